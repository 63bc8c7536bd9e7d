# SPDX-License-Identifier: Apache-2.0
"""`nvflare-lazy verify`: check that checkpoints are valid and readable to their last byte.

Opening a file already checks every rule of its format; this module reads the data.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import click

from nvflare_lazy._text import format_size, printable
from nvflare_lazy.cli._common import count, error_line, json_option, print_json, progress, section_option
from nvflare_lazy.errors import NVFlareLazyError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict
    from nvflare_lazy.formats.pytorch import ZipRecord
    from nvflare_lazy.tensors.byte_source import ByteSource
    from nvflare_lazy.tensors.dtypes import ElementType
    from nvflare_lazy.tensors.lazy_tensor import LazyTensor
    from nvflare_lazy.tensors.tensor_file import OpenFile

_TILE_BYTES = 4 << 20


@click.command(epilog="Example: nvflare-lazy verify --check-finite model.safetensors training.pt")
@click.argument("files", metavar="FILE...", type=click.Path(), nargs=-1, required=True)
@section_option
@click.option("--check-finite", is_flag=True, help="Also fail on NaN and infinite values.")
@json_option
@click.pass_context
def verify(
    context: click.Context, files: tuple[str, ...], section: str | None, check_finite: bool, as_json: bool
) -> None:
    """Check checkpoints and read all of their data.

    FILE is a safetensors file, the index or directory of a sharded checkpoint, or a PyTorch checkpoint. Validates the
    format, reads every byte, and verifies checksums where the format has them. No code in a file is executed.

    The exit code is 0 if all files are valid, and 1 if any is not.
    """
    from nvflare_lazy.remote.url import display, is_url

    failed = 0
    reports = []
    for path in files:
        report = check(path, section=section, finite=check_finite)
        file = display(path) if is_url(path) else path
        failed += bool(report.problems)
        if as_json:
            reports.append({"file": file, "ok": not report.problems, **asdict(report)})
            continue
        if report.problems:
            click.echo(f"{printable(file)}: FAILED")
        else:
            click.echo(f"{printable(file)}: OK, {count(report.tensors, 'tensor')}, {format_size(report.nbytes)}")
        for problem in report.problems:
            click.echo(f"  {problem}")
    if as_json:
        print_json({"files": reports})
    context.exit(1 if failed else 0)


@dataclass
class Report:
    """The result of checking one file, with one line for each problem."""

    tensors: int = 0
    nbytes: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Step:
    """One unit of work: `run` takes a progress callback and returns the problem it found, if any."""

    what: str
    nbytes: int
    run: Callable[[Callable[[int], None]], str | None]


def check(file: str, *, section: str | None = None, finite: bool = False) -> Report:
    """Read all of a checkpoint, or of a section of it. With `finite`, NaN and infinite values are problems."""
    import nvflare_lazy

    try:
        tensors = nvflare_lazy.open(file, section=section)
        sums = list(_checksum_steps(tensors))
    except (NVFlareLazyError, OSError) as error:
        return Report(problems=[error_line(error)])
    report = Report(len(tensors), tensors.nbytes)
    steps = [*sums, *_reading_steps(tensors, finite, is_read=bool(sums))]
    with progress(f"Checking {printable(os.path.basename(file))}", sum(step.nbytes for step in steps)) as done:
        for step in steps:
            try:
                problem = step.run(done)
            except (NVFlareLazyError, OSError) as error:
                problem = error_line(error)
            if problem is not None:
                report.problems.append(f"{step.what}: {problem}")
    return report


def _checksum_steps(tensors: LazyTensorDict) -> Iterator[_Step]:
    """Yield the records of the zip archives a checkpoint is in, the only kind of file that has checksums."""
    from nvflare_lazy.formats.pytorch import zip_records

    files = (entry.source.file() for entry in tensors.entries.values())
    for file in dict.fromkeys(file for file in files if file is not None):
        for name, record in zip_records(file).items():
            yield _Step(f"record {printable(name)}", record.nbytes, partial(_check_sum, file, record))


def _reading_steps(tensors: LazyTensorDict, finite: bool, is_read: bool) -> Iterator[_Step]:
    """Yield the tensors to read.

    With `finite`, values are checked; otherwise bytes are read, unless their files have been read completely already.
    """
    seen: set[int] = set()
    for name, entry in tensors.entries.items():
        what = f"tensor {printable(name)}"
        if finite and _may_be_infinite(entry.element_type):
            if id(entry) not in seen:
                yield _Step(what, entry.nbytes, partial(_check_values, entry.lazy()))
        elif id(entry.source) not in seen and not (is_read and entry.source.file()):
            yield _Step(what, entry.source.nbytes, partial(_read, entry.source))
        seen.update((id(entry), id(entry.source)))


def _tiles(source: ByteSource, tile: memoryview, done: Callable[[int], None]) -> Iterator[memoryview]:
    for begin in range(0, source.nbytes, len(tile)):
        part = tile[: source.nbytes - begin]
        source.read_into(part, begin)
        yield part
        done(len(part))


def _read(source: ByteSource, done: Callable[[int], None]) -> None:
    for _ in _tiles(source, memoryview(bytearray(_TILE_BYTES)), done):
        pass


def _check_sum(file: OpenFile, record: ZipRecord, done: Callable[[int], None]) -> str | None:
    found = 0
    source = file.source(record.offset, record.nbytes)
    for part in _tiles(source, memoryview(bytearray(_TILE_BYTES)), done):
        found = zlib.crc32(part, found)
    # torch can be told to leave the checksums out, and then writes 0.
    if record.crc32 in (0, found):
        return None
    return f"its checksum is {found:08x}, and should be {record.crc32:08x}: its bytes were changed; get the file again"


def _check_values(tensor: LazyTensor, done: Callable[[int], None]) -> str | None:
    import torch

    tile = memoryview(bytearray(_TILE_BYTES))
    before = nans = infinities = 0
    first = None
    for part in _tiles(tensor.source, tile, done):
        values = torch.frombuffer(part, dtype=tensor.dtype)
        # NumPy and torch have no arithmetic on 8-bit floats.
        values = values.float() if tensor.dtype.itemsize == 1 else values
        good = values.isfinite()
        if not good.all():
            first = before + int((~good).to(torch.uint8).argmax()) if first is None else first
            nans += int(values.isnan().sum())
            infinities += int(values.isinf().sum())
        before += len(values)
    if first is None:
        return None
    place = [int(index) for index in torch.unravel_index(torch.tensor(first), tensor.shape)]
    return f"{nans:,} NaN and {infinities:,} infinite of {count(before, 'value')}, the first at {place}"


def _may_be_infinite(row: ElementType) -> bool:
    return row.torch is not None and (row.torch.is_floating_point or row.torch.is_complex) and row.packed == 1

# SPDX-License-Identifier: Apache-2.0
"""`verify` reads everything, and reports each error with its position; a correct file passes."""

from __future__ import annotations

import math
import os
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nvflare_lazy.cli import verify
from nvflare_lazy.errors import TruncatedSourceError
from nvflare_lazy.tensors.tensor_file import TensorFile
from tests.cli.sparse import write_sparse


@pytest.fixture
def zipped(tensors, tmp_path) -> Path:
    torch.save(tensors, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def flip(path: Path, offset: int) -> None:
    """Invert a single bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def storage_offset(path: Path, key: str) -> int:
    """Return an offset inside a storage of a zip checkpoint."""
    with zipfile.ZipFile(path) as archive:
        [info] = [info for info in archive.infolist() if info.filename.endswith(f"/data/{key}")]
    # The name is in the central directory at the end, but in front of the data first.
    return path.read_bytes().index(f"/data/{key}".encode(), info.header_offset) + 100


def test_good_files(cli, model, training, tmp_path):
    """Good files of every kind, and how much there is in them."""
    torch.save({"w": torch.ones(3)}, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    cli("convert", model, tmp_path / "s.safetensors", "--max-shard-size", "20KB")
    code, out, err = cli("verify", "in.safetensors", "training.pt", "legacy.pt", "s.safetensors.index.json")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "in.safetensors: OK, 4 tensors, 25.1 KiB",
        "training.pt: OK, 5 tensors, 50.1 KiB",
        "legacy.pt: OK, 1 tensor, 12 B",
        "s.safetensors.index.json: OK, 4 tensors, 25.1 KiB",
    ]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: os.truncate(path, path.stat().st_size - 1), "the download or copy broke off"),
        (lambda path: os.truncate(path, 20), "ends after 20 bytes, in its header"),
        (lambda path: path.write_bytes(path.read_bytes() + b"\0"), "1 bytes after its last tensor"),
        (lambda path: flip(path, 9), "in.safetensors"),
        (lambda path: path.write_bytes(b"<html>"), "HTML"),
        (lambda path: path.unlink(), "in.safetensors: No such file or directory"),
    ],
    ids=["truncated", "header truncated", "trailing", "header", "other kind", "missing"],
)
def test_bad_safetensors(cli, model, damage, message):
    """What breaks a rule of the format is named, and the exit code is 1."""
    damage(model)
    code, out, err = cli("verify", "in.safetensors")
    assert (code, err) == (1, "")
    first, second = out.splitlines()
    assert first == "in.safetensors: FAILED"
    assert message in second


def test_one_bad_file_of_several(cli, model, zipped):
    """All files are checked, whatever errors one of them has."""
    code, out, _ = cli("verify", "nowhere", model, zipped, "nowhere")
    assert code == 1
    lines = [line.rsplit(": ", 1)[-1] for line in out.splitlines() if not line.startswith(" ")]
    assert lines == ["FAILED", "OK, 4 tensors, 25.1 KiB", "OK, 4 tensors, 25.1 KiB", "FAILED"]


def test_flipped_bit_in_a_zip(cli, zipped):
    """A bit that changed in a tensor's bytes breaks the checksum of its record."""
    flip(zipped, storage_offset(zipped, "0"))
    code, out, _ = cli("verify", "model.pt")
    assert code == 1
    [_, problem] = out.splitlines()
    assert problem.startswith("  record model/data/0: its checksum is ")


def test_zip_without_checksums(cli, tensors, tmp_path):
    """Checkpoints saved without checksums pass."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensors, tmp_path / "model.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    assert cli("verify", "model.pt").code == 0


def test_shards(cli, model, tmp_path):
    """A shard that is missing or cut short makes the whole bad, and is named."""
    cli("convert", model, tmp_path / "s.safetensors", "--max-shard-size", "20KB")
    shard = sorted(tmp_path.glob("s-*.safetensors"))[0]
    os.truncate(shard, shard.stat().st_size - 1)
    code, out, _ = cli("verify", "s.safetensors.index.json")
    assert code == 1
    assert shard.name in out
    shard.unlink()
    code, out, _ = cli("verify", "s.safetensors.index.json")
    assert code == 1
    assert shard.name in out


def test_read_errors(cli, model, monkeypatch):
    """A tensor whose bytes cannot be read is named, and so is the next one."""
    read_into = TensorFile.read_into

    def failing(self, buffer, offset):
        if len(buffer) in (128, 25600):
            raise TruncatedSourceError(f"{self.path} ends at byte {offset}")
        read_into(self, buffer, offset)

    monkeypatch.setattr(TensorFile, "read_into", failing)
    code, out, _ = cli("verify", "in.safetensors")
    assert code == 1
    assert [line.split(":")[0] for line in out.splitlines()[1:]] == ["  tensor embed.weight", "  tensor norm"]


def test_reads_every_byte_once(cli, tmp_path, rchar):
    """All data is read, and what tensors share is read once."""
    write_sparse(tmp_path / "a.safetensors", {f"w{i}": ("F32", (1 << 20,)) for i in range(8)})
    shared = torch.zeros(4 << 20)
    torch.save({"a": shared, "b": shared, "c": shared.reshape(2, -1).t(), "d": shared[7:]}, tmp_path / "b.pt")
    for path, options, nbytes in (
        ("a.safetensors", [], 32 << 20),
        ("a.safetensors", ["--check-finite"], 32 << 20),
        ("b.pt", [], 16 << 20),
    ):
        before = rchar()
        assert cli("verify", path, *options).code == 0
        assert nbytes <= rchar() - before < nbytes + (1 << 20)


def test_finite(cli, tmp_path):
    """NaN and infinite values are counted and located when asked for, in every type that has them."""
    good = torch.randn(700, 1000)
    bad = good.clone()
    bad[3, 7] = math.nan
    bad[699, 999] = bad[5] = math.inf
    tensors = {
        "good": good,
        "bad": bad,
        "half": torch.tensor([1.0, 2.0, -math.inf]).half(),
        "narrow": torch.tensor([[math.nan]]).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(math.nan),
        "steps": torch.arange(3),
        "empty": torch.zeros(0),
    }
    save_file(tensors, tmp_path / "in.safetensors")
    assert cli("verify", "in.safetensors").code == 0
    code, out, _ = cli("verify", "--check-finite", "in.safetensors")
    assert code == 1
    assert sorted(out.splitlines()[1:]) == [
        "  tensor bad: 1 NaN and 1,001 infinite of 700,000 values, the first at [3, 7]",
        "  tensor half: 0 NaN and 1 infinite of 3 values, the first at [2]",
        "  tensor narrow: 1 NaN and 0 infinite of 1 value, the first at [0, 0]",
        "  tensor scalar: 1 NaN and 0 infinite of 1 value, the first at []",
    ]


def test_finite_across_tiles(cli, tmp_path, monkeypatch):
    """The index of a value depends neither on how the tensor is read, nor on its layout in the file."""
    monkeypatch.setattr(verify, "_TILE_BYTES", 16)
    values = torch.zeros(6, 5)
    values[4, 1] = math.nan
    torch.save({"plain": values, "view": values.t(), "pairs": torch.tensor([1, 2j, complex(0, math.inf)])}, "in.pt")
    code, out, _ = cli("verify", "--check-finite", "in.pt")
    assert code == 1
    assert out.splitlines()[1:] == [
        "  tensor plain: 1 NaN and 0 infinite of 30 values, the first at [4, 1]",
        "  tensor view: 1 NaN and 0 infinite of 30 values, the first at [1, 4]",
        "  tensor pairs: 0 NaN and 1 infinite of 3 values, the first at [2]",
    ]


def test_finite_and_types_without_numbers(cli, tmp_path):
    """Types that torch cannot compute with, or not hold, are read and not looked at."""
    write_sparse(tmp_path / "f", {"f4": ("F4", (4, 8)), "f6": ("F6_E2M3", (4, 4)), "f8": ("F8_E8M0", (3,))})
    assert cli("verify", "--check-finite", "f").code == 0


def test_tensor_that_cannot_be_read(cli, tmp_path):
    """A checkpoint with a tensor that cannot be had without loading it is not good for what this is for."""
    torch.save({"dense": torch.ones(2), "sparse": torch.eye(3).to_sparse()}, tmp_path / "in.pt")
    code, out, _ = cli("verify", "in.pt")
    assert code == 1
    assert "  tensor sparse: " in out
    assert "dense" not in out


def test_section(cli, training):
    """Only the requested part is checked."""
    assert "training.pt: OK, 4 tensors" in cli("verify", "--section", "model", "training.pt").out


def test_names_cannot_command_the_terminal(cli, tmp_path):
    """Neither a file's name nor a tensor's."""
    save_file({"\x1b[2J": torch.tensor(math.nan)}, tmp_path / "\x1b[31m")
    code, out, _ = cli("verify", "--check-finite", "\x1b[31m")
    assert code == 1
    assert out.isprintable() is False
    assert "\x1b" not in out
    assert "\\x1b[31m: FAILED" in out
    assert "tensor \\x1b[2J: 1 NaN" in out


def test_no_file(cli):
    """A misuse."""
    assert cli("verify").code == 2

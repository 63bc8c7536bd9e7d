# SPDX-License-Identifier: Apache-2.0
"""Aggregation by an executor gives the bytes of one process, whatever it loses, and leaves nothing behind."""

from __future__ import annotations

import fcntl
import functools
import os
import re
import threading
from concurrent.futures import BrokenExecutor, Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import nvflare_lazy
from nvflare_lazy.aggregation import Aggregation
from nvflare_lazy.aggregation._distributed import parts
from nvflare_lazy.aggregation._distributed import sources as part_sources
from nvflare_lazy.aggregation._distributed.shared_directory import SharedDirectory
from nvflare_lazy.aggregation.executors import Workers
from nvflare_lazy.errors import (
    AggregationCancelledError,
    ExecutorError,
    MissingPackageError,
    NonFiniteError,
    RemoteError,
    RemoteFileChangedError,
    RemoteNotFoundError,
    SharedStorageError,
    SourceError,
)
from nvflare_lazy.tensors.tensor_file import TensorFile

RULES = [
    "mean",
    "median",
    "trimmed_mean",
    "krum",
    "multi_krum",
    "geometric_median",
    {"name": "bulyan", "num_byzantine": 1},
    {"name": "clipped_mean", "clip_norm": 1.0, "noise_multiplier": 1.0, "seed": 7},
]


def make_contributions(directory: Path, count: int = 7) -> dict[str, nvflare_lazy.LazyTensorDict]:
    """Write contributions with a tensor of several parts, tensors of other types, and one without elements."""
    generator = torch.Generator().manual_seed(0)
    contributions = {}
    for number in range(count):
        tensors = {
            "large": torch.randn(150_000, generator=generator),
            "narrow": torch.randn(30, 1001, generator=generator).bfloat16(),
            "counter": torch.randint(0, 9, (1000,), generator=generator),
            "mask": torch.rand(100, generator=generator) > 0.5,
            "empty": torch.empty(0),
            "scalar": torch.tensor(float(number)),
        }
        name = f"site-{number}"
        contributions[name] = nvflare_lazy.open(nvflare_lazy.save(tensors, directory / f"{name}.safetensors"))
    return contributions


def hidden(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.startswith(".")]


class Counting(Executor):
    """Runs functions in threads, and counts them; a subclass changes the parts or loses some."""

    def __init__(self) -> None:
        self.count = 0
        self._threads = ThreadPoolExecutor(3)

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.count += 1
        return self.start(fn, *args)

    def start(self, fn: Any, part: Any) -> Future[Any]:
        return self._threads.submit(fn, part)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._threads.shutdown(wait, cancel_futures=cancel_futures)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule if isinstance(rule, str) else rule["name"])
def test_same_bytes(rule: Any, tmp_path: Path) -> None:
    """A result that is computed in parts has the bytes of one that is not, whatever the size of the parts."""
    contributions = make_contributions(tmp_path)
    reference = contributions["site-0"]
    Aggregation(rule).run(contributions, tmp_path / "one.safetensors", reference=reference)
    for part_size, fewest in (("8MiB", 1), ("1500KiB", 4), ("100KiB", 40)):
        with Counting() as executor:
            aggregation = Aggregation(rule, executor=executor, part_size=part_size)
            aggregation.run(contributions, tmp_path / "parts.safetensors", reference=reference)
        assert executor.count >= fewest
        assert (tmp_path / "parts.safetensors").read_bytes() == (tmp_path / "one.safetensors").read_bytes()
    assert not hidden(tmp_path)


def test_shards_and_directories(tmp_path: Path) -> None:
    """The shards of a result, in a directory that is created for it, have the same bytes."""
    contributions = make_contributions(tmp_path)
    for name, executor in (("one/", None), ("parts/", Counting())):
        aggregation = Aggregation("median", executor=executor, part_size="300KiB", max_shard_size="200KiB")
        aggregation.run(contributions, f"{tmp_path}/new/{name}")
    one, parts = (
        {path.name: path.read_bytes() for path in (tmp_path / "new" / name).iterdir()} for name in ("one", "parts")
    )
    assert len(one) > 3
    assert parts == one
    assert not hidden(tmp_path)


def test_inputs_in_memory(tmp_path: Path) -> None:
    """Tensors in memory, and views that no file contains contiguously, reach the workers through the storage."""
    stored = make_contributions(tmp_path)
    contributions: dict[str, Any] = {
        name: {key: value.clone() for key, value in c.items()} for name, c in stored.items()
    }
    contributions["site-3"] = {**stored["site-3"], "large": stored["site-3"]["large"].double()}
    contributions["site-4"] = {**stored["site-4"], "narrow": stored["site-4"]["narrow"].t().t()}
    Aggregation().run(contributions, tmp_path / "one.safetensors")
    Aggregation(executor=Counting(), part_size="300KiB").run(contributions, tmp_path / "parts.safetensors")
    assert (tmp_path / "parts.safetensors").read_bytes() == (tmp_path / "one.safetensors").read_bytes()
    assert not hidden(tmp_path)


def test_a_process_pool(tmp_path: Path) -> None:
    """Parts reach other processes, and so do the errors of a contribution: the others are aggregated."""
    contributions = make_contributions(tmp_path)
    bad = {**contributions["site-2"], "large": contributions["site-2"]["large"].clone()}
    bad["large"][149_999] = float("nan")
    contributions["site-2"] = nvflare_lazy.open(nvflare_lazy.save(bad, tmp_path / "bad.safetensors"))
    with Workers({"name": "processes", "max_workers": 1}) as workers:
        for rule in ("mean", "krum"):
            one = Aggregation(rule, on_non_finite="skip").run(contributions, tmp_path / "one.safetensors")
            parts = Aggregation(rule, on_non_finite="skip", executor=workers, part_size="1MiB").run(
                contributions, tmp_path / "parts.safetensors"
            )
            assert isinstance(parts.report.skipped["site-2"], NonFiniteError)
            assert parts.report.skipped.keys() == one.report.skipped.keys() == {"site-2"}
            assert (tmp_path / "parts.safetensors").read_bytes() == (tmp_path / "one.safetensors").read_bytes()


def test_a_truncated_input_is_skipped(tmp_path: Path) -> None:
    """A file that was cut after it was opened costs its contribution."""
    contributions = make_contributions(tmp_path)
    os.truncate(tmp_path / "site-1.safetensors", 100_000)
    result = Aggregation(executor=Counting()).run(contributions, tmp_path / "out.safetensors")
    assert [*result.report.skipped] == ["site-1"]


def test_progress(tmp_path: Path) -> None:
    """Progress counts the bytes of finished parts, up to all of them, for each pass."""
    seen: dict[str, list[int]] = {}
    totals = {}

    def progress(report: Any) -> None:
        seen.setdefault(report.stage, []).append(report.done)
        totals[report.stage] = report.total

    Aggregation("krum", executor=Counting(), part_size="500KiB").run(
        make_contributions(tmp_path), tmp_path / "out.safetensors", progress=progress
    )
    assert [*seen] == ["pairwise distances", "krum"]
    assert all(done == sorted(done) and done[-1] == totals[stage] for stage, done in seen.items())


class Losing(Counting):
    """Loses the first attempts of every third part, before or after it has run."""

    def __init__(self, attempts: int, error: type[Exception] = RuntimeError) -> None:
        super().__init__()
        self._left = attempts
        self._error = error

    def start(self, fn: Any, part: Any) -> Future[Any]:
        future = super().start(fn, part)
        if self.count % 3 == 0 and self._left:
            self._left -= 1
            future.result()
            lost: Future[Any] = Future()
            lost.set_exception(self._error("the node is gone"))
            return lost
        return future


def test_a_lost_part_is_repeated(tmp_path: Path) -> None:
    """A part whose worker is lost is computed again, and the result has the same bytes."""
    contributions = make_contributions(tmp_path)
    Aggregation("krum").run(contributions, tmp_path / "one.safetensors")
    executor = Losing(3)
    Aggregation("krum", executor=executor, part_size="500KiB").run(contributions, tmp_path / "parts.safetensors")
    assert (tmp_path / "parts.safetensors").read_bytes() == (tmp_path / "one.safetensors").read_bytes()


def test_a_part_that_is_lost_again_and_again(tmp_path: Path) -> None:
    """The number of repetitions is limited, and nothing is published."""

    class Useless(Counting):
        def start(self, fn: Any, part: Any) -> Future[Any]:
            raise RuntimeError("no worker has enough memory")

    with pytest.raises(ExecutorError, match=r"failed 3 times .*no worker has enough memory.*memory of its workers"):
        Aggregation(executor=Useless()).run(make_contributions(tmp_path), tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()
    assert not hidden(tmp_path)


def test_a_broken_executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken executor is created again if its specification is known; an object cannot be."""
    contributions = make_contributions(tmp_path)
    with pytest.raises(ExecutorError, match=r"broken .*executor='processes'"):
        Aggregation(executor=Losing(1, BrokenExecutor), part_size="500KiB").run(
            contributions, tmp_path / "out.safetensors"
        )
    created = []

    def create() -> Executor:
        created.append(Losing(1 - len(created), BrokenExecutor))
        return created[-1]

    monkeypatch.setattr("tests.aggregation.test_executors.create", create, raising=False)
    Aggregation(executor="tests.aggregation.test_executors.create", part_size="500KiB").run(
        contributions, tmp_path / "out.safetensors"
    )
    assert len(created) == 2


def test_output_that_is_not_shared(tmp_path: Path) -> None:
    """A worker that does not see the directory of the output ends the aggregation with its path in the error."""

    class Elsewhere(Counting):
        def start(self, fn: Any, part: Any) -> Future[Any]:
            return super().start(fn, replace(part, directory=str(tmp_path / "elsewhere")))

    with pytest.raises(SharedStorageError, match=r"does not see .*elsewhere.*put inputs and outputs on storage"):
        Aggregation(executor=Elsewhere()).run(make_contributions(tmp_path), tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()
    assert not hidden(tmp_path)


def test_input_that_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that sees no file, or another one, under the path of an input ends the aggregation."""
    contributions = make_contributions(tmp_path)
    other = nvflare_lazy.save({"w": torch.zeros(3)}, tmp_path / "other.safetensors")
    open_input = part_sources.open_input

    for seen, problem in ((tmp_path / "none", "No such file"), (other, "another size or time")):

        @functools.wraps(open_input)
        def open_elsewhere(path: str, size: int, modified: int, seen: Path = seen) -> TensorFile:
            is_worker = threading.current_thread() is not threading.main_thread()
            if not (is_worker and path.endswith("site-2.safetensors")):
                return open_input(path, size, modified)
            try:
                return open_input(str(seen), size, modified)
            except part_sources.InputError as error:
                raise part_sources.InputError(path, size, modified, error.problem) from None

        monkeypatch.setattr(part_sources, "open_input", open_elsewhere)
        with pytest.raises(SharedStorageError, match=rf"does not see .*site-2.*{problem}.*same path"):
            Aggregation(executor=Counting()).run(contributions, tmp_path / "out.safetensors")
    assert not hidden(tmp_path)


@pytest.mark.parametrize(
    "error",
    [
        RemoteNotFoundError("cannot open s3://models/site-2: it does not exist"),
        RemoteError("cannot read s3://models/site-2: no answer"),
        SourceError("cannot read site-2.safetensors: [Errno 5] Input/output error"),
        MissingPackageError("s3://models/site-2 needs a package that is not installed"),
        ModuleNotFoundError("No module named 'nvflare_lazy.remote'"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_worker_without_access_to_the_storage(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a worker cannot read what the caller can, its part is repeated, and no contribution is skipped."""
    contributions = make_contributions(tmp_path)
    Aggregation("krum").run(contributions, tmp_path / "one.safetensors")
    unpickled = parts.unpickled
    failures = [error, error]

    def sources_without_access(text: bytes) -> Any:
        is_worker = threading.current_thread() is not threading.main_thread()
        if is_worker and b"site-2" in text and failures:
            raise failures.pop()
        return unpickled(text)

    monkeypatch.setattr(parts, "unpickled", sources_without_access)
    result = Aggregation("krum", executor=Counting()).run(contributions, tmp_path / "parts.safetensors")
    assert not failures
    assert result.report.skipped == {}
    assert (tmp_path / "parts.safetensors").read_bytes() == (tmp_path / "one.safetensors").read_bytes()
    failures += [error] * 3
    with pytest.raises((SharedStorageError, type(error)), match=re.escape(str(error))) as raised:
        Aggregation("krum", executor=Counting()).run(contributions, tmp_path / "none.safetensors")
    assert isinstance(raised.value, SharedStorageError) or type(error) in (RemoteError, MissingPackageError)
    assert not failures
    assert not (tmp_path / "none.safetensors").exists()
    assert not hidden(tmp_path)


def test_cancel(tmp_path: Path) -> None:
    """Cancelling stops running parts, drops waiting ones, and leaves the old output."""
    contributions = make_contributions(tmp_path)
    out = nvflare_lazy.save({"w": torch.zeros(3)}, tmp_path / "out.safetensors")
    before = out.read_bytes()
    executor, cancel = Counting(), threading.Event()

    def progress(report: Any) -> None:
        if report.done:
            cancel.set()

    with pytest.raises(AggregationCancelledError):
        Aggregation(executor=executor, part_size="100KiB").run(
            contributions, out, progress=progress, should_cancel=cancel.is_set
        )
    assert out.read_bytes() == before
    assert not hidden(tmp_path)


def test_a_late_part_writes_nothing(tmp_path: Path) -> None:
    """A part that starts after its aggregation has ended does not write to the published file."""
    late: list[tuple[Any, Any]] = []

    class Remembering(Counting):
        def start(self, fn: Any, part: Any) -> Future[Any]:
            late.append((fn, part))
            return super().start(fn, part)

    Aggregation(executor=Remembering()).run(make_contributions(tmp_path), tmp_path / "out.safetensors")
    status = os.stat(tmp_path / "out.safetensors")
    for fn, part in late:
        assert isinstance(fn(part).error, SharedStorageError)
    assert os.stat(tmp_path / "out.safetensors").st_mtime_ns == status.st_mtime_ns


def test_a_part_that_continues_after_it_was_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that counts as lost, and continues after the inputs have changed, does not change the published file."""
    contributions = make_contributions(tmp_path)
    first, continues = threading.Event(), threading.Event()
    outcomes: list[Future[Any]] = []
    check = parts._Every.__call__

    def paused_after_check(self: Any) -> bool:
        is_revoked = check(self)
        if not is_revoked and not first.is_set():
            first.set()
            continues.wait(30)
        return is_revoked

    class LosesFirst(Counting):
        def start(self, fn: Any, part: Any) -> Future[Any]:
            future = super().start(fn, part)
            if self.count > 1:
                return future
            outcomes.append(future)
            assert first.wait(30)
            lost: Future[Any] = Future()
            lost.set_exception(ConnectionError("the worker does not answer"))
            return lost

    monkeypatch.setattr(parts._Every, "__call__", paused_after_check)
    Aggregation("median", executor=LosesFirst()).run(contributions, tmp_path / "out.safetensors")
    published = (tmp_path / "out.safetensors").read_bytes()
    for number in range(len(contributions)):
        path = tmp_path / f"site-{number}.safetensors"
        with open(path, "r+b") as file:
            file.seek(-100_000, os.SEEK_END)
            file.write(bytes(100_000))
    continues.set()
    assert isinstance(outcomes[0].result().error, AggregationCancelledError)
    assert (tmp_path / "out.safetensors").read_bytes() == published


def test_what_a_killed_process_has_left(tmp_path: Path) -> None:
    """The next aggregation to an output removes the hidden directory of a killed one, and not that of a running one."""
    for name, token in (("dead", "session"), ("ending", "revoked"), ("running", "session")):
        path = tmp_path / f".out.safetensors.{name}.parts"
        path.mkdir()
        (path / token).write_text("token")
        (path / "0").write_bytes(b"half")
    with open(tmp_path / ".out.safetensors.running.parts/session", "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        Aggregation(executor=Counting()).run(make_contributions(tmp_path), tmp_path / "out.safetensors")
    assert hidden(tmp_path) == [".out.safetensors.running.parts"]


def test_what_another_user_has_left(tmp_path: Path) -> None:
    """Directories like those of aggregations, with a link or a pipe, are not followed and not waited for."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "session").write_text("token")
    (tmp_path / ".out.safetensors.link.parts").symlink_to(tmp_path / "home")
    (tmp_path / ".out.safetensors.pipe.parts").mkdir()
    os.mkfifo(tmp_path / ".out.safetensors.pipe.parts" / "session")
    Aggregation(executor=Counting()).run(make_contributions(tmp_path), tmp_path / "out.safetensors")
    assert (tmp_path / "home" / "session").exists()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("cluster", "unknown executor 'cluster'; available: processes, dask, ray"),
        ({"max_workers": 2}, "unknown executor"),
        (7, "unknown executor"),
    ],
)
def test_unknown_executor(spec: Any, message: str) -> None:
    """A specification is checked when the aggregation is configured."""
    with pytest.raises(ValueError, match=message):
        Aggregation(executor=spec)


def test_executor_that_cannot_be_created(tmp_path: Path) -> None:
    """If an executor cannot be created, the error names it and the cause."""
    for spec, cause in (("no.such.Executor", "No module named 'no'"), ("pathlib.Path", "no method submit")):
        with pytest.raises(ExecutorError, match=cause):
            Aggregation(executor=spec).run(make_contributions(tmp_path), tmp_path / "out.safetensors")


def without_generation(text: str) -> str:
    """Return the name of a remote file, or the text of an index, as if each save had the same number."""
    return re.sub(r"\.g\d+\.", ".", text.removeprefix("/executors/")[2:] if text.startswith("/executors/") else text)


def test_url(tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers write the shards of a result for a URL to scratch, from which they are uploaded."""
    monkeypatch.setenv("NVFLARE_LAZY_SCRATCH", str(tmp_path))
    contributions = make_contributions(tmp_path)
    for number, executor in enumerate((None, Counting())):
        aggregation = Aggregation("median", executor=executor, part_size="300KiB", max_shard_size="200KiB")
        aggregation.run(contributions, f"memory://executors/{number}/model.safetensors")
    one, parts = (
        {without_generation(path): memory.cat_file(path) for path in memory.ls(f"/executors/{number}", detail=False)}
        for number in range(2)
    )
    index = "model.safetensors.index.json"
    one[index], parts[index] = (without_generation(part[index].decode()) for part in (one, parts))
    assert len(one) > 3
    assert parts == one
    assert not hidden(tmp_path)


def test_inputs_at_urls(tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers read inputs at URLs themselves, in the version that was opened; one that is replaced is skipped."""
    stored = make_contributions(tmp_path)
    contributions = {}
    for name in stored:
        url = f"memory://executors/inputs/{name}.safetensors"
        nvflare_lazy.save(stored[name], url)
        contributions[name] = nvflare_lazy.open(url)
    monkeypatch.delattr(SharedDirectory, "copy_of")
    Aggregation("krum").run(stored, tmp_path / "one.safetensors")
    Aggregation("krum", executor=Counting(), part_size="500KiB").run(contributions, tmp_path / "parts.safetensors")
    assert (tmp_path / "parts.safetensors").read_bytes() == (tmp_path / "one.safetensors").read_bytes()
    memory.pipe_file("/executors/inputs/site-2.safetensors", (tmp_path / "site-3.safetensors").read_bytes())
    result = Aggregation("krum", executor=Counting()).run(contributions, tmp_path / "parts.safetensors")
    assert isinstance(result.report.skipped["site-2"], RemoteFileChangedError)


def test_one_message_for_a_broken_executor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All parts that a pool had are lost with one of its processes: the log has one line."""
    created: list[Executor] = []

    class Broken(Counting):
        def start(self, fn: Any, part: Any) -> Future[Any]:
            lost: Future[Any] = Future()
            lost.set_exception(BrokenExecutor("a process was killed"))
            return lost

    def create() -> Executor:
        created.append(Counting() if created else Broken())
        return created[-1]

    monkeypatch.setattr("tests.aggregation.test_executors.create", create, raising=False)
    Aggregation(executor="tests.aggregation.test_executors.create", part_size="500KiB").run(
        make_contributions(tmp_path), tmp_path / "out.safetensors"
    )
    assert len(created) == 2
    assert caplog.text.count("A worker was lost") == 1

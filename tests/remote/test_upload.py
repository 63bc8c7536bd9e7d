# SPDX-License-Identifier: Apache-2.0
"""A save to a URL is atomic, whatever fails, and failures leave no files."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import fsspec
import pytest
import safetensors.torch
import torch

import nvflare_lazy
from nvflare_lazy.errors import AggregationCancelledError, DiskFullError, MetadataMismatchError, RemoteError, SaveError
from nvflare_lazy.formats import StreamingWriter, TensorMeta
from nvflare_lazy.formats.atomic_file import AtomicFile
from nvflare_lazy.formats.safetensors.shards import parse_shard_name
from tests.remote.s3_on_disk import S3OnDisk

TENSORS = {f"layer.{number}": torch.full((500, 500), float(number)) for number in range(6)}
NEW = {name: tensor + 1 for name, tensor in TENSORS.items()}
MIB = 1 << 20
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One server for all tests that do not kill it."""
    made = S3OnDisk(tmp_path_factory.mktemp("s3"))
    yield made
    made.kill()


@pytest.fixture
def s3(server: S3OnDisk, monkeypatch, tmp_path) -> S3OnDisk:
    """A server without objects, and this process as its client."""
    return _as_client(server, monkeypatch, tmp_path)


def _as_client(server: S3OnDisk, monkeypatch, tmp_path) -> S3OnDisk:
    s3fs = pytest.importorskip("s3fs")
    s3fs.S3FileSystem.clear_instance_cache()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("NVFLARE_LAZY_SCRATCH", str(scratch))
    server.clear()
    return server


@pytest.fixture
def impatient(monkeypatch) -> None:
    """Repeat a failed upload at once."""
    monkeypatch.setattr("nvflare_lazy.remote.upload._FIRST_PAUSE_SECONDS", 0.01)


def assert_saved(url: str, tensors: dict[str, torch.Tensor]) -> None:
    """The checkpoint at a URL has these tensors."""
    fs, path = fsspec.url_to_fs(url)
    if url.endswith(".json"):
        names = set(json.loads(fs.cat_file(path))["weight_map"].values())
        files = [f"{path.rpartition('/')[0]}/{name}" for name in names]
    else:
        files = [path]
    found = {name: tensor for file in files for name, tensor in safetensors.torch.load(fs.cat_file(file)).items()}
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def _by_number(files: dict[str, bytes]) -> dict[int, bytes]:
    return {shard.number: data for name, data in files.items() if (shard := parse_shard_name(name))}


def test_same_bytes(memory, tmp_path) -> None:
    """The files at a URL have the bytes of those in a directory, in one file and in shards."""
    assert nvflare_lazy.save(TENSORS, "memory://m/model.safetensors") == "memory://m/model.safetensors"
    nvflare_lazy.save(TENSORS, tmp_path / "model.safetensors")
    assert memory.cat("/m/model.safetensors") == (tmp_path / "model.safetensors").read_bytes()

    saved = nvflare_lazy.save(TENSORS, "memory://sharded", max_shard_size="2MB", metadata={"a": "b"})
    nvflare_lazy.save(TENSORS, f"{tmp_path}/sharded/", max_shard_size="2MB", metadata={"a": "b"})
    assert saved == "memory://sharded/model.safetensors.index.json"
    at_url = {path.rpartition("/")[2]: memory.cat(path) for path in memory.ls("/sharded", detail=False)}
    in_directory = {path.name: path.read_bytes() for path in (tmp_path / "sharded").iterdir()}
    assert _by_number(at_url) == _by_number(in_directory)
    assert len(_by_number(at_url)) == 3
    assert_saved(saved, TENSORS)
    assert nvflare_lazy.open(saved).keys() == TENSORS.keys()


def test_result_of_aggregate(memory, tmp_path) -> None:
    """The result at a URL is opened from there, with the values and metadata of a local result."""
    contributions = {"a": TENSORS, "b": NEW}
    stages = []
    found = nvflare_lazy.aggregate(
        contributions, "memory://mean/", max_shard_size="2MB", progress=lambda progress: stages.append(progress.stage)
    )
    expected = nvflare_lazy.aggregate(contributions, tmp_path / "mean.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in TENSORS)
    assert found.metadata == expected.metadata
    assert stages[-1] == "upload"


def test_result_replaces_a_contribution(memory) -> None:
    """A checkpoint that is read while it is replaced is read to its end."""
    nvflare_lazy.save(TENSORS, "memory://m/", max_shard_size="2MB")
    found = nvflare_lazy.open("memory://m/")
    again = nvflare_lazy.aggregate({"a": found, "b": NEW}, "memory://m/", max_shard_size="3MB")
    assert all(torch.equal(again[name], TENSORS[name] + 0.5) for name in TENSORS)


@pytest.mark.slow
def test_result_of_an_executor(memory, tmp_path, monkeypatch) -> None:
    """Workers write parts of files that this process uploads; nothing of them is left."""
    monkeypatch.chdir(tmp_path)
    for name, tensors in (("a", TENSORS), ("b", NEW)):
        nvflare_lazy.save(tensors, f"{name}.safetensors")
    contributions = {name: nvflare_lazy.open(f"{name}.safetensors") for name in "ab"}
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        found = nvflare_lazy.aggregate(contributions, "memory://m/", max_shard_size="2MB", executor=pool)
    assert all(torch.equal(found[name], TENSORS[name] + 0.5) for name in TENSORS)
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "b.safetensors"]


def test_progress_ends_with_the_last_byte(memory) -> None:
    """The progress of a save to a URL adds up to the bytes of the tensors."""
    counted = []
    nvflare_lazy.save(TENSORS, "memory://m/", max_shard_size="2MB", progress=counted.append)
    assert sum(counted) == sum(tensor.nbytes for tensor in TENSORS.values())


def test_hugging_face_directory(memory, tmp_path) -> None:
    """The configuration and the tokenizer are uploaded too, and the index last."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("[]")
    nvflare_lazy.save(TENSORS, "memory://hf", like=tmp_path, max_shard_size="2MB")
    assert memory.cat("/hf/config.json") == b"{}"
    assert memory.cat("/hf/tokenizer.json") == b"[]"
    written = sorted(memory.ls("/hf"), key=lambda info: info["created"])
    assert written[-1]["name"] == "/hf/model.safetensors.index.json"


@pytest.mark.parametrize("before", [None, "1MB", "3MB"])
@pytest.mark.parametrize("after", [None, "2MB"])
def test_replacement(memory, before, after) -> None:
    """A checkpoint replaces the one of its name, sharded or not, and no others."""
    nvflare_lazy.save(TENSORS, "memory://m/", max_shard_size=before)
    nvflare_lazy.save({"other": torch.ones(3)}, "memory://m/other.safetensors")
    assert_saved(str(nvflare_lazy.save(NEW, "memory://m/", max_shard_size=after)), NEW)
    assert_saved("memory://m/other.safetensors", {"other": torch.ones(3)})
    assert len(memory.ls("/m")) == 1 + (1 if after is None else 4)


@pytest.mark.parametrize(
    ("sharded", "error"),
    [
        (True, "model-00001-of-.* was removed after it was opened.*; open it again"),
        (False, "was replaced .*open it again"),
    ],
)
def test_reading_what_was_replaced(memory, sharded, error) -> None:
    """A process that still reads the old checkpoint gets an error that tells to open it again, and no mix of both."""
    options = {"max_shard_size": "2MB"} if sharded else {}
    nvflare_lazy.save(TENSORS, "memory://old/", **options)
    tensors = nvflare_lazy.open("memory://old/")
    nvflare_lazy.save({name: tensor.clone() for name, tensor in NEW.items()}, "memory://old/", **options)
    with pytest.raises(RemoteError, match=error):
        tensors["layer.0"].materialize()
    assert torch.equal(nvflare_lazy.open("memory://old/")["layer.0"].materialize(), NEW["layer.0"])


def test_failed_save_leaves_the_old_checkpoint(memory) -> None:
    """A save that ends early leaves the files that were there, and no others."""
    nvflare_lazy.save(TENSORS, "memory://m/", max_shard_size="2MB")
    before = memory.find("/m")
    metas = [TensorMeta(name, "U8", (MIB,)) for name in "abcd"]
    writer = StreamingWriter("memory://m/", metas, max_shard_size=MIB)
    writer.write("a", 0, bytes(MIB))
    writer.write("b", 0, bytes(MIB))
    with pytest.raises(MetadataMismatchError):
        writer.commit()
    assert memory.find("/m") == before


def test_empty_tensors(memory) -> None:
    """Tensors without elements, before and after those with some, and a checkpoint without tensors."""
    tensors = {"a": torch.ones(0), "b": torch.ones(9), "c": torch.ones(0), "d": torch.ones(9), "e": torch.ones(3, 0)}
    assert_saved(str(nvflare_lazy.save(tensors, "memory://m/", max_shard_size=36)), tensors)
    nvflare_lazy.save({}, "memory://empty/model.safetensors")
    assert safetensors.torch.load(memory.cat("/empty/model.safetensors")) == {}


@pytest.mark.slow
def test_at_most_two_files_on_disk(s3: S3OnDisk) -> None:
    """The disk holds the file that is uploaded and the one that is written; the writer waits for the upload."""
    scratch = os.environ["NVFLARE_LAZY_SCRATCH"]
    s3.fail("PUT", "of-00020", "slow", 20)
    used = []
    tensors = {f"{number:02d}": torch.zeros(MIB, dtype=torch.uint8) for number in range(20)}
    nvflare_lazy.save(
        tensors, "s3://bucket/m/", max_shard_size=MIB, progress=lambda nbytes: used.append(_open_files(scratch))
    )
    assert max(used) == 2
    assert os.listdir(scratch) == []


def _open_files(directory: str) -> int:
    """Return the number of files in a directory that this process has open, with a name or without."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        link = f"/proc/self/fd/{descriptor}"
        if os.path.islink(link) and os.readlink(link).startswith(directory):
            found.add(os.stat(link).st_ino)
    return len(found)


FAULTS = [
    ("PUT", "partNumber=2", "500"),
    ("PUT", "partNumber=2", "reset"),
    ("POST", "uploads", "503"),
    ("POST", "uploads", "reset"),
    ("POST", "uploadId", "500"),
    ("POST", "uploadId", "reset"),
    ("PUT", "index.json", "503"),
    ("PUT", "index.json", "half"),
]


@pytest.mark.parametrize(
    ("method", "match", "action"),
    [("PUT", "partNumber=2", "half"), *(pytest.param(*fault, marks=pytest.mark.slow) for fault in FAULTS)],
)
def test_faults(s3: S3OnDisk, impatient, method, match, action) -> None:
    """A request that fails is repeated, and nothing of the first attempt is left."""
    big = {str(number): torch.full((3 << 20,), float(number)) for number in range(2)}
    s3.fail(method, match, action)
    shard = "12MiB" if "index" in match else None
    assert_saved(str(nvflare_lazy.save(big, "s3://bucket/m/", max_shard_size=shard)), big)
    assert s3.unfinished() == []
    assert len(s3.keys()) == (1 if shard is None else 3)


@pytest.mark.parametrize(("count", "match"), [(2 * MIB, "partNumber=1"), (10, "model.safetensors")])
def test_damage_is_noticed(s3: S3OnDisk, impatient, count, match) -> None:
    """If the store keeps different bytes from the sent ones, they are sent again."""
    s3.fail("PUT", match, "corrupt")
    before = len(s3.requests())
    nvflare_lazy.save({"w": torch.arange(count)}, "s3://bucket/model.safetensors")
    assert_saved("s3://bucket/model.safetensors", {"w": torch.arange(count)})
    assert sum("PUT" in request and match in request for request in s3.requests()[before:]) == 2


def test_a_store_that_refuses(s3: S3OnDisk, impatient) -> None:
    """Without the right to write, the save fails before the first tensor is read, and names the URL."""
    s3.fail("POST", "uploads", "403")
    with pytest.raises(SaveError, match=r"cannot write s3://bucket/m/model\.safetensors: access denied"):
        nvflare_lazy.save(TENSORS, "s3://bucket/m/")
    with pytest.raises(SaveError, match="its bucket or directory does not exist"):
        nvflare_lazy.save(TENSORS, "s3://other/m/")
    with pytest.raises(SaveError, match=r"cannot write https://localhost/m.*: web servers are read-only"):
        nvflare_lazy.save(TENSORS, "https://user:secret@localhost/m/")
    assert s3.keys() == s3.unfinished() == []


@pytest.mark.slow
def test_lasting_failure(s3: S3OnDisk, impatient) -> None:
    """A store that keeps failing ends the save; the old checkpoint stays, and the uploaded shards are removed."""
    nvflare_lazy.save(TENSORS, "s3://bucket/m/", max_shard_size="2MB")
    before = s3.keys()
    s3.fail("PUT", "00003-of", "400", 99)
    with pytest.raises(SaveError, match=r"cannot write s3://bucket/m/model-00003-of-00006"):
        nvflare_lazy.save(TENSORS, "s3://bucket/m/", max_shard_size="1MB")
    assert s3.keys() == before
    assert s3.unfinished() == []


@pytest.mark.slow
@pytest.mark.parametrize(("match", "shard"), [("partNumber", None), ("00001-of", "1MB")])
def test_cancelled(s3: S3OnDisk, match, shard) -> None:
    """An upload that hangs is cancelled at once, also while the threads of the aggregation wait for it."""
    tensors = TENSORS if shard else {"w": torch.ones(3 << 20)}
    s3.fail("PUT", match, "hang")
    cancelled = threading.Event()

    def cancel_when_it_hangs() -> None:
        while not any("PUT" in request and match in request for request in s3.requests()):
            time.sleep(0.05)
        cancelled.set()

    thread = threading.Thread(target=cancel_when_it_hangs)
    thread.start()
    with pytest.raises(AggregationCancelledError):
        nvflare_lazy.aggregate({"a": tensors}, "s3://bucket/m/", max_shard_size=shard, should_cancel=cancelled.is_set)
    thread.join()
    assert s3.keys() == s3.unfinished() == []


def test_no_room_on_the_disk(memory, monkeypatch) -> None:
    """A shard that exceeds the disk raises an error that names the directory to change."""

    def full(file: AtomicFile, nbytes: int) -> None:
        with file.descriptor():
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(AtomicFile, "reserve", full)
    with pytest.raises(DiskFullError, match="NVFLARE_LAZY_SCRATCH"):
        nvflare_lazy.save(TENSORS, "memory://m/", max_shard_size="2MB")
    assert memory.store == {}


def test_uploads_to_other_directories_stay(s3: S3OnDisk) -> None:
    """A save ends the incomplete uploads of earlier saves, but not uploads to a directory with a similar name."""
    import s3fs

    fs = s3fs.S3FileSystem()
    for directory in ("dir", "dir/model-backup"):
        key = f"{directory}/model-00001-of-00002.g5.safetensors"
        fs.call_s3("create_multipart_upload", Bucket="bucket", Key=key)
    nvflare_lazy.save(TENSORS, "s3://bucket/dir/", max_shard_size="2MiB")
    assert len(s3.unfinished()) == 1


def test_a_clock_that_was_ahead(memory, monkeypatch):
    """A save replaces an earlier one, although the clock of that one's machine was ahead."""
    now = time.time_ns
    with monkeypatch.context() as ahead:
        ahead.setattr(time, "time_ns", lambda: now() + 10**12)
        nvflare_lazy.save(TENSORS, "memory://bucket/m.safetensors", max_shard_size="2MiB")
    nvflare_lazy.save(NEW, "memory://bucket/m.safetensors", max_shard_size="2MiB")
    assert_saved("memory://bucket/m.safetensors.index.json", NEW)
    generations = {shard.generation for name in memory.store if (shard := parse_shard_name(name))}
    assert len(generations) == 1


def test_the_later_of_two_saves_wins(memory) -> None:
    """A save that ends after one that began later changes nothing, because its shards may be removed by now."""
    metas = [TensorMeta(name, "U8", (MIB,)) for name in "ab"]
    new = {name: torch.ones(MIB, dtype=torch.uint8) for name in "ab"}
    first = StreamingWriter("memory://m/", metas, max_shard_size=MIB)
    first.write("a", 0, bytes(MIB))
    nvflare_lazy.save(new, "memory://m/", max_shard_size=MIB)
    first.write("b", 0, bytes(MIB))
    with pytest.raises(SaveError, match="a save that began later has replaced it"):
        first.commit()
    assert_saved("memory://m/model.safetensors.index.json", new)
    assert len(memory.ls("/m")) == 3


SAVE = """
import torch, nvflare_lazy
tensors = {str(number): torch.full((3 << 20,), 7.0) for number in range(4)}
nvflare_lazy.save(tensors, "s3://bucket/m/", max_shard_size="12MiB")
"""


def _start_hanging_save(s3: S3OnDisk) -> subprocess.Popen[str]:
    """Start a process that saves, and return when the upload of the third shard hangs."""
    s3.fail("PUT", "00003-of", "hang")
    before = len(s3.requests())
    process = subprocess.Popen([sys.executable, "-c", SAVE], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while not any("PUT" in request and "00003-of" in request for request in s3.requests()[before:]):
        assert process.poll() is None
        time.sleep(0.05)
    return process


@pytest.mark.slow
def test_killed_writer(s3: S3OnDisk) -> None:
    """After `kill -9` in mid-upload the old checkpoint is readable, and the next save removes the remaining files."""
    nvflare_lazy.save(TENSORS, "s3://bucket/m/", max_shard_size="3MB")
    before = s3.keys()
    with _start_hanging_save(s3) as process:
        process.kill()
    assert set(s3.keys()) > set(before)
    assert os.listdir(os.environ["NVFLARE_LAZY_SCRATCH"]) == []
    assert_saved("s3://bucket/m/model.safetensors.index.json", TENSORS)

    nvflare_lazy.save(NEW, "s3://bucket/m/", max_shard_size="3MB")
    assert_saved("s3://bucket/m/model.safetensors.index.json", NEW)
    assert len(s3.keys()) == len(before)
    assert s3.unfinished() == []


@pytest.mark.slow
def test_interrupted_writer(s3: S3OnDisk) -> None:
    """Ctrl-C ends the upload: nothing is left in the store or on the disk."""
    with _start_hanging_save(s3) as process:
        process.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in process.stderr.read()
    assert s3.keys() == s3.unfinished() == os.listdir(os.environ["NVFLARE_LAZY_SCRATCH"]) == []


@pytest.mark.slow
def test_killed_store(monkeypatch, tmp_path, impatient) -> None:
    """If the store is killed in mid-upload, the save fails; the old checkpoint is there when the store is back."""
    s3 = _as_client(S3OnDisk(tmp_path / "s3"), monkeypatch, tmp_path)
    try:
        nvflare_lazy.save(TENSORS, "s3://bucket/m/", max_shard_size="3MB")
        s3.fail("PUT", "00004-of", "hang")
        thread = threading.Thread(target=_kill_when_it_hangs, args=(s3,))
        thread.start()
        with pytest.raises(SaveError, match=r"cannot write s3://bucket/m/model-00004-of-00006"):
            nvflare_lazy.save(TENSORS, "s3://bucket/m/", max_shard_size="1MB")
        thread.join()
        s3.start()
        assert_saved("s3://bucket/m/model.safetensors.index.json", TENSORS)
        nvflare_lazy.save(NEW, "s3://bucket/m/", max_shard_size="2MB")
        assert_saved("s3://bucket/m/model.safetensors.index.json", NEW)
        assert len(s3.keys()) == 4
    finally:
        s3.kill()


def _kill_when_it_hangs(s3: S3OnDisk) -> None:
    while not any("PUT" in request and "00004-of" in request for request in s3.requests()):
        time.sleep(0.02)
    s3.kill()

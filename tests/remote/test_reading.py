# SPDX-License-Identifier: Apache-2.0
"""Checkpoints at URLs open and read as they do from disk: every format, over HTTP, S3 and fsspec's memory."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import nvflare_lazy
from nvflare_lazy.errors import (
    MissingShardError,
    RemoteError,
    RemoteFileChangedError,
    RemoteNotFoundError,
    SourceReleasedError,
    UnknownFormatError,
)
from nvflare_lazy.remote import RemoteFile, _reads


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    small = {f"layer.{number}.bias": torch.randn(17, generator=generator) for number in range(40)}
    return {
        "embedding": torch.randn(500, 300, generator=generator),
        "long": torch.randn(3_000_001, generator=generator),
        "half": torch.randn(100, generator=generator).bfloat16(),
        "empty": torch.empty(0, 3),
        **small,
    }


def save(kind: str, directory) -> str:
    """Write the model to a directory in a format, and return the name to open: of a file, or "" for the directory."""
    tensors = model()
    if kind == "safetensors":
        nvflare_lazy.save(tensors, directory / "model.safetensors")
        return "model.safetensors"
    if kind in ("sharded", "index"):
        nvflare_lazy.save(tensors, directory, max_shard_size="2MB")
        return "" if kind == "sharded" else "model.safetensors.index.json"
    torch.save(tensors, directory / "model.pt", _use_new_zipfile_serialization=kind == "zip")
    return "model.pt"


KINDS = ("safetensors", "sharded", "index", "zip", "legacy")
SLOW_KINDS = [pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "sharded"]


def check(found) -> None:
    expected = model()
    assert list(found) == list(expected) or set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].materialize(), tensor), name


@pytest.fixture(params=KINDS)
def stored(request, tmp_path):
    name = save(request.param, tmp_path)
    return name, {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_http(web, stored):
    name, files = stored
    web.files = {f"/models/a b/{path}": data for path, data in files.items()}
    tensors = nvflare_lazy.open(f"{web.url}/models/a%20b/{name}")
    assert not any(isinstance(value, str) and "long" in value for value in tensors.metadata.values())
    check(tensors)


@pytest.mark.parametrize("stored", ["sharded", "zip"], indirect=True)
def test_memory(stored, memory):
    name, files = stored
    for path, data in files.items():
        memory.pipe(f"/reading/{path}", data)
    check(nvflare_lazy.open(f"memory://reading/{name}"))


@pytest.fixture
def bucket(s3):
    import s3fs

    fs = s3fs.S3FileSystem()
    yield fs
    fs.invalidate_cache()
    for path in fs.find("models"):
        fs.rm_file(path)


@pytest.mark.parametrize("stored", ["sharded", *SLOW_KINDS], indirect=True)
def test_s3(bucket, stored):
    name, files = stored
    for path, data in files.items():
        bucket.pipe(f"models/a/{path}", data)
    check(nvflare_lazy.open(f"s3://models/a/{name}".rstrip("/")))


# ---- requests --------------------------------------------------------------------------------------------------------


@pytest.fixture
def url(web, tmp_path):
    nvflare_lazy.save(model(), tmp_path / "model.safetensors")
    web.files["/model.safetensors"] = (tmp_path / "model.safetensors").read_bytes()
    return f"{web.url}/model.safetensors"


def ranges(web) -> list[str]:
    return [wanted for _, _, wanted in web.requests if wanted is not None]


def test_opening_reads_no_tensors(web, url):
    nvflare_lazy.open(url)
    assert len(web.requests) <= 3
    assert web.sent < 1 << 20


def test_small_neighbors_come_with_one_request(web, url):
    tensors = nvflare_lazy.open(url)
    before = len(ranges(web))
    for number in range(40):
        tensors[f"layer.{number}.bias"].sum()
    assert len(ranges(web)) - before <= 1


def test_long_reads_are_parallel_requests(web, url):
    tensors = nvflare_lazy.open(url)
    before = len(ranges(web))
    assert torch.equal(tensors["long"].materialize(), model()["long"])
    assert 3 <= len(ranges(web)) - before <= 4


def test_a_file_in_order_is_fetched_once(web):
    data = os.urandom(20 << 20)
    web.files["/data"] = data
    file = RemoteFile(f"{web.url}/data")
    found = bytearray()
    for at in range(0, len(data), 100_000):
        found += file.source(at, min(100_000, len(data) - at)).read()
    assert found == data
    assert len(ranges(web)) < 25
    assert web.sent == len(data)


def test_many_threads(web, url):
    tensors = nvflare_lazy.open(url)
    expected = model()
    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(lambda name: tensors[name].materialize(), list(expected) * 4))
    assert all(torch.equal(a, b) for a, b in zip(found, list(expected.values()) * 4, strict=True))


def test_the_cache_has_a_limit(web):
    web.files = {f"/{number}": os.urandom(3 << 20) for number in range(16)}
    files = [RemoteFile(f"{web.url}/{number}") for number in range(16)]
    for at in range(0, 3 << 20, 300_000):
        for number, file in enumerate(files):
            length = min(300_000, file.size - at)
            assert file.source(at, length).read() == web.files[f"/{number}"][at : at + length]
    assert len(_reads._reader._blocks) * _reads._BLOCK_BYTES <= _reads.CACHE_BYTES
    # Few bytes are sent twice.
    assert web.sent < 1.3 * 16 * (3 << 20)
    numbers = {file.number for file in files}
    del file, files
    assert not numbers & {number for number, _ in _reads._reader._blocks}


def test_files_are_closed(web, url):
    tensors = nvflare_lazy.open(url)
    tensor = tensors["half"]
    tensors.cleanup()
    with pytest.raises(SourceReleasedError, match="cleanup"):
        tensors["half"].sum()
    with pytest.raises(SourceReleasedError, match="was released; read its tensors"):
        tensor.materialize()


def test_copies(web, url):
    tensors = nvflare_lazy.open(url)
    tensor = tensors["embedding"]
    assert copy.deepcopy(tensor) is not None
    loaded = pickle.loads(pickle.dumps(tensor))
    assert torch.equal(loaded, model()["embedding"])
    assert type(loaded) is torch.Tensor


_FORK = """
import os, sys
import nvflare_lazy

def read(name):
    return bytes(tensors[name].source.read())

tensors = nvflare_lazy.open(sys.argv[1])
expected = [read("long"), read("half")]
child = os.fork()
if not child:
    good = [read("long"), read("half")] == expected
    tensors = nvflare_lazy.open(sys.argv[1])
    os._exit(0 if good and read("half") == expected[1] else 1)
assert os.waitpid(child, 0)[1] == 0
assert [read("long"), read("half")] == expected
"""


def test_a_forked_child_reads(web, url):
    # A separate program: other libraries in this process may not survive a fork.
    subprocess.run([sys.executable, "-c", _FORK, url], check=True, timeout=120)


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_missing(web, url):
    with pytest.raises(RemoteNotFoundError, match=r"cannot open http://127.0.0.1:\d+/none.pt: it does not exist"):
        nvflare_lazy.open(f"{web.url}/none.pt?secret=1")
    with pytest.raises(RemoteNotFoundError, match=r"memory://none/x: it does not exist"):
        nvflare_lazy.open("memory://none/x")


def test_missing_shards(web, tmp_path):
    save("sharded", tmp_path)
    web.files = {f"/m/{path.name}": path.read_bytes() for path in tmp_path.iterdir()}
    shard = next(name for name in web.files if "-00002-" in name)
    del web.files[shard]
    with pytest.raises(MissingShardError, match="00002"):
        nvflare_lazy.open(f"{web.url}/m/model.safetensors.index.json")


def test_other_formats(web):
    web.files["/page"] = b"<!DOCTYPE html><html>log in</html>"
    with pytest.raises(UnknownFormatError, match=r"/page is not a checkpoint. It is an HTML page"):
        nvflare_lazy.open(f"{web.url}/page?token=secret")


def test_servers_without_ranges(web, url):
    web.ranges = False
    with pytest.raises(RemoteError, match=r"ignores requests for ranges .*; use a server that supports ranges"):
        nvflare_lazy.open(url)


@pytest.mark.parametrize(("etag", "if_match"), [(True, True), (True, False), (False, False)])
def test_replaced_files(web, url, etag, if_match):
    web.etag, web.if_match = etag, if_match
    tensors = nvflare_lazy.open(url)
    data = web.files["/model.safetensors"]
    # The same size, unless that is all that tells the versions apart.
    web.files["/model.safetensors"] = data[:-4] + bytes(4 if etag else 8)
    with pytest.raises(RemoteFileChangedError, match="was replaced while it was being read; open it again"):
        tensors["long"].materialize()


def test_replaced_files_without_etags(web, url):
    """The time of modification tells versions of the same size apart."""
    web.etag, web.modified = False, "Thu, 19 Nov 2026 20:00:00 GMT"
    tensors = nvflare_lazy.open(url)
    web.files["/model.safetensors"] = web.files["/model.safetensors"][:-4] + bytes(4)
    web.modified = "Thu, 19 Nov 2026 20:00:01 GMT"
    with pytest.raises(RemoteFileChangedError, match="was replaced"):
        tensors["long"].materialize()


def test_replaced_in_a_store_without_conditional_requests(memory, monkeypatch, tmp_path):
    """The version is compared after each request, whatever client the store has."""
    monkeypatch.setattr(type(memory), "async_impl", True)
    nvflare_lazy.save(model(), tmp_path / "m.safetensors")
    data = (tmp_path / "m.safetensors").read_bytes()
    memory.pipe("/changing", data)
    tensors = nvflare_lazy.open("memory://changing")
    memory.pipe("/changing", data[:-4] + bytes(4))
    with pytest.raises(RemoteFileChangedError, match="was replaced"):
        tensors["long"].materialize()


def test_replaced_in_s3_while_it_is_opened(bucket, tmp_path, monkeypatch):
    """The version is that of the bytes, even if the first request found another one."""
    bucket.pipe("models/m", b"old")
    info = type(bucket).info
    found = []

    def replaced_after(self, path, **options):
        found.append(info(self, path, **options))
        if len(found) == 1:
            bucket.pipe("models/m", b"new")
        return found[-1]

    monkeypatch.setattr(type(bucket), "info", replaced_after)
    file = RemoteFile("s3://models/m")
    assert file.source(0, 3).read() == b"new"
    assert RemoteFile("s3://models/m").version == file.version


def test_replaced_in_memory_and_s3(bucket, memory, tmp_path):
    data = Path(nvflare_lazy.save(model(), tmp_path / "m.safetensors")).read_bytes()
    for fs, path, url in ((bucket, "models/m", "s3://models/m"), (memory, "/m", "memory://m")):
        fs.pipe(path, data)
        tensors = nvflare_lazy.open(url)
        fs.pipe(path, data[:-4] + bytes(4))
        with pytest.raises(RemoteFileChangedError, match=f"{url} was replaced"):
            tensors["long"].materialize()


def test_redirects_to_plain_text_are_refused():
    from types import SimpleNamespace

    from yarl import URL

    from nvflare_lazy.remote import _http

    response = SimpleNamespace(headers={"Location": "http://other/m"}, close=lambda: None)
    event = SimpleNamespace(url=URL("https://me:pass@host/m?key=1"), response=response)
    import asyncio

    with pytest.raises(RemoteError, match=r"^https://host/m redirects from https to http"):
        asyncio.run(_http._check_redirect(None, None, event))


def test_redirects_are_followed(web, url):
    web.redirects["/latest"] = "/model.safetensors"
    check(nvflare_lazy.open(f"{web.url}/latest"))

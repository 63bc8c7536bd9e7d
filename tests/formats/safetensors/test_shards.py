# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of several files: what an index may say, and which files of a directory count."""

from __future__ import annotations

import itertools
import json
import os
import threading
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import nvflare_lazy
from nvflare_lazy.errors import MissingShardError, SectionError, ShardError, ShardIndexError, UnknownFormatError
from nvflare_lazy.formats import LazyTensorDict, open_checkpoint
from nvflare_lazy.formats.safetensors.shards import ShardName, parse_shard_name, read_weight_map
from nvflare_lazy.tensors.tensor_file import TensorFile

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A directory with two shards and an index, as transformers writes them."""
    save_file({"a": torch.tensor([1, 2])}, tmp_path / FIRST, metadata={"format": "pt", "part": "1"})
    save_file(
        {"b": torch.tensor([3]), "c": torch.tensor([4])}, tmp_path / SECOND, metadata={"format": "pt", "part": "2"}
    )
    write_index(tmp_path, {"a": FIRST, "b": SECOND, "c": SECOND})
    return tmp_path


def write_index(directory: Path, weight_map: object, **other: object) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": 32}, "weight_map": weight_map, **other}))


def contents(path: Path) -> dict[str, list[int]]:
    return {name: tensor.tolist() for name, tensor in nvflare_lazy.open(path).items()}


@pytest.mark.parametrize("name", ["", INDEX, "model.safetensors"])
def test_open_by_directory_index_or_name(sharded: Path, name: str) -> None:
    """The directory, the index and the name of the whole all open the checkpoint."""
    assert contents(sharded / name) == {"a": [1, 2], "b": [3], "c": [4]}


def test_metadata_is_what_shards_agree_on(sharded: Path) -> None:
    """What two shards say differently is the metadata of neither."""
    assert nvflare_lazy.open(sharded).metadata == {"format": "pt"}


def test_only_what_the_index_names_counts(sharded: Path) -> None:
    """Tensors and files that the index does not name are not part of the checkpoint."""
    save_file({"x": torch.tensor([9])}, sharded / "other.safetensors")
    write_index(sharded, {"a": FIRST, "c": SECOND})
    assert contents(sharded) == {"a": [1, 2], "c": [4]}


def test_shards_in_pickles(tmp_path: Path) -> None:
    """An index may name PyTorch files, as it did before safetensors."""
    torch.save({"a": torch.tensor([1])}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"b": torch.tensor([2])}, tmp_path / "pytorch_model-00002-of-00002.bin")
    weight_map = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert contents(tmp_path) == {"a": [1], "b": [2]}


@pytest.mark.parametrize(
    "name",
    ["../secret", "/etc/passwd", "sub/file.safetensors", "..", ".", "", "a\\b", "nul\0byte", "sub/../../x", "~/x/y"],
)
def test_index_stays_in_its_directory(sharded: Path, name: str) -> None:
    """A name that leads out of the directory, or could elsewhere, is refused before anything is opened."""
    save_file({"a": torch.tensor([1])}, sharded.parent / "secret")
    write_index(sharded, {"a": name})
    with pytest.raises(ShardError, match="only name files in the same directory"):
        nvflare_lazy.open(sharded)


def test_symbolic_links_are_followed(sharded: Path, tmp_path_factory) -> None:
    """Shards may be links to other directories, as in the cache of Hugging Face; their owner made them."""
    elsewhere = tmp_path_factory.mktemp("blobs") / "0a1b"
    os.rename(sharded / FIRST, elsewhere)
    os.symlink(elsewhere, sharded / FIRST)
    assert contents(sharded)["a"] == [1, 2]


def test_missing_shard_and_missing_tensor(sharded: Path) -> None:
    """The error for a missing shard, or for a tensor missing from its shard, has their names."""
    write_index(sharded, {"a": SECOND})
    with pytest.raises(MissingShardError, match=r"'a' is in 'model-00002.* but it is not"):
        nvflare_lazy.open(sharded)
    write_index(sharded, {"a": "model-00003-of-00002.safetensors"})
    with pytest.raises(MissingShardError, match=r"model-00003.*is missing"):
        nvflare_lazy.open(sharded)


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"metadata":{}}',
        '{"weight_map":[]}',
        '{"weight_map":{"a":1}}',
        '{"weight_map":{"a":{}}}',
        '{"weight_map":{"a":"b","a":"c"}}',
        '{"weight_map":{},"weight_map":{}}',
        '{"weight_map":{"a":"\\ud800"}}',
        '{"metadata":' + "[" * 100_000,
        '{"weight_map":{"a":"b"}',
        "{",
    ],
)
def test_broken_index(sharded: Path, text: str) -> None:
    """JSON that is not an index raises that error, however deep it is."""
    (sharded / INDEX).write_text(text)
    with pytest.raises(ShardIndexError, match="index"):
        nvflare_lazy.open(sharded)


def test_large_metadata_of_an_index_is_not_built(sharded: Path) -> None:
    """Other contents of an index use no memory, and at most one megabyte of them is allowed."""
    write_index(sharded, {"a": FIRST}, notes=[[]] * 250_000)
    file = TensorFile(sharded / INDEX)
    tracemalloc.start()
    try:
        assert read_weight_map(file) == {"a": FIRST}
        assert tracemalloc.get_traced_memory()[1] < 4 * file.size
    finally:
        tracemalloc.stop()
    write_index(sharded, {"a": FIRST}, notes=[[]] * 500_000)
    with pytest.raises(ShardIndexError, match="megabyte"):
        nvflare_lazy.open(sharded)


def test_an_index_does_not_lead_to_itself(sharded: Path) -> None:
    """An index among the shards is not followed."""
    write_index(sharded, {"a": INDEX})
    with pytest.raises(UnknownFormatError, match="not a checkpoint"):
        nvflare_lazy.open(sharded)


@pytest.mark.parametrize("name", ["x" * 300, "\U0001f600" * 100, "loop"], ids=["long", "long in bytes", "loop"])
def test_a_shard_that_the_system_cannot_open(sharded: Path, name: str) -> None:
    """A name that is too long, or a link to itself, is an error of the checkpoint and not one of the system."""
    (sharded / "loop").symlink_to("loop")
    write_index(sharded, {"a": FIRST, "b": name})
    with pytest.raises(ShardError, match="which cannot be opened: "):
        nvflare_lazy.open(sharded)


def test_an_index_that_names_its_shards_again_and_again(sharded: Path) -> None:
    """Each shard is opened once, and the names of the tensors take a small multiple of the index."""
    for name in (FIRST, "missing.safetensors"):
        write_index(sharded, {f"{index:x}": name for index in range(4000)})
        file = sharded / INDEX
        tracemalloc.start()
        try:
            with pytest.raises(MissingShardError):
                nvflare_lazy.open(sharded)
            assert tracemalloc.get_traced_memory()[1] < 20 * file.stat().st_size
        finally:
            tracemalloc.stop()


def test_a_pipe_is_not_waited_for(sharded: Path) -> None:
    """A shard that is a pipe raises at once."""
    os.mkfifo(sharded / "pipe")
    write_index(sharded, {"a": "pipe"})
    with pytest.raises(UnknownFormatError, match="not a regular file"):
        nvflare_lazy.open(sharded)


def test_shards_without_an_index(sharded: Path) -> None:
    """A directory with shards is a checkpoint if it has all of them."""
    (sharded / INDEX).unlink()
    assert contents(sharded) == {"a": [1, 2], "b": [3], "c": [4]}
    (sharded / FIRST).unlink()
    with pytest.raises(MissingShardError, match=r"1 of 2 shards.*model-00001-of-00002.*missing"):
        nvflare_lazy.open(sharded)


def test_a_set_of_shards_that_claims_to_be_huge(tmp_path: Path) -> None:
    """The number in a file's name is not counted up to."""
    save_file({"a": torch.tensor([1])}, tmp_path / "model-00001-of-99999999999999.safetensors")
    with pytest.raises(MissingShardError, match="model-00002-of"):
        nvflare_lazy.open(tmp_path)


def test_unrelated_files_make_one_checkpoint(tmp_path: Path) -> None:
    """Files of any name are put together, unless a tensor is in two of them."""
    save_file({"a": torch.tensor([1])}, tmp_path / "one.safetensors")
    save_file({"b": torch.tensor([2])}, tmp_path / "two.safetensors")
    (tmp_path / ".three.safetensors").write_bytes(b"hidden files do not count")
    assert contents(tmp_path) == {"a": [1], "b": [2]}
    save_file({"b": torch.tensor([2])}, tmp_path / "four.safetensors")
    with pytest.raises(ShardError, match=r"'b' is in four.safetensors and in two.safetensors"):
        nvflare_lazy.open(tmp_path)


def test_a_single_file_counts_before_shards_of_its_name(sharded: Path) -> None:
    """With `model.safetensors` there, neither the index nor the shards of that name count."""
    save_file({"new": torch.tensor([5])}, sharded / "model.safetensors")
    assert contents(sharded) == {"new": [5]}
    (sharded / INDEX).unlink()
    assert contents(sharded) == {"new": [5]}


def test_two_checkpoints_in_a_directory(sharded: Path) -> None:
    """Where two indexes are, the directory does not say which is meant."""
    (sharded / "other.safetensors.index.json").write_bytes((sharded / INDEX).read_bytes())
    with pytest.raises(ShardError, match="name the one to open"):
        nvflare_lazy.open(sharded)
    assert contents(sharded / INDEX)["b"] == [3]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "contains nothing"),
        (lambda path: (path / "notes.txt").touch(), "1 files, none of which"),
        (lambda path: torch.save({}, path / "pytorch_model.bin"), "for example .*pytorch_model.bin"),
        (lambda path: (path / "saved_model.pb").touch(), "TensorFlow SavedModel"),
    ],
)
def test_directories_without_a_checkpoint(tmp_path: Path, make, message: str) -> None:
    """The error lists the files in the directory."""
    make(tmp_path)
    with pytest.raises(UnknownFormatError, match=message):
        nvflare_lazy.open(tmp_path)


def test_sections_are_for_pickles(sharded: Path) -> None:
    """Safetensors files have names, not sections."""
    for path in (sharded, sharded / FIRST, sharded / INDEX):
        with pytest.raises(SectionError, match="'model'"):
            nvflare_lazy.open(path, section="model")


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("model-00001-of-00002.safetensors", ShardName("model", 1, 2)),
        ("a-b-00012-of-00345.g7.safetensors", ShardName("a-b", 12, 345, 7)),
        ("model-123456-of-999999.safetensors", ShardName("model", 123456, 999999)),
        ("model-0001-of-0002.safetensors", None),
        ("model.safetensors", None),
        ("model-00001-of-00002.bin", None),
    ],
)
def test_names_of_shards(name: str, parsed: ShardName | None) -> None:
    """The names of shards are read and written the same way."""
    assert parse_shard_name(name) == parsed
    if parsed is not None:
        assert str(parsed) == name


def test_indexes_of_other_kinds_do_not_count(sharded: Path) -> None:
    """If PyTorch files exist next to safetensors, they are opened; other JSON with such a name is not an index."""
    (sharded / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "pytorch_model-1.bin"}}))
    (sharded / "other.index.json").write_text(json.dumps({"a": 1}))
    assert contents(sharded) == {"a": [1, 2], "b": [3], "c": [4]}
    nvflare_lazy.save({"whole": torch.tensor([5])}, sharded / "model.safetensors")
    assert contents(sharded) == {"whole": [5]}


def test_an_index_of_pytorch_files_counts_alone(tmp_path: Path) -> None:
    """Where there are PyTorch files only, their index is the checkpoint."""
    torch.save({"a": torch.tensor([1])}, tmp_path / "pytorch_model-1.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "pytorch_model-1.bin"}}))
    assert contents(tmp_path) == {"a": [1]}


def test_two_saves_while_the_shards_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a save as one file, the next save can use the names of the old shards."""
    path = tmp_path / "model.safetensors"

    def save(value: int, max_shard_size: int | None) -> None:
        nvflare_lazy.save({name: torch.full((8,), value) for name in "abcd"}, path, max_shard_size=max_shard_size)

    save(0, None)
    save(1, 100)
    open_one, opened = open_checkpoint.open_safetensors, []

    def open_slowly(name: str, file: TensorFile) -> LazyTensorDict:
        found = open_one(name, file)
        opened.append(name)
        if len(opened) == 1:
            save(2, None)
            save(3, 100)
        return found

    monkeypatch.setattr(open_checkpoint, "open_safetensors", open_slowly)
    values = nvflare_lazy.open(path)
    assert {int(tensor[0]) for tensor in values.values()} == {3}
    assert len(set(opened)) < len(opened)  # the names are the same


def test_opening_while_it_is_saved_again_and_again(tmp_path: Path) -> None:
    """A reader gets the old checkpoint or the new one, while it is saved again and again."""
    path = tmp_path / "model.safetensors"
    enough, done = threading.Event(), threading.Event()

    def write() -> None:
        for round_number in itertools.count():
            if round_number >= 60 and enough.is_set():
                break
            tensors = {name: torch.full((8,), round_number) for name in "abcd"}
            nvflare_lazy.save(tensors, path, max_shard_size=100 if round_number % 2 else None)
        done.set()

    nvflare_lazy.save({name: torch.full((8,), 0) for name in "abcd"}, path)
    writer = threading.Thread(target=write)
    writer.start()
    opened = 0
    try:
        while not done.is_set():
            for place in (tmp_path, path):
                values = {int(tensor[0]) for tensor in nvflare_lazy.open(place).values()}
                assert len(values) == 1
                opened += 1
            if opened > 10:
                enough.set()
    finally:
        enough.set()
        writer.join()

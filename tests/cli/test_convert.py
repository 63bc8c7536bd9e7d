# SPDX-License-Identifier: Apache-2.0
"""`convert` writes any checkpoint as safetensors, atomically, in a few megabytes of memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.cli.sparse import write_sparse


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == expected[name].dtype and torch.equal(found[name], expected[name]) for name in expected
    )


@pytest.mark.parametrize("kind", ["safetensors", "zip", "legacy"])
def test_every_kind(cli, tmp_path, tensors, kind):
    """The tensors of any readable kind arrive as they were; a view becomes what it shows."""
    tensors["view"] = torch.arange(12.0).reshape(3, 4).t()[1:]
    if kind == "safetensors":
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "in")
    else:
        torch.save(tensors, tmp_path / "in", _use_new_zipfile_serialization=kind == "zip")
    code, out, err = cli("convert", "in", "out.safetensors")
    assert (code, out, err) == (0, "out.safetensors: 5 tensors, 25.2 KiB\n", "")
    assert same(load_file("out.safetensors"), tensors)


def test_metadata(cli, model, training):
    """Metadata is kept; tensors from PyTorch are marked as such, which some readers require."""
    cli("convert", model, "a.safetensors")
    cli("convert", training, "b.safetensors", "--section", "model")
    for path in ("a.safetensors", "b.safetensors"):
        with safe_open(path, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}


@pytest.mark.parametrize("name", ["f64", "f32", "f16", "BF16", "f8_e4m3", "f8_e5m2"])
def test_cast(cli, model, tensors, name):
    """Floats are rounded as torch rounds them; integers and booleans stay."""
    dtype = {
        "f64": torch.float64,
        "f32": torch.float32,
        "f16": torch.float16,
        "BF16": torch.bfloat16,
        "f8_e4m3": torch.float8_e4m3fn,
        "f8_e5m2": torch.float8_e5m2,
    }[name]
    assert cli("convert", model, "out.safetensors", "--dtype", name).code == 0
    loaded = load_file("out.safetensors")
    for key, tensor in tensors.items():
        expected = tensor.to(dtype) if tensor.dtype.is_floating_point else tensor
        assert loaded[key].dtype == expected.dtype
        assert loaded[key].reshape(-1).view(torch.uint8).equal(expected.reshape(-1).view(torch.uint8))


def test_cast_that_overflows(cli, tmp_path, caplog):
    """Values that become infinite are not passed over in silence."""
    save_file({"small": torch.ones(3), "large": torch.tensor([1.0, 70000.0, -1e9])}, tmp_path / "in")
    assert cli("convert", "in", "out.safetensors", "--dtype", "f16").code == 0
    assert "2 values, in 1 tensors ('large' the first), are too large for torch.float16" in caplog.text


@pytest.mark.parametrize("dtype", ["i32", "int8", "bool", "float16"])
def test_dtype_that_is_none(cli, model, dtype):
    """Only the floating-point types are on offer, and the error lists them."""
    code, _, err = cli("convert", model, "out.safetensors", "--dtype", dtype)
    assert code == 2
    assert "'bf16'" in err
    assert not os.path.exists("out.safetensors")


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3"])
def test_type_that_cannot_be_cast(cli, tmp_path, dtype):
    """It can be copied; asked to cast it, the command refuses, names the tensor, and writes nothing."""
    write_sparse(tmp_path / "in", {"scales": ("F32", (4,)), "experts.w": (dtype, (4, 8))})
    code, _, err = cli("convert", "in", "out.safetensors", "--dtype", "bf16")
    assert code == 1
    assert "tensor 'experts.w': torch" in err
    assert "cannot cast" in err
    assert not os.path.exists("out.safetensors")
    assert cli("convert", "in", "out.safetensors").code == 0
    assert Path("out.safetensors").read_bytes() == Path("in").read_bytes()


def test_shards(cli, tmp_path, tensors):
    """Shards and an index as others write them, which open as one."""
    tensors = {f"layers.{i}": torch.full((1000,), float(i)) for i in range(10)}
    save_file(tensors, tmp_path / "in", metadata={"format": "pt"})
    os.mkdir("out")
    code, out, _ = cli("convert", "in", "out/model.safetensors", "--max-shard-size", "10 KB")
    assert (code, out) == (0, "out/model.safetensors.index.json: 10 tensors, 39.1 KiB\n")
    weight_map = json.loads(Path("out/model.safetensors.index.json").read_text())["weight_map"]
    assert set(weight_map.values()) == {f"model-0000{i}-of-00005.safetensors" for i in range(1, 6)}
    assert set(os.listdir("out")) == {*weight_map.values(), "model.safetensors.index.json"}
    assert cli("convert", "out", "whole.safetensors").code == 0
    assert Path("whole.safetensors").read_bytes() == Path("in").read_bytes()


@pytest.mark.parametrize("size", ["many", "5 apples", "-1"])
def test_shard_size_that_is_none(cli, model, size):
    """A misuse, told before anything is opened."""
    code, _, err = cli("convert", model, "out.safetensors", f"--max-shard-size={size}")
    assert code == 2
    assert "--max-shard-size" in err


def test_extras_are_left_out_aloud(cli, training):
    """What safetensors cannot hold is named."""
    code, _, err = cli("convert", training, "out.safetensors")
    assert code == 0
    assert err == "Skipped, not tensors: optimizer, epoch\n"


@pytest.mark.parametrize("target", ["out", "out/", "new/out", "out/model.safetensors"])
def test_into_a_directory(cli, model, tensors, target):
    """A directory gets the file that others look for in one, and is created if it is missing."""
    os.mkdir("out")
    directory = target.removesuffix("/").removesuffix("/model.safetensors")
    assert cli("convert", model, target).out.startswith(f"{directory}/model.safetensors: ")
    assert same(load_file(f"{directory}/model.safetensors"), tensors)


def test_the_other_files_of_a_directory(cli, model):
    """They are copied from another directory, and do not replace others without --force."""
    for name, content in (("config.json", "{}"), ("tokenizer.json", "[]"), ("trainer_state.json", "{}")):
        Path("like").mkdir(exist_ok=True)
        Path("like", name).write_text(content)
    assert cli("convert", model, "out", "--like", "like", "--max-shard-size", "20KB").code == 0
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert sorted(os.listdir("out")) == ["config.json", *shards, "model.safetensors.index.json", "tokenizer.json"]
    Path("other").mkdir()
    Path("other", "tokenizer.json").write_text("precious")
    code, _, err = cli("convert", model, "other", "--like", "like")
    assert (code, err) == (1, "Error: other/tokenizer.json exists; set --force to replace it\n")
    assert cli("convert", model, "other", "--like", "like", "--force").code == 0
    assert Path("other", "tokenizer.json").read_text() == "[]"
    code, _, err = cli("convert", model, "more", "--like", "out/..")
    assert code == 2
    assert "it has neither config.json nor adapter_config.json" in err
    assert not os.path.exists("more")


def test_a_new_directory_goes_with_a_failure(cli, model):
    """Nothing is left of a conversion that fails."""
    write_sparse(Path("f4"), {"w": ("F4", (4, 8))})
    assert cli("convert", "gone", "new/out").code == 1
    assert cli("convert", "f4", "new/out", "--dtype", "bf16").code == 1
    assert not os.path.exists("new")


@pytest.mark.parametrize(
    "there",
    [
        "out.safetensors",
        "out.safetensors.index.json",
        "out-00001-of-00002.safetensors",
    ],
)
def test_does_not_overwrite(cli, model, tensors, there):
    """Whatever a save would replace or remove, an old shard included, is safe without --force, and goes with it."""
    Path(there).write_text("precious")
    code, out, err = cli("convert", model, "out.safetensors")
    assert (code, out) == (1, "")
    assert f"{there} exists; set --force to replace it" in err
    assert Path(there).read_text() == "precious"
    assert cli("convert", model, "out.safetensors", "--force").code == 0
    assert same(load_file("out.safetensors"), tensors)


def test_onto_itself(cli, model, tensors):
    """With --force a file may be replaced by its own conversion."""
    assert cli("convert", model, model, "--dtype", "f64", "--force").code == 0
    assert load_file(model)["embed.weight"].equal(tensors["embed.weight"].double())


def test_a_dangling_link_is_there(cli, model):
    """A link that leads nowhere is still something that would be written through."""
    os.symlink("nowhere", "out.safetensors")
    assert cli("convert", model, "out.safetensors").code == 1


@pytest.mark.parametrize(
    ("target", "code", "message"),
    [
        ("out.bin", 2, "OUTPUT must be a directory or end in .safetensors, got 'out.bin'."),
        ("out.safetensors.index.json", 2, "OUTPUT must be a directory or end in .safetensors"),
        ("no/out.safetensors", 1, "no: No such file or directory"),
        ("in.safetensors/out.safetensors", 1, "in.safetensors: Not a directory"),
    ],
)
def test_wrong_targets(cli, model, target, code, message):
    """An invalid OUTPUT is reported in one line, and nothing is written."""
    before = sorted(os.listdir())
    found, _, err = cli("convert", model, target)
    assert found == code
    assert err.splitlines()[-1].startswith(f"Error: {message}")
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html><body>Not Found</body></html>", "HTML"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "Git LFS"),
        (b"", "empty"),
    ],
)
def test_no_checkpoint(cli, content, message):
    """The error for a file that is not a checkpoint has the format's name, in one line."""
    Path("in").write_bytes(content)
    for command in (["convert", "in", "out.safetensors"], ["inspect", "in"]):
        code, out, err = cli(*command)
        assert (code, out) == (1, "")
        assert message in err
        assert len(err.splitlines()) == 1


MEASURED_CONVERSION = """if True:
    import threading
    from nvflare_lazy.cli.program import run
    from tests.measure import rss_anon

    options = ["--dtype", "bf16", "--max-shard-size", "130MiB"]
    run(["convert", "small", "small.safetensors", *options])
    before = peak = rss_anon()
    over = threading.Event()

    def watch():
        global peak
        while not over.wait(0.001):
            peak = max(peak, rss_anon())

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = run(["convert", "big", "big.safetensors", *options])
    over.set()
    watcher.join()
    assert code == 0
    assert peak - before < 16 << 20, f"{(peak - before) >> 20} MiB"
"""


def test_memory(tmp_path):
    """Half a gigabyte is cast and split in a few megabytes of memory."""
    write_sparse(tmp_path / "small", {"w": ("F32", (1, 1 << 20))})
    write_sparse(tmp_path / "big", {f"w{i}": ("F32", (32, 1 << 20)) for i in range(4)})
    subprocess.run(
        [sys.executable, "-c", MEASURED_CONVERSION],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        check=True,
    )
    assert sum(path.stat().st_size for path in tmp_path.glob("big-*.safetensors")) > 256 << 20


SLOW_DISK = """if True:
    import os, time
    from nvflare_lazy.cli import main

    def slowly(write):
        def call(*arguments):
            print("writing", flush=True)
            time.sleep(0.5)
            return write(*arguments)
        return call

    os.pwrite, os.copy_file_range = slowly(os.pwrite), slowly(os.copy_file_range)
    main()
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopped(tmp_path, signum):
    """A conversion that is stopped leaves nothing, says nothing, and ends as one that was stopped."""
    write_sparse(tmp_path / "in", {"w": ("F32", (2, 1 << 30))})
    (tmp_path / "out").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_DISK, "convert", "in", "out"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        for _ in range(2):
            assert process.stdout.readline() == b"writing\n"
        process.send_signal(signum)
        _, err = process.communicate()
    assert process.returncode == -signum
    assert err == b""
    assert list((tmp_path / "out").iterdir()) == []

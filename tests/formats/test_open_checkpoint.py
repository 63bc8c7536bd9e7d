# SPDX-License-Identifier: Apache-2.0
"""`open` recognizes a file by its contents, and the error for an unknown format names that format."""

from __future__ import annotations

import gzip
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import nvflare_lazy
from nvflare_lazy.errors import ArchiveError, FormatError, SectionError, UnknownFormatError
from nvflare_lazy.formats import save

TENSORS = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.tensor([1, 2])}
WRITERS: dict[str, Callable[[Path], object]] = {
    "safetensors": lambda path: save_file(TENSORS, path),
    "ours": lambda path: save(TENSORS, path),
    "zip": lambda path: torch.save(TENSORS, path),
    "legacy": lambda path: torch.save(TENSORS, path, _use_new_zipfile_serialization=False),
}


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin", "model", "model.txt"])
@pytest.mark.parametrize("kind", WRITERS)
def test_by_content_not_by_name(tmp_path: Path, kind: str, name: str) -> None:
    """Every kind opens under every name."""
    WRITERS[kind](tmp_path / name)
    opened = nvflare_lazy.open(tmp_path / name)
    assert {key: tensor.tolist() for key, tensor in opened.items()} == {
        key: tensor.tolist() for key, tensor in TENSORS.items()
    }


def test_section_of_a_nested_checkpoint(tmp_path: Path) -> None:
    """A part of a PyTorch checkpoint opens by its name."""
    torch.save({"model": TENSORS, "epoch": 3}, tmp_path / "m.pt")
    assert set(nvflare_lazy.open(tmp_path / "m.pt", section="model")) == set(TENSORS)
    with pytest.raises(SectionError):
        nvflare_lazy.open(tmp_path / "m.pt", section="optimizer")


FOREIGN: dict[str, tuple[bytes, str]] = {
    "HTML": (b"<!DOCTYPE html>\n<html><head><title>Sign in</title>", "an HTML page: the download brought a login"),
    "HTML, sloppy": (b"\n\n  <HTML lang=en>", "an HTML page"),
    "HTML after a byte order mark": (b"\xef\xbb\xbf<!doctype html>", "an HTML page"),
    "Git LFS": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 12345\n",
        "a Git LFS pointer, not the file itself: run `git lfs pull`",
    ),
    "empty": (b"", "an empty file"),
    "zeros": (bytes(10_000), "zero bytes: a download that reserved its space"),
    "gzip": (gzip.compress(b"x"), "gzip data: decompress it first"),
    "JSON": (b'{"error": "Repository not found"}', 'unknown format that begins with b\'{"error": "Repository'),
    "text": (b"Access to this model is restricted.", "unknown format that begins with b'Access to this"),
    "noise": (b"\xde\xad\xbe\xef" * 8, r"unknown format that begins with b'\\xde\\xad\\xbe"),
    "pickle": (pickle.dumps({"weights": [1.0]}), r"unknown format that begins with b'\\x80"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_files_are_named(tmp_path: Path, kind: str) -> None:
    """The error for a file that is not a checkpoint names its format and a remedy, whatever the file's name is."""
    content, found = FOREIGN[kind]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(UnknownFormatError, match=found) as caught:
        nvflare_lazy.open(path)
    assert str(caught.value).startswith(f"{path} is not a checkpoint. It is ")


def test_foreign_archives_and_scripts(tmp_path: Path) -> None:
    """A zip file of another format is recognized by its contents and refused."""
    path = tmp_path / "model.pt"
    with path.open("wb") as file:
        np.savez(file, a=np.zeros(3))
    with pytest.raises(ArchiveError, match=r"load them with numpy\.load"):
        nvflare_lazy.open(path)


def test_pipes_devices_and_nothing(tmp_path: Path) -> None:
    """What cannot be read at random is refused without waiting for it."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(UnknownFormatError, match="not a regular file"):
            nvflare_lazy.open(path)
    with pytest.raises(FileNotFoundError):
        nvflare_lazy.open(tmp_path / "missing")


@given(st.binary(max_size=200))
def test_any_bytes_open_or_raise_a_format_error(tmp_path_factory, content: bytes) -> None:
    """Whatever the contents of a file, opening it never fails in another way."""
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(content)
    with pytest.raises(FormatError):
        nvflare_lazy.open(path)


def test_opening_does_not_import_nvflare(tmp_path: Path) -> None:
    """Opening and saving a file does not import NVFlare unless a caller uses a part that requires it."""
    save(TENSORS, tmp_path / "m.safetensors")
    program = (
        "import sys, nvflare_lazy; opened = nvflare_lazy.open(sys.argv[1]); nvflare_lazy.save(opened, sys.argv[1]); "
        "sys.exit('nvflare' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path / "m.safetensors"], check=True)

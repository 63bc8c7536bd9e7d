# SPDX-License-Identifier: Apache-2.0
"""Damaged checkpoints: the tensors equal those from `torch.load`, or opening raises an error of this package."""

from __future__ import annotations

import os
import random
import warnings

import pytest
import torch

from nvflare_lazy.errors import NVFlareLazyError
from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict
from nvflare_lazy.formats.pytorch import open_pytorch
from tests.formats.pytorch import files

ROUNDS = 20_000 if os.environ.get("HYPOTHESIS_PROFILE") == "night" else 800


def content() -> dict[str, object]:
    base = torch.arange(24.0)
    return {
        "w": base.view(4, 6),
        "t": base.view(4, 6).t(),
        "b": torch.arange(3, dtype=torch.int16),
        "p": torch.nn.Parameter(torch.ones(2)),
        "n": {"x": [torch.zeros(2), 5, "text"], "y": 1.5},
        "e": torch.empty(0),
    }


def damage(data: bytes, rng: random.Random, start: int, stop: int) -> bytes:
    """Change one to three bytes between `start` and `stop`, as damage or an attacker would."""
    damaged = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        stop = min(stop, len(damaged))
        at = rng.randrange(start, stop)
        match rng.randrange(6):
            case 0:
                damaged[at] ^= 1 << rng.randrange(8)
            case 1:
                damaged[at] = rng.randrange(256)
            case 2:
                damaged[at] = rng.choice((0, 0x7F, 0x80, 0xFF, ord("."), ord("R"), ord("("), ord("b")))
            case 3:
                del damaged[at : at + rng.randint(1, 4)]
            case 4:
                damaged[at:at] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 4)))
            case 5:
                other = rng.randrange(start, stop)
                damaged[at : at + 4] = damaged[other : other + 4]
    return bytes(damaged)


def by_name(value: object, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors from `torch.load` by the names they have here."""
    if isinstance(value, torch.Tensor):
        return {prefix: value}
    if isinstance(value, torch.storage.TypedStorage):
        return {prefix: torch.empty(0, dtype=value.dtype).set_(value.untyped())}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    found = {}
    for key, part in items:
        found |= by_name(part, f"{prefix}.{key}" if prefix else str(key))
    return found


def opened(path) -> LazyTensorDict | None:
    """Open and read everything, or return None if it is refused; any other error comes through."""
    try:
        lazy = open_pytorch(path)
        for tensor in lazy.values():
            tensor.source.read()
    except NVFlareLazyError:
        return None
    return lazy


def loaded(path) -> dict[str, torch.Tensor] | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return by_name(torch.load(path, weights_only=True))
        except Exception:  # anything at all: only what loads can be compared
            return None


@pytest.mark.parametrize(
    ("saver", "checksums"),
    [(files.save_zip, True), (files.save_zip, False), (files.save_legacy, True)],
    ids=["zip", "zip without checksums", "legacy"],
)
def test_damaged_like_torch(tmp_path, saver, checksums):
    """Where both read a damaged file, they read the same; where one does not, it is with an error."""
    path = tmp_path / "model.pt"
    if checksums:
        saver(content(), path)
    else:
        with files.without_checksums():
            saver(content(), path)
    data = path.read_bytes()
    rng = random.Random(saver.__name__ + str(checksums))
    both = alone = 0
    for _ in range(ROUNDS):
        path.write_bytes(damage(data, rng, 0, len(data)))
        lazy = opened(path)
        expected = loaded(path)
        if lazy is not None and expected is not None:
            both += 1
            assert lazy.keys() == expected.keys()
            files.assert_same(lazy, expected)
        elif lazy is not None:
            alone += 1
    assert both > ROUNDS // 50
    assert alone < ROUNDS // 2


def test_damaged_tar(tmp_path):
    """Torch reads tar files by its unrestricted unpickler only, so here only our own errors are looked at."""
    path = tmp_path / "model.pt"
    files.save_tar({"w": torch.arange(24.0).view(4, 6).t(), "b": torch.arange(3)}, path)
    data = path.read_bytes()
    rng = random.Random(3)
    refused = sum(
        opened(path) is None
        for _ in range(ROUNDS)
        if path.write_bytes(damage(data, rng, 0, len(data) - 8192)) is not None
    )
    assert ROUNDS // 10 < refused < ROUNDS


def test_random_opcodes(tmp_path):
    """Pickles of nothing but opcodes and small numbers reach the corners that damage does not."""
    rng = random.Random(4)
    opcodes = b"(.01NIJKMTUX]}()\x85\x86\x87tldaseuqrhjcbRQ\x80\x81\x88\x89\x8a\x8c\x8f\x90\x91\x92\x93\x94\x95"
    names = [b"ccollections\nOrderedDict\n", b"ctorch._utils\n_rebuild_tensor_v2\n", b"ctorch\nFloatStorage\n"]
    names += [b"cnumpy\ndtype\n", b"cargparse\nNamespace\n", b"cbuiltins\nset\n", b"c_codecs\nencode\n", b"K\x01", b"N"]
    done = 0
    for _ in range(ROUNDS):
        pieces = [
            rng.choice(names) if rng.random() < 0.4 else bytes([rng.choice(opcodes)]) for _ in range(rng.randint(1, 25))
        ]
        files.write_legacy(tmp_path / "model.pt", b"\x80\x02" + b"".join(pieces) + b".")
        done += opened(tmp_path / "model.pt") is not None
    assert done

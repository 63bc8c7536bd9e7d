# SPDX-License-Identifier: Apache-2.0
"""Sizes as people write and read them, and untrusted text in messages."""

from __future__ import annotations

import pytest

from nvflare_lazy._text import format_size, parse_size, quoted


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [(0, 0), (7, 7), ("7", 7), ("256MiB", 256 << 20), ("2 GB", 2 * 10**9), ("1.5kib", 1536), (" 3 TiB ", 3 << 40)],
)
def test_parse(text, nbytes):
    """Binary and decimal units, in any case, with or without a space."""
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", [-1, "", "-1", "MiB", "5 apples", "5%", "1e9", "1 2", "5 M i B"])
def test_not_a_size(text):
    """The error for an invalid size shows the expected form; no number is guessed."""
    with pytest.raises(ValueError, match="invalid size"):
        parse_size(text)


def test_percentage():
    """A share of a disk requires a disk, and is at most 100 %."""
    assert parse_size("5%", of=2000) == 100
    with pytest.raises(ValueError, match="invalid size"):
        parse_size("101%", of=2000)


def test_format():
    """Three digits and a unit are what a person reads."""
    sizes = [0, 1023, 1536, 5 << 30, 3 << 50, 5000 << 50]
    assert [format_size(size) for size in sizes] == ["0 B", "1023 B", "1.5 KiB", "5.0 GiB", "3.0 PiB", "5000.0 PiB"]


def test_quoted():
    """Untrusted text cannot move the cursor of a terminal, nor fill it."""
    assert quoted("\x1b[2J") == r"'\x1b[2J'"
    assert len(quoted("a" * 10_000)) == 120

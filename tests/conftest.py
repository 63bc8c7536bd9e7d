# SPDX-License-Identifier: Apache-2.0
"""Hypothesis profiles and fixtures that every test may use."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import measure

# The same examples every time, however loaded the machine is.
settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
# Other examples every time, and many of them.
settings.register_profile(
    "night",
    max_examples=5000,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture
def rss_anon() -> Callable[[], int]:
    """Reader of this process's anonymous memory, in bytes."""
    return measure.rss_anon


@pytest.fixture
def rchar() -> Callable[[], int]:
    """Reader of the bytes this process has asked the kernel to read."""
    return measure.rchar


@pytest.fixture
def no_gc() -> Iterator[None]:
    """Only reference counts free objects in this test: a reference cycle keeps what it refers to."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def memory() -> Iterator[Any]:
    """An empty file system in memory, which all tests in a process share."""
    fs = pytest.importorskip("fsspec").filesystem("memory")
    yield fs
    fs.store.clear()
    # Directories, which outlive their files.
    fs.pseudo_dirs[:] = [""]

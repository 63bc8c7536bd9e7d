# SPDX-License-Identifier: Apache-2.0
"""Hypothesis profiles, the time limit of slow tests, and fixtures every test may use."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests import measure

SLOW_TEST_SECONDS = 1800

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TEST_SECONDS))


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

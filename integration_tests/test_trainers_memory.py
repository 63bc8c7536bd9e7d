# SPDX-License-Identifier: Apache-2.0
"""Ordinary training scripts receive, load and return a model with one copy of it, as `benchmarks.trainers` measures."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from benchmarks.trainers import CASES, Case, measure

pytestmark = pytest.mark.filterwarnings("default")  # those of the libraries are not ours

# The conversion from NumPy arrays, and the difference that the Client API computes, are further copies.
_ONE_COPY = [case for case in CASES if case.exchange == "pytorch" and not case.executor]


@pytest.mark.slow
@pytest.mark.parametrize("external", [False, True], ids=["in process", "external"])
@pytest.mark.parametrize("case", _ONE_COPY, ids=lambda case: case.name)
def test_one_copy_of_the_model(case: Case, external: bool):
    """The idle process, the model, and half of it for data in flight and the loaded tensor."""
    if not all(map(find_spec, case.packages)):
        pytest.skip(f"needs {', '.join(case.packages)}")
    found = measure(case, 256, external=external, package=True)
    print(f"{case.name}: {found.copies:.2f} copies")
    assert found.copies < 1.5

# SPDX-License-Identifier: Apache-2.0
"""The jobs of `test_framework_jobs.py`, in environments with the libraries that they need."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.environment import make_environment, run_slow_tests


@pytest.mark.slow
@pytest.mark.parametrize(
    "libraries",
    [["scikit-learn", "jax"], ["tensorflow-cpu"]],
    ids=lambda libraries: libraries[0],
)
def test_jobs(tmp_path, libraries):
    """scikit-learn, JAX and TensorFlow."""
    python = make_environment(tmp_path / "environment", *libraries)
    run_slow_tests(python, Path(__file__).with_name("test_framework_jobs.py"))

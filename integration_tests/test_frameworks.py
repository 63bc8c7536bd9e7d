# SPDX-License-Identifier: Apache-2.0
"""The jobs of `test_framework_jobs.py`, in environments with the libraries that they need."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.environment import make_environment, run_slow_tests, run_tests


@pytest.mark.slow
@pytest.mark.parametrize(
    "libraries",
    # TenSEAL does not work next to some of the others.
    [["lightning", "tensorboard"], ["scikit-learn", "jax"], ["tensorflow-cpu"], ["tenseal"]],
    ids=lambda libraries: libraries[0],
)
def test_jobs(tmp_path, libraries):
    """Lightning with TensorBoard, scikit-learn, JAX, TensorFlow and homomorphic encryption."""
    python = make_environment(tmp_path / "environment", *libraries)
    run_slow_tests(python, Path(__file__).with_name("test_framework_jobs.py"))


@pytest.mark.slow
def test_trackers(tmp_path):
    """The metrics of rounds in TensorBoard and MLflow."""
    python = make_environment(tmp_path / "environment", "tensorboard", "mlflow-skinny", "alembic")
    run_tests(python, "-m", "slow", "-k", "tensorboard or mlflow", Path(__file__).with_name("test_progress.py"))

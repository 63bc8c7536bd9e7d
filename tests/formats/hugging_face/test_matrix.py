# SPDX-License-Identifier: Apache-2.0
"""Tests that need transformers, in an environment for each of its generations, next to the packages of this one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.environment import ROOT, make_environment, run_slow_tests

LIBRARIES = Path(__file__).with_name("test_libraries.py")
NAMES = ROOT / "tests" / "flare" / "test_model_names.py"
JOBS = ROOT / "integration_tests" / "test_hugging_face.py"
EXAMPLE = ROOT / "integration_tests" / "test_llm_example.py"
HOW_TO = ROOT / "tests" / "documents" / "test_hugging_face.py"
#: What transformers 4 requires in other versions.
UNPINNED = "transformers|tokenizers|huggingface_hub"


@pytest.mark.slow
@pytest.mark.parametrize("transformers", ["transformers", "transformers==4.57.*"])
def test_libraries(tmp_path, transformers):
    """All tests pass with the newest libraries and with the last transformers 4."""
    unpinned = "" if transformers == "transformers" else UNPINNED
    python = make_environment(tmp_path / "environment", transformers, "accelerate", "peft", unpinned=unpinned)
    run_slow_tests(python, LIBRARIES, NAMES, JOBS, EXAMPLE, HOW_TO)

# SPDX-License-Identifier: Apache-2.0
"""Run the tutorial for Hugging Face models. `test_matrix.py` does so where transformers and PEFT are installed."""

from __future__ import annotations

import pytest

from tests.documents.session import run_document
from tests.documents.test_documents import HUGGING_FACE

pytest.importorskip("transformers")
pytest.importorskip("peft")


@pytest.mark.slow
@pytest.mark.usefixtures("disposable_temporary_directory")
def test_document(tmp_path):
    """Every code block runs and prints the output in the document."""
    run_document(HUGGING_FACE, tmp_path)

# SPDX-License-Identifier: Apache-2.0
"""What the documents show is what happens: each of them is carried out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.documents.session import run_document

ROOT = Path(__file__).parents[2]
#: Needs further packages: `test_hugging_face.py` runs it.
HUGGING_FACE = ROOT / "docs" / "how-to" / "hugging-face.md"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted({*(ROOT / "docs").rglob("*.md")} - {HUGGING_FACE})]


@pytest.mark.usefixtures("disposable_temporary_directory")
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_document(document, tmp_path):
    """Every code block runs and prints what the document says, or says why it is not run."""
    run_document(document, tmp_path)

# SPDX-License-Identifier: Apache-2.0
"""What the documents show is what happens: each of them is carried out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.documents.session import run_document

ROOT = Path(__file__).parents[2]
#: Needs further packages: `test_hugging_face.py` runs it.
HUGGING_FACE = ROOT / "docs" / "tutorials" / "hugging-face.md"
#: Four jobs of three rounds.
FIRST_JOB = ROOT / "docs" / "tutorials" / "first-job.md"
FURTHER = {*(ROOT / "docs").rglob("*.md")} - {HUGGING_FACE, FIRST_JOB}
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(FURTHER)]


@pytest.mark.usefixtures("disposable_temporary_directory")
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_document(document, tmp_path):
    """Every code block runs and prints the documented output, or has a reason why it is not run."""
    run_document(document, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("disposable_temporary_directory")
def test_first_job(tmp_path):
    """The tutorial of a job, whose text has the errors."""
    run_document(FIRST_JOB, tmp_path)

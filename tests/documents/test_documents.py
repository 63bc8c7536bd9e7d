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
#: Jobs whose trainers are separate processes.
EXTERNAL_TRAINERS = ROOT / "docs" / "how-to" / "external-trainers.md"
FURTHER = {*(ROOT / "docs").rglob("*.md")} - {HUGGING_FACE, FIRST_JOB, EXTERNAL_TRAINERS}
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(FURTHER)]


@pytest.mark.usefixtures("disposable_temporary_directory")
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_document(document, tmp_path):
    """Every code block runs and prints the documented output, or has a reason why it is not run."""
    run_document(document, tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("disposable_temporary_directory")
@pytest.mark.parametrize("document", [FIRST_JOB, EXTERNAL_TRAINERS], ids=lambda path: str(path.relative_to(ROOT)))
def test_long_document(document, tmp_path):
    """The documents that run several jobs."""
    run_document(document, tmp_path)

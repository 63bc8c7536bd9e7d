# SPDX-License-Identifier: Apache-2.0
"""The records of a trainer in its own process, in the file of its client job, which an environment variable names.

NVFlare has no messages for them, and the client job does not see tensors that pass through it as references.
"""

from __future__ import annotations

import os
from pathlib import Path

from nvflare_lazy._system import anonymous_bytes
from nvflare_lazy._text import get_logger
from nvflare_lazy.records.schema import SampleRecord, TransferRecord
from nvflare_lazy.records.writer import RecordWriter

logger = get_logger(__name__)

#: The variable; set it by hand for a trainer that the client job does not start.
ENVIRONMENT_VARIABLE = "NVFLARE_LAZY_RECORDS"


def set_trainer_records(path: str | None) -> str | None:
    """Name the file for the processes that this one starts; None names no file.

    Returns:
        The previous name, to be restored.
    """
    before = os.environ.pop(ENVIRONMENT_VARIABLE, None)
    if path is not None:
        os.environ[ENVIRONMENT_VARIABLE] = path
    return before


def record_in_trainer(transfer: TransferRecord) -> None:
    """Write a transfer of this process, and its memory after it, if the process is a trainer with a file."""
    path = os.environ.get(ENVIRONMENT_VARIABLE)
    if path:
        transfer.process = "trainer"
        writer = RecordWriter(Path(path), lambda message: logger.warning("%s", message))
        writer.write(transfer)
        writer.write(SampleRecord(memory_bytes=anonymous_bytes(), process="trainer"))

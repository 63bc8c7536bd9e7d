# SPDX-License-Identifier: Apache-2.0
"""The records of a job: memory, scratch, time, bytes and skipped clients, as lines of JSON in its run directory.

`flare` writes them, and the `nvflare-lazy` command reads them. Nothing here depends on NVFlare.
"""

from nvflare_lazy.records.reader import Records, parse_records, read_records
from nvflare_lazy.records.schema import (
    FILE_NAME,
    SCHEMA,
    ContributionRecord,
    EndRecord,
    JobRecord,
    Record,
    RoundRecord,
    SampleRecord,
    TaskRecord,
    TransferRecord,
)
from nvflare_lazy.records.writer import RecordWriter

__all__ = [
    "FILE_NAME",
    "SCHEMA",
    "ContributionRecord",
    "EndRecord",
    "JobRecord",
    "Record",
    "RecordWriter",
    "Records",
    "RoundRecord",
    "SampleRecord",
    "TaskRecord",
    "TransferRecord",
    "parse_records",
    "read_records",
]

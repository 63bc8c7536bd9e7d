# SPDX-License-Identifier: Apache-2.0
"""Reports of jobs from their records: one HTML page, a picture, or the numbers as JSON.

`nvflare-lazy report` uses it. Charts require matplotlib, which the extra `[report]` installs.
"""

from nvflare_lazy.report.answers import Answer, answers
from nvflare_lazy.report.job_report import JobReport, summarize
from nvflare_lazy.report.record_files import RecordFile, read_job

__all__ = ["Answer", "JobReport", "RecordFile", "answers", "read_job", "summarize"]

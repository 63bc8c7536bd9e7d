# SPDX-License-Identifier: Apache-2.0
"""Where the next global model is written: beside the checkpoints if they are ours, else in the job's scratch.

A file beside the checkpoints becomes one by a second name, without a copy. Either way the file goes when nobody refers
to its tensors any more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nvflare.apis.fl_context import FLContext

from nvflare_lazy.flare import job_context
from nvflare_lazy.flare.initial_model import new_file
from nvflare_lazy.scratch import JobScratch, current_job_scratch


class InScratch:
    """A file in a leased directory, which goes with it."""

    def __init__(self, job: JobScratch, nbytes: int) -> None:
        self._download = job.download("aggregate", reserve=nbytes)
        self.path = self._download.path / "model.safetensors"

    def adopt(self) -> None:
        """Count the file, once it is there, instead of what was expected of it."""
        self._download.adopt(self.path.name)


class Outgoing:
    """Makes places for files.

    Args:
        incoming: The persistor's directory for files that are to become checkpoints, if there is one.
    """

    def __init__(self, incoming: Path | None) -> None:
        self._incoming = incoming

    @classmethod
    def of(cls, fl_ctx: FLContext | None) -> Outgoing:
        """Return the places of a job."""
        persistor = job_context.persistor_of(fl_ctx)
        return cls(None if persistor is None else persistor.store.incoming)

    @property
    def directory(self) -> Path | None:
        """The persistor's directory, if there is one."""
        return self._incoming

    def new(self, nbytes: int) -> Any:
        """Return a place for a file of so many bytes: it has a `path`, and keeps the file as long as it lives."""
        if self._incoming is not None:
            return new_file(self._incoming)
        return InScratch(current_job_scratch(), nbytes)

    @staticmethod
    def written(place: Any) -> None:
        """Count a file that was written to a place, if it is in scratch."""
        if isinstance(place, InScratch):
            place.adopt()

# SPDX-License-Identifier: Apache-2.0
"""A component that lets a job report the progress of its rounds at a short interval; for short tests."""

from __future__ import annotations

from nvflare.apis.fl_component import FLComponent

from nvflare_lazy.flare import round_progress


class Impatient(FLComponent):
    """Sets the times when the job is configured."""

    def __init__(self):
        super().__init__()
        round_progress.SECONDS_BETWEEN_LINES = 1.0
        round_progress._SECONDS_BETWEEN_LOOKS = 0.05

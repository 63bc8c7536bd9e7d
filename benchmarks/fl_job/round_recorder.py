# SPDX-License-Identifier: Apache-2.0
"""A component of the server's job that records the package's calls in the second round, for `benchmarks.walk`."""

from __future__ import annotations

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.app_event_type import AppEventType

from benchmarks.walk import recorder


class RoundRecorder(FLComponent):
    """Starts the recorder with the second round, and writes its counts when the third one starts."""

    def __init__(self) -> None:
        super().__init__()
        self._rounds = 0

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == AppEventType.ROUND_STARTED:
            self._rounds += 1
            recorder.recording = self._rounds == 2
        elif event_type == EventType.END_RUN:
            recorder.write()

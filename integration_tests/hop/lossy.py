# SPDX-License-Identifier: Apache-2.0
"""A component of a client whose messages with results are lost at first. Travels in the job's `custom` folder."""

from __future__ import annotations

from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import ServerCommandNames
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.f3.cellnet.defs import ReturnCode
from nvflare.fuel.f3.cellnet.utils import make_reply


class LosesResults(FLComponent):
    """Every first message with the result of a round does not arrive."""

    def __init__(self) -> None:
        super().__init__()
        self._lost = False

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.START_RUN:
            cell = fl_ctx.get_engine().get_cell()
            send = cell.send_request

            def send_or_lose(*args: Any, topic: str, **kwargs: Any) -> Any:
                if topic == ServerCommandNames.SUBMIT_UPDATE:
                    self._lost = not self._lost
                    if self._lost:
                        self.logger.info("lost a result")
                        # Encoded as usual, for a receiver that does not exist.
                        send(*args, **{**kwargs, "topic": "lost", "timeout": 0.1})
                        return make_reply(ReturnCode.TIMEOUT)
                return send(*args, topic=topic, **kwargs)

            cell.send_request = send_or_lose

# SPDX-License-Identifier: Apache-2.0
"""Components for the clients of swarm jobs: one decides who aggregates, one ends the job in the middle of a round."""

from __future__ import annotations

from types import SimpleNamespace

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.ccwf import swarm_client_ctl


class Rotation(FLComponent):
    """Makes the client after this one the next aggregator, where NVFlare takes any."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.START_RUN:
            me = fl_ctx.get_identity_name()
            swarm_client_ctl.random = SimpleNamespace(choice=lambda names: names[(names.index(me) + 1) % len(names)])


class Panic(FLComponent):
    """Ends the job when the first result of the second round is accepted, with another one in scratch."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == AppEventType.AFTER_CONTRIBUTION_ACCEPT and fl_ctx.get_prop(AppConstants.CURRENT_ROUND) == 1:
            self.system_panic("the test ends the job", fl_ctx)

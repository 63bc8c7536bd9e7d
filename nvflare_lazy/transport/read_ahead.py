# SPDX-License-Identifier: Apache-2.0
"""One request ahead of what is being written: how whole items of a stock sender come without waiting in between.

NVFlare does this for consumers that never change the state of a download. Ours does, when it takes an offer of
segments, and finds out only with the first reply whether there is one.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.utils import new_cell_message
from nvflare.fuel.f3.streaming.download_service import OBJ_DOWNLOADER_CHANNEL, OBJ_DOWNLOADER_TOPIC, ProduceRC
from nvflare.fuel.f3.streaming.stream_utils import download_request_thread_pool

from nvflare_lazy.transport import nvflare_private

if TYPE_CHECKING:
    from nvflare_lazy.transport.fetching import Link


class ReadAhead:
    """Asks for the items after those that are here.

    Anything but items is left to NVFlare's own loop, which asks again: it knows what to do about the end, and about
    failures.

    Args:
        link: Where the items come from.
    """

    def __init__(self, link: Link) -> None:
        self._link = link

    def ask(self, state: dict[str, Any]) -> Future[Any] | None:
        """Ask for what comes after `state`, without waiting for it."""
        future: Future[Any] | None = download_request_thread_pool.submit(self._request, state)
        return future

    def take(self, future: Future[Any] | None) -> tuple[dict[str, Any], list[Any]] | None:
        """Wait for the answer; None if it is anything but items."""
        if future is None:
            return None
        reply = future.result()
        payload = reply.payload
        if reply.get_header(MessageHeaderKey.RETURN_CODE) != ReturnCode.OK or not isinstance(payload, dict):
            return None
        state, items = payload.get(nvflare_private.STATE), payload.get(nvflare_private.DATA)
        if payload.get(nvflare_private.STATUS) != ProduceRC.OK:
            return None
        return (state, items) if isinstance(state, dict) and isinstance(items, list) else None

    def _request(self, state: dict[str, Any]) -> Any:
        link = self._link
        payload = {
            nvflare_private.REF_ID: link.ref_id,
            nvflare_private.STATE: state,
            # As NVFlare's loop says it: the end that is answered to this request is not yet the end.
            nvflare_private.CONFIRM_CAPABLE: True,
        }
        return link.cell.send_request(
            channel=OBJ_DOWNLOADER_CHANNEL,
            topic=OBJ_DOWNLOADER_TOPIC,
            target=link.from_fqcn,
            request=new_cell_message({}, payload),
            timeout=link.timeout,
            secure=link.secure,
            optional=link.optional,
            abort_signal=link.abort,
        )

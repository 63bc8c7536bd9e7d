# SPDX-License-Identifier: Apache-2.0
"""`pull_items`: receives whole tensors in NVFlare's format, and requests the next ones while these are written.

NVFlare does this for consumers that never change the state of a download. This package's consumer changes the state
when it accepts an offer of segments, and only the first reply shows whether there is an offer.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.utils import new_cell_message
from nvflare.fuel.f3.streaming.download_service import OBJ_DOWNLOADER_CHANNEL, OBJ_DOWNLOADER_TOPIC, ProduceRC
from nvflare.fuel.f3.streaming.stream_utils import download_request_thread_pool

from nvflare_lazy.errors import ProtocolError
from nvflare_lazy.transport import _nvflare_private

if TYPE_CHECKING:
    from nvflare_lazy.transport._flow_control import Slot
    from nvflare_lazy.transport.receive import PayloadConsumer, RemotePayload


def pull_items(state: dict[str, Any], items: list[Any], download: PayloadConsumer) -> dict[str, Any]:
    """Receive these items, and those after them as long as the sender sends any.

    Returns:
        The state in which NVFlare's own loop continues.
    """
    if not items:
        # The sender offered another way, which was blocked: asked for item 0, it sends items.
        return {_nvflare_private.START: 0, _nvflare_private.COUNT: 0}
    remote = download.remote
    ahead = Prefetch(remote)
    try:
        while True:
            nbytes = _nbytes(items, remote.from_fqcn)
            # The next items are about as large as these; only their arrival would tell.
            ahead.prefetch_if_possible(state, nbytes)
            download.result = download.consume_items(items, download.result)
            download.items += len(items)
            download.count(download.nbytes + nbytes, download.items)
            # Emptied, not just dereferenced: NVFlare's loop keeps the first list until the download is over.
            items.clear()
            ahead.written()
            download.release_slot()
            answer = ahead.take(state)
            if answer is None or remote.abort.triggered:
                return state
            state, items = answer
            if not items:
                download.expect_items()
    finally:
        ahead.release()


def _nbytes(items: list[Any], sender: str) -> int:
    for item in items:
        if not isinstance(item, (bytes, bytearray, memoryview)):
            raise ProtocolError(f"{sender} sent an invalid item: expected bytes, got {type(item).__name__}")
    return sum(map(len, items))


class Prefetch:
    """Requests the next items while the current ones are written.

    Anything but items is left to NVFlare's own loop, which asks again: it knows what to do about the end, and about
    failures. Items take slots: an item is a whole tensor, and several copies of it are in memory until it is written.
    """

    def __init__(self, remote: RemotePayload) -> None:
        self._remote = remote
        self._throttle = remote.runtime.throttle
        self._future: Future[Any] | None = None
        self._size = 0
        self._here: Slot | None = None
        self._ahead: Slot | None = None

    def prefetch_if_possible(self, state: dict[str, Any], size: int) -> None:
        """Request the items after `state`, without waiting for them, if no other transfer waits for a slot.

        `size` is an estimate of the bytes of the answer.
        """
        self._size = max(1, size)
        self._ahead = self._throttle.acquire_if_free(self._size)
        if self._ahead is not None:
            self._future = download_request_thread_pool.submit(self._request, state)

    def written(self) -> None:
        """Release the slot of the items that were written."""
        self._throttle.release(self._here)

    def take(self, state: dict[str, Any]) -> tuple[dict[str, Any], list[Any]] | None:
        """Wait for the answer, after sending the request if it was not sent ahead; None if the answer has no items."""
        if self._ahead is None:
            abort = self._remote.abort
            self._here = self._throttle.acquire(self._size, after=self._here, give_up=lambda: abort.triggered)
            self._future = download_request_thread_pool.submit(self._request, state)
        else:
            self._here, self._ahead = self._ahead, None
        future, self._future = self._future, None
        if future is None:
            return None
        reply = future.result()
        payload = reply.payload
        if reply.get_header(MessageHeaderKey.RETURN_CODE) != ReturnCode.OK or not isinstance(payload, dict):
            return None
        following, items = payload.get(_nvflare_private.STATE), payload.get(_nvflare_private.DATA)
        if payload.get(_nvflare_private.STATUS) != ProduceRC.OK:
            return None
        return (following, items) if isinstance(following, dict) and isinstance(items, list) else None

    def release(self) -> None:
        """Release the slots."""
        self._throttle.release(self._here)
        self._throttle.release(self._ahead)

    def _request(self, state: dict[str, Any]) -> Any:
        remote = self._remote
        payload = {
            _nvflare_private.REF_ID: remote.ref_id,
            _nvflare_private.STATE: state,
            # As NVFlare's loop says it: the end that is answered to this request is not yet the end.
            _nvflare_private.CONFIRM_CAPABLE: True,
        }
        return remote.cell.send_request(
            channel=OBJ_DOWNLOADER_CHANNEL,
            topic=OBJ_DOWNLOADER_TOPIC,
            target=remote.from_fqcn,
            request=new_cell_message({}, payload),
            timeout=remote.timeout,
            secure=remote.secure,
            optional=remote.optional,
            abort_signal=remote.abort,
        )

# SPDX-License-Identifier: Apache-2.0
"""The sender's end of NVFlare's own download protocol: offers segments to those who know them, whole tensors to all.

What a receiver asks for says where it is; so there is nothing to remember about receivers, and no cache that would
grow with how far they are apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvflare.fuel.f3.streaming.download_service import Downloadable, ProduceRC

from nvflare_lazy.transport import nvflare_private, offload, wire
from nvflare_lazy.transport.payload import Payload

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nvflare_lazy.transport.families import Family
    from nvflare_lazy.transport.offload import TransferRuntime
    from nvflare_lazy.transport.whole_items import Turn


class PayloadDownloadable(Downloadable):
    """Named values of one family, to be downloaded by any number of receivers.

    Args:
        values: What to send, by name.
        max_chunk_size: Tensors that together stay below this go in one message to a receiver without this package.
        family: What kind of values they are.
        cell: The cell to answer requests for segments on; without it, none are offered.
        runtime: What the transfers of this process share.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        max_chunk_size: int,
        family: Family,
        cell: Any = None,
        runtime: TransferRuntime | None = None,
    ) -> None:
        super().__init__(values)
        if max_chunk_size < 0:
            raise ValueError(f"max_chunk_size must not be negative, and is {max_chunk_size}")
        self.max_chunk_size = max_chunk_size
        self.size = len(values)
        self._payload = Payload(values, family)
        self._cell = cell
        self._runtime = runtime or offload.runtime
        self._ref_id: str | None = None
        self._turns: dict[str, Turn] = {}

    def set_transaction(self, tx_id: str, ref_id: str) -> None:
        """Start to answer requests for segments."""
        self._ref_id = ref_id
        if self._cell is not None:
            self._runtime.server.listen(self._cell)
            self._runtime.server.offer(ref_id, self._payload)

    def get_item_count(self) -> int:
        """Return the number of tensors."""
        return self.size

    def produce_item(self, index: int) -> bytes | bytearray | memoryview:
        """Return one tensor in the form that NVFlare's own receivers take."""
        return self._payload.stock_item(index)

    def produce(self, state: dict[str, Any] | None, requester: str) -> tuple[str, Any, dict[str, Any]]:
        """Answer one request of NVFlare's protocol; see `Downloadable`."""
        if not state and self.size and self._ref_id is not None and self._cell is not None:
            # No items, and one more key in the state: a stock receiver sends both back and goes on from item 0.
            manifest = self._payload.manifest
            offer = wire.Offer(self.size, manifest.nbytes, len(self._payload.encoded_manifest))
            return ProduceRC.OK, [], {nvflare_private.START: 0, nvflare_private.COUNT: 0, wire.KEY: offer.to_state()}
        start = 0
        if state:
            start = _count(state.get(nvflare_private.START, 0)) + _count(state.get(nvflare_private.COUNT, 0))
        if start >= self.size:
            self._runtime.throttle.end(self._turns.pop(requester, None))
            return ProduceRC.EOF, None, {}
        # What was on its way to this receiver has arrived, or it would not ask.
        before = self._turns.get(requester)
        self._turns[requester] = self._runtime.throttle.take(self._payload.stock_item_nbytes(start), after=before)
        items = [self.produce_item(start)]
        total = len(items[0])
        while start + len(items) < self.size:
            total += self._payload.stock_item_nbytes(start + len(items))
            if total >= self.max_chunk_size:
                break
            items.append(self.produce_item(start + len(items)))
        return ProduceRC.OK, items, {nvflare_private.START: start, nvflare_private.COUNT: len(items)}

    def downloaded_to_one(self, to_receiver: str, status: str) -> None:
        """Count a download by a process behind a forwarding hop for the hop, if the hop was expected."""
        if self._ref_id is not None:
            nvflare_private.finish_for_ancestor(self._ref_id, to_receiver, status)

    def transaction_done(self, transaction_id: str, status: str) -> None:
        """Answer no more requests."""
        if self._ref_id is not None:
            self._runtime.server.withdraw(self._ref_id)

    def release(self) -> None:
        """Let go of the tensors."""
        self._payload.release()
        self.base_obj = None


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"a download cannot go on from {value!r}")
    return value

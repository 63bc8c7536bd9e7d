# SPDX-License-Identifier: Apache-2.0
"""The list of ways of transport for payloads (`WAYS`), best first; add a new one here.

A sender offers a payload in every way that it can; the receiver takes the first way that it recognizes an offer of.
Offers travel in the state that NVFlare's downloads carry; a receiver without this package echoes unknown keys. A way is
a subpackage with a class like `Way`, and one line in `WAYS`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from nvflare_lazy.transport.handoff.way import Handoff
from nvflare_lazy.transport.segments import protocol
from nvflare_lazy.transport.segments.way import Segments

if TYPE_CHECKING:
    from nvflare_lazy.transport._downloadable import Payload
    from nvflare_lazy.transport.offload import TransferRuntime
    from nvflare_lazy.transport.receive import PayloadConsumer


class Way(Protocol):
    """One way in which a payload can travel.

    It keeps no state: objects that all transfers of a process share are in `TransferRuntime.shared()`.
    """

    @property
    def description(self) -> str:
        """Words for the log: how a payload was transferred."""

    def serve(self, payload: Payload, ref_id: str, cell: Any, runtime: TransferRuntime) -> None:
        """Begin to answer requests for a payload at a cell, without keeping the payload alive."""

    def offer(self, payload: Payload, ref_id: str, runtime: TransferRuntime) -> dict[str, Any]:
        """Return what to add to the state of a download of this payload; empty if it cannot travel this way.

        Dictionaries under the same key are merged.
        """

    def withdraw(self, ref_id: str, runtime: TransferRuntime) -> None:
        """Answer no more requests for a payload."""

    def recognize(self, state: dict[str, Any]) -> Any:
        """Return the offer in the state of a download, or None; a sender that sends items offers no other way."""

    def receive(self, offer: Any, download: PayloadConsumer) -> dict[str, Any] | None:
        """Receive a payload.

        Its size is untrusted: `download.tally` checks it before anything is reserved for it.

        Returns:
            The state in which NVFlare's own loop continues, or None if this way is blocked and the next one is tried.
        """

    def answer(
        self, state: dict[str, Any], ref_id: str, receiver: str, runtime: TransferRuntime
    ) -> dict[str, Any] | None:
        """Take what the state of a receiver's request says, such as the one that `receive` returned there.

        Returns:
            The state of a reply without items, or None: then the request is answered as NVFlare's are.
        """


#: If none is offered, or all are blocked, the payload travels in NVFlare's items, which need no offer.
WAYS: tuple[Way, ...] = (Handoff(), Segments())
#: The description of that.
AS_ITEMS = "as whole tensors"


def stated_way(state: dict[str, Any] | None) -> str:
    """Return the description of the way that a receiver states at the end of a download, or "" for an unknown one."""
    fields = (state or {}).get(protocol.KEY)
    stated = fields.get("way") if isinstance(fields, dict) else None
    return next((way.description for way in WAYS if way.description == stated), "")

# SPDX-License-Identifier: Apache-2.0
"""`Handoff`, a way of transport: offers a payload as files on this host, and takes the files of such a payload."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from nvflare_lazy.transport import _nvflare_private
from nvflare_lazy.transport.handoff import wire
from nvflare_lazy.transport.handoff.client import FileDownload
from nvflare_lazy.transport.handoff.server import HandoffServer
from nvflare_lazy.transport.limits import PayloadSize
from nvflare_lazy.transport.segments import protocol
from nvflare_lazy.transport.segments.way import end_state, fetch_manifest

if TYPE_CHECKING:
    from nvflare_lazy.transport._downloadable import Payload
    from nvflare_lazy.transport.offload import TransferRuntime
    from nvflare_lazy.transport.receive import PayloadConsumer


class HandoffOffer(NamedTuple):
    """An offer of files; the manifest is received in segments."""

    segments: protocol.Offer
    rendezvous: wire.RendezvousOffer


class Handoff:
    """Both ends have this package and share a scratch root on one host: the receiver takes files; see `Way`."""

    description = "by handoff"

    def serve(self, payload: Payload, ref_id: str, cell: Any, runtime: TransferRuntime) -> None:
        """Answer requests for files."""
        runtime.shared(HandoffServer).serve(ref_id, payload, cell.core_cell.my_info.fqcn)

    def offer(self, payload: Payload, ref_id: str, runtime: TransferRuntime) -> dict[str, Any]:
        """Return the rendezvous directory of this process."""
        if not runtime.handoff or not payload.names:
            return {}
        fields = runtime.shared(HandoffServer).offer(ref_id, payload, runtime)
        return {protocol.KEY: fields} if fields else {}

    def withdraw(self, ref_id: str, runtime: TransferRuntime) -> None:
        """Take the files back."""
        runtime.shared(HandoffServer).withdraw(ref_id)

    def recognize(self, state: dict[str, Any]) -> HandoffOffer | None:
        """Return the offer."""
        fields = state.get(protocol.KEY)
        segments, rendezvous = protocol.Offer.from_state(fields), wire.RendezvousOffer.from_fields(fields)
        return None if segments is None or rendezvous is None else HandoffOffer(segments, rendezvous)

    def receive(self, offer: HandoffOffer, download: PayloadConsumer) -> dict[str, Any] | None:
        """Take the files, if this process may and can."""
        remote = download.remote
        if not remote.runtime.handoff or not download.takes_files:
            return None
        segments = offer.segments
        download.tally.check(remote.from_fqcn, PayloadSize(segments.nbytes, segments.items))
        files = FileDownload(download, segments.nbytes, lambda: fetch_manifest(segments, download))
        if not files.run(offer.rendezvous):
            download.nbytes = 0
            return None
        download.count(segments.nbytes, segments.items)
        return end_state(segments, download, self.description)

    def answer(
        self, state: dict[str, Any], ref_id: str, receiver: str, runtime: TransferRuntime
    ) -> dict[str, Any] | None:
        """Answer a receiver's proof."""
        proof = wire.proof_from_fields(state.get(protocol.KEY))
        if proof is None:
            return None
        fields = runtime.shared(HandoffServer).answer(ref_id, proof, receiver, runtime)
        return {_nvflare_private.START: 0, _nvflare_private.COUNT: 0, protocol.KEY: fields}

# SPDX-License-Identifier: Apache-2.0
"""`Segments`, a way of transport: offers a payload as ranges of bytes, and receives such a payload."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvflare_lazy._text import get_logger
from nvflare_lazy.errors import ProtocolError, SegmentTimeoutError
from nvflare_lazy.transport import _nvflare_private
from nvflare_lazy.transport.limits import PayloadSize
from nvflare_lazy.transport.segments import manifest as manifests
from nvflare_lazy.transport.segments import protocol
from nvflare_lazy.transport.segments.client import FIRST_NEWS_SECONDS, Inbox, SegmentDownload
from nvflare_lazy.transport.segments.server import SegmentServer

if TYPE_CHECKING:
    from nvflare_lazy.transport._downloadable import Payload
    from nvflare_lazy.transport.offload import TransferRuntime
    from nvflare_lazy.transport.receive import PayloadConsumer

logger = get_logger(__name__)


class Segments:
    """Both ends have this package: the receiver asks for ranges of the payload's bytes; see `Way`."""

    description = "in segments"

    def serve(self, payload: Payload, ref_id: str, cell: Any, runtime: TransferRuntime) -> None:
        """Answer requests for segments."""
        server = runtime.shared(SegmentServer)
        server.listen(cell)
        server.offer(ref_id, payload)

    def offer(self, payload: Payload, ref_id: str, runtime: TransferRuntime) -> dict[str, Any]:
        """Return the numbers of tensors and bytes, and the manifest or its size."""
        if not payload.names:
            return {}
        offer = protocol.Offer.of(len(payload.names), payload.manifest.nbytes, payload.encoded_manifest)
        return {protocol.KEY: offer.to_state()}

    def withdraw(self, ref_id: str, runtime: TransferRuntime) -> None:
        """Answer no more requests."""
        runtime.shared(SegmentServer).withdraw(ref_id)

    def recognize(self, state: dict[str, Any]) -> protocol.Offer | None:
        """Return the offer."""
        return protocol.Offer.from_state(state.get(protocol.KEY))

    def receive(self, offer: protocol.Offer, download: PayloadConsumer) -> dict[str, Any] | None:
        """Download the manifest, check it, and fetch all bytes."""
        try:
            _fetch(offer, download)
        except SegmentTimeoutError as error:
            # Its text, since a handler may keep records, and the error refers to the download.
            logger.warning("%s; falling back to whole-tensor transfer", str(error))
            return None
        return end_state(offer, download, self.description)

    def answer(self, state: dict[str, Any], ref_id: str, receiver: str, runtime: TransferRuntime) -> None:
        """Take the receipts of the last segments."""
        runtime.shared(SegmentServer).prove(receiver, protocol.receipts_from_fields(state.get(protocol.KEY)))


def end_state(offer: protocol.Offer, download: PayloadConsumer, way: str) -> dict[str, Any]:
    """Return the state that ends a download, with the receipts of the last segments and the way, for the records."""
    remote = download.remote
    receipts = remote.runtime.shared(Inbox).receipts.take(remote.cell.core_cell.my_info.fqcn, remote.from_fqcn)
    end = {_nvflare_private.START: offer.items, _nvflare_private.COUNT: 0}
    return {**end, protocol.KEY: {**protocol.receipts_to_fields(receipts), "way": way}}


def fetch_manifest(offer: protocol.Offer, download: PayloadConsumer) -> manifests.Manifest:
    """Return the list of a payload's tensors, checked and counted; it is received once for all ways of transport."""
    if download.manifest is not None:
        return download.manifest
    remote, tally = download.remote, download.tally
    tally.check(remote.from_fqcn, PayloadSize(offer.nbytes, offer.items))
    encoded = _fetch_encoded_manifest(offer, download)
    # What decoding takes for a moment counts as in flight, so that several long lists take turns.
    with remote.runtime.budget.hold(manifests.decoding_cost(offer.items, len(encoded)), remote.raise_if_aborted):
        manifest = manifests.decode(encoded, download.backend, remote.from_fqcn, tally.limits)
        del encoded
        if len(manifest.items) != offer.items or manifest.nbytes != offer.nbytes:
            raise ProtocolError(
                f"{remote.from_fqcn} offers {offer.items} tensors of {offer.nbytes} bytes, but lists "
                f"{len(manifest.items)} of {manifest.nbytes}"
            )
        tally.add(remote.from_fqcn, manifest.size)
    download.manifest = manifest
    return manifest


def _fetch(offer: protocol.Offer, download: PayloadConsumer) -> None:
    manifest = fetch_manifest(offer, download)
    remote = download.remote
    # What the headers of the files take for a moment counts as in flight.
    with remote.runtime.budget.hold(manifests.decoding_cost(offer.items, 0), remote.raise_if_aborted):
        sink = download.open_sink(manifest)
    first_news = None if offer.manifest is None else FIRST_NEWS_SECONDS
    try:
        SegmentDownload(
            remote,
            protocol.DATA,
            manifest.nbytes,
            sink.write,
            progress=download.count,
            first_news=first_news,
            on_slow=sink.release_rest,
        ).run()
    except SegmentTimeoutError:
        # The payload comes in another way, and counts there.
        download.abandon_sink()
        download.nbytes = 0
        download.tally.remove(manifest.size)
        raise
    download.count(manifest.nbytes, len(manifest.items))


def _fetch_encoded_manifest(offer: protocol.Offer, download: PayloadConsumer) -> bytes | memoryview:
    if offer.manifest is not None:
        return offer.manifest
    remote = download.remote
    room = manifests.max_encoded_bytes(download.tally.limits)
    if offer.manifest_nbytes > room:
        raise ProtocolError(
            f"{remote.from_fqcn} offers {offer.items} tensors in a list of {offer.manifest_nbytes} bytes, "
            f"more than the limit of {room}"
        )
    encoded = memoryview(bytearray(offer.manifest_nbytes))

    def write(offset: int, data: memoryview) -> None:
        encoded[offset : offset + len(data)] = data

    SegmentDownload(remote, protocol.MANIFEST, offer.manifest_nbytes, write, first_news=FIRST_NEWS_SECONDS).run()
    return encoded

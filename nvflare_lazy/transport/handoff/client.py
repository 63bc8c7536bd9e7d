# SPDX-License-Identifier: Apache-2.0
"""The receiver's side of handoffs: proves that it is on the sender's host, and takes the files that contain a payload.

A handoff that fails leaves nothing behind, and the payload is received in segments.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.utils import new_cell_message
from nvflare.fuel.f3.streaming.download_service import OBJ_DOWNLOADER_CHANNEL, OBJ_DOWNLOADER_TOPIC, ProduceRC

from nvflare_lazy._text import format_size, get_logger
from nvflare_lazy.errors import ProtocolError, ScratchError, SourceError
from nvflare_lazy.scratch.rendezvous import host_token
from nvflare_lazy.tensors.tensor_file import FileSource
from nvflare_lazy.transport import _nvflare_private
from nvflare_lazy.transport.handoff import wire
from nvflare_lazy.transport.segments import protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvflare_lazy.scratch.rendezvous import VisitedRendezvous
    from nvflare_lazy.tensors.tensor_file import TensorFile
    from nvflare_lazy.transport.receive import PayloadConsumer, RemotePayload
    from nvflare_lazy.transport.segments.manifest import Manifest, ManifestItem

logger = get_logger(__name__)

# A receiver asks again when the rest should be ready at the rate so far, within these limits.
_MIN_WAIT_SECONDS = 0.01
_MAX_WAIT_SECONDS = 0.2
# A sender whose disk takes nothing for this time may still be able to send from memory.
_STALL_SECONDS = 60.0


def visit(offer: wire.RendezvousOffer, remote: RemotePayload) -> VisitedRendezvous | None:
    """Open the directory in which a sender shows its files; None if that is not on this host, or not in this root."""
    if offer.host_token != host_token(offer.nonce):
        return None
    try:
        visited = remote.runtime.scratch.visit(offer.lease)
    except ScratchError as error:
        logger.debug("No handoff from %s: %s", remote.from_fqcn, error)
        return None
    if visited is None:
        logger.debug("No handoff from %s: it uses another scratch root", remote.from_fqcn)
    return visited


class FileDownload:
    """Receives one payload by taking its files.

    Args:
        nbytes: The size of the payload, as offered.
        fetch_manifest: Returns the list of tensors; called while the sender prepares the files.
    """

    def __init__(self, download: PayloadConsumer, nbytes: int, fetch_manifest: Callable[[], Manifest]) -> None:
        self._download = download
        self._remote: RemotePayload = download.remote
        self._nbytes = nbytes
        self._fetch_manifest = fetch_manifest

    def run(self, offer: wire.RendezvousOffer) -> bool:
        """Receive it; false if that is not possible, and nothing is left of the attempt.

        Raises:
            ProtocolError: If the list of tensors is invalid, or larger than the message may be.
            TransferAbortedError: If the download was cancelled.
        """
        visited = visit(offer, self._remote)
        if visited is None:
            return False
        with visited:
            try:
                files = self._wait_for_files(visited)
            except ProtocolError as error:
                return self._give_up(error)
            if files is None:
                return False
            manifest = self._fetch_manifest()
            try:
                files.check(manifest)
                self._take(files, visited, manifest)
            except (ProtocolError, ScratchError, SourceError) as error:
                return self._give_up(error)
        return True

    def _give_up(self, reason: Exception) -> bool:
        logger.info(
            "Receiving %s from %s in segments, not by handoff: %s",
            format_size(self._nbytes),
            self._remote.from_fqcn,
            reason,
        )
        return False

    def _wait_for_files(self, visited: VisitedRendezvous) -> wire.Files | None:
        remote = self._remote
        proof = visited.proof(wire.proof_text(remote.from_fqcn, remote.cell.core_cell.my_info.fqcn, remote.ref_id))
        started = moved = time.monotonic()
        done = 0
        while True:
            reply = self._ask(proof)
            if not isinstance(reply, wire.Wait):
                return reply
            self._fetch_manifest()
            self._download.count(reply.done)
            now = time.monotonic()
            if reply.done > done:
                done, moved = reply.done, now
            elif now - moved > _STALL_SECONDS:
                raise ProtocolError(f"the sender has written nothing for {now - moved:.0f} s")
            rest = (now - started) * (self._nbytes - done) / max(done, 1)
            time.sleep(min(max(rest, _MIN_WAIT_SECONDS), _MAX_WAIT_SECONDS))
            remote.raise_if_aborted()

    def _ask(self, proof: str) -> wire.Files | wire.Wait | None:
        remote = self._remote
        state = {_nvflare_private.START: 0, _nvflare_private.COUNT: 0, protocol.KEY: wire.proof_to_fields(proof)}
        reply = remote.cell.send_request(
            channel=OBJ_DOWNLOADER_CHANNEL,
            topic=OBJ_DOWNLOADER_TOPIC,
            target=remote.from_fqcn,
            request=new_cell_message(
                {},
                {
                    _nvflare_private.REF_ID: remote.ref_id,
                    _nvflare_private.STATE: state,
                    _nvflare_private.CONFIRM_CAPABLE: True,
                },
            ),
            timeout=remote.timeout,
            secure=remote.secure,
            optional=remote.optional,
            abort_signal=remote.abort,
        )
        remote.raise_if_aborted()
        code, payload = reply.get_header(MessageHeaderKey.RETURN_CODE), reply.payload
        if (
            code != ReturnCode.OK
            or not isinstance(payload, dict)
            or payload.get(_nvflare_private.STATUS) != ProduceRC.OK
        ):
            raise ProtocolError(f"the sender does not answer a request for files: {code}")
        following = payload.get(_nvflare_private.STATE)
        fields: Any = following.get(protocol.KEY) if isinstance(following, dict) else None
        return wire.reply_from_fields(fields, self._nbytes)

    def _take(self, files: wire.Files, visited: VisitedRendezvous, manifest: Manifest) -> None:
        opened: list[TensorFile] = []

        def source(item: ManifestItem) -> FileSource:
            index, at = files.place(item)
            return FileSource(opened[index], at, item.nbytes)

        try:
            opened.extend(self._download.open_shown(visited, file) for file in files.files)
            self._download.take_sources(manifest, source)
        except BaseException:
            for taken in opened:
                self._download.drop_shown(taken)
            raise

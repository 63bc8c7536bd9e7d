# SPDX-License-Identifier: Apache-2.0
"""The sender's side of handoffs: offers payloads, and names their files to receivers that prove to be on this host.

Nothing is done for a receiver before its proof: it might be on another host, and the proof costs it nothing.
"""

from __future__ import annotations

import hmac
import secrets
import threading
import weakref
from typing import TYPE_CHECKING, Any

from nvflare_lazy._text import get_logger
from nvflare_lazy.errors import ScratchError
from nvflare_lazy.scratch.rendezvous import host_token
from nvflare_lazy.transport import _nvflare_private
from nvflare_lazy.transport.handoff import wire
from nvflare_lazy.transport.handoff.copies import Copies
from nvflare_lazy.transport.handoff.layout import Layout

if TYPE_CHECKING:
    from nvflare_lazy.scratch.rendezvous import Rendezvous
    from nvflare_lazy.transport._downloadable import Payload
    from nvflare_lazy.transport.offload import TransferRuntime

logger = get_logger(__name__)

_NONCE_BYTES = 16
# A request is answered at once; most payloads are laid out in this time, and their receivers need not ask again.
_PATIENCE_SECONDS = 0.02


class HandoffServer:
    """All payloads that this process may hand over."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._served: dict[str, _Served] = {}
        self._copies = Copies()

    def serve(self, ref_id: str, payload: Payload, sender: str) -> None:
        """Answer requests for the files of this payload, which is not kept alive."""
        with self._lock:
            self._served[ref_id] = _Served(weakref.ref(payload, lambda _: self._served.pop(ref_id, None)), sender)

    def withdraw(self, ref_id: str) -> None:
        """Answer no more requests for it, and take its files back."""
        with self._lock:
            served = self._served.pop(ref_id, None)
        if served is not None and served.layout is not None:
            served.layout.release()

    def offer(self, ref_id: str, payload: Payload, runtime: TransferRuntime) -> dict[str, Any]:
        """Return the fields that offer a payload; empty if this process cannot hand it over."""
        served = self._served.get(ref_id)
        if served is None or payload.manifest.nbytes < wire.MIN_BYTES:
            return {}
        try:
            rendezvous = runtime.scratch.rendezvous()
        except (ScratchError, OSError) as error:
            logger.debug("Offering no handoff: %s", error)
            return {}
        served.rendezvous = rendezvous
        nonce = secrets.token_hex(_NONCE_BYTES)
        return wire.RendezvousOffer(nonce, host_token(nonce), rendezvous.lease).to_fields()

    def answer(self, ref_id: str, proof: str, receiver: str, runtime: TransferRuntime) -> dict[str, Any]:
        """Return the fields of the reply to a receiver's proof."""
        served = self._served.get(ref_id)
        payload = None if served is None else served.payload()
        if served is None or payload is None or served.rendezvous is None:
            return wire.none_to_fields()
        expected = served.rendezvous.proof(wire.proof_text(served.sender, receiver, ref_id))
        if not hmac.compare_digest(expected, proof):
            logger.info("Ignored a request of %s for files, with an invalid proof", receiver)
            return wire.none_to_fields()
        with self._lock:
            if self._served.get(ref_id) is not served:  # withdrawn in the meantime
                return wire.none_to_fields()
            if served.layout is None:
                served.layout = Layout(payload, runtime.scratch, served.rendezvous, self._copies)
        layout = served.layout
        is_laid_out = layout.wait(_PATIENCE_SECONDS)
        if is_laid_out and layout.files is None:
            return wire.none_to_fields()
        self._record_progress(served, payload, ref_id, receiver, layout.done)
        return layout.files.to_fields() if layout.files is not None else wire.wait_to_fields(wire.Wait(layout.done))

    def _record_progress(self, served: _Served, payload: Payload, ref_id: str, receiver: str, done: int) -> None:
        """Count bytes in files as sent, in the progress that NVFlare reports, and to keep the payload available."""
        with self._lock:
            before, served.told[receiver] = served.told.get(receiver, 0), done
        with _nvflare_private.serving(ref_id) as ref:
            patience = _nvflare_private.patience_for(ref_id, receiver, served.sender)
            if ref is None or patience is None or done <= before:
                return
            _nvflare_private.record_sent(ref, receiver, done - before)
            payload.progress.sent(receiver, 0, done, patience)


class _Served:
    """One payload that is offered.

    Attributes:
        payload: The payload, or None if it was dropped.
        sender: The cell that offers it.
        rendezvous: The directory through which it was offered.
        layout: Its files, after the first proof.
        told: The bytes that each receiver was told of.
    """

    def __init__(self, payload: weakref.ref[Payload], sender: str) -> None:
        self.payload = payload
        self.sender = sender
        self.rendezvous: Rendezvous | None = None
        self.layout: Layout | None = None
        self.told: dict[str, int] = {}

# SPDX-License-Identifier: Apache-2.0
"""`Hop`: the payloads that a client job between the server and an external trainer takes itself, to hand them on.

NVFlare lets tensors pass through the client job as references, and trainer and server download from each other. If the
trainer takes and gives files, the client job takes the trainer's result as files and sends it to the server from there:
the trainer need not wait for the server, and a result that was lost on the way is sent again. Afterwards, it also
receives the tasks, and hands them to the trainer as files. Everything else passes through as references.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.streaming.download_service import Consumer, download_object, request_download_chunk

from nvflare_lazy._text import get_logger
from nvflare_lazy.errors import NVFlareLazyError, ProtocolError, TransferAbortedError
from nvflare_lazy.scratch import JobScratch
from nvflare_lazy.transport import _nvflare_private
from nvflare_lazy.transport.handoff import wire
from nvflare_lazy.transport.handoff.client import visit
from nvflare_lazy.transport.handoff.way import Handoff
from nvflare_lazy.transport.receive import note_received
from nvflare_lazy.transport.segments import protocol
from nvflare_lazy.transport.segments.way import Segments

if TYPE_CHECKING:
    from nvflare_lazy.transport.offload import ReceiveMode
    from nvflare_lazy.transport.receive import PayloadConsumer, RemotePayload

logger = get_logger(__name__)


class Hop:
    """The decisions of a client job, one object per process; see `TransferRuntime.shared`.

    Attributes:
        enabled: Whether this process is a client job in which nothing but its trainers uses the tensors. The component
            of the job sets it.
    """

    def __init__(self) -> None:
        self.enabled = False
        # The size of the trainer's last result, if it was taken as files.
        self._result_nbytes = 0
        # Whether the trainer can also take files from the server; None while that is not known.
        self._server_is_near: bool | None = None
        self._warned_of_trainer = False

    def takes(self, source: str, own: str, mode: ReceiveMode, *, has_package: bool) -> bool:
        """Whether this process receives a payload that passes through it, or tries to.

        Args:
            source: The cell that has the payload.
            own: The cell of this process.
            mode: How this process receives.
            has_package: Whether the sender has this package.
        """
        from_trainer = FQCN.is_ancestor(own, source)
        if self.enabled and from_trainer and not has_package:
            self._warn_of_trainer()
        if not (self.enabled and mode.handoff and isinstance(mode.scratch, JobScratch)) or self._server_is_near:
            return False
        if from_trainer:
            if not has_package:
                self._result_nbytes = 0
            return has_package
        # A task and its result are in scratch at the same time.
        from_server = has_package and FQCN.get_root(source) == FQCN.ROOT_SERVER
        return from_server and 0 < 2 * self._result_nbytes <= mode.scratch.free()

    def _warn_of_trainer(self) -> None:
        if not self._warned_of_trainer:
            self._warned_of_trainer = True
            logger.warning(
                "The training script of this site does not use nvflare-lazy: its results take memory in the script and "
                "in the server. Add these lines before flare.init(): import nvflare_lazy; nvflare_lazy.install(). Or "
                "set install_in_trainers=True in the recipe"
            )

    def is_near(self, remote: RemotePayload) -> bool:
        """Whether the server is on this host and has the same scratch root: then it and the trainer need no hop.

        Files go from one to the other, which takes less time than through this process.
        """
        if self._server_is_near is None:
            offer = Handoff().recognize(_first_state(remote))
            if offer is None:
                return False
            visited = visit(offer.rendezvous, remote)
            self._server_is_near = visited is not None
            if visited is not None:
                visited.close()
        return bool(self._server_is_near)

    def take_result(self, consumer: PayloadConsumer, remote: RemotePayload) -> bool:
        """Take the result of a trainer as files; false if it stays where it is, unchanged and available to others.

        A result that is too small for files is received in segments.

        Raises:
            TransferError: If the trainer no longer answers.
        """
        started = time.monotonic()
        try:
            with _nvflare_private.source_signal(remote.cell, remote.from_fqcn, remote.ref_id, remote.abort) as signal:
                attached = consumer.attach(replace(remote, abort=signal))
                end = _receive(consumer, _first_state(attached))
                if end is not None:
                    consumer.finish()
                    _confirm(attached, end)
        except TransferAbortedError:
            consumer.discard()
            raise
        except (NVFlareLazyError, OSError) as error:
            logger.info("Forwarding a reference to the result of %s: %s", remote.from_fqcn, error)
            end = None
        if end is None:
            consumer.discard()
            self._result_nbytes = 0
            # Raises if the trainer is gone: NVFlare then fails its task, instead of waiting for a result of an ended
            # process.
            _first_state(remote)
            return False
        if consumer.way == Handoff.description:
            self._result_nbytes = consumer.nbytes
        note_received(consumer, remote, started)
        return True


def _receive(consumer: PayloadConsumer, state: dict[str, Any]) -> dict[str, Any] | None:
    """Take the files that the state of a download offers; return the state that ends it, or None."""
    handoff, segments = Handoff(), Segments()
    files, parts = handoff.recognize(state), segments.recognize(state)
    if files is not None:
        consumer.way = handoff.description
        end = handoff.receive(files, consumer)
    elif parts is not None and parts.nbytes < wire.MIN_BYTES:
        consumer.way = segments.description
        end = segments.receive(parts, consumer)
    else:
        end = None
    if end is not None:
        end[protocol.KEY].update(wire.for_all_to_fields())
    return end


def _first_state(remote: RemotePayload) -> dict[str, Any]:
    """Return the first answer of the sender, in the state of the download; the download need not be continued."""
    reply = request_download_chunk(
        remote.from_fqcn,
        remote.ref_id,
        None,
        remote.timeout,
        remote.cell,
        abort_signal=remote.abort,
        secure=remote.secure,
        optional=remote.optional,
    )
    remote.raise_if_aborted()
    code, payload = reply.get_header(MessageHeaderKey.RETURN_CODE), reply.payload
    state = payload.get(_nvflare_private.STATE) if code == ReturnCode.OK and isinstance(payload, dict) else None
    if not isinstance(state, dict):
        raise ProtocolError(f"{remote.from_fqcn} does not answer a request for a download: {code}")
    return state


def _confirm(remote: RemotePayload, end: dict[str, Any]) -> None:
    """Tell the sender that its payload was received: for all that it expects."""
    download_object(
        from_fqcn=remote.from_fqcn,
        ref_id=remote.ref_id,
        per_request_timeout=remote.timeout,
        cell=remote.cell,
        consumer=_LastRequest(end),
        secure=remote.secure,
        optional=remote.optional,
        abort_signal=remote.abort,
    )


class _LastRequest(Consumer):
    """Ends a download whose payload is here already."""

    def __init__(self, end: dict[str, Any]) -> None:
        super().__init__()
        self._end = end

    def consume(self, ref_id: str, state: dict[str, Any], data: Any) -> dict[str, Any]:
        """Return the state that asks for nothing more."""
        return self._end

    def download_completed(self, ref_id: str) -> None:
        """Do nothing: it was complete before."""

    def download_failed(self, ref_id: str, reason: str) -> None:
        """Log it: the payload is here, and only the trainer cannot know."""
        logger.warning("Cannot confirm that a result was received: %s", reason)

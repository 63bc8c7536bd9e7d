# SPDX-License-Identifier: Apache-2.0
"""The receiver's side of a download: receives one payload, in the best way that the sender offers.

NVFlare's `download_object` makes the first contact, retries, confirms that everything has arrived, and tells the sender
when the download ends early. Everything between the first answer and the last is done here.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from nvflare.apis.signal import Signal
from nvflare.fuel.f3.streaming.cacheable import ItemConsumer
from nvflare.fuel.f3.streaming.download_service import download_object

from nvflare_lazy._text import format_size, get_logger
from nvflare_lazy.errors import (
    NVFlareLazyError,
    PeerLostError,
    ProtocolError,
    TransferAbortedError,
    TransferError,
)
from nvflare_lazy.records import TransferRecord
from nvflare_lazy.transport import _nvflare_private, ways
from nvflare_lazy.transport._flow_control import FIRST_ANSWER_BYTES
from nvflare_lazy.transport.limits import PayloadLimits, PayloadSize, PayloadTally
from nvflare_lazy.transport.nvflare_items.pull import pull_items
from nvflare_lazy.transport.running_downloads import RunningDownloads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nvflare_lazy.scratch.rendezvous import VisitedRendezvous
    from nvflare_lazy.tensors.tensor_file import FileSource, TensorFile
    from nvflare_lazy.transport._backends import ArrayBackend
    from nvflare_lazy.transport._flow_control import Slot
    from nvflare_lazy.transport._memory_consumer import Sink
    from nvflare_lazy.transport.handoff.wire import ShownFile
    from nvflare_lazy.transport.offload import TransferRuntime
    from nvflare_lazy.transport.segments.manifest import Manifest, ManifestItem

T = TypeVar("T")

logger = get_logger(__name__)

_PROGRESS_SECONDS = 5.0
_MAX_REPLIES_WITHOUT_ITEMS = 8
# What NVFlare's loop raises if a reply is not what it expects, such as numbers instead of items.
_NVFLARE_STUMBLES = (AssertionError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True)
class RemotePayload:
    """A payload at another cell, and how to reach that cell.

    Attributes:
        runtime: What the transfers of this process share.
        cell: The cell of this process.
        from_fqcn: The cell that has the payload.
        ref_id: What NVFlare calls the payload.
        timeout: Seconds without news after which the sender counts as lost.
        secure: Whether messages are encrypted end to end.
        optional: Whether NVFlare shall be quiet about messages that cannot be sent.
        abort: A signal to watch, or None.
        tally: What the message of the payload has brought so far. Default: nothing, within the limits of this process.
    """

    runtime: TransferRuntime = field(repr=False)
    cell: Any
    from_fqcn: str
    ref_id: str
    timeout: float = 600.0
    secure: bool = False
    optional: bool = False
    abort: Any = None
    tally: PayloadTally | None = None

    def raise_if_aborted(self) -> None:
        """Raise TransferAbortedError if the signal was triggered."""
        if self.abort is not None and self.abort.triggered:
            reason = getattr(self.abort, "value", None)
            why = f": {reason}" if isinstance(reason, str) and reason else ""
            raise TransferAbortedError(f"the transfer from {self.from_fqcn} was cancelled{why}")


class PayloadConsumer(ItemConsumer):
    """Receives one payload; subclasses decide where to.

    Attributes:
        backend: Kind of the received values.
        error: Reason of the failure, as text; otherwise None.
        failure: Reason of the failure, as an exception.
        result: Received values.
        nbytes: Bytes received so far.
        items: Whole tensors received so far; not counted in other ways of transport.
        way: Way of transport, for the log.
        place: Location of the values, for the log.
        progress: Receives the progress, or None.
        tally: Items and bytes that the message has brought so far, within its limits.
        manifest: List of the payload's tensors, once received.
    """

    # The state of an offer that was taken is not the state that was offered.
    supports_pipelining = False
    place = "in memory"

    def __init__(self, backend: ArrayBackend) -> None:
        super().__init__()
        self.backend = backend
        self.error: str | None = None
        self.failure: BaseException | None = None
        self.result: Any = None
        self.nbytes = 0
        self.items = 0
        self.way = ""
        self.progress: ProgressRelay | None = None
        self.tally = PayloadTally(PayloadLimits())
        self.manifest: Manifest | None = None
        self._remote: RemotePayload | None = None
        self._replies_without_items = 0
        self._sender = "the sender"
        self._cancel = _LinkedSignal()
        self._first_answer: Slot | None = None

    # ---- what a subclass does ----------------------------------------------------------------------------------

    @abstractmethod
    def consume_items(self, items: list[Any], result: Any) -> Any:
        """Take whole tensors in NVFlare's form and return the updated result."""

    @abstractmethod
    def open_sink(self, manifest: Manifest) -> Sink:
        """Return what takes the bytes of these tensors."""

    @abstractmethod
    def abandon_sink(self) -> None:
        """Undo `open_sink`; nothing was written."""

    @property
    def takes_files(self) -> bool:
        """Whether `open_shown` and `take_sources` may be used instead of `open_sink`."""
        return True

    @abstractmethod
    def open_shown(self, visited: VisitedRendezvous, shown: ShownFile) -> TensorFile:
        """Open a file that the sender shows, so that its tensors may be part of the result.

        Raises:
            ScratchError: If that is not possible; nothing is left of the file.
        """

    def drop_shown(self, file: TensorFile) -> None:
        """Undo `open_shown`."""
        file.close()

    @abstractmethod
    def take_sources(self, manifest: Manifest, source_of: Callable[[ManifestItem], FileSource]) -> None:
        """Take all tensors, each from its place in an open file.

        Raises:
            SourceError: If one cannot be read; nothing has been taken then.
        """

    @abstractmethod
    def finish(self) -> None:
        """Complete the result: everything has arrived."""

    def discard(self) -> None:
        """Discard the part that has arrived: the rest will not."""

    def unpack(self, item: Any) -> Iterator[tuple[str, Any, tuple[int, ...], memoryview]]:
        """Read name, dtype, shape and bytes of each value in an item in NVFlare's format, within the limits.

        Raises:
            ProtocolError: If the item contradicts its header, or exceeds the limits of the message.
        """
        for name, dtype, shape, data in self.backend.unpack_item(item, self._sender):
            self.tally.add(self._sender, PayloadSize(len(data), 1, len(name.encode())))
            yield name, dtype, shape, data

    @property
    def remote(self) -> RemotePayload:
        """Where the payload is."""
        if self._remote is None:
            raise TransferError("this consumer is used without a sender")
        return self._remote

    # ---- what NVFlare calls ------------------------------------------------------------------------------------

    def attach(self, remote: RemotePayload, progress: ProgressRelay | None = None) -> RemotePayload:
        """Set the location of the payload; without it, only items in NVFlare's format are received."""
        self._cancel = _LinkedSignal(parent=remote.abort)
        self._remote = replace(remote, abort=self._cancel)
        self._sender = remote.from_fqcn
        self.tally = remote.tally or PayloadTally(remote.runtime.limits)
        self.progress = progress
        return self._remote

    def cancel(self, reason: str) -> None:
        """Call the download off, from any thread."""
        self._cancel.trigger(reason)

    def count(self, nbytes: int, items: int | None = None) -> None:
        """Set the totals received so far. Pass None as `items` while their number is unknown."""
        self.nbytes = nbytes
        if self.progress is not None:
            self.progress.received(nbytes, items)

    def acquire_slot(self) -> None:
        """Wait for a slot for the first answer, unless that is known to be small.

        A sender without this package sends a whole tensor in it. A sender that has offered segments before does so
        again: its downloads do not queue behind slow ones.
        """
        remote = self._remote
        if remote is not None and remote.from_fqcn not in remote.runtime.senders_with_package:
            self._first_answer = remote.runtime.throttle.acquire(FIRST_ANSWER_BYTES)

    def release_slot(self) -> None:
        """Release the slot: the first answer is no longer in memory.

        Also without a slot, since every download is an occasion to look at the memory: a process that returned all free
        memory has to keep buffers again soon. Otherwise a federated job took 5 % more processor time.
        """
        if self._remote is not None:
            self._remote.runtime.throttle.release(self._first_answer)

    def consume(self, ref_id: str, state: dict[str, Any], data: Any) -> dict[str, Any]:
        """Take one reply of the sender; see `Consumer`."""
        try:
            return self._consume(state, data)
        except Exception as error:
            self.failure = error
            raise

    def _consume(self, state: Any, data: Any) -> dict[str, Any]:
        if not isinstance(data, list) or not isinstance(state, dict):
            raise ProtocolError(
                f"{self._sender} sent an invalid reply: expected a list of items and a state, "
                f"got {type(data).__name__} and {type(state).__name__}"
            )
        if self._remote is None:
            self.result = self.consume_items(data, self.result)
            return state
        if self.way not in ("", ways.AS_ITEMS):
            raise ProtocolError(f"{self._sender} continues after the payload that it offered was received")
        if not data:
            self.expect_items()
            # An offer, and not a whole tensor.
            self._remote.runtime.senders_with_package.add(self._sender)
            self.release_slot()
            for way in () if self.way else ways.WAYS:
                offer = way.recognize(state)
                if offer is not None:
                    following = way.receive(offer, self)
                    if following is not None:
                        self.way = way.description
                        return following
        self.way = ways.AS_ITEMS
        return pull_items(state, data, self)

    def expect_items(self) -> None:
        """Count a reply without items: a sender with this package sends one first, and no sender sends many."""
        self._replies_without_items += 1
        if self._replies_without_items > _MAX_REPLIES_WITHOUT_ITEMS:
            raise ProtocolError(f"{self._sender} sent {self._replies_without_items} replies without an item")

    def download_completed(self, ref_id: str) -> None:
        """Complete the result."""
        try:
            self.finish()
        except Exception as error:
            self._fail(error)
            raise

    def download_failed(self, ref_id: str, reason: str) -> None:
        """Discard the part that has arrived."""
        error = self.failure
        if error is None:
            kind = TransferAbortedError if self._cancel.triggered else PeerLostError
            error = kind(f"the download from {self._sender} failed: {reason}")
        self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        self.error = str(error) or type(error).__name__
        self.result = None
        self.discard()


def receive(consumer: PayloadConsumer, remote: RemotePayload, progress_cb: Callable[..., None] | None = None) -> Any:
    """Download a remote payload, and return the consumer's result.

    Raises:
        TransferError: Or another error of this package, if it fails; nothing is left of it then.
    """
    started = time.monotonic()
    relay = None if progress_cb is None else ProgressRelay(progress_cb)
    try:
        with _nvflare_private.source_signal(remote.cell, remote.from_fqcn, remote.ref_id, remote.abort) as signal:
            attached = consumer.attach(replace(remote, abort=signal), relay)
            with remote.runtime.shared(RunningDownloads).running(consumer):
                consumer.acquire_slot()
                download_object(
                    from_fqcn=remote.from_fqcn,
                    ref_id=remote.ref_id,
                    consumer=consumer,
                    per_request_timeout=remote.timeout,
                    cell=remote.cell,
                    secure=remote.secure,
                    optional=remote.optional,
                    abort_signal=attached.abort,
                    progress_cb=relay,
                )
    except Exception as error:
        if consumer.failure is None:
            consumer.failure = error
            if isinstance(error, _NVFLARE_STUMBLES):
                what = f"{type(error).__name__}: {error}"
                consumer.failure = ProtocolError(f"invalid reply of {remote.from_fqcn}: {what}")
                consumer.failure.__cause__ = error
    finally:
        consumer.release_slot()
    failure = consumer.failure
    if failure is None:
        note_received(consumer, remote, started)
        return consumer.result
    consumer.discard()
    consumer.result = None
    if isinstance(failure, NVFlareLazyError):
        raise failure
    raise TransferError(f"the download from {remote.from_fqcn} failed: {failure}") from failure


def note_received(consumer: PayloadConsumer, remote: RemotePayload, started: float) -> None:
    """Count a payload that was received, and log it; `started` is the time of `time.monotonic()` before it."""
    seconds = time.monotonic() - started
    remote.runtime.record_transfer(
        TransferRecord(
            direction="received",
            peer=remote.from_fqcn,
            nbytes=consumer.nbytes,
            seconds=round(seconds, 3),
            way=consumer.way,
        )
    )
    logger.info(
        "Received %s from %s in %.2f s, %s, %s",
        format_size(consumer.nbytes),
        remote.from_fqcn,
        seconds,
        consumer.way,
        consumer.place,
    )


def outcome(download: Callable[[], T]) -> tuple[str | None, T | None]:
    """Return an error message or None, and the downloaded value or None, as NVFlare's own functions do."""
    try:
        return None, download()
    except NVFlareLazyError as error:
        return str(error), None


class ProgressRelay:
    """Reports the progress of a download to NVFlare's callback, in one sequence for all ways of transport."""

    def __init__(self, callback: Callable[..., None]) -> None:
        self._callback = callback
        self._lock = threading.Lock()
        self._sequence = 0
        self._bytes = self._told_bytes = 0
        self._items: int | None = None
        self._told = 0.0
        self._ref_id: Any = None

    def __call__(self, **event: Any) -> None:
        """Pass an event of `download_object` on, with the totals: its own loop sees only the first reply."""
        self._ref_id = event.get("ref_id")
        self._report(event)

    def received(self, nbytes: int, items: int | None = None) -> None:
        """Set the totals, and report them after some time. `items` may be None while their number is unknown."""
        self._bytes, self._items = nbytes, items
        if nbytes > self._told_bytes and time.monotonic() - self._told >= _PROGRESS_SECONDS:
            self._report({"ref_id": self._ref_id, "state": "active", "timestamp": time.time()})

    def _report(self, event: dict[str, Any]) -> None:
        with self._lock:
            self._sequence += 1
            self._told, self._told_bytes = time.monotonic(), self._bytes
            totals = {"bytes_done": self._bytes, "items_done": self._items, "sequence": self._sequence}
            try:
                self._callback(**{**event, **totals})
            except Exception as error:
                logger.warning("A progress callback failed: %s", error)


class _LinkedSignal(Signal):
    """A signal that also knows why its parent was triggered."""

    @property
    def value(self) -> Any:
        return _nvflare_private.reason_of(self)

# SPDX-License-Identifier: Apache-2.0
"""Receipts: a receiver proves which data it has read, and a sender limits the bytes that are not proven.

When messages pass through another process, only that process sees that a receiver does not read, and queues what the
sender gives it. Each data message therefore carries a random number, its receipt, and the receiver returns the receipts
of read messages with its next request. A receiver that proves nothing is sent one window, and then very little.
"""

from __future__ import annotations

import os
import threading
import time
from typing import NamedTuple

_RECEIPT_BYTES = 8
# The most that a site may have unproven: some downloads at once, or one whose data got lost. The rest is for transfers
# with nothing unproven, one message each, so that what others have lost or do not read stops no download.
# A process that forwards messages has each in memory three times.
_MAX_UNPROVEN_BYTES = 20 << 20
_RESERVED_BYTES = 4 << 20
#: What one transfer may have unproven.
MAX_TRANSFER_BYTES = _MAX_UNPROVEN_BYTES - _RESERVED_BYTES
# What a message counts at least. A process that forwards messages may need a thread for each, and has a hundred.
_MIN_MESSAGE_BYTES = 512 << 10
# A receipt proves that messages which were sent this long before have arrived as well, or are lost: the receiver
# repeats a request after this time. Messages that follow one another closely may overtake each other.
_OVERTAKING_SECONDS = 30.0
# At this rate, unproven messages count as lost without any receipt. It is slower than what keeps a payload available.
_LOST_BYTES_PER_SECOND = 8 << 10
# Sites and senders that are remembered; receipts that are kept for one sender, more than it leaves unproven.
_MAX_SITES = 4096
_MAX_RECEIPTS = 256


class _Message(NamedTuple):
    receiver: str
    transfer: str
    nbytes: int
    sent: float


class _Site:
    """What the cells of one site have been sent and not proven, by receipt, the oldest first."""

    __slots__ = ("forgotten", "messages", "nbytes")

    def __init__(self) -> None:
        self.messages: dict[bytes, _Message] = {}
        self.nbytes = 0
        self.forgotten = 0.0  # until when messages count as lost

    def remove(self, receipt: bytes) -> _Message | None:
        message = self.messages.pop(receipt, None)
        if message is not None:
            self.nbytes -= message.nbytes
        return message

    def forget_lost(self, now: float) -> None:
        while self.messages:
            receipt, oldest = next(iter(self.messages.items()))
            due = max(self.forgotten, oldest.sent) + oldest.nbytes / _LOST_BYTES_PER_SECOND
            if due > now:
                return
            self.forgotten = due
            self.remove(receipt)


class UnprovenData:
    """The data messages of this process that wait for their receipts. The cells of a site count together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sites: dict[str, _Site] = {}

    def permits(self, receiver: str, transfer: str, nbytes: int) -> bool:
        """Whether a message of this size may be sent."""
        with self._lock:
            site = self._sites.get(_site_of(receiver))
            return site is None or self._fits(site, transfer, nbytes)

    def add(self, receiver: str, transfer: str, nbytes: int) -> bytes | None:
        """Count a message before it is sent; return its receipt, or None if it may not be sent."""
        name = _site_of(receiver)
        with self._lock:
            site = self._sites.get(name)
            if site is None:
                if len(self._sites) >= _MAX_SITES:
                    del self._sites[next(iter(self._sites))]
                site = self._sites[name] = _Site()
            elif not self._fits(site, transfer, nbytes):
                return None
            receipt = os.urandom(_RECEIPT_BYTES)
            counted = max(nbytes, _MIN_MESSAGE_BYTES)
            site.messages[receipt] = _Message(receiver, transfer, counted, time.monotonic())
            site.nbytes += counted
            return receipt

    def discard(self, receiver: str, receipt: bytes) -> None:
        """Count a message no longer: it was not sent."""
        with self._lock:
            site = self._sites.get(_site_of(receiver))
            if site is not None:
                site.remove(receipt)

    def prove(self, receiver: str, receipts: tuple[bytes, ...]) -> None:
        """Take the receipts that a receiver returns; those of other sites mean nothing."""
        with self._lock:
            site = self._sites.get(_site_of(receiver))
            if site is None:
                return
            latest: dict[str, float] = {}
            for receipt in receipts:
                message = site.remove(receipt)
                if message is not None:
                    latest[message.receiver] = max(message.sent, latest.get(message.receiver, 0.0))
            for receipt, message in list(site.messages.items()) if latest else ():
                if message.sent + _OVERTAKING_SECONDS <= latest.get(message.receiver, 0.0):
                    site.remove(receipt)
            if not site.messages:
                del self._sites[_site_of(receiver)]

    def _fits(self, site: _Site, transfer: str, nbytes: int) -> bool:
        site.forget_lost(time.monotonic())
        total = site.nbytes + max(nbytes, _MIN_MESSAGE_BYTES)
        return total <= MAX_TRANSFER_BYTES or (
            total <= _MAX_UNPROVEN_BYTES and all(message.transfer != transfer for message in site.messages.values())
        )


class ReceiptsToReturn:
    """Receipts of read messages, for the next requests of this process; kept only for senders that it has asked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._receipts: dict[tuple[str, object], list[bytes]] = {}

    def add(self, cell: str, sender: object, receipt: bytes) -> None:
        """Keep a receipt that a cell of this process got."""
        with self._lock:
            receipts = self._receipts.get((cell, sender)) if isinstance(sender, str) else None
            if receipts is not None and len(receipts) < _MAX_RECEIPTS:
                receipts.append(receipt)

    def take(self, cell: str, sender: str) -> tuple[bytes, ...]:
        """Return the receipts that the cell has to return to this sender, once."""
        with self._lock:
            receipts = self._receipts.pop((cell, sender), [])
            self._receipts[cell, sender] = []
            if len(self._receipts) > _MAX_SITES:
                del self._receipts[next(iter(self._receipts))]
            return tuple(receipts)


def _site_of(cell: str) -> str:
    return cell.partition(".")[0]

# SPDX-License-Identifier: Apache-2.0
"""The messages between two processes with this package: the offer, requests for ranges of bytes, and data.

The offer is part of the state in NVFlare's own download protocol; a receiver without this package echoes it unread.
Requests and data are separate messages on NVFlare's download channel, so that all guards of a site on that channel also
apply to them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nvflare.fuel.f3.streaming.download_service import OBJ_DOWNLOADER_CHANNEL

from nvflare_lazy._text import quoted
from nvflare_lazy.errors import ProtocolError

if TYPE_CHECKING:
    from nvflare.fuel.f3.message import Message

CHANNEL = OBJ_DOWNLOADER_CHANNEL
REQUEST_TOPIC = "nvflare_lazy__request"
DATA_TOPIC = "nvflare_lazy__data"
# The key of the offer in a download's state, and of our part of a message's headers.
KEY = "nvflare_lazy"
VERSION = 2

# One message, measured by benchmarks.transfer: half as much takes a fifth more time, since each message has its price;
# twice as much takes even more, since it does not stay in the processor's cache from one copy to the next.
SEGMENT_BYTES = 2 << 20
# What a sender answers at most, whatever a later release asks for: NVFlare's http driver closes the connection on a
# message of 4 MiB, headers included.
MAX_REQUEST_BYTES = (4 << 20) - (64 << 10)
# A manifest up to this size is part of the offer, which saves the round trip of a separate request.
MAX_OFFERED_MANIFEST_BYTES = 16 << 10
_MAX_TEXT = 200
_MAX_ITEM_TEXT = 4096
_MAX_RECEIPTS = 256
_MAX_RECEIPT_BYTES = 16

# What a request can be about.
MANIFEST = "manifest"
DATA = "data"
ITEM = "item"


@dataclass(frozen=True)
class Offer:
    """A sender's description of a payload, before it sends any of it; with the manifest, if that is small."""

    items: int
    nbytes: int
    manifest_nbytes: int
    manifest: bytes | None = None

    @classmethod
    def of(cls, items: int, nbytes: int, manifest: bytes) -> Offer:
        """Describe a payload by its encoded manifest."""
        return cls(items, nbytes, len(manifest), manifest if len(manifest) <= MAX_OFFERED_MANIFEST_BYTES else None)

    def to_state(self) -> dict[str, Any]:
        """Return it as it travels."""
        state = {"v": VERSION, "items": self.items, "nbytes": self.nbytes, "manifest": self.manifest_nbytes}
        return state if self.manifest is None else {**state, "list": self.manifest}

    @classmethod
    def from_state(cls, state: object) -> Offer | None:
        """Read an offer, or return None without an offer that this release supports."""
        if not isinstance(state, dict):
            return None
        version = state.get("v")
        if type(version) is not int or version != VERSION:
            return None
        items, nbytes, manifest = (_count(state.get(key)) for key in ("items", "nbytes", "manifest"))
        if items is None or nbytes is None or manifest is None:
            raise ProtocolError(f"invalid offer: {quoted(state)}")
        listed = state.get("list")
        complete = isinstance(listed, bytes) and len(listed) == manifest <= MAX_OFFERED_MANIFEST_BYTES
        return cls(items, nbytes, manifest, listed if complete else None)


@dataclass(frozen=True)
class Request:
    """Ask for a range of bytes of the manifest, of the run of all bytes, or of one item.

    `transfer` is the receiver's own number for the transfer; the bytes also carry it. `receipts` are the receipts of
    the messages that the receiver has read since its last request.
    """

    transfer: str
    ref_id: str
    what: str
    start: int
    count: int
    item: str | None = None
    receipts: tuple[bytes, ...] = field(default=(), compare=False)

    def to_headers(self) -> dict[str, Any]:
        """Return it as it travels."""
        fields = {"to": self.transfer, "ref": self.ref_id, "what": self.what, "at": self.start, "n": self.count}
        item = {} if self.item is None else {"item": self.item}
        return {KEY: {**fields, **item, **receipts_to_fields(self.receipts)}}

    @classmethod
    def from_message(cls, message: Message) -> Request:
        """Read a request, believing nothing."""
        fields = message.get_header(KEY)
        if not isinstance(fields, dict):
            raise ProtocolError("invalid request: missing fields")
        transfer, ref_id, what = (_text(fields.get(key)) for key in ("to", "ref", "what"))
        start, count = (_count(fields.get(key)) for key in ("at", "n"))
        item = fields.get("item")
        if (
            transfer is None
            or ref_id is None
            or what is None
            or start is None
            or count is None
            or count > MAX_REQUEST_BYTES
            or not (item is None or _text(item, _MAX_ITEM_TEXT) is not None)
        ):
            raise ProtocolError(f"invalid request: {quoted(fields)}")
        return cls(transfer, ref_id, what, start, count, item, receipts_from_fields(fields))


@dataclass(frozen=True)
class Data:
    """Requested bytes, or the reason for their absence; and the receipt that the receiver returns."""

    transfer: str
    start: int
    error: str | None = None
    receipt: bytes | None = None

    def to_headers(self) -> dict[str, Any]:
        """Return it as it travels."""
        fields: dict[str, Any] = {"to": self.transfer, "at": self.start}
        others = {"error": self.error, "receipt": self.receipt}
        return {KEY: fields | {key: value for key, value in others.items() if value is not None}}

    @classmethod
    def from_message(cls, message: Message) -> Data | None:
        """Read the fields of data, or return None if the message has no valid ones."""
        fields = message.get_header(KEY)
        if not isinstance(fields, dict):
            return None
        transfer, start, error = _text(fields.get("to")), _count(fields.get("at")), fields.get("error")
        if transfer is None or start is None:
            return None
        if error is not None:
            error = error[:1000] if isinstance(error, str) else quoted(error)
        receipt = fields.get("receipt")
        return cls(transfer, start, error, receipt if _is_receipt(receipt) else None)


def receipts_to_fields(receipts: tuple[bytes, ...]) -> dict[str, Any]:
    """Return receipts as they travel to their sender."""
    return {"got": list(receipts)} if receipts else {}


def receipts_from_fields(fields: object) -> tuple[bytes, ...]:
    """Read the receipts that a receiver returns; invalid ones are ignored."""
    receipts = fields.get("got") if isinstance(fields, dict) else None
    return tuple(filter(_is_receipt, receipts[:_MAX_RECEIPTS])) if isinstance(receipts, list) else ()


def _is_receipt(value: object) -> bool:
    return isinstance(value, bytes) and len(value) <= _MAX_RECEIPT_BYTES


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and type(value) is int and 0 <= value < 1 << 62 else None


def _text(value: object, limit: int = _MAX_TEXT) -> str | None:
    return value if isinstance(value, str) and len(value) <= limit else None

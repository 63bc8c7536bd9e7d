# SPDX-License-Identifier: Apache-2.0
"""Which payloads a message refers to: while it is written, and while it is read.

The first payload's placeholders are as NVFlare writes them, those of further ones say whose they are.
"""

from __future__ import annotations

from typing import Any

from nvflare_lazy.transport import _nvflare_private

_SEPARATOR = "@"


class OutgoingPayloads:
    """The payloads that a message refers to, in the order in which they came up."""

    def __init__(self) -> None:
        self.payloads: dict[str, str | None] = {}

    def placeholder(self, ref_id: str, fqcn: str | None, item_id: str) -> dict[str, Any]:
        """Return what stands in the message for an item."""
        self.payloads.setdefault(ref_id, fqcn)
        first = next(iter(self.payloads))
        content = item_id if ref_id == first else f"{item_id}{_SEPARATOR}{ref_id}"
        return {_nvflare_private.ENC_TYPE: _nvflare_private.ENC_REF, _nvflare_private.ENC_DATA: content}


class IncomingPayloads:
    """The payloads of a message that comes in; a placeholder that names none means the last."""

    def __init__(self) -> None:
        self._by_ref: dict[str, Any] = {}
        self._last: Any = None

    def add(self, ref_id: str, batch: Any) -> None:
        """Take the next payload."""
        self._by_ref[ref_id] = self._last = batch

    def find(self, content: str) -> Any:
        """Return the payload that a placeholder belongs to, or None."""
        _, separator, ref_id = content.partition(_SEPARATOR)
        return self._by_ref.get(ref_id) if separator else self._last


class PayloadReference:
    """A payload that stays where it is."""

    def __init__(self, fqcn: str, ref_id: str, secure: bool) -> None:
        self.fqcn = fqcn
        self.ref_id = ref_id
        self.secure = secure


def item_of(content: str) -> str:
    """Return the item that a placeholder names."""
    return content.partition(_SEPARATOR)[0]

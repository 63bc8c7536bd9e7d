# SPDX-License-Identifier: Apache-2.0
"""The tensors of one payload as a sender sees them: a manifest, and the bytes of any part, from where they are.

Nothing is kept of what was sent. A receiver that is far behind, or asks twice, costs the sender no memory.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

from nvflare_lazy.errors import PeerLostError, ProtocolError
from nvflare_lazy.transport import manifest as manifests
from nvflare_lazy.transport.families import MemoryPiece
from nvflare_lazy.transport.stock_items import pack_item

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nvflare_lazy.tensors.byte_source import ByteSource
    from nvflare_lazy.transport.families import Family


class Payload:
    """Named tensors or arrays, to be served by parts.

    Args:
        values: What to send, by name.
        family: What kind of values they are.
    """

    def __init__(self, values: Mapping[str, Any], family: Family) -> None:
        self.names = list(values)
        self.family = family
        self._values: Mapping[str, Any] | None = values
        self._lock = threading.Lock()
        self._manifest: manifests.Manifest | None = None
        self._encoded = b""
        self._owners: list[manifests.Item] = []
        self._starts: list[int] = []
        # The source of the tensor that was asked for last: some take work to make, and requests come in order.
        self._last: tuple[str, ByteSource] | None = None

    def release(self) -> None:
        """Let go of the tensors."""
        self._values = None
        self._last = None

    @property
    def manifest(self) -> manifests.Manifest:
        """Names, types, shapes, and where the bytes lie."""
        with self._lock:
            if self._manifest is None:
                values = self._held()
                self._manifest = manifests.lay_out(
                    (name, *self._described(values[name]), self.family.identity(values[name])) for name in self.names
                )
                self._owners = [item for item in self._manifest.owners() if item.nbytes]
                self._starts = [item.offset for item in self._owners]
            return self._manifest

    def _described(self, value: Any) -> tuple[Any, tuple[int, ...], int]:
        dtype, shape = self.family.describe(value)
        return dtype, shape, self.family.nbytes(dtype, shape)

    @property
    def encoded_manifest(self) -> bytes:
        """The manifest for the wire."""
        manifest = self.manifest
        with self._lock:
            self._encoded = self._encoded or manifests.encode(manifest, self.family)
            return self._encoded

    # NVFlare copies what is sent into a frame: from a bytearray at once, from anything else through a bytearray.

    def read(self, start: int, count: int) -> bytearray | memoryview:
        """Return a part of the run of all bytes; the sender's own memory where it lies there in one piece."""
        manifest = self.manifest
        if start < 0 or count < 0 or start + count > manifest.nbytes:
            raise ProtocolError(f"bytes {start} to {start + count} were asked for, and there are {manifest.nbytes}")
        index = bisect_right(self._starts, start) - 1
        item = self._owners[index]
        if start + count <= item.offset + item.nbytes:
            return self._part(item.name, start - item.offset, count)
        gathered = bytearray(count)
        view = memoryview(gathered)
        done = 0
        while done < count:
            item = self._owners[index]
            inside = start + done - item.offset
            take = min(count - done, item.nbytes - inside)
            self._source(item.name).read_into(view[done : done + take], inside)
            done, index = done + take, index + 1
        return gathered

    def read_item(self, name: str, start: int, count: int) -> bytearray | memoryview:
        """Return a part of one tensor's bytes."""
        if name not in self._held():
            raise ProtocolError(f"{name!r} was asked for, which is not in this payload")
        source = self._source(name)
        if start < 0 or count < 0 or start + count > source.nbytes:
            raise ProtocolError(f"bytes {start} to {start + count} of {name!r} were asked for; it has {source.nbytes}")
        return self._part(name, start, count)

    def stock_item(self, index: int) -> bytearray | memoryview:
        """Return one tensor in the form that NVFlare's own receivers take: whole."""
        name = self.names[index]
        return pack_item(self.family, name, self._held()[name], self._source(name))

    def stock_item_nbytes(self, index: int) -> int:
        """Return about how long that is, without making it."""
        return self._described(self._held()[self.names[index]])[2]

    def _part(self, name: str, start: int, count: int) -> bytearray | memoryview:
        source = self._source(name)
        if isinstance(source, MemoryPiece):
            return source.view[start : start + count]
        return source.read(start, count)

    def _source(self, name: str) -> ByteSource:
        last = self._last
        if last is not None and last[0] == name:
            return last[1]
        source = self.family.source(self._held()[name])
        if self._values is not None:
            self._last = (name, source)
        return source

    def _held(self) -> Mapping[str, Any]:
        values = self._values
        if values is None:
            raise PeerLostError("the tensors have been let go: their transfer is over, or timed out")
        return values

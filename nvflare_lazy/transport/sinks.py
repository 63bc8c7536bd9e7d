# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of a download go: straight into the tensors they make up, or straight into files.

A sink is told all names and shapes first and then takes bytes in any order, from many threads at once.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from nvflare_lazy.transport.families import Family
    from nvflare_lazy.transport.manifest import Item, Manifest


class Sink(Protocol):
    """Takes the bytes of all tensors."""

    def write(self, offset: int, data: memoryview) -> None:
        """Take bytes of the run of all bytes."""


class MemorySink:
    """Assembles ordinary tensors: each is made when its first bytes come, and nothing is joined.

    Args:
        manifest: What will come.
        family: What kind of values to make.
        deliver: Called with each value as soon as it is complete, from several threads at once.
    """

    def __init__(self, manifest: Manifest, family: Family, deliver: Callable[[str, Any], None]) -> None:
        self._manifest = manifest
        self._family = family
        self._deliver = deliver
        self._owners = [item for item in manifest.owners() if item.nbytes]
        self._starts = [item.offset for item in self._owners]
        self._lock = threading.Lock()
        self._made: dict[int, _Made] = {}
        self._aliases: dict[int, list[Item]] = {}
        for item in manifest.items:
            if item.alias:
                self._aliases.setdefault(item.offset, []).append(item)

    def write(self, offset: int, data: memoryview) -> None:
        """Copy bytes into the tensors they belong to."""
        index = bisect_right(self._starts, offset) - 1
        while data:
            item = self._owners[index]
            inside = offset - item.offset
            part = data[: item.nbytes - inside]
            self._fill(item, inside, part)
            data, offset, index = data[len(part) :], offset + len(part), index + 1

    def _fill(self, item: Item, inside: int, part: memoryview) -> None:
        with self._lock:
            made = self._made.get(item.offset)
            if made is None:
                self._made[item.offset] = made = _Made(*self._family.new(item.dtype, item.shape), item.nbytes)
        made.memory[inside : inside + len(part)] = part
        with self._lock:
            made.missing -= len(part)
            if made.missing:
                return
            del self._made[item.offset]
        for twin in self._aliases.get(item.offset, ()):
            # Tensors of their own: whoever writes to one does not expect to find it in the other.
            value, memory = self._family.new(twin.dtype, twin.shape)
            memory[:] = made.memory
            self._deliver(twin.name, value)
        self._deliver(item.name, made.value)

    def finish(self) -> None:
        """Deliver what has no bytes and therefore never came."""
        for item in self._manifest.owners():
            if not item.nbytes:
                self._deliver(item.name, self._family.new(item.dtype, item.shape)[0])


class _Made:
    __slots__ = ("memory", "missing", "value")

    def __init__(self, value: Any, memory: memoryview, nbytes: int) -> None:
        self.value = value
        self.memory = memory
        self.missing = nbytes

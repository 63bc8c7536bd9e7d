# SPDX-License-Identifier: Apache-2.0
"""References to tensors that are still at their sender; a forwarding hop sends them instead of the tensors.

A hop (the client job, between server and trainer) decodes a message without downloading anything, and gets references
to where the tensors are. It can forward them, from any number of payloads, and read one if it must.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from nvflare.fuel.utils import fobs

from nvflare_lazy.errors import TransferError
from nvflare_lazy.transport import _nvflare_private, offload
from nvflare_lazy.transport._backends import BACKENDS
from nvflare_lazy.transport._nvflare_private import stock_via_downloader
from nvflare_lazy.transport.segments.remote_source import open_remote

if TYPE_CHECKING:
    from nvflare_lazy.transport._backends import ArrayBackend


class LazyDownloadRef(stock_via_downloader.LazyDownloadRef):
    """A tensor that is still with its sender.

    NVFlare's own code takes it for its own kind of reference. It does not change, so copies of it are itself.

    Args:
        fqcn: The cell that has the tensor.
        ref_id: The payload there.
        item_id: The tensor in the payload.
        dot: NVFlare's number for the kind of tensor.

    Attributes:
        dtype: The tensor's dtype if its sender told it, else None.
        shape: Its shape if its sender told it, else None.
        secure: Whether it has to be encrypted end to end when it is read here.
    """

    __slots__ = ("_backend", "_cell", "dtype", "secure", "shape")

    # On the wire this is NVFlare's reference, which every receiver knows; `type()` tells the difference.
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return stock_via_downloader.LazyDownloadRef  # type: ignore[no-any-return]

    def __init__(self, fqcn: str, ref_id: str, item_id: str, dot: int = 0) -> None:
        super().__init__(fqcn, ref_id, item_id, dot)
        self.dtype: Any = None
        self.shape: tuple[int, ...] | None = None
        self.secure = False
        self._backend: ArrayBackend | None = None
        self._cell: weakref.ref[Any] | None = None

    @classmethod
    def of(
        cls,
        fqcn: str,
        ref_id: str,
        item_id: str,
        dot: int,
        backend: ArrayBackend,
        described: tuple[Any, Any],
        cell: Any,
    ) -> LazyDownloadRef:
        """Return a reference that can be read through a cell."""
        made = cls(fqcn, ref_id, item_id, dot)
        made.dtype, made.shape = described
        made._backend = backend
        made._cell = None if cell is None else weakref.ref(cell)
        return made

    def lazy(self, cell: Any = None, *, timeout: float = 600.0, abort_signal: Any = None) -> Any:
        """Return the tensor as a lazy one that is read from where it is, as far as it is used.

        Args:
            cell: The cell of this process; Default: the one that received the reference.
            timeout: Seconds without news after which the sender counts as lost.
            abort_signal: A signal to watch.
        """
        found = cell if cell is not None else self._cell() if self._cell is not None else None
        if found is None or self._backend is None:
            raise TransferError(f"{self.item_id} of {self.fqcn} cannot be read without a cell; pass one")
        return open_remote(self, self._backend, found, timeout, abort_signal)

    def materialize(self, cell: Any = None, *, timeout: float = 600.0, abort_signal: Any = None) -> Any:
        """Read the tensor from where it is, and nothing else; see `lazy`."""
        return self.lazy(cell, timeout=timeout, abort_signal=abort_signal).materialize()

    def __reduce__(self) -> Any:
        # NVFlare's slots, and the metadata of the tensor; a cell belongs to its process: pass one to `lazy()`.
        state = self.dtype, self.shape, self.secure, None if self._backend is None else self._backend.name
        return _unpickle_ref, (self.fqcn, self.ref_id, self.item_id, self.dot, *state)

    def __copy__(self) -> LazyDownloadRef:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyDownloadRef:
        return self

    def __repr__(self) -> str:
        return f"LazyDownloadRef({self.item_id} of {self.ref_id} at {self.fqcn})"


def _unpickle_ref(
    fqcn: str, ref_id: str, item_id: str, dot: int, dtype: Any, shape: Any, secure: bool, backend: str | None
) -> LazyDownloadRef:
    ref = LazyDownloadRef(fqcn, ref_id, item_id, dot)
    ref.dtype, ref.shape, ref.secure = dtype, shape, secure
    ref._backend = None if backend is None else BACKENDS[backend]
    return ref


@_nvflare_private.named_in_files_as(stock_via_downloader.LazyDownloadRefDecomposer)
class LazyDownloadRefDecomposer(stock_via_downloader.LazyDownloadRefDecomposer):
    """Sends references on; each says itself to which payload it belongs, so that a message may mix them."""

    def supported_type(self) -> type:
        """Return NVFlare's reference type: ours is sent under its name."""
        return stock_via_downloader.LazyDownloadRef  # type: ignore[no-any-return]

    def decompose(self, lazy: Any, manager: Any = None) -> dict[str, Any]:
        """Encode a reference."""
        handler = fobs.get_dot_handler(lazy.dot)
        if handler is None:
            raise TransferError(
                f"cannot forward a reference of kind {lazy.dot}: no decomposer is registered for it; "
                "call nvflare_lazy.install() first"
            )
        return {**handler.decompose(lazy, manager), "lazy_dot": lazy.dot}


def clear_download_initiated() -> None:
    """Clear this thread's note that it has sent a payload that must be downloaded from this process."""
    offload.runtime.by_thread.initiated = False


def was_download_initiated() -> bool:
    """Whether this thread, since `clear_download_initiated`, has sent something that has to be downloaded from here.

    A process that did must not exit before it was.
    """
    return bool(getattr(offload.runtime.by_thread, "initiated", False))

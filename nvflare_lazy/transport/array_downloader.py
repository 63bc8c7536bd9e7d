# SPDX-License-Identifier: Apache-2.0
"""NumPy arrays over NVFlare's download service, with the names and calls of `np_downloader` in NVFlare.

The counterpart of `tensor_downloader` for jobs that exchange NumPy arrays, which is the default of NVFlare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvflare_lazy.transport import offload
from nvflare_lazy.transport._backends import NUMPY
from nvflare_lazy.transport._downloadable import PayloadDownloadable
from nvflare_lazy.transport._memory_consumer import MemoryConsumer
from nvflare_lazy.transport.receive import RemotePayload, outcome, receive

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np

_TWO_MB = 2 * 1024 * 1024


class ArrayDownloadable(PayloadDownloadable):
    """Arrays, lazy or not, to be downloaded by any number of receivers; see `TensorDownloadable`."""

    def __init__(self, arrays: Mapping[str, np.ndarray[Any, Any]], max_chunk_size: int, cell: Any = None) -> None:
        super().__init__(arrays, max_chunk_size, NUMPY, cell)


class ArrayConsumer(MemoryConsumer):
    """Receives arrays into memory; see `TensorConsumer`."""

    def __init__(
        self,
        arrays_received_cb: Callable[..., Any] | None = None,
        cb_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(NUMPY, arrays_received_cb, cb_kwargs)


def add_arrays(downloader: Any, arrays: Mapping[str, np.ndarray[Any, Any]], max_chunk_size: int = _TWO_MB) -> str:
    """Add arrays to what an `ObjectDownloader` offers; see `tensor_downloader.add_tensors`."""
    reference: str = downloader.add_object(ArrayDownloadable(arrays, max_chunk_size, cell=downloader.cell))
    return reference


def download_arrays(
    from_fqcn: str,
    ref_id: str,
    per_request_timeout: float,
    cell: Any,
    secure: bool = False,
    optional: bool = False,
    abort_signal: Any = None,
    arrays_received_cb: Callable[..., Any] | None = None,
    progress_cb: Callable[..., None] | None = None,
    **cb_kwargs: Any,
) -> tuple[str | None, dict[str, np.ndarray[Any, Any]] | None]:
    """Download arrays into memory; see `tensor_downloader.download_tensors`."""
    remote = RemotePayload(
        offload.runtime, cell, from_fqcn, ref_id, per_request_timeout, secure, optional, abort_signal
    )
    return outcome(lambda: receive(ArrayConsumer(arrays_received_cb, cb_kwargs), remote, progress_cb))


__all__ = [
    "ArrayConsumer",
    "ArrayDownloadable",
    "add_arrays",
    "download_arrays",
]

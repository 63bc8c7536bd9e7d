# SPDX-License-Identifier: Apache-2.0
"""Torch tensors over NVFlare's download service, with the names and calls of `tensor_downloader` in NVFlare.

The decomposers use it, and a component of a job may use it directly.
"""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

from nvflare.app_opt.pt.tensor_downloader import cleanup_active_disk_tensor_downloads

from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict
from nvflare_lazy.tensors.entry import entry_of
from nvflare_lazy.transport import offload
from nvflare_lazy.transport._backends import TORCH
from nvflare_lazy.transport._disk_consumer import DiskConsumer
from nvflare_lazy.transport._downloadable import PayloadDownloadable
from nvflare_lazy.transport._memory_consumer import MemoryConsumer
from nvflare_lazy.transport.receive import RemotePayload, outcome, receive

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    import torch

    from nvflare_lazy.transport._received_files import ReceiveDirectory

_TWO_MB = 2 * 1024 * 1024


class TensorDownloadable(PayloadDownloadable):
    """Tensors, lazy or not, to be downloaded by any number of receivers.

    Args:
        tensors: The tensors by name.
        max_chunk_size: Tensors that together stay below this go in one message to a receiver without this package.
        cell: The cell to answer requests for segments on; without it, none are offered.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], max_chunk_size: int, cell: Any = None) -> None:
        super().__init__(tensors, max_chunk_size, TORCH, cell)


class TensorConsumer(MemoryConsumer):
    """Receives tensors into memory.

    Args:
        tensors_received_cb: Called with tensors as they are complete; see `MemoryConsumer`.
        cb_kwargs: Further arguments for it.
    """

    def __init__(
        self,
        tensors_received_cb: Callable[..., Any] | None = None,
        cb_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(TORCH, tensors_received_cb, cb_kwargs)


class DiskTensorConsumer(DiskConsumer):
    """Receives tensors into files.

    Args:
        temp_dir: A directory that the caller made, or a leased directory of the job's scratch.
    """

    def __init__(self, temp_dir: str | os.PathLike[str] | ReceiveDirectory) -> None:
        super().__init__(TORCH, temp_dir)

    def tensors(self) -> LazyTensorDict:
        """Return the received tensors, which keep the directory alive."""
        tensors = LazyTensorDict.from_entries({name: entry_of(tensor) for name, tensor in self.values().items()})
        tensors.own(self.owner)
        return tensors


def add_tensors(downloader: Any, tensors: Mapping[str, torch.Tensor], max_chunk_size: int = _TWO_MB) -> str:
    """Add tensors to what an `ObjectDownloader` offers.

    Args:
        downloader: NVFlare's `ObjectDownloader`.
        tensors: The tensors by name, lazy or not.
        max_chunk_size: Tensors that together stay below this go in one message to a receiver without this package.

    Returns:
        The reference to download them by.
    """
    reference: str = downloader.add_object(TensorDownloadable(tensors, max_chunk_size, cell=downloader.cell))
    return reference


def download_tensors(
    from_fqcn: str,
    ref_id: str,
    per_request_timeout: float,
    cell: Any,
    secure: bool = False,
    optional: bool = False,
    abort_signal: Any = None,
    tensors_received_cb: Callable[..., Any] | None = None,
    progress_cb: Callable[..., None] | None = None,
    **cb_kwargs: Any,
) -> tuple[str | None, dict[str, torch.Tensor] | None]:
    """Download tensors into memory.

    Args:
        from_fqcn: The cell that has them.
        ref_id: The reference that `add_tensors` returned there.
        per_request_timeout: Seconds without news after which that cell counts as lost.
        cell: The cell of this process.
        secure: Whether messages are encrypted end to end.
        optional: Whether NVFlare shall be quiet about messages that cannot be sent.
        abort_signal: A signal to watch.
        tensors_received_cb: Called with tensors as they are complete.
        progress_cb: NVFlare's progress callback.
        **cb_kwargs: Further arguments for `tensors_received_cb`.

    Returns:
        An error message or None, and the tensors or None.
    """
    remote = RemotePayload(
        offload.runtime, cell, from_fqcn, ref_id, per_request_timeout, secure, optional, abort_signal
    )
    return outcome(lambda: receive(TensorConsumer(tensors_received_cb, cb_kwargs), remote, progress_cb))


def download_tensors_to_disk(
    from_fqcn: str,
    ref_id: str,
    per_request_timeout: float,
    cell: Any,
    secure: bool = False,
    optional: bool = False,
    abort_signal: Any = None,
    progress_cb: Callable[..., None] | None = None,
    root_dir: str | os.PathLike[str] | None = None,
) -> tuple[str | None, LazyTensorDict | None]:
    """Download tensors into scratch, or into a new directory in `root_dir`; see `download_tensors`.

    Returns:
        An error message or None, and the tensors or None.
    """
    remote = RemotePayload(
        offload.runtime, cell, from_fqcn, ref_id, per_request_timeout, secure, optional, abort_signal
    )

    def download() -> LazyTensorDict:
        if root_dir is None:
            place: Any = offload.runtime.scratch.download(label=from_fqcn)
        else:
            place = tempfile.mkdtemp(prefix="nvflare_lazy_", dir=root_dir)
        consumer = DiskTensorConsumer(place)
        receive(consumer, remote, progress_cb)
        return consumer.tensors()

    return outcome(download)


__all__ = [
    "DiskTensorConsumer",
    "LazyTensorDict",
    "TensorConsumer",
    "TensorDownloadable",
    "add_tensors",
    "cleanup_active_disk_tensor_downloads",
    "download_tensors",
    "download_tensors_to_disk",
]

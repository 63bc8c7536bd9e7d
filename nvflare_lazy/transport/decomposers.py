# SPDX-License-Identifier: Apache-2.0
"""The decomposers that NVFlare's serializer calls to encode and decode each tensor and array in a message.

A message has a small placeholder for each tensor, and one datum for each payload with the location to download it from.
The first payload's placeholders are as NVFlare writes them, so that a receiver without this package can read them.
Those of further payloads name theirs; such a receiver refuses them, instead of taking a tensor of the same number from
the wrong payload.
"""

from __future__ import annotations

import io
import json
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.torch
import torch
from nvflare.apis.fl_constant import ConfigVarName
from nvflare.app_common.decomposers.numpy_decomposers import NumpyArrayDecomposer
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.utils import app_config_utils
from nvflare.fuel.utils.fobs import FOBSContextKey, dots
from nvflare.fuel.utils.fobs.datum import Datum, DatumType
from nvflare.fuel.utils.fobs.decomposers.via_downloader import ViaDownloaderDecomposer

from nvflare_lazy._text import get_logger, quoted
from nvflare_lazy.errors import ProtocolError
from nvflare_lazy.tensors.lazy_array import LazyArray
from nvflare_lazy.tensors.lazy_tensor import LazyTensor
from nvflare_lazy.transport import _nvflare_private, offload
from nvflare_lazy.transport._backends import NUMPY, TORCH, ArrayBackend
from nvflare_lazy.transport._disk_consumer import DiskConsumer
from nvflare_lazy.transport._downloadable import PayloadDownloadable
from nvflare_lazy.transport._memory_consumer import MemoryConsumer
from nvflare_lazy.transport._placeholders import (
    IncomingPayloads,
    OutgoingPayloads,
    PayloadReference,
    described,
    description,
    item_of,
    location_of,
)
from nvflare_lazy.transport.failed import FailedPayload
from nvflare_lazy.transport.handoff.hop import Hop
from nvflare_lazy.transport.limits import PayloadTally
from nvflare_lazy.transport.nvflare_items.format import unpack_array_file, unpack_tensors
from nvflare_lazy.transport.receive import RemotePayload, receive
from nvflare_lazy.transport.via_downloader import LazyDownloadRef

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from nvflare.fuel.utils.fobs.datum import DatumManager

_TWO_MB = 2 * 1024 * 1024
# Key in NVFlare's context of a message: the tally of its received data.
_TALLY = "nvflare_lazy_tally"


class LazyDecomposer(ViaDownloaderDecomposer):
    """Sends values of one backend by reference, and receives them into memory or scratch.

    `dot` is NVFlare's number for the datum with their location.
    """

    def __init__(self, backend: ArrayBackend, dot: int, config_prefix: str) -> None:
        super().__init__(_TWO_MB, config_prefix)
        self.logger = get_logger(_nvflare_private.implementation_of(self))
        self.backend = backend
        self._dot = dot

    def get_download_dot(self) -> int:
        """Return NVFlare's number for the datum."""
        return self._dot

    # ---- sending -----------------------------------------------------------------------------------------------

    def decompose(self, target: Any, manager: DatumManager = None) -> dict[str, Any]:
        """Encode a value, or a reference that is sent on."""
        if isinstance(target, _nvflare_private.stock_via_downloader.LazyDownloadRef):
            outgoing = self._outgoing(manager)
            placeholder = outgoing.placeholder(target.ref_id, target.fqcn, target.item_id)
            return {**placeholder, **self._describe_ref(target)}
        if not manager.fobs_ctx.get(FOBSContextKey.CELL):
            manager.fobs_ctx["native"] = True
        if manager.fobs_ctx.get("native", False) or self._configured_chunk_size() <= 0:
            native = self.native_decompose(target, manager)
            return {_nvflare_private.ENC_TYPE: _nvflare_private.ENC_NATIVE, _nvflare_private.ENC_DATA: native}
        dtype, shape = self.backend.describe(target)
        outgoing = self._outgoing(manager)
        context = self._new_items(manager)
        item_id, _, _ = context.add_item(target)
        placeholder = outgoing.placeholder(context.ref_id, None, item_id)
        return {**placeholder, **description(self.backend, dtype, shape)}

    def _describe_ref(self, ref: Any) -> dict[str, Any]:
        dtype = getattr(ref, "dtype", None)
        if dtype is None or ref.shape is None:
            return {}
        return description(self.backend, dtype, ref.shape)

    def _configured_chunk_size(self) -> int:
        size: int = app_config_utils.get_int_var(
            self._config_var_name(ConfigVarName.DOWNLOAD_CHUNK_SIZE), self.max_chunk_size
        )
        return size

    def _outgoing(self, manager: DatumManager) -> OutgoingPayloads:
        key = f"{self.prefix}_outgoing"
        outgoing: OutgoingPayloads | None = manager.fobs_ctx.get(key)
        if outgoing is None:
            manager.fobs_ctx[key] = outgoing = OutgoingPayloads()
            manager.register_post_cb(self._add_data)
        return outgoing

    def _new_items(self, manager: DatumManager) -> Any:
        context = manager.fobs_ctx.get(self.decompose_ctx_key)
        if context is None:
            manager.fobs_ctx[self.decompose_ctx_key] = context = _nvflare_private.new_items_context()
            context.ref_id = str(uuid.uuid4())
        return context

    def _add_data(self, manager: DatumManager) -> None:
        """Add a datum for each payload in the message, the first one last: NVFlare uses the last."""
        if manager.get_error():
            return
        outgoing = self._outgoing(manager)
        context = manager.fobs_ctx.get(self.decompose_ctx_key)
        own = None if context is None else context.ref_id
        for ref_id, fqcn in reversed(list(outgoing.payloads.items())):
            if ref_id == own:
                fqcn = self._prepare_download(manager, ref_id)
            where = {_nvflare_private.DATUM_FQCN: fqcn, _nvflare_private.DATUM_REF_ID: ref_id}
            manager.add_datum(Datum(datum_type=DatumType.TEXT, value=json.dumps(where), dot=self._dot))

    def _prepare_download(self, manager: DatumManager, ref_id: str) -> str:
        """Hand the values to NVFlare, which opens the transaction when the whole message is encoded."""
        fobs_ctx = manager.fobs_ctx
        if not fobs_ctx.get(_nvflare_private.CTX_FINAL_CB_REGISTERED):
            manager.register_post_cb(self._finalize_download_tx)
            fobs_ctx[_nvflare_private.CTX_FINAL_CB_REGISTERED] = True
        objects = fobs_ctx.setdefault(_nvflare_private.CTX_OBJECTS, [])
        objects.append((ref_id, self._create_downloadable(fobs_ctx)))
        fqcn: str = fobs_ctx[FOBSContextKey.CELL].get_fqcn()
        return fqcn

    def to_downloadable(
        self, items: dict[str, Any], max_chunk_size: int, fobs_ctx: dict[str, Any]
    ) -> PayloadDownloadable:
        """Return the object that serves the values of a message."""
        return PayloadDownloadable(items, max_chunk_size, self.backend, fobs_ctx.get(FOBSContextKey.CELL))

    def _finalize_download_tx(self, mgr: DatumManager) -> None:
        super()._finalize_download_tx(mgr)
        offload.runtime.by_thread.initiated = True

    # ---- receiving ---------------------------------------------------------------------------------------------

    def process_datum(self, datum: Datum, manager: DatumManager) -> None:
        """Download the payload that a datum points to; a hop that forwards it decides at its first placeholder."""
        fobs_ctx = manager.fobs_ctx
        payloads = fobs_ctx.get(self.items_key)
        if not isinstance(payloads, IncomingPayloads):
            fobs_ctx[self.items_key] = payloads = IncomingPayloads()
        ref_id = ""
        try:
            payloads.check_room()
            fqcn, ref_id = location_of(datum)
            if fobs_ctx.get(FOBSContextKey.PASS_THROUGH):
                payload: Any = PayloadReference(fqcn, ref_id, _is_secure(fobs_ctx, fqcn))
            else:
                payload = self._download_from_remote_cell(
                    fobs_ctx, {_nvflare_private.DATUM_FQCN: fqcn, _nvflare_private.DATUM_REF_ID: ref_id}
                )
        except Exception as error:
            if not _must_decode(fobs_ctx):
                raise
            self.logger.error(f"Failed to receive tensors: {error}. The message that contains them will be skipped.")
            payload = FailedPayload(error)
        payloads.add(ref_id, payload)

    def recompose(self, data: Any, manager: DatumManager = None) -> Any:
        """Decode a placeholder into a value, a lazy value, or a reference."""
        try:
            return self._recompose(data, manager)
        except Exception as error:
            if not _must_decode(manager.fobs_ctx):
                raise
            self.logger.error(f"Failed to decode a tensor: {error}. The message that contains it will be skipped.")
            return FailedPayload(error).value(self.backend)

    def _recompose(self, data: Any, manager: DatumManager) -> Any:
        if not isinstance(data, dict):
            raise ProtocolError(f"invalid placeholder of a tensor: expected a dictionary, got {type(data).__name__}")
        kind, content = data.get(_nvflare_private.ENC_TYPE), data.get(_nvflare_private.ENC_DATA)
        if kind == _nvflare_private.ENC_NATIVE:
            return self.native_recompose(content, manager)
        if kind != _nvflare_private.ENC_REF or not isinstance(content, str):
            raise ProtocolError(f"unknown kind of placeholder: {quoted(kind)}")
        payloads = manager.fobs_ctx.get(self.items_key)
        payload = payloads.find(content) if isinstance(payloads, IncomingPayloads) else None
        item_id = item_of(content)
        if payload is None:
            raise ProtocolError(f"placeholder {quoted(content)} refers to a missing payload")
        dtype, shape = described(self.backend, data)
        if isinstance(payload, PayloadReference) and not payload.decided:
            # Only a sender with this package describes its tensors.
            payload = payloads.replace(payload, self._at_hop(payload, manager.fobs_ctx, has_package=dtype is not None))
        if isinstance(payload, PayloadReference):
            cell = manager.fobs_ctx.get(FOBSContextKey.CELL)
            ref = LazyDownloadRef.of(
                payload.fqcn, payload.ref_id, item_id, self._dot, self.backend, (dtype, shape), cell
            )
            ref.secure = payload.secure
            return ref
        if isinstance(payload, FailedPayload):
            return payload.value(self.backend, dtype, shape)
        if item_id not in payload:
            raise ProtocolError(f"tensor {quoted(item_id)} is missing from its payload")
        return payload[item_id]

    def _at_hop(self, reference: PayloadReference, fobs_ctx: dict[str, Any], *, has_package: bool) -> Any:
        """Return the values of a payload that passes through this process, if it takes them, else the reference."""
        hop, cell = offload.runtime.shared(Hop), fobs_ctx.get(FOBSContextKey.CELL)
        mode = offload.runtime.mode_for(fobs_ctx)
        values = None
        if cell is not None and hop.takes(reference.fqcn, cell.get_fqcn(), mode, has_package=has_package):
            location = {_nvflare_private.DATUM_FQCN: reference.fqcn, _nvflare_private.DATUM_REF_ID: reference.ref_id}
            values = self._download_from_remote_cell(fobs_ctx, location)
        return values or reference._replace(decided=True)

    def _get_download_kwargs(self, fobs_ctx: dict[str, Any]) -> dict[str, Any]:
        return {"fobs_ctx": fobs_ctx}

    def download(
        self,
        from_fqcn: str,
        ref_id: str,
        per_request_timeout: float,
        cell: Any,
        secure: bool = False,
        optional: bool = False,
        abort_signal: Any = None,
        progress_cb: Callable[..., None] | None = None,
        fobs_ctx: dict[str, Any] | None = None,
    ) -> tuple[str | None, Mapping[str, Any]]:
        """Download a payload; raises the reason if that fails."""
        mode = offload.runtime.mode_for(fobs_ctx)
        # One for the tensors and arrays of a message, from any number of payloads.
        tally = (
            PayloadTally(mode.limits) if fobs_ctx is None else fobs_ctx.setdefault(_TALLY, PayloadTally(mode.limits))
        )
        remote = RemotePayload(
            offload.runtime, cell, from_fqcn, ref_id, per_request_timeout, secure, optional, abort_signal, tally
        )
        scratch = mode.scratch
        if scratch is None:
            return None, receive(MemoryConsumer(self.backend), remote, progress_cb)
        roots = _nvflare_private.offload_roots(fobs_ctx or {})
        hop = offload.runtime.shared(Hop) if (fobs_ctx or {}).get(FOBSContextKey.PASS_THROUGH) else None
        from_trainer = hop is not None and FQCN.is_ancestor(cell.get_fqcn(), from_fqcn)
        if hop is not None and not from_trainer and hop.is_near(remote):
            return None, {}
        consumer = DiskConsumer(self.backend, scratch.download(label=from_fqcn), roots)
        if hop is not None and from_trainer:
            return None, consumer.values() if hop.take_result(consumer, remote) else {}
        receive(consumer, remote, progress_cb)
        return None, consumer.values()


@_nvflare_private.named_in_files_as(TensorDecomposer)
class LazyTensorDecomposer(LazyDecomposer):
    """`torch.Tensor`, replaces NVFlare's `TensorDecomposer`."""

    def __init__(self) -> None:
        super().__init__(TORCH, dots.TENSOR_DOWNLOAD, "tensor_")

    def supported_type(self) -> type:
        """Return the type that is sent."""
        return torch.Tensor

    def native_decompose(self, target: torch.Tensor, manager: DatumManager = None) -> bytes:
        """Encode a tensor into the message."""
        tensor = target.materialize() if isinstance(target, LazyTensor) else target
        encoded: bytes = safetensors.torch.save({"t": tensor.contiguous()})
        return encoded

    def native_recompose(self, data: bytes, manager: DatumManager = None) -> torch.Tensor:
        """Decode a tensor that was encoded into the message."""
        tensor: torch.Tensor = _recompose_native(self.backend, unpack_tensors(data, "the peer"))
        return tensor


@_nvflare_private.named_in_files_as(NumpyArrayDecomposer)
class LazyArrayDecomposer(LazyDecomposer):
    """`np.ndarray`, replaces NVFlare's `NumpyArrayDecomposer`."""

    def __init__(self) -> None:
        super().__init__(NUMPY, dots.NUMPY_DOWNLOAD, "np_")

    def supported_type(self) -> type:
        """Return the type that is sent."""
        return np.ndarray

    def native_decompose(self, target: Any, manager: DatumManager = None) -> bytes:
        """Encode an array into the message."""
        stream = io.BytesIO()
        np.save(stream, target.materialize() if isinstance(target, LazyArray) else target, allow_pickle=False)
        return stream.getvalue()

    def native_recompose(self, data: bytes, manager: DatumManager = None) -> np.ndarray[Any, Any]:
        """Decode an array that was encoded into the message."""
        array: np.ndarray[Any, Any] = _recompose_native(self.backend, unpack_array_file(data, "the peer"))
        return array


def _recompose_native(backend: ArrayBackend, items: Iterator[tuple[str, Any, tuple[int, ...], memoryview]]) -> Any:
    ((_, dtype, shape, data),) = items
    value, memory = backend.new(dtype, shape)
    memory[:] = data
    return value


def _is_secure(fobs_ctx: dict[str, Any], fqcn: str) -> bool:
    """Whether downloads from `fqcn` must be encrypted: its own message was. Messages of other cells prove nothing."""
    message = fobs_ctx.get(FOBSContextKey.MESSAGE)
    if message is None or message.get_header(MessageHeaderKey.ORIGIN) != fqcn:
        return False
    return bool(message.get_header(MessageHeaderKey.SECURE, False))


def _must_decode(fobs_ctx: dict[str, Any]) -> bool:
    """Whether an error in decoding would end the process: NVFlare does that to the server's job."""
    cell = fobs_ctx.get(FOBSContextKey.CELL)
    return cell is not None and FQCN.get_root(cell.get_fqcn()) == FQCN.ROOT_SERVER

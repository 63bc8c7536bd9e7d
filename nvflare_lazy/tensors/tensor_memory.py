# SPDX-License-Identifier: Apache-2.0
"""The memory of an ordinary tensor as a plain buffer, whatever its dtype.

NumPy has no bfloat16 and no 8-bit floats, so its views cannot serve here; a pointer can. Loading, saving, sending and
aggregating fill and read tensors through this module.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.autograd import forward_ad

if TYPE_CHECKING:
    from collections.abc import Iterator

_set_tracing_state = torch._C._set_tracing_state  # type: ignore[attr-defined]  # as torch.jit itself does
_CPU = torch.device("cpu")
_is_included = torch._C._dispatch_tls_is_dispatch_key_included
_OBSERVERS = (
    torch._C.DispatchKey.Python,
    torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode,
    torch._C.DispatchKey.Functionalize,
    torch._C.DispatchKey.PreDispatch,
)
_OTHER_OBSERVERS = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize).add(torch._C.DispatchKey.PreDispatch)


def torch_is_watched() -> bool:
    """Whether torch's operations in this thread are observed at the moment.

    By a mode, a function transform, a tracer, or forward-mode automatic differentiation.
    """
    return (
        torch._C._len_torch_function_stack() > 0
        or any(map(_is_included, _OBSERVERS))
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def new_memory(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return an ordinary tensor on the CPU whose memory was not written yet, row-major without strides.

    The result is independent of the caller's settings: with a default device, a mode that fakes or traces tensors, or
    a function transform, `torch.empty` would return something without memory to fill.
    """
    if strides is None and not torch_is_watched():
        return torch.empty(shape, dtype=dtype, device=_CPU)
    with (
        torch._C.DisableTorchFunction(),
        torch._C._DisableTorchDispatch(),
        torch._C._DisableFuncTorch(),
        torch._C._ExcludeDispatchKeyGuard(_OTHER_OBSERVERS),
        _untraced(),
    ):
        if strides is None:
            return torch.empty(shape, dtype=dtype, device=_CPU)
        return torch.empty_strided(shape, strides, dtype=dtype, device=_CPU)


@contextmanager
def _untraced() -> Iterator[None]:
    """Keep `torch.jit.trace` from recording the operations of the block."""
    state = torch._C._get_tracing_state()
    if state is None:
        yield
        return
    _set_tracing_state(None)
    try:
        yield
    finally:
        _set_tracing_state(state)


def storage_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes from the first element of `tensor` to the last one that its strides reach.

    For a contiguous tensor these are its elements in row-major order. The view is writable, shares the memory, and
    keeps the tensor alive.

    Args:
        tensor: An ordinary tensor on the CPU.
    """
    if tensor.device.type != "cpu":
        raise ValueError(f"cannot access the bytes of a tensor on {tensor.device}; move it to the CPU first")
    if tensor.numel() == 0:
        return memoryview(bytearray())
    return owned_bytes(tensor, extent(tuple(tensor.shape), tensor.stride()) * tensor.element_size())


def array_bytes(array: np.ndarray[Any, Any]) -> memoryview:
    """Return the memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data if array.nbytes else memoryview(bytearray())


def owned_bytes(tensor: torch.Tensor, nbytes: int) -> memoryview:
    """Return the first bytes of the memory of `tensor`, at least one, all inside it; they keep it alive."""
    array = np.ndarray.__new__(_Memory, (nbytes,), np.uint8, borrowed_bytes(tensor, nbytes))
    array.owner = tensor
    return array.data


_view_of_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of_memory.argtypes = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
_view_of_memory.restype = ctypes.py_object
_WRITABLE = 0x200


def borrowed_bytes(tensor: torch.Tensor, nbytes: int) -> memoryview:
    """Return the first bytes of the memory of `tensor`, valid while the caller keeps the tensor.

    For code that fills a tensor at once, in one thread, and keeps no reference.

    Args:
        tensor: An ordinary tensor on the CPU.
        nbytes: Number of bytes, at least one, all inside the tensor.
    """
    address = tensor.data_ptr()
    if not address:
        raise ValueError(f"cannot access the bytes of a {type(tensor).__name__} without memory")
    view: memoryview = _view_of_memory(address, nbytes, _WRITABLE)
    return view


class _Memory(np.ndarray[Any, Any]):
    """A run of bytes, and what keeps them alive."""

    owner: torch.Tensor


def extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the number of storage elements from the first to the last element of a view."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))

# SPDX-License-Identifier: Apache-2.0
"""Makes this package's handlers the process's handlers for tensors, arrays and references to them.

NVFlare keeps the first decomposer that is registered for a type, and which comes first depends on who imports what.
`register()` does not rely on coming first: it replaces any other, and each job decides where it receives. `install()`
receives on disk; it is for a training script, or for all jobs of a site.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvflare.fuel.f3.mpm import MainProcessMonitor
from nvflare.fuel.utils import fobs
from nvflare.fuel.utils.class_loader import get_class_name

from nvflare_lazy._text import get_logger
from nvflare_lazy.transport import _nvflare_private, offload
from nvflare_lazy.transport.decomposers import LazyArrayDecomposer, LazyTensorDecomposer
from nvflare_lazy.transport.malloc_tuning import tune_malloc
from nvflare_lazy.transport.via_downloader import LazyDownloadRefDecomposer

if TYPE_CHECKING:
    from nvflare.fuel.utils.fobs import Decomposer


logger = get_logger(__name__)


@dataclass(frozen=True)
class Handler:
    """The handler of one type.

    Attributes:
        type_name: The type.
        dot: NVFlare's number for the location of a download of its values, if it has one.
        in_place: The class that handles the type now, or None.
        ours: Whether that class belongs to this package.
        replaced: The class that was replaced, or None.
    """

    type_name: str
    dot: int | None
    in_place: str | None
    ours: bool
    replaced: str | None = None

    def __str__(self) -> str:
        by = self.in_place or "no handler"
        return f"{self.type_name} by {by}" + (f" instead of {self.replaced}" if self.replaced else "")


@dataclass(frozen=True)
class Registration:
    """The handlers of tensors, arrays and references in this process."""

    handlers: tuple[Handler, ...]

    @property
    def complete(self) -> bool:
        """Whether all are this package's."""
        return all(handler.ours for handler in self.handlers)

    def __str__(self) -> str:
        return "; ".join(map(str, self.handlers))


_KINDS: tuple[type[Decomposer], ...] = (LazyTensorDecomposer, LazyArrayDecomposer, LazyDownloadRefDecomposer)


def register(replace: bool = True) -> Registration:
    """Make NVFlare of this process send and receive tensors and arrays through this package.

    Other handlers may be registered already; a second call changes nothing. `offload` decides where payloads are
    received. Call it before messages are sent: components do it in their constructors, `nvflare_lazy.install()` does it
    for everything else.

    Args:
        replace: Whether to replace your own handlers, with a warning, as NVFlare's own always are. Default: True.

    Returns:
        The handlers now, and the ones that were replaced.

    Example:
        >>> print(register())
        torch.Tensor by nvflare_lazy.transport.decomposers.LazyTensorDecomposer; ...
    """
    _nvflare_private.release_sent_messages()
    _nvflare_private.send_items_without_copies()
    _nvflare_private.use_single_cleanup_thread(lambda: offload.runtime.cleanup)
    # Job processes of NVFlare end without what Python does at exit. NVFlare refuses a function that it has already.
    with contextlib.suppress(RuntimeError):
        MainProcessMonitor.add_cleanup_cb(offload.runtime.release_scratch)
    before = registered()
    registration = Registration(tuple(_put(kind, replace) for kind in _KINDS))
    if registration != before:
        ours = [handler.type_name for handler in registration.handlers if handler.ours]
        logger.info("Tensors are handled lazily: %s", ", ".join(name.rpartition(".")[2] for name in ours) or "none")
        logger.debug("Handlers: %s", registration)
    return registration


def registered() -> Registration:
    """Return the handlers of tensors, arrays and references in this process, without changing them."""
    return Registration(tuple(_find_handler(kind()) for kind in _KINDS))


def _put(kind: type[Decomposer], replace: bool) -> Handler:
    found = _find_handler(kind())
    custom = _nvflare_private.registered_for(found.type_name)
    is_custom = custom is not None and not found.ours and not _nvflare_private.is_stock(custom)
    if found.ours or (is_custom and not replace):
        return found
    replaced = _nvflare_private.replace_decomposer(kind())
    after = _find_handler(kind())
    if is_custom:
        logger.warning(
            "Replaced your own decomposer for %s, %s; to keep it, call nvflare_lazy.install(replace=False)",
            *(found.type_name, found.in_place),
        )
    return Handler(after.type_name, after.dot, after.in_place, after.ours, _name(replaced))


def _find_handler(wanted: Any) -> Handler:
    type_name = get_class_name(wanted.supported_type())
    dot = next(iter(wanted.supported_dots() or ()), None)
    registered = _nvflare_private.registered_for(type_name)
    ours = type(registered) is type(wanted) and (dot is None or fobs.get_dot_handler(dot) is registered)
    return Handler(type_name, dot, _name(registered), ours)


def _name(decomposer: Any) -> str | None:
    return None if decomposer is None else _nvflare_private.implementation_of(decomposer)


def install(replace: bool = True) -> Registration:
    """Make NVFlare of this process send tensors and arrays in segments, and receive them on disk.

    Received values are lazy: `model.load_state_dict(received.params)` reads one tensor after the other. Other handlers
    may be registered already; a second call changes nothing. Call it before messages are sent: before `flare.init()`.

    Scratch is in `NVFLARE_LAZY_SCRATCH`, or where a `TensorOffload` of this process has it. For another place,
    `offload.enable(JobScratch.open(...))` goes after it; to receive into memory, `offload.disable()`.

    Args:
        replace: Whether to replace your own decomposers for tensors and arrays, with a warning. Default: True.

    Returns:
        The handlers now, and the ones that were replaced.

    Example:
        >>> print(nvflare_lazy.install())
        torch.Tensor by nvflare_lazy.transport.decomposers.LazyTensorDecomposer; ...
    """
    registration = register(replace)
    tune_malloc()
    offload.enable()
    return registration

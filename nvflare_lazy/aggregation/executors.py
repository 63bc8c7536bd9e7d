# SPDX-License-Identifier: Apache-2.0
"""The executors that aggregation can run on: processes, Dask, Ray, MPI, and any other of `concurrent.futures`.

`Aggregation(executor=...)` and `LazyAggregator(executor=...)` accept them. `_distributed/` splits the work.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from nvflare_lazy._text import get_logger, quoted
from nvflare_lazy.errors import ExecutorError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Self

logger = get_logger(__name__)

#: What specifies an executor: an object, a name, or a name with arguments.
ExecutorSpec = str | Mapping[str, Any] | Executor

_Result = TypeVar("_Result")


class Workers:
    """An executor that is created at its first use, and again if it breaks.

    | executor | workers |
    |---|---|
    | `"processes"` or `{"name": "processes", "max_workers": 4}` | processes of this machine |
    | `{"name": "dask", "address": "tcp://scheduler:8786"}` | those of a Dask cluster |
    | `{"name": "ray", "address": "auto"}` | those of a Ray cluster |
    | `{"name": "mpi4py.futures.MPIPoolExecutor", "max_workers": 8}` | those of any class of executors |
    | an object, such as `client.get_executor()` | its own; the caller shuts it down |

    Args:
        spec: The executor.

    Example:
        >>> with Workers({"name": "processes", "max_workers": 2}) as workers:
        ...     Aggregation("median", executor=workers).run(updates, "global.safetensors")
    """

    def __init__(self, spec: ExecutorSpec) -> None:
        self._create: Callable[[], Executor] | None = None
        self._executor: Executor | None = None
        self._lock = threading.Lock()
        if isinstance(spec, Executor):
            self._executor = spec
            return
        arguments = dict(spec) if isinstance(spec, Mapping) else {"name": spec}
        name = arguments.pop("name", None)
        if not isinstance(name, str) or (name not in _FACTORIES and "." not in name):
            raise ValueError(
                f"unknown executor {quoted(name)}; available: {', '.join(_FACTORIES)}, the path of a class such as "
                "'mpi4py.futures.MPIPoolExecutor', or an object with the methods of concurrent.futures.Executor"
            )
        self._create = lambda: _created(name, arguments)

    @property
    def executor(self) -> Executor:
        """The executor."""
        with self._lock:
            if self._executor is None:
                if self._create is None:
                    raise ExecutorError("the workers were closed")
                self._executor = self._create()
            return self._executor

    def replace(self, broken: Executor) -> bool:
        """Have another executor created in place of a broken one; return whether that is possible."""
        with self._lock:
            if self._create is None:
                return False
            if self._executor is broken:
                self._executor = None
                with suppress(Exception):  # it is broken
                    broken.shutdown(wait=False)
            return True

    def close(self) -> None:
        """Shut the executor down if it was created here. It is created again at the next use."""
        if self._create is None:
            return
        with self._lock:
            executor, self._executor = self._executor, None
        # Without the lock: an aggregation that uses the executor must be able to end.
        if executor is not None:
            executor.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@contextmanager
def workers_of(executor: ExecutorSpec | Workers) -> Iterator[Workers]:
    """Lend the workers for a block. An executor that was created for it is shut down after it."""
    if isinstance(executor, Workers):
        yield executor
    else:
        with Workers(executor) as workers:
            yield workers


class RayExecutor(Executor):
    """Runs functions as tasks of a Ray cluster. Ray must be installed, and nvflare-lazy on all nodes.

    Args:
        address: The address of the cluster, as `ray.init` accepts it. Default: the cluster that this process is
            connected to, else a new one on this machine.
        num_cpus: The number of cores that each function occupies.
        options: Other arguments of `ray.init`.
    """

    def __init__(self, address: str | None = None, *, num_cpus: float = 1, **options: Any) -> None:
        import ray

        self._ray = ray
        self._is_owner = not ray.is_initialized()
        if self._is_owner:
            ray.init(address=address, **{"log_to_driver": False, **options})
        self._task = ray.remote(_call).options(num_cpus=num_cpus)

    def submit(self, fn: Callable[..., _Result], /, *args: Any, **kwargs: Any) -> Future[_Result]:
        """Start `fn(*args, **kwargs)` on the cluster."""
        future: Future[_Result] = self._task.remote(fn, args, kwargs).future()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Disconnect from the cluster if this object has connected; one that it has started ends."""
        if self._is_owner and self._ray.is_initialized():
            self._ray.shutdown()


class _DaskExecutor(Executor):
    """The executor of a Dask client, which ends with it."""

    def __init__(self, address: str | None = None, **options: Any) -> None:
        from distributed import Client

        self._client = Client(address, set_as_default=False, **options)
        self._executor = self._client.get_executor()

    def submit(self, fn: Callable[..., _Result], /, *args: Any, **kwargs: Any) -> Future[_Result]:
        future: Future[_Result] = self._executor.submit(fn, *args, **kwargs)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._executor.shutdown(wait=wait)
        self._client.close()


def _call(function: Callable[..., _Result], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Result:
    return function(*args, **kwargs)


def _processes(max_workers: int | None = None, **options: Any) -> ProcessPoolExecutor:
    import multiprocessing

    # A server has threads, and a fork would copy their locks.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(max_workers, mp_context=context, initializer=_start_process, **options)


def _start_process() -> None:
    """Prepare a process of a pool: it ends with its parent, which receives the signals of a terminal."""
    import multiprocessing
    from multiprocessing.connection import wait as wait_for

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        wait_for([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, name="end-with-parent", daemon=True).start()


_FACTORIES: dict[str, Callable[..., Executor]] = {
    "processes": _processes,
    "dask": _DaskExecutor,
    "ray": RayExecutor,
}


def _created(name: str, arguments: Mapping[str, Any]) -> Executor:
    try:
        factory = _FACTORIES.get(name)
        if factory is None:
            module, _, member = name.rpartition(".")
            factory = getattr(import_module(module), member)
        executor = factory(**arguments)
    except Exception as error:
        raise ExecutorError(f"cannot create the executor {name!r}: {type(error).__name__}: {error}") from error
    if not callable(getattr(executor, "submit", None)):
        raise ExecutorError(f"the executor {name!r} is a {type(executor).__name__}, which has no method submit")
    logger.info("Started the executor %r for aggregation", name)
    return executor

# SPDX-License-Identifier: Apache-2.0
"""Cells in separate processes, which tests control.

A peer runs functions of this package's test modules: they get its `State` and return something that can be pickled.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

CHANNEL = "nvflare_lazy_tests"
TOPIC = "payload"

# A process that imports these takes two seconds of processor time; one that is forked from it takes none.
_PRELOADED = ["torch", "safetensors.torch", "nvflare.fuel.f3.cellnet.cell", "nvflare.app_opt.pt.tensor_downloader"]


@dataclass
class State:
    """What a peer knows."""

    fqcn: str
    plugin: bool
    cell: Any
    scratch_root: str | None = None
    payloads: list[Any] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)
    arrived: threading.Event = field(default_factory=threading.Event)


class Peer:
    """A process with a cell."""

    def __init__(
        self,
        fqcn: str,
        port: int,
        plugin: bool,
        scratch_root: str | None = None,
        credentials: dict[str, str] | None = None,
        scheme: str = "tcp",
        handoff: bool = False,
        parent_url: str | None = None,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self.fqcn = fqcn
        self._ours, theirs = context.Pipe()
        self._process = context.Process(
            target=_main,
            args=(
                theirs,
                fqcn,
                f"{scheme}://127.0.0.1:{port}",
                plugin,
                scratch_root,
                credentials or {},
                handoff,
                parent_url,
            ),
            daemon=True,
        )
        self._process.start()
        theirs.close()
        self._started = False

    def wait_until_up(self) -> None:
        if not self._started:
            self._receive(500)
            self._started = True

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Let the peer do something; `result()` waits for it."""
        self.wait_until_up()
        self._ours.send((function, args, kwargs))

    def result(self, timeout: float = 500) -> Any:
        return self._receive(timeout)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.start(function, *args, **kwargs)
        return self.result()

    def _receive(self, timeout: float) -> Any:
        if not self._ours.poll(timeout):
            raise TimeoutError(f"{self.fqcn} has not answered in {timeout} s")
        ok, value = self._ours.recv()
        if not ok:
            raise AssertionError(f"in {self.fqcn}: {value}")
        return value

    def kill(self) -> None:
        """End the process as a crash does."""
        os.kill(self.pid, signal.SIGKILL)
        self._process.join(60)

    def stop(self) -> None:
        """Freeze the process; `resume` continues it."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join(60)
        self._ours.close()


class Net:
    """A server cell and its clients; with credentials by name if messages shall be encrypted.

    Without `handoff`, they send each other what processes on different hosts do.
    A cell named "site_1__job" also connects to "site_1", if that exists. `through` is a port of a proxy in
    front of the server's `port`, for all others.
    """

    def __init__(
        self,
        scratch_root: str | None = None,
        credentials: dict[str, dict[str, str]] | None = None,
        *,
        scheme: str = "tcp",
        handoff: bool = False,
        port: int | None = None,
        through: int | None = None,
        **clients: bool,
    ) -> None:
        self.scheme = scheme
        self.handoff = handoff
        self.port = port or free_port()
        self.through = through or self.port
        self.scratch_root = scratch_root
        self.credentials = credentials or {}
        self.peers: dict[str, Peer] = {}
        for name, plugin in clients.items():
            self.add(name, plugin)
        for peer in self.peers.values():
            peer.wait_until_up()

    def add(self, name: str, plugin: bool) -> Peer:
        # Names as NVFlare gives them: a cell of a job is below the one of its site.
        fqcn = name.replace("__", ".").replace("_", "-")
        parent = self.peers.get(name.rpartition("__")[0])
        self.peers[name] = peer = Peer(
            fqcn,
            self.port if name == "server" else self.through,
            plugin,
            self.scratch_root,
            self.credentials.get(name),
            self.scheme,
            self.handoff,
            None if parent is None else parent.call(_url_for_children),
        )
        return peer

    def __getitem__(self, name: str) -> Peer:
        return self.peers[name]

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()
        # A killed peer leaves its scratch, which may be a gigabyte, to a process that removes it at the same time.
        while self.scratch_root is not None and os.path.exists(self.scratch_root):
            shutil.rmtree(self.scratch_root, ignore_errors=True)

    def __enter__(self) -> Net:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def _url_for_children(state: State) -> str:
    state.cell.core_cell.make_internal_listener()
    return state.cell.core_cell.get_internal_listener_url()


def _main(pipe: Any, fqcn: str, *args: Any) -> None:
    try:
        state = _start(fqcn, *args)
        pipe.send((True, None))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        return
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = (True, function(state, *args, **kwargs))
        except BaseException:
            answer = (False, traceback.format_exc())
        try:
            pipe.send(answer)
        except (ValueError, TypeError, AttributeError) as error:
            pipe.send((False, f"the answer cannot be pickled: {error}"))


def _start(
    fqcn: str,
    url: str,
    plugin: bool,
    scratch_root: str | None,
    credentials: dict[str, str],
    handoff: bool,
    parent_url: str | None,
) -> State:
    logging.basicConfig(level=os.environ.get("PEER_LOG", "CRITICAL"))
    from nvflare.fuel.f3.cellnet.cell import Cell

    if plugin:
        if scratch_root is not None:
            os.environ["NVFLARE_LAZY_SCRATCH"] = scratch_root
        from nvflare_lazy.transport import ways
        from nvflare_lazy.transport.handoff.way import Handoff
        from nvflare_lazy.transport.registration import register

        if not handoff:
            ways.WAYS = tuple(way for way in ways.WAYS if not isinstance(way, Handoff))
        assert register().complete
    else:
        from nvflare.app_common.decomposers.numpy_decomposers import NumpyArrayDecomposer
        from nvflare.app_opt.pt.decomposers import TensorDecomposer
        from nvflare.fuel.utils import fobs

        fobs.register(TensorDecomposer)
        fobs.register(NumpyArrayDecomposer)
    cell = Cell(
        fqcn=fqcn,
        root_url=url,
        secure=False,
        credentials=credentials,
        create_internal_listener=False,
        parent_url=parent_url,
    )
    cell.start()
    state = State(fqcn, plugin, cell, scratch_root)
    cell.register_request_cb(channel=CHANNEL, topic=TOPIC, cb=lambda message: _take(state, message))
    deadline = time.monotonic() + 300
    while not cell.core_cell.is_backbone_ready() and time.monotonic() < deadline:
        time.sleep(0.02)
    return state


def _take(state: State, message: Any) -> Any:
    from nvflare.fuel.f3.cellnet.defs import ReturnCode
    from nvflare.fuel.f3.cellnet.utils import make_reply

    state.payloads.append(message.payload)
    state.arrived.set()
    return make_reply(ReturnCode.OK)

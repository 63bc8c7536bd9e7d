# SPDX-License-Identifier: Apache-2.0
"""How fast a model crosses a link of limited rate and some delay: NVFlare's pipelined downloads and this package.

    python -m benchmarks.shaped_link                          # 0.1, 1 and 10 Gbit/s; 0, 20 and 80 ms
    python -m benchmarks.shaped_link --gbit 1 --delay 80 --rounds 3 --tensor-mib 4
    python -m benchmarks.shaped_link --upload                 # from the client to the server
    python -m benchmarks.shaped_link --trainer                # to a trainer behind its client's job, or from it

Every process is real, with cells that talk over loopback; the client's connection to the server passes through a proxy
that limits the rate of each direction and delays it. Delays are round trips: half of one in each direction. The
proxy simulates a link without losses and with TCP windows that are large enough. NVFlare and the plugin alternate.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple

from benchmarks.transfer import broadcast, prepare, processor_seconds
from tests.transport import scenes
from tests.transport.peers import Net, free_port

MIB = 1 << 20
# The queue of a router for bytes that arrive faster than they leave, as a time at the rate of the link.
_QUEUE_SECONDS = 0.02
_SOCKET_BYTES = 256 << 10
_SECONDS_FOR_EACH = 3.0
_MAX_MIB = 512
# The processes, by their roles in a deployment.
_ROLES = {
    "server__job": "server job",
    "server": "server parent",
    "site_1": "client parent",
    "site_1__job": "client job",
    "site_1__job__trainer": "trainer",
}


class ShapedLink:
    """A TCP proxy in a separate process, from one port of loopback to another.

    Args:
        target: Port of the server behind it.
    """

    def __init__(self, target: int) -> None:
        self.port = free_port()
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_run_proxy, args=(theirs, self.port, target), daemon=True)
        self._process.start()
        theirs.close()
        self._ours.recv()

    def shape(self, bytes_per_second: float, round_trip: float) -> None:
        """Change rate and delay, while nothing is on the link."""
        self._ours.send((bytes_per_second, round_trip))
        self._ours.recv()

    def close(self) -> None:
        """End the proxy."""
        self._process.kill()
        self._process.join()
        self._ours.close()


class _Direction:
    """One direction of the link; all connections share its rate."""

    def __init__(self) -> None:
        self.rate = float("inf")
        self.delay = 0.0
        self._lock = threading.Lock()
        self._free_at = 0.0

    def pass_on(self, nbytes: int) -> tuple[float, float]:
        """Return when these bytes arrive, and when the queue accepts more."""
        with self._lock:
            self._free_at = max(time.monotonic(), self._free_at) + nbytes / self.rate
            return self._free_at + self.delay, self._free_at - _QUEUE_SECONDS

    @property
    def piece(self) -> int:
        """How many bytes to move in one step: 2 ms of the rate, so that small messages of others fit in between."""
        return int(min(max(self.rate * 0.002, 4 << 10), 256 << 10))


def _run_proxy(pipe: Any, port: int, target: int) -> None:
    sys.setswitchinterval(0.0005)
    directions = _Direction(), _Direction()
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BYTES)
    listener.bind(("127.0.0.1", port))
    listener.listen()
    threading.Thread(target=_accept, args=(listener, target, directions), daemon=True).start()
    pipe.send(None)
    while True:
        try:
            rate, round_trip = pipe.recv()
        except EOFError:
            return
        for direction in directions:
            direction.rate, direction.delay = rate, round_trip / 2
        pipe.send(None)


def _accept(listener: socket.socket, target: int, directions: tuple[_Direction, _Direction]) -> None:
    while True:
        near, _ = listener.accept()
        far = socket.socket()
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BYTES)
        try:
            far.connect(("127.0.0.1", target))
        except ConnectionRefusedError:  # the server is not up yet; NVFlare tries again
            near.close()
            continue
        for side in near, far:
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for source, sink, direction in (near, far, directions[0]), (far, near, directions[1]):
            _Pump(source, sink, direction)


class _Pump:
    """Moves the bytes of one connection in one direction."""

    def __init__(self, source: socket.socket, sink: socket.socket, direction: _Direction) -> None:
        self._source = source
        self._sink = sink
        self._direction = direction
        self._on_the_way: deque[tuple[float, bytes]] = deque()
        self._changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._write, daemon=True).start()

    def _read(self) -> None:
        data = b"-"
        while data:
            try:
                data = self._source.recv(self._direction.piece)
            except OSError:
                data = b""
            arrival, room = self._direction.pass_on(len(data))
            with self._changed:
                self._on_the_way.append((arrival, data))
                self._changed.notify()
            time.sleep(max(0.0, room - time.monotonic()))

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._on_the_way)
                arrival, data = self._on_the_way.popleft()
            time.sleep(max(0.0, arrival - time.monotonic()))
            try:
                if not data:
                    self._sink.shutdown(socket.SHUT_WR)
                    return
                self._sink.sendall(data)
            except OSError:
                with suppress(OSError):
                    self._source.shutdown(socket.SHUT_RDWR)
                return


class _Transfer(NamedTuple):
    """What one transfer took: time, processor time by process, and memory of the receiver."""

    seconds: float
    processor: dict[str, float]
    receiver_grown: int


class _Case:
    """A server and a client on both ends of a link: NVFlare alone, or with this package."""

    def __init__(self, plugin: bool, scheme: str, trainer: bool, upload: bool) -> None:
        self.name = "plugin" if plugin else "NVFlare"
        self._scratch = tempfile.TemporaryDirectory(prefix="nvflare_lazy_bench_")
        ends = ["server__job", "site_1__job__trainer" if trainer else "site_1__job"]
        names = ["server", "server__job", "site_1", "site_1__job", *(ends[1:] if trainer else [])]
        self._sender, self._receiver = ends[::-1] if upload else ends
        port = free_port()
        self.link = ShapedLink(port)
        self.net = Net(
            self._scratch.name, scheme=scheme, port=port, through=self.link.port, **dict.fromkeys(names, plugin)
        )
        if plugin:
            self.net[self._receiver].call(scenes.offload, True)
        self.net[self._sender].call(prepare, 1, 1)
        self._send()

    def _send(self) -> _Transfer:
        sender, receiver = self.net[self._sender], self.net[self._receiver]
        for peer in self.net.peers.values():
            peer.call(scenes.watch)
        before = {name: peer.call(processor_seconds) for name, peer in self.net.peers.items()}
        seconds = sender.call(broadcast, [receiver.fqcn])
        processor = {name: peer.call(processor_seconds) - before[name] for name, peer in self.net.peers.items()}
        grown = {name: peer.call(scenes.grown) for name, peer in self.net.peers.items()}
        receiver.call(scenes.forget)
        return _Transfer(seconds, processor, grown[self._receiver])

    def measure(self, gbit: float, delay_ms: float, mib: int, tensors: int) -> _Transfer:
        """Send a model of this size over a link with this rate and round trip."""
        self.net[self._sender].call(prepare, mib, tensors)
        self.link.shape(gbit * 1e9 / 8, delay_ms / 1000)
        return self._send()

    def close(self) -> None:
        """End all processes."""
        self.net.close()
        self.link.close()
        self._scratch.cleanup()


def measure(
    links: list[tuple[float, float]],
    *,
    rounds: int,
    tensor_mib: float = 16,
    seconds: float = _SECONDS_FOR_EACH,
    scheme: str = "http",
    trainer: bool = False,
    upload: bool = False,
) -> list[dict[str, Any]]:
    """Send a model over each link several times, with NVFlare alone and with this package in turn."""
    cases = [_Case(plugin, scheme, trainer, upload) for plugin in (False, True)]
    rows = []
    try:
        for gbit, delay in links:
            mib = int(min(_MAX_MIB, max(16, gbit * 1e9 / 8 * seconds / MIB)) // tensor_mib * tensor_mib)
            measured: dict[str, list[_Transfer]] = {case.name: [] for case in cases}
            for number in range(rounds):
                for case in cases if number % 2 == 0 else cases[::-1]:
                    measured[case.name].append(case.measure(gbit, delay, mib, max(1, int(mib / tensor_mib))))
            row: dict[str, Any] = {"gbit": gbit, "delay_ms": delay, "mib": mib}
            for name, results in measured.items():
                row[name] = {
                    "mb_per_second": round(mib * MIB / statistics.median(each.seconds for each in results) / 1e6, 1),
                    "receiver_mib": round(statistics.median(each.receiver_grown for each in results) / MIB),
                    "processor_seconds_per_gib": {
                        _ROLES[process]: round(
                            statistics.median(each.processor[process] for each in results) * 1024 / mib, 2
                        )
                        for process in results[0].processor
                    },
                }
            rows.append(row)
    finally:
        for case in cases:
            case.close()
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| link | round trip | model | NVFlare | plugin | ratio | receiver's memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        stock, plugin = row["NVFlare"], row["plugin"]
        lines.append(
            f"| {row['gbit']:g} Gbit/s | {row['delay_ms']:g} ms | {row['mib']} MiB | {stock['mb_per_second']:g} MB/s "
            f"| {plugin['mb_per_second']:g} MB/s | {plugin['mb_per_second'] / stock['mb_per_second']:.2f} "
            f"| {stock['receiver_mib']} / {plugin['receiver_mib']} MiB |"
        )
    return "\n".join(lines)


def processor_table(rows: list[dict[str, Any]]) -> str:
    """Return the processor seconds per GiB of each process, the median over the links, as a Markdown table."""
    lines = ["| CPU seconds per GiB | NVFlare | plugin |", "|---|---|---|"]
    for process in rows[0]["plugin"]["processor_seconds_per_gib"]:
        stock, plugin = (
            statistics.median(row[name]["processor_seconds_per_gib"][process] for row in rows)
            for name in ("NVFlare", "plugin")
        )
        lines.append(f"| {process} | {stock:.2f} | {plugin:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gbit", type=float, nargs="+", default=[0.1, 1, 10], help="rates of the link")
    parser.add_argument("--delay", type=float, nargs="+", default=[0, 20, 80], help="round trips in ms")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tensor-mib", type=float, default=16, help="size of each tensor")
    parser.add_argument(
        "--seconds", type=float, default=_SECONDS_FOR_EACH, help="what a transfer takes at the full rate"
    )
    parser.add_argument("--scheme", choices=("http", "tcp", "grpc"), default="http", help="NVFlare's driver")
    parser.add_argument("--trainer", action="store_true", help="the client's end is a trainer behind its client's job")
    parser.add_argument("--upload", action="store_true", help="from the client to the server")
    parser.add_argument("--json", help="also write the results to this file")
    options = parser.parse_args()
    rows = measure(
        [(gbit, delay) for gbit in options.gbit for delay in options.delay],
        rounds=options.rounds,
        tensor_mib=options.tensor_mib,
        scheme=options.scheme,
        trainer=options.trainer,
        upload=options.upload,
        seconds=options.seconds,
    )
    print(table(rows), processor_table(rows), sep="\n\n")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()

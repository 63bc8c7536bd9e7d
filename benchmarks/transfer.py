# SPDX-License-Identifier: Apache-2.0
"""How fast a model gets from a server to its clients, and what memory that takes: NVFlare as it is, and this package.

    python -m benchmarks.transfer                    # 1 GiB as 64 and as 20,000 tensors, to 1 and to 4 receivers
    python -m benchmarks.transfer --mib 256 --receivers 1
    python -m benchmarks.transfer --segment-mib 0.5 1 2 4   # which segments are best; they take turns

Every process is real, with a cell that talks TCP over loopback; stock receives into memory, the plugin into scratch.
Anonymous memory counts (RssAnon): the growth of the receiver that grew most, and of the sender beyond its model.
Processor time is the time of the sender and of all receivers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from typing import Any

from tests.transport import scenes
from tests.transport.peers import CHANNEL, TOPIC, Net, State

MIB = 1 << 20


def prepare(state: State, mib: int, count: int) -> None:
    """Make the model."""
    import torch

    size = mib * MIB // 4 // count
    state.kept["model"] = {f"layer.{i}": torch.full((size,), float(i)) for i in range(count)}


def broadcast(state: State, targets: list[str]) -> float:
    """Send the model to all and return the seconds until all have it."""
    from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
    from nvflare.fuel.f3.cellnet.utils import new_cell_message

    start = time.perf_counter()
    replies = state.cell.broadcast_request(
        channel=CHANNEL,
        topic=TOPIC,
        targets=targets,
        request=new_cell_message({}, {"model": state.kept["model"]}),
        timeout=300.0,
    )
    seconds = time.perf_counter() - start
    codes = {reply.get_header(MessageHeaderKey.RETURN_CODE) for reply in replies.values()}
    if codes != {"ok"}:
        raise RuntimeError(f"some receivers did not get the model: {codes}")
    return seconds


def processor_seconds(state: State) -> float:
    """Return the processor time that this process has used so far."""
    return time.process_time()


def use_segments(state: State, nbytes: int) -> None:
    """Ask for so much at a time."""
    from nvflare_lazy.transport.segments import protocol

    protocol.SEGMENT_BYTES = nbytes


def measure(
    plugin: bool, mib: int, count: int, receivers: int, rounds: int, sizes: list[int | None]
) -> list[dict[str, Any]]:
    """Send a model several times with each size of segments; each receiver drops it before the next."""
    measured: dict[int | None, list[tuple[float, float, int, int]]] = {size: [] for size in sizes}
    with tempfile.TemporaryDirectory(prefix="nvflare_lazy_bench_") as scratch:
        names = [f"site_{number}" for number in range(1, receivers + 1)]
        with Net(scratch, server=plugin, **dict.fromkeys(names, plugin)) as net:
            targets = [net[name].fqcn for name in names]
            net["server"].call(prepare, 1, 8)
            if plugin:
                for name in names:
                    net[name].call(scenes.offload, True)
            net["server"].call(broadcast, targets)
            net["server"].call(prepare, mib, count)
            for _ in range(rounds):
                for size in sizes:
                    for name in names:
                        net[name].call(scenes.forget)
                        if size is not None:
                            net[name].call(use_segments, size)
                    measured[size].append(_one_round(net, names, targets))
            for name in names:
                net[name].call(scenes.forget)
    rows = []
    for size in sizes:
        seconds, processor, receiver, sender = zip(*measured[size], strict=True)
        rows.append(
            {
                "who": "plugin to disk" if plugin else "stock to memory",
                "segment_mib": None if size is None else size / MIB,
                "tensors": count,
                "receivers": receivers,
                "seconds": round(statistics.median(seconds), 2),
                "mb_per_second": round(mib * MIB * receivers / statistics.median(seconds) / 1e6),
                "processor_seconds": round(statistics.median(processor), 2),
                "receiver_mib": round(max(receiver) / MIB),
                "sender_mib": round(max(sender) / MIB),
            }
        )
    return rows


def _one_round(net: Net, names: list[str], targets: list[str]) -> tuple[float, float, int, int]:
    everybody = ["server", *names]
    for name in everybody:
        net[name].call(scenes.watch)
    before = sum(net[name].call(processor_seconds) for name in everybody)
    seconds = net["server"].call(broadcast, targets)
    processor = sum(net[name].call(processor_seconds) for name in everybody) - before
    receiver = max(net[name].call(scenes.grown) for name in names)
    return seconds, processor, receiver, net["server"].call(scenes.grown)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the model")
    parser.add_argument("--tensors", type=int, nargs="+", default=[64, 20_000])
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--segment-mib", type=float, nargs="+", help="compare these sizes, without stock")
    parser.add_argument("--json", help="also write the results to this file")
    options = parser.parse_args()
    results = []
    print(
        f"{'':24}{'tensors':>8}{'receivers':>10}{'seconds':>9}{'MB/s':>7}{'processor s':>13}"
        f"{'receiver MiB':>14}{'sender MiB':>12}"
    )
    sizes = [int(size * MIB) for size in options.segment_mib or ()] or [None]
    for count in options.tensors:
        for receivers in options.receivers:
            for plugin in (True,) if options.segment_mib else (False, True):
                rows = measure(plugin, options.mib, count, receivers, options.rounds, sizes)
                results += rows
                for row in rows:
                    who = row["who"] + (f", {row['segment_mib']:g} MiB" if row["segment_mib"] else "")
                    print(
                        f"{who:24}{count:8}{receivers:10}{row['seconds']:9.2f}{row['mb_per_second']:7}"
                        f"{row['processor_seconds']:13.2f}{row['receiver_mib']:14}{row['sender_mib']:12}",
                        flush=True,
                    )
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"mib": options.mib, "rounds": options.rounds, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""How fast a model gets from a server to its clients, and what memory that takes: NVFlare as it is, and this package.

    python -m benchmarks.transfer                    # 1 GiB as 64 and as 20,000 tensors, to 1 and to 4 receivers
    python -m benchmarks.transfer --mib 256 --receivers 1

Every process is real, with a cell that talks TCP over loopback; stock receives into memory, the plugin into scratch.
Anonymous memory counts (RssAnon): the growth of the receiver that grew most, and of the sender beyond its model.
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
        raise RuntimeError(f"not everybody got the model: {codes}")
    return seconds


def measure(plugin: bool, mib: int, count: int, receivers: int, rounds: int) -> dict[str, Any]:
    """Send a model several times; each receiver drops it before the next."""
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
            seconds, memory, sender = [], [], []
            for _ in range(rounds):
                for name in names:
                    net[name].call(scenes.forget)
                    net[name].call(scenes.watch)
                net["server"].call(scenes.watch)
                seconds.append(net["server"].call(broadcast, targets))
                memory.append(max(net[name].call(scenes.grown) for name in names))
                sender.append(net["server"].call(scenes.grown))
            for name in names:
                net[name].call(scenes.forget)
    return {
        "who": "plugin to disk" if plugin else "stock to memory",
        "tensors": count,
        "receivers": receivers,
        "seconds": round(statistics.median(seconds), 2),
        "mb_per_second": round(mib * MIB * receivers / statistics.median(seconds) / 1e6),
        "receiver_mib": round(max(memory) / MIB),
        "sender_mib": round(max(sender) / MIB),
    }


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the model")
    parser.add_argument("--tensors", type=int, nargs="+", default=[64, 20_000])
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="also write the results to this file")
    options = parser.parse_args()
    results = []
    print(f"{'':16}{'tensors':>8}{'receivers':>10}{'seconds':>9}{'MB/s':>7}{'receiver MiB':>14}{'sender MiB':>12}")
    for count in options.tensors:
        for receivers in options.receivers:
            for plugin in (False, True):
                row = measure(plugin, options.mib, count, receivers, options.rounds)
                results.append(row)
                print(
                    f"{row['who']:16}{count:8}{receivers:10}{row['seconds']:9.2f}{row['mb_per_second']:7}"
                    f"{row['receiver_mib']:14}{row['sender_mib']:12}",
                    flush=True,
                )
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"mib": options.mib, "rounds": options.rounds, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()

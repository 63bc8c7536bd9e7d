# SPDX-License-Identifier: Apache-2.0
"""Senders that disconnect, stall, truncate and send false data, and receivers that report the effect."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from tests.transport import scenes
from tests.transport.peers import State

if TYPE_CHECKING:
    from nvflare_lazy.transport.limits import PayloadLimits

MIB = 1 << 20


def offer(state: State, mib: int = 16, fault: str | None = None, at: float = 0.0, count: int = 4) -> str:
    """Offer tensors for download in segments, with something wrong; return the reference."""
    import torch

    from nvflare_lazy.transport.tensor_downloader import TensorDownloadable

    values = {f"T{i}": torch.full((mib * MIB // 4 // count,), float(i)) for i in range(count)}
    if fault == "never ends":
        from nvflare_lazy.tensors.lazy_tensor import LazyTensor

        values = {"T0": LazyTensor(_Zeros(1 << 40), torch.uint8, (1 << 40,))}
    made = TensorDownloadable(values, 2 * MIB, cell=state.cell)
    if fault is not None:
        made._payload = _bad_payload(made._payload, fault, at)
    return _add(state, made)


def offer_names(state: State, count: int, name_bytes: int, stalls: bool = False) -> str:
    """Offer tensors of one byte with long names that JSON escapes; return the reference."""
    import torch

    from nvflare_lazy.transport.tensor_downloader import TensorDownloadable

    values = {f"{i:06}".ljust(name_bytes, "\x01"): torch.zeros(1, dtype=torch.uint8) for i in range(count)}
    made = TensorDownloadable(values, 2 * MIB, cell=state.cell)
    if stalls:
        made._payload = _bad_payload(made._payload, "stalls", 0.0)
    return _add(state, made)


def receive_all(state: State, offers: list[tuple[str, str]], **kwargs: Any) -> tuple[list[dict[str, Any]], int]:
    """Receive several payloads at once; return what became of each, and by how much memory grew."""
    watch = scenes.Watch()
    with ThreadPoolExecutor(len(offers)) as pool:
        outcomes = list(pool.map(lambda offer: receive(state, *offer, **kwargs), offers))
    return outcomes, watch.grown()


def offer_items(state: State, items: list[bytes], endless: str | None = None) -> str:
    """Offer items in NVFlare's form, as they are given, or without end; return the reference."""
    from nvflare.fuel.f3.streaming.download_service import Downloadable, ProduceRC

    def made(number: int) -> list[bytes]:
        if endless == "nothing":
            return []
        name = "T0" if endless == "the same" else f"T{number}"
        return [item(name, MIB if endless == "tensors" else 0)]

    class Scripted(Downloadable):
        def produce(self, position: dict | None, requester: str) -> tuple:
            start = 0 if not position else position["start"] + position["count"]
            if endless:
                return ProduceRC.OK, made(start), {"start": start, "count": 1}
            if start >= len(items):
                return ProduceRC.EOF, None, {}
            return ProduceRC.OK, [items[start]], {"start": start, "count": 1}

    return _add(state, Scripted(None))


def item(name: str, nbytes: int) -> bytes:
    """One tensor in NVFlare's form."""
    import safetensors.torch
    import torch

    return safetensors.torch.save({name: torch.zeros(nbytes, dtype=torch.uint8)})


def _add(state: State, downloadable: Any) -> str:
    from nvflare.fuel.f3.streaming.obj_downloader import ObjectDownloader

    downloader = ObjectDownloader(cell=state.cell, timeout=60.0, num_receivers=1)
    return downloader.add_object(downloadable)


def _bad_payload(good: Any, fault: str, at: float) -> Any:
    from nvflare_lazy.transport._downloadable import Payload
    from nvflare_lazy.transport.segments import manifest as manifests

    class Bad(Payload):
        served = 0

        def read(self, start: int, count: int) -> Any:
            self.served += count
            if start + count >= at * self.manifest.nbytes:
                if fault == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                if fault == "stalls":
                    threading.Event().wait(60)
                if fault == "cuts short":
                    return super().read(start, count)[:-1]
                if fault == "sends too much":
                    return memoryview(bytes(super().read(start, count)) + b"x")
                if fault == "fails":
                    raise OSError("the disk of the sender has died")
            if fault == "is slow":
                time.sleep(0.05)
            return super().read(start, count)

        @property
        def encoded_manifest(self) -> bytes:
            import msgpack

            if not fault.startswith("list: "):
                return super().encoded_manifest
            total = self.manifest.nbytes
            head = [manifests.VERSION, "torch", 2, total]
            records = {
                "overlap": [[None, "uint8", [total], None], [None, "uint8", [4], 8]],
                "overflow": [[None, "float64", [1 << 61, 1 << 61], None], [None, "uint8", [4], None]],
                "hidden overflow": [[None, "uint8", [total], None], [None, "float64", [0, 1 << 61], None]],
                "wrong dtype": [[None, "float33", [total], None], [None, "uint8", [0], None]],
                "wrong total": [[None, "uint8", [total - 1], None], [None, "uint8", [0], None]],
                "too few": [[None, "uint8", [total], None]],
                "too many": [[None, "uint8", [total], None], [None, "uint8", [0], None], [None, "uint8", [0], None]],
                "same name": [["a", "uint8", [total], None], ["a", "uint8", [0], None]],
                "negative": [[None, "uint8", [-1, -total], None], [None, "uint8", [0], None]],
                "no list": [["a"], 7],
            }.get(fault.removeprefix("list: "))
            if fault == "list: rubbish":
                return os.urandom(300)
            if fault == "list: a million names":
                return b"".join([msgpack.packb([1, "torch", 10**6, total]), *[msgpack.packb(["x", 1, [], 0])] * 10])
            return b"".join(msgpack.packb(record) for record in [head, *records])

    return Bad({name: good._values[name] for name in good.names}, good.backend)


def receive(
    state: State,
    fqcn: str,
    ref_id: str,
    *,
    to_disk: bool = True,
    timeout: float = 60.0,
    abort_after: float | None = None,
    quota: int | None = None,
    root: str | None = None,
    delete_after: float | None = None,
    min_free: int | None = None,
    hold: str | None = None,
    limits: PayloadLimits | None = None,
) -> dict[str, Any]:
    """Download, and return the outcome and the remaining files."""
    from nvflare.apis.signal import Signal

    from nvflare_lazy.scratch import JobScratch
    from nvflare_lazy.transport import offload
    from nvflare_lazy.transport._backends import TORCH
    from nvflare_lazy.transport._disk_consumer import DiskConsumer
    from nvflare_lazy.transport.limits import PayloadTally
    from nvflare_lazy.transport.receive import RemotePayload
    from nvflare_lazy.transport.receive import receive as receive_into
    from nvflare_lazy.transport.tensor_downloader import TensorConsumer

    abort = Signal()
    if abort_after is not None:
        threading.Timer(abort_after, abort.trigger, ["enough"]).start()
    tally = None if limits is None else PayloadTally(limits)
    remote = RemotePayload(offload.runtime, state.cell, fqcn, ref_id, timeout=timeout, abort=abort, tally=tally)
    started = time.monotonic()
    outcome: dict[str, Any] = {"error": None, "text": "", "tensors": 0}
    job = JobScratch.open(root or state.scratch_root, job="tests", quota=quota, min_free=min_free, warn=False)
    try:
        if to_disk:
            download = job.download(label=fqcn)
            if delete_after is not None:
                threading.Timer(delete_after, shutil.rmtree, [str(download.path)]).start()
            consumer = DiskConsumer(TORCH, download)
            receive_into(consumer, remote)
            received: Any = consumer.values()
            while hold is not None and not os.path.exists(hold):
                time.sleep(0.05)
        else:
            received = receive_into(TensorConsumer(), remote)
        outcome["tensors"] = len(received)
        few = quota is None and len(received) < 1000
        outcome["sum"] = sum(float(tensor.sum()) for tensor in received.values()) if few else None
    except Exception as error:
        outcome.update(error=type(error).__name__, text=str(error))
        del error
    received = consumer = download = None
    outcome["seconds"] = time.monotonic() - started
    outcome["used"] = job.used
    outcome["left"] = scenes.files_under(str(job.path))
    outcome["recycled"] = len(list(job.path.glob("recycled/*")))
    place = job.path
    job.release()
    outcome["job left"] = place.exists()
    outcome["budget"] = _budget_used()
    return outcome


def _budget_used() -> int:
    from nvflare_lazy.transport import offload

    return offload.runtime.budget.used


def offer_often(state: State, mib: int, times: int) -> list[str]:
    """Offer the same tensors several times; return the references."""
    import torch

    from nvflare_lazy.transport.tensor_downloader import TensorDownloadable

    values = {f"T{i}": torch.full((mib * MIB // 16,), float(i)) for i in range(4)}
    return [_add(state, TensorDownloadable(values, 2 * MIB, cell=state.cell)) for _ in range(times)]


def abort_cycles(state: State, fqcn: str, refs: list[str]) -> list[dict[str, int]]:
    """Abort one download after the other; say what the process holds half way and at the end."""
    held = []
    for number, ref_id in enumerate(refs, 1):
        receive(state, fqcn, ref_id, abort_after=0.002 * (number % 10))
        if number in (len(refs) // 2, len(refs)):
            held.append(_held())
    return held


def _held() -> dict[str, int]:
    import ctypes
    import gc

    from nvflare.fuel.f3.streaming.byte_receiver import RxTask

    # NVFlare remembers each stream for a minute, with a thread. A leak is an object that remains without those.
    for task in list(RxTask.rx_task_map.values()):
        task._remove_task()
    time.sleep(0.3)
    gc.collect()
    threads, files, _ = scenes.threads_and_files(None)
    # NVFlare also remembers the last few thousand streams that it has sent.
    objects = sum(type(thing).__name__ != "_TxTaskContext" for thing in gc.get_objects())
    ctypes.CDLL(None).malloc_trim(0)
    return {"threads": threads, "files": files, "objects": objects, "memory": scenes.measure.rss_anon()}


def used_by(state: State) -> Any:
    from nvflare_lazy.scratch import list_scratch

    return [(report.job, report.alive, report.nbytes) for report in list_scratch(state.scratch_root)]


def leases_of(state: State) -> list[str]:
    """Open a job's scratch as a restarted process does, and say whose is there then."""
    from nvflare_lazy.scratch import JobScratch, list_scratch

    with JobScratch.open(state.scratch_root, job="tests", warn=False):
        return sorted(report.owner for report in list_scratch(state.scratch_root))


def _zeros() -> Any:
    from nvflare_lazy.tensors.byte_source import ByteSource

    class Zeros(ByteSource):
        def __init__(self, nbytes: int) -> None:
            self.nbytes = nbytes

        def _read_into(self, buffer: memoryview, offset: int) -> None:
            buffer[:] = bytes(len(buffer))

        def describe(self) -> str:
            return "nothing but zeros"

    return Zeros


_Zeros = _zeros()


def drop_answers(state: State, every: int) -> None:
    """Drop one of every `every` answers to requests for segments; none, if that is 0."""
    from nvflare_lazy.transport.segments.server import SegmentServer

    answer = state.kept.setdefault("answer", SegmentServer._answer)
    counter = iter(range(1, 1 << 30))

    def forgetful(self: SegmentServer, job: Any) -> bool:
        return not next(counter) % every or answer(self, job)

    SegmentServer._answer = forgetful if every else answer


def be_impatient(state: State) -> None:
    """Do not wait as long as usual for what does not come."""
    from nvflare_lazy.transport.segments import client, way

    way.FIRST_NEWS_SECONDS = 0.5
    client._STALL_SECONDS = 0.1
    client._RETRY_SECONDS = 0.2

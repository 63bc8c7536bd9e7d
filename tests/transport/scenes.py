# SPDX-License-Identifier: Apache-2.0
"""What peers do in tests: make payloads, send them, look at what they got, and say how much memory that took."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

from tests import measure
from tests.transport.peers import CHANNEL, TOPIC, State

MIB = 1 << 20


# ---- payloads ------------------------------------------------------------------------------------------------------


def tensors(kind: str) -> dict[str, Any]:
    """Make a payload; the same for the same name."""
    import torch

    torch.manual_seed(7)
    if kind == "one":
        return {"w": torch.randn(333, 7)}
    if kind == "ten":
        return {f"layer.{i}": torch.randn(i + 1, 50_000) for i in range(10)}
    if kind == "many":
        return {f"layer.{i}": torch.full((i % 7 + 1,), float(i)) for i in range(20_000)}
    if kind == "dtypes":
        made = {}
        for name in DTYPES:
            dtype = getattr(torch, name)
            raw = torch.randint(0, 100, (3, 16), dtype=torch.uint8)
            made[name] = (raw % 2 == 0) if dtype is torch.bool else raw.to(torch.float32).to(dtype)
        return made
    if kind == "odd for stock":  # what a stock sender can send
        made = tensors("odd")
        return {name: made[name] for name in ("scalar", "empty", "tied.a", "tied.b", "parameter.data")}
    if kind == "odd":
        base = torch.randn(40, 30)
        tied = torch.randn(8, 8)
        return {
            "scalar": torch.tensor(3.5),
            "empty": torch.zeros(0, 4),
            "tied.a": tied,
            "tied.b": tied,
            "alias": tied.detach(),
            "transposed": base.T,
            "strided": base[::3, 1::2],
            "expanded": torch.randn(1, 5).expand(6, 5),
            "parameter.data": torch.nn.Parameter(torch.randn(4)).data,
        }
    raise ValueError(kind)


DTYPES = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
    "float16", "bfloat16", "float32", "float64", "complex64", "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip


def arrays(kind: str) -> dict[str, Any]:
    """Make a payload of arrays."""
    import numpy as np

    kind = kind.removesuffix(" for stock")

    random = np.random.default_rng(7)
    if kind == "odd":
        base = random.standard_normal((40, 30))
        tied = random.standard_normal((8, 8))
        return {
            "scalar": np.array(3.5),
            "empty": np.zeros((0, 4)),
            "tied.a": tied,
            "tied.b": tied,
            "transposed": base.T,
            "fortran": np.asfortranarray(base),
            "strided": base[::3, 1::2],
            "reversed": base[::-1],
            "big endian": base.astype(">f4"),
            "text": np.array(["one", "seventeen"]),
            "structured": np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "i4"), ("b", "f8")]),
            "complex": base[:2].astype(np.complex128),
        }
    if kind == "dtypes":
        names = [name for name in DTYPES if "float8" not in name and name != "bfloat16"]
        return {name: random.integers(0, 2, (3, 16)).astype(name) for name in names}
    return {name: np.asarray(value) for name, value in tensors(kind).items()}


def payload(family: str, kind: str) -> dict[str, Any]:
    return tensors(kind) if family == "torch" else arrays(kind)


# ---- doing ---------------------------------------------------------------------------------------------------------


def send(state: State, target: str, family: str, kind: str, keep: bool = False) -> str:
    """Send a payload and wait for the answer; return the code of it."""
    return send_value(state, target, payload(family, kind))


def send_value(state: State, target: str, value: Any, timeout: float = 60.0) -> str:
    from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
    from nvflare.fuel.f3.cellnet.utils import new_cell_message

    reply = state.cell.send_request(
        channel=CHANNEL,
        topic=TOPIC,
        target=target,
        request=new_cell_message({}, {"model": value}),
        timeout=timeout,
    )
    return reply.get_header(MessageHeaderKey.RETURN_CODE)


def offload(state: State, on: bool) -> None:
    """Receive to disk from now on, or to memory."""
    from nvflare_lazy.transport import offload as switch

    if on:
        switch.enable()
    else:
        switch.reset()


def compare(state: State, family: str, kind: str, lazy: bool) -> list[str]:
    """Say what of the last payload is not as it was sent."""
    import numpy as np
    import torch

    from nvflare_lazy.tensors.lazy_array import LazyArray
    from nvflare_lazy.tensors.lazy_tensor import LazyTensor

    expected = payload(family, kind)
    received = state.payloads[-1]["model"]
    wrong = []
    if list(received) != list(expected):
        return [f"names {list(received)[:20]}"]
    for name, want in expected.items():
        got = received[name]
        if isinstance(got, (LazyTensor, LazyArray)) != lazy:
            wrong.append(f"{name} is a {type(got).__name__}")
        if not isinstance(got, torch.Tensor if family == "torch" else np.ndarray):
            wrong.append(f"{name} is no {family}")
        if got.dtype != want.dtype or tuple(got.shape) != tuple(want.shape):
            wrong.append(f"{name} is {got.dtype} {tuple(got.shape)}")
            continue
        plain = got.materialize() if lazy else got
        if family == "torch":
            same = torch.equal(_bits(plain), _bits(want))
        else:
            same = plain.tobytes() == np.ascontiguousarray(want).tobytes()
        if not same:
            wrong.append(f"{name} has other values")
    if "tied.a" in received and received["tied.a"] is not received["tied.b"]:
        wrong.append("tied tensors came apart")
    return wrong


def _bits(tensor: Any) -> Any:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)


def forget(state: State) -> None:
    """Drop everything that was received."""
    state.payloads.clear()
    state.arrived.clear()
    state.kept.clear()
    gc.collect()


def scratch_files(state: State) -> list[str]:
    """What is on disk of downloads."""
    root = Path(state.scratch_root or "/nonexistent")
    return sorted(str(path.relative_to(root)) for path in root.rglob("*.safetensors"))


# ---- memory --------------------------------------------------------------------------------------------------------


class Watch:
    """Follows a process's anonymous memory, and remembers the peak."""

    def __init__(self) -> None:
        gc.collect()
        self.start = self.peak = measure.rss_anon()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._stop.wait(0.005):
            self.peak = max(self.peak, measure.rss_anon())

    def grown(self) -> int:
        """Bytes that the peak is above the start; ends the watch."""
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, measure.rss_anon())
        return self.peak - self.start


def watch(state: State) -> None:
    state.kept["watch"] = Watch()


def grown(state: State) -> int:
    return state.kept.pop("watch").grown()


def threads_and_files(state: State) -> tuple[int, int, int]:
    """Threads, open descriptors and anonymous memory."""
    gc.collect()
    time.sleep(0.2)
    return threading.active_count(), len(os.listdir("/proc/self/fd")), measure.rss_anon()

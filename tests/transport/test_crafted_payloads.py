# SPDX-License-Identifier: Apache-2.0
"""Crafted and mutated payloads from a client: a named error or a correct result, within bounded memory and time.

Each case is generated from its number, which a failed assertion shows. The ordinary run has 2,500 cases;
`HYPOTHESIS_PROFILE=night` runs 20 times as many, and other ones each time.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import random
import time
import tracemalloc
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest
import torch
from nvflare.fuel.utils.fobs import FOBSContextKey
from nvflare.fuel.utils.fobs.datum import Datum, DatumType

from nvflare_lazy.errors import NVFlareLazyError, ProtocolError
from nvflare_lazy.scratch import JobScratch
from nvflare_lazy.transport import offload
from nvflare_lazy.transport._backends import NUMPY, TORCH
from nvflare_lazy.transport._disk_consumer import DiskConsumer
from nvflare_lazy.transport._memory_consumer import MemoryConsumer
from nvflare_lazy.transport.decomposers import LazyArrayDecomposer, LazyTensorDecomposer
from nvflare_lazy.transport.failed import failure_of
from nvflare_lazy.transport.limits import PayloadLimits, PayloadTally
from nvflare_lazy.transport.offload import ReceiveMode, TransferRuntime
from nvflare_lazy.transport.receive import RemotePayload, receive
from nvflare_lazy.transport.segments import client, protocol, way
from nvflare_lazy.transport.segments import manifest as manifests
from tests.transport.fake_cell import SENDER, FakeCell, ItemSender, Sender

NIGHT = os.environ.get("HYPOTHESIS_PROFILE") == "night"
LIMITS = PayloadLimits(nbytes=1 << 20, tensors=50, name_bytes=2 << 10)
_MAX_CASE_SECONDS = 5.0
_MAX_CASE_BYTES = 16 << 20


def numbers(count):
    """The numbers of the cases."""
    first = random.SystemRandom().randrange(1 << 40) if NIGHT else 0
    return range(first, first + count * (20 if NIGHT else 1))


def deep(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


HOSTILE = [
    0, 1, -1, 2, 7, 255, 2**31, 2**32 + 1, 2**53 + 1, 2**61, 2**62 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63),
    0.0, 1.0, -0.0, 0.5, 1e308, float("inf"), float("nan"), True, False, None, "", "T0", "7", "x" * 300, "\n\x1b[31m",
    "uint8", "float32", "|O", "<f4", "V0", "U0", "V2147483647", "V-1", "f8,i4", "(9999999,9999999)f8", b"", b"T0", [],
    {}, [0], [1, 2], [-1], [1.0], [True], [2**62, 2**62], [1 << 40, 1 << 21], [0, 2**62], [1] * 64, [1] * 65, ["a"],
    [["a", "<f4"]], [["a", "<f4", [2**40]]], [["a", [["b", "<i2"]]]], deep(30), deep(400), {"a": 1}, {0: {}},
]  # fmt: skip


def hostile(rng):
    value = rng.choice(HOSTILE)
    return rng.randrange(-(2**70), 2**70) if rng.random() < 0.05 else value


def mutated(rng, value):
    """Replace, remove, duplicate or swap something, anywhere in nested lists and dictionaries."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        value = dict(value)
        key = rng.choice(list(value))
        if rng.random() < 0.15:
            del value[key]
        else:
            value[key] = mutated(rng, value[key])
        return value
    if isinstance(value, list) and value and rng.random() < 0.9:
        value = list(value)
        at = rng.randrange(len(value))
        kind = rng.random()
        if kind < 0.1:
            del value[at]
        elif kind < 0.2:
            value.insert(at, value[rng.randrange(len(value))])
        elif kind < 0.3:
            other = rng.randrange(len(value))
            value[at], value[other] = value[other], value[at]
        else:
            value[at] = mutated(rng, value[at])
        return value
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.4:
        return value + rng.choice([-1, 1, 4, 8, -value * 2, 2**32])
    return hostile(rng)


def damaged(rng, data):
    """Change, cut out or insert some bytes."""
    data = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(data) + 1)
        kind = rng.random()
        if kind < 0.5 and at < len(data):
            data[at] = rng.randrange(256)
        elif kind < 0.7:
            del data[at : at + rng.randrange(1, 40)]
        elif kind < 0.9:
            data[at:at] = rng.randbytes(rng.randrange(1, 40))
        else:
            data += data[: rng.randrange(1, 40)]
    return bytes(data)


def values_of(rng, backend):
    """Make a small payload."""
    made = {}
    for index in range(rng.randrange(1, 9)):
        shape = tuple(rng.randrange(4) for _ in range(rng.randrange(4)))
        if rng.random() < 0.1:
            shape = (rng.randrange(40_000),)
        name = f"T{index}" if rng.random() < 0.7 else f"layer.{index}.\x01é"
        if backend is TORCH:
            dtype = rng.choice([torch.float32, torch.bfloat16, torch.bool, torch.uint8, torch.complex64])
            made[name] = torch.ones(shape, dtype=dtype)
        else:
            dtype = rng.choice(["<f4", ">f8", "U3", "?", "M8[us]", [("a", "<i4"), ("b", "<f8", (2,))]])
            made[name] = np.zeros(shape, dtype)
    return made


def records_of(encoded):
    return list(msgpack.Unpacker(io.BytesIO(encoded)))


def pack(records):
    parts = []
    for record in records if isinstance(records, list) else [records]:
        try:
            parts.append(msgpack.packb(record))
        except (OverflowError, ValueError):  # a number that does not travel
            parts.append(msgpack.packb(2**64 - 1))
    return b"".join(parts)


class Bounded:
    """Measures each case: its processor time, and the memory that Python allocates for it."""

    def __enter__(self):
        tracemalloc.start()
        return self

    def __exit__(self, *_):
        tracemalloc.stop()

    def run(self, case, number, *args):
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        started = time.thread_time()
        case(number, *args)
        assert time.thread_time() - started < _MAX_CASE_SECONDS, number
        assert tracemalloc.get_traced_memory()[1] - before < _MAX_CASE_BYTES, number


# ---- lists of tensors ------------------------------------------------------------------------------------------------


def crafted_manifest(rng, backend):
    """Make a list of tensors that is wrong in some way, or only might be."""
    encoded = Sender.of(values_of(rng, backend), backend).encoded
    if rng.random() < 0.3:
        return damaged(rng, encoded)
    records = records_of(encoded)
    for _ in range(rng.randrange(1, 3)):
        at = rng.randrange(len(records))
        records[at] = mutated(rng, records[at])
    if rng.random() < 0.1:
        records = mutated(rng, records)
    return pack(records)


def decode_case(number):
    rng = random.Random(number)
    backend = rng.choice([TORCH, NUMPY])
    encoded = crafted_manifest(rng, backend)
    try:
        made = manifests.decode(encoded, backend, SENDER, LIMITS)
    except ProtocolError:
        return
    counts = [n for item in made.items for n in (*item.shape, item.nbytes, item.offset)]
    assert all(type(n) is int and n >= 0 for n in counts)
    assert all(type(item.name) is str and item.offset + item.nbytes <= made.nbytes for item in made.items)
    assert len({item.name for item in made.items}) == len(made.items) <= LIMITS.tensors
    assert made.size.name_bytes <= LIMITS.name_bytes
    assert sum(item.nbytes for item in made.stored()) == made.nbytes


def test_lists_of_tensors():
    """A list that was changed is refused by name, or is a list of counts and offsets that hold together."""
    with Bounded() as bounded:
        for number in numbers(1200):
            bounded.run(decode_case, number)


# ---- transfers -------------------------------------------------------------------------------------------------------


class Lying(Sender):
    """Offers something else than it has, or answers requests with something else than was asked for."""

    def __init__(self, rng, values, backend):
        good = Sender.of(values, backend)
        super().__init__(good.encoded, good.data, len(values))
        self._rng = rng
        self._answers = rng.random() < 0.6
        kind = rng.random()
        if kind < 0.3:
            self.offer = mutated(rng, self.offer)
        elif kind < 0.7:
            self.encoded = crafted_manifest(rng, backend)
            self.offer = {**self.offer, "manifest": len(self.encoded)}
        else:
            self._answers = True

    def replies(self):
        for reply in super().replies():
            for _ in range(self._rng.choice([1, 1, 1, 3])):
                yield mutated(self._rng, reply) if self._rng.random() < 0.2 else reply

    def on_request(self, fields, take):
        rng = self._rng
        if not self._answers or rng.random() < 0.5:
            return super().on_request(fields, take)
        data = memoryview(self.encoded if fields["what"] == protocol.MANIFEST else self.data)
        data = bytes(data[fields["at"] : fields["at"] + fields["n"]])
        headers = protocol.Data(fields["to"], fields["at"]).to_headers()
        kind = rng.random()
        if kind < 0.3:
            headers = mutated(rng, headers)
        elif kind < 0.5:
            data = hostile(rng)
        elif kind < 0.7:
            data = damaged(rng, data)
        elif kind < 0.8:
            headers[protocol.KEY]["error"] = hostile(rng)
        elif kind < 0.9:
            take(headers, data, hostile(rng))
            return None
        take(headers, data)
        if rng.random() < 0.3:
            take(headers, data)
        return None


def crafted_items(rng, values, backend):
    """Make items in NVFlare's form, some of them wrong, in some number."""
    items = [bytes(backend.pack_item(name, value, backend.source(value))) for name, value in values.items()]
    kind = rng.random()
    if kind < 0.4:
        at = rng.randrange(len(items))
        items[at] = damaged(rng, items[at])
    elif kind < 0.6:
        items = mutated(rng, items)
    elif kind < 0.7:
        items = [items] * 3
    elif kind < 0.8:
        items += [[]] * rng.randrange(20)
    else:
        shape = rng.choice([(0,), (0, 5), (40_000,)])
        endless = TORCH.new(torch.uint8, shape)[0] if backend is TORCH else np.zeros(shape)
        source = backend.source(endless)
        items = (bytes(backend.pack_item(f"{rng.random()}", endless, source)) for _ in itertools.count())
    return ItemSender(items)


def transfer_case(number, cell, job):
    rng = random.Random(number)
    backend = rng.choice([TORCH, NUMPY])
    values = values_of(rng, backend)
    make = crafted_items if rng.random() < 0.4 else Lying
    try:
        sender = make(rng, values, backend)
    except NVFlareLazyError:  # not every type has a form in NVFlare's items
        return
    cell.connect(sender)
    runtime = TransferRuntime()
    remote = RemotePayload(runtime, cell, SENDER, "ref", timeout=0.02, tally=PayloadTally(LIMITS))
    to_disk = rng.random() < 0.5
    consumer = DiskConsumer(backend, job.download("x")) if to_disk else MemoryConsumer(backend)
    try:
        received = receive(consumer, remote)
        if to_disk:
            received = consumer.values()
        total = 0
        for value in received.values():
            dtype, shape = backend.describe(value)
            total += backend.nbytes(dtype, shape)
            loaded = value.materialize() if to_disk else value
            assert backend.describe(loaded) == (dtype, shape)
        assert total <= LIMITS.nbytes
        assert len(received) <= LIMITS.tensors
        del received
    except NVFlareLazyError as error:
        error.__traceback__ = None
    finally:
        assert runtime.budget.used == 0
        assert runtime.throttle.used == 0
        assert not runtime.shared(client.Inbox)._downloads
    consumer.failure = consumer.result = None
    del consumer


def test_transfers(tmp_path, monkeypatch):
    """Offers, segments and items that were changed: nothing is left in scratch, in flight, or waiting for data."""
    monkeypatch.setattr(client, "_POLL_SECONDS", 0.001)
    monkeypatch.setattr(way, "FIRST_NEWS_SECONDS", 0.01)
    cell = FakeCell()
    with JobScratch.open(tmp_path, job="tests", min_free=0, warn=False) as job, Bounded() as bounded:
        for number in numbers(700):
            bounded.run(transfer_case, number, cell, job)
            assert job.used == 0, number
            assert [path for path in job.path.iterdir() if path.name != "recycled"] == [], number


# ---- placeholders ----------------------------------------------------------------------------------------------------


def placeholder_case(number, decomposers, cells):
    rng = random.Random(number)
    decomposer = rng.choice(decomposers)
    backend = decomposer.backend
    cell = rng.choice(cells)
    is_server = cell.get_fqcn().startswith("server")
    values = values_of(rng, backend)
    cell.connect(Sender.of(values, backend))
    manager = SimpleNamespace(
        fobs_ctx={FOBSContextKey.CELL: cell, FOBSContextKey.PASS_THROUGH: rng.random() < 0.3}, get_error=lambda: None
    )
    name, value = rng.choice(list(values.items()))
    dtype, shape = backend.describe(value)
    native = decomposer.native_decompose(value)
    placeholder = {"type": "ref", "data": name, "dtype": backend.encode_dtype(dtype), "shape": list(shape)}
    if rng.random() < 0.3:
        placeholder = {"type": "native", "data": damaged(rng, native) if rng.random() < 0.7 else hostile(rng)}
    placeholder = mutated(rng, placeholder) if rng.random() < 0.8 else placeholder
    location = {"fqcn": SENDER, "ref_id": "ref"}
    text = json.dumps(mutated(rng, location) if rng.random() < 0.5 else location, default=str)
    text = rng.choice([text] * 8 + ["[" * 100_000, "9" * 5000, "1e999", "", b"\xff", None, 7, deep(50)])
    try:
        for _ in range(rng.choice([0, 1, 1, 1, 1, 2])):
            cell.connect(Sender.of(values, backend))
            decomposer.process_datum(SimpleNamespace(value=text, dot=0), manager)
        made = decomposer.recompose(placeholder, manager)
    except NVFlareLazyError:
        assert not is_server  # which NVFlare would end
        return
    failure = failure_of(made)
    assert failure is None or isinstance(failure, NVFlareLazyError)
    assert len(repr(failure)) < 10_000


def test_placeholders(tmp_path, monkeypatch):
    """Placeholders and data that were changed: the server gets a failed value, other processes a named error."""
    monkeypatch.setattr(client, "_POLL_SECONDS", 0.001)
    monkeypatch.setattr(way, "FIRST_NEWS_SECONDS", 0.01)
    decomposers = LazyTensorDecomposer(), LazyArrayDecomposer()
    for decomposer in decomposers:
        decomposer.logger.disabled = True
    cells = FakeCell("server.job"), FakeCell("site-2.job")
    with JobScratch.open(tmp_path, job="tests", min_free=0, warn=False) as job, Bounded() as bounded:
        before = offload.runtime.use(ReceiveMode(job, 32 << 20, LIMITS))
        try:
            for number in numbers(600):
                bounded.run(placeholder_case, number, decomposers, cells)
                assert offload.runtime.budget.used == 0
        finally:
            offload.runtime.use(before)


def datum(ref_id):
    where = json.dumps({"fqcn": SENDER, "ref_id": ref_id})
    return Datum(datum_type=DatumType.TEXT, value=where, dot=6)


def test_a_message_with_many_payloads():
    """A message may refer to a few hundred payloads, which no honest one does; each costs its receiver a download."""
    decomposer = LazyTensorDecomposer()
    manager = SimpleNamespace(fobs_ctx={FOBSContextKey.PASS_THROUGH: True})
    data = [datum(str(number)) for number in range(257)]
    for good in data[:-1]:
        decomposer.process_datum(good, manager)
    with pytest.raises(ProtocolError, match="more than 256 payloads"):
        decomposer.process_datum(data[-1], manager)


def test_payloads_of_a_message_share_its_limits(tmp_path):
    """Two payloads that are within the limits, and together are not."""
    half = {"T0": torch.zeros(600 << 10, dtype=torch.uint8)}
    cell = FakeCell("site-2.job")
    decomposer = LazyTensorDecomposer()
    with JobScratch.open(tmp_path, job="tests", min_free=0, warn=False) as job:
        before = offload.runtime.use(ReceiveMode(job, 32 << 20, LIMITS))
        manager = SimpleNamespace(fobs_ctx={FOBSContextKey.CELL: cell})
        try:
            cell.connect(Sender.of(half, TORCH))
            decomposer.process_datum(datum("a"), manager)
            cell.connect(Sender.of(half, TORCH))
            with pytest.raises(ProtocolError, match=r"limit of 1\.0 MiB"):
                decomposer.process_datum(datum("b"), manager)
        finally:
            offload.runtime.use(before)

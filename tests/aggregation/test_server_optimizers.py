# SPDX-License-Identifier: Apache-2.0
"""Server optimizers against their papers, step after step, and their state against crashes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import nvflare_lazy
from nvflare_lazy.aggregation import (
    FedAdagrad,
    FedAdam,
    FedAvgM,
    FedYogi,
    to_optimizer,
)
from nvflare_lazy.aggregation._optimizer_state import OptimizerStates
from nvflare_lazy.errors import AggregationDtypeError, MismatchError, OptimizerStateError
from nvflare_lazy.formats import StreamingWriter
from tests.aggregation.contributions import bits, random_tensor

OPTIMIZERS = (FedAvgM(lr=0.7, momentum=0.8), FedAdagrad(lr=0.1), FedAdam(lr=0.1), FedYogi(lr=0.1), FedAdagrad(0.1, 0.5))
ROUNDS = 5


class Reference:
    """Second implementation of the optimizers, in NumPy: algorithm 2 of the paper, with its names."""

    def __init__(self, optimizer, model):
        self.optimizer = optimizer
        self.x = {key: value.double().numpy() for key, value in model.items()}
        self.m = {key: np.zeros_like(value) for key, value in self.x.items()}
        self.v = {key: np.full_like(value, getattr(optimizer, "tau", 0) ** 2) for key, value in self.x.items()}

    def step(self, key, delta, dtype):
        o, m, v = self.optimizer, self.m[key], self.v[key]
        if isinstance(o, FedAvgM):
            m = o.momentum * m + delta
            x = self.x[key] + o.lr * m
        else:
            m = o.beta1 * m + (1 - o.beta1) * delta
            if isinstance(o, FedAdagrad):
                v = v + delta**2
            elif isinstance(o, FedYogi):
                v = v - (1 - o.beta2) * delta**2 * np.sign(v - delta**2)
            else:
                v = o.beta2 * v + (1 - o.beta2) * delta**2
            x = self.x[key] + o.lr * m / (np.sqrt(v) + o.tau)
        # The state on disk between steps is rounded.
        width = np.float64 if dtype is torch.float64 else np.float32
        self.m[key], self.v[key] = m.astype(width).astype(float), v.astype(width).astype(float)
        self.x[key] = torch.tensor(x).to(dtype).double().numpy()


def initial_model(random):
    return {
        "w": random_tensor(random, (300, 7), torch.float32),
        "b": random_tensor(random, (33,), torch.bfloat16),
        "d": random_tensor(random, (5,), torch.float64),
        "s": random_tensor(random, (), torch.float32),
        "n": torch.tensor([3, 4]),
        "mask": torch.tensor([True, False]),
    }


def next_update(random, model):
    return {key: random_tensor(random, tuple(value.shape), value.dtype) for key, value in model.items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
@pytest.mark.parametrize("params_type", ["FULL", "DIFF"])
def test_paper(tmp_path, optimizer, params_type):
    """Five rounds, each from files only, with whole models and with differences."""
    random = np.random.default_rng(0)
    model = initial_model(random)
    reference = Reference(optimizer, model)
    for number in range(ROUNDS):
        update = next_update(random, model)
        for key in ("w", "b", "d", "s"):
            sent = update[key].double().numpy()
            reference.step(key, sent if params_type == "DIFF" else sent - reference.x[key], model[key].dtype)
        expected_n = update["n"] if params_type == "FULL" else model["n"] + update["n"]
        model = optimizer.step(
            model,
            update,
            tmp_path / f"{number}.safetensors",
            state_dir=tmp_path / "states",
            params_type=params_type,
            fsync=False,
        )
        for key in ("w", "b", "d", "s"):
            np.testing.assert_array_equal(model[key].double().numpy(), reference.x[key])
        assert model["n"].tolist() == expected_n.tolist()
        if params_type == "FULL":
            assert model["mask"].tolist() == update["mask"].tolist()


def test_same_bits_whatever_tiles_and_threads(tmp_path):
    """Also the state: nothing in a step depends on where a tile ends."""
    random = np.random.default_rng(1)
    model = {"w": random_tensor(random, (70_001,), torch.float32), "b": random_tensor(random, (501,), torch.bfloat16)}
    update = next_update(random, model)
    seen = set()
    for number, (budget, threads) in enumerate([("64KiB", 1), ("300KiB", 4), ("64MiB", 8)]):
        states = tmp_path / f"states-{number}"
        out = tmp_path / f"{number}.safetensors"
        result = FedYogi().step(model, update, out, state_dir=states, memory_budget=budget, threads=threads)
        [state] = [path for path in states.iterdir() if path.suffix == ".safetensors"]
        seen.add((tuple(bits(result).items()), state.read_bytes()))
    assert len(seen) == 1


def add_difference(model, difference, out):
    """Return the model plus a difference: the step without momentum."""
    return FedAvgM(momentum=0.0).step(model, difference, out, params_type="DIFF")


class TestWhatIsUpdated:
    """Which tensors an update may have."""

    def test_missing_tensors_stay(self, tmp_path):
        """The model keeps its own tensors, and the state of earlier updated tensors is kept."""
        random = np.random.default_rng(2)
        model = initial_model(random)
        first = FedAvgM().step(model, next_update(random, model), tmp_path / "1.safetensors", state_dir=tmp_path / "s")
        partly = {"w": random_tensor(random, (300, 7), torch.float32)}
        second = FedAvgM().step(first, partly, tmp_path / "2.safetensors", state_dir=tmp_path / "s")
        assert bits(second)["b"] == bits(first)["b"]
        states = sorted((tmp_path / "s").glob("*.safetensors"))
        old, new = (nvflare_lazy.open(path) for path in states)
        assert torch.equal(new["momentum/b"], old["momentum/b"])
        assert not torch.equal(new["momentum/w"], old["momentum/w"])

    def test_surplus_tensors(self, tmp_path):
        """A tensor that the model does not have cannot be updated."""
        with pytest.raises(MismatchError, match="'v' that the model does not have"):
            add_difference({"w": torch.ones(2)}, {"v": torch.ones(2)}, tmp_path / "x")

    def test_other_shapes(self, tmp_path):
        """Named, with both."""
        with pytest.raises(MismatchError, match=r"mismatch for 'w': the model has shape \[2\].*update \[3\]"):
            add_difference({"w": torch.ones(2)}, {"w": torch.ones(3)}, tmp_path / "x")

    def test_difference_of_narrow_floats_is_rounded_once(self, tmp_path):
        """In float64, to the type of the model, whatever the type of the difference."""
        model, difference = torch.randn(5000).bfloat16(), torch.randn(5000) * 1e-2
        result = add_difference({"w": model}, {"w": difference}, tmp_path / "x")["w"].materialize()
        exact = model.double() + difference.double()
        assert result.dtype is torch.bfloat16
        above, below = result.double() - exact, exact.abs() * 2.0**-8
        assert (above.abs() <= below).all()

    def test_integers_saturate(self, tmp_path):
        """Rather than wrap around; a float difference of counters is rounded."""
        model = {"n": torch.tensor([250, 3], dtype=torch.uint8), "k": torch.tensor([2**62]), "m": torch.tensor([True])}
        difference = {"n": torch.tensor([100, -5]), "k": torch.tensor([1.6]), "m": torch.tensor([True])}
        result = add_difference(model, difference, tmp_path / "x")
        assert result["n"].tolist() == [255, 0]
        assert result["k"].tolist() == [2**62 + 2]
        assert result["m"].tolist() == [True]

    def test_unsigned_64_bits_have_no_differences(self, tmp_path):
        """Said, rather than done wrong."""
        with pytest.raises(AggregationDtypeError, match=r"'n' is torch\.uint64"):
            add_difference({"n": torch.tensor([1], dtype=torch.uint64)}, {"n": torch.tensor([1])}, tmp_path / "x")


class TestState:
    """Return the state on disk between steps."""

    def steps(self, tmp_path, count=3):
        random = np.random.default_rng(5)
        models = [{"w": random_tensor(random, (1000,), torch.float32)}]
        updates = [next_update(random, models[0]) for _ in range(count)]
        for number, update in enumerate(updates):
            out = tmp_path / f"model-{number}.safetensors"
            models.append(FedAdam().step(models[-1], update, out, state_dir=tmp_path / "states"))
        return models, updates

    def test_only_what_is_needed_is_kept(self, tmp_path):
        """The state of the model, that of the one before, and the list of both."""
        self.steps(tmp_path, 4)
        assert sorted(path.name[:12] for path in (tmp_path / "states").iterdir()) == [
            "state-000003",
            "state-000004",
            "states.json",
        ]

    def test_too_large_for_float32(self, tmp_path):
        """A finite update cannot make the state infinite, which would stop its element for ever."""
        out, where = tmp_path / "model.safetensors", tmp_path / "states"
        model = {"w": torch.zeros(3)}
        for difference in (1e30, -1.0, -1.0):
            update = {"w": torch.tensor([difference, -1.0, 0.0])}
            model = FedAdam(lr=0.1, beta2=0.5).step(model, update, out, state_dir=where, params_type="DIFF")
        for file in where.glob("*.safetensors"):
            assert all(torch.isfinite(value.materialize()).all() for value in nvflare_lazy.open(file).values())

    def test_more_may_be_kept(self, tmp_path):
        """For a model that has to go back some steps after a restart."""
        random = np.random.default_rng(5)
        model = first = {"w": random_tensor(random, (10,), torch.float32)}
        for number in range(4):
            out = tmp_path / f"model-{number}.safetensors"
            update = next_update(random, first)
            model = FedAdam().step(model, update, out, state_dir=tmp_path / "states", keep_states=4)
        again = nvflare_lazy.open(tmp_path / "model-1.safetensors")
        FedAdam().step(again, update, tmp_path / "again.safetensors", state_dir=tmp_path / "states", keep_states=4)

    def test_step_is_done_again_after_a_crash(self, tmp_path, monkeypatch):
        """The state was written, the model was not: the same step again gives the same, as if nothing had been."""
        models, updates = self.steps(tmp_path, 3)
        update = next_update(np.random.default_rng(9), models[0])
        commit = StreamingWriter.commit

        def crash_before_the_model(writer, *arguments):
            if "crashed" in str(writer.path):
                raise KeyboardInterrupt
            return commit(writer, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(StreamingWriter, "commit", crash_before_the_model)
            with pytest.raises(KeyboardInterrupt):
                FedAdam().step(models[-1], update, tmp_path / "crashed", state_dir=tmp_path / "states")
        again = FedAdam().step(models[-1], update, tmp_path / "again", state_dir=tmp_path / "states")
        other = tmp_path / "other"
        model = models[0]
        for number, sent in enumerate([*updates, update]):
            out = tmp_path / f"other-{number}.safetensors"
            model = FedAdam().step(model, sent, out, state_dir=other)
        assert bits(again) == bits(model)

    def test_first_step_is_done_again_after_a_crash(self, tmp_path, monkeypatch):
        """The initial model has no optimizer state, and is recognized nevertheless."""
        model, update = {"w": torch.ones(10)}, {"w": torch.zeros(10)}
        with monkeypatch.context() as patch:
            patch.setattr(OptimizerStates, "prune", lambda states: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                FedAdam().step(model, update, tmp_path / "1", state_dir=tmp_path / "states")
        again = FedAdam().step(model, update, tmp_path / "2", state_dir=tmp_path / "states")
        assert bits(again) == bits(nvflare_lazy.open(tmp_path / "1"))

    def test_model_is_known_by_its_content(self, tmp_path):
        """The file, the program that saved it, and its metadata do not matter."""
        models, updates = self.steps(tmp_path)
        torch.save({"w": models[-1]["w"].materialize()}, tmp_path / "elsewhere.pt")
        copied = nvflare_lazy.open(tmp_path / "elsewhere.pt")
        FedAdam().step(copied, updates[0], tmp_path / "next", state_dir=tmp_path / "states")
        assert len(list((tmp_path / "states").glob("state-000004-*"))) == 1

    def test_unknown_model(self, tmp_path):
        """An error with a remedy, or a new start."""
        models, updates = self.steps(tmp_path)
        with pytest.raises(OptimizerStateError, match=r"none of the states in .* belongs to this model.*steps 2, 3"):
            FedAdam().step(models[1], updates[0], tmp_path / "x", state_dir=tmp_path / "states")
        FedAdam().step(models[1], updates[0], tmp_path / "x", state_dir=tmp_path / "states", on_unknown_model="restart")
        assert sorted(path.name[:12] for path in (tmp_path / "states").iterdir()) == ["state-000001", "states.json"]

    def test_other_optimizer(self, tmp_path):
        """States are not taken for those of another kind."""
        models, updates = self.steps(tmp_path)
        with pytest.raises(OptimizerStateError, match="are of 'fedadam', not of 'fedyogi'"):
            FedYogi().step(models[-1], updates[0], tmp_path / "x", state_dir=tmp_path / "states")

    def test_lost_and_damaged(self, tmp_path):
        """A missing state, and an invalid list of states."""
        models, updates = self.steps(tmp_path)
        [state] = (tmp_path / "states").glob("state-000003-*")
        state.unlink()
        with pytest.raises(OptimizerStateError, match="the state of step 3 is missing"):
            FedAdam().step(models[-1], updates[0], tmp_path / "x", state_dir=tmp_path / "states")
        index = tmp_path / "states" / "states.json"
        good = json.loads(index.read_text())
        state = good["states"][-1]
        wrong = [
            {"step": 1.0},
            {"step": True},
            {"step": -1},
            {"model": 7},
            {"file": "../x"},
            {"file": "/etc/passwd"},
            {"file": 1},
        ]
        states = [[7], [[]], 7, [{}], *([{**state, **change}] for change in wrong)]
        for damaged in (
            b"",
            b"\xff",
            b"[]",
            b"7",
            b"[" * 100_000,
            *(json.dumps({**good, "states": it}).encode() for it in states),
        ):
            index.write_bytes(damaged)
            with pytest.raises(OptimizerStateError, match="is damaged"):
                FedAdam().step(models[-1], updates[0], tmp_path / "x", state_dir=tmp_path / "states")

    def test_needs_a_place(self, tmp_path):
        """Without one, an optimizer that remembers nothing works, and others say what they need."""
        model = {"w": torch.ones(2)}
        assert FedAvgM(momentum=0.0).step(model, {"w": torch.zeros(2)}, tmp_path / "x")["w"].tolist() == [0, 0]
        with pytest.raises(ValueError, match=r"fedadam keeps state \(mean, square\); pass state_dir"):
            FedAdam().step(model, model, tmp_path / "x")


LOOP = """if True:
    import sys
    import torch
    import nvflare_lazy
    from nvflare_lazy.aggregation import FedAdam

    out, states = sys.argv[1:]
    while True:
        model = nvflare_lazy.open(out)
        number = int(model["step"].item())
        generator = torch.Generator().manual_seed(number)
        update = {"w": torch.randn(20_000, generator=generator), "step": torch.tensor([number + 1])}
        FedAdam().step(model, update, out, state_dir=states)
        print(number + 1, flush=True)
"""


def test_kill_at_any_moment(tmp_path):
    """A server killed again and again makes the same models as one that never was."""
    out, states = tmp_path / "model.safetensors", tmp_path / "states"
    initial = {"w": torch.zeros(20_000), "step": torch.tensor([0])}
    nvflare_lazy.save(initial, out)
    random = np.random.default_rng(0)
    for _ in range(4):
        with subprocess.Popen([sys.executable, "-c", LOOP, out, states], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(random.uniform(0, 0.05))
            os.kill(process.pid, signal.SIGKILL)
    survived = nvflare_lazy.open(out)
    model = initial
    for number in range(int(survived["step"].item())):
        generator = torch.Generator().manual_seed(number)
        update = {"w": torch.randn(20_000, generator=generator), "step": torch.tensor([number + 1])}
        path = Path(tmp_path / "unhurt.safetensors")
        model = FedAdam().step(model, update, path, state_dir=tmp_path / "unhurt", fsync=False)
    assert bits(survived) == bits(model)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
def test_by_name(optimizer):
    """A configuration has names and parameters."""
    assert to_optimizer(optimizer.describe()) == optimizer


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("sgd", "unknown server optimizer 'sgd'; available: fedavgm, fedadagrad"),
        ({"name": "fedadam", "lr": 0}, "lr must be positive"),
        ({"name": "fedadam", "beta2": 1}, "beta2 must be at least 0 and less than 1"),
        ({"name": "fedavgm", "momentum": -0.1}, "momentum must be at least 0"),
        ({"name": "fedyogi", "tau": 0}, "tau must be positive"),
        ({"name": "fedavgm", "beta": 0.9}, "unexpected keyword argument 'beta'"),
    ],
)
def test_wrong_parameters(wrong, message):
    """An invalid configuration raises an error when it is read."""
    with pytest.raises(ValueError, match=message):
        to_optimizer(wrong)

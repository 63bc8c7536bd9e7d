# SPDX-License-Identifier: Apache-2.0
"""One step of a server optimizer, tile by tile: reads model, update and state, writes the next model and state.

Uses the engine of aggregation, with two to four inputs of different types instead of contributions.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nvflare_lazy.aggregation._engine.memory_plan import Arena, plan_memory
from nvflare_lazy.aggregation._engine.rounding import FLOATS, ROUNDING_BYTES, round_into
from nvflare_lazy.aggregation._engine.tile_io import InputVector, OutputVector, real_dtype, real_numel
from nvflare_lazy.aggregation._engine.tile_pool import run_tiles
from nvflare_lazy.aggregation._optimizer_state import ModelFingerprint
from nvflare_lazy.aggregation.schema import read_entries, specs_of, tensor_metas
from nvflare_lazy.errors import AggregationDtypeError, MismatchError
from nvflare_lazy.formats import LazyTensorDict, StreamingWriter
from nvflare_lazy.tensors.entry import TensorSpec

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence

    from nvflare_lazy.aggregation._engine.tile_pool import PassMonitor
    from nvflare_lazy.aggregation._optimizer_state import OptimizerStates
    from nvflare_lazy.aggregation.server_optimizers import ServerOptimizer, UnknownModelPolicy
    from nvflare_lazy.tensors.entry import TensorEntry


@dataclass(frozen=True)
class _Run:
    """Tensors that are computed in the same way, as one long vector each for model, update and state."""

    model: InputVector
    update: InputVector
    state: Sequence[InputVector | None]
    new_model: OutputVector
    new_state: Sequence[OutputVector]
    is_bool: bool

    @property
    def nbytes(self) -> int:
        return self.model.nbytes + self.update.nbytes

    @property
    def is_optimized(self) -> bool:
        return self.model.dtype in FLOATS


class OptimizerStep:
    """A step of a server optimizer from a global model, along an update that is a model or a difference."""

    def __init__(
        self, optimizer: ServerOptimizer, model: Mapping[str, Any], update: Mapping[str, Any], params_type: str
    ) -> None:
        if params_type not in ("FULL", "DIFF"):
            raise ValueError(f"params_type must be 'FULL' or 'DIFF', not {params_type!r}")
        self._optimizer = optimizer
        self._is_difference = params_type == "DIFF"
        self._model = read_entries(model, "the global model")
        self._update = read_entries(update, "the update")
        for name, entry in self._update.items():
            self._check(name, entry, self._model.get(name))
        self._specs = specs_of(self._model)
        self._initial = [*optimizer.slots.values()]

    def run(
        self,
        out: str | os.PathLike[str],
        states: OptimizerStates | None,
        on_unknown_model: UnknownModelPolicy,
        *,
        budget: int,
        threads: int | None,
        max_shard_size: int | str | None,
        fsync: bool,
        metadata: Mapping[str, str],
        monitor: PassMonitor,
    ) -> LazyTensorDict:
        """Write the next state, then the next model, and return it."""
        state: Mapping[str, TensorEntry] = {}
        if states is not None:
            before = ModelFingerprint(self._specs)
            for name, entry in self._model.items():
                before.read(name, entry)
            state = read_entries(states.find(before.digest(), restart=on_unknown_model == "restart") or {}, "the state")
        after = ModelFingerprint(self._specs)
        writer = StreamingWriter(
            out, tensor_metas(self._specs), metadata=metadata, max_shard_size=max_shard_size, fsync=fsync
        )
        state_writer = None
        try:
            if states is not None:
                state_path = states.new_file()
                state_writer = StreamingWriter(state_path, tensor_metas(self._state_specs(state)))
            with ExitStack() as borrowed:
                runs = [*self._runs(state, writer, state_writer)]
                for run in runs:
                    for vector in (run.model, run.update, *filter(None, run.state)):
                        borrowed.enter_context(vector)
                self._compute(runs, after, budget, threads, monitor)
            for name in self._model.keys() - self._update.keys():
                writer.copy(name, self._model[name].rows())
                after.read(name, self._model[name])
            if states is not None and state_writer is not None:
                for name in state.keys() - self._state_names():
                    state_writer.copy(name, state[name].rows())
                state_writer.commit()
                states.record(state_path, after.digest())
            tensors = writer.commit_and_open()
            if states is not None:
                states.prune()
            return tensors
        finally:
            writer.abort()
            if state_writer is not None:
                state_writer.abort()

    def _check(self, name: str, update: TensorEntry, model: TensorEntry | None) -> None:
        if model is None:
            raise MismatchError(f"the update has a tensor {name!r} that the model does not have; exclude it")
        if update.shape != model.shape or update.dtype.is_complex != model.dtype.is_complex:
            raise MismatchError(
                f"mismatch for {name!r}: the model has shape {list(model.shape)} ({model.dtype}), the update "
                f"{list(update.shape)} ({update.dtype}); fix the update or exclude the tensor"
            )
        if self._is_difference and torch.uint64 in (update.dtype, model.dtype):
            raise AggregationDtypeError(f"{name!r} is torch.uint64, to which torch cannot add differences; exclude it")

    def _state_names(self) -> set[str]:
        return {f"{slot}/{name}" for name in self._optimized() for slot in self._optimizer.slots}

    def _optimized(self) -> list[str]:
        return [name for name in self._update if real_dtype(self._model[name].dtype) in FLOATS]

    def _state_specs(self, state: Mapping[str, TensorEntry]) -> dict[str, TensorSpec]:
        specs = specs_of(state)
        for name in self._optimized():
            dtype = torch.float64 if self._model[name].dtype == torch.float64 else torch.float32
            for slot in self._optimizer.slots:
                specs[f"{slot}/{name}"] = TensorSpec(dtype, (real_numel(self._specs[name]),))
        return specs

    def _runs(
        self, state: Mapping[str, TensorEntry], writer: StreamingWriter, state_writer: StreamingWriter | None
    ) -> Iterator[_Run]:
        together: dict[tuple[object, ...], list[str]] = {}
        for name in sorted(self._update):
            known = all(f"{slot}/{name}" in state for slot in self._optimizer.slots)
            together.setdefault((self._model[name].dtype, self._update[name].dtype, known), []).append(name)
        for names in together.values():
            sizes = [real_numel(self._specs[name]) for name in names]
            model = InputVector([self._model[name] for name in names], self._model[names[0]].dtype)
            old, new = [], []
            if model.dtype in FLOATS and state_writer is not None:
                width = torch.float64 if model.dtype == torch.float64 else torch.float32
                for slot in self._optimizer.slots:
                    keys = [f"{slot}/{name}" for name in names]
                    known = keys[0] in state
                    old.append(InputVector([state[key] for key in keys], state[keys[0]].dtype) if known else None)
                    new.append(OutputVector(keys, sizes, width, state_writer))
            yield _Run(
                model,
                InputVector([self._update[name] for name in names], self._update[names[0]].dtype),
                old,
                OutputVector(names, sizes, model.dtype, writer),
                new,
                is_bool=self._model[names[0]].dtype is torch.bool,
            )

    def _compute(
        self, runs: Sequence[_Run], after: ModelFingerprint, budget: int, threads: int | None, monitor: PassMonitor
    ) -> None:
        slots = len(self._initial)
        # Three buffers for reading and writing, and float64 for everything else.
        plan = plan_memory(budget, 3 * 8 + (3 + slots) * 8 + ROUNDING_BYTES, threads=threads)

        def work(task: tuple[_Run, int], arena: Arena) -> None:
            run, start = task
            count = min(plan.tile, run.model.numel - start)
            out, buffer = arena.take_buffer(run.new_model.dtype, count)
            if run.is_optimized:
                self._optimize(run, start, out, arena)
            else:
                self._replace(run, start, out, arena)
            for name, offset, piece in run.new_model.pieces(start, buffer):
                after.add(name, offset, piece)
            run.new_model.write(start, buffer)
            monitor.advance(count * (run.model.dtype.itemsize + run.update.dtype.itemsize))

        tasks = ((run, start) for run in runs for start in range(0, run.model.numel, plan.tile))
        monitor.start(self._optimizer.name, sum(run.nbytes for run in runs))
        run_tiles(tasks, work, plan, monitor)

    def _optimize(self, run: _Run, start: int, out: torch.Tensor, arena: Arena) -> None:
        values, difference, spare, *state = (
            arena.take(torch.float64, out.numel()) for _ in range(3 + len(self._initial))
        )
        _read(run.model, start, values, arena)
        _read(run.update, start, difference, arena)
        if not self._is_difference:
            difference.sub_(values)
        for slot, initial, vector in zip(state, self._initial, run.state, strict=True):
            if vector is None:
                slot.fill_(initial)
            else:
                _read(vector, start, slot, arena)
        direction = self._optimizer.compute_update(difference, state, spare)
        round_into(out, values.add_(torch.mul(direction, self._optimizer.lr, out=spare)), arena)
        for slot, output in zip(state, run.new_state, strict=True):
            rounded, buffer = arena.take_buffer(output.dtype, out.numel())
            rounded.copy_(slot)
            if not torch.isfinite(rounded.sum()):
                # A value too large for float32 must not be infinite: the element would never change again.
                limit = torch.finfo(output.dtype).max
                rounded.clamp_(-limit, limit)
            output.write(start, buffer)

    def _replace(self, run: _Run, start: int, out: torch.Tensor, arena: Arena) -> None:
        """Write counters and masks: the values of the update, rounded to integers and clamped to their range."""
        if run.update.dtype == run.model.dtype and not self._is_difference:
            mark = arena.mark()
            values, buffer = arena.take_buffer(run.update.dtype, out.numel())
            run.update.read(start, buffer)
            out.copy_(values.clamp_(max=1) if run.is_bool else values)
            arena.release(mark)
            return
        values, update = (arena.take(torch.int64, out.numel()) for _ in range(2))
        _read(run.update, start, update, arena)
        if self._is_difference:
            _read(run.model, start, values, arena)
            update.add_(values)
        limits = torch.iinfo(out.dtype)
        out.copy_(update.clamp_(limits.min, 1 if run.is_bool else min(limits.max, torch.iinfo(torch.int64).max)))


def _read(vector: InputVector, start: int, into: torch.Tensor, arena: Arena) -> None:
    mark = arena.mark()
    values, buffer = arena.take_buffer(vector.dtype, into.numel())
    vector.read(start, buffer)
    if values.dtype in FLOATS and not into.dtype.is_floating_point:
        into.copy_(values.double().round_())
    else:
        into.copy_(values)
    arena.release(mark)

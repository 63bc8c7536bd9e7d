# SPDX-License-Identifier: Apache-2.0
"""The states of a server optimizer on disk, each found by the content of the global model that it belongs to.

A model may be copied, renamed or stored by other code, so its path says nothing. The new state is written first, then
the index that links it to its model, then that model: a server killed at any moment finds a model with its state.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from nvflare_lazy._text import quoted
from nvflare_lazy.errors import OptimizerStateError
from nvflare_lazy.formats import open as open_checkpoint
from nvflare_lazy.formats.atomic_file import AtomicFile, sync_directory

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict
    from nvflare_lazy.tensors.entry import TensorEntry, TensorSpec

_INDEX = "states.json"
_PREFIX = "state-"
_STATE_FILE = re.compile(rf"{_PREFIX}\d{{6,}}-[0-9a-f]{{8}}\.safetensors")
_SAMPLED_BYTES = 1 << 20
_MIN_SAMPLE = 64


class ModelFingerprint:
    """A hash of a model: names, dtypes, shapes, and the first and last bytes of each tensor, or all bytes if few."""

    def __init__(self, specs: Mapping[str, TensorSpec]) -> None:
        sample = max(_MIN_SAMPLE, _SAMPLED_BYTES // max(len(specs), 1))
        self._specs = specs
        self._samples: dict[str, list[tuple[int, bytearray]]] = {}
        for name, (dtype, shape) in specs.items():
            nbytes = dtype.itemsize
            for size in shape:
                nbytes *= size
            ranges = [(0, nbytes)] if nbytes <= sample else [(0, sample // 2), (nbytes - sample // 2, nbytes)]
            self._samples[name] = [(begin, bytearray(end - begin)) for begin, end in ranges]

    def add(self, name: str, offset: int, data: memoryview) -> None:
        """Add bytes of a tensor that are being written; every byte must be passed exactly once."""
        for begin, sample in self._samples[name]:
            first, last = max(begin, offset), min(begin + len(sample), offset + len(data))
            if first < last:
                sample[first - begin : last - begin] = data[first - offset : last - offset]

    def read(self, name: str, entry: TensorEntry) -> None:
        """Add a tensor: its sampled bytes are read."""
        for begin, sample in self._samples[name]:
            entry.rows().read_into(sample, begin)

    def digest(self) -> str:
        """Return the fingerprint, after all tensors have been added."""
        content = hashlib.blake2b(digest_size=16)
        for name in sorted(self._specs):
            dtype, shape = self._specs[name]
            content.update(json.dumps([name, str(dtype), shape]).encode())
            for _, sample in self._samples[name]:
                content.update(sample)
        return content.hexdigest()


@dataclass(frozen=True)
class _Entry:
    """A state and the model it belongs to; the model before the first step has no file."""

    step: int
    model: str
    file: str | None


class OptimizerStates:
    """The states of one optimizer for one global model, in a directory that it creates.

    At least two states are kept: the previous one is needed until the model is on the disk.
    """

    def __init__(
        self, directory: str | os.PathLike[str], optimizer: str, slots: Collection[str], keep_states: int = 2
    ) -> None:
        if keep_states < 2:
            raise ValueError(f"keep_states must be at least 2, not {keep_states}")
        self.directory = os.fspath(directory)
        self._optimizer = optimizer
        self._slots = sorted(slots)
        self._keep_states = keep_states
        os.makedirs(self.directory, exist_ok=True)
        self._entries = self._load()
        self._current: _Entry | None = None

    @property
    def step(self) -> int:
        """Number of steps that led to the model that was found."""
        assert self._current is not None
        return self._current.step

    def find(self, model: str, *, restart: bool) -> LazyTensorDict | None:
        """Return the state that belongs to the model with a fingerprint, or None if it is the first one.

        If no state belongs to it, `restart` starts with a new state.
        """
        found = [entry for entry in self._entries if entry.model == model]
        if not found and self._entries and not restart:
            raise OptimizerStateError(
                f"none of the states in {self.directory} belongs to this model; they belong to the models of steps "
                f"{', '.join(str(entry.step) for entry in self._entries)}. Pass the model of one of these steps, "
                "or set on_unknown_model='restart' to start with a new state"
            )
        self._current = found[-1] if found else _Entry(0, model, None)
        if self._current.file is None:
            return None
        path = os.path.join(self.directory, self._current.file)
        if not os.path.exists(path):
            raise OptimizerStateError(
                f"the state of step {self.step} is missing: {path}; restore it, or remove {self.directory} to start "
                "over"
            )
        return open_checkpoint(path)

    def new_file(self) -> str:
        """Return the path for the state of the next step."""
        return os.path.join(self.directory, f"{_PREFIX}{self.step + 1:06d}-{secrets.token_hex(4)}.safetensors")

    def record(self, path: str, model: str) -> None:
        """Record in the index that a state has been written, before the model it belongs to is published."""
        assert self._current is not None
        older = [entry for entry in self._entries if entry.step < self.step]
        kept = [*older, self._current, _Entry(self.step + 1, model, os.path.basename(path))][-self._keep_states :]
        index = {"optimizer": self._optimizer, "slots": self._slots, "states": [asdict(entry) for entry in kept]}
        with AtomicFile(os.path.join(self.directory, _INDEX)) as file:
            file.write_at((json.dumps(index, indent=2) + "\n").encode(), 0)
            file.sync()
            file.publish()
        sync_directory(self.directory)
        self._entries = kept

    def prune(self) -> None:
        """Remove the files of states that are not in the index."""
        known = {entry.file for entry in self._entries}
        for name in os.listdir(self.directory):
            if name.startswith(_PREFIX) and name not in known:
                os.unlink(os.path.join(self.directory, name))

    def _load(self) -> list[_Entry]:
        path = os.path.join(self.directory, _INDEX)
        try:
            with open(path, encoding="utf-8") as file:
                index: dict[str, Any] = json.load(file)
            states = [_entry(state) for state in index["states"]]
        except FileNotFoundError:
            return []
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise OptimizerStateError(
                f"{path} is damaged ({error}); remove {self.directory} to start with a new state"
            ) from None
        if (index.get("optimizer"), index.get("slots")) != (self._optimizer, self._slots):
            raise OptimizerStateError(
                f"the states in {self.directory} are of {index.get('optimizer')!r}, not of {self._optimizer!r}; use a "
                "separate directory for each optimizer"
            )
        return states


def _entry(state: Any) -> _Entry:
    """Return an entry of the index, or raise ValueError, KeyError or TypeError if it is not as `record` writes it."""
    entry = _Entry(state["step"], state["model"], state["file"])
    has_types = type(entry.step) is int and entry.step >= 0 and type(entry.model) is str
    if not has_types or not (entry.file is None or _STATE_FILE.fullmatch(entry.file)):
        raise ValueError(f"the state {quoted(state)}")
    return entry

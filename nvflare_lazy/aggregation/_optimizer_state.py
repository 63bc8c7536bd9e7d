# SPDX-License-Identifier: Apache-2.0
"""Where the state of a server optimizer is between steps, and how the one that belongs to a model is found again.

Beside the global model on the disk. A model may be copied, renamed or stored by somebody else, so a state goes by what
is in its model. First the new state is on the disk, then a note of which model it belongs to, then that model: a server
killed at any moment finds a model with its state.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from nvflare_lazy.errors import OptimizerStateError
from nvflare_lazy.formats import open as open_checkpoint
from nvflare_lazy.formats.atomic_file import AtomicFile, sync_directory

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict
    from nvflare_lazy.tensors.entry import TensorEntry, TensorSpec

_INDEX = "states.json"
_PREFIX = "state-"
_SAMPLED_BYTES = 1 << 20
_MIN_SAMPLE = 64


class ModelFingerprint:
    """Tells models apart by names, types, shapes and the first and last bytes of each tensor; a small one by all bytes.

    Args:
        specs: Types and shapes of its tensors.
    """

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
        """Take what is needed of some bytes of a tensor; each byte has to come once."""
        for begin, sample in self._samples[name]:
            first, last = max(begin, offset), min(begin + len(sample), offset + len(data))
            if first < last:
                sample[first - begin : last - begin] = data[first - offset : last - offset]

    def read(self, name: str, entry: TensorEntry) -> None:
        """Read what is needed of a tensor."""
        for begin, sample in self._samples[name]:
            entry.rows().read_into(sample, begin)

    def digest(self) -> str:
        """Return the fingerprint, once all tensors have been noted or read."""
        content = hashlib.blake2b(digest_size=16)
        for name in sorted(self._specs):
            dtype, shape = self._specs[name]
            content.update(json.dumps([name, str(dtype), shape]).encode())
            for _, sample in self._samples[name]:
                content.update(sample)
        return content.hexdigest()


@dataclass(frozen=True)
class _Entry:
    """A state and the model it belongs to; a model that no step has been made from yet has no file."""

    step: int
    model: str
    file: str | None


class OptimizerStates:
    """The states of one optimizer for one global model, as it moves on.

    Args:
        directory: Where they are; made if it is not there.
        optimizer: Name of the optimizer.
        slots: What it remembers of each element.
        keep_states: How many states are kept; at least two, since the last but one is needed until the model is on
            the disk.
    """

    def __init__(
        self, directory: str | os.PathLike[str], optimizer: str, slots: Collection[str], keep_states: int = 2
    ) -> None:
        if keep_states < 2:
            raise ValueError(f"at least the last 2 states have to be kept, not {keep_states}")
        self.directory = os.fspath(directory)
        self._optimizer = optimizer
        self._slots = sorted(slots)
        self._keep_states = keep_states
        os.makedirs(self.directory, exist_ok=True)
        self._entries = self._load()
        self._current: _Entry | None = None

    @property
    def step(self) -> int:
        """How many steps led to the model that was found."""
        assert self._current is not None
        return self._current.step

    def find(self, model: str, *, restart: bool) -> LazyTensorDict | None:
        """Return the state that belongs to a model, or None if it is the first one.

        Args:
            model: Its fingerprint.
            restart: Begin anew if none of the states belongs to it.
        """
        found = [entry for entry in self._entries if entry.model == model]
        if not found and self._entries and not restart:
            raise OptimizerStateError(
                f"none of the states in {self.directory} belongs to this model: they are of steps "
                f"{', '.join(str(entry.step) for entry in self._entries)}. Give the model of one of these steps, "
                "or start with a new state: on_unknown_model='restart'"
            )
        self._current = found[-1] if found else _Entry(0, model, None)
        if self._current.file is None:
            return None
        path = os.path.join(self.directory, self._current.file)
        if not os.path.exists(path):
            raise OptimizerStateError(
                f"{path} is gone, the state of step {self.step}: put it back, or remove {self.directory} to begin anew"
            )
        return open_checkpoint(path)

    def new_file(self) -> str:
        """Return where to write the state of the next step."""
        return os.path.join(self.directory, f"{_PREFIX}{self.step + 1:06d}-{secrets.token_hex(4)}.safetensors")

    def record(self, path: str, model: str) -> None:
        """Note that a state has been written, before the model it belongs to appears."""
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
        """Remove the states that belong to no model that counts."""
        known = {entry.file for entry in self._entries}
        for name in os.listdir(self.directory):
            if name.startswith(_PREFIX) and name not in known:
                os.unlink(os.path.join(self.directory, name))

    def _load(self) -> list[_Entry]:
        path = os.path.join(self.directory, _INDEX)
        try:
            with open(path, encoding="utf-8") as file:
                index: dict[str, Any] = json.load(file)
            states = [_Entry(**state) for state in index["states"]]
        except FileNotFoundError:
            return []
        except (ValueError, KeyError, TypeError) as error:
            raise OptimizerStateError(
                f"{path} is damaged ({error}): remove {self.directory} to begin with a new state"
            ) from None
        if (index.get("optimizer"), index.get("slots")) != (self._optimizer, self._slots):
            raise OptimizerStateError(
                f"the states in {self.directory} are of {index.get('optimizer')!r}, not of {self._optimizer!r}: give "
                "each optimizer a directory of its own"
            )
        return states

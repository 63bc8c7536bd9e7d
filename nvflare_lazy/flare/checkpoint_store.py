# SPDX-License-Identifier: Apache-2.0
"""`CheckpointStore`: a job's checkpoints on disk: the global model, the best model and the last rounds.

The persistor saves the output of aggregation here. Files that hold exactly the model get another name instead of a
copy. The record of the last round is replaced last and atomically, so a job that is killed at any moment finds the
previous round or this one, with the matching model.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvflare_lazy._text import quoted
from nvflare_lazy.errors import JobCheckpointError
from nvflare_lazy.formats.atomic_file import AtomicFile, sync_directory
from nvflare_lazy.formats.hugging_face import ModelDirectory
from nvflare_lazy.formats.hugging_face.model_directory import WEIGHTS_NAME
from nvflare_lazy.formats.open_checkpoint import open as open_checkpoint
from nvflare_lazy.formats.safetensors.header import read_header
from nvflare_lazy.formats.safetensors.shards import index_path
from nvflare_lazy.formats.save_checkpoint import link_checkpoint, save
from nvflare_lazy.scratch import DirectoryLease
from nvflare_lazy.tensors.entry import files_holding
from nvflare_lazy.tensors.lazy_array import LazyArray
from nvflare_lazy.tensors.lazy_tensor import LazyTensor
from nvflare_lazy.tensors.tensor_file import TensorFile

RECORD_NAME = "checkpoint.json"
_FORMAT = 2
_ROUNDS = "rounds"
_OPTIMIZER = "optimizer"
#: The Hugging Face directory of the best model, in jobs that started from one.
BEST = "best"
_MAX_ROUND = 1 << 53
_MAX_RECORD_BYTES = 64 << 20
_ROUND_NAME = re.compile(r"round-(\d{5,})")


@dataclass(frozen=True)
class Checkpoint:
    """A complete round.

    Attributes:
        round: Number of the round, or None for a model saved outside rounds.
        path: Directory of the global model after the round.
        meta: NVFlare's metadata of the model, as far as JSON can represent it.
    """

    round: int | None
    path: Path
    meta: Mapping[str, Any] = field(default_factory=dict)


class CheckpointStore:
    """The checkpoints of one job, in a directory that it creates.

    Args:
        directory: The directory.
        model_name: The file of the global model. A job that started from a Hugging Face directory uses the name that
            `from_pretrained` expects instead.
        best_name: The same for the best model.
        keep_rounds: Number of rounds to keep.
        max_shard_size: Split larger models. Default: as the Hugging Face directory that the job started from is split.
    """

    def __init__(
        self,
        directory: Path,
        model_name: str,
        best_name: str,
        *,
        keep_rounds: int = 2,
        max_shard_size: int | None = None,
    ) -> None:
        self.directory = directory
        self.max_shard_size = max_shard_size
        self.model_name = model_name
        self.best_name = best_name
        self.incoming = directory / ".incoming"
        #: The state of a server optimizer.
        self.optimizer = directory / _OPTIMIZER
        self._rounds = directory / _ROUNDS
        self._keep_rounds = keep_rounds
        self._lease: DirectoryLease | None = None
        # Of a job that started from a Hugging Face directory, this one is another.
        self._hugging_face = ModelDirectory.find(directory)
        for path in (directory, self._rounds):
            path.mkdir(parents=True, exist_ok=True)
        self.incoming.mkdir(mode=0o700, exist_ok=True)

    @property
    def model_path(self) -> Path:
        """The file of the global model. If it is split, there is an index of this name instead."""
        return self.directory / (self._weights_name if self._hugging_face else self.model_name)

    @property
    def best_path(self) -> Path:
        """The file of the best model."""
        return self.directory / BEST / self._weights_name if self._hugging_face else self.directory / self.best_name

    @property
    def is_hugging_face(self) -> bool:
        """Whether the models are Hugging Face directories."""
        return self._hugging_face is not None

    @property
    def _weights_name(self) -> str:
        return self._hugging_face.weights_name if self._hugging_face else WEIGHTS_NAME

    def lease(self, job: str) -> None:
        """Lease the directory for a job, until `release()`.

        Raises:
            JobCheckpointError: Another job uses it.
        """
        self._lease = DirectoryLease(self.directory, job)

    def release(self) -> None:
        """Release the lease."""
        if self._lease is not None:
            self._lease.release()

    def clear_incoming(self) -> None:
        """Remove unfinished models of a killed process. Only for the one process that owns the store."""
        for path in self.incoming.iterdir():
            shutil.rmtree(path, ignore_errors=True)

    def begin_with(self, initial: ModelDirectory) -> None:
        """Let this directory, `best` and the directories of rounds be Hugging Face directories, like the initial one.

        Raises:
            JobCheckpointError: It is this directory, whose weights would be replaced.
        """
        if os.path.samefile(initial.path, self.directory) and self.latest() is None:
            raise JobCheckpointError(
                f"checkpoint_dir {self.directory} is the initial model, which would be replaced; use another directory"
            )
        if self.max_shard_size is None:
            self.max_shard_size = initial.max_shard_size()
        elif initial.is_adapter:
            raise JobCheckpointError("max_shard_size is set, but PEFT does not load an adapter in shards; remove it")
        initial.copy_companions(self.directory)
        # The initial directory need not exist until the end of the job.
        self._hugging_face = ModelDirectory(self.directory, adapter=initial.is_adapter)

    def save(
        self, weights: Mapping[str, Any], round_number: int | None = None, meta: Mapping[str, Any] | None = None
    ) -> Path:
        """Save the global model after a round; the last complete one stays until this one is.

        If files below this store hold exactly these tensors, they are not copied.
        """
        directory = self._rounds / _round_name(round_number)
        files = self._put(weights, directory / self._weights_name)
        sync_directory(str(self._rounds))
        if not link_checkpoint(files, self.model_path, fsync=False):
            self._copy(weights, self.model_path)
        self._record(Checkpoint(round_number, directory, meta or {}))
        self._prune()
        return self.model_path

    def save_best(self, weights: Mapping[str, Any]) -> Path:
        """Save the best model so far."""
        self._put(weights, self.best_path)
        return self.best_path

    def latest(self) -> Checkpoint | None:
        """Return the last complete round, or None before the first.

        Raises:
            JobCheckpointError: If the record of it cannot be understood.
        """
        path = self.directory / RECORD_NAME
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_RECORD_BYTES:
                raise ValueError(f"not a regular file of at most {_MAX_RECORD_BYTES} bytes")
            record = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError) as error:
            raise self._damaged(f"is not JSON ({error})") from None
        if not isinstance(record, dict) or type(record.get("format")) is not int:
            raise self._damaged("is not a record of a round")
        if record["format"] != _FORMAT:
            raise JobCheckpointError(
                f"{path} was written by another version of nvflare-lazy; use that version, or start with an empty "
                "checkpoint_dir"
            )
        number, name, meta = record.get("round"), record.get("directory"), record.get("meta", {})
        if not (number is None or (type(number) is int and 0 <= number <= _MAX_ROUND)):
            raise self._damaged(f"has the round {quoted(number)}")
        if name != _round_name(number):
            raise self._damaged(f"names {quoted(name)}, which is not the directory of round {number}")
        if not isinstance(meta, dict):
            raise self._damaged(f"has the meta data {quoted(meta)}")
        found = self._rounds / name
        if not found.is_dir():
            raise self._damaged(f"names {found}, which is missing")
        return Checkpoint(number, found, meta)

    def _damaged(self, what: str) -> JobCheckpointError:
        """Return the error for a record that the job cannot resume from; it names the last existing round."""
        rounds = self._round_names()
        advice = "" if not rounds else f", or set source_ckpt_file_full_name to {self._rounds / rounds[-1]} as well"
        return JobCheckpointError(
            f"{self.directory / RECORD_NAME} {what}; restore it from a backup, or remove it to start over{advice}"
        )

    def models(self) -> dict[str, Path]:
        """Return the existing models, the global model first, by the configured names: a file or an index of each."""
        named = ((self.model_name, self.model_path), (self.best_name, self.best_path))
        return {name: existing for name, path in named if (existing := existing_checkpoint(path))}

    def bytes_to_come(self, model_bytes: int) -> int:
        """Return the disk space that the checkpoints of models of this size take in addition to the existing ones."""
        # The kept rounds and the best model, and a new round while the one that it replaces still exists.
        most = (self._keep_rounds + 2) * model_bytes
        existing = {status.st_ino: status.st_size for status in map(os.lstat, self.directory.rglob("*"))}
        return max(model_bytes, most - sum(existing.values()))

    def rounds(self) -> dict[int, Path]:
        """Return the file or the index of each kept round."""
        paths = ((_number_of(name), self._rounds / name / self._weights_name) for name in self._round_names())
        return {number: existing for number, path in paths if (existing := existing_checkpoint(path))}

    def copy_companions(self, directory: Path) -> None:
        """Copy the files that belong next to the weights, in a job that started from a Hugging Face directory."""
        if self.is_hugging_face:
            ModelDirectory(self.directory).copy_companions(directory)

    def clear_state(self) -> None:
        """Remove everything but the models: a job that is over does not resume."""
        (self.directory / RECORD_NAME).unlink(missing_ok=True)
        shutil.rmtree(self.optimizer, ignore_errors=True)
        for directory in (self._rounds, self.incoming):
            with contextlib.suppress(OSError):
                directory.rmdir()

    def _put(self, weights: Mapping[str, Any], path: Path) -> list[TensorFile]:
        """Save a model and return the files that hold it."""
        path.parent.mkdir(exist_ok=True)
        own = self._hugging_face
        if own is not None and not all((path.parent / name).exists() for name in own.companions()):
            # Before the weights: a directory with weights is complete.
            own.copy_companions(path.parent, link=True)
        files = files_holding(weights)
        # Aggregation does not wait for the disk; a checkpoint does.
        if not (files and self._can_link(files) and link_checkpoint(files, path)):
            saved = open_checkpoint(self._copy(weights, path))
            files = saved.local_files()
        return files

    def _copy(self, weights: Mapping[str, Any], path: Path) -> Path:
        """Save a model with the metadata of the files that aggregation has written for it: where the model is from."""
        values = (value for value in weights.values() if isinstance(value, (LazyTensor, LazyArray)))
        files = {file for value in values if isinstance(file := value.source.file(), TensorFile)}
        own = sorted(filter(self._is_own, files), key=lambda file: file.path)
        metadata = {key: text for file in own for key, text in read_header(file).metadata.items()}
        return Path(save(weights, path, max_shard_size=self.max_shard_size, metadata=metadata))

    def _is_own(self, file: TensorFile) -> bool:
        return Path(os.path.realpath(file.path)).is_relative_to(os.path.realpath(self.directory))

    def _can_link(self, files: list[TensorFile]) -> bool:
        """Whether files are below this store, because others may change them elsewhere, and not too large."""
        if not all(map(self._is_own, files)):
            return False
        most = self.max_shard_size
        if most is None:
            return len(files) == 1
        contents = [file.contents or {} for file in files]
        return all(len(each) == 1 or sum(stored.nbytes for stored in each.values()) <= most for each in contents)

    def _record(self, checkpoint: Checkpoint) -> None:
        record = {
            "format": _FORMAT,
            "round": checkpoint.round,
            "directory": checkpoint.path.name,
            "meta": json_part(checkpoint.meta),
        }
        with AtomicFile(self.directory / RECORD_NAME) as file:
            file.write_at((json.dumps(record, indent=2) + "\n").encode(), 0)
            file.sync()
            file.publish()
        sync_directory(str(self.directory))

    def _prune(self) -> None:
        for name in self._round_names()[: -self._keep_rounds]:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self._rounds / name)

    def _round_names(self) -> list[str]:
        """Return the names of the directories of rounds, the last round last."""
        return sorted(filter(_ROUND_NAME.fullmatch, os.listdir(self._rounds)), key=_number_of)


def _round_name(round_number: int | None) -> str:
    return f"round-{round_number or 0:05d}"


def _number_of(round_name: str) -> int:
    return int(round_name.rpartition("-")[2])


def existing_checkpoint(path: Path) -> Path | None:
    """Return the file of a checkpoint, the index of its shards, or None if neither exists."""
    return next((each for each in (path, Path(index_path(str(path)))) if each.exists()), None)


def json_part(value: Any) -> Any:
    """Return the part of a value that JSON can hold, without other values in dictionaries and lists."""
    if isinstance(value, Mapping):
        kept = {str(key): json_part(part) for key, part in value.items()}
        return {key: part for key, part in kept.items() if part is not None}
    if isinstance(value, (list, tuple)):
        return [json_part(part) for part in value]
    return value if isinstance(value, (str, int, float, bool)) else None

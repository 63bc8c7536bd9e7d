# SPDX-License-Identifier: Apache-2.0
"""`CheckpointStore`: a job's checkpoints on disk: the global model, the best model and those of the last rounds.

Where the persistor puts what aggregation wrote. A file that holds exactly the model gets one more name instead of a
copy. The record of the last round is replaced last and atomically, so a job that is killed at any moment finds the
previous round or this one, with the matching file.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvflare_lazy._text import get_logger, quoted
from nvflare_lazy.errors import JobCheckpointError
from nvflare_lazy.formats.atomic_file import AtomicFile, sync_directory
from nvflare_lazy.formats.hugging_face import ModelDirectory
from nvflare_lazy.formats.save_checkpoint import save
from nvflare_lazy.scratch import DirectoryLease
from nvflare_lazy.tensors.entry import file_holding
from nvflare_lazy.tensors.tensor_file import TensorFile

logger = get_logger(__name__)

RECORD_NAME = "checkpoint.json"
_FORMAT = 1
_ROUNDS = "rounds"
#: The Hugging Face directory of the best model, in jobs that began with one.
BEST = "best"
_MAX_ROUND = 1 << 53
_MAX_RECORD_BYTES = 64 << 20
_ROUND_FILE = re.compile(r"round-(\d{5,})\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """A complete round.

    Attributes:
        round: Its number, or None for a model saved outside of rounds.
        path: The file of the global model after it.
        meta: What NVFlare keeps with the model, as far as JSON can hold it.
    """

    round: int | None
    path: Path
    meta: Mapping[str, Any] = field(default_factory=dict)


class CheckpointStore:
    """The checkpoints of one job, in a directory that it creates; it keeps the files of the last rounds."""

    def __init__(self, directory: Path, model_name: str, best_name: str, *, keep_rounds: int = 2) -> None:
        self.directory = directory
        self.model_path = directory / model_name
        self.best_path = directory / best_name
        self.incoming = directory / ".incoming"
        self._rounds = directory / _ROUNDS
        self._keep_rounds = keep_rounds
        self._lease: DirectoryLease | None = None
        self._initial: ModelDirectory | None = None
        for path in (directory, self._rounds):
            path.mkdir(parents=True, exist_ok=True)
        self.incoming.mkdir(mode=0o700, exist_ok=True)

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
        """Remove what a killed process was about to hand over. Only for the one process that owns the store."""
        for path in self.incoming.iterdir():
            with contextlib.suppress(OSError):
                path.unlink()

    def begin_with(self, initial: ModelDirectory) -> None:
        """Complete the checkpoints with the files next to the weights of a Hugging Face directory.

        This directory, and `best` below it, then have the weights under the names that `from_pretrained` expects, too.

        Raises:
            JobCheckpointError: It is this directory, whose weights would be replaced.
        """
        if os.path.samefile(initial.path, self.directory) and self.latest() is None:
            raise JobCheckpointError(
                f"checkpoint_dir {self.directory} is the initial model, which would be replaced; use another directory"
            )
        initial.copy_companions(self.directory)
        # The initial directory need not exist until the end of the job.
        self._initial = ModelDirectory(self.directory, adapter=initial.is_adapter)

    def save(
        self, weights: Mapping[str, Any], round_number: int | None = None, meta: Mapping[str, Any] | None = None
    ) -> Path:
        """Save the global model after a round; the last complete one stays until this one is.

        If one file below this store holds exactly these tensors, it is not copied.
        """
        path = self._rounds / _file_name(round_number)
        self._put(weights, path)
        if not _add_name(path, self.model_path):
            save(weights, self.model_path)
        self._complete(weights, path, self.directory)
        self._record(Checkpoint(round_number, path, meta or {}))
        self._prune()
        return self.model_path

    def save_best(self, weights: Mapping[str, Any]) -> Path:
        """Save the best model so far."""
        self._put(weights, self.best_path)
        self._complete(weights, self.best_path, self.directory / BEST)
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
        number, name, meta = record.get("round"), record.get("file"), record.get("meta", {})
        if not (number is None or (type(number) is int and 0 <= number <= _MAX_ROUND)):
            raise self._damaged(f"has the round {quoted(number)}")
        if name != _file_name(number):
            raise self._damaged(f"names {quoted(name)}, which is not the file of round {number}")
        if not isinstance(meta, dict):
            raise self._damaged(f"has the meta data {quoted(meta)}")
        found = self._rounds / name
        if not found.is_file():
            raise self._damaged(f"names {found}, which is missing")
        return Checkpoint(number, found, meta)

    def _damaged(self, what: str) -> JobCheckpointError:
        """Return the error for a record that the job cannot resume from; it names the last file there is."""
        files = self._round_files()
        advice = "" if not files else f", or set source_ckpt_file_full_name to {self._rounds / files[-1]} as well"
        return JobCheckpointError(
            f"{self.directory / RECORD_NAME} {what}; restore it from a backup, or remove it to start over{advice}"
        )

    def models(self) -> dict[str, Path]:
        """Return the models there are, the last one first, by the names of their files."""
        paths = [path for path in (self.model_path, self.best_path) if path.exists()]
        return {path.name: path for path in paths}

    def _put(self, weights: Mapping[str, Any], path: Path) -> None:
        held = file_holding(weights)
        if held is None or not self._is_own(held) or not _add_name(Path(held.path), path):
            save(weights, path)
        else:
            # Aggregation does not wait for the disk; a checkpoint that counts does.
            _sync(path)

    def _complete(self, weights: Mapping[str, Any], path: Path, directory: Path) -> None:
        """Make a Hugging Face directory of a model that is saved."""
        if self._initial is None:
            return
        directory.mkdir(exist_ok=True)
        if not all((directory / name).exists() for name in self._initial.companions()):
            self._initial.copy_companions(directory)
        name = directory / self._initial.weights_name
        if name not in (self.model_path, self.best_path) and not _add_name(path, name):
            save(weights, name)

    def _is_own(self, file: TensorFile) -> bool:
        """Whether a file is below this store: elsewhere others may change it."""
        below = Path(os.path.realpath(file.path)).is_relative_to(os.path.realpath(self.directory))
        return below and file.is_still_at(file.path)

    def _record(self, checkpoint: Checkpoint) -> None:
        record = {
            "format": _FORMAT,
            "round": checkpoint.round,
            "file": checkpoint.path.name,
            "meta": json_part(checkpoint.meta),
        }
        with AtomicFile(self.directory / RECORD_NAME) as file:
            file.write_at((json.dumps(record, indent=2) + "\n").encode(), 0)
            file.sync()
            file.publish()
        sync_directory(str(self.directory))

    def _prune(self) -> None:
        for name in self._round_files()[: -self._keep_rounds]:
            with contextlib.suppress(FileNotFoundError):
                (self._rounds / name).unlink()

    def _round_files(self) -> list[str]:
        """Return the names of the files of rounds, the last round last."""
        found = (match for name in os.listdir(self._rounds) if (match := _ROUND_FILE.fullmatch(name)))
        return [match[0] for match in sorted(found, key=lambda match: match[1].zfill(20))]


def _file_name(round_number: int | None) -> str:
    return f"round-{round_number or 0:05d}.safetensors"


def json_part(value: Any) -> Any:
    """Return the part of a value that JSON can hold, without other values in dictionaries and lists."""
    if isinstance(value, Mapping):
        kept = {str(key): json_part(part) for key, part in value.items()}
        return {key: part for key, part in kept.items() if part is not None}
    if isinstance(value, (list, tuple)):
        return [json_part(part) for part in value]
    return value if isinstance(value, (str, int, float, bool)) else None


def _add_name(path: Path, name: Path) -> bool:
    """Give a file one more name, which replaces the file of that name; False if it cannot be linked to."""
    hidden = name.with_name(f".{name.name}.{secrets.token_hex(6)}.tmp")
    try:
        os.link(path, hidden)
    except FileNotFoundError:
        return False
    except OSError as error:
        logger.info("%s cannot be linked to (%s): copying it", path, error)
        return False
    try:
        os.replace(hidden, name)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise
    if hidden.exists():
        # Both names were the same file already: then rename() does nothing, and says that it did.
        hidden.unlink(missing_ok=True)
    sync_directory(str(name.parent))
    return True


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

# SPDX-License-Identifier: Apache-2.0
"""The messages of a handoff: the sender's rendezvous directory, the receiver's proof, and the files and runs of bytes.

The messages are keys in the state that NVFlare's downloads carry, next to the offer of segments; releases without
handoffs ignore them. Everything received is untrusted input; an invalid reply ends the handoff, not the download.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from nvflare_lazy._text import quoted
from nvflare_lazy.errors import ProtocolError

if TYPE_CHECKING:
    from nvflare_lazy.transport.segments.manifest import Manifest, ManifestItem

#: Smaller payloads travel in a few segments, which takes less time than a proof and a reply.
MIN_BYTES = 4 << 20
MAX_RUNS = 4096
# What files may have in addition to a payload's bytes: their headers. Files of tensors that arrived one by one have
# space for further entries.
_HEADER_ROOM = 5 << 20
_HEADER_BYTES_PER_TENSOR = 1000
_MAX_NBYTES = 1 << 62
_TOKEN = re.compile(r"[0-9a-f]{16,128}")
_LEASE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_ID = re.compile(r"[0-9a-f]{32}")
_WAIT = "wait"
_START = itemgetter(0)


class RendezvousOffer(NamedTuple):
    """The rendezvous directory of a sender.

    Attributes:
        nonce: Random text, different for each offer.
        host_token: A keyed hash of the nonce, which processes on one host compute alike; see `scratch.rendezvous`.
        lease: The name of the sender's leased directory, below the scratch root.
    """

    nonce: str
    host_token: str
    lease: str

    def to_fields(self) -> dict[str, Any]:
        """Return it as it travels."""
        return {"rendezvous": list(self)}

    @classmethod
    def from_fields(cls, fields: object) -> RendezvousOffer | None:
        """Read an offer; None if it is missing or invalid."""
        found = fields.get("rendezvous") if isinstance(fields, dict) else None
        if not isinstance(found, (list, tuple)) or len(found) != 3 or not all(isinstance(part, str) for part in found):
            return None
        nonce, token, lease = found
        if not (_TOKEN.fullmatch(nonce) and _TOKEN.fullmatch(token) and _LEASE.fullmatch(lease)):
            return None
        return cls(nonce, token, lease)


def proof_text(sender: str, receiver: str, ref_id: str) -> str:
    """Return the text that a receiver authenticates with the secret of the rendezvous directory.

    It names both cells: a receiver on another host could otherwise let a process on this host make the proof for it,
    by offering that process the same rendezvous directory.
    """
    return "\n".join((sender, receiver, ref_id))


def proof_to_fields(proof: str) -> dict[str, Any]:
    """Return a receiver's proof as it travels."""
    return {"proof": proof}


def proof_from_fields(fields: object) -> str | None:
    """Read the proof in a request; None if the request asks for no files. An invalid proof is an empty text."""
    if not isinstance(fields, dict) or "proof" not in fields:
        return None
    proof = fields["proof"]
    return proof if isinstance(proof, str) and _TOKEN.fullmatch(proof) else ""


def for_all_to_fields() -> dict[str, Any]:
    """Return what a client job adds to the end of a download of its trainer's result: it passes the result on."""
    return {"for_all": True}


def is_for_all(fields: object) -> bool:
    """Whether the end of a download reports that the receiver passes the payload on to all others."""
    return isinstance(fields, dict) and fields.get("for_all") is True


class Wait(NamedTuple):
    """The sender is still writing: `done` bytes of the payload are in files."""

    done: int


class ShownFile(NamedTuple):
    """A file in the rendezvous directory, by the random name of its link."""

    id: str
    nbytes: int


class Run(NamedTuple):
    """A range of the payload's bytes, and its offset in one of the files."""

    start: int
    nbytes: int
    file: int
    at: int


@dataclass(frozen=True)
class Files:
    """The files that contain a payload.

    Attributes:
        files: The files.
        runs: All bytes of the payload, in order.
    """

    files: tuple[ShownFile, ...]
    runs: tuple[Run, ...]

    def check(self, manifest: Manifest) -> None:
        """Raise ProtocolError unless the runs are all bytes of a manifest, each tensor in one run, and no file more."""
        end = 0
        for run in self.runs:
            if run.start != end or not 0 < run.nbytes <= manifest.nbytes - end:
                raise ProtocolError(f"a run of bytes starts at {run.start} and has {run.nbytes}, expected one at {end}")
            if not 0 <= run.file < len(self.files):
                raise ProtocolError(f"a run is in file {run.file} of {len(self.files)}")
            if run.at < 0 or run.at + run.nbytes > self.files[run.file].nbytes:
                raise ProtocolError(f"a run is outside its file: {run.nbytes} bytes at {run.at}")
            end += run.nbytes
        if end != manifest.nbytes:
            raise ProtocolError(f"the runs end at byte {end} of {manifest.nbytes}")
        if {run.file for run in self.runs} != set(range(len(self.files))):
            raise ProtocolError("a file contains no run")
        nbytes = sum(file.nbytes for file in self.files)
        more = len(self.files) * _HEADER_ROOM + len(manifest.items) * _HEADER_BYTES_PER_TENSOR
        if nbytes > manifest.nbytes + more:
            raise ProtocolError(f"the files have {nbytes} bytes, far more than the payload's {manifest.nbytes}")
        for item in manifest.items:
            self.place(item)

    def place(self, item: ManifestItem) -> tuple[int, int]:
        """Return the file that contains a tensor, and its offset there."""
        run = self.runs[max(bisect_right(self.runs, item.offset, key=_START) - 1, 0)]
        if not item.nbytes:
            return run.file, run.at
        if item.offset + item.nbytes > run.start + run.nbytes:
            raise ProtocolError(f"the bytes of {quoted(item.name)} are not in one run")
        return run.file, run.at + item.offset - run.start

    def to_fields(self) -> dict[str, Any]:
        """Return the reply as it travels."""
        return {"files": [[list(file) for file in self.files], [list(run) for run in self.runs]]}


def wait_to_fields(wait: Wait) -> dict[str, Any]:
    """Return the reply of a sender that is still writing, as it travels."""
    return {"files": _WAIT, "done": wait.done}


def none_to_fields() -> dict[str, Any]:
    """Return the reply of a sender that hands no files over."""
    return {"files": None}


def reply_from_fields(fields: object, nbytes: int) -> Files | Wait | None:
    """Read a sender's reply about a payload of `nbytes` bytes; None if it hands no files over.

    Raises:
        ProtocolError: If it is no such reply.
    """
    if not isinstance(fields, dict) or "files" not in fields:
        raise ProtocolError(f"invalid reply to a proof: {quoted(fields)}")
    files = fields["files"]
    if files is None:
        return None
    if files == _WAIT:
        done = fields.get("done")
        if type(done) is not int or not 0 <= done <= nbytes:
            raise ProtocolError(f"invalid number of bytes that are in files: {quoted(done)} of {nbytes}")
        return Wait(done)
    if not isinstance(files, (list, tuple)) or len(files) != 2 or not all(map(_is_list, files)):
        raise ProtocolError(f"invalid list of files: {quoted(files)}")
    shown = tuple(map(_shown_file, files[0]))
    if not shown or len({file.id for file in shown}) != len(shown):
        raise ProtocolError(f"expected at least one file, and each once, got {len(shown)}")
    return Files(shown, tuple(map(_run, files[1])))


def _shown_file(record: object) -> ShownFile:
    if (
        isinstance(record, (list, tuple))
        and len(record) == 2
        and isinstance(record[0], str)
        and _ID.fullmatch(record[0])
        and _is_count(record[1])
    ):
        return ShownFile(*record)
    raise ProtocolError(f"invalid file: {quoted(record)}")


def _run(record: object) -> Run:
    if isinstance(record, (list, tuple)) and len(record) == 4 and all(map(_is_count, record)):
        return Run(*record)
    raise ProtocolError(f"invalid run of bytes: {quoted(record)}")


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple)) and len(value) <= MAX_RUNS


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MAX_NBYTES

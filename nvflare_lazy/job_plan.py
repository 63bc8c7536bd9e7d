# SPDX-License-Identifier: Apache-2.0
"""`JobPlan`: disk, memory and traffic of each process of a job, computed from its options and its model's headers.

`nvflare-lazy plan` prints it. All formulas are here, each with its reason; constants that were measured are at the top,
and tests compare the plan with the jobs of `benchmarks/planned_jobs.py`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from nvflare_lazy._system import available_cores
from nvflare_lazy._text import parse_size
from nvflare_lazy.aggregation.rules import to_rule
from nvflare_lazy.aggregation.server_optimizers import to_optimizer
from nvflare_lazy.formats.hugging_face import ModelDirectory
from nvflare_lazy.formats.hugging_face.tied import tied_names
from nvflare_lazy.formats.open_checkpoint import open as open_checkpoint
from nvflare_lazy.formats.open_checkpoint import open_model

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    import torch

    from nvflare_lazy.tensors.entry import TensorEntry

_MIB = 1 << 20

# Measured: RssAnon of each process in a job with a model of 4 KiB, with Python, torch, NVFlare and this package.
_IDLE_SERVER = 186 * _MIB
_IDLE_CLIENT_JOB = 189 * _MIB
_IDLE_CLIENT_WITH_TRAINER = 182 * _MIB
_IDLE_TRAINER = 181 * _MIB
_IDLE_INSTANTIATION = 146 * _MIB
_IDLE_PARENT = 78 * _MIB
# Measured: buffers of a parent process, in which NVFlare forwards messages without this package.
_FORWARDED_SEGMENTS = 88 * _MIB
_FORWARDED_ITEMS = 35 * _MIB
# Measured: of the data in flight to a server, the part whose buffers are in memory while it aggregates.
_KEPT_IN_FLIGHT = 1 / 2
# Measured: models that NVFlare's persistor and aggregation hold in the server, with any number of clients.
_MODELS_OF_STOCK_SERVER = 4.4
# Measured: NVFlare's copies of the items in flight when it puts messages together and takes them apart. In a
# deployment, the parent process has the connections and their copies.
_COPIES_OF_STOCK_ITEMS = {"sim": 3.3, "poc": 2.0, "prod": 2.0}
# Measured: with NVFlare's aggregation, the last result of a round is freed when the first one of the next arrives.
_RESULTS_KEPT_BY_STOCK = 1

# A thread of an aggregation works in tiles that fit into the processor's cache; `_engine/memory_plan.py`. A rule that
# sorts has the values of all clients, at most 8 bytes each, in a tile of this number of elements or more.
_TILE_BYTES = 16 * _MIB
_MIN_TILE_ELEMENTS = 16 * 512
_SORTED_BYTES = 8
# `TensorOffload`: a quarter of the budget is in flight. A process keeps free memory of three quarters of the budget, or
# up to three times as much after it has used models, at most. The part of this limit that it keeps was measured.
_IN_FLIGHT_SHARE = 4
_KEPT_SHARE = 3 / 4
_MAX_KEPT_SHARE = 9 / 4
_KEPT_PART = 1 / 2
# NVFlare's persistor writes the last and the best model.
_STOCK_CHECKPOINTS = 2
# Two states are kept, and the next one is written before the older one is removed; `_optimizer_state.py`.
_OPTIMIZER_STATES = 3
# States are float32, or float64 for float64 tensors.
_MIN_STATE_ITEMSIZE = 4

Environment = Literal["sim", "poc", "prod"]


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a model that a plan depends on.

    Attributes:
        nbytes: Bytes as the model is exchanged.
        stored: Bytes as it is saved: tied tensors of a Hugging Face directory are stored once.
        largest: Bytes of the largest tensor.
        tensors: Number of tensors as the model is exchanged.
        slot: Bytes that one value per element takes in the state of a server optimizer.
    """

    nbytes: int
    stored: int
    largest: int
    tensors: int
    slot: int

    @classmethod
    def of(cls, path: str | os.PathLike[str], section: str | None = None) -> ModelSize:
        """Read the headers of a checkpoint or a Hugging Face directory.

        Args:
            path: The checkpoint.
            section: Part of a training checkpoint. Default: "model", where NVFlare's files have the model.

        Raises:
            FormatError: It is not a checkpoint.
        """
        directory = None if section else ModelDirectory.find(path)
        tied: Mapping[str, str] = {}
        if directory is not None:
            entries = directory.open().entries
            if not directory.is_adapter:
                tied = tied_names(directory.config(), entries)
        else:
            entries = (open_checkpoint(path, section=section) if section else open_model(path)).entries
        saved = [entry for name, entry in entries.items() if name not in tied]
        stored = sum(entry.nbytes for entry in saved)
        return cls(
            nbytes=stored + sum(entries[name].nbytes for name in tied.values()),
            stored=stored,
            largest=max((entry.nbytes for entry in saved), default=0),
            tensors=len(saved) + len(tied),
            slot=sum(map(_slot_bytes, saved)),
        )


@dataclass(frozen=True)
class JobOptions:
    """The options of a job that its disk, memory and traffic depend on.

    Attributes:
        clients: Clients that take part in a round.
        level: 1 receives on disk, 2 also aggregates and saves on disk, 3 also receives on disk on the clients.
        rule: Name of the aggregation rule.
        optimizer: Name of the server optimizer, or None.
        sends_differences: Whether clients send differences from the global model.
        keep_rounds: Rounds whose models are kept.
        external: Whether trainers are separate processes.
        install_in_trainers: Whether such trainers use this package.
        environment: "prod" with each site on its own host, "poc" with all sites on one host and one scratch root, or
            "sim" for NVFlare's simulator.
        separate_checkpoints: Whether the checkpoints are on another file system than scratch.
        memory_budget: The `memory_budget` of the job.
        cores: Processor cores of the server.
    """

    clients: int
    level: int = 3
    rule: str = "mean"
    optimizer: str | None = None
    sends_differences: bool = False
    keep_rounds: int = 1
    external: bool = False
    install_in_trainers: bool = False
    environment: Environment = "prod"
    separate_checkpoints: bool = False
    memory_budget: int | str = "128MiB"
    cores: int = field(default_factory=available_cores)

    def __post_init__(self) -> None:
        if self.level == 1 and (self.rule != "mean" or self.optimizer is not None):
            raise ValueError("a rule or a server optimizer requires level 2 or 3; NVFlare aggregates at level 1")
        if self.install_in_trainers and not self.external:
            raise ValueError("install_in_trainers requires external trainers; others use the package at level 3")
        if self.optimizer is not None:
            to_optimizer(self.optimizer)
        least = to_rule(self.rule).min_contributors
        if self.clients < least:
            raise ValueError(f"the rule {self.rule} requires {least} or more clients, got {self.clients}")

    @property
    def budget(self) -> int:
        """The memory budget in bytes."""
        return parse_size(self.memory_budget)

    @property
    def trainers_have_package(self) -> bool:
        """Whether the processes that train exchange tensors with this package."""
        return self.install_in_trainers if self.external else self.level == 3

    @property
    def is_one_host(self) -> bool:
        """Whether all sites are on one host."""
        return self.environment != "prod"

    @property
    def hands_over(self) -> bool:
        """Whether the server and the processes that train take each other's files."""
        return self.is_one_host and self.trainers_have_package

    @property
    def has_hop(self) -> bool:
        """Whether a client job exchanges files with its external trainer."""
        return self.external and self.level == 3 and self.trainers_have_package and not self.is_one_host


@dataclass(frozen=True)
class ProcessDemand:
    """The demand of one process; sizes are bytes.

    Attributes:
        site: "server" or "client".
        process: The role of the process.
        count: Number of such processes in the job.
        memory: Peak of anonymous memory, or None if the process does not use this package, which changes nothing then.
        scratch: Peak of scratch; files that several processes share count for the one that wrote them.
        checkpoints: Peak of the directory of checkpoints.
        received: Bytes that the site receives from other sites per round.
        sent: Bytes that the site sends to other sites per round.
        loopback: Bytes that processes of the site exchange through sockets per round.
    """

    site: Literal["server", "client"]
    process: str
    count: int
    memory: int | None
    scratch: int = 0
    checkpoints: int = 0
    received: int = 0
    sent: int = 0
    loopback: int = 0


@dataclass(frozen=True)
class JobPlan:
    """The demand of each process of a job.

    Example:
        >>> plan = JobPlan.of(ModelSize.of("model.safetensors"), JobOptions(clients=10))
        >>> plan.processes[0].scratch
    """

    model: ModelSize
    options: JobOptions
    processes: tuple[ProcessDemand, ...]

    @classmethod
    def of(cls, model: ModelSize, options: JobOptions) -> JobPlan:
        """Compute the plan of a job."""
        return cls(model, options, tuple(_processes(model, options)))

    def memory(self, site: str | None = None) -> int:
        """Return the memory of a host with one site, or with all sites; processes without this package not included."""
        return sum((process.memory or 0) * count for process, count in self._on_host(site))

    def scratch(self, site: str | None = None) -> int:
        """Return the scratch of such a host."""
        return sum(process.scratch * count for process, count in self._on_host(site))

    def checkpoints(self, site: str | None = None) -> int:
        """Return the disk space for checkpoints on such a host."""
        return sum(process.checkpoints * count for process, count in self._on_host(site))

    def _on_host(self, site: str | None) -> list[tuple[ProcessDemand, int]]:
        if site is None:
            return [(process, process.count) for process in self.processes]
        return [(process, 1) for process in self.processes if process.site == site]

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        return {
            "model": asdict(self.model),
            "options": asdict(self.options),
            "processes": [asdict(process) for process in self.processes],
        }


def _processes(model: ModelSize, job: JobOptions) -> list[ProcessDemand]:
    exchanged = 0 if job.hands_over else model.nbytes
    has_parents = job.environment != "sim"
    found = [
        ProcessDemand(
            "server",
            "server job",
            1,
            _server_memory(model, job),
            _server_scratch(model, job),
            _checkpoints(model, job),
            received=job.clients * exchanged,
            sent=job.clients * exchanged,
            # The parent process of the site has the connections, and forwards each message to the job process and back.
            loopback=2 * job.clients * exchanged if has_parents else 0,
        ),
    ]
    if job.level > 1:
        # The class of a model is instantiated on disk. Its parameters and their file are among the checkpoints, which
        # are empty at that time, and of the memory, at most the result of one operator is anonymous.
        found.append(ProcessDemand("server", "instantiation", 1, _IDLE_INSTANTIATION + model.largest))
    found += _client_processes(model, job, exchanged)
    if has_parents:
        memory = _IDLE_PARENT
        if not job.hands_over:
            memory += _FORWARDED_SEGMENTS if job.trainers_have_package else _FORWARDED_ITEMS
        found.insert(1, ProcessDemand("server", "parent", 1, memory))
        found.append(ProcessDemand("client", "parent", job.clients, _IDLE_PARENT))
    return found


def _client_processes(model: ModelSize, job: JobOptions, exchanged: int) -> list[ProcessDemand]:
    in_flight = job.budget // _IN_FLIGHT_SHARE
    # On one host, the global model is a link to the server's file, and the result is a file that the server links.
    # Otherwise the global model is received, and the result is sent from memory.
    own_file = model.nbytes if job.trainers_have_package else 0
    if not job.external:
        memory = None
        if job.trainers_have_package:
            # The result is in memory until it is sent. While it was made, freed parts of it were kept.
            kept = min(max(_KEPT_SHARE * job.budget, model.nbytes / 2), _MAX_KEPT_SHARE * job.budget)
            memory = _IDLE_CLIENT_WITH_TRAINER + model.nbytes + int(_KEPT_PART * kept)
        client_job = ProcessDemand(
            "client", "client job", job.clients, memory, own_file, received=exchanged, sent=exchanged
        )
        return [client_job]
    client_job = ProcessDemand(
        "client",
        "client job",
        job.clients,
        _IDLE_CLIENT_JOB + (0 if job.hands_over else in_flight) if job.level == 3 else None,
        # The client job receives the global model and links the result of its trainer: both are files at a time.
        model.nbytes if job.has_hop else 0,
        received=exchanged,
        sent=exchanged,
        # Without files, the client job forwards each message to its trainer and back.
        loopback=0 if job.has_hop else 2 * exchanged,
    )
    # The last result and the next one, which a script makes while the last one is still in memory.
    memory = _IDLE_TRAINER + 2 * model.nbytes if job.trainers_have_package else None
    return [client_job, ProcessDemand("client", "trainer", job.clients, memory, own_file)]


def _server_memory(model: ModelSize, job: JobOptions) -> int:
    if job.level == 1:
        return _IDLE_SERVER + int(_MODELS_OF_STOCK_SERVER * model.nbytes)
    in_flight = job.budget // _IN_FLIGHT_SHARE
    tiles = min(job.budget, job.cores * _tile_bytes(job))
    if job.trainers_have_package:
        # Aggregation and transfers stay within the budget.
        return _IDLE_SERVER + min(job.budget, tiles + int(_KEPT_IN_FLIGHT * in_flight))
    # As many tensors as fit into the quarter of the budget, or one that is larger, are in flight.
    return _IDLE_SERVER + tiles + int(_COPIES_OF_STOCK_ITEMS[job.environment] * max(in_flight, model.largest))


def _tile_bytes(job: JobOptions) -> int:
    if not to_rule(job.rule).uses_order:
        return _TILE_BYTES
    return max(_TILE_BYTES, _MIN_TILE_ELEMENTS * _SORTED_BYTES * job.clients)


def _server_scratch(model: ModelSize, job: JobOptions) -> int:
    if job.hands_over:
        # Results are links to the clients' files. To link a checkpoint, it must be on the same file system.
        results, copies = 0, int(job.separate_checkpoints)
    else:
        # Each result stays until the round is combined, and then as a file that the next round overwrites.
        results, copies = job.clients, 0
    if job.level == 1:
        copies += _RESULTS_KEPT_BY_STOCK
    return (results + copies) * model.nbytes


def _checkpoints(model: ModelSize, job: JobOptions) -> int:
    if job.level == 1:
        return _STOCK_CHECKPOINTS * model.stored
    # The kept rounds, the best model if it is an earlier one, and the next one, which is written before the oldest is
    # removed. A mean of differences, and a mean that an optimizer reads, are additional files.
    models = job.keep_rounds + 2 + (job.sends_differences or job.optimizer is not None)
    state = 0
    if job.optimizer is not None:
        state = _OPTIMIZER_STATES * len(to_optimizer(job.optimizer).slots) * model.slot
    return models * model.stored + state


def _slot_bytes(entry: TensorEntry) -> int:
    dtype: torch.dtype = entry.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0
    real = dtype.to_real()
    return entry.nbytes // real.itemsize * max(_MIN_STATE_ITEMSIZE, real.itemsize)

# SPDX-License-Identifier: Apache-2.0
"""`SiteRecords`: the records of one process of a job that are not about a round's results.

`TensorOffload` starts them: the start and the end of the run, memory and scratch over time, and on a client, its tasks
and transfers. `RoundLog` writes the rounds.
"""

from __future__ import annotations

import platform
import threading
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from nvflare.apis.fl_constant import FLContextKey, ProcessType
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.app_constant import AppConstants
from nvflare.fuel.f3.cellnet.fqcn import FQCN

import nvflare_lazy
from nvflare_lazy._system import anonymous_bytes
from nvflare_lazy.records import EndRecord, JobRecord, TaskRecord, TransferRecord
from nvflare_lazy.records.sampler import Sampler
from nvflare_lazy.transport import offload

if TYPE_CHECKING:
    from nvflare_lazy.flare.round_log import RoundLog
    from nvflare_lazy.scratch import JobScratch

# A client that has no task yet keeps this number of transfers at most until it has one.
_MAX_WAITING = 64


class SiteRecords:
    """Records the events of this process outside rounds, from its start until `end()`.

    Args:
        log: The log of the rounds, which has the file.
        scratch: The scratch of the job.
        settings: The settings of `TensorOffload`.
        fl_ctx: The context of the start of the run.
    """

    def __init__(self, log: RoundLog, scratch: JobScratch, settings: dict[str, Any], fl_ctx: FLContext) -> None:
        self._log = log
        self._is_client = fl_ctx.get_process_type() == ProcessType.CLIENT_JOB
        self._lock = threading.Lock()
        # Payloads of the task that this client is going to begin: its number is only known then.
        self._of_next_task: list[TransferRecord] = []
        self._round: int | None = None
        self._failure: str | None = None
        self._site = str(fl_ctx.get_identity_name(""))
        log.write(
            JobRecord(
                job=str(fl_ctx.get_job_id("")),
                site=self._site if self._is_client else "server",
                role="client" if self._is_client else "server",
                versions=_versions(),
                settings={**settings, **_components(fl_ctx)},
                memory_bytes=anonymous_bytes(),
                scratch_free_bytes=scratch.free(),
            )
        )
        self.sampler = Sampler(log.write, lambda: scratch.used)
        offload.runtime.on_transfer.append(self._on_transfer)

    def on_task(self, fl_ctx: FLContext) -> None:
        """Record that this client begins a task."""
        task = fl_ctx.get_prop(FLContextKey.TASK_DATA)
        number = task.get_header(AppConstants.CURRENT_ROUND) if isinstance(task, Shareable) else None
        with self._lock:
            self._round = number if type(number) is int else None
            waiting, self._of_next_task = self._of_next_task, []
        self._log.write(TaskRecord(task=str(fl_ctx.get_prop(FLContextKey.TASK_NAME)), round=self._round))
        for transfer in waiting:
            transfer.round = self._round
            self._log.write(transfer)

    def on_failure(self, fl_ctx: FLContext) -> None:
        """Keep the reason for which a component ends the job."""
        self._failure = self._failure or str(fl_ctx.get_prop(FLContextKey.EVENT_DATA, ""))

    def end(self, fl_ctx: FLContext) -> None:
        """Write the end of the run."""
        offload.runtime.on_transfer.remove(self._on_transfer)
        self.sampler.stop()
        for transfer in self._of_next_task:
            self._log.write(transfer)
        signal = fl_ctx.get_run_abort_signal()
        # The signal of a client is also triggered by an ordinary end.
        aborted = (
            bool(fl_ctx.get_prop(FLContextKey.RUN_ABORT_REQUESTED, False))
            if self._is_client
            else signal is not None and bool(signal.triggered)
        )
        status = "failed" if self._failure is not None else "aborted" if aborted else "finished"
        self._log.write(EndRecord(status=status, reason=self._failure, model=self._log.last_model))

    def _on_transfer(self, transfer: TransferRecord) -> None:
        self._log.on_transfer(transfer)
        if not self._is_client:
            return
        with_server = FQCN.get_root(transfer.peer) == FQCN.ROOT_SERVER
        with self._lock:
            if with_server and transfer.direction == "received" and len(self._of_next_task) < _MAX_WAITING:
                self._of_next_task.append(transfer)
                return
            # In swarm learning, payloads of other clients can be about the previous, this or the next round.
            if with_server or self._site in transfer.peer.split("."):
                transfer.round = self._round
        self._log.write(transfer)


def _versions() -> dict[str, str]:
    found = {"nvflare-lazy": nvflare_lazy.__version__, "python": platform.python_version()}
    for package in ("nvflare", "torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _components(fl_ctx: FLContext) -> dict[str, Any]:
    """Return the classes of the job's controller, aggregator and persistor, and the rule, as far as they are known."""
    config = getattr(fl_ctx.get_prop(FLContextKey.RUNNER), "config", None)
    controllers = [getattr(workflow, "controller", None) for workflow in getattr(config, "workflows", None) or ()]
    components = getattr(config, "components", None) or {}
    found: dict[str, Any] = {}
    if controllers:
        found["controller"] = ", ".join(type(controller).__name__ for controller in controllers)
    aggregators = [getattr(controller, "aggregator", None) for controller in controllers] + list(components.values())
    for name, each in (("aggregator", aggregators), ("persistor", components.values())):
        kinds = [value for value in each if name in type(value).__name__.lower()]
        if kinds:
            found[name] = type(kinds[0]).__name__
            for setting in ("rule", "min_results", "on_too_few", "checkpoint_dir"):
                value = getattr(kinds[0], setting, None)
                if isinstance(value, (str, int)):
                    found[setting] = value
    return found

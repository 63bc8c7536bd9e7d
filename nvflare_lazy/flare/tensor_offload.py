# SPDX-License-Identifier: Apache-2.0
"""`TensorOffload`: the component that makes an existing job receive its tensors on disk.

It registers this package's handlers, leases the scratch of the job, rejects results that no aggregator can use, and
logs each round. Controllers, aggregators, persistors and filters are unchanged.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, ProcessType, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.ccwf.client_ctl import ClientSideController
from nvflare.app_common.logging.constants import is_log_streaming_allowed

from nvflare_lazy._text import format_size, logs_printably, parse_size
from nvflare_lazy.aggregation import ParamsType
from nvflare_lazy.errors import ScratchError
from nvflare_lazy.flare import job_context
from nvflare_lazy.flare.accepted_result import (
    check_params_type,
    described,
    spec_or_none,
)
from nvflare_lazy.flare.client_errors import ERROR_EVENT, LINE, ClientErrors, ErrorRecorder
from nvflare_lazy.flare.job_demand import JobDemand
from nvflare_lazy.flare.result_acceptance import ResultAcceptance, decoded
from nvflare_lazy.flare.results_in_memory import cause, is_encrypted, uses_tensor_streaming
from nvflare_lazy.flare.round_log import RoundLog, RunningRound
from nvflare_lazy.flare.round_metrics import RoundMetrics
from nvflare_lazy.flare.round_progress import ProgressReport, RoundProgress
from nvflare_lazy.flare.site_records import SiteRecords
from nvflare_lazy.flare.terminal_status import TerminalStatus
from nvflare_lazy.flare.weights import is_lazy, is_weight
from nvflare_lazy.records import FILE_NAME
from nvflare_lazy.records.trainer import set_trainer_records
from nvflare_lazy.scratch import JobScratch
from nvflare_lazy.scratch.root import set_default_root
from nvflare_lazy.transport import offload
from nvflare_lazy.transport.handoff.hop import Hop
from nvflare_lazy.transport.limits import PayloadLimits, PayloadSize
from nvflare_lazy.transport.malloc_tuning import MallocTrimmer, tune_malloc
from nvflare_lazy.transport.registration import register
from nvflare_lazy.transport.running_downloads import RunningDownloads
from nvflare_lazy.transport.ways import AS_ITEMS

DEFAULT_MEMORY_BUDGET = "128MiB"
# The name in `ClientAPIExecutor`; other executors train in the job process.
_IN_PROCESS = "in_process"
_RETURN_CODES = [code for name, code in vars(ReturnCode).items() if not name.startswith("_")]


@logs_printably
class TensorOffload(FLComponent):
    """Receives tensors and arrays on disk, in the process whose configuration names it.

    On the server, these are the results of the clients; on a client, the global model, and in swarm learning the
    results of other clients. The other side does not need this package.

    | to                                    | set                                                            |
    |---------------------------------------|----------------------------------------------------------------|
    | choose the disk for received tensors  | `scratch_dir`, or `NVFLARE_LAZY_SCRATCH` in the environment    |
    | limit the disk space of a job         | `scratch_quota`, such as `"200GiB"`                            |
    | keep disk space free                  | `min_free`, such as `"10GiB"` or `"5%"`                        |
    | limit memory                          | `memory_budget`                                                |
    | accept results larger than usual      | `max_result_size`, such as `"10GiB"`                           |

    Args:
        scratch_dir: Scratch root; a private directory is leased in it. Default: the current user's. Trainers that the
            client job starts have the same root.
        scratch_quota: Maximum bytes of scratch of this process. Default: no limit.
        min_free: Space to keep free on that file system. Default: 1 GiB, or a twentieth of a small file system.
        memory_budget: Memory for receiving and, with `LazyAggregator`, for aggregation.
        max_result_size: Maximum bytes of tensors in one result; a larger result is rejected before it is received.
            Default: on the server, and on a client that aggregates, twice the tensors of the task or of the global
            model, and at least 64 MiB. Other clients have no limit, and there is none while no model is known.
        params_type: On the server: "FULL" if clients send models, "DIFF" if they send differences; other results are
            rejected. Default: with NVFlare's FedAvg, the kind of most results of the previous round.
        handoff: Whether processes on one host, with one scratch root, may take the files of a payload instead of
            receiving its bytes.

    Example:
        >>> {"id": "offload", "path": "nvflare_lazy.flare.TensorOffload", "args": {"scratch_dir": "/data/scratch"}}
    """

    def __init__(
        self,
        scratch_dir: str | None = None,
        scratch_quota: int | str | None = None,
        min_free: int | str | None = None,
        memory_budget: int | str = DEFAULT_MEMORY_BUDGET,
        max_result_size: int | str | None = None,
        params_type: ParamsType | None = None,
        handoff: bool = True,
    ) -> None:
        super().__init__()
        check_params_type(params_type)
        self.params_type = params_type
        self.handoff = handoff
        self.scratch_dir = scratch_dir
        self.scratch_quota = scratch_quota
        self.min_free = min_free
        self.memory_budget = memory_budget
        self.max_result_size = max_result_size
        # A quarter for data in flight to this process; aggregation uses the rest.
        self._inflight_bytes = max(1, parse_size(memory_budget) // 4)
        if scratch_quota is not None:
            parse_size(scratch_quota)
        self._max_result_bytes = None if max_result_size is None else parse_size(max_result_size)
        # The largest model of the job so far, and the round and task that it was last compared with.
        self._model_size = PayloadSize()
        self._measured: tuple[object, object] | None = None
        self._engine: Any = None
        self._scratch: JobScratch | None = None
        # Restored when the run ends: `install()` in this process, or another run, may have set it.
        self._mode_before: offload.ReceiveMode | None = None
        self._restore_root: Callable[[], object] | None = None
        self.round_log: RoundLog | None = None
        # The errors of this client, if the site may send its log, and of the clients whose results are aggregated here.
        self._recorder: ErrorRecorder | None = None
        self._errors: ClientErrors | None = None
        self._has_listed_outcomes = False
        self._records: SiteRecords | None = None
        self._forget_records: Callable[[], object] | None = None
        self._progress: RoundProgress | None = None
        self._terminal: TerminalStatus | None = None
        self._round: int | None = None
        self._acceptance = ResultAcceptance(self, params_type)
        self._memory: MallocTrimmer | None = None
        self._must_unfreeze = False
        # When a result has its tensors as the client sent them.
        self._complete_at = EventType.BEFORE_TASK_RESULT_FILTER
        self._warned_of_memory = False
        self._warned_of_handoff = False
        tune_malloc()
        register()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.ABOUT_TO_START_RUN:
            # On clients only, and before any executor starts a trainer at START_RUN.
            self._open_scratch(fl_ctx)
            if is_log_streaming_allowed(fl_ctx):
                self._recorder = ErrorRecorder(self._send_error)
                self._recorder.start()
        elif event_type == EventType.START_RUN:
            self._start(fl_ctx)
        elif event_type == EventType.END_RUN:
            self._end(fl_ctx)
        elif event_type == EventType.FATAL_SYSTEM_ERROR:
            self._on_fatal_error(fl_ctx)
        elif fl_ctx.get_process_type() == ProcessType.CLIENT_JOB:
            self._on_client(event_type, fl_ctx)
        elif event_type == EventType.AFTER_TASK_DATA_FILTER:
            self._on_task_sent(fl_ctx)
        elif event_type in (EventType.BEFORE_TASK_RESULT_FILTER, EventType.AFTER_TASK_RESULT_FILTER):
            result = fl_ctx.get_prop(FLContextKey.TASK_RESULT)
            if event_type == self._complete_at:
                self._on_result(result, fl_ctx)
            if event_type == EventType.AFTER_TASK_RESULT_FILTER:
                self._acceptance.accept(result, fl_ctx)
        elif event_type == AppEventType.ROUND_STARTED:
            self._start_round(fl_ctx.get_prop(AppConstants.CURRENT_ROUND))
        elif event_type == AppEventType.AFTER_CONTRIBUTION_ACCEPT:
            self._on_verdict(fl_ctx)
        elif event_type == EventType.END_WORKFLOW:
            signal = fl_ctx.get_run_abort_signal()
            if self.round_log is not None and signal is not None and signal.triggered:
                self.round_log.on_failure()
            self._end_round()
        elif event_type == AppEventType.AFTER_LEARNABLE_PERSIST:
            self._end_round()
        elif event_type == EventType.CLIENT_DISCONNECTED:
            if self.round_log is not None:
                self.round_log.on_lost(str(fl_ctx.get_prop(FLContextKey.DISCONNECTED_CLIENT_NAME)))
        elif event_type == ERROR_EVENT:
            self._on_client_error(fl_ctx)

    def _on_client(self, event_type: str, fl_ctx: FLContext) -> None:
        """Handle the events of a client, which aggregates results of other clients in swarm learning only.

        Events of tasks are about its own results, and about messages whose tensors have not been received.
        """
        if self._recorder is not None and event_type == EventType.BEFORE_TASK_EXECUTION:
            self._recorder.forget()
        elif self._recorder is not None and event_type == EventType.BEFORE_SEND_TASK_RESULT:
            result = fl_ctx.get_prop(FLContextKey.TASK_RESULT)
            if not isinstance(result, Shareable) or result.get_return_code() != ReturnCode.OK:
                fl_ctx.set_prop(LINE, self._recorder.line, private=False, sticky=False)
        if event_type == EventType.BEFORE_TASK_EXECUTION:
            if self._records is not None:
                self._records.on_task(fl_ctx)
        elif event_type == AppEventType.ROUND_STARTED:
            self._start_gathering(fl_ctx)
        elif event_type == AppEventType.BEFORE_CONTRIBUTION_ACCEPT:
            result = fl_ctx.get_prop(AppConstants.TRAINING_RESULT)
            self._on_result(result, fl_ctx)
            self._acceptance.accept(result, fl_ctx)
        elif event_type == AppEventType.AFTER_CONTRIBUTION_ACCEPT:
            self._on_verdict(fl_ctx)
        elif event_type == AppEventType.AFTER_AGGREGATION:
            self._end_round()

    def _start_gathering(self, fl_ctx: FLContext) -> None:
        """Start a round on a client that may aggregate it; a round in which another client does is not logged."""
        job_context.keep_global_weights(fl_ctx)
        number = fl_ctx.get_prop(AppConstants.CURRENT_ROUND)
        self._start_round(number, announced=False)
        self._limit_results(None, number, fl_ctx)
        if self.round_log is not None:
            for client in job_context.trainers(fl_ctx):
                self.round_log.on_task_sent(client)

    # ---- the run -------------------------------------------------------------------------------------------------

    def _start(self, fl_ctx: FLContext) -> None:
        register()
        self._engine = fl_ctx.get_engine()
        self._open_scratch(fl_ctx)
        if self._scratch is None:
            return
        limits = PayloadLimits(self._max_result_bytes)
        self._mode_before = offload.runtime.use(
            offload.ReceiveMode(self._scratch, self._inflight_bytes, limits, self.handoff)
        )
        # Garbage collections then skip the objects of imported modules, which stay until the process ends. What another
        # component has frozen stays frozen after the run.
        self._must_unfreeze = gc.get_freeze_count() == 0
        gc.freeze()
        self._memory = MallocTrimmer(parse_size(self.memory_budget) * (1 if _forwards(fl_ctx) else 3) // 4)
        offload.runtime.on_buffers_released.append(self._memory.trim_excess)
        job_context.set_offload(fl_ctx, self)
        is_client = fl_ctx.get_process_type() == ProcessType.CLIENT_JOB
        offload.runtime.shared(Hop).enabled = is_client and not job_context.wants_values_in_memory(fl_ctx)
        if uses_tensor_streaming(fl_ctx):
            # Its component puts the tensors into the result at the same event as this one, before or after.
            self._complete_at = EventType.AFTER_TASK_RESULT_FILTER
        metrics = RoundMetrics(
            self,
            self._engine,
            job=str(fl_ctx.get_job_id("job")),
            site=fl_ctx.get_identity_name(""),
            is_server=not is_client,
        )
        self._errors = ClientErrors(str(fl_ctx.get_job_id()))
        self.round_log = RoundLog(
            _records_path(fl_ctx), self._log_line, metrics.send_round, self._errors.explain, warn=self.logger.warning
        )
        self._acceptance.log = self.round_log
        self._records = SiteRecords(self.round_log, self._scratch, self._settings(), fl_ctx)
        if not is_client or job_context.controller_of(fl_ctx) is not None:
            self._watch(self.round_log, metrics, is_client=is_client)
        self.log_info(
            fl_ctx,
            f"Receiving tensors to {self._scratch.path} ({format_size(self._scratch.free())} free, at most "
            f"{format_size(self._inflight_bytes)} in flight)",
            fire_event=False,
        )
        self._warn_of_settings(fl_ctx)
        if is_client:
            # The server waits until it knows the model.
            self._warn_of_shortages(0, fl_ctx)

    def _warn_of_settings(self, fl_ctx: FLContext) -> None:
        """Log the arguments that have no effect in this process."""
        assert self._scratch is not None
        total = self._scratch.root_info.total
        if self.scratch_quota is not None and parse_size(self.scratch_quota) > total:
            self._warn_of_setting(f"scratch_quota, because the disk has {format_size(total)}")
        is_client = fl_ctx.get_process_type() == ProcessType.CLIENT_JOB
        if is_client and self.params_type is not None and job_context.controller_of(fl_ctx) is None:
            self._warn_of_setting("params_type, because this client does not aggregate")

    def _warn_of_setting(self, setting: str) -> None:
        self.logger.warning("Setting without effect: %s; remove or correct it", setting)

    def _open_scratch(self, fl_ctx: FLContext) -> None:
        if self._scratch is not None:
            return
        job_id = str(fl_ctx.get_job_id("job"))
        try:
            self._scratch = JobScratch.open(
                self.scratch_dir, job=job_id, quota=self.scratch_quota, min_free=self.min_free
            )
        except ScratchError as error:
            self.system_panic(f"cannot create scratch for tensors: {error}", fl_ctx)
            return
        if fl_ctx.get_process_type() == ProcessType.CLIENT_JOB:
            path = _records_path(fl_ctx)
            before = set_trainer_records(None if path is None else str(path.absolute()))
            self._forget_records = partial(set_trainer_records, before)
            self._restore_root = partial(set_default_root, set_default_root(str(self._scratch.root)))

    def _settings(self) -> dict[str, Any]:
        names = ("scratch_quota", "min_free", "memory_budget", "max_result_size", "params_type", "handoff")
        scratch = None if self._scratch is None else str(self._scratch.root)
        return {"scratch_dir": scratch, **{name: getattr(self, name) for name in names}}

    def _watch(self, log: RoundLog, metrics: RoundMetrics, *, is_client: bool) -> None:
        """Report the progress of rounds: on a client, only of rounds that it aggregates in swarm learning."""

        def running() -> RunningRound | None:
            found = log.running()
            # Another client aggregates, and sends this one the model.
            is_elsewhere = is_client and found is not None and not found.results and found.aggregation is None
            return None if is_elsewhere else found

        def report(progress: ProgressReport) -> None:
            self._log_line(progress.line())
            metrics.send_progress(progress)

        self._terminal = None if is_client else TerminalStatus.of_this_process()
        self._progress = RoundProgress(
            running,
            offload.runtime.shared(RunningDownloads).progress,
            lambda: self._model_size.nbytes,
            report,
            None if self._terminal is None else self._terminal.show,
        )
        self._progress.start()

    def _end(self, fl_ctx: FLContext) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        if self._terminal is not None:
            self._terminal.close()
            self._terminal = None
        try:
            self._end_round()
        finally:
            self._release(fl_ctx)

    def _release(self, fl_ctx: FLContext) -> None:
        """End the records of this process, and restore its state before the run."""
        if self._recorder is not None:
            self._recorder.stop()
        records, self._records = self._records, None
        if records is not None:
            records.end(fl_ctx)
        if self._forget_records is not None:
            self._forget_records()
        scratch, self._scratch = self._scratch, None
        if scratch is None:
            return
        if self._restore_root is not None:
            self._restore_root()
        offload.runtime.shared(Hop).enabled = False
        offload.runtime.use(self._mode_before)
        if self._must_unfreeze:
            gc.unfreeze()
        if self._memory is not None:
            offload.runtime.on_buffers_released.remove(self._memory.trim_excess)
        scratch.release()

    # ---- one result ----------------------------------------------------------------------------------------------

    def _on_task_sent(self, fl_ctx: FLContext) -> None:
        client, task = job_context.sender_of(fl_ctx), fl_ctx.get_prop(FLContextKey.TASK_DATA)
        if self.round_log is None or not client or not isinstance(task, Shareable):
            return
        number = task.get_header(AppConstants.CURRENT_ROUND)
        self._limit_results(task, number, fl_ctx)
        if number is not None and number != self._round:
            # Some controllers, such as NVFlare's SCAFFOLD, do not announce rounds.
            self._start_round(number, announced=False)
        if self._errors is not None:
            self._errors.on_task_sent(client)
        self.round_log.on_task_sent(client)

    def _limit_results(self, task: Shareable | None, number: object, fl_ctx: FLContext) -> None:
        """Let results be as large as the largest model of the job so far permits, once per task."""
        key = number, fl_ctx.get_prop(FLContextKey.TASK_NAME)
        if key == self._measured:
            return
        self._measured = key
        size = self._model_size.union(_size_of(task)).union(_size_of(job_context.global_weights(fl_ctx)))
        if size.tensors and size != self._model_size:
            if not self._model_size.tensors:
                self._warn_of_shortages(size.nbytes, fl_ctx)
            self._model_size = size
            offload.runtime.limit_payloads(PayloadLimits.for_model(size, self._max_result_bytes))

    def _warn_of_shortages(self, model_bytes: int, fl_ctx: FLContext) -> None:
        """Warn if this machine, or the limits of the container, are too small for the job."""
        if self._scratch is None:
            return
        try:
            demand = JobDemand.of(fl_ctx, model_bytes, parse_size(self.memory_budget), self._scratch.path)
            shortages = demand.shortages()
        except (ScratchError, OSError) as error:
            self.log_warning(fl_ctx, f"Cannot read the limits of this machine: {error}", fire_event=False)
            return
        what = f"{demand.results} results of {format_size(model_bytes)}" if model_bytes else "this job"
        for shortage in shortages:
            self.log_warning(fl_ctx, f"This machine may be too small for {what}: {shortage}", fire_event=False)

    def _on_result(self, result: object, fl_ctx: FLContext) -> None:
        client = job_context.sender_of(fl_ctx)
        code = result.get_return_code() if isinstance(result, Shareable) else None
        if isinstance(result, Shareable) and code not in (None, *_RETURN_CODES):
            # NVFlare writes it to the log as it is.
            result.set_return_code(ReturnCode.EXECUTION_EXCEPTION)
        if self.round_log is not None and client:
            self.round_log.on_answer(client)
            if code not in (None, ReturnCode.OK):
                peer = fl_ctx.get_peer_context()
                if self._errors is not None and peer is not None:
                    self._errors.add(client, peer.get_prop(LINE))
                self.round_log.on_skip(client, f"its task ended with {described(code)}", failed=True)
        try:
            dxo = decoded(result)
        except Exception:
            return  # logged when it is rejected
        if self.round_log is None or not client or dxo is None or dxo.data_kind == DataKind.METRICS:
            return
        # SCAFFOLD sends control variates in the metadata, and filters that quantize send most of the bytes there.
        values = [value for _, value in _weights_in((dxo.data, dxo.meta))]
        if values or job_context.kind_of_data(dxo.data_kind):
            nbytes = sum(spec.dtype.itemsize * prod(spec.shape) for spec in map(spec_or_none, values) if spec)
            on_disk = any(map(is_lazy, values))
            self.round_log.on_result(client, nbytes, len(values), on_disk=on_disk)
            if self._records is not None:
                self._records.sampler.look()
            # A client that aggregates has its own result in memory if it trains in its process.
            if not on_disk and (values or is_encrypted(dxo)) and client != fl_ctx.get_identity_name():
                self._warn_of_memory(dxo, fl_ctx)

    def _warn_of_memory(self, result: DXO, fl_ctx: FLContext) -> None:
        if not self._warned_of_memory:
            self._warned_of_memory = True
            self.log_warning(fl_ctx, f"Results are in memory, not on disk: {cause(result, fl_ctx)}", fire_event=False)

    def _on_verdict(self, fl_ctx: FLContext) -> None:
        client = job_context.sender_of(fl_ctx)
        if self.round_log is not None and client:
            self.round_log.on_verdict(client, accepted=self._acceptance.is_used(client, fl_ctx))

    # ---- failures --------------------------------------------------------------------------------------------------

    def _send_error(self, line: str) -> None:
        """Send the line of an error to the server, on a client: its trainer may hang instead of returning a result."""
        if self._engine is not None:
            with self._engine.new_context() as fl_ctx:
                self.fire_fed_event(ERROR_EVENT, Shareable({LINE: line}), fl_ctx)

    def _on_client_error(self, fl_ctx: FLContext) -> None:
        message = fl_ctx.get_prop(FLContextKey.EVENT_DATA)
        if self._errors is not None and isinstance(message, Shareable):
            self._errors.add(str(message.get_peer_prop(ReservedKey.IDENTITY_NAME, "")), message.get(LINE))

    def _on_fatal_error(self, fl_ctx: FLContext) -> None:
        """Record why a component ends the job, and on the server, log the outcome of each client in its last round."""
        if self._records is not None:
            self._records.on_failure(fl_ctx)
        if fl_ctx.get_process_type() == ProcessType.CLIENT_JOB:
            return
        if self.round_log is not None:
            self.round_log.on_failure()
        outcomes = "" if self._has_listed_outcomes else self.outcomes()
        if outcomes:
            self.log_error(fl_ctx, f"{_in_round(self._round)} ended without a new model: {outcomes}", fire_event=False)

    def outcomes(self) -> str:
        """Return for each client of the job whether its result in this round counts, or why not."""
        self._has_listed_outcomes = True
        clients = [] if self._engine is None else self._engine.get_clients()
        return "" if self.round_log is None else self.round_log.outcomes(client.name for client in clients)

    # ---- one round -----------------------------------------------------------------------------------------------

    def _start_round(self, number: int | None, *, announced: bool = True) -> None:
        self._end_round()
        self._round, self._has_listed_outcomes = number, False
        self._acceptance.start_round()
        if self.round_log is not None:
            self.round_log.start_round(number, announced=announced)

    def _end_round(self) -> None:
        if self.round_log is None:
            return
        scratch = self._scratch
        used, peak = (scratch.used, scratch.take_peak()) if scratch is not None else (0, 0)
        transport = offload.runtime.take_received()
        if not self.handoff and not self._warned_of_handoff and transport.keys() == {AS_ITEMS}:
            self._warned_of_handoff = True
            self._warn_of_setting("handoff, because no process that sent tensors in this round uses nvflare-lazy")
        record = self.round_log.end_round(
            scratch_bytes=used,
            scratch_peak_bytes=peak,
            memory_peak_bytes=0 if self._records is None else self._records.sampler.take_peak(),
            transport=transport,
        )
        if record is not None and self._memory is not None:
            self._memory.trim_idle()

    def _log_line(self, line: str) -> None:
        self.logger.info("%s", line)


def _in_round(number: int | None) -> str:
    return "A round" if number is None else f"Round {number}"


def _weights_in(value: object) -> Iterator[tuple[object, Any]]:
    """Yield all tensors and arrays in nested collections, such as a task with a model and its control variates."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, DXO):
            part = part.data, part.meta
        if isinstance(part, (list, tuple)):
            part = dict(enumerate(part))
        for name, item in part.items() if isinstance(part, Mapping) else ():
            if is_weight(item):
                yield name, item
            else:
                waiting.append(item)


def _size_of(value: object) -> PayloadSize:
    nbytes = tensors = name_bytes = 0
    for name, item in _weights_in(value):
        nbytes += item.nbytes
        tensors += 1
        name_bytes += len(str(name).encode())
    return PayloadSize(nbytes, tensors, name_bytes)


def _forwards(fl_ctx: FLContext) -> bool:
    """Return whether all trainers of this client job are external processes, and it aggregates nothing."""
    router = getattr(fl_ctx.get_prop(FLContextKey.RUNNER), "task_router", None)
    executors = getattr(router, "task_table", {}).values()
    return bool(executors) and not any(
        isinstance(executor, ClientSideController) or getattr(executor, "execution_mode", _IN_PROCESS) == _IN_PROCESS
        for executor in executors
    )


def _records_path(fl_ctx: FLContext) -> Path | None:
    try:
        return Path(fl_ctx.get_workspace().get_run_dir(fl_ctx.get_job_id())) / FILE_NAME
    except (AttributeError, RuntimeError, OSError):
        return None

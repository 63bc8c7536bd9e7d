# SPDX-License-Identifier: Apache-2.0
"""The progress of a running round: in the log, on a terminal, and as metrics."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.fl_job import FLJob
from benchmarks.fl_job.simulator import end_tree
from integration_tests.conftest import JobRunner, records
from tests.terminal import Terminal

HERE = Path(__file__).parent
MIB = 1 << 20
IMPATIENT = {"id": "impatient", "path": "impatient.Impatient"}
FILES = (HERE / "witnesses" / "impatient.py", HERE / "witnesses" / "witness.py")
# The second client pauses for 15 seconds in the middle of its result.
PAUSE = '{"2": "pauses"}'


def slow_job(*components, **arguments):
    return FLJob(
        mode="level-2",
        clients=2,
        model_mib=8,
        tensors=4,
        rounds=1,
        trainer=HERE / "faulty_trainer.py",
        files=FILES,
        components=(IMPATIENT, *components),
        **arguments,
    )


@pytest.mark.slow
def test_log_and_metrics_of_a_slow_client(run_job: JobRunner, tmp_path: Path):
    """Lines at most once per second say which client is slow; StatsD and analytics receivers get the same numbers."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as statsd:
        statsd.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        statsd.bind(("127.0.0.1", 0))
        port = statsd.getsockname()[1]
        reporter = {
            "id": "statsd",
            "path": "nvflare.fuel_opt.statsd.statsd_reporter.StatsDReporter",
            "args": {"site": "server", "host": "127.0.0.1", "port": port},
        }
        job = slow_job(reporter, {"id": "metrics", "path": "witness.MetricsWitness"})
        seen = tmp_path / "witness.jsonl"
        result = run_job(job, environment={"FAULTS": PAUSE, "WITNESS": str(seen)})
        statsd.setblocking(False)
        gauges: list[str] = []
        while True:
            try:
                gauges += statsd.recv(65536).decode().splitlines()
            except BlockingIOError:
                break

    lines = re.findall(
        r"Round 0: received (\d+) % \(.*?, 1 of 2 results complete.*?; in progress: (.*)", result.server_log
    )
    assert 5 <= len(lines) <= 25
    assert {details.split(" ", 1)[0] for _, details in lines} == {"site-2"}
    assert {int(share) for share, _ in lines} <= set(range(50, 100))
    [record] = records(result, "round")
    of_job = "|g|#job_id:simulate_job,site:simulator_server"
    assert f"nvflare_lazy_received_bytes:{record['received_bytes']:.0f}{of_job}" in [
        gauge.replace(".0|", "|") for gauge in gauges
    ]
    progress = [line for line in gauges if line.startswith("nvflare_lazy_progress_percent:") and line.endswith(of_job)]
    assert len(progress) == len(lines)
    assert any(line.startswith("nvflare_lazy_progress_bytes:") and line.endswith(",client:site-2") for line in gauges)
    notes = [json.loads(line) for line in seen.read_text().splitlines()]
    origins = {note["tag"]: {other["origin"] for other in notes if other["tag"] == note["tag"]} for note in notes}
    assert origins["nvflare_lazy/progress_bytes"] == {"simulator_server", "site-2"}
    assert origins["nvflare_lazy/result_bytes"] == {"site-1", "site-2"}
    assert origins["nvflare_lazy/server/memory_bytes"] == {"site-1", "site-2"}


def tracked(run_job, tmp_path, path, arguments=None, environment=None):
    """Run two rounds with an NVFlare receiver on the server, and return the run and its records of rounds."""
    job = FLJob(mode="level-2", model_mib=1, components=({"id": "tracker", "path": path, "args": arguments or {}},))
    result = run_job(job, environment=environment or {})
    assert " - ERROR - " not in result.server_log
    return result, records(result, "round")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those of the libraries are not ours
def test_tensorboard(run_job: JobRunner, tmp_path: Path):
    """The server and each client have a directory with the curves of their numbers."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    result, rounds = tracked(run_job, tmp_path, "nvflare.app_opt.tracking.tb.tb_receiver.TBAnalyticsReceiver")
    curves = {}
    for path in result.server_run_dir.glob("tb_events/*"):
        events = accumulators.EventAccumulator(str(path))
        events.Reload()
        curves[path.name] = {
            tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
        }
    assert curves.keys() == {"simulator_server", "site-1", "site-2"}
    assert curves["simulator_server"]["nvflare_lazy/received_bytes"] == [(0, 2 * MIB), (1, 2 * MIB)]
    memory = {record["round"]: record["memory_bytes"] for record in rounds}
    assert dict(curves["simulator_server"]["nvflare_lazy/memory_bytes"]) == pytest.approx(memory)
    assert curves["site-2"]["nvflare_lazy/result_bytes"] == [(0, MIB), (1, MIB)]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_mlflow(run_job: JobRunner, tmp_path: Path):
    """The run of each client has the numbers of its results and the server's numbers."""
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("alembic", reason="MLflow's local store needs it")
    path = "nvflare.app_opt.tracking.mlflow.mlflow_receiver.MLflowReceiver"
    result, rounds = tracked(run_job, tmp_path, path)
    [database] = result.workspace.rglob("mlflow.db")
    client = mlflow.MlflowClient(f"sqlite:///{database}")
    runs = [run for found in client.search_experiments() for run in client.search_runs([found.experiment_id])]
    assert len(runs) == 2

    def history(run, name):
        return sorted((metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name))

    for run in runs:
        assert run.info.run_name.startswith("site-")
        assert history(run, "nvflare_lazy/result_bytes") == [(0, MIB), (1, MIB)]
        expected = [(record["round"], record["memory_bytes"]) for record in rounds]
        assert history(run, "nvflare_lazy/server/memory_bytes") == expected


def wandb_records(content):
    """Yield the records of an offline run: a log of LevelDB after a header of 7 bytes."""
    at, block, parts = 7, 32768, b""
    while at + 7 <= len(content):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # complete, or the last part
            yield parts
            parts = b""


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_wandb(run_job: JobRunner, tmp_path: Path):
    """The offline run of each client, which `wandb sync` sends, has the numbers of its results and the server's."""
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    path = "nvflare.app_opt.tracking.wandb.wandb_receiver.WandBReceiver"
    arguments = {"wandb_args": {"project": "digits", "name": "run", "job_type": "training"}, "mode": "offline"}
    _, rounds = tracked(run_job, tmp_path, path, arguments, {"WANDB_DIR": str(tmp_path)})
    memory = [record["memory_bytes"] for record in rounds]
    found = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(found) == 2
    for file in found:
        rows = []
        for data in wandb_records(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
        assert [row["nvflare_lazy/result_bytes"] for row in rows] == [MIB, MIB]
        assert [row["nvflare_lazy/server/memory_bytes"] for row in rows] == memory


@pytest.mark.slow
def test_terminal_of_the_simulator(tmp_path: Path):
    """The last row shows the progress while server and clients log above it; no line of a log is damaged."""
    folder = slow_job().write(tmp_path / "job")
    command = [sys.executable, "-m", "nvflare.private.fed.app.simulator.simulator", str(folder)]
    command += ["-w", str(tmp_path / "workspace"), "-n", "2", "-t", "2"]
    terminal = Terminal(rows=30, columns=400)
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdin=terminal.fd,
        stdout=terminal.fd,
        stderr=terminal.fd,
        start_new_session=True,
        preexec_fn=terminal.become_ours,
        env={**os.environ, "TERM": "xterm", "FAULTS": PAUSE, "NVFLARE_LAZY_SCRATCH": str(tmp_path / "scratch")},
    )
    rows: list[str] = []
    try:
        deadline = time.monotonic() + 300
        while process.poll() is None and time.monotonic() < deadline:
            row = terminal.screen.display[-1].rstrip()
            if row.startswith("Round 0 ") and row not in rows:
                rows.append(row)
            time.sleep(0.02)
        assert process.poll() == 0
    finally:
        end_tree(process)
        terminal.close()
    print(*rows, sep="\n")
    assert any("slowest: site-2" in row and "1 of 2 results" in row for row in rows)
    assert terminal.screen.margins is None
    shown = terminal.lines()
    assert not any("━" in line or "─" in line for line in shown)
    logged = (tmp_path / "workspace" / "server" / "log.txt").read_text()
    # The console has lines of some loggers only, in another format.
    messages = re.findall(
        r" - (?:TensorOffload|LazyModelPersistor|FedAvg) - INFO - (?:\[[^\]]*\] - |)(?!\[)(\S.*)", logged
    )
    assert len(messages) > 8
    assert not [message for message in messages if not any(line.endswith(message.rstrip()) for line in shown)]
    assert not [line for line in shown if re.search(r".\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,", line)]

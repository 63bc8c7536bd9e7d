# SPDX-License-Identifier: Apache-2.0
"""The main benchmark: its tables, pictures and limits agree, and a measurement that was broken off is resumed."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from benchmarks import federated
from benchmarks.federated_report import Case, Record, render, required
from benchmarks.fl_job import MIB, FLJob, RunResult, Sample
from benchmarks.fl_job.sampling import MachineSample

ABOUT = {"command": "python -m benchmarks.federated", "machine": {"memory": "4 GiB"}, "separate": True}


def record(case: Case, rounds: list[float], server_mib: int = 200, cpu: float = 10.0) -> Record:
    """Return a run of a job with an external trainer."""
    return Record(
        case,
        failed=False,
        round_seconds=rounds,
        cpu={"server": cpu / 2, "trainer": cpu / 2},
        peaks={"server": server_mib * MIB, "client": 190 * MIB, "trainer": 300 * MIB},
        written=1536.0 * MIB,
        sockets=0.0,
        scratch_peak=0,
        page_cache_growth=0,
        timeline=[(0.0, MIB), (1.0, server_mib * MIB)],
    )


def runs(mode: str, rounds: list[list[float]], peaks: list[int]) -> Iterator[Record]:
    """Yield the runs of a mode of the main case."""
    case = Case("rounds", "poc", mode, 2, 512, 3)
    for number, (seconds, peak) in enumerate(zip(rounds, peaks, strict=True)):
        yield record(case, seconds, peak, cpu=10.0 + number)


# The median over runs of their means is 3.0 seconds; that over all rounds is 1.0, the mean of all 14.3.
ROUNDS = [[1.0, 1.0, 7.0], [1.0, 1.0, 1.0], [100.0, 9.0, 8.0]]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Return the texts of each saved picture."""
    from matplotlib.figure import Figure

    texts: dict[str, set[str]] = {}

    def savefig(figure: Figure, path: Path) -> None:
        found = texts.setdefault(path.name, set())
        for axes in figure.axes:
            legend = axes.get_legend()
            found |= {text.get_text() for text in (*axes.texts, *(legend.get_texts() if legend else ()))}

    monkeypatch.setattr(Figure, "savefig", savefig)
    return texts


def test_pictures_have_the_numbers_of_the_tables(tmp_path, drawn):
    """Each is the median over runs, of which one with slow rounds counts no more than another."""
    memory = [record(Case("memory", "sim", "level-3", clients, 256, 2), [1.0], 200 + clients) for clients in (1, 16)]
    lazy, stock = runs("level-3", ROUNDS, [300, 1024, 400]), runs("stock", [[4.0], [6.0], [5.0]], [5120, 4096, 6144])
    render([*stock, *lazy, *memory], ABOUT, tmp_path)
    report = (tmp_path / "README.md").read_text()
    row = next(line for line in report.splitlines() if line.startswith("| nvflare-lazy, level 3 |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:5] == [
        "3",
        "3.0 s (1.0 to 39.0), 0.60 ×",
        "4.0 s (1.0 to 8.5), 0.80 ×",
        "11.0 (10.0 to 12.0), 1.00 ×",
    ]
    assert "400 MiB" in cells
    assert drawn["rounds.png"] == {"5.0", "3.0"}
    assert drawn["cpu.png"] == {"11.0"}
    assert drawn["timeline.png"] == {"NVFlare, in memory: peak 5.00 GiB", "nvflare-lazy, level 3: peak 0.39 GiB"}
    assert drawn["clients.png"] == {"nvflare-lazy, level 3", "0.21"}
    for name in drawn:
        assert f"]({name})" in report


def test_limits_pass_and_fail_by_the_numbers_that_are_printed():
    """A ratio of 0.554 is printed, and judged, as 0.55; memory counts above the idle job."""
    stock = list(runs("stock", [[10.0]] * 3, [4000] * 3))
    idle = record(Case("memory", "poc", "level-3", 2, 1 / 256, 2), [1.0], 190)
    lines = required([*stock, *runs("level-3", [[5.54]] * 3, [300, 382, 383]), idle])
    assert "| deployment, both ends: a later round, × stock | 0.55 | 0.55 | pass |" in lines
    assert "| deployment, both ends: CPU, × stock | 0.60 | 1.00 | **fail** |" in lines
    assert "| poc, both ends on one host: MiB written in a round, (clients + 1) × model | 1536 | 1536 | pass |" in lines
    assert "| poc, server: MiB above idle, highest run | 192 | 193 | **fail** |" in lines
    assert "| poc, client job that forwards: MiB above idle, highest run | 64 | 0 | pass |" in lines
    assert not any("simulator" in line for line in lines)


def test_a_measurement_goes_on_where_it_stopped(tmp_path, monkeypatch):
    """Modes alternate and come in reverse order in each other repetition; no time, no run; nothing runs twice."""
    plan = federated.Plan((("poc", 2, 512, ("stock", "level-3")),), 2, 1)
    measured: list[str] = []

    def measure(case: Case) -> Record:
        measured.append(case.mode)
        return record(case, [1.0])

    monkeypatch.setattr(federated, "measure", measure)
    file = tmp_path / "out" / "runs.json.gz"
    records = [record(case, [1.0]) for case in list(plan.cases())[:2]]
    assert federated.run_all(plan, ABOUT, records, file, minutes=0) == 2
    assert measured == []
    assert federated.run_all(plan, ABOUT, records, file, minutes=9) == 0
    assert measured == ["level-3", "stock"]
    about, read = federated.load(file)
    assert about == ABOUT
    assert [r.case for r in read] == list(plan.cases())
    assert read[0].timeline == [[0.0, MIB], [1.0, 200 * MIB]]


def test_counts_of_a_run_begin_with_it():
    """CPU of a parent before the job does not count, and bytes count from the first round to the end of the last."""

    def sample(seconds: float, role: str, pid: int, written: int, cpu: float) -> Sample:
        return Sample(seconds, role, pid, 0, 0, 0, 0, written, cpu)

    def logged(seconds: float, message: str) -> dict[str, str]:
        return {
            "asctime": f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S},{seconds % 1 * 1000:03.0f}",
            "message": message,
        }

    samples = [
        sample(0.0, "parent-site-1", 1, 5, 30.0),
        # Just forked, a process has the command line of its parent.
        sample(0.5, "parent-site-1", 2, 0, 0.5),
        sample(1.0, "client-site-1", 2, 10, 1.0),
        sample(2.5, "client-site-1", 2, 70, 2.0),
        sample(3.5, "client-site-1", 2, 90, 3.0),
        sample(9.0, "client-site-1", 2, 5000, 4.0),
        sample(9.0, "parent-site-1", 1, 5000, 31.0),
    ]
    machine = [MachineSample(s, 0, 0, int(1000 * s)) for s in (0.0, 1.0, 2.0, 3.0, 4.0)]
    # The child that wrote the initial model has just ended, and its parent's next sample includes it.
    records = [logged(1000.75, "Round 0 started."), logged(1002, "Round 1 started."), logged(1003, "Finished FedAvg.")]
    result = RunResult(FLJob(), 1000.0, 9.0, 0, samples, machine, "", records, Path(), Path())
    assert result.cpu_by_role == {"parent": 1.0, "client": 4.0}
    assert result.written_per_round == 40
    assert result.sockets_per_round == 1000

# SPDX-License-Identifier: Apache-2.0
"""Jobs with one client that attacks in every round: each model is the honest mean, and the log has the reason."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import nvflare_lazy
from benchmarks.fl_job import MIB, FLJob, RunResult
from integration_tests.attacks import attacking_site
from integration_tests.attacks.attacking_site import (
    ATTACKS,
    ELEMENTS,
    FORGED,
    NAMES,
    TENSORS,
    attacks_of,
    control_changes,
    mean,
    values,
)
from integration_tests.conftest import JobRunner, left_in, records, server_app

GENERATOR = "nvflare.app_common.shareablegenerators.full_model_shareable_generator.FullModelShareableGenerator"
SELECTOR = "nvflare.app_common.widgets.intime_model_selector.IntimeModelSelector"
CONTROLLERS = {
    "fedavg": "nvflare_lazy.flare.LazyFedAvg",
    "deployment": "nvflare_lazy.flare.LazyFedAvg",
    "memory": "nvflare_lazy.flare.LazyFedAvg",
    "sag": "nvflare.app_common.workflows.scatter_and_gather.ScatterAndGather",
    "scaffold": "nvflare_lazy.flare.LazyScaffold",
}
# At level 1, NVFlare adds each result as it arrives, so that the majority is not known in time.
OFFLOAD = {
    "level-1": {"params_type": "FULL"},
    "level-1-numpy": {"params_type": "FULL"},
    "memory": {"max_result_size": "1GiB"},
}
HONEST = [2, 3]


@dataclass(frozen=True)
class AttackedJob(FLJob):
    """A job with short rounds, whose sites run `attacking_site`."""

    workflow: str = "fedavg"
    attacks: tuple[str, ...] = ()

    @classmethod
    def of(cls, workflow: str, attacks: list[str]) -> AttackedJob:
        level_1 = workflow.startswith("level-1")
        return cls(
            mode="level-1" if level_1 else "level-2",
            exchange="numpy" if workflow.endswith("numpy") else "pytorch",
            clients=len(attacking_site.WEIGHTS),
            model_mib=TENSORS * ELEMENTS * 4 / (1 << 20),
            tensors=TENSORS,
            rounds=len(attacks),
            offload=OFFLOAD.get(workflow, {}),
            files=(Path(attacking_site.__file__),),
            workflow=workflow,
            attacks=tuple(attacks),
        )

    def server(self) -> dict[str, Any]:
        config = super().server()
        config["server"]["task_request_interval"] = 0.05
        workflow = config["workflows"][0]
        common: dict[str, Any] = {"task_check_period": 0.02, "memory_gc_rounds": 0}
        if self.workflow not in CONTROLLERS or self.workflow == "sag":
            # By default, NVFlare's controllers end the job if a client reports an error and all clients are required.
            common["ignore_result_error"] = True
        workflow["args"] |= common
        workflow["path"] = CONTROLLERS.get(self.workflow, workflow["path"])
        if self.workflow == "sag":
            aggregator = workflow["args"]["aggregator"]
            workflow["args"] = {"min_clients": self.clients, "num_rounds": self.rounds, "persistor_id": "persistor"}
            workflow["args"] |= common
            config["components"] += [
                {"id": "aggregator", **aggregator},
                {"id": "shareable_generator", "path": GENERATOR, "args": {}},
            ]
        elif self.workflow == "scaffold":
            workflow["args"].pop("aggregator")
        config["components"].append({"id": "selector", "path": SELECTOR, "args": {"key_metric": "accuracy"}})
        return config

    def client(self) -> dict[str, Any]:
        config = super().client()
        arguments = {
            "attacks": list(self.attacks),
            "arrays": self.exchange == "numpy",
            "scaffold": self.workflow == "scaffold",
        }
        config["executors"][0]["executor"] = {"path": "attacking_site.Site", "args": arguments}
        return config


def final_model(result: RunResult) -> dict[str, np.ndarray]:
    app = server_app(result)
    if result.job.mode == "level-1":
        model = torch.load(app / "FL_global_model.pt")["model"]
        return {name: np.asarray(value) for name, value in model.items()}
    model = nvflare_lazy.open(app / "FL_global_model.safetensors")
    return {name: value.numpy() for name, value in model.items()}


def received(notes: Path, number: int, part: str) -> dict[str, np.ndarray]:
    with np.load(notes / f"received-{number}.npz") as file:
        return {name.split("/", 1)[1]: file[name] for name in file.files if name.startswith(f"{part}/")}


def same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    """Whether two models are the same, names, types and bits."""
    return found.keys() == expected.keys() and all(
        found[name].dtype == expected[name].dtype and np.array_equal(found[name], expected[name]) for name in expected
    )


def failures(result: RunResult, notes: Path) -> dict[str, str]:
    """Return each attack that did more than it may, and what."""
    found: dict[str, str] = {}
    attacks = result.job.attacks
    rounds = {record["round"]: record for record in records(result, "round")}
    controls = {name: np.zeros(ELEMENTS, np.float32) for name in NAMES}
    for number, name in enumerate(attacks):
        attack = ATTACKS[name]
        sites = [attacking_site.ATTACKER, *HONEST] if attack.counts else HONEST
        last = number + 1 == len(attacks)
        try:
            model = final_model(result) if last else received(notes, number + 1, "model")
        except OSError:
            found[name] = "the job ended"
            return found
        if not same(model, mean(values, sites, number)):
            found[name] = "the model is not the mean of " + ("all" if attack.counts else "the honest clients")
        if result.job.workflow == "scaffold" and not last:
            change = mean(control_changes, sites, number)
            controls = {name: controls[name] + change[name] for name in NAMES}
            after = received(notes, number + 1, "controls")
            if not same(after, controls):
                found[name] = f"{found.get(name, '')} the controls are not those of these clients"
                controls = after
        record = rounds[number]
        if record["aggregated"] != [f"site-{site}" for site in sites]:
            found[name] = f"{found.get(name, '')} aggregated {record['aggregated']}"
        reason = record["skipped"].get("site-1", "")
        if not attack.counts and not re.search(attack.reason, reason):
            found[name] = f"{found.get(name, '')} skipped because of {reason!r}"
    return found


def forged_lines(result: RunResult) -> list[str]:
    """Return the log lines of this package that have line breaks, escape sequences or bidirectional marks.

    NVFlare's own part of a line has the return code that a client sends, as the client sends it.
    """
    ours = [record for record in result.records if record["fullName"].startswith("nvflare_lazy")]
    texts = [re.sub(r"^\[identity=.*?\](: | - )", "", record["message"], flags=re.DOTALL) for record in ours]
    forged = [text for text in texts if FORGED in text]
    return [text for text in forged if any(character in text for character in "\n\r\x1b\u202e\u2028")]


# The first job has all attacks; these reach different code in the other jobs.
LEVEL_1 = [
    "differences_before_all_others",
    "an_unknown_kind",
    "values_said_to_be_encrypted",
    "text_after_good_tensors",
    "an_array_of_text",
    "another_shape",
    "complex_numbers",
    "half_the_precision",
    "a_number_for_a_name",
    "steps_in_words",
    "a_huge_number_of_steps",
    "metrics_of_8_bits",
    "a_round_that_is_far_away",
    "a_return_code_with_forged_lines",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workflow", "attacks"),
    [
        pytest.param("level-1", LEVEL_1, id="level-1"),
        *(pytest.param(name, attacks_of(name), id=f"all-{name}") for name in attacking_site.JOBS),
    ],
)
def test_a_client_that_attacks_costs_only_its_own_results(
    run_job: JobRunner, tmp_path: Path, workflow: str, attacks: list[str]
):
    """In each round, the model is the honest clients' mean to the bit, and the log has the reason for the skip."""
    notes = tmp_path / "notes"
    notes.mkdir()
    job = AttackedJob.of(workflow, attacks)
    # The rarer the samples of memory, which are not used here, the faster the job.
    result = run_job(job, environment={"ATTACK_NOTES": str(notes)}, may_fail=True, interval=5.0)
    assert failures(result, notes) == {}
    assert result.ok, result.output[-5000:]
    assert forged_lines(result) == []
    # NVFlare's own components may fail with such results; NVFlare logs it and continues.
    assert not re.search(r'File ".*/nvflare_lazy/', result.server_log)
    assert not left_in(result.workspace.parent / "scratch")


@pytest.mark.slow
def test_large_results_do_not_take_the_servers_memory(run_job: JobRunner, tmp_path: Path):
    """Metrics of 500 MiB, an offer of 64 GiB and 10,000 long names take at most 64 MiB more than ordinary results."""
    peaks = []
    large = [name for name in attacks_of("memory") if name != "nothing_unusual"]
    for number, attacks in enumerate((["nothing_unusual"] * len(large), large)):
        notes = tmp_path / f"notes{number}"
        notes.mkdir()
        job = AttackedJob.of("memory", [*attacks, "nothing_unusual"])
        environment = {"ATTACK_NOTES": str(notes), "NVFLARE_STREAMING_MAX_BLOB_SIZE": str(64 * MIB)}
        result = run_job(job, environment=environment)
        assert failures(result, notes) == {}
        assert not left_in(result.workspace.parent / "scratch")
        peaks.append(result.server_peak)
    ordinary, attacked = peaks
    print(f"peak of the server: {ordinary / MIB:.0f} MiB, under attack {attacked / MIB:.0f} MiB")
    assert attacked <= ordinary + 64 * MIB

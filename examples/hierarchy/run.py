# SPDX-License-Identifier: Apache-2.0
"""A tree of five sites, two of which aggregate the results of the others; compares the model with the flat mean."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from numbers_of_site import PARENTS, STEPS, changed

import nvflare_lazy
from benchmarks.fl_job import MIB, Sampler
from benchmarks.fl_job.poc import Deployment, collect, wait_for_clients

HERE = Path(__file__).parent
SITES = 5
MIDDLE = sorted({*PARENTS.values()})
LEAVES = sorted(PARENTS)
ELEMENTS = MIB  # 4 MiB of float32
LEVELS = 2
# NVFlare's list of allowed classes does not have those for trees.
ALLOWED = ["nvflare.", "nvflare_lazy."]


def component(name: str, path: str, **arguments: Any) -> dict[str, Any]:
    return {"id": name, "path": path, "args": arguments}


def write_job(folder: Path, initial: Path, rounds: int, timeout: float) -> Path:
    """Write a job folder with an application for the server, the middle and the leaves."""
    server = {
        "format_version": 2,
        "workflows": [
            component(
                "controller",
                "nvflare.edge.controllers.sage.ScatterAndGatherForEdge",
                num_rounds=rounds,
                assessor_id="assessor",
                task_name="train",
            )
        ],
        "components": [
            component("offload", "nvflare_lazy.flare.TensorOffload"),
            component(
                "persistor",
                "nvflare_lazy.flare.LazyModelPersistor",
                source_ckpt_file_full_name=str(initial),
                allow_numpy_conversion=False,
            ),
            component("aggregator", "nvflare_lazy.flare.LazyAggregator", min_results=len(LEAVES)),
            component(
                "generator",
                "nvflare.app_common.shareablegenerators.full_model_shareable_generator.FullModelShareableGenerator",
            ),
            component(
                "assessor",
                "nvflare.edge.assessors.sgap.SGAPAssessor",
                persistor_id="persistor",
                aggregator_id="aggregator",
                shareable_generator_id="generator",
            ),
        ],
    }
    gather = component(
        "",
        "nvflare.edge.executors.hug.HierarchicalUpdateGatherer",
        learner_id="",
        updater_id="updater",
        # A part of a subtree's results is a model, which the node above downloads within this time.
        update_timeout=timeout,
    )
    middle = {
        "format_version": 2,
        "executors": [{"tasks": ["train"], "executor": gather}],
        "components": [
            component("offload", "nvflare_lazy.flare.TensorOffload"),
            component("aggregator", "nvflare_lazy.flare.LazyAggregator"),
            # With 1, results are passed on in parts, and none is lost if another one does not come.
            component("updater", "nvflare.edge.updaters.aggr.AggrUpdater", aggregator_id="aggregator", min_accepted=1),
        ],
    }
    train = component(
        "",
        "nvflare.app_common.executors.client_api_executor.ClientAPIExecutor",
        execution_mode="in_process",
        task_script_path="client.py",
        params_exchange_format="pytorch",
        server_expected_format="pytorch",
    )
    leaf = {
        "format_version": 2,
        "executors": [{"tasks": ["train"], "executor": train}],
        # Nodes in the middle read only results with this header.
        "task_result_filters": [
            {"tasks": ["train"], "filters": [component("", "nvflare.edge.filters.add_update_header.AddUpdateHeader")]}
        ],
        "components": [component("offload", "nvflare_lazy.flare.TensorOffload")],
    }
    for app, config in (("app_server", server), ("app_middle", middle), ("app_leaf", leaf)):
        (folder / app / "config").mkdir(parents=True)
        side = "server" if config is server else "client"
        (folder / app / "config" / f"config_fed_{side}.json").write_text(json.dumps(config, indent=2))
    custom = folder / "app_leaf" / "custom"
    custom.mkdir()
    for script in ("client.py", "numbers_of_site.py"):
        shutil.copy(HERE / script, custom)
    meta = {
        "name": "hierarchy",
        "min_clients": SITES,
        "deploy_map": {"app_server": ["server"], "app_middle": MIDDLE, "app_leaf": LEAVES},
    }
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def run(directory: Path, job: Path, timeout: float) -> tuple[Path, dict[str, int]]:
    """Run the job; returns the server's run directory and the peak memory of each process, in bytes."""
    scratch = directory / "scratch"
    scratch.mkdir(mode=0o700, exist_ok=True)
    environment, settings = {"NVFLARE_LAZY_SCRATCH": str(scratch)}, {"class_allow_list": ALLOWED}
    with Deployment(directory, SITES, environment, settings, parents=PARENTS) as deployment:
        session: Any = deployment.session()
        wait_for_clients(session, SITES, timeout=120)
        with Sampler(deployment.roles, 0.2, scratch) as watched:
            job_id = session.submit_job(str(job))
            deadline = time.time() + timeout
            while not (status := str(session.get_job_status(job_id))).startswith("FINISHED"):
                if time.time() > deadline:
                    session.abort_job(job_id)
                    raise TimeoutError(f"the job is still {status} after {timeout:.0f} s; see {directory}")
                time.sleep(1)
        result = collect(session, deployment, job_id, directory)
        session.close()
    if not status.startswith("FINISHED:COMPLETED"):
        raise RuntimeError(f"the job ended with {status}; see {directory}")
    peaks: dict[str, int] = defaultdict(int)
    for sample in watched.samples:
        peaks[sample.role] = max(peaks[sample.role], sample.anon)
    return result, peaks


def compare(initial: Path, found: Path, rounds: int) -> tuple[float, float]:
    """Return the largest error compared with the flat mean, and the largest that two levels of rounding permit."""
    before, after = nvflare_lazy.open(initial), nvflare_lazy.open(found)
    total = sum(STEPS.values())
    error = size = 0.0
    for name in before:
        value = before[name].clone()
        for _ in range(rounds):
            results = {site: changed(site, name, value) for site in LEAVES}
            flat = sum(STEPS[site] * result.double() for site, result in results.items()) / total
            size = max(size, max(float(result.abs().max()) for result in results.values()))
            value = flat.float()
        error = max(error, float((after[name].double() - flat).abs().max()))
    return error, rounds * LEVELS * size * 2.0**-24


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="size of the model")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workspace", help="an empty directory; default: a temporary one, which is removed")
    parser.add_argument("--timeout", type=float, default=400, help="seconds")
    options = parser.parse_args()
    if options.workspace:
        return show(Path(options.workspace), options)
    with tempfile.TemporaryDirectory(prefix="hierarchy-") as directory:
        return show(Path(directory), options)


def show(directory: Path, options: argparse.Namespace) -> int:
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {f"layer{number}": torch.zeros(ELEMENTS) for number in range(max(1, options.mib // 4))}
    initial = nvflare_lazy.save(tensors, directory / "initial.safetensors")
    job = write_job(directory / "job", initial, options.rounds, options.timeout)
    result, peaks = run(directory, job, options.timeout)
    (model,) = result.rglob("FL_global_model.safetensors")
    error, bound = compare(initial, model, options.rounds)
    print(f"\nmodel of {options.mib} MiB, {options.rounds} rounds; peak memory of the job's process")
    for role in ("server", *(f"client-{site}" for site in (*MIDDLE, *LEAVES))):
        site = role.removeprefix("client-")
        place = "top" if role == "server" else "middle" if site in MIDDLE else f"leaf below {PARENTS[site]}"
        print(f"{site:8} {place:18} {peaks[role] / MIB:8.0f} MiB")
    print(f"largest error compared with the flat mean: {error * 1e6:.2f}e-6; rounding permits {bound * 1e6:.2f}e-6")
    return 0 if error <= bound else 1


if __name__ == "__main__":
    raise SystemExit(main())

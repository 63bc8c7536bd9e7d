# SPDX-License-Identifier: Apache-2.0
"""Runs the measured job on a deployment as in production, on loopback: a server, sites, an admin, certificates.

Every site is a parent process that starts a job process for each job, and with `external` the trainer is one more.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from benchmarks.fl_job.job import FLJob
from benchmarks.fl_job.result import RunResult, read_records
from benchmarks.fl_job.sampling import Sampler, descendants
from benchmarks.fl_job.simulator import INSTANTIATION, end_tree

_SITE = re.compile(r"/(site-\d+)[/ ]")
_ADMIN = "admin@example.com"
_SCRATCH = "NVFLARE_LAZY_SCRATCH"


class Deployment:
    """A server and sites on this machine, running until it is left.

    Args:
        directory: Where the startup kits and the workspaces go.
        clients: Number of sites.
        env: Further environment variables for all of them.
        resources: Further settings for `resources.json` of all of them.
        server_env: Further environment variables for the server alone.
        parents: For sites below other sites, the site above. The other sites are below the server.
    """

    def __init__(
        self,
        directory: Path,
        clients: int,
        env: dict[str, str] | None = None,
        resources: dict[str, Any] | None = None,
        server_env: dict[str, str] | None = None,
        parents: dict[str, str] | None = None,
    ) -> None:
        self.parents = parents or {}
        self.directory = directory
        self.clients = clients
        self.resources = resources or {}
        self.env = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(directory),
            **(env or {}),
        }
        self.server_env = server_env or {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def kits(self) -> Path:
        """Where the startup kits are."""
        return self.directory / "example_project" / "prod_00"

    def __enter__(self) -> Deployment:
        provision(self.directory, self.clients, self.parents)
        for name in ("localhost", *(f"site-{index + 1}" for index in range(self.clients))):
            local = self.kits / name / "local"
            given = local / "resources.json"
            read = json.loads((given if given.exists() else local / "resources.json.default").read_text())
            given.write_text(json.dumps({**read, **self.resources}))
            self.start(name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            end_tree(process)

    def start(self, name: str) -> None:
        """Start the server or a site."""
        with open(self.directory / f"{name}.txt", "ab") as output:
            self._processes[name] = subprocess.Popen(
                ["bash", str(self.kits / name / "startup" / "sub_start.sh"), "--once"],
                env={**self.env, **self.server_env} if name == "localhost" else self.env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def roles(self) -> dict[int, str]:
        """Say which process plays which role."""
        roles = {}
        for name, process in self._processes.items():
            for pid, command in descendants(process.pid):
                if "trainer.py" in command:
                    roles[pid] = f"trainer-{name}"
                elif INSTANTIATION in command:
                    roles[pid] = "instantiation"
                elif "runner_process" in command:
                    roles[pid] = "server"
                elif "worker_process" in command:
                    roles[pid] = f"client-{name}"
                else:
                    roles[pid] = f"parent-{name}"
        return roles

    def session(self, timeout: float = 60) -> object:
        """Return an admin's session, waiting until the server takes one."""
        from nvflare.fuel.flare_api.flare_api import new_secure_session

        deadline = time.time() + timeout
        while True:
            try:
                return new_secure_session(_ADMIN, str(self.kits / _ADMIN), timeout=5.0)
            except Exception:
                if time.time() > deadline:
                    raise
                time.sleep(0.5)


def provision(directory: Path, clients: int, parents: Mapping[str, str]) -> None:
    """Make the startup kits."""
    import nvflare.lighter
    from nvflare.tool.poc.poc_commands import local_provision

    project = yaml.safe_load((Path(nvflare.lighter.__file__).parent / "dummy_project.yml").read_text())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    project["participants"] = [
        {"name": "localhost", "type": "server", "org": "example", "fed_learn_port": port, "admin_port": port},
        *(
            {"name": name, "type": "client", "org": "example", **({"parent": parents[name]} if name in parents else {})}
            for name in (f"site-{index + 1}" for index in range(clients))
        ),
        {"name": _ADMIN, "type": "admin", "org": "example", "role": "project_admin"},
    ]
    config = directory / "described.yml"
    config.write_text(yaml.safe_dump(project))
    local_provision([], clients, str(directory), "", project_conf_path=str(config))
    local = directory / "example_project" / "prod_00" / "localhost" / "local"
    resources = json.loads((local / "resources.json.default").read_text())
    resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(directory / "snapshots")
    for component in resources["components"]:
        if component["id"] == "job_manager":
            component["args"]["uri_root"] = str(directory / "jobs")
    (local / "resources.json").write_text(json.dumps(resources))


def run_in_poc(
    job: FLJob,
    directory: Path,
    *,
    timeout: float = 900,
    interval: float = 0.05,
    environment: dict[str, str] | None = None,
    resources: dict[str, Any] | None = None,
    during: Callable[[Deployment, str], None] | None = None,
    server_scratch: Path | None = None,
) -> RunResult:
    """Run a job on a separate deployment.

    Args:
        job: What to run.
        directory: An empty directory for everything.
        timeout: Seconds after which the run is ended.
        interval: Seconds between two samples.
        environment: Further environment variables for the server and the sites.
        resources: Further settings for the `resources.json` of the server and the sites.
        during: Called over and over with the deployment and the job's id while the job runs, to interfere with it.
        server_scratch: Scratch root of the server. With another root than the sites, it cannot exchange files with
            them, as if it were on another host. Default: the scratch root of the sites.
    """
    folder = job.write(directory / "job")
    scratch = directory / "scratch"
    roots = {scratch, server_scratch or scratch}
    for root in roots:
        root.mkdir(mode=0o700)
    with Deployment(
        directory,
        job.clients,
        {_SCRATCH: str(scratch), **(environment or {})},
        resources,
        {_SCRATCH: str(server_scratch)} if server_scratch else None,
    ) as deployment:
        session = deployment.session()
        wait_for_clients(session, job.clients)
        started = time.time()
        with Sampler(deployment.roles, interval, *roots) as sampler:
            job_id = session.submit_job(str(folder))  # type: ignore[attr-defined]
            status = _wait(session, deployment, job_id, timeout, during)
        seconds = time.time() - started
        run_dir = collect(session, deployment, job_id, directory)
        session.close()  # type: ignore[attr-defined]
    log = run_dir / "log.txt"
    return RunResult(
        job=job,
        started=sampler.started,
        seconds=seconds,
        status=0 if status.startswith("FINISHED:COMPLETED") else 1,
        samples=sampler.samples,
        machine_samples=sampler.machine_samples,
        server_log=log.read_text() if log.exists() else "",
        records=read_records(log.with_suffix(".json")),
        server_run_dir=run_dir,
        workspace=deployment.kits,
        output=status + "\n" + (directory / "localhost.txt").read_text(errors="replace"),
    )


def wait_for_clients(session: object, clients: int, timeout: float = 60) -> None:
    """Wait until all sites have joined."""
    deadline = time.time() + timeout
    while len(session.get_system_info().client_info) < clients:  # type: ignore[attr-defined]
        if time.time() > deadline:
            raise TimeoutError("the sites did not join the server")
        time.sleep(0.5)


def collect(session: object, deployment: Deployment, job_id: str, directory: Path) -> Path:
    """Return the server's run directory: where the job left it, or as the admin downloads it."""
    left = deployment.kits / "localhost" / job_id
    if left.exists():
        return shutil.copytree(left, directory / "run")
    result = Path(session.download_job_result(job_id))  # type: ignore[attr-defined]
    return result / "workspace" if (result / "workspace").exists() else result


def _wait(
    session: object,
    deployment: Deployment,
    job_id: str,
    timeout: float,
    during: Callable[[Deployment, str], None] | None,
) -> str:
    from nvflare.fuel.flare_api.api_spec import NoConnection

    deadline = time.time() + timeout
    asked = 0.0
    status = ""
    while not status.startswith("FINISHED"):
        if time.time() > deadline:
            session.abort_job(job_id)  # type: ignore[attr-defined]
            return f"still {status} after {timeout} s"
        if during is not None:
            during(deployment, job_id)
        if time.time() - asked > 1:
            # A busy server may not answer in time.
            with suppress(NoConnection):
                status = str(session.get_job_status(job_id))  # type: ignore[attr-defined]
            asked = time.time()
        time.sleep(0.05)
    return status

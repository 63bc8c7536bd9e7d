# SPDX-License-Identifier: Apache-2.0
"""The files in docs/how-to/containers.md give a job's container the documented settings, by NVFlare's launchers.

Only the clients of the Kubernetes API and of Docker are replaced: they record each pod and container.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import docker
import pytest
import yaml
from nvflare.apis.fl_constant import FLContextKey, JobConstants, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import DEFAULT_STUDY, JobMetaKey
from nvflare.apis.job_launcher_spec import JobProcessArgs
from nvflare.apis.workspace import Workspace
from nvflare.app_opt.job_launcher.docker_launcher import ServerDockerJobLauncher
from nvflare.app_opt.job_launcher.k8s_launcher import DEFAULT_EPHEMERAL_STORAGE, ServerK8sJobLauncher
from nvflare.tool.deploy import docker_deploy

from nvflare_lazy._text import parse_size
from tests.documents.markdown import blocks

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "containers.md"
JOB = "6d5ad1ab-7a7a-4c40-9f3c-1f5e0c6d0a55"
VARIABLES = {"NVFLARE_NVFLARE_DECOMPOSERS": "nvflare_lazy.flare.install"}


class Cluster:
    """Kubernetes' API: starts every pod, and keeps its manifest."""

    def __init__(self) -> None:
        self.pods: list[dict] = []

    def create_namespaced_secret(self, **_) -> None:
        pass

    patch_namespaced_secret = create_namespaced_secret

    def create_namespaced_pod(self, body: dict, namespace: str) -> SimpleNamespace:
        self.pods.append(body)
        return SimpleNamespace(metadata=SimpleNamespace(uid="1"))

    def read_namespaced_pod(self, **_) -> SimpleNamespace:
        return SimpleNamespace(status=SimpleNamespace(phase="Running"))


class DockerDaemon:
    """Docker's client: starts every container, and keeps the arguments."""

    def __init__(self) -> None:
        self.started: dict = {}
        self.containers = self
        self.networks = SimpleNamespace(get=lambda name: name)

    def ping(self) -> None:
        pass

    def run(self, image: str, **arguments) -> DockerDaemon:
        self.started = {"image": image, **arguments}
        return self

    def get(self, container_id: str) -> DockerDaemon:
        return self

    def wait(self) -> dict:
        return {"StatusCode": 0}

    id, status = "1", "running"


@pytest.fixture
def site(tmp_path):
    """Writes the files of the page, and returns the folder of one launcher as the server's workspace."""
    for block in blocks(PAGE):
        if block.file:
            path = tmp_path / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)

    def of(launcher: str) -> Path:
        (tmp_path / launcher / "startup").mkdir()
        (tmp_path / launcher / JOB / "app_server" / "custom").mkdir(parents=True)
        return tmp_path / launcher

    return of


def context(workspace: Path) -> FLContext:
    cell = SimpleNamespace(get_fqcn=lambda: "server", register_request_cb=lambda **_: None)
    found = FLContext()
    found.set_prop(ReservedKey.IDENTITY_NAME, "server", private=False)
    found.set_prop(ReservedKey.ENGINE, SimpleNamespace(cell=cell))
    found.set_prop(FLContextKey.WORKSPACE_OBJECT, Workspace(str(workspace), "server"))
    found.set_prop(FLContextKey.ARGS, argparse.Namespace(workspace=str(workspace), set=None))
    arguments = {JobProcessArgs.EXE_MODULE: ("-m", "nvflare.private.fed.app.server.runner_process")}
    found.set_prop(FLContextKey.JOB_PROCESS_ARGS, arguments)
    return found


def meta(path: Path) -> dict:
    return {**json.loads(path.read_text()), JobConstants.JOB_ID: JOB, JobMetaKey.STUDY.value: DEFAULT_STUDY}


@pytest.fixture
def launch_pod(site, monkeypatch):
    """Launches a job in Kubernetes and returns the manifest of its pod."""
    rest = ModuleType("kubernetes.client.rest")
    rest.ApiException = type("ApiException", (Exception,), {})
    for name, module in (
        ("kubernetes", ModuleType("kubernetes")),
        ("kubernetes.client", ModuleType("kubernetes.client")),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "kubernetes.client.rest", rest)
    workspace = site("k8s")

    def launch(job: dict, **arguments) -> dict:
        launcher = ServerK8sJobLauncher(**{"config_file_path": None, **arguments})
        launcher.core_v1 = Cluster()
        launcher.launch_job(job, context(workspace))
        [pod] = launcher.core_v1.pods
        return pod

    return launch, workspace


def test_a_job_pod(launch_pod):
    """It has the environment, the scratch volume, the checkpoints and the limits."""
    launch, workspace = launch_pod
    pod = launch(meta(workspace / "meta.json"))["spec"]
    [container] = pod["containers"]
    variables = {each["name"]: each for each in container["env"]}
    assert {name: variables[name]["value"] for name in VARIABLES} == VARIABLES
    scratch = Path(variables["NVFLARE_LAZY_SCRATCH"]["value"])
    mounted = {Path(each["mountPath"]): each for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert volumes[mounted[scratch.parent]["name"]] == {"name": "scratch", "emptyDir": {}}
    checkpoints = mounted[Path("/data/default/checkpoints")]
    assert not checkpoints["readOnly"]
    assert volumes[checkpoints["name"]]["persistentVolumeClaim"] == {"claimName": "nvflare-checkpoints"}
    for kind in ("limits", "requests"):
        assert container["resources"][kind] == {"ephemeral-storage": "200Gi", "memory": "2Gi"}
    limit = variables["NVFLARE_LAZY_STORAGE_LIMIT"]["valueFrom"]["resourceFieldRef"]["resource"]
    kind, resource = limit.split(".")
    assert parse_size(container["resources"][kind][resource] + "B") == 200 << 30
    # The workspace, with the checkpoints of a job without checkpoint_dir, has the same limit.
    assert volumes["workspace-job"]["emptyDir"] == {"sizeLimit": "200Gi"}


def test_the_limit_of_all_jobs_of_a_site(launch_pod):
    """By an argument of the launcher; without one it is 1 GiB."""
    launch, workspace = launch_pod
    component = json.loads((workspace / "component.json").read_text())
    assert component["path"] == f"{ServerK8sJobLauncher.__module__}.{ServerK8sJobLauncher.__qualname__}"
    job = meta(workspace / "meta.json")
    job["launcher_spec"].pop("server")
    for arguments, limit in ((component["args"], "200Gi"), ({}, DEFAULT_EPHEMERAL_STORAGE)):
        pod = launch(job, **arguments)
        assert pod["spec"]["containers"][0]["resources"]["limits"] == {"ephemeral-storage": limit}
    assert parse_size(DEFAULT_EPHEMERAL_STORAGE + "B") == 1 << 30


def test_a_job_container(site, monkeypatch, tmp_path):
    """The configuration passes NVFlare's checks, and the container has environment, volumes and limit."""
    workspace = site("docker")
    config = yaml.safe_load((workspace / "config.yaml").read_text())
    docker_deploy.validate_config(config)
    daemon = DockerDaemon()
    monkeypatch.setattr(docker, "from_env", lambda: daemon)
    launcher = ServerDockerJobLauncher(workspace=str(workspace), **config["job_launcher"])
    # The parent reads the site's files where they are mounted in its own container.
    launcher.WORKSPACE_MOUNT = str(workspace)
    launcher.launch_job({JobConstants.JOB_ID: JOB, JobMetaKey.STUDY.value: DEFAULT_STUDY}, context(workspace))
    started = daemon.started
    assert started["image"] == "registry.example.com/nvflare-job:2.9"
    assert started["mem_limit"] == "2g"
    assert started["environment"].items() >= VARIABLES.items()
    mounted = {each["Target"]: each for each in started["mounts"]}
    scratch = Path(started["environment"]["NVFLARE_LAZY_SCRATCH"])
    for target, source in ((str(scratch.parent), "/disk/scratch"), ("/data/default/checkpoints", "/disk/checkpoints")):
        assert (mounted[target]["Source"], mounted[target]["ReadOnly"]) == (source, False)
    assert mounted[str(workspace)]["Type"] == "tmpfs"

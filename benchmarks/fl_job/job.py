# SPDX-License-Identifier: Apache-2.0
"""The measured job, written as the folder NVFlare takes: the same job for stock NVFlare and for every level of use."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# `stock` and `offload` are NVFlare alone, without and with its own disk offload. Level 1 adds `TensorOffload` to the
# server, level 2 also our aggregator and persistor, level 3 also `TensorOffload` to the clients.
MODES = ("stock", "offload", "level-1", "level-2", "level-3")


@dataclass(frozen=True)
class FLJob:
    """One federated job.

    Args:
        mode: One of `MODES`.
        clients: Number of clients, all of which take part in every round.
        model_mib: Size of the model; fractions of a MiB make an idle job.
        tensors: Number of equal tensors it consists of.
        rounds: Number of rounds.
        dtype: A torch dtype's name.
        exchange: "pytorch" or "numpy".
        difference: Whether the clients send differences instead of the whole.
        external: Whether the trainers are separate processes.
        offload: Arguments for the TensorOffload component.
        aggregator: Arguments for the LazyAggregator.
        persistor: Arguments for the LazyModelPersistor.
        controller: Further arguments for the controller.
        executor: Further arguments for the clients' executor.
        controller_path: Another controller than FedAvg.
        components: Further components of the server's configuration.
        filters: The server's filters of task results.
        client_filters: The clients' filters of task results.
        trainer: Another client script.
        files: Further files and folders for the job's `custom` folder.
    """

    mode: str = "stock"
    clients: int = 2
    model_mib: float = 64
    tensors: int = 8
    rounds: int = 2
    dtype: str = "float32"
    exchange: str = "pytorch"
    difference: bool = False
    external: bool = False
    offload: dict[str, Any] = field(default_factory=dict)
    aggregator: dict[str, Any] = field(default_factory=dict)
    persistor: dict[str, Any] = field(default_factory=dict)
    controller: dict[str, Any] = field(default_factory=dict)
    executor: dict[str, Any] = field(default_factory=dict)
    controller_path: str = "nvflare.app_common.workflows.fedavg.FedAvg"
    components: tuple[dict[str, Any], ...] = ()
    filters: tuple[dict[str, Any], ...] = ()
    client_filters: tuple[dict[str, Any], ...] = ()
    trainer: Path | None = None
    files: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"unknown mode {self.mode!r}; available: {', '.join(MODES)}")

    @property
    def elements(self) -> int:
        """Elements of one tensor."""
        itemsize = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}[self.dtype]
        return max(1, int(self.model_mib * (1 << 20) / self.tensors / itemsize))

    @property
    def _lazy(self) -> bool:
        return self.mode in ("level-1", "level-2", "level-3")

    def write(self, folder: Path) -> Path:
        """Write the job's folder and return it."""
        config, custom = folder / "app" / "config", folder / "app" / "custom"
        config.mkdir(parents=True)
        custom.mkdir()
        here = Path(__file__).parent
        shutil.copy(here / "synthetic_model.py", custom)
        shutil.copy(self.trainer or here / "trainer.py", custom / "trainer.py")
        for file in self.files:
            if file.is_dir():
                shutil.copytree(file, custom / file.name)
            else:
                shutil.copy(file, custom)
        meta = {"name": folder.name, "min_clients": self.clients, "deploy_map": {"app": ["@ALL"]}, "resource_spec": {}}
        for path, content in (
            (folder / "meta.json", meta),
            (config / "config_fed_server.json", self.server()),
            (config / "config_fed_client.json", self.client()),
        ):
            path.write_text(json.dumps(content, indent=2))
        return folder

    def server(self) -> dict[str, Any]:
        """Return the content of `config_fed_server.json`."""
        model = {
            "path": "synthetic_model.SyntheticModel",
            "args": {"tensors": self.tensors, "elements": self.elements, "dtype": self.dtype},
        }
        controller: dict[str, Any] = {
            "num_clients": self.clients,
            "num_rounds": self.rounds,
            "enable_tensor_disk_offload": self.mode != "stock",
            **self.controller,
        }
        components: list[dict[str, Any]] = []
        if self._lazy:
            components.append({"id": "offload", "path": "nvflare_lazy.flare.TensorOffload", "args": self.offload})
        if self.mode in ("level-2", "level-3"):
            controller["aggregator"] = {"path": "nvflare_lazy.flare.LazyAggregator", "args": self.aggregator}
            # Written so, NVFlare leaves it to the persistor to instantiate the model.
            arguments = {"model": {**model, "config_type": "dict"}, **self.persistor}
            persistor: dict[str, Any] = {"path": "nvflare_lazy.flare.LazyModelPersistor", "args": arguments}
        else:
            path = "nvflare.app_opt.pt.file_model_persistor.PTFileModelPersistor"
            persistor = {"path": path, "args": {"model": model}}
        persistor["args"]["allow_numpy_conversion"] = self.exchange == "numpy"
        components.append({"id": "persistor", **persistor})
        components.extend(self.components)
        return {
            "format_version": 2,
            # Clients ask for their next task this often; at NVFlare's 2 s a short round would be mostly waiting.
            "server": {"heart_beat_timeout": 600, "task_request_interval": 0.5},
            "workflows": [{"id": "controller", "path": self.controller_path, "args": controller}],
            "components": components,
            "task_data_filters": [],
            "task_result_filters": _filters(self.filters),
        }

    def client(self) -> dict[str, Any]:
        """Return the content of `config_fed_client.json`."""
        both = self.mode == "level-3"
        flags = [flag for flag, on in (("--difference", self.difference), ("--install", both)) if on]
        executor: dict[str, Any] = {
            "params_exchange_format": self.exchange,
            "server_expected_format": self.exchange,
            **self.executor,
        }
        if self.external:
            executor |= {
                "execution_mode": "external_process",
                "command": [sys.executable, "-u", "custom/trainer.py", *flags],
            }
        else:
            executor |= {
                "execution_mode": "in_process",
                "task_script_path": "trainer.py",
                "task_script_args": " ".join(flags),
            }
        path = "nvflare.app_common.executors.client_api_executor.ClientAPIExecutor"
        plugin = {"id": "offload", "path": "nvflare_lazy.flare.TensorOffload", "args": self.offload}
        return {
            "format_version": 2,
            "executors": [{"tasks": ["*"], "executor": {"path": path, "args": executor}}],
            "components": [plugin] if both else [],
            "task_data_filters": [],
            "task_result_filters": _filters(self.client_filters),
        }


def _filters(filters: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
    return [{"tasks": ["train"], "filters": list(filters)}] if filters else []

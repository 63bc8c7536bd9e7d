# SPDX-License-Identifier: Apache-2.0
"""The measured job as swarm learning: in each round, one of the clients aggregates."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvflare.app_opt.pt.recipes.swarm import SwarmLearningRecipe as StockRecipe
from nvflare.recipe.spec import Recipe

from benchmarks.fl_job.job import FLJob
from nvflare_lazy.recipes import SwarmLearningRecipe, make_lazy


@dataclass(frozen=True)
class SwarmJob(FLJob):
    """One swarm job, made by a recipe: NVFlare's, with `TensorOffload` added at level 1, or ours at level 2.

    The components are the clients' components.

    Args:
        recipe: Further arguments for the recipe.
    """

    recipe: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Write the job's folder and return it."""
        here = Path(__file__).parent
        scripts = folder.parent / "scripts"
        scripts.mkdir(parents=True)
        shutil.copy(self.trainer or here / "trainer.py", scripts / "trainer.py")
        for file in (here / "synthetic_model.py", *self.files):
            shutil.copy(file, scripts)
        # NVFlare puts a file at its place below the first entry of the path that it is in.
        sys.path.insert(0, str(scripts))
        try:
            recipe = self._recipe(folder.name, scripts)
            recipe.export(str(folder.parent))
        finally:
            sys.path.remove(str(scripts))
        path = folder / "app" / "config" / "config_fed_client.json"
        config = json.loads(path.read_text())
        config["components"].extend(self.components)
        path.write_text(json.dumps(config, indent=2))
        return folder

    def _recipe(self, name: str, scripts: Path) -> Recipe:
        lazy = self.mode in ("level-2", "level-3")
        flags = [flag for flag, on in (("--difference", self.difference), ("--install", lazy)) if on]
        recipe = (SwarmLearningRecipe if lazy else StockRecipe)(
            name=name,
            model={
                "class_path": "synthetic_model.SyntheticModel",
                "args": {"tensors": self.tensors, "elements": self.elements, "dtype": self.dtype},
            },
            num_rounds=self.rounds,
            train_script=str(scripts / "trainer.py"),
            min_clients=self.clients,
            train_args={"script_args": " ".join(flags)},
            launch_external_process=self.external,
            command=f"{sys.executable} -u",
            aggregation_format=self.exchange,
            expected_data_kind="WEIGHT_DIFF" if self.difference else "WEIGHTS",
            **({"enable_tensor_disk_offload": True} if self.mode == "offload" else {}),
            **(self.offload if lazy else {}),
            **self.recipe,
        )
        if self.mode == "level-1":
            make_lazy(recipe, 1, **self.offload)
        for file in scripts.iterdir():
            if file.name != "trainer.py":
                recipe._job.to_clients(str(file))
        return recipe

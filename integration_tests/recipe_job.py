# SPDX-License-Identifier: Apache-2.0
"""Jobs that an NVFlare recipe makes, run as the measured job is; and what their logs must not say."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from nvflare.job_config.api import FedJob
from nvflare.recipe.spec import Recipe

from benchmarks.fl_job import FLJob, RunResult

WITNESS = Path(__file__).parent / "witnesses" / "witness.py"
#: Of NVFlare at the end of each job, and on a machine that is so busy that requests are repeated.
_ORDINARY = re.compile(r"ask to stop job|request to stop the job| - (Communicator|Cell|CoreCell) - WARNING - ")
_COMPLAINT = re.compile(
    r" - (WARNING|ERROR|CRITICAL) - |Round None|received the result of simulator_server| 0 B in 0 tensors|received 0 B;"
)
_VARYING = re.compile(r"\[identity=.*?\]|[\w-]*\d[\w.:,-]*")


class RecipeOf(Recipe):
    """A recipe for a job that was made with NVFlare's job API."""

    def __init__(self, job: FedJob) -> None:
        super().__init__(job)


@dataclass(frozen=True)
class RecipeJob(FLJob):
    """The job of a recipe, and further components of the server.

    Args:
        recipe: A recipe from NVFlare or this package; `RecipeOf` is one for any other job.
        watched: Whether a filter of the server writes the types of results to the file that WITNESS names.
    """

    recipe: Recipe | None = None
    watched: bool = True

    def write(self, folder: Path) -> Path:
        """Export the job, and let its clients ask for tasks more often."""
        assert self.recipe is not None
        exported = folder.parent / "exported"
        self.recipe.export(str(exported))
        [job] = exported.iterdir()
        shutil.move(job, folder)
        for path in folder.glob("*/config/config_fed_server.json"):
            config = json.loads(path.read_text())
            config["server"] = {"heart_beat_timeout": 600, "task_request_interval": 0.5}
            if self.watched:
                filters = config.setdefault("task_result_filters", [])
                filters.append({"tasks": ["train", "submit_model"], "filters": [{"path": "witness.ResultWitness"}]})
                custom = path.parents[1] / "custom"
                custom.mkdir(exist_ok=True)
                shutil.copy(WITNESS, custom)
            config["components"] += self.components
            path.write_text(json.dumps(config))
        return folder


def complaints(result: RunResult) -> set[str]:
    """Return the lines of all logs that are warnings, errors or wrong, without numbers and without what varies."""
    paths = [*result.workspace.rglob("log.txt"), result.server_run_dir / "log.txt"]
    lines = [line for path in paths if path.exists() for line in path.read_text().splitlines()]
    return {_VARYING.sub("*", line) for line in lines if _COMPLAINT.search(line) and not _ORDINARY.search(line)}

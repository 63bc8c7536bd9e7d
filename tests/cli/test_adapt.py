# SPDX-License-Identifier: Apache-2.0
"""`nvflare-lazy adapt` prints what it changes, and changes what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SERVER = """{
  "format_version": 2,
  "workflows": [
    {"id": "controller", "path": "nvflare.app_common.workflows.fedavg.FedAvg", "args": {"num_clients": 2}}
  ],
  "components": []
}
"""
DIFF = """\
--- a/app/config/config_fed_server.json
+++ b/app/config/config_fed_server.json
@@ -1,7 +1,13 @@
 {
   "format_version": 2,
   "workflows": [
-    {"id": "controller", "path": "nvflare.app_common.workflows.fedavg.FedAvg", "args": {"num_clients": 2}}
+    {"id": "controller", "path": "nvflare_lazy.flare.LazyFedAvg", "args": {"num_clients": 2}}
   ],
-  "components": []
+  "components": [
+    {
+      "id": "offload",
+      "path": "nvflare_lazy.flare.TensorOffload",
+      "args": {}
+    }
+  ]
 }
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    config = tmp_path / "job" / "app" / "config"
    config.mkdir(parents=True)
    (config / "config_fed_server.json").write_text(SERVER)
    (tmp_path / "job" / "meta.json").write_text(json.dumps({"deploy_map": {"app": ["@ALL"]}}))
    return tmp_path / "job"


def test_diff_then_job(cli, job):
    """A dry run writes nothing; then the job is changed as shown, and the second run changes nothing."""
    config = job / "app" / "config" / "config_fed_server.json"
    code, out, err = cli("adapt", "job", "--dry-run")
    assert (code, out) == (0, DIFF)
    assert err.startswith("job: level 3, 1 file changed, nothing written\n")
    assert config.read_text() == SERVER
    code, out, err = cli("adapt", "job", "--dry-run", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["diff"] + "\n" == DIFF
    code, out, err = cli("adapt", "job")
    assert (code, out) == (0, DIFF)
    assert 'need "nvflare_lazy." in their class_allow_list' in err
    assert "LazyFedAvg" in config.read_text()
    assert cli("adapt", "job") == (0, "", "job: level 3, nothing to change\n")


def test_out(cli, job, tmp_path):
    """The copy is complete, the job stays, and a copy that exists is not replaced."""
    (job / "app" / "custom").mkdir()
    (job / "app" / "custom" / "net.py").write_text("raise RuntimeError('not run')\n")
    assert cli("adapt", "job", "--level", "1", "--out", "copies/lazy").code == 0
    copied = {path.relative_to(tmp_path / "copies" / "lazy") for path in (tmp_path / "copies" / "lazy").rglob("*")}
    assert copied == {path.relative_to(job) for path in job.rglob("*")}
    assert (job / "app" / "config" / "config_fed_server.json").read_text() == SERVER
    code, _, err = cli("adapt", "job", "--out", "copies/lazy")
    assert (code, err) == (1, "Error: copies/lazy exists; remove it, or choose another output folder\n")


def test_a_job_that_cannot_be_adapted(cli, job):
    """Exit code 1, one line with the reason, and no diff."""
    config = job / "app" / "config" / "config_fed_server.json"
    config.write_text(SERVER.replace("fedavg.FedAvg", "scatter_and_gather_scaffold.ScatterAndGatherScaffold"))
    code, out, err = cli("adapt", "job")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "ScatterAndGatherScaffold (controller) has no counterpart: use nvflare.app_common" in err
    assert cli("adapt", "job", "--level", "4").code == 2
    assert cli("adapt", "nowhere").code == 2

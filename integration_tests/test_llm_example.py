# SPDX-License-Identifier: Apache-2.0
"""The example `llm`: slow, because it needs transformers. `test_matrix.py` runs this module where it is installed."""

from __future__ import annotations

import os

import pytest

from integration_tests.test_examples import run_command, show

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # those of the libraries are not ours
]

os.environ["HF_HUB_OFFLINE"] = "1"
#: A limit for a machine with much other work.
SECONDS = 3000


def test_all_weights(tmp_path):
    """The loss falls in each round, a chart is drawn, and the result loads completely."""
    shown = show("llm", tmp_path, SECONDS)
    shown.check()
    before, first, second = shown.numbers("held-out loss:")
    assert before - 1 > first > second
    assert (tmp_path / "llm.png").read_bytes().startswith(b"\x89PNG")
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoints", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


def test_an_adapter(tmp_path):
    """The loss falls, and PEFT loads every matrix of the result."""
    shown = show("lora", tmp_path, SECONDS)
    shown.check()
    before, *_, after = shown.numbers("held-out loss:")
    assert after < before - 1
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = peft.PeftModel.from_pretrained(base, tmp_path / "checkpoints")
    assert all(weight.any() for weight in peft.get_peft_model_state_dict(model).values())


def test_a_deployment_with_real_sites(tmp_path):
    """The same command works with a server and sites in separate processes."""
    env = {"NVFLARE_POC_WORKSPACE": str(tmp_path / "poc"), "HOME": str(tmp_path)}
    deployed = run_command(
        [".venv/bin/python", "examples/llm/job.py", "--env", "poc"], tmp_path, env=env, seconds=SECONDS
    )
    assert deployed.status == 0, deployed.output[-5000:]


@pytest.mark.timeout(3600)
def test_the_server_of_a_large_model_stays_smaller_than_the_model(tmp_path):
    """690 MiB of weights, trained by two sites, pass through a server that never has so much memory."""
    large = run_command([".venv/bin/python", "examples/llm/job.py", "--size", "360m"], tmp_path, seconds=SECONDS)
    assert large.status == 0, large.output[-5000:]
    assert large.numbers("peak memory of the server:")[0] < 690 / 2

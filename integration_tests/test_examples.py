# SPDX-License-Identifier: Apache-2.0
"""The examples show what their READMEs say: each command in them is run, at a small size, and what it prints compared.

Numbers differ from machine to machine: they are left out of the comparison, and those that matter are looked at.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import nvflare_lazy
from benchmarks.fl_job.simulator import end_tree
from tests.documents.markdown import blocks
from tests.documents.session import matches

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
DEFAULT_WORKSPACE = "/tmp/nvflare/simulation"
SECONDS = 500
NUMBER = r"\d+(?:[.,]\d+)*"

# The commands in the READMEs that are run for every change, and what makes them small.
SHOWN = {
    "robust": ("robust", 0, []),
    "own_aggregator": ("own_aggregator", 0, ["--width", "256", "--layers", "2"]),
    "llm": ("llm", 0, []),
    "lora": ("llm", 1, []),
    "hello": ("hello", 0, []),
}


@dataclass(frozen=True)
class Shown:
    """What came of a command."""

    workspace: Path
    output: str
    status: int
    expected: str

    def check(self) -> None:
        """Compare it with what is expected, but for numbers, spaces and where it ran."""
        assert self.status == 0, self.output[-5000:]
        assert matches(_masked(self.expected), _masked(self.output)), self.output[-2000:]

    def numbers(self, line: str) -> list[float]:
        """Return the numbers in the last line that begins so, without those in its beginning."""
        found = [text for text in self.output.splitlines() if text.startswith(line)]
        return [float(number.replace(",", "")) for number in re.findall(NUMBER, found[-1].removeprefix(line))]


@pytest.fixture
def shown(request: pytest.FixtureRequest, tmp_path: Path) -> Shown:
    """What came of the command a test is about."""
    return _show(request.param, tmp_path)


def _show(name: str, workspace: Path) -> Shown:
    example, place, small = SHOWN[name]
    sessions = [block for block in blocks(EXAMPLES / example / "README.md") if block.language == "console"]
    command, _, expected = sessions[place].text.removeprefix("$ ").partition("\n")
    return _run([*command.split(), *small], workspace, expected)


def _run(
    command: list[str],
    workspace: Path,
    expected: str = "",
    env: dict[str, str] | None = None,
    seconds: float = SECONDS,
) -> Shown:
    assert command[0] == ".venv/bin/python"
    log = workspace / "output.txt"
    (workspace / "scratch").mkdir(mode=0o700)
    with open(log, "w") as output:
        process = subprocess.Popen(
            [sys.executable, *command[1:], "--workspace", str(workspace)],
            cwd=ROOT,
            env={**os.environ, "NVFLARE_LAZY_SCRATCH": str(workspace / "scratch"), **(env or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            status = process.wait(seconds)
        finally:
            end_tree(process)
    return Shown(workspace, log.read_text().replace(str(workspace), DEFAULT_WORKSPACE), status, expected)


def about(name: str) -> pytest.MarkDecorator:
    """A test of what came of a command."""
    return pytest.mark.parametrize("shown", [name], indirect=True)


def _masked(text: str) -> str:
    return re.sub(r"[ \t]+", " ", re.sub(NUMBER, "0", text))


@about("robust")
def test_a_poisoned_site_ruins_the_mean_and_not_the_trimmed_mean(shown):
    """The two jobs differ in the name of a rule; the accuracies and the picture tell them apart."""
    shown.check()
    assert shown.numbers("mean")[-1] < 0.7
    assert shown.numbers("trimmed_mean")[-1] > 0.9
    for picture in (shown.workspace / "robust.png", EXAMPLES / "robust" / "robust.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")


@about("own_aggregator")
def test_an_aggregator_that_knows_nothing_gets_lazy_tensors_and_makes_the_same_of_them(shown):
    """A stock job with one more component gives the same model to the bit, from results that are on disk."""
    shown.check()
    assert "the same model with and without TensorOffload, to the bit: yes" in shown.output
    assert shown.numbers("results on disk when the aggregator had them:") == [6, 6]
    assert shown.numbers("accuracy:")[1] > 0.9


@about("llm")
def test_a_decoder_is_fine_tuned_whole_in_processes_of_their_own(shown):
    """The held-out loss goes down, and what comes out is the whole decoder in bfloat16."""
    shown.check()
    before, after, *_ = shown.numbers("held-out loss:")
    assert after < before - 1
    result = nvflare_lazy.open(shown.workspace / "checkpoints" / "FL_global_model.safetensors")
    assert result.keys() == nvflare_lazy.open(shown.workspace / "base.safetensors").keys()
    assert {tensor.dtype for tensor in result.values()} == {torch.bfloat16}


@about("lora")
def test_adapters_are_all_that_travels(shown):
    """The held-out loss goes down, and what comes out is adapters and nothing else."""
    shown.check()
    before, after, *_ = shown.numbers("held-out loss:")
    assert after < before - 0.3
    result = nvflare_lazy.open(shown.workspace / "checkpoints" / "FL_global_model.safetensors")
    assert all("lora_" in name for name in result)


@about("hello")
def test_two_sites_with_different_digits_train_a_model_that_knows_all(shown):
    """The loss goes down, the accuracy is high, and the model is where the example says."""
    shown.check()
    loss, accuracy = shown.numbers("round 2")
    assert loss < shown.numbers("untrained")[0]
    assert accuracy > 0.9
    said = re.search(r"it is in (\S+)", shown.output)[1].replace(DEFAULT_WORKSPACE, str(shown.workspace))
    assert "digit.weight" in nvflare_lazy.open(said)


def test_the_picture_in_the_repository_is_the_one_the_readme_shows():
    """A README that shows a picture which is not there shows nothing."""
    readme = (EXAMPLES / "robust" / "README.md").read_text()
    [name] = re.findall(r"!\[[^]]*\]\(([^)]+)\)", readme)
    assert (EXAMPLES / "robust" / name).is_file()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_server_of_a_large_decoder_stays_smaller_than_the_decoder(tmp_path):
    """690 MiB of weights, all fine-tuned by two sites, pass through a server that never has so much memory."""
    large = _run([".venv/bin/python", "examples/llm/job.py", "--size", "360m"], tmp_path, seconds=1500)
    assert large.status == 0, large.output[-5000:]
    assert large.numbers("server memory at most:")[0] < 690.1 / 2
    before, after, *_ = large.numbers("held-out loss:")
    assert after < before - 3


@pytest.mark.slow
def test_the_decoder_is_fine_tuned_in_a_deployment_with_real_sites(tmp_path):
    """The same command, with a server and sites as processes of their own."""
    env = {"NVFLARE_POC_WORKSPACE": str(tmp_path / "poc"), "HOME": str(tmp_path)}
    deployed = _run([".venv/bin/python", "examples/llm/job.py", "--env", "poc"], tmp_path, env=env)
    assert deployed.status == 0, deployed.output[-5000:]
    assert deployed.numbers("results received on disk:") == [4, 4]

# SPDX-License-Identifier: Apache-2.0
"""The commands in the READMEs of the examples are run, at a small size, and their output is compared.

Numbers differ between machines: the comparison ignores them, and the important ones are checked separately.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

import nvflare_lazy
from benchmarks.fl_job.simulator import end_tree
from integration_tests.conftest import in_deployment
from tests.documents.markdown import blocks
from tests.documents.session import matches

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
DEFAULT_WORKSPACE = "/tmp/nvflare/simulation"
SECONDS = 500
NUMBER = r"\d+(?:[.,]\d+)*"

# The commands in the READMEs that are run, and what makes them small. `test_llm_example.py` runs those of `llm`.
SHOWN = {
    "robust": ("robust", 0, []),
    "own_aggregator": ("own_aggregator", 0, ["--width", "256", "--layers", "2"]),
    "hello": ("hello", 0, []),
    "llm": ("llm", 0, []),
    "lora": ("llm", 1, []),
    "hierarchy": ("hierarchy", 0, ["--mib", "64"]),
}


@dataclass(frozen=True)
class Shown:
    """Result of a command."""

    workspace: Path
    output: str
    status: int
    expected: str

    def check(self) -> None:
        """Compare the output with the expected one, except for numbers, spaces and the directory."""
        assert self.status == 0, self.output[-5000:]
        assert matches(_masked(self.expected), _masked(self.output)), self.output[-2000:]

    def numbers(self, line: str) -> list[float]:
        """Return the numbers in the last line that begins so, without those in its beginning."""
        found = [text for text in self.output.splitlines() if text.startswith(line)]
        return [float(number.replace(",", "")) for number in re.findall(NUMBER, found[-1].removeprefix(line))]


@pytest.fixture
def shown(request: pytest.FixtureRequest, tmp_path: Path) -> Shown:
    """The result of the command that a test runs."""
    return show(request.param, tmp_path)


def show(name: str, workspace: Path, seconds: float = SECONDS) -> Shown:
    example, place, small = SHOWN[name]
    sessions = [block for block in blocks(EXAMPLES / example / "README.md") if block.language == "console"]
    command, _, expected = sessions[place].text.removeprefix("$ ").partition("\n")
    return run_command([*command.split(), *small], workspace, expected, seconds=seconds)


def run_command(
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
    """A test of a command's result."""
    return pytest.mark.parametrize("shown", [name], indirect=True)


def _masked(text: str) -> str:
    return re.sub(r"[ \t]+", " ", re.sub(NUMBER, "0", text))


@pytest.mark.slow
@about("robust")
def test_a_poisoned_site_ruins_the_mean_and_not_the_trimmed_mean(shown):
    """The two jobs differ in the name of a rule; the accuracies and the picture tell them apart."""
    shown.check()
    assert shown.numbers("mean")[-1] < 0.7
    assert shown.numbers("trimmed_mean")[-1] > 0.9
    for picture in (shown.workspace / "robust.png", EXAMPLES / "robust" / "robust.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@about("own_aggregator")
def test_an_aggregator_that_knows_nothing_gets_lazy_tensors_and_makes_the_same_of_them(shown):
    """A stock job with one more component gives the same model to the bit, from results that are on disk."""
    shown.check()
    assert "the same model with and without TensorOffload, to the bit: yes" in shown.output
    assert shown.numbers("results on disk when the aggregator had them:") == [6, 6]
    assert shown.numbers("accuracy:")[1] > 0.9


@about("hello")
def test_two_sites_with_different_digits_train_a_model_that_knows_all(shown):
    """The loss goes down, the accuracy is high, and the model is where the example says."""
    shown.check()
    loss, accuracy = shown.numbers("round 2")
    assert loss < shown.numbers("untrained")[0]
    assert accuracy > 0.9
    said = re.search(r"it is in (\S+)", shown.output)[1].replace(DEFAULT_WORKSPACE, str(shown.workspace))
    assert "digit.weight" in nvflare_lazy.open(said)


@in_deployment
@pytest.mark.slow
@about("hierarchy")
def test_a_tree_of_sites_gives_the_flat_mean(shown):
    """The nodes in the middle hold no model, and the error is within that of two roundings per round."""
    shown.check()
    error, _, bound, _ = shown.numbers("largest error compared with the flat mean:")
    assert 0 < error <= bound
    assert shown.numbers("site-1")[-1] < 450


def test_the_picture_in_the_repository_is_the_one_the_readme_shows():
    """A README that shows a picture which is not there shows nothing."""
    readme = (EXAMPLES / "robust" / "README.md").read_text()
    [name] = re.findall(r"!\[[^]]*\]\(([^)]+)\)", readme)
    assert (EXAMPLES / "robust" / name).is_file()


@pytest.mark.skipif(find_spec("accelerate") is not None, reason="the packages are installed")
def test_an_example_says_which_packages_are_missing(tmp_path):
    """The user reads which packages to install, and no traceback."""
    missing = run_command([".venv/bin/python", "examples/llm/job.py"], tmp_path)
    assert missing.status == 1
    assert re.fullmatch(r"this example needs .*; install them with: pip install -e '\.\[hf\]'\n", missing.output)

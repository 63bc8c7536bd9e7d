# SPDX-License-Identifier: Apache-2.0
"""Completion on the Tab key, in the shells themselves: what the documents say is typed, then a line with Tab in it."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nvflare_lazy.cli.program import COMMANDS

ROOT = Path(__file__).parents[2]
SHELLS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
_SECONDS = 300


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """An environment in which `nvflare-lazy` completes, but only writes its arguments to the file `ran`."""
    script = tmp_path / "bin" / "nvflare-lazy"
    script.parent.mkdir()
    script.write_text(
        f'''#!/bin/sh
[ "$_NVFLARE_LAZY_COMPLETE" ] && exec "{sys.executable}" -m nvflare_lazy.cli
echo "$@" > ran.new && mv ran.new ran
'''
    )
    script.chmod(0o755)
    path = os.pathsep.join((str(script.parent), os.environ["PATH"]))
    return {
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
        "TERM": "xterm",
        "COLUMNS": "200",
        "LC_ALL": "C.UTF-8",
    }


def documented(shell: str) -> str:
    """Return the line that turns completion on, as the reference has it."""
    page = (ROOT / "docs/reference/command-line.md").read_text(encoding="utf-8")
    [line] = re.findall(rf"^\| {shell} \| `(.*?)` \|", page, flags=re.MULTILINE)
    return line.replace("\\|", "|")


def completions(environment, *words: str) -> list[str]:
    """Return what the program offers bash for the last of these words."""
    line = {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(
        ["nvflare-lazy"],
        env={**environment, **line, "_NVFLARE_LAZY_COMPLETE": "bash_complete"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    return [item.removeprefix("plain,") for item in done.stdout.splitlines()]


@pytest.mark.parametrize("shell", SHELLS)
def test_tab(shell, environment, tmp_path):
    """Commands, options and files are completed on a line that the user types."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "weights.safetensors").write_bytes(b"")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execvpe(SHELLS[shell][0], SHELLS[shell], environment)
    shown, ran = b"", tmp_path / "ran"
    try:
        os.write(terminal, f"{documented(shell)}\nnvflare-lazy insp\t weigh\t --sect\t part --js\t\n".encode())
        limit = time.monotonic() + _SECONDS
        while not ran.exists() and time.monotonic() < limit:
            if select.select([terminal], [], [], 0.1)[0]:
                shown += os.read(terminal, 1 << 16)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)
    assert ran.exists(), shown
    assert ran.read_text().split() == ["inspect", "weights.safetensors", "--section", "part", "--json"]


def test_commands(environment):
    """All commands are offered."""
    assert completions(environment, "nvflare-lazy", "") == list(COMMANDS)
    assert completions(environment, "nvflare-lazy", "unknown", "--") == ["--version", "--help"]


def test_values(environment):
    """The values of an option are offered."""
    assert completions(environment, "nvflare-lazy", "adapt", "--level", "") == ["1", "2", "3"]


def test_does_not_load_torch(tmp_path):
    """Completion never waits for torch."""
    words = ["nvflare-lazy", "convert", "a", "b", "--dtype", "f32", "--like", str(tmp_path), "--"]
    code = f"""if True:
        import os, sys
        os.environ |= {{"COMP_WORDS": {chr(10).join(words)!r}, "COMP_CWORD": "{len(words) - 1}"}}
        from nvflare_lazy.cli.program import _complete
        assert _complete("bash_complete") == 0
        assert not {{"torch", "numpy", "nvflare", "rich.progress"}} & set(sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "plain,--max-shard-size" in done.stdout


def test_unknown_shell(environment):
    """The error for an unsupported shell lists the supported shells."""
    environment["_NVFLARE_LAZY_COMPLETE"] = "ksh_source"
    done = subprocess.run(["nvflare-lazy"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "bash_source, zsh_source, fish_source" in done.stderr

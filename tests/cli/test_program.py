# SPDX-License-Identifier: Apache-2.0
"""The program around the commands: quick to start, honest in its exit codes, polite to shells and pipes."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

import nvflare_lazy
from nvflare_lazy._text import printable
from nvflare_lazy.cli import program
from nvflare_lazy.cli._common import error_line
from nvflare_lazy.cli.program import COMMANDS, run
from tests.cli.sparse import write_sparse


def test_version(cli):
    """The version of the package."""
    assert cli("--version") == (0, f"nvflare-lazy {nvflare_lazy.__version__}\n", "")


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_lists_the_commands(cli, option):
    """All of them, each with a line about it."""
    code, out, _ = cli(option)
    assert code == 0
    listed = re.findall(r"^  ([a-z][a-z-]*)  +[A-Z].*\.$", out, flags=re.MULTILINE)
    assert listed == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command(cli, name):
    """Describes the command, and explains each of its options."""
    code, out, _ = cli(name, "--help")
    assert code == 0
    assert out.startswith(f"Usage: nvflare-lazy {name} [OPTIONS]")
    command = program.program.get_command(None, name)
    assert all(parameter.help for parameter in command.params if isinstance(parameter, click.Option))


@pytest.mark.parametrize("name", COMMANDS)
def test_example_of_a_command(cli, name):
    """The help of each command ends with a command line that the program accepts."""
    command = program.program.get_command(None, name)
    label, example = (command.epilog or "").split(": ", 1)
    words = shlex.split(example)
    assert (label, words[:2]) == ("Example", ["nvflare-lazy", name])
    out = " ".join(cli(name, "--help").out.split())
    assert out.endswith(f"Example: {example}")
    context = click.Context(command, resilient_parsing=True)
    values, _, _ = command.make_parser(context).parse_args(words[2:])
    for parameter in command.params:
        if isinstance(parameter.type, click.Path) and parameter.type.exists and parameter.name in values:
            Path(values[parameter.name]).mkdir(parents=True)
    command.make_context(name, words[2:])


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_json(name):
    """The findings of every command can be had as JSON."""
    command = program.program.get_command(None, name)
    assert ["--json"] in [parameter.opts for parameter in command.params]


@pytest.mark.parametrize(
    ("args", "code", "found"),
    [
        (["verify", "training.pt", "missing"], 1, {"files": [{"ok": True, "tensors": 5}, {"ok": False}]}),
        (
            ["convert", "training.pt", "o.safetensors"],
            0,
            {"path": "o.safetensors", "tensors": 5, "skipped": ["optimizer"]},
        ),
        (["aggregate", "training.pt", "--out", "o.safetensors"], 0, {"contributors": ["training.pt"], "skipped": {}}),
        (["clean", "--scratch-dir", "scratch", "--remove"], 0, {"removed": [], "scratch": []}),
        (["doctor", "--scratch-dir", "training.pt"], 1, {"checks": [{"level": "OK"}]}),
    ],
)
def test_findings_as_json(cli, training, args, code, found):
    """One document on stdout, nothing on stderr, and the same exit code."""
    result = cli(*args, "--json")
    assert (result.code, result.err) == (code, "")

    def check(document, expected):
        if isinstance(expected, dict):
            for key, value in expected.items():
                check(document[key], value)
        elif isinstance(expected, list) and expected:
            for item, value in zip(document, expected, strict=False):
                check(item, value)
        else:
            assert document == expected

    check(json.loads(result.out), found)


@pytest.mark.parametrize("args", [["--version"], ["--help"], ["convert", "--help"], ["inspect", "a", "--match=("]])
def test_needs_neither_torch_nor_nvflare(args):
    """The usage of a command is shown without loading torch."""
    code = f"""if True:
        import sys
        from nvflare_lazy.cli.program import run
        run({args!r})
        assert not {{"torch", "numpy", "nvflare", "rich.progress"}} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_clean_does_not_load_torch(tmp_path):
    """`clean` and all of scratch work without torch, so it must not come with the module that opens files."""
    code = f"""if True:
        import sys
        from nvflare_lazy.cli.program import run
        import nvflare_lazy.tensors.tensor_file
        run(["clean", "--scratch-dir", {str(tmp_path / "scratch")!r}])
        assert not {{"torch", "numpy", "nvflare"}} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["inspct", "f"], "No such command 'inspct'. Did you mean 'inspect'?"),
        (["destroy"], "No such command 'destroy'. Available: adapt, inspect, convert"),
        (["--vresion"], "No such option '--vresion'."),
        (["inspect"], "Missing argument 'FILE'."),
        (["inspect", "a", "b"], "Got unexpected extra argument (b)"),
        (["inspect", "--jsn", "a"], "No such option '--jsn'."),
        (["convert", "a"], "Missing argument 'OUTPUT'."),
    ],
)
def test_misuse(cli, args, message):
    """Exit code 2, the invalid argument, and a reference to the help; nothing on stdout."""
    code, out, err = cli(*args)
    assert (code, out) == (2, "")
    assert f"\nError: {message}" in err
    assert "--help' for help." in err


def test_no_command(cli):
    """Shows what there is."""
    code, _, err = cli()
    assert code == 2
    assert "Commands:" in err


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_error_is_one_line(cli, command):
    """What the system or a file has to say comes without a traceback."""
    code, out, err = cli(command, "no\nwhere", *(["out.safetensors"] if command == "convert" else []))
    assert (code, out, err) == (1, "", "Error: no\\nwhere: No such file or directory\n")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(cli, model):
    """Permissions are the user's to change."""
    model.chmod(0)
    assert cli("inspect", model).err == f"Error: {model}: Permission denied\n"


def test_a_bug_has_its_traceback(model, monkeypatch):
    """An unforeseen exception is not reported as a user's error."""

    def broken(*args, **kwargs):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(nvflare_lazy, "open", broken)
    with pytest.raises(ZeroDivisionError):
        run(["inspect", str(model)])


def test_pipe_that_closes(start, tmp_path):
    """`nvflare-lazy inspect FILE | head -1` ends quietly, as other programs do."""
    write_sparse(tmp_path / "many", {f"layers.{i}.weight": ("F32", (4,)) for i in range(20_000)})
    process = start("inspect", "many")
    assert process.stdout.readline().startswith(b"NAME")
    process.stdout.close()
    assert process.wait(500) == -signal.SIGPIPE
    assert process.stderr.read() == b""


def test_help_into_a_closed_pipe(start):
    """The same where there is nothing but help to print."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = start("--help", stdout=write_end)
    os.close(write_end)
    assert process.wait(500) == -signal.SIGPIPE
    assert process.stderr.read() == b""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_full_disk(start, model, unbuffered):
    """Output that did not arrive is an error, told once, whether Python keeps output back or not."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        process = start("inspect", model, stdout=full, env=environment)
        _, err = process.communicate(timeout=500)
    assert (process.returncode, err) == (1, b"Error: No space left on device\n")


def test_terminal_without_unicode(start, tmp_path):
    """What the encoding of the terminal lacks is escaped, and does not fail."""
    write_sparse(tmp_path / "f", {"größe": ("F32", (4,))})
    process = start("inspect", "f", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    out, err = process.communicate(timeout=500)
    assert (process.returncode, err) == (0, b"")
    assert rb"gr\xf6\xdfe" in out


def test_progress_on_a_terminal_and_not_in_a_pipe(start, tmp_path):
    """A terminal shows progress; in the end the screen, like a pipe, has only the result."""
    write_sparse(tmp_path / "f", {"w": ("F32", (16, 1 << 20))})
    result = b"a.safetensors: 1 tensor, 64.0 MiB\n"
    shown, process = on_terminal(start, "convert", "f", "a.safetensors")
    assert (process.wait(500), process.stdout.read()) == (0, result)
    assert b"Converting" in shown
    assert b"64.0" in shown
    piped = start("convert", "f", "a.safetensors", "--force")
    assert piped.communicate(timeout=500) == (result, b"")


@pytest.mark.parametrize(
    ("command", "shows"),
    [(["diff", "f", "g"], b"Comparing"), (["aggregate", "f", "g", "--out", "o.safetensors"], b"Reading for mean")],
    ids=["diff", "aggregate"],
)
def test_progress_counts_the_bytes_of_all_inputs(start, tmp_path, command, shows):
    """The total includes both models, and the bar reaches it."""
    for name in "fg":
        write_sparse(tmp_path / name, {"w": ("F32", (64, 1 << 20))})
    shown, process = on_terminal(start, *command)
    out = process.stdout.read()
    assert (process.wait(500), shows in out) == (0, False)
    assert shows in shown
    totals = set(re.findall(rb"([\d.]+)/([\d.]+) ([KMG]iB)", shown))
    assert {total[1:] for total in totals} == {(b"512.0", b"MiB")}
    assert max(float(total[0]) for total in totals) == 512.0


def test_progress_of_a_file_with_an_odd_name(start, tmp_path):
    """A name is never taken for markup, nor obeyed by the terminal."""
    write_sparse(tmp_path / "[bold]\x1b[5m", {"w": ("F32", (16, 1 << 20))})
    shown, process = on_terminal(start, "verify", "[bold]\x1b[5m")
    assert process.wait(500) == 0
    assert b"Checking [bold]\\x1b[5m" in shown
    assert b"\x1b[5m" not in shown


def on_terminal(start, *args) -> tuple[bytes, subprocess.Popen]:
    """Start a command whose stderr is a terminal; return its complete output there."""
    ours, theirs = pty.openpty()
    process = start(*args, stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "120"})
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 1 << 16):
            shown += chunk
    except OSError:
        pass  # a terminal reads this once no writer is left
    os.close(ours)
    return shown, process


def test_runs_as_a_module_and_as_a_script():
    """`python -m nvflare_lazy.cli`, and the script next to the interpreter."""
    for command in ([sys.executable, "-m", "nvflare_lazy.cli"], [Path(sys.executable).parent / "nvflare-lazy"]):
        done = subprocess.run([*command, "--version"], check=True, capture_output=True, text=True)
        assert done.stdout == f"nvflare-lazy {nvflare_lazy.__version__}\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain.weight", "plain.weight"),
        ("größe 埋め込み", "größe 埋め込み"),
        ("\x1b[31m", "\\x1b[31m"),
        ("a\tb\nc\rd", "a\\tb\\nc\\rd"),
        ("\x9b\u202e\u2028\udc80", "\\x9b\\u202e\\u2028\\udc80"),
    ],
)
def test_printable(text, shown):
    """Control characters, right-to-left text, and bytes that are not valid text are written as escapes."""
    assert printable(text) == shown


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (FileNotFoundError(2, "No such file or directory", "a"), "a: No such file or directory"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (ValueError("two\nlines"), "two lines"),
        (ValueError(), "ValueError"),
        (ValueError("\x1b[31m"), "\\x1b[31m"),
    ],
)
def test_error_line(error, line):
    """One line, whatever the error holds."""
    assert error_line(error) == line


@pytest.mark.parametrize("expression", ["x{99999999999}", "(" * 2000 + ")" * 2000])
def test_expressions_that_cannot_be(cli, expression):
    """A regular expression that is too large or too deep is a usage error, not a crash."""
    code, _, err = cli("inspect", "m", "--match", expression)
    assert code == 2
    assert "Invalid regular expression" in err

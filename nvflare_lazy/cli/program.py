# SPDX-License-Identifier: Apache-2.0
"""The command-line program: list of subcommands, exit codes and signals.

A subcommand prints its findings and raises its errors. An error becomes an exit code and one line on stderr, and a
signal ends the process as a shell expects.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from difflib import get_close_matches
from io import TextIOWrapper
from typing import TYPE_CHECKING, NoReturn

import click
from click.shell_completion import shell_complete

import nvflare_lazy
from nvflare_lazy.cli._common import error_line
from nvflare_lazy.errors import NVFlareLazyError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

# Each is a function in the module of its name, which is loaded when it is used. These modules import nothing heavy at
# their top, since `--help` loads them all.
COMMANDS = (
    "adapt",
    "inspect",
    "convert",
    "export",
    "merge-lora",
    "diff",
    "verify",
    "aggregate",
    "plan",
    "report",
    "doctor",
    "clean",
)
_NAME = "nvflare-lazy"
# The variable by which the completion script of a shell calls the program. Its name is click's.
_COMPLETE = "_NVFLARE_LAZY_COMPLETE"


class LazyCommandGroup(click.Group):
    """Imports the module of a subcommand when the subcommand is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        command: click.Command = getattr(importlib.import_module(f"nvflare_lazy.cli.{name}"), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or suggest the closest one."""
        if args[0] not in COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            close = get_close_matches(args[0], COMMANDS, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"Available: {', '.join(COMMANDS)}."
            ctx.fail(f"No such command {args[0]!r}. {hint}")
        return super().resolve_command(ctx, args)


@click.group(
    cls=LazyCommandGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 success, 1 failed check or error, 2 usage error.",
)
@click.version_option(nvflare_lazy.__version__, prog_name=_NAME, message="%(prog)s %(version)s")
def program() -> None:
    """Make NVFlare jobs lazy, and inspect, compare, convert, verify and aggregate checkpoints larger than memory."""


class SignalReceived(BaseException):
    """A signal asked the process to end. Raised in the main thread, so that `with` and `finally` clean up."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def main() -> NoReturn:
    """Run the command line of the process, and exit with its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # Names may have characters that the encoding of the terminal lacks.
            stream.reconfigure(errors="backslashreplace")
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(signum, _stop)
    instruction = os.environ.get(_COMPLETE)
    try:
        code = _flush_after(run(sys.argv[1:]) if instruction is None else _complete(instruction))
    except BrokenPipeError:
        _exit_by_signal(signal.SIGPIPE)
    except SignalReceived as received:
        _exit_by_signal(received.signum)
    sys.exit(code)


def run(args: Sequence[str]) -> int:
    """Run a command line, without the program's name before it, and return its exit code."""
    try:
        # Not `program.main`, which would turn a broken pipe and Ctrl-C into errors.
        with program.make_context(_NAME, list(args)) as context:
            program.invoke(context)
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except BrokenPipeError:
        raise
    except (NVFlareLazyError, OSError) as error:
        return _fail(error)
    return 0


def _complete(instruction: str) -> int:
    """Print the completion script of a shell, or the completions that the script asks for."""
    # `program.main` would do this first.
    code = shell_complete(program, {}, _NAME, _COMPLETE, instruction)
    if code:
        click.echo(
            f"Error: invalid {_COMPLETE} {instruction!r}; available: bash_source, zsh_source, fish_source", err=True
        )
    return code


def _fail(error: Exception) -> int:
    click.echo(f"Error: {error_line(error)}", err=True)
    return 1


def _flush_after(code: int) -> int:
    """Flush stdout and return the exit code; earlier failures were already reported."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop_output()
        return code or _fail(error)
    return code


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    raise SignalReceived(signum)


def _exit_by_signal(signum: int) -> NoReturn:
    """End the process by the signal, so that the calling shell ends its loop or pipe."""
    _drop_output()
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
    os._exit(128 + signum)


def _drop_output() -> None:
    """Discard unwritten output of a broken pipe or a full disk, so that it does not raise again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

# SPDX-License-Identifier: Apache-2.0
"""The program around the subcommands: which there are, and how each of them may end.

A subcommand says what it found and raises what went wrong; here that becomes an exit code and at most one line on
stderr, and a signal becomes what the shell expects of a process that was stopped by it.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from importlib.util import find_spec
from io import TextIOWrapper
from typing import TYPE_CHECKING, NoReturn

import click

import nvflare_lazy
from nvflare_lazy.cli.wording import error_line
from nvflare_lazy.errors import NVFlareLazyError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

# Loaded when used. A module in this table imports nothing heavy at its top, since `--help` loads them all.
COMMANDS = {
    "inspect": "nvflare_lazy.cli.inspect:inspect",
    "convert": "nvflare_lazy.cli.convert:convert",
    "verify": "nvflare_lazy.cli.verify:verify",
    "aggregate": "nvflare_lazy.cli.aggregate:aggregate",
    "doctor": "nvflare_lazy.cli.doctor:doctor",
    "clean": "nvflare_lazy.cli.clean:clean",
}


class LazyGroup(click.Group):
    """A group that imports the module of a subcommand when the subcommand is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name, home in COMMANDS.items() if find_spec(home.partition(":")[0])]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 all is well, 1 a check failed or something went wrong, 2 the command was misused.",
)
@click.version_option(nvflare_lazy.__version__, prog_name="nvflare-lazy", message="%(prog)s %(version)s")
def program() -> None:
    """Look at, check and convert model checkpoints that are larger than memory."""


class Stopped(BaseException):
    """A signal asked the process to end. Raised where it runs, so that it cleans up behind itself on its way out."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the program and end the process with its exit code.

    Args:
        args: The command line after the program's name; the process's own, if not given.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A name that the terminal's encoding lacks is no reason to fail.
            stream.reconfigure(errors="backslashreplace")
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is signal.SIG_DFL:
            signal.signal(signum, _stop)
    try:
        code = program.main(args, prog_name="nvflare-lazy", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        _die_of(signal.SIGINT)
    except Stopped as stopped:
        _die_of(stopped.signum)
    except BrokenPipeError:
        _die_of(signal.SIGPIPE)
    except (NVFlareLazyError, OSError) as error:
        click.echo(f"Error: {error_line(error)}", err=True)
        code = 1
    sys.exit(code)


def _stop(signum: int, frame: FrameType | None) -> NoReturn:
    raise Stopped(signum)


def _die_of(signum: int) -> NoReturn:
    """End as if the signal had never been caught: a shell that runs a loop or a pipe has to know."""
    # What is left in the buffer of a broken pipe can go nowhere, and must not raise once more at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)
    os._exit(128 + signum)

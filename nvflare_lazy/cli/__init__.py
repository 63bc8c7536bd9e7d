# SPDX-License-Identifier: Apache-2.0
"""The `nvflare-lazy` command: checkpoints and jobs from a shell.

Importing it loads neither torch nor NVFlare; a subcommand loads what it needs when it runs.
"""

from nvflare_lazy.cli.program import main

__all__ = ["main"]

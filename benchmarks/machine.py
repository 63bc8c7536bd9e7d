# SPDX-License-Identifier: Apache-2.0
"""What a measurement was made on: machine and versions, for the head of every report."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path


def describe_machine() -> dict[str, str]:
    """Return processor, cores, memory, kernel and the versions that matter."""
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    gib = int(memory.split()[1]) / (1 << 20)
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    packages = ", ".join(f"{name} {version(name)}" for name in ("nvflare", "torch", "safetensors", "numpy"))
    return {
        "processor": f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{gib:.1f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "packages": packages,
    }

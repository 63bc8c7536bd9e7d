# SPDX-License-Identifier: Apache-2.0
"""How much of the package one received tensor and one round pass through, counted in real processes.

    python -m benchmarks.walk
    python -m benchmarks.walk --modules    # also names the modules
    python -m benchmarks.walk --functions  # and their functions, with the number of calls

A profile hook is installed when the traced process starts, so that it sees every thread. A tensor of 9 KiB goes from
one cell to another over TCP and is received to disk. A round is the second of three in NVFlare's simulator, with two
clients that use the package (level 3), counted in the server's job process. Calls of functions count; imports do not.

A form of a tensor's description is a class whose objects have the type and the shape of a tensor, or its position, if
an object of it was created in that round. Forms between a result and its checkpoint count, from the received lazy
tensors to the tensors of the new model. Two others are shown separately: the form on the wire, which a message needs
whatever happens before and after it, and the fields of `LazyTensor`, which is the tensor and not its description.
"""

from __future__ import annotations

import argparse
import ast
import collections
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = "nvflare_lazy"
_ROOT = Path(__file__).parents[1]
_OUTPUT = "NVFLARE_LAZY_WALK_OUTPUT"
# The only reader of safetensors headers.
_HEADER_READER = (f"{PACKAGE}.formats.safetensors.header", "parse_header")


class CallRecorder:
    """Counts the calls of the package's functions, while it is told to, in all threads of this process."""

    def __init__(self) -> None:
        self.recording = False
        self._calls: collections.Counter[tuple[str, str]] = collections.Counter()
        self._crossings = 0
        self._created: set[str] = set()

    def install(self) -> None:
        """Observe this thread and every thread that starts later."""
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not self.recording:
            return
        module = frame.f_globals.get("__name__", "")
        function = frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name
        if module.startswith("namedtuple_"):
            self._created.add(module.removeprefix("namedtuple_"))
        if not module.startswith(PACKAGE) or frame.f_code.co_name.startswith("<"):
            return
        self._calls[module, function] += 1
        if frame.f_code.co_name == "__init__":
            self._created.add(type(frame.f_locals["self"]).__name__)
        caller = frame.f_back
        if caller is not None and caller.f_globals.get("__name__") != module:
            self._crossings += 1

    def write(self) -> None:
        """Write the counts to the file that the tracing process named."""
        calls = dict(self._calls)
        modules: dict[str, dict[str, int]] = {}
        for (module, function), count in sorted(calls.items()):
            modules.setdefault(module, {})[function] = count
        counted = {
            "modules": modules,
            "functions": len(calls),
            "calls": sum(calls.values()),
            "crossings": self._crossings,
            "header_parses": self._calls[_HEADER_READER],
            "created": sorted(self._created),
        }
        Path(os.environ[_OUTPUT]).write_text(json.dumps(counted))


recorder = CallRecorder()


def descriptions() -> dict[str, str]:
    """Return the classes whose objects describe one tensor (its type and shape, or its place), and their modules."""
    found = {}
    for path in sorted((_ROOT / PACKAGE).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and _describes_a_tensor(node):
                found[node.name] = path.relative_to(_ROOT).with_suffix("").as_posix().replace("/", ".")
    return found


def _describes_a_tensor(node: ast.ClassDef) -> bool:
    fields = {
        item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    for item in node.body:
        if isinstance(item, ast.Assign) and any(
            isinstance(to, ast.Name) and to.id == "__slots__" for to in item.targets
        ):
            fields |= set(ast.literal_eval(item.value))
    is_geometry = "shape" in fields and bool(fields & {"dtype", "element_type"})
    return is_geometry or {"offset", "nbytes"} <= fields


# ---- traced functions ---------------------------------------------------------------------------------------------


def receive(sender_has_package: bool) -> None:
    """Receive one tensor to disk, twice; the second time counts."""
    from tests.transport import peers, scenes

    with tempfile.TemporaryDirectory(prefix="nvflare_lazy_walk_") as scratch:
        net = peers.Net(scratch)
        state = peers._start("server", net.port, True, scratch, {})
        scenes.offload(state, True)
        try:
            client = net.add("site_1", sender_has_package)
            client.call(scenes.send, "server", "torch", "one")
            scenes.forget(state)
            recorder.recording = True
            client.call(scenes.send, "server", "torch", "one")
            recorder.recording = False
            wrong = scenes.compare(state, "torch", "one", True)
            if wrong:
                raise RuntimeError(f"the tensor was not received as it was sent: {wrong}")
        finally:
            net.close()
    recorder.write()
    os._exit(0)


# ---- running it ----------------------------------------------------------------------------------------------------


def trace_receive(*, sender_has_package: bool) -> dict[str, Any]:
    """Return what one received tensor passes."""
    with tempfile.TemporaryDirectory(prefix="nvflare_lazy_walk_") as directory:
        code = f"from benchmarks.walk import receive; receive({sender_has_package})"
        return _traced([sys.executable, "-c", f"if __name__ == '__main__':\n    {code}"], Path(directory))


def trace_round() -> dict[str, Any]:
    """Return what one round passes on the server."""
    from benchmarks.fl_job.job import FLJob

    component = {"id": "walk", "path": "benchmarks.fl_job.round_recorder.RoundRecorder", "args": {}}
    job = FLJob(mode="level-3", clients=2, model_mib=1, tensors=4, rounds=3, components=(component,))
    with tempfile.TemporaryDirectory(prefix="nvflare_lazy_walk_") as name:
        directory = Path(name)
        folder = job.write(directory / "job")
        (directory / "scratch").mkdir(mode=0o700)
        simulator = "nvflare.private.fed.app.simulator.simulator"
        command = [
            sys.executable,
            "-m",
            simulator,
            str(folder),
            "-w",
            str(directory / "workspace"),
            "-n",
            "2",
            "-t",
            "2",
        ]
        return _traced(command, directory)


def _traced(command: list[str], directory: Path) -> dict[str, Any]:
    hook = directory / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text("from benchmarks.walk import recorder\n\nrecorder.install()\n")
    output = directory / "walk.json"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(hook), str(_ROOT), os.environ.get("PYTHONPATH", "")]),
        "NVFLARE_LAZY_SCRATCH": str(directory / "scratch"),
        _OUTPUT: str(output),
    }
    done = subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True, timeout=300)
    if not output.exists():
        raise RuntimeError(f"{command} wrote nothing:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    counted: dict[str, Any] = json.loads(output.read_text())
    return counted


def main() -> None:
    """Trace and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", action="store_true", help="also name the modules")
    parser.add_argument("--functions", action="store_true", help="also name the modules and their functions")
    options = parser.parse_args()
    walks = {
        "one received tensor, both ends have the package": trace_receive(sender_has_package=True),
        "one received tensor, NVFlare's format": trace_receive(sender_has_package=False),
        "one round, on the server": trace_round(),
    }
    print(f"{'':50}{'modules':>8}{'functions':>10}{'calls':>8}{'calls between modules':>23}")
    for name, walk in walks.items():
        print(
            f"{name:50}{len(walk['modules']):8}{walk['functions']:10}{walk['calls']:8}{walk['crossings']:23}",
            flush=True,
        )
    last = walks["one round, on the server"]
    created = {name: module for name, module in descriptions().items() if name in last["created"]}
    on_the_wire = sorted(name for name, module in created.items() if module.startswith(f"{PACKAGE}.transport."))
    in_tensors = sorted(name for name, module in created.items() if module == f"{PACKAGE}.tensors._storage")
    forms = sorted(created.keys() - {*on_the_wire, *in_tensors})
    print(f"\nforms of a tensor's description between a result and its checkpoint: {len(forms)} ({', '.join(forms)})")
    print(f"on the wire: {len(on_the_wire)} ({', '.join(on_the_wire)}); in lazy tensors: {', '.join(in_tensors)}")
    print(f"safetensors headers parsed in that round: {last['header_parses']}")
    if options.modules or options.functions:
        for name, walk in walks.items():
            print(f"\n{name}:")
            for module, functions in walk["modules"].items():
                print(f"  {module}")
                for function, count in functions.items() if options.functions else ():
                    print(f"    {count:4} {function}")


if __name__ == "__main__":
    main()

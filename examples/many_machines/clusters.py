# SPDX-License-Identifier: Apache-2.0
"""Starts and ends a Ray cluster, a Dask cluster and an S3 server on loopback."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
HOST = "127.0.0.1"
# One address for each node. Ray replaces 127.0.0.1 by the address of the network.
RAY_HOSTS = ("127.0.0.2", "127.0.0.3")
STORE_BYTES = 80 << 20  # Ray requires 75 MiB. No tensors pass through it.
SECONDS = 120.0
_RAY_RUNS = "will now block forever"
WORKERS = 2


def free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        port: int = found.getsockname()[1]
        return port


@contextmanager
def running(command: Sequence[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in its own process group, and end the whole group."""
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        # A second Ctrl-C would leave processes behind.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                break
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                continue
        process.wait()
        signal.signal(signal.SIGINT, signal.default_int_handler)


def wait_until(ready: Callable[[], bool], processes: Sequence[subprocess.Popen[bytes]], what: str, log: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not ready():
        if any(process.poll() is not None for process in processes):
            raise RuntimeError(f"{what} ended: {log.read_text(errors='replace')[-2000:]}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not start within {SECONDS:.0f} s; see {log}")
        time.sleep(0.2)


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


@contextmanager
def s3_store(directory: Path) -> Iterator[str]:
    """Run moto's S3 server, and yield the URL of a bucket. This process and those it starts find the server."""
    port, log = free_port(), directory / "s3.txt"
    with running([sys.executable, "-m", "moto.server", "-H", HOST, "-p", str(port)], log) as process:
        wait_until(lambda: accepts(port), [process], "the S3 server", log)
        os.environ.update(
            AWS_ENDPOINT_URL=f"http://{HOST}:{port}",
            AWS_ACCESS_KEY_ID="example",
            AWS_SECRET_ACCESS_KEY="example",  # any is accepted
            AWS_DEFAULT_REGION="us-east-1",
        )
        import s3fs

        s3fs.S3FileSystem().mkdir("federation")
        yield "s3://federation"


@contextmanager
def file_store(directory: Path) -> Iterator[str]:
    """Yield a directory, which all processes of this machine share."""
    yield str(directory / "store")


@contextmanager
def ray_cluster(directory: Path) -> Iterator[dict[str, Any]]:
    """Start two Ray nodes of one core each, and yield the executor that uses them."""
    # Its processes and this one recognize each other by a token.
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ.update(token)
    environment = {**token, "RAY_raylet_start_wait_time_s": str(int(SECONDS))}
    import ray

    port, log = free_port(), directory / "ray.txt"
    ray_command = str(Path(sys.executable).with_name("ray"))
    limits = [f"--object-store-memory={STORE_BYTES}", "--num-cpus=1", "--disable-usage-stats", "--block"]
    address = f"{RAY_HOSTS[0]}:{port}"
    with ExitStack() as stack:
        # The path of a socket is limited to 107 bytes.
        short = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True))
        head = [ray_command, "start", "--head", f"--port={port}", f"--node-ip-address={RAY_HOSTS[0]}", *limits]
        processes = [
            stack.enter_context(
                running([*head, f"--temp-dir={short}", "--include-dashboard=false"], log, **environment)
            )
        ]
        wait_until(lambda: _RAY_RUNS in log.read_text(), processes, "the first Ray node", log)
        second = [ray_command, "start", f"--address={address}", f"--node-ip-address={RAY_HOSTS[1]}", *limits]
        second_log = directory / "ray-2.txt"
        processes.append(stack.enter_context(running(second, second_log, **environment)))
        wait_until(lambda: _RAY_RUNS in second_log.read_text(), processes, "the second Ray node", second_log)
        on_sigterm = signal.getsignal(signal.SIGTERM)
        ray.init(address=address, log_to_driver=False, logging_level="error")
        # Ray's own handler aborts this process, which would leave the cluster behind.
        signal.signal(signal.SIGTERM, on_sigterm)
        stack.callback(ray.shutdown)
        yield {"name": "ray", "address": address}


@contextmanager
def dask_cluster(directory: Path) -> Iterator[dict[str, Any]]:
    """Start a Dask scheduler and two workers of one thread each, and yield the executor that uses them."""
    from distributed import Client

    port, log = free_port(), directory / "dask.txt"
    address = f"tcp://{HOST}:{port}"
    python = [sys.executable, "-m"]
    with ExitStack() as stack:
        scheduler = [
            "distributed.cli.dask_scheduler",
            "--host",
            HOST,
            "--port",
            str(port),
            "--no-dashboard",
            "--no-show",
        ]
        processes = [stack.enter_context(running([*python, *scheduler], log))]
        worker = ["distributed.cli.dask_worker", address, "--nthreads", "1", "--no-nanny", "--no-dashboard"]
        worker += ["--memory-limit", "0", "--host", HOST, "--local-directory", str(directory)]
        for number in range(WORKERS):
            path = directory / f"dask-{number}.txt"
            processes.append(stack.enter_context(running([*python, *worker], path)))
        wait_until(lambda: accepts(port), processes, "the Dask scheduler", log)
        with Client(address, set_as_default=False) as client:
            client.wait_for_workers(WORKERS, timeout=SECONDS)
        yield {"name": "dask", "address": address}


@contextmanager
def processes(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield an executor of two processes, which aggregation starts and ends itself."""
    yield {"name": "processes", "max_workers": WORKERS}


STORES = {"s3": s3_store, "files": file_store}
ENGINES = {"processes": processes, "dask": dask_cluster, "ray": ray_cluster}

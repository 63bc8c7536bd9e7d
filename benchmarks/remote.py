# SPDX-License-Identifier: Apache-2.0
"""Reading a model by URL, next to a plain download with the client library (fsspec and aiohttp).

    python -m benchmarks.remote                 # 4 GiB
    python -m benchmarks.remote --gib 1 --rounds 3

A server in another process on loopback answers ranges with `sendfile`, from the page cache. Here, each tensor is read
once, into one buffer. The plain download gets the file in one stream and discards it. Both run in turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import tempfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path

import fsspec
import torch

import nvflare_lazy
from benchmarks.machine import describe_machine
from benchmarks.measuring import GIB, MIB, PeakMemory, in_turns, show_rates

PLAIN = "plain download"
# Of a tensor that is read at once.
_BUFFER_BYTES = 64 * MIB


class _Ranges(BaseHTTPRequestHandler):
    """Sends a file, or a range of it, from the current directory."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, *, has_body: bool) -> None:
        with open(self.path.lstrip("/"), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            start = int(asked[1]) if asked else 0
            end = min(int(asked[2]) + 1, size) if asked and asked[2] else size
            self.send_response(206 if asked else 200)
            if asked:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("ETag", '"1"')
            self.send_header("Content-Length", str(end - start))
            self.end_headers()
            self.wfile.flush()
            while has_body and start < end:
                start += os.sendfile(self.connection.fileno(), file.fileno(), start, end - start)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def _serve(folder: str, port: Connection) -> None:
    os.chdir(folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Ranges) as server:
        port.send(server.server_address[1])
        server.serve_forever()


class _Nowhere:
    """A file that discards its content, with the methods by which fsspec recognizes a file."""

    def write(self, data: bytes) -> int:
        return len(data)

    def read(self) -> bytes:
        return b""

    def tell(self) -> int:
        return 0

    def close(self) -> None:
        """Nothing is open."""


def download(url: str) -> None:
    """Get a file with the client library."""
    fsspec.filesystem("http", skip_instance_cache=True).get_file(url, _Nowhere())


def read(url: str) -> None:
    """Read every tensor of a model once."""
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    for entry in nvflare_lazy.open(url).entries.values():
        for offset in range(0, entry.nbytes, _BUFFER_BYTES):
            count = min(_BUFFER_BYTES, entry.nbytes - offset)
            entry.rows().read_into(buffer[:count], offset)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print("\n".join(f"{name}: {value}" for name, value in describe_machine().items()))
    one = torch.randn(int(options.gib * GIB) // 4 // options.tensors)
    with tempfile.TemporaryDirectory(prefix="nvflare_lazy_bench_") as folder:
        path = Path(folder, "model.safetensors")
        nvflare_lazy.save({f"layer.{index}.weight": one for index in range(options.tensors)}, path)
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        server = context.Process(target=_serve, args=(folder, theirs), daemon=True)
        server.start()
        try:
            url = f"http://127.0.0.1:{ours.recv()}/{path.name}"
            with PeakMemory() as memory:
                read(url)
            print(f"a model of {options.gib:g} GiB; RssAnon of reading it: {memory.growth / MIB:.0f} MiB")
            rivals = {"nvflare_lazy.open(url)": lambda: read(url), PLAIN: lambda: download(url)}
            show_rates(in_turns(rivals, options.rounds), path.stat().st_size, PLAIN)
        finally:
            server.terminate()
            server.join()


if __name__ == "__main__":
    main()

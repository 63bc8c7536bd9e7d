# SPDX-License-Identifier: Apache-2.0
"""Servers on loopback: one for files over HTTP with ranges, an S3 one, and a proxy with faults for both."""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class _Quiet(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request, client_address):
        """Clients close connections in the middle, and so do faults."""


@contextmanager
def _serving(handler):
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass
class WebServer:
    """Files by path, and how they are served.

    Attributes:
        files: The contents by path, such as "/a/model.safetensors".
        ranges: Whether requests for ranges are answered with ranges.
        etag: Whether there are ETags.
        modified: The value of Last-Modified, or None.
        if_match: Whether If-Match is evaluated.
        redirects: For each path, another URL.
        requests: Method, path and range of each request.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    ranges: bool = True
    etag: bool = True
    modified: str | None = None
    if_match: bool = True
    redirects: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    url: str = ""
    sent: int = 0

    @contextmanager
    def running(self):
        web = self

        class Handler(_Quiet):
            def do_GET(self):
                path = unquote(urlsplit(self.path).path)
                web.requests.append((self.command, path, self.headers.get("Range")))
                if path in web.redirects:
                    self.answer(302, Location=web.redirects[path])
                elif path.endswith("/"):
                    self._list(path)
                elif path in web.files:
                    self._file(web.files[path])
                else:
                    self.answer(404)

            do_HEAD = do_GET  # noqa: N815

            def _list(self, path):
                names = {name[len(path) :].partition("/")[0] for name in web.files if name.startswith(path)}
                page = "".join(f'<a href="{name}">{name}</a>' for name in sorted(names))
                self.answer(200 if names else 404, page.encode(), Content_Type="text/html")

            def _file(self, data):
                etag = f'"{hashlib.sha256(data).hexdigest()}"'
                headers = {"ETag": etag} if web.etag else {}
                if web.modified is not None:
                    headers["Last-Modified"] = web.modified
                if web.if_match and self.headers.get("If-Match", etag) != etag:
                    self.answer(412)
                    return
                wanted = _RANGE.fullmatch(self.headers.get("Range", ""))
                if wanted is None or not web.ranges:
                    self.answer(200, data, **headers)
                    return
                start, end = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
                if start > end:
                    self.answer(416)
                    return
                web.sent += end + 1 - start
                self.answer(206, data[start : end + 1], Content_Range=f"bytes {start}-{end}/{len(data)}", **headers)

        with _serving(Handler) as port:
            self.url = f"http://127.0.0.1:{port}"
            yield self


@dataclass
class FaultyProxy:
    """Forwards requests to a server, with faults.

    Attributes:
        target: Host and port of the server.
        faults: For each of the next requests for ranges: "reset", "reset-midway", "short", "stall", "slow", a status,
            or None. More requests than faults have none.
        retry_after: The header of statuses.
        times: When each request for a range began.
    """

    target: str
    faults: list[str | int | None] = field(default_factory=list)
    retry_after: str | None = None
    methods: tuple[str, ...] = ("GET",)
    times: list[float] = field(default_factory=list)
    url: str = ""

    @contextmanager
    def running(self):
        proxy = self
        lock = threading.Lock()

        class Handler(_Quiet):
            def do_GET(self):
                fault = None
                if self.command in proxy.methods and ("Range" in self.headers or "HEAD" in proxy.methods):
                    with lock:
                        proxy.times.append(time.monotonic())
                        fault = proxy.faults.pop(0) if proxy.faults else None
                if fault == "reset":
                    self._reset()
                elif isinstance(fault, int):
                    headers = {} if proxy.retry_after is None else {"Retry_After": proxy.retry_after}
                    self.answer(fault, **headers)
                else:
                    self._forward(fault)

            do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

            def _reset(self):
                self.close_connection = True
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()

            def _forward(self, fault):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                upstream = http.client.HTTPConnection(proxy.target)
                upstream.request(self.command, self.path, body, dict(self.headers))
                response = upstream.getresponse()
                data = response.read()
                self.send_response(response.status)
                for name, value in response.getheaders():
                    if name.lower() not in ("connection", "transfer-encoding", "server", "date", "content-length"):
                        self.send_header(name, value)
                length = response.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
                if length is not None:
                    self.send_header("Content-Length", length)
                self.end_headers()
                upstream.close()
                half = len(data) // 2
                with suppress(OSError):
                    if fault in ("reset-midway", "short", "stall"):
                        self.wfile.write(data[:half])
                        self.wfile.flush()
                        if fault == "reset-midway":
                            self._reset()
                        elif fault == "stall":
                            time.sleep(10)
                        self.close_connection = True
                    elif fault == "slow":
                        for at in range(0, len(data), max(len(data) // 5, 1)):
                            self.wfile.write(data[at : at + max(len(data) // 5, 1)])
                            self.wfile.flush()
                            time.sleep(0.1)
                    else:
                        self.wfile.write(data)

        with _serving(Handler) as port:
            self.url = f"http://127.0.0.1:{port}"
            yield self


_S3 = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@contextmanager
def s3_server():
    """Run an S3 server (moto) as a process, and yield its address; its contents are gone with it."""
    process = subprocess.Popen(
        [sys.executable, "-c", _S3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ.copy(),
    )
    try:
        line = process.stdout.readline()
        while not line.strip().isdigit():
            assert line, "moto's server did not start"
            line = process.stdout.readline()
        yield f"127.0.0.1:{int(line)}"
    finally:
        process.kill()
        process.stdout.close()
        process.stdin.close()
        process.wait()

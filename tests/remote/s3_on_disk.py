# SPDX-License-Identifier: Apache-2.0
"""An S3-compatible server on loopback that keeps its objects on disk, so that it can be killed, and fails on request.

It knows what clients use to read, write and list objects: single and multipart uploads, ranges, and listings.

    python -m tests.remote.s3_on_disk DIRECTORY [PORT]      prints its port

`POST /_faults` sets the faults, such as `[{"method": "PUT", "match": "partNumber=2", "action": "500", "times": 3}]`.
The actions are a status, "reset", "half" (reset after half of the body), "corrupt" (another byte is stored), "slow" and
"hang".
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

_ETAG_BYTES = 64


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, directory: Path, port: int) -> None:
        self.objects, self.uploads = directory / "objects", directory / "uploads"
        self.objects.mkdir(parents=True, exist_ok=True)
        self.uploads.mkdir(exist_ok=True)
        self.faults: list[dict[str, object]] = []
        self.log: list[str] = []
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", port), _Handler)

    def handle_error(self, request, client_address) -> None:
        """A client that went away is what tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    disable_nagle_algorithm = True

    def handle_any(self) -> None:
        parts = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        self.bucket, _, self.key = unquote(parts.path).lstrip("/").partition("/")
        if self.bucket == "_faults":
            self.server.faults = json.loads(self._body())
            return self._answer(200)
        if self.bucket == "_log":
            return self._answer(200, json.dumps(self.server.log).encode())
        action = self._fault(f"{self.command} {self.path}")
        if action == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            self.close_connection = True
            return self.connection.close()
        if action == "hang":
            time.sleep(600)
        if action == "slow":
            time.sleep(0.05)
        if action == "half":
            self.rfile.read(int(self.headers.get("Content-Length", 0)) // 2)
            self.close_connection = True
            return self.connection.shutdown(socket.SHUT_RDWR)
        body = self._body()
        if action is not None and action.isdigit():
            return self._error(
                int(action), {"500": "InternalError", "403": "AccessDenied"}.get(action, "InvalidRequest")
            )
        if action == "corrupt" and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        elif "Content-MD5" in self.headers and self._md5_header() != hashlib.md5(body).digest():
            return self._error(400, "BadDigest")
        if self.bucket != "bucket":
            return self._error(404, "NoSuchBucket")
        getattr(self, f"_{self.command.lower()}")(body)
        return None

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any  # noqa: N815

    def log_message(self, *args: object) -> None:
        pass

    def _md5_header(self) -> bytes:
        import base64

        return base64.b64decode(self.headers["Content-MD5"])

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _fault(self, request: str) -> str | None:
        with self.server.lock:
            self.server.log.append(request)
            for fault in self.server.faults:
                if fault["method"] == self.command and str(fault["match"]) in request and fault.get("times", 1):
                    fault["times"] = int(fault.get("times", 1)) - 1
                    return str(fault["action"])
        return None

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _error(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

    def _xml(self, name: str, content: str) -> None:
        text = f'<?xml version="1.0"?><{name} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{content}</{name}>'
        self._answer(200, text.encode(), Content_Type="application/xml")

    def _object(self, key: str | None = None) -> Path:
        return self.server.objects / quote(self.key if key is None else key, safe="")

    def _store(self, pieces: list[Path] | bytes, etag: str) -> None:
        hidden = self.server.uploads / secrets.token_hex(8)
        with open(hidden, "wb") as file:
            file.write(etag.encode().ljust(_ETAG_BYTES))
            if isinstance(pieces, bytes):
                file.write(pieces)
            else:
                for piece in pieces:
                    with open(piece, "rb") as part:
                        shutil.copyfileobj(part, file, 1 << 20)
        os.replace(hidden, self._object())

    def _put(self, body: bytes) -> None:
        etag = hashlib.md5(body).hexdigest()
        if "uploadId" in self.query:
            upload = self.server.uploads / self.query["uploadId"]
            if not upload.is_dir():
                return self._error(404, "NoSuchUpload")
            (upload / self.query["partNumber"]).write_bytes(body)
        else:
            self._store(body, etag)
        return self._answer(200, ETag=f'"{etag}"')

    def _post(self, body: bytes) -> None:
        if "uploads" in self.query:
            upload_id = secrets.token_hex(8) + "-upload"
            (self.server.uploads / upload_id).mkdir()
            (self.server.uploads / upload_id / "key").write_text(self.key)
            return self._xml("InitiateMultipartUploadResult", f"<UploadId>{upload_id}</UploadId>")
        upload = self.server.uploads / self.query["uploadId"]
        if not upload.is_dir():
            return self._error(404, "NoSuchUpload")
        numbers = [int(number) for number in re.findall(rb"<PartNumber>(\d+)</PartNumber>", body)]
        parts = [upload / str(number) for number in sorted(numbers)]
        digests = b"".join(hashlib.md5(part.read_bytes()).digest() for part in parts)
        etag = f"{hashlib.md5(digests).hexdigest()}-{len(parts)}"
        self._store(parts, etag)
        shutil.rmtree(upload)
        return self._xml("CompleteMultipartUploadResult", f"<ETag>&quot;{etag}&quot;</ETag>")

    def _delete(self, body: bytes) -> None:
        if "uploadId" in self.query:
            shutil.rmtree(self.server.uploads / self.query["uploadId"], ignore_errors=True)
        else:
            self._object().unlink(missing_ok=True)
        self._answer(204)

    def _head(self, body: bytes) -> None:
        if not self.key:
            return self._answer(200)
        return self._get(body)

    def _get(self, body: bytes) -> None:
        if not self.key:
            return self._list()
        try:
            file = open(self._object(), "rb")  # noqa: SIM115
        except FileNotFoundError:
            return self._error(404, "NoSuchKey")
        with file:
            size = os.fstat(file.fileno()).st_size - _ETAG_BYTES
            etag = file.read(_ETAG_BYTES).decode().strip()
            begin, end, status = 0, size, 200
            headers = {"ETag": f'"{etag}"', "Last_Modified": "Thu, 01 Jan 2026 00:00:00 GMT", "Accept_Ranges": "bytes"}
            if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                begin, end, status = int(match[1]), min(size, int(match[2] or size) + 1), 206
                headers["Content_Range"] = f"bytes {begin}-{end - 1}/{size}"
            file.seek(_ETAG_BYTES + begin)
            content = b"" if self.command == "HEAD" else file.read(end - begin)
            self._answer(status, content, Content_Length=str(end - begin), **headers)
        return None

    def _list(self) -> None:
        if "uploads" in self.query:
            uploads = [path for path in self.server.uploads.iterdir() if path.is_dir()]
            found = [(escape((path / "key").read_text()), path.name) for path in uploads]
            items = "".join(f"<Upload><Key>{key}</Key><UploadId>{number}</UploadId></Upload>" for key, number in found)
            return self._xml("ListMultipartUploadsResult", items)
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        keys, prefixes = [], set()
        for path in sorted(self.server.objects.iterdir()):
            key = unquote(path.name)
            if not key.startswith(prefix):
                continue
            if delimiter and delimiter in key[len(prefix) :]:
                prefixes.add(prefix + key[len(prefix) :].partition(delimiter)[0] + delimiter)
                continue
            size = path.stat().st_size - _ETAG_BYTES
            etag = path.open("rb").read(_ETAG_BYTES).decode().strip()
            keys.append(
                f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                f"<ETag>&quot;{etag}&quot;</ETag><Size>{size}</Size></Contents>"
            )
        common = "".join(f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in sorted(prefixes))
        keys_and_more = f"<KeyCount>{len(keys) + len(prefixes)}</KeyCount><IsTruncated>false</IsTruncated>"
        return self._xml("ListBucketResult", keys_and_more + "".join(keys) + common)


class S3OnDisk:
    """A server in its own process, which can be killed and started again on its port with its objects."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.port = 0
        self.start()

    def start(self) -> None:
        """Start the process, and wait until it answers."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.remote.s3_on_disk", str(self.directory), str(self.port)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def kill(self) -> None:
        """End the process as `kill -9` does."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def endpoint(self) -> str:
        """The URL of the service."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs to use it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "user",
            "AWS_SECRET_ACCESS_KEY": "a-secret-key",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def fail(self, method: str, match: str, action: str, times: int = 1) -> None:
        """Make the next requests fail whose method and URL match, and no others."""
        self._set_faults([{"method": method, "match": match, "action": action, "times": times}])

    def clear(self) -> None:
        """Remove all objects, uploads and faults."""
        self._set_faults([])
        for upload in self.unfinished():
            shutil.rmtree(self.directory / "uploads" / upload)
        for path in (self.directory / "objects").iterdir():
            path.unlink()

    def _set_faults(self, faults: list[dict[str, object]]) -> None:
        urllib.request.urlopen(f"{self.endpoint}/_faults", data=json.dumps(faults).encode()).close()

    def requests(self) -> list[str]:
        """Return the method and URL of each request so far."""
        with urllib.request.urlopen(f"{self.endpoint}/_log") as answer:
            return json.loads(answer.read())

    def keys(self) -> list[str]:
        """Return the names of all objects."""
        return sorted(unquote(path.name) for path in (self.directory / "objects").iterdir())

    def content(self, key: str) -> bytes:
        """Return the bytes of an object."""
        return (self.directory / "objects" / quote(key, safe="")).read_bytes()[_ETAG_BYTES:]

    def unfinished(self) -> list[str]:
        """Return the multipart uploads that were neither completed nor aborted."""
        return sorted(path.name for path in (self.directory / "uploads").iterdir() if path.is_dir())


def main() -> None:
    """Run the server."""
    server = _Server(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()

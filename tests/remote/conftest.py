# SPDX-License-Identifier: Apache-2.0
"""Checkpoints by URL: the stores that the tests of this directory share."""

from __future__ import annotations

import pytest

from nvflare_lazy.remote import _retries
from tests.remote.servers import FaultyProxy, WebServer, s3_server


@pytest.fixture
def web():
    """A web server without files."""
    with WebServer().running() as server:
        yield server


@pytest.fixture
def faulty(web):
    """A proxy in front of the web server."""
    with FaultyProxy(web.url.removeprefix("http://")).running() as proxy:
        yield proxy


@pytest.fixture
def soon(monkeypatch):
    """Give up after a second."""
    monkeypatch.setattr(_retries, "OPEN_SECONDS", 0.5)
    monkeypatch.setattr("nvflare_lazy.remote.file.OPEN_SECONDS", 0.5)
    monkeypatch.setattr("nvflare_lazy.remote.file.READ_SECONDS", 1.0)


@pytest.fixture(scope="session")
def s3_address():
    """The address of an S3 server."""
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    with s3_server() as address:
        yield address


@pytest.fixture
def s3(s3_address, monkeypatch):
    """A proxy in front of the S3 server, which s3:// leads to."""
    with FaultyProxy(s3_address).running() as proxy:
        for name, value in (
            ("AWS_ENDPOINT_URL", proxy.url),
            ("AWS_ACCESS_KEY_ID", "test"),
            ("AWS_SECRET_ACCESS_KEY", "test"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
        ):
            monkeypatch.setenv(name, value)
        import s3fs

        # Its instances have the address of the proxy of an earlier test.
        s3fs.S3FileSystem.clear_instance_cache()
        fs = s3fs.S3FileSystem()
        if not fs.exists("models"):
            fs.mkdir("models")
        yield proxy
        s3fs.S3FileSystem.clear_instance_cache()

# SPDX-License-Identifier: Apache-2.0
"""Reading survives servers and connections that fail for a while, and gives up with an error that names both."""

from __future__ import annotations

import os
import time
import traceback

import fsspec
import pytest

from nvflare_lazy.errors import RemoteError
from nvflare_lazy.remote import RemoteFile, _http
from nvflare_lazy.remote._retries import _pause
from nvflare_lazy.remote.url import http_status

DATA = os.urandom((9 << 20) + 12_345)
FAULTS = ["reset", "reset-midway", "short", "slow", 500, 503, 429]


@pytest.fixture
def file(web, faulty):
    web.files["/model"] = DATA
    return RemoteFile(f"{faulty.url}/model?key=secret")


@pytest.mark.parametrize("fault", FAULTS)
def test_http(file, faulty, fault):
    faulty.faults = [fault, None, fault]
    assert file.source(0, len(DATA)).read() == DATA
    faulty.faults = [fault, fault]
    assert file.source(5_000, 100).read() == DATA[5_000:5_100]
    assert len(faulty.faults) == (1 if fault == "slow" else 0)


def test_stalled_connections(web, faulty, monkeypatch):
    monkeypatch.setattr(_http, "_STALLED_SECONDS", 0.3)
    web.files["/model"] = DATA
    # A new session, which has the shorter limit.
    fsspec.get_filesystem_class("http").clear_instance_cache()
    file = RemoteFile(f"{faulty.url}/model")
    faulty.faults = ["stall"]
    started = time.monotonic()
    assert file.source(0, 100).read() == DATA[:100]
    assert time.monotonic() - started < 5
    fsspec.get_filesystem_class("http").clear_instance_cache()


def test_retry_after(file, faulty):
    faulty.retry_after = "1"
    faulty.faults = [429]
    assert file.source(0, 100).read() == DATA[:100]
    assert faulty.times[1] - faulty.times[0] >= 1


def test_pauses_grow_and_have_a_limit():
    pauses = [_pause(ConnectionResetError(), tries) for tries in (1, 4, 100)]
    assert 0.05 <= pauses[0] <= 0.1
    assert 0.4 <= pauses[1] <= 0.8
    assert 5 <= pauses[2] <= 10


@pytest.mark.parametrize("value", ["0", "Thu, 19 Nov 2020 20:00:00 GMT", "soon", "\u00b2"])
def test_a_server_that_wants_no_pause(value):
    error = ConnectionResetError()
    error.headers = {"Retry-After": value}
    assert _pause(error, 4) >= 0.4


@pytest.mark.parametrize(
    ("fault", "cause"), [("reset", "Server disconnected|reset"), ("short", "payload|bytes"), (503, "HTTP 503")]
)
def test_giving_up(file, faulty, soon, fault, cause):
    faulty.faults = [fault] * 50
    with pytest.raises(RemoteError, match=rf"cannot read http://127.0.0.1:\d+/model: .*({cause}).*\(\d+ tries") as info:
        file.source(0, 100).read()
    assert "secret" not in str(info.value)
    faulty.faults = []
    assert file.source(0, 100).read() == DATA[:100]


def test_errors_that_last(file, faulty):
    faulty.faults = [403]
    with pytest.raises(RemoteError, match=r"access denied .* check the credentials") as info:
        file.source(0, 100).read()
    assert len(faulty.times) == 1
    assert http_status(info.value) == 403
    faulty.faults = [403] * 3
    with pytest.raises(RemoteError, match="access denied") as info:
        file.source(0, len(DATA)).read()
    assert http_status(info.value) == 403
    # A traceback has the errors of the client library, whose texts have the whole URL.
    assert "Forbidden" in (printed := "".join(traceback.format_exception(info.value)))
    assert "secret" not in printed


def test_no_server(soon, web, faulty):
    with pytest.raises(RemoteError, match=r"cannot open http://127.0.0.1:9/m: .* check the network") as info:
        RemoteFile("http://me:secret@127.0.0.1:9/m")
    assert "secret" not in str(info.value)


@pytest.mark.parametrize(
    "fault",
    ["reset-midway", *(pytest.param(fault, marks=pytest.mark.slow) for fault in FAULTS if fault != "reset-midway")],
)
def test_s3(s3, fault):
    import s3fs

    fs = s3fs.S3FileSystem()
    fs.pipe("models/faults", DATA)
    file = RemoteFile("s3://models/faults")
    s3.faults = [fault, None, fault]
    assert file.source(0, len(DATA)).read() == DATA
    s3.faults = [fault, fault]
    assert file.source(5_000, 100).read() == DATA[5_000:5_100]
    assert len(s3.faults) == (1 if fault == "slow" else 0)
    fs.rm_file("models/faults")

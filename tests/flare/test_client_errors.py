# SPDX-License-Identifier: Apache-2.0
"""The line of a client's last error: found in what its processes log, and read by the server as untrusted text."""

from __future__ import annotations

import logging
import os
import queue

import pytest

from nvflare_lazy.flare.client_errors import ClientErrors, ErrorRecorder, LastError

CHAINED = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    load()
ValueError: no data

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 5, in <module>
    raise RuntimeError("cannot train")
RuntimeError: cannot train
"""
LOG = f"""2026-11-19 16:11:28,335 - TaskScriptRunner - ERROR - {CHAINED}
2026-11-19 16:11:28,335 - TaskScriptRunner - ERROR - fire abort event
"""


@pytest.mark.parametrize(
    ("messages", "line"),
    [
        ([], ""),
        (["trainer process group exited (rc=-9)"], "trainer process group exited (rc=-9)"),
        (["[identity=site-2, run=7]: timed out after 5s"], "timed out after 5s"),
        ([CHAINED, "fire abort event"], "RuntimeError: cannot train"),
        ([f"unavailable (reason: aborted, {CHAINED}); failing task 'train'"], "RuntimeError: cannot train"),
        (["Traceback (most recent call last):\n  cut"], ""),
        (["one", "two\nwith details"], "two"),
        (["x" * 10_000], "x" * 400),
    ],
)
def test_the_line_of_an_error(messages, line):
    """The last exception, or else the first line of the last message, without NVFlare's fields."""
    last = LastError()
    for message in messages:
        last.add(message, is_error=True)
    assert last.line == line


def test_the_output_of_a_trainer_that_hangs(monkeypatch):
    """NVFlare logs it line by line, as information, and other threads log in between; no line is sent twice."""
    sent: queue.Queue[str] = queue.Queue()
    recorder = ErrorRecorder(sent.put)
    monkeypatch.setattr("nvflare_lazy.flare.client_errors._SETTLE_SECONDS", 0)
    root, trainer, other = logging.getLogger(), logging.getLogger("trainer"), logging.getLogger("other")
    monkeypatch.setattr(root, "level", logging.INFO)
    recorder.start()
    try:
        for line in CHAINED.splitlines():
            trainer.info("%s", line)
            other.info("RuntimeError: of something else, and no error")
        # It may have been sent before the traceback was complete.
        lines = [sent.get(timeout=60)]
        while lines[-1] != "RuntimeError: cannot train":
            lines.append(sent.get(timeout=60))
        assert lines[:-1] in ([], ["ValueError: no data"])
        for _ in range(2):  # the same error in two tasks
            recorder.forget()
            assert recorder.line == ""
            try:
                raise KeyError("layer")
            except KeyError:
                other.exception("it failed")
            assert recorder.line == "KeyError: 'layer'"
            assert sent.get(timeout=60) == "KeyError: 'layer'"
    finally:
        recorder.stop()
    other.error("after the run")
    assert recorder.line == "KeyError: 'layer'"
    assert sent.empty()


def test_a_line_that_a_client_sends():
    """Its text is quoted and cut, and belongs to one task; without a task, no text is kept."""
    errors = ClientErrors("simulate_job")
    errors.add("site-1", "too early")
    errors.on_task_sent("site-1")
    assert errors.explain("site-1") == "; see site-1/log.txt"
    errors.add("site-1", "ValueError: \x1b[2J\n2026 - ServerRunner - ERROR - forged")
    assert errors.explain("site-1") == r""": 'ValueError: \x1b[2J\n2026 - ServerRunner - ERROR - forged'"""
    errors.add("site-1", "x" * (1 << 20))
    assert len(errors.explain("site-1")) < 150
    for wrong in (None, 3, b"bytes", " ", ["text"]):
        errors.on_task_sent("site-1")
        errors.add("site-1", wrong)
        assert errors.explain("site-1") == "; see site-1/log.txt"
    assert ClientErrors("7c3f").explain("site-1") == "; see 7c3f/log.txt in its workspace"


def test_the_log_that_nvflare_streams(tmp_path, monkeypatch):
    """What a client logged before its task does not explain the failure of the task; only regular files are read."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    errors = ClientErrors("7c3f")
    log = tmp_path / "7c3f" / "site-1" / "error_log.txt"
    log.parent.mkdir(parents=True)
    log.write_text(LOG.replace("cannot train", "an earlier one"))
    errors.on_task_sent("site-1")
    unknown = "; see 7c3f/log.txt in its workspace"
    assert errors.explain("site-1") == unknown
    with log.open("a") as file:
        file.write(LOG)
    assert errors.explain("site-1") == ": 'RuntimeError: cannot train'"
    with log.open("a") as file:
        file.write("2026-11-19 16:12:00,000 - ClientRunner - ERROR - [identity=site-1, run=7c3f] - " + "x" * 200_000)
    assert errors.explain("site-1") == unknown  # only the end of so much is read
    for client in ("../7c3f/site-1", "site-1/../site-1", "..", ""):
        assert errors.explain(client) == unknown
    log.unlink()
    os.mkfifo(log)
    assert errors.explain("site-1") == unknown
    log.unlink()
    (tmp_path / "elsewhere").write_text(LOG)
    log.symlink_to(tmp_path / "elsewhere")
    assert errors.explain("site-1") == unknown

# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, driven through its DevTools protocol over two pipes."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: The program, or None if it is not installed.
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One page in a browser."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._count = 0
        self._session = ""
        self._unread = b""
        #: Requests, console messages and errors of the page.
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def open(self, path: Path, *, width: int, dark: bool = False) -> None:
        """Load a file as a window of some width shows it, and wait until it is complete."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._receive()

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"])
        return result["result"].get("value")

    def accessible(self) -> list[tuple[str, str]]:
        """Return role and name of all nodes of the accessibility tree that are not ignored."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node.get("ignored")
        ]

    def screenshot(self, path: Path) -> None:
        """Write a picture of the whole page."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            part = os.read(self._from, 1 << 20)
            if not part:
                raise RuntimeError("Chromium has ended")
            self._unread += part
        message, _, self._unread = self._unread.partition(b"\0")
        content = json.loads(message)
        if "method" in content:
            self.events.append(content)
        return content


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Start Chromium with a new profile, and end it."""
    assert CHROMIUM is not None
    profile.mkdir(exist_ok=True)
    commands, answers = os.pipe(), os.pipe()
    options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage")
    options += ("--no-first-run", "--disable-background-networking", "--disable-component-update")

    def connect() -> None:
        # Chromium reads commands from descriptor 3 and writes answers to descriptor 4.
        read, write = os.dup(commands[0]), os.dup(answers[1])
        os.dup2(read, 3)
        os.dup2(write, 4)

    process = subprocess.Popen(
        [CHROMIUM, *options, "--remote-debugging-pipe", f"--user-data-dir={profile}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        close_fds=False,
        preexec_fn=connect,
        start_new_session=True,
        env={**os.environ, "HOME": str(profile)},
    )
    os.close(commands[0])
    os.close(answers[1])
    try:
        started = Browser(commands[1], answers[0])
        yield started
        started._session = ""
        started.call("Browser.close")
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(commands[1])
        os.close(answers[0])

# SPDX-License-Identifier: Apache-2.0
"""The page in a headless Chromium: its requests, width and colors, and its content for a screen reader."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvflare_lazy.report import read_job, summarize
from nvflare_lazy.report.page import page
from tests.report.browser import CHROMIUM, browser
from tests.report.jobs import simulated
from tests.report.test_page import EVIL

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("disposable_temporary_directory"),  # Chromium's
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian: apt-get install chromium)"),
]
# Relative luminance and contrast of WCAG 2, of the text in `selector` on the page's background.
_CONTRASTS = """
(() => {
  const channels = (color) => color.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const linear = (value) => (value /= 255) <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const light = (color) => {
    const [red, green, blue] = channels(color).map(linear);
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const ground = light(getComputedStyle(document.body).backgroundColor);
  const contrast = (color) => (Math.max(light(color), ground) + 0.05) / (Math.min(light(color), ground) + 0.05);
  const texts = [...document.querySelectorAll("main :is(p, dt, dd, h2, h3, th, td, summary, caption)")]
    .map((each) => getComputedStyle(each).color);
  const drawn = [...document.querySelectorAll("svg text")].map((each) => getComputedStyle(each).fill);
  return Math.min(...texts.concat(drawn).map(contrast));
})()
"""


def test_the_page_in_a_browser(tmp_path: Path):
    """On a desktop and a phone, light and dark: no request, no error, no horizontal scrolling, readable contrast."""
    workspace = simulated(
        tmp_path / "workspace", clients=["site-1", "site-2", EVIL[:80]], skipped={1: {"site-1": EVIL}}
    )
    path = tmp_path / "report.html"
    path.write_text(page(summarize(read_job(workspace / "server"))), encoding="utf-8")
    with browser(tmp_path / "profile") as chromium:
        grounds = set()
        for dark in (False, True):
            for width in (1280, 390):
                chromium.open(path, width=width, dark=dark)
                requests = [each for each in chromium.events if each["method"] == "Network.requestWillBeSent"]
                assert [each["params"]["request"]["url"] for each in requests] == [path.as_uri()]
                problems = {"Runtime.exceptionThrown", "Log.entryAdded", "Page.javascriptDialogOpening"}
                assert not [each for each in chromium.events if each["method"] in problems]
                assert chromium.evaluate("document.documentElement.scrollWidth") == width
                # The smallest text of a chart, in pixels of the screen.
                smallest = chromium.evaluate(
                    "Math.min(...[...document.querySelectorAll('svg text')].map("
                    "each => [parseFloat(getComputedStyle(each).fontSize), each.getCTM()]).map("
                    "([size, matrix]) => size * Math.hypot(matrix.a, matrix.b)))"
                )
                assert smallest >= 7.5
                assert chromium.evaluate(_CONTRASTS) >= 4.5
                grounds.add(chromium.evaluate("getComputedStyle(document.body).backgroundColor"))
                chromium.screenshot(tmp_path / f"{width}-{dark}.png")
                assert (tmp_path / f"{width}-{dark}.png").stat().st_size > 50_000
        assert len(grounds) == 2

        chromium.open(path, width=1280)
        tree = chromium.accessible()
        names = {role: [name for each, name in tree if each == role] for role in dict(tree)}
        assert names["heading"][0] == "Job simulate_job"
        charts = ["Memory of each process", "Scratch in use", "Time of each round"]
        assert names["image"][:3] == charts
        assert {"banner", "navigation", "main", "contentinfo"} <= names.keys()
        assert {"Rounds", "Skipped results", "Processes"} <= set(names["table"])
        assert "reason" in names["columnheader"]
        text = chromium.evaluate("document.body.innerText")
        for answer in ("site-2\n", "1 client, 1 result", "240.0 MiB in server", "302.0 MiB of scratch"):
            assert answer in text
        # A closed table of numbers opens without a script.
        chromium.evaluate("document.querySelector('summary').click()")
        assert "time of the peak" in chromium.evaluate("document.body.innerText")

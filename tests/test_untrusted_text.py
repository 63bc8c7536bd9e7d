# SPDX-License-Identifier: Apache-2.0
"""Text of clients and files in errors and log lines cannot forge a line, or hide or move text on a terminal."""

from __future__ import annotations

import ast
import importlib
import io
import json
import logging
import pkgutil
from decimal import Decimal
from pathlib import Path

import pytest
import torch
from nvflare.apis.fl_component import FLComponent
from nvflare.fuel.utils.fobs import Decomposer

import nvflare_lazy
from nvflare_lazy import errors
from nvflare_lazy._text import get_logger, quoted
from nvflare_lazy.aggregation import Aggregation
from nvflare_lazy.flare.round_log import RoundLog
from nvflare_lazy.tensors.byte_source import FailedSource
from nvflare_lazy.tensors.lazy_tensor import LazyTensor

FORGED = "2026-01-01 00:00:00 - INFO - all is well"
HOSTILE = f"x\n{FORGED}\r\x1b[2J\u202e\u2028\u200b\x85\x00"
ROOT = Path(nvflare_lazy.__file__).parent
MODULES = sorted(
    name
    for _, name, _ in pkgutil.walk_packages([str(ROOT)], "nvflare_lazy.")
    if not name.endswith(("__main__", "flare.decomposers", "flare.install", "write_initial_model"))
)


def subclasses(base):
    return {base}.union(*map(subclasses, base.__subclasses__()))


ERRORS = sorted(subclasses(errors.NVFlareLazyError), key=lambda error: error.__name__)


def made(error, text):
    return error("header-json", text) if error is errors.SafetensorsError else error(text)


@pytest.mark.parametrize("error", ERRORS)
def test_errors(error):
    """The text of every error is one printable line of limited length; text that is printable stays as it is."""
    assert str(made(error, "a 'b' \\n ü: 日本")) == "a 'b' \\n ü: 日本"
    text = str(made(error, HOSTILE))
    assert text.isprintable()
    assert r"x\n2026" in text
    assert len(str(made(error, "\x00" * 10**6))) < 10_000
    assert repr(made(error, HOSTILE)).isprintable()
    if issubclass(error, OSError):
        assert str(error(2, "No such file", HOSTILE)).isprintable()


@pytest.fixture
def logged():
    """The text that the handlers of the package's loggers have written."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s - %(message)s"))
    logger = logging.getLogger("nvflare_lazy")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield lambda: stream.getvalue()
    logger.removeHandler(handler)
    logger.setLevel(before)


def check_lines(text):
    """No line starts with untrusted text, and all are printable."""
    assert "all is well" in text
    for line in text.removesuffix("\n").split("\n"):
        assert line.isprintable()
        assert line.startswith(("DEBUG - ", "INFO - ", "WARNING - ", "ERROR - ", "  | "))


def components():
    """The classes whose objects log by a logger that NVFlare names after them."""
    for name in MODULES:
        for value in vars(importlib.import_module(name)).values():
            if isinstance(value, type) and issubclass(value, (FLComponent, Decomposer)):
                own_name = getattr(value, "implementation", f"{value.__module__}.{value.__qualname__}")
                if own_name.startswith(f"{name}."):
                    yield own_name


def test_every_logger_is_printable(logged):
    """A module's or component's messages, with or without a traceback, cannot be mistaken for separate log lines."""
    names = [
        name for name in MODULES if isinstance(getattr(importlib.import_module(name), "logger", None), logging.Logger)
    ]
    abstract = {"nvflare_lazy.transport.decomposers.LazyDecomposer"}
    names += sorted(set(components()) - abstract)
    assert len(names) > 20
    for name in names:
        logger = logging.getLogger(name)
        logger.warning("a message of %s", HOSTILE)
        logger.warning(HOSTILE)
        try:
            raise ValueError(HOSTILE)
        except ValueError:
            logger.exception("with a traceback")
        check_lines(logged())


def test_loggers_are_made_in_one_place():
    """No module makes a logger that is not printable."""
    for path in ROOT.rglob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
        found = [node.lineno for node in calls if node.attr == "getLogger"]
        assert not found or path.name == "_text.py" or path.parts[-2:] == ("cli", "aggregate.py"), (path, found)


def test_a_message_is_cut(logged):
    """A peer's error text of 10 MiB is not written to the log."""
    get_logger("nvflare_lazy.cut").warning("%s", "é" * 10_000_000)
    assert len(logged()) < 30_000
    assert "more characters" in logged()


class Liar:
    """An object with a custom representation."""

    def __repr__(self):
        return HOSTILE


class Broken:
    """An object without a representation."""

    def __repr__(self):
        raise ValueError(HOSTILE)


def test_quoted():
    """Every value can be quoted: printable, and short."""
    texts = [HOSTILE, HOSTILE.encode(), [HOSTILE] * 100, {HOSTILE: HOSTILE}, b"x" * 10**7, "x" * 10**7, "\ud800"]
    numbers = [10**5000, -(10**5000), [10**5000], float("nan"), Decimal(1), torch.zeros(2, 2)]
    for value in [*texts, *numbers, Liar(), [Liar()], Broken(), [Broken()]]:
        assert quoted(value).isprintable()
        assert len(quoted(value)) < 4000


def skipped(contributions, **options):
    def aggregate(folder):
        aggregation = Aggregation(on_mismatch="skip", on_non_finite="skip", **options)
        aggregation.run({"a": {"w": torch.ones(2)}, "b": {"w": torch.ones(2)}, **contributions}, folder / "out.st")

    return aggregate


def opened(name, content):
    def open_checkpoint(folder):
        (folder / name).write_bytes(content)
        with pytest.raises(errors.NVFlareLazyError) as caught:
            nvflare_lazy.open(folder / name)
        assert "all is well" in str(caught.value)
        get_logger("nvflare_lazy.opened").warning("%s", caught.value)

    return open_checkpoint


def safetensors(name, **entry):
    header = json.dumps({name: entry}).encode()
    return len(header).to_bytes(8, "little") + header


def round_lines(folder):
    log = RoundLog(folder / "rounds.jsonl", lambda line: get_logger("nvflare_lazy.round").info("%s", line))
    log.start_round(1)
    log.on_result(HOSTILE, 1, 1, on_disk=True)
    log.on_skip(HOSTILE, HOSTILE)
    log.on_verdict(HOSTILE, accepted=False)
    log.end_round()
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["contribution", "round"]
    assert all(line.isprintable() for line in lines)


SOURCES = {
    "contributor": skipped({HOSTILE: {"w": torch.ones(3)}}),
    "surplus tensor": skipped({"c": {"w": torch.ones(2), HOSTILE: torch.ones(2)}}, rule="median"),
    "no tensor": skipped({"c": {HOSTILE: "text"}}),
    "not a name": skipped({"c": {HOSTILE.encode(): torch.ones(1)}}),
    "non-finite": skipped({"c": {"w": torch.ones(2), HOSTILE: torch.tensor([float("nan")])}}),
    "error text": skipped({"c": {"w": LazyTensor(FailedSource(8, OSError(HOSTILE)), torch.float32, (2,))}}),
    "tensor in a header": opened("x.safetensors", safetensors(HOSTILE, dtype="F9")),
    "dtype in a header": opened("x.safetensors", safetensors("w", dtype=HOSTILE, shape=[1], data_offsets=[0, 4])),
    "shard in an index": opened("x.safetensors.index.json", json.dumps({"weight_map": {"w": HOSTILE}}).encode()),
    "client of a round": round_lines,
}


@pytest.mark.parametrize("source", SOURCES)
def test_sources(source, tmp_path, logged):
    """Text from every kind of source, in the error and the log line that report it."""
    SOURCES[source](tmp_path)
    check_lines(logged())

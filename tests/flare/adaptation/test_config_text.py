# SPDX-License-Identifier: Apache-2.0
"""The text of a configuration keeps its comments and format, and has the meaning that was written to it."""

from __future__ import annotations

import json
from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nvflare.fuel.utils.config import ConfigFormat
from nvflare.fuel.utils.config_factory import ConfigFactory

from nvflare_lazy.errors import JobAdaptationError
from nvflare_lazy.flare.adaptation.config_text import ConfigText, Uninterpreted

HOCON = """\
{
  # the version
  format_version = 2
  rounds = ${ROUNDS}
  model = "net.Net"  // of the job
  components = [
    {
      id = "persistor"
      args.model.path = "{model}"   # by its name
      args.name = a.pt
    }
    { id = other, args {} }
  ]
  url = "http://host/#1"
}
"""


def hocon(text: str) -> dict:
    return ConfigFactory.get_config_loader(ConfigFormat.PYHOCON).load_config_from_str(text).to_dict()


def test_hocon_is_read():
    """Dotted keys are objects, and a substitution stays as it is."""
    assert ConfigText(HOCON, strict_json=False).data == {
        "format_version": 2,
        "rounds": Uninterpreted("${ROUNDS}"),
        "model": "net.Net",
        "components": [
            {"id": "persistor", "args": {"model": {"path": "{model}"}, "name": "a.pt"}},
            {"id": "other", "args": {}},
        ],
        "url": "http://host/#1",
    }


def test_changes_keep_everything_else():
    """One value changes, one is added below a dotted key, one goes with its line, and an element is added."""
    text = ConfigText(HOCON, strict_json=False)
    data = deepcopy(text.data)
    data["components"][0]["args"]["model"]["config_type"] = "dict"
    del data["components"][0]["args"]["name"]
    data["components"][1]["args"]["n"] = 1
    data["components"].append({"id": "offload", "args": {"limit": 1}})
    expected = HOCON
    for old, now in (
        ("      args.name = a.pt", '      args.model.config_type = "dict"'),
        ("{ id = other, args {} }", '{ id = other, args {n = 1} }\n    {id = "offload", args = {limit = 1}}'),
    ):
        assert old in expected
        expected = expected.replace(old, now)
    assert text.with_data(data) == expected


def test_unchanged_data_is_unchanged_text():
    """To the last space and end of line."""
    for text in (HOCON, HOCON.replace("\n", "\r\n"), '{"a": [1,2 , {}]}', "a = 1", "", "{}"):
        parsed = ConfigText(text, strict_json=False)
        assert parsed.with_data(deepcopy(parsed.data)) == text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a = 1\na = 2", "line 2: 'a' is set twice"),
        ("a.b = 1\na { c = 2 }", "line 2: 'a' is set twice"),
        ('include "other.conf"', "expected a value"),
        ("a += [1]", r"\+= is not supported"),
        ("{ a = 1", "missing }"),
        ("{} {}", "text after the end"),
        ('a = "b', "invalid string"),
        ("a =", "expected a value"),
    ],
)
def test_what_cannot_be_edited_is_an_error(text, problem):
    """With the line."""
    with pytest.raises(JobAdaptationError, match=problem):
        ConfigText(text, strict_json=False)


NAMES = st.sampled_from(["id", "path", "args", "a", "b", "with space", "with.dot", "ü"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["", "x", 'quo"te', "{v}", "# no comment", "1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=12,
)
CONFIGS = st.dictionaries(NAMES, VALUES, max_size=4)


@given(CONFIGS, CONFIGS, st.sampled_from([None, 2, 4]))
def test_any_change_of_json(old, new, indent):
    """The text is JSON of the new data, whatever the old one was."""
    text = ConfigText(json.dumps(old, indent=indent), strict_json=True)
    assert text.data == old
    assert json.loads(text.with_data(deepcopy(new))) == new


PLAIN_NAMES = st.sampled_from(["id", "path", "args", "a", "b"])
PLAIN = st.recursive(
    st.booleans() | st.integers(0, 9) | st.sampled_from(["x", "a.b", "{v}", "# no comment"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PLAIN_NAMES, inner, max_size=3),
    max_leaves=8,
)
PLAIN_CONFIGS = st.dictionaries(PLAIN_NAMES, PLAIN, min_size=1, max_size=3)


def as_hocon(data: object, indent: int = 0) -> str:
    """Write data with comments, without commas."""
    space = "\n" + "  " * (indent + 1)
    end = "\n" + "  " * indent
    if isinstance(data, dict) and data:
        return (
            "{" + "".join(f"{space}# of {k}{space}{k} = {as_hocon(v, indent + 1)}" for k, v in data.items()) + end + "}"
        )
    if isinstance(data, list) and data:
        return "[" + "".join(f"{space}{as_hocon(v, indent + 1)} // one" for v in data) + end + "]"
    return json.dumps(data)


@pytest.mark.slow
@given(PLAIN_CONFIGS, PLAIN_CONFIGS)
def test_any_change_of_hocon(old, new):
    """NVFlare reads the new data from the text, whatever the old one was."""
    text = ConfigText(as_hocon(old), strict_json=False)
    assert text.data == old
    assert hocon(text.with_data(deepcopy(new))) == new

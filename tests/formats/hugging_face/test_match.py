# SPDX-License-Identifier: Apache-2.0
"""Results of jobs under the names of a Hugging Face directory; `test_libraries.py` loads them with transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import nvflare_lazy
from nvflare_lazy.errors import ModelDirectoryError
from nvflare_lazy.formats.hugging_face import ModelDirectory
from nvflare_lazy.formats.hugging_face.match import match_model_directory

EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def directory(path: Path, names: list[str], *, tied: bool | None = None, **config: object) -> ModelDirectory:
    """A directory whose tensors with a row for each token have the same values."""
    if tied is not None:
        config["tie_word_embeddings"] = tied
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"vocab_size": 8, **config}))
    nvflare_lazy.save({name: torch.ones(3) if "norm" in name else torch.full((8, 3), 0.5) for name in names}, path)
    return ModelDirectory(path)


def matched(tmp_path: Path, base: ModelDirectory, result: dict[str, torch.Tensor]) -> dict[str, list]:
    nvflare_lazy.save(result, tmp_path / "result.safetensors")
    found = match_model_directory(nvflare_lazy.open(tmp_path / "result.safetensors"), base)
    return {name: tensor.tolist() for name, tensor in found.items()}


RESULT = {EMBED: torch.arange(24.0).reshape(8, 3), NORM: torch.tensor([1.0, 2.0, 3.0])}


@pytest.mark.parametrize("tied", [None, True])
def test_a_tied_embedding_is_dropped_or_restored(tmp_path, tied):
    """The result has the names of the directory, which stores a tied embedding once or twice."""
    once = directory(tmp_path / "once", [EMBED, NORM], tied=tied)
    twice = directory(tmp_path / "twice", [EMBED, NORM, HEAD], tied=tied)
    assert matched(tmp_path, once, {**RESULT, HEAD: RESULT[EMBED]}).keys() == {EMBED, NORM}
    assert matched(tmp_path, twice, RESULT)[HEAD] == RESULT[EMBED].tolist()


def test_what_is_not_tied(tmp_path):
    """Other values, or a configuration that excludes it: an error instead of a model that is not the result."""
    once = directory(tmp_path / "once", [EMBED, NORM], tied=True)
    with pytest.raises(ModelDirectoryError, match=r"missing none; unexpected 'lm_head\.weight'"):
        matched(tmp_path, once, {**RESULT, HEAD: RESULT[EMBED] + 1})
    twice = directory(tmp_path / "twice", [EMBED, NORM, HEAD], tied=False)
    with pytest.raises(ModelDirectoryError, match=r"missing 'lm_head\.weight'; unexpected none"):
        matched(tmp_path, twice, RESULT)
    # All norms of an initial model have the same values, and are not tied.
    norms = directory(tmp_path / "norms", [EMBED, NORM, "model.layers.0.norm.weight"])
    with pytest.raises(ModelDirectoryError, match=r"missing 'model\.layers\.0\.norm\.weight'"):
        matched(tmp_path, norms, RESULT)


def test_prefixes(tmp_path):
    """Added, stripped from some names, or neither."""
    base = directory(tmp_path / "base", [EMBED, NORM, HEAD], tied=False)
    result = {**RESULT, HEAD: RESULT[EMBED] + 1}
    expected = {name: tensor.tolist() for name, tensor in result.items()}
    for prefix in ("", "model.", "a.b."):
        assert matched(tmp_path, base, {prefix + name: tensor for name, tensor in result.items()}) == expected
    assert matched(tmp_path, base, {name.removeprefix("model."): result[name] for name in result}) == expected


def test_nothing_matches(tmp_path):
    """Examples of both sides, and no result."""
    base = directory(tmp_path / "base", [EMBED, NORM])
    with pytest.raises(ModelDirectoryError, match=r"the result has 'h\.weight'; .* has 'model\.embed_tokens\.weight'"):
        matched(tmp_path, base, {"h.weight": torch.ones(2)})
    with pytest.raises(ModelDirectoryError, match=r"has shape \[3\] in .* and \[4\] in the result"):
        matched(tmp_path, base, {**RESULT, NORM: torch.ones(4)})
    with pytest.raises(ModelDirectoryError, match=r"two tensors of the result are 'model\.norm\.weight'"):
        matched(tmp_path, base, {f"model.{name}": tensor for name, tensor in RESULT.items()} | {NORM: RESULT[NORM]})


def test_a_command_that_fails_writes_nothing(tmp_path, capsys):
    """The message is one line, and the output is missing."""
    from nvflare_lazy.cli.program import run

    base = directory(tmp_path / "base", [EMBED, NORM])
    nvflare_lazy.save({"other": torch.ones(2)}, tmp_path / "result.safetensors")
    assert (
        run(["export", str(tmp_path / "result.safetensors"), "--base", str(base.path), "-o", str(tmp_path / "x")]) == 1
    )
    assert capsys.readouterr().err.startswith("Error: no tensor of the result is one of ")
    assert not (tmp_path / "x").exists()

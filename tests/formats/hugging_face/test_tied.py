# SPDX-License-Identifier: Apache-2.0
"""Names of tied tensors by configuration and stored names; `test_libraries.py` compares them with real models."""

from __future__ import annotations

import pytest
import torch

import nvflare_lazy
from nvflare_lazy.formats.hugging_face.tied import is_plain_decoder, tied_names

WORDS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
QWEN = {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 6, "tie_word_embeddings": True}


def entries(tmp_path, *names: str, **tensors: torch.Tensor):
    made = {name: torch.ones(6, 2) for name in names}
    return nvflare_lazy.open(nvflare_lazy.save({**made, **tensors}, tmp_path / "m.safetensors")).entries


@pytest.mark.parametrize(
    ("config", "names", "tied"),
    [
        (QWEN, [WORDS], {HEAD: WORDS}),
        # Transformers 4 does not write a setting that is the default of the class.
        ({**QWEN, "tie_word_embeddings": None}, [WORDS], {HEAD: WORDS}),
        ({**QWEN, "tie_word_embeddings": False}, [WORDS], {}),
        ({**QWEN, "text_config": {"tie_word_embeddings": False}}, [WORDS], {}),
        # Both are stored, with separate values.
        (QWEN, [WORDS, HEAD], {}),
        ({**QWEN, "architectures": ["Qwen2ForSequenceClassification"]}, [WORDS], {}),
        ({**QWEN, "vocab_size": 7}, [WORDS], {}),
        # Nothing decides which of two it is.
        (QWEN, [WORDS, "audio.embed_tokens.weight"], {}),
        (
            {**QWEN, "architectures": ["T5ForConditionalGeneration"], "tie_word_embeddings": False},
            ["shared.weight", HEAD],
            dict.fromkeys(["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"], "shared.weight"),
        ),
        (
            {**QWEN, "architectures": ["BertForMaskedLM"]},
            ["bert.embeddings.word_embeddings.weight", "cls.predictions.bias"],
            {
                "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
                "cls.predictions.decoder.bias": "cls.predictions.bias",
            },
        ),
        *(({**QWEN, "architectures": odd}, [WORDS], {}) for odd in (None, [], [7], "Qwen2ForCausalLM")),
    ],
)
def test_names_that_are_not_stored(tmp_path, config, names, tied):
    """They follow from the class, the stored names and the settings."""
    assert tied_names(config, entries(tmp_path, *names)) == tied


@pytest.mark.parametrize(
    ("config", "name", "is_plain"),
    [
        ({"model_type": "qwen2"}, WORDS, True),
        # Of another kind, with another head, or with names of another form.
        ({"model_type": "gpt_neox"}, WORDS, False),
        ({}, WORDS, False),
        ({"model_type": "qwen2", "architectures": ["Qwen2ForSequenceClassification"]}, WORDS, False),
        ({"model_type": "qwen2"}, "language_model.model.embed_tokens.weight", False),
        ({"model_type": ["qwen2"]}, WORDS, False),
        ({"model_type": "qwen2", "architectures": [7]}, WORDS, False),
    ],
)
def test_models_for_which_transformers_is_not_asked(tmp_path, config, name, is_plain):
    """Frequent decoders, whose names do not depend on the version of transformers."""
    assert is_plain_decoder({**QWEN, **config}, entries(tmp_path, name)) == is_plain


def test_a_pytorch_checkpoint_has_both_names(tmp_path):
    """If they share memory, one of them is a further name; equal values do not suffice."""
    shared = torch.ones(6, 2)
    for head, tied in ((shared, {HEAD: WORDS}), (shared.clone(), {})):
        torch.save({WORDS: shared, HEAD: head}, tmp_path / "m.bin")
        assert tied_names(QWEN, nvflare_lazy.open(tmp_path / "m.bin").entries) == tied

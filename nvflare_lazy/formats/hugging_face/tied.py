# SPDX-License-Identifier: Apache-2.0
"""`tied_names()`: the names that a model has for tied tensors, of which `save_pretrained` stores one.

A job sends tied tensors under all their names, because a strict `load_state_dict` requires them. The names are part of
the code of transformers, not of a directory. `model_names` asks transformers if it is installed; this module lists the
names by architecture for frequent models, and for machines without transformers.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nvflare_lazy.tensors.entry import TensorEntry


class _Ties(NamedTuple):
    """Names of one tied tensor of some architectures.

    Attributes:
        architectures: Regular expression for the names of their classes.
        stored: Regular expression for the name that is stored.
        optional: Further names, if the configuration ties the word embeddings.
        always: Further names in any case.
    """

    architectures: str
    stored: str
    optional: tuple[str, ...] = ()
    always: tuple[str, ...] = ()


_MASKED = r"(?:ForMaskedLM|ForCausalLM|ForPreTraining|LMHeadModel)"
_BERT = rf"(?:Bert|Deberta|DebertaV2){_MASKED}"
_ROBERTA = rf"\w*(?:Roberta|Camembert|MPNet)\w*?{_MASKED}"
_BART = r"\w*(?:Bart|Pegasus|Marian|M2M100|Blenderbot|BlenderbotSmall)(?:ForConditionalGeneration|MTModel)"
_WORDS = r"\w+\.embeddings\.word_embeddings\.weight"
_BART_EMBEDDINGS = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
_T5_EMBEDDINGS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# Their models have the names of their directories, and further names for tied tensors, in each version of transformers.
_PLAIN_DECODERS = frozenset(
    ("gemma", "gemma2", "gpt2", "llama", "mistral", "olmo2", "opt", "phi", "phi3", "qwen2", "qwen3", "smollm3")
)
_PLAIN_PREFIXES = ("model.", "transformer.", "lm_head.")
# A configuration is untrusted.
_MAX_NAME = 200
_TIES = (
    _Ties(r"\w*T5ForConditionalGeneration", r"shared\.weight", ("lm_head.weight",), _T5_EMBEDDINGS),
    _Ties(_BART, r"model\.shared\.weight", ("lm_head.weight", *_BART_EMBEDDINGS)),
    _Ties(r"WhisperForConditionalGeneration", r"model\.decoder\.embed_tokens\.weight", ("proj_out.weight",)),
    _Ties(_BERT, _WORDS, ("cls.predictions.decoder.weight",)),
    _Ties(_BERT, r"cls\.predictions\.bias", always=("cls.predictions.decoder.bias",)),
    _Ties(_ROBERTA, _WORDS, ("lm_head.decoder.weight",)),
    _Ties(_ROBERTA, r"lm_head\.bias", always=("lm_head.decoder.bias",)),
    _Ties(r"DistilBertForMaskedLM", _WORDS, ("vocab_projector.weight",)),
    _Ties(r"ElectraForMaskedLM", _WORDS, ("generator_lm_head.weight",)),
    _Ties(r"ModernBertForMaskedLM", r"model\.embeddings\.tok_embeddings\.weight", ("decoder.weight",)),
)
_OTHERS = _Ties(
    r"\w+(?:ForCausalLM|LMHeadModel|ForConditionalGeneration)",
    r"(?:.*\.)?(?:embed_tokens|wte|word_embeddings|tokens_embed)\.weight",
    ("lm_head.weight",),
)


def is_plain_decoder(config: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> bool:
    """Whether `tied_names()` is certainly complete, because the model is a frequent one of the usual form."""
    is_decoder = (_architecture(config) or "").endswith(("ForCausalLM", "LMHeadModel"))
    is_known = str(config.get("model_type")) in _PLAIN_DECODERS
    return is_decoder and is_known and all(name.startswith(_PLAIN_PREFIXES) for name in entries)


def tied_names(config: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> dict[str, str]:
    """Return the names of tied tensors that are not stored, each with the name of the tensor that is stored.

    A PyTorch checkpoint may have a tied tensor under several names. If these share memory, one of them is stored.

    Args:
        config: The configuration of the model.
        entries: The tensors of the directory.

    Example:
        >>> tied_names(directory.config(), directory.open().entries)
        {'lm_head.weight': 'model.embed_tokens.weight'}
    """
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    is_tied = not any(part.get("tie_word_embeddings") is False for part in parts)
    vocabularies = {part["vocab_size"] for part in parts if isinstance(part.get("vocab_size"), int)}
    tied = {}
    for ties in _ties_of(_architecture(config) or ""):
        stored = [name for name in entries if re.fullmatch(ties.stored, name)]
        if stored and ties.optional:
            # Other embeddings of a model have other numbers of rows.
            stored = [name for name in stored if entries[name].shape[:1] in {(rows,) for rows in vocabularies}]
        if len(stored) != 1:
            continue
        for name in (*ties.always, *(ties.optional if is_tied else ())):
            if name not in entries or _are_same(entries[name], entries[stored[0]]):
                tied[name] = stored[0]
    return tied


def _architecture(config: Mapping[str, Any]) -> str | None:
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    return name if isinstance(name, str) and len(name) <= _MAX_NAME else None


def _ties_of(name: str) -> list[_Ties]:
    known = [ties for ties in _TIES if re.fullmatch(ties.architectures, name)]
    return known or ([_OTHERS] if re.fullmatch(_OTHERS.architectures, name) else [])


def _are_same(one: TensorEntry, two: TensorEntry) -> bool:
    places = one.source.file_range(), two.source.file_range()
    return places[0] is not None and places[0] == places[1] and one.shape == two.shape

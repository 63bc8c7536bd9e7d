# SPDX-License-Identifier: Apache-2.0
"""Rounds of models whose tensors have other names in memory than in their directory, by the real transformers.

Slow, because an ordinary environment does not have it: `test_matrix.py` runs this module in environments that do.
"""

from __future__ import annotations

import json
import os

import pytest
import torch
from nvflare.apis.event_type import EventType

import nvflare_lazy
from nvflare_lazy.cli.program import run
from nvflare_lazy.formats.hugging_face import ModelDirectory
from nvflare_lazy.formats.hugging_face.model_names import model_names
from nvflare_lazy.formats.hugging_face.names import adapter_name as saved_name
from nvflare_lazy.formats.hugging_face.tied import is_plain_decoder
from tests.flare.test_tensor_names import HEAD, NORM, end_round, task_sent
from tests.flare.test_tensor_names import WORDS as WORDS_NAME
from tests.flare.test_tensor_names import begin as begin
from tests.flare.test_tensor_names import qwen as qwen
from tests.formats.hugging_face.test_libraries import ADAPTERS, adapted, peft, transformers
from tests.formats.hugging_face.test_libraries import qwen as qwen_model

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # those of the libraries are not ours

os.environ["HF_HUB_OFFLINE"] = "1"
IS_5 = int(transformers.__version__.split(".")[0]) >= 5
WORDS = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
GROUPED = {**WORDS, "num_key_value_heads": 2, "head_dim": 16}
PADDED = {**GROUPED, "pad_token_id": 0}
T5 = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
BART = {
    "vocab_size": 96,
    "d_model": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    **{
        f"{part}_{name}": number for part in ("encoder", "decoder") for name, number in (("layers", 1), ("ffn_dim", 32))
    },
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "decoder_start_token_id": 1,
}
IMAGES = {**WORDS, "image_size": 28, "patch_size": 14}
del IMAGES["vocab_size"]
SPEECH = {
    "vocab_size": 20,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "conv_dim": (16, 16),
    "conv_stride": (2, 2),
    "conv_kernel": (3, 3),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
SWIN = {"image_size": 32, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 2}


def gemma3() -> torch.nn.Module:
    text, vision = transformers.Gemma3TextConfig(**GROUPED), transformers.SiglipVisionConfig(**IMAGES)
    config = transformers.Gemma3Config(
        text_config=text.to_dict(), vision_config=vision.to_dict(), mm_tokens_per_image=4
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def encoder_decoder() -> torch.nn.Module:
    encoder = transformers.BertConfig(**WORDS)
    decoder = transformers.BertConfig(**WORDS, is_decoder=True, add_cross_attention=True)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    return transformers.EncoderDecoderModel(config)


def made(architecture: str, config: str, **settings: object):
    def make() -> torch.nn.Module:
        return getattr(transformers, architecture)(getattr(transformers, config)(**settings))

    return make


MODELS = {
    "GPT-NeoX, tied": made("GPTNeoXForCausalLM", "GPTNeoXConfig", **WORDS, tie_word_embeddings=True),
    "GPT-NeoX, untied": made("GPTNeoXForCausalLM", "GPTNeoXConfig", **WORDS, tie_word_embeddings=False),
    "Albert": made("AlbertForMaskedLM", "AlbertConfig", **WORDS, embedding_size=16),
    "T5": made("T5ForConditionalGeneration", "T5Config", **T5),
    "T5, encoder": made("T5EncoderModel", "T5Config", **T5),
    "BART": made("BartForConditionalGeneration", "BartConfig", **BART, forced_eos_token_id=None),
    "BART, classifier": made("BartForSequenceClassification", "BartConfig", **BART, forced_eos_token_id=None),
    "encoder and decoder": encoder_decoder,
    "Gemma 3": gemma3,
    "Mamba": made("MambaForCausalLM", "MambaConfig", vocab_size=96, hidden_size=32, num_hidden_layers=1),
    "wav2vec 2": made("Wav2Vec2ForCTC", "Wav2Vec2Config", **SPEECH),
    "Swin": made("SwinForImageClassification", "SwinConfig", **SWIN),
    "CLIP": made("CLIPVisionModel", "CLIPVisionConfig", **IMAGES),
    "classifier": made("Qwen2ForSequenceClassification", "Qwen2Config", **GROUPED),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_round(begin, fl_ctx, result, tmp_path, name):
    """A strict client loads what the server sends, and `from_pretrained` loads the checkpoint, with the same values."""
    torch.manual_seed(0)
    model = MODELS[name]()
    model.save_pretrained(tmp_path / "base")
    persistor = begin(tmp_path / "base")
    client = type(model)(model.config)
    client.load_state_dict(task_sent(persistor, fl_ctx).data, strict=True)
    end_round(persistor, fl_ctx, result, client.state_dict())
    checkpoint = tmp_path / "checkpoints"
    loaded, info = type(model).from_pretrained(checkpoint, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    state = loaded.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
    assert nvflare_lazy.open(checkpoint).keys() == nvflare_lazy.open(tmp_path / "base").keys()
    persistor.handle_event(EventType.END_RUN, fl_ctx)
    # `export` does the same for the result of a job without this package.
    torch.save({"model": model.state_dict()}, tmp_path / "result.pt")
    arguments = ["export", str(tmp_path / "result.pt"), "--base", str(tmp_path / "base"), "-o", str(tmp_path / "out")]
    assert run(arguments) == 0
    exported = nvflare_lazy.open(tmp_path / "out")
    assert exported.keys() == nvflare_lazy.open(tmp_path / "base").keys()


@pytest.mark.parametrize("name", ["BERT", "wav2vec 2"])
def test_a_directory_with_old_names(begin, fl_ctx, result, tmp_path, name):
    """Of the first BERT, and of weight normalization before torch 2: the model has other names."""
    model = made("BertForMaskedLM", "BertConfig", **WORDS)() if name == "BERT" else MODELS[name]()
    model.save_pretrained(tmp_path / "base")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"} if name == "BERT" else {
        "parametrizations.weight.original0": "weight_g", "parametrizations.weight.original1": "weight_v"
    }  # fmt: skip
    tensors = {}
    for key, tensor in nvflare_lazy.open(tmp_path / "base").items():
        new = next((key.replace(*pair) for pair in old.items() if key.endswith(pair[0])), key)
        tensors[new] = tensor.materialize()
    assert any(key.endswith(tuple(old.values())) for key in tensors)
    nvflare_lazy.save(tensors, tmp_path / "base" / "model.safetensors")
    persistor = begin(tmp_path / "base")
    client = type(model)(model.config)
    client.load_state_dict(task_sent(persistor, fl_ctx).data, strict=True)
    end_round(persistor, fl_ctx, result, client.state_dict())
    assert nvflare_lazy.open(tmp_path / "checkpoints").keys() == tensors.keys()
    state = type(model).from_pretrained(tmp_path / "checkpoints").state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())


def test_a_model_of_other_code(begin, qwen, fl_ctx, caplog):
    """transformers does not have it, and no code of a directory is run: the table knows its tied tensors."""
    config = {"architectures": ["MyModelForCausalLM"], "model_type": "mine", "vocab_size": 6}
    (qwen / "config.json").write_text(json.dumps(config))
    assert task_sent(begin(qwen), fl_ctx).data.keys() == {WORDS_NAME, HEAD, NORM}
    assert f"transformers cannot instantiate the model of {qwen}" in caplog.text


def test_tensors_that_are_computed_on_loading(begin, fl_ctx, tmp_path, caplog):
    """transformers 5 merges all experts into one tensor: a warning names them, with a remedy."""
    settings = {**GROUPED, "num_experts": 4, "moe_intermediate_size": 16}
    made("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **settings)().save_pretrained(tmp_path / "base")
    begin(tmp_path / "base")
    expected = "needs 'model.layers.0.mlp.experts.gate_up_proj'"
    assert (expected in caplog.text) == ("start the job with a checkpoint of" in caplog.text) == IS_5


PLAIN = {
    **dict.fromkeys(("Gemma", "Gemma2", "Llama", "Mistral", "Olmo2", "Qwen2", "Qwen3", "SmolLM3"), PADDED),
    **{key: {**WORDS, "pad_token_id": 0} for key in ("Phi", "Phi3")},
    "OPT": {**WORDS, "word_embed_proj_dim": 32, "ffn_dim": 32},
}


def test_models_for_which_transformers_is_not_asked(tmp_path):
    """Their models have exactly the names that the table has."""
    models = {name: made(f"{name}ForCausalLM", f"{name}Config", **settings) for name, settings in PLAIN.items()}
    models["GPT2"] = made("GPT2LMHeadModel", "GPT2Config", vocab_size=96, n_embd=32, n_layer=1, n_head=2)
    for name, make in models.items():
        for tied in (True, False):
            model = make()
            model.config.tie_word_embeddings = tied
            model = type(model)(model.config)
            model.save_pretrained(tmp_path / f"{name}-{tied}")
            directory = ModelDirectory(tmp_path / f"{name}-{tied}")
            entries = directory.open().entries
            assert is_plain_decoder(directory.config(), entries)
            assert entries.keys() | model_names(directory, entries).stored.keys() == model.state_dict().keys(), name


@pytest.mark.parametrize("sent", ["saved names", "all parameters", "trained parameters"])
@pytest.mark.parametrize("adapter_name", ["default", "site"])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_round_of_an_adapter(begin, fl_ctx, result, tmp_path, kind, adapter_name, sent):
    """PEFT loads what the server sends, whatever names it sends back, and loads the checkpoint completely."""
    base = qwen_model(tied=False)
    model = adapted(base, adapter_name=adapter_name, **ADAPTERS[kind])
    model.save_pretrained(tmp_path / "saved", selected_adapters=[adapter_name])
    directory = tmp_path / "saved" / ("" if adapter_name == "default" else adapter_name)
    persistor = begin(directory)
    expected = peft.get_peft_model_state_dict(model, adapter_name=adapter_name)
    expected = {name: tensor.clone() for name, tensor in expected.items()}
    received = {name: tensor.materialize() for name, tensor in task_sent(persistor, fl_ctx).data.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    peft.set_peft_model_state_dict(model, received, adapter_name=adapter_name)
    trained = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    if sent == "saved names":
        trained = peft.get_peft_model_state_dict(model, adapter_name=adapter_name)
    elif sent == "all parameters":
        trained = model.state_dict()
    elif not expected.keys() <= {saved_name(name) or name for name in trained}:
        pytest.skip("the adapter has tensors that are not trained")
    end_round(persistor, fl_ctx, result, trained)
    found = ModelDirectory(tmp_path / "checkpoints").open()
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, found[name].materialize()) for name, tensor in expected.items())
    loaded = peft.PeftModel.from_pretrained(qwen_model(tied=False), tmp_path / "checkpoints")
    again = peft.get_peft_model_state_dict(loaded)
    assert all(torch.equal(tensor, again[name]) for name, tensor in expected.items())

# SPDX-License-Identifier: Apache-2.0
"""Model classes around a Hugging Face model, as the scripts have them that start a job from a class."""

from __future__ import annotations

import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import AutoModelForCausalLM


class WholeModel(torch.nn.Module):
    """All names have the prefix of the attribute."""

    def __init__(self, base: str) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(base)


class AdapterModel(torch.nn.Module):
    """Only the adapter is in the state dict, with a prefix or under PEFT's names."""

    def __init__(self, base: str, adapter: str, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)

    def state_dict(self, *args: object, **kwargs: object) -> dict[str, torch.Tensor]:
        return {self.prefix + name: value for name, value in get_peft_model_state_dict(self.model).items()}

    def load_state_dict(self, state_dict: dict[str, torch.Tensor], *args: object, **kwargs: object) -> None:
        set_peft_model_state_dict(
            self.model, {name.removeprefix(self.prefix): value for name, value in state_dict.items()}
        )

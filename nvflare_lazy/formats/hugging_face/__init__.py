# SPDX-License-Identifier: Apache-2.0
"""Hugging Face directories: the files next to the weights, the names of tensors, and merging of LoRA adapters.

Needs neither transformers nor PEFT, and runs no code of a directory. `save()`, aggregation and the command line use it.
"""

from nvflare_lazy.formats.hugging_face.model_directory import ModelDirectory

__all__ = ["ModelDirectory"]

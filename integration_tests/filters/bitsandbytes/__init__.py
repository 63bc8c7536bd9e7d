# SPDX-License-Identifier: Apache-2.0
"""Stands for the bitsandbytes library, which NVFlare's quantizers import although their float16 does not need it."""

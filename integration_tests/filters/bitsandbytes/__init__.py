# SPDX-License-Identifier: Apache-2.0
"""Replacement for the bitsandbytes library, which NVFlare's quantizers import but do not need for float16."""

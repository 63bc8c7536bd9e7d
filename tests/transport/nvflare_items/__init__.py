# SPDX-License-Identifier: Apache-2.0
"""Tests of tensors on the wire in the format that NVFlare uses."""

# SPDX-License-Identifier: Apache-2.0
"""Tests of NVFlare's own format of tensors on the wire."""

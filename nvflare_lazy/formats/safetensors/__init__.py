# SPDX-License-Identifier: Apache-2.0
"""Safetensors files: the header, reading, streamed writing, and checkpoints of several files."""

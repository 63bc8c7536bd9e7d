# SPDX-License-Identifier: Apache-2.0
"""Measurements of this project against the limits of the machine and against stock NVFlare."""

# SPDX-License-Identifier: Apache-2.0
"""The engine behind `Aggregation`: tiles, threads, memory, exact means and rounding.

Rules use a `Tile` and its `Arena`; everything else is used by the round and by the optimizers' step.
"""

# SPDX-License-Identifier: Apache-2.0
"""Aggregation: rules, engine, optimizers."""

# SPDX-License-Identifier: Apache-2.0
"""Recipes: what they take, and what jobs they make."""

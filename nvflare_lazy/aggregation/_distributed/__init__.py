# SPDX-License-Identifier: Apache-2.0
"""Aggregation in parts, which the workers of an executor compute on storage that they share."""

# SPDX-License-Identifier: Apache-2.0
"""What the measured job must come to, worked out in float64 without any of the code under test."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.fl_job.synthetic_model import initial_values, step


def exact_mean(values: list[np.ndarray], weights: list[float]) -> np.ndarray:
    """Return the weighted mean in float64: exact enough that one rounding to float32 is the only one that shows."""
    total = sum(
        np.longdouble(weight) * value.astype(np.longdouble) for value, weight in zip(values, weights, strict=True)
    )
    return total / np.longdouble(sum(weights))


def next_global(value: np.ndarray, sites: list[int], *, difference: bool = False) -> np.ndarray:
    """Return a tensor of the global model after one more round, in longdouble, from its float32 values before."""
    before = torch.from_numpy(value)
    if difference:
        sent = [(step(before, site) - before).numpy() for site in sites]
        return value.astype(np.longdouble) + exact_mean(sent, [float(site) for site in sites])
    return exact_mean([step(before, site).numpy() for site in sites], [float(site) for site in sites])


def start(index: int, elements: int) -> np.ndarray:
    """Return a tensor of the initial model."""
    return initial_values(index, elements).numpy()


def ulps(found: np.ndarray, exact: np.ndarray) -> float:
    """Return how far float32 values are from exact ones at most, in units in the last place of the found ones."""
    spacing = np.spacing(np.abs(found)).astype(np.longdouble)
    return float(np.max(np.abs(found.astype(np.longdouble) - exact) / spacing))

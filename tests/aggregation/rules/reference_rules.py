# SPDX-License-Identifier: Apache-2.0
"""Second implementation of the rules, from their papers, in float64 NumPy over whole models: slow, independent.

Updates are matrices, a row for each contributor and a column for each element.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np


def mean(updates, weights):
    """Sum of weights times values, over the sum of weights."""
    return np.average(updates, axis=0, weights=weights)


def median(updates):
    """NumPy's own."""
    return np.median(updates, axis=0)


def trimmed_mean(updates, byzantine):
    """Sort, drop at both ends, average."""
    return np.sort(updates, axis=0)[byzantine : len(updates) - byzantine].mean(axis=0)


def squared_distances(updates):
    """Of all pairs."""
    distances = np.zeros((len(updates), len(updates)))
    for i, j in combinations(range(len(updates)), 2):
        distances[i, j] = distances[j, i] = np.sum((updates[i] - updates[j]) ** 2)
    return distances


def krum_scores(distances, byzantine):
    """For each update: the sum over its n - f - 2 closest others."""
    scores = []
    for i in range(len(distances)):
        others = sorted(distances[i, j] for j in range(len(distances)) if j != i)
        scores.append(sum(others[: max(1, len(distances) - byzantine - 2)]))
    return np.array(scores)


def krum(updates, byzantine):
    """Which update wins."""
    return int(np.argmin(krum_scores(squared_distances(updates), byzantine)))


def multi_krum(updates, byzantine, keep):
    """The mean of the winners."""
    order = np.argsort(krum_scores(squared_distances(updates), byzantine), kind="stable")
    return updates[sorted(order[:keep])].mean(axis=0)


def bulyan(updates, byzantine):
    """Krum until n - 2f are chosen; of each column, the n - 4f closest to the median, averaged."""
    left = list(range(len(updates)))
    chosen = []
    while len(chosen) < len(updates) - 2 * byzantine:
        chosen.append(left.pop(krum(updates[left], byzantine)))
    selected = np.sort(updates[sorted(chosen)], axis=0)
    keep = len(selected) - 2 * byzantine
    result = np.empty(selected.shape[1])
    for column in range(selected.shape[1]):
        values = selected[:, column]
        closest = np.argsort(np.abs(values - np.median(values)), kind="stable")[:keep]
        result[column] = values[closest].mean()
    return result


def geometric_median(updates, weights, smoothing, iterations=10_000):
    """Weiszfeld's algorithm on the updates themselves, until nothing changes."""
    weights = np.asarray(weights) / np.sum(weights)
    center = weights @ updates
    for _ in range(iterations):
        pull = weights / np.maximum(np.linalg.norm(updates - center, axis=1), smoothing)
        moved = pull @ updates / pull.sum()
        if np.abs(moved - center).max(initial=0) < 1e-13:
            break
        center = moved
    return center


def clipped_mean(updates, weights, clip_norm, origin):
    """The mean of differences from `origin`, each scaled down to the norm, added to it."""
    differences = updates - origin
    norms = np.linalg.norm(differences, axis=1)
    clipped = differences * np.minimum(1, clip_norm / np.maximum(norms, 1e-300))[:, None]
    return origin + np.average(clipped, axis=0, weights=weights)

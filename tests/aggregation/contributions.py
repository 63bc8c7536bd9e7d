# SPDX-License-Identifier: Apache-2.0
"""Contributions for tests: by hypothesis, at random, as matrices, and from files."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st

from nvflare_lazy.formats import open as open_checkpoint
from nvflare_lazy.formats import save

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@st.composite
def shapes(draw):
    """Shapes of a few tensors: scalars, empty ones, some that end in the middle of a block."""
    return draw(
        st.lists(
            st.sampled_from([(), (1,), (0, 3), (7,), (3, 5), (511,), (2, 257), (1030,)]),
            min_size=1,
            max_size=4,
        )
    )


@st.composite
def rounds(draw, least=1, most=9, dtypes=FLOATS, ties=True):
    """Contributions of a round: names, tensors, and one dtype for each tensor."""
    count = draw(st.integers(least, most))
    tensors = [(shape, draw(st.sampled_from(dtypes))) for shape in draw(shapes())]
    seed = draw(st.integers(0, 2**32 - 1))
    coarse = ties and draw(st.booleans())
    return random_round(count, tensors, seed, coarse=coarse)


def random_round(count, tensors, seed, *, coarse=False):
    """Contributions of `count`; `coarse` values are few, so that many are equal."""
    random = np.random.default_rng(seed)
    # Names in another order than they are made in.
    names = [f"site-{number}" for number in random.permutation(count)]
    contributions = {}
    for name in names:
        contributions[name] = {
            f"t{index}": random_tensor(random, shape, dtype, coarse=coarse)
            for index, (shape, dtype) in enumerate(tensors)
        }
    return contributions


def random_tensor(random, shape, dtype, *, coarse=False):
    """Normal numbers, or whole ones."""
    if dtype is torch.bool:
        return torch.tensor(random.integers(0, 2, shape), dtype=dtype)
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.tensor(random.integers(0, 100, shape), dtype=torch.int64).to(dtype)
    values = random.integers(-2, 3, shape) if coarse else random.normal(size=shape) * random.choice([1e-3, 1.0, 50.0])
    return torch.tensor(np.asarray(values, dtype=np.float64)).to(dtype)


def matrix(contributions):
    """All elements in float64: a row for each contributor, in the order of their names."""
    rows = []
    for name in sorted(contributions):
        tensors = contributions[name]
        rows.append(np.concatenate([tensors[key].double().numpy().ravel() for key in sorted(tensors)] or [[]]))
    return np.array(rows)


def flat(tensors):
    """All elements of a model in float64, in the order of `matrix`."""
    return np.concatenate([tensors[key].materialize().double().numpy().ravel() for key in sorted(tensors)])


def ulps(tensors):
    """What one unit in the last place is, for each element, in the order of `matrix`."""
    parts = []
    for key in sorted(tensors):
        tensor = tensors[key].materialize()
        if tensor.dtype.is_floating_point:
            info = torch.finfo(tensor.dtype)
            size = tensor.double().abs().clamp_min(info.tiny)
            parts.append((torch.exp2(size.log2().floor()) * info.eps).numpy().ravel())
        else:
            parts.append(np.ones(tensor.numel()))
    return np.concatenate(parts)


def on_disk(contributions, directory):
    """The same contributions, lazy."""
    directory.mkdir(parents=True, exist_ok=True)
    return {
        name: open_checkpoint(save(tensors, directory / f"{name}.safetensors"))
        for name, tensors in contributions.items()
    }


def bits(tensors):
    """The bytes of each tensor of a model."""
    return {key: bytes(tensors[key].source.read()) for key in tensors}

# SPDX-License-Identifier: Apache-2.0
"""Pictures of digits, drawn here: nothing to download, and the same ones on every machine."""

from __future__ import annotations

import torch

SIZE = 12
# The share of each digit: each site has few of the digits of the other, and the test has the same number of each.
SITE_SHARES = {1: [9.0] * 5 + [1.0] * 5, 2: [1.0] * 5 + [9.0] * 5}
TEST_SHARES = [1.0] * 10

_FONT = """
    ### ..# ### ### #.# ### ### ### ### ###
    #.# .## ..# ..# #.# #.. #.. ..# #.# #.#
    #.# ..# ### .## ### ### ### .#. ### ###
    #.# ..# #.. ..# ..# ..# #.# .#. #.# ..#
    ### ..# ### ### ..# ### ### .#. ### ###
"""


def draw(count: int, shares: list[float], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw digits: each somewhere in a noisy picture, brighter or darker.

    Returns:
        The pictures, (count, 1, SIZE, SIZE), and which digit each of them is.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.multinomial(torch.tensor(shares), count, replacement=True, generator=generator)
    glyphs = _glyphs()
    height, width = glyphs.shape[1:]
    pictures = torch.randn(count, 1, SIZE, SIZE, generator=generator) * 0.2
    tops = torch.randint(0, SIZE - height + 1, (count,), generator=generator).tolist()
    lefts = torch.randint(0, SIZE - width + 1, (count,), generator=generator).tolist()
    brightness = torch.empty(count).uniform_(0.6, 1.4, generator=generator)
    for index, (top, left, label) in enumerate(zip(tops, lefts, labels.tolist(), strict=True)):
        pictures[index, 0, top : top + height, left : left + width] += glyphs[label] * brightness[index]
    return pictures, labels


def _glyphs() -> torch.Tensor:
    rows = [line.split() for line in _FONT.split("\n") if line.strip()]
    dots = torch.tensor([[[float(dot == "#") for dot in row[digit]] for row in rows] for digit in range(10)])
    return dots.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)

# SPDX-License-Identifier: Apache-2.0
"""The benchmark of shaped links, on a small model: the proxy limits the rate, and the package is as fast as NVFlare."""

from __future__ import annotations

import pytest

from benchmarks.shaped_link import measure, processor_table, table

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("trainer", "upload"), [(False, False), (True, False), (True, True)], ids=["to a job", "to a trainer", "from it"]
)
def test_slow_and_far(trainer, upload):
    """0.2 Gbit/s, and 100 ms of round trip."""
    rows = measure([(0.2, 100)], rounds=3, seconds=2, trainer=trainer, upload=upload)
    rate, (row,) = 0.2e9 / 8 / 1e6, rows
    assert 0.3 * rate < row["NVFlare"]["mb_per_second"] < rate
    assert 0.95 * row["NVFlare"]["mb_per_second"] < row["plugin"]["mb_per_second"] < rate
    assert len(processor_table(rows).splitlines()) == (7 if trainer else 6)
    assert table(rows).splitlines()[2].startswith("| 0.2 Gbit/s | 100 ms | 32 MiB |")

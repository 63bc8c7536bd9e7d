# SPDX-License-Identifier: Apache-2.0
"""Uses a scratch root on and on until it is killed: leases, downloads of all sizes, recycled files, released leases.

`python scratch_user.py ROOT SEED`; with an odd seed, no other process removes what it leaves.
"""

from __future__ import annotations

import random
import sys

from nvflare_lazy.scratch import JobScratch
from nvflare_lazy.scratch._cleanup_process import cleanup_process

root, seed = sys.argv[1], int(sys.argv[2])
if seed % 2:
    cleanup_process.add = lambda path: None  # type: ignore[method-assign]
chance = random.Random(seed)
while True:
    with JobScratch.open(root, job=f"user {seed}", min_free=0, warn=False) as job:
        for _ in range(chance.randrange(8)):
            download = job.download()
            for _ in range(chance.randrange(3)):
                file = download.new_file()
                size = chance.randrange(4 << 20)
                file.preallocate(size)
                for offset in range(0, size, 1 << 20):
                    file.pwrite(bytes(min(1 << 20, size - offset)), offset)
                file.finish().close()
            download.release()

# SPDX-License-Identifier: Apache-2.0
"""Uses a scratch root on and on until it is killed: leases, downloads of all sizes, recycled files, released leases.

It shows files to all other users of the root and takes theirs. `python scratch_user.py ROOT SEED`; with an odd seed, no
other process removes what it leaves.
"""

from __future__ import annotations

import os
import random
import sys

from nvflare_lazy.errors import ScratchError
from nvflare_lazy.scratch import DownloadScratch, JobScratch
from nvflare_lazy.scratch._cleanup_process import cleanup_process
from nvflare_lazy.tensors.tensor_file import TensorFile

root, seed = sys.argv[1], int(sys.argv[2])
if seed % 2:
    cleanup_process.add = lambda path: None  # type: ignore[method-assign]
chance = random.Random(seed)
# The files of a job in this root are larger.
MAX_BYTES = 4 << 20


def check(file: TensorFile) -> None:
    """End the process if a file is not what another user has written: one value from its first to its last byte."""
    content = bytearray(file.size)
    file.read_into(memoryview(content), 0)
    if len(content) < MAX_BYTES and content != content[:1] * len(content):
        sys.exit(f"a file of {len(content)} bytes has {len(set(content))} values")


def take_from_others(job: JobScratch, download: DownloadScratch) -> list[TensorFile]:
    """Link to some of the files that other processes show."""
    taken = []
    for name in os.listdir(root):
        visited = job.visit(name)
        if visited is None:
            continue
        shown = os.path.join(root, name, "handoff")
        with visited:
            try:
                ids = (id for id in os.listdir(shown) if not id.startswith("probe"))
                taken += [download.take_link(visited, id, os.stat(os.path.join(shown, id)).st_size) for id in ids]
            except (FileNotFoundError, ScratchError):
                pass  # taken back, or its owner was killed
    return taken


while True:
    with JobScratch.open(root, job=f"user {seed}", min_free=0, warn=False) as job:
        for _ in range(chance.randrange(8)):
            download = job.download()
            taken = take_from_others(job, download)
            files = []
            for _ in range(chance.randrange(3)):
                file = download.new_file()
                size = chance.randrange(MAX_BYTES)
                value = bytes([chance.randrange(256)])
                file.preallocate(size)
                for offset in range(0, size, 1 << 20):
                    file.pwrite(value * min(1 << 20, size - offset), offset)
                files.append(file.finish())
            ids = []
            for finished in files:
                with finished.descriptor() as fd:
                    ids.append(job.rendezvous().show(fd))
            for one in (*taken, *files):
                check(one)
            if chance.random() < 0.8:
                job.rendezvous().take_back(ids)
            for one in (*taken, *files):
                check(one)
                one.close()
            download.release()

# SPDX-License-Identifier: Apache-2.0
"""What every `ByteSource` must do, whatever it reads from. A test class for a new one subclasses this."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

import pytest

from nvflare_lazy.tensors.byte_source import ByteSource


class ByteSourceContract(ABC):
    """Subclasses return a source and the bytes it must read as; at least a few hundred of them."""

    @abstractmethod
    def make(self, tmp_path) -> tuple[ByteSource, bytes]: ...

    @pytest.fixture
    def source(self, tmp_path):
        return self.make(tmp_path)

    def test_reads_whole(self, source):
        """A source reads as its bytes, and knows how many they are."""
        made, data = source
        assert made.nbytes == len(data)
        assert bytes(made.read()) == data

    def test_reads_any_range(self, source):
        """Every offset and length gives that part, unaligned ones included."""
        made, data = source
        for start in (0, 1, 2, 3, 7, 8, 63, len(data) // 2, len(data) - 1, len(data)):
            for count in (0, 1, 2, 5, 64, len(data)):
                if start + count <= len(data):
                    assert bytes(made.read(start, count)) == data[start : start + count]

    def test_slices_of_slices(self, source):
        """A slice of a slice reads as the slice of the slice of the bytes."""
        made, data = source
        part = made.slice(8, len(data) - 16).slice(4, len(data) - 32)
        expected = data[8:-8][4:][: len(data) - 32]
        assert part.nbytes == len(expected)
        assert bytes(part.read()) == expected
        assert bytes(part.read(3, 9)) == expected[3:12]

    def test_file_range_is_the_truth(self, source):
        """If a source says where in a file it lies, then those are its bytes."""
        made, data = source
        for part, expected in ((made, data), (made.slice(8, 40), data[8:48])):
            found = part.file_range()
            if found is not None:
                file, offset = found
                buffer = bytearray(part.nbytes)
                file.read_into(memoryview(buffer), offset)
                assert bytes(buffer) == expected

    @pytest.mark.parametrize(("offset", "count"), [(-1, 1), (0, None), (None, 1)])
    def test_outside_is_an_error(self, source, offset, count):
        """Reading or slicing outside the source raises, and does not shorten or wrap."""
        made, data = source
        offset = len(data) if offset is None else offset
        count = len(data) + 1 if count is None else count
        with pytest.raises(ValueError, match="outside"):
            made.read(offset, count)
        with pytest.raises(ValueError, match="outside"):
            made.slice(offset, count)

    def test_many_threads(self, source):
        """Threads that read at the same time do not disturb each other."""
        made, data = source
        wrong: list[int] = []

        def read(seed: int) -> None:
            for step in range(50):
                start = (seed * 31 + step * 17) % (len(data) - 16)
                if bytes(made.read(start, 16)) != data[start : start + 16]:
                    wrong.append(start)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    def test_describes_itself(self, source):
        """The description is a short text."""
        made, _ = source
        assert 0 < len(made.describe()) < 4096

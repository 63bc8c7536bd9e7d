# SPDX-License-Identifier: Apache-2.0
"""`compare()`: the differences of two models, element by element, in one pass over both within bounded memory.

`nvflare-lazy diff` prints them. Blocks of both models are read and compared by several threads; a block with values
that are not finite, and a block of integers or complex numbers, is compared in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from nvflare_lazy._system import available_cores
from nvflare_lazy.aggregation._engine.memory_plan import MemoryPlan
from nvflare_lazy.aggregation._engine.read_ahead import STEP_BYTES, FileRange, ReadAhead
from nvflare_lazy.aggregation._engine.tile_pool import PassMonitor, run_tiles
from nvflare_lazy.aggregation._engine.unlocked import differences
from nvflare_lazy.tensors.entry import entry_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from nvflare_lazy.aggregation._engine.memory_plan import Arena
    from nvflare_lazy.aggregation._engine.read_ahead import Loaded
    from nvflare_lazy.tensors.byte_source import ByteSource
    from nvflare_lazy.tensors.dtypes import ElementType
    from nvflare_lazy.tensors.entry import TensorEntry

    Array = np.ndarray[Any, Any]

# Elements that a thread compares at once, if they do not have more bytes. With smaller blocks, threads spend more time
# in waiting for the interpreter than in computing.
_BLOCK = 1 << 19
_BLOCK_BYTES = 2 << 20
# Elements of one comparison, and of one comparison in float64, whose many arrays fit into the cache of a core.
_PART = 1 << 18
_EXACT_PART = 1 << 16
# Two models; three arrays of float64 or four of float32, and four of integers as wide as an element; gaps.
_ARENA = 2 * _BLOCK_BYTES + _PART * (3 * 8 + 4 * 8) + (64 << 10)
# Elements whose squares and largest difference are computed together: the sum of more squares loses digits.
_ROW = 128
# The type of the bits of a number.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Tolerance:
    """The largest difference of equal elements: |a - b| <= atol + rtol |b|, as `numpy.allclose` and `torch.allclose`.

    Attributes:
        rtol: Factor of the absolute value in the second model.
        atol: Absolute difference.
    """

    rtol: float = 0.0
    atol: float = 0.0


@dataclass(frozen=True)
class TensorDifference:
    """The difference of a tensor between two models, a and b.

    Only elements that are finite in both count for the differences, the ULPs and the cosine.

    Attributes:
        name: Its name.
        dtypes: Its types in a and in b.
        shapes: Its shapes in a and in b. If they differ, the elements are not compared.
        same: Whether shapes and elements are the same; without a tolerance, also the types.
        elements: Number of elements.
        different: Number of elements that are beyond the tolerance. NaN is the same as NaN, and an infinite value the
            same as one with the same sign. For types without arithmetic, the number of different bytes.
        non_finite: Number of different elements that are NaN or infinite in one model only, or in another way.
        max_abs: Largest absolute difference.
        mean_abs: Mean absolute difference.
        max_rel: Largest absolute difference divided by the absolute value in b, where that is not zero.
        mean_rel: Mean of it.
        max_ulps: Largest number of steps from one element to the other, from number to next number of the type, as in
            `numpy.testing.assert_array_max_ulp`. If the types differ, the steps of the type with fewer digits, to which
            the other tensor is rounded. None for integers, and if only one is complex.
        cosine: Cosine of the angle between the tensors as vectors. None if one of them is zero, or if their squares
            exceed float64.
        nan: Number of NaN in a and in b.
        inf: Number of infinite values in a and in b.
    """

    name: str
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    same: bool
    elements: int = 0
    different: int = 0
    non_finite: int = 0
    max_abs: float | None = None
    mean_abs: float | None = None
    max_rel: float | None = None
    mean_rel: float | None = None
    max_ulps: int | None = None
    cosine: float | None = None
    nan: tuple[int, int] = (0, 0)
    inf: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Comparison:
    """The differences of two models.

    Attributes:
        only_in_a: Names of tensors that b does not have.
        only_in_b: Names of tensors that a does not have.
        tensors: The tensors of both, different ones first, ordered by the largest absolute difference.
    """

    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    tensors: tuple[TensorDifference, ...]

    @property
    def same(self) -> bool:
        """Whether both models have the same tensors, within the tolerance."""
        return not self.only_in_a and not self.only_in_b and all(tensor.same for tensor in self.tensors)


class _Pair:
    """A tensor in both models, and the way to compare its blocks."""

    def __init__(self, a: TensorEntry, b: TensorEntry) -> None:
        self.a, self.b = a.rows(), b.rows()
        self.has_numbers = all(_has_numbers(entry.element_type) for entry in (a, b))
        self.numel = a.numel if self.has_numbers else a.nbytes
        self.dtypes = (a.dtype, b.dtype) if self.has_numbers else (torch.uint8, torch.uint8)
        real = [dtype for dtype in self.dtypes if dtype.is_floating_point]
        self.is_real = len(real) == 2
        # The arithmetic of narrower types loses digits, and 8-bit types have no arithmetic.
        self.wide = torch.float64 if torch.float64 in real else torch.float32
        floats = [dtype.to_real() if dtype.is_complex else dtype for dtype in self.dtypes]
        all_float = all(dtype.is_floating_point for dtype in floats) and a.dtype.is_complex == b.dtype.is_complex
        self.ulps = max(floats, key=lambda dtype: torch.finfo(dtype).eps) if all_float else None
        sizes = [dtype.itemsize for dtype in self.dtypes]
        # Types of 8 bits are converted all at once.
        self.block = min(_BLOCK, _PART if min(sizes) == 1 else _BLOCK_BYTES // max(sizes))
        self.piece = max(STEP_BYTES // sum(sizes) // self.block, 1) * self.block

    @property
    def element_bytes(self) -> int:
        return self.dtypes[0].itemsize + self.dtypes[1].itemsize

    def file_ranges(self, start: int, count: int) -> list[FileRange]:
        """Return the places of elements that are in files."""
        ranges = (
            FileRange.of(source, start * dtype.itemsize, count * dtype.itemsize)
            for source, dtype in zip((self.a, self.b), self.dtypes, strict=True)
        )
        return [each for each in ranges if each is not None]


class _Piece(NamedTuple):
    pair: int
    start: int
    length: int


@dataclass
class _Sums:
    """The sums over some elements of a tensor."""

    different: int = 0
    non_finite: int = 0
    finite: int = 0
    sum_abs: float = 0.0
    max_abs: float = 0.0
    not_zero: int = 0
    sum_rel: float = 0.0
    max_rel: float = 0.0
    max_ulps: int = 0
    squares_a: float = 0.0
    squares_b: float = 0.0
    squares: float = 0.0
    nan_a: int = 0
    nan_b: int = 0
    inf_a: int = 0
    inf_b: int = 0

    def add(self, other: _Sums) -> None:
        for name, value in vars(other).items():
            mine = getattr(self, name)
            setattr(self, name, max(mine, value) if name.startswith("max_") else mine + value)

    def cosine(self) -> float | None:
        """Return the cosine; it has the digits close to 1 that a product of the two would not have."""
        a, b = math.sqrt(self.squares_a), math.sqrt(self.squares_b)
        if not a * b or not math.isfinite(self.squares_a + self.squares_b + self.squares):
            return None
        return max(-1.0, 1.0 - (self.squares - (a - b) ** 2) / (2 * a * b)) if self.squares else 1.0


def compare(
    a: Mapping[str, object],
    b: Mapping[str, object],
    tolerance: Tolerance | None = None,
    *,
    threads: int | None = None,
    progress: Callable[[int], object] | None = None,
) -> Comparison:
    """Compare two models. Each element is read once; memory use does not depend on the models.

    Args:
        a: A model: tensors or arrays by name, lazy or not.
        b: The model to compare it with; relative differences are relative to it.
        tolerance: Default: elements must have the same value, and tensors the same type.
        threads: Number of threads. Default: one per core.
        progress: Called with each number of bytes that have been compared, from any thread.

    Example:
        >>> compare(nvflare_lazy.open("a.safetensors"), nvflare_lazy.open("b.safetensors")).same
        True
    """
    entries_a, entries_b = _entries(a), _entries(b)
    names = [name for name in entries_a if name in entries_b]
    # Tied tensors are read once.
    pairs: dict[object, _Pair] = {}
    key_of: dict[str, object] = {}
    for name in names:
        first, second = entries_a[name], entries_b[name]
        if _shape(first) == _shape(second) and _comparable(first, second):
            key_of[name] = key = (_identity(first), _identity(second))
            if key not in pairs:
                pairs[key] = _Pair(first, second)
    sums = dict(zip(pairs, _run([*pairs.values()], tolerance or Tolerance(), threads, progress), strict=True))
    found = []
    for name in names:
        difference = _describe(name, entries_a[name], entries_b[name], needs_type=tolerance is None)
        if name in key_of:
            difference = _complete(difference, pairs[key_of[name]], sums[key_of[name]])
        found.append(difference)
    found.sort(key=lambda each: (each.same, each.elements > 0, -each.non_finite, -(each.max_abs or 0.0)))
    return Comparison(
        tuple(name for name in entries_a if name not in entries_b),
        tuple(name for name in entries_b if name not in entries_a),
        tuple(found),
    )


def _entries(model: Mapping[str, object]) -> dict[str, TensorEntry]:
    entries = getattr(model, "entries", None)
    return dict(entries) if entries is not None else {name: entry_of(value) for name, value in model.items()}


def _identity(entry: TensorEntry) -> object:
    return id(entry.source), entry.storage_offset, entry.strides, entry.shape, entry.element_type


def _has_numbers(kind: ElementType) -> bool:
    return kind.torch is not None and kind.packed == 1


def _comparable(a: TensorEntry, b: TensorEntry) -> bool:
    """Whether elements can be compared: two types with arithmetic, or bytes of one type."""
    return a.element_type == b.element_type or (_has_numbers(a.element_type) and _has_numbers(b.element_type))


def _shape(entry: TensorEntry) -> tuple[int, ...]:
    packed = entry.element_type.packed
    return (*entry.shape[:-1], entry.shape[-1] * packed) if packed != 1 and entry.shape else entry.shape


def _describe(name: str, a: TensorEntry, b: TensorEntry, *, needs_type: bool) -> TensorDifference:
    kinds = (a.element_type, b.element_type)
    dtypes = [kind.name or str(kind.torch).removeprefix("torch.") for kind in kinds]
    same = _shape(a) == _shape(b) and (kinds[0] == kinds[1] or (not needs_type and _comparable(a, b)))
    return TensorDifference(name, (dtypes[0], dtypes[1]), (_shape(a), _shape(b)), same)


def _complete(found: TensorDifference, pair: _Pair, sums: _Sums) -> TensorDifference:
    same = found.same and not sums.different
    if not pair.has_numbers:
        return replace(found, same=same, elements=math.prod(found.shapes[0]), different=sums.different)
    return replace(
        found,
        same=same,
        elements=pair.numel,
        different=sums.different,
        non_finite=sums.non_finite,
        max_abs=sums.max_abs,
        mean_abs=sums.sum_abs / sums.finite if sums.finite else 0.0,
        max_rel=sums.max_rel,
        mean_rel=sums.sum_rel / sums.not_zero if sums.not_zero else 0.0,
        max_ulps=sums.max_ulps if pair.ulps else None,
        cosine=sums.cosine(),
        nan=(sums.nan_a, sums.nan_b),
        inf=(sums.inf_a, sums.inf_b),
    )


def _run(
    pairs: Sequence[_Pair],
    tolerance: Tolerance,
    threads: int | None,
    progress: Callable[[int], object] | None,
) -> list[_Sums]:
    """Return the sums of each pair. They are added in the order of the elements, whatever the number of threads."""
    sums = [_Sums() for _ in pairs]

    def work(task: tuple[int, list[_Piece]], arena: Arena) -> list[tuple[int, _Sums]]:
        with ahead.step(task[0]) as loaded:
            return [(piece.pair, compare_piece(piece, loaded, arena)) for piece in task[1]]

    def compare_piece(piece: _Piece, loaded: Loaded, arena: Arena) -> _Sums:
        pair, found = pairs[piece.pair], _Sums()
        for start in range(piece.start, piece.start + piece.length, pair.block):
            count = min(pair.block, piece.start + piece.length - start)
            mark = arena.mark()
            known_ulps = max(found.max_ulps, sums[piece.pair].max_ulps)
            found.add(_compare(pair, start, count, loaded, arena, tolerance, known_ulps))
            arena.release(mark)
        if progress is not None:
            progress(piece.length * pair.element_bytes)
        return found

    def collect(found: list[tuple[int, _Sums]]) -> None:
        for index, part in found:
            sums[index].add(part)

    plan = MemoryPlan(threads or available_cores(), _BLOCK, _ARENA)
    files = (each.file for pair in pairs for each in pair.file_ranges(0, pair.numel))
    with ReadAhead(files, _steps(pairs), plan.threads) as ahead:
        run_tiles(enumerate(_tasks(pairs)), work, plan, PassMonitor(), collect=collect)
    return sums


def _steps(pairs: Sequence[_Pair]) -> Iterator[list[FileRange]]:
    for task in _tasks(pairs):
        yield [each for piece in task for each in pairs[piece.pair].file_ranges(piece.start, piece.length)]


def _tasks(pairs: Sequence[_Pair]) -> Iterator[list[_Piece]]:
    """Yield the pieces that one thread works on: parts of a large tensor, or many small tensors."""
    task: list[_Piece] = []
    room = STEP_BYTES
    for index, pair in enumerate(pairs):
        for start in range(0, pair.numel, pair.piece):
            piece = _Piece(index, start, min(pair.piece, pair.numel - start))
            nbytes = piece.length * pair.element_bytes
            if nbytes > room and task:
                yield task
                task, room = [], STEP_BYTES
            task.append(piece)
            room -= nbytes
    if task:
        yield task


def _compare(
    pair: _Pair, start: int, count: int, loaded: Loaded, arena: Arena, tolerance: Tolerance, known_ulps: int
) -> _Sums:
    """Return the sums of consecutive elements of a pair; `known_ulps` is the most steps in other elements of it."""
    a, b = (
        _read(source, dtype, start, count, loaded, arena)
        for source, dtype in zip((pair.a, pair.b), pair.dtypes, strict=True)
    )
    if not pair.has_numbers:
        return _Sums(different=int((a != b).sum()))
    mark = arena.mark()
    found = _Block(pair, a, b, arena).fast(tolerance, known_ulps)
    if found is None:
        found = _Sums()
        for begin in range(0, count, _EXACT_PART):
            arena.release(mark)
            part = _Block(pair, a[begin : begin + _EXACT_PART], b[begin : begin + _EXACT_PART], arena)
            found.add((part.fast(tolerance, known_ulps) if count > _EXACT_PART else None) or part.exact(tolerance))
    return found


def _read(source: ByteSource, dtype: torch.dtype, start: int, count: int, loaded: Loaded, arena: Arena) -> torch.Tensor:
    offset, nbytes = start * dtype.itemsize, count * dtype.itemsize
    raw = loaded.find(FileRange.of(source, offset, nbytes))
    if raw is None or raw.storage_offset() % dtype.itemsize:
        raw, buffer = arena.take_buffer(torch.uint8, nbytes)
        source.read_into(buffer, offset)
    return raw.view(dtype)


class _Block:
    """Some consecutive elements of a pair, in memory."""

    def __init__(self, pair: _Pair, a: torch.Tensor, b: torch.Tensor, arena: Arena) -> None:
        self._pair, self._count, self._arena = pair, len(a), arena
        self.a, self.b = a, b

    # ---- finite real numbers, in few operations ----------------------------------------------------------------------

    def _wide(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values, and the same or memory for them, of the type to compute with."""
        dtype = self._pair.wide
        if values.dtype is dtype:
            return values, values
        wide = self._arena.take(dtype, min(self._count, _PART))
        if values.dtype.itemsize == 1:
            # torch takes ten times as long to convert them.
            np.take(_table(values.dtype, dtype), values.view(torch.uint8).numpy(), out=wide.numpy(), mode="clip")
            return wide, wide
        return values, wide

    def fast(self, tolerance: Tolerance, known_ulps: int) -> _Sums | None:
        """Return the sums, or None if values are not real, not finite, or out of the range of squares.

        The maximum number of steps is at least `known_ulps`.
        """
        if not self._pair.is_real:
            return None
        (a, x), (b, y) = self._wide(self.a), self._wide(self.b)
        errors, ratios = (
            self._arena.take(wide.dtype, min(self._count, _PART)) if wide is values else wide
            for values, wide in ((a, x), (b, y))
        )
        least = self._least_error(known_ulps)
        numbers, rows = differences(
            a, b, x, y, errors, ratios, _ROW, tolerance.atol, tolerance.rtol, math.inf if least is None else least
        )
        if not numbers:
            return None
        found = _Sums(finite=self._count)
        found.squares_a, found.squares_b, found.squares = numbers[:3]
        found.max_abs, found.sum_abs, different, found.max_rel, found.sum_rel, not_zero = numbers[3:]
        found.different, found.not_zero = int(different), int(not_zero)
        if not found.max_abs:
            return found
        if least is None or len(rows) * _ROW > self._count // 8:
            has_same_signs = found.max_rel < 1 and found.not_zero == self._count
            found.max_ulps = self._ulps_of_all(has_same_signs=has_same_signs)
        else:
            found.max_ulps = max(known_ulps, self._ulps_of_rows(rows.numpy()) if len(rows) else 0)
        return found

    def _least_error(self, known_ulps: int) -> float | None:
        """Return the smallest difference of elements with more steps between them, or None if it is not known."""
        dtype = self._pair.ulps
        # Other types are rounded before their steps are counted.
        if dtype is None or self.a.dtype is not self.b.dtype:
            return None
        # With p digits, neighbors of a number z are |z| / 2**p apart or more. If |a - b| < |b| / 2, all numbers between
        # a and b exceed |b| / 2, so a and b are at most 2**p steps apart. With other signs, it is usually far more.
        return _least_error(dtype, known_ulps) if known_ulps > 2.1 / torch.finfo(dtype).eps else None

    def _ulps_of_all(self, *, has_same_signs: bool) -> int:
        """Return the largest distance in steps of all elements."""
        most, mark = 0, self._arena.mark()
        for begin in range(0, self._count, _PART):
            a, b = self._both_bits(slice(begin, begin + _PART))
            if has_same_signs and self.a.dtype is self.b.dtype:
                # The distance of the numbers equals the distance of their bits.
                steps = np.subtract(a, b, out=self._take(_INTEGERS[a.itemsize], len(a)))
                most = max(most, int(steps.max()), -int(steps.min()))
            else:
                most = max(most, self._distance(a, b))
            self._arena.release(mark)
        return most

    def _ulps_of_rows(self, rows: Array) -> int:
        """Return the largest distance in steps of the elements of some rows, and of those after the last whole row."""
        whole = self._count // _ROW
        rows = rows[rows < whole]
        a, b = (
            np.append(bits[: whole * _ROW].reshape(-1, _ROW)[rows], bits[whole * _ROW :])
            for bits in self._both_bits(slice(None))
        )
        return self._distance(a, b)

    def _both_bits(self, where: slice) -> tuple[Array, Array]:
        dtype = self._pair.ulps
        assert dtype is not None
        return _bits(_of_type(self.a[where], dtype)), _bits(_of_type(self.b[where], dtype))

    def _take(self, dtype: torch.dtype, count: int) -> Array:
        """Return memory of the thread."""
        memory: Array = self._arena.take(dtype, count).numpy()
        return memory

    # ---- all other values, in float64 --------------------------------------------------------------------------------

    # Sums that exceed float64 are infinite.
    @np.errstate(over="ignore")
    def exact(self, tolerance: Tolerance) -> _Sums:
        x, y = _as_numpy(self.a), _as_numpy(self.b)
        found = _Sums(
            nan_a=int(np.isnan(x).sum()),
            nan_b=int(np.isnan(y).sum()),
            inf_a=int((np.isinf(x) & ~np.isnan(x)).sum()),
            inf_b=int((np.isinf(y) & ~np.isnan(y)).sum()),
        )
        finite = np.isfinite(x) & np.isfinite(y)
        found.finite = int(finite.sum())
        if found.finite < self._count:
            odd_x, odd_y = x[~finite], y[~finite]
            same = (odd_x == odd_y) | (np.isnan(odd_x) & np.isnan(odd_y))
            found.non_finite = found.different = int((~same).sum())
            x, y = x[finite], y[finite]
        if not found.finite:
            return found
        error, size = _distance(x, y), np.abs(_as_double(y))
        found.different += int((error > tolerance.atol + tolerance.rtol * size).sum())
        found.max_abs, found.sum_abs = float(error.max()), float(error.sum())
        found.squares = float(np.dot(error, error))
        found.squares_b = float(np.dot(size, size))
        size_a = np.abs(_as_double(x))
        found.squares_a = float(np.dot(size_a, size_a))
        not_zero = size != 0
        found.not_zero = int(not_zero.sum())
        if found.not_zero:
            ratio = error[not_zero] / size[not_zero]
            found.max_rel, found.sum_rel = float(ratio.max()), float(ratio.sum())
        if self._pair.ulps is not None:
            found.max_ulps = self._ulps(finite)
        return found

    def _ulps(self, finite: Array) -> int:
        """Return the largest distance in steps between neighboring numbers, of the finite elements."""
        dtype = self._pair.ulps
        assert dtype is not None
        first, second = (_bits(_of_type(values, dtype)) for values in (self.a, self.b))
        if not finite.all():
            finite = finite.repeat(len(first) // len(finite))
            first, second = first[finite], second[finite]
        return self._distance(first, second)

    def _distance(self, a: Array, b: Array) -> int:
        """Return the largest distance of numbers in steps, from their bits."""
        first, second = self._steps(a), self._steps(b)
        high = np.maximum(first, second)
        np.subtract(high, np.minimum(first, second, out=first), out=high)
        # The difference of two signed numbers always fits into an unsigned one.
        return int(high.view(f"u{high.itemsize}").max(initial=0))

    def _steps(self, bits: Array) -> Array:
        """Return integers that are in the order of the numbers, with neighbors one apart; both zeros are 0."""
        sign, steps = (self._take(_INTEGERS[bits.itemsize], len(bits)) for _ in range(2))
        np.right_shift(bits, 8 * bits.itemsize - 1, out=sign)
        np.bitwise_and(sign, np.iinfo(bits.dtype).max, out=steps)
        np.bitwise_xor(steps, bits, out=steps)
        return np.subtract(steps, sign, out=steps)


@lru_cache
def _table(dtype: torch.dtype, wide: torch.dtype) -> Array:
    """Return the values of a type of 8 bits, by their bits."""
    values: Array = torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32).to(wide).numpy()
    return values


@lru_cache
def _least_error(dtype: torch.dtype, steps: int) -> float:
    """Return the smallest difference of numbers with more steps between them, unless it is less than half of a number.

    If n(x) is the number of steps from zero to x, n is concave. With different signs, there are therefore
    n(|a|) + n(|b|) <= 2 n(|a - b| / 2) steps between a and b. With the same sign, both are at most 3 |a - b|, so there
    are at most n(3 |a - b|).
    """
    largest = int(_bits(torch.tensor([torch.finfo(dtype).max]).to(dtype))[0])

    def number(steps: int) -> float:
        bits = torch.tensor([min(steps, largest)]).to(_INTEGERS[dtype.itemsize])
        return float(bits.view(dtype).to(torch.float32 if dtype.itemsize == 1 else torch.float64))

    # The differences are rounded.
    return 0.999 * min(2 * number(steps // 2), number(steps) / 3)


def _of_type(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the real numbers of a tensor, rounded to a type."""
    if values.is_complex():
        values = values.view(values.dtype.to_real())
    return (
        values
        if values.dtype is dtype
        else values.to(torch.float32).to(dtype)
        if dtype.itemsize == 1
        else values.to(dtype)
    )


def _bits(values: torch.Tensor) -> Array:
    """Return the bits of real numbers as signed integers, in which a number below zero has the sign."""
    bits: Array = values.view(_INTEGERS[values.dtype.itemsize]).numpy()
    return bits.view(np.uint8).astype(np.int16) if values.dtype is getattr(torch, "float8_e8m0fnu", None) else bits


def _as_numpy(values: torch.Tensor) -> Array:
    """Return the values in a type of NumPy that has them all."""
    if values.dtype is torch.bool:
        values = values.view(torch.uint8)
    elif values.dtype is torch.complex32:
        # torch warns that this type is experimental, except in views.
        values = values.view(torch.float16).to(torch.float32).view(torch.complex64)
    elif values.dtype.is_floating_point:
        values = values.to(torch.float32 if values.dtype.itemsize < 8 else torch.float64)
    array: Array = values.numpy()
    return array


def _as_double(values: Array) -> Array:
    return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)


def _distance(x: Array, y: Array) -> Array:
    """Return the absolute differences in float64; those of integers are exact before they are rounded."""
    if x.dtype.kind in "iu" and y.dtype.kind in "iu":
        common = np.result_type(x, y)
        if common.kind in "iu":
            wide = np.uint64 if common.kind == "u" else np.int64
            x, y = x.astype(wide), y.astype(wide)
            exact: Array = np.maximum(x, y).view(np.uint64) - np.minimum(x, y).view(np.uint64)
            return exact.astype(np.float64)
    distance: Array = np.abs(_as_double(x) - _as_double(y))
    return distance

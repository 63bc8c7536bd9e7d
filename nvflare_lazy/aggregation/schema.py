# SPDX-License-Identifier: Apache-2.0
"""The schema of a round, resolved before data is read: contributors, weights, tensor names, shapes and dtypes.

Contributions are untrusted. The global model defines the expected schema; without it, most contributors do. A
contribution that differs raises an error or is skipped, as the caller chooses. `flare` uses the same functions when a
result arrives.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import reduce
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

import torch

from nvflare_lazy._text import quoted
from nvflare_lazy.aggregation._engine.rounding import FLOATS
from nvflare_lazy.aggregation._engine.tile import TensorGroup
from nvflare_lazy.aggregation._engine.tile_io import InputVector, real_numel
from nvflare_lazy.errors import (
    AggregationDtypeError,
    MismatchError,
    NothingToAggregateError,
    UnsupportedDtypeError,
    UnsupportedTensorError,
    WeightError,
)
from nvflare_lazy.formats.lazy_tensor_dict import LazyTensorDict
from nvflare_lazy.formats.safetensors.layout import TensorMeta, in_file_order
from nvflare_lazy.tensors import dtypes
from nvflare_lazy.tensors.entry import TensorSpec, entry_of

if TYPE_CHECKING:
    import re
    from collections.abc import Mapping, Sequence

    from nvflare_lazy.tensors.entry import TensorEntry

#: Handling of a contribution that does not match the others.
MismatchPolicy = Literal["error", "skip"]
#: Dtypes that can be aggregated. The others have no arithmetic, or none without rounding.
COMPUTABLE = FLOATS | {
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16),
    *(torch.uint32, torch.int32, torch.uint64, torch.int64, torch.complex64),
}
#: Dtypes that are converted to each other when they are read, so that contributors may differ in precision.
CONVERTIBLE = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
# In a tie, later types win.
_RANKS = {row.torch: rank for rank, row in enumerate(dtypes.ELEMENT_TYPES)}
_MAX_NAMES = 3


def read_entries(
    tensors: Mapping[str, Any], owner: str, exclude: re.Pattern[str] | None = None
) -> dict[str, TensorEntry]:
    """Return the entries of a contribution by name; no tensor is read.

    Args:
        tensors: Tensors or arrays by name, lazy or not.
        owner: Owner of the tensors, for messages.
        exclude: Values whose names match are ignored, whatever their type.

    Raises:
        UnsupportedTensorError: If a value is not a tensor or array, or has no dense elements.
        UnsupportedDtypeError: If torch does not support the type of a value.
    """
    # The entries exist already; creating 20,000 lazy tensors from them first would take a second.
    values: Mapping[str, Any] = tensors.entries if isinstance(tensors, LazyTensorDict) else tensors
    entries = {}
    for name, value in values.items():
        if not isinstance(name, str):
            raise UnsupportedTensorError(f"invalid tensor name {name!r} in {owner}: expected a string")
        if exclude is not None and exclude.search(name):
            continue
        try:
            entries[name] = entry = entry_of(value)
            if entry.element_type.torch is None:
                _ = entry.dtype  # raises
        except (UnsupportedTensorError, UnsupportedDtypeError) as error:
            raise type(error)(f"{name!r} of {owner}: {error}; or exclude it") from error
    return entries


def specs_of(entries: Mapping[str, TensorEntry]) -> dict[str, TensorSpec]:
    """Return dtype and shape of each tensor."""
    return {name: entry.spec for name, entry in entries.items()}


def find_mismatch(specs: Mapping[str, TensorSpec], expected: Mapping[str, TensorSpec]) -> str | None:
    """Describe how the tensors of a contribution differ from the expected ones, or return None.

    Tensors may be missing. A floating-point tensor may have another precision than expected: it is converted when it is
    read.
    """
    if specs.keys() - expected.keys():
        return f"unexpected tensor {listed([name for name in specs if name not in expected])}"
    for name, spec in specs.items():
        right = expected[name]
        if spec == right and spec.dtype in COMPUTABLE:
            continue
        if spec.shape != right.shape:
            return f"{quoted(name)} has shape {list(spec.shape)}, expected {list(right.shape)}"
        if spec.dtype not in COMPUTABLE:
            return f"{quoted(name)} is {spec.dtype}, which cannot be aggregated"
        if not (spec.dtype in CONVERTIBLE and right.dtype in CONVERTIBLE):
            return f"{quoted(name)} is {spec.dtype}, expected {right.dtype}"
    return None


def listed(names: Sequence[object]) -> str:
    """Return the first few of some untrusted names, and the number of the others."""
    named = ", ".join(quoted(name) for name in names[:_MAX_NAMES])
    return named if len(names) <= _MAX_NAMES else f"{named} and {len(names) - _MAX_NAMES} more"


@dataclass(frozen=True)
class RoundSchema:
    """The contributors and tensors of a round.

    Attributes:
        names: The contributors whose contributions are used, in order.
        weights: Their weights.
        specs: The tensors of the result, in the order they have in a file.
        holders: For each tensor, the contributors that have it, as indices into `names`.
        skipped: The contributors whose contributions are skipped, and why.
    """

    names: tuple[str, ...]
    weights: tuple[float, ...]
    specs: dict[str, TensorSpec]
    holders: dict[str, tuple[int, ...]]
    skipped: dict[str, Exception]


def resolve_schema(
    contributions: Mapping[str, Mapping[str, TensorEntry]],
    weights: Mapping[str, float],
    *,
    reference: Mapping[str, TensorEntry] | None,
    params_type: str,
    requires_all_tensors: bool,
    on_mismatch: MismatchPolicy,
) -> RoundSchema:
    """Return the schema of a round.

    The global model defines the expected names, shapes and dtypes if it is passed; otherwise most contributors do. Most
    contributors also decide the precision of differences, which may need more digits than the model.
    """
    skipped: dict[str, Exception] = {
        name: WeightError("weight is zero") for name in sorted(contributions) if not weights[name]
    }
    names = [name for name in sorted(contributions) if name not in skipped]
    if contributions and not names:
        raise WeightError(f"the weights of all contributors are zero: {listed(sorted(contributions))}")
    sent = {name: specs_of(contributions[name]) for name in names}
    of_model = None if reference is None else specs_of(reference)
    expected = _expected(sent, of_model, keeps_precision=params_type == "DIFF")
    mismatches = {name: reason for name, specs in sent.items() if (reason := find_mismatch(specs, expected))}
    if requires_all_tensors:
        mismatches |= _find_incomplete({name: specs for name, specs in sent.items() if name not in mismatches})
    for name, reason in sorted(mismatches.items()):
        others = "the other contributions" if reference is None else "the global model"
        error = MismatchError(
            f"contribution {quoted(name)} does not match {others}: {reason}; "
            "exclude the tensor, fix the client or set on_mismatch='skip'"
        )
        if on_mismatch == "error":
            raise error
        skipped[name] = error
    staying = tuple(name for name in names if name not in skipped)
    if not staying:
        raise NothingToAggregateError("no usable contributions" + reasons(skipped), skipped)
    everyone = tuple(range(len(staying)))
    if all(len(sent[name]) == len(expected) for name in staying):
        holders = dict.fromkeys(expected, everyone)
    else:
        holders = {key: tuple(index for index in everyone if key in sent[staying[index]]) for key in expected}
    result = {key: spec for key, spec in expected.items() if holders[key]}
    if not result:
        raise NothingToAggregateError("no tensors to aggregate: all tensors were excluded, or none were sent")
    # The order in the output file, and in most input files: adjacent tensors are read with one request.
    in_order = {meta.name: result[meta.name] for meta in in_file_order(tensor_metas(result))}
    return RoundSchema(staying, tuple(weights[name] for name in staying), in_order, holders, skipped)


def validate_weights(names: Sequence[str], weights: Mapping[str, float] | None) -> dict[str, float]:
    """Return the weight of each contributor as a float. Default: 1 for each."""
    if weights is None:
        return dict.fromkeys(names, 1.0)
    missing = [name for name in names if name not in weights]
    if missing:
        raise WeightError(f"missing weights for {listed(missing)}; pass a weight for every contributor, or none")
    return {name: _as_weight(name, weights[name]) for name in names}


def _as_weight(name: str, weight: object) -> float:
    # NumPy's scalars are also real numbers; a bool is one by accident, and a tensor may be anything.
    if isinstance(weight, Real) and not isinstance(weight, bool):
        try:
            number = float(weight)
        except OverflowError:
            number = math.inf
        if 0 <= number < math.inf:
            return number
    raise WeightError(f"the weight of {quoted(name)} must be zero or a positive number, got {quoted(weight)}")


def group_tensors(
    schema: RoundSchema,
    contributions: Mapping[str, Mapping[str, TensorEntry]],
    reference: Mapping[str, TensorEntry] | None,
) -> list[TensorGroup]:
    """Return the tensors of a round, grouped by dtype and by the contributors that have them."""
    together: dict[tuple[torch.dtype, tuple[int, ...]], list[str]] = {}
    for key, spec in schema.specs.items():
        together.setdefault((spec.dtype, schema.holders[key]), []).append(key)
    groups = []
    for index, ((dtype, members), keys) in enumerate(together.items()):
        contributors = tuple(schema.names[member] for member in members)
        entries = [[contributions[name][key] for key in keys] for name in contributors]
        groups.append(
            TensorGroup(
                index=index,
                dtype=dtype,
                names=tuple(keys),
                sizes=tuple(real_numel(schema.specs[key]) for key in keys),
                members=members,
                contributors=contributors,
                inputs=tuple(InputVector(own, dtype) for own in entries),
                reference=None if reference is None else InputVector([reference[key] for key in keys], dtype),
            )
        )
    return groups


def tensor_metas(specs: Mapping[str, TensorSpec]) -> list[TensorMeta]:
    """Return the metadata of a file of these tensors."""
    return [TensorMeta(key, dtypes.by_torch(spec.dtype).name or "", spec.shape) for key, spec in specs.items()]


def _expected(
    sent: Mapping[str, Mapping[str, TensorSpec]],
    reference: Mapping[str, TensorSpec] | None,
    *,
    keeps_precision: bool,
) -> dict[str, TensorSpec]:
    """Return the expected spec of each tensor: that of the global model if it is known, else the choice of most."""
    first = next(iter(sent.values()))
    if reference is not None and not keeps_precision:
        wanted = {key for specs in sent.values() for key in specs}
        expected = {key: spec for key, spec in reference.items() if key in wanted}
    elif reference is None and all(specs == first for specs in sent.values()):
        expected = dict(first)
    else:
        votes: dict[str, Counter[TensorSpec]] = {}
        for specs in sent.values():
            for key, spec in specs.items():
                votes.setdefault(key, Counter())[spec] += 1
        if reference is not None:
            votes = {key: _of_kind(reference[key], count) for key, count in votes.items() if key in reference}
        expected = {key: _elect(count, len(sent)) for key, count in votes.items()}
    for key, spec in expected.items():
        # A single contributor cannot end a round with its dtype: only the majority's dtype counts.
        if spec.dtype not in COMPUTABLE and 2 * sum(key in specs for specs in sent.values()) > len(sent):
            owner = "" if reference is None else " in the global model"
            raise AggregationDtypeError(f"{quoted(key)} is {spec.dtype}{owner}, which cannot be aggregated; exclude it")
    return expected


def _of_kind(right: TensorSpec, votes: Counter[TensorSpec]) -> Counter[TensorSpec]:
    """Return the votes for the shape and the kind of a spec; without votes, one for the spec."""
    if right.dtype in CONVERTIBLE:
        votes = Counter(
            {spec: n for spec, n in votes.items() if spec.shape == right.shape and spec.dtype in CONVERTIBLE}
        )
        if votes:
            return votes
    return Counter((right,))


def _elect(votes: Counter[TensorSpec], contributors: int) -> TensorSpec:
    """Return the shape and dtype that most contributors have; types that are converted to each other count as one.

    In a tie of dtypes, the type to which all convert without loss wins, then floating point; in a tie of shapes, that
    of the first contributor by name.
    """
    kinds: dict[tuple[torch.dtype | None, tuple[int, ...]], Counter[torch.dtype]] = {}
    for spec, count in votes.items():
        kind = None if spec.dtype in CONVERTIBLE else spec.dtype
        kinds.setdefault((kind, spec.shape), Counter())[spec.dtype] += count

    def rank(kind: tuple[torch.dtype | None, tuple[int, ...]]) -> tuple[int, bool, bool, int]:
        dtype, count = kind[0], kinds[kind].total()
        is_computable = dtype is None or dtype in COMPUTABLE
        # Types without arithmetic win only against all others together.
        return (
            count if is_computable or 2 * count > contributors else 0,
            is_computable,
            dtype is None,
            _RANKS.get(dtype, 0),
        )

    _, shape = winner = max(kinds, key=rank)
    most = max(kinds[winner].values())
    return TensorSpec(reduce(torch.promote_types, (t for t, count in kinds[winner].items() if count == most)), shape)


def _find_incomplete(sent: Mapping[str, Mapping[str, TensorSpec]]) -> dict[str, str]:
    """Describe for each contribution how its names differ from the majority's; in a tie, from the most names."""
    votes = Counter(frozenset(specs) for specs in sent.values())
    if len(votes) <= 1:
        return {}
    names = max(votes, key=lambda some: (votes[some], len(some), sorted(some)))
    found = {}
    for name, specs in sent.items():
        missing, surplus = sorted(names - specs.keys()), sorted(specs.keys() - names)
        if missing:
            found[name] = f"no tensor {listed(missing)}, but the rule requires every tensor"
        elif surplus:
            found[name] = f"unexpected tensor {listed(surplus)}"
    return found


def reasons(skipped: Mapping[str, Exception]) -> str:
    """Return the skipped contributors and the reasons, for the end of a message."""
    return "".join(f"; skipped {name!r}: {error}" for name, error in sorted(skipped.items()))

# SPDX-License-Identifier: Apache-2.0
"""The schema of a round, resolved before data is read: contributors, weights, tensor names, shapes and dtypes.

Contributions are untrusted. The majority of them, or the global model, defines the expected schema; a contribution that
differs raises an error or is skipped, as the caller chooses.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

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
from nvflare_lazy.tensors.entry import entry_of

if TYPE_CHECKING:
    import re
    from collections.abc import Mapping, Sequence

    from nvflare_lazy.tensors.entry import TensorEntry, TensorSpec

#: Handling of a contribution that does not match the others.
MismatchPolicy = Literal["error", "skip"]
_COMPUTABLE = FLOATS | {
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16),
    *(torch.uint32, torch.int32, torch.uint64, torch.int64, torch.complex64),
}


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
            raise type(error)(f"{name!r} of {owner}: {error}; exclude it or convert it first") from error
    return entries


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
    requires_all_tensors: bool,
    on_mismatch: MismatchPolicy,
) -> RoundSchema:
    """Return the schema of a round.

    The global model defines the expected names and shapes if it is passed; otherwise most contributors do.
    """
    skipped: dict[str, Exception] = {
        name: WeightError("weight is zero") for name in sorted(contributions) if not weights[name]
    }
    names = [name for name in sorted(contributions) if name not in skipped]
    if contributions and not names:
        raise WeightError(f"the weights of all contributors are zero: {', '.join(sorted(contributions))}")
    sent = {name: {key: entry.spec for key, entry in contributions[name].items()} for name in names}
    expected = _expected(sent, reference)
    keys = _common_keys(sent) & expected.keys() if requires_all_tensors else None
    for name, specs in sent.items():
        error = _find_mismatch(name, specs, expected, keys)
        if error is not None:
            if on_mismatch == "error":
                raise error
            skipped[name] = error
    staying = tuple(name for name in names if name not in skipped)
    if not staying:
        raise NothingToAggregateError("no usable contributions" + reasons(skipped))
    holders: dict[str, tuple[int, ...]] = {
        key: tuple(index for index, name in enumerate(staying) if key in sent[name]) for key in expected
    }
    result = {key: spec for key, spec in expected.items() if holders[key]}
    if not result:
        raise NothingToAggregateError("no tensors to aggregate: all tensors were excluded, or none were sent")
    return RoundSchema(
        staying,
        tuple(float(weights[name]) for name in staying),
        _in_order(result),
        holders,
        skipped,
    )


def validate_weights(names: Sequence[str], weights: Mapping[str, float] | None) -> dict[str, float]:
    """Return the weight of each contributor. Default: 1 for each."""
    if weights is None:
        return dict.fromkeys(names, 1.0)
    missing = [name for name in names if name not in weights]
    if missing:
        raise WeightError(f"missing weights for {', '.join(missing)}; pass a weight for every contributor, or none")
    for name in names:
        if not 0 <= weights[name] < math.inf:
            raise WeightError(f"the weight of {name!r} must be zero or a positive number, got {weights[name]!r}")
    return {name: float(weights[name]) for name in names}


def group_tensors(
    schema: RoundSchema,
    contributions: Mapping[str, Mapping[str, TensorEntry]],
    reference: Mapping[str, TensorEntry] | None,
) -> list[TensorGroup]:
    """Return the tensors of a round, grouped by dtype and by the contributors that have them."""
    together: dict[tuple[torch.dtype, tuple[int, ...], torch.dtype | None], list[str]] = {}
    for key, spec in schema.specs.items():
        of_reference = None if reference is None else reference[key].dtype
        together.setdefault((spec.dtype, schema.holders[key], of_reference), []).append(key)
        if of_reference is not None and of_reference.is_complex != spec.dtype.is_complex:
            raise AggregationDtypeError(f"{key!r} is {spec.dtype}, but {of_reference} in the global model; exclude it")
    groups = []
    for index, ((dtype, members, _), keys) in enumerate(together.items()):
        contributors = tuple(schema.names[member] for member in members)
        entries = [[contributions[name][key] for key in keys] for name in contributors]
        groups.append(
            TensorGroup(
                index=index,
                dtype=dtype,
                names=tuple(keys),
                sizes=tuple(map(real_numel, entries[0])),
                members=members,
                contributors=contributors,
                inputs=tuple(map(InputVector, entries)),
                reference=None if reference is None else InputVector([reference[key] for key in keys]),
            )
        )
    return groups


def tensor_metas(specs: Mapping[str, TensorSpec]) -> list[TensorMeta]:
    """Return the metadata of a file of these tensors."""
    return [TensorMeta(key, dtypes.by_torch(spec.dtype).name or "", spec.shape) for key, spec in specs.items()]


def _in_order(specs: dict[str, TensorSpec]) -> dict[str, TensorSpec]:
    for key, spec in specs.items():
        if spec.dtype not in _COMPUTABLE:
            raise AggregationDtypeError(f"{key!r} is {spec.dtype}, which cannot be aggregated; exclude it")
    # The order in the output file, and in most input files: adjacent tensors are read with one request.
    return {meta.name: specs[meta.name] for meta in in_file_order(tensor_metas(specs))}


def _expected(
    sent: Mapping[str, Mapping[str, TensorSpec]], reference: Mapping[str, TensorEntry] | None
) -> dict[str, TensorSpec]:
    """Return the spec of each tensor in most contributions; its shape must be that of the global model, if known."""
    votes: dict[str, Counter[TensorSpec]] = {}
    for specs in sent.values():
        for key, spec in specs.items():
            votes.setdefault(key, Counter())[spec] += 1
    if reference is not None:
        votes = {key: count for key, count in votes.items() if key in reference}
        for key, count in votes.items():
            right = {spec: number for spec, number in count.items() if spec.shape == reference[key].shape}
            votes[key] = Counter(right or {reference[key].spec: 1})
    # In a tie, the spec of the first contributor by name wins.
    return {key: count.most_common(1)[0][0] for key, count in votes.items()}


def _common_keys(sent: Mapping[str, Mapping[str, TensorSpec]]) -> frozenset[str]:
    return Counter(frozenset(specs) for specs in sent.values()).most_common(1)[0][0]


def _find_mismatch(
    name: str, specs: Mapping[str, TensorSpec], expected: Mapping[str, TensorSpec], keys: frozenset[str] | None
) -> MismatchError | None:
    if keys is not None:
        missing = sorted(keys - specs.keys())
        if missing:
            return MismatchError(
                f"contribution {name!r} has no tensor {missing[0]!r}{_and_more(missing)}, but the rule requires every "
                "tensor; exclude the tensor or set on_mismatch='skip'"
            )
    surplus = sorted(specs.keys() - (expected.keys() if keys is None else keys))
    if surplus:
        return MismatchError(
            f"contribution {name!r} has an unexpected tensor {surplus[0]!r}{_and_more(surplus)}; "
            "exclude it or set on_mismatch='skip'"
        )
    for key, spec in specs.items():
        right = expected[key]
        if spec.shape != right.shape:
            return MismatchError(
                f"shape mismatch for {key!r} from {name!r}: expected {list(right.shape)}, got {list(spec.shape)}; "
                "fix the client or set on_mismatch='skip'"
            )
        if spec.dtype != right.dtype:
            return MismatchError(
                f"dtype mismatch for {key!r} from {name!r}: expected {right.dtype}, got {spec.dtype}; "
                "fix the client or set on_mismatch='skip'"
            )
    return None


def _and_more(keys: Sequence[str]) -> str:
    return f" (and {len(keys) - 1} more)" if len(keys) > 1 else ""


def reasons(skipped: Mapping[str, Exception]) -> str:
    """Return the skipped contributors and the reasons, for the end of a message."""
    return "".join(f"; skipped {name!r}: {error}" for name, error in sorted(skipped.items()))

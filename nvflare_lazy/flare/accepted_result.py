# SPDX-License-Identifier: Apache-2.0
"""Acceptance of results: what a client states becomes plain, trusted values here, or its result is skipped.

`TensorOffload` accepts a result before NVFlare's aggregation reads it, and `LazyAggregator` before it keeps the result
until the end of the round. `docs/security.md` lists the rules.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
from nvflare.apis.dxo import DXO, MetaKey
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.app_constant import AlgorithmConstants, AppConstants

from nvflare_lazy._text import quoted
from nvflare_lazy.aggregation import ParamsType as ParamsKind
from nvflare_lazy.aggregation.schema import find_mismatch, listed, specs_of
from nvflare_lazy.errors import ResultMismatchError, UnsupportedDtypeError, UnsupportedTensorError
from nvflare_lazy.flare.job_context import kind_of_data
from nvflare_lazy.flare.subtree import Subtree, subtree_of
from nvflare_lazy.flare.tensor_names import TensorNames, renamed
from nvflare_lazy.flare.weights import holds_arrays, is_array, is_lazy, is_weight
from nvflare_lazy.tensors.entry import TensorEntry, TensorSpec, entry_of, geometry_of
from nvflare_lazy.transport.failed import failure_of

CLIENT_NAME = "client_name"
MAX_STEPS = 1e12
MAX_METRICS = 1000
_MAX_TEXT = 256
_CONTROL_DIFF = AlgorithmConstants.SCAFFOLD_CTRL_DIFF
_SMALL = 16
# The integers that torch multiplies by a weight.
_AVERAGED = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


@dataclass(frozen=True)
class Expectation:
    """The properties that the results of a round must have.

    Attributes:
        reference: The global model by name, or None if it is unknown.
        exclude: Tensors whose names match are not part of the result.
        kind: Whether results are models or differences, or None if most results decide.
        controls: SCAFFOLD's global control variates; a result must then have their change.
        ignore_unknown: Whether tensors that the global model does not have are left to another aggregator.
        by_nvflare: Whether NVFlare's own aggregation computes the mean, in whose models integers become floating-point
            numbers.
        names: Further names that clients use for the tensors of the global model.
        in_tree: Whether senders may pass on the aggregate of other clients. In a job without a tree, a client that
            states one would count as many.
    """

    reference: Mapping[str, Any] | None = None
    exclude: re.Pattern[str] | None = None
    kind: ParamsKind | None = None
    controls: Mapping[str, Any] | None = None
    ignore_unknown: bool = False
    by_nvflare: bool = False
    names: TensorNames | None = None
    in_tree: bool = False


@dataclass(frozen=True)
class AcceptedResult:
    """A result as plain, trusted values; only the elements of its tensors are still unread.

    Attributes:
        client: The client, by the name that NVFlare has for it.
        kind: Whether the tensors are a model or a difference.
        tensors: The tensors, without the excluded ones.
        controls: The change of SCAFFOLD's control variates, if the round expects it.
        steps: The number of training steps, 1 if the client does not state it.
        metrics: Finite numbers, or None if the client sent no metrics at all.
        text_metrics: Short texts among the metrics, which are not averaged.
        dropped_metrics: Names and types of other values, as text.
        excluded: Names of the excluded tensors.
        numpy: Whether the client sent arrays.
        on_disk: Whether a tensor is lazy.
        renamed: The names that the client used for tensors that have another name here, or None if they are dropped.
        subtree: What the sender states about the results below it, if it is a node in the middle of a tree of clients.
    """

    client: str
    kind: ParamsKind
    tensors: dict[str, TensorEntry]
    controls: dict[str, TensorEntry] | None
    steps: float
    metrics: dict[str, float] | None
    text_metrics: dict[str, str]
    dropped_metrics: str
    excluded: frozenset[str]
    numpy: bool
    on_disk: bool
    renamed: Mapping[str, str | None] = field(default_factory=dict)
    subtree: Subtree | None = None

    @property
    def weight(self) -> float:
        """The weight of the result; 0 steps count as 1, as in NVFlare's FedAvg."""
        return self.steps or 1.0

    @property
    def count(self) -> int:
        """The number of results of clients that it consists of."""
        return 1 if self.subtree is None else self.subtree.results

    def tensors_by_weight(self) -> dict[float, dict[str, TensorEntry]]:
        """Return the tensors for each weight; only those of a subtree may have several."""
        own = {} if self.subtree is None else self.subtree.tensor_weights
        if not own:
            return {self.weight: self.tensors}
        found: dict[float, dict[str, TensorEntry]] = {}
        for name, entry in self.tensors.items():
            found.setdefault(own.get(name, self.weight), {})[name] = entry
        return found


def accept_result(client: str, stated: FLModel | DXO, expected: Expectation) -> AcceptedResult:
    """Return a result as plain values, all-or-nothing.

    Args:
        client: The client.
        stated: The result as NVFlare decoded it. Nothing in it is trusted, and it is not read again.
        expected: The properties that it must have.

    Raises:
        ResultMismatchError: If the result cannot be used, for whatever reason.
    """
    try:
        return _accept(client, stated, expected)
    except ResultMismatchError:
        raise
    except Exception as error:
        raise ResultMismatchError(
            f"the result of {shown(client)} cannot be used: {type(error).__name__}: {quoted(str(error))}"
        ) from error


def _accept(client: str, stated: FLModel | DXO, expected: Expectation) -> AcceptedResult:
    who = shown(client)
    meta = {} if stated.meta is None else stated.meta
    if not isinstance(meta, dict):
        raise ResultMismatchError(f"the metadata of {who} must be a dictionary, got {type(meta).__name__}")
    if isinstance(stated, DXO):
        params, metrics = stated.data, meta.get(MetaKey.INITIAL_METRICS)
        kind, stated_kind = kind_of_data(stated.data_kind), stated.data_kind
    else:
        params, metrics = stated.params, stated.metrics
        kind, stated_kind = _kind_of_params(stated.params_type), stated.params_type
    if kind is None:
        raise ResultMismatchError(f"{who} sent data of an unknown kind, {described(stated_kind)}")
    if expected.kind not in (None, kind):
        raise ResultMismatchError(odd_kind(client, kind, f"params_type is {expected.kind}"))
    everything = _plain_dict(params, f"the result of {who}", any_names=expected.ignore_unknown)
    excluded = _excluded(everything, expected.exclude)
    subtree = subtree_of(meta, who, everything, MAX_STEPS)
    if subtree is not None and not expected.in_tree:
        raise ResultMismatchError(f"{who} states that its result is the aggregate of a subtree; this job has no tree")
    values = {name: value for name, value in everything.items() if name not in excluded}
    if expected.names is not None:
        _check_received(values, f"the result of {who}")
    values, names = _under_stored_names(values, expected.reference, expected.names)
    if names:
        if subtree is not None:
            subtree = replace(subtree, tensor_weights=renamed(subtree.tensor_weights, names))
        # Under a name of the global model, another tensor may be excluded.
        excluded |= (again := _excluded(values, expected.exclude))
        values = {name: value for name, value in values.items() if name not in again}
    tensors = _accept_tensors(
        values, expected.reference, f"the result of {who}", expected, can_exclude=expected.controls is None
    )
    plain_metrics, text_metrics, dropped_metrics = _accept_metrics(metrics)
    controls = None
    if expected.controls is not None:
        if _CONTROL_DIFF not in meta:
            raise ResultMismatchError(
                f"{who} did not send meta[{_CONTROL_DIFF!r}]: its script must use NVFlare's PTScaffoldHelper"
            )
        what = f"the control variates of {who}"
        changes = _plain_dict(meta[_CONTROL_DIFF], what)
        # Only parameters have control variates; values for counters are not used.
        changes, _ = _under_stored_names(changes, expected.controls, expected.names)
        changes = {name: change for name, change in changes.items() if not _is_counter(expected.controls.get(name))}
        controls = _accept_tensors(changes, expected.controls, what, Expectation(), can_exclude=False)
    return AcceptedResult(
        client=client,
        kind=kind,
        tensors=tensors,
        controls=controls,
        steps=_accept_steps(who, meta.get(MetaKey.NUM_STEPS_CURRENT_ROUND)),
        metrics=plain_metrics,
        text_metrics=text_metrics,
        dropped_metrics=dropped_metrics,
        excluded=excluded,
        numpy=any(map(is_array, values.values())),
        on_disk=any(map(is_lazy, values.values())),
        renamed=names,
        subtree=subtree,
    )


def _accept_metrics(metrics: object) -> tuple[dict[str, float] | None, dict[str, str], str]:
    if metrics is None:
        return None, {}, ""
    if not isinstance(metrics, dict):
        # A single number is for NVFlare's model selection.
        return {}, {}, "" if accept_number(metrics) is not None else f"{type(metrics).__name__} without names"
    numbers: dict[str, float] = {}
    texts: dict[str, str] = {}
    dropped: list[str] = []
    for name, value in dict.items(metrics):
        is_name = type(name) is str and len(name) <= _MAX_TEXT and len(numbers) + len(texts) < MAX_METRICS
        number = accept_number(value) if is_name else None
        if number is not None:
            numbers[name] = number
        elif is_name and type(value) is str and len(value) <= _MAX_TEXT:
            texts[name] = value
        else:
            dropped.append(f"{name} ({type(value).__name__})" if type(name) is str else type(name).__name__)
    return numbers, texts, listed(dropped) if dropped else ""


def accept_number(value: object) -> float | None:
    """Return a finite number, also from a tensor or array of one element, or None."""
    try:
        if is_weight(value):
            entry = entry_of(value)
            if entry.numel != 1 or entry.nbytes > _SMALL or entry.dtype.is_complex:
                return None
            element = torch.frombuffer(bytearray(entry.rows().read(0, entry.nbytes)), dtype=entry.dtype)
            number = element.double().item()
        elif isinstance(value, (int, float)):
            number = float(value)
        else:
            return None
    except Exception:
        # Too large for a float, not received, or of a type without numbers.
        return None
    return number if math.isfinite(number) else None


def _accept_steps(who: str, value: object) -> float:
    if value is None:
        return 1.0
    steps = accept_number(value)
    if steps is None or not 0 <= steps <= MAX_STEPS:
        raise ResultMismatchError(
            f"{MetaKey.NUM_STEPS_CURRENT_ROUND} of {who} must be a number from 0 to {MAX_STEPS:.0e}, "
            f"got {described(value)}"
        )
    return steps


def _accept_tensors(
    values: dict[str, Any], reference: Mapping[str, Any] | None, what: str, expected: Expectation, *, can_exclude: bool
) -> dict[str, TensorEntry]:
    _check_received(values, what)
    if expected.ignore_unknown:
        values = {name: value for name, value in values.items() if is_weight((reference or {}).get(name))}
    elif not values:
        raise ResultMismatchError(f"{what} has no tensors")
    elif expected.by_nvflare:
        values = {name: value for name, value in values.items() if not _is_plain_number(value, reference, name)}
    if reference is not None:
        unexpected = [name for name in values if name not in reference]
        if unexpected:
            hint = ""
            if len(unexpected) == len(values):
                hint = (
                    f"; it has {listed(list(reference))}; if these are the same tensors, clients must send these "
                    "names: see server_key_prefix of nvflare.client.hf"
                )
            if can_exclude:
                # SCAFFOLD has no such option.
                hint += f"; if this is intended, set exclude_vars, for example to {_example(unexpected[0])}"
            raise ResultMismatchError(f"{what} cannot be used: the global model has no {listed(unexpected)}{hint}")
    entries = {}
    for name, value in values.items():
        if not is_weight(value):
            raise ResultMismatchError(
                f"{what} cannot be used: {quoted(name)} must be a tensor or an array, got {type(value).__name__}"
            )
        try:
            entries[name] = entry = entry_of(value)
            _ = entry.dtype
        except Exception as error:
            raise ResultMismatchError(f"{what} cannot be used: {quoted(name)}: {error}") from error
    specs = specs_of(entries)
    right = specs if reference is None else _expected_specs(specs, reference, expected)
    mismatch = find_mismatch(specs, right)
    if mismatch is not None:
        raise ResultMismatchError(f"{what} cannot be used: {mismatch}")
    return entries


def _check_received(values: Mapping[str, Any], what: str) -> None:
    failure = failure_of(values)
    if failure is not None:
        raise ResultMismatchError(f"{what} could not be received: {failure}") from failure


def _under_stored_names(
    values: dict[str, Any], model: Mapping[str, Any] | None, names: TensorNames | None
) -> tuple[dict[str, Any], Mapping[str, str | None]]:
    """Return values under names of the global model where they match, and the metadata of the changes."""
    if names is None or model is None:
        return values, {}
    changed = names.stored(values, model)
    return (renamed(values, changed), changed) if changed else (values, {})


def _is_plain_number(value: object, reference: Mapping[str, Any] | None, name: str) -> bool:
    """Whether a value and the global model's are plain numbers, which NVFlare's mean also adds."""
    is_number = type(value) in (int, float) and accept_number(value) is not None
    return is_number and (reference is None or type(reference.get(name)) in (int, float))


def _is_counter(value: object) -> bool:
    return value is not None and not (dtype := spec_of(value).dtype).is_floating_point and not dtype.is_complex


def _expected_specs(
    specs: Mapping[str, TensorSpec], reference: Mapping[str, Any], expected: Expectation
) -> dict[str, TensorSpec]:
    right = {}
    for name, spec in specs.items():
        known = spec_of(reference[name])
        mean_of_integers = torch.float64 if is_array(reference[name]) else torch.float32
        if expected.by_nvflare and known.dtype == mean_of_integers and spec.dtype in _AVERAGED:
            # A buffer that NVFlare has averaged before, as the client still has it.
            known = TensorSpec(spec.dtype, known.shape)
        right[name] = known
    return right


def spec_of(value: object) -> TensorSpec:
    """Return dtype and shape of a tensor or array, without its bytes."""
    element_type, shape = geometry_of(value)
    return TensorSpec(element_type.torch or torch.uint8, shape)


def spec_or_none(value: object) -> TensorSpec | None:
    """Return dtype and shape of a value, or None if it is not a tensor of a supported dtype."""
    try:
        return spec_of(value)
    except (UnsupportedTensorError, UnsupportedDtypeError):
        return None


def _plain_dict(values: object, what: str, *, any_names: bool = False) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ResultMismatchError(f"{what} must be a dictionary of tensors, got {type(values).__name__}")
    plain = {name: value for name, value in dict.items(values) if type(name) is str}
    if len(plain) < dict.__len__(values) and not any_names:
        raise ResultMismatchError(f"{what} has names that are not text")
    return plain


def _excluded(values: Mapping[str, Any], exclude: re.Pattern[str] | None) -> frozenset[str]:
    return frozenset() if exclude is None else frozenset(filter(exclude.search, values))


def _kind_of_params(params_type: object) -> ParamsKind | None:
    kinds: dict[str, ParamsKind] = {"FULL": "FULL", "DIFF": "DIFF"}
    if params_type is None:
        return "FULL"
    return kinds.get(params_type) if isinstance(params_type, str) else None


def _example(name: str) -> str:
    parent = name.rpartition(".")[0] or name
    return quoted("^" + re.escape(parent)) if 0 < len(parent) < 50 else "a regular expression that matches it"


def odd_kind(client: str, kind: ParamsKind, why: str) -> str:
    """Return the reason why a result of another kind is skipped."""
    return (
        f"{shown(client)} sent params of type {kind}, but {why}; set the same params_transfer_type for all clients, "
        "and params_type on the server"
    )


def shown(client: str) -> str:
    """Return the name of a client for a line of a log: quoted if it could be mistaken for something else."""
    return client if client.isprintable() and 0 < len(client) <= 120 else quoted(client)


def described(value: object) -> str:
    """Return a value for a message: its type, unless it is text or a number."""
    return quoted(value) if type(value) in (str, bool, int, float) else type(value).__name__


def client_of(model: FLModel) -> str:
    """Return the client that sent a result, as NVFlare's controller names it."""
    name = model.meta.get(CLIENT_NAME) if isinstance(model.meta, dict) else None
    return name if isinstance(name, str) and name else str(AppConstants.CLIENT_UNKNOWN)


def check_params_type(params_type: object) -> None:
    """Raise `ValueError` unless a configured kind of results is valid."""
    if params_type not in (None, *get_args(ParamsKind)):
        raise ValueError(f"params_type must be 'FULL', 'DIFF' or None, got {params_type!r}")


def majority_kind(kinds: Iterable[ParamsKind], previous: ParamsKind | None) -> ParamsKind:
    """Return the kind of most results; in a tie, that of the previous round, then "FULL"."""
    votes = Counter(kinds)
    if votes["FULL"] == votes["DIFF"]:
        return previous or "FULL"
    return "FULL" if votes["FULL"] > votes["DIFF"] else "DIFF"


@dataclass(frozen=True)
class Contribution:
    """Tensors of a result that have the same weight.

    Attributes:
        result: The name of the result in its round.
        weight: The weight.
        tensors: The tensors.
    """

    result: str
    weight: float
    tensors: dict[str, TensorEntry]


@dataclass
class RoundResults:
    """The accepted results of a round, until they are aggregated. Factors multiply the weights of some clients."""

    aggregation_weights: Mapping[str, float] = field(default_factory=dict)
    results: dict[str, AcceptedResult] = field(default_factory=dict)
    _messages: list[dict[Any, Any]] = field(default_factory=list)

    def add(self, result: AcceptedResult, message: object) -> None:
        """Add a result, or one more part of a subtree; the dictionary with it is emptied when the round ends."""
        name, part = result.client, 1
        while name in self.results:
            part += 1
            name = f"{result.client} (part {part})"
        self.results[name] = result
        if isinstance(message, dict):
            self._messages.append(message)

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each client."""
        return {name: self._factor(result) * result.weight for name, result in self.results.items()}

    def _factor(self, result: AcceptedResult) -> float:
        return self.aggregation_weights.get(result.client, 1.0)

    def contributions(self) -> dict[str, Contribution]:
        """Return what the engine combines: each result once for each weight that its tensors have."""
        found = {}
        for name, result in self.results.items():
            factor = self._factor(result)
            for number, (weight, tensors) in enumerate(result.tensors_by_weight().items()):
                label = f"{name} (weight {weight:g})" if number else name
                while label in found or (number and label in self.results):
                    label += "'"
                found[label] = Contribution(name, factor * weight, tensors)
        return found

    @property
    def tensors(self) -> dict[str, dict[str, TensorEntry]]:
        """The tensors of each client."""
        return {client: result.tensors for client, result in self.results.items()}

    @property
    def controls(self) -> dict[str, dict[str, TensorEntry]]:
        """The change of the control variates of each client, if they have any."""
        return {client: result.controls for client, result in self.results.items() if result.controls is not None}

    def numpy(self, base: Mapping[str, Any] | None) -> bool:
        """Return whether most clients sent arrays; in a tie, whether the global model has arrays."""
        arrays = sum(result.numpy for result in self.results.values())
        return holds_arrays(base or {}) if 2 * arrays == len(self.results) else 2 * arrays > len(self.results)

    def mean_metrics(self, clients: Iterable[str]) -> dict[str, float] | None:
        """Return the weighted mean of the metrics of these clients, each over the clients that report it.

        If one client has no metrics at all, no mean is computed, as in NVFlare's FedAvg.
        """
        weights = self.weights
        reported: dict[str, list[tuple[float, float]]] = {}
        for client in sorted(clients):
            metrics = self.results[client].metrics
            if metrics is None:
                return None
            for name, value in metrics.items():
                reported.setdefault(name, []).append((value, weights[client]))
        means = {}
        for name, values in reported.items():
            total = math.fsum(weight for _, weight in values)
            if total:
                # Scaled by a power of two, which changes no bit: a sum of finite numbers may be infinite.
                scaled = [(value, math.ldexp(weight, -math.frexp(total)[1])) for value, weight in values]
                sum_of_weights = math.fsum(weight for _, weight in scaled)
                means[name] = math.fsum(value * weight for value, weight in scaled) / sum_of_weights
        return means or None

    def clear(self) -> None:
        """Release the tensors. NVFlare may keep the messages for longer, so their dictionaries are emptied."""
        for message in self._messages:
            dict.clear(message)
        self._messages.clear()
        self.results.clear()

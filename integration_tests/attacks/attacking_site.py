# SPDX-License-Identifier: Apache-2.0
"""The sites of a job in which one client attacks: site-1 sends another attack in each round, the others are honest.

Travels in the job's `custom` folder, so it imports NVFlare and nothing of this package. All values are multiples of 8
and all weights are powers of two or add up to one, so that every mean is exact in any order and any precision.
"""

from __future__ import annotations

import importlib
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import nvflare.private.fed.client.communicator as communicator
import torch
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLContextKey, FLMetaKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.app_constant import AlgorithmConstants, AppConstants
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
from nvflare.fuel.utils import fobs
from nvflare.private.defs import CellMessageHeaderKeys

Params = dict[Any, Any]

ATTACKER = 1
WEIGHTS = {1: 4, 2: 1, 3: 3}
TENSORS, ELEMENTS = 4, 512
NAMES = [f"layer{index:05d}" for index in range(TENSORS)]
LAST = NAMES[-1]
#: The start of a line that a client tries to write into the server's log.
FORGED = "FORGED-LINE"
FORGERY = f"name\n{FORGED} - INFO - all is well\r\x1b[2J\x1b[1A\u202e\u2028{FORGED}"
_DEADLINE = 120


def values(site: int, number: int) -> dict[str, np.ndarray]:
    """Return a site's result of a round."""
    base = np.arange(ELEMENTS)
    return {
        name: (((base + 31 * index) % 101 + 7 * number + 3 * site) * 8).astype(np.float32)
        for index, name in enumerate(NAMES)
    }


def control_changes(site: int, number: int) -> dict[str, np.ndarray]:
    """Return how a site changes its SCAFFOLD control variates in a round."""
    base = np.arange(ELEMENTS)
    return {
        name: (((base + 5 * index) % 13 + number + site) * 8).astype(np.float32) for index, name in enumerate(NAMES)
    }


def mean(of: Callable[[int, int], dict[str, np.ndarray]], sites: list[int], number: int) -> dict[str, np.ndarray]:
    """Return the weighted mean of these sites' values, which is exact."""
    sums = {name: sum(WEIGHTS[site] * of(site, number)[name].astype(np.float64) for site in sites) for name in NAMES}
    total = sum(WEIGHTS[site] for site in sites)
    return {name: (value / total).astype(np.float32) for name, value in sums.items()}


@dataclass(frozen=True)
class Extra:
    """A message that is sent before the result: its content, and what its context and its headers claim."""

    message: Shareable
    claims: dict[str, Any] = field(default_factory=dict)
    cookies: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, Any] = field(default_factory=dict)


@dataclass
class Turn:
    """One round of the attacker: what an honest client would send, and how to send something else."""

    number: int
    arrays: bool
    scaffold: bool
    params: Params = field(init=False)
    controls: Params = field(init=False)
    before: list[Extra] = field(default_factory=list)
    #: Properties that the message with the result claims.
    claims: dict[str, Any] = field(default_factory=dict)
    cookies: dict[str, Any] = field(default_factory=dict)
    repeat: bool = False

    def __post_init__(self) -> None:
        self.params = {name: self.value(array) for name, array in values(ATTACKER, self.number).items()}
        self.controls = {name: self.value(array) for name, array in control_changes(ATTACKER, self.number).items()}

    def value(self, array: np.ndarray) -> Any:
        """Return an array in the form in which this job exchanges tensors."""
        return array if self.arrays else torch.from_numpy(array)

    def changed(self, **last: Any) -> Params:
        """Return large values, with other entries at the end."""
        return {**{name: value * 1e6 for name, value in self.params.items()}, **last}

    def as_type(self, name: str) -> Params:
        """Return the honest values in another element type."""
        if self.arrays:
            return {key: value.astype(name) for key, value in self.params.items()}
        return {key: value.to(getattr(torch, name)) for key, value in self.params.items()}

    def result(self, params: Any = None, *, kind: Any = DataKind.WEIGHTS, **meta: Any) -> Shareable:
        """Return a result; by default, `steps`, `metrics` and `controls` are an honest client's."""
        full = {
            FLMetaKey.NUM_STEPS_CURRENT_ROUND: meta.pop("steps", WEIGHTS[ATTACKER]),
            MetaKey.INITIAL_METRICS: meta.pop("metrics", {"accuracy": 0.5}),
            **({AlgorithmConstants.SCAFFOLD_CTRL_DIFF: meta.pop("controls", self.controls)} if self.scaffold else {}),
            **meta,
        }
        return self.raw({"kind": kind, "data": self.params if params is None else params, "meta": full})

    def raw(self, content: Any) -> Shareable:
        """Return a result with any content."""
        shareable = DXO(DataKind.WEIGHTS, data={}).to_shareable()
        shareable["DXO"] = content
        return shareable


@dataclass(frozen=True)
class Attack:
    """One attack.

    Args:
        send: Returns the result, or raises.
        counts: Whether the attacker's honest values are in the mean, since only something else in the result is wrong.
        reason: A regular expression that the reason of the skipped result matches, or a line of the log.
        jobs: In which jobs it is sent. Default: in all.
    """

    send: Callable[[Turn], Shareable]
    counts: bool
    reason: str
    jobs: tuple[str, ...]


ATTACKS: dict[str, Attack] = {}
FEDAVG, SAG, SCAFFOLD, LEVEL_1, LEVEL_1_NUMPY = JOBS = ("fedavg", "sag", "scaffold", "level-1", "level-1-numpy")
DEPLOYMENT, MEMORY = "deployment", "memory"
LEVEL_2 = (FEDAVG, SAG, SCAFFOLD)
_Send = Callable[[Turn], Shareable]


def skipped(reason: str = ".", *jobs: str) -> Callable[[_Send], _Send]:
    """Register an attack after which the attacker's result is not used."""
    return _register(False, reason, jobs)


def counted(reason: str = "", *jobs: str) -> Callable[[_Send], _Send]:
    """Register an attack whose values are honest and used."""
    return _register(True, reason, jobs)


def _register(counts: bool, reason: str, jobs: tuple[str, ...]) -> Callable[[_Send], _Send]:
    def register(send: _Send) -> _Send:
        ATTACKS[send.__name__] = Attack(send, counts, reason, jobs or JOBS)
        return send

    return register


def attacks_of(job: str) -> list[str]:
    """Return the names of a job's attacks, in the order in which they are sent."""
    return [name for name, attack in ATTACKS.items() if job in attack.jobs]


# ---- what a result is ----------------------------------------------------------------------------------------------


@skipped()
def differences_before_all_others(turn: Turn) -> Shareable:
    return turn.result(turn.changed(), kind=DataKind.WEIGHT_DIFF)


@skipped()
def an_unknown_kind(turn: Turn) -> Shareable:
    return turn.result(turn.changed(**{LAST: "text"}), kind="NOTHING")


@skipped()
def a_kind_that_is_a_list(turn: Turn) -> Shareable:
    return turn.result(turn.changed(), kind=["WEIGHTS"])


@skipped()
def metrics_instead_of_a_model(turn: Turn) -> Shareable:
    return turn.result({"accuracy": 1.0}, kind=DataKind.METRICS)


@skipped()
def values_said_to_be_encrypted(turn: Turn) -> Shareable:
    return turn.result(turn.changed(**{LAST: "text"}), **{MetaKey.PROCESSED_ALGORITHM: "none"})


@skipped()
def text_instead_of_meta(turn: Turn) -> Shareable:
    return turn.raw({"kind": DataKind.WEIGHTS, "data": turn.changed(), "meta": "text"})


@skipped()
def text_instead_of_everything(turn: Turn) -> Shareable:
    return turn.raw("text")


@skipped()
def a_list_instead_of_tensors(turn: Turn) -> Shareable:
    return turn.result([1.0, 2.0])


@skipped()
def an_empty_message(turn: Turn) -> Shareable:
    return Shareable()


@skipped()
def no_tensors(turn: Turn) -> Shareable:
    return turn.result({})


@skipped(".", FEDAVG, SCAFFOLD, LEVEL_1, LEVEL_1_NUMPY)
def a_name_of_a_submitted_model(turn: Turn) -> Shareable:
    shareable = turn.result(turn.changed())
    shareable.set_header(AppConstants.SUBMIT_MODEL_NAME, FORGERY)
    return shareable


@skipped()
def an_exception_with_forged_lines(turn: Turn) -> Shareable:
    raise ValueError(FORGERY)


@skipped()
def a_return_code_with_forged_lines(turn: Turn) -> Shareable:
    return make_reply(FORGERY)


# ---- the tensors ---------------------------------------------------------------------------------------------------


@skipped()
def text_after_good_tensors(turn: Turn) -> Shareable:
    return turn.result(turn.changed(**{LAST: FORGERY}))


@skipped()
def nothing_after_good_tensors(turn: Turn) -> Shareable:
    return turn.result(turn.changed(**{LAST: None}))


@skipped()
def tensors_in_tensors(turn: Turn) -> Shareable:
    return turn.result(turn.changed(**{LAST: {"weight": turn.params[LAST], "list": [turn.params[LAST]]}}))


@skipped()
def an_array_of_text(turn: Turn) -> Shareable:
    return turn.result(turn.changed(**{LAST: np.full(ELEMENTS, "text")}))


@skipped()
def arrays_of_text_only(turn: Turn) -> Shareable:
    return turn.result(dict.fromkeys(NAMES, np.full(ELEMENTS, "text")))


@skipped()
def an_array_of_dates(turn: Turn) -> Shareable:
    return turn.result(turn.changed(**{LAST: np.zeros(ELEMENTS, "datetime64[s]")}))


@skipped()
def another_shape(turn: Turn) -> Shareable:
    return turn.result(turn.changed(**{LAST: turn.params[LAST].reshape(2, -1)}))


@skipped()
def one_element_to_broadcast(turn: Turn) -> Shareable:
    return turn.result(turn.changed(**{LAST: turn.params[LAST][:1]}))


@skipped()
def complex_numbers(turn: Turn) -> Shareable:
    return turn.result(turn.as_type("complex64"))


@skipped(".", *LEVEL_2)
def integers(turn: Turn) -> Shareable:
    return turn.result(turn.as_type("int64"))


@skipped(".", *LEVEL_2, LEVEL_1)
def numbers_of_8_bits(turn: Turn) -> Shareable:
    return turn.result({name: value.to(torch.float8_e4m3fn) for name, value in turn.params.items()})


@counted()
def twice_the_precision(turn: Turn) -> Shareable:
    return turn.result(turn.as_type("float64"))


@counted()
def half_the_precision(turn: Turn) -> Shareable:
    return turn.result(turn.as_type("float16"))


@skipped("[Nn]a[Nn]|finite", *LEVEL_2)
def not_a_number(turn: Turn) -> Shareable:
    last = turn.value(np.full(ELEMENTS, np.nan, np.float32))
    return turn.result(turn.changed(**{LAST: last}))


@skipped()
def forged_names(turn: Turn) -> Shareable:
    return turn.result({FORGERY: turn.params[LAST], **turn.changed()})


@skipped()
def a_number_for_a_name(turn: Turn) -> Shareable:
    return turn.result({7: turn.params[LAST], **turn.changed()})


@skipped()
def many_names(turn: Turn) -> Shareable:
    return turn.result({**turn.changed(), **{f"{number}" * 20: 0.0 for number in range(20_000)}})


# ---- steps and metrics ---------------------------------------------------------------------------------------------


@skipped()
def a_huge_number_of_steps(turn: Turn) -> Shareable:
    return turn.result(turn.changed(), steps=1e308)


@skipped()
def infinitely_many_steps(turn: Turn) -> Shareable:
    return turn.result(turn.changed(), steps=float("inf"))


@skipped()
def less_than_no_steps(turn: Turn) -> Shareable:
    return turn.result(turn.changed(), steps=-4)


@skipped()
def steps_in_words(turn: Turn) -> Shareable:
    return turn.result(turn.changed(), steps=FORGERY)


@skipped()
def an_array_of_steps(turn: Turn) -> Shareable:
    return turn.result(turn.changed(), steps=np.full(3, 4.0))


@counted()
def metrics_of_8_bits(turn: Turn) -> Shareable:
    return turn.result(metrics={"accuracy": torch.zeros(3).to(torch.float8_e4m3fn), "loss": 1.0})


@counted()
def metrics_of_every_kind(turn: Turn) -> Shareable:
    metrics = {
        "accuracy": np.zeros((2, 3), np.complex64),
        "list": [1.0, 2.0],
        "text": FORGERY,
        FORGERY: float("nan"),
        "infinite": float("inf"),
        "large": 2**62,
        "names": np.full(3, "text"),
        "nested": {"accuracy": 1.0},
        "tensor": torch.arange(5),
        7: 1.0,
    }
    return turn.result(metrics=metrics)


@counted()
def metrics_in_words(turn: Turn) -> Shareable:
    return turn.result(metrics=FORGERY)


# ---- who sends it, and for which task ------------------------------------------------------------------------------


@counted()
def another_clients_name_in_the_meta(turn: Turn) -> Shareable:
    return turn.result(client_name="site-2", site_name="site-2", current_round=7, props={"client_name": "site-2"})


@counted()
def another_clients_name_in_the_message(turn: Turn) -> Shareable:
    turn.claims[ReservedKey.IDENTITY_NAME] = "site-2"
    return turn.result()


@counted()
def a_round_that_is_far_away(turn: Turn) -> Shareable:
    shareable = turn.result()
    shareable.set_header(AppConstants.CURRENT_ROUND, 10**9)
    shareable.set_header(AppConstants.NUM_ROUNDS, FORGERY)
    return shareable


@skipped(".", SAG)
def a_contribution_to_another_round(turn: Turn) -> Shareable:
    turn.cookies[AppConstants.CONTRIBUTION_ROUND] = FORGERY
    return turn.result(turn.changed())


@counted()
def the_result_twice(turn: Turn) -> Shareable:
    turn.repeat = True
    return turn.result()


@counted()
def results_of_other_tasks(turn: Turn) -> Shareable:
    for claims, cookies in (
        ({}, {FLContextKey.TASK_ID: str(uuid.uuid4())}),
        ({ReservedKey.IDENTITY_NAME: "site-2"}, {FLContextKey.TASK_ID: str(uuid.uuid4())}),
        ({ReservedKey.IDENTITY_NAME: FORGERY}, {FLContextKey.TASK_ID: FORGERY}),
        ({ReservedKey.RUN_NUM: "another-job"}, {}),
    ):
        turn.before.append(Extra(turn.result(), claims, cookies))
    return turn.result()


@counted("", DEPLOYMENT)
def messages_in_another_clients_name(turn: Turn) -> Shareable:
    """NVFlare's authentication drops them. Without TLS, as in the simulator, their replies would be lost."""
    for headers in (
        {CellMessageHeaderKeys.CLIENT_NAME: "site-2"},
        {MessageHeaderKey.ORIGIN: "site-2"},
        {CellMessageHeaderKeys.TOKEN: str(uuid.uuid4())},
    ):
        turn.before.append(Extra(turn.result(turn.changed()), headers=headers))
    return turn.result()


# ---- SCAFFOLD ------------------------------------------------------------------------------------------------------


@skipped(".", SCAFFOLD)
def bad_controls_with_a_bad_model(turn: Turn) -> Shareable:
    nan = turn.value(np.full(ELEMENTS, np.nan, np.float32))
    return turn.result({LAST: turn.params[LAST].reshape(2, -1)}, controls=dict.fromkeys(NAMES, nan))


@skipped(".", SCAFFOLD)
def good_controls_with_a_model_that_is_bad_when_it_is_read(turn: Turn) -> Shareable:
    nan = turn.value(np.full(ELEMENTS, np.nan, np.float32))
    return turn.result({**turn.params, LAST: nan}, controls={key: value * 1e6 for key, value in turn.controls.items()})


@skipped(".", SCAFFOLD)
def bad_controls_with_a_good_model(turn: Turn) -> Shareable:
    nan = turn.value(np.full(ELEMENTS, np.nan, np.float32))
    return turn.result(controls={**turn.controls, LAST: nan})


@skipped(".", SCAFFOLD)
def controls_of_text(turn: Turn) -> Shareable:
    return turn.result(controls={**turn.controls, LAST: np.full(ELEMENTS, "text")})


@skipped(".", SCAFFOLD)
def controls_in_words(turn: Turn) -> Shareable:
    return turn.result(controls=FORGERY)


@skipped(".", SCAFFOLD)
def complex_controls(turn: Turn) -> Shareable:
    return turn.result(controls={**turn.controls, LAST: turn.value(np.zeros(ELEMENTS, np.complex64))})


@skipped(".", SCAFFOLD)
def controls_with_forged_names(turn: Turn) -> Shareable:
    return turn.result(controls={FORGERY: turn.controls[LAST], **turn.controls})


# ---- large results -------------------------------------------------------------------------------------------------


@counted("", MEMORY)
def nothing_unusual(turn: Turn) -> Shareable:
    return turn.result()


@skipped(".", MEMORY)
def a_message_of_500_mebibytes(turn: Turn) -> Shareable:
    """Without this package, each tensor is one message, which NVFlare limits."""
    return turn.result(metrics={"accuracy": torch.zeros(125 << 20)})


@counted("", MEMORY)
def metrics_of_500_mebibytes(turn: Turn) -> Shareable:
    importlib.import_module("nvflare_lazy").install()
    return turn.result(metrics={"accuracy": torch.zeros(125 << 20)})


@skipped("max_result_size", MEMORY)
def more_than_the_limit(turn: Turn) -> Shareable:
    """64 GiB that take no memory here."""
    return turn.result({**turn.params, LAST: torch.zeros(1).expand(1 << 34)})


@skipped(".", MEMORY)
def names_that_grow_when_they_are_escaped(turn: Turn) -> Shareable:
    """In the list of tensors, each character of a name takes six bytes."""
    names = {"\x01" * 200 + str(number): torch.zeros(()) for number in range(10_000)}
    return turn.result({**turn.params, **names})


# ---- the sites -----------------------------------------------------------------------------------------------------


class Site(Executor):
    """Sends the attacks if it is site-1, or else honest results, each after the server has the attacker's.

    Args:
        attacks: The names of the attacks, one for each round.
        arrays: Whether the job exchanges arrays rather than tensors.
        scaffold: Whether the job is SCAFFOLD.
    """

    def __init__(self, attacks: list[str], arrays: bool = False, scaffold: bool = False) -> None:
        super().__init__()
        fobs.register(TensorDecomposer)
        self._attacks = attacks
        self._arrays = arrays
        self._scaffold = scaffold
        self._notes = Path(os.environ["ATTACK_NOTES"])
        self._turn: Turn | None = None
        self._result: Shareable | None = None
        self._claims: dict[str, Any] = {}
        self._headers: dict[str, Any] = {}
        self._has_filter = False
        self._original = communicator.gen_new_peer_ctx
        communicator.gen_new_peer_ctx = self._claimed_context

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Any) -> Shareable:
        """Return the result of a round."""
        name = fl_ctx.get_identity_name()
        site, number = int(name.rsplit("-", 1)[-1]), shareable.get_header(AppConstants.CURRENT_ROUND)
        turn = Turn(number, self._arrays, self._scaffold)
        if site == ATTACKER:
            self._turn = turn
            self._result = ATTACKS[self._attacks[number]].send(turn)
            return self._result
        if site == ATTACKER + 1:
            self._write_down(from_shareable(shareable), number)
        wait_for(self._notes / f"attacked-{number}", abort_signal)
        turn.controls = {name: turn.value(array) for name, array in control_changes(site, number).items()}
        params = {name: turn.value(array) for name, array in values(site, number).items()}
        return turn.result(params, steps=WEIGHTS[site])

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Send further messages of the attack, and let the honest sites continue after it."""
        turn = self._turn
        if turn is None:
            return
        if event_type == EventType.BEFORE_SEND_TASK_RESULT:
            self._filter_headers(fl_ctx)
            for extra in turn.before:
                self._send(extra, fl_ctx)
            for name, value in turn.cookies.items():
                self._result.add_cookie(name, value)
            self._claims = turn.claims
        elif event_type == EventType.AFTER_SEND_TASK_RESULT:
            self._claims = {}
            if turn.repeat:
                self._send(Extra(turn.result(turn.changed(), kind=DataKind.WEIGHT_DIFF)), fl_ctx)
            self._turn = None
            (self._notes / f"attacked-{turn.number}").touch()

    def _send(self, extra: Extra, fl_ctx: FLContext) -> None:
        extra.message.set_cookie_jar({**self._result.get_cookie_jar(), **extra.cookies})
        self._claims, self._headers = extra.claims, extra.headers
        fl_ctx.get_engine().send_task_result(extra.message, fl_ctx, timeout=5.0)
        self._claims, self._headers = {}, {}

    def _filter_headers(self, fl_ctx: FLContext) -> None:
        """Change the headers of messages after NVFlare has added its own."""
        if not self._has_filter:
            self._has_filter = True
            cell = fl_ctx.get_engine().get_cell()
            cell.core_cell.add_outgoing_request_filter("*", "*", lambda message: message.add_headers(self._headers))

    def _claimed_context(self, fl_ctx: FLContext, *arguments: Any, **more: Any) -> FLContext:
        context = self._original(fl_ctx, *arguments, **more)
        context.set_public_props({**context.get_all_public_props(), **self._claims})
        return context

    def _write_down(self, received: DXO, number: int) -> None:
        parts = {f"model/{name}": np.asarray(value) for name, value in received.data.items()}
        controls = (received.meta or {}).get(AlgorithmConstants.SCAFFOLD_CTRL_GLOBAL) or {}
        parts |= {f"controls/{name}": np.asarray(value) for name, value in controls.items()}
        np.savez(self._notes / f"received-{number}.npz", **parts)


def wait_for(path: Path, abort_signal: Any) -> None:
    """Wait until a file exists or the job is aborted."""
    deadline = time.monotonic() + _DEADLINE
    while not path.exists() and not abort_signal.triggered:
        if time.monotonic() > deadline:
            raise TimeoutError(path.name)
        time.sleep(0.01)

# SPDX-License-Identifier: Apache-2.0
"""The limits of one message: derived from the model, counted over all of its payloads, and named in the error."""

from __future__ import annotations

import pytest

from nvflare_lazy.errors import ProtocolError
from nvflare_lazy.transport.limits import PayloadLimits, PayloadSize, PayloadTally
from nvflare_lazy.transport.offload import ReceiveMode, TransferRuntime

MODEL = PayloadSize(nbytes=1 << 30, tensors=300, name_bytes=9000)


@pytest.mark.parametrize(
    ("model", "nbytes", "expected"),
    [
        (MODEL, None, (2 << 30, 1600)),
        (PayloadSize(8, 1, 1), None, (64 << 20, 1002)),
        (MODEL, 10 << 30, (10 << 30, 4000)),
        (MODEL, 5, (5, 1600)),
        (PayloadSize(0, 400_000, 0), None, (64 << 20, 500_000)),
    ],
)
def test_limits_for_a_model(model, nbytes, expected):
    """Twice the model with a minimum; a configured size also permits more tensors, in proportion."""
    limits = PayloadLimits.for_model(model, nbytes)
    assert (limits.nbytes, limits.tensors) == expected
    assert limits.name_bytes >= 2 * model.name_bytes + 8 * limits.tensors


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (PayloadSize((1 << 30) + 1, 1, 1), r"site-1 sends 1.0 GiB .* limit of 1.0 GiB; .*max_result_size"),
        (PayloadSize(1, 101, 1), "site-1 sends 101 tensors .* limit of 100"),
        (PayloadSize(1, 1, 1025), "site-1 sends names of 1.0 KiB .* limit of 1.0 KiB"),
    ],
)
def test_each_limit_has_an_error(size, text):
    """The error names the sender, the size, the limit and the option; nothing of the rejected part is counted."""
    tally = PayloadTally(PayloadLimits(1 << 30, 100, 1 << 10))
    tally.check("site-1", PayloadSize(1 << 30, 100, 1 << 10))
    for check in (tally.check, tally.add):
        with pytest.raises(ProtocolError, match=text):
            check("site-1", size)
    tally.add("site-1", PayloadSize(1 << 30, 100, 1 << 10))
    with pytest.raises(ProtocolError, match="site-1"):
        tally.add("site-1", PayloadSize(0, 1, 0))


def test_limits_belong_to_the_mode():
    """They end with the mode that they were set for."""
    runtime = TransferRuntime()
    limits = PayloadLimits(nbytes=5)
    runtime.limit_payloads(limits)  # no job runs
    assert runtime.limits == PayloadLimits()
    before = runtime.use(ReceiveMode(None, 1 << 20))
    runtime.limit_payloads(limits)
    assert runtime.mode_for(None).limits is runtime.limits is limits
    runtime.use(before)
    assert runtime.limits == PayloadLimits()

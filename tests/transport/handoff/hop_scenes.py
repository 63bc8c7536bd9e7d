# SPDX-License-Identifier: Apache-2.0
"""What peers do in tests of the hop."""

from __future__ import annotations

from typing import Any

from tests.transport import scenes
from tests.transport.peers import CHANNEL, TOPIC, State


def enable(state: State, quota: int | None = None) -> None:
    """Receive as a client job with the component does, from the beginning."""
    from nvflare_lazy.scratch import JobScratch
    from nvflare_lazy.transport import offload
    from nvflare_lazy.transport.handoff.hop import Hop

    mode = offload.runtime._mode
    if mode is None or mode.scratch is None or quota is not None or mode.scratch._quota.limit is not None:
        end(state)
        offload.enable(JobScratch.open(state.scratch_root, job="job", quota=quota))
    offload.runtime.use(offload.runtime._mode._replace(handoff=True))
    offload.runtime._shared[Hop] = hop = Hop()
    hop.enabled = True


def warned_of_trainer(state: State) -> bool:
    """Whether the warning about a trainer without the package was logged."""
    from nvflare_lazy.transport import offload
    from nvflare_lazy.transport.handoff.hop import Hop

    return offload.runtime.shared(Hop)._warned_of_trainer


def use_root(state: State, root: str) -> None:
    """Have scratch in this root."""
    from nvflare_lazy.scratch import JobScratch
    from nvflare_lazy.transport import offload

    mode = offload.runtime.mode_for(None)
    offload.runtime.use(mode._replace(scratch=JobScratch.open(root, job="server")))


def end(state: State) -> None:
    from nvflare_lazy.transport import offload

    offload.runtime.scratch.release()
    offload.reset()


def change(state: State, what: str) -> None:
    from nvflare_lazy.transport import offload
    from nvflare_lazy.transport.handoff.hop import Hop

    if what == "disabled":
        offload.runtime.shared(Hop).enabled = False
    elif what == "quota":
        end(state)
        enable(state, quota=1 << 20)
    elif what == "handoff off":
        offload.runtime.use(offload.runtime._mode._replace(handoff=False))
    else:
        offload.disable()


def send_and_wait(state: State, target: str, receivers: list[str]) -> list[str]:
    """Send a result as NVFlare's Client API does: wait until its receivers have it."""
    start_sending(state, target, receivers)
    outcomes = [waiter.wait(60) for waiter in state.kept["waiters"]]
    return [outcome.status for outcome in outcomes if outcome is not None]


def start_sending(state: State, target: str, receivers: list[str]) -> str:
    from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
    from nvflare.fuel.f3.cellnet.utils import new_cell_message
    from nvflare.fuel.f3.streaming.download_service import DownloadService
    from nvflare.fuel.utils.fobs import FOBSContextKey
    from nvflare.fuel.utils.fobs.decomposers.via_downloader import RESULT_UPLOAD_TX_CREATED_CB_CTX_KEY

    state.kept["waiters"] = waiters = []
    reply = state.cell.send_request(
        channel=CHANNEL,
        topic=TOPIC,
        target=target,
        request=new_cell_message({MessageHeaderKey.PASS_THROUGH: True}, {"model": scenes.payload("torch", "ten")}),
        timeout=60,
        num_receivers=len(receivers),
        receiver_ids=tuple(receivers),
        fobs_ctx_props={
            FOBSContextKey.STREAM_PROGRESS_CB: lambda **_: None,
            RESULT_UPLOAD_TX_CREATED_CB_CTX_KEY: lambda transaction: waiters.append(
                DownloadService.get_transfer_waiter(transaction.tx_id)
            ),
        },
    )
    return reply.get_header(MessageHeaderKey.RETURN_CODE)


def claim_for_all(state: State) -> None:
    """Download the last payload, and say that it is passed on to all others."""
    from nvflare_lazy.transport import offload
    from nvflare_lazy.transport._backends import TORCH
    from nvflare_lazy.transport._disk_consumer import DiskConsumer
    from nvflare_lazy.transport.handoff.hop import Hop
    from nvflare_lazy.transport.receive import RemotePayload

    ref = next(iter(state.payloads[-1]["model"].values()))
    consumer = DiskConsumer(TORCH, offload.runtime.scratch.download())
    assert Hop().take_result(consumer, RemotePayload(offload.runtime, state.cell, ref.fqcn, ref.ref_id))
    consumer.discard()


def statuses(state: State) -> list[dict[str, Any]]:
    """The receivers of the payloads that this peer still serves."""
    import time

    from nvflare.fuel.f3.streaming.download_service import DownloadService

    deadline = time.monotonic() + 60
    while True:
        found = [ref.snapshot_receiver_statuses() for ref in list(DownloadService._ref_table.values())]
        if any(found) or time.monotonic() > deadline:
            return [one for one in found if one]
        time.sleep(0.01)

# SPDX-License-Identifier: Apache-2.0
"""`RoundMetrics`: the numbers of rounds, for NVFlare's receivers of analytics and for its publisher of metrics.

NVFlare's receivers write them to TensorBoard, MLflow or Weights & Biases, and its `StatsDReporter` sends them to
StatsD, from where Prometheus reads them. `TensorOffload` sends them when a round ends and with each line of progress.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from nvflare.apis.analytix import ANALYTIC_EVENT_TYPE, AnalyticsDataType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import EventScope, FedEventHeader, FLContextKey, ReservedKey
from nvflare.apis.utils.analytix_utils import create_analytic_dxo, send_analytic_dxo
from nvflare.fuel.data_event.data_bus import DataBus
from nvflare.metrics.metrics_keys import MetricKeys, MetricTypes
from nvflare.metrics.metrics_publisher import publish_app_metrics

from nvflare_lazy.flare.round_progress import ProgressReport
from nvflare_lazy.records import RoundRecord

_TAG = "nvflare_lazy/"
# MLflow and W&B have a run for each client and none for the server. Up to this number of runs get the server's numbers.
_MAX_RUNS_WITH_SERVER = 20
_MAX_CLIENTS = 1000
# In StatsD's lines, other characters separate fields.
_NOT_IN_TAGS = re.compile(r"[^A-Za-z0-9_.-]")
_MAX_TAG = 120


class RoundMetrics:
    """Sends the numbers of a job's rounds.

    Args:
        component: The component that fires the events.
        engine: NVFlare's engine.
        job: The job's id.
        site: The name of this site.
        is_server: Whether receivers here have the runs of clients, which get their part of the numbers.
    """

    def __init__(self, component: FLComponent, engine: Any, *, job: str, site: str, is_server: bool) -> None:
        self._component = component
        self._engine = engine
        self._tags = {"job_id": _tag(job), "site": _tag(site)}
        self._is_server = is_server
        self._bus = DataBus()

    def send_progress(self, report: ProgressReport) -> None:
        """Send the numbers of a running round."""
        clients = {client.client: {"progress_bytes": float(client.received)} for client in report.arriving}
        self._send(report.number, report.numbers(), clients)

    def send_round(self, record: RoundRecord) -> None:
        """Send the numbers of a round at its end."""
        clients = {}
        for client, result in record.clients.items():
            clients[client] = {"result_bytes": float(result.nbytes), "result_used": float(client in record.aggregated)}
            if result.seconds is not None:
                clients[client]["result_seconds"] = result.seconds
        self._send(record.round, record.numbers(), clients)

    def _send(self, step: int | None, numbers: Mapping[str, float], clients: Mapping[str, Mapping[str, float]]) -> None:
        self._publish(numbers, self._tags)
        self._fire(numbers, step)
        for index, client in enumerate(sorted(clients)[:_MAX_CLIENTS]):
            self._publish(clients[client], {**self._tags, "client": _tag(client)})
            if self._is_server:
                of_server = {f"server/{name}": value for name, value in numbers.items()}
                self._fire({**clients[client], **(of_server if index < _MAX_RUNS_WITH_SERVER else {})}, step, client)

    def _publish(self, numbers: Mapping[str, float], tags: dict[str, str]) -> None:
        metrics = {MetricKeys.type: MetricTypes.GAUGE, **numbers}
        publish_app_metrics(metrics, "nvflare_lazy", tags, self._bus)

    def _fire(self, numbers: Mapping[str, float], step: int | None, client: str | None = None) -> None:
        """Fire an event for each number: of this site, or as NVFlare fires the events that a client has sent."""
        with self._engine.new_context() as fl_ctx:
            for name, value in numbers.items():
                dxo = create_analytic_dxo(
                    tag=_TAG + name, value=value, data_type=AnalyticsDataType.SCALAR, global_step=step
                )
                if client is None:
                    send_analytic_dxo(self._component, dxo, fl_ctx)
                    continue
                data = dxo.to_shareable()
                data.set_header(FedEventHeader.DIRECTION, "in")
                data.set_peer_props({ReservedKey.IDENTITY_NAME: client})
                fl_ctx.set_prop(FLContextKey.EVENT_DATA, data, private=True, sticky=False)
                fl_ctx.set_prop(FLContextKey.EVENT_SCOPE, EventScope.FEDERATION, private=True, sticky=False)
                self._engine.fire_event(f"fed.{ANALYTIC_EVENT_TYPE}", fl_ctx)


def _tag(text: str) -> str:
    return _NOT_IN_TAGS.sub("_", text[:_MAX_TAG])

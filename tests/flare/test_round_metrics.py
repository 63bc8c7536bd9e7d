# SPDX-License-Identifier: Apache-2.0
"""The numbers of rounds as NVFlare's receivers of analytics and its reporter to StatsD get them."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest
from nvflare.apis.analytix import AnalyticsData
from nvflare.apis.dxo import from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import ReservedKey, ReservedTopic
from nvflare.apis.fl_context import FLContext
from nvflare.apis.utils.event import fire_event_to_components
from nvflare.app_common.widgets.streaming import AnalyticsReceiver
from nvflare.fuel.data_event.data_bus import DataBus
from nvflare.widgets.fed_event import ServerFedEventRunner

from nvflare_lazy.flare.round_log import RoundLog
from nvflare_lazy.flare.round_metrics import RoundMetrics
from nvflare_lazy.flare.round_progress import ClientProgress, ProgressReport
from tests.flare.conftest import Engine

MIB = 1 << 20


class Receiver(AnalyticsReceiver):
    """Keeps what it gets, by site, with the events that NVFlare's receiver for MLflow or another one takes."""

    def __init__(self, events=None):
        super().__init__(events)
        self.found = {}

    def initialize(self, fl_ctx):
        pass

    def save(self, fl_ctx, shareable, record_origin):
        data = AnalyticsData.from_dxo(from_shareable(shareable))
        self.found.setdefault(record_origin, {})[data.tag] = data.value, data.step

    def finalize(self, fl_ctx):
        pass


class JobEngine(Engine):
    """Fires events to components, among them NVFlare's own, which sends those of this site to the other sites."""

    def __init__(self, *components):
        super().__init__()
        self.sent = []
        runner = ServerFedEventRunner()
        runner.fire_and_forget_request = lambda **request: self.sent.append(request)
        self.receivers = [*components, runner]

    def new_context(self):
        context = super().new_context()
        context.set_prop(ReservedKey.IDENTITY_NAME, "server", private=False, sticky=False)
        return context

    def fire_event(self, event_type, fl_ctx):
        fire_event_to_components(event_type, self.receivers, fl_ctx)


def record_of_a_round():
    """A round in which two clients sent 1 MiB each, and the result of one was skipped."""
    log = RoundLog(None, lambda line: None)
    log.start_round(3)
    for client in ("site-1", "site-2"):
        log.on_task_sent(client)
        log.on_result(client, MIB, 2, on_disk=True)
    log.on_skip("site-2", "NaN in it")
    log.on_verdict("site-1", accepted=True)
    log.on_verdict("site-2", accepted=False)
    record = log.end_round(scratch_bytes=7)
    assert record is not None
    return record


REPORT = ProgressReport(
    4,
    (ClientProgress("site-1", MIB, 2 * MIB, False),),
    (ClientProgress("site-1", MIB, 2 * MIB, False),),
    MIB,
    2 * MIB,
    False,
    0.0,
    None,
)


@pytest.mark.parametrize("is_server", [True, False])
def test_receivers_of_analytics(is_server):
    """A site has its own numbers; MLflow and W&B, which have runs of clients only, get theirs and the server's."""
    all_events, of_clients = Receiver(), Receiver(["fed.analytix_log_stats"])
    engine = JobEngine(all_events, of_clients)
    for receiver in (all_events, of_clients):
        receiver.handle_event(EventType.START_RUN, FLContext())
    metrics = RoundMetrics(FLComponent(), engine, job="job", site="server", is_server=is_server)
    metrics.send_round(record_of_a_round())
    metrics.send_progress(REPORT)
    own = all_events.found.pop("server")
    assert own["nvflare_lazy/received_bytes"] == (2 * MIB, 3)
    assert (own["nvflare_lazy/aggregated"], own["nvflare_lazy/skipped"]) == ((1, 3), (1, 3))
    assert own["nvflare_lazy/scratch_bytes"] == (7, 3)
    assert own["nvflare_lazy/progress_percent"] == (50.0, 4)
    assert all_events.found == of_clients.found
    assert engine.sent == []
    if not is_server:
        assert of_clients.found == {}
        return
    assert of_clients.found.keys() == {"site-1", "site-2"}
    for client, used in (("site-1", 1.0), ("site-2", 0.0)):
        found = of_clients.found[client]
        assert (found["nvflare_lazy/result_bytes"], found["nvflare_lazy/result_used"]) == ((MIB, 3), (used, 3))
        assert 0 <= found["nvflare_lazy/result_seconds"][0] < 60
        assert found["nvflare_lazy/server/received_bytes"] == (2 * MIB, 3)
    assert of_clients.found["site-1"]["nvflare_lazy/progress_bytes"] == (MIB, 4)
    assert of_clients.found["site-1"]["nvflare_lazy/server/progress_percent"] == (50.0, 4)


@pytest.fixture
def statsd():
    """A StatsD server on this host that NVFlare's own reporter sends to; returns the lines it has received."""
    from nvflare.fuel_opt.statsd.statsd_reporter import StatsDReporter

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(60)
        reporter = StatsDReporter(site="server", host="127.0.0.1", port=server.getsockname()[1])

        def lines():
            from datadog import statsd

            statsd.gauge("end", 0)
            statsd.flush()
            found = []
            while not any(line.startswith("end:") for line in found):
                found += server.recv(65536).decode().splitlines()
            return [line for line in found if not line.startswith(("end:", "datadog."))]

        yield lines
        DataBus().unsubscribe(ReservedTopic.APP_METRICS, reporter.process_metrics)


def test_statsd(statsd):
    """Gauges with the job, the site and the client as tags; a name cannot add a line, a tag or a value."""
    metrics = RoundMetrics(FLComponent(), JobEngine(), job="job-1", site="server", is_server=True)
    record = record_of_a_round()
    record.clients["evil|c|#job_id:x\nfake:1"] = replace(record.clients["site-2"], client="evil")
    metrics.send_round(record)
    metrics.send_progress(REPORT)
    found = [line.split("|") for line in statsd()]
    assert {parts[1] for parts in found} == {"g"}
    values = {(parts[0].partition(":")[0], parts[2]): float(parts[0].partition(":")[2]) for parts in found}
    of_job = "#job_id:job-1,site:server"
    assert values["nvflare_lazy_received_bytes", of_job] == 2 * MIB
    assert values["nvflare_lazy_progress_percent", of_job] == 50.0
    assert values["nvflare_lazy_progress_bytes", f"{of_job},client:site-1"] == MIB
    assert values["nvflare_lazy_result_bytes", f"{of_job},client:site-2"] == MIB
    assert {tags for _, tags in values} == {
        of_job,
        *(f"{of_job},client:{name}" for name in ("site-1", "site-2", "evil_c__job_id_x_fake_1")),
    }

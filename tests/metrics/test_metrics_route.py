"""`GET /metrics` of a process with an HTTP server."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import holdfast as hf
from holdfast.ops.metrics.process_samples import (
    MeteredProcess,
    process_histograms,
    read_process_samples,
)
from holdfast.ops.metrics.runner_metrics import add_metrics, read_samples, runner_readings
from holdfast.runner.counters import RunnerCounters
from holdfast.runner.error_policy import ErrorKind
from holdfast.workers.world.worker import WorldWorkerPolicy
from tests.ops.http_rig import TOKEN, HttpRig, JsonClient, client, rig, server
from tests.postgres import reused_url
from tests.process.watch import until

__all__ = ["client", "rig", "server"]


class Greeted(hf.Event):
    name: str


@hf.effect("greet")
def greet(call: hf.Call, name: str) -> str:
    return name


class Greeter(hf.World):
    count: int = 0

    @hf.on(Greeted)
    def greeted(self, event: Greeted, cx: hf.Context) -> None:
        cx.do(greet, event.name)
        self.count += 1

    @hf.on(greet)
    def receipt(self, event: hf.Receipt, cx: hf.Context) -> None:
        self.count += 1


APP = hf.App("greetings", worlds=[Greeter], effects=[greet])


def test_runners_of_a_process_are_exported_by_queue(tmp_path: Path) -> None:
    with APP.open(str(tmp_path / "store")) as rt:
        world = rt.world(Greeter, "ada")
        world.send(Greeted("ada"))
        while world.state().count < 2:
            pass
        # The commit of the receipt precedes the update of the counters.
        while not (metrics := attempts(rt)).get(("greetings/effects/greet", "successes")):
            pass
    assert metrics["greetings/effects/greet", "successes"] == 1
    assert metrics["greetings/effects/greet", "fatals"] == 0


def attempts(rt: hf.Runtime) -> dict[tuple[str, str], float]:
    return {
        (sample.labels[1], sample.labels[2]): sample.value
        for sample in read_samples("w1", runner_readings(rt.roles))
        if sample.family == "holdfast_runner_attempts_total"
    }


def test_counters_of_two_runners_of_a_queue_are_added() -> None:
    first, second = RunnerCounters(), RunnerCounters()
    first.count_attempt(ErrorKind.SUCCESS, 1_000_000)
    second.count_attempt(ErrorKind.SUCCESS, 2_000_000)
    second.count_attempt(ErrorKind.CONFLICT, 400_000_000)
    added = add_metrics([first.snapshot(), second.snapshot()])
    assert (added.successes, added.conflicts, added.latency_samples) == (2, 1, 3)
    assert added.latency_max_ns == 400_000_000
    assert added.latency_total_ns == 403_000_000
    assert sum(added.latency_histogram) == 3


def test_metrics_route_answers_prometheus_text(client: JsonClient, rig: HttpRig) -> None:
    connection = client._connection
    connection.request("GET", "/metrics")
    response = connection.getresponse()
    names = {metric.name for metric in text_string_to_metric_families(response.read().decode())}
    assert response.status == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert {"holdfast_commits", "process_resident_memory_bytes"} <= names


def test_metrics_route_needs_the_token(rig: HttpRig) -> None:
    guarded = rig.serve(token=TOKEN)
    assert rig.client(guarded).call("GET", "/metrics").status == 401


@hf.task(attempts=1)
def halve(n: int) -> float:
    return n / 2 if n else 1 / n


METERED = hf.App("metered", worlds=[Greeter], effects=[greet], tasks=[halve])


def process_samples(rt: hf.Runtime) -> dict[tuple[str, ...], float]:
    return {
        (sample.family, *sample.labels): sample.value
        for sample in read_process_samples(MeteredProcess("w1", rt.roles), rt.store)
    }


@pytest.mark.parametrize("kind", ["lmdb", pytest.param("postgresql", marks=pytest.mark.postgresql)])
def test_roles_and_commits_of_a_process_are_exported(tmp_path: Path, kind: str) -> None:
    url = str(tmp_path / "store") if kind == "lmdb" else reused_url()
    # The leases are extended within a third of a second.
    policy = WorldWorkerPolicy(lease_ttl_s=1.0, heartbeat_s=0.1)
    with METERED.open(url, policy=policy) as rt:
        rt.world(Greeter, "ada").send(Greeted("ada"))
        failed = rt.submit(halve, 0)
        assert rt.submit(halve, 8).result(30) == 4
        with pytest.raises(hf.TaskFailedError):
            failed.result(30)
        name = "holdfast_leases_renewed_total"
        until(
            lambda: process_samples(rt)[name, "w1", "worlds"], "the lease of the world is renewed"
        )
        found = until(
            lambda: (
                (now := process_samples(rt))["holdfast_task_attempts_total", "w1", "failed"] and now
            ),
            "the failed attempt is counted",
        )
        histograms = {
            one.name: {
                (sample.name, sample.labels.get("le")): sample.value for sample in one.samples
            }
            for one in process_histograms("w1", rt.store, rt.roles)
        }
        assert found["holdfast_leases_held", "w1", "worlds"] == 1
        assert found["holdfast_leases_held", "w1", "authority"] == 1
    assert found["holdfast_task_attempts_total", "w1", "ok"] == 1
    assert found["holdfast_task_reports_total", "w1", "committed"] == 2
    assert found["holdfast_leases_lost_total", "w1", "worlds"] == 0
    seconds = histograms["holdfast_task_attempt_seconds"]
    assert seconds["holdfast_task_attempt_seconds_bucket", "+Inf"] == 2
    commits = histograms["holdfast_commit_seconds"]
    assert commits["holdfast_commit_seconds_count", None] >= 4
    assert 0 < commits["holdfast_commit_seconds_sum", None] < 1_000
    round_trips = found.get(("holdfast_postgres_round_trips_total", "w1"), 0)
    assert (round_trips > 0) == (kind == "postgresql")

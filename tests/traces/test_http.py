"""Trace contexts over HTTP: accepted by requests that start work, given to foreign workers, one trace over processes."""

from __future__ import annotations

import http.client
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import traces
from tests.api_server.served_rig import ServedRig, rig
from tests.process.watch import until
from tests.processes import ROOT, Proc
from tests.traces.recorded import Recorded, trace_of
from tests.traces.traced_app import read_spans

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TRACE = PARENT[3:35]

__all__ = ["rig"]


def leased_task(rig: ServedRig, headers: dict[str, str]) -> dict[str, Any]:
    client = rig.client(rig.bank())
    submitted = client.call("POST", "/v1/tasks", {"name": "print", "args": [1]}, headers)
    assert submitted.status == 201
    lease = client.call(
        "POST", "/v1/tasks/lease", {"worker": "w", "queues": ["default"], "limit": 1}
    )
    [task] = lease.document["tasks"]
    return dict(task)


def test_lease_of_a_foreign_worker_has_the_context_of_the_submission(rig: ServedRig) -> None:
    task = leased_task(rig, {"traceparent": PARENT, "tracestate": "congo=1"})
    assert (task["traceparent"], task["tracestate"]) == (PARENT, "congo=1")


def test_lease_has_no_context_without_one(rig: ServedRig) -> None:
    assert not {"traceparent", "tracestate"} & leased_task(rig, {}).keys()


def test_malformed_traceparent_does_not_refuse_the_request(rig: ServedRig) -> None:
    assert "traceparent" not in leased_task(rig, {"traceparent": PARENT.upper()})


def test_tracestate_of_10_000_characters_is_bounded(rig: ServedRig) -> None:
    state = ",".join(f"vendor{n}=" + "x" * 90 for n in range(100))
    task = leased_task(rig, {"traceparent": PARENT, "tracestate": state})
    assert task["traceparent"] == PARENT
    assert 0 < len(task["tracestate"]) <= traces.TRACESTATE_BYTES_MAX


def test_context_of_one_request_is_not_that_of_the_next(recorded: Recorded, rig: ServedRig) -> None:
    client = rig.client(rig.bank())
    for headers in ({"traceparent": PARENT}, {}):
        client.call("POST", "/v1/tasks", {"name": "print", "args": [1]}, headers)
    first, second = recorded.wait("submit", 2)
    assert trace_of(first) == TRACE != trace_of(second)


class Processes:
    """Processes of the traced application over one store."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.started: list[Proc] = []

    def up(self, *argv: str) -> Proc:
        command = [sys.executable, "-m", "holdfast.cli", "up", "tests.traces.traced_app:app"]
        env = {"HOLDFAST_TEST_SPANS": str(self.path), "PYTHONPATH": str(ROOT)}
        store = ("--store", str(self.path / "data"))
        self.started.append(Proc.spawn([*command, *store, *argv], ready="ready", cwd=ROOT, env=env))
        return self.started[-1]

    def spans(self) -> list[dict[str, Any]]:
        return [span for spans in read_spans(self.path).values() for span in spans]

    def names(self) -> list[str]:
        return sorted(span["name"] for span in self.spans())

    def wait(self, **counts: int) -> None:
        """Wait for these numbers of spans, by the first word of their names, and for the spans of their parents."""

        def is_complete() -> bool:
            spans = self.spans()
            known = {span["span"] for span in spans} | {PARENT[36:52]}
            found = Counter(span["name"].split()[0] for span in spans)
            return counts.items() <= found.items() and {s["parent"] for s in spans} <= known

        until(is_complete, f"spans {counts}")


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    found = Processes(tmp_path)
    yield found
    for proc in found.started:
        proc.close()


def call(proc: Proc, path: str, document: Any) -> Any:
    [line] = [line for line in proc.lines if "http" in line]
    host, _, port = line.rpartition("://")[2].split("/")[0].strip('"}').rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=50)
    try:
        headers = {"Content-Type": "application/json", "traceparent": PARENT}
        connection.request("POST", path, json.dumps(document), headers)
        answer = connection.getresponse()
        assert answer.status < 300
        return json.loads(answer.read())
    finally:
        connection.close()


def test_request_flow_step_effect_and_receipt_of_two_processes_are_one_trace(
    processes: Processes,
) -> None:
    roles = ("orchestrator", "world", "timer", "task")
    server = processes.up("--http", "127.0.0.1:0", *(f"--role={role}" for role in roles))
    processes.up("--role=adapter")
    call(server, "/v1/flows", {"name": "order", "args": ["boots"]})
    call(server, "/v1/worlds/Shelf/top/send", {"type": "TeaBought", "event": {"what": "tea"}})
    processes.wait(start=1, step=1, call=2, send=1, reduce=2)
    assert len([spans for spans in read_spans(processes.path).values() if spans]) == 2
    spans = processes.spans()
    assert {span["trace"] for span in spans} == {TRACE}
    by_id = {span["span"]: span["name"] for span in spans}
    parents = {span["name"]: by_id.get(span["parent"], span["parent"]) for span in spans}
    assert parents["start order"] == parents["send Shelf"] == PARENT[36:52]
    assert parents["step reserve"] == "run flow:order"
    assert {by_id[s["parent"]] for s in spans if s["name"] == "call charge"} == {
        "run flow:order",
        "reduce Shelf",
    }
    assert {by_id[s["parent"]] for s in spans if s["name"] == "reduce Shelf"} == {
        "send Shelf",
        "call charge",
    }


def test_killed_worker_and_the_replay_make_no_span_twice(processes: Processes) -> None:
    server = processes.up("--http", "127.0.0.1:0", "--role=orchestrator", "--role=adapter")
    dying = processes.up("--role=task", "--worker", "first")
    marker = processes.path / "marker"
    call(server, "/v1/flows", {"name": "order", "args": ["boots", str(marker)]})
    assert dying.wait(60) == 9
    processes.up("--role=task", "--role=timer", "--worker", "second")
    until(lambda: processes.names().count("call charge") == 1, "the effect")
    until(
        lambda: processes.names().count("run flow:order") == 2,
        "two activations of the second worker",
    )
    names = processes.names()
    assert names.count("step reserve") == 1  # the replay has its outcome
    assert names.count("step die_once") == 1  # the killed attempt ended no span
    assert {span["trace"] for span in processes.spans()} == {TRACE}

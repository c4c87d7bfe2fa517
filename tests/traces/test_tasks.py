"""Spans of tasks: submit, lease, run. One trace, whatever runs the task."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import SpanKind, StatusCode

import holdfast as hf
from holdfast import traces
from holdfast.app.task_handle import TaskFailedError
from tests.process.watch import until
from tests.traces import traced_app
from tests.traces.recorded import (
    Recorded,
    attributes_of,
    configure_sdk,
    linked,
    parent_of,
    remove_sdk,
    span_id_of,
    trace_of,
)

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
UNSAMPLED = PARENT[:-1] + "0"


@hf.task(queue="images")
def resize(name: str) -> str:
    with trace.get_tracer("user").start_as_current_span("user code"):
        return traces.trace_id(traces.current())


@hf.task
async def fetch(name: str) -> str:
    await asyncio.sleep(0)
    with trace.get_tracer("user").start_as_current_span("user code"):
        return traces.trace_id(traces.current())


@hf.task
def plain(name: str) -> str:
    return name


@hf.task(attempts=1)
def refuse() -> None:
    raise ValueError("no")


@pytest.fixture(params=["memory:", "lmdb"])
def rt(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[hf.Runtime]:
    app = hf.App("jobs", tasks=[resize, fetch, plain, refuse])
    url = "memory:" if request.param == "memory:" else f"lmdb:{tmp_path / 'data'}"
    with app.open(url, roles=("task",)) as runtime:
        yield runtime


@pytest.mark.parametrize("task", [resize, fetch])
def test_submit_lease_run_and_user_code_are_one_trace(
    recorded: Recorded, rt: hf.Runtime, task: Any
) -> None:
    with trace.get_tracer("user").start_as_current_span("request") as request:
        handle = rt.submit(task, "a")
    found = handle.result(30)
    name, queue = task.spec.name, task.spec.queue
    submit, lease, ran = recorded.one("submit"), recorded.one("lease"), recorded.one("run")
    assert {found} == {trace_of(span) for span in (submit, lease, ran)}
    assert [submit.name, lease.name, ran.name] == [
        f"submit {name}",
        f"lease {queue}",
        f"run {name}",
    ]
    assert parent_of(submit) == request.get_span_context().span_id
    assert parent_of(lease) == parent_of(ran) == span_id_of(submit)
    assert linked(ran) == [span_id_of(lease)]
    assert parent_of(recorded.one("user code")) == span_id_of(ran)
    assert [submit.kind, lease.kind, ran.kind] == [
        SpanKind.PRODUCER,
        SpanKind.CLIENT,
        SpanKind.CONSUMER,
    ]
    seq = handle.id.partition("-")[2]
    assert attributes_of(submit) == {
        "messaging.system": "holdfast",
        "messaging.operation.name": "submit",
        "messaging.operation.type": "send",
        "messaging.destination.name": queue,
        "messaging.message.id": seq,
    }
    assert attributes_of(ran) == {
        "messaging.system": "holdfast",
        "messaging.operation.name": "run",
        "messaging.operation.type": "process",
        "messaging.destination.name": queue,
        "messaging.message.id": seq,
        "holdfast.task.id": handle.id,
        "holdfast.task.name": name,
        "holdfast.attempt": 1,
    }


def test_failed_attempt_has_the_status_error(recorded: Recorded, rt: hf.Runtime) -> None:
    with pytest.raises(TaskFailedError):
        rt.submit(refuse).result(30)
    ran = recorded.one("run refuse")
    assert ran.status.status_code is StatusCode.ERROR
    assert attributes_of(ran)["error.type"] == "handler_error"


def test_tasks_of_one_batch_share_the_submit_span(recorded: Recorded, rt: hf.Runtime) -> None:
    handles = rt.submit_many(resize, [(str(n),) for n in range(20)])
    for handle in handles:
        handle.result(30)
    submit = recorded.one("submit resize")
    assert attributes_of(submit)["messaging.batch.message_count"] == 20
    runs = recorded.wait("run resize", 20)
    assert {parent_of(ran) for ran in runs} == {span_id_of(submit)}
    leased = recorded.finished("lease")
    assert sum(attributes_of(span)["messaging.batch.message_count"] for span in leased) == 20
    assert {linked(ran)[0] for ran in runs} == {span_id_of(span) for span in leased}


def test_lease_of_two_traces_has_links_and_no_parent(recorded: Recorded, tmp_path: Path) -> None:
    app = hf.App("jobs", tasks=[resize])
    with app.open(str(tmp_path / "data"), roles=()) as rt:
        handles = [rt.submit(resize, "a") for _ in range(2)]
        submits = recorded.wait("submit", 2)
        assert len({trace_of(span) for span in submits}) == 2
        with app.open(str(tmp_path / "data"), roles=("task",)):
            found = [handle.result(30) for handle in handles]
    assert found == [trace_of(span) for span in submits]
    lease = recorded.one("lease")
    assert lease.parent is None
    assert sorted(linked(lease)) == sorted(map(span_id_of, submits))


def test_unsampled_parent_makes_no_span_and_passes_its_context_on(
    recorded: Recorded, rt: hf.Runtime
) -> None:
    token = traces.receive(traces.parse(UNSAMPLED, "congo=1"))
    try:
        handle = rt.submit(resize, "a")
    finally:
        traces.forget(token)
    assert handle.result(30) == PARENT[3:35]
    assert recorded.names() == []


def test_dropped_root_is_not_sampled_again_by_the_worker(rt: hf.Runtime) -> None:
    recorded = configure_sdk(ParentBased(ALWAYS_OFF))
    try:
        assert rt.submit(resize, "a").result(30) != ""
        assert recorded.names() == []
    finally:
        remove_sdk()


def test_worker_with_the_sdk_starts_a_trace_for_a_task_without_one(tmp_path: Path) -> None:
    app = hf.App("jobs", tasks=[resize])
    with app.open(str(tmp_path / "data"), roles=()) as rt:
        handle = rt.submit(resize, "a")
        recorded = configure_sdk()
        try:
            with app.open(str(tmp_path / "data"), roles=("task",)):
                found = handle.result(30)
            assert recorded.names() == ["run resize", "user code"]
            assert recorded.one("run").parent is None
            assert found == trace_of(recorded.one("run"))
        finally:
            remove_sdk()


def test_repeat_of_a_key_with_another_traceparent_is_the_same_task(
    recorded: Recorded, rt: hf.Runtime
) -> None:
    first = rt.submit(resize.options(key="k"), "a")
    second = rt.submit(resize.options(key="k"), "a")
    assert first.id == second.id
    first.result(30)
    submits = recorded.wait("submit", 2)
    assert trace_of(submits[0]) != trace_of(submits[1])
    assert trace_of(recorded.one("run resize")) == trace_of(submits[0])


def test_child_process_of_a_task_has_the_context_and_makes_its_spans(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOLDFAST_TEST_SPANS", str(tmp_path))
    with traced_app.app.open("memory:", roles=("task",)) as rt:
        token = traces.receive(traces.parse(PARENT))
        handle = rt.submit(traced_app.weigh, "a")
        traces.forget(token)
        assert handle.result(60) == PARENT[3:35]
        [spans] = until(lambda: list(traced_app.read_spans(tmp_path).values()), "the spans")
    assert [span["name"] for span in spans] == ["user process", "run weigh"]
    assert {span["trace"] for span in spans} == {PARENT[3:35]}

"""Spans of flows: start, activation, step, child. A step that a replay answers makes no span."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.trace import StatusCode

import holdfast as hf
from holdfast import traces
from tests.traces.recorded import (
    Recorded,
    attributes_of,
    configure_sdk,
    parent_of,
    remove_sdk,
    span_id_of,
    trace_of,
)

PARENT = traces.parse("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")


@hf.effect("quote")
def quote(call: hf.Call, what: str) -> int:
    return len(what)


@hf.task
def invoice(cents: int) -> str:
    return f"invoice {cents}"


def reserve(what: str) -> str:
    with trace.get_tracer("user").start_as_current_span("user step"):
        return traces.trace_id(traces.current())


async def label(what: str) -> str:
    with trace.get_tracer("user").start_as_current_span("user coroutine"):
        await asyncio.sleep(0)
    return what


def fail_once(step_attempts: int) -> int:
    if hf.current_step().attempt <= step_attempts:
        raise ValueError("again")
    return step_attempts


@hf.flow
async def wrap(what: str) -> str:
    return await hf.step(label, what)


@hf.flow
async def order(what: str) -> str:
    found = await hf.step(reserve, what)
    cents = await hf.step(quote, what)
    await hf.step(invoice, cents)
    await hf.step(wrap, what)
    await hf.sleep(0.01)
    await hf.step(hf.options(fail_once, attempts=2, backoff_s=0.001), 1)
    return found


class Asked(hf.Event):
    what: str


class Desk(hf.World):
    ended: str = ""

    @hf.on(Asked)
    def asked(self, event: Asked, cx: hf.Context) -> None:
        cx.start(wrap, event.what)

    @hf.on(wrap)
    def wrapped(self, receipt: Any, cx: hf.Context) -> None:
        self.ended = receipt.value


APP = hf.App("shop", flows=[order, wrap], tasks=[invoice], effects=[quote], worlds=[Desk])
ROLES = ("orchestrator", "world", "task", "adapter", "timer")


@pytest.fixture(params=["memory:", "lmdb"])
def rt(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[hf.Runtime]:
    url = "memory:" if request.param == "memory:" else f"lmdb:{tmp_path / 'data'}"
    with APP.open(url, roles=ROLES) as runtime:
        yield runtime


def parent_name(recorded: Recorded, name: str) -> str:
    """The name of the parent of the only span of this name."""
    by_id = {span_id_of(span): span.name for span in recorded.finished()}
    parent = parent_of(recorded.one(name))
    return "" if parent is None else by_id[parent]


def test_start_activations_steps_and_children_are_one_trace(
    recorded: Recorded, rt: hf.Runtime
) -> None:
    with trace.get_tracer("user").start_as_current_span("request") as request:
        handle = rt.start(order, "boots")
    assert handle.result(30) == format(request.get_span_context().trace_id, "032x")
    recorded.one("step reserve")
    recorded.wait("step fail_once", 2)
    assert len({trace_of(span) for span in recorded.finished()}) == 1
    assert parent_name(recorded, "start order") == "request"
    assert {parent_of(span) for span in recorded.finished("run flow:order")} == {
        span_id_of(recorded.one("start order"))
    }
    parents = {
        "step reserve": "run flow:order",
        "user step": "step reserve",
        "call quote": "run flow:order",
        "run invoice": "run flow:order",
        "step label": "run flow:wrap",
        "user coroutine": "step label",
    }
    assert {name: parent_name(recorded, name) for name in parents} == parents
    first, second = recorded.finished("step fail_once")
    assert first.status.status_code is StatusCode.ERROR
    assert attributes_of(first)["error.type"] == "ValueError"
    assert second.status.status_code is StatusCode.UNSET
    assert attributes_of(second) == {
        "holdfast.flow.id": str(handle.id),
        "holdfast.step.name": "fail_once",
        "holdfast.step.occurrence": 1,
        "holdfast.attempt": 2,
    }


def test_world_that_starts_a_flow_is_in_its_trace(recorded: Recorded, rt: hf.Runtime) -> None:
    rt.world(Desk, "d").send(Asked("boots"))
    rt.world(Desk, "d").wait_for(lambda state: state.ended == "boots")
    recorded.wait("reduce Desk", 2)
    assert len({trace_of(span) for span in recorded.finished()}) == 1
    asked, ended = recorded.finished("reduce Desk")
    assert parent_of(recorded.one("run flow:wrap")) == span_id_of(asked)
    assert parent_of(ended) == span_id_of(asked)


def test_context_of_a_flow_survives_processes_without_the_sdk(tmp_path: Path) -> None:
    url = f"lmdb:{tmp_path / 'data'}"
    with APP.open(url, roles=("task",)) as rt:
        token = traces.receive(PARENT)
        handle = rt.start(order.options(key="k"), "boots")
        traces.forget(token)
        assert rt.start(order.options(key="k"), "boots").id == handle.id
        while len(handle.steps()) < 2:  # the effect waits for its pool
            pass
    recorded = configure_sdk()
    try:
        with APP.open(url, roles=ROLES) as rt:
            assert rt.flow(handle.id).result(30) == traces.trace_id(PARENT)
        assert {trace_of(span) for span in recorded.finished()} == {traces.trace_id(PARENT)}
        assert not recorded.finished("step reserve")  # it ran in the first process
        assert recorded.finished("call quote")
    finally:
        remove_sdk()

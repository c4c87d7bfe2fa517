"""Spans of worlds: send, reduce, call. A replay makes no span, and a cycle makes its spans when it is committed."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

import holdfast as hf
from holdfast import traces
from holdfast.clock import S
from holdfast.durable import journal
from holdfast.ops import log_format, world_replay
from holdfast.ops.verify import find_differences
from holdfast.store.api import Store
from holdfast.world.catalog import subject_of
from tests.process.watch import until
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
from tests.world.rig import CRASH_AFTER, CRASH_BEFORE, FAULTS, UNKNOWN_BEFORE, Crash, WorldRig

PARENT = traces.parse("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
OTHER = traces.parse("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")


class Opened(hf.Event):
    cents: int


class TillTold(hf.Event):
    text: str


class Rung(hf.Event):
    pass


@hf.effect("charge", attempts=2)
def charge(call: hf.Call, cents: int) -> int:
    with trace.get_tracer("user").start_as_current_span("user effect"):
        if cents == 13 and call.attempt == 1:
            raise RuntimeError("unlucky")
    return cents


class LedgerBook(hf.World):
    cents: int = 0
    rung: int = 0

    @hf.on(Opened)
    def opened(self, event: Opened, cx: hf.Context) -> None:
        with trace.get_tracer("user").start_as_current_span("user reducer"):
            if event.cents < 0:
                raise ValueError("negative")
        self.cents += event.cents
        cx.do(charge, event.cents)

    @hf.on(charge)
    def charged(self, receipt: Any, cx: hf.Context) -> None:
        cx.send(Friend, "bob", TillTold("charged"))
        cx.after(0, Rung())

    @hf.on(Rung)
    def rang(self, event: Rung, cx: hf.Context) -> None:
        self.rung += 1


class Friend(hf.World):
    told: int = 0

    @hf.on(TillTold)
    def heard(self, event: TillTold, cx: hf.Context) -> None:
        self.told += 1


APP = hf.App("bank", worlds=[LedgerBook, Friend], effects=[charge])
ROLES = ("orchestrator", "world", "adapter", "timer")


@pytest.fixture(params=["memory:", "lmdb"])
def rt(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[hf.Runtime]:
    url = "memory:" if request.param == "memory:" else f"lmdb:{tmp_path / 'data'}"
    with APP.open(url, roles=ROLES) as runtime:
        yield runtime


def test_send_reduce_call_receipt_mail_and_timer_are_one_trace(
    recorded: Recorded, rt: hf.Runtime
) -> None:
    rt.world(LedgerBook, "ada").send(Opened(100))
    rt.world(LedgerBook, "ada").wait_for(lambda state: state.rung == 1)
    rt.world(Friend, "bob").wait_for(lambda state: state.told == 1)
    opened, charged, rang = recorded.wait("reduce LedgerBook", 3)
    send, call, heard = recorded.one("send"), recorded.one("call"), recorded.one("reduce Friend")
    assert {trace_of(span) for span in recorded.finished()} == {trace_of(send)}
    chain = [send, opened, call, charged]
    assert [parent_of(span) for span in chain] == [None, *map(span_id_of, chain[:-1])]
    assert parent_of(heard) == parent_of(rang) == span_id_of(charged)
    assert parent_of(recorded.one("user reducer")) == span_id_of(opened)
    assert parent_of(recorded.one("user effect")) == span_id_of(call)
    assert [span.kind for span in chain] == [
        SpanKind.PRODUCER, SpanKind.CONSUMER, SpanKind.CLIENT, SpanKind.CONSUMER,
    ]  # fmt: skip
    assert attributes_of(opened) | {"holdfast.world_id": ""} == {
        "messaging.system": "holdfast",
        "messaging.operation.name": "reduce",
        "messaging.operation.type": "process",
        "messaging.destination.name": "LedgerBook",
        "messaging.message.id": "1",
        "holdfast.universe": "bank",
        "holdfast.world": "LedgerBook/ada",
        "holdfast.world_id": "",
        "holdfast.height": 1,
        "holdfast.ingress": "event Opened",
    }
    assert attributes_of(call)["holdfast.effect"] == "charge"
    assert attributes_of(call)["holdfast.attempt"] == 1


def test_failed_attempt_and_failed_event_have_the_status_error(
    recorded: Recorded, rt: hf.Runtime
) -> None:
    rt.world(LedgerBook, "ada").send(Opened(13))
    first, second = recorded.wait("call", 2)
    assert first.status.status_code is StatusCode.ERROR
    assert attributes_of(first)["error.type"] == "handler_error"
    assert second.status.status_code is StatusCode.UNSET
    assert attributes_of(second)["holdfast.attempt"] == 2
    rt.world(LedgerBook, "eve").send(Opened(-1))

    def of_eve() -> list[Any]:
        spans = recorded.finished("reduce")
        return [one for one in spans if attributes_of(one)["holdfast.world"] == "LedgerBook/eve"]

    [failed] = until(of_eve, "the failed event")
    assert attributes_of(failed)["error.type"] == "reducer_failed"
    assert failed.status.description == "ValueError: negative"


def test_span_of_an_application_with_hidden_values_has_the_code_of_an_error_only(
    recorded: Recorded, rt: hf.Runtime
) -> None:
    traces.hide_error_texts(rt)
    rt.world(LedgerBook, "eve").send(Opened(-1))
    [failed] = until(lambda: recorded.finished("reduce"), "the failed event")
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.status.description == "reducer_failed"


def sent(rt: hf.Runtime, name: str, event: Any, context: bytes, key: str | None = None) -> int:
    token = traces.receive(context)
    try:
        return rt.world(LedgerBook, name).send(event, key=key)
    finally:
        traces.forget(token)


def test_repeat_of_a_key_with_another_traceparent_is_the_same_event(
    recorded: Recorded, rt: hf.Runtime
) -> None:
    first = sent(rt, "ada", Opened(1), PARENT, key="k")
    assert sent(rt, "ada", Opened(1), OTHER, key="k") == first
    rt.world(LedgerBook, "ada").wait_for(lambda state: state.rung == 1)
    recorded.wait("reduce LedgerBook", 3)
    assert {trace_of(span) for span in recorded.finished("reduce")} == {traces.trace_id(PARENT)}


def entries_of(rt: hf.Runtime, name: str) -> list[bytes]:
    store: Store = rt.store
    world_id = rt.world(LedgerBook, name).record().world_id
    subject = subject_of("bank", world_id)
    return store.read(lambda txn: [entry.body for entry in journal.read(txn, subject, 1, 100, 100)])


def test_journal_and_verification_do_not_see_a_context(recorded: Recorded, tmp_path: Path) -> None:
    url = f"lmdb:{tmp_path / 'data'}"
    with APP.open(url, roles=ROLES) as rt:
        sent(rt, "ada", Opened(1), PARENT)
        rt.world(LedgerBook, "ada").wait_for(lambda state: state.rung == 1)
        bodies = b"".join(entries_of(rt, "ada"))
        assert b"Opened" in bodies
        for context in (PARENT[:16], PARENT[:16].hex().encode()):
            assert context not in bodies
        recorded.wait("reduce", 4)
        before = recorded.names()
        assert rt.store.read(find_differences) == []
        for target in rt.store.read(world_replay.targets, "bank"):
            finding = world_replay.check_world(rt.store, APP, target)
            assert (finding.code, finding.steps > 0) == ("", True)
        assert recorded.names() == before


def test_restored_world_makes_no_span_again(recorded: Recorded, tmp_path: Path) -> None:
    url = f"lmdb:{tmp_path / 'data'}"
    with APP.open(url, roles=ROLES) as rt:
        rt.world(LedgerBook, "ada").send(Opened(1))
        rt.world(LedgerBook, "ada").wait_for(lambda state: state.rung == 1)
        rt.world(Friend, "bob").wait_for(lambda state: state.told == 1)
        recorded.wait("reduce", 4)
        before = recorded.names()
        assert rt.world(LedgerBook, "ada").state(at=1).cents == 1  # replays the first entry
    assert recorded.names() == before
    with APP.open(url, roles=ROLES) as rt:
        rt.world(LedgerBook, "ada").send(Opened(2))
        rt.world(LedgerBook, "ada").wait_for(lambda state: state.rung == 2)
        recorded.wait("reduce LedgerBook", 6)
    assert [
        attributes_of(s)["holdfast.height"] for s in recorded.finished("reduce LedgerBook")
    ] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
    assert len(recorded.finished("user reducer")) == 2


def test_process_without_the_sdk_passes_the_context_on(tmp_path: Path) -> None:
    url = f"lmdb:{tmp_path / 'data'}"
    with APP.open(url, roles=("orchestrator", "world")) as rt:
        sent(rt, "ada", Opened(1), PARENT)
        rt.world(LedgerBook, "ada").wait_for(lambda state: state.cents == 1)
    recorded = configure_sdk()
    try:
        with APP.open(url, roles=ROLES) as rt:
            rt.world(LedgerBook, "ada").wait_for(lambda state: state.rung == 1)
            call = recorded.one("call")
        assert trace_of(call) == traces.trace_id(PARENT)
        assert parent_of(call) == int.from_bytes(PARENT[16:24], "big")
        assert linked(call) == []
    finally:
        remove_sdk()


def test_log_lines_of_a_world_and_an_effect_have_the_trace_id(rt: hf.Runtime) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(log_format.JsonFormatter({}))
    logger = logging.getLogger("holdfast")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel("INFO")
    try:
        sent(rt, "eve", Opened(-1), PARENT)
        sent(rt, "ada", Opened(13), PARENT)
        rt.world(LedgerBook, "ada").wait_for(lambda state: state.rung == 1)
        until(lambda: stream.getvalue().count("\n") >= 2, "two log lines")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    found = {line["message"]: line for line in lines}
    assert set(found) == {"event failed", "attempt failed"}
    assert {line["trace_id"] for line in lines} == {traces.trace_id(PARENT)}
    assert found["attempt failed"]["world_id"]
    assert len(found["attempt failed"]["intent"]) == 64


@pytest.mark.parametrize("fault", FAULTS)
def test_cycle_whose_commit_fails_makes_each_span_at_most_once(
    recorded: Recorded, fault: str
) -> None:
    rig = WorldRig(APP)
    rig.world(LedgerBook).send(Opened(5))
    worker = rig.worker()
    worker.tick()
    rig.world(LedgerBook).send(Opened(6))
    rig.backend.arm({1: fault})
    with suppress(Crash):
        worker.tick()
    rig.backend.arm({})
    if fault in (CRASH_BEFORE, CRASH_AFTER):
        rig.clock.advance(60 * S)  # the lease of the dead worker expires
        worker = rig.worker(incarnation="2")
    rig.run(worker)
    assert rig.world(LedgerBook).state().cents == 11
    heights = [attributes_of(span)["holdfast.height"] for span in recorded.finished("reduce")]
    # After an unknown commit that was applied, the span is lost and not made again.
    assert heights == ([1, 2] if fault in (CRASH_BEFORE, UNKNOWN_BEFORE) else [1])

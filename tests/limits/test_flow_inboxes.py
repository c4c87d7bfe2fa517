"""Load limits of the inboxes of flows: their depth and their bytes, judged in the commit of the event."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import holdfast as hf
from holdfast import codec
from holdfast import store as stores
from holdfast.app.flow_handle import FlowHandle
from holdfast.app.runtime import Runtime
from holdfast.clock import SimClock
from holdfast.durable import load_limits
from holdfast.durable.load_limits import BYTES
from holdfast.errors import KeyConflict
from holdfast.flows.model import decode_head, keys_of, pack_int
from holdfast.ops import rebuild, verify
from holdfast.ops.api.call import invoke
from holdfast.ops.http.problem import problem_response
from tests.api.rig import find_endpoint
from tests.cli.conftest import RunCommand, run
from tests.flows.rig import FlowRig
from tests.limits.test_load_limits import assert_refused, limit, used

UNIVERSE = FlowRig.universe

__all__ = ["run"]


class Wanted(hf.Event):
    text: str = ""


class Unwanted(hf.Event):
    text: str = ""


bank_is_down: list[bool] = []


async def charge() -> None:
    if bank_is_down:
        raise ConnectionError


@hf.flow
async def collect() -> str:
    found = await hf.receive(Wanted)
    await hf.step(charge)
    last = await hf.receive(Unwanted)
    return found.text + last.text


app = hf.App(UNIVERSE, flows=[collect], events=[Wanted, Unwanted])


def make_rig() -> FlowRig:
    bank_is_down.clear()
    clock = SimClock()
    return FlowRig(stores.open("memory:", clock=clock), clock, app)


@pytest.fixture
def rig() -> Iterator[FlowRig]:
    made = make_rig()
    yield made
    assert made.store.read(verify.find_differences) == []
    made.threads.shutdown()


@pytest.fixture
def rt() -> Iterator[Runtime]:
    with app.open(stores.open("memory:"), roles=()) as rt:
        yield rt


def run_until_waiting(rig: FlowRig, flow: FlowHandle[Any]) -> None:
    rig.run(lambda: flow.status().state == "WAITING")


def unread(rig: FlowRig) -> int:
    return used(rig.store, BYTES, UNIVERSE)


def over_http(rt: Runtime, flow: FlowHandle[Any]) -> Any:
    endpoint, path = find_endpoint("POST", f"/v1/flows/{flow.id}/send")
    return invoke(
        endpoint, rt.store, UNIVERSE, path=path, app=app, body={"type": "Unwanted", "event": {}}
    )


DOORS: dict[str, Callable[[Runtime, FlowHandle[Any]], Any]] = {
    "send": lambda rt, flow: flow.send(Unwanted()),
    "send with a key": lambda rt, flow: flow.send(Unwanted(), key="new"),
    "aio.send": lambda rt, flow: asyncio.run(rt.aio.send(flow, Unwanted())),
    "HTTP": over_http,
}


@pytest.mark.parametrize("door", DOORS)
def test_full_inbox_of_a_flow_refuses_events(rt: Runtime, door: str) -> None:
    flow, other = rt.start(collect), rt.start(collect)
    limit(rt.store, UNIVERSE, flow_inbox=2)
    for _ in range(2):
        flow.send(Unwanted())
    error = assert_refused(rt.store, lambda: DOORS[door](rt, flow), "flow_inbox")
    assert (error.found, error.limit_max, error.flow) == (3, 2, flow.id)
    response = problem_response(error)
    assert (response.status, dict(response.headers)["Retry-After"]) == (503, "1")
    DOORS[door](rt, other)
    limit(rt.store, UNIVERSE, flow_inbox=3)
    DOORS[door](rt, flow)


def test_full_inbox_of_a_flow_is_a_line_of_the_command(tmp_path: Path, run: RunCommand) -> None:
    url = str(tmp_path / "data")
    with app.open(url, roles=()) as rt:
        flow = rt.start(collect)
        assert run("limits", "set", "flow_inbox=1", "--store", url).out.split()[-3:] == [
            "flow_inbox", "1", "-",
        ]  # fmt: skip
        send = ("flows", "send", flow.id, "Wanted", "{}", "--store", url)
        with_app = ("--app", "tests.limits.test_flow_inboxes:app")
        assert run(*send, *with_app).code == 0
        refused = run(*send, *with_app)
        assert (refused.code, refused.out) == (1, "")
        assert refused.error.startswith("overloaded: limit='flow_inbox'")
        assert len(refused.err.splitlines()) == 1
        assert "limit flow_inbox: 1 of 1" in run("flows", "why", flow.id, "--store", url).out


def test_repeat_of_an_accepted_event_is_not_refused(rt: Runtime) -> None:
    flow = rt.start(collect)
    limit(rt.store, UNIVERSE, flow_inbox=1)
    assert flow.send(Unwanted(), key="k") == flow.send(Unwanted(), key="k") == 1
    with pytest.raises(KeyConflict):
        flow.send(Wanted(), key="k")


def test_waiting_receive_gets_its_event_at_any_limit(rig: FlowRig) -> None:
    flow = rig.start(collect)
    run_until_waiting(rig, flow)
    limit(rig.store, UNIVERSE, flow_inbox=1, bytes_in_flight=1)
    assert_refused(rig.store, lambda: flow.send(Unwanted("x" * 10)), BYTES)
    limit(rig.store, UNIVERSE, bytes_in_flight=0)
    flow.send(Unwanted("b"))
    assert_refused(rig.store, lambda: flow.send(Unwanted()), "flow_inbox")
    flow.send(Wanted("a"))
    assert rig.result(flow) == "ab"


def test_received_event_makes_room_in_the_inbox(rig: FlowRig) -> None:
    flow = rig.start(collect)
    limit(rig.store, UNIVERSE, flow_inbox=1, bytes_in_flight=10_000)
    flow.send(Wanted("x" * 5_000))
    assert unread(rig) > 5_000
    assert_refused(rig.store, lambda: flow.send(Unwanted("b")), "flow_inbox")
    run_until_waiting(rig, flow)
    assert unread(rig) == 0
    flow.send(Wanted("stays in the inbox"))
    flow.send(Unwanted("b"))
    assert rig.result(flow)[-1] == "b"


def test_bytes_in_flight_counts_the_events_of_open_flows(rig: FlowRig) -> None:
    bank_is_down.append(True)
    first, second = rig.start(collect), rig.start(collect)
    first.send(Unwanted("from before the limit"))
    limit(rig.store, UNIVERSE, bytes_in_flight=1_000)
    first.send(Unwanted("x" * 400))
    error = assert_refused(rig.store, lambda: second.send(Unwanted("x" * 700)), BYTES)
    assert error.found > 1_000
    in_flight = unread(rig)
    assert 400 < in_flight < 700
    assert rig.store.read(verify.find_differences) == []
    first.send(Wanted())
    rig.run(first.done)
    assert unread(rig) == 0, "the events of an ended flow are not in flight"
    assert rig.store.read(verify.find_differences) == []
    bank_is_down.clear()
    first.redrive()
    # The arguments of the activation count, too.
    assert in_flight < unread(rig) < in_flight + 10
    assert rig.result(first) == "from before the limit"
    assert unread(rig) == 0


def test_verify_compares_the_depth_of_an_inbox_and_rebuild_repairs_it(tmp_path: Path) -> None:
    url = str(tmp_path / "data")
    key = keys_of(UNIVERSE).heads + pack_int(1)
    with app.open(url, roles=()) as rt:
        flow = rt.start(collect)
        limit(rt.store, UNIVERSE, bytes_in_flight=1_000)
        flow.send(Unwanted("x"))
        in_flight = used(rt.store, BYTES, UNIVERSE)
        head = decode_head(rt.store.read(lambda txn: txn.get(key)) or b"")
        assert head.unread == 1
        rt.store.transact(lambda txn: txn.put(key, codec.pack(replace(head, unread=7))))
        rt.store.transact(lambda txn: load_limits.add_to(txn, UNIVERSE, BYTES, 5))
        found = rt.store.read(verify.find_differences)
        assert sorted((one.what, one.found, one.expected) for one in found) == [
            ("counter bytes_in_flight", in_flight + 5, in_flight),
            ("events in the inbox", 7, 1),
        ]
    rebuild.rebuild(url, UNIVERSE)
    with app.open(url, roles=()) as rt:
        assert rt.store.read(verify.find_differences) == []
        assert used(rt.store, BYTES, UNIVERSE) == in_flight

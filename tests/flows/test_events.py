"""Events: order, types, receivers, keys, timeouts."""

import asyncio
import contextlib
import time
from typing import Any

import pytest

import holdfast as hf
from holdfast.errors import Invalid, KeyConflict
from holdfast.flows import mailbox
from holdfast.ops.verify import find_differences
from tests.flows.test_steps import app_of


class Payment(hf.Event):
    cents: int


class Shipped(hf.Event):
    parcel: str


def app_with_events(*flows: Any) -> hf.App:
    return app_of(*flows, events=[Payment, Shipped])


def state_of(handle: Any, name: str) -> str:
    """The state of the first step of a name, or nothing if there is none."""
    return next((step.state for step in handle.steps() if step.name == name), "")


def test_receive_takes_events_in_the_order_of_send(make_rig: Any) -> None:
    @hf.flow
    async def order() -> list[int]:
        return [(await hf.receive(Payment)).cents for _ in range(3)]

    rig = make_rig(app_with_events(order))
    handle = rig.start(order)
    for cents in (1, 2):
        handle.send(Payment(cents))
    rig.run(rig.is_idle)
    handle.send(Payment(3))
    assert rig.result(handle) == [1, 2, 3]


def test_receive_leaves_events_of_other_types(make_rig: Any) -> None:
    @hf.flow
    async def order() -> list[Any]:
        parcel = (await hf.receive(Shipped)).parcel
        rest = [await hf.receive(Payment, Shipped) for _ in range(2)]
        return [parcel, *(type(event).__name__ for event in rest)]

    rig = make_rig(app_with_events(order))
    handle = rig.start(order)
    handle.send(Payment(1))
    handle.send(Shipped("a"))
    handle.send(Shipped("b"))
    assert rig.result(handle) == ["a", "Payment", "Shipped"]
    assert handle.events() == []


def test_receive_finds_an_event_behind_many_events_of_other_types(make_rig: Any) -> None:
    @hf.flow
    async def order() -> str:
        return (await hf.receive(Shipped)).parcel

    rig = make_rig(app_with_events(order))
    handle = rig.start(order)
    for cents in range(3 * mailbox.MAIL_PAGE):
        handle.send(Payment(cents))
    handle.send(Shipped("last"))
    assert rig.result(handle) == "last"


def test_receivers_are_served_in_the_order_of_their_calls(make_rig: Any) -> None:
    @hf.flow
    async def order() -> list[int]:
        first, second = hf.receive(Payment), hf.receive(Payment)
        events = await asyncio.gather(second, first)
        return [event.cents for event in events]

    rig = make_rig(app_with_events(order))
    handle = rig.start(order)
    rig.run_one()
    handle.send(Payment(1))
    handle.send(Payment(2))
    assert rig.result(handle) == [2, 1]


def test_send_with_a_known_key_is_the_first_one_again(make_rig: Any) -> None:
    @hf.flow
    async def order() -> int:
        first = await hf.receive(Payment)
        second = await hf.receive(Payment)
        return first.cents + second.cents

    rig = make_rig(app_with_events(order))
    handle = rig.start(order)
    assert handle.send(Payment(1), key="p") == handle.send(Payment(1), key="p") == 1
    with pytest.raises(KeyConflict):
        handle.send(Payment(2), key="p")
    assert handle.send(Payment(5), key="q") == 2
    assert rig.result(handle) == 6
    assert handle.send(Payment(1), key="p") == 1


def test_receive_raises_timeout_when_no_event_comes(make_rig: Any) -> None:
    @hf.flow
    async def order() -> str:
        try:
            await hf.receive(Payment, timeout_s=60)
        except hf.Timeout:
            await hf.sleep(1)
            return "none"
        return "came"

    rig = make_rig(app_with_events(order))
    assert rig.result(rig.start(order)) == "none"


def test_event_after_the_timeout_of_a_receive_stays_in_the_inbox(make_rig: Any) -> None:
    @hf.flow
    async def order() -> int:
        with contextlib.suppress(hf.Timeout):
            await hf.receive(Payment, timeout_s=60)
        return (await hf.receive(Payment)).cents

    rig = make_rig(app_with_events(order))
    handle = rig.start(order)
    rig.run_one()
    rig.run(lambda: state_of(handle, "hf.receive") == "failed")
    handle.send(Payment(7))
    assert rig.result(handle) == 7


def test_event_before_the_timeout_of_a_receive_removes_the_timer(make_rig: Any) -> None:
    @hf.flow
    async def order() -> int:
        event = await hf.receive(Payment, timeout_s=60)
        await hf.sleep(3600)
        return event.cents

    rig = make_rig(app_with_events(order))
    handle = rig.start(order)
    rig.run_one()
    handle.send(Payment(7))
    assert rig.result(handle) == 7
    assert [step.state for step in handle.steps()] == ["completed", "completed"]
    assert rig.store.read(find_differences) == []


def test_receive_that_the_code_cancelled_takes_no_event(make_rig: Any) -> None:
    @hf.flow
    async def order() -> int:
        waiting = {hf.receive(Payment), hf.sleep(60)}
        _, left = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for step in left:
            step.cancel()
        return (await hf.receive(Payment)).cents

    rig = make_rig(app_with_events(order))
    handle = rig.start(order)
    rig.run(lambda: state_of(handle, "hf.sleep") == "completed")
    rig.run_one()
    handle.send(Payment(3))
    assert rig.result(handle) == 3


def test_event_that_came_for_a_cancelled_receive_is_delivered_again(make_rig: Any) -> None:
    """The event is recorded before the commit that cancels the receive."""

    @hf.flow
    async def order() -> list[int]:
        waiting = {hf.receive(Payment), hf.sleep(60)}
        _done, left = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not sent:
            sent.append(handle.send(Payment(3)))
        for step in left:
            step.cancel()
        return [(await hf.receive(Payment)).cents]

    sent: list[int] = []
    rig = make_rig(app_with_events(order))
    handle = rig.start(order)
    rig.run_one()
    rig.pass_time()
    assert rig.result(handle) == [3]
    assert rig.store.read(find_differences) == []


def cancelling_flow(make_rig: Any) -> tuple[Any, Any, list[int]]:
    """A flow that cancels a receive. The event comes while its next step runs, before the commit of the cancellation."""
    sent: list[int] = []

    async def slow() -> None:
        if not sent:
            sent.append(handle.send(Payment(3)))
            # The worker reads the event meanwhile.
            await asyncio.sleep(0.2)

    @hf.flow
    async def order() -> list[int]:
        waiting = {hf.receive(Payment), hf.sleep(60)}
        _done, left = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for step in left:
            step.cancel()
        await hf.step(slow)
        first = (await hf.receive(Payment)).cents
        return [first, (await hf.receive(Payment)).cents]

    rig = make_rig(app_with_events(order))
    handle = rig.start(order)
    rig.run_one()
    rig.pass_time()
    return rig, handle, sent


def test_event_that_the_worker_read_for_a_cancelled_receive_is_delivered_again(
    make_rig: Any,
) -> None:
    rig, handle, sent = cancelling_flow(make_rig)
    rig.run(lambda: bool(sent))
    handle.send(Payment(4))
    assert rig.result(handle) == [3, 4]
    assert handle.events() == []
    assert rig.store.read(find_differences) == []


@pytest.mark.parametrize("commit", [2, 3, 4])
def test_event_of_a_cancelled_receive_is_delivered_again_once_after_a_crash(
    make_rig: Any, commit: int
) -> None:
    rig, handle, sent = cancelling_flow(make_rig)
    rig.plan["flows.commit", commit] = "before"
    rig.run(lambda: bool(sent))
    handle.send(Payment(4))
    assert rig.result(handle) == [3, 4]
    assert handle.events() == []
    assert not rig.plan
    assert rig.store.read(find_differences) == []


def test_send_to_an_ended_flow_is_refused(make_rig: Any) -> None:
    @hf.flow
    async def order() -> None:
        return None

    rig = make_rig(app_with_events(order))
    handle = rig.start(order)
    rig.result(handle)
    with pytest.raises(Invalid, match="start a new one, or redrive it"):
        handle.send(Payment(1))


@pytest.mark.parametrize("is_second_run", [False, True])
def test_event_for_a_cancelled_receive_is_the_first_record_of_its_run(
    make_rig: Any, is_second_run: bool
) -> None:
    """The event comes while the code waits for something that is not recorded, and then cancels the receive."""
    sent: list[int] = []

    def outside() -> None:
        if not sent:
            # The commit of the receive comes first.
            while not any(step.state == "open" for step in handle.steps()):
                time.sleep(0.001)
            sent.append(handle.send(Payment(3)))

    @hf.flow
    async def order(again: bool) -> int:
        if again:
            hf.again(False)
        one = asyncio.ensure_future(hf.receive(Payment))
        await asyncio.sleep(0)
        await asyncio.to_thread(outside)
        one.cancel()
        return (await hf.receive(Payment)).cents

    rig = make_rig(app_with_events(order))
    handle = rig.start(order, is_second_run)
    rig.run(lambda: bool(sent))
    assert rig.result(handle) == 3

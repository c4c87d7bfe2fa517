"""Forks: they take over recorded steps and leave out recorded compensations, also if other code runs the fork."""

import asyncio
from typing import Any

import msgspec
import pytest

import holdfast as hf
from holdfast.errors import NotFound
from holdfast.flows import records
from holdfast.flows.model import keys_of, pack_int
from holdfast.flows.records import Forked, ParentUndo
from tests.flows.test_events import Payment
from tests.flows.test_steps import app_of, double, failure, labels


class ForkedOrder:
    """A flow whose code is another one for its fork: with other steps in front."""

    def __init__(self, make_rig: Any) -> None:
        self.undone: list[str] = []
        self.calls: list[str] = []
        self.in_front = 2
        self.fails = True

        def take_back(name: str) -> None:
            self.undone.append(name)

        def call(name: str) -> str:
            self.calls.append(name)
            return name

        def refuse() -> None:
            raise ValueError("full")

        @hf.flow
        async def order() -> str:
            for n in range(self.in_front):
                await hf.step(hf.options(double, name=f"front{n}"), n)
            await hf.step(hf.options(call, name="reserve"), "reserve")
            hf.undo(hf.options(take_back, name="release"), "reserve")
            hf.undo(hf.options(take_back, name="refund"), "charge")
            await hf.step(hf.options(call, name="charge"), "charge")
            hf.undo(hf.options(take_back, name="unpack"), "pack")
            await hf.step(hf.options(call, name="pack"), "pack")
            if self.fails:
                await hf.step(hf.options(refuse, name="refuse"))
            return "done"

        self.rig = make_rig(app_of(order))
        self.handle = self.rig.start(order)
        failure(self.rig, self.handle)
        assert self.undone == ["pack", "charge", "reserve"]
        self.undone.clear()
        self.calls.clear()

    def fork(self, at: str | None, key: str = "f-1") -> Any:
        fork = self.handle.fork(key, at=at)
        failure(self.rig, fork)
        return fork


@pytest.mark.parametrize("in_front", [0, 2, 5])
@pytest.mark.parametrize(
    ("at", "called", "undone"),
    [
        ("reserve", ["reserve", "charge", "pack"], ["pack", "charge", "reserve"]),
        ("undo:release", ["charge", "pack"], ["pack", "charge", "reserve"]),
        ("undo:refund", ["charge", "pack"], ["pack", "charge"]),
        ("charge", ["charge", "pack"], ["pack"]),
        ("pack", ["pack"], []),
    ],
)
def test_fork_with_other_code_takes_over_the_recorded_steps_and_compensations(
    make_rig: Any, in_front: int, at: str, called: list[str], undone: list[str]
) -> None:
    order = ForkedOrder(make_rig)
    order.in_front = in_front
    order.fork(at)
    assert order.calls == called
    assert order.undone == undone


def test_compensation_before_the_first_step_belongs_to_a_fork_without_steps(make_rig: Any) -> None:
    undone: list[int] = []

    async def refund(n: int) -> None:
        undone.append(n)

    async def charge(n: int) -> None:
        raise ValueError("no money")

    @hf.flow
    async def order() -> None:
        await hf.receive(Payment)
        hf.undo(refund, 7)
        await hf.step(hf.options(charge, name="charge"), 7)

    rig = make_rig(app_of(order, events=[Payment]))
    handle = rig.start(order)
    handle.send(Payment(1))
    failure(rig, handle)
    undone.clear()
    failure(rig, handle.fork("f-1", at="charge"))
    assert undone == [7]


@pytest.mark.parametrize("in_front", [0, 5])
def test_fork_of_a_fork_knows_the_compensations_of_both(make_rig: Any, in_front: int) -> None:
    order = ForkedOrder(make_rig)
    order.in_front = in_front
    fork = order.fork("pack")
    order.undone.clear()
    failure(order.rig, fork.fork("f-2", at="refuse"))
    assert order.undone == []
    failure(order.rig, fork.fork("f-3", at="undo:refund"))
    assert order.undone == ["pack", "charge"]


def test_fork_at_an_unknown_compensation_is_refused(make_rig: Any) -> None:
    order = ForkedOrder(make_rig)
    with pytest.raises(NotFound):
        order.handle.fork("f-1", at="undo:absent")
    with pytest.raises(NotFound):
        order.handle.fork("f-1", at="undo:refund#2")


def test_steps_after_a_deploy_that_removes_steps_have_higher_positions(make_rig: Any) -> None:
    in_front = [3]

    @hf.flow
    async def order() -> list[int]:
        for n in range(in_front[0]):
            await hf.step(hf.options(double, name=f"front{n}"), n)
        cents = (await hf.receive(Payment)).cents
        first = await hf.step(hf.options(double, name="first"), cents)
        return [cents, await hf.step(hf.options(double, name="last"), first)]

    rig = make_rig(app_of(order, events=[Payment]))
    handle = rig.start(order)
    rig.run(lambda: handle.status().state == "WAITING")
    in_front[0] = 0
    handle.send(Payment(5))
    assert rig.result(handle) == [5, 20]
    assert labels(handle)[-3:] == ["hf.receive#1", "first#1", "last#1"]
    # The fork has the event.
    assert rig.result(handle.fork("f-1", at="first")) == [5, 20]


@pytest.mark.parametrize("in_front", [3, 0])
def test_fork_with_other_code_returns_the_event_of_a_receive_that_it_cancelled(
    make_rig: Any, in_front: int
) -> None:
    front = [3]
    sent: list[int] = []

    @hf.flow
    async def order(waits: bool) -> list[int]:
        for n in range(front[0]):
            await hf.step(hf.options(double, name=f"front{n}"), n)
        found = [(await hf.receive(Payment)).cents]
        await hf.step(hf.options(double, name="middle"), 1)
        waiting = {hf.receive(Payment), hf.sleep(60)}
        _done, left = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not sent:
            sent.append(forks[0].send(Payment(3)))
        for step in left:
            step.cancel()
        return [*found, (await hf.receive(Payment)).cents]

    rig = make_rig(app_of(order, events=[Payment]))
    handle = rig.start(order, True)
    handle.send(Payment(1))
    rig.run(lambda: handle.status().state == "WAITING" and "middle#1" in labels(handle))
    handle.cancel()
    failure(rig, handle)
    front[0] = in_front
    forks = [handle.fork("f-1", at="middle")]
    rig.run(lambda: forks[0].status().state == "WAITING")
    rig.pass_time()
    assert rig.result(forks[0]) == [1, 3]


def test_event_that_the_code_of_the_parent_had_cancelled_stays_with_the_parent(
    make_rig: Any,
) -> None:
    sent: list[int] = []

    @hf.flow
    async def order() -> int:
        waiting = {hf.receive(Payment), hf.sleep(60)}
        _done, left = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not sent:
            sent.append(handle.send(Payment(3)))
        for step in left:
            step.cancel()
        return (await hf.receive(Payment)).cents

    rig = make_rig(app_of(order, events=[Payment]))
    handle = rig.start(order)
    rig.run_one()
    rig.pass_time()
    assert rig.result(handle) == 3
    fork = handle.fork("f-1", at="hf.receive#2")
    rig.run(lambda: fork.status().state == "WAITING")
    assert fork.events() == []
    fork.send(Payment(4))
    assert rig.result(fork) == 4


def test_record_of_a_fork_of_a_former_release_is_read() -> None:
    stored = msgspec.msgpack.encode([13, 4])
    forked = msgspec.msgpack.decode(stored, type=records.AnyRecord)
    assert forked == Forked(4)
    taken = records.StepCompleted("a", 1, 3, b"")
    assert forked.took(9, taken)
    assert not forked.took(1, msgspec.structs.replace(taken, position=4))
    new = Forked(4, 2, (ParentUndo("refund", 1, 3),))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(new), type=records.AnyRecord) == new
    assert new.took(2, taken)
    assert not new.took(3, taken)


def as_former_release(rig: Any, fork: Any) -> None:
    """Replace the first record of a fork by the one that a former release would have written."""
    seq = int(fork.id.partition("-")[2])
    key = keys_of(rig.universe).records_of(seq, 1) + pack_int(1)

    def rewrite(txn: Any) -> None:
        row = records.decode_record(txn.get(key))
        former = [row.decided_ns, [13, row.record.position]]
        txn.put(key, msgspec.msgpack.encode(former))

    rig.store.transact(rewrite)


def test_fork_of_a_former_release_counts_positions(make_rig: Any) -> None:
    order = ForkedOrder(make_rig)
    fork = order.handle.fork("f-1", at="charge")
    as_former_release(order.rig, fork)
    failure(order.rig, fork)
    assert order.undone == ["pack"]
    order.undone.clear()
    failure(order.rig, fork.fork("f-2", at="pack"))
    assert order.undone == []

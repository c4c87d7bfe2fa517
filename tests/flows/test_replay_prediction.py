"""The prediction of `holdfast verify --app`: a flow is parked by new code exactly if the replay predicts it (DESIGN 12)."""

import asyncio
from typing import Any

import pytest

import holdfast as hf
from holdfast.flows.model import parse_flow_id
from holdfast.ops.flow_replay import (
    DIVERGED,
    FLOW_UNKNOWN,
    RAISED,
    RESULT_CHANGED,
    TIME_LIMIT,
    FlowFinding,
    FlowTarget,
    replay_flow,
)
from tests.flows.test_steps import double


class Review(hf.Event):
    stars: int


class Complaint(hf.Event):
    text: str


async def notify(text: str) -> None:
    return None


async def price(id: str) -> int:
    return 5


async def release(shelf: str) -> None:
    return None


@hf.task
def invoice(id: str) -> str:
    return f"invoice of {id}"


@hf.flow
async def ship(id: str) -> str:
    await hf.sleep(30)
    return f"{id} is shipped"


def app_of(*flows: Any) -> hf.App:
    return hf.App("flows", flows=[*flows, ship], tasks=[invoice], events=[Review, Complaint])


def old_code() -> Any:
    """Steps of all kinds, then a wait for three open steps."""

    @hf.flow(attempts=2)
    async def order(id: str, cents: int = 10) -> str:
        first = await hf.step(double, cents)
        hf.undo(release, id)
        hf.publish("status", "priced")
        await hf.sleep(1)
        bill = await hf.step(invoice, id)
        review = hf.receive(Review)
        shipped = hf.step(ship, id)
        await hf.sleep(60)
        return f"{first} {bill} {await shipped} {(await review).stars}"

    return order


def unchanged() -> Any:
    return old_code()


def inserted_step() -> Any:
    @hf.flow(attempts=2)
    async def order(id: str, cents: int = 10) -> str:
        await hf.step(notify, "new")
        await hf.step(double, cents)
        hf.undo(release, id)
        await hf.sleep(1)
        await hf.step(invoice, id)
        return str((await hf.receive(Review)).stars)

    return order


def inserted_step_before_a_change() -> Any:
    @hf.flow(attempts=2)
    async def order(id: str, cents: int = 10) -> str:
        await hf.step(notify, "new")
        await hf.sleep(1)
        await hf.step(double, cents + 1)
        return str((await hf.receive(Review)).stars)

    return order


def removed_and_renamed_steps() -> Any:
    @hf.flow(attempts=2)
    async def order(id: str, cents: int = 10) -> str:
        await hf.step(hf.options(notify, name="tell"), "renamed")
        await hf.sleep(1)
        return str((await hf.receive(Review)).stars)

    return order


def changed_arguments() -> Any:
    @hf.flow(attempts=2)
    async def order(id: str, cents: int = 10) -> str:
        return str(await hf.step(double, cents + 1))

    return order


def changed_sleep() -> Any:
    @hf.flow(attempts=2)
    async def order(id: str, cents: int = 10) -> str:
        await hf.step(double, cents)
        await hf.sleep(2)
        return ""

    return order


def changed_task_arguments() -> Any:
    @hf.flow(attempts=2)
    async def order(id: str, cents: int = 10) -> str:
        await hf.step(double, cents)
        await hf.sleep(1)
        return await hf.step(invoice, id + "!")

    return order


def changed_open_sleep() -> Any:
    @hf.flow(attempts=2)
    async def order(id: str, cents: int = 10) -> str:
        await hf.step(double, cents)
        await hf.sleep(1)
        await hf.step(invoice, id)
        review = hf.receive(Review)
        shipped = hf.step(ship, id)
        await hf.sleep(61)
        return f"{await shipped} {(await review).stars}"

    return order


def changed_open_receive() -> Any:
    @hf.flow(attempts=2)
    async def order(id: str, cents: int = 10) -> str:
        await hf.step(double, cents)
        await hf.sleep(1)
        await hf.step(invoice, id)
        await hf.receive(Review, Complaint)
        return ""

    return order


def changed_open_child() -> Any:
    @hf.flow(attempts=2)
    async def order(id: str, cents: int = 10) -> str:
        await hf.step(double, cents)
        await hf.sleep(1)
        await hf.step(invoice, id)
        return await hf.step(ship, id + "!")

    return order


def changed_flow_arguments() -> Any:
    @hf.flow(attempts=2)
    async def order(id: int) -> str:
        return ""

    return order


def changed_result_type() -> Any:
    async def double(n: int) -> str:
        return ""

    @hf.flow(attempts=2)
    async def order(id: str, cents: int = 10) -> str:
        return await hf.step(hf.options(double, name="double"), cents)

    return order


def inserted_undo_and_published_value() -> Any:
    @hf.flow(attempts=2)
    async def order(id: str, cents: int = 10) -> str:
        hf.publish("more", 1)
        hf.undo(notify, "first")
        await hf.step(double, cents)
        hf.undo(release, id)
        hf.publish("status", "priced")
        await hf.sleep(1)
        await hf.step(invoice, id)
        return str((await hf.receive(Review)).stars)

    return order


def raises() -> Any:
    @hf.flow(attempts=2)
    async def order(id: str, cents: int = 10) -> str:
        await hf.step(double, cents)
        raise ValueError("a bug")

    return order


VARIANTS = [
    (unchanged, False, ""),
    (inserted_step, False, ""),
    (inserted_step_before_a_change, True, "double#1"),
    (removed_and_renamed_steps, False, ""),
    (changed_arguments, True, "double#1"),
    (changed_sleep, True, "hf.sleep#1"),
    (changed_task_arguments, True, "invoice#1"),
    (changed_open_sleep, True, "hf.sleep#2"),
    (changed_open_receive, True, "hf.receive#1"),
    (changed_open_child, True, "ship#1"),
    (changed_flow_arguments, True, "order"),
    (changed_result_type, True, "double#1"),
    (inserted_undo_and_published_value, False, ""),
    (raises, False, ""),
]


def start_old(make_rig: Any) -> Any:
    """A flow of the old code that waits for a sleep, an event and a child."""
    order = old_code()
    rig = make_rig(app_of(order))
    handle = rig.start(order.options(key="o-1"), "o-1")
    rig.run(lambda: len([step for step in handle.steps() if step.state == "open"]) == 3)
    assert handle.status().state == "WAITING"
    return handle


def predict(rig: Any, handle: Any, limit_s: float = 30.0) -> FlowFinding:
    seq = parse_flow_id(handle.id).seq
    found = replay_flow(rig.store, rig.app, FlowTarget(rig.universe, seq), limit_s)
    assert found is not None
    return found


@pytest.mark.parametrize(("new_code", "parks", "step"), VARIANTS)
def test_flow_is_parked_exactly_if_the_replay_predicts_it(
    make_rig: Any, new_code: Any, parks: bool, step: str
) -> None:
    handle = start_old(make_rig)
    rig = make_rig(app_of(new_code()))
    before = handle.status()
    found = predict(rig, handle)
    assert (found.parks, found.step) == (parks, step)
    assert handle.status() == before
    handle.send(Review(5))
    rig.run(lambda: handle.done() or handle.status().state == "PARKED")
    assert (handle.status().state == "PARKED") is parks
    if parks:
        assert handle.status().step == step
        assert handle.status().error == found.text
        # The old code comes back: the flow ends as if nothing had happened.
        handle.resume()
        assert "invoice of o-1" in make_rig(app_of(old_code())).result(handle)


def test_replay_names_removed_and_inserted_steps(make_rig: Any) -> None:
    handle = start_old(make_rig)
    found = predict(make_rig(app_of(removed_and_renamed_steps())), handle)
    assert found.code == ""
    assert found.removed == ("double#1", "invoice#1", "hf.sleep#2", "ship#1")
    assert found.inserted == ("tell#1",)


def test_replay_stops_at_a_new_step_with_a_value(make_rig: Any) -> None:
    """The value is not known, so the steps behind it cannot be checked."""
    handle = start_old(make_rig)

    @hf.flow
    async def order(id: str, cents: int = 10) -> str:
        cost = await hf.step(price, id)
        await hf.step(double, cost)
        return ""

    rig = make_rig(app_of(order))
    found = predict(rig, handle)
    assert (found.code, found.parks) == ("", None)
    assert "price#1" in found.text
    assert "double#1" in found.removed


def test_replay_reports_an_error_of_the_flow(make_rig: Any) -> None:
    found = predict(make_rig(app_of(raises())), start_old(make_rig))
    assert (found.code, found.parks) == (RAISED, False)
    assert "a bug" in found.text
    assert found.needs_attention


def test_replay_reports_a_flow_that_the_app_does_not_declare(make_rig: Any) -> None:
    """The flow was renamed by the deploy: it waits, it is neither parked nor failed."""
    handle = start_old(make_rig)
    renamed = hf.flow(name="order_v2")(old_code().fn)
    rig = make_rig(app_of(renamed))
    found = predict(rig, handle)
    assert (found.code, found.parks) == (FLOW_UNKNOWN, False)
    assert "order" in found.name


def test_replay_reports_code_that_waits_too_long(make_rig: Any) -> None:
    handle = start_old(make_rig)

    @hf.flow
    async def order(id: str, cents: int = 10) -> str:
        await asyncio.sleep(3_600)
        return ""

    found = predict(make_rig(app_of(order)), handle, limit_s=0.05)
    assert (found.code, found.parks) == (TIME_LIMIT, False)


def test_replay_of_an_ended_flow_reports_and_never_parks(make_rig: Any) -> None:
    order = old_code()
    rig = make_rig(app_of(order))
    handle = rig.start(order, "o-1")
    handle.send(Review(5))
    rig.result(handle)
    assert predict(rig, handle).code == ""
    changed = predict(make_rig(app_of(changed_arguments())), handle)
    assert (changed.code, changed.parks, changed.step) == (DIVERGED, False, "double#1")
    assert not changed.needs_attention

    @hf.flow
    async def order(id: str, cents: int = 10) -> str:
        return "other"

    other = predict(make_rig(app_of(order)), handle)
    assert other.code == RESULT_CHANGED
    assert "invoice#1" in other.removed


def test_value_published_by_new_code_does_not_hide_a_recorded_one(make_rig: Any) -> None:
    handle = start_old(make_rig)
    handle.send(Review(5))
    make_rig(app_of(inserted_undo_and_published_value())).result(handle)
    assert handle.published() == {"status": "priced", "more": 1}

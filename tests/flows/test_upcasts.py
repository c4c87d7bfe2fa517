"""Recorded values of flows whose classes changed: `hf.upcast` reads them, and without it the flow is parked."""

from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any

import msgspec
import pydantic
import pytest

import holdfast as hf
from holdfast.errors import Invalid, KeyConflict
from holdfast.flows.model import parse_flow_id
from holdfast.ops.flow_replay import VALUE_UNREADABLE, FlowFinding, FlowTarget, replay_flow
from tests.flows.test_deploys import is_parked

KINDS = ("dataclass", "struct", "pydantic")


def make_class(kind: str, name: str, **fields: type) -> Any:
    if kind == "struct":
        return msgspec.defstruct(name, list(fields.items()))
    if kind == "pydantic":
        return pydantic.create_model(name, **{key: (type, ...) for key, type in fields.items()})
    return make_dataclass(name, list(fields.items()))


def to_cents(fields: dict[str, Any]) -> dict[str, Any]:
    return {"cents": round(fields["euros"] * 100)}


def old_app(kind: str) -> hf.App:
    """The first release. Each value of the flow has euros, and each goes into another recorded step."""
    paid_type = make_class(kind, "Paid", euros=float)

    class Tip(hf.Event):
        euros: float

    async def charge(cart: paid_type) -> list[paid_type]:
        return [paid_type(euros=cart.euros + 1)]

    async def book(text: str, paid: list[paid_type], cart: paid_type, tip: Tip) -> None: ...

    @hf.task
    def refund(paid: paid_type) -> paid_type:
        return paid_type(euros=-paid.euros)

    @hf.flow
    async def child(paid: paid_type) -> dict[str, paid_type]:
        return {"child": paid}

    @hf.flow
    async def order(cart: paid_type) -> list[float]:
        paid = await hf.step(hf.options(charge, name="charge"), cart)
        given = await hf.step(refund, paid[0])
        nested = await hf.step(child, paid[0])
        tip = await hf.receive(Tip)
        await hf.step(hf.options(book, name="book"), "all", paid, cart, tip)
        await hf.sleep(60)
        await hf.receive(Tip)
        return [given.euros, nested["child"].euros]

    app = hf.App("flows", flows=[order, child], tasks=[refund], events=[Tip])
    app.paid_type, app.tip_type = paid_type, Tip  # type: ignore[attr-defined]
    return app


def new_app(kind: str, *, upcasts: bool = True) -> hf.App:
    """The next release: the classes have cents instead of euros."""
    paid_type = make_class(kind, "Paid", cents=int)

    class Tip(hf.Event):
        cents: int

    async def charge(cart: paid_type) -> list[paid_type]:
        return [paid_type(cents=cart.cents + 100)]

    async def book(text: str, paid: list[paid_type], cart: paid_type, tip: Tip) -> None: ...

    @hf.task
    def refund(paid: paid_type) -> paid_type:
        return paid_type(cents=-paid.cents)

    @hf.flow
    async def child(paid: paid_type) -> dict[str, paid_type]:
        return {"child": paid}

    @hf.flow
    async def order(cart: paid_type) -> list[float]:
        paid = await hf.step(hf.options(charge, name="charge"), cart)
        given = await hf.step(refund, paid[0])
        nested = await hf.step(child, paid[0])
        tip = await hf.receive(Tip)
        await hf.step(hf.options(book, name="book"), "all", paid, cart, tip)
        await hf.sleep(60)
        last = await hf.receive(Tip)
        again = await hf.step(hf.options(charge, name="charge"), nested["child"])
        return [given.cents, nested["child"].cents, tip.cents, last.cents, again[0].cents]

    declared = [(paid_type, 1, to_cents), (Tip, 1, to_cents)] if upcasts else []
    app = hf.App("flows", flows=[order, child], tasks=[refund], events=[Tip], upcasts=declared)
    app.paid_type = paid_type  # type: ignore[attr-defined]
    return app


def start_old(make_rig: Any, kind: str) -> Any:
    """A flow of the first release that sleeps, with an event in its inbox."""
    app: Any = old_app(kind)
    rig = make_rig(app)
    handle = rig.start(app.flows["order"], app.paid_type(euros=2.5))
    handle.send(app.tip_type(0.5))
    rig.run(lambda: any(step.name == "hf.sleep" for step in handle.steps()))
    handle.send(app.tip_type(0.75))
    return handle


def predict(rig: Any, handle: Any) -> FlowFinding:
    target = FlowTarget(rig.universe, parse_flow_id(handle.id).seq)
    found = replay_flow(rig.store, rig.app, target)
    assert found is not None
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_upcasts_read_every_recorded_value_of_a_flow(make_rig: Any, kind: str) -> None:
    handle = start_old(make_rig, kind)
    rig = make_rig(new_app(kind))
    assert predict(rig, handle).code == ""
    handle = rig.handle(parse_flow_id(handle.id))
    assert rig.result(handle) == [-350, 350, 50, 75, 450]


@pytest.mark.parametrize("kind", KINDS)
def test_values_recorded_after_the_deploy_are_not_upcast_again(make_rig: Any, kind: str) -> None:
    app: Any = new_app(kind)
    rig = make_rig(app)
    handle = rig.start(app.flows["order"], app.paid_type(cents=250))
    tip = next(event for event in app.event_types if event.__name__ == "Tip")
    handle.send(tip(50))
    handle.send(tip(75))
    assert rig.result(handle) == [-350, 350, 50, 75, 450]


@pytest.mark.parametrize("kind", KINDS)
def test_flow_is_parked_without_an_upcast_and_continues_with_it(make_rig: Any, kind: str) -> None:
    handle = start_old(make_rig, kind)
    rig = make_rig(new_app(kind, upcasts=False))
    found = predict(rig, handle)
    assert (found.code, found.parks, found.step) == (VALUE_UNREADABLE, True, "order")
    rig.run(lambda: is_parked(handle))
    assert handle.status().code == "value_unreadable"
    [blocker] = handle.why()
    assert blocker["code"] == "value_unreadable"
    assert "argument cart" in blocker["text"]
    assert "Paid" in blocker["text"]
    assert "hf.upcast" in blocker["action"]
    rig = make_rig(new_app(kind))
    rig.resume_parked({"order": rig.codes["flow:order"].code_version})
    assert rig.result(rig.handle(parse_flow_id(handle.id))) == [-350, 350, 50, 75, 450]


@dataclass
class Price:
    euros: float


def step_app(returns: Any, make: Any, *upcasts: Any) -> hf.App:
    # In a list, which counts by its type: another function in the closure would be another step.
    makers = [make]

    async def price() -> returns:
        return makers[0]()

    @hf.flow
    async def order() -> Any:
        found = await hf.step(price)
        await hf.sleep(60)
        return str(found)

    return hf.App("flows", flows=[order], upcasts=upcasts)


def start_step(make_rig: Any, app: hf.App) -> Any:
    rig = make_rig(app)
    handle = rig.start(app.flows["order"])
    rig.run(lambda: bool(handle.steps()) and handle.status().state == "WAITING")
    return handle


def test_step_whose_recorded_value_cannot_be_read_is_named(make_rig: Any) -> None:
    handle = start_step(make_rig, step_app(Price, lambda: Price(1.5)))
    changed = make_class("dataclass", "Price", cents=int)
    rig = make_rig(step_app(changed, None))
    assert (predict(rig, handle).code, predict(rig, handle).step) == (
        VALUE_UNREADABLE,
        "step_app.price#1",
    )
    rig.run(lambda: is_parked(handle))
    [blocker] = handle.why()
    assert "step_app.price#1" in blocker["text"]
    assert "cents" in blocker["text"]


def test_upcast_that_raises_parks_the_flow(make_rig: Any) -> None:
    handle = start_step(make_rig, step_app(Price, lambda: Price(1.5)))
    changed = make_class("dataclass", "Price", cents=int)
    rig = make_rig(step_app(changed, None, (changed, 1, lambda fields: {"cents": fields["yen"]})))
    rig.run(lambda: is_parked(handle))
    assert "its upcast raised KeyError: 'yen'" in handle.why()[0]["text"]


def test_value_of_a_newer_version_parks_the_flow_on_older_code(make_rig: Any) -> None:
    """The meaning of the field changed, not its type: older code must not read the value."""
    newer = make_class("dataclass", "Price", euros=float)
    app = step_app(newer, lambda: newer(150.0), (newer, 1, lambda fields: {"euros": 1.0}))
    handle = start_step(make_rig, app)
    assert handle.steps()[0].value == {"euros": 150.0}
    rig = make_rig(step_app(Price, None))
    rig.run(lambda: is_parked(handle))
    assert "version 2, newer than this code" in handle.why()[0]["text"]
    assert handle.resume()
    assert make_rig(app).result(handle) == f"{newer(150.0)}"


def test_unreadable_event_in_the_inbox_is_reported_before_the_deploy(make_rig: Any) -> None:
    def app_with(**fields: type) -> Any:
        tip = msgspec.defstruct("Tip", list(fields.items()), bases=(hf.Event,))

        @hf.flow
        async def order() -> str:
            await hf.sleep(60)
            return str(await hf.receive(tip))

        app: Any = hf.App("flows", flows=[order], events=[tip])
        app.tip = tip
        return app

    old = app_with(euros=float)
    rig = make_rig(old)
    handle = rig.start(old.flows["order"])
    handle.send(old.tip(0.5))
    rig.run_one()
    rig = make_rig(app_with(cents=int))
    found = predict(rig, handle)
    assert (found.code, found.parks, found.needs_attention) == (VALUE_UNREADABLE, None, True)
    assert "event 1 of its inbox" in found.text
    rig.run(lambda: is_parked(handle))
    assert "hf.receive#1" in handle.why()[0]["text"]
    assert handle.resume()
    assert "0.5" in make_rig(old).result(handle)


def test_result_of_an_ended_flow_is_upcast(make_rig: Any) -> None:
    def app_with(kind: Any, make: Any, *upcasts: Any) -> hf.App:
        @hf.flow
        async def order() -> kind:
            return make()

        return hf.App("flows", flows=[order], upcasts=upcasts)

    app = app_with(Price, lambda: Price(1.5))
    rig = make_rig(app)
    handle = rig.start(app.flows["order"])
    rig.result(handle)
    changed = make_class("dataclass", "Price", cents=int)
    rig = make_rig(app_with(changed, None, (changed, 1, to_cents)))
    assert rig.handle(parse_flow_id(handle.id)).result(timeout=0) == changed(cents=150)


def test_upcasts_of_two_classes_with_one_name_are_refused() -> None:
    @hf.flow
    async def order() -> None: ...

    other = make_class("dataclass", "Price", cents=int)
    with pytest.raises(Invalid, match="two classes have this name"):
        hf.App("flows", flows=[order], upcasts=[(Price, 1, dict), (other, 1, dict)])


@pytest.mark.parametrize("kind", KINDS)
def test_start_with_a_key_in_use_finds_the_flow_of_a_former_version(
    tmp_path: Path, kind: str
) -> None:
    old: Any = old_app(kind)
    with old.open(tmp_path / "data", roles=()) as rt:
        first = rt.start(old.flows["order"].options(key="k"), old.paid_type(euros=2.5))
    app: Any = new_app(kind)
    with app.open(tmp_path / "data", roles=()) as rt:
        keyed = app.flows["order"].options(key="k")
        assert rt.start(keyed, app.paid_type(cents=250)).id == first.id
        with pytest.raises(KeyConflict):
            rt.start(keyed, app.paid_type(cents=251))

"""Steps whose functions or arguments carry values: a swapped call parks, an equal call gets the recorded outcome."""

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast import codec
from holdfast.app.argument_digest import digest_of
from tests.flows.test_deploys import is_parked
from tests.flows.test_steps import Till, app_of


class Desk:
    def __init__(self, user: str) -> None:
        self.user = user
        self.calls = 0
        self.seen: list[str] = []

    def call(self, n: int) -> str:
        self.calls += 1
        self.seen.append(self.user)
        return f"{self.user}{n}"


def greeting(name: str) -> Callable[[], str]:
    def greet() -> str:
        return name

    return greet


def recording(calls: list[int]) -> Callable[[int], int]:
    def record(n: int) -> int:
        calls.append(n)
        return n

    return record


def charge(id: str, cents: int = 5, *, note: str = "") -> str:
    return f"{id} {cents} {note}"


def named_lambda(value: str) -> Any:
    return hf.options(lambda value=value: value, name="ask")


def flow_of(first: Callable[[], Any]) -> Any:
    @hf.flow
    async def order() -> Any:
        found = await first()
        await hf.sleep(60)
        return found

    return order


def deploy(make_rig: Any, old: Callable[[], Any], new: Callable[[], Any]) -> Any:
    """Run a flow of the old code to its sleep, and the new code to its end or until it is parked."""
    order = flow_of(old)
    rig = make_rig(app_of(order))
    handle = rig.start(order)
    rig.run_one()
    assert handle.status().state == "WAITING"
    rig = make_rig(app_of(flow_of(new)))
    rig.run(lambda: handle.done() or is_parked(handle))
    return handle


CARRIERS: dict[str, Callable[[str], Any]] = {
    "closure": lambda user: hf.step(greeting(user)),
    "method": lambda user: hf.step(Desk(user).call, 1),
    "lambda": lambda user: hf.step(named_lambda(user)),
    "callable": lambda user: hf.step(hf.options(Till(len(user)), name="till")),
}


@pytest.mark.parametrize("call", CARRIERS.values(), ids=CARRIERS)
def test_function_that_carries_another_value_parks_the_flow(
    make_rig: Any, call: Callable[[str], Any]
) -> None:
    handle = deploy(make_rig, lambda: call("ada"), lambda: call("grace"))
    assert handle.status().state == "PARKED"
    assert handle.why()[0]["code"] == "replay_diverged"


@pytest.mark.parametrize("call", CARRIERS.values(), ids=CARRIERS)
def test_function_that_carries_an_equal_value_gets_the_recorded_outcome(
    make_rig: Any, call: Callable[[str], Any]
) -> None:
    handle = deploy(make_rig, lambda: call("ada"), lambda: call("ada"))
    assert handle.status().state == "COMPLETED"


def test_values_that_change_while_flows_run_do_not_count(make_rig: Any) -> None:
    desk, calls = Desk("ada"), [7]

    async def both(calls: list[int]) -> list[Any]:
        return [await hf.step(desk.call, 1), await hf.step(recording(calls), 2)]

    handle = deploy(make_rig, lambda: both(calls), lambda: both([1, 2, 3]))
    assert handle.result(timeout=0) == ["ada1", 2]
    assert desk.calls == 1


class LiveThing:
    pass


def digest(*args: Any, **kwargs: Any) -> bytes:
    return digest_of(args, kwargs, {}).stored


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Path("/a"), Path("/b")),
        (2**70, 2**71),
        (Fraction(1, 2), Fraction(1, 3)),
        ([LiveThing(), Decimal("1")], [LiveThing(), Decimal("2")]),
        (greeting("a"), greeting("b")),
        (greeting, recording),
        ({1: "a", "b": 2}, {1: "a", "b": 3}),
        ([LiveThing(), 1], [LiveThing(), 2]),
        ({"deep": [{"path": Path("/a")}]}, {"deep": [{"path": Path("/b")}]}),
        (Desk("a").call, Desk("b").call),
    ],
)
def test_arguments_that_msgpack_cannot_hold_count_by_their_value(one: Any, other: Any) -> None:
    assert digest(one) == digest(one)
    assert digest(one) != digest(other)


def test_order_of_a_dict_with_mixed_keys_does_not_count() -> None:
    assert digest({1: "a", "b": Path("/x")}) == digest({"b": Path("/x"), 1: "a"})


def test_list_that_contains_itself_has_a_digest() -> None:
    items: list[Any] = [LiveThing()]
    items.append(items)
    assert digest(items) == digest(items)


@pytest.mark.parametrize("args", [(), (1, "a", b"b", None), ([1, {"a": 2.5}],), (Decimal("1.0"),)])
def test_digests_of_plain_arguments_are_those_of_former_releases(args: tuple[Any, ...]) -> None:
    found = digest_of(args, {"k": 1}, {})
    assert found.stored == codec.digest(codec.pack_value([list(args), {"k": 1}]))[:16]
    assert found.former == found.stored


def test_digest_of_a_live_object_is_that_of_former_releases() -> None:
    name = f"{LiveThing.__module__}.{LiveThing.__qualname__}".encode()
    expected = codec.digest(codec.pack(3), name)[:16]
    assert digest(3, LiveThing()) == expected
    assert (
        digest_of((3, Path("/a")), {}, {}).former
        == codec.digest(
            codec.pack(3), f"{type(Path()).__module__}.{type(Path()).__qualname__}".encode()
        )[:16]
    )


EQUAL: list[Callable[[], Any]] = [
    lambda: hf.step(charge, "x", 5),
    lambda: hf.step(charge, "x", cents=5),
    lambda: hf.step(charge, cents=5, id="x"),
    lambda: hf.step(charge, "x"),
    lambda: hf.step(charge, id="x", note=""),
]


@pytest.mark.parametrize("old", range(len(EQUAL)))
@pytest.mark.parametrize("new", range(len(EQUAL)))
def test_equal_call_written_in_another_way_gets_the_recorded_outcome(
    make_rig: Any, old: int, new: int
) -> None:
    handle = deploy(make_rig, EQUAL[old], EQUAL[new])
    assert handle.status().state == "COMPLETED"


def test_other_value_of_a_named_argument_parks_the_flow(make_rig: Any) -> None:
    handle = deploy(make_rig, EQUAL[0], lambda: hf.step(charge, "x", cents=6))
    assert handle.status().state == "PARKED"

"""The identity of steps: names, occurrences, argument digests, and values that are recorded once."""

import functools
import uuid
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pytest

import holdfast as hf
from holdfast.errors import Invalid


class Till:
    def __init__(self, cents: int) -> None:
        self.cents = cents

    def pay(self, more: int) -> int:
        return self.cents + more

    def __call__(self) -> int:
        return self.cents


def double(n: int) -> int:
    return 2 * n


def app_of(*flows: Any, **fields: Any) -> hf.App:
    return hf.App("flows", flows=list(flows), **fields)


def labels(handle: Any) -> list[str]:
    return [f"{step.name}#{step.occurrence}" for step in handle.steps()]


def failure(rig: Any, handle: Any) -> hf.FlowFailed:
    with pytest.raises(hf.FlowFailed) as caught:
        rig.result(handle)
    return caught.value


def test_step_is_named_by_qualified_name_method_and_partial(make_rig: Any) -> None:
    def local(n: int) -> int:
        return n

    @hf.flow
    async def order() -> list[int]:
        return [
            await hf.step(double, 1),
            await hf.step(Till(5).pay, 2),
            await hf.step(functools.partial(double, 4)),
            await hf.step(local, 9),
            await hf.step(hf.options(lambda: 3, name="three")),
        ]

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    assert rig.result(handle) == [2, 7, 8, 9, 3]
    outer = "test_step_is_named_by_qualified_name_method_and_partial"
    assert labels(handle) == ["double#1", "Till.pay#1", "double#2", f"{outer}.local#1", "three#1"]


@pytest.mark.parametrize("callable_object", [lambda: 1, Till(5)])
def test_step_refuses_callable_without_a_name(make_rig: Any, callable_object: Any) -> None:
    @hf.flow(attempts=1)
    async def order() -> None:
        await hf.step(callable_object)

    rig = make_rig(app_of(order))
    error = failure(rig, rig.start(order))
    assert (error.code, error.error_type) == ("raised", "Invalid")
    assert "hf.options(fn, name=…)" in error.error


def test_step_refuses_two_functions_with_one_name(make_rig: Any) -> None:
    @hf.flow(attempts=1)
    async def order() -> None:
        await hf.step(hf.options(double, name="same"), 1)
        await hf.step(hf.options(lambda: 1, name="same"))

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    assert "two functions have this name" in failure(rig, handle).error
    assert labels(handle) == ["same#1"]


def test_step_refuses_function_with_the_name_of_a_task(make_rig: Any) -> None:
    @hf.task
    def invoice(n: int) -> int:
        return n

    @hf.flow(attempts=1)
    async def order() -> None:
        await hf.step(invoice, 1)
        await hf.step(hf.options(double, name="invoice"), 1)

    rig = make_rig(app_of(order, tasks=[invoice]))
    assert "two functions have this name" in failure(rig, rig.start(order)).error


def test_step_runs_closures_of_one_function_under_its_name(make_rig: Any) -> None:
    @hf.flow
    async def order() -> list[int]:
        results = []
        for n in range(3):

            def add(m: int, n: int = n) -> int:
                return n + m

            results.append(await hf.step(add, 10))
        return results

    rig = make_rig(app_of(order))
    assert rig.result(rig.start(order)) == [10, 11, 12]


def test_undo_does_not_shift_the_occurrences_of_steps(make_rig: Any) -> None:
    @hf.flow
    async def order() -> int:
        hf.undo(double, 1)
        return await hf.step(double, 2)

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    assert rig.result(handle) == 4
    assert labels(handle) == ["double#1"]


def test_current_step_has_one_idempotency_key_for_all_attempts(make_rig: Any) -> None:
    seen: list[tuple[int, str]] = []

    def flaky() -> str:
        step = hf.current_step()
        seen.append((step.attempt, step.idempotency_key))
        if step.attempt < 3:
            raise OSError("busy")
        return step.name

    @hf.flow
    async def order() -> str:
        return await hf.step(hf.options(flaky, attempts=3, backoff_s=0.001, name="flaky"))

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    assert rig.result(handle) == "flaky"
    assert [attempt for attempt, _ in seen] == [1, 2, 3]
    assert len({key for _, key in seen}) == 1
    assert [step.attempts for step in handle.steps()] == [3]


def test_step_timeout_is_retried_up_to_attempts(make_rig: Any) -> None:
    import asyncio

    seen: list[int] = []

    async def slow() -> str:
        seen.append(hf.current_step().attempt)
        if len(seen) < 3:
            await asyncio.sleep(60)
        return "late"

    @hf.flow
    async def order() -> str:
        return await hf.step(
            hf.options(slow, attempts=3, timeout_s=0.02, backoff_s=0.001, name="slow")
        )

    rig = make_rig(app_of(order))
    assert rig.result(rig.start(order)) == "late"
    assert seen == [1, 2, 3]


def test_step_retries_only_errors_of_retry_on(make_rig: Any) -> None:
    calls: list[int] = []

    def refuse() -> None:
        calls.append(1)
        raise ValueError("no")

    @hf.flow
    async def order() -> None:
        await hf.step(hf.options(refuse, attempts=5, retry_on=OSError, name="refuse"))

    rig = make_rig(app_of(order))
    assert failure(rig, rig.start(order)).code == "step_failed"
    assert calls == [1]


def test_now_uuid_and_random_are_equal_in_a_replay(make_rig: Any) -> None:
    seen: list[tuple[datetime, uuid.UUID, float]] = []

    @hf.flow
    async def order() -> bool:
        seen.append((hf.now(), hf.uuid(), hf.random()))
        await hf.sleep(60)
        return hf.uuid() != seen[0][1]

    rig = make_rig(app_of(order))
    assert rig.result(rig.start(order)) is True
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert seen[0][0].tzinfo is not None
    assert 0 <= seen[0][2] < 1


def test_publish_is_durable_before_a_later_step(make_rig: Any) -> None:
    @hf.flow
    async def order() -> None:
        hf.publish("status", "first")
        hf.publish("status", "second")
        hf.publish("count", 2)
        await hf.sleep(60)
        hf.publish("status", "third")

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    rig.run_one()
    assert handle.published() == {"status": "second", "count": 2}
    assert handle.published("absent", 7) == 7
    rig.result(handle)
    assert handle.published("status") == "third"


def test_plain_calls_are_recorded_before_later_outcomes(make_rig: Any) -> None:
    from holdfast.flows.model import keys_of
    from holdfast.flows.records import decode_record
    from holdfast.store import tuples

    @hf.flow
    async def order() -> None:
        hf.now()
        hf.publish("status", 1)
        hf.undo(double, 1)
        await hf.step(double, 2)

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    rig.result(handle)
    prefix = keys_of(rig.universe).records
    rows = rig.store.read(lambda txn: txn.scan(prefix, tuples.prefix_end(prefix)))
    names = [type(decode_record(row).record).__name__ for _, row in rows]
    assert names == ["StepCompleted", "Published", "UndoRegistered", "StepCompleted", "FlowEnded"]


def test_step_of_a_live_object_runs_on_it(make_rig: Any) -> None:
    till = Till(1)

    def change(target: Till) -> None:
        target.cents += 1

    @hf.flow
    async def order() -> int:
        await hf.step(change, till)
        await hf.sleep(1)
        return await hf.step(till.pay, 0)

    rig = make_rig(app_of(order))
    assert rig.result(rig.start(order)) == 2


@pytest.mark.parametrize("steps", [1, 5, 20])
def test_flow_costs_one_commit_for_each_step_and_one_for_its_end(make_rig: Any, steps: int) -> None:
    """Published values, compensations and recorded values are part of the commit of the next step."""

    @hf.flow
    async def order() -> int:
        total = 0
        for n in range(steps):
            total += await hf.step(double, n) + hf.now().year
            hf.publish("total", total)
            hf.undo(double, n)
        return total

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    rig.run(handle.done)
    assert rig.crashing_store.operations.count("flows.commit") == steps + 1


@dataclass
class WeighedItem:
    grams: int


def test_arguments_in_args_and_kwargs_of_a_flow_have_their_annotated_types(make_rig: Any) -> None:
    @hf.flow
    async def ship(first: str, *parcels: WeighedItem, **named: WeighedItem) -> list[int]:
        return [parcel.grams for parcel in (*parcels, *named.values())]

    rig = make_rig(app_of(ship))
    assert rig.result(
        rig.start(ship, "a", WeighedItem(1), WeighedItem(2), gift=WeighedItem(3))
    ) == [1, 2, 3]
    for args, kwargs, argument in (
        (("a", WeighedItem(1), 5), {}, 3),
        (("a",), {"gift": 5}, "gift"),
    ):
        with pytest.raises(Invalid) as caught:
            rig.start(ship, *args, **kwargs)
        assert (caught.value.what, caught.value.argument) == ("flow arguments", argument)

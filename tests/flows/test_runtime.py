"""Flows in a real runtime: workers, effects, worlds, and a worker with other code."""

import threading
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.errors import Invalid
from tests.flows.test_steps import app_of, double
from tests.process.watch import until


class Deposit(hf.Event):
    cents: int


class Wallet(hf.World):
    cents: int = 0
    deposits: int = 0

    @hf.on(Deposit)
    def deposit(self, event: Deposit, cx: hf.Context) -> None:
        self.cents += event.cents
        self.deposits += 1
        cx.reply(self.cents)


def test_flow_runs_in_a_runtime_with_sleep_and_event() -> None:
    @hf.flow
    async def order(n: int) -> int:
        first = await hf.step(double, n)
        await hf.sleep(0.01)
        return first + (await hf.receive(Deposit)).cents

    with app_of(order, events=[Deposit]).open("memory:") as rt:
        run = rt.start(order, 3)
        run.send(Deposit(10))
        assert run.result(timeout=30) == 16


def test_thread_of_a_timed_out_step_keeps_its_slot_and_is_shown_until_it_ends(
    tmp_path: Path,
) -> None:
    begun, release = threading.Event(), threading.Event()

    def hang() -> str:
        begun.set()
        release.wait(60)
        return "late"

    def quick() -> str:
        return "quick"

    @hf.flow
    async def order() -> str:
        try:
            return await hf.step(hf.options(hang, timeout_s=0.05))
        except hf.StepFailed as error:
            return error.error_type

    @hf.flow
    async def other() -> str:
        return await hf.step(quick)

    def threads_of(handle: Any) -> list[Any]:
        return [one for one in handle.why() if one["code"] == "thread_still_running"]

    app = app_of(order, other)
    with app.open(str(tmp_path), concurrency=1) as rt, app.open(str(tmp_path), roles=()) as client:
        run = rt.start(order)
        assert run.result(timeout=60) == "StepTimeout"
        assert begun.is_set()
        seen = client.flow(run.id)
        until(lambda: threads_of(seen), "the thread is shown")
        [blocker] = threads_of(seen)
        assert "hang#1" in blocker["text"]
        assert rt.worker in blocker["text"]
        waiting = rt.start(other)
        until(lambda: waiting.why()[0]["code"] == "running", "the other flow runs")
        # The only thread of the worker is taken, so the step of the other flow has not started.
        with pytest.raises(hf.Timeout):
            waiting.result(timeout=0.2)
        release.set()
        assert waiting.result(timeout=60) == "quick"
        until(lambda: not threads_of(seen), "the thread is no longer shown")
        assert seen.result() == "StepTimeout"
        assert [step.state for step in seen.steps()] == ["failed"]


def test_effect_as_a_step_runs_in_its_pool() -> None:
    keys: list[str] = []

    @hf.effect("quote")
    def quote(call: hf.Call, currency: str) -> str:
        keys.append(call.idempotency_key)
        return f"1 {currency}"

    @hf.flow
    async def order() -> str:
        return await hf.step(quote, "EUR")

    with app_of(order, effects=[quote]).open("memory:") as rt:
        assert rt.start(order).result(timeout=30) == "1 EUR"
    assert len(keys) == 1


def test_effect_that_fails_is_a_step_failure() -> None:
    @hf.effect("quote", attempts=1)
    def quote(call: hf.Call, currency: str) -> str:
        raise hf.Refused(why="unknown currency")

    @hf.flow
    async def order() -> str:
        try:
            return await hf.step(quote, "XXX")
        except hf.StepFailed as error:
            return error.error

    with app_of(order, effects=[quote]).open("memory:") as rt:
        assert "unknown currency" in rt.start(order).result(timeout=30)


def test_world_ask_as_a_step_delivers_once() -> None:
    @hf.flow
    async def order() -> list[int]:
        first = await hf.step(hf.world(Wallet, "ada").ask, Deposit(5))
        await hf.sleep(0.01)
        await hf.step(hf.world(Wallet, "ada").send, Deposit(7))
        return [first, await hf.step(hf.world(Wallet, "ada").ask, Deposit(1))]

    app = hf.App("flows", worlds=[Wallet], flows=[order])
    with app.open("memory:") as rt:
        run = rt.start(order)
        assert run.result(timeout=30) == [5, 13]
        assert [step.name for step in run.steps() if step.name.startswith("Wallet")] == [
            "Wallet.ask",
            "Wallet.send",
            "Wallet.ask",
        ]
        assert rt.world(Wallet, "ada").state().deposits == 3


def test_world_step_that_is_repeated_uses_one_key() -> None:
    calls: list[str] = []

    def twice(event: Deposit) -> int:
        key = hf.current_step().idempotency_key
        calls.append(key)
        reply: int = hf.world(Wallet, "ada").ask(event, key=key)
        if len(calls) == 1:
            raise OSError("the answer was lost")
        return reply

    @hf.flow
    async def order() -> int:
        return await hf.step(hf.options(twice, attempts=2, backoff_s=0.001), Deposit(5))

    app = hf.App("flows", worlds=[Wallet], flows=[order])
    with app.open("memory:") as rt:
        assert rt.start(order).result(timeout=30) == 5
        assert rt.world(Wallet, "ada").state().deposits == 1


def test_world_in_a_task_delivers_an_event() -> None:
    @hf.task
    def deposit(cents: int) -> int:
        reply: int = hf.world(Wallet, "ada").ask(Deposit(cents))
        return reply

    app = hf.App("flows", worlds=[Wallet], tasks=[deposit])
    with app.open("memory:") as rt:
        assert rt.submit(deposit, 5).result(timeout=30) == 5


def test_world_outside_a_step_and_a_task_is_refused() -> None:
    with pytest.raises(Invalid, match=r"use rt\.world"):
        hf.world(Wallet, "ada").send(Deposit(1))


def test_worker_with_other_code_resumes_a_parked_flow(tmp_path: Path) -> None:
    def app_with(n: int, changed: bool) -> tuple[hf.App, Any]:
        if changed:

            @hf.flow
            async def order() -> int:
                first = await hf.step(double, n)
                await hf.sleep(0.3)
                return first

        else:

            @hf.flow
            async def order() -> int:
                first = await hf.step(double, n)
                await hf.sleep(0.3)
                return first + 0

        return app_of(order), order

    app, order = app_with(1, False)
    with app.open(str(tmp_path)) as rt:
        run = rt.start(order.options(key="o-1"))
        wait_for_state(run, "WAITING")
    app, order = app_with(2, True)
    with app.open(str(tmp_path)) as rt:
        wait_for_state(rt.flow(order, key="o-1"), "PARKED")
    app, order = app_with(1, False)
    with app.open(str(tmp_path)) as rt:
        assert rt.flow(order, key="o-1").result(timeout=30) == 2


def wait_for_state(run: Any, state: str) -> None:
    until(lambda: run.status().state == state, f"the flow is {state}")

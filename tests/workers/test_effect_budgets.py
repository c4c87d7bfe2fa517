"""Budgets of billed effects: reserved with the claim, settled with the receipt, never exceeded.

The effect is the shipped chat effect with a fake body. The test scripts its answers and bills.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast as hf
from holdfast import codec, failpoints
from holdfast import store as stores
from holdfast.adapters import llm
from holdfast.adapters.errors import RejectedByServer, Unavailable
from holdfast.adapters.llm import ChatOptions, Endpoint, Price, Reply, Usage
from holdfast.app.builtin_effects.llm import Chat
from holdfast.clock import MS, S
from holdfast.durable import item as items
from holdfast.durable import queue
from holdfast.durable.item import keys_of
from holdfast.effects import budget
from holdfast.effects.budget import MONEY, TOKENS, UNIVERSE_SCOPE, BudgetAccount, Cost
from holdfast.errors import Timeout
from holdfast.messages import Intent
from holdfast.runner.tick import TickStats
from holdfast.store import tuples
from holdfast.store.api import Store
from holdfast.workers.effects import admission, receipts
from holdfast.workers.effects.handler import EffectHandler
from holdfast.workers.effects.pool import WRITE_OFF_S, EffectWorkerPool
from holdfast.world import intents as world_intents
from tests.workers.rig import WorkerRig
from tests.world.rig import CRASH_AFTER, CRASH_BEFORE, Crash

MODULES = (
    "holdfast.workers.effects.admission",
    "holdfast.workers.effects.handler",
    "holdfast.effects.budget",
)

U = "talk"
QUEUE = world_intents.effect_queue(U, "speech")
TIMEOUT_S = 30.0
PRICES = {"m": Price(input=1.0, output=10.0)}
MESSAGES = [{"role": "user", "content": "Hello"}]
BILL = Usage(7, 3)


# -- the application -------------------------------------------------------------------------------


class FakeChatService:
    """Scripted answers: a usage, an error to raise, or a function that returns one of them."""

    def __init__(self) -> None:
        self.calls: list[hf.Call] = []
        self.answers: deque[Any] = deque()
        self.default_answer: Any = BILL

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]

    def handle_call(self, call: hf.Call) -> Any:
        self.calls.append(call)
        answer = self.answers.popleft() if self.answers else self.default_answer
        if callable(answer):
            answer = answer()
        if isinstance(answer, BaseException):
            raise answer
        return answer


fake_chat = FakeChatService()


def reply(usage: Usage, cost: float = 0.5) -> hf.Costed[Reply]:
    return hf.Costed(Reply("Hi", "m", "stop", usage), cost)


class Talk(Chat):
    """The chat effect as a coroutine."""

    async def _chat(
        self,
        call: hf.Call,
        messages: list[dict[str, Any]],
        model: str,
        options: ChatOptions | None = None,
    ) -> hf.Costed[Reply]:
        answer = fake_chat.handle_call(call)
        if hasattr(answer, "__await__"):
            answer = await answer
        return answer if isinstance(answer, hf.Costed) else reply(answer)


class Speech(Chat):
    """The chat effect as a plain function."""

    def _chat(  # type: ignore[override]
        self,
        call: hf.Call,
        messages: list[dict[str, Any]],
        model: str,
        options: ChatOptions | None = None,
    ) -> hf.Costed[Reply]:
        answer = fake_chat.handle_call(call)
        return answer if isinstance(answer, hf.Costed) else reply(answer)


ENDPOINT = Endpoint("http://localhost/v1", "", PRICES)
talk = Talk("talk", ENDPOINT, attempts=2, timeout_s=5.0, concurrency=8)
speech = Speech("speech", ENDPOINT, attempts=2, timeout_s=5.0, concurrency=8)
short = Speech("short", ENDPOINT, attempts=1, timeout_s=0.1, concurrency=2)
# The second attempt must not time out on a busy machine.
again = Speech("again", ENDPOINT, attempts=2, timeout_s=1.0, concurrency=2)
again_talk = Talk("again.talk", ENDPOINT, attempts=2, timeout_s=1.0, concurrency=2)
# A price that no integer of the ledger can hold.
DEAR = Endpoint("http://localhost/v1", "", {"m": Price(1e300, 1e300)})
dear = Speech("dear", DEAR, attempts=2, timeout_s=5.0, concurrency=8)
EFFECTS: dict[str, Any] = {one.kind: one for one in (talk, speech, short, again, again_talk, dear)}


class Ask(hf.Event):
    model: str = "m"
    max_tokens: int = 100
    kind: str = "speech"
    priority: int = 0


class Drop(hf.Event):
    n: int = 0


class BudgetedCaller(hf.World):
    intents: list[bytes] = msgspec.field(default_factory=list)
    told: list[str] = msgspec.field(default_factory=list)

    @hf.on(Ask)
    def ask(self, event: Ask, cx: hf.Context) -> None:
        options = ChatOptions(max_tokens=event.max_tokens)
        effect = EFFECTS[event.kind].options(priority=event.priority)
        self.intents.append(cx.do(effect, MESSAGES, event.model, options).intent_hash)

    @hf.on(Drop)
    def drop(self, event: Drop, cx: hf.Context) -> None:
        cx.cancel(self.intents[event.n])

    @hf.on(*EFFECTS.values())
    def heard(self, receipt: hf.Receipt[Reply], cx: hf.Context) -> None:
        self.told.append(f"{receipt.status} {receipt.code}".strip())


app = hf.App(U, worlds=[BudgetedCaller])


def cost_bound(max_tokens: int = 100, model: str = "m") -> dict[str, int]:
    """The cost bound of an `Ask` by unit."""
    params = codec.pack([MESSAGES, model, ChatOptions(max_tokens=max_tokens)])
    bound = llm.cost_bound.fn(None, params, codec.pack(PRICES))  # type: ignore[arg-type]
    return {charge.unit: charge.amount for charge in bound}


def billed_cost(usage: Usage = BILL) -> dict[str, int]:
    return {charge.unit: charge.amount for charge in llm.charges_of(PRICES["m"], usage)}


COST_BOUND = cost_bound()
BILLED = billed_cost()


class BudgetRig(WorkerRig):
    """The worker rig plus access to budget accounts."""

    def __init__(self) -> None:
        super().__init__(app)
        fake_chat.reset()

    def asker(self, name: str = "ada", *events: Any) -> hf.WorldHandle[BudgetedCaller]:
        handle = self.world(BudgetedCaller, name)
        for event in events:
            handle.send(event)
        self.run_worlds()
        return handle

    def account(self, unit: str = TOKENS, scope: str = UNIVERSE_SCOPE) -> BudgetAccount:
        return self.store.read(budget.account, U, scope, unit)

    def limit(self, amount: int | None, unit: str = TOKENS, scope: str = UNIVERSE_SCOPE) -> None:
        self.store.transact(budget.set_limit, U, scope, unit, amount)

    def warm_pool(self, **options: Any) -> EffectWorkerPool:
        """Return a pool after its first call, so that each later commit belongs to the next effect."""
        pool = self.pool(**options)
        self.asker("warm", Ask())
        self.run_until_idle(pool)
        fake_chat.calls.clear()
        return pool


@pytest.fixture
def budget_rig() -> BudgetRig:
    return BudgetRig()


def run_until_crash(budget_rig: BudgetRig, pool: EffectWorkerPool) -> None:
    with pytest.raises(Crash):
        budget_rig.run_until_idle(pool)
    budget_rig.backend.arm({})


# -- reservation with the claim, settlement with the receipt ---------------------------------------


def test_budget_reserves_the_cost_bound_during_a_call_for_world_and_universe(
    budget_rig: BudgetRig,
) -> None:
    ada = budget_rig.asker("ada", Ask())
    during: list[BudgetAccount] = []

    def look() -> Usage:
        for unit in (TOKENS, MONEY):
            during.append(budget_rig.account(unit))
            during.append(budget_rig.account(unit, budget_rig.id(ada)))
        return BILL

    fake_chat.answers.append(look)
    budget_rig.run_until_idle(budget_rig.pool())
    assert [one.reserved for one in during] == [
        COST_BOUND[TOKENS], COST_BOUND[TOKENS], COST_BOUND[MONEY], COST_BOUND[MONEY],
    ]  # fmt: skip
    assert {one.spent for one in during} == {0}
    assert ada.state().told == ["ok"]


@pytest.mark.parametrize("kind", ["talk", "speech"])
def test_budget_records_the_bill_and_no_reservation_after_the_receipt(
    budget_rig: BudgetRig, kind: str
) -> None:
    ada = budget_rig.asker("ada", Ask(kind=kind))
    budget_rig.run_until_idle(budget_rig.pool())
    for unit in (TOKENS, MONEY):
        assert budget_rig.account(unit) == BudgetAccount(BILLED[unit], 0, None)
        assert budget_rig.account(unit, budget_rig.id(ada)) == BudgetAccount(BILLED[unit], 0, None)


@pytest.mark.parametrize(("fault", "claimed"), [(CRASH_BEFORE, 0), (CRASH_AFTER, 1)])
def test_claim_and_budget_reservation_are_one_commit(
    budget_rig: BudgetRig, fault: str, claimed: int
) -> None:
    pool = budget_rig.warm_pool()
    budget_rig.asker("ada", Ask())
    budget_rig.backend.arm({1: fault})
    run_until_crash(budget_rig, pool)
    assert budget_rig.effect_counts("speech").claimed == claimed
    assert budget_rig.account().reserved == claimed * COST_BOUND[TOKENS]
    assert fake_chat.calls == []


@pytest.mark.parametrize(("fault", "done"), [(CRASH_BEFORE, 0), (CRASH_AFTER, 1)])
def test_receipt_and_billed_cost_are_one_commit(
    budget_rig: BudgetRig, fault: str, done: int
) -> None:
    pool = budget_rig.warm_pool()
    ada = budget_rig.asker("ada", Ask())
    budget_rig.backend.arm({2: fault})
    run_until_crash(budget_rig, pool)
    assert len(fake_chat.calls) == 1
    before = BudgetAccount(BILLED[TOKENS], COST_BOUND[TOKENS], None)
    assert budget_rig.account() == (BudgetAccount(2 * BILLED[TOKENS], 0, None) if done else before)
    assert budget_rig.inbox_depth(ada) == done


def test_call_of_a_crashed_pool_costs_its_bound_and_the_retry_its_bill(
    budget_rig: BudgetRig,
) -> None:
    ada = budget_rig.asker("ada", Ask())
    fake_chat.answers.append(Crash())
    run_until_crash(budget_rig, budget_rig.pool("first"))
    assert budget_rig.account().reserved == COST_BOUND[TOKENS]
    budget_rig.advance_clock(20)
    budget_rig.run_until_idle(budget_rig.pool("second"))
    assert (len(fake_chat.calls), ada.state().told) == (2, ["ok"])
    assert budget_rig.account() == BudgetAccount(COST_BOUND[TOKENS] + BILLED[TOKENS], 0, None)


def test_call_is_over_budget_after_a_crashed_attempt_used_up_the_limit(
    budget_rig: BudgetRig,
) -> None:
    budget_rig.limit(2 * COST_BOUND[TOKENS] - 1)
    ada = budget_rig.asker("ada", Ask())
    fake_chat.answers.append(Crash())
    run_until_crash(budget_rig, budget_rig.pool("first"))
    budget_rig.advance_clock(20)
    budget_rig.run_until_idle(budget_rig.pool("second"))
    assert (len(fake_chat.calls), ada.state().told) == (1, ["error over_budget"])
    assert budget_rig.account() == BudgetAccount(COST_BOUND[TOKENS], 0, 2 * COST_BOUND[TOKENS] - 1)


def claim_next(budget_rig: BudgetRig, pool: EffectWorkerPool) -> queue.Claim:
    """Claim the next effect as a pool does."""
    [claim] = budget_rig.store.transact(
        queue.claim, QUEUE, "hand", 1, 60 * S, queue.RetryBudget(), pool._admission(speech)
    )
    return claim


def test_released_claim_costs_nothing(budget_rig: BudgetRig) -> None:
    ada = budget_rig.asker("ada", Ask())
    pool = budget_rig.pool()
    budget_rig.store.transact(queue.release, [claim_next(budget_rig, pool)])
    assert budget_rig.account() == BudgetAccount(0, COST_BOUND[TOKENS], None)
    budget_rig.run_until_idle(pool)
    assert ada.state().told == ["ok"]
    assert budget_rig.account() == BudgetAccount(BILLED[TOKENS], 0, None)


def test_released_claim_of_a_started_call_costs_its_bound(budget_rig: BudgetRig) -> None:
    budget_rig.asker("ada", Ask())
    pool = budget_rig.pool()
    [runner] = [one for one in pool.runners if one.worker == "pool/speech"]
    [work] = runner._claimer.claim(1, runner.policy, TickStats(), lambda claim: False)
    EffectHandler(budget_rig.store, speech, pool.await_result)._begin(work)
    runner._claimer.release_unstarted([work], TickStats())
    assert budget_rig.effect_counts("speech").ready == 1
    assert budget_rig.account() == BudgetAccount(COST_BOUND[TOKENS], 0, None)


def test_call_that_outlived_its_claim_costs_its_bill(budget_rig: BudgetRig) -> None:
    ada = budget_rig.asker("ada", Ask())

    def sleep() -> Usage:
        budget_rig.advance_clock(60)
        return BILL

    fake_chat.answers.append(sleep)
    budget_rig.run_until_idle(budget_rig.pool())
    assert (len(fake_chat.calls), ada.state().told) == (2, ["ok"])
    assert budget_rig.account() == BudgetAccount(2 * BILLED[TOKENS], 0, None)


@pytest.mark.parametrize("end", [BILL, ConnectionResetError(), Unavailable(status=503)])
def test_call_that_outlived_its_claim_is_billed_once_after_another_pool_ran_it(
    budget_rig: BudgetRig, end: Any
) -> None:
    ada = budget_rig.asker("ada", Ask())

    def sleep() -> Any:
        budget_rig.advance_clock(60)
        budget_rig.run_until_idle(budget_rig.pool("second"))
        return end

    fake_chat.answers.append(sleep)
    budget_rig.run_until_idle(budget_rig.pool("first"))
    assert (len(fake_chat.calls), ada.state().told) == (2, ["ok"])
    assert budget_rig.account() == BudgetAccount(COST_BOUND[TOKENS] + BILLED[TOKENS], 0, None)


# -- failed calls ----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RejectedByServer(status=400), Unavailable(status=503)])
def test_failed_call_without_cost_frees_its_reservation(
    budget_rig: BudgetRig, error: Exception
) -> None:
    budget_rig.asker("ada", Ask())
    fake_chat.default_answer = error
    budget_rig.run_until_idle(budget_rig.pool())
    assert fake_chat.calls
    assert budget_rig.account() == budget_rig.account(MONEY) == BudgetAccount(0, 0, None)


@pytest.mark.parametrize("error", [ConnectionResetError(), Timeout(what="x", waited_s=1.0)])
def test_interrupted_call_costs_its_bound(budget_rig: BudgetRig, error: Exception) -> None:
    ada = budget_rig.asker("ada", Ask())
    fake_chat.answers.append(error)
    budget_rig.run_until_idle(budget_rig.pool(), seconds=30)
    assert ada.state().told == ["ok"]
    assert budget_rig.account() == BudgetAccount(COST_BOUND[TOKENS] + BILLED[TOKENS], 0, None)


def test_no_budget_is_reserved_between_two_attempts(budget_rig: BudgetRig) -> None:
    budget_rig.asker("ada", Ask())
    fake_chat.answers.append(ConnectionResetError())
    budget_rig.run_until_idle(budget_rig.pool())
    assert budget_rig.effect_counts("speech").delayed == 1
    assert budget_rig.account() == BudgetAccount(COST_BOUND[TOKENS], 0, None)


def test_call_with_a_bad_result_costs_its_bill(budget_rig: BudgetRig) -> None:
    ada = budget_rig.asker("ada", Ask())
    fake_chat.default_answer = reply(BILL, cost=float("nan"))
    budget_rig.run_until_idle(budget_rig.pool())
    assert ada.state().told == ["error bad_result"]
    assert budget_rig.account() == BudgetAccount(BILLED[TOKENS], 0, None)


def test_effect_with_exhausted_expiries_costs_its_bound_per_attempt(budget_rig: BudgetRig) -> None:
    ada = budget_rig.asker("ada", Ask())
    for n in range(3):
        fake_chat.answers.append(Crash())
        run_until_crash(budget_rig, budget_rig.pool(f"pool {n}"))
        budget_rig.advance_clock(20)
    budget_rig.run_until_idle(budget_rig.pool("last"))
    assert (len(fake_chat.calls), ada.state().told) == (3, ["timeout expiries_exhausted"])
    assert budget_rig.account() == BudgetAccount(3 * COST_BOUND[TOKENS], 0, None)


def test_bill_above_the_reservation_is_recorded_in_full(budget_rig: BudgetRig) -> None:
    budget_rig.limit(COST_BOUND[TOKENS])
    ada = budget_rig.asker("ada", Ask(), Ask())
    fake_chat.answers.append(Usage(10 * COST_BOUND[TOKENS], 0))
    budget_rig.run_until_idle(budget_rig.pool(), seconds=10)
    assert sorted(ada.state().told) == ["error over_budget", "ok"]
    assert budget_rig.account() == BudgetAccount(10 * COST_BOUND[TOKENS], 0, COST_BOUND[TOKENS])


# -- over budget -----------------------------------------------------------------------------------


def test_effect_over_budget_is_not_called_and_has_an_error_receipt(budget_rig: BudgetRig) -> None:
    budget_rig.limit(COST_BOUND[TOKENS] - 1)
    ada = budget_rig.asker("ada", Ask())
    budget_rig.run_until_idle(budget_rig.pool())
    assert (fake_chat.calls, ada.state().told) == ([], ["error over_budget"])
    [dead_letter] = budget_rig.dead_letters("speech")
    assert dead_letter.code == "over_budget"
    assert budget_rig.account() == BudgetAccount(0, 0, COST_BOUND[TOKENS] - 1)


def test_tick_that_rejects_all_effects_over_budget_counts_as_work(budget_rig: BudgetRig) -> None:
    budget_rig.limit(0)
    budget_rig.asker("ada", *[Ask() for _ in range(3)])
    [runner] = [one for one in budget_rig.pool().runners if one.worker == "pool/speech"]
    tick = runner.tick()
    assert (tick.claimed, tick.not_admitted, tick.made_progress) == (0, 3, True)


def test_call_that_needs_exactly_the_remaining_budget_is_admitted(budget_rig: BudgetRig) -> None:
    budget_rig.limit(COST_BOUND[TOKENS])
    ada = budget_rig.asker("ada", Ask())
    budget_rig.run_until_idle(budget_rig.pool())
    assert ada.state().told == ["ok"]


def test_per_world_budget_rejects_one_world_and_no_other(budget_rig: BudgetRig) -> None:
    budget_rig.limit(COST_BOUND[MONEY], MONEY, budget.DEFAULT_SCOPE)
    fake_chat.default_answer = Usage(COST_BOUND[TOKENS] - 100, 100)
    ada, bob = budget_rig.asker("ada", Ask()), budget_rig.asker("bob", Ask())
    pool = budget_rig.pool()
    budget_rig.run_until_idle(pool)
    ada.send(Ask())
    budget_rig.run_until_idle(pool)
    assert ada.state().told == ["ok", "error over_budget"]
    assert bob.state().told == ["ok"]
    [dead_letter] = budget_rig.dead_letters("speech")
    assert "BudgetedCaller/ada" in dead_letter.error


def test_effect_waits_while_reservations_use_the_budget_and_then_runs(
    budget_rig: BudgetRig,
) -> None:
    budget_rig.limit(COST_BOUND[TOKENS] + BILLED[TOKENS])
    ada, bob = budget_rig.asker("ada", Ask()), budget_rig.asker("bob", Ask())
    pool = budget_rig.pool()
    waiting: list[queue.QueueCounts] = []

    def look() -> Usage:
        waiting.append(budget_rig.effect_counts("speech"))
        return BILL

    fake_chat.default_answer = look
    # The clock does not advance. An ended call wakes a waiting effect.
    budget_rig.run_until_idle(pool)
    assert waiting[0].delayed == 1, "one of them has to wait"
    assert ada.state().told == bob.state().told == ["ok"]
    assert budget_rig.dead_letters("speech") == []


def exhaust_budget(budget_rig: BudgetRig) -> None:
    """Reserve the whole budget for a lost call. The limit would admit each other call alone."""
    budget_rig.asker("first", Ask())
    fake_chat.answers.append(Crash())
    run_until_crash(budget_rig, budget_rig.pool("dies"))
    budget_rig.limit(budget_rig.account().reserved + 1)


def deferred_ns(budget_rig: BudgetRig, seq: int) -> int:
    """The time between the enqueue of an effect and its next budget check."""
    item = budget_rig.store.read(
        lambda txn: items.load_item(txn, keys_of(QUEUE), tuples.pack_int(seq))
    )
    return item.not_before_ns - item.enqueued_ns


def test_budget_wait_grows_with_the_waiting_effects_of_the_world(budget_rig: BudgetRig) -> None:
    """A long queue thus causes no more budget checks than a short one."""
    exhaust_budget(budget_rig)
    pool = budget_rig.pool()
    many = budget_rig.asker("many", *[Ask() for _ in range(40)])
    budget_rig.run_until_idle(pool)
    assert budget_rig.effect_counts("speech").delayed == 40
    many.send(Ask())
    budget_rig.run_until_idle(pool)
    assert (
        deferred_ns(budget_rig, 42)
        >= admission.RETRY_NS_MAX + 40 * admission.RETRY_PER_WORLD_ITEM_NS
    )
    assert len(fake_chat.calls) == 1


def test_budget_wait_is_shorter_for_a_world_with_fewer_waiting_effects(
    budget_rig: BudgetRig,
) -> None:
    exhaust_budget(budget_rig)
    pool = budget_rig.pool()
    many = budget_rig.asker("many", *[Ask() for _ in range(300)])
    budget_rig.run_until_idle(pool)
    budget_rig.asker("few", Ask())
    many.send(Ask())
    budget_rig.run_until_idle(pool)
    assert budget_rig.effect_counts("speech").delayed == 302
    apart_ns = deferred_ns(budget_rig, 303) - deferred_ns(budget_rig, 302)
    assert apart_ns >= 300 * admission.RETRY_PER_WORLD_ITEM_NS - 2 * admission.RETRY_STEP_NS > 0


def test_waiting_effects_share_few_budget_retry_times(budget_rig: BudgetRig) -> None:
    exhaust_budget(budget_rig)
    budget_rig.asker("many", *[Ask() for _ in range(90)])
    budget_rig.run_until_idle(budget_rig.pool())
    assert budget_rig.effect_counts("speech").delayed == 90
    assert len({deferred_ns(budget_rig, seq) // MS for seq in range(2, 92)}) <= 3


def test_budget_is_checked_once_per_waiting_world_in_a_batch(budget_rig: BudgetRig) -> None:
    exhaust_budget(budget_rig)
    budget_rig.asker("many", *[Ask() for _ in range(40)])
    budget_rig.asker("few", Ask(), Ask())
    asked: list[str] = []
    with failpoints.on("budget.reserve", calls=asked.append):
        budget_rig.run_until_idle(budget_rig.pool())
    assert budget_rig.effect_counts("speech").delayed == 42
    assert len(asked) == len(set(asked)) == 2


def test_effect_with_a_reservation_runs_before_waiting_effects(budget_rig: BudgetRig) -> None:
    """The other effects wait for its reservation."""
    pool = budget_rig.pool()
    ada = budget_rig.asker("ada", Ask())
    holding = claim_next(budget_rig, pool)
    ada.send(Ask(max_tokens=101))
    budget_rig.run_worlds()
    budget_rig.limit(cost_bound(101)[TOKENS])
    budget_rig.store.transact(queue.release, [holding])
    budget_rig.store.transact(queue.release, [claim_next(budget_rig, pool)])
    fake_chat.default_answer = Usage(0, 0)
    budget_rig.run_until_idle(pool)
    assert ada.state().told == ["ok", "ok"]
    assert [call.idempotency_key for call in fake_chat.calls] == [
        f"1-{intent.hex()}" for intent in ada.state().intents
    ]


def test_highest_priority_of_effects_waiting_for_budget_runs_first(budget_rig: BudgetRig) -> None:
    """The wait time of the other effects does not matter."""
    budget_rig.limit(COST_BOUND[TOKENS])
    fake_chat.default_answer = Usage(0, 0)
    ada = budget_rig.asker("ada", Ask())
    pool = budget_rig.pool()
    first = claim_next(budget_rig, pool)
    for _ in range(20):
        ada.send(Ask())
    budget_rig.run_until_idle(pool, seconds=3)
    ada.send(Ask(priority=5))
    budget_rig.run_until_idle(pool, seconds=0.1)
    assert (budget_rig.effect_counts("speech").delayed, fake_chat.calls) == (21, [])
    [urgent] = ada.state().intents[-1:]
    intent = codec.unpack_as(Intent, first.payload)
    close = codec.pack((U, intent.intent_hash.hex(), []))
    then = queue.JoinedOperation(0, budget.settle_by_claim.name, close)
    budget_rig.store.transact(queue.finish_batch, [first.token], [], queue.RetryBudget(), [then])
    budget_rig.run_until_idle(pool)
    assert fake_chat.calls[0].idempotency_key == f"1-{urgent.hex()}"
    assert len(fake_chat.calls) == 21, "each that ended has woken the next"


def test_released_unstarted_claim_frees_its_reservation(budget_rig: BudgetRig) -> None:
    budget_rig.asker("ada", Ask())
    pool = budget_rig.pool()
    [runner] = [one for one in pool.runners if one.worker == "pool/speech"]
    works = runner._claimer.claim(1, runner.policy, TickStats(), lambda claim: False)
    assert budget_rig.account().reserved == COST_BOUND[TOKENS]
    runner._claimer.release_unstarted(works, TickStats())
    assert budget_rig.effect_counts("speech").ready == 1
    assert budget_rig.account() == BudgetAccount(0, 0, None)


def test_raised_budget_limit_wakes_waiting_effects(budget_rig: BudgetRig) -> None:
    exhaust_budget(budget_rig)
    bob = budget_rig.asker("bob", Ask())
    pool = budget_rig.pool()
    budget_rig.run_until_idle(pool)
    assert budget_rig.effect_counts("speech").delayed == 1
    budget_rig.limit(10 * COST_BOUND[TOKENS])
    budget_rig.run_until_idle(pool)
    assert bob.state().told == ["ok"]


def test_effect_is_over_budget_when_earlier_calls_used_the_limit(budget_rig: BudgetRig) -> None:
    budget_rig.limit(2 * COST_BOUND[TOKENS] - 1)
    fake_chat.default_answer = Usage(COST_BOUND[TOKENS], 0)
    ada = budget_rig.asker("ada", Ask(), Ask())
    budget_rig.run_until_idle(budget_rig.pool(), seconds=5)
    assert sorted(ada.state().told) == ["error over_budget", "ok"]
    assert len(fake_chat.calls) == 1


def test_pool_enforces_the_budget_limits_of_its_store_only() -> None:
    limited = BudgetRig()
    limited.limit(0)
    free = BudgetRig()
    asked = [budget_rig.asker("ada", Ask()) for budget_rig in (limited, free)]
    for budget_rig in (limited, free):
        budget_rig.run_until_idle(budget_rig.pool())
    assert [handle.state().told for handle in asked] == [["error over_budget"], ["ok"]]
    assert (limited.account().spent, free.account().spent) == (0, BILLED[TOKENS])


def test_raised_budget_limit_admits_the_next_call(budget_rig: BudgetRig) -> None:
    budget_rig.limit(0)
    ada = budget_rig.asker("ada", Ask())
    pool = budget_rig.pool()
    budget_rig.run_until_idle(pool)
    budget_rig.limit(None)
    ada.send(Ask())
    budget_rig.run_until_idle(pool)
    assert ada.state().told == ["error over_budget", "ok"]


def test_effect_over_budget_can_be_redriven(budget_rig: BudgetRig) -> None:
    budget_rig.limit(0)
    ada = budget_rig.asker("ada", Ask())
    pool = budget_rig.pool()
    budget_rig.run_until_idle(pool)
    budget_rig.limit(None)
    [dead_letter] = budget_rig.dead_letters("speech")
    budget_rig.store.transact(receipts.redrive_effects, U, "speech", [dead_letter.seq])
    budget_rig.run_until_idle(pool)
    assert ada.state().told == ["error over_budget", "ok"]
    assert budget_rig.account() == BudgetAccount(BILLED[TOKENS], 0, None)


# -- prices and parameters -------------------------------------------------------------------------


@pytest.mark.parametrize("scope", [UNIVERSE_SCOPE, budget.DEFAULT_SCOPE])
def test_call_without_price_is_rejected_under_a_money_limit(
    budget_rig: BudgetRig, scope: str
) -> None:
    budget_rig.limit(10**9, MONEY, scope)
    ada = budget_rig.asker("ada", Ask(model="unknown"))
    budget_rig.run_until_idle(budget_rig.pool())
    assert (fake_chat.calls, ada.state().told) == ([], ["error not_configured"])
    assert budget_rig.account().reserved == 0


def test_call_without_price_is_counted_under_a_token_limit(budget_rig: BudgetRig) -> None:
    budget_rig.limit(10**9)
    ada = budget_rig.asker("ada", Ask(model="unknown"))
    budget_rig.run_until_idle(budget_rig.pool())
    assert ada.state().told == ["ok"]
    assert (budget_rig.account().spent, budget_rig.account(MONEY).spent) == (BILLED[TOKENS], 0)


BAD_PARAMS: dict[str, Any] = {
    "no list": 7,
    "nothing": [],
    "no messages": [[], "m"],
    "no roles": [[{"content": "Hello"}], "m"],
    "a model that is a list": [MESSAGES, ["m"]],
    "options that do not fit": [MESSAGES, "m", {"max_tokens": "many"}],
    "more tokens than there can be": [MESSAGES, "m", {"max_tokens": 1 << 62}],
    "an image without a bound": [[{"role": "user", "content": [{"type": "image_url"}]}], "m"],
}


@pytest.mark.parametrize("name", BAD_PARAMS)
def test_intent_without_a_cost_bound_is_invalid_and_delays_no_other_intent(
    budget_rig: BudgetRig, name: str
) -> None:
    ada = budget_rig.asker("ada", Ask())
    good = budget_rig.next_intent("speech")
    bad = msgspec.structs.replace(
        good, intent_hash=b"x" * 32, params=codec.pack(BAD_PARAMS[name]), priority=9
    )
    budget_rig.store.transact(world_intents.publish, [bad])
    budget_rig.run_until_idle(budget_rig.pool())
    assert len(fake_chat.calls) == 1
    assert ada.state().told[-1] == "ok"
    [dead_letter] = budget_rig.dead_letters("speech")
    assert dead_letter.code == "invalid"
    assert budget_rig.account() == BudgetAccount(BILLED[TOKENS], 0, None)


def test_price_overflow_rejects_the_call_and_keeps_the_pool_running(budget_rig: BudgetRig) -> None:
    ada = budget_rig.asker("ada", Ask(kind="dear"))
    budget_rig.run_until_idle(budget_rig.pool())
    assert (fake_chat.calls, ada.state().told) == ([], ["error invalid"])


# -- deleted worlds and cancelled calls ------------------------------------------------------------


def test_effect_of_a_deleted_world_is_dropped_without_cost(budget_rig: BudgetRig) -> None:
    ada = budget_rig.asker("ada", Ask())
    ada.delete()
    budget_rig.run_until_idle(budget_rig.pool())
    assert fake_chat.calls == []
    assert budget_rig.effect_counts("speech") == queue.QueueCounts(done=1)
    assert budget_rig.account() == BudgetAccount(0, 0, None)


def test_reservation_of_a_world_deleted_during_its_call_is_written_off(
    budget_rig: BudgetRig,
) -> None:
    ada = budget_rig.asker("ada", Ask())
    fake_chat.answers.append(Crash())
    run_until_crash(budget_rig, budget_rig.pool("first"))
    ada.delete()
    budget_rig.advance_clock(20)
    budget_rig.run_until_idle(budget_rig.pool("second"))
    assert len(fake_chat.calls) == 1
    assert budget_rig.account() == BudgetAccount(COST_BOUND[TOKENS], 0, None)


def test_reservation_of_a_cancelled_lost_call_is_written_off_at_its_bound(
    budget_rig: BudgetRig,
) -> None:
    ada = budget_rig.asker("ada", Ask())
    fake_chat.answers.append(Crash())
    run_until_crash(budget_rig, budget_rig.pool("first"))
    ada.send(Drop())
    budget_rig.run_worlds()
    assert ada.state().told == ["error cancelled"]
    assert budget_rig.account() == BudgetAccount(0, COST_BOUND[TOKENS], None)
    budget_rig.advance_clock(WRITE_OFF_S + 3 * speech.timeout_s)
    ada.send(Ask())
    budget_rig.run_until_idle(budget_rig.pool("second"))
    assert budget_rig.account() == BudgetAccount(COST_BOUND[TOKENS] + BILLED[TOKENS], 0, None)


def claim_then_crash(budget_rig: BudgetRig, pool: EffectWorkerPool) -> Intent:
    """Return an effect of a crashed worker. Its bill may arrive late."""
    intent = budget_rig.next_intent("speech")
    fake_chat.answers.append(Crash())
    run_until_crash(budget_rig, pool)
    return intent


def test_late_cost_of_a_cancelled_call_replaces_its_reservation(budget_rig: BudgetRig) -> None:
    ada = budget_rig.asker("ada", Ask())
    intent = claim_then_crash(budget_rig, budget_rig.pool())
    ada.send(Drop())
    budget_rig.run_worlds()
    bill = [Cost(TOKENS, 40)]
    budget_rig.store.transact(receipts.record_late_cost, intent, 1, bill)
    assert budget_rig.account() == BudgetAccount(40, 0, None)


def test_late_cancelled_call_without_bill_costs_its_bound(budget_rig: BudgetRig) -> None:
    ada = budget_rig.asker("ada", Ask())
    intent = claim_then_crash(budget_rig, budget_rig.pool())
    ada.send(Drop())
    budget_rig.run_worlds()
    budget_rig.store.transact(receipts.record_late_cost, intent, 1, None)
    assert budget_rig.account() == BudgetAccount(COST_BOUND[TOKENS], 0, None)


def test_late_cost_of_a_call_to_be_retried_replaces_its_reservation(
    budget_rig: BudgetRig,
) -> None:
    ada = budget_rig.asker("ada", Ask())
    intent = claim_then_crash(budget_rig, budget_rig.pool("first"))
    budget_rig.store.transact(receipts.record_late_cost, intent, 1, [Cost(TOKENS, 40)])
    budget_rig.store.transact(receipts.record_late_cost, intent, 1, None)
    assert budget_rig.account() == BudgetAccount(40, 0, None)
    budget_rig.advance_clock(20)
    budget_rig.run_until_idle(budget_rig.pool("second"))
    assert ada.state().told == ["ok"]
    assert budget_rig.account() == BudgetAccount(40 + BILLED[TOKENS], 0, None)


# -- real threads ----------------------------------------------------------------------------------


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class LiveRuntime:
    """A runtime with real threads, and its budget account."""

    def __init__(self, runtime: hf.Runtime) -> None:
        self.runtime = runtime
        self.store: Store = runtime.store
        self.ada = runtime.world(BudgetedCaller, "ada")
        self.ada.create()

    def account(self) -> BudgetAccount:
        return self.store.read(budget.account, U, UNIVERSE_SCOPE, TOKENS)

    def receipt_texts(self) -> list[str]:
        state: list[str] = self.ada.state().told
        return state


@contextmanager
def open_live() -> Iterator[LiveRuntime]:
    fake_chat.reset()
    with app.open("memory:") as runtime:
        yield LiveRuntime(runtime)


def test_coroutine_cancelled_while_running_costs_its_bound() -> None:
    entered = threading.Event()

    async def hang() -> Usage:
        entered.set()
        await asyncio.sleep(3600)
        raise AssertionError

    with open_live() as live:
        fake_chat.answers.append(hang)
        live.ada.send(Ask(kind="talk"))
        assert entered.wait(TIMEOUT_S)
        live.ada.send(Drop())
        until(lambda: live.receipt_texts() == ["error cancelled"])
        until(lambda: live.account() == BudgetAccount(COST_BOUND[TOKENS], 0, None))


def test_function_cancelled_while_running_costs_its_bill_after_it_returns() -> None:
    entered, leave = threading.Event(), threading.Event()

    def hang() -> Usage:
        entered.set()
        assert leave.wait(TIMEOUT_S)
        return BILL

    with open_live() as live:
        fake_chat.answers.append(hang)
        live.ada.send(Ask(kind="speech"))
        assert entered.wait(TIMEOUT_S)
        live.ada.send(Drop())
        until(lambda: fake_chat.calls[0].cancelled)
        assert live.account() == BudgetAccount(0, COST_BOUND[TOKENS], None)
        leave.set()
        until(lambda: live.account() == BudgetAccount(BILLED[TOKENS], 0, None))
        until(lambda: live.receipt_texts() == ["error cancelled"])


def test_cancelled_function_that_fails_without_cost_costs_nothing() -> None:
    entered, leave = threading.Event(), threading.Event()

    def hang() -> Exception:
        entered.set()
        assert leave.wait(TIMEOUT_S)
        return Unavailable(status=503)

    with open_live() as live:
        fake_chat.answers.append(hang)
        live.ada.send(Ask(kind="speech"))
        assert entered.wait(TIMEOUT_S)
        live.ada.send(Drop())
        until(lambda: fake_chat.calls[0].cancelled)
        leave.set()
        until(lambda: live.account() == BudgetAccount(0, 0, None))


def test_function_timeout_costs_its_bound_once_despite_a_late_result() -> None:
    leave, left = threading.Event(), threading.Event()

    def hang() -> Usage:
        assert leave.wait(TIMEOUT_S)
        left.set()
        return BILL

    with open_live() as live:
        fake_chat.answers.append(hang)
        live.ada.send(Ask(kind="short"))
        until(lambda: live.receipt_texts() == ["timeout timeout"])
        assert live.account() == BudgetAccount(COST_BOUND[TOKENS], 0, None)
        leave.set()
        assert left.wait(TIMEOUT_S)
        live.ada.send(Ask(kind="speech"))
        until(lambda: len(live.receipt_texts()) == 2)
        assert live.account() == BudgetAccount(COST_BOUND[TOKENS] + BILLED[TOKENS], 0, None)


@pytest.mark.parametrize("kind", ["again", "again.talk"])
def test_call_timeout_costs_its_bound_and_the_retry_its_bill(
    kind: str,
) -> None:
    leave = threading.Event()

    def hang() -> Usage:
        assert leave.wait(TIMEOUT_S)
        return BILL

    async def hang_async() -> Usage:
        await asyncio.sleep(3600)
        raise AssertionError

    with open_live() as live:
        fake_chat.answers.append(hang if kind == "again" else hang_async)
        live.ada.send(Ask(kind=kind))
        until(lambda: live.receipt_texts() == ["ok"])
        assert live.account() == BudgetAccount(COST_BOUND[TOKENS] + BILLED[TOKENS], 0, None)
        leave.set()


# -- limits are never exceeded ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["talk", "speech"])
def test_concurrent_pools_never_exceed_the_budget(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "RETRY_NS_MAX", 20 * MS)
    rng = random.Random(5)
    intents, worlds = 60, 4
    limit = 12 * COST_BOUND[TOKENS]
    observed_accounts: list[BudgetAccount] = []
    bills: list[int] = []
    lock = threading.Lock()
    fake_chat.reset()
    with stores.open("memory:") as store:
        store.transact(budget.set_limit, U, UNIVERSE_SCOPE, TOKENS, limit)

        def answer() -> Usage:
            account: BudgetAccount = store.read(budget.account, U, UNIVERSE_SCOPE, TOKENS)
            with lock:
                observed_accounts.append(account)
                bills.append(rng.randrange(COST_BOUND[TOKENS] + 1))
                return Usage(bills[-1], 0)

        fake_chat.default_answer = answer
        options = {"universe": U, "adapters": app.effects, "kinds": [kind]}
        pools = [EffectWorkerPool(store, worker=f"pool {n}", **options) for n in range(3)]
        with app.open(store, roles=("orchestrator", "world")) as runtime:
            handles = [runtime.world(BudgetedCaller, f"w{n}") for n in range(worlds)]
            for n in range(intents):
                handles[n % worlds].send(Ask(kind=kind))
            for pool in pools:
                pool.start()

            def all_told() -> bool:
                return sum(len(handle.state().told) for handle in handles) == intents

            until(all_told)
            for pool in pools:
                pool.request_stop()
            for pool in pools:
                pool.join(TIMEOUT_S)
            told = [one for handle in handles for one in handle.state().told]
        assert set(told) <= {"ok", "error over_budget"}
        assert told.count("ok") == len(bills) >= 12
        account = store.read(budget.account, U, UNIVERSE_SCOPE, TOKENS)
        assert account == BudgetAccount(sum(bills), 0, limit)
        assert account.spent <= limit
        assert all(one.spent + one.reserved <= limit for one in observed_accounts)


class CallPlan(msgspec.Struct, frozen=True):
    world: int
    max_tokens: int
    # The end of its first call, and the billed share of its cost bound.
    end: str
    share: float


CALL_PLANS = st.lists(
    st.builds(
        CallPlan,
        st.integers(0, 2),
        st.sampled_from([1, 50, 400]),
        st.sampled_from(["ok", "ok", "free", "broke", "crash"]),
        st.floats(0, 1),
    ),
    max_size=8,
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(plans=CALL_PLANS, limit=st.integers(0, 2500), each=st.integers(0, 1500))
def test_no_budget_is_exceeded_for_any_costs_and_call_ends(
    plans: list[CallPlan], limit: int, each: int
) -> None:
    budget_rig = BudgetRig()
    budget_rig.limit(limit)
    budget_rig.limit(each, TOKENS, budget.DEFAULT_SCOPE)
    handles = [budget_rig.world(BudgetedCaller, f"w{n}") for n in range(3)]
    for plan in plans:
        handles[plan.world].send(Ask(max_tokens=plan.max_tokens))
    budget_rig.run_worlds()
    ends = deque(plans)

    def answer() -> Any:
        require_within_budget(budget_rig, handles)
        plan = ends.popleft() if ends else CallPlan(0, 1, "ok", 0.0)
        if plan.end == "ok":
            # No bill exceeds the smallest reservation.
            return Usage(int(cost_bound(1)[TOKENS] * plan.share), 0)
        return {"free": RejectedByServer(status=400), "broke": OSError(), "crash": Crash()}[
            plan.end
        ]

    fake_chat.default_answer = answer
    pools = [budget_rig.pool("0"), budget_rig.pool("1")]
    for n in range(200):
        try:
            budget_rig.run_until_idle(pools[n % 2], seconds=1)
        except Crash:
            pools[n % 2] = budget_rig.pool(f"again {n}")
            budget_rig.advance_clock(20)
        require_within_budget(budget_rig, handles)
        if sum(len(handle.state().told) for handle in handles) == len(plans):
            break
    else:
        raise AssertionError("some were never told")
    assert budget_rig.account().reserved == 0
    assert budget_rig.account().spent == sum(
        budget_rig.account(TOKENS, budget_rig.id(handle)).spent for handle in handles
    )


def require_within_budget(budget_rig: BudgetRig, handles: list[Any]) -> None:
    for scope in (UNIVERSE_SCOPE, *map(budget_rig.id, handles)):
        account = budget_rig.account(TOKENS, scope)
        assert account.limit is not None
        assert account.spent + account.reserved <= account.limit

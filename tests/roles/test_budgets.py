"""Budgets of billed effects: set aside with the claim, settled with the receipt, never overspent.

The effect is the shipped chat with another body: what it answers, and bills, is the test's to say.
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
from holdfast import codec
from holdfast import store as stores
from holdfast.adapters import llm
from holdfast.adapters.errors import Answered, Unavailable
from holdfast.adapters.llm import ChatOptions, Endpoint, Price, Reply, Usage
from holdfast.app.shipped.llm import Chat
from holdfast.clock import MS, S
from holdfast.durable import item as items
from holdfast.durable import queue
from holdfast.durable.item import keys_of
from holdfast.effects import budget
from holdfast.effects.budget import MONEY, TOKENS, UNIVERSE, Account, Charge
from holdfast.errors import Timeout
from holdfast.messages import Intent
from holdfast.roles import admission, receipts
from holdfast.roles.adapter import LAPSE_S, AdapterPool
from holdfast.roles.doing import Doing
from holdfast.runner.tick import Tick
from holdfast.store import tuples
from holdfast.store.api import Store
from holdfast.world import publish
from tests.roles.rig import Rig
from tests.world.rig import CRASH_AFTER, CRASH_BEFORE, Crash

MODULES = ("holdfast.roles.admission", "holdfast.roles.doing", "holdfast.effects.budget")

U = "talk"
QUEUE = publish.effects(U, "speech")
LONG_S = 30.0
PRICES = {"m": Price(input=1.0, output=10.0)}
MESSAGES = [{"role": "user", "content": "Hello"}]
BILL = Usage(7, 3)


# -- the application -------------------------------------------------------------------------------


class Teller:
    """The next answers: a usage, an error to raise, or a function that gives one of these."""

    def __init__(self) -> None:
        self.calls: list[hf.Call] = []
        self.answers: deque[Any] = deque()
        self.usual: Any = BILL

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]

    def called(self, call: hf.Call) -> Any:
        self.calls.append(call)
        answer = self.answers.popleft() if self.answers else self.usual
        if callable(answer):
            answer = answer()
        if isinstance(answer, BaseException):
            raise answer
        return answer


teller = Teller()


def reply(usage: Usage, cost: float = 0.5) -> hf.Costed[Reply]:
    return hf.Costed(Reply("Hi", "m", "stop", usage), cost)


class Talk(Chat):
    """As a coroutine."""

    async def _chat(
        self,
        call: hf.Call,
        messages: list[dict[str, Any]],
        model: str,
        options: ChatOptions | None = None,
    ) -> hf.Costed[Reply]:
        answer = teller.called(call)
        if hasattr(answer, "__await__"):
            answer = await answer
        return answer if isinstance(answer, hf.Costed) else reply(answer)


class Speech(Chat):
    """As a plain function."""

    def _chat(  # type: ignore[override]
        self,
        call: hf.Call,
        messages: list[dict[str, Any]],
        model: str,
        options: ChatOptions | None = None,
    ) -> hf.Costed[Reply]:
        answer = teller.called(call)
        return answer if isinstance(answer, hf.Costed) else reply(answer)


ENDPOINT = Endpoint("http://localhost/v1", "", PRICES)
talk = Talk("talk", ENDPOINT, attempts=2, timeout_s=5.0, concurrency=8)
speech = Speech("speech", ENDPOINT, attempts=2, timeout_s=5.0, concurrency=8)
short = Speech("short", ENDPOINT, attempts=1, timeout_s=0.1, concurrency=2)
# Their second attempts are to be within their time, on a busy machine too.
again = Speech("again", ENDPOINT, attempts=2, timeout_s=1.0, concurrency=2)
again_talk = Talk("again.talk", ENDPOINT, attempts=2, timeout_s=1.0, concurrency=2)
EFFECTS: dict[str, Any] = {one.kind: one for one in (talk, speech, short, again, again_talk)}


class Ask(hf.Event):
    model: str = "m"
    max_tokens: int = 100
    kind: str = "speech"
    priority: int = 0


class Drop(hf.Event):
    n: int = 0


class Asker(hf.World):
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


app = hf.App(U, worlds=[Asker])


def charges(max_tokens: int = 100, model: str = "m") -> dict[str, int]:
    """The most that an `Ask` can cost."""
    params = codec.pack([MESSAGES, model, ChatOptions(max_tokens=max_tokens)])
    most = llm.most.fn(None, params, codec.pack(PRICES))  # type: ignore[arg-type]
    return {charge.unit: charge.amount for charge in most}


def billed(usage: Usage = BILL) -> dict[str, int]:
    return {charge.unit: charge.amount for charge in llm.charges(PRICES["m"], usage)}


MOST = charges()
BOOKED = billed()


class Desk(Rig):
    """The rig, with the accounts at hand."""

    def __init__(self) -> None:
        super().__init__(app)
        teller.reset()

    def asker(self, name: str = "ada", *events: Any) -> hf.WorldHandle[Asker]:
        handle = self.world(Asker, name)
        for event in events:
            handle.send(event)
        self.think()
        return handle

    def account(self, unit: str = TOKENS, scope: str = UNIVERSE) -> Account:
        return self.store.read(budget.account, U, scope, unit)

    def limit(self, amount: int | None, unit: str = TOKENS, scope: str = UNIVERSE) -> None:
        self.store.transact(budget.limit, U, scope, unit, amount)

    def warm_pool(self, **options: Any) -> AdapterPool:
        """A pool that has done its first call, so that each commit after it is the next effect's."""
        pool = self.pool(**options)
        self.asker("warm", Ask())
        self.work(pool)
        teller.calls.clear()
        return pool


@pytest.fixture
def desk() -> Desk:
    return Desk()


def crashing(desk: Desk, pool: AdapterPool) -> None:
    with pytest.raises(Crash):
        desk.work(pool)
    desk.backend.arm({})


# -- with the claim, and with the receipt ----------------------------------------------------------


def test_while_a_call_is_made_its_most_is_set_aside_for_world_and_universe(desk: Desk) -> None:
    ada = desk.asker("ada", Ask())
    during: list[Account] = []

    def look() -> Usage:
        for unit in (TOKENS, MONEY):
            during.append(desk.account(unit))
            during.append(desk.account(unit, desk.id(ada)))
        return BILL

    teller.answers.append(look)
    desk.work(desk.pool())
    assert [one.reserved for one in during] == [
        MOST[TOKENS], MOST[TOKENS], MOST[MONEY], MOST[MONEY],
    ]  # fmt: skip
    assert {one.spent for one in during} == {0}
    assert ada.state().told == ["ok"]


@pytest.mark.parametrize("kind", ["talk", "speech"])
def test_when_the_receipt_is_there_the_bill_is_booked_and_nothing_is_set_aside(
    desk: Desk, kind: str
) -> None:
    ada = desk.asker("ada", Ask(kind=kind))
    desk.work(desk.pool())
    for unit in (TOKENS, MONEY):
        assert desk.account(unit) == Account(BOOKED[unit], 0, None)
        assert desk.account(unit, desk.id(ada)) == Account(BOOKED[unit], 0, None)


@pytest.mark.parametrize(("fault", "claimed"), [(CRASH_BEFORE, 0), (CRASH_AFTER, 1)])
def test_the_claim_and_what_is_set_aside_are_one_commit(
    desk: Desk, fault: str, claimed: int
) -> None:
    pool = desk.warm_pool()
    desk.asker("ada", Ask())
    desk.backend.arm({1: fault})
    crashing(desk, pool)
    assert desk.counts("speech").claimed == claimed
    assert desk.account().reserved == claimed * MOST[TOKENS]
    assert teller.calls == []


@pytest.mark.parametrize(("fault", "done"), [(CRASH_BEFORE, 0), (CRASH_AFTER, 1)])
def test_the_receipt_and_the_bill_are_one_commit(desk: Desk, fault: str, done: int) -> None:
    pool = desk.warm_pool()
    ada = desk.asker("ada", Ask())
    desk.backend.arm({2: fault})
    crashing(desk, pool)
    assert len(teller.calls) == 1
    before = Account(BOOKED[TOKENS], MOST[TOKENS], None)
    assert desk.account() == (Account(2 * BOOKED[TOKENS], 0, None) if done else before)
    assert desk.depth(ada) == done


def test_a_call_of_a_process_that_died_is_booked_at_its_most_and_the_next_by_its_bill(
    desk: Desk,
) -> None:
    ada = desk.asker("ada", Ask())
    teller.answers.append(Crash())
    crashing(desk, desk.pool("first"))
    assert desk.account().reserved == MOST[TOKENS]
    desk.expire(20)
    desk.work(desk.pool("second"))
    assert (len(teller.calls), ada.state().told) == (2, ["ok"])
    assert desk.account() == Account(MOST[TOKENS] + BOOKED[TOKENS], 0, None)


def test_if_the_dead_have_left_no_room_the_call_is_not_made_again(desk: Desk) -> None:
    desk.limit(2 * MOST[TOKENS] - 1)
    ada = desk.asker("ada", Ask())
    teller.answers.append(Crash())
    crashing(desk, desk.pool("first"))
    desk.expire(20)
    desk.work(desk.pool("second"))
    assert (len(teller.calls), ada.state().told) == (1, ["error over_budget"])
    assert desk.account() == Account(MOST[TOKENS], 0, 2 * MOST[TOKENS] - 1)


def claimed(desk: Desk, pool: AdapterPool) -> queue.Claim:
    """The next effect, claimed as a pool does it."""
    [taken] = desk.store.transact(
        queue.claim, QUEUE, "hand", 1, 60 * S, queue.Budget(), pool._admission(speech)
    )
    return taken


def test_a_claim_that_was_given_back_costs_nothing(desk: Desk) -> None:
    ada = desk.asker("ada", Ask())
    pool = desk.pool()
    desk.store.transact(queue.release, [claimed(desk, pool)])
    assert desk.account() == Account(0, MOST[TOKENS], None)
    desk.work(pool)
    assert ada.state().told == ["ok"]
    assert desk.account() == Account(BOOKED[TOKENS], 0, None)


def test_a_call_that_was_given_back_when_it_had_begun_is_booked_at_its_most(desk: Desk) -> None:
    desk.asker("ada", Ask())
    pool = desk.pool()
    [runner] = [one for one in pool.runners if one.worker == "pool/speech"]
    [work] = runner._claimer.claim(1, runner.policy, Tick(), lambda claim: False)
    Doing(desk.store, speech, pool.wait_for)._begin(work)
    runner._claimer.hand_back([work], Tick())
    assert desk.counts("speech").ready == 1
    assert desk.account() == Account(MOST[TOKENS], 0, None)


def test_a_call_that_outlived_its_claim_is_booked_at_its_bill(desk: Desk) -> None:
    ada = desk.asker("ada", Ask())

    def sleep() -> Usage:
        desk.expire(60)
        return BILL

    teller.answers.append(sleep)
    desk.work(desk.pool())
    assert (len(teller.calls), ada.state().told) == (2, ["ok"])
    assert desk.account() == Account(2 * BOOKED[TOKENS], 0, None)


@pytest.mark.parametrize("end", [BILL, ConnectionResetError(), Unavailable(status=503)])
def test_a_call_that_outlived_its_claim_is_booked_once_if_another_has_made_it_meanwhile(
    desk: Desk, end: Any
) -> None:
    ada = desk.asker("ada", Ask())

    def sleep() -> Any:
        desk.expire(60)
        desk.work(desk.pool("second"))
        return end

    teller.answers.append(sleep)
    desk.work(desk.pool("first"))
    assert (len(teller.calls), ada.state().told) == (2, ["ok"])
    assert desk.account() == Account(MOST[TOKENS] + BOOKED[TOKENS], 0, None)


# -- calls that fail -------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [Answered(status=400), Unavailable(status=503)])
def test_a_failed_call_that_cost_nothing_gives_back_what_was_set_aside(
    desk: Desk, error: Exception
) -> None:
    desk.asker("ada", Ask())
    teller.usual = error
    desk.work(desk.pool())
    assert teller.calls
    assert desk.account() == desk.account(MONEY) == Account(0, 0, None)


@pytest.mark.parametrize("error", [ConnectionResetError(), Timeout(what="x", waited_s=1.0)])
def test_a_call_that_broke_off_is_booked_at_its_most(desk: Desk, error: Exception) -> None:
    ada = desk.asker("ada", Ask())
    teller.answers.append(error)
    desk.work(desk.pool(), seconds=30)
    assert ada.state().told == ["ok"]
    assert desk.account() == Account(MOST[TOKENS] + BOOKED[TOKENS], 0, None)


def test_between_two_attempts_nothing_is_set_aside(desk: Desk) -> None:
    desk.asker("ada", Ask())
    teller.answers.append(ConnectionResetError())
    desk.work(desk.pool())
    assert desk.counts("speech").delayed == 1
    assert desk.account() == Account(MOST[TOKENS], 0, None)


def test_a_result_that_cannot_be_used_is_booked_at_its_bill(desk: Desk) -> None:
    ada = desk.asker("ada", Ask())
    teller.usual = reply(BILL, cost=float("nan"))
    desk.work(desk.pool())
    assert ada.state().told == ["error bad_result"]
    assert desk.account() == Account(BOOKED[TOKENS], 0, None)


def test_an_effect_whose_workers_all_died_is_booked_at_its_most(desk: Desk) -> None:
    ada = desk.asker("ada", Ask())
    for n in range(3):
        teller.answers.append(Crash())
        crashing(desk, desk.pool(f"pool {n}"))
        desk.expire(20)
    desk.work(desk.pool("last"))
    assert (len(teller.calls), ada.state().told) == (3, ["timeout expiries_exhausted"])
    assert desk.account() == Account(3 * MOST[TOKENS], 0, None)


def test_a_call_that_costs_more_than_was_set_aside_is_booked_in_full(desk: Desk) -> None:
    desk.limit(MOST[TOKENS])
    ada = desk.asker("ada", Ask(), Ask())
    teller.answers.append(Usage(10 * MOST[TOKENS], 0))
    desk.work(desk.pool(), seconds=10)
    assert sorted(ada.state().told) == ["error over_budget", "ok"]
    assert desk.account() == Account(10 * MOST[TOKENS], 0, MOST[TOKENS])


# -- over budget -----------------------------------------------------------------------------------


def test_over_budget_no_call_is_made_and_the_receipt_says_so(desk: Desk) -> None:
    desk.limit(MOST[TOKENS] - 1)
    ada = desk.asker("ada", Ask())
    desk.work(desk.pool())
    assert (teller.calls, ada.state().told) == ([], ["error over_budget"])
    [letter] = desk.letters("speech")
    assert letter.code == "over_budget"
    assert desk.account() == Account(0, 0, MOST[TOKENS] - 1)


def test_a_tick_in_which_all_were_refused_is_no_reason_to_rest(desk: Desk) -> None:
    desk.limit(0)
    desk.asker("ada", *[Ask() for _ in range(3)])
    [runner] = [one for one in desk.pool().runners if one.worker == "pool/speech"]
    tick = runner.tick()
    assert (tick.claimed, tick.turned_away, tick.moved) == (0, 3, True)


def test_exactly_what_is_left_is_enough(desk: Desk) -> None:
    desk.limit(MOST[TOKENS])
    ada = desk.asker("ada", Ask())
    desk.work(desk.pool())
    assert ada.state().told == ["ok"]


def test_a_budget_of_each_world_refuses_one_world_and_no_other(desk: Desk) -> None:
    desk.limit(MOST[MONEY], MONEY, budget.EACH)
    teller.usual = Usage(MOST[TOKENS] - 100, 100)
    ada, bob = desk.asker("ada", Ask()), desk.asker("bob", Ask())
    pool = desk.pool()
    desk.work(pool)
    ada.send(Ask())
    desk.work(pool)
    assert ada.state().told == ["ok", "error over_budget"]
    assert bob.state().told == ["ok"]
    [letter] = desk.letters("speech")
    assert "Asker/ada" in letter.error


def test_what_does_not_fit_beside_others_waits_for_them_and_is_done(desk: Desk) -> None:
    desk.limit(MOST[TOKENS] + BOOKED[TOKENS])
    ada, bob = desk.asker("ada", Ask()), desk.asker("bob", Ask())
    pool = desk.pool()
    waiting: list[queue.Counts] = []

    def look() -> Usage:
        waiting.append(desk.counts("speech"))
        return BILL

    teller.usual = look
    # No time passes: what has ended wakes what waits.
    desk.work(pool)
    assert waiting[0].delayed == 1, "one of them has to wait"
    assert ada.state().told == bob.state().told == ["ok"]
    assert desk.letters("speech") == []


def full(desk: Desk) -> None:
    """A budget that a call under way has to itself, which would do for each of the others."""
    desk.asker("first", Ask())
    teller.answers.append(Crash())
    crashing(desk, desk.pool("dies"))
    desk.limit(desk.account().reserved + 1)


def wait_ns(desk: Desk, seq: int) -> int:
    """How long an effect is put off."""
    item = desk.store.read(lambda txn: items.load(txn, keys_of(QUEUE), tuples.pack_int(seq)))
    return item.not_before_ns - item.enqueued_ns


def test_the_more_of_a_world_are_waiting_the_longer_its_next_is_put_off(desk: Desk) -> None:
    """So a long line is looked at no more often than a short one."""
    full(desk)
    pool = desk.pool()
    many = desk.asker("many", *[Ask() for _ in range(40)])
    desk.work(pool)
    assert desk.counts("speech").delayed == 40
    many.send(Ask())
    desk.work(pool)
    assert wait_ns(desk, 42) >= admission.LATER_NS + 40 * admission.LATER_EACH_NS
    assert len(teller.calls) == 1


def test_a_world_is_put_off_for_less_than_another_that_has_more_waiting(desk: Desk) -> None:
    full(desk)
    pool = desk.pool()
    many = desk.asker("many", *[Ask() for _ in range(300)])
    desk.work(pool)
    desk.asker("few", Ask())
    many.send(Ask())
    desk.work(pool)
    assert desk.counts("speech").delayed == 302
    apart_ns = wait_ns(desk, 303) - wait_ns(desk, 302)
    assert apart_ns >= 300 * admission.LATER_EACH_NS - 2 * admission.LATER_STEP_NS > 0


def test_those_that_have_to_wait_are_asked_again_many_at_a_time(desk: Desk) -> None:
    full(desk)
    desk.asker("many", *[Ask() for _ in range(90)])
    desk.work(desk.pool())
    assert desk.counts("speech").delayed == 90
    assert len({wait_ns(desk, seq) // MS for seq in range(2, 92)}) <= 3


def test_of_a_world_that_has_to_wait_one_is_asked_in_a_batch(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    full(desk)
    desk.asker("many", *[Ask() for _ in range(40)])
    desk.asker("few", Ask(), Ask())
    asked: list[str] = []
    reserve = budget.reserve.fn

    def asking(txn: Any, universe: str, world: str, *args: Any) -> Any:
        asked.append(world)
        return reserve(txn, universe, world, *args)

    monkeypatch.setattr(budget.reserve, "fn", asking)
    desk.work(desk.pool())
    assert desk.counts("speech").delayed == 42
    assert len(asked) == len(set(asked)) == 2


def test_what_has_its_budget_set_aside_already_waits_behind_nobody(desk: Desk) -> None:
    """It is what the others wait for."""
    pool = desk.pool()
    ada = desk.asker("ada", Ask())
    holding = claimed(desk, pool)
    ada.send(Ask(max_tokens=101))
    desk.think()
    desk.limit(charges(101)[TOKENS])
    desk.store.transact(queue.release, [holding])
    desk.store.transact(queue.release, [claimed(desk, pool)])
    teller.usual = Usage(0, 0)
    desk.work(pool)
    assert ada.state().told == ["ok", "ok"]
    assert [call.idempotency_key for call in teller.calls] == [
        f"1-{intent.hex()}" for intent in ada.state().intents
    ]


def test_of_those_that_wait_the_highest_priority_is_begun_first(desk: Desk) -> None:
    """However long the others have waited, and whatever the clock says."""
    desk.limit(MOST[TOKENS])
    teller.usual = Usage(0, 0)
    ada = desk.asker("ada", Ask())
    pool = desk.pool()
    first = claimed(desk, pool)
    for _ in range(20):
        ada.send(Ask())
    desk.work(pool, seconds=3)
    ada.send(Ask(priority=5))
    desk.work(pool, seconds=0.1)
    assert (desk.counts("speech").delayed, teller.calls) == (21, [])
    [urgent] = ada.state().intents[-1:]
    intent = codec.unpack_as(Intent, first.payload)
    close = codec.pack((U, intent.intent_hash.hex(), []))
    then = queue.Then(0, budget.close.name, close)
    desk.store.transact(queue.settle, [first.token], [], queue.Budget(), [then])
    desk.work(pool)
    assert teller.calls[0].idempotency_key == f"1-{urgent.hex()}"
    assert len(teller.calls) == 21, "each that ended has woken the next"


def test_a_claim_that_is_handed_back_unbegun_sets_nothing_aside(desk: Desk) -> None:
    desk.asker("ada", Ask())
    pool = desk.pool()
    [runner] = [one for one in pool.runners if one.worker == "pool/speech"]
    works = runner._claimer.claim(1, runner.policy, Tick(), lambda claim: False)
    assert desk.account().reserved == MOST[TOKENS]
    runner._claimer.hand_back(works, Tick())
    assert desk.counts("speech").ready == 1
    assert desk.account() == Account(0, 0, None)


def test_a_raised_limit_wakes_those_that_waited(desk: Desk) -> None:
    full(desk)
    bob = desk.asker("bob", Ask())
    pool = desk.pool()
    desk.work(pool)
    assert desk.counts("speech").delayed == 1
    desk.limit(10 * MOST[TOKENS])
    desk.work(pool)
    assert bob.state().told == ["ok"]


def test_what_waited_for_others_in_vain_is_over_budget(desk: Desk) -> None:
    desk.limit(2 * MOST[TOKENS] - 1)
    teller.usual = Usage(MOST[TOKENS], 0)
    ada = desk.asker("ada", Ask(), Ask())
    desk.work(desk.pool(), seconds=5)
    assert sorted(ada.state().told) == ["error over_budget", "ok"]
    assert len(teller.calls) == 1


def test_a_pool_enforces_the_limits_of_its_own_store_and_of_no_other() -> None:
    limited = Desk()
    limited.limit(0)
    free = Desk()
    asked = [desk.asker("ada", Ask()) for desk in (limited, free)]
    for desk in (limited, free):
        desk.work(desk.pool())
    assert [handle.state().told for handle in asked] == [["error over_budget"], ["ok"]]
    assert (limited.account().spent, free.account().spent) == (0, BOOKED[TOKENS])


def test_a_raised_limit_lets_the_next_call_through(desk: Desk) -> None:
    desk.limit(0)
    ada = desk.asker("ada", Ask())
    pool = desk.pool()
    desk.work(pool)
    desk.limit(None)
    ada.send(Ask())
    desk.work(pool)
    assert ada.state().told == ["error over_budget", "ok"]


def test_an_effect_that_was_over_budget_can_be_redriven(desk: Desk) -> None:
    desk.limit(0)
    ada = desk.asker("ada", Ask())
    pool = desk.pool()
    desk.work(pool)
    desk.limit(None)
    [letter] = desk.letters("speech")
    desk.store.transact(receipts.redrive_effects, U, "speech", [letter.seq])
    desk.work(pool)
    assert ada.state().told == ["error over_budget", "ok"]
    assert desk.account() == Account(BOOKED[TOKENS], 0, None)


# -- prices and parameters -------------------------------------------------------------------------


@pytest.mark.parametrize("scope", [UNIVERSE, budget.EACH])
def test_where_money_is_limited_a_call_of_unknown_price_is_not_made(desk: Desk, scope: str) -> None:
    desk.limit(10**9, MONEY, scope)
    ada = desk.asker("ada", Ask(model="unknown"))
    desk.work(desk.pool())
    assert (teller.calls, ada.state().told) == ([], ["error not_configured"])
    assert desk.account().reserved == 0


def test_where_tokens_are_limited_a_call_of_unknown_price_is_made_and_counted(desk: Desk) -> None:
    desk.limit(10**9)
    ada = desk.asker("ada", Ask(model="unknown"))
    desk.work(desk.pool())
    assert ada.state().told == ["ok"]
    assert (desk.account().spent, desk.account(MONEY).spent) == (BOOKED[TOKENS], 0)


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
def test_an_intent_whose_most_cannot_be_told_is_refused_and_holds_up_nobody(
    desk: Desk, name: str
) -> None:
    ada = desk.asker("ada", Ask())
    good = desk.intent("speech")
    bad = msgspec.structs.replace(
        good, intent_hash=b"x" * 32, params=codec.pack(BAD_PARAMS[name]), priority=9
    )
    desk.store.transact(publish.publish, [bad])
    desk.work(desk.pool())
    assert len(teller.calls) == 1
    assert ada.state().told[-1] == "ok"
    [letter] = desk.letters("speech")
    assert letter.code == "invalid"
    assert desk.account() == Account(BOOKED[TOKENS], 0, None)


def test_a_price_beyond_all_bounds_refuses_the_call_and_ends_no_pool(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    dear = Endpoint("http://localhost/v1", "", {"m": Price(1e300, 1e300)})
    monkeypatch.setattr(speech, "_endpoint", dear)
    ada = desk.asker("ada", Ask())
    desk.work(desk.pool())
    assert (teller.calls, ada.state().told) == ([], ["error invalid"])


# -- nobody waits any more -------------------------------------------------------------------------


def test_the_effect_of_a_deleted_world_is_dropped_and_books_nothing(desk: Desk) -> None:
    ada = desk.asker("ada", Ask())
    ada.delete()
    desk.work(desk.pool())
    assert teller.calls == []
    assert desk.counts("speech") == queue.Counts(done=1)
    assert desk.account() == Account(0, 0, None)


def test_the_reservation_of_a_call_whose_world_was_deleted_meanwhile_is_closed(
    desk: Desk,
) -> None:
    ada = desk.asker("ada", Ask())
    teller.answers.append(Crash())
    crashing(desk, desk.pool("first"))
    ada.delete()
    desk.expire(20)
    desk.work(desk.pool("second"))
    assert len(teller.calls) == 1
    assert desk.account() == Account(MOST[TOKENS], 0, None)


def test_a_cancelled_call_of_which_nobody_ever_hears_lapses_and_is_booked_at_its_most(
    desk: Desk,
) -> None:
    ada = desk.asker("ada", Ask())
    teller.answers.append(Crash())
    crashing(desk, desk.pool("first"))
    ada.send(Drop())
    desk.think()
    assert ada.state().told == ["error cancelled"]
    assert desk.account() == Account(0, MOST[TOKENS], None)
    desk.expire(LAPSE_S + 3 * speech.timeout_s)
    ada.send(Ask())
    desk.work(desk.pool("second"))
    assert desk.account() == Account(MOST[TOKENS] + BOOKED[TOKENS], 0, None)


def claimed_intent(desk: Desk, pool: AdapterPool) -> Intent:
    """An effect whose worker is gone, and whose bill may still come."""
    intent = desk.intent("speech")
    teller.answers.append(Crash())
    crashing(desk, pool)
    return intent


def test_a_late_bill_of_what_was_cancelled_takes_the_place_of_its_reservation(desk: Desk) -> None:
    ada = desk.asker("ada", Ask())
    intent = claimed_intent(desk, desk.pool())
    ada.send(Drop())
    desk.think()
    bill = [Charge(TOKENS, 40)]
    desk.store.transact(receipts.book_late, intent, 1, bill)
    assert desk.account() == Account(40, 0, None)


def test_a_late_call_that_was_cancelled_and_has_no_bill_is_booked_at_its_most(desk: Desk) -> None:
    ada = desk.asker("ada", Ask())
    intent = claimed_intent(desk, desk.pool())
    ada.send(Drop())
    desk.think()
    desk.store.transact(receipts.book_late, intent, 1, None)
    assert desk.account() == Account(MOST[TOKENS], 0, None)


def test_a_late_bill_of_what_another_will_do_again_takes_the_place_of_its_reservation(
    desk: Desk,
) -> None:
    ada = desk.asker("ada", Ask())
    intent = claimed_intent(desk, desk.pool("first"))
    desk.store.transact(receipts.book_late, intent, 1, [Charge(TOKENS, 40)])
    desk.store.transact(receipts.book_late, intent, 1, None)
    assert desk.account() == Account(40, 0, None)
    desk.expire(20)
    desk.work(desk.pool("second"))
    assert ada.state().told == ["ok"]
    assert desk.account() == Account(40 + BOOKED[TOKENS], 0, None)


# -- with threads ----------------------------------------------------------------------------------


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Live:
    """A runtime with real threads, and its accounts."""

    def __init__(self, runtime: hf.Runtime) -> None:
        self.runtime = runtime
        self.store: Store = runtime.store
        self.ada = runtime.world(Asker, "ada")
        self.ada.create()

    def account(self) -> Account:
        return self.store.read(budget.account, U, UNIVERSE, TOKENS)

    def told(self) -> list[str]:
        state: list[str] = self.ada.state().told
        return state


@contextmanager
def living() -> Iterator[Live]:
    teller.reset()
    with app.open("memory:") as runtime:
        yield Live(runtime)


def test_a_coroutine_that_is_cancelled_while_it_runs_is_booked_at_its_most() -> None:
    entered = threading.Event()

    async def hang() -> Usage:
        entered.set()
        await asyncio.sleep(3600)
        raise AssertionError

    with living() as live:
        teller.answers.append(hang)
        live.ada.send(Ask(kind="talk"))
        assert entered.wait(LONG_S)
        live.ada.send(Drop())
        until(lambda: live.told() == ["error cancelled"])
        until(lambda: live.account() == Account(MOST[TOKENS], 0, None))


def test_a_function_that_is_cancelled_while_it_runs_is_booked_at_its_bill_when_it_comes() -> None:
    entered, leave = threading.Event(), threading.Event()

    def hang() -> Usage:
        entered.set()
        assert leave.wait(LONG_S)
        return BILL

    with living() as live:
        teller.answers.append(hang)
        live.ada.send(Ask(kind="speech"))
        assert entered.wait(LONG_S)
        live.ada.send(Drop())
        until(lambda: teller.calls[0].cancelled)
        assert live.account() == Account(0, MOST[TOKENS], None)
        leave.set()
        until(lambda: live.account() == Account(BOOKED[TOKENS], 0, None))
        until(lambda: live.told() == ["error cancelled"])


def test_a_function_that_is_cancelled_and_then_fails_for_free_books_nothing() -> None:
    entered, leave = threading.Event(), threading.Event()

    def hang() -> Exception:
        entered.set()
        assert leave.wait(LONG_S)
        return Unavailable(status=503)

    with living() as live:
        teller.answers.append(hang)
        live.ada.send(Ask(kind="speech"))
        assert entered.wait(LONG_S)
        live.ada.send(Drop())
        until(lambda: teller.calls[0].cancelled)
        leave.set()
        until(lambda: live.account() == Account(0, 0, None))


def test_a_function_that_is_out_of_time_is_booked_at_its_most_once_whatever_it_brings_later() -> (
    None
):
    leave, left = threading.Event(), threading.Event()

    def hang() -> Usage:
        assert leave.wait(LONG_S)
        left.set()
        return BILL

    with living() as live:
        teller.answers.append(hang)
        live.ada.send(Ask(kind="short"))
        until(lambda: live.told() == ["timeout timeout"])
        assert live.account() == Account(MOST[TOKENS], 0, None)
        leave.set()
        assert left.wait(LONG_S)
        live.ada.send(Ask(kind="speech"))
        until(lambda: len(live.told()) == 2)
        assert live.account() == Account(MOST[TOKENS] + BOOKED[TOKENS], 0, None)


@pytest.mark.parametrize("kind", ["again", "again.talk"])
def test_a_call_that_is_out_of_time_is_booked_at_its_most_and_the_next_attempt_by_its_bill(
    kind: str,
) -> None:
    leave = threading.Event()

    def hang() -> Usage:
        assert leave.wait(LONG_S)
        return BILL

    async def hang_async() -> Usage:
        await asyncio.sleep(3600)
        raise AssertionError

    with living() as live:
        teller.answers.append(hang if kind == "again" else hang_async)
        live.ada.send(Ask(kind=kind))
        until(lambda: live.told() == ["ok"])
        assert live.account() == Account(MOST[TOKENS] + BOOKED[TOKENS], 0, None)
        leave.set()


# -- never more than there is ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["talk", "speech"])
def test_pools_that_work_at_the_same_time_never_overspend(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "LATER_NS", 20 * MS)
    chance = random.Random(5)
    intents, worlds = 60, 4
    limit = 12 * MOST[TOKENS]
    seen: list[Account] = []
    bills: list[int] = []
    lock = threading.Lock()
    teller.reset()
    with stores.open("memory:") as store:
        store.transact(budget.limit, U, UNIVERSE, TOKENS, limit)

        def answer() -> Usage:
            account: Account = store.read(budget.account, U, UNIVERSE, TOKENS)
            with lock:
                seen.append(account)
                bills.append(chance.randrange(MOST[TOKENS] + 1))
                return Usage(bills[-1], 0)

        teller.usual = answer
        options = {"universe": U, "adapters": app.effects, "kinds": [kind]}
        pools = [AdapterPool(store, worker=f"pool {n}", **options) for n in range(3)]
        with app.open(store, roles=("orchestrator", "world")) as runtime:
            handles = [runtime.world(Asker, f"w{n}") for n in range(worlds)]
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
                pool.join(LONG_S)
            told = [one for handle in handles for one in handle.state().told]
        assert set(told) <= {"ok", "error over_budget"}
        assert told.count("ok") == len(bills) >= 12
        account = store.read(budget.account, U, UNIVERSE, TOKENS)
        assert account == Account(sum(bills), 0, limit)
        assert account.spent <= limit
        assert all(one.spent + one.reserved <= limit for one in seen)


class Plan(msgspec.Struct, frozen=True):
    world: int
    max_tokens: int
    # What becomes of its first call, and how much of its most it is billed at.
    end: str
    share: float


PLANS = st.lists(
    st.builds(
        Plan,
        st.integers(0, 2),
        st.sampled_from([1, 50, 400]),
        st.sampled_from(["ok", "ok", "free", "broke", "crash"]),
        st.floats(0, 1),
    ),
    max_size=8,
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(plans=PLANS, limit=st.integers(0, 2500), each=st.integers(0, 1500))
def test_whatever_calls_cost_and_however_they_end_no_budget_is_exceeded(
    plans: list[Plan], limit: int, each: int
) -> None:
    desk = Desk()
    desk.limit(limit)
    desk.limit(each, TOKENS, budget.EACH)
    handles = [desk.world(Asker, f"w{n}") for n in range(3)]
    for plan in plans:
        handles[plan.world].send(Ask(max_tokens=plan.max_tokens))
    desk.think()
    ends = deque(plans)

    def answer() -> Any:
        within(desk, handles)
        plan = ends.popleft() if ends else Plan(0, 1, "ok", 0.0)
        if plan.end == "ok":
            # No call is billed at more than the least that was set aside for any.
            return Usage(int(charges(1)[TOKENS] * plan.share), 0)
        return {"free": Answered(status=400), "broke": OSError(), "crash": Crash()}[plan.end]

    teller.usual = answer
    pools = [desk.pool("0"), desk.pool("1")]
    for n in range(200):
        try:
            desk.work(pools[n % 2], seconds=1)
        except Crash:
            pools[n % 2] = desk.pool(f"again {n}")
            desk.expire(20)
        within(desk, handles)
        if sum(len(handle.state().told) for handle in handles) == len(plans):
            break
    else:
        raise AssertionError("some were never told")
    assert desk.account().reserved == 0
    assert desk.account().spent == sum(
        desk.account(TOKENS, desk.id(handle)).spent for handle in handles
    )


def within(desk: Desk, handles: list[Any]) -> None:
    for scope in (UNIVERSE, *map(desk.id, handles)):
        account = desk.account(TOKENS, scope)
        assert account.limit is not None
        assert account.spent + account.reserved <= account.limit

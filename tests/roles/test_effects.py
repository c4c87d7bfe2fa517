"""Effects: whatever happens to adapters, an intent ends with exactly one receipt."""

from __future__ import annotations

import asyncio
from itertools import product
from typing import Any

import pytest

import holdfast as hf
from holdfast import codec
from holdfast.clock import S
from holdfast.config import BATCH_MAX, MESSAGE_BYTES_MAX
from holdfast.durable import queue
from holdfast.errors import Invalid, NotFound
from holdfast.messages import Intent, Receipt, Status
from holdfast.roles import receipts
from holdfast.world import publish
from tests.roles.rig import Rig
from tests.roles.shop import Buyer, Dropped, Ordered, Shipped, app, pay
from tests.world.rig import FAULTS, Crash

MODULES = ("holdfast.roles.adapter", "holdfast.roles.receipts", "holdfast.app.declare")

PAY = publish.effects("shop", "pay")


def receipts_of(handle: hf.WorldHandle[Buyer]) -> list[str]:
    return handle.state().told


# -- a call and its receipt ----------------------------------------------------------------------


def test_a_receipt_brings_back_the_value_and_the_tag(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered("tea", tag="t"))
    rig.work(rig.pool())
    assert receipts_of(ada) == ["ok done 1 t"]
    assert [call.args for call in rig.outside.calls] == [("tea",)]
    assert rig.counts() == queue.Counts(done=1)


def test_an_async_effect_gets_typed_arguments_and_says_what_it_cost(rig: Rig) -> None:
    ada = rig.buyer("ada", Shipped(2.5))
    rig.work(rig.pool())
    assert (receipts_of(ada), ada.state().cost) == (["ok 2.5"], 0.5)


def test_a_pool_does_the_kinds_it_is_told_to_and_leaves_the_others(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered(), Shipped(1.0))
    rig.work(rig.pool(kinds=["ship"]))
    assert receipts_of(ada) == ["ok 1.0"]
    assert rig.counts().ready == 1
    with pytest.raises(Invalid):
        rig.pool(kinds=["no such kind"])


def test_a_replay_gives_the_state_that_the_receipts_made(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered(times=3), Shipped(1.0))
    rig.work(rig.pool())
    rig.host = rig.worker(incarnation="2", idle_s=1e6)
    rig.expire()
    ada.send(Ordered())
    rig.work(rig.pool())
    assert len(receipts_of(ada)) == 5
    assert rig.blocker(ada) == ""


# -- adapters that die ---------------------------------------------------------------------------


def test_an_adapter_that_dies_after_the_call_calls_again_with_the_same_key(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered())
    rig.outside.answers.append(Crash())
    with pytest.raises(Crash):
        rig.work(rig.pool("first"))
    rig.work(rig.pool("second"))
    assert receipts_of(ada) == [], "the first one's claim has not run out"
    rig.expire(12)
    rig.work(rig.pool("second"))
    assert receipts_of(ada) == ["ok done 2"]
    assert [call.attempt for call in rig.outside.calls] == [1, 2]
    assert len(rig.outside.keys) == 1


@pytest.mark.parametrize(("fault", "commit"), list(product(FAULTS, (1, 2))))
def test_whichever_commit_of_an_adapter_goes_wrong_there_is_one_receipt(
    rig: Rig, fault: str, commit: int
) -> None:
    ada = rig.buyer("ada", Ordered())
    pool = rig.pool()
    rig.backend.arm({commit: fault})
    try:
        for runner in pool.runners:
            runner.tick()
    except Crash:
        pool = rig.pool("next")
    rig.backend.arm({})
    rig.work(pool, seconds=40)
    assert [told.split()[:2] for told in receipts_of(ada)] == [["ok", "done"]]
    assert len(rig.outside.keys) == 1
    assert rig.counts() == queue.Counts(done=1)


def test_a_late_answer_is_refused_and_leaves_no_receipt(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered())
    other = rig.pool("other")

    def slowly() -> str:
        rig.expire(12)
        rig.work(other)
        return "late"

    rig.outside.answers += [slowly, "in time"]
    rig.work(rig.pool("slow"))
    assert receipts_of(ada) == ["ok in time 2"]
    assert len(rig.outside.keys) == 1


def test_a_late_answer_that_comes_before_the_second_one_leaves_no_receipt_either(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered())

    def slowly() -> str:
        rig.expire(12)
        return "late"

    rig.outside.answers += [slowly, "in time"]
    slow = rig.pool("slow", kinds=["pay"])
    [runner, *_] = slow.runners
    assert runner.tick().lost == 1
    assert rig.depth(ada) == 0
    rig.work(slow)
    assert receipts_of(ada) == ["ok in time 2"]


def test_a_second_receipt_for_an_intent_changes_nothing(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered())
    intent = rig.intent()
    rig.work(rig.pool())
    for value in ("done", "something else"):
        told = Receipt(intent.intent_hash, "pay", Status.OK, codec.pack(value))
        rig.store.transact(receipts.receive, intent, told)
    rig.think()
    assert receipts_of(ada) == ["ok done 1"]


def test_an_intent_that_asks_for_more_time_than_its_kind_gets_it(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered(timeout_s=100))
    rig.outside.answers.append(lambda: rig.expire(90) or "at last")
    rig.work(rig.pool())
    assert receipts_of(ada) == ["ok at last 1"]


# -- the end of attempts -------------------------------------------------------------------------


def test_failures_are_tried_again_with_backoff(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered())
    rig.outside.answers += [OSError("down"), OSError("down")]
    pool = rig.pool()
    rig.work(pool)
    assert (len(rig.outside.calls), rig.counts().delayed) == (1, 1)
    rig.work(pool, seconds=5)
    assert receipts_of(ada) == ["ok done 3"]
    assert len(rig.outside.keys) == 1


def test_used_up_failures_end_in_an_error_receipt_and_a_dead_letter(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered(tag="t"))
    rig.outside.answers += [OSError("down")] * 9
    rig.work(rig.pool(), seconds=60)
    assert receipts_of(ada) == ["error handler_error 3 t"]
    assert len(rig.outside.calls) == 3
    [letter] = rig.letters()
    assert (letter.code, letter.failures) == ("handler_error", 3)
    assert "down" in letter.error


def test_used_up_expiries_end_in_a_timeout_receipt(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered())
    rig.outside.answers += [Crash()] * 9
    for n in range(3):
        with pytest.raises(Crash):
            rig.work(rig.pool(f"pool-{n}"))
        rig.expire(12)
    rig.work(rig.pool("last"))
    assert receipts_of(ada) == ["timeout expiries_exhausted 3"]
    assert len(rig.outside.calls) == 3


def test_an_effect_that_kills_its_worker_takes_no_other_with_it(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered(times=5), Ordered("poison"), Ordered(times=5))
    rig.outside.deadly = Crash()
    for n in range(3):
        with pytest.raises(Crash):
            rig.work(rig.pool(f"pool-{n}"))
        rig.expire(12)
    rig.work(rig.pool("last"))
    told = receipts_of(ada)
    assert told.count("timeout expiries_exhausted 3") == 1
    assert [text.split()[0] for text in told].count("ok") == 10


def test_an_async_call_that_takes_too_long_ends_in_a_timeout_receipt(rig: Rig) -> None:
    ada = rig.buyer("ada", Shipped(1.0))
    rig.outside.answers += [lambda: asyncio.sleep(60)] * 2
    rig.work(rig.pool(), seconds=5)
    assert receipts_of(ada) == ["timeout timeout"]


@pytest.mark.parametrize(
    ("answer", "code", "calls"),
    [
        (7, "bad_result", 1),
        (object(), "bad_result", 1),
        ("x" * (MESSAGE_BYTES_MAX + 1), "bad_result", 1),
        (ValueError("no"), "handler_error", 3),
        (SystemExit(3), "exited", 3),
    ],
    ids=["another type", "no data", "too large", "raises", "exits"],
)
def test_an_effect_that_misbehaves_ends_in_an_error_receipt_and_harms_nobody(
    rig: Rig, answer: Any, code: str, calls: int
) -> None:
    ada = rig.buyer("ada", Ordered())
    rig.outside.answers += [answer] * calls
    pool = rig.pool()
    rig.work(pool, seconds=30)
    assert receipts_of(ada) == [f"error {code} {calls}"]
    assert len(rig.outside.calls) == calls
    bob = rig.buyer("bob", Ordered())
    rig.work(pool)
    assert receipts_of(bob) == ["ok done 1"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"attempts": 0},
        {"timeout_s": 0},
        {"timeout_s": float("nan")},
        {"timeout_s": float("inf")},
        {"concurrency": 0},
        {"rate_per_s": 0},
    ],
    ids=str,
)
def test_an_effect_is_refused_where_it_is_declared_wrongly(wrong: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        hf.effect("x", **wrong)(lambda call: None)


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan"), float("inf"), 1e30])
def test_an_order_with_a_wrong_timeout_fails_its_event_only(rig: Rig, timeout_s: float) -> None:
    ada = rig.buyer("ada", Ordered(timeout_s=timeout_s), Ordered())
    assert [entry.outcome for entry in ada.journal()] == ["failed", "ok"]


def test_arguments_of_another_type_fail_the_event_that_wants_them() -> None:
    with pytest.raises(Invalid):
        app.effect_call(pay, (5,))
    with pytest.raises(Invalid):
        app.effect_call(pay, ())


def test_a_kind_of_the_runtime_is_nobody_elses() -> None:
    with pytest.raises(Invalid):
        hf.App("x", effects=[hf.effect("timer.set")(lambda call: None)])


# -- cancelling ----------------------------------------------------------------------------------


def test_an_effect_that_waits_is_cancelled_and_its_receipt_keeps_the_tag(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered(tag="t"), Dropped())
    rig.work(rig.pool())
    assert receipts_of(ada) == ["error cancelled 0 t"]
    assert rig.outside.calls == []


def test_an_effect_that_waits_for_its_next_attempt_is_cancelled(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered())
    rig.outside.answers.append(OSError("down"))
    pool = rig.pool()
    rig.work(pool)
    ada.send(Dropped())
    rig.work(pool, seconds=60)
    assert receipts_of(ada) == ["error cancelled 0"]
    assert len(rig.outside.calls) == 1


def test_an_effect_that_is_being_done_is_cancelled_and_what_it_brings_is_refused(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered())
    rig.outside.answers.append(lambda: (ada.send(Dropped()), rig.think(), "done")[-1])
    rig.work(rig.pool())
    assert receipts_of(ada) == ["error cancelled 0"]
    assert len(rig.outside.calls) == 1
    assert rig.counts() == queue.Counts(done=1)


def test_cancelling_twice_or_afterwards_adds_no_receipt(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered(), Dropped(), Dropped(), Ordered("jam"))
    rig.work(rig.pool())
    ada.send(Dropped(1))
    rig.think()
    assert receipts_of(ada) == ["error cancelled 0", "ok done 1"]


# -- worlds that go ------------------------------------------------------------------------------


def test_the_effect_of_a_deleted_world_ends_without_a_receipt_and_without_harm(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered(times=2))
    bob = rig.buyer("bob", Ordered())
    rig.outside.answers += ["done", "done", OSError("down")]
    ada.delete()
    rig.work(rig.pool(), seconds=60)
    assert receipts_of(bob) == ["ok done 1"]
    assert rig.counts().ready == rig.counts().claimed == rig.counts().delayed == 0


def test_a_paused_world_finds_its_receipt_when_it_goes_on(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered())
    ada.pause()
    rig.work(rig.pool())
    assert receipts_of(ada) == []
    ada.resume()
    rig.expire()
    rig.think()
    assert receipts_of(ada) == ["ok done 1"]


# -- redrive -------------------------------------------------------------------------------------


def died(rig: Rig) -> tuple[hf.WorldHandle[Buyer], queue.Dead]:
    ada = rig.buyer("ada", Ordered())
    rig.outside.answers += [OSError("down")] * 3
    rig.work(rig.pool(), seconds=60)
    [letter] = rig.letters()
    return ada, letter


def test_a_redriven_effect_is_a_new_intent_linked_to_the_old(rig: Rig) -> None:
    ada, letter = died(rig)
    [made] = rig.store.transact(receipts.redrive_effects, "shop", "pay", [letter.seq])
    intent = rig.intent()
    assert intent.intent_hash == made
    assert intent.redrive_of == ada.state().intents[0] != made
    rig.work(rig.pool())
    assert receipts_of(ada) == ["error handler_error 3", "ok done 1 again"]
    assert len(rig.outside.keys) == 2
    assert rig.letters() == []


def test_a_redriven_effect_may_die_and_be_redriven_again(rig: Rig) -> None:
    ada, letter = died(rig)
    rig.store.transact(receipts.redrive_effects, "shop", "pay", [letter.seq])
    rig.outside.answers += [OSError("down")] * 3
    rig.work(rig.pool(), seconds=60)
    [letter] = rig.letters()
    rig.store.transact(receipts.redrive_effects, "shop", "pay", [letter.seq])
    rig.work(rig.pool())
    assert [told.split()[0] for told in receipts_of(ada)] == ["error", "error", "ok"]


def test_a_dead_effect_is_redriven_once(rig: Rig) -> None:
    _, letter = died(rig)
    rig.store.transact(receipts.redrive_effects, "shop", "pay", [letter.seq])
    with pytest.raises(NotFound):
        rig.store.transact(receipts.redrive_effects, "shop", "pay", [letter.seq])
    assert rig.counts().ready == 1


def test_the_effect_of_a_deleted_world_is_not_redriven(rig: Rig) -> None:
    ada, letter = died(rig)
    ada.delete()
    with pytest.raises(Invalid):
        rig.store.transact(receipts.redrive_effects, "shop", "pay", [letter.seq])
    assert len(rig.letters()) == 1


# -- order ---------------------------------------------------------------------------------------


def crowd(rig: Rig, world_id: str, n: int) -> None:
    """As many intents of one world, put as `publish.dispatch` puts them."""
    for start in range(0, n, BATCH_MAX):
        payloads = [
            codec.pack(Intent("shop", world_id, b"%d" % i, "pay", b"", "crowd", b"", 0))
            for i in range(start, min(start + BATCH_MAX, n))
        ]
        rig.store.transact(queue.put_many, PAY, payloads, 0, 0, world_id, publish.WILL)


def test_a_world_with_100_000_intents_does_not_starve_another(rig: Rig) -> None:
    crowd(rig, rig.id(rig.world(Buyer, "crowd")), 100_000)
    ada = rig.buyer("ada", Ordered("mine"))
    claims = rig.store.transact(queue.claim, PAY, "me", 2, S)
    assert rig.id(ada) in [codec.unpack_as(Intent, claim.payload).world_id for claim in claims]


def test_an_urgent_intent_of_a_crowded_world_does_not_let_it_overtake_others(rig: Rig) -> None:
    crowded = rig.buyer("crowd")
    crowd(rig, rig.id(crowded), 1000)
    crowded.send(Ordered("urgent", priority=9))
    rig.think()
    [urgent] = rig.store.transact(queue.claim, PAY, "me", 1, S)
    assert urgent.priority == 9
    ada = rig.buyer("ada", Ordered("mine"))
    claims = rig.store.transact(queue.claim, PAY, "me", 2, S)
    assert rig.id(ada) in [codec.unpack_as(Intent, claim.payload).world_id for claim in claims]


def test_cancelled_intents_do_not_count_against_the_next_ones(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered(times=50), *[Dropped(n) for n in reversed(range(50))])
    bob = rig.buyer("bob", Ordered(times=10))
    ada.send(Ordered())
    rig.think()
    claims = rig.store.transact(queue.claim, PAY, "me", 2, S)
    worlds = {codec.unpack_as(Intent, claim.payload).world_id for claim in claims}
    assert worlds == {rig.id(ada), rig.id(bob)}


def test_larger_priorities_are_done_first(rig: Rig) -> None:
    rig.buyer("ada", *[Ordered(str(priority), priority=priority) for priority in (0, 9, -1, 5)])
    rig.work(rig.pool())
    assert [call.args for call in rig.outside.calls] == [("9",), ("5",), ("0",), ("-1",)]


def test_every_call_of_one_intent_has_one_key_and_no_other_intent_has_it(rig: Rig) -> None:
    rig.buyer("ada", Ordered(times=5))
    rig.outside.answers += [OSError("down"), Crash()]
    with pytest.raises(Crash):
        rig.work(rig.pool("first"), seconds=1)
    rig.expire(12)
    rig.work(rig.pool("second"), seconds=60)
    assert len(rig.outside.calls) == 7
    assert len(rig.outside.keys) == 5

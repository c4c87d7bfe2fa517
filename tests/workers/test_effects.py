"""Effects: an intent ends with exactly one receipt, despite faults of effect workers."""

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
from holdfast.messages import Intent, IntentReceipt, ReceiptStatus
from holdfast.workers.effects import receipts
from holdfast.world import intents
from tests.workers.rig import WorkerRig
from tests.workers.shop import Buyer, Dropped, GoodsOrdered, Shipped, app, pay
from tests.world.rig import FAULTS, Crash

MODULES = (
    "holdfast.workers.effects.pool",
    "holdfast.workers.effects.receipts",
    "holdfast.app.definitions",
)

PAY = intents.effect_queue("shop", "pay")


def receipt_texts(handle: hf.WorldHandle[Buyer]) -> list[str]:
    return handle.state().told


# -- a call and its receipt ----------------------------------------------------------------------


def test_receipt_contains_the_value_and_the_tag(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered("tea", tag="t"))
    rig.run_until_idle(rig.pool())
    assert receipt_texts(ada) == ["ok done 1 t"]
    assert [call.args for call in rig.fake_service.calls] == [("tea",)]
    assert rig.effect_counts() == queue.QueueCounts(done=1)


def test_async_effect_gets_typed_arguments_and_reports_its_cost(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Shipped(2.5))
    rig.run_until_idle(rig.pool())
    assert (receipt_texts(ada), ada.state().cost) == (["ok 2.5"], 0.5)


def test_pool_runs_only_its_configured_effect_kinds(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered(), Shipped(1.0))
    rig.run_until_idle(rig.pool(kinds=["ship"]))
    assert receipt_texts(ada) == ["ok 1.0"]
    assert rig.effect_counts().ready == 1
    with pytest.raises(Invalid):
        rig.pool(kinds=["no such kind"])


def test_replay_with_receipts_rebuilds_the_same_state(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered(times=3), Shipped(1.0))
    rig.run_until_idle(rig.pool())
    rig.world_worker = rig.worker(incarnation="2", idle_s=1e6)
    rig.advance_clock()
    ada.send(GoodsOrdered())
    rig.run_until_idle(rig.pool())
    assert len(receipt_texts(ada)) == 5
    assert rig.blocker_code(ada) == ""


# -- crashes of effect workers -------------------------------------------------------------------


def test_retry_after_a_crash_uses_the_same_idempotency_key(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    rig.fake_service.answers.append(Crash())
    with pytest.raises(Crash):
        rig.run_until_idle(rig.pool("first"))
    rig.run_until_idle(rig.pool("second"))
    assert receipt_texts(ada) == [], "the first one's claim has not run out"
    rig.advance_clock(12)
    rig.run_until_idle(rig.pool("second"))
    assert receipt_texts(ada) == ["ok done 2"]
    assert [call.attempt for call in rig.fake_service.calls] == [1, 2]
    assert len(rig.fake_service.keys) == 1


@pytest.mark.parametrize(("fault", "commit"), list(product(FAULTS, (1, 2))))
def test_any_failed_pool_commit_leaves_one_receipt(rig: WorkerRig, fault: str, commit: int) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    pool = rig.pool()
    rig.backend.arm({commit: fault})
    try:
        for runner in pool.runners:
            runner.tick()
    except Crash:
        pool = rig.pool("next")
    rig.backend.arm({})
    rig.run_until_idle(pool, seconds=40)
    assert [told.split()[:2] for told in receipt_texts(ada)] == [["ok", "done"]]
    assert len(rig.fake_service.keys) == 1
    assert rig.effect_counts() == queue.QueueCounts(done=1)


def test_late_result_after_another_pool_finished_leaves_no_receipt(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    other = rig.pool("other")

    def slowly() -> str:
        rig.advance_clock(12)
        rig.run_until_idle(other)
        return "late"

    rig.fake_service.answers += [slowly, "in time"]
    rig.run_until_idle(rig.pool("slow"))
    assert receipt_texts(ada) == ["ok in time 2"]
    assert len(rig.fake_service.keys) == 1


def test_late_result_before_the_retry_leaves_no_receipt(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered())

    def slowly() -> str:
        rig.advance_clock(12)
        return "late"

    rig.fake_service.answers += [slowly, "in time"]
    slow = rig.pool("slow", kinds=["pay"])
    [runner, *_] = slow.runners
    assert runner.tick().lost == 1
    assert rig.inbox_depth(ada) == 0
    rig.run_until_idle(slow)
    assert receipt_texts(ada) == ["ok in time 2"]


def test_second_receipt_for_an_intent_changes_nothing(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    intent = rig.next_intent()
    rig.run_until_idle(rig.pool())
    for value in ("done", "something else"):
        told = IntentReceipt(intent.intent_hash, "pay", ReceiptStatus.OK, codec.pack(value))
        rig.store.transact(receipts.deliver_receipt, intent, told)
    rig.run_worlds()
    assert receipt_texts(ada) == ["ok done 1"]


def test_intent_timeout_overrides_the_timeout_of_its_kind(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered(timeout_s=100))
    rig.fake_service.answers.append(lambda: rig.advance_clock(90) or "at last")
    rig.run_until_idle(rig.pool())
    assert receipt_texts(ada) == ["ok at last 1"]


# -- retries and exhausted attempts --------------------------------------------------------------


def test_failed_effect_is_retried_with_backoff(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    rig.fake_service.answers += [OSError("down"), OSError("down")]
    pool = rig.pool()
    rig.run_until_idle(pool)
    assert (len(rig.fake_service.calls), rig.effect_counts().delayed) == (1, 1)
    rig.run_until_idle(pool, seconds=5)
    assert receipt_texts(ada) == ["ok done 3"]
    assert len(rig.fake_service.keys) == 1


def test_exhausted_attempts_end_in_an_error_receipt_and_a_dead_letter(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered(tag="t"))
    rig.fake_service.answers += [OSError("down")] * 9
    rig.run_until_idle(rig.pool(), seconds=60)
    assert receipt_texts(ada) == ["error handler_error 3 t"]
    assert len(rig.fake_service.calls) == 3
    [dead_letter] = rig.dead_letters()
    assert (dead_letter.code, dead_letter.failures) == ("handler_error", 3)
    assert "down" in dead_letter.error


def test_exhausted_expiries_end_in_a_timeout_receipt(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    rig.fake_service.answers += [Crash()] * 9
    for n in range(3):
        with pytest.raises(Crash):
            rig.run_until_idle(rig.pool(f"pool-{n}"))
        rig.advance_clock(12)
    rig.run_until_idle(rig.pool("last"))
    assert receipt_texts(ada) == ["timeout expiries_exhausted 3"]
    assert len(rig.fake_service.calls) == 3


@pytest.mark.parametrize("expiries_max", [1, 5])
def test_expiries_max_limits_the_lost_processes_of_an_intent(
    rig: WorkerRig, monkeypatch: pytest.MonkeyPatch, expiries_max: int
) -> None:
    monkeypatch.setattr(pay, "expiries_max", expiries_max)
    ada = rig.buyer("ada", GoodsOrdered())
    rig.fake_service.answers += [Crash()] * 9
    for n in range(expiries_max):
        with pytest.raises(Crash):
            rig.run_until_idle(rig.pool(f"pool-{n}"))
        rig.advance_clock(12)
    rig.run_until_idle(rig.pool("last"))
    assert receipt_texts(ada) == [f"timeout expiries_exhausted {expiries_max}"]


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "3"])
def test_wrong_expiries_max_is_refused_at_the_declaration(wrong: Any) -> None:
    with pytest.raises(Invalid):
        hf.effect("wrong", expiries_max=wrong)(lambda call: None)


def test_effect_that_crashes_its_worker_fails_no_other_effect(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered(times=5), GoodsOrdered("poison"), GoodsOrdered(times=5))
    rig.fake_service.fatal_error = Crash()
    for n in range(3):
        with pytest.raises(Crash):
            rig.run_until_idle(rig.pool(f"pool-{n}"))
        rig.advance_clock(12)
    rig.run_until_idle(rig.pool("last"))
    told = receipt_texts(ada)
    assert told.count("timeout expiries_exhausted 3") == 1
    assert [text.split()[0] for text in told].count("ok") == 10


def test_async_effect_over_its_timeout_gets_a_timeout_receipt(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Shipped(1.0))
    rig.fake_service.answers += [lambda: asyncio.sleep(60)] * 2
    rig.run_until_idle(rig.pool(), seconds=5)
    assert receipt_texts(ada) == ["timeout timeout"]


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
def test_faulty_effect_gets_an_error_receipt_and_the_pool_continues(
    rig: WorkerRig, answer: Any, code: str, calls: int
) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    rig.fake_service.answers += [answer] * calls
    pool = rig.pool()
    rig.run_until_idle(pool, seconds=30)
    assert receipt_texts(ada) == [f"error {code} {calls}"]
    assert len(rig.fake_service.calls) == calls
    bob = rig.buyer("bob", GoodsOrdered())
    rig.run_until_idle(pool)
    assert receipt_texts(bob) == ["ok done 1"]


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
def test_effect_with_invalid_options_is_rejected_at_declaration(wrong: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        hf.effect("x", **wrong)(lambda call: None)


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan"), float("inf"), 1e30])
def test_invalid_effect_timeout_fails_only_its_event(rig: WorkerRig, timeout_s: float) -> None:
    ada = rig.buyer("ada", GoodsOrdered(timeout_s=timeout_s), GoodsOrdered())
    assert [entry.outcome for entry in ada.journal()] == ["failed", "ok"]


def test_effect_arguments_of_the_wrong_type_are_invalid() -> None:
    with pytest.raises(Invalid):
        app.effect_call(pay, (5,), {})
    with pytest.raises(Invalid):
        app.effect_call(pay, (), {})


def test_reserved_effect_kind_is_invalid() -> None:
    with pytest.raises(Invalid):
        hf.App("x", effects=[hf.effect("timer.set")(lambda call: None)])


# -- cancelling ----------------------------------------------------------------------------------


def test_cancel_of_a_ready_effect_keeps_the_tag_in_its_receipt(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered(tag="t"), Dropped())
    rig.run_until_idle(rig.pool())
    assert receipt_texts(ada) == ["error cancelled 0 t"]
    assert rig.fake_service.calls == []


def test_cancel_of_an_effect_in_backoff(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    rig.fake_service.answers.append(OSError("down"))
    pool = rig.pool()
    rig.run_until_idle(pool)
    ada.send(Dropped())
    rig.run_until_idle(pool, seconds=60)
    assert receipt_texts(ada) == ["error cancelled 0"]
    assert len(rig.fake_service.calls) == 1


def test_cancel_of_a_running_effect_discards_its_result(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    rig.fake_service.answers.append(lambda: (ada.send(Dropped()), rig.run_worlds(), "done")[-1])
    rig.run_until_idle(rig.pool())
    assert receipt_texts(ada) == ["error cancelled 0"]
    assert len(rig.fake_service.calls) == 1
    assert rig.effect_counts() == queue.QueueCounts(done=1)


def test_repeated_or_late_cancel_adds_no_receipt(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered(), Dropped(), Dropped(), GoodsOrdered("jam"))
    rig.run_until_idle(rig.pool())
    ada.send(Dropped(1))
    rig.run_worlds()
    assert receipt_texts(ada) == ["error cancelled 0", "ok done 1"]


# -- deleted and paused worlds -------------------------------------------------------------------


def test_effect_of_a_deleted_world_ends_without_a_receipt(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered(times=2))
    bob = rig.buyer("bob", GoodsOrdered())
    rig.fake_service.answers += ["done", "done", OSError("down")]
    ada.delete()
    rig.run_until_idle(rig.pool(), seconds=60)
    assert receipt_texts(bob) == ["ok done 1"]
    assert (
        rig.effect_counts().ready == rig.effect_counts().claimed == rig.effect_counts().delayed == 0
    )


def test_paused_world_gets_its_receipt_after_resume(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    ada.pause()
    rig.run_until_idle(rig.pool())
    assert receipt_texts(ada) == []
    ada.resume()
    rig.advance_clock()
    rig.run_worlds()
    assert receipt_texts(ada) == ["ok done 1"]


# -- redrive -------------------------------------------------------------------------------------


def dead_effect(rig: WorkerRig) -> tuple[hf.WorldHandle[Buyer], queue.DeadLetter]:
    ada = rig.buyer("ada", GoodsOrdered())
    rig.fake_service.answers += [OSError("down")] * 3
    rig.run_until_idle(rig.pool(), seconds=60)
    [dead_letter] = rig.dead_letters()
    return ada, dead_letter


def test_redriven_effect_is_a_new_intent_linked_to_the_old_one(rig: WorkerRig) -> None:
    ada, dead_letter = dead_effect(rig)
    [made] = rig.store.transact(receipts.redrive_effects, "shop", "pay", [dead_letter.seq])
    intent = rig.next_intent()
    assert intent.intent_hash == made
    assert intent.redrive_of == ada.state().intents[0] != made
    rig.run_until_idle(rig.pool())
    assert receipt_texts(ada) == ["error handler_error 3", "ok done 1 again"]
    assert len(rig.fake_service.keys) == 2
    assert rig.dead_letters() == []


def test_dead_redriven_effect_can_be_redriven_again(rig: WorkerRig) -> None:
    ada, dead_letter = dead_effect(rig)
    rig.store.transact(receipts.redrive_effects, "shop", "pay", [dead_letter.seq])
    rig.fake_service.answers += [OSError("down")] * 3
    rig.run_until_idle(rig.pool(), seconds=60)
    [dead_letter] = rig.dead_letters()
    rig.store.transact(receipts.redrive_effects, "shop", "pay", [dead_letter.seq])
    rig.run_until_idle(rig.pool())
    assert [told.split()[0] for told in receipt_texts(ada)] == ["error", "error", "ok"]


def test_a_dead_effect_is_redriven_once(rig: WorkerRig) -> None:
    _, dead_letter = dead_effect(rig)
    rig.store.transact(receipts.redrive_effects, "shop", "pay", [dead_letter.seq])
    with pytest.raises(NotFound):
        rig.store.transact(receipts.redrive_effects, "shop", "pay", [dead_letter.seq])
    assert rig.effect_counts().ready == 1


def test_redrive_of_a_deleted_worlds_effect_is_invalid(rig: WorkerRig) -> None:
    ada, dead_letter = dead_effect(rig)
    ada.delete()
    with pytest.raises(Invalid):
        rig.store.transact(receipts.redrive_effects, "shop", "pay", [dead_letter.seq])
    assert len(rig.dead_letters()) == 1


# -- order ---------------------------------------------------------------------------------------


def enqueue_intents(rig: WorkerRig, world_id: str, n: int) -> None:
    """Enqueue `n` intents of one world in the same way as its world worker."""
    for start in range(0, n, BATCH_MAX):
        payloads = [
            codec.pack(
                Intent(
                    universe_id="shop",
                    world_id=world_id,
                    intent_hash=b"%d" % i,
                    effect_kind="pay",
                    params=b"",
                    origin_name="crowd",
                    policy_context_hash=b"",
                    enqueued_at_ns=0,
                )
            )
            for i in range(start, min(start + BATCH_MAX, n))
        ]
        rig.store.transact(queue.put_many, PAY, payloads, 0, 0, world_id, intents.ON_DEAD_OPERATION)


def test_a_world_with_100_000_intents_does_not_starve_another(rig: WorkerRig) -> None:
    enqueue_intents(rig, rig.id(rig.world(Buyer, "crowd")), 100_000)
    ada = rig.buyer("ada", GoodsOrdered("mine"))
    claims = rig.store.transact(queue.claim, PAY, "me", 2, S)
    assert rig.id(ada) in [codec.unpack_as(Intent, claim.payload).world_id for claim in claims]


def test_high_priority_intent_does_not_change_the_fair_share_of_its_world(rig: WorkerRig) -> None:
    crowded = rig.buyer("crowd")
    enqueue_intents(rig, rig.id(crowded), 1000)
    crowded.send(GoodsOrdered("urgent", priority=9))
    rig.run_worlds()
    [urgent] = rig.store.transact(queue.claim, PAY, "me", 1, S)
    assert urgent.priority == 9
    ada = rig.buyer("ada", GoodsOrdered("mine"))
    claims = rig.store.transact(queue.claim, PAY, "me", 2, S)
    assert rig.id(ada) in [codec.unpack_as(Intent, claim.payload).world_id for claim in claims]


def test_cancelled_intents_do_not_reduce_the_fair_share_of_a_world(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered(times=50), *[Dropped(n) for n in reversed(range(50))])
    bob = rig.buyer("bob", GoodsOrdered(times=10))
    ada.send(GoodsOrdered())
    rig.run_worlds()
    claims = rig.store.transact(queue.claim, PAY, "me", 2, S)
    worlds = {codec.unpack_as(Intent, claim.payload).world_id for claim in claims}
    assert worlds == {rig.id(ada), rig.id(bob)}


def test_effects_run_in_descending_priority(rig: WorkerRig) -> None:
    rig.buyer(
        "ada", *[GoodsOrdered(str(priority), priority=priority) for priority in (0, 9, -1, 5)]
    )
    rig.run_until_idle(rig.pool())
    assert [call.args for call in rig.fake_service.calls] == [("9",), ("5",), ("0",), ("-1",)]


def test_all_calls_of_an_intent_share_one_unique_idempotency_key(rig: WorkerRig) -> None:
    rig.buyer("ada", GoodsOrdered(times=5))
    rig.fake_service.answers += [OSError("down"), Crash()]
    with pytest.raises(Crash):
        rig.run_until_idle(rig.pool("first"), seconds=1)
    rig.advance_clock(12)
    rig.run_until_idle(rig.pool("second"), seconds=60)
    assert len(rig.fake_service.calls) == 7
    assert len(rig.fake_service.keys) == 5

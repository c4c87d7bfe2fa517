"""Document 004, section 4 and protocols C and D: effects, from intent to receipt.

Each test names the rule it checks. Where the design differs from the document, the test checks the
design and its rule text names the difference. Timers and fabric have separate files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from holdfast import codec
from holdfast.clock import S
from holdfast.durable import lease, queue
from holdfast.errors import ClaimLost, Invalid, NotFound, Overloaded
from holdfast.messages import IngressKind, Intent, IntentReceipt, ReceiptStatus, intent_hash
from holdfast.ops import pending_work, world_operations
from holdfast.runner.error_policy import Refused
from holdfast.workers.effects import receipts
from holdfast.world import ingress, intents
from holdfast.world.intents import effect_queue
from tests.postgres import RIG_STORES
from tests.workers.rig import WorkerRig
from tests.workers.shop import Buyer, Dropped, GoodsOrdered, Shipped, Slept, Woken, Wrote, pay
from tests.world.rig import CRASH_AFTER, CRASH_BEFORE, FAULTS, Crash, make_backend

MODULES = (
    "holdfast.world.intents",
    "holdfast.workers.effects.pool",
    "holdfast.workers.effects.handler",
    "holdfast.workers.effects.receipts",
)

PAY = effect_queue("shop", "pay")


@pytest.fixture(params=RIG_STORES)
def rig(request: pytest.FixtureRequest) -> Iterator[WorkerRig]:
    opened = WorkerRig(backend=make_backend(request.param))
    yield opened
    opened.store.close()


def receipts_in(world: Any) -> list[IntentReceipt]:
    """The receipts in the journal of a world, in order."""
    steps = [entry.step.ingress for entry in world.journal()]
    return [
        codec.unpack_as(IntentReceipt, ingress.value)
        for ingress in steps
        if ingress.kind is IngressKind.RECEIPT
    ]


# -- section 4: the item -------------------------------------------------------------------------


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "an effect intent has the eight fields of the dispatch item",
)
def test_effect_intent_has_the_eight_fields(rig: WorkerRig) -> None:
    assert [field.name for field in msgspec.structs.fields(Intent)][:8] == [
        "universe_id", "world_id", "intent_hash", "effect_kind", "params", "origin_name",
        "policy_context_hash", "enqueued_at_ns",
    ]  # fmt: skip
    rig.clock.advance(7 * S)
    ada = rig.buyer("ada", Woken(), GoodsOrdered("tea", times=2))
    [first, second] = [codec.unpack_as(Intent, payload) for payload in rig.queued(PAY)]
    for n, intent in enumerate((first, second)):
        assert (intent.universe_id, intent.world_id) == ("shop", rig.id(ada))
        assert intent.intent_hash == intent_hash(rig.store.generation, rig.id(ada), (2, n))
        assert (intent.effect_kind, intent.origin_name) == ("pay", "ada")
        assert codec.unpack(intent.params) == ["tea"]
        # The policy belongs to the effect: it is the same for all its intents.
        assert intent.policy_context_hash == pay.policy_hash != b""
        assert intent.enqueued_at_ns == rig.clock.wall_ns()


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "an effect item is either pending, in flight or ended",
)
def test_effect_item_is_in_one_queue_state_at_a_time(rig: WorkerRig) -> None:
    rig.buyer("ada", GoodsOrdered())
    assert rig.effect_counts() == queue.QueueCounts(ready=1)
    [claim] = rig.store.transact(queue.claim, PAY, "me", 1, S)
    assert rig.effect_counts() == queue.QueueCounts(claimed=1)
    assert rig.store.read(queue.peek, PAY, 10) == []
    rig.store.transact(queue.fail, claim, "down", "down", True, S)
    assert rig.effect_counts() == queue.QueueCounts(delayed=1)
    assert rig.store.read(queue.claims_of, PAY, "me", 10) == []
    rig.clock.advance(2 * S)
    [claim] = rig.store.transact(queue.claim, PAY, "me", 1, S)
    rig.store.transact(queue.ack, [claim.token])
    assert rig.effect_counts() == queue.QueueCounts(done=1)


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "the worlds of a universe share one queue per effect kind, and claims alternate between worlds",
)
def test_effect_claims_alternate_between_worlds(rig: WorkerRig) -> None:
    rig.buyer("ada", GoodsOrdered("hers", times=50))
    rig.buyer("bob", GoodsOrdered("his"))
    claims = rig.store.transact(queue.claim, PAY, "me", 2, S)
    assert {codec.unpack(_intent(claim).params)[0] for claim in claims} == {"hers", "his"}


# -- section 4: claim and execute ----------------------------------------------------------------


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "a claim hides an item from other claims until the claim expires",
)
def test_effect_claim_is_exclusive_until_it_expires(rig: WorkerRig) -> None:
    rig.buyer("ada", GoodsOrdered())
    assert len(rig.store.transact(queue.claim, PAY, "one", 10, S)) == 1
    assert rig.store.transact(queue.claim, PAY, "two", 10, S) == []
    rig.clock.advance(2 * S)
    assert len(rig.store.transact(queue.claim, PAY, "two", 10, S)) == 1


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "an effect call runs outside any transaction, so other commits continue, even for the same world",
)
def test_effect_call_runs_outside_any_transaction(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    rig.fake_service.answers.append(lambda: str(ada.send(Woken("meanwhile"))))
    rig.run_until_idle(rig.pool())
    assert ada.state().woken == ["meanwhile"]
    assert ada.state().told == ["ok 2 1"]


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "the receipt is ingress of the kind receipt in the inbox of the world that requested the effect",
)
def test_effect_receipt_is_ingress_of_kind_receipt(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered(tag="t"))
    intent = rig.next_intent()
    rig.run_until_idle(rig.pool())
    delivered = ada.journal()[1].step.ingress
    assert (delivered.kind, delivered.type) == (IngressKind.RECEIPT, "pay")
    assert delivered.intent_hash == intent.intent_hash
    stored = codec.unpack_as(IntentReceipt, delivered.value)
    assert (stored.status, codec.unpack(stored.value), stored.tag) == (
        ReceiptStatus.OK,
        "done",
        "t",
    )


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "a receipt completes its intent and removes the pending and in-flight rows",
)
def test_intent_with_a_receipt_is_no_longer_pending(rig: WorkerRig) -> None:
    rig.buyer("ada", GoodsOrdered())
    intent = rig.next_intent()
    assert rig.store.read(intents.find_pending, "shop", intent.intent_hash) is not None
    rig.run_until_idle(rig.pool())
    assert rig.store.read(intents.find_pending, "shop", intent.intent_hash) is None
    assert rig.effect_counts() == queue.QueueCounts(done=1)


# -- section 4: recovery -------------------------------------------------------------------------


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "either the reaper or the next claim takes over an item whose claim expired",
)
@pytest.mark.parametrize("by", ["a reaper", "the next claim"])
def test_expired_effect_claim_is_requeued_by_reaper_or_next_claim(rig: WorkerRig, by: str) -> None:
    rig.buyer("ada", GoodsOrdered())
    rig.store.transact(queue.claim, PAY, "dies", 1, S)
    rig.clock.advance(2 * S)
    if by == "a reaper":
        assert rig.store.transact(queue.expire_overdue, PAY, 10) == 1
        assert rig.effect_counts().ready == 1
    else:
        assert len(rig.store.transact(queue.claim, PAY, "next", 1, S)) == 1


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "a second receipt of an intent is dropped or refused",
)
def test_second_receipt_of_an_intent_is_dropped(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    intent = rig.next_intent()
    rig.run_until_idle(rig.pool())
    error = IntentReceipt(intent.intent_hash, "pay", ReceiptStatus.ERROR, code="late")
    rig.store.transact(receipts.deliver_receipt, intent, error)
    assert rig.inbox_depth(ada) == 0
    with pytest.raises((NotFound, Invalid)):
        world_operations.receipt_inject(rig.store, "shop", rig.id(ada), error)


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "expired claims that exhaust their limit end the intent with the receipt timeout",
)
def test_exhausted_claim_expiries_end_in_a_timeout_receipt(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    rig.fake_service.answers += [Crash()] * 9
    for n in range(3):
        with pytest.raises(Crash):
            rig.run_until_idle(rig.pool(f"pool-{n}"))
        rig.advance_clock(12)
    rig.run_until_idle(rig.pool("last"))
    [receipt] = receipts_in(ada)
    assert (receipt.status, receipt.code) == (ReceiptStatus.TIMEOUT, "expiries_exhausted")
    assert rig.effect_counts() == queue.QueueCounts(dead=1)


# -- section 4: retries --------------------------------------------------------------------------


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "retries inside an effect call count as one attempt",
)
def test_retries_inside_an_effect_call_count_as_one_attempt(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    tries: list[int] = []

    def stubborn() -> str:
        while len(tries) < 3:
            tries.append(1)
        return "at last"

    rig.fake_service.answers.append(stubborn)
    rig.run_until_idle(rig.pool())
    assert ada.state().told == ["ok at last 1"]


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "a retry of an effect counts an attempt and keeps the idempotency key",
)
def test_effect_retries_count_attempts_and_keep_the_idempotency_key(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    rig.fake_service.answers += [OSError("down"), OSError("down")]
    rig.run_until_idle(rig.pool(), seconds=10)
    assert [call.attempt for call in rig.fake_service.calls] == [1, 2, 3]
    assert len(rig.fake_service.keys) == 1
    assert ada.height() == 2


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "the receipt records each failed attempt with worker, times, outcome and error",
)
def test_failed_effect_attempts_are_recorded_in_the_receipt(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    rig.fake_service.answers += [OSError("down"), Crash()]
    with pytest.raises(Crash):
        rig.run_until_idle(rig.pool("first"), seconds=10)
    rig.advance_clock(12)
    rig.run_until_idle(rig.pool("second"), seconds=10)
    [receipt] = receipts_in(ada)
    assert [(attempt.end, attempt.owner.partition("/")[0]) for attempt in receipt.failed_attempts] == [
        ("failed", "first"), ("expired", "first"),
    ]  # fmt: skip
    assert "down" in receipt.failed_attempts[0].error
    assert all(attempt.began_ns <= attempt.ended_ns for attempt in receipt.failed_attempts)
    assert (receipt.status, receipt.attempts) == (ReceiptStatus.OK, 3)


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "a retry of an effect keeps its seq and waits until its delay is over",
)
def test_effect_retry_keeps_its_seq_and_is_delayed(rig: WorkerRig) -> None:
    rig.buyer("ada", GoodsOrdered())
    [claim] = rig.store.transact(queue.claim, PAY, "me", 1, S)
    rig.store.transact(queue.fail, claim, "down", "down", True, 5 * S)
    assert rig.store.transact(queue.claim, PAY, "me", 1, S) == []
    rig.clock.advance(6 * S)
    [again] = rig.store.transact(queue.claim, PAY, "me", 1, S)
    assert (again.seq, again.number) == (claim.seq, claim.number + 1)


# -- section 4: terminal states ------------------------------------------------------------------


def run_to_success(rig: WorkerRig) -> Buyer:
    ada = rig.buyer("ada", GoodsOrdered())
    rig.run_until_idle(rig.pool())
    return ada  # type: ignore[return-value]


def run_to_failure(rig: WorkerRig) -> Buyer:
    rig.fake_service.answers += [OSError("down")] * 9
    ada = rig.buyer("ada", GoodsOrdered())
    rig.run_until_idle(rig.pool(), seconds=60)
    return ada  # type: ignore[return-value]


def run_to_timeout(rig: WorkerRig) -> Buyer:
    rig.fake_service.answers += [lambda: asyncio.sleep(60)] * 9
    ada = rig.buyer("ada", Shipped(1.0))
    rig.run_until_idle(rig.pool(), seconds=60)
    return ada  # type: ignore[return-value]


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "an intent ends as ok, error or timeout",
)
@pytest.mark.parametrize(
    ("story", "status"),
    [
        (run_to_success, ReceiptStatus.OK),
        (run_to_failure, ReceiptStatus.ERROR),
        (run_to_timeout, ReceiptStatus.TIMEOUT),
    ],
)
def test_intent_ends_as_ok_error_or_timeout(
    rig: WorkerRig, story: Callable[[WorkerRig], Any], status: ReceiptStatus
) -> None:
    assert [receipt.status for receipt in receipts_in(story(rig))] == [status]
    assert len(ReceiptStatus) == 3


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "an effect that is refused or out of attempts ends with the receipt error and a dead letter",
)
@pytest.mark.parametrize(
    ("answers", "code", "failures"),
    [([OSError("down")] * 3, "handler_error", 3), ([Refused(why="no")], "refused", 1)],
    ids=["used up", "refused"],
)
def test_exhausted_or_refused_effect_ends_in_an_error_and_a_dead_letter(
    rig: WorkerRig, answers: list[Exception], code: str, failures: int
) -> None:
    rig.fake_service.answers += answers
    ada = rig.buyer("ada", GoodsOrdered())
    intent = rig.next_intent()
    rig.run_until_idle(rig.pool(), seconds=60)
    [receipt], [letter] = receipts_in(ada), rig.dead_letters()
    assert (receipt.status, receipt.code) == (ReceiptStatus.ERROR, code)
    assert (letter.code, letter.failures, len(letter.failed_attempts)) == (code, failures, failures)
    assert codec.unpack_as(Intent, letter.payload) == intent


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "cancellation gives an intent the receipt error with code cancelled, even if an adapter has claimed it",
)
@pytest.mark.parametrize("claimed", [False, True])
def test_cancelled_intent_gets_an_error_cancelled_receipt(rig: WorkerRig, claimed: bool) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    claims = rig.store.transact(queue.claim, PAY, "me", 1, 100 * S) if claimed else []
    ada.send(Dropped())
    rig.run_worlds()
    [receipt] = receipts_in(ada)
    assert (receipt.status, receipt.code) == (ReceiptStatus.ERROR, "cancelled")
    for claim in claims:
        with pytest.raises(ClaimLost):
            rig.store.transact(queue.ack, [claim.token])


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "a redrive of a dead effect creates one new intent that references the old one",
)
def test_redrive_creates_a_new_intent_linked_to_the_old_one(rig: WorkerRig) -> None:
    ada: Any = run_to_failure(rig)
    [old], [letter] = receipts_in(ada), rig.dead_letters()
    [new_intent] = rig.store.transact(receipts.redrive_effects, "shop", "pay", [letter.seq])
    with pytest.raises(NotFound):
        rig.store.transact(receipts.redrive_effects, "shop", "pay", [letter.seq])
    rig.fake_service.answers.clear()
    rig.run_until_idle(rig.pool())
    [_, new] = receipts_in(ada)
    assert (new.intent_hash, new.redrive_of) == (new_intent, old.intent_hash)
    assert len(rig.fake_service.keys) == 2


# -- protocol C ----------------------------------------------------------------------------------


@pytest.mark.spec(
    "004",
    "Protocol C: `publish_effect_intents(world, epoch, intents[])`",
    "a worker without the lease publishes no intents",
)
def test_worker_without_the_lease_publishes_no_effects(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Woken())
    ada.send(GoodsOrdered())
    rig.store.transact(lease.force_release, rig.subject(ada), "taken away")
    rig.world_worker.tick()
    assert rig.effect_counts() == queue.QueueCounts()
    assert ada.height() == 1


@pytest.mark.spec(
    "004",
    "Protocol C: `publish_effect_intents(world, epoch, intents[])`",
    "the intents of an entry are published together or not at all",
)
@pytest.mark.parametrize("fault", [CRASH_BEFORE, CRASH_AFTER])
def test_intents_of_an_entry_are_published_all_or_none(rig: WorkerRig, fault: str) -> None:
    ada = rig.buyer("ada", Woken())
    ada.send(GoodsOrdered(times=5))
    rig.backend.arm({1: fault})
    with pytest.raises(Crash):
        rig.world_worker.tick()
    assert rig.effect_counts().ready == (5 if fault == CRASH_AFTER else 0)


@pytest.mark.spec(
    "004",
    "Protocol C: `publish_effect_intents(world, epoch, intents[])`",
    "the commit of an entry publishes its intents once, even if the outcome of the commit is unknown",
)
@pytest.mark.parametrize("fault", FAULTS)
def test_intents_of_an_entry_are_published_once(rig: WorkerRig, fault: str) -> None:
    ada = rig.buyer("ada", Woken())
    ada.send(GoodsOrdered(times=3))
    rig.backend.arm({1: fault})
    rig.run_worlds()
    rig.advance_clock(60)
    rig.run_worlds()
    assert rig.effect_counts() == queue.QueueCounts(ready=3)
    assert len(set(ada.state().intents)) == 3


@pytest.mark.spec(
    "004",
    "Protocol C: `publish_effect_intents(world, epoch, intents[])`",
    "intents with the same key dispatch one effect, also after its receipt",
)
def test_effect_key_is_dispatched_once(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered(key="k"), GoodsOrdered(key="k"))
    assert rig.effect_counts().ready == 1
    rig.run_until_idle(rig.pool())
    ada.send(GoodsOrdered(key="k"))
    rig.run_until_idle(rig.pool())
    assert rig.effect_counts() == queue.QueueCounts(done=1)
    assert len(set(ada.state().intents)) == 1


@pytest.mark.spec(
    "004",
    "Protocol C: `publish_effect_intents(world, epoch, intents[])`",
    "an intent with a known key and other parameters gets the receipt error with code key_conflict",
)
def test_effect_key_with_other_parameters_is_a_key_conflict(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered("tea", key="k"), GoodsOrdered("coffee", key="k"))
    rig.run_until_idle(rig.pool())
    assert sorted(receipt.code for receipt in receipts_in(ada)) == ["", "key_conflict"]
    assert [call.args for call in rig.fake_service.calls] == [("tea",)]


# -- protocol D ----------------------------------------------------------------------------------


@pytest.mark.spec(
    "004",
    "Protocol D: `adapter_claim_execute_ack(effect_seq)`",
    "the receipt and the ack of an effect are one commit",
)
@pytest.mark.parametrize("fault", [CRASH_BEFORE, CRASH_AFTER])
def test_receipt_and_ack_of_an_effect_are_one_commit(rig: WorkerRig, fault: str) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    pool = rig.pool(kinds=["pay"])
    rig.backend.arm({2: fault})
    with pytest.raises(Crash):
        pool.runners[0].tick()
    assert rig.inbox_depth(ada) == rig.effect_counts().done == (fault == CRASH_AFTER)


@pytest.mark.spec(
    "004",
    "Protocol D: `adapter_claim_execute_ack(effect_seq)`",
    "an ack of an expired claim raises ClaimLost",
)
def test_ack_of_an_expired_effect_claim_raises_claim_lost(rig: WorkerRig) -> None:
    rig.buyer("ada", GoodsOrdered())
    [claim] = rig.store.transact(queue.claim, PAY, "slow", 1, S)
    rig.clock.advance(2 * S)
    with pytest.raises(ClaimLost):
        rig.store.transact(queue.ack, [claim.token])
    then = queue.JoinedOperation(
        0, receipts.deliver_receipt.name, codec.pack([_intent(claim), _ok(claim)])
    )
    assert rig.store.transact(
        queue.finish_batch, [claim.token], [], queue.RetryBudget(), [then]
    ) == ["lost"]
    assert rig.effect_counts().done == 0


@pytest.mark.spec(
    "004",
    "Protocol D: `adapter_claim_execute_ack(effect_seq)`",
    "a settlement needs the current claim number: an earlier claim of the same worker is lost",
)
def test_settle_with_an_earlier_claim_of_the_same_worker_is_lost(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    [first] = rig.store.transact(queue.claim, PAY, "me", 1, S)
    rig.clock.advance(2 * S)
    [second] = rig.store.transact(queue.claim, PAY, "me", 1, S)
    then = queue.JoinedOperation(
        0, receipts.deliver_receipt.name, codec.pack([_intent(first), _ok(first)])
    )
    assert rig.store.transact(
        queue.finish_batch, [first.token], [], queue.RetryBudget(), [then]
    ) == ["lost"]
    assert rig.inbox_depth(ada) == 0
    assert rig.store.transact(
        queue.finish_batch, [second.token], [], queue.RetryBudget(), [then]
    ) == ["done"]
    assert rig.inbox_depth(ada) == 1


@pytest.mark.spec(
    "004",
    "Protocol D: `adapter_claim_execute_ack(effect_seq)`",
    "a receipt waits in the inbox of a world that no worker hosts",
)
def test_receipt_waits_in_the_inbox_of_an_unhosted_world(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    rig.store.transact(lease.force_release, rig.subject(ada), "its worker is gone")
    pool = rig.pool(kinds=["pay"])
    while pool.runners[0].tick().claimed:
        pass
    assert rig.inbox_depth(ada) == 1
    rig.world_worker = rig.worker(incarnation="another", idle_s=1e6)
    rig.advance_clock(60)
    rig.run_worlds()
    assert ada.state().told == ["ok done 1"]


@pytest.mark.spec(
    "004",
    "Protocol D: `adapter_claim_execute_ack(effect_seq)`",
    "a full inbox still accepts receipts",
)
def test_receipt_is_accepted_by_a_full_inbox(
    rig: WorkerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    monkeypatch.setattr(ingress, "INBOX_DEPTH_MAX", 0)
    with pytest.raises(Overloaded):
        ada.send(Woken())
    pool = rig.pool(kinds=["pay"])
    while pool.runners[0].tick().claimed:
        pass
    assert (rig.effect_counts().done, rig.inbox_depth(ada)) == (1, 1)


@pytest.mark.spec(
    "004",
    "Protocol D: `adapter_claim_execute_ack(effect_seq)`",
    "effects of a deleted world are dropped without a call",
)
def test_effects_of_a_deleted_world_are_dropped(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered(times=3))
    ada.delete()
    rig.run_until_idle(rig.pool())
    assert rig.fake_service.calls == []
    assert rig.effect_counts() == queue.QueueCounts(done=3)


def _intent(claim: queue.Claim) -> Intent:
    return codec.unpack_as(Intent, claim.payload)


def _ok(claim: queue.Claim) -> IntentReceipt:
    return IntentReceipt(_intent(claim).intent_hash, "pay", ReceiptStatus.OK)


# -- crash windows, anchors, the document's own tests --------------------------------------------


@pytest.mark.spec(
    "004",
    "Failure Semantics and Safety",
    "the journal entry and the pending effect are one commit",
)
@pytest.mark.parametrize("fault", [CRASH_BEFORE, CRASH_AFTER])
def test_journal_entry_and_pending_effect_are_one_commit(rig: WorkerRig, fault: str) -> None:
    ada = rig.buyer("ada", Woken())
    ada.send(GoodsOrdered())
    rig.backend.arm({1: fault})
    with pytest.raises(Crash):
        rig.world_worker.tick()
    assert (ada.height() - 1, rig.effect_counts().ready) == (
        (1, 1) if fault == CRASH_AFTER else (0, 0)
    )


@pytest.mark.spec(
    "004",
    "Failure Semantics and Safety",
    "a pool repeats a call without a receipt under the same idempotency key",
)
def test_effect_call_without_a_receipt_is_repeated_with_the_same_key(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    rig.fake_service.answers.append(Crash())
    with pytest.raises(Crash):
        rig.run_until_idle(rig.pool("dies"))
    rig.advance_clock(12)
    rig.run_until_idle(rig.pool("follows"))
    assert (len(rig.fake_service.calls), len(rig.fake_service.keys)) == (2, 1)
    assert ada.state().told == ["ok done 2"]


@pytest.mark.spec(
    "004",
    "Failure Semantics and Safety",
    "the intent hash of effects, timers and mail is stable in a replay and unique per position",
)
def test_intent_hash_is_stable_in_replay_and_unique_elsewhere(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered(times=2), Slept(60), Wrote("bob"))
    bob = rig.buyer("bob", GoodsOrdered(times=2))
    here = (rig.store.generation, rig.id(ada))
    assert ada.state().intents == [intent_hash(*here, (1, 0)), intent_hash(*here, (1, 1))]
    assert ada.state(at=1).intents == ada.state().intents
    [timer] = [row.intent.intent_hash for row in rig.store.read(pending_work.timers, "shop")]
    assert timer == intent_hash(*here, (2, 0))
    [mail] = [
        entry.step.ingress.intent_hash
        for entry in bob.journal()
        if entry.step.ingress.kind is IngressKind.FABRIC
    ]
    assert mail == intent_hash(*here, (3, 0))
    assert len({*ada.state().intents, *bob.state().intents, timer, mail}) == 6
    # The same position in another world or another store generation has another hash.
    elsewhere = {
        intent_hash(here[0], rig.id(bob), (1, 0)),
        intent_hash(here[0] + 1, here[1], (1, 0)),
    }
    assert len({*elsewhere, ada.state().intents[0]}) == 3


@pytest.mark.spec(
    "004", "Testing and Validation", "repeated publishing of an intent gives one receipt"
)
def test_duplicate_publishes_of_an_intent_end_in_one_receipt(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    intent = rig.next_intent()
    for _ in range(5):
        rig.store.transact(intents.publish, [intent])
    for n in range(3):
        rig.run_until_idle(rig.pool(f"pool-{n}"))
    assert len(receipts_in(ada)) == 1
    assert len(rig.fake_service.keys) == 1


@pytest.mark.spec(
    "004",
    "Testing and Validation",
    "after a crash between claim and call the next pool calls the effect once",
)
def test_effect_claimed_by_a_crashed_pool_is_called_once_by_the_next(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    rig.backend.arm({1: CRASH_AFTER})
    with pytest.raises(Crash):
        rig.run_until_idle(rig.pool("dies"))
    rig.backend.arm({})
    assert rig.fake_service.calls == []
    rig.advance_clock(12)
    rig.run_until_idle(rig.pool("follows"))
    assert len(rig.fake_service.calls) == 1
    assert [receipt.status for receipt in receipts_in(ada)] == [ReceiptStatus.OK]


@pytest.mark.spec(
    "004",
    "Testing and Validation",
    "a lost receipt commit repeats the call and not the receipt",
)
@pytest.mark.parametrize("fault", FAULTS)
def test_lost_receipt_commit_repeats_the_call_and_not_the_receipt(
    rig: WorkerRig, fault: str
) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    pool = rig.pool("dies")
    rig.backend.arm({2: fault})
    try:
        rig.run_until_idle(pool)
    except Crash:
        pool = rig.pool("follows")
    rig.backend.arm({})
    rig.advance_clock(12)
    rig.run_until_idle(pool, seconds=40)
    assert [receipt.status for receipt in receipts_in(ada)] == [ReceiptStatus.OK]
    assert len(rig.fake_service.keys) == 1

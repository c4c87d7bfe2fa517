"""Document 004, sections 4, 5, 6, protocols C to F, crash windows, anchors, its tests 2, 3 and 4.

Where the design settles a rule differently, the test guards what we built and its rule says so.
"""

from __future__ import annotations

import msgspec
import pytest

from holdfast import codec
from holdfast.clock import S
from holdfast.durable import lease, queue
from holdfast.errors import ClaimLost
from holdfast.messages import Intent, Kind, Receipt, Status
from holdfast.roles import receipts
from holdfast.world import publish
from holdfast.world.publish import effects
from tests.roles.rig import Rig
from tests.roles.shop import Ordered, Slept, Woken, Wrote
from tests.world.rig import CRASH_AFTER, CRASH_BEFORE, Crash

MODULES = (
    "holdfast.world.publish",
    "holdfast.roles.adapter",
    "holdfast.roles.receipts",
)


PAY = effects("shop", "pay")


@pytest.fixture
def rig() -> Rig:
    return Rig()


# -- section 4 -----------------------------------------------------------------------------------


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "a dispatch item names universe, world, intent, kind, params, origin, policy context and time",
)
def test_a_dispatch_item_has_the_eight_fields(rig: Rig) -> None:
    assert [field.name for field in msgspec.structs.fields(Intent)][:8] == [
        "universe_id", "world_id", "intent_hash", "effect_kind", "params", "origin_name",
        "policy_context_hash", "enqueued_at_ns",
    ]  # fmt: skip
    ada = rig.buyer("ada", Ordered("tea"))
    intent = rig.intent()
    assert (intent.universe_id, intent.world_id) == ("shop", rig.id(ada))
    assert (intent.effect_kind, intent.origin_name) == ("pay", "ada")
    assert codec.unpack(intent.params) == ["tea"]


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "a claim takes an item out of what is pending, for a time",
)
def test_a_claimed_effect_is_nobody_elses_until_its_time_is_over(rig: Rig) -> None:
    rig.buyer("ada", Ordered())
    assert len(rig.store.transact(queue.claim, PAY, "one", 10, S)) == 1
    assert rig.store.transact(queue.claim, PAY, "two", 10, S) == []
    rig.clock.advance(2 * S)
    assert len(rig.store.transact(queue.claim, PAY, "two", 10, S)) == 1


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "the call is made outside any transaction, and its receipt is a typed event in the inbox of the world",
)
def test_a_receipt_is_ingress_of_its_own_kind(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered(tag="t"))
    intent = rig.intent()
    rig.work(rig.pool())
    ingress = ada.journal()[1].step.ingress
    assert (ingress.kind, ingress.type) == (Kind.RECEIPT, "pay")
    assert ingress.intent_hash == intent.intent_hash
    stored = codec.unpack_as(Receipt, ingress.value)
    assert (stored.status, codec.unpack(stored.value), stored.tag) == (Status.OK, "done", "t")


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "what a claim holds goes back to pending when its time is over, without a reaper to depend on",
)
def test_an_expired_claim_is_requeued_by_the_next_claim_or_by_a_reaper(rig: Rig) -> None:
    rig.buyer("ada", Ordered())
    rig.store.transact(queue.claim, PAY, "dies", 1, S)
    rig.clock.advance(2 * S)
    assert rig.store.transact(queue.reap, PAY, 10) == 1
    assert rig.counts().ready == 1


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "an intent whose receipt was delivered gets no second one",
)
def test_a_second_terminal_delivery_is_dropped(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered())
    intent = rig.intent()
    rig.work(rig.pool())
    error = Receipt(intent.intent_hash, "pay", Status.ERROR, code="late")
    rig.store.transact(receipts.receive, intent, error)
    assert rig.depth(ada) == 0


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "a retry is another attempt of the same intent and comes before any receipt",
)
def test_retries_count_attempts_and_keep_the_identity(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered())
    rig.outside.answers += [OSError("down"), OSError("down")]
    rig.work(rig.pool(), seconds=10)
    assert [call.attempt for call in rig.outside.calls] == [1, 2, 3]
    assert len(rig.outside.keys) == 1
    assert ada.height() == 2


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "an intent ends as ok, error or timeout, and as nothing else",
)
def test_there_are_three_ends(rig: Rig) -> None:
    assert {status.value for status in Status} == {"ok", "error", "timeout"}


# -- protocols -----------------------------------------------------------------------------------


@pytest.mark.spec(
    "004",
    "Protocol C: `publish_effect_intents(world, epoch, intents[])`",
    "who has lost the lease publishes nothing",
)
def test_a_stale_worker_publishes_nothing(rig: Rig) -> None:
    ada = rig.buyer("ada", Woken())
    ada.send(Ordered())
    rig.store.transact(lease.force_release, rig.subject(ada), "taken away")
    rig.host.tick()
    assert rig.counts() == queue.Counts()
    assert ada.height() == 1


@pytest.mark.spec(
    "004",
    "Protocol C: `publish_effect_intents(world, epoch, intents[])`",
    "an intent that was dispatched is not dispatched again",
)
def test_an_intent_is_dispatched_once(rig: Rig) -> None:
    rig.buyer("ada", Ordered())
    intent = rig.intent()
    for _ in range(3):
        rig.store.transact(publish.publish, [intent])
    assert rig.counts().ready == 1
    rig.work(rig.pool())
    rig.store.transact(publish.publish, [intent])
    assert rig.counts() == queue.Counts(done=1)


@pytest.mark.spec(
    "004",
    "Protocol D: `adapter_claim_execute_ack(effect_seq)`",
    "receipt and end of the item are one commit",
)
@pytest.mark.parametrize("fault", [CRASH_BEFORE, CRASH_AFTER])
def test_a_receipt_is_there_exactly_when_the_item_is_done(rig: Rig, fault: str) -> None:
    ada = rig.buyer("ada", Ordered())
    pool = rig.pool(kinds=["pay"])
    rig.backend.arm({2: fault})
    with pytest.raises(Crash):
        pool.runners[0].tick()
    assert rig.depth(ada) == rig.counts().done == (fault == CRASH_AFTER)


@pytest.mark.spec(
    "004",
    "Protocol D: `adapter_claim_execute_ack(effect_seq)`",
    "an answer under a claim that has run out is refused",
)
def test_a_late_ack_is_refused(rig: Rig) -> None:
    rig.buyer("ada", Ordered())
    [claim] = rig.store.transact(queue.claim, PAY, "slow", 1, S)
    rig.clock.advance(2 * S)
    with pytest.raises(ClaimLost):
        rig.store.transact(queue.ack, [claim.token])
    then = queue.Then(0, receipts.receive.name, codec.pack([_intent(claim), _ok(claim)]))
    assert rig.store.transact(queue.settle, [claim.token], [], queue.Budget(), [then]) == ["lost"]
    assert rig.counts().done == 0


def _intent(claim: queue.Claim) -> Intent:
    return codec.unpack_as(Intent, claim.payload)


def _ok(claim: queue.Claim) -> Receipt:
    return Receipt(_intent(claim).intent_hash, "pay", Status.OK)


# -- crash windows, anchors, tests ---------------------------------------------------------------


@pytest.mark.spec(
    "004",
    "Failure Semantics and Safety",
    "between journal and dispatch there is no window: both are one commit",
)
@pytest.mark.parametrize("fault", [CRASH_BEFORE, CRASH_AFTER])
def test_an_effect_is_pending_exactly_when_its_entry_is_there(rig: Rig, fault: str) -> None:
    ada = rig.buyer("ada", Woken())
    ada.send(Ordered())
    rig.backend.arm({1: fault})
    with pytest.raises(Crash):
        rig.host.tick()
    assert (ada.height() - 1, rig.counts().ready) == ((1, 1) if fault == CRASH_AFTER else (0, 0))


@pytest.mark.spec(
    "004",
    "Failure Semantics and Safety",
    "an adapter that dies between call and receipt is followed by one that calls under the same key",
)
def test_a_call_without_a_receipt_is_made_again(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered())
    rig.outside.answers.append(Crash())
    with pytest.raises(Crash):
        rig.work(rig.pool("dies"))
    rig.expire(12)
    rig.work(rig.pool("follows"))
    assert (len(rig.outside.calls), len(rig.outside.keys)) == (2, 1)
    assert ada.state().told == ["ok done 2"]


@pytest.mark.spec(
    "004",
    "Failure Semantics and Safety",
    "effects, timers and mail are known by one hash of where they were born",
)
def test_identities_are_alike_in_every_replay_and_different_everywhere_else(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered(times=2), Slept(60), Wrote("bob"))
    bob = rig.buyer("bob", Ordered(times=2))
    known = {*ada.state().intents, *bob.state().intents}
    assert len(known) == 4
    assert ada.state(at=1).intents == ada.state().intents


@pytest.mark.spec("004", "Testing and Validation", "dispatched over and over, an intent ends once")
def test_duplicate_dispatches_end_in_one_receipt(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered())
    intent = rig.intent()
    pool = rig.pool()
    for _ in range(5):
        rig.store.transact(publish.publish, [intent])
        rig.work(pool)
    assert ada.state().told == ["ok done 1"]



"""Document 004, section 4 and protocols C and D: effects, from wish to receipt.

Each test names the rule it guards. Where the design settles a rule differently, the test guards what
we built and its rule says so. Timers and fabric have files of their own.
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
from holdfast.messages import Intent, Kind, Receipt, Status, intent_hash
from holdfast.ops import pending, service
from holdfast.roles import receipts
from holdfast.runner.faults import Refused
from holdfast.world import ingress, publish
from holdfast.world.publish import effects
from tests.postgres import RIGS
from tests.roles.rig import Rig
from tests.roles.shop import Buyer, Dropped, Ordered, Shipped, Slept, Woken, Wrote, pay
from tests.world.rig import CRASH_AFTER, CRASH_BEFORE, FAULTS, Crash, rows_on

MODULES = (
    "holdfast.world.publish",
    "holdfast.roles.adapter",
    "holdfast.roles.doing",
    "holdfast.roles.receipts",
)

PAY = effects("shop", "pay")


@pytest.fixture(params=RIGS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(backend=rows_on(request.param))
    yield made
    made.store.close()


def receipts_in(world: Any) -> list[Receipt]:
    """The receipts in a world's journal, in order."""
    steps = [entry.step.ingress for entry in world.journal()]
    return [codec.unpack_as(Receipt, one.value) for one in steps if one.kind is Kind.RECEIPT]


# -- section 4: the item -------------------------------------------------------------------------


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
    rig.clock.advance(7 * S)
    ada = rig.buyer("ada", Woken(), Ordered("tea", times=2))
    [first, second] = [codec.unpack_as(Intent, one) for one in rig.queued(PAY)]
    for n, intent in enumerate((first, second)):
        assert (intent.universe_id, intent.world_id) == ("shop", rig.id(ada))
        assert intent.intent_hash == intent_hash(rig.store.generation, rig.id(ada), (2, n))
        assert (intent.effect_kind, intent.origin_name) == ("pay", "ada")
        assert codec.unpack(intent.params) == ["tea"]
        # The policy is the effect's: the same for all its intents.
        assert intent.policy_context_hash == pay.policy_hash != b""
        assert intent.enqueued_at_ns == rig.clock.wall_ns()


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "an item is pending, or in flight, or ended, and never in two of these places",
)
def test_an_item_is_in_one_place_at_a_time(rig: Rig) -> None:
    rig.buyer("ada", Ordered())
    assert rig.counts() == queue.Counts(ready=1)
    [claim] = rig.store.transact(queue.claim, PAY, "me", 1, S)
    assert rig.counts() == queue.Counts(claimed=1)
    assert rig.store.read(queue.peek, PAY, 10) == []
    rig.store.transact(queue.fail, claim, "down", "down", True, S)
    assert rig.counts() == queue.Counts(delayed=1)
    assert rig.store.read(queue.claims_of, PAY, "me", 10) == []
    rig.clock.advance(2 * S)
    [claim] = rig.store.transact(queue.claim, PAY, "me", 1, S)
    rig.store.transact(queue.ack, [claim.token])
    assert rig.counts() == queue.Counts(done=1)


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "effects of all worlds of a universe and of one kind wait in one queue, and worlds take turns",
)
def test_a_crowd_of_one_world_does_not_keep_another_waiting(rig: Rig) -> None:
    rig.buyer("ada", Ordered("hers", times=50))
    rig.buyer("bob", Ordered("his"))
    claims = rig.store.transact(queue.claim, PAY, "me", 2, S)
    assert {codec.unpack(_intent(claim).params)[0] for claim in claims} == {"hers", "his"}


# -- section 4: claim and execute ----------------------------------------------------------------


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
    "the call is made outside any transaction: others commit meanwhile, and to the same world",
)
def test_a_call_holds_up_no_commit(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered())
    rig.outside.answers.append(lambda: str(ada.send(Woken("meanwhile"))))
    rig.work(rig.pool())
    assert ada.state().woken == ["meanwhile"]
    assert ada.state().told == ["ok 2 1"]


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "what comes back is a typed receipt event in the inbox of the world that wanted it",
)
def test_a_receipt_is_ingress_of_its_own_kind(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered(tag="t"))
    intent = rig.intent()
    rig.work(rig.pool())
    found = ada.journal()[1].step.ingress
    assert (found.kind, found.type) == (Kind.RECEIPT, "pay")
    assert found.intent_hash == intent.intent_hash
    stored = codec.unpack_as(Receipt, found.value)
    assert (stored.status, codec.unpack(stored.value), stored.tag) == (Status.OK, "done", "t")


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "with its receipt an intent is complete: nothing of it is pending or in flight any more",
)
def test_nothing_is_left_of_an_intent_that_has_its_receipt(rig: Rig) -> None:
    rig.buyer("ada", Ordered())
    intent = rig.intent()
    assert rig.store.read(publish.pending, "shop", intent.intent_hash) is not None
    rig.work(rig.pool())
    assert rig.store.read(publish.pending, "shop", intent.intent_hash) is None
    assert rig.counts() == queue.Counts(done=1)


# -- section 4: recovery -------------------------------------------------------------------------


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "what a claim holds goes back to pending when its time is over, without a reaper to depend on",
)
@pytest.mark.parametrize("by", ["a reaper", "the next claim"])
def test_an_expired_claim_is_requeued_by_whoever_comes_first(rig: Rig, by: str) -> None:
    rig.buyer("ada", Ordered())
    rig.store.transact(queue.claim, PAY, "dies", 1, S)
    rig.clock.advance(2 * S)
    if by == "a reaper":
        assert rig.store.transact(queue.reap, PAY, 10) == 1
        assert rig.counts().ready == 1
    else:
        assert len(rig.store.transact(queue.claim, PAY, "next", 1, S)) == 1


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "an intent whose receipt was delivered gets no second one, from whomever",
)
def test_a_second_terminal_delivery_is_dropped(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered())
    intent = rig.intent()
    rig.work(rig.pool())
    error = Receipt(intent.intent_hash, "pay", Status.ERROR, code="late")
    rig.store.transact(receipts.receive, intent, error)
    assert rig.depth(ada) == 0
    with pytest.raises((NotFound, Invalid)):
        service.receipt_inject(rig.store, "shop", rig.id(ada), error)


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "an item whose claims keep running out is given up after a few, with a receipt `timeout`",
)
def test_claims_that_run_out_have_a_budget(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered())
    rig.outside.answers += [Crash()] * 9
    for n in range(3):
        with pytest.raises(Crash):
            rig.work(rig.pool(f"pool-{n}"))
        rig.expire(12)
    rig.work(rig.pool("last"))
    [told] = receipts_in(ada)
    assert (told.status, told.code) == (Status.TIMEOUT, "expiries_exhausted")
    assert rig.counts() == queue.Counts(dead=1)


# -- section 4: retries --------------------------------------------------------------------------


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "an adapter may try again by itself before it answers: to the runtime that is one attempt",
)
def test_retries_inside_a_call_are_its_own(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered())
    tries: list[int] = []

    def stubborn() -> str:
        while len(tries) < 3:
            tries.append(1)
        return "at last"

    rig.outside.answers.append(stubborn)
    rig.work(rig.pool())
    assert ada.state().told == ["ok at last 1"]


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "a retry is another attempt of the same intent, under the same key, before any receipt",
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
    "every attempt that came to nothing leaves a record: who made it, when, how it ended",
)
def test_each_attempt_is_written_down(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered())
    rig.outside.answers += [OSError("down"), Crash()]
    with pytest.raises(Crash):
        rig.work(rig.pool("first"), seconds=10)
    rig.expire(12)
    rig.work(rig.pool("second"), seconds=10)
    [told] = receipts_in(ada)
    assert [(one.end, one.owner.partition("/")[0]) for one in told.tried] == [
        ("failed", "first"), ("expired", "first"),
    ]  # fmt: skip
    assert "down" in told.tried[0].error
    assert all(one.began_ns <= one.ended_ns for one in told.tried)
    assert (told.status, told.attempts) == (Status.OK, 3)


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "a retry waits, and keeps its place: its number stays and it is not due before its time",
)
def test_a_retry_keeps_its_number_and_is_put_off(rig: Rig) -> None:
    rig.buyer("ada", Ordered())
    [claim] = rig.store.transact(queue.claim, PAY, "me", 1, S)
    rig.store.transact(queue.fail, claim, "down", "down", True, 5 * S)
    assert rig.store.transact(queue.claim, PAY, "me", 1, S) == []
    rig.clock.advance(6 * S)
    [again] = rig.store.transact(queue.claim, PAY, "me", 1, S)
    assert (again.seq, again.number) == (claim.seq, claim.number + 1)


# -- section 4: the end --------------------------------------------------------------------------


def ends_well(rig: Rig) -> Buyer:
    ada = rig.buyer("ada", Ordered())
    rig.work(rig.pool())
    return ada  # type: ignore[return-value]


def fails(rig: Rig) -> Buyer:
    rig.outside.answers += [OSError("down")] * 9
    ada = rig.buyer("ada", Ordered())
    rig.work(rig.pool(), seconds=60)
    return ada  # type: ignore[return-value]


def takes_too_long(rig: Rig) -> Buyer:
    rig.outside.answers += [lambda: asyncio.sleep(60)] * 9
    ada = rig.buyer("ada", Shipped(1.0))
    rig.work(rig.pool(), seconds=60)
    return ada  # type: ignore[return-value]


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "an intent ends as ok, error or timeout, and as nothing else",
)
@pytest.mark.parametrize(
    ("story", "status"),
    [(ends_well, Status.OK), (fails, Status.ERROR), (takes_too_long, Status.TIMEOUT)],
)
def test_there_are_three_ends(rig: Rig, story: Callable[[Rig], Any], status: Status) -> None:
    assert [told.status for told in receipts_in(story(rig))] == [status]
    assert len(Status) == 3


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "attempts that are used up, or that cannot help, end in an error and a letter with everything",
)
@pytest.mark.parametrize(
    ("answers", "code", "failures"),
    [([OSError("down")] * 3, "handler_error", 3), ([Refused(why="no")], "refused", 1)],
    ids=["used up", "refused"],
)
def test_what_is_given_up_is_kept(
    rig: Rig, answers: list[Exception], code: str, failures: int
) -> None:
    rig.outside.answers += answers
    ada = rig.buyer("ada", Ordered())
    intent = rig.intent()
    rig.work(rig.pool(), seconds=60)
    [told], [letter] = receipts_in(ada), rig.letters()
    assert (told.status, told.code) == (Status.ERROR, code)
    assert (letter.code, letter.failures, len(letter.tried)) == (code, failures, failures)
    assert codec.unpack_as(Intent, letter.payload) == intent


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "a cancelled intent ends as `error: cancelled`, also while somebody is at it",
)
@pytest.mark.parametrize("claimed", [False, True])
def test_a_cancelled_intent_has_its_receipt_at_once(rig: Rig, claimed: bool) -> None:
    ada = rig.buyer("ada", Ordered())
    held = rig.store.transact(queue.claim, PAY, "me", 1, 100 * S) if claimed else []
    ada.send(Dropped())
    rig.think()
    [told] = receipts_in(ada)
    assert (told.status, told.code) == (Status.ERROR, "cancelled")
    for claim in held:
        with pytest.raises(ClaimLost):
            rig.store.transact(queue.ack, [claim.token])


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "redriven, a dead intent is a new one that names the old; the old one is not redriven twice",
)
def test_a_redrive_is_another_intent(rig: Rig) -> None:
    ada: Any = fails(rig)
    [old], [letter] = receipts_in(ada), rig.letters()
    [made] = rig.store.transact(receipts.redrive_effects, "shop", "pay", [letter.seq])
    with pytest.raises(NotFound):
        rig.store.transact(receipts.redrive_effects, "shop", "pay", [letter.seq])
    rig.outside.answers.clear()
    rig.work(rig.pool())
    [_, new] = receipts_in(ada)
    assert (new.intent_hash, new.redrive_of) == (made, old.intent_hash)
    assert len(rig.outside.keys) == 2


# -- protocol C ----------------------------------------------------------------------------------


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
    "the intents of an entry are pending all together or not at all",
)
@pytest.mark.parametrize("fault", [CRASH_BEFORE, CRASH_AFTER])
def test_intents_are_published_all_or_none(rig: Rig, fault: str) -> None:
    ada = rig.buyer("ada", Woken())
    ada.send(Ordered(times=5))
    rig.backend.arm({1: fault})
    with pytest.raises(Crash):
        rig.host.tick()
    assert rig.counts().ready == (5 if fault == CRASH_AFTER else 0)


@pytest.mark.spec(
    "004",
    "Protocol C: `publish_effect_intents(world, epoch, intents[])`",
    "an entry's intents are published once, by the commit of the entry, whatever becomes of it",
)
@pytest.mark.parametrize("fault", FAULTS)
def test_an_intent_is_dispatched_once(rig: Rig, fault: str) -> None:
    ada = rig.buyer("ada", Woken())
    ada.send(Ordered(times=3))
    rig.backend.arm({1: fault})
    rig.think()
    rig.expire(60)
    rig.think()
    assert rig.counts() == queue.Counts(ready=3)
    assert len(set(ada.state().intents)) == 3


@pytest.mark.spec(
    "004",
    "Protocol C: `publish_effect_intents(world, epoch, intents[])`",
    "a key stands for one intent: wanted again under it, also when it is done, nothing is dispatched",
)
def test_a_key_is_dispatched_once(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered(key="k"), Ordered(key="k"))
    assert rig.counts().ready == 1
    rig.work(rig.pool())
    ada.send(Ordered(key="k"))
    rig.work(rig.pool())
    assert rig.counts() == queue.Counts(done=1)
    assert len(set(ada.state().intents)) == 1


@pytest.mark.spec(
    "004",
    "Protocol C: `publish_effect_intents(world, epoch, intents[])`",
    "a key that comes with other parameters is answered with `error: key_conflict`",
)
def test_a_key_for_something_else_is_a_conflict(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered("tea", key="k"), Ordered("coffee", key="k"))
    rig.work(rig.pool())
    assert sorted(told.code for told in receipts_in(ada)) == ["", "key_conflict"]
    assert [call.args for call in rig.outside.calls] == [("tea",)]


# -- protocol D ----------------------------------------------------------------------------------


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


@pytest.mark.spec(
    "004",
    "Protocol D: `adapter_claim_execute_ack(effect_seq)`",
    "a claim is known by item, number and owner: the same worker's earlier claim counts for nothing",
)
def test_an_earlier_claim_of_the_same_worker_is_refused(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered())
    [first] = rig.store.transact(queue.claim, PAY, "me", 1, S)
    rig.clock.advance(2 * S)
    [second] = rig.store.transact(queue.claim, PAY, "me", 1, S)
    then = queue.Then(0, receipts.receive.name, codec.pack([_intent(first), _ok(first)]))
    assert rig.store.transact(queue.settle, [first.token], [], queue.Budget(), [then]) == ["lost"]
    assert rig.depth(ada) == 0
    assert rig.store.transact(queue.settle, [second.token], [], queue.Budget(), [then]) == ["done"]
    assert rig.depth(ada) == 1


@pytest.mark.spec(
    "004",
    "Protocol D: `adapter_claim_execute_ack(effect_seq)`",
    "the handoff is durable: a receipt waits in the inbox while nobody hosts its world",
)
def test_a_receipt_waits_for_its_world(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered())
    rig.store.transact(lease.force_release, rig.subject(ada), "its worker is gone")
    pool = rig.pool(kinds=["pay"])
    while pool.runners[0].tick().claimed:
        pass
    assert rig.depth(ada) == 1
    rig.host = rig.worker(incarnation="another", idle_s=1e6)
    rig.expire(60)
    rig.think()
    assert ada.state().told == ["ok done 1"]


@pytest.mark.spec(
    "004",
    "Protocol D: `adapter_claim_execute_ack(effect_seq)`",
    "a full inbox takes receipts all the same",
)
def test_a_receipt_is_never_refused_for_want_of_room(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada = rig.buyer("ada", Ordered())
    monkeypatch.setattr(ingress, "INBOX_DEPTH_MAX", 0)
    with pytest.raises(Overloaded):
        ada.send(Woken())
    pool = rig.pool(kinds=["pay"])
    while pool.runners[0].tick().claimed:
        pass
    assert (rig.counts().done, rig.depth(ada)) == (1, 1)


@pytest.mark.spec(
    "004",
    "Protocol D: `adapter_claim_execute_ack(effect_seq)`",
    "what a deleted world wanted is dropped: no call, no receipt, no letter",
)
def test_the_wishes_of_a_deleted_world_are_dropped(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered(times=3))
    ada.delete()
    rig.work(rig.pool())
    assert rig.outside.calls == []
    assert rig.counts() == queue.Counts(done=3)


def _intent(claim: queue.Claim) -> Intent:
    return codec.unpack_as(Intent, claim.payload)


def _ok(claim: queue.Claim) -> Receipt:
    return Receipt(_intent(claim).intent_hash, "pay", Status.OK)


# -- crash windows, anchors, the document's own tests --------------------------------------------


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
    here = (rig.store.generation, rig.id(ada))
    assert ada.state().intents == [intent_hash(*here, (1, 0)), intent_hash(*here, (1, 1))]
    assert ada.state(at=1).intents == ada.state().intents
    [timer] = [row.intent.intent_hash for row in rig.store.read(pending.timers, "shop")]
    assert timer == intent_hash(*here, (2, 0))
    [mail] = [
        entry.step.ingress.intent_hash
        for entry in bob.journal()
        if entry.step.ingress.kind is Kind.FABRIC
    ]
    assert mail == intent_hash(*here, (3, 0))
    assert len({*ada.state().intents, *bob.state().intents, timer, mail}) == 6
    # The same place in another world, or in another generation of the store, is another identity.
    elsewhere = {
        intent_hash(here[0], rig.id(bob), (1, 0)),
        intent_hash(here[0] + 1, here[1], (1, 0)),
    }
    assert len({*elsewhere, ada.state().intents[0]}) == 3


@pytest.mark.spec("004", "Testing and Validation", "dispatched over and over, an intent ends once")
def test_duplicate_dispatches_end_in_one_receipt(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered())
    intent = rig.intent()
    for _ in range(5):
        rig.store.transact(publish.publish, [intent])
    for n in range(3):
        rig.work(rig.pool(f"pool-{n}"))
    assert len(receipts_in(ada)) == 1
    assert len(rig.outside.keys) == 1


@pytest.mark.spec(
    "004",
    "Testing and Validation",
    "a crash after the claim and before the call costs nothing: it is called once, by the next",
)
def test_a_claim_without_a_call_is_called_by_another(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered())
    rig.backend.arm({1: CRASH_AFTER})
    with pytest.raises(Crash):
        rig.work(rig.pool("dies"))
    rig.backend.arm({})
    assert rig.outside.calls == []
    rig.expire(12)
    rig.work(rig.pool("follows"))
    assert len(rig.outside.calls) == 1
    assert [told.status for told in receipts_in(ada)] == [Status.OK]


@pytest.mark.spec(
    "004",
    "Testing and Validation",
    "a crash after the call and before the receipt repeats the call and not the receipt",
)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_receipt_that_was_lost_is_made_good(rig: Rig, fault: str) -> None:
    ada = rig.buyer("ada", Ordered())
    pool = rig.pool("dies")
    rig.backend.arm({2: fault})
    try:
        rig.work(pool)
    except Crash:
        pool = rig.pool("follows")
    rig.backend.arm({})
    rig.expire(12)
    rig.work(pool, seconds=40)
    assert [told.status for told in receipts_in(ada)] == [Status.OK]
    assert len(rig.outside.keys) == 1

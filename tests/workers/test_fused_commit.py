"""Fused commits of receipts: settle and apply in one commit, with concurrent changes before it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

import holdfast as hf
from holdfast import codec, failpoints
from holdfast.clock import S
from holdfast.durable import inbox, journal, queue
from holdfast.durable.queue import Claim
from holdfast.errors import CommitUnknown
from holdfast.messages import IngressKind, Intent, IntentReceipt, ReceiptStatus
from holdfast.runner import RunnerPolicy
from holdfast.runner.claim_ops import ClaimRequest
from holdfast.runner.commit_handoff import Handoff
from holdfast.runner.work import WorkItem, WorkOutcome
from holdfast.workers.effects.receipts import deliver_receipt
from holdfast.world import catalog, intents, journal_entry
from tests.workers.rig import WorkerRig
from tests.workers.shop import Dropped, GoodsOrdered, Woken
from tests.world.rig import CRASH_AFTER, UNKNOWN_AFTER, Crash

MODULES = ("holdfast.workers.world.fused_commit", "holdfast.runner.commit_handoff")
OWNER = "pool/1"


class FakeWakeSignal:
    def __init__(self) -> None:
        self.event = threading.Event()

    def set(self) -> None:
        self.event.set()


class FusedCommitRig(WorkerRig):
    """A world worker with a fused committer, and one worker of an effect pool."""

    def __init__(self) -> None:
        super().__init__()
        self.committer = self.world_worker.committer
        self.committer.open(FakeWakeSignal())
        self.queue_name = intents.effect_queue(self.universe, "pay")

    def claim(self, limit: int = 10, ttl_s: float = 10.0) -> list[Claim]:
        claims: list[Claim] = self.store.transact(
            queue.claim, self.queue_name, OWNER, limit, int(ttl_s * S)
        )
        return claims

    def outcome_of(self, claim: Claim, value: str = "done") -> WorkOutcome:
        """The outcome of an ended call as a pool holds it."""
        intent = codec.unpack_as(Intent, claim.payload)
        receipt = IntentReceipt(
            intent.intent_hash, intent.effect_kind, ReceiptStatus.OK, codec.pack(value)
        )
        work = WorkItem(claim, claim.payload, "queue", lambda *_: None)
        work.on_ack(deliver_receipt, intent, receipt)
        return WorkOutcome(work, None, 1)

    def make_handoff(self, *outcomes: WorkOutcome, capacity: int = 0) -> Handoff:
        request = ClaimRequest(
            queue=self.queue_name,
            timers="",
            owner=OWNER,
            limit=capacity,
            reserved=0,
            ttl_ns=10 * S,
            budget=RunnerPolicy().budget,
        )
        return Handoff(list(outcomes), request if capacity else None, capacity, 0, lambda: None)

    def commit_handoff(self, *outcomes: WorkOutcome, capacity: int = 0) -> Handoff:
        """Submit a handoff and process it to its end."""
        handoff = self.make_handoff(*outcomes, capacity=capacity)
        assert self.committer.submit(handoff)
        self.committer.process(self.clock.mono_ns() + S)
        assert handoff.is_resolved
        return handoff

    def is_consistent(self, handle: hf.WorldHandle) -> bool:  # type: ignore[type-arg]
        self.store.read(journal.verify, self.subject(handle))
        subject = self.subject(handle)
        return self.store.read(inbox.last_seq, subject) == self.cursor(handle)


@pytest.fixture
def rig() -> FusedCommitRig:
    return FusedCommitRig()


# -- one commit ------------------------------------------------------------------------------------


def test_fused_commit_applies_the_receipt_and_completes_the_effect(rig: FusedCommitRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    handoff = rig.commit_handoff(rig.outcome_of(*rig.claim()))
    assert handoff.result == ([], None)
    assert (rig.effect_counts(), ada.state().told) == (queue.QueueCounts(done=1), ["ok done 1"])


def test_settle_apply_and_claim_are_one_fused_commit(rig: FusedCommitRig) -> None:
    rig.buyer("ada", GoodsOrdered(times=2))
    [first] = rig.claim(limit=1)
    before = rig.backend.last_id()
    handoff = rig.commit_handoff(rig.outcome_of(first), capacity=5)
    assert rig.backend.last_id() == before + 1
    assert handoff.result is not None
    assert handoff.result[1] is not None
    assert [one.seq for one in handoff.result[1].items] == [2]


def test_fused_commit_writes_no_inbox_row_and_no_runnable_row(rig: FusedCommitRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    rig.commit_handoff(rig.outcome_of(*rig.claim()))
    assert rig.is_consistent(ada)
    assert rig.store.read(catalog.list_runnable, rig.universe, "A", 10) == []


def test_journal_with_fused_receipts_replays_to_the_same_state(rig: FusedCommitRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered(times=3))
    rig.commit_handoff(*map(rig.outcome_of, rig.claim()))
    before = ada.state()
    rig.world_worker = rig.worker("A", "2")
    rig.advance_clock()
    rig.buyer("ada", Woken())
    assert ada.state().told == before.told == ["ok done 1"] * 3


def test_receipts_of_one_world_are_applied_in_handoff_order(rig: FusedCommitRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered(times=3))
    claims = rig.claim()
    rig.commit_handoff(
        *(rig.outcome_of(one, said) for one, said in zip(claims, "cab", strict=True))
    )
    assert ada.state().told == ["ok c 1", "ok a 1", "ok b 1"]


def test_inbox_events_are_applied_before_the_fused_receipt(rig: FusedCommitRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    [claim] = rig.claim()
    ada.send(Woken("first"))
    rig.commit_handoff(rig.outcome_of(claim))
    kinds = [journal_entry.decode(body).ingress.kind for body in rig.entry_bodies(ada)]
    assert kinds == [IngressKind.EVENT, IngressKind.EVENT, IngressKind.RECEIPT]
    assert rig.is_consistent(ada)


# -- concurrent changes ----------------------------------------------------------------------------


def test_receipt_of_a_lost_claim_is_not_applied(rig: FusedCommitRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    outcome = rig.outcome_of(*rig.claim(ttl_s=1.0))
    rig.clock.advance(2 * S)
    handoff = rig.commit_handoff(outcome)
    assert handoff.result == ([outcome], None)
    assert ada.state().told == []
    rig.run_until_idle(rig.pool())
    assert (ada.state().told, rig.effect_counts().done) == (["ok done 2"], 1)


def test_receipt_of_a_cancelled_effect_is_not_applied(rig: FusedCommitRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    outcome = rig.outcome_of(*rig.claim())
    ada.send(Dropped(0))
    rig.run_worlds()
    handoff = rig.commit_handoff(outcome)
    assert handoff.result == ([outcome], None)
    rig.run_worlds()
    assert ada.state().told == ["error cancelled 0"]


def test_effect_answered_by_an_operator_keeps_only_that_receipt(rig: FusedCommitRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    [claim] = rig.claim()
    intent = codec.unpack_as(Intent, claim.payload)
    told = IntentReceipt(intent.intent_hash, "pay", ReceiptStatus.OK, codec.pack("by hand"))
    rig.store.transact(intents.resolve_manually, rig.universe, intent.world_id, told)
    rig.commit_handoff(rig.outcome_of(claim))
    rig.run_worlds()
    assert ada.state().told == ["ok by hand 1"]


def test_concurrent_event_voids_the_fused_cycle_and_loses_nothing(rig: FusedCommitRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    outcome = rig.outcome_of(*rig.claim())
    with failpoints.on("world.inboxes_read", calls=lambda _: ada.send(Woken("between"))):
        handoff = rig.commit_handoff(outcome)
    assert handoff.result == ([outcome], None)
    rig.store.transact(
        queue.finish_batch,
        [outcome.work.claim.token],
        [],
        RunnerPolicy().budget,
        [
            queue.JoinedOperation(
                0, deliver_receipt.name, codec.pack(outcome.work.ack_operations[0][1])
            )
        ],
    )
    rig.run_worlds()
    assert (ada.state().woken, ada.state().told) == (["between"], ["ok done 1"])
    assert rig.is_consistent(ada)


def test_world_is_not_fused_for_a_while_after_a_conflict(rig: FusedCommitRig) -> None:
    rig.buyer("ada", GoodsOrdered(times=2))
    first, second = rig.claim(ttl_s=1.0)
    rig.clock.advance(2 * S)
    outcome = rig.outcome_of(second)
    assert rig.committer.accepts(outcome)
    rig.commit_handoff(rig.outcome_of(first))
    assert not rig.committer.accepts(outcome)
    rig.clock.advance(2 * S)
    rig.committer.process(rig.clock.mono_ns() + S)
    assert rig.committer.accepts(outcome)


def test_paused_world_is_not_fused(rig: FusedCommitRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    outcome = rig.outcome_of(*rig.claim())
    rig.store.transact(catalog.change_status, rig.universe, rig.id(ada), catalog.WorldEvent.PAUSE)
    handoff = rig.commit_handoff(outcome)
    assert handoff.result == ([outcome], None)
    assert ada.state().told == []


def test_world_hosted_elsewhere_is_not_fused(rig: FusedCommitRig) -> None:
    rig.buyer("ada", GoodsOrdered())
    outcome = rig.outcome_of(*rig.claim())
    assert not rig.worker("B").committer.accepts(outcome)


def test_rejected_outcome_does_not_reject_other_outcomes_of_the_handoff(
    rig: FusedCommitRig,
) -> None:
    ada, bob = rig.buyer("ada", GoodsOrdered()), rig.buyer("bob", GoodsOrdered())
    outcomes = [rig.outcome_of(one) for one in rig.claim()]
    ada.send(Dropped(0))
    rig.run_worlds()
    handoff = rig.commit_handoff(*outcomes)
    assert handoff.result is not None
    assert len(handoff.result[0]) == 1
    rig.run_worlds()
    assert (ada.state().told, bob.state().told) == (["error cancelled 0"], ["ok done 1"])


def test_fused_commit_of_unknown_outcome_is_reported_and_applied_once(rig: FusedCommitRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    outcome = rig.outcome_of(*rig.claim())
    rig.backend.arm({1: UNKNOWN_AFTER})
    handoff = rig.commit_handoff(outcome)
    assert isinstance(handoff.error, CommitUnknown)
    rig.run_worlds()
    assert (ada.state().told, rig.effect_counts().done) == (["ok done 1"], 1)


def test_crash_after_the_fused_commit_keeps_all_its_effects(rig: FusedCommitRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered())
    outcome = rig.outcome_of(*rig.claim())
    rig.backend.arm({1: CRASH_AFTER})
    with pytest.raises(Crash):
        rig.commit_handoff(outcome)
    rig.world_worker = rig.worker("A", "2")
    rig.advance_clock()
    rig.run_worlds()
    assert (ada.state().told, rig.effect_counts()) == (["ok done 1"], queue.QueueCounts(done=1))


def test_drained_committer_accepts_no_handoff(rig: FusedCommitRig) -> None:
    rig.buyer("ada", GoodsOrdered())
    handoff = rig.make_handoff(rig.outcome_of(*rig.claim()))
    rig.committer.drain()
    assert not rig.committer.submit(handoff)


def test_unstarted_handoff_can_be_withdrawn(rig: FusedCommitRig) -> None:
    rig.buyer("ada", GoodsOrdered())
    handoff = rig.make_handoff(rig.outcome_of(*rig.claim()))
    rig.committer.submit(handoff)
    assert rig.committer.withdraw(handoff)
    rig.committer.process(rig.clock.mono_ns() + S)
    assert not handoff.is_resolved


# -- real threads ----------------------------------------------------------------------------------


@hf.effect("echo")
def echo(call: hf.Call, n: int) -> int:
    return n


class StepBegun(hf.Event):
    n: int


class Poked(hf.Event):
    pass


class Chain(hf.World):
    steps: int = 0
    pokes: int = 0
    last: int = -1

    @hf.on(StepBegun)
    def begin(self, event: StepBegun, cx: hf.Context) -> None:
        cx.do(echo, event.n)

    @hf.on(Poked)
    def poke(self, event: Poked, cx: hf.Context) -> None:
        self.pokes += 1

    @hf.on(echo)
    def step(self, receipt: hf.Receipt[int], cx: hf.Context) -> None:
        self.steps += 1
        self.last = receipt.value
        if receipt.value:
            cx.do(echo, receipt.value - 1)


app = hf.App("line", worlds=[Chain])
TIMEOUT_S = 60.0


def test_effect_chains_complete_while_clients_send_to_their_worlds(tmp_path: Path) -> None:
    length, pokes, worlds = 30, 40, 12
    with app.open(f"lmdb:{tmp_path}/store") as runtime:
        chains = [runtime.world(Chain, f"c{n}") for n in range(worlds)]
        runtime.send_many([(one, StepBegun(length)) for one in chains])
        for _ in range(pokes):
            runtime.send_many([(one, Poked()) for one in chains[::2]])
        deadline = time.monotonic() + TIMEOUT_S
        while any(one.state().last != 0 for one in chains):
            assert time.monotonic() < deadline
            runtime.check()
            time.sleep(0.005)
        for index, one in enumerate(chains):
            one.wait_for(lambda s, i=index: s.pokes == (0 if i % 2 else pokes), timeout=TIMEOUT_S)
            assert one.state().steps == length + 1
        for one in chains:
            subject = catalog.subject_of(runtime.universe, one.create())
            runtime.store.read(journal.verify, subject)
        done = runtime.store.read(queue.counts, intents.effect_queue("line", "echo"))
    assert done == queue.QueueCounts(done=worlds * (length + 1))


# -- offers ----------------------------------------------------------------------------------------


def test_new_intents_are_claimed_for_offered_capacity_in_the_same_commit(
    rig: FusedCommitRig,
) -> None:
    ada = rig.buyer("ada")
    rig.run_worlds()
    offer = rig.make_handoff(capacity=3)
    assert rig.committer.offer_capacity(offer)
    ada.send(GoodsOrdered(times=5))
    before = rig.backend.last_id()
    rig.world_worker.tick()
    assert offer.result is not None
    assert offer.result[1] is not None
    assert [one.seq for one in offer.result[1].items] == [1, 2, 3]
    assert (rig.effect_counts().claimed, rig.effect_counts().ready) == (3, 2)
    assert rig.backend.last_id() <= before + 2, "the cycle's, and its hint's"


def test_offer_remains_until_a_world_emits_a_matching_intent(rig: FusedCommitRig) -> None:
    offer = rig.make_handoff(capacity=3)
    rig.committer.offer_capacity(offer)
    rig.buyer("ada", Woken())
    assert not offer.is_resolved
    assert rig.committer.cancel_offer(offer)


def test_used_offer_cannot_be_cancelled(rig: FusedCommitRig) -> None:
    offer = rig.make_handoff(capacity=3)
    rig.committer.offer_capacity(offer)
    rig.buyer("ada", GoodsOrdered())
    assert not rig.committer.cancel_offer(offer)


def test_offer_in_a_commit_of_unknown_outcome_gets_commit_unknown(rig: FusedCommitRig) -> None:
    ada = rig.buyer("ada", Woken())
    offer = rig.make_handoff(capacity=3)
    rig.committer.offer_capacity(offer)
    ada.send(GoodsOrdered())
    rig.backend.arm({1: UNKNOWN_AFTER})
    rig.run_worlds()
    assert isinstance(offer.error, CommitUnknown)
    assert rig.effect_counts() == queue.QueueCounts(claimed=1)


def test_runner_that_cancels_its_offer_claims_from_its_queue(tmp_path: Path) -> None:
    """Another process fills its queue while the local world worker emits no intent."""
    with (
        app.open(f"lmdb:{tmp_path}/store") as runtime,
        app.open(f"lmdb:{tmp_path}/store", roles=("world",), worker="other") as other,
    ):
        chains = [other.world(Chain, f"c{n}") for n in range(8)]
        other.send_many([(one, StepBegun(3)) for one in chains])
        for one in chains:
            one.wait_for(lambda s: s.steps == 4, timeout=TIMEOUT_S)
        assert runtime.roles[0].failure is None

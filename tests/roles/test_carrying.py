"""A receipt that is settled and handled in one commit, and everything that may come between."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

import holdfast as hf
from holdfast import codec
from holdfast.clock import S
from holdfast.durable import inbox, journal, queue
from holdfast.durable.queue import Claim
from holdfast.errors import CommitUnknown
from holdfast.messages import Intent, Kind, Receipt, Status
from holdfast.roles.receipts import receive
from holdfast.runner import Policy
from holdfast.runner.parcel import Parcel
from holdfast.runner.work import Outcome, Work
from holdfast.world import catalog, entry, publish
from tests.roles.rig import Rig
from tests.roles.shop import Dropped, Ordered, Woken
from tests.world.rig import CRASH_AFTER, UNKNOWN_AFTER, Crash

MODULES = ("holdfast.roles.carrying", "holdfast.runner.parcel")
OWNER = "pool/1"


class Bell:
    def __init__(self) -> None:
        self.rung = threading.Event()

    def ring(self) -> None:
        self.rung.set()


class Carrying(Rig):
    """A worker that carries, and one hand of a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.carriage = self.host.carriage
        self.carriage.open(Bell())
        self.name = publish.effects(self.universe, "pay")

    def claim(self, limit: int = 10, ttl_s: float = 10.0) -> list[Claim]:
        claims: list[Claim] = self.store.transact(
            queue.claim, self.name, OWNER, limit, int(ttl_s * S)
        )
        return claims

    def done(self, claim: Claim, said: str = "done") -> Outcome:
        """What a pool has in hand when its call has ended."""
        intent = codec.unpack_as(Intent, claim.payload)
        told = Receipt(intent.intent_hash, intent.effect_kind, Status.OK, codec.pack(said))
        work = Work(claim, claim.payload, "queue", lambda *_: None)
        work.join(receive, intent, told)
        return Outcome(work, None, 1)

    def parcel(self, *outcomes: Outcome, asked: int = 0) -> Parcel:
        taking = (self.name, "", OWNER, asked, 0, 10 * S, Policy().budget, None, None)
        return Parcel(list(outcomes), taking if asked else None, asked, 0, lambda: None)

    def bring(self, *outcomes: Outcome, asked: int = 0) -> Parcel:
        """Carry a parcel to its end."""
        parcel = self.parcel(*outcomes, asked=asked)
        assert self.carriage.carry(parcel)
        self.carriage.turn(self.clock.mono_ns() + S)
        assert parcel.ended
        return parcel

    def sound(self, handle: hf.WorldHandle) -> bool:  # type: ignore[type-arg]
        self.store.read(journal.verify, self.subject(handle))
        subject = self.subject(handle)
        return self.store.read(inbox.last_seq, subject) == self.cursor(handle)


@pytest.fixture
def rig() -> Carrying:
    return Carrying()


# -- one commit ------------------------------------------------------------------------------------


def test_a_carried_receipt_is_handled_and_its_effect_done(rig: Carrying) -> None:
    ada = rig.buyer("ada", Ordered())
    parcel = rig.bring(rig.done(*rig.claim()))
    assert parcel.answer == ([], None)
    assert (rig.counts(), ada.state().told) == (queue.Counts(done=1), ["ok done 1"])


def test_settling_handling_and_claiming_are_one_commit(rig: Carrying) -> None:
    rig.buyer("ada", Ordered(times=2))
    [first] = rig.claim(limit=1)
    before = rig.backend.last_id()
    parcel = rig.bring(rig.done(first), asked=5)
    assert rig.backend.last_id() == before + 1
    assert parcel.answer is not None
    assert parcel.answer[1] is not None
    assert [one.seq for one in parcel.answer[1].items] == [2]


def test_what_is_carried_leaves_neither_an_ingress_nor_a_hint(rig: Carrying) -> None:
    ada = rig.buyer("ada", Ordered())
    rig.bring(rig.done(*rig.claim()))
    assert rig.sound(ada)
    assert rig.store.read(catalog.hints, rig.universe, "A", 10) == []


def test_a_journal_with_carried_receipts_is_replayed_alike(rig: Carrying) -> None:
    ada = rig.buyer("ada", Ordered(times=3))
    rig.bring(*map(rig.done, rig.claim()))
    before = ada.state()
    rig.host = rig.worker("A", "2")
    rig.expire()
    rig.buyer("ada", Woken())
    assert ada.state().told == before.told == ["ok done 1"] * 3


def test_receipts_of_one_world_are_handled_in_the_order_of_the_parcel(rig: Carrying) -> None:
    ada = rig.buyer("ada", Ordered(times=3))
    claims = rig.claim()
    rig.bring(*(rig.done(one, said) for one, said in zip(claims, "cab", strict=True)))
    assert ada.state().told == ["ok c 1", "ok a 1", "ok b 1"]


def test_what_waits_in_the_inbox_is_handled_before_it(rig: Carrying) -> None:
    ada = rig.buyer("ada", Ordered())
    [claim] = rig.claim()
    ada.send(Woken("first"))
    rig.bring(rig.done(claim))
    kinds = [entry.decode(body).ingress.kind for body in rig.bodies(ada)]
    assert kinds == [Kind.EVENT, Kind.EVENT, Kind.RECEIPT]
    assert rig.sound(ada)


# -- what comes between ----------------------------------------------------------------------------


def test_a_receipt_whose_claim_was_lost_is_not_handled(rig: Carrying) -> None:
    ada = rig.buyer("ada", Ordered())
    outcome = rig.done(*rig.claim(ttl_s=1.0))
    rig.clock.advance(2 * S)
    parcel = rig.bring(outcome)
    assert parcel.answer == ([outcome], None)
    assert ada.state().told == []
    rig.work(rig.pool())
    assert (ada.state().told, rig.counts().done) == (["ok done 2"], 1)


def test_a_receipt_of_a_cancelled_effect_is_not_handled(rig: Carrying) -> None:
    ada = rig.buyer("ada", Ordered())
    outcome = rig.done(*rig.claim())
    ada.send(Dropped(0))
    rig.think()
    parcel = rig.bring(outcome)
    assert parcel.answer == ([outcome], None)
    rig.think()
    assert ada.state().told == ["error cancelled 0"]


def test_an_effect_that_was_answered_by_hand_has_that_receipt_alone(rig: Carrying) -> None:
    ada = rig.buyer("ada", Ordered())
    [claim] = rig.claim()
    intent = codec.unpack_as(Intent, claim.payload)
    told = Receipt(intent.intent_hash, "pay", Status.OK, codec.pack("by hand"))
    rig.store.transact(publish.answer, rig.universe, intent.world_id, told)
    rig.bring(rig.done(claim))
    rig.think()
    assert ada.state().told == ["ok by hand 1"]


def test_an_event_that_comes_first_voids_the_cycle_and_loses_nothing(rig: Carrying) -> None:
    ada = rig.buyer("ada", Ordered())
    outcome = rig.done(*rig.claim())
    drained = rig.host.drain_all

    def drain_then_send(world_ids: list[str]) -> dict[str, list[inbox.Ingress]]:
        found = drained(world_ids)
        ada.send(Woken("between"))
        return found

    rig.host.drain_all = drain_then_send  # type: ignore[assignment,method-assign]
    parcel = rig.bring(outcome)
    rig.host.drain_all = drained  # type: ignore[method-assign]
    assert parcel.answer == ([outcome], None)
    rig.store.transact(
        queue.settle,
        [outcome.work.claim.token],
        [],
        Policy().budget,
        [queue.Then(0, receive.name, codec.pack(outcome.work.joined[0][1]))],
    )
    rig.think()
    assert (ada.state().woken, ada.state().told) == (["between"], ["ok done 1"])
    assert rig.sound(ada)


def test_a_world_that_was_mistaken_is_not_carried_for_a_while(rig: Carrying) -> None:
    rig.buyer("ada", Ordered(times=2))
    first, second = rig.claim(ttl_s=1.0)
    rig.clock.advance(2 * S)
    outcome = rig.done(second)
    assert rig.carriage.carries(outcome)
    rig.bring(rig.done(first))
    assert not rig.carriage.carries(outcome)
    rig.clock.advance(2 * S)
    rig.carriage.turn(rig.clock.mono_ns() + S)
    assert rig.carriage.carries(outcome)


def test_a_world_that_is_paused_is_not_carried(rig: Carrying) -> None:
    ada = rig.buyer("ada", Ordered())
    outcome = rig.done(*rig.claim())
    rig.store.transact(catalog.change, rig.universe, rig.id(ada), catalog.Event.PAUSE)
    parcel = rig.bring(outcome)
    assert parcel.answer == ([outcome], None)
    assert ada.state().told == []


def test_a_world_that_is_not_hosted_here_is_not_carried(rig: Carrying) -> None:
    rig.buyer("ada", Ordered())
    outcome = rig.done(*rig.claim())
    assert not rig.worker("B").carriage.carries(outcome)


def test_one_that_is_refused_takes_no_other_along(rig: Carrying) -> None:
    ada, bob = rig.buyer("ada", Ordered()), rig.buyer("bob", Ordered())
    outcomes = [rig.done(one) for one in rig.claim()]
    ada.send(Dropped(0))
    rig.think()
    parcel = rig.bring(*outcomes)
    assert parcel.answer is not None
    assert len(parcel.answer[0]) == 1
    rig.think()
    assert (ada.state().told, bob.state().told) == (["error cancelled 0"], ["ok done 1"])


def test_a_commit_of_unknown_outcome_is_told_and_handled_once(rig: Carrying) -> None:
    ada = rig.buyer("ada", Ordered())
    outcome = rig.done(*rig.claim())
    rig.backend.arm({1: UNKNOWN_AFTER})
    parcel = rig.bring(outcome)
    assert isinstance(parcel.error, CommitUnknown)
    rig.think()
    assert (ada.state().told, rig.counts().done) == (["ok done 1"], 1)


def test_a_crash_right_after_the_commit_leaves_all_of_it(rig: Carrying) -> None:
    ada = rig.buyer("ada", Ordered())
    outcome = rig.done(*rig.claim())
    rig.backend.arm({1: CRASH_AFTER})
    with pytest.raises(Crash):
        rig.bring(outcome)
    rig.host = rig.worker("A", "2")
    rig.expire()
    rig.think()
    assert (ada.state().told, rig.counts()) == (["ok done 1"], queue.Counts(done=1))


def test_no_parcel_is_taken_after_the_end(rig: Carrying) -> None:
    rig.buyer("ada", Ordered())
    parcel = rig.parcel(rig.done(*rig.claim()))
    rig.carriage.finish()
    assert not rig.carriage.carry(parcel)


def test_a_parcel_that_was_not_begun_may_be_taken_back(rig: Carrying) -> None:
    rig.buyer("ada", Ordered())
    parcel = rig.parcel(rig.done(*rig.claim()))
    rig.carriage.carry(parcel)
    assert rig.carriage.withdraw(parcel)
    rig.carriage.turn(rig.clock.mono_ns() + S)
    assert not parcel.ended


# -- real threads ----------------------------------------------------------------------------------


@hf.effect("echo")
def echo(call: hf.Call, n: int) -> int:
    return n


class Begun(hf.Event):
    n: int


class Poked(hf.Event):
    pass


class Chain(hf.World):
    steps: int = 0
    pokes: int = 0
    last: int = -1

    @hf.on(Begun)
    def begin(self, event: Begun, cx: hf.Context) -> None:
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
LONG_S = 60.0


def test_chains_go_on_while_others_send_to_their_worlds(tmp_path: Path) -> None:
    length, pokes, worlds = 30, 40, 12
    with app.open(f"lmdb:{tmp_path}/store") as runtime:
        chains = [runtime.world(Chain, f"c{n}") for n in range(worlds)]
        runtime.send_many([(one, Begun(length)) for one in chains])
        for _ in range(pokes):
            runtime.send_many([(one, Poked()) for one in chains[::2]])
        deadline = time.monotonic() + LONG_S
        while any(one.state().last != 0 for one in chains):
            assert time.monotonic() < deadline
            runtime.check()
            time.sleep(0.005)
        for index, one in enumerate(chains):
            one.wait_for(lambda s, i=index: s.pokes == (0 if i % 2 else pokes), timeout=LONG_S)
            assert one.state().steps == length + 1
        for one in chains:
            subject = catalog.subject_of(runtime.universe, one.create())
            runtime.store.read(journal.verify, subject)
        done = runtime.store.read(queue.counts, publish.effects("line", "echo"))
    assert done == queue.Counts(done=worlds * (length + 1))


# -- offers ----------------------------------------------------------------------------------------


def test_what_a_world_wants_is_claimed_for_a_runner_that_waits_in_the_same_commit(
    rig: Carrying,
) -> None:
    ada = rig.buyer("ada")
    rig.think()
    offer = rig.parcel(asked=3)
    assert rig.carriage.offer(offer)
    ada.send(Ordered(times=5))
    before = rig.backend.last_id()
    rig.host.tick()
    assert offer.answer is not None
    assert offer.answer[1] is not None
    assert [one.seq for one in offer.answer[1].items] == [1, 2, 3]
    assert (rig.counts().claimed, rig.counts().ready) == (3, 2)
    assert rig.backend.last_id() <= before + 2, "the cycle's, and its hint's"


def test_an_offer_stands_until_somebody_wants_what_it_is_for(rig: Carrying) -> None:
    offer = rig.parcel(asked=3)
    rig.carriage.offer(offer)
    rig.buyer("ada", Woken())
    assert not offer.ended
    assert rig.carriage.retract(offer)


def test_an_offer_that_was_used_cannot_be_taken_back(rig: Carrying) -> None:
    offer = rig.parcel(asked=3)
    rig.carriage.offer(offer)
    rig.buyer("ada", Ordered())
    assert not rig.carriage.retract(offer)


def test_an_offer_that_went_with_a_commit_of_unknown_outcome_is_told_so(rig: Carrying) -> None:
    ada = rig.buyer("ada", Woken())
    offer = rig.parcel(asked=3)
    rig.carriage.offer(offer)
    ada.send(Ordered())
    rig.backend.arm({1: UNKNOWN_AFTER})
    rig.think()
    assert isinstance(offer.error, CommitUnknown)
    assert rig.counts() == queue.Counts(claimed=1)


def test_a_runner_that_retracts_its_offer_claims_by_itself(tmp_path: Path) -> None:
    """Whatever another process puts into its queue, while its own worker has nothing for it."""
    with (
        app.open(f"lmdb:{tmp_path}/store") as runtime,
        app.open(f"lmdb:{tmp_path}/store", roles=("world",), worker="other") as other,
    ):
        chains = [other.world(Chain, f"c{n}") for n in range(8)]
        other.send_many([(one, Begun(3)) for one in chains])
        for one in chains:
            one.wait_for(lambda s: s.steps == 4, timeout=LONG_S)
        assert runtime.roles[0].failure is None

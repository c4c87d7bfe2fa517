"""Document 004, sections 1, 2, 3, 7, 8, protocols A and B, its failures and its tests 1 and 5.

Where the design settles a rule differently, the test guards what we built and its rule says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import pytest

import holdfast as hf
from holdfast import codec
from holdfast.clock import S
from holdfast.durable import inbox, journal, lease, queue, snapshot
from holdfast.durable.lease import Lease
from holdfast.errors import CommitUnknown, Fenced, HeadMoved, Invalid, KeyConflict
from holdfast.messages import Ingress, Intent, Kind, Receipt, Status, receipt_ingress
from holdfast.roles.world_worker import WorldWorker
from holdfast.store import schema
from holdfast.world import catalog, restore, tenure
from holdfast.world.catalog import Assignment
from holdfast.world.host import Budgets, SnapshotPolicy
from holdfast.world.ingress import enqueue
from holdfast.world.publish import effects
from holdfast.world.tenure import Granted
from holdfast.world.timers import delays
from tests.at_once import at_once
from tests.postgres import RIGS
from tests.world import bank
from tests.world.rig import (
    CRASH_AFTER,
    CRASH_BEFORE,
    FAULTS,
    UNKNOWN_AFTER,
    UNKNOWN_BEFORE,
    Crash,
    Rig,
    rows_on,
)

MODULES = (
    "holdfast.world.tenure",
    "holdfast.world.host",
    "holdfast.world.ingress",
    "holdfast.world.fork",
    "holdfast.world.catalog",
    "holdfast.roles.world_worker",
)

LEASES = "1) Lease protocol with fencing epoch"
LOOP = "2) Worker lifecycle and host loop"
INGRESS = "3) Durable ingress normalization path"
FORK = "7) World fork and seed from snapshot"
READY = "8) Scheduling and readiness model"
PROTOCOL_A = "Protocol A: `acquire_lease(world, worker)`"
PROTOCOL_B = "Protocol B: `renew_lease(world, worker, epoch)`"
FAILURES = "Failure Semantics and Safety"
TESTS = "Testing and Validation"

TTL_NS = 10 * S
QUOTES = effects("bank", "fx.quote")

Handle = hf.WorldHandle[Any]


@pytest.fixture(params=RIGS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(backend=rows_on(request.param))
    yield made
    made.store.close()


def acquire(rig: Rig, handle: Handle, worker: str, incarnation: str = "1") -> Granted:
    [answer] = rig.store.transact(
        tenure.acquire, rig.universe, [rig.id(handle)], worker, incarnation, TTL_NS, 5
    )
    return answer


def granted(rig: Rig, handle: Handle, worker: str, incarnation: str = "1") -> Lease:
    found = acquire(rig, handle, worker, incarnation).lease
    assert found is not None
    return found


def renew(rig: Rig, held: Lease) -> Lease | None:
    [answer] = rig.store.transact(lease.renew, [held], TTL_NS)
    return answer


def current(rig: Rig, handle: Handle) -> lease.Status:
    found = rig.store.read(lease.current, rig.subject(handle))
    assert found is not None
    return found


def worked(rig: Rig, count: int = 3, **policy: Any) -> tuple[Handle, WorldWorker]:
    """A world with some entries, and the worker that hosts it."""
    ada = rig.world()
    rig.runtime.send_many([(ada, bank.Deposited(n)) for n in range(1, count + 1)])
    return ada, rig.run(rig.worker(idle_s=1e6, **policy))


# -- 1: leases -----------------------------------------------------------------------------------


@pytest.mark.spec("004", LEASES, "a lease names its holder, its epoch and when it ends")
def test_a_lease_record_has_holder_epoch_and_expiry(rig: Rig) -> None:
    ada = rig.world()
    held = granted(rig, ada, "A")
    status = current(rig, ada)
    assert (status.worker, status.epoch, status.expires_ns) == ("A", 1, held.expires_ns)
    assert 0 < held.expires_ns - rig.store.now_ns() <= TTL_NS


@pytest.mark.spec("004", LEASES, "an assignment names the wanted worker, an urgency and a reason")
def test_an_assignment_record_has_worker_priority_and_reason(rig: Rig) -> None:
    ada = rig.runtime.world(bank.Account, "ada")
    rig.store.transact(catalog.assign, "bank", rig.id(ada), "B", 7, "nearest")
    found = rig.store.read(catalog.assignment, "bank", rig.id(ada))
    assert found == Assignment("B", 7, "nearest")


@pytest.mark.spec("004", LEASES, "a world has one valid lease at most")
def test_a_second_worker_gets_no_lease_while_one_is_valid(rig: Rig) -> None:
    ada = rig.runtime.world(bank.Account, "ada")
    granted(rig, ada, "A")
    assert acquire(rig, ada, "B").lease is None
    assert acquire(rig, ada, "A", "restarted").lease is None


@pytest.mark.spec("004", LEASES, "every write for a world carries the epoch that its host holds")
def test_every_write_of_a_cycle_stands_or_falls_with_the_epoch(rig: Rig) -> None:
    ada, worker = worked(rig)
    for event in (bank.Deposited(1), bank.Paid("EUR"), bank.Told("main"), bank.Failing()):
        ada.send(event)
    host = worker._hosted[rig.id(ada)].host
    cycle = host.prepare(rig.store)
    assert cycle is not None
    rig.expire()
    rig.assign(ada, "B")
    granted(rig, ada, "B")
    before = rig.rows()
    with pytest.raises(Fenced):
        rig.store.transact(host.commit, cycle)
    assert rig.rows() == before


@pytest.mark.spec("004", LEASES, "the store refuses what comes under an old epoch")
@pytest.mark.parametrize("write", ["commit", "leave", "compact", "park", "try_alone"])
def test_the_store_refuses_every_kind_of_write_under_an_old_epoch(rig: Rig, write: str) -> None:
    ada, worker = worked(rig)
    ada.send(bank.Deposited(1))
    host = worker._hosted[rig.id(ada)].host
    rig.expire()
    granted(rig, ada, "A", "restarted")
    attempts: dict[str, Callable[[], object]] = {
        "commit": lambda: rig.store.transact(host.commit, host.prepare(rig.store)),
        "leave": lambda: rig.store.transact(host.commit, host.last()),
        "compact": lambda: rig.store.transact(host.compact),
        "park": lambda: rig.store.transact(
            tenure.park, "bank", rig.id(ada), host.lease, catalog.Blocker("x", "y")
        ),
        "try_alone": lambda: rig.store.transact(tenure.try_alone, "bank", rig.id(ada), host.lease),
    }
    before = rig.rows()
    with pytest.raises(Fenced):
        attempts[write]()
    assert rig.rows() == before


@pytest.mark.spec("004", LEASES, "a worker renews while more than the margin is left")
def test_a_worker_renews_well_before_the_lease_ends(rig: Rig) -> None:
    ada, worker = worked(rig, lease_ttl_s=10.0, renewal_margin=0.6)
    expires_ns = current(rig, ada).expires_ns
    rig.clock.advance(3 * S)
    worker.tick()
    assert current(rig, ada).expires_ns == expires_ns
    rig.clock.advance(int(1.5 * S))
    worker.tick()
    assert current(rig, ada).expires_ns > expires_ns


@pytest.mark.spec("004", LEASES, "a worker that fails to renew stops working for that world")
def test_a_worker_that_fails_to_renew_does_nothing_more_for_the_world(rig: Rig) -> None:
    ada, worker = worked(rig)
    rig.expire()
    worker.tick()
    assert worker.hosted == []
    assert ada.height() == 3


# -- 2: the loop ---------------------------------------------------------------------------------


@pytest.mark.spec("004", LOOP, "a worker hosts what is assigned to it and has work")
def test_a_worker_takes_up_what_is_assigned_to_it_and_nothing_else(rig: Rig) -> None:
    mine, others, nobodys = rig.world(name="mine"), rig.world(name="others"), "nobodys"
    rig.assign(others, "B")
    for handle in (mine, others, rig.runtime.world(bank.Account, nobodys)):
        handle.send(bank.Deposited(1))
    worker = rig.run()
    assert worker.hosted == [rig.id(mine)]


@pytest.mark.spec("004", LOOP, "a host starts from the active baseline and the entries after it")
def test_a_new_host_starts_from_baseline_and_tail(rig: Rig) -> None:
    policy = {"snapshots": SnapshotPolicy(10), "budgets": Budgets(max_inbox_batch=5)}
    ada, _ = worked(rig, 25, **policy)
    assert rig.baseline(ada) == 20
    rig.expire()
    ada.send(bank.Deposited(100))
    rig.run(rig.worker("A", "2"))
    assert ada.state().balance == 425
    assert ada.height() == 26


@pytest.mark.spec(
    "004",
    LOOP,
    "a round drains the inbox, steps, publishes, snapshots and renews; here the first four are one "
    "transaction",
)
def test_a_round_does_all_of_it_and_in_one_commit(rig: Rig) -> None:
    ada, worker = worked(rig, snapshots=SnapshotPolicy(5), compacted_per_tick=0)
    for event in (bank.Deposited(1), bank.Paid("EUR")):
        ada.send(event)
    rig.backend.arm({})
    worker.tick()
    assert rig.backend.commits == 1
    assert (rig.depth(ada), ada.height(), rig.baseline(ada)) == (0, 5, 5)
    assert len(rig.queued(QUOTES)) == 1


@pytest.mark.spec("004", LOOP, "on revocation the host stops, keeps its state and lets go")
def test_a_revoked_world_is_saved_and_let_go(rig: Rig) -> None:
    ada, worker = worked(rig)
    rig.assign(ada, "B")
    rig.run(worker)
    assert worker.hosted == []
    assert rig.baseline(ada) == 3
    assert current(rig, ada).state is lease.State.FREE


@pytest.mark.spec("004", LOOP, "on a failed renewal the host stops and writes nothing")
def test_a_host_that_lost_its_lease_writes_nothing_on_its_way_out(rig: Rig) -> None:
    ada, worker = worked(rig)
    rig.expire()
    worker.finish()
    assert rig.baseline(ada) == 0
    assert current(rig, ada).epoch == 1


@pytest.mark.spec("004", LOOP, "a round takes so many messages at most (max_inbox_batch)")
def test_the_inbox_batch_is_bounded(rig: Rig) -> None:
    ada, _ = worked(rig, 0)
    rig.runtime.send_many([(ada, bank.Deposited(1))] * 10)
    rig.worker("A", "2", budgets=Budgets(max_inbox_batch=4)).tick()
    assert ada.height() == 4


@pytest.mark.spec("004", LOOP, "a round takes so many steps at most (max_tick_steps_per_cycle)")
def test_the_steps_of_a_round_are_bounded(rig: Rig) -> None:
    ada, _ = worked(rig, 0)
    rig.runtime.send_many([(ada, bank.Deposited(1))] * 10)
    rig.worker("A", "2", budgets=Budgets(max_tick_steps_per_cycle=3)).tick()
    assert ada.height() == 3


@pytest.mark.spec("004", LOOP, "a round ends once it has wanted so much (max_effects_per_cycle)")
def test_the_effects_of_a_round_are_bounded(rig: Rig) -> None:
    ada, _ = worked(rig, 0)
    rig.runtime.send_many([(ada, bank.Paid("EUR", times=2))] * 10)
    rig.worker("A", "2", budgets=Budgets(max_effects_per_cycle=4)).tick()
    assert ada.height() == 2


@pytest.mark.spec(
    "004", LOOP, "a round ends when its time is up; what is journaled does not depend on that"
)
def test_the_time_of_a_round_decides_when_not_what(rig: Rig) -> None:
    journals = []
    for wall_ms in (0, 1000):
        each = Rig()
        ada, _ = worked(each, 0)
        each.runtime.send_many([(ada, bank.Deposited(n)) for n in range(5)])
        worker = each.worker("A", "2", budgets=Budgets(max_cycle_wall_ms=wall_ms))
        worker.tick()
        assert ada.height() == (1 if wall_ms == 0 else 5)
        each.run(worker)
        journals.append([(one.type, one.outcome, one.step.reply) for one in ada.journal()])
    assert journals[0] == journals[1]


# -- 3: ingress ----------------------------------------------------------------------------------


@pytest.mark.spec(
    "004", INGRESS, "every input is an inbox item, journaled by the lease holder alone"
)
def test_inputs_of_every_kind_take_the_same_way(rig: Rig) -> None:
    ada, worker = worked(rig, 1)
    ada.send(bank.Deposited(1))
    receipt = receipt_ingress(Receipt(b"i" * 32, "fx.quote", Status.OK, codec.pack(1.5)))
    fired = Ingress(Kind.TIMER, "Deposited", *_body(bank.Deposited(2)), intent_hash=b"t" * 32)
    mail = Ingress(
        Kind.FABRIC, "Deposited", *_body(bank.Deposited(4)), from_world="w", from_height=3
    )
    for key, item in (("receipt:1", receipt), ("timer:1", fired), ("fabric:1", mail)):
        rig.store.transact(enqueue, "bank", rig.id(ada), key, item)
    assert ada.height() == 1
    rig.run(worker)
    kinds = [one.step.ingress.kind.value for one in ada.journal()]
    assert kinds == ["event", "event", "receipt", "timer", "fabric"]
    assert ada.state() == bank.Account(balance=8, receipts=["ok 1.5 "])


def _body(event: object) -> tuple[bytes, bytes]:
    name, value = bank.app.encode_event(event)
    return value, codec.digest(name.encode(), value)


@pytest.mark.spec("004", INGRESS, "shapes are checked before anything is enqueued")
def test_a_wrong_shape_does_not_reach_the_inbox(rig: Rig) -> None:
    ada = rig.world()
    with pytest.raises(Invalid):
        ada.send(bank.Deposited("five"))  # type: ignore[arg-type]
    assert rig.depth(ada) == 0


@pytest.mark.spec("004", INGRESS, "an input has one canonical form, which is the one journaled")
def test_what_is_journaled_is_what_was_enqueued_byte_for_byte(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Noted("ü", ["b"]))
    [waiting] = rig.store.read(inbox.read, rig.subject(ada), 10)
    rig.run()
    assert codec.pack(ada.journal()[0].step.ingress) == waiting.body


@pytest.mark.spec("004", INGRESS, "intent, event and correlation ids arrive as they were given")
def test_identities_survive_the_way_through_world_and_effect(rig: Rig) -> None:
    ada = rig.world()
    ada.send(bank.Paid("EUR"), correlation_id="order-7")
    worker = rig.run()
    [payload] = rig.queued(QUOTES)
    intent = codec.unpack_as(Intent, payload)
    assert intent.correlation_id == "order-7"
    receipt = receipt_ingress(
        Receipt(intent.intent_hash, intent.effect_kind, Status.OK), correlation_id="order-7"
    )
    rig.store.transact(enqueue, "bank", rig.id(ada), "r", receipt)
    rig.run(worker)
    first, last = (one.step.ingress for one in ada.journal())
    assert first.event_hash == _body(bank.Paid("EUR"))[1]
    assert (last.intent_hash, last.correlation_id) == (intent.intent_hash, "order-7")


@pytest.mark.spec(
    "004", INGRESS, "an input is durable once it is acknowledged, and comes once per key"
)
def test_an_input_whose_acknowledgement_was_lost_converges_when_it_is_sent_again(rig: Rig) -> None:
    for fault in (UNKNOWN_BEFORE, UNKNOWN_AFTER):
        rig = Rig()
        ada = rig.world()
        rig.backend.arm({1: fault})
        with pytest.raises(CommitUnknown):
            ada.send(bank.Deposited(5), key="k")
        assert ada.send(bank.Deposited(5), key="k") == 1
        rig.run()
        assert [one.type for one in ada.journal()] == ["Deposited"], fault
    with pytest.raises(KeyConflict):
        ada.send(bank.Deposited(6), key="k")


# -- 7: fork -------------------------------------------------------------------------------------


@pytest.mark.spec("004", FORK, "a world is created empty when it has no seed")
def test_a_created_world_is_empty(rig: Rig) -> None:
    ada = rig.runtime.world(bank.Account, "ada")
    ada.create()
    assert (ada.height(), ada.state()) == (0, bank.Account())


@pytest.mark.spec("004", FORK, "a fork has an id of its own")
def test_a_fork_is_another_world(rig: Rig) -> None:
    ada, _ = worked(rig)
    assert rig.id(ada.fork("child")) != rig.id(ada)


@pytest.mark.spec(
    "004", FORK, "a fork's baseline is the source's snapshot and its head that height"
)
def test_a_fork_starts_at_the_snapshot(rig: Rig) -> None:
    ada, _ = worked(rig, 10, snapshots=SnapshotPolicy(5), budgets=Budgets(max_inbox_batch=5))
    child = ada.fork("child", at=5)
    source = rig.store.read(snapshot.load, rig.subject(ada), 5)
    assert rig.store.read(snapshot.load, rig.subject(child), 5) == source
    assert (rig.baseline(child), rig.head(child).height) == (5, 5)


@pytest.mark.spec("004", FORK, "a fork's inbox is empty, whatever the source has unread")
def test_a_fork_has_nothing_to_read(rig: Rig) -> None:
    ada, _ = worked(rig)
    ada.send(bank.Deposited(1))
    child = ada.fork("child")
    assert (rig.cursor(child), rig.depth(child)) == (0, 0)
    assert rig.record(child).stuck_count == 0


@pytest.mark.spec("004", FORK, "a fork records its parent, the snapshot's hash and the height")
def test_a_fork_knows_its_lineage(rig: Rig) -> None:
    ada, _ = worked(rig)
    child = ada.fork("child", at=2)
    [found] = child.lineage()
    state = rig.store.read(snapshot.load, rig.subject(child), 2)
    assert (found.parent_world_id, found.forked_at_height) == (rig.id(ada), 2)
    baseline = rig.store.read(snapshot.baseline, rig.subject(child))
    assert found.parent_snapshot_hash == baseline.hash
    assert codec.unpack(state)["balance"] == 3


@pytest.mark.spec("004", FORK, "by default nothing that the source has pending is the fork's")
def test_a_fork_dispatches_nothing_and_remembers_no_key(rig: Rig) -> None:
    ada, worker = worked(rig, 0)
    for event in (bank.Paid("EUR", key="k"), bank.Waited(60)):
        ada.send(event)
    worker = rig.run(rig.worker("A", "2", idle_s=1e6))
    child = ada.fork("child")
    rig.assign(child)
    rig.run(worker)
    assert len(rig.queued(QUOTES)) == 1
    assert rig.store.read(queue.counts, delays("bank")).delayed == 1
    child.send(bank.Paid("USD", key="k"))
    rig.run(worker)
    assert len(rig.queued(QUOTES)) == 2


# -- 8: scheduling -------------------------------------------------------------------------------


@pytest.mark.spec("004", READY, "a world with unread messages is runnable")
def test_unread_messages_make_a_world_runnable(rig: Rig) -> None:
    ada = rig.world()
    assert rig.hints() == []
    ada.send(bank.Deposited(1))
    assert rig.hints() == [rig.id(ada)]


@pytest.mark.spec("004", READY, "a world that has more to do than a round took stays runnable")
def test_a_world_that_is_not_drained_stays_runnable(rig: Rig) -> None:
    ada, _ = worked(rig, 0)
    rig.runtime.send_many([(ada, bank.Deposited(1))] * 5)
    worker = rig.worker("A", "2", budgets=Budgets(max_inbox_batch=2))
    worker.tick()
    assert rig.hints() == [rig.id(ada)]
    rig.run(worker)
    assert rig.hints() == []


@pytest.mark.spec(
    "004", READY, "a world whose lease is due for renewal is seen to without a message"
)
def test_renewal_needs_no_message(rig: Rig) -> None:
    ada, worker = worked(rig)
    assert worker.next_s() <= 1.0
    rig.clock.advance(5 * S)
    assert worker.next_s() == 0.0
    worker.tick()
    assert current(rig, ada).expires_ns > rig.store.now_ns() + 9 * S


@pytest.mark.spec("004", READY, "hints may be doubled, and come by priority")
def test_hints_are_idempotent_and_ordered(rig: Rig) -> None:
    low, high = rig.world(name="low"), rig.world(name="high")
    rig.assign(high, "A", priority=1)
    for handle in (low, low, high, high):
        handle.send(bank.Deposited(1))
    assert rig.hints() == [rig.id(high), rig.id(low)]


@pytest.mark.spec("004", READY, "a hint without work does no harm; the truth is in the inbox")
def test_a_hint_without_work_is_taken_away_and_nothing_else_happens(rig: Rig) -> None:
    ada = rig.world()
    rig.store.transact(catalog.hint, "bank", rig.id(ada))
    rig.run()
    assert (rig.hints(), ada.height()) == ([], 0)


# -- protocols A and B ---------------------------------------------------------------------------


@pytest.mark.spec("004", PROTOCOL_A, "a worker that the assignment excludes gets no lease")
def test_acquiring_needs_the_assignments_consent(rig: Rig) -> None:
    ada = rig.world()
    assert acquire(rig, ada, "B").refusal == "assigned_to_another"
    assert granted(rig, ada, "A").worker == "A"


@pytest.mark.spec("004", PROTOCOL_A, "each grant has the epoch after the last, whatever ended that")
@pytest.mark.parametrize("end", ["expiry", "release", "force"])
def test_epochs_go_up_by_one_with_every_grant(rig: Rig, end: str) -> None:
    ada = rig.world()
    epochs = []
    for incarnation in range(4):
        held = granted(rig, ada, "A", str(incarnation))
        epochs.append(held.epoch)
        if end == "expiry":
            rig.expire()
        elif end == "release":
            rig.store.transact(lease.release, held)
        else:
            rig.store.transact(lease.force_release, rig.subject(ada), "test")
    assert epochs == [1, 2, 3, 4]


@pytest.mark.spec(
    "004", PROTOCOL_A, "a lease that is neither absent nor expired is not granted anew"
)
def test_a_valid_lease_is_not_granted_again(rig: Rig) -> None:
    ada = rig.world()
    first = granted(rig, ada, "A")
    assert granted(rig, ada, "A") == first
    rig.clock.advance(TTL_NS - S)
    assert acquire(rig, ada, "A", "restarted").refusal == "held"
    rig.clock.advance(2 * S)
    assert granted(rig, ada, "A", "restarted").epoch == first.epoch + 1


@pytest.mark.spec("004", PROTOCOL_A, "one holder at a time, however many ask at once")
def test_of_many_that_ask_one_gets_it(rig: Rig) -> None:
    ada = rig.runtime.world(bank.Account, "ada")
    world_id = rig.id(ada)
    # All of them in one batch, each without knowing of the others.
    asked = [(rig.universe, [world_id], worker, "1", TTL_NS, 5) for worker in "ABCDEF"]
    answers = [answer for [answer] in at_once(rig.store, tenure.acquire, asked)]
    [held] = [answer.lease for answer in answers if answer.lease is not None]
    assert sorted(answer.refusal for answer in answers if answer.lease is None) == ["held"] * 5
    found = current(rig, ada)
    assert (found.worker, found.epoch) == (held.worker, 1)
    assert [acquire(rig, ada, worker).refusal for worker in "GH"] == ["held"] * 2


@pytest.mark.spec("004", PROTOCOL_B, "renewing extends the lease of its holder under its epoch")
def test_renewing_extends_and_keeps_the_epoch(rig: Rig) -> None:
    held = granted(rig, rig.world(), "A")
    rig.clock.advance(5 * S)
    renewed = renew(rig, held)
    assert renewed is not None
    assert renewed.epoch == held.epoch
    assert renewed.expires_ns > held.expires_ns + 4 * S


@pytest.mark.spec(
    "004", PROTOCOL_B, "another holder, another epoch or an expired lease renews nothing"
)
@pytest.mark.parametrize("wrong", ["holder", "incarnation", "epoch", "expired", "released"])
def test_a_stale_worker_cannot_renew(rig: Rig, wrong: str) -> None:
    ada = rig.world()
    held = granted(rig, ada, "A")
    changed: dict[str, Any] = {
        "holder": {"worker": "B"},
        "incarnation": {"incarnation": "2"},
        "epoch": {"epoch": held.epoch + 1},
    }.get(wrong, {})
    if wrong == "expired":
        rig.expire()
    if wrong == "released":
        rig.store.transact(lease.release, held)
    before = current(rig, ada)
    assert renew(rig, msgspec.structs.replace(held, **changed)) is None
    assert current(rig, ada) == before


# -- failures ------------------------------------------------------------------------------------


@pytest.mark.spec(
    "004", FAILURES, "after the first fence failure a worker does no more for the world"
)
def test_a_fenced_worker_halts_at_once(rig: Rig) -> None:
    ada, worker = worked(rig)
    ada.send(bank.Deposited(1))
    rig.expire()
    rig.assign(ada, "B")
    b = rig.worker("B")
    rig.run(b)
    head = rig.head(ada)
    for _ in range(3):
        worker.tick()
    assert worker.hosted == []
    assert rig.head(ada) == head


@pytest.mark.spec("004", FAILURES, "an append names the head that it was computed on")
def test_an_append_on_another_head_is_refused(rig: Rig) -> None:
    ada, worker = worked(rig)
    ada.send(bank.Deposited(1))
    host = worker._hosted[rig.id(ada)].host
    cycle = host.prepare(rig.store)
    assert cycle is not None
    rig.store.transact(host.commit, cycle)
    with pytest.raises(HeadMoved):
        rig.store.transact(host.commit, cycle)
    assert ada.height() == 4


# -- tests 1 and 5, and the chaos rows 1 to 3 -----------------------------------------------------

SCRIPT = [
    bank.Deposited(5),
    bank.Paid("EUR", tag="a"),
    bank.Told("main", 3),
    bank.Failing(),
    bank.Rated(2),
    bank.Queried(),
    bank.Waited(60),
    bank.Told("main", 4),
    bank.Paid("USD", key="k"),
    bank.Deposited(2),
    bank.Queried(),
]
POLICY = {"snapshots": SnapshotPolicy(4), "budgets": Budgets(max_inbox_batch=3)}


class End(NamedTuple):
    """What must not depend on who did it, when, and how often it was tried."""

    state: bytes
    audit: bytes
    journal: list[tuple[int, str, str, list[bytes], bytes | None]]
    dispatched: list[bytes]
    mail: list[tuple[str, bytes, int | None]]
    letters: int
    timers: int


def scripted() -> tuple[Rig, Handle, Handle]:
    rig = Rig()
    ada, audit = rig.world(), rig.world(bank.Audit, "main")
    for event in SCRIPT:
        ada.send(event)
    return rig, ada, audit


def end(rig: Rig, ada: Handle, audit: Handle) -> End:
    for handle in (ada, audit):
        rig.store.read(journal.verify, rig.subject(handle))
        rig.store.read(lambda txn, h=handle: restore.check_snapshots(txn, rig.kernel_in(txn, h)))
        assert rig.depth(handle) == 0
        assert rig.record(handle).status.value == "active"
    return End(
        rig.kernel(ada).program.dump(ada.state()),
        rig.kernel(audit).program.dump(audit.state()),
        [
            (one.step.seq, one.type, one.outcome, one.step.emitted, one.step.reply)
            for one in ada.journal()
        ],
        [codec.unpack_as(Intent, payload).content() for payload in rig.queued(QUOTES)],
        [
            (one.type, one.step.ingress.value, one.step.ingress.from_height)
            for one in audit.journal()
        ],
        len(rig.dead()),
        rig.store.read(queue.counts, delays("bank")).delayed,
    )


def undisturbed() -> tuple[End, int]:
    """The end of a run without faults, and how many commits it takes."""
    rig, ada, audit = scripted()
    rig.backend.arm({})
    rig.run(rig.worker(**POLICY))
    commits = rig.backend.commits
    return end(rig, ada, audit), commits


def disturbed(plan: dict[int, Any]) -> tuple[End, set[int]]:
    """The end of a run in which commits go wrong as planned; and which of the plan came to pass.

    A worker that crashes is followed by another, when its leases have run out.
    """
    rig, ada, audit = scripted()
    rig.backend.arm(plan)
    for incarnation in range(len(plan) + 1):
        try:
            rig.run(rig.worker("A", str(incarnation), **POLICY))
            break
        except Crash:
            rig.expire()
    left = set(rig.backend.plan)
    rig.backend.arm({})
    return end(rig, ada, audit), set(plan) - left


UNDISTURBED, COMMITS = undisturbed()


def test_the_undisturbed_run_is_what_it_should_be() -> None:
    state = codec.unpack(UNDISTURBED.state)
    assert (state["balance"], state["rate"]) == (7, 2.0)
    assert codec.unpack(UNDISTURBED.audit) == {"total": 7}
    assert [line[2] for line in UNDISTURBED.journal].count("failed") == 1
    assert (len(UNDISTURBED.dispatched), UNDISTURBED.letters, UNDISTURBED.timers) == (2, 1, 1)
    assert COMMITS >= 6


@pytest.mark.spec(
    "004",
    TESTS,
    "test 1: A loses its lease, B goes on from baseline and tail, and the end is the one of a run "
    "in which nothing happened; what A writes late is refused",
)
@pytest.mark.parametrize("ticks", [1, 2, 3])
def test_failover_after_any_round_ends_like_a_run_without_faults(ticks: int) -> None:
    rig, ada, audit = scripted()
    a, b = rig.worker("A", **POLICY), rig.worker("B", **POLICY)
    for _ in range(ticks):
        a.tick()
    zombie = a._hosted[rig.id(ada)].host
    rig.expire()
    for handle in (ada, audit):
        rig.assign(handle, "B")
    late = zombie.prepare(rig.store)
    assert late is not None
    rig.run(b)
    before = owned(rig)
    with pytest.raises((Fenced, HeadMoved)):
        rig.store.transact(zombie.commit, late)
    with pytest.raises(Fenced):
        rig.store.transact(lease.release, zombie.lease)
    assert renew(rig, zombie.lease) is None
    rig.run(a)
    a.finish()
    assert owned(rig) == before
    assert end(rig, ada, audit) == UNDISTURBED


def owned(rig: Rig) -> dict[bytes, bytes]:
    """Every row that only the holder of a world may write, or that follows from such."""
    advisory = (schema.Space.READY, schema.Space.WORKER)
    return {
        key: row
        for key, row in rig.rows().items()
        if not key.startswith(tuple(schema.prefix(space) for space in advisory))
    }


@pytest.mark.spec("004", TESTS, "test 1: a replay of the journal gives the same bytes")
def test_a_replay_of_the_journal_is_byte_identical() -> None:
    rig, ada, _ = scripted()
    ada.send(bank.Rolled())
    rig.run(rig.worker(**POLICY))
    live = rig.kernel(ada).program.dump(ada.state())
    subject = rig.subject(ada)
    rig.store.transact(lambda txn: _drop_snapshots(txn, subject))
    assert rig.kernel(ada).program.dump(ada.state()) == live


def _drop_snapshots(txn: Any, subject: str) -> None:
    prefix = schema.prefix(schema.Space.SNAPSHOT, subject)
    for key, _ in txn.scan(prefix, prefix + b"\xff"):
        txn.delete(key)


@pytest.mark.spec(
    "004",
    TESTS,
    "test 5: a fork boots exactly at the source's state, with nothing of the source's pending",
)
@pytest.mark.parametrize("at", range(len(SCRIPT) + 1))
def test_a_fork_boots_at_the_sources_state_at_every_height(at: int) -> None:
    rig, ada, audit = scripted()
    rig.run(rig.worker(**POLICY))
    before = end(rig, ada, audit)
    child = ada.fork("child", at=at)
    rig.assign(child)
    child.send(bank.Deposited(0))
    rig.run(rig.worker("A", "2", **POLICY))
    rig.expire()
    rig.run(rig.worker("A", "3", **POLICY))
    assert child.state() == ada.state(at=at)
    assert child.height() == at + 1
    assert end(rig, ada, audit) == before


def crash_points() -> Iterator[tuple[int, str]]:
    for commit in range(1, COMMITS + 1):
        for fault in FAULTS:
            yield commit, fault


@pytest.mark.spec(
    "004",
    TESTS,
    "chaos rows 1 to 3: a crash after the lease was acquired, before the append, or after it, and "
    "an unknown outcome at each: nothing is lost, nothing stale is written, replay agrees",
)
@pytest.mark.parametrize(("commit", "fault"), list(crash_points()))
def test_every_crash_point_ends_like_a_run_without_faults(commit: int, fault: str) -> None:
    ended, met = disturbed({commit: fault})
    assert met == {commit}
    assert ended == UNDISTURBED


@pytest.mark.spec("004", TESTS, "chaos rows 1 to 3: two faults, one after the other")
@pytest.mark.parametrize("first", FAULTS)
@pytest.mark.parametrize("second", [CRASH_BEFORE, CRASH_AFTER, UNKNOWN_AFTER])
def test_every_pair_of_crash_points_ends_like_a_run_without_faults(first: str, second: str) -> None:
    for one in range(1, COMMITS):
        for two in range(one + 1, COMMITS + 3):
            ended, _ = disturbed({one: first, two: second})
            assert ended == UNDISTURBED, (one, two)


@pytest.mark.spec(
    "004",
    TESTS,
    "chaos row 2: a crash between draining and appending loses nothing, for draining removes nothing",
)
def test_draining_alone_consumes_nothing(rig: Rig) -> None:
    ada, worker = worked(rig)
    ada.send(bank.Deposited(1))
    before = rig.rows()
    host = worker._hosted[rig.id(ada)].host
    assert host.prepare(rig.store) is not None
    assert rig.rows() == before


@pytest.mark.spec(
    "004",
    TESTS,
    "chaos row 3: there is nothing between append and cursor: they are in one transaction",
)
@pytest.mark.parametrize("fault", FAULTS)
def test_entries_and_cursor_move_together_or_not_at_all(rig: Rig, fault: str) -> None:
    ada, worker = worked(rig)
    ada.send(bank.Deposited(1))
    rig.backend.arm({1: fault})
    with contextlib.suppress(Crash):
        worker.tick()
    kept = fault in (CRASH_AFTER, UNKNOWN_AFTER)
    assert (ada.height(), rig.cursor(ada)) == ((4, 4) if kept else (3, 3))

"""Document 004, sections 1, 2, 3, 7 and 8, protocols A and B, failures, and tests 1 and 5.

Where the design differs from the document, the test checks the design and its rule text names the difference.
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
from holdfast.messages import (
    Ingress,
    IngressKind,
    Intent,
    IntentReceipt,
    ReceiptStatus,
    receipt_ingress,
)
from holdfast.store import schema
from holdfast.workers.world.worker import WorldWorker
from holdfast.world import catalog, hosting_lease, restore
from holdfast.world.catalog import Assignment
from holdfast.world.host import Budgets, SnapshotPolicy
from holdfast.world.hosting_lease import HostingGrant
from holdfast.world.ingress import deliver_by_id
from holdfast.world.intents import effect_queue
from holdfast.world.timers import delay_queue
from tests.batch_calls import call_in_one_batch
from tests.postgres import RIG_STORES
from tests.world import bank
from tests.world.rig import (
    CRASH_AFTER,
    CRASH_BEFORE,
    FAULTS,
    UNKNOWN_AFTER,
    UNKNOWN_BEFORE,
    Crash,
    WorldRig,
    make_backend,
)

MODULES = (
    "holdfast.world.hosting_lease",
    "holdfast.world.host",
    "holdfast.world.ingress",
    "holdfast.world.fork",
    "holdfast.world.catalog",
    "holdfast.workers.world.worker",
    "holdfast.workers.world.hosted_worlds",
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
QUOTES = effect_queue("bank", "fx.quote")

Handle = hf.WorldHandle[Any]


@pytest.fixture(params=RIG_STORES)
def rig(request: pytest.FixtureRequest) -> Iterator[WorldRig]:
    opened = WorldRig(backend=make_backend(request.param))
    yield opened
    opened.store.close()


def acquire(rig: WorldRig, handle: Handle, worker: str, incarnation: str = "1") -> HostingGrant:
    [answer] = rig.store.transact(
        hosting_lease.acquire, rig.universe, [rig.id(handle)], worker, incarnation, TTL_NS, 5
    )
    return answer


def granted(rig: WorldRig, handle: Handle, worker: str, incarnation: str = "1") -> Lease:
    granted_lease = acquire(rig, handle, worker, incarnation).lease
    assert granted_lease is not None
    return granted_lease


def renew(rig: WorldRig, held_lease: Lease) -> Lease | None:
    [answer] = rig.store.transact(lease.renew, [held_lease], TTL_NS)
    return answer


def current(rig: WorldRig, handle: Handle) -> lease.LeaseStatus:
    status = rig.store.read(lease.current_status, rig.subject(handle))
    assert status is not None
    return status


def rig_with_entries(rig: WorldRig, count: int = 3, **policy: Any) -> tuple[Handle, WorldWorker]:
    """A world with `count` entries, and the worker that hosts it."""
    ada = rig.world()
    rig.runtime.send_many([(ada, bank.DepositMade(n)) for n in range(1, count + 1)])
    return ada, rig.run(rig.worker(idle_s=1e6, **policy))


# -- 1: leases -----------------------------------------------------------------------------------


@pytest.mark.spec("004", LEASES, "a world lease has a holder, an epoch and an expiry")
def test_world_lease_has_holder_epoch_and_expiry(rig: WorldRig) -> None:
    ada = rig.world()
    held_lease = granted(rig, ada, "A")
    status = current(rig, ada)
    assert (status.worker, status.epoch, status.expires_ns) == ("A", 1, held_lease.expires_ns)
    assert 0 < held_lease.expires_ns - rig.store.now_ns() <= TTL_NS


@pytest.mark.spec("004", LEASES, "an assignment has the desired worker, a priority and a reason")
def test_assignment_has_worker_priority_and_reason(rig: WorldRig) -> None:
    ada = rig.runtime.world(bank.BankAccount, "ada")
    rig.store.transact(catalog.assign, "bank", rig.id(ada), "B", 7, "nearest")
    assignment = rig.store.read(catalog.find_assignment, "bank", rig.id(ada))
    assert assignment == Assignment("B", 7, "nearest")


@pytest.mark.spec("004", LEASES, "a world has at most one valid lease")
def test_acquire_is_refused_while_another_lease_is_valid(rig: WorldRig) -> None:
    ada = rig.runtime.world(bank.BankAccount, "ada")
    granted(rig, ada, "A")
    assert acquire(rig, ada, "B").lease is None
    assert acquire(rig, ada, "A", "restarted").lease is None


@pytest.mark.spec("004", LEASES, "a cycle commit under an old epoch writes nothing")
def test_cycle_commit_with_an_old_epoch_writes_nothing(rig: WorldRig) -> None:
    ada, worker = rig_with_entries(rig)
    for event in (
        bank.DepositMade(1),
        bank.PaymentOrdered("EUR"),
        bank.TransferOrdered("main"),
        bank.Failing(),
    ):
        ada.send(event)
    host = worker._hosted[rig.id(ada)].host
    cycle = host.prepare(rig.store)
    assert cycle is not None
    rig.advance_clock()
    rig.assign(ada, "B")
    granted(rig, ada, "B")
    before = rig.rows()
    with pytest.raises(Fenced):
        rig.store.transact(host.commit, cycle)
    assert rig.rows() == before


@pytest.mark.spec("004", LEASES, "the store fences every write of a host under an old epoch")
@pytest.mark.parametrize("write", ["commit", "leave", "compact", "park", "try_alone"])
def test_every_host_write_with_an_old_epoch_is_fenced(rig: WorldRig, write: str) -> None:
    ada, worker = rig_with_entries(rig)
    ada.send(bank.DepositMade(1))
    host = worker._hosted[rig.id(ada)].host
    rig.advance_clock()
    granted(rig, ada, "A", "restarted")
    attempts: dict[str, Callable[[], object]] = {
        "commit": lambda: rig.store.transact(host.commit, host.prepare(rig.store)),
        "leave": lambda: rig.store.transact(host.commit, host.final_cycle()),
        "compact": lambda: rig.store.transact(host.compact),
        "park": lambda: rig.store.transact(
            hosting_lease.park, "bank", rig.id(ada), host.lease, catalog.WorldBlocker("x", "y")
        ),
        "try_alone": lambda: rig.store.transact(
            hosting_lease.mark_isolated, "bank", rig.id(ada), host.lease
        ),
    }
    before = rig.rows()
    with pytest.raises(Fenced):
        attempts[write]()
    assert rig.rows() == before


@pytest.mark.spec("004", LEASES, "a worker renews its lease when the renewal margin is reached")
def test_worker_renews_the_lease_at_the_renewal_margin(rig: WorldRig) -> None:
    ada, worker = rig_with_entries(rig, lease_ttl_s=10.0, renewal_margin=0.6)
    expires_ns = current(rig, ada).expires_ns
    rig.clock.advance(3 * S)
    worker.tick()
    assert current(rig, ada).expires_ns == expires_ns
    rig.clock.advance(int(1.5 * S))
    worker.tick()
    assert current(rig, ada).expires_ns > expires_ns


@pytest.mark.spec(
    "004", LEASES, "a worker that cannot renew the lease of a world stops hosting the world"
)
def test_worker_that_fails_to_renew_stops_hosting_the_world(rig: WorldRig) -> None:
    ada, worker = rig_with_entries(rig)
    rig.advance_clock()
    worker.tick()
    assert worker.hosted == []
    assert ada.height() == 3


# -- 2: the host loop ----------------------------------------------------------------------------


@pytest.mark.spec("004", LOOP, "a worker hosts only worlds that are assigned to it and have work")
def test_worker_hosts_assigned_worlds_only(rig: WorldRig) -> None:
    mine, assigned_to_another, unassigned_name = (
        rig.world(name="mine"),
        rig.world(name="others"),
        "nobodys",
    )
    rig.assign(assigned_to_another, "B")
    for handle in (mine, assigned_to_another, rig.runtime.world(bank.BankAccount, unassigned_name)):
        handle.send(bank.DepositMade(1))
    worker = rig.run()
    assert worker.hosted == [rig.id(mine)]


@pytest.mark.spec(
    "004", LOOP, "a new host starts from the active baseline and the journal entries after it"
)
def test_new_host_starts_from_baseline_and_journal_tail(rig: WorldRig) -> None:
    policy = {"snapshots": SnapshotPolicy(10), "budgets": Budgets(max_inbox_batch=5)}
    ada, _ = rig_with_entries(rig, 25, **policy)
    assert rig.baseline(ada) == 20
    rig.advance_clock()
    ada.send(bank.DepositMade(100))
    rig.run(rig.worker("A", "2"))
    assert ada.state().balance == 425
    assert ada.height() == 26


@pytest.mark.spec(
    "004",
    LOOP,
    "a cycle commits journal entries, cursor, intents and snapshot in one transaction",
)
def test_host_cycle_is_one_commit(rig: WorldRig) -> None:
    ada, worker = rig_with_entries(rig, snapshots=SnapshotPolicy(5), compacted_per_tick=0)
    for event in (bank.DepositMade(1), bank.PaymentOrdered("EUR")):
        ada.send(event)
    rig.backend.arm({})
    worker.tick()
    assert rig.backend.commits == 1
    assert (rig.inbox_depth(ada), ada.height(), rig.baseline(ada)) == (0, 5, 5)
    assert len(rig.queued(QUOTES)) == 1


@pytest.mark.spec(
    "004", LOOP, "a worker whose world is reassigned writes a snapshot and releases the lease"
)
def test_revoked_world_is_snapshotted_and_its_lease_released(rig: WorldRig) -> None:
    ada, worker = rig_with_entries(rig)
    rig.assign(ada, "B")
    rig.run(worker)
    assert worker.hosted == []
    assert rig.baseline(ada) == 3
    assert current(rig, ada).state is lease.LeaseState.FREE


@pytest.mark.spec("004", LOOP, "a host that lost its lease writes nothing when it stops")
def test_host_without_its_lease_writes_nothing_on_finish(rig: WorldRig) -> None:
    ada, worker = rig_with_entries(rig)
    rig.advance_clock()
    worker.shut_down()
    assert rig.baseline(ada) == 0
    assert current(rig, ada).epoch == 1


@pytest.mark.spec("004", LOOP, "max_inbox_batch bounds the messages of a cycle")
def test_max_inbox_batch_bounds_a_cycle(rig: WorldRig) -> None:
    ada, _ = rig_with_entries(rig, 0)
    rig.runtime.send_many([(ada, bank.DepositMade(1))] * 10)
    rig.worker("A", "2", budgets=Budgets(max_inbox_batch=4)).tick()
    assert ada.height() == 4


@pytest.mark.spec("004", LOOP, "max_tick_steps_per_cycle bounds the steps of a cycle")
def test_max_tick_steps_per_cycle_bounds_a_cycle(rig: WorldRig) -> None:
    ada, _ = rig_with_entries(rig, 0)
    rig.runtime.send_many([(ada, bank.DepositMade(1))] * 10)
    rig.worker("A", "2", budgets=Budgets(max_tick_steps_per_cycle=3)).tick()
    assert ada.height() == 3


@pytest.mark.spec("004", LOOP, "max_effects_per_cycle bounds the effects of a cycle")
def test_max_effects_per_cycle_bounds_a_cycle(rig: WorldRig) -> None:
    ada, _ = rig_with_entries(rig, 0)
    rig.runtime.send_many([(ada, bank.PaymentOrdered("EUR", times=2))] * 10)
    rig.worker("A", "2", budgets=Budgets(max_effects_per_cycle=4)).tick()
    assert ada.height() == 2


@pytest.mark.spec(
    "004",
    LOOP,
    "max_cycle_wall_ms bounds the time of a cycle and does not change the journal content",
)
def test_max_cycle_wall_ms_changes_batching_and_not_the_journal(rig: WorldRig) -> None:
    journals = []
    for wall_ms in (0, 1000):
        each = WorldRig()
        ada, _ = rig_with_entries(each, 0)
        each.runtime.send_many([(ada, bank.DepositMade(n)) for n in range(5)])
        worker = each.worker("A", "2", budgets=Budgets(max_cycle_wall_ms=wall_ms))
        worker.tick()
        assert ada.height() == (1 if wall_ms == 0 else 5)
        each.run(worker)
        journals.append([(entry.type, entry.outcome, entry.step.reply) for entry in ada.journal()])
    assert journals[0] == journals[1]


# -- 3: ingress ----------------------------------------------------------------------------------


@pytest.mark.spec(
    "004",
    INGRESS,
    "inputs of every kind pass through the inbox, and only the lease holder journals them",
)
def test_ingress_of_every_kind_is_journaled_from_the_inbox(rig: WorldRig) -> None:
    ada, worker = rig_with_entries(rig, 1)
    ada.send(bank.DepositMade(1))
    receipt = receipt_ingress(
        IntentReceipt(b"i" * 32, "fx.quote", ReceiptStatus.OK, codec.pack(1.5))
    )
    fired = Ingress(
        IngressKind.TIMER, "DepositMade", *_body(bank.DepositMade(2)), intent_hash=b"t" * 32
    )
    mail = Ingress(
        IngressKind.FABRIC,
        "DepositMade",
        *_body(bank.DepositMade(4)),
        from_world="w",
        from_height=3,
    )
    for key, item in (("receipt:1", receipt), ("timer:1", fired), ("fabric:1", mail)):
        rig.store.transact(deliver_by_id, "bank", rig.id(ada), key, item)
    assert ada.height() == 1
    rig.run(worker)
    kinds = [entry.step.ingress.kind.value for entry in ada.journal()]
    assert kinds == ["event", "event", "receipt", "timer", "fabric"]
    assert ada.state() == bank.BankAccount(balance=8, receipts=["ok 1.5 "])


def _body(event: object) -> tuple[bytes, bytes]:
    name, value = bank.app.encode_event(event)
    return value, codec.digest(name.encode(), value)


@pytest.mark.spec("004", INGRESS, "an event with an invalid shape is refused before the inbox")
def test_send_of_an_invalid_event_is_refused_before_the_inbox(rig: WorldRig) -> None:
    ada = rig.world()
    with pytest.raises(Invalid):
        ada.send(bank.DepositMade("five"))  # type: ignore[arg-type]
    assert rig.inbox_depth(ada) == 0


@pytest.mark.spec("004", INGRESS, "the journal entry has the same bytes as the inbox item")
def test_journaled_ingress_equals_the_enqueued_bytes(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.Noted("ü", ["b"]))
    [waiting] = rig.store.read(inbox.read, rig.subject(ada), 10)
    rig.run()
    assert codec.pack(ada.journal()[0].step.ingress) == waiting.body


@pytest.mark.spec(
    "004", INGRESS, "intent, event and correlation ids pass unchanged through worlds and effects"
)
def test_correlation_and_intent_ids_pass_through_world_and_effect(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.PaymentOrdered("EUR"), correlation_id="order-7")
    worker = rig.run()
    [payload] = rig.queued(QUOTES)
    intent = codec.unpack_as(Intent, payload)
    assert intent.correlation_id == "order-7"
    receipt = receipt_ingress(
        IntentReceipt(intent.intent_hash, intent.effect_kind, ReceiptStatus.OK),
        correlation_id="order-7",
    )
    rig.store.transact(deliver_by_id, "bank", rig.id(ada), "r", receipt)
    rig.run(worker)
    first, last = (entry.step.ingress for entry in ada.journal())
    assert first.event_hash == _body(bank.PaymentOrdered("EUR"))[1]
    assert (last.intent_hash, last.correlation_id) == (intent.intent_hash, "order-7")


@pytest.mark.spec(
    "004",
    INGRESS,
    "an acknowledged input is durable, and a repeated send with its key adds no second item",
)
def test_resend_after_commit_unknown_enqueues_once(rig: WorldRig) -> None:
    for fault in (UNKNOWN_BEFORE, UNKNOWN_AFTER):
        rig = WorldRig()
        ada = rig.world()
        rig.backend.arm({1: fault})
        with pytest.raises(CommitUnknown):
            ada.send(bank.DepositMade(5), key="k")
        assert ada.send(bank.DepositMade(5), key="k") == 1
        rig.run()
        assert [entry.type for entry in ada.journal()] == ["DepositMade"], fault
    with pytest.raises(KeyConflict):
        ada.send(bank.DepositMade(6), key="k")


# -- 7: fork -------------------------------------------------------------------------------------


@pytest.mark.spec("004", FORK, "a world that is created without a seed is empty")
def test_created_world_is_empty(rig: WorldRig) -> None:
    ada = rig.runtime.world(bank.BankAccount, "ada")
    ada.create()
    assert (ada.height(), ada.state()) == (0, bank.BankAccount())


@pytest.mark.spec("004", FORK, "a fork has a new world id")
def test_fork_has_its_own_world_id(rig: WorldRig) -> None:
    ada, _ = rig_with_entries(rig)
    assert rig.id(ada.fork("child")) != rig.id(ada)


@pytest.mark.spec(
    "004", FORK, "a fork starts with the snapshot of the source as baseline and its height as head"
)
def test_fork_starts_at_the_snapshot_height(rig: WorldRig) -> None:
    ada, _ = rig_with_entries(
        rig, 10, snapshots=SnapshotPolicy(5), budgets=Budgets(max_inbox_batch=5)
    )
    child = ada.fork("child", at=5)
    source = rig.store.read(snapshot.load, rig.subject(ada), 5)
    assert rig.store.read(snapshot.load, rig.subject(child), 5) == source
    assert (rig.baseline(child), rig.head(child).height) == (5, 5)


@pytest.mark.spec("004", FORK, "a fork has an empty inbox, also if the source has unread messages")
def test_fork_has_an_empty_inbox(rig: WorldRig) -> None:
    ada, _ = rig_with_entries(rig)
    ada.send(bank.DepositMade(1))
    child = ada.fork("child")
    assert (rig.cursor(child), rig.inbox_depth(child)) == (0, 0)
    assert rig.record(child).stuck_count == 0


@pytest.mark.spec("004", FORK, "a fork records its parent, the hash of the snapshot and the height")
def test_fork_records_parent_snapshot_hash_and_height(rig: WorldRig) -> None:
    ada, _ = rig_with_entries(rig)
    child = ada.fork("child", at=2)
    [ancestor] = child.lineage()
    state = rig.store.read(snapshot.load, rig.subject(child), 2)
    assert (ancestor.parent_world_id, ancestor.forked_at_height) == (rig.id(ada), 2)
    baseline = rig.store.read(snapshot.baseline, rig.subject(child))
    assert ancestor.parent_snapshot_hash == baseline.hash
    assert codec.unpack(state)["balance"] == 3


@pytest.mark.spec("004", FORK, "a fork inherits no pending effects, timers or keys")
def test_fork_inherits_no_pending_effects_timers_or_keys(rig: WorldRig) -> None:
    ada, worker = rig_with_entries(rig, 0)
    for event in (bank.PaymentOrdered("EUR", key="k"), bank.Waited(60)):
        ada.send(event)
    worker = rig.run(rig.worker("A", "2", idle_s=1e6))
    child = ada.fork("child")
    rig.assign(child)
    rig.run(worker)
    assert len(rig.queued(QUOTES)) == 1
    assert rig.store.read(queue.counts, delay_queue("bank")).delayed == 1
    child.send(bank.PaymentOrdered("USD", key="k"))
    rig.run(worker)
    assert len(rig.queued(QUOTES)) == 2


# -- 8: scheduling -------------------------------------------------------------------------------


@pytest.mark.spec("004", READY, "unread messages make a world runnable")
def test_unread_inbox_makes_a_world_ready(rig: WorldRig) -> None:
    ada = rig.world()
    assert rig.runnable() == []
    ada.send(bank.DepositMade(1))
    assert rig.runnable() == [rig.id(ada)]


@pytest.mark.spec("004", READY, "a world with unread messages after a cycle stays runnable")
def test_world_with_unread_inbox_after_a_cycle_stays_ready(rig: WorldRig) -> None:
    ada, _ = rig_with_entries(rig, 0)
    rig.runtime.send_many([(ada, bank.DepositMade(1))] * 5)
    worker = rig.worker("A", "2", budgets=Budgets(max_inbox_batch=2))
    worker.tick()
    assert rig.runnable() == [rig.id(ada)]
    rig.run(worker)
    assert rig.runnable() == []


@pytest.mark.spec("004", READY, "a worker renews the lease of a world without messages")
def test_worker_renews_leases_without_messages(rig: WorldRig) -> None:
    ada, worker = rig_with_entries(rig)
    assert worker.sleep_s() <= 1.0
    rig.clock.advance(5 * S)
    assert worker.sleep_s() == 0.0
    worker.tick()
    assert current(rig, ada).expires_ns > rig.store.now_ns() + 9 * S


@pytest.mark.spec(
    "004", READY, "duplicate runnable marks have no effect, and the marks are ordered by priority"
)
def test_ready_hints_are_idempotent_and_ordered_by_priority(rig: WorldRig) -> None:
    low, high = rig.world(name="low"), rig.world(name="high")
    rig.assign(high, "A", priority=1)
    for handle in (low, low, high, high):
        handle.send(bank.DepositMade(1))
    assert rig.runnable() == [rig.id(high), rig.id(low)]


@pytest.mark.spec("004", READY, "a runnable mark without work is cleared and changes nothing")
def test_ready_hint_without_work_is_cleared(rig: WorldRig) -> None:
    ada = rig.world()
    rig.store.transact(catalog.mark_runnable, "bank", rig.id(ada))
    rig.run()
    assert (rig.runnable(), ada.height()) == ([], 0)


# -- protocols A and B ---------------------------------------------------------------------------


@pytest.mark.spec("004", PROTOCOL_A, "a worker that is not assigned gets no lease")
def test_acquire_by_an_unassigned_worker_is_refused(rig: WorldRig) -> None:
    ada = rig.world()
    assert acquire(rig, ada, "B").refusal == "assigned_to_another"
    assert granted(rig, ada, "A").worker == "A"


@pytest.mark.spec(
    "004",
    PROTOCOL_A,
    "each grant has the next epoch after an expiry, a release or a forced release",
)
@pytest.mark.parametrize("end", ["expiry", "release", "force"])
def test_acquire_increments_the_epoch_by_one(rig: WorldRig, end: str) -> None:
    ada = rig.world()
    epochs = []
    for incarnation in range(4):
        held_lease = granted(rig, ada, "A", str(incarnation))
        epochs.append(held_lease.epoch)
        if end == "expiry":
            rig.advance_clock()
        elif end == "release":
            rig.store.transact(lease.release, held_lease)
        else:
            rig.store.transact(lease.force_release, rig.subject(ada), "test")
    assert epochs == [1, 2, 3, 4]


@pytest.mark.spec(
    "004", PROTOCOL_A, "a valid lease is not granted to another holder before it expires"
)
def test_acquire_of_a_valid_lease_is_refused_until_expiry(rig: WorldRig) -> None:
    ada = rig.world()
    first = granted(rig, ada, "A")
    assert granted(rig, ada, "A") == first
    rig.clock.advance(TTL_NS - S)
    assert acquire(rig, ada, "A", "restarted").refusal == "held"
    rig.clock.advance(2 * S)
    assert granted(rig, ada, "A", "restarted").epoch == first.epoch + 1


@pytest.mark.spec("004", PROTOCOL_A, "of several concurrent acquires one gets the world lease")
def test_concurrent_acquires_grant_one_world_lease(rig: WorldRig) -> None:
    ada = rig.runtime.world(bank.BankAccount, "ada")
    world_id = rig.id(ada)
    # All requests are in one batch, so each is prepared before any commits.
    calls = [(rig.universe, [world_id], worker, "1", TTL_NS, 5) for worker in "ABCDEF"]
    answers = [answer for [answer] in call_in_one_batch(rig.store, hosting_lease.acquire, calls)]
    [held_lease] = [answer.lease for answer in answers if answer.lease is not None]
    assert sorted(answer.refusal for answer in answers if answer.lease is None) == ["held"] * 5
    status = current(rig, ada)
    assert (status.worker, status.epoch) == (held_lease.worker, 1)
    assert [acquire(rig, ada, worker).refusal for worker in "GH"] == ["held"] * 2


@pytest.mark.spec("004", PROTOCOL_B, "a renewal extends the lease and keeps the epoch")
def test_renew_extends_the_lease_and_keeps_the_epoch(rig: WorldRig) -> None:
    held_lease = granted(rig, rig.world(), "A")
    rig.clock.advance(5 * S)
    renewed = renew(rig, held_lease)
    assert renewed is not None
    assert renewed.epoch == held_lease.epoch
    assert renewed.expires_ns > held_lease.expires_ns + 4 * S


@pytest.mark.spec(
    "004",
    PROTOCOL_B,
    "a renewal with another holder or epoch, or of an expired lease, changes nothing",
)
@pytest.mark.parametrize("wrong", ["holder", "incarnation", "epoch", "expired", "released"])
def test_renew_of_a_stale_lease_is_refused(rig: WorldRig, wrong: str) -> None:
    ada = rig.world()
    held_lease = granted(rig, ada, "A")
    changed: dict[str, Any] = {
        "holder": {"worker": "B"},
        "incarnation": {"incarnation": "2"},
        "epoch": {"epoch": held_lease.epoch + 1},
    }.get(wrong, {})
    if wrong == "expired":
        rig.advance_clock()
    if wrong == "released":
        rig.store.transact(lease.release, held_lease)
    before = current(rig, ada)
    assert renew(rig, msgspec.structs.replace(held_lease, **changed)) is None
    assert current(rig, ada) == before


# -- failures ------------------------------------------------------------------------------------


@pytest.mark.spec("004", FAILURES, "a fenced worker stops all writes for the world")
def test_fenced_worker_stops_writing_for_the_world(rig: WorldRig) -> None:
    ada, worker = rig_with_entries(rig)
    ada.send(bank.DepositMade(1))
    rig.advance_clock()
    rig.assign(ada, "B")
    b = rig.worker("B")
    rig.run(b)
    head = rig.head(ada)
    for _ in range(3):
        worker.tick()
    assert worker.hosted == []
    assert rig.head(ada) == head


@pytest.mark.spec("004", FAILURES, "a commit on a moved journal head raises HeadMoved")
def test_commit_on_a_moved_journal_head_raises_head_moved(rig: WorldRig) -> None:
    ada, worker = rig_with_entries(rig)
    ada.send(bank.DepositMade(1))
    host = worker._hosted[rig.id(ada)].host
    cycle = host.prepare(rig.store)
    assert cycle is not None
    rig.store.transact(host.commit, cycle)
    with pytest.raises(HeadMoved):
        rig.store.transact(host.commit, cycle)
    assert ada.height() == 4


# -- tests 1 and 5, and the chaos rows 1 to 3 -----------------------------------------------------

SCRIPT = [
    bank.DepositMade(5),
    bank.PaymentOrdered("EUR", tag="a"),
    bank.TransferOrdered("main", 3),
    bank.Failing(),
    bank.Rated(2),
    bank.Queried(),
    bank.Waited(60),
    bank.TransferOrdered("main", 4),
    bank.PaymentOrdered("USD", key="k"),
    bank.DepositMade(2),
    bank.Queried(),
]
POLICY = {"snapshots": SnapshotPolicy(4), "budgets": Budgets(max_inbox_batch=3)}


class WorldRunResult(NamedTuple):
    """The result of a run, which must not depend on worker, timing or retries."""

    state: bytes
    audit: bytes
    journal: list[tuple[int, str, str, list[bytes], bytes | None]]
    dispatched: list[bytes]
    mail: list[tuple[str, bytes, int | None]]
    letters: int
    timers: int


def scripted_rig() -> tuple[WorldRig, Handle, Handle]:
    rig = WorldRig()
    ada, audit = rig.world(), rig.world(bank.Audit, "main")
    for event in SCRIPT:
        ada.send(event)
    return rig, ada, audit


def run_result(rig: WorldRig, ada: Handle, audit: Handle) -> WorldRunResult:
    for handle in (ada, audit):
        rig.store.read(journal.verify, rig.subject(handle))
        rig.store.read(
            lambda txn, h=handle: restore.check_snapshots(txn, rig.world_spec_in(txn, h))
        )
        assert rig.inbox_depth(handle) == 0
        assert rig.record(handle).status.value == "active"
    return WorldRunResult(
        rig.world_spec(ada).definition.dump_state(ada.state()),
        rig.world_spec(audit).definition.dump_state(audit.state()),
        [
            (entry.step.seq, entry.type, entry.outcome, entry.step.emitted, entry.step.reply)
            for entry in ada.journal()
        ],
        [codec.unpack_as(Intent, payload).replay_digest() for payload in rig.queued(QUOTES)],
        [
            (entry.type, entry.step.ingress.value, entry.step.ingress.from_height)
            for entry in audit.journal()
        ],
        len(rig.failed_events()),
        rig.store.read(queue.counts, delay_queue("bank")).delayed,
    )


def run_without_faults() -> tuple[WorldRunResult, int]:
    """The result of a run without faults, and its number of commits."""
    rig, ada, audit = scripted_rig()
    rig.backend.arm({})
    rig.run(rig.worker(**POLICY))
    commits = rig.backend.commits
    return run_result(rig, ada, audit), commits


def run_with_faults(plan: dict[int, Any]) -> tuple[WorldRunResult, set[int]]:
    """The result of a run with the planned commit faults, and the planned faults that occurred.

    After a crash and the expiry of its leases another worker takes over.
    """
    rig, ada, audit = scripted_rig()
    rig.backend.arm(plan)
    for incarnation in range(len(plan) + 1):
        try:
            rig.run(rig.worker("A", str(incarnation), **POLICY))
            break
        except Crash:
            rig.advance_clock()
    unmet = set(rig.backend.plan)
    rig.backend.arm({})
    return run_result(rig, ada, audit), set(plan) - unmet


EXPECTED_RESULT, COMMITS = run_without_faults()


def test_run_without_faults_has_the_expected_result() -> None:
    state = codec.unpack(EXPECTED_RESULT.state)
    assert (state["balance"], state["rate"]) == (7, 2.0)
    assert codec.unpack(EXPECTED_RESULT.audit) == {"total": 7}
    assert [line[2] for line in EXPECTED_RESULT.journal].count("failed") == 1
    assert (len(EXPECTED_RESULT.dispatched), EXPECTED_RESULT.letters, EXPECTED_RESULT.timers) == (
        2,
        1,
        1,
    )
    assert COMMITS >= 6


@pytest.mark.spec(
    "004",
    TESTS,
    "test 1: after a failover the final state equals a run without faults, and late writes are fenced",
)
@pytest.mark.parametrize("ticks", [1, 2, 3])
def test_failover_after_any_cycle_ends_like_a_run_without_faults(ticks: int) -> None:
    rig, ada, audit = scripted_rig()
    a, b = rig.worker("A", **POLICY), rig.worker("B", **POLICY)
    for _ in range(ticks):
        a.tick()
    zombie = a._hosted[rig.id(ada)].host
    rig.advance_clock()
    for handle in (ada, audit):
        rig.assign(handle, "B")
    late = zombie.prepare(rig.store)
    assert late is not None
    rig.run(b)
    before = rows_of_holders(rig)
    with pytest.raises((Fenced, HeadMoved)):
        rig.store.transact(zombie.commit, late)
    with pytest.raises(Fenced):
        rig.store.transact(lease.release, zombie.lease)
    assert renew(rig, zombie.lease) is None
    rig.run(a)
    a.shut_down()
    assert rows_of_holders(rig) == before
    assert run_result(rig, ada, audit) == EXPECTED_RESULT


def rows_of_holders(rig: WorldRig) -> dict[bytes, bytes]:
    """Every row that only the lease holder of a world writes, and rows derived from them."""
    advisory = (schema.Space.READY, schema.Space.WORKER)
    return {
        key: row
        for key, row in rig.rows().items()
        if not key.startswith(tuple(schema.key_prefix(space) for space in advisory))
    }


@pytest.mark.spec("004", TESTS, "test 1: a replay of the journal restores the state byte for byte")
def test_journal_replay_restores_the_state_byte_for_byte() -> None:
    rig, ada, _ = scripted_rig()
    ada.send(bank.Rolled())
    rig.run(rig.worker(**POLICY))
    live = rig.world_spec(ada).definition.dump_state(ada.state())
    subject = rig.subject(ada)
    rig.store.transact(lambda txn: _drop_snapshots(txn, subject))
    assert rig.world_spec(ada).definition.dump_state(ada.state()) == live


def _drop_snapshots(txn: Any, subject: str) -> None:
    prefix = schema.key_prefix(schema.Space.SNAPSHOT, subject)
    for key, _ in txn.scan(prefix, prefix + b"\xff"):
        txn.delete(key)


@pytest.mark.spec(
    "004",
    TESTS,
    "test 5: a fork starts with the state of the source at that height and nothing pending",
)
@pytest.mark.parametrize("at", range(len(SCRIPT) + 1))
def test_fork_starts_with_the_source_state_at_every_height(at: int) -> None:
    rig, ada, audit = scripted_rig()
    rig.run(rig.worker(**POLICY))
    before = run_result(rig, ada, audit)
    child = ada.fork("child", at=at)
    rig.assign(child)
    child.send(bank.DepositMade(0))
    rig.run(rig.worker("A", "2", **POLICY))
    rig.advance_clock()
    rig.run(rig.worker("A", "3", **POLICY))
    assert child.state() == ada.state(at=at)
    assert child.height() == at + 1
    assert run_result(rig, ada, audit) == before


def crash_points() -> Iterator[tuple[int, str]]:
    for commit in range(1, COMMITS + 1):
        for fault in FAULTS:
            yield commit, fault


@pytest.mark.spec(
    "004",
    TESTS,
    "chaos rows 1 to 3: a crash or an unknown outcome at any commit gives the result of a run without faults",
)
@pytest.mark.parametrize(("commit", "fault"), list(crash_points()))
def test_every_crash_point_ends_like_a_run_without_faults(commit: int, fault: str) -> None:
    ended, met = run_with_faults({commit: fault})
    assert met == {commit}
    assert ended == EXPECTED_RESULT


@pytest.mark.spec(
    "004", TESTS, "chaos rows 1 to 3: two faults in one run give the result of a run without faults"
)
@pytest.mark.parametrize("first", FAULTS)
@pytest.mark.parametrize("second", [CRASH_BEFORE, CRASH_AFTER, UNKNOWN_AFTER])
def test_every_pair_of_crash_points_ends_like_a_run_without_faults(first: str, second: str) -> None:
    for first_commit in range(1, COMMITS):
        for second_commit in range(first_commit + 1, COMMITS + 3):
            ended, _ = run_with_faults({first_commit: first, second_commit: second})
            assert ended == EXPECTED_RESULT, (first_commit, second_commit)


@pytest.mark.spec(
    "004",
    TESTS,
    "chaos row 2: host.prepare writes nothing, so a crash before the append loses nothing",
)
def test_host_prepare_writes_nothing(rig: WorldRig) -> None:
    ada, worker = rig_with_entries(rig)
    ada.send(bank.DepositMade(1))
    before = rig.rows()
    host = worker._hosted[rig.id(ada)].host
    assert host.prepare(rig.store) is not None
    assert rig.rows() == before


@pytest.mark.spec(
    "004",
    TESTS,
    "chaos row 3: journal entries and inbox cursor are one commit",
)
@pytest.mark.parametrize("fault", FAULTS)
def test_journal_entries_and_inbox_cursor_are_one_commit(rig: WorldRig, fault: str) -> None:
    ada, worker = rig_with_entries(rig)
    ada.send(bank.DepositMade(1))
    rig.backend.arm({1: fault})
    with contextlib.suppress(Crash):
        worker.tick()
    kept = fault in (CRASH_AFTER, UNKNOWN_AFTER)
    assert (ada.height(), rig.cursor(ada)) == ((4, 4) if kept else (3, 3))

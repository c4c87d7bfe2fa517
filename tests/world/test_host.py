"""The world host: cycle budgets, one transaction per cycle, snapshots, restore, and recovery from
failed commits."""

from __future__ import annotations

import contextlib

import msgspec
import pytest

import holdfast as hf
from holdfast import logs
from holdfast.clock import MS, SimClock
from holdfast.config import CYCLE_BYTES_MAX
from holdfast.durable import inbox, journal, lease, queue, snapshot
from holdfast.errors import (
    Busy,
    CommitUnknown,
    Conflict,
    Fenced,
    HeadMoved,
    Invalid,
    NotFound,
    ReplayDiverged,
    StoreCorrupt,
    StoreFull,
)
from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.store.schema import Space
from holdfast.world import intents, redrive, restore
from holdfast.world.host import Budgets, SnapshotPolicy, WorldHost
from tests.world import bank
from tests.world.rig import WorldRig

MODULES = (
    "holdfast.world.host",
    "holdfast.world.restore",
    "holdfast.workers.world.worker",
    "holdfast.workers.world.hosted_worlds",
)

EVERY_10 = SnapshotPolicy(entries=10)
DivergedWorld = tuple[WorldRig, hf.WorldHandle[bank.BankAccount]]
# An idle timeout longer than any test: no world is released as idle.
NEVER = 1e6


def world_with_deposits(
    rig: WorldRig, count: int, name: str = "ada"
) -> hf.WorldHandle[bank.BankAccount]:
    handle = rig.world(name=name)
    rig.runtime.send_many([(handle, bank.DepositMade(n)) for n in range(1, count + 1)])
    return handle


# -- budgets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", ["max_inbox_batch", "max_tick_steps_per_cycle"])
def test_cycle_takes_at_most_its_budget_of_messages(rig: WorldRig, budget: str) -> None:
    ada = world_with_deposits(rig, 10)
    worker = rig.worker(budgets=Budgets(**{budget: 3}))
    heights = []
    while worker.tick():
        heights.append(ada.height())
    assert heights == [3, 6, 9, 10]
    assert ada.state().balance == 55


def test_cycle_ends_at_the_effects_budget(rig: WorldRig) -> None:
    ada = rig.world()
    for _ in range(5):
        ada.send(bank.PaymentOrdered("EUR", times=3))
    worker = rig.worker(budgets=Budgets(max_effects_per_cycle=6))
    worker.tick()
    assert ada.height() == 2
    assert len(rig.queued("bank/effects/fx.quote")) == 6
    rig.run(worker)
    assert len(rig.queued("bank/effects/fx.quote")) == 15


def timed_app(clock: SimClock) -> hf.App:
    class Clocked(hf.World):
        n: int = 0

        @hf.on(bank.Timed)
        def timed(self, event: bank.Timed, cx: hf.Context) -> None:
            clock.advance(event.ms * MS)
            self.n += 1

    return hf.App("bank", worlds=[Clocked])


def timed_rig() -> tuple[WorldRig, type[hf.World]]:
    clock = SimClock()
    rig = WorldRig(timed_app(clock), clock=clock)
    return rig, rig.app.programs["Clocked"].state


def test_cycle_ends_at_its_wall_time_budget(rig: WorldRig) -> None:
    rig, Clocked = timed_rig()
    world = rig.world(Clocked, "w")
    for _ in range(5):
        world.send(bank.Timed(100))
    worker = rig.worker(budgets=Budgets(max_cycle_wall_ms=250))
    worker.tick()
    assert world.height() == 3


def test_journal_does_not_depend_on_budgets() -> None:
    def journaled(**budgets: int) -> list[tuple[str, bytes | None]]:
        rig = WorldRig()
        ada = world_with_deposits(rig, 20)
        rig.run(rig.worker(budgets=Budgets(**budgets)))
        return [(one.type, one.step.reply) for one in ada.journal()]

    assert journaled() == journaled(max_inbox_batch=1) == journaled(max_effects_per_cycle=1)


def test_cycle_of_large_events_stays_below_the_commit_size_limit(rig: WorldRig) -> None:
    ada = rig.world()
    for _ in range(6):
        ada.send(bank.Noted("x" * (CYCLE_BYTES_MAX // 4 - 1000), []))
    rig.worker(snapshots=SnapshotPolicy(bytes=1 << 40)).tick()
    assert 4 <= ada.height() <= 5


def test_cycle_of_large_intents_stays_below_the_commit_size_limit(rig: WorldRig) -> None:
    ada = rig.world()
    large = "x" * (CYCLE_BYTES_MAX // 8)
    for _ in range(6):
        ada.send(bank.PaymentOrdered(large, times=4))
    rig.worker().tick()
    assert 1 <= ada.height() <= 2


def test_long_tick_commits_and_continues_in_the_next_tick() -> None:
    rig, Clocked = timed_rig()
    worlds = [rig.world(Clocked, f"w{n}") for n in range(6)]
    for world in worlds:
        world.send(bank.Timed(400))
    worker = rig.worker(tick_s=1.0)
    done = []
    while worker.tick():
        done.append(sum(world.height() for world in worlds))
    assert done == [3, 6]


def test_leases_survive_a_backlog_longer_than_their_ttl() -> None:
    rig, Clocked = timed_rig()
    worlds = [rig.world(Clocked, f"w{n}") for n in range(100)]
    for world in worlds:
        world.send(bank.Timed(240))
    worker = rig.run(rig.worker(lease_ttl_s=5.0, idle_s=NEVER))
    assert [world.state().n for world in worlds] == [1] * 100
    assert {rig.record(world).stuck_count for world in worlds} == {0}
    assert len(worker.hosted) == 100


# -- one transaction -----------------------------------------------------------------------------


def test_cycle_is_one_transaction(rig: WorldRig) -> None:
    ada = world_with_deposits(rig, 1)
    worker = rig.run()
    for event in (
        bank.DepositMade(1),
        bank.PaymentOrdered("EUR"),
        bank.TransferOrdered("main"),
        bank.Failing(),
    ):
        ada.send(event)
    before = rig.rows()
    rig.backend.arm({})
    worker.tick()
    assert rig.backend.commits == 1
    changed = [key for key, row in rig.rows().items() if before.get(key) != row]
    spaces = {Space(tuples.unpack(key)[0]) for key in changed}
    # Entries, cursor and mail, intents and dead letters, dedupe records, the new world, its
    # runnable mark.
    assert spaces >= {
        Space.JOURNAL,
        Space.INBOX,
        Space.QUEUE,
        Space.DEDUPE,
        Space.WORLD,
        Space.READY,
    }


def test_fenced_world_aborts_alone_in_a_shared_tick(rig: WorldRig) -> None:
    handles = [world_with_deposits(rig, 3, f"w{n}") for n in range(4)]
    worker = rig.worker()
    worker.tick()
    for handle in handles:
        handle.send(bank.DepositMade(10))
    rig.store.transact(lease.force_release, rig.subject(handles[2]), "test")
    worker.tick()
    assert [handle.height() for handle in handles] == [4, 4, 3, 4]
    assert rig.id(handles[2]) not in worker.hosted


def test_fenced_cycle_changes_nothing(rig: WorldRig) -> None:
    ada = world_with_deposits(rig, 1)
    worker = rig.run()
    ada.send(bank.PaymentOrdered("EUR"))
    ada.send(bank.TransferOrdered("main"))
    rig.advance_clock()
    host = worker._hosted[rig.id(ada)].host
    cycle = host.prepare(rig.store)
    assert cycle is not None
    before = rig.rows()
    with pytest.raises(Fenced):
        rig.store.transact(host.commit, cycle)
    assert rig.rows() == before


# -- failed commits ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [CommitUnknown(), Busy(), StoreFull(), HeadMoved(), Conflict()],
    ids=lambda error: error.code,
)
def test_failed_commit_reloads_the_world_and_retries(
    error: Exception,
) -> None:
    rig = WorldRig()
    ada = world_with_deposits(rig, 3)
    worker = rig.run()
    ada.send(bank.DepositMade(100))
    rig.backend.arm({1: error})
    with contextlib.suppress(StoreFull):
        worker.tick()
    assert ada.height() == 3
    rig.run(worker)
    assert ada.state().balance == 106
    assert rig.blocker_code(ada) == ""
    assert [one.step.reply for one in ada.journal()] == [b"\x01", b"\x03", b"\x06", b"\x6a"]


def test_full_store_does_not_park_the_world(rig: WorldRig) -> None:
    ada = world_with_deposits(rig, 1)
    worker = rig.worker()
    worker.tick()
    ada.send(bank.DepositMade(1))
    rig.backend.arm({n: StoreFull() for n in range(1, 20)})
    with pytest.raises(StoreFull):
        worker.tick()
    rig.backend.arm({})
    rig.run(worker)
    assert (ada.state().balance, rig.blocker_code(ada)) == (2, "")


def test_interrupt_before_commit_never_runs_an_event_twice() -> None:
    """An interrupt in one world ends the tick after reducers of other worlds ran. Their states are
    discarded."""
    ran: list[int] = []

    class Fragile(hf.World):
        n: int = 0

        @hf.on(bank.DepositMade)
        def deposited(self, event: bank.DepositMade, cx: hf.Context) -> None:
            self.n += event.amount
            cx.reply(self.n)
            ran.append(event.amount)
            if event.amount == 5 and ran.count(5) == 4:
                raise KeyboardInterrupt

    rig = WorldRig(hf.App("bank", worlds=[Fragile]))
    worlds = [rig.world(Fragile, name) for name in "abcdef"]
    for world in worlds:
        world.send(bank.DepositMade(1))
    worker = rig.run()
    for world in worlds:
        world.send(bank.DepositMade(5))
    with pytest.raises(KeyboardInterrupt):
        worker.tick()
    rig.run(worker)
    replies = [[one.step.reply for one in world.journal()] for world in worlds]
    assert replies == [[b"\x01", b"\x06"]] * 6
    assert [world.state().n for world in worlds] == [6] * 6


def test_host_that_loses_a_head_race_discards_its_state(rig: WorldRig) -> None:
    ada = world_with_deposits(rig, 2)
    worker = rig.run()
    host = worker._hosted[rig.id(ada)].host
    rival = WorldHost(
        host.world, host.lease, clock=rig.clock, budgets=Budgets(), policy=SnapshotPolicy()
    )
    ada.send(bank.DepositMade(7))
    cycle, other = host.prepare(rig.store), rival.prepare(rig.store)
    assert cycle is not None
    assert other is not None
    rig.store.transact(rival.commit, other)
    with pytest.raises(HeadMoved):
        rig.store.transact(host.commit, cycle)
    ada.send(bank.DepositMade(1))
    rig.run(worker)
    assert ada.state().balance == 11
    assert ada.height() == 4


# -- snapshots -----------------------------------------------------------------------------------


def test_snapshot_is_due_after_a_number_of_entries(rig: WorldRig) -> None:
    ada = world_with_deposits(rig, 25)
    worker = rig.worker(snapshots=EVERY_10, budgets=Budgets(max_inbox_batch=5))
    baselines = []
    while worker.tick():
        baselines.append(rig.baseline(ada))
    assert baselines == [0, 10, 10, 20, 20]


def test_snapshot_is_due_after_a_number_of_bytes(rig: WorldRig) -> None:
    ada = rig.world()
    worker = rig.worker(snapshots=SnapshotPolicy(bytes=3000))
    for _ in range(3):
        ada.send(bank.Noted("x" * 1400, []))
        worker.tick()
    assert rig.baseline(ada) == 2


def test_snapshot_bytes_are_counted_across_hosts(rig: WorldRig) -> None:
    ada = rig.world()
    for n in range(3):
        ada.send(bank.Noted("x" * 1400, []))
        # Each host processes one entry and dies. No single host reaches the limit.
        rig.worker("A", str(n), snapshots=SnapshotPolicy(bytes=3000)).tick()
        rig.advance_clock()
    assert rig.baseline(ada) == 2


def test_old_snapshots_are_pruned_and_the_baseline_is_kept(rig: WorldRig) -> None:
    ada = world_with_deposits(rig, 50)
    rig.run(rig.worker(snapshots=SnapshotPolicy(10, keep=2), budgets=Budgets(max_inbox_batch=5)))
    assert rig.read(snapshot.heights, rig.subject(ada), 100) == [50, 40]
    assert rig.baseline(ada) == 50


def test_released_world_leaves_a_snapshot_for_newer_code(
    rig: WorldRig,
) -> None:
    ada = world_with_deposits(rig, 3)
    worker = rig.run()
    worker.shut_down()
    assert rig.baseline(ada) == 3

    class RepricedAccount(hf.World):
        balance: int = 0

        @hf.on(bank.DepositMade)
        def deposited(self, event: bank.DepositMade, cx: hf.Context) -> None:
            self.balance += 1000 * event.amount

    # The same stored type as `bank.BankAccount`, in other code.
    RepricedAccount.__name__ = bank.BankAccount.__name__
    newer = hf.App("bank", worlds=[RepricedAccount])
    ada.send(bank.DepositMade(1))
    rig.run(rig.worker("A", "2", app=newer))
    assert rig.blocker_code(ada) == ""
    assert (
        newer.open(rig.store, roles=(), clock=rig.clock)
        .world(RepricedAccount, "ada")
        .state()
        .balance
        == 1006
    )


@pytest.mark.parametrize(
    "value", [1 << 70, "\ud800", object()], ids=["huge", "surrogate", "object"]
)
@pytest.mark.parametrize("batch", [1, 3, 256])
def test_event_that_makes_the_state_unstorable_fails_alone(value: object, batch: int) -> None:
    class Storing(hf.World):
        value: object = None
        seen_so_far: int = 0

        @hf.on(bank.Seen)
        def seen(self, event: bank.Seen, cx: hf.Context) -> None:
            self.seen_so_far += 1
            if event.amount == 13:
                cx.reply("never")
                cx.do(bank.quote, "EUR")
                self.value = value

    rig = WorldRig(hf.App("bank", worlds=[Storing, bank.BankAccount]))
    bad, good = rig.world(Storing, "bad"), rig.world(bank.BankAccount, "good")
    for n in range(10):
        bad.send(bank.Seen(13 if n in (3, 4, 9) else n))
        good.send(bank.DepositMade(1))
    rig.run(rig.worker(snapshots=EVERY_10, budgets=Budgets(max_inbox_batch=batch)))
    assert rig.blocker_code(bad) == ""
    assert [one.height for one in bad.journal() if one.outcome == "failed"] == [4, 5, 10]
    assert [one.code for one in rig.failed_events()] == ["reducer_failed"] * 3
    assert all("state" in one.error for one in rig.failed_events())
    # A failed step leaves neither intents nor state changes.
    assert rig.queued(intents.effect_queue("bank", "fx.quote")) == []
    assert bad.state().seen_so_far == 7
    assert rig.read(restore.check_snapshots, rig.world_spec(bad)) == 10
    assert good.state().balance == 10


def test_a_state_of_the_wrong_type_never_becomes_the_baseline() -> None:
    class Wrong(hf.World):
        n: int = 0

        @hf.on(bank.Seen)
        def seen(self, event: bank.Seen, cx: hf.Context) -> None:
            self.n = "much"  # type: ignore[assignment]

    rig = WorldRig(hf.App("bank", worlds=[Wrong]))
    world = rig.world(Wrong, "w")
    for _ in range(10):
        world.send(bank.Seen())
    rig.run(rig.worker(snapshots=EVERY_10))
    assert (rig.blocker_code(world), len(rig.failed_events())) == ("", 10)
    assert rig.baseline(world) == 10
    assert world.state().n == 0

    class Mended(hf.World, tag=False):
        n: int = 0

        @hf.on(bank.Seen)
        def seen(self, event: bank.Seen, cx: hf.Context) -> None:
            self.n += 1

    Mended.__name__ = "Wrong"
    mended = hf.App("bank", worlds=[Mended])
    rig.advance_clock()
    rig.store.transact(
        queue.redrive, redrive.failed_events_queue("bank"), [one.seq for one in rig.failed_events()]
    )
    rig.run(rig.worker("A", "2", app=mended, snapshots=EVERY_10))
    assert world.state().n == 10


def test_world_with_a_state_above_the_value_limit_can_be_snapshotted() -> None:
    rig = WorldRig(hf.App("bank", worlds=[Hoard]))
    world = rig.world(Hoard, "h")
    for n in range(1, 8):
        world.send(PlaceGrown(n, 3 << 20))
    rig.run(rig.worker(snapshots=SnapshotPolicy(entries=3)))
    assert rig.blocker_code(world) == ""
    assert rig.baseline(world) >= 6
    assert len(world.state().held) == 7
    # Another worker restores the state from its snapshot chunks.
    rig.advance_clock()
    world.send(PlaceGrown(1, 1))
    rig.run(rig.worker("A", "2"))
    assert rig.read(restore.check_snapshots, rig.world_spec(world)) > 0
    assert [len(one) for one in world.state().held.values()] == [1] + [3 << 20] * 6


@pytest.mark.parametrize("batch", [1, 256])
def test_event_that_makes_the_state_too_large_fails(
    monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    monkeypatch.setattr("holdfast.world.definition.STATE_BYTES_MAX", 5000)
    rig = WorldRig(hf.App("bank", worlds=[Hoard]))
    world = rig.world(Hoard, "h")
    for n in range(1, 9):
        world.send(PlaceGrown(n, 1000))
    world.send(PlaceGrown(1, 1))
    world.send(PlaceGrown(9, 900))
    rig.run(rig.worker(snapshots=SnapshotPolicy(3), budgets=Budgets(max_inbox_batch=batch)))
    assert rig.blocker_code(world) == ""
    assert [one.outcome for one in world.journal()] == ["ok"] * 4 + ["failed"] * 4 + ["ok"] * 2
    assert all("at most 5,000" in one.error for one in rig.failed_events())
    assert sorted(world.state().held) == list("12349")
    assert rig.read(restore.check_snapshots, rig.world_spec(world)) == 10


class PlaceGrown(hf.Event):
    place: int
    size: int


class Hoard(hf.World):
    held: dict[str, str] = msgspec.field(default_factory=dict)

    @hf.on(PlaceGrown)
    def grown(self, event: PlaceGrown, cx: hf.Context) -> None:
        self.held[str(event.place)] = str(event.place) * event.size


# -- restore -------------------------------------------------------------------------------------


def test_restored_state_is_baseline_plus_tail(any_rig: WorldRig) -> None:
    rig = any_rig
    ada = world_with_deposits(rig, 25)
    rig.run(rig.worker(snapshots=EVERY_10, budgets=Budgets(max_inbox_batch=5)))
    found = rig.store.read(restore.restore, rig.world_spec(ada))
    assert (found.state.balance, found.height, found.snapshot_height) == (325, 25, 20)
    assert (found.cursor, found.tail_bytes) == (
        25,
        sum(len(body) for body in rig.entry_bodies(ada)[20:]),
    )


def test_restore_from_baseline_equals_full_replay(rig: WorldRig) -> None:
    plain, snapped = WorldRig(), WorldRig()
    states = []
    for each, policy in ((plain, SnapshotPolicy()), (snapped, SnapshotPolicy(3))):
        ada = each.world()
        for n in range(20):
            ada.send([bank.DepositMade(n), bank.Rated(n), bank.Queried(), bank.Failing()][n % 4])
        each.run(each.worker(snapshots=policy, budgets=Budgets(max_inbox_batch=2)))
        states.append(each.world_spec(ada).definition.dump_state(ada.state()))
    assert states[0] == states[1]


@pytest.mark.parametrize("at", range(26))
def test_state_at_every_height_is_correct(at: int) -> None:
    rig = WorldRig()
    ada = world_with_deposits(rig, 25)
    rig.run(rig.worker(snapshots=EVERY_10, budgets=Budgets(max_inbox_batch=5)))
    assert ada.state(at=at).balance == at * (at + 1) // 2


@pytest.mark.parametrize("at", [-1, 4, 1000])
def test_state_at_a_missing_height_is_not_found(rig: WorldRig, at: int) -> None:
    ada = world_with_deposits(rig, 3)
    rig.run()
    with pytest.raises(NotFound):
        ada.state(at=at)


def test_state_below_the_truncated_floor_is_not_found(rig: WorldRig) -> None:
    ada = world_with_deposits(rig, 25)
    rig.run(rig.worker(snapshots=SnapshotPolicy(10, keep=1), budgets=Budgets(max_inbox_batch=5)))
    while rig.store.transact(journal.truncate, rig.subject(ada), 100):
        pass
    assert rig.head(ada).floor == 20
    for at in (0, 5, 19):
        with pytest.raises(NotFound):
            ada.state(at=at)
    assert ada.state(at=20).balance == 210
    assert ada.state(at=23).balance == 276
    assert [one.height for one in ada.journal()] == list(range(20, 26))
    with pytest.raises(NotFound):
        ada.journal(lo=5)


def test_int_in_a_float_field_does_not_diverge_in_replay(rig: WorldRig) -> None:
    """After a round trip through the store, 5 becomes 5.0. A reply made from it must be equal in
    every replay."""
    ada = rig.world()
    worker = rig.worker(snapshots=SnapshotPolicy(4, keep=100), budgets=Budgets(max_inbox_batch=1))
    for _ in range(3):
        for event in (
            bank.Rated(5),
            bank.Queried(),
            bank.Failing(),
            bank.Queried(),
            bank.Queried(),
        ):
            ada.send(event)
    rig.run(worker)
    rig.advance_clock()
    ada.send(bank.Queried())
    rig.run(rig.worker("A", "2"))
    assert rig.blocker_code(ada) == ""
    assert rig.store.read(restore.check_snapshots, rig.world_spec(ada)) == 16
    # A full replay without snapshots gives the same state.
    rig.store.transact(_drop_snapshots, rig.subject(ada))
    assert ada.state() == bank.BankAccount(rate=5.0)


def _drop_snapshots(txn: Txn, subject: str) -> None:
    prefix = schema.key_prefix(schema.Space.SNAPSHOT, subject)
    for key, _ in txn.scan(prefix, prefix + b"\xff"):
        txn.delete(key)


def test_default_of_another_type_does_not_diverge() -> None:
    class Defaulted(hf.World):
        rate: float = 0

        @hf.on(bank.Queried)
        def queried(self, event: bank.Queried, cx: hf.Context) -> None:
            cx.reply(self.rate)

    rig = WorldRig(hf.App("bank", worlds=[Defaulted]))
    world = rig.world(Defaulted, "w")
    world.send(bank.Queried())
    rig.run()
    assert world.state() == Defaulted(0.0)


def test_state_has_its_declared_types_with_or_without_snapshot(rig: WorldRig) -> None:
    ada = rig.world()
    ada.send(bank.Rated(5))
    rig.run()
    assert rig.baseline(ada) == 0
    assert type(ada.state().rate) is float


def test_missing_journal_entry_is_not_found(rig: WorldRig) -> None:
    ada = world_with_deposits(rig, 5)
    rig.run()
    rig.store.transact(
        lambda txn: txn.delete(schema.key_prefix(schema.Space.JOURNAL, rig.subject(ada), "e", 5))
    )
    with pytest.raises(NotFound):
        ada.state()
    with pytest.raises(NotFound):
        rig.store.read(restore.check_snapshots, rig.world_spec(ada))


def test_undecodable_inbox_row_parks_the_world(rig: WorldRig) -> None:
    ada, bob = world_with_deposits(rig, 1), world_with_deposits(rig, 1, "bob")
    rig.store.transact(inbox.put, rig.subject(ada), None, b"junk")
    rig.run()
    assert rig.blocker_code(ada) == StoreCorrupt.code
    assert bob.state().balance == 1


# -- checking a journal against its snapshots ----------------------------------------------------


def check_from(rig: WorldRig, ada: hf.WorldHandle[bank.BankAccount], since: int = 0) -> int:
    return rig.store.read(
        lambda txn: restore.check_snapshots(txn, rig.world_spec_in(txn, ada), since=since)
    )


def test_check_snapshots_replays_from_the_first_entry(rig: WorldRig) -> None:
    ada = world_with_deposits(rig, 25)
    rig.run(rig.worker(snapshots=EVERY_10, budgets=Budgets(max_inbox_batch=5)))
    assert check_from(rig, ada) == 25
    assert check_from(rig, ada, since=12) == 15


def test_check_snapshots_starts_at_the_oldest_snapshot_of_a_truncated_journal(
    rig: WorldRig,
) -> None:
    ada = world_with_deposits(rig, 25)
    rig.run(rig.worker(snapshots=EVERY_10, budgets=Budgets(max_inbox_batch=5)))
    while rig.store.transact(journal.truncate, rig.subject(ada), 100):
        pass
    assert check_from(rig, ada) == 5


def test_check_snapshots_reports_the_height_of_a_wrong_snapshot(rig: WorldRig) -> None:
    ada = world_with_deposits(rig, 25)
    rig.run(rig.worker(snapshots=EVERY_10, budgets=Budgets(max_inbox_batch=5)))
    rig.store.transact(_drop_snapshots, rig.subject(ada))
    wrong = rig.world_spec(ada).definition.dump_state(bank.BankAccount(balance=1))
    rig.store.transact(snapshot.save, rig.subject(ada), 10, wrong)
    with pytest.raises(ReplayDiverged) as raised:
        check_from(rig, ada)
    assert (raised.value.height, raised.value.what) == (10, "state")


# -- diverging code ------------------------------------------------------------------------------


def diverging_app() -> hf.App:
    class DivergingAccount(hf.World):
        balance: int = 0
        rate: float = 0.0
        notes: list[str] = msgspec.field(default_factory=list)
        receipts: list[str] = msgspec.field(default_factory=list)

        @hf.on(bank.DepositMade)
        def deposited(self, event: bank.DepositMade, cx: hf.Context) -> None:
            self.balance += 2 * event.amount if event.amount == 3 else event.amount
            cx.reply(self.balance)

    # The same stored type as `bank.BankAccount`, in other code.
    DivergingAccount.__name__ = bank.BankAccount.__name__
    return hf.App("bank", worlds=[DivergingAccount])


@pytest.fixture
def diverged(rig: WorldRig) -> DivergedWorld:
    ada = world_with_deposits(rig, 5)
    rig.run()
    rig.advance_clock()
    ada.send(bank.DepositMade(1))
    rig.run(rig.worker("A", "2", app=diverging_app()))
    return rig, ada


def test_diverging_code_parks_the_world_and_names_the_height(
    diverged: DivergedWorld,
) -> None:
    rig, ada = diverged
    record = rig.record(ada)
    assert record.status.value == "parked"
    assert record.blocker is not None
    assert (record.blocker.code, record.blocker.height) == ("replay_diverged", 3)
    assert record.blocker.since_ns > 0
    assert ada.height() == 5


def test_parked_world_is_logged(diverged: DivergedWorld, caplog: pytest.LogCaptureFixture) -> None:
    rig, ada = diverged
    [record] = [one for one in caplog.get_records("setup") if one.name == "holdfast.worlds"]
    ids = getattr(record, logs.IDS_ATTRIBUTE)
    assert record.getMessage().startswith("world parked: universe=bank world=BankAccount/")
    assert (ids["world_id"], ids["code"]) == (rig.record(ada).world_id, "replay_diverged")
    assert "height=3" in ids["error"]


def test_parked_world_is_not_retried(diverged: DivergedWorld) -> None:
    rig, _ = diverged
    worker = rig.run(rig.worker("A", "3", app=diverging_app()))
    before = rig.rows()
    rig.backend.arm({})
    for _ in range(5):
        assert not worker.tick()
    assert rig.backend.commits == 0
    assert rig.rows() == before
    assert worker.hosted == []


def test_parked_world_accepts_messages_and_continues_after_resume(
    diverged: DivergedWorld,
) -> None:
    rig, ada = diverged
    worker = rig.run(rig.worker("A", "3"))
    ada.send(bank.DepositMade(10))
    rig.run(worker)
    assert ada.height() == 5
    ada.resume()
    rig.run(worker)
    assert ada.state().balance == 26
    assert rig.record(ada).blocker is None


def test_resume_with_diverging_code_parks_the_world_again(diverged: DivergedWorld) -> None:
    rig, ada = diverged
    worker = rig.run(rig.worker("A", "3", app=diverging_app()))
    for _ in range(3):
        ada.resume()
        rig.run(worker)
        assert rig.blocker_code(ada) == "replay_diverged"


def test_worker_that_lost_its_lease_does_not_park_the_world(rig: WorldRig) -> None:
    """A zombie worker with other code or an old state finds a divergence that does not concern the
    world."""
    ada = world_with_deposits(rig, 5)
    zombie = rig.worker("A", "1", app=diverging_app())
    zombie.tick()
    assert zombie.hosted
    rig.advance_clock()
    rig.assign(ada, "B")
    ada.send(bank.DepositMade(1))
    zombie._hosted.park(rig.id(ada), Invalid(what="test"))
    assert rig.record(ada).status.value == "active"

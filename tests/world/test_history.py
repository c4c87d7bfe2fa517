"""`keep`: trimming the journal of a world type, and reads of the remaining entries."""

from __future__ import annotations

import contextlib
import zlib

import pytest

import holdfast as hf
from holdfast import codec, failpoints
from holdfast.app.world_handle import WorldHandle
from holdfast.clock import S
from holdfast.durable import journal, snapshot
from holdfast.errors import Invalid, KeyExpired, NoReply, NotFound, UnknownEvent
from holdfast.store import blobs, schema, tuples
from holdfast.workers.orchestrator import Orchestrator
from holdfast.world import history, unknown_events
from holdfast.world.catalog import subject_of
from holdfast.world.history import HistoryBound
from holdfast.world.host import Budgets, SnapshotPolicy
from holdfast.world.restore import check_snapshots
from tests.world import bank
from tests.world.rig import CRASH_AFTER, CRASH_BEFORE, Crash, WorldRig, make_backend

MODULES = (
    "holdfast.world.history",
    "holdfast.app.history_limit",
    "holdfast.workers.history_upkeep",
)

DAY_S = 24 * 3600
EVERY_5 = SnapshotPolicy(entries=5, keep=2)
STORES = [
    pytest.param("memory", id="memory"),
    pytest.param("postgres", id="postgres", marks=pytest.mark.postgresql),
]


def app_with_keep(keep: hf.Keep | None) -> hf.App:
    bounded = {} if keep is None else {bank.BankAccount: keep}
    return hf.App(
        "bank",
        worlds=[bank.BankAccount, bank.Audit],
        events=[bank.UnhandledEvent, bank.Seen],
        keep=bounded,
    )


def rig_with_keep(keep: hf.Keep | None, on: str = "memory") -> WorldRig:
    return WorldRig(app_with_keep(keep), make_backend(on))


def leader_of(rig: WorldRig, incarnation: str = "1") -> Orchestrator:
    return Orchestrator(
        rig.store,
        universe="bank",
        worker="O",
        incarnation=incarnation,
        histories=rig.app.histories,
        clock=rig.clock,
    )


def make_deposits(
    rig: WorldRig,
    ada: WorldHandle[bank.BankAccount],
    n: int,
    *,
    large: bool = False,
    packed: int = 4,
) -> None:
    event = bank.Noted("x" * 6000, []) if large else bank.DepositMade(1)
    for _ in range(n):
        ada.send(event)
    budgets = Budgets(max_inbox_batch=5)
    rig.run(rig.worker(snapshots=EVERY_5, budgets=budgets, compacted_per_tick=packed))


def run_leader(rig: WorldRig, leader: Orchestrator | None = None, ticks_max: int = 1000) -> None:
    leader = leader or leader_of(rig)
    rig.advance_clock(2)
    for _ in range(ticks_max):
        if not leader.tick():
            leader.shut_down()
            return
    raise AssertionError("there is always more to cut")


def rows_below_floor(rig: WorldRig, ada: WorldHandle[bank.BankAccount]) -> int:
    """Count the entry rows below the floor."""
    head = rig.head(ada)
    prefix = schema.key_prefix(schema.Space.JOURNAL, rig.subject(ada), "e")
    return len(rig.read(lambda txn: txn.scan(prefix, prefix + tuples.pack_int(head.floor), 10_000)))


@pytest.mark.parametrize("on", STORES)
def test_entries_beyond_keep_are_trimmed_and_the_rest_replays(on: str) -> None:
    rig = rig_with_keep(hf.Keep(entries=20), on)
    ada = rig.world()
    make_deposits(rig, ada, 100)
    hash_before = rig.read(journal.hash_at, rig.subject(ada), 80)
    run_leader(rig)
    head = rig.head(ada)
    assert head.height == 100
    # The last 20 entries are kept: a snapshot exists directly below them.
    assert rows_below_floor(rig, ada) == 0
    assert (head.floor, head.hash_below_floor) == (81, hash_before)
    rig.read(journal.verify, rig.subject(ada))
    assert rig.read(check_snapshots, rig.world_spec(ada)) == 100 - head.floor + 1
    for at in range(head.floor - 1, 101):
        assert ada.state(at=at).balance == at
    assert [one.height for one in ada.journal()] == list(range(head.floor, 101))


def test_reads_below_the_floor_raise_not_found_with_the_floor() -> None:
    rig = rig_with_keep(hf.Keep(entries=20))
    ada = rig.world()
    make_deposits(rig, ada, 100)
    run_leader(rig)
    floor = rig.head(ada).floor
    for ask in (
        lambda: ada.state(at=0),
        lambda: ada.state(at=floor - 2),
        lambda: ada.journal(1),
        lambda: ada.journal(lo=floor - 1),
        lambda: ada.fork("child", at=floor - 2),
    ):
        with pytest.raises(NotFound) as raised:
            ask()
        assert raised.value.fields["floor"] == floor
    assert ada.fork("child", at=floor - 1).state().balance == floor - 1


def test_world_without_keep_is_not_trimmed() -> None:
    rig = rig_with_keep(None)
    ada = rig.world()
    make_deposits(rig, ada, 60)
    run_leader(rig)
    assert rig.head(ada).floor == 1
    assert ada.state(at=1).balance == 1


def test_keep_days_protects_young_entries_beyond_the_count() -> None:
    rig = rig_with_keep(hf.Keep(entries=10, days=30))
    ada = rig.world()
    make_deposits(rig, ada, 60)
    run_leader(rig)
    assert rig.head(ada).floor == 1
    rig.advance_clock(31 * DAY_S)
    run_leader(rig)
    # No event was sent since then: the age limit alone triggered the trim.
    assert 45 <= rig.head(ada).floor <= 51
    assert ada.state().balance == 60


def test_keep_entries_protects_old_entries_within_the_count() -> None:
    rig = rig_with_keep(hf.Keep(entries=1000, days=1))
    ada = rig.world()
    make_deposits(rig, ada, 60)
    rig.advance_clock(400 * DAY_S)
    run_leader(rig)
    assert rig.head(ada).floor == 1


def test_keep_days_trims_an_idle_world_down_to_its_last_snapshot() -> None:
    rig = rig_with_keep(hf.Keep(days=7))
    ada = rig.world()
    make_deposits(rig, ada, 23)
    rig.advance_clock(30)
    rig.run()  # the worker releases the world with a final snapshot
    rig.advance_clock(8 * DAY_S)
    run_leader(rig)
    head = rig.head(ada)
    assert head.floor <= head.height + 1
    assert head.floor > 20
    assert ada.state().balance == 23
    ada.send(bank.DepositMade(1))
    rig.run(rig.worker("A", "2"))
    assert ada.state().balance == 24


def test_snapshots_kept_for_trimming_are_few() -> None:
    rig = rig_with_keep(hf.Keep(entries=80))
    ada = rig.world()
    make_deposits(rig, ada, 400)
    heights = rig.read(snapshot.heights, rig.subject(ada), 1000)
    # One snapshot per eighth of the limit up to the floor, plus the latest ones.
    assert len(heights) <= 400 // 10 + 3
    run_leader(rig)
    heights = rig.read(snapshot.heights, rig.subject(ada), 1000)
    assert len(heights) <= 8 + 4
    assert min(heights) == rig.head(ada).floor - 1


def test_trim_cuts_inside_a_compacted_segment() -> None:
    rig = rig_with_keep(hf.Keep(entries=12))
    ada = rig.world()
    make_deposits(rig, ada, 100, large=True)
    subject = rig.subject(ada)
    assert rig.head(ada).packed_to > 0
    run_leader(rig)
    head = rig.head(ada)
    assert head.floor > 80
    rig.read(journal.verify, subject)
    assert rig.read(check_snapshots, rig.world_spec(ada)) > 0
    entries = rig.read(journal.read, subject, head.floor, head.height + 1, 1000)
    assert [one.height for one in entries] == list(range(head.floor, 101))
    assert head.floor <= head.packed_to
    segments = schema.key_prefix(schema.Space.JOURNAL, subject, "s")
    [row] = [row for key, row in rig.rows().items() if key.startswith(segments)]
    # The segment holds no entry below the floor.
    [first, kept] = codec.unpack(zlib.decompress(row))
    assert (first, len(kept)) == (head.floor, head.packed_to - head.floor + 1)


def test_trim_removes_blobs_of_entries_but_not_those_of_a_fork() -> None:
    rig = rig_with_keep(hf.Keep(entries=5))
    ada = rig.world()
    for n in range(40):
        ada.send(bank.Noted(str(n) * 6000, []))
    rig.run(rig.worker(snapshots=EVERY_5, budgets=Budgets(max_inbox_batch=5)))
    child = ada.fork("child", at=20)
    notes = list(child.state().notes)
    run_leader(rig)
    assert rig.head(ada).floor > 30
    rig.advance_clock(2 * 3600)
    while rig.store.transact(blobs.collect, 3600 * S, 1000):
        pass
    assert child.state().notes == notes
    assert len(ada.state().notes) == 40
    data = schema.key_prefix(schema.Space.BLOB, "data")
    kept = sum(1 for key in rig.rows() if key.startswith(data))
    assert kept <= 20


@pytest.mark.parametrize("fault", [CRASH_BEFORE, CRASH_AFTER])
@pytest.mark.parametrize("at", range(2, 9))
def test_next_leader_continues_an_interrupted_trim(at: int, fault: str) -> None:
    rig = rig_with_keep(hf.Keep(entries=20))
    ada = rig.world()
    make_deposits(rig, ada, 300)
    first = leader_of(rig)
    rig.backend.arm({at: fault})
    with contextlib.suppress(Crash):
        for _ in range(20):
            first.tick()
    rig.backend.arm({})
    assert ada.state().balance == 300
    rig.read(journal.verify, rig.subject(ada))
    rig.advance_clock(60)
    run_leader(rig, leader_of(rig, "2"))
    assert rig.head(ada).floor > 270
    assert rows_below_floor(rig, ada) == 0
    rig.read(journal.verify, rig.subject(ada))


def test_trim_removes_a_bounded_number_of_rows_per_commit() -> None:
    rig = rig_with_keep(hf.Keep(entries=20))
    ada = rig.world()
    make_deposits(rig, ada, 200, packed=0)
    commits = 0
    while rig.store.transact(history.trim, "bank", 30):
        commits += 1
        head = rig.head(ada)
        # The first commit sets the floor, so no reader sees a partial trim.
        assert head.floor > 170
        assert ada.state(at=head.floor - 1).balance == head.floor - 1
        assert rig.read(check_snapshots, rig.world_spec(ada)) == 200 - head.floor + 1
    assert commits >= 2
    assert rows_below_floor(rig, ada) == 0


def test_snapshot_during_a_trim_does_not_end_it() -> None:
    rig = rig_with_keep(hf.Keep(entries=20))
    ada = rig.world()
    make_deposits(rig, ada, 200, packed=0)
    assert rig.store.transact(history.trim, "bank", 30)
    left = rows_below_floor(rig, ada)
    assert left > 0
    floor = rig.head(ada).floor
    for _ in range(3):
        ada.send(bank.DepositMade(1))
    rig.run(rig.worker(snapshots=SnapshotPolicy(entries=3, keep=2), compacted_per_tick=0))
    # There is a new snapshot and no new cut point. The remaining rows are still due.
    assert rig.baseline(ada) == 203
    assert rows_below_floor(rig, ada) == left
    run_leader(rig)
    assert rows_below_floor(rig, ada) == 0
    assert rig.head(ada).floor == floor
    assert ada.state().balance == 203


def test_trim_never_cuts_above_the_baseline() -> None:
    rig = rig_with_keep(hf.Keep(entries=1))
    ada = rig.world()
    make_deposits(rig, ada, 13)
    run_leader(rig)
    assert rig.head(ada).floor <= rig.baseline(ada) + 1
    with pytest.raises(Invalid):
        rig.store.transact(journal.raise_floor, rig.subject(ada), rig.head(ada).checkpoint + 1)
    assert ada.state().balance == 13


def test_keep_declared_later_applies_to_idle_worlds() -> None:
    rig = rig_with_keep(None)
    ada = rig.world()
    make_deposits(rig, ada, 60)
    run_leader(rig)
    assert rig.head(ada).floor == 1
    rig.app = app_with_keep(hf.Keep(entries=5))
    run_leader(rig, leader_of(rig, "2"))
    assert rig.head(ada).floor == 56
    assert ada.state().balance == 60


def test_keep_removed_later_applies_from_the_next_snapshot() -> None:
    rig = rig_with_keep(hf.Keep(entries=20))
    ada = rig.world()
    make_deposits(rig, ada, 50)
    rig.runtime.app = rig.app = app_with_keep(None)
    make_deposits(rig, ada, 50)
    run_leader(rig)
    assert rig.head(ada).floor == 1
    assert rig.read(history.find_plan, "bank", rig.id(ada)) is None


def test_send_with_a_key_of_a_trimmed_entry_reports_removed() -> None:
    rig = rig_with_keep(hf.Keep(entries=5))
    ada = rig.world()
    ada.send(bank.Failing("x"), key="k")
    make_deposits(rig, ada, 60)
    assert ada.send(bank.Failing("x"), key="k").status == "failed"
    run_leader(rig)
    assert rig.head(ada).floor > 1
    assert len(rig.failed_events()) == 1
    assert ada.send(bank.Failing("x"), key="k").status == "removed"
    with pytest.raises(KeyExpired) as raised:
        ada.ask(bank.Failing("x"), key="k", timeout=0)
    assert raised.value.fields["key"] == "k"
    assert (raised.value.fields["seq"], raised.value.fields["floor"]) == (1, rig.head(ada).floor)
    assert raised.value.code == "key_expired"


def test_ask_raises_no_reply_when_its_entry_is_trimmed_before_reading() -> None:
    """The event was handled without a key, so the caller cannot repeat the call."""
    rig = rig_with_keep(hf.Keep(entries=5))
    ada = rig.world()

    def trim(_: object) -> None:
        make_deposits(rig, ada, 60)
        run_leader(rig)

    with failpoints.on("world.ask_wait", calls=trim), pytest.raises(NoReply, match="removed"):
        ada.ask(bank.DepositMade(1))


def test_given_up_event_is_reported_after_its_entry_is_trimmed() -> None:
    rig = rig_with_keep(hf.Keep(entries=5))
    ada = rig.world()
    ada.send(bank.DepositMade(1), key="k")
    make_deposits(rig, ada, 60)
    run_leader(rig)
    world_id = rig.id(ada)
    rig.store.transact(unknown_events.record_given_up, "bank", world_id, 1, "DepositMade", 7)
    with pytest.raises(UnknownEvent):
        ada.ask(bank.DepositMade(1), key="k", timeout=0)
    rig.store.transact(unknown_events.record_redrive, "bank", world_id, 1, rig.head(ada).height)
    assert ada.ask(bank.DepositMade(1), key="k", timeout=0) == 61


def test_keep_removed_later_applies_to_idle_worlds() -> None:
    rig = rig_with_keep(hf.Keep(days=30))
    ada = rig.world()
    make_deposits(rig, ada, 60)
    run_leader(rig)
    assert rig.head(ada).floor == 1
    rig.app = app_with_keep(None)
    rig.advance_clock(31 * DAY_S)
    run_leader(rig, leader_of(rig, "2"))
    assert rig.head(ada).floor == 1
    assert rig.read(history.find_plan, "bank", rig.id(ada)) is None


def test_keep_raised_later_trims_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """All worlds are due when the new code starts, and it scans one world per tick."""
    monkeypatch.setattr("holdfast.workers.history_upkeep.SCAN_PAGE", 1)
    rig = rig_with_keep(hf.Keep(days=30))
    worlds = [rig.world(name=f"w{n}") for n in range(4)]
    for one in worlds:
        make_deposits(rig, one, 20)
    run_leader(rig)
    rig.app = app_with_keep(hf.Keep(days=3650))
    rig.advance_clock(31 * DAY_S)
    run_leader(rig, leader_of(rig, "2"))
    assert [rig.head(one).floor for one in worlds] == [1] * 4


def test_leader_without_the_world_type_keeps_its_trim_plan() -> None:
    rig = rig_with_keep(hf.Keep(days=30))
    ada = rig.world()
    make_deposits(rig, ada, 60)
    planned = rig.read(history.find_plan, "bank", rig.id(ada))
    assert planned is not None
    rig.app = hf.App("bank", worlds=[bank.Audit], events=[bank.UnhandledEvent, bank.Seen])
    run_leader(rig, leader_of(rig, "2"))
    assert rig.read(history.find_plan, "bank", rig.id(ada)) == planned


def test_deleted_world_is_not_trimmed() -> None:
    rig = rig_with_keep(hf.Keep(entries=5))
    ada = rig.world()
    make_deposits(rig, ada, 50)
    world_id = rig.id(ada)
    ada.delete()
    while rig.store.transact(history.trim, "bank", 100):
        pass
    assert rig.read(journal.head, subject_of("bank", world_id)).floor == 1
    assert rig.read(history.find_plan, "bank", world_id) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: hf.Keep(),
        lambda: hf.Keep(entries=0),
        lambda: hf.Keep(entries=-1),
        lambda: hf.Keep(entries=1.5),  # type: ignore[arg-type]
        lambda: hf.Keep(entries=True),
        lambda: hf.Keep(days=0),
        lambda: hf.Keep(days=float("nan")),
        lambda: hf.Keep(days=1e9),
        lambda: hf.Keep(days="30"),  # type: ignore[arg-type]
        lambda: hf.App("bank", worlds=[bank.Audit], keep={bank.BankAccount: hf.Keep(days=1)}),
        lambda: hf.App("bank", worlds=[bank.BankAccount], keep={bank.BankAccount: 30}),  # type: ignore[dict-item]
    ],
)
def test_invalid_keep_is_refused(make: object) -> None:
    with pytest.raises(Invalid):
        make()  # type: ignore[operator]


def test_keep_converts_to_entries_and_store_time() -> None:
    assert hf.Keep(entries=100_000, days=30).bound == HistoryBound(100_000, 30 * DAY_S * S)
    assert hf.Keep(days=0.5).bound == HistoryBound(0, DAY_S * S // 2)

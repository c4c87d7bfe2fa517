"""`keep`: the history of a world type is bounded, and what is left of it still holds."""

from __future__ import annotations

import contextlib
import zlib

import pytest

import holdfast as hf
from holdfast import codec
from holdfast.app.handle import WorldHandle
from holdfast.clock import S
from holdfast.durable import journal, snapshot
from holdfast.errors import Invalid, KeyExpired, NoReply, NotFound, UnknownEvent
from holdfast.roles.orchestrator import Orchestrator
from holdfast.store import blobs, schema, tuples
from holdfast.world import history, unknown
from holdfast.world.catalog import subject_of
from holdfast.world.history import Bound
from holdfast.world.host import Budgets, SnapshotPolicy
from holdfast.world.restore import check_snapshots
from tests.world import bank
from tests.world.rig import CRASH_AFTER, CRASH_BEFORE, Crash, Rig, rows_on

MODULES = ("holdfast.world.history", "holdfast.app.keep", "holdfast.roles.upkeep")

DAY_S = 24 * 3600
EVERY_5 = SnapshotPolicy(entries=5, keep=2)
ON = [
    pytest.param("memory", id="memory"),
    pytest.param("postgres", id="postgres", marks=pytest.mark.postgresql),
]


def app(keep: hf.Keep | None) -> hf.App:
    bounded = {} if keep is None else {bank.Account: keep}
    return hf.App(
        "bank", worlds=[bank.Account, bank.Audit], events=[bank.Unheard, bank.Seen], keep=bounded
    )


def rig_of(keep: hf.Keep | None, on: str = "memory") -> Rig:
    return Rig(app(keep), rows_on(on))


def leader_of(rig: Rig, incarnation: str = "1") -> Orchestrator:
    return Orchestrator(
        rig.store,
        universe="bank",
        worker="O",
        incarnation=incarnation,
        histories=rig.app.histories,
        clock=rig.clock,
    )


def deposits(
    rig: Rig, ada: WorldHandle[bank.Account], n: int, *, large: bool = False, packed: int = 4
) -> None:
    event = bank.Noted("x" * 6000, []) if large else bank.Deposited(1)
    for _ in range(n):
        ada.send(event)
    budgets = Budgets(max_inbox_batch=5)
    rig.run(rig.worker(snapshots=EVERY_5, budgets=budgets, compacted_per_tick=packed))


def lead(rig: Rig, leader: Orchestrator | None = None, ticks_max: int = 1000) -> None:
    leader = leader or leader_of(rig)
    rig.expire(2)
    for _ in range(ticks_max):
        if not leader.tick():
            leader.finish()
            return
    raise AssertionError("there is always more to cut")


def rows_below(rig: Rig, ada: WorldHandle[bank.Account]) -> int:
    """Rows of entries, and of segments, that lie below the floor."""
    head = rig.head(ada)
    prefix = schema.prefix(schema.Space.JOURNAL, rig.subject(ada), "e")
    return len(rig.read(lambda txn: txn.scan(prefix, prefix + tuples.pack_int(head.floor), 10_000)))


@pytest.mark.parametrize("on", ON)
def test_entries_beyond_the_bound_go_and_the_rest_still_replays(on: str) -> None:
    rig = rig_of(hf.Keep(entries=20), on)
    ada = rig.world()
    deposits(rig, ada, 100)
    hash_before = rig.read(journal.hash_at, rig.subject(ada), 80)
    lead(rig)
    head = rig.head(ada)
    assert head.height == 100
    # The last 20 stay: there is a snapshot right below them.
    assert rows_below(rig, ada) == 0
    assert (head.floor, head.below) == (81, hash_before)
    rig.read(journal.verify, rig.subject(ada))
    assert rig.read(check_snapshots, rig.kernel(ada)) == 100 - head.floor + 1
    for at in range(head.floor - 1, 101):
        assert ada.state(at=at).balance == at
    assert [one.height for one in ada.journal()] == list(range(head.floor, 101))


def test_below_the_floor_everything_answers_not_found_with_the_floor() -> None:
    rig = rig_of(hf.Keep(entries=20))
    ada = rig.world()
    deposits(rig, ada, 100)
    lead(rig)
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


def test_without_a_bound_nothing_goes() -> None:
    rig = rig_of(None)
    ada = rig.world()
    deposits(rig, ada, 60)
    lead(rig)
    assert rig.head(ada).floor == 1
    assert ada.state(at=1).balance == 1


def test_what_is_younger_than_its_days_stays_however_much_it_is() -> None:
    rig = rig_of(hf.Keep(entries=10, days=30))
    ada = rig.world()
    deposits(rig, ada, 60)
    lead(rig)
    assert rig.head(ada).floor == 1
    rig.expire(31 * DAY_S)
    lead(rig)
    # Nothing was sent since: the bound in days alone has brought it here.
    assert 45 <= rig.head(ada).floor <= 51
    assert ada.state().balance == 60


def test_what_is_among_the_last_entries_stays_however_old_it_is() -> None:
    rig = rig_of(hf.Keep(entries=1000, days=1))
    ada = rig.world()
    deposits(rig, ada, 60)
    rig.expire(400 * DAY_S)
    lead(rig)
    assert rig.head(ada).floor == 1


def test_days_alone_bound_a_world_that_sleeps_and_leave_its_last_snapshot() -> None:
    rig = rig_of(hf.Keep(days=7))
    ada = rig.world()
    deposits(rig, ada, 23)
    rig.expire(30)
    rig.run()  # it is released, with a last snapshot
    rig.expire(8 * DAY_S)
    lead(rig)
    head = rig.head(ada)
    assert head.floor <= head.height + 1
    assert head.floor > 20
    assert ada.state().balance == 23
    ada.send(bank.Deposited(1))
    rig.run(rig.worker("A", "2"))
    assert ada.state().balance == 24


def test_snapshots_that_are_kept_for_cutting_are_few() -> None:
    rig = rig_of(hf.Keep(entries=80))
    ada = rig.world()
    deposits(rig, ada, 400)
    heights = rig.read(snapshot.heights, rig.subject(ada), 1000)
    # One for each eighth of the bound up to the floor, and the last ones.
    assert len(heights) <= 400 // 10 + 3
    lead(rig)
    heights = rig.read(snapshot.heights, rig.subject(ada), 1000)
    assert len(heights) <= 8 + 4
    assert min(heights) == rig.head(ada).floor - 1


def test_packed_entries_are_cut_within_their_segment() -> None:
    rig = rig_of(hf.Keep(entries=12))
    ada = rig.world()
    deposits(rig, ada, 100, large=True)
    subject = rig.subject(ada)
    assert rig.head(ada).packed > 0
    lead(rig)
    head = rig.head(ada)
    assert head.floor > 80
    rig.read(journal.verify, subject)
    assert rig.read(check_snapshots, rig.kernel(ada)) > 0
    entries = rig.read(journal.read, subject, head.floor, head.height + 1, 1000)
    assert [one.height for one in entries] == list(range(head.floor, 101))
    assert head.floor <= head.packed
    segments = schema.prefix(schema.Space.JOURNAL, subject, "s")
    [row] = [row for key, row in rig.rows().items() if key.startswith(segments)]
    # What lay below the floor is not in the segment any more.
    [first, kept] = codec.unpack(zlib.decompress(row))
    assert (first, len(kept)) == (head.floor, head.packed - head.floor + 1)


def test_blobs_of_entries_that_are_cut_go_and_those_of_a_fork_stay() -> None:
    rig = rig_of(hf.Keep(entries=5))
    ada = rig.world()
    for n in range(40):
        ada.send(bank.Noted(str(n) * 6000, []))
    rig.run(rig.worker(snapshots=EVERY_5, budgets=Budgets(max_inbox_batch=5)))
    child = ada.fork("child", at=20)
    notes = list(child.state().notes)
    lead(rig)
    assert rig.head(ada).floor > 30
    rig.expire(2 * 3600)
    while rig.store.transact(blobs.collect, 3600 * S, 1000):
        pass
    assert child.state().notes == notes
    assert len(ada.state().notes) == 40
    data = schema.prefix(schema.Space.BLOB, "data")
    kept = sum(1 for key in rig.rows() if key.startswith(data))
    assert kept <= 20


@pytest.mark.parametrize("fault", [CRASH_BEFORE, CRASH_AFTER])
@pytest.mark.parametrize("at", range(2, 9))
def test_a_leader_that_dies_while_it_cuts_is_continued_by_the_next(at: int, fault: str) -> None:
    rig = rig_of(hf.Keep(entries=20))
    ada = rig.world()
    deposits(rig, ada, 300)
    first = leader_of(rig)
    rig.backend.arm({at: fault})
    with contextlib.suppress(Crash):
        for _ in range(20):
            first.tick()
    rig.backend.arm({})
    assert ada.state().balance == 300
    rig.read(journal.verify, rig.subject(ada))
    rig.expire(60)
    lead(rig, leader_of(rig, "2"))
    assert rig.head(ada).floor > 270
    assert rows_below(rig, ada) == 0
    rig.read(journal.verify, rig.subject(ada))


def test_a_commit_that_cuts_removes_a_bounded_number_of_rows_and_is_continued() -> None:
    rig = rig_of(hf.Keep(entries=20))
    ada = rig.world()
    deposits(rig, ada, 200, packed=0)
    commits = 0
    while rig.store.transact(history.trim, "bank", 30):
        commits += 1
        head = rig.head(ada)
        # The floor is there from the first commit on: no reader sees half of it.
        assert head.floor > 170
        assert ada.state(at=head.floor - 1).balance == head.floor - 1
        assert rig.read(check_snapshots, rig.kernel(ada)) == 200 - head.floor + 1
    assert commits >= 2
    assert rows_below(rig, ada) == 0


def test_a_snapshot_while_rows_are_removed_does_not_end_the_removal() -> None:
    rig = rig_of(hf.Keep(entries=20))
    ada = rig.world()
    deposits(rig, ada, 200, packed=0)
    assert rig.store.transact(history.trim, "bank", 30)
    left = rows_below(rig, ada)
    assert left > 0
    floor = rig.head(ada).floor
    for _ in range(3):
        ada.send(bank.Deposited(1))
    rig.run(rig.worker(snapshots=SnapshotPolicy(entries=3, keep=2), compacted_per_tick=0))
    # There is a new snapshot, and none to cut at: the rows that are left are due all the same.
    assert rig.baseline(ada) == 203
    assert rows_below(rig, ada) == left
    lead(rig)
    assert rows_below(rig, ada) == 0
    assert rig.head(ada).floor == floor
    assert ada.state().balance == 203


def test_a_journal_is_never_cut_above_its_baseline() -> None:
    rig = rig_of(hf.Keep(entries=1))
    ada = rig.world()
    deposits(rig, ada, 13)
    lead(rig)
    assert rig.head(ada).floor <= rig.baseline(ada) + 1
    with pytest.raises(Invalid):
        rig.store.transact(journal.cut, rig.subject(ada), rig.head(ada).checkpoint + 1)
    assert ada.state().balance == 13


def test_a_bound_that_is_declared_later_counts_for_worlds_that_sleep() -> None:
    rig = rig_of(None)
    ada = rig.world()
    deposits(rig, ada, 60)
    lead(rig)
    assert rig.head(ada).floor == 1
    rig.app = app(hf.Keep(entries=5))
    lead(rig, leader_of(rig, "2"))
    assert rig.head(ada).floor == 56
    assert ada.state().balance == 60


def test_a_bound_that_is_taken_back_counts_from_the_next_snapshot_on() -> None:
    rig = rig_of(hf.Keep(entries=20))
    ada = rig.world()
    deposits(rig, ada, 50)
    rig.runtime.app = rig.app = app(None)
    deposits(rig, ada, 50)
    lead(rig)
    assert rig.head(ada).floor == 1
    assert rig.read(history.planned, "bank", rig.id(ada)) is None


def test_a_key_whose_entry_was_removed_is_not_answered_as_handled() -> None:
    rig = rig_of(hf.Keep(entries=5))
    ada = rig.world()
    ada.send(bank.Failing("x"), key="k")
    deposits(rig, ada, 60)
    assert ada.send(bank.Failing("x"), key="k").status == "failed"
    lead(rig)
    assert rig.head(ada).floor > 1
    assert len(rig.dead()) == 1
    assert ada.send(bank.Failing("x"), key="k").status == "removed"
    with pytest.raises(KeyExpired) as raised:
        ada.ask(bank.Failing("x"), key="k", timeout=0)
    assert raised.value.fields["key"] == "k"
    assert (raised.value.fields["seq"], raised.value.fields["floor"]) == (1, rig.head(ada).floor)
    assert raised.value.code == "key_expired"


def test_an_answer_that_is_removed_before_it_is_read_is_no_reply() -> None:
    """Without a key: the event was handled, and there is nothing to repeat it under."""
    rig = rig_of(hf.Keep(entries=5))
    ada = rig.world()
    wait = rig.store.wait

    def late(topic: str, since: int, seconds: float) -> int:
        if seconds:
            deposits(rig, ada, 60)
            lead(rig)
        return wait(topic, since, 0.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig.store, "wait", late)
        with pytest.raises(NoReply, match="removed"):
            ada.ask(bank.Deposited(1))


def test_an_item_that_was_given_up_is_told_of_when_its_entry_is_removed() -> None:
    rig = rig_of(hf.Keep(entries=5))
    ada = rig.world()
    ada.send(bank.Deposited(1), key="k")
    deposits(rig, ada, 60)
    lead(rig)
    world_id = rig.id(ada)
    rig.store.transact(unknown.keep, "bank", world_id, 1, "Deposited", 7)
    with pytest.raises(UnknownEvent):
        ada.ask(bank.Deposited(1), key="k", timeout=0)
    rig.store.transact(unknown.redriven, "bank", world_id, 1, rig.head(ada).height)
    assert ada.ask(bank.Deposited(1), key="k", timeout=0) == 61


def test_a_bound_that_is_taken_back_counts_for_worlds_that_sleep() -> None:
    rig = rig_of(hf.Keep(days=30))
    ada = rig.world()
    deposits(rig, ada, 60)
    lead(rig)
    assert rig.head(ada).floor == 1
    rig.app = app(None)
    rig.expire(31 * DAY_S)
    lead(rig, leader_of(rig, "2"))
    assert rig.head(ada).floor == 1
    assert rig.read(history.planned, "bank", rig.id(ada)) is None


def test_nothing_is_cut_by_a_bound_that_was_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are due when the new code begins, and it looks at one world a turn."""
    monkeypatch.setattr("holdfast.roles.upkeep.SCAN_PAGE", 1)
    rig = rig_of(hf.Keep(days=30))
    worlds = [rig.world(name=f"w{n}") for n in range(4)]
    for one in worlds:
        deposits(rig, one, 20)
    lead(rig)
    rig.app = app(hf.Keep(days=3650))
    rig.expire(31 * DAY_S)
    lead(rig, leader_of(rig, "2"))
    assert [rig.head(one).floor for one in worlds] == [1] * 4


def test_a_leader_without_a_world_type_leaves_its_bound_alone() -> None:
    rig = rig_of(hf.Keep(days=30))
    ada = rig.world()
    deposits(rig, ada, 60)
    planned = rig.read(history.planned, "bank", rig.id(ada))
    assert planned is not None
    rig.app = hf.App("bank", worlds=[bank.Audit], events=[bank.Unheard, bank.Seen])
    lead(rig, leader_of(rig, "2"))
    assert rig.read(history.planned, "bank", rig.id(ada)) == planned


def test_a_deleted_world_is_not_cut() -> None:
    rig = rig_of(hf.Keep(entries=5))
    ada = rig.world()
    deposits(rig, ada, 50)
    world_id = rig.id(ada)
    ada.delete()
    while rig.store.transact(history.trim, "bank", 100):
        pass
    assert rig.read(journal.head, subject_of("bank", world_id)).floor == 1
    assert rig.read(history.planned, "bank", world_id) is None


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
        lambda: hf.App("bank", worlds=[bank.Audit], keep={bank.Account: hf.Keep(days=1)}),
        lambda: hf.App("bank", worlds=[bank.Account], keep={bank.Account: 30}),  # type: ignore[dict-item]
    ],
)
def test_a_bound_that_means_nothing_is_refused(make: object) -> None:
    with pytest.raises(Invalid):
        make()  # type: ignore[operator]


def test_a_bound_is_entries_and_store_time() -> None:
    assert hf.Keep(entries=100_000, days=30).bound == Bound(100_000, 30 * DAY_S * S)
    assert hf.Keep(days=0.5).bound == Bound(0, DAY_S * S // 2)

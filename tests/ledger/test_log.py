"""A run's log on a store: durable with its rows, under its lease, short, and the board again."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.clock import S, SimClock
from holdfast.durable import journal, lease, snapshot
from holdfast.durable.lease import Lease
from holdfast.errors import CommitUnknown, Fenced, HeadMoved, NotFound, StoreCorrupt, StoreFull
from holdfast.ledger import log as logs
from holdfast.ledger import runs
from holdfast.ledger.answers import Grant
from holdfast.ledger.board import Board
from holdfast.ledger.classes import Policy
from holdfast.ledger.log import RunLog
from holdfast.ledger.records import Done
from holdfast.store import schema
from holdfast.store.api import Store, Txn
from holdfast.store.local import LocalStore
from tests.ledger.histories import POLICIES, SIZES, STEPS, History, Step
from tests.world.rig import (
    CRASH_AFTER,
    CRASH_BEFORE,
    UNKNOWN_AFTER,
    UNKNOWN_BEFORE,
    Crash,
    FaultyBackend,
)

RUN_ID = "r-1"
SUBJECT = runs.subject_of(RUN_ID)
ROW = schema.prefix(schema.Space.APP_STATE, "sim", "row")


def hold(store: Store, who: str = "service", ttl_ns: int = 3600 * S) -> Lease:
    found: Lease = store.transact(lease.acquire, runs.lease_resource("labels"), who, "1", ttl_ns)
    return found


def open_new(store: Store, size: int = 100, policy: Policy | None = None) -> tuple[RunLog, Board]:
    log = RunLog(store, RUN_ID, hold(store))
    board, entries = Board.open(size, policy or Policy(), now_ns=store.now_ns())
    assert log.append(entries) == [1]
    return log, board


def work(log: RunLog, board: Board, rows: int = 10) -> bool:
    """Claim, finish and commit some rows, each decision logged; False when there are none left."""
    answer, entries = board.claim("w", rows, now_ns=board.decided_ns + S, begin=rows)
    if not isinstance(answer, Grant):
        return False
    log.append(entries)
    done = [Done(part.lo, part.hi, 3) for part in answer.parts]
    _, entries = board.advance(answer.epoch, 1, b"", done=done, now_ns=board.decided_ns + S)
    upto = board.terminal_prefix()
    _, more = board.commit(upto, upto - 1, board.decided_ns + S)
    log.append([*entries, *more])
    return True


def test_a_log_gives_its_board_back(any_store: Store) -> None:
    log, board = open_new(any_store)
    while work(log, board):
        again, loaded = logs.open_run(any_store, RUN_ID, log.lease)
        assert loaded.dump() == board.dump()
        assert again.next_height == log.next_height
    assert logs.load(any_store, RUN_ID).finished
    assert logs.verify(any_store, RUN_ID) == log.next_height - 1


def test_entries_and_rows_are_written_together(any_store: Store) -> None:
    log, board = open_new(any_store)
    _, entries = board.claim("w", 10, now_ns=any_store.now_ns())
    height = log.next_height
    assert log.append(entries, [(ROW, b"outcome")]) == [height]
    assert log.next_height == height + 1
    assert any_store.read(lambda txn: txn.get(ROW)) == b"outcome"
    assert log.append([], [(ROW, b"later")]) == []
    assert any_store.read(lambda txn: txn.get(ROW)) == b"later"


def test_a_checkpoint_shortens_the_log_and_loads_the_same(any_store: Store) -> None:
    log, board = open_new(any_store, 1000)
    floors = []
    for _ in range(6):
        for _ in range(5):
            assert work(log, board)
        log.append([], [], board.dump())
        log.append([], [])
        assert logs.load(any_store, RUN_ID).dump() == board.dump()
        assert logs.verify(any_store, RUN_ID) > 0
        floors.append(any_store.read(journal.head, SUBJECT).floor)
    assert floors[0] == 1
    assert floors == sorted(floors)
    assert log.next_height - floors[-1] < 40
    assert len(any_store.read(snapshot.heights, SUBJECT, 100)) == 2


def test_a_checkpoint_is_saved_with_the_entries_it_follows(any_store: Store) -> None:
    log, board = open_new(any_store)
    _, entries = board.claim("w", 10, now_ns=any_store.now_ns())
    [height] = log.append(entries, [], board.dump())
    assert any_store.read(snapshot.heights, SUBJECT, 10) == [height]
    log.append([], [], board.dump())
    assert logs.load(any_store, RUN_ID).dump() == board.dump()


def test_a_checkpoint_that_does_not_fit_its_log_is_found(any_store: Store) -> None:
    log, board = open_new(any_store)
    work(log, board)
    other, _ = Board.open(100, Policy(), now_ns=1)
    log.append([], [], other.dump())
    with pytest.raises(StoreCorrupt) as found:
        logs.verify(any_store, RUN_ID)
    assert found.value.height == log.next_height - 1


def test_a_changed_entry_is_found(any_store: Store) -> None:
    log, board = open_new(any_store)
    work(log, board)
    key = schema.prefix(schema.Space.JOURNAL, SUBJECT, "e", 2)

    def tamper(txn: Txn) -> None:
        row = txn.get(key)
        assert row is not None
        txn.put(key, row.replace(b"leased", b"leasee"))

    any_store.transact(tamper)
    with pytest.raises(StoreCorrupt):
        logs.verify(any_store, RUN_ID)


def test_a_run_without_a_log_is_not_found(any_store: Store) -> None:
    with pytest.raises(NotFound):
        logs.load(any_store, RUN_ID)


def test_who_lost_the_run_writes_nothing_more() -> None:
    clock = SimClock()
    store = LocalStore("memory:", FaultyBackend(), clock)
    log = RunLog(store, RUN_ID, hold(store, ttl_ns=10 * S))
    board, entries = Board.open(8, Policy(), now_ns=store.now_ns())
    log.append(entries)
    clock.advance(11 * S)
    successor, theirs = logs.open_run(store, RUN_ID, hold(store, "other"))
    with pytest.raises(Fenced):
        log.append(board.claim("w", 4, now_ns=store.now_ns())[1], [(ROW, b"zombie")])
    assert store.read(lambda txn: txn.get(ROW)) is None
    successor.append(theirs.claim("x", 4, now_ns=store.now_ns())[1])
    with pytest.raises(HeadMoved):
        log.append([])
    assert logs.load(store, RUN_ID).dump() == theirs.dump()


def test_grants_outlive_a_service_that_was_away_for_long() -> None:
    clock = SimClock()
    store = LocalStore("memory:", FaultyBackend(), clock)
    log, board = open_new(store)
    grant, entries = board.claim("w", 10, now_ns=store.now_ns(), begin=10)
    log.append(entries)
    assert isinstance(grant, Grant)
    clock.advance(1000 * S)
    for found in (logs.open_run(store, RUN_ID, log.lease)[1], logs.load(store, RUN_ID)):
        assert found.expire(store.now_ns()) == ([], [])
        assert found.expire(store.now_ns() + Policy().lease_ns)[0] == [grant.epoch]


@pytest.mark.parametrize("fault", [UNKNOWN_BEFORE, UNKNOWN_AFTER])
def test_after_an_unknown_commit_the_log_is_opened_again(fault: str) -> None:
    backend = FaultyBackend()
    store = LocalStore("memory:", backend, SimClock())
    log, board = open_new(store)
    grant, entries = board.claim("w", 10, now_ns=store.now_ns(), begin=10)
    backend.arm({1: fault})
    with pytest.raises(CommitUnknown):
        log.append(entries)
    with pytest.raises(HeadMoved):
        log.append(entries)
    log, found = logs.open_run(store, RUN_ID, log.lease)
    assert isinstance(grant, Grant)
    assert (grant.epoch in found.grants) == (fault == UNKNOWN_AFTER)
    while work(log, found):
        pass
    found_again = logs.load(store, RUN_ID)
    assert found_again.dump() == found.dump()


def test_what_was_surely_not_written_may_be_appended_again() -> None:
    backend = FaultyBackend()
    store = LocalStore("memory:", backend, SimClock())
    log, board = open_new(store)
    _, entries = board.claim("w", 10, now_ns=store.now_ns())
    backend.arm({1: StoreFull()})
    with pytest.raises(StoreFull):
        log.append(entries)
    assert log.append(entries) == [2]
    assert logs.load(store, RUN_ID).dump() == board.dump()


@settings(max_examples=150)
@given(
    size=SIZES,
    policy=POLICIES,
    steps=STEPS,
    crashes=st.dictionaries(
        st.integers(1, 60),
        st.sampled_from([CRASH_BEFORE, CRASH_AFTER, UNKNOWN_BEFORE, UNKNOWN_AFTER]),
        max_size=4,
    ),
)
def test_a_service_that_dies_at_any_commit_goes_on_from_its_log(
    size: int, policy: dict[str, int], steps: list[Step], crashes: dict[int, str]
) -> None:
    """Each decision is one append; whatever a crash leaves, the board loaded is the log replayed."""
    backend = FaultyBackend()
    store = LocalStore("memory:", backend, SimClock())
    history = History(size, **policy)
    log = RunLog(store, RUN_ID, hold(store))
    log.append(history.log)
    backend.arm(crashes)
    for at, step in enumerate(steps):
        before = len(history.log)
        history.run([step])
        fresh = history.log[before:]
        checkpoint = history.board.dump() if at % 7 == 6 else None
        try:
            log.append(fresh, [], checkpoint)
        except (Crash, CommitUnknown):
            log, board = logs.open_run(store, RUN_ID, log.lease)
            kept = log.next_height - 1
            assert kept in (before, before + len(fresh))
            assert board.dump() == Board.replay(history.log[:kept]).dump()
            # What was decided and not logged was never told: life goes on from the log.
            history.recover(board, kept)
    backend.arm({})
    assert logs.load(store, RUN_ID).dump() == history.board.dump()
    logs.verify(store, RUN_ID)

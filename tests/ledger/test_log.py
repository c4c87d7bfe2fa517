"""The log of a run on a store: atomic with its rows, fenced by the lease, truncated by checkpoints, replayable."""

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
from holdfast.ledger.events import FinishedRange
from holdfast.ledger.log import RunLog
from holdfast.ledger.replies import RowGrant
from holdfast.ledger.run_policy import RunPolicy
from holdfast.ledger.run_scheduler import RunScheduler
from holdfast.store import schema
from holdfast.store.api import Store, Txn
from holdfast.store.in_process import InProcessStore
from tests.ledger.scheduler_histories import POLICIES, SIZES, STEPS, HistoryStep, SchedulerHistory
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
ROW = schema.key_prefix(schema.Space.APP_STATE, "sim", "row")


def acquire_lease(store: Store, holder: str = "service", ttl_ns: int = 3600 * S) -> Lease:
    run_lease: Lease = store.transact(
        lease.acquire, runs.lease_resource("labels"), holder, "1", ttl_ns
    )
    return run_lease


def open_new_run(
    store: Store, size: int = 100, policy: RunPolicy | None = None
) -> tuple[RunLog, RunScheduler]:
    log = RunLog(store, RUN_ID, acquire_lease(store))
    scheduler, entries = RunScheduler.open(size, policy or RunPolicy(), now_ns=store.now_ns())
    assert log.append(entries) == [1]
    return log, scheduler


def finish_rows(log: RunLog, scheduler: RunScheduler, rows: int = 10) -> bool:
    """Claim, finish and commit some rows and log each decision. False when no rows are left."""
    answer, entries = scheduler.claim("w", rows, now_ns=scheduler.decided_ns + S, begin=rows)
    if not isinstance(answer, RowGrant):
        return False
    log.append(entries)
    done = [FinishedRange(part.lo, part.hi, 3) for part in answer.ranges]
    _, entries = scheduler.report(answer.epoch, 1, b"", done=done, now_ns=scheduler.decided_ns + S)
    upto = scheduler.terminal_prefix()
    _, more = scheduler.commit(upto, upto - 1, scheduler.decided_ns + S)
    log.append([*entries, *more])
    return True


def test_open_run_restores_the_scheduler_from_the_log(any_store: Store) -> None:
    log, scheduler = open_new_run(any_store)
    while finish_rows(log, scheduler):
        again, loaded = logs.open_run(any_store, RUN_ID, log.lease)
        assert loaded.dump() == scheduler.dump()
        assert again.next_height == log.next_height
    assert logs.load_run(any_store, RUN_ID).finished
    assert logs.verify_run(any_store, RUN_ID) == log.next_height - 1


def test_append_writes_entries_and_rows_in_one_commit(any_store: Store) -> None:
    log, scheduler = open_new_run(any_store)
    _, entries = scheduler.claim("w", 10, now_ns=any_store.now_ns())
    height = log.next_height
    assert log.append(entries, [(ROW, b"outcome")]) == [height]
    assert log.next_height == height + 1
    assert any_store.read(lambda txn: txn.get(ROW)) == b"outcome"
    assert log.append([], [(ROW, b"later")]) == []
    assert any_store.read(lambda txn: txn.get(ROW)) == b"later"


def test_checkpoint_truncates_the_log_and_loads_the_same_scheduler(any_store: Store) -> None:
    log, scheduler = open_new_run(any_store, 1000)
    floors = []
    for _ in range(6):
        for _ in range(5):
            assert finish_rows(log, scheduler)
        log.append([], [], scheduler.dump())
        log.append([], [])
        assert logs.load_run(any_store, RUN_ID).dump() == scheduler.dump()
        assert logs.verify_run(any_store, RUN_ID) > 0
        floors.append(any_store.read(journal.head, SUBJECT).floor)
    assert floors[0] == 1
    assert floors == sorted(floors)
    assert log.next_height - floors[-1] < 40
    assert len(any_store.read(snapshot.heights, SUBJECT, 100)) == 2


def test_checkpoint_is_saved_in_the_commit_of_its_entries(any_store: Store) -> None:
    log, scheduler = open_new_run(any_store)
    _, entries = scheduler.claim("w", 10, now_ns=any_store.now_ns())
    [height] = log.append(entries, [], scheduler.dump())
    assert any_store.read(snapshot.heights, SUBJECT, 10) == [height]
    log.append([], [], scheduler.dump())
    assert logs.load_run(any_store, RUN_ID).dump() == scheduler.dump()


def test_verify_run_finds_a_checkpoint_that_differs_from_its_log(any_store: Store) -> None:
    log, scheduler = open_new_run(any_store)
    finish_rows(log, scheduler)
    other, _ = RunScheduler.open(100, RunPolicy(), now_ns=1)
    log.append([], [], other.dump())
    with pytest.raises(StoreCorrupt) as raised:
        logs.verify_run(any_store, RUN_ID)
    assert raised.value.height == log.next_height - 1


def test_verify_run_finds_a_changed_entry(any_store: Store) -> None:
    log, scheduler = open_new_run(any_store)
    finish_rows(log, scheduler)
    key = schema.key_prefix(schema.Space.JOURNAL, SUBJECT, "e", 2)

    def tamper(txn: Txn) -> None:
        row = txn.get(key)
        assert row is not None
        txn.put(key, row.replace(b"leased", b"leasee"))

    any_store.transact(tamper)
    with pytest.raises(StoreCorrupt):
        logs.verify_run(any_store, RUN_ID)


def test_load_run_without_a_log_raises_not_found(any_store: Store) -> None:
    with pytest.raises(NotFound):
        logs.load_run(any_store, RUN_ID)


def test_append_after_the_lease_was_lost_is_fenced() -> None:
    clock = SimClock()
    store = InProcessStore("memory:", FaultyBackend(), clock)
    log = RunLog(store, RUN_ID, acquire_lease(store, ttl_ns=10 * S))
    scheduler, entries = RunScheduler.open(8, RunPolicy(), now_ns=store.now_ns())
    log.append(entries)
    clock.advance(11 * S)
    successor, successor_scheduler = logs.open_run(store, RUN_ID, acquire_lease(store, "other"))
    with pytest.raises(Fenced):
        log.append(scheduler.claim("w", 4, now_ns=store.now_ns())[1], [(ROW, b"zombie")])
    assert store.read(lambda txn: txn.get(ROW)) is None
    successor.append(successor_scheduler.claim("x", 4, now_ns=store.now_ns())[1])
    with pytest.raises(HeadMoved):
        log.append([])
    assert logs.load_run(store, RUN_ID).dump() == successor_scheduler.dump()


def test_grants_survive_a_long_outage_of_the_service() -> None:
    clock = SimClock()
    store = InProcessStore("memory:", FaultyBackend(), clock)
    log, scheduler = open_new_run(store)
    grant, entries = scheduler.claim("w", 10, now_ns=store.now_ns(), begin=10)
    log.append(entries)
    assert isinstance(grant, RowGrant)
    clock.advance(1000 * S)
    for loaded in (logs.open_run(store, RUN_ID, log.lease)[1], logs.load_run(store, RUN_ID)):
        assert loaded.expire(store.now_ns()) == ([], [])
        assert loaded.expire(store.now_ns() + RunPolicy().lease_ns)[0] == [grant.epoch]


@pytest.mark.parametrize("fault", [UNKNOWN_BEFORE, UNKNOWN_AFTER])
def test_log_must_be_reopened_after_an_unknown_commit(fault: str) -> None:
    backend = FaultyBackend()
    store = InProcessStore("memory:", backend, SimClock())
    log, scheduler = open_new_run(store)
    grant, entries = scheduler.claim("w", 10, now_ns=store.now_ns(), begin=10)
    backend.arm({1: fault})
    with pytest.raises(CommitUnknown):
        log.append(entries)
    with pytest.raises(HeadMoved):
        log.append(entries)
    log, reopened = logs.open_run(store, RUN_ID, log.lease)
    assert isinstance(grant, RowGrant)
    assert (grant.epoch in reopened.grants) == (fault == UNKNOWN_AFTER)
    while finish_rows(log, reopened):
        pass
    loaded = logs.load_run(store, RUN_ID)
    assert loaded.dump() == reopened.dump()


def test_append_can_be_repeated_after_a_definite_failure() -> None:
    backend = FaultyBackend()
    store = InProcessStore("memory:", backend, SimClock())
    log, scheduler = open_new_run(store)
    _, entries = scheduler.claim("w", 10, now_ns=store.now_ns())
    backend.arm({1: StoreFull()})
    with pytest.raises(StoreFull):
        log.append(entries)
    assert log.append(entries) == [2]
    assert logs.load_run(store, RUN_ID).dump() == scheduler.dump()


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
def test_service_crash_at_any_commit_resumes_from_the_log(
    size: int, policy: dict[str, int], steps: list[HistoryStep], crashes: dict[int, str]
) -> None:
    """Each decision is one append. After any crash the loaded scheduler equals a replay of the log."""
    backend = FaultyBackend()
    store = InProcessStore("memory:", backend, SimClock())
    history = SchedulerHistory(size, **policy)
    log = RunLog(store, RUN_ID, acquire_lease(store))
    log.append(history.log)
    backend.arm(crashes)
    for at, step in enumerate(steps):
        before = len(history.log)
        history.run([step])
        fresh = history.log[before:]
        checkpoint = history.scheduler.dump() if at % 7 == 6 else None
        try:
            log.append(fresh, [], checkpoint)
        except (Crash, CommitUnknown):
            log, scheduler = logs.open_run(store, RUN_ID, log.lease)
            kept = log.next_height - 1
            assert kept in (before, before + len(fresh))
            assert scheduler.dump() == RunScheduler.replay(history.log[:kept]).dump()
            # A decision that is not logged was never sent: the history continues from the log.
            history.recover(scheduler, kept)
    backend.arm({})
    assert logs.load_run(store, RUN_ID).dump() == history.scheduler.dump()
    logs.verify_run(store, RUN_ID)

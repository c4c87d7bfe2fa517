"""Run records by name and id, their blocks and chunks, and their deletion."""

from __future__ import annotations

import subprocess
import sys

import pytest

from holdfast import codec
from holdfast.clock import S
from holdfast.config import VALUE_BYTES_MAX
from holdfast.durable import lease, snapshot
from holdfast.errors import IllegalTransition, Invalid, NotFound
from holdfast.ledger import runs
from holdfast.ledger.error_groups import ErrorGroup
from holdfast.ledger.log import RunLog
from holdfast.ledger.run_policy import RunPolicy
from holdfast.ledger.run_scheduler import RunScheduler
from holdfast.ledger.runs import (
    RUN,
    UNFINISHED,
    OutcomeChunk,
    ResultlessRow,
    RunEvent,
    RunLifecycle,
    RunProgress,
    RunRecord,
)
from holdfast.store import blobs, schema, tuples
from holdfast.store.api import Store


def record(run_id: str, name: str = "labels") -> RunRecord:
    return RunRecord(run_id, name, policy=RunPolicy(attempts_max=5), blocks=[(0, 10), (2, 5)])


def chunk(lo: int) -> OutcomeChunk:
    return OutcomeChunk(
        lo=lo,
        seqs=b"",
        batch=b"ipc",
        resultless=[ResultlessRow(lo, 5, 2, 4, "bad")],
        attempts=[],
        cost=0.5,
        calls=1,
        spent_us_log2=[0, 1],
    )


@pytest.fixture
def store(any_store: Store) -> Store:
    return any_store


def test_get_latest_returns_the_newest_run_of_a_name(store: Store) -> None:
    for run_id in ("b", "a"):
        store.transact(runs.create, record(run_id))
    store.transact(runs.create, record("c", "other"))
    latest = store.read(runs.get_latest, "labels")
    assert latest == record("a")
    assert store.read(runs.list_names) == [("labels", "a"), ("other", "c")]
    assert store.read(runs.list_names, "labels", 5) == [("other", "c")]
    assert [run.run_id for run in store.read(runs.list_runs)] == ["a", "b", "c"]
    assert [run.run_id for run in store.read(runs.list_runs, "a", 1)] == ["b"]
    assert store.read(runs.get_latest, "nothing") is None
    assert store.read(runs.get_record, "nothing") is None


def test_create_refuses_a_used_run_id(store: Store) -> None:
    store.transact(runs.create, record("a"))
    with pytest.raises(Invalid):
        store.transact(runs.create, record("a", "other"))
    assert store.read(runs.list_names) == [("labels", "a")]


def test_change_status_follows_the_table_and_sets_finished_ns(store: Store) -> None:
    store.transact(runs.create, record("a"))
    assert store.transact(runs.change_status, "a", RunEvent.SEAL, size=15).size == 15
    done = store.transact(runs.change_status, "a", RunEvent.FINISH)
    assert done.status is RunLifecycle.FINISHED
    assert done.finished_ns > 0
    with pytest.raises(IllegalTransition):
        store.transact(runs.change_status, "a", RunEvent.CANCEL)
    assert store.read(runs.get_record, "a") == done
    with pytest.raises(NotFound):
        store.transact(runs.change_status, "b", RunEvent.SEAL)


def test_run_table_states_are_unfinished_or_terminal() -> None:
    assert RUN.unreachable() == frozenset()
    assert RUN.states - RUN.terminal == UNFINISHED


def test_request_cancel_is_idempotent_and_needs_an_unfinished_run(store: Store) -> None:
    store.transact(runs.create, record("a"))
    with pytest.raises(Invalid):
        store.transact(runs.request_retry, "a")
    requested = store.transact(runs.request_cancel, "a")
    assert requested.cancel_requested_ns > 0
    assert store.transact(runs.request_cancel, "a") == requested
    store.transact(runs.change_status, "a", RunEvent.CANCEL)
    with pytest.raises(Invalid):
        store.transact(runs.request_cancel, "a")
    with pytest.raises(Invalid, match="only a finished run"):
        store.transact(runs.request_retry, "a")


def test_request_retry_needs_a_finished_run(store: Store) -> None:
    store.transact(runs.create, record("a"))
    store.transact(runs.change_status, "a", RunEvent.SEAL)
    store.transact(runs.change_status, "a", RunEvent.FINISH)
    assert store.transact(runs.request_retry, "a").retry_requested_ns > 0


def test_get_progress_returns_the_last_put_progress(store: Store) -> None:
    assert store.read(runs.get_progress, "a") is None
    progress = RunProgress(
        1, 2, [1] * 8, series=[(1, 2, 3, 4, 5, 0.5)], errors=[ErrorGroup(1, "x", 2)]
    )
    store.transact(runs.put_progress, "a", progress)
    assert store.read(runs.get_progress, "a") == progress
    assert RunProgress().ended == []


def test_blocks_and_chunks_are_read_by_their_numbers(store: Store) -> None:
    def write(txn: object) -> None:
        txn.put(runs.block_key("a", 2), b"block")  # type: ignore[attr-defined]
        for page, height in ((0, 7), (0, 300), (1, 8), (0, 5)):
            key = runs.chunk_key("a", page, height)
            txn.put(key, codec.pack(chunk(height)))  # type: ignore[attr-defined]

    store.transact(write)
    assert store.read(runs.get_block, "a", 2) == b"block"
    assert store.read(runs.get_block, "a", 1) is None
    assert store.read(runs.list_chunks, "a", 0) == [(h, chunk(h)) for h in (5, 7, 300)]
    assert store.read(runs.list_chunks, "a", 0, 5, 1) == [(7, chunk(7))]
    assert store.read(runs.list_chunks, "a", 2) == []


def test_delete_rows_removes_a_run_in_bounded_steps(store: Store) -> None:
    for run_id in ("a", "b"):
        store.transact(runs.create, record(run_id))
        run_lease = store.transact(lease.acquire, f"run/{run_id}", "w", "1", 100 * S)
        scheduler, entries = RunScheduler.open(2_000, RunPolicy(page_rows=1), now_ns=S)
        log = RunLog(store, run_id, run_lease)
        puts = [(runs.block_key(run_id, n), b"x") for n in range(10)]
        puts += [(runs.chunk_key(run_id, 0, n), codec.pack(chunk(n))) for n in range(10)]
        log.append(entries, puts, scheduler.dump())
        store.transact(runs.put_progress, run_id, RunProgress())
    with pytest.raises(Invalid):
        store.transact(runs.delete_rows, "a", 10)
    store.transact(runs.change_status, "a", RunEvent.CANCEL)
    steps = []
    while removed := store.transact(runs.delete_rows, "a", 8):
        steps.append(removed)
    assert max(steps) <= 8
    assert sum(steps) == 10 + 10 + 2 + 2 + 1 + 1
    spaces = (schema.Space.RUN, schema.Space.JOURNAL, schema.Space.SNAPSHOT)
    for space in spaces:
        prefix = schema.key_prefix(space)
        rows = store.read(lambda txn, p=prefix: txn.scan(p, tuples.prefix_end(p)))
        assert rows
        assert not [key for key, _ in rows if b"run/a" in key or b"\x02a\x00" in key]
    # The name points to the remaining run.
    assert store.read(runs.get_latest, "labels") == record("b")


def test_checkpoint_larger_than_a_value_is_stored_and_deleted_with_its_run(store: Store) -> None:
    store.transact(runs.create, record("a"))
    run_lease = store.transact(lease.acquire, "run/a", "w", "1", 100 * S)
    _board, entries = RunScheduler.open(10, RunPolicy(), now_ns=S)
    log = RunLog(store, "a", run_lease)
    large = bytes(range(256)) * (VALUE_BYTES_MAX // 256) + b"more"
    [height] = log.append(entries, [], large)
    assert store.read(snapshot.load, runs.subject_of("a"), height) == large
    store.transact(runs.change_status, "a", RunEvent.CANCEL)
    while store.transact(runs.delete_rows, "a", 100):
        pass
    refs = schema.key_prefix(schema.Space.BLOB, "refs")
    rows = store.read(lambda txn: txn.scan(refs, tuples.prefix_end(refs)))
    assert rows
    assert all(codec.unpack_as(blobs.BlobRefs, row).idle_since_ns for _, row in rows)


def test_runs_can_be_imported_without_numpy() -> None:
    code = """
import sys
sys.modules["numpy"] = sys.modules["pyarrow"] = sys.modules["pyspark"] = None
import holdfast.ledger.runs, holdfast.ledger.replies, holdfast.ledger.states
"""
    subprocess.run([sys.executable, "-c", code], check=True)

"""Runs, by name and id: their records, blocks and chunks, and how they go away."""

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
from holdfast.ledger.board import Board
from holdfast.ledger.classes import Policy
from holdfast.ledger.error_groups import ErrorGroup
from holdfast.ledger.log import RunLog
from holdfast.ledger.runs import GOING, RUN, Chunk, Event, Other, Progress, RunRecord, Status
from holdfast.store import blobs, schema, tuples
from holdfast.store.api import Store


def record(run_id: str, name: str = "labels") -> RunRecord:
    return RunRecord(run_id, name, policy=Policy(attempts_max=5), blocks=[(0, 10), (2, 5)])


def chunk(lo: int) -> Chunk:
    return Chunk(lo, b"", b"ipc", [Other(lo, 5, 2, 4, "bad")], [], 0.5, 1, [0, 1])


@pytest.fixture
def store(any_store: Store) -> Store:
    return any_store


def test_a_name_leads_to_its_latest_run(store: Store) -> None:
    for run_id in ("b", "a"):
        store.transact(runs.create, record(run_id))
    store.transact(runs.create, record("c", "other"))
    found = store.read(runs.latest, "labels")
    assert found == record("a")
    assert store.read(runs.names) == [("labels", "a"), ("other", "c")]
    assert store.read(runs.names, "labels", 5) == [("other", "c")]
    assert [run.run_id for run in store.read(runs.runs)] == ["a", "b", "c"]
    assert [run.run_id for run in store.read(runs.runs, "a", 1)] == ["b"]
    assert store.read(runs.latest, "nothing") is None
    assert store.read(runs.get, "nothing") is None


def test_a_run_id_is_used_once(store: Store) -> None:
    store.transact(runs.create, record("a"))
    with pytest.raises(Invalid):
        store.transact(runs.create, record("a", "other"))
    assert store.read(runs.names) == [("labels", "a")]


def test_a_status_moves_by_its_table_and_an_end_is_dated(store: Store) -> None:
    store.transact(runs.create, record("a"))
    assert store.transact(runs.move, "a", Event.SEAL, size=15).size == 15
    done = store.transact(runs.move, "a", Event.FINISH)
    assert done.status is Status.FINISHED
    assert done.finished_ns > 0
    with pytest.raises(IllegalTransition):
        store.transact(runs.move, "a", Event.CANCEL)
    assert store.read(runs.get, "a") == done
    with pytest.raises(NotFound):
        store.transact(runs.move, "b", Event.SEAL)


def test_the_table_of_runs_ends_where_nothing_goes_on() -> None:
    assert RUN.unreachable() == frozenset()
    assert RUN.states - RUN.terminal == GOING


def test_a_cancellation_is_asked_for_once_and_of_a_run_that_goes_on(store: Store) -> None:
    store.transact(runs.create, record("a"))
    with pytest.raises(Invalid):
        store.transact(runs.request_retry, "a")
    asked = store.transact(runs.request_cancel, "a")
    assert asked.cancel_requested_ns > 0
    assert store.transact(runs.request_cancel, "a") == asked
    store.transact(runs.move, "a", Event.CANCEL)
    with pytest.raises(Invalid):
        store.transact(runs.request_cancel, "a")
    with pytest.raises(Invalid, match="only a finished run"):
        store.transact(runs.request_retry, "a")


def test_another_try_is_asked_for_of_a_finished_run(store: Store) -> None:
    store.transact(runs.create, record("a"))
    store.transact(runs.move, "a", Event.SEAL)
    store.transact(runs.move, "a", Event.FINISH)
    assert store.transact(runs.request_retry, "a").retry_requested_ns > 0


def test_progress_is_what_was_put_last(store: Store) -> None:
    assert store.read(runs.progress, "a") is None
    told = Progress(1, 2, [1] * 8, series=[(1, 2, 3, 4, 5, 0.5)], errors=[ErrorGroup(1, "x", 2)])
    store.transact(runs.put_progress, "a", told)
    assert store.read(runs.progress, "a") == told
    assert Progress().ended == []


def test_blocks_and_chunks_are_read_by_their_numbers(store: Store) -> None:
    def write(txn: object) -> None:
        txn.put(runs.block_key("a", 2), b"block")  # type: ignore[attr-defined]
        for page, height in ((0, 7), (0, 300), (1, 8), (0, 5)):
            key = runs.chunk_key("a", page, height)
            txn.put(key, codec.pack(chunk(height)))  # type: ignore[attr-defined]

    store.transact(write)
    assert store.read(runs.block, "a", 2) == b"block"
    assert store.read(runs.block, "a", 1) is None
    assert store.read(runs.chunks, "a", 0) == [(h, chunk(h)) for h in (5, 7, 300)]
    assert store.read(runs.chunks, "a", 0, 5, 1) == [(7, chunk(7))]
    assert store.read(runs.chunks, "a", 2) == []


def test_a_run_goes_away_in_steps_and_leaves_nothing(store: Store) -> None:
    for run_id in ("a", "b"):
        store.transact(runs.create, record(run_id))
        held = store.transact(lease.acquire, f"run/{run_id}", "w", "1", 100 * S)
        board, entries = Board.open(2_000, Policy(page_rows=1), now_ns=S)
        log = RunLog(store, run_id, held)
        puts = [(runs.block_key(run_id, n), b"x") for n in range(10)]
        puts += [(runs.chunk_key(run_id, 0, n), codec.pack(chunk(n))) for n in range(10)]
        log.append(entries, puts, board.dump())
        store.transact(runs.put_progress, run_id, Progress())
    with pytest.raises(Invalid):
        store.transact(runs.delete, "a", 10)
    store.transact(runs.move, "a", Event.CANCEL)
    steps = []
    while removed := store.transact(runs.delete, "a", 8):
        steps.append(removed)
    assert max(steps) <= 8
    assert sum(steps) == 10 + 10 + 2 + 2 + 1 + 1
    spaces = (schema.Space.RUN, schema.Space.JOURNAL, schema.Space.SNAPSHOT)
    for space in spaces:
        prefix = schema.prefix(space)
        rows = store.read(lambda txn, p=prefix: txn.scan(p, tuples.after(p)))
        assert rows
        assert not [key for key, _ in rows if b"run/a" in key or b"\x02a\x00" in key]
    # The name still leads to the run that is there.
    assert store.read(runs.latest, "labels") == record("b")


def test_a_checkpoint_larger_than_a_value_is_kept_and_goes_with_its_run(store: Store) -> None:
    store.transact(runs.create, record("a"))
    held = store.transact(lease.acquire, "run/a", "w", "1", 100 * S)
    _board, entries = Board.open(10, Policy(), now_ns=S)
    log = RunLog(store, "a", held)
    large = bytes(range(256)) * (VALUE_BYTES_MAX // 256) + b"more"
    [height] = log.append(entries, [], large)
    assert store.read(snapshot.load, runs.subject_of("a"), height) == large
    store.transact(runs.move, "a", Event.CANCEL)
    while store.transact(runs.delete, "a", 100):
        pass
    refs = schema.prefix(schema.Space.BLOB, "refs")
    rows = store.read(lambda txn: txn.scan(refs, tuples.after(refs)))
    assert rows
    assert all(codec.unpack_as(blobs.Refs, row).idle_since_ns for _, row in rows)


def test_runs_can_be_looked_at_where_numpy_is_not_installed() -> None:
    code = """
import sys
sys.modules["numpy"] = sys.modules["pyarrow"] = sys.modules["pyspark"] = None
import holdfast.ledger.runs, holdfast.ledger.answers, holdfast.ledger.states
"""
    subprocess.run([sys.executable, "-c", code], check=True)

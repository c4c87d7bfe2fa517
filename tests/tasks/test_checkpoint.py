"""Checkpoints of the task log: content, due time, log truncation and concurrent creators."""

from __future__ import annotations

import threading
import zlib
from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.clock import S
from holdfast.durable import journal
from holdfast.durable.difference import Difference
from holdfast.store.api import Txn
from holdfast.tasks import checkpoint, consistency, replay_check
from holdfast.tasks import operations as tasks
from holdfast.tasks.checkpoint import STALLED_NS, CheckpointChunk
from holdfast.tasks.model import TaskSpec, pack
from holdfast.tasks.operations import AttemptOutcome, GrantRequest, TaskReport, TaskToSubmit
from tests.tasks.rig import KEYS, LEASE_NS, UNIVERSE, TaskOperationsRig


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "CHUNK_TASKS", 3)
    monkeypatch.setattr(checkpoint, "LOG_BYTES_MIN", 1_000)


def create_checkpoint(rig: TaskOperationsRig) -> bool:
    try:
        return checkpoint.create(rig.store, UNIVERSE)
    finally:
        rig.check_consistency()


def run_mixed_tasks(rig: TaskOperationsRig, rounds: int = 3) -> None:
    """Create tasks in all states."""
    for _ in range(rounds):
        seqs = rig.submit(*[TaskToSubmit(b"x", limit="a")] * 2, *[b"y"] * 4)
        rig.submit(TaskToSubmit(b"z", delay_ns=S), TaskToSubmit(b"w", after=(seqs[-1],)))
        grants = rig.lease(4)
        for grant, end in zip(
            grants, (AttemptOutcome.OK, AttemptOutcome.FAILED, AttemptOutcome.REFUSED), strict=False
        ):
            rig.report(TaskReport(grant.seq, grant.lease, end))
        rig.advance(LEASE_NS // 2)


def journal_head(rig: TaskOperationsRig) -> journal.JournalHead:
    return rig.store.read(journal.head, KEYS.subject)


def read_latest_chunks(rig: TaskOperationsRig) -> list[CheckpointChunk]:
    def read(txn: Txn) -> list[CheckpointChunk]:
        index = checkpoint.read_index(txn, UNIVERSE)
        return list(checkpoint.read_chunks(txn, UNIVERSE, index.latest))

    return rig.store.read(read)


def test_checkpoint_contains_every_stored_task(rig: TaskOperationsRig) -> None:
    run_mixed_tasks(rig)
    assert create_checkpoint(rig)
    checkpointed = [
        seq for c in read_latest_chunks(rig) for seq in [*c.fresh, *(task for task, _ in c.tasks)]
    ]
    assert sorted(checkpointed) == sorted(rig.rows())


def test_log_is_truncated_to_the_previous_checkpoint(rig: TaskOperationsRig) -> None:
    heights = []
    for _ in range(4):
        run_mixed_tasks(rig, 2)
        heights.append(journal_head(rig).height)
        assert create_checkpoint(rig)
    assert journal_head(rig).floor == heights[-2]


def test_truncated_log_and_checkpoint_replay_to_the_rows(rig: TaskOperationsRig) -> None:
    for _ in range(5):
        run_mixed_tasks(rig, 2)
        create_checkpoint(rig)
    run_mixed_tasks(rig, 1)
    assert journal_head(rig).floor > 1
    assert not rig.store.read(lambda txn: list(replay_check.find_differences(txn, UNIVERSE)))


def test_chunks_of_old_checkpoints_are_deleted(rig: TaskOperationsRig) -> None:
    for _ in range(4):
        run_mixed_tasks(rig, 1)
        create_checkpoint(rig)
    index = rig.store.read(checkpoint.read_index, UNIVERSE)
    rows = rig.store.read(lambda txn: txn.scan(KEYS.checkpoints, KEYS.checkpoints + b"\xff"))
    assert len(rows) == 1 + index.latest.chunks + index.before.chunks


def test_checkpoint_is_not_created_without_new_entries(rig: TaskOperationsRig) -> None:
    assert not create_checkpoint(rig)
    run_mixed_tasks(rig)
    assert create_checkpoint(rig)
    assert not create_checkpoint(rig)


def test_checkpoint_is_due_when_the_log_outgrows_the_last_one(rig: TaskOperationsRig) -> None:
    assert not checkpoint.is_due(rig.store, UNIVERSE)
    run_mixed_tasks(rig, 6)
    assert checkpoint.is_due(rig.store, UNIVERSE)
    create_checkpoint(rig)
    assert not checkpoint.is_due(rig.store, UNIVERSE)
    created_count = 0
    for _ in range(12):
        run_mixed_tasks(rig, 1)
        if checkpoint.is_due(rig.store, UNIVERSE):
            created_count += create_checkpoint(rig)
    assert 1 <= created_count <= 4


def test_checkpoint_tolerates_changes_between_its_chunks(rig: TaskOperationsRig) -> None:
    run_mixed_tasks(rig)
    store, heights = rig.store, set()
    started = store.transact(checkpoint.begin, UNIVERSE)
    at = n = 0
    while at <= started.last:
        chunk = store.read(checkpoint._read_chunk, UNIVERSE, at, started.last)
        packed = zlib.compress(pack(chunk))
        assert store.transact(checkpoint.add_chunk, UNIVERSE, started.number, n, packed)
        at, n = chunk.hi, n + 1
        heights.add(chunk.height)
        run_mixed_tasks(rig, 1)
    assert store.transact(checkpoint.install, UNIVERSE, started.number, n, 1)
    assert len(heights) > 3
    rig.check_consistency()
    run_mixed_tasks(rig, 1)
    assert create_checkpoint(rig)
    run_mixed_tasks(rig, 1)
    assert journal_head(rig).floor > 1


def test_second_concurrent_checkpoint_is_refused(rig: TaskOperationsRig) -> None:
    run_mixed_tasks(rig)
    assert rig.store.transact(checkpoint.begin, UNIVERSE) is not None
    assert not create_checkpoint(rig)
    assert not checkpoint.is_due(rig.store, UNIVERSE)


def test_stalled_checkpoint_is_superseded_and_cannot_be_installed(rig: TaskOperationsRig) -> None:
    run_mixed_tasks(rig)
    first = rig.store.transact(checkpoint.begin, UNIVERSE)
    assert rig.store.transact(checkpoint.add_chunk, UNIVERSE, first.number, 0, b"stale")
    rig.advance(STALLED_NS)
    assert create_checkpoint(rig)
    assert not rig.store.transact(checkpoint.add_chunk, UNIVERSE, first.number, 1, b"stale")
    assert not rig.store.transact(checkpoint.install, UNIVERSE, first.number, 2, 10)
    rig.check_consistency()


def test_chunks_of_an_abandoned_checkpoint_are_deleted(rig: TaskOperationsRig) -> None:
    run_mixed_tasks(rig)
    first = rig.store.transact(checkpoint.begin, UNIVERSE)
    for n in range(5):
        rig.store.transact(checkpoint.add_chunk, UNIVERSE, first.number, n, b"stale")
    rig.advance(STALLED_NS)
    create_checkpoint(rig)
    rows = rig.store.read(lambda txn: txn.scan(KEYS.checkpoints, KEYS.checkpoints + b"\xff"))
    assert not [row for _, row in rows if row == b"stale"]


def test_removed_task_is_not_in_the_next_checkpoint(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one(retain_ns=S)
    rig.complete(rig.lease_one(seq))
    create_checkpoint(rig)
    rig.advance(S)
    rig.maintain()
    rig.submit_one()
    create_checkpoint(rig)
    rig.submit_one()
    create_checkpoint(rig)
    assert seq not in [task for c in read_latest_chunks(rig) for task in [*c.fresh, *dict(c.tasks)]]


def test_concurrent_checkpoint_creators_and_a_worker_stay_consistent(tmp_path: Path) -> None:
    done = threading.Event()
    created: list[bool] = []
    with stores.open(tmp_path) as store:

        def keep_making() -> None:
            while not done.is_set():
                created.append(checkpoint.create(store, UNIVERSE))

        creators = [threading.Thread(target=keep_making) for _ in range(2)]
        for creator in creators:
            creator.start()
        try:
            for _ in range(100):
                store.transact(tasks.submit, UNIVERSE, TaskSpec("work"), [TaskToSubmit(b"x")] * 5)
                leased = store.transact(tasks.lease, UNIVERSE, GrantRequest("w", ["default"], 4))
                reports = [TaskReport(grant.seq, grant.lease) for grant in leased.grants]
                store.transact(tasks.apply_reports, UNIVERSE, "w", store.generation, reports)
        finally:
            done.set()
            for creator in creators:
                creator.join()

        def find_differences(txn: Txn) -> list[Difference]:
            return [
                *replay_check.find_differences(txn, UNIVERSE),
                *consistency.find_differences(txn, UNIVERSE),
            ]

        assert store.read(find_differences) == []
        assert sum(created) > 2
        assert store.read(journal.head, KEYS.subject).floor > 1

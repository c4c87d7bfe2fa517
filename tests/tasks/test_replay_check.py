"""Replay check: every row changed without a log entry is reported with task, height and field."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast import codec
from holdfast.clock import S
from holdfast.durable import journal
from holdfast.durable.difference import Difference
from holdfast.durable.tags import pack_tag
from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.tasks import checkpoint, consistency, events, replay_check, status_fold
from holdfast.tasks.model import (
    TaskCounts,
    TaskStatusRow,
    get_body,
    get_counts,
    pack,
    pack_int,
    pack_text,
)
from holdfast.tasks.operations import TaskToSubmit
from holdfast.tasks.row_ranges import get_status
from holdfast.tasks.states import TaskState
from tests.tasks.rig import KEYS, UNIVERSE, TaskOperationsRig

Change = Callable[[Txn], None]


def find_differences(rig: TaskOperationsRig) -> list[Difference]:
    def look(txn: Txn) -> list[Difference]:
        return [
            *replay_check.find_differences(txn, UNIVERSE),
            *consistency.find_differences(txn, UNIVERSE),
        ]

    return rig.store.read(look)


def change_status(seq: int, **fields: Any) -> Change:
    def change(txn: Txn) -> None:
        status: TaskStatusRow = get_status(txn, KEYS, pack_int(seq))
        txn.put(KEYS.statuses + pack_int(seq), pack(replace(status, **fields)))

    return change


def change_body(seq: int, **fields: Any) -> Change:
    def change(txn: Txn) -> None:
        body = get_body(txn, KEYS, pack_int(seq))
        assert body is not None
        txn.put(KEYS.bodies + pack_int(seq), pack(replace(body, **fields)))

    return change


@pytest.fixture
def populated_rig(rig: TaskOperationsRig) -> TaskOperationsRig:
    """Task 1 is leased, 2 completed, 3 retried, 4 ready, 5 delayed, 6 blocked by 4, 7 leased,
    8 throttled, 9 quarantined, 10 dead and redriven as 11 with the same key."""
    rig.set_limits(per_key=1)
    rig.submit(*[b"x"] * 4, backoff_ns=S)
    rig.submit(TaskToSubmit(b"d", delay_ns=3600 * S), TaskToSubmit(b"a", after=(4,)))
    rig.submit(TaskToSubmit(b"l", limit="a"), TaskToSubmit(b"l", limit="a"))
    rig.submit_one(lease_ns=1, priority=1)
    rig.submit_one(key="k", queue="other", tag="eu")
    rig.cancel(10)
    rig.redrive(10)
    nine, _, two, three = rig.lease(4)
    assert nine.seq == 9
    rig.complete(two)
    rig.fail(three)
    rig.advance(0)
    rig.maintain()
    rig.cancel(4)
    rig.submit(b"four")
    rig.lease(2)
    rig.maintain()
    assert find_differences(rig) == []
    return rig


def test_consistent_store_has_no_differences(populated_rig: TaskOperationsRig) -> None:
    states = populated_rig.states(*range(1, 13))
    assert states[:4] == ["LEASED", "COMPLETED", "WAITING", "DEAD"]
    assert find_differences(populated_rig) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("state", TaskState.COMPLETED),
        ("attempt", 7),
        ("failures", 1),
        ("expiries", 1),
        ("lease", 99),
        ("worker", "somebody"),
        ("expires_ns", 5),
        ("granted_ns", 5),
        ("progress_ns", 5),
        ("not_before_ns", 5),
        ("ended_ns", 5),
        ("reason", "because"),
        ("error", "what"),
    ],
)
def test_changed_status_field_is_reported_with_task_and_height(
    populated_rig: TaskOperationsRig, field: str, value: object
) -> None:
    heights = [
        height
        for height, entry in enumerate(populated_rig.entries(), 1)
        if any(record.task_id == 1 for record in events.iter_records(entry, lambda seq: None))
    ]
    populated_rig.store.transact(change_status(1, **{field: value}))
    first = find_differences(populated_rig)[0]
    assert (first.where, first.height, first.what) == (f"{UNIVERSE}/1-1", heights[-1], field)


def test_replay_check_compares_every_status_field() -> None:
    derived = {"waits", "awaited", "redriven_by", "result", "blob"}
    assert {*replay_check.LOGGED_FIELDS, *derived} == {*TaskStatusRow.__struct_fields__}


def delete_row(key: bytes) -> Change:
    return lambda txn: txn.delete(key)


def put_row(key: bytes, row: bytes) -> Change:
    return lambda txn: txn.put(key, row)


def delete_first_row(prefix: bytes) -> Change:
    return lambda txn: txn.delete(txn.scan(prefix, tuples.prefix_end(prefix), 1)[0][0])


def change_counts(queue: str, **fields: int) -> Change:
    def change(txn: Txn) -> None:
        counts: TaskCounts = get_counts(txn, KEYS, queue)
        txn.put(KEYS.counts + pack_text(queue), pack(replace(counts, **fields)))

    return change


CORRUPTIONS: dict[str, tuple[Change, str]] = {
    "a body is gone": (delete_row(KEYS.bodies + pack_int(1)), "task"),
    "a body that nobody created": (
        lambda txn: txn.put(
            KEYS.bodies + pack_int(50), txn.get(KEYS.bodies + pack_int(1)) or b""
        ),
        "task",
    ),
    "a body is another": (change_body(1, args=b"other"), "bodies"),
    "a body of another time": (change_body(1, created_ns=1), "created"),
    "a result is another": (change_status(2, result=b"other"), "results"),
    "a status that nobody wrote": (put_row(KEYS.statuses + pack_int(50), pack(TaskStatusRow())), "task"),
    "ready, and in no place": (delete_first_row(KEYS.ready), "place"),
    "suspect, and in no place": (delete_first_row(KEYS.quarantined), "place"),
    "parked, and in no place": (delete_first_row(KEYS.throttled), "place"),
    "delayed, and in no place": (delete_first_row(KEYS.delayed), "place"),
    "leased, and in a place": (put_row(KEYS.ready + b"z", pack_int(1)), "place"),
    "a place of nobody": (put_row(KEYS.ready + b"z", pack_int(60)), "place"),
    "its lease never runs out": (delete_first_row(KEYS.expiries), "looked at when its lease is over"),
    "a count is wrong": (change_counts("default", ready=44), "count of ready in default"),
    "a count of another queue": (change_counts("other", dead=44), "count of dead in other"),
    "a limit is miscounted": (
        lambda txn: txn.put(KEYS.leased_per_limit + tuples.pack(("default", "a")), schema.encode_int(4)),
        "leases of limit a in default",
    ),
    "a key is forgotten": (delete_first_row(KEYS.idempotency_keys), "key k"),
    "a tag is forgotten": (delete_first_row(KEYS.tags), "listed by its tag"),
    "a tag that no task has": (
        put_row(KEYS.tags + pack_tag("us") + pack_int(1), b""), "listed by its tag",
    ),
    "a key names another": (
        put_row(KEYS.idempotency_keys + tuples.pack(("work", "k")), pack_int(1)), "key",
    ),
    "not told when another ends": (change_status(12, waits=1), "waits"),
    "redriven by nobody": (change_status(10, redriven_by=0), "redriven by"),
    "ended, and kept for ever": (delete_first_row(KEYS.retained), "retention"),
    "the counter of seqs is too low": (delete_row(KEYS.seq_counter), "seq"),
    "the counter of leases is too low": (delete_row(KEYS.lease_counter), "lease"),
}  # fmt: skip


@pytest.mark.parametrize("what", list(CORRUPTIONS))
def test_row_changed_outside_the_log_is_reported(
    populated_rig: TaskOperationsRig, what: str
) -> None:
    change, field = CORRUPTIONS[what]
    populated_rig.store.transact(change)
    assert field in [difference.what for difference in find_differences(populated_rig)]


def test_changed_log_entry_is_reported_at_its_height(populated_rig: TaskOperationsRig) -> None:
    prefix = schema.key_prefix(schema.Space.JOURNAL, KEYS.subject, "e")

    def change(txn: Txn) -> None:
        key, row = txn.scan(prefix, tuples.prefix_end(prefix), 3)[2]
        entry_row = codec.unpack_as(journal.EntryRow, row)
        txn.put(key, pack(replace(entry_row, body=entry_row.body + b" ")))

    populated_rig.store.transact(change)
    first = find_differences(populated_rig)[0]
    assert (first.what, first.height) == ("log", 3)


def test_illegal_log_record_is_reported(populated_rig: TaskOperationsRig) -> None:
    def append(txn: Txn) -> None:
        head = journal.head(txn, KEYS.subject)
        entry = events.TaskLogEntry(
            txn.now_ns, txn.generation, [events.TasksCompleted([4], [1], b"")]
        )
        journal.append(txn, KEYS.subject, [pack(entry)], expected_head=head.height)

    populated_rig.store.transact(append)
    height = len(populated_rig.entries())
    first = find_differences(populated_rig)[0]
    assert (first.where, first.height, first.what) == (f"{UNIVERSE}/1-4", height, "TaskCompleted")


def change_checkpointed_failures(txn: Txn) -> None:
    """Change the failures of the completed tasks in the chunks of the checkpoint."""
    prefix = KEYS.checkpoints + tuples.pack(("c",))
    for key, row in txn.scan(prefix, tuples.prefix_end(prefix), 100):
        chunk = codec.unpack_as(checkpoint.CheckpointChunk, zlib.decompress(row))
        tasks = [
            (seq, replace(status, failures=5) if status.state == TaskState.COMPLETED else status)
            for seq, status in chunk.tasks
        ]
        txn.put(key, zlib.compress(pack(replace(chunk, tasks=tasks)), 1))


def test_checkpoint_that_differs_from_the_log_is_reported(populated_rig: TaskOperationsRig) -> None:
    checkpoint.create(populated_rig.store, UNIVERSE)
    populated_rig.store.transact(change_checkpointed_failures)
    first = find_differences(populated_rig)[0]
    assert (first.where, first.what) == (f"{UNIVERSE}/1-2", "checkpoint")


def test_missing_checkpoint_chunk_is_reported(populated_rig: TaskOperationsRig) -> None:
    checkpoint.create(populated_rig.store, UNIVERSE)
    populated_rig.store.transact(delete_first_row(KEYS.checkpoints + tuples.pack(("c",))))
    assert "chunks" in [difference.what for difference in find_differences(populated_rig)]


def test_log_replay_equals_the_fold_of_the_complete_log(populated_rig: TaskOperationsRig) -> None:
    replay = populated_rig.store.read(_replay_log)
    assert replay == status_fold.TaskFold().replay(populated_rig.log()).tasks


def _replay_log(txn: Txn) -> dict[int, TaskStatusRow]:
    replay = replay_check.LogReplay(txn, UNIVERSE)
    assert list(replay.run()) == []
    return replay.tasks

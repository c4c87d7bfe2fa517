"""Verifying: whatever is changed behind the log's back is found, and named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast import codec
from holdfast.clock import S
from holdfast.durable import journal
from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.tasks import board, checkpoint, records, recount, verify
from holdfast.tasks.coordinator import New
from holdfast.tasks.rows import (
    Counts,
    Status,
    body_of,
    counts_of,
    pack,
    pack_int,
    packed_text,
)
from holdfast.tasks.runs import status_of
from holdfast.tasks.states import State
from tests.tasks.rig import KEYS, UNIVERSE, Desk

Change = Callable[[Txn], None]


def found(desk: Desk) -> list[verify.Difference]:
    def look(txn: Txn) -> list[verify.Difference]:
        return [*verify.differences(txn, UNIVERSE), *recount.differences(txn, UNIVERSE)]

    return desk.store.read(look)


def change_status(seq: int, **fields: Any) -> Change:
    def change(txn: Txn) -> None:
        status: Status = status_of(txn, KEYS, pack_int(seq))
        txn.put(KEYS.statuses + pack_int(seq), pack(replace(status, **fields)))

    return change


def change_body(seq: int, **fields: Any) -> Change:
    def change(txn: Txn) -> None:
        body = body_of(txn, KEYS, pack_int(seq))
        assert body is not None
        txn.put(KEYS.bodies + pack_int(seq), pack(replace(body, **fields)))

    return change


@pytest.fixture
def set_desk(desk: Desk) -> Desk:
    """1 is leased, 2 completed, 3 retried, 4 ready, 5 delayed, 6 blocked by 4, 7 leased, 8 parked,
    9 suspect, 10 dead and redriven as 11, which has its key."""
    desk.limit(per_key=1)
    desk.submit(*[b"x"] * 4, backoff_ns=S)
    desk.submit(New(b"d", delay_ns=3600 * S), New(b"a", after=(4,)))
    desk.submit(New(b"l", limit="a"), New(b"l", limit="a"))
    desk.one(lease_ns=1, priority=1)
    desk.one(key="k", queue="other")
    desk.cancel(10)
    desk.redrive(10)
    nine, _, two, three = desk.lease(4)
    assert nine.seq == 9
    desk.complete(two)
    desk.fail(three)
    desk.later(0)
    desk.maintain()
    desk.cancel(4)
    desk.submit(b"four")
    desk.lease(2)
    desk.maintain()
    assert found(desk) == []
    return desk


def test_a_sound_store_has_no_difference(set_desk: Desk) -> None:
    states = set_desk.states(*range(1, 13))
    assert states[:4] == ["LEASED", "COMPLETED", "WAITING", "DEAD"]
    assert found(set_desk) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("state", State.COMPLETED),
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
def test_a_changed_field_is_named_with_its_task_and_height(
    set_desk: Desk, field: str, value: object
) -> None:
    heights = [
        height
        for height, entry in enumerate(set_desk.entries(), 1)
        if any(record.task_id == 1 for record in records.singles(entry, lambda seq: None))
    ]
    set_desk.store.transact(change_status(1, **{field: value}))
    first = found(set_desk)[0]
    assert (first.task, first.height, first.field) == (1, heights[-1], field)


def test_every_field_of_a_status_is_looked_at() -> None:
    derived = {"waits", "awaited", "redriven_by", "result", "blob"}
    assert {*verify.FIELDS, *derived} == {*Status.__struct_fields__}


def drop(key: bytes) -> Change:
    return lambda txn: txn.delete(key)


def put(key: bytes, row: bytes) -> Change:
    return lambda txn: txn.put(key, row)


def first_of(prefix: bytes) -> Change:
    return lambda txn: txn.delete(txn.scan(prefix, tuples.after(prefix), 1)[0][0])


def count(queue: str, **fields: int) -> Change:
    def change(txn: Txn) -> None:
        counts: Counts = counts_of(txn, KEYS, queue)
        txn.put(KEYS.counts + packed_text(queue), pack(replace(counts, **fields)))

    return change


BEHIND_ITS_BACK: dict[str, tuple[Change, str]] = {
    "a body is gone": (drop(KEYS.bodies + pack_int(1)), "task"),
    "a body that nobody created": (
        lambda txn: txn.put(
            KEYS.bodies + pack_int(50), txn.get(KEYS.bodies + pack_int(1)) or b""
        ),
        "task",
    ),
    "a body is another": (change_body(1, args=b"other"), "bodies"),
    "a body of another time": (change_body(1, created_ns=1), "created"),
    "a result is another": (change_status(2, result=b"other"), "results"),
    "a status that nobody wrote": (put(KEYS.statuses + pack_int(50), pack(Status())), "task"),
    "ready, and in no place": (first_of(KEYS.ready), "place"),
    "suspect, and in no place": (first_of(KEYS.suspects), "place"),
    "parked, and in no place": (first_of(KEYS.parked), "place"),
    "delayed, and in no place": (first_of(KEYS.delayed), "place"),
    "leased, and in a place": (put(KEYS.ready + b"z", pack_int(1)), "place"),
    "a place of nobody": (put(KEYS.ready + b"z", pack_int(60)), "place"),
    "its lease never runs out": (first_of(KEYS.expiries), "looked at when its lease is over"),
    "a count is wrong": (count("default", ready=44), "count of ready in default"),
    "a count of another queue": (count("other", dead=44), "count of dead in other"),
    "a limit is miscounted": (
        lambda txn: txn.put(KEYS.running + tuples.pack(("default", "a")), schema.int_bytes(4)),
        "leases of limit a in default",
    ),
    "a key is forgotten": (first_of(KEYS.keys), "key k"),
    "a key names another": (
        put(KEYS.keys + tuples.pack(("work", "k")), pack_int(1)), "key",
    ),
    "not told when another ends": (change_status(12, waits=1), "waits"),
    "redriven by nobody": (change_status(10, redriven_by=0), "redriven by"),
    "ended, and kept for ever": (first_of(KEYS.retained), "retention"),
    "the counter of seqs is too low": (drop(KEYS.seq), "seq"),
    "the counter of leases is too low": (drop(KEYS.lease), "lease"),
}  # fmt: skip


@pytest.mark.parametrize("what", list(BEHIND_ITS_BACK))
def test_what_is_changed_behind_its_back_is_found(set_desk: Desk, what: str) -> None:
    change, field = BEHIND_ITS_BACK[what]
    set_desk.store.transact(change)
    assert field in [difference.field for difference in found(set_desk)]


def test_a_changed_entry_breaks_the_chain(set_desk: Desk) -> None:
    prefix = schema.prefix(schema.Space.JOURNAL, KEYS.subject, "e")

    def change(txn: Txn) -> None:
        key, row = txn.scan(prefix, tuples.after(prefix), 3)[2]
        kept = codec.unpack_as(journal.Kept, row)
        txn.put(key, pack(replace(kept, body=kept.body + b" ")))

    set_desk.store.transact(change)
    first = found(set_desk)[0]
    assert (first.field, first.height) == ("log", 3)


def test_an_illegal_record_is_named(set_desk: Desk) -> None:
    def append(txn: Txn) -> None:
        head = journal.head(txn, KEYS.subject)
        entry = records.Entry(txn.now_ns, txn.generation, [records.Completed([4], [1], b"")])
        journal.append(txn, KEYS.subject, [pack(entry)], expected_head=head.height)

    set_desk.store.transact(append)
    height = len(set_desk.entries())
    first = found(set_desk)[0]
    assert (first.task, first.height, first.field) == (4, height, "TaskCompleted")


def test_a_checkpoint_that_is_not_what_the_log_says_is_found(
    set_desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = checkpoint.logged

    def wrong(status: Status) -> Status:
        told = genuine(status)
        return replace(told, failures=5) if told.state == State.COMPLETED else told

    monkeypatch.setattr(checkpoint, "logged", wrong)
    checkpoint.make(set_desk.store, UNIVERSE)
    monkeypatch.setattr(checkpoint, "logged", genuine)
    first = found(set_desk)[0]
    assert (first.task, first.field) == (2, "checkpoint")


def test_a_missing_chunk_is_found(set_desk: Desk) -> None:
    checkpoint.make(set_desk.store, UNIVERSE)
    set_desk.store.transact(first_of(KEYS.checkpoints + tuples.pack(("c",))))
    assert "chunks" in [difference.field for difference in found(set_desk)]


def test_the_board_of_the_whole_log_is_what_verifying_replays(set_desk: Desk) -> None:
    replay = set_desk.store.read(_replayed)
    assert replay == board.Board().replay(set_desk.log()).tasks


def _replayed(txn: Txn) -> dict[int, Status]:
    replay = verify.Replay(txn, UNIVERSE)
    assert list(replay.run()) == []
    return replay.tasks

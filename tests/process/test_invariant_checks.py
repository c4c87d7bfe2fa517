"""Each invariant check passes for a valid history and reports a history with the matching planted fault."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec
import pytest

from holdfast import store as stores
from holdfast.durable import item, journal, lease, queue
from holdfast.store import schema, tuples
from holdfast.store.api import Store
from tests.process import invariant_checks, load_worker
from tests.process.invariant_checks import LogLine, WorkerLogs

MODULES = ("holdfast.durable.queue", "holdfast.durable.lease", "holdfast.durable.journal")

NAME = "w0#0"


class RecordedHistory:
    """A memory store, and the log of one worker that ran every operation once."""

    def __init__(self) -> None:
        self.store: Store = stores.open("memory:")
        self.lines: list[LogLine] = []
        self.do("count", load_worker.counted, 0)
        self.do("append", load_worker.appended)
        self.do("shared", load_worker.shared)
        self.lease: lease.Lease = self.do("acquire", load_worker.acquired, "north", NAME, 10**9)
        self.guarded()
        self.guarded()
        seqs = [self.do("put", load_worker.put, 0) for _ in range(3)]
        assert seqs == [1, 2, 3]
        [claim] = self.store.transact(queue.claim, load_worker.QUEUE, NAME, 1, 10**9)
        self.do("ack", load_worker.acked, claim)

    def do(self, what: str, fn: Callable[..., load_worker.LoggedResult], *args: object) -> object:
        id = f"{NAME}.{len(self.lines)}"
        self.lines.append(LogLine("intend", what, id, {}))
        result, logged = self.store.transact(fn, id, *args)
        fields = {name: getattr(value, "value", value) for name, value in logged.items()}
        if "lease" in fields:
            fields["lease"] = msgspec.to_builtins(fields["lease"])
        if what == "guarded":
            fields |= {"resource": "north", "epoch": self.lease.epoch}
        self.lines.append(LogLine("acked", what, id, fields))
        return getattr(result, "value", result)

    def guarded(self) -> None:
        height = self.store.read(journal.head, "north").height
        self.do("guarded", load_worker.guarded, self.lease, height)

    def log_unapplied(self, how: str, what: str, **fields: object) -> None:
        """Log an operation that was not applied to the store."""
        id = f"{NAME}.{len(self.lines)}"
        self.lines += [LogLine("intend", what, id, {}), LogLine(how, what, id, dict(fields))]

    def put(self, key: bytes, value: bytes) -> None:
        self.store.transact(lambda txn: txn.put(key, value))

    def breaches(self) -> list[str]:
        return invariant_checks.breaches(self.store, WorkerLogs(self.lines))


def lose_a_count(history: RecordedHistory) -> None:
    history.log_unapplied("acked", "count", counter=0)


def count_twice(history: RecordedHistory) -> None:
    history.store.transact(lambda txn: txn.add((*load_worker.COUNT, 0), 1))


def lose_an_append(history: RecordedHistory) -> None:
    history.log_unapplied("acked", "append", seq=1)


def append_twice(history: RecordedHistory) -> None:
    id = next(line.id for line in history.lines if line.operation == "append")
    history.store.transact(lambda txn: txn.append(load_worker.LOG, id.encode()))


def keep_a_refused_append(history: RecordedHistory) -> None:
    history.log_unapplied("refused", "append", code="conflict")
    id = history.lines[-1].id
    history.store.transact(lambda txn: txn.append(load_worker.LOG, id.encode()))


def skip_a_number(history: RecordedHistory) -> None:
    history.put(tuples.pack((*load_worker.LOG, 7)), b"stray")


def change_an_entry(history: RecordedHistory) -> None:
    prefix = schema.key_prefix(schema.Space.JOURNAL, "north", "e")
    [(key, _), (_, other)] = invariant_checks.rows(history.store, prefix)
    history.put(key, other)


def lower_an_epoch(history: RecordedHistory) -> None:
    body = json.dumps([f"{NAME}.99", 0, "w0", "0"]).encode()
    history.lines.append(LogLine("intend", "guarded", f"{NAME}.99", {}))
    history.store.transact(
        lambda txn: journal.append(txn, "north", [body], expected_head=2) and None
    )


def write_after_the_lease_ended(history: RecordedHistory) -> None:
    history.store.transact(lease.release, history.lease)
    late = history.store.now_ns() + 10**9
    lines = [
        line for line in history.lines if line.operation == "guarded" and line.outcome == "acked"
    ]
    lines[-1].fields["at_ns"] = late


def commit_after_a_fence(history: RecordedHistory) -> None:
    fields = {"resource": "north", "epoch": history.lease.epoch, "code": "fenced"}
    history.log_unapplied("refused", "guarded", **fields)
    history.guarded()


def acknowledge_an_unlogged_grant(history: RecordedHistory) -> None:
    history.log_unapplied("acked", "acquire", lease=["north", "w9", "0", 1, 5, 0])


def do_an_item_twice(history: RecordedHistory) -> None:
    [(_, done)] = invariant_checks.rows(history.store, tuples.pack(load_worker.DONE))
    history.store.transact(lambda txn: txn.append(load_worker.DONE, done))


def lose_an_item(history: RecordedHistory) -> None:
    history.log_unapplied("acked", "put", seq=9)


def keep_an_item_that_is_done(history: RecordedHistory) -> None:
    keys = item.keys_of(load_worker.QUEUE)
    rows = invariant_checks.rows(history.store, keys.items)
    history.put(keys.items + tuples.pack_int(1), rows[0][1])
    history.put(keys.ready_key(0, 0, tuples.pack_int(1)), tuples.pack_int(1))


def miscount(history: RecordedHistory) -> None:
    counts = history.store.read(queue.counts, load_worker.QUEUE)
    history.put(
        item.keys_of(load_worker.QUEUE).counts, item.pack(queue.QueueCounts(counts.ready + 1))
    )


FAULTS = {
    lose_a_count: "counters_equal_their_marks: 1 acknowledged are lost",
    count_twice: "counters_equal_their_marks: counter 0 is 2",
    lose_an_append: "appends_are_there_once_and_in_sequence: 1 acknowledged are lost",
    append_twice: "appends_are_there_once_and_in_sequence: w0#0.2 is there 2 times",
    keep_a_refused_append: "appends_are_there_once_and_in_sequence: 1 refused are there",
    skip_a_number: "appends_are_there_once_and_in_sequence: 2 appends have the numbers up to 7",
    change_an_entry: "guarded_journals_hold_each_entry_once: store_corrupt",
    lower_an_epoch: "guarded_journals_hold_each_entry_once: north: a later entry has a lower",
    write_after_the_lease_ended: "guarded_writes_carry_the_epoch_of_their_time: w0#0.",
    commit_after_a_fence: "nothing_is_committed_after_a_fence: w0#0.",
    acknowledge_an_unlogged_grant: "epochs_only_grow: ",
    do_an_item_twice: "items_are_done_once_or_still_there: item 1 was done 2 times",
    lose_an_item: "items_are_done_once_or_still_there: 1 acknowledged are lost",
    keep_an_item_that_is_done: "items_are_done_once_or_still_there: items [1] are left and done",
    miscount: "queue_counts_equal_a_recount: kept",
}


def test_valid_history_has_no_breach() -> None:
    assert RecordedHistory().breaches() == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_fault_is_reported_as_a_breach(fault: Callable[[RecordedHistory], None]) -> None:
    history = RecordedHistory()
    fault(history)
    found = history.breaches()
    assert any(line.startswith(FAULTS[fault]) for line in found), found

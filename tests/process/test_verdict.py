"""Each check of the verdict holds for a sound history, and fails for one with that fault in it."""

from __future__ import annotations

import json
from collections.abc import Callable

import msgspec
import pytest

from holdfast import store as stores
from holdfast.durable import item, journal, lease, queue
from holdfast.store import schema, tuples
from holdfast.store.api import Store
from tests.process import verdict, worker
from tests.process.verdict import Line, Logs

MODULES = ("holdfast.durable.queue", "holdfast.durable.lease", "holdfast.durable.journal")

NAME = "w0#0"


class Story:
    """A store in memory, and the log of one worker that did everything once."""

    def __init__(self) -> None:
        self.store: Store = stores.open("memory:")
        self.lines: list[Line] = []
        self.do("count", worker.counted, 0)
        self.do("append", worker.appended)
        self.do("shared", worker.shared)
        self.held: lease.Lease = self.do("acquire", worker.acquired, "north", NAME, 10**9)
        self.guarded()
        self.guarded()
        seqs = [self.do("put", worker.put, 0) for _ in range(3)]
        assert seqs == [1, 2, 3]
        [claim] = self.store.transact(queue.claim, worker.QUEUE, NAME, 1, 10**9)
        self.do("ack", worker.acked, claim)

    def do(self, what: str, fn: Callable[..., worker.Told], *args: object) -> object:
        id = f"{NAME}.{len(self.lines)}"
        self.lines.append(Line("intend", what, id, {}))
        result, told = self.store.transact(fn, id, *args)
        fields = {name: getattr(value, "value", value) for name, value in told.items()}
        if "lease" in fields:
            fields["lease"] = msgspec.to_builtins(fields["lease"])
        if what == "guarded":
            fields |= {"resource": "north", "epoch": self.held.epoch}
        self.lines.append(Line("acked", what, id, fields))
        return getattr(result, "value", result)

    def guarded(self) -> None:
        height = self.store.read(journal.head, "north").height
        self.do("guarded", worker.guarded, self.held, height)

    def told(self, how: str, what: str, **fields: object) -> None:
        """Put a line into the log for which there is nothing in the store."""
        id = f"{NAME}.{len(self.lines)}"
        self.lines += [Line("intend", what, id, {}), Line(how, what, id, dict(fields))]

    def put(self, key: bytes, value: bytes) -> None:
        self.store.transact(lambda txn: txn.put(key, value))

    def breaches(self) -> list[str]:
        return verdict.breaches(self.store, Logs(self.lines))


def lose_a_count(story: Story) -> None:
    story.told("acked", "count", counter=0)


def count_twice(story: Story) -> None:
    story.store.transact(lambda txn: txn.add((*worker.COUNT, 0), 1))


def lose_an_append(story: Story) -> None:
    story.told("acked", "append", seq=1)


def append_twice(story: Story) -> None:
    id = next(line.id for line in story.lines if line.what == "append")
    story.store.transact(lambda txn: txn.append(worker.LOG, id.encode()))


def keep_a_refused_append(story: Story) -> None:
    story.told("refused", "append", code="conflict")
    id = story.lines[-1].id
    story.store.transact(lambda txn: txn.append(worker.LOG, id.encode()))


def skip_a_number(story: Story) -> None:
    story.put(tuples.pack((*worker.LOG, 7)), b"stray")


def change_an_entry(story: Story) -> None:
    prefix = schema.prefix(schema.Space.JOURNAL, "north", "e")
    [(key, _), (_, other)] = verdict.rows(story.store, prefix)
    story.put(key, other)


def lower_an_epoch(story: Story) -> None:
    body = json.dumps([f"{NAME}.99", 0, "w0", "0"]).encode()
    story.lines.append(Line("intend", "guarded", f"{NAME}.99", {}))
    story.store.transact(lambda txn: journal.append(txn, "north", [body], expected_head=2) and None)


def write_after_the_lease_ended(story: Story) -> None:
    story.store.transact(lease.release, story.held)
    late = story.store.now_ns() + 10**9
    lines = [line for line in story.lines if line.what == "guarded" and line.how == "acked"]
    lines[-1].fields["at_ns"] = late


def go_on_after_a_fence(story: Story) -> None:
    fields = {"resource": "north", "epoch": story.held.epoch, "code": "fenced"}
    story.told("refused", "guarded", **fields)
    story.guarded()


def grant_what_nobody_logged(story: Story) -> None:
    story.told("acked", "acquire", lease=["north", "w9", "0", 1, 5, 0])


def do_an_item_twice(story: Story) -> None:
    [(_, done)] = verdict.rows(story.store, tuples.pack(worker.DONE))
    story.store.transact(lambda txn: txn.append(worker.DONE, done))


def lose_an_item(story: Story) -> None:
    story.told("acked", "put", seq=9)


def keep_an_item_that_is_done(story: Story) -> None:
    keys = item.keys_of(worker.QUEUE)
    rows = verdict.rows(story.store, keys.items)
    story.put(keys.items + tuples.pack_int(1), rows[0][1])
    story.put(keys.ready_key(0, 0, tuples.pack_int(1)), tuples.pack_int(1))


def miscount(story: Story) -> None:
    counts = story.store.read(queue.counts, worker.QUEUE)
    story.put(item.keys_of(worker.QUEUE).counts, item.pack(queue.Counts(counts.ready + 1)))


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
    go_on_after_a_fence: "nothing_is_committed_after_a_fence: w0#0.",
    grant_what_nobody_logged: "epochs_only_grow: ",
    do_an_item_twice: "items_are_done_once_or_still_there: item 1 was done 2 times",
    lose_an_item: "items_are_done_once_or_still_there: 1 acknowledged are lost",
    keep_an_item_that_is_done: "items_are_done_once_or_still_there: items [1] are left and done",
    miscount: "queue_counts_equal_a_recount: kept",
}


def test_a_sound_history_has_no_breach() -> None:
    assert Story().breaches() == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found(fault: Callable[[Story], None]) -> None:
    story = Story()
    fault(story)
    found = story.breaches()
    assert any(line.startswith(FAULTS[fault]) for line in found), found

"""Damage to stored rows of flows: one change for each kind of row, and flows that have every kind of row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

import holdfast as hf
from holdfast import codec
from holdfast.durable.tags import pack_tag
from holdfast.flows import name_index
from holdfast.flows.model import (
    RETRY_NAME,
    FlowKeys,
    decode_body,
    decode_head,
    decode_mail,
    decode_open,
    keys_of,
    pack_int,
)
from holdfast.flows.records import Published, RecordRow, StepCompleted, decode_record
from holdfast.flows.retention import REMOVING
from holdfast.flows.states import FlowState
from holdfast.store import schema, tuples
from holdfast.store.api import Row, Txn
from tests.flows.test_steps import double

UNIVERSE = "flows"
KEYS: FlowKeys = keys_of(UNIVERSE)
LARGE = 100_000


class Collected(hf.Event):
    cents: int
    scan: bytes = b""


@hf.task(queue="slow")
def pack(n: int) -> int:
    return n


@hf.flow(retain_s=86_400)
async def child() -> None:
    await hf.sleep(86_400)


@hf.flow(retain_s=86_400, timeout_s=30 * 86_400)
async def order(run: int) -> None:
    hf.publish("run", run)
    await hf.step(double, run)
    await hf.receive(Collected)
    if run < 2:
        hf.again(run + 1)
    hf.publish("packed", False)
    first, second = hf.step(child), hf.step(pack, 1)
    await hf.sleep(86_400)
    await first
    await second


@hf.flow(attempts=3)
async def raising() -> None:
    await hf.step(double, 1)
    raise ValueError("again later")


@hf.flow(retain_s=86_400)
async def done(data: bytes) -> int:
    return await hf.step(double, 2)


app = hf.App(UNIVERSE, flows=[order, child, raising, done], tasks=[pack], events=[Collected])
# The flows by number.
ORDER, DONE, RAISING, CHILD = 1, 2, 3, 4


def start_flows(start: Callable[..., Any]) -> Any:
    """Start the flows of which a worker makes every kind of row. Returns the handle of the order."""
    handle = start(order.options(key="o-1", tag="eu"), 1)
    handle.send(Collected(1), key="p-1")
    handle.send(Collected(2), key="p-2")
    handle.send(Collected(3, b"s" * LARGE), key="p-3")
    handle.send(Collected(4), key="p-4")
    start(done.options(key="d-1"), b"a" * LARGE)
    start(raising)
    return handle


# -- changes ---------------------------------------------------------------------------------------

Change = Callable[[Txn], None]


def rows_below(txn: Txn, prefix: bytes) -> list[Row]:
    rows = txn.scan(prefix, tuples.prefix_end(prefix))
    assert rows, "this kind of row exists"
    return rows


def lose(prefix: bytes, at: int = 0) -> Change:
    def change(txn: Txn) -> None:
        txn.delete(rows_below(txn, prefix)[at][0])

    return change


def put(key: bytes, row: bytes) -> Change:
    def change(txn: Txn) -> None:
        txn.put(key, row)

    return change


def edit(prefix: bytes, edited: Callable[[bytes], bytes], at: int = 0) -> Change:
    def change(txn: Txn) -> None:
        key, row = rows_below(txn, prefix)[at]
        txn.put(key, edited(row))

    return change


def edit_head(seq: int, **fields: Any) -> Change:
    def edited(row: bytes) -> bytes:
        return codec.pack(replace(decode_head(row), **fields))

    return edit(KEYS.heads + pack_int(seq), edited)


def edit_record(seq: int, run: int, name: str, **fields: Any) -> Change:
    def change(txn: Txn) -> None:
        for key, row in rows_below(txn, KEYS.records_of(seq, run)):
            stored = decode_record(row)
            if isinstance(stored.record, StepCompleted) and stored.record.name == name:
                record = replace(stored.record, **fields)
                txn.put(key, codec.pack(RecordRow(stored.decided_ns, record)))
                return
        raise AssertionError("the run has such a record")

    return change


def change_time_of_record(txn: Txn) -> None:
    key, row = rows_below(txn, KEYS.records_of(ORDER, 2))[1]
    txn.put(key, codec.pack(replace(decode_record(row), decided_ns=1)))


def lose_blob(name_of: Callable[[Txn], bytes]) -> Change:
    def change(txn: Txn) -> None:
        name = name_of(txn)
        assert name
        txn.delete(schema.key_prefix(schema.Space.BLOB, "data", name))

    return change


def _blob_of_arguments(txn: Txn) -> bytes:
    return decode_body(rows_below(txn, KEYS.bodies + pack_int(DONE))[0][1]).blob


def _blob_of_event(txn: Txn) -> bytes:
    return decode_mail(rows_below(txn, KEYS.mail + pack_int(ORDER))[0][1]).blob


def change_child(txn: Txn) -> None:
    for key, row in rows_below(txn, KEYS.open_steps + pack_int(ORDER)):
        step = decode_open(row)
        if step.child:
            txn.put(key, codec.pack(replace(step, child=99)))


def retained_run_row(txn: Txn) -> bytes:
    return rows_below(txn, KEYS.retained_runs)[0][0]


def change_time_of_retained_run(txn: Txn) -> None:
    key = retained_run_row(txn)
    until_ns, seq, run = tuples.unpack(key[len(KEYS.retained_runs) :])
    txn.delete(key)
    txn.put(KEYS.retained_runs + tuples.pack((int(until_ns) + 10**9, seq, run)), b"")


def add_retained_run(txn: Txn) -> None:
    until_ns, seq, _ = tuples.unpack(retained_run_row(txn)[len(KEYS.retained_runs) :])
    txn.put(KEYS.retained_runs + tuples.pack((until_ns, seq, 2)), b"")


def _event_key(key: str, number: int) -> Change:
    return put(KEYS.mail_keys + tuples.pack((ORDER, key)), codec.pack([number, bytes(32)]))


def _value(value: object) -> Callable[[bytes], bytes]:
    return lambda row: codec.pack(value)


# Rows that follow from others: the rebuild restores them. The change, and the finding of verify.
DERIVED: dict[str, tuple[Change, str]] = {
    "state row lost": (lose(KEYS.states), "row of its state"),
    "row of a tag lost": (lose(KEYS.tags), "row of its tag"),
    "row of a tag that no flow has": (
        put(KEYS.tags + pack_tag("us") + pack_int(1), b""),
        "row of its tag",
    ),
    "row of a name lost": (lose(name_index.prefix_of(UNIVERSE)), "row of its name"),
    "row of a name that the flow does not have": (
        put(name_index.row_key(UNIVERSE, "none", 1), b""),
        "row of its name",
    ),
    "state row of another state": (put(KEYS.states + tuples.pack((7, 1)), b""), "row of its state"),
    "counters lost": (lose(KEYS.counts), "counters"),
    "counters of no flow": (put(KEYS.counts + tuples.pack(("none",)), b"\x91\x01"), "counters"),
    "key lost": (lose(KEYS.keys), "key"),
    "key of another flow": (edit(KEYS.keys, lambda row: pack_int(RAISING)), "key"),
    "key without a flow": (put(KEYS.keys + tuples.pack(("order", "o-9")), pack_int(1)), "key"),
    "due time of a step lost": (
        lambda txn: _lose_due(txn, "hf.sleep"),
        "due time",
    ),
    "timeout lost": (lambda txn: _lose_due(txn, "hf.timeout"), "due time"),
    "retry lost": (lambda txn: _lose_due(txn, RETRY_NAME), "due time"),
    "due time of no step": (put(KEYS.due_key(5, ORDER, "hf.sleep", 9), b""), "due time"),
    "timeout of another time": (put(KEYS.due_key(5, ORDER, "hf.timeout", 0), b""), "due time"),
    "due time of no flow": (put(KEYS.due_key(5, 99, "hf.sleep", 1), b""), "due time"),
    "retry of another time": (put(KEYS.due_key(5, RAISING, RETRY_NAME, 0), b""), "due time"),
    "retention lost": (lose(KEYS.retained), "retention"),
    "retention of a flow in progress": (
        put(KEYS.retained + tuples.pack((5, ORDER)), b""),
        "retention",
    ),
    "retention of no flow": (put(KEYS.retained + tuples.pack((5, 99)), b""), "retention"),
    "retention under removal of a stored flow": (
        edit(KEYS.retained, lambda row: REMOVING),
        "retention",
    ),
    "retention of a run lost": (lose(KEYS.retained_runs), "retention of a run"),
    "retention of a run at another time": (change_time_of_retained_run, "retention of a run"),
    "retention of the last run": (add_retained_run, "retention of a run"),
    "child lost": (lose(KEYS.children), "child"),
    "child of another flow": (put(KEYS.children + tuples.pack((DONE, CHILD)), b""), "child"),
    "published value lost": (lose(KEYS.published), "published value"),
    "published value changed": (edit(KEYS.published, _value(77)), "published value"),
    "published value without a record": (
        put(KEYS.published + tuples.pack((ORDER, "none")), codec.pack(1)),
        "published value",
    ),
    "key of an event lost": (lose(KEYS.mail_keys, 2), "key of an event"),
    "key of an event with another number": (_event_key("p-4", 3), "key of an event"),
    "key of a received event with another digest": (_event_key("p-9", 1), "key of an event"),
    "key of an event that was never sent": (_event_key("p-9", 9), "key of an event"),
    "key of an event of no flow": (
        put(KEYS.mail_keys + tuples.pack((99, "p-1")), codec.pack([1, bytes(32)])),
        "key of an event",
    ),
    "thread of no flow": (put(KEYS.threads + tuples.pack((99, "k", 1)), b""), "thread of a step"),
    "state of a head": (edit_head(ORDER, state=FlowState.PARKED), "state"),
    "failures of a head": (edit_head(RAISING, failures=0), "failures"),
    "cancellation of a head": (edit_head(ORDER, cancelled=True), "cancelled"),
    "end of a head": (edit_head(DONE, ended_ns=5), "ended_ns"),
    "compensations of a head": (edit_head(DONE, undone=1), "undone"),
    "error of a head": (edit_head(RAISING, error_type="KeyError"), "error_type"),
    "fewer records in a head": (edit_head(DONE, records=1), "records"),
}

# Records and rows that no other row determines: the rebuild refuses.
SOURCES: dict[str, tuple[Change, str]] = {
    "body lost": (lose(KEYS.bodies + pack_int(DONE)), "rows"),
    "head lost": (lose(KEYS.heads + pack_int(DONE)), "rows"),
    "last record lost": (lose(KEYS.records_of(DONE, 1), -1), "records"),
    "first record lost": (lose(KEYS.records_of(DONE, 1)), "run 1: record 2"),
    "record of a former run lost": (lose(KEYS.records_of(ORDER, 1)), "run 1: record 2"),
    "record of a later run": (
        put(
            KEYS.records_of(DONE, 2) + pack_int(1),
            codec.pack(RecordRow(5, Published("a", b"\xc0"))),
        ),
        "run of a record",
    ),
    "time of a record": (change_time_of_record, "time of run 2: record 2"),
    "records of no flow": (
        put(
            KEYS.records_of(99, 1) + pack_int(1), codec.pack(RecordRow(5, Published("a", b"\xc0")))
        ),
        "records",
    ),
    "step in progress lost": (lose(KEYS.open_steps + pack_int(ORDER)), "open steps"),
    "step in progress of no flow": (
        put(KEYS.open_key(99, "double", 1), codec.pack(None)),
        "steps in progress",
    ),
    "child of a step": (change_child, "child of child#1"),
    "event lost": (lose(KEYS.mail + pack_int(ORDER)), "event 3"),
    "event that was never sent": (
        lambda txn: txn.put(KEYS.mail + tuples.pack((ORDER, 9)), rows_below(txn, KEYS.mail)[1][1]),
        "number of an event",
    ),
    "event of no flow": (
        lambda txn: txn.put(KEYS.mail + tuples.pack((99, 1)), rows_below(txn, KEYS.mail)[1][1]),
        "inbox",
    ),
    "number of a received event": (
        edit_record(ORDER, 2, "hf.receive", mail=7),
        "event 2",
    ),
    "activation of an ended flow": (edit_head(DONE, task=1), "activation"),
    "result": (edit_head(DONE, result=codec.pack(5)), "digest of the result"),
    "counter of the numbers": (
        put(KEYS.seq_counter, schema.encode_int(2)),
        "last number of a flow",
    ),
    "blob of the arguments lost": (lose_blob(_blob_of_arguments), "blob of the arguments"),
    "blob of an event lost": (lose_blob(_blob_of_event), "blob of event 3"),
}


def _lose_due(txn: Txn, name: str) -> None:
    for key, _ in rows_below(txn, KEYS.due):
        if tuples.unpack(key)[-2] == name:
            txn.delete(key)
            return
    raise AssertionError("this kind of row exists")

"""Retention of flows: removes ended flows and former runs, and finds the next time at which the timer worker has work."""

from __future__ import annotations

from holdfast.durable.validation import check_limit
from holdfast.flows.model import decode_mail, keys_of, pack_int
from holdfast.flows.records import StepCompleted, decode_record
from holdfast.flows.unit_of_work import FlowUnit
from holdfast.store import blobs, tuples
from holdfast.store.api import Txn, operation

REMOVED_ROWS_MAX = 2_000


def next_due_ns(txn: Txn, universe: str) -> int | None:
    """Return the store time of the next sleep, timeout or removal, or None."""
    keys = keys_of(universe)
    times: list[int] = []
    for prefix in (keys.due, keys.retained, keys.retained_runs):
        for key, _ in txn.scan(prefix, tuples.prefix_end(prefix), 1):
            elements = tuples.unpack(key)
            at = elements[3]
            assert isinstance(at, int)
            times.append(at)
    return min(times, default=None)


@operation("flows.remove_ended")
def remove_ended(txn: Txn, universe: str, limit: int) -> int:
    """Remove flows and former runs past their retention, a bounded number of rows. Returns the number of removed rows."""
    check_limit(limit)
    keys = keys_of(universe)
    unit = FlowUnit(txn, universe)
    until = keys.retained + tuples.pack((unit.now_ns + 1,))
    rows_left = _remove_runs(unit, limit, REMOVED_ROWS_MAX)
    if rows_left <= 0:
        return REMOVED_ROWS_MAX - rows_left
    for key, _ in txn.scan(keys.retained, until, limit):
        seq = tuples.unpack(key)[-1]
        assert isinstance(seq, int)
        rows_left = _remove(unit, seq, rows_left)
        if rows_left <= 0:
            break
        txn.delete(key)
    unit.close()
    return REMOVED_ROWS_MAX - rows_left


def _remove_runs(unit: FlowUnit, limit: int, rows_left: int) -> int:
    """Remove the records of runs that ended with `hf.again`. A result of 0 or less means that rows remain."""
    runs = unit.keys.retained_runs
    for key, _ in unit.txn.scan(runs, runs + tuples.pack((unit.now_ns + 1,)), limit):
        *_, seq, run = tuples.unpack(key)
        assert isinstance(seq, int)
        assert isinstance(run, int)
        rows_left = _remove_rows(unit, unit.keys.records_of(seq, run), rows_left)
        if rows_left <= 0:
            break
        unit.txn.delete(key)
    return rows_left


def _remove(unit: FlowUnit, seq: int, rows_left: int) -> int:
    """Remove the rows of a flow. A result of 0 or less means that rows remain."""
    txn, keys = unit.txn, unit.keys
    for prefix in (
        keys.records,
        keys.mail,
        keys.mail_keys,
        keys.published,
        keys.open_steps,
        keys.children,
        keys.threads,
    ):
        rows_left = _remove_rows(unit, prefix + pack_int(seq), rows_left)
        if rows_left <= 0:
            return rows_left
    flow = unit.load(seq)
    for blob in (flow.body.blob, flow.head.blob, flow.head.args_blob):
        if blob:
            blobs.release.fn(txn, blob)
    if flow.body.key:
        index_key = keys.keys + tuples.pack((flow.body.spec.name, flow.body.key))
        if txn.get(index_key) == pack_int(seq):
            txn.delete(index_key)
    if flow.body.parent is not None and flow.body.parent.flow:
        txn.delete(keys.children + tuples.pack((flow.body.parent.flow, seq)))
    unit.forget(flow)
    return rows_left - 2


def _remove_rows(unit: FlowUnit, prefix: bytes, rows_left: int) -> int:
    """Remove rows with a prefix, and release the blobs of records and mail."""
    txn, keys = unit.txn, unit.keys
    found = txn.scan(prefix, tuples.prefix_end(prefix), rows_left)
    for key, row in found:
        txn.delete(key)
        if prefix.startswith(keys.records):
            record = decode_record(row).record
            if isinstance(record, StepCompleted) and record.blob:
                blobs.release.fn(txn, record.blob)
        elif prefix.startswith(keys.mail) and (blob := decode_mail(row).blob):
            blobs.release.fn(txn, blob)
    return rows_left - len(found)

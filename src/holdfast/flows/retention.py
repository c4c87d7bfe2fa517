"""Retention of flows: removes ended flows and former runs, and finds the next time at which the timer worker has work.

The first commit of a removal deletes body, head and key of the flow, so no reader sees a part of it. Later commits
delete the other rows, a bounded number each. The retention row is deleted last and has the mark `REMOVING` meanwhile.
"""

from __future__ import annotations

from holdfast.durable.validation import check_limit
from holdfast.errors import NotFound
from holdfast.flows import compensation_dead_letters
from holdfast.flows.model import decode_mail, keys_of, pack_int
from holdfast.flows.records import StepCompleted, decode_record
from holdfast.flows.unit_of_work import FlowUnit
from holdfast.store import blobs, tuples
from holdfast.store.api import Txn, operation

REMOVED_ROWS_MAX = 2_000
# The value of a retention row whose flow or run is partly removed.
REMOVING = b"r"


def next_due_ns(txn: Txn, universe: str) -> int | None:
    """Return the store time of the next sleep, timeout or removal, or None."""
    times = (next_sleep_ns(txn, universe), next_removal_ns(txn, universe))
    return min((time for time in times if time is not None), default=None)


def next_sleep_ns(txn: Txn, universe: str) -> int | None:
    """Return the store time at which the next sleep, timeout or retry is due, or None."""
    return _first_time(txn, keys_of(universe).due)


def next_removal_ns(txn: Txn, universe: str) -> int | None:
    """Return the store time at which the next flow or former run is removed, or None."""
    keys = keys_of(universe)
    times = (_first_time(txn, keys.retained), _first_time(txn, keys.retained_runs))
    return min((time for time in times if time is not None), default=None)


def _first_time(txn: Txn, prefix: bytes) -> int | None:
    for key, _ in txn.scan(prefix, tuples.prefix_end(prefix), 1):
        time = tuples.unpack(key)[3]
        assert isinstance(time, int)
        return time
    return None


@operation("flows.remove_ended")
def remove_ended(txn: Txn, universe: str, limit: int, rows_max: int = REMOVED_ROWS_MAX) -> int:
    """Remove flows and former runs past their retention, at most `rows_max` rows. Returns the number of removed rows,
    0 if nothing is left to remove."""
    check_limit(limit)
    check_limit(rows_max, "rows")
    unit = FlowUnit(txn, universe)
    rows_left = _remove_runs(unit, limit, rows_max)
    if not _due(unit, unit.keys.retained_runs, 1):
        rows_left = _remove_flows(unit, limit, rows_left)
    unit.close()
    return rows_max - rows_left


def _due(unit: FlowUnit, prefix: bytes, limit: int) -> list[tuple[bytes, bytes]]:
    """The oldest retention rows whose time has come."""
    return unit.txn.scan(prefix, prefix + tuples.pack((unit.now_ns + 1,)), limit)


def _remove_runs(unit: FlowUnit, limit: int, rows_left: int) -> int:
    """Remove the records of runs that ended with `hf.again`. Returns how many rows this commit may still remove."""
    for key, _ in _due(unit, unit.keys.retained_runs, limit):
        *_, seq, run = tuples.unpack(key)
        assert isinstance(seq, int)
        assert isinstance(run, int)
        if not rows_left:
            break
        rows_left = _remove_rows(unit, unit.keys.records_of(seq, run), rows_left)
        if not rows_left:
            unit.txn.put(key, REMOVING)
            break
        unit.txn.delete(key)
        rows_left -= 1
    return rows_left


def _remove_flows(unit: FlowUnit, limit: int, rows_left: int) -> int:
    """Remove ended flows. Returns how many rows this commit may still remove."""
    for key, mark in _due(unit, unit.keys.retained, limit):
        seq = tuples.unpack(key)[-1]
        assert isinstance(seq, int)
        if not rows_left:
            break
        if mark != REMOVING:
            unit.txn.put(key, REMOVING)
            _forget(unit, seq)
            rows_left -= 1
        rows_left = _remove_rows_of(unit, seq, rows_left)
        if not rows_left:
            break
        unit.txn.delete(key)
        rows_left -= 1
    return rows_left


def _forget(unit: FlowUnit, seq: int) -> None:
    """Delete the body, the head, the key and the index rows of a flow. A flow without them has no such rows."""
    txn, keys = unit.txn, unit.keys
    try:
        flow = unit.load(seq)
    except NotFound:
        return
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


def _remove_rows_of(unit: FlowUnit, seq: int, rows_left: int) -> int:
    """Remove the other rows of a flow. At 0 some may remain."""
    keys = unit.keys
    for prefix in (
        keys.records,
        keys.mail,
        keys.mail_keys,
        keys.published,
        keys.open_steps,
        keys.children,
        keys.threads,
        compensation_dead_letters.letter_prefix(unit.universe),
    ):
        rows_left = _remove_rows(unit, prefix + pack_int(seq), rows_left)
        if not rows_left:
            break
    return rows_left


def _remove_rows(unit: FlowUnit, prefix: bytes, rows_left: int) -> int:
    """Remove rows with a prefix, and release the blobs of records and mail. At 0 some may remain."""
    if not rows_left:
        return 0
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

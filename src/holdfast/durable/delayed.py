"""Delayed items that run in the transaction that takes them, such as a timer that becomes a message.

For actions that need only the store. Taking, acting and completing are one commit, so a worker cannot
crash in between. No claims are needed, and each item runs exactly once with any number of workers.

- Due items run in the order of their due times, across all queues of one call, after any downtime.
- A failing action rolls back only its own writes. Its item is delayed and retried, or becomes a dead
  letter if the error is not retryable. The rest of the batch completes.
- A queue may use store time or another clock. The caller passes the reading of that clock.
- The cost of a call does not depend on the backlog.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from holdfast.config import ERROR_CODE_CHARS_MAX, ERROR_TEXT_CHARS_MAX
from holdfast.durable import dead_letters, queue
from holdfast.durable import item as items
from holdfast.durable.item import (
    ItemEvent,
    ItemState,
    QueueCounterDelta,
    QueueItem,
    QueueKeys,
    keys_of,
    pack_int,
    seq_of,
)
from holdfast.durable.queue import RetryBudget
from holdfast.durable.validation import check_limit, check_time
from holdfast.errors import Conflict, HoldfastError
from holdfast.retry import Backoff
from holdfast.store import blobs, tuples
from holdfast.store.api import Operation, Txn
from holdfast.store.txn import run_in_savepoint

# Backoff after a failed action.
RETRY_BACKOFF = Backoff()
# No limit on expired claims. Only an older release wrote claims to these queues.
_NO_LIMITS = RetryBudget(failures_max=1 << 31, expiries_max=1 << 31)


def schedule(txn: Txn, name: str, payload: bytes, due_ns: int, original_due_ns: int) -> int:
    """Insert an item that is due at a time of the queue's clock, and return its seq.

    Items of one batch run in the order of `original_due_ns`. A rescheduled item keeps its first due time there.
    """
    keys = keys_of(name)
    check_time("due_ns", due_ns)
    check_time("original_due_ns", original_due_ns)
    body = (*items.inline_or_blob(txn, payload), 0, None, "", "")
    [seq] = items.insert(txn, keys, [body], due_ns, fair_rank=original_due_ns, keep_delayed=True)
    return seq


def run_due(
    txn: Txn, clocks: Sequence[tuple[str, int]], action: Operation[..., Any], *args: Any, limit: int
) -> int:
    """Run `act(txn, payload, *args)` for up to `limit` due items, and return their number.

    `clocks` pairs each queue with the reading of its clock. The most overdue item of all queues runs first.
    """
    check_limit(limit)
    due_items = [
        due_item
        for name, now_ns in clocks
        for due_item in _expire_and_find_due(txn, name, now_ns, limit)
    ]
    due_items.sort(key=_due_order)
    batch = due_items[:limit]
    deltas = {name: QueueCounterDelta() for name, _ in clocks}
    for due_item in batch:
        delta = deltas[due_item.keys.queue]
        if due_item.delayed:
            delta.transition(ItemState.DELAYED, ItemEvent.DUE)
        delta.transition(ItemState.READY, ItemEvent.CLAIM)
        _run_one(txn, due_item, delta, action, args)
    for name, delta in deltas.items():
        delta.apply(txn, keys_of(name))
    return len(batch)


def peek(txn: Txn, clocks: Sequence[tuple[str, int]], limit: int) -> list[tuple[str, int, bytes]]:
    """Return the items that `run_due` would run: queue, seq and payload of each, in order."""
    check_limit(limit)
    due_items = [
        due_item
        for name, now_ns in clocks
        for due_item in _find_due(txn, keys_of(name), now_ns, limit)
    ]
    due_items.sort(key=_due_order)
    return [
        (due_item.keys.queue, seq_of(due_item.packed_seq), queue.payload_of(txn, due_item.item))
        for due_item in due_items[:limit]
    ]


def is_due(txn: Txn, name: str, seq: int, now_ns: int) -> bool:
    """Whether an item is due and unclaimed."""
    keys, packed_seq = keys_of(name), pack_int(seq)
    if txn.get(keys.items + packed_seq) is None:
        return False
    item = items.load_item(txn, keys, packed_seq)
    return _due_row(txn, keys, item, packed_seq, now_ns) is not None


def complete(txn: Txn, name: str, seq: int, now_ns: int) -> None:
    """Complete a due item whose action the caller has performed in this transaction."""
    keys, packed_seq, delta = keys_of(name), pack_int(seq), QueueCounterDelta()
    item = items.load_item(txn, keys, packed_seq)
    index_key = _due_row(txn, keys, item, packed_seq, now_ns)
    if index_key is None:
        raise Conflict(queue=name, seq=seq, why="the item is not due, or it is claimed")
    if index_key.startswith(keys.delayed):
        delta.transition(ItemState.DELAYED, ItemEvent.DUE)
    delta.transition(ItemState.READY, ItemEvent.CLAIM)
    txn.delete(index_key)
    _complete_item(txn, keys, item, packed_seq, delta)
    delta.apply(txn, keys)


# -- inside --------------------------------------------------------------------------------------


class _DueItem(NamedTuple):
    keys: QueueKeys
    row: bytes
    packed_seq: bytes
    item: QueueItem
    now_ns: int
    delayed: bool


def _expire_and_find_due(txn: Txn, name: str, now_ns: int, limit: int) -> Iterator[_DueItem]:
    """Expire overdue claims of one queue, then iterate over its due items, most overdue first."""
    queue.expire_overdue.fn(txn, name, limit, _NO_LIMITS)
    return _find_due(txn, keys_of(name), now_ns, limit)


def _find_due(txn: Txn, keys: QueueKeys, now_ns: int, limit: int) -> Iterator[_DueItem]:
    ready = txn.scan(keys.ready, tuples.prefix_end(keys.ready), limit)
    until = keys.delayed + pack_int(now_ns + 1)
    due_rows = txn.scan(keys.delayed, until, limit - len(ready)) if len(ready) < limit else []
    for rows, delayed in ((ready, False), (due_rows, True)):
        for key, seq in rows:
            yield _DueItem(keys, key, seq, items.load_item(txn, keys, seq), now_ns, delayed)


def _due_row(
    txn: Txn, keys: QueueKeys, item: QueueItem, packed_seq: bytes, now_ns: int
) -> bytes | None:
    """Return the index key of the item, or None if it is not due."""
    ready = keys.ready_key(item.priority, item.fair_rank, packed_seq)
    if txn.get(ready) is not None:
        return ready
    delayed = keys.delayed + pack_int(item.not_before_ns) + packed_seq
    return delayed if item.not_before_ns <= now_ns and txn.get(delayed) is not None else None


def _due_order(due_item: _DueItem) -> tuple[int, int]:
    return due_item.item.fair_rank - due_item.now_ns, seq_of(due_item.packed_seq)


def _run_one(
    txn: Txn,
    due_item: _DueItem,
    delta: QueueCounterDelta,
    action: Operation[..., Any],
    args: tuple[Any, ...],
) -> None:
    keys, item, packed_seq = due_item.keys, due_item.item, due_item.packed_seq
    txn.delete(due_item.row)
    error = run_in_savepoint(txn, action, queue.payload_of(txn, item), *args)
    if error is not None:
        _record_failure(txn, due_item, error, delta)
        return
    _complete_item(txn, keys, item, packed_seq, delta)


def _complete_item(
    txn: Txn, keys: QueueKeys, item: QueueItem, packed_seq: bytes, delta: QueueCounterDelta
) -> None:
    txn.delete(keys.items + packed_seq)
    if item.blob:
        blobs.release(txn, item.blob)
    delta.transition(ItemState.CLAIMED, ItemEvent.ACK)


def _record_failure(
    txn: Txn, due_item: _DueItem, error: Exception, delta: QueueCounterDelta
) -> None:
    keys, item, packed_seq = due_item.keys, due_item.item, due_item.packed_seq
    code = error.code if isinstance(error, HoldfastError) else "failed"
    failures = item.failures + 1
    if not (isinstance(error, HoldfastError) and error.retryable):
        after = replace(item, failures=failures)
        dead_letters.write_letter(txn, keys, packed_seq, after, code, str(error) or repr(error))
        delta.transition(ItemState.CLAIMED, ItemEvent.BURY)
        return
    after = replace(
        item,
        failures=failures,
        code=code[:ERROR_CODE_CHARS_MAX],
        error=str(error)[:ERROR_TEXT_CHARS_MAX],
        not_before_ns=due_item.now_ns + RETRY_BACKOFF.delay_ns(failures, 0.0),
    )
    txn.put(keys.items + packed_seq, items.pack(after))
    txn.put(keys.delayed + pack_int(after.not_before_ns) + packed_seq, packed_seq)
    delta.transition(ItemState.CLAIMED, ItemEvent.DEFER)

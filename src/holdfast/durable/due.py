"""Items that wait for a time, and the end of their wait: taken, acted on and done in one commit.

For what needs nothing but the store, such as a timer that becomes a message. There is no moment
between taking and done in which a worker could die with it, so there are no claims, and whoever asks,
however many do, each item is acted on once.

- What is due is taken in the order of its times, over all queues that are worked off together, however
  long nobody asked.
- One whose act fails undoes its own writes alone. It waits and is tried again, or is a dead letter if
  trying again is of no use; the others are done.
- Times are of whatever clock the queue goes by: store time, or another whose reading is given.
- No call costs more for a longer backlog.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from holdfast.config import ERROR_CODE_CHARS_MAX, ERROR_TEXT_CHARS_MAX
from holdfast.durable import dead, queue
from holdfast.durable import item as items
from holdfast.durable.bounds import check_limit, check_time
from holdfast.durable.item import Event, Item, Keys, State, Tally, keys_of, pack_int, seq_of
from holdfast.durable.queue import Budget
from holdfast.errors import Conflict, HoldfastError
from holdfast.retry import Backoff
from holdfast.store import blobs, tuples
from holdfast.store.api import Operation, Txn
from holdfast.store.txn import attempt

# Between two tries of an act that failed.
AGAIN = Backoff()
# Claims of others (an older release had them) run out as often as they like.
_CERTAIN = Budget(failures_max=1 << 31, expiries_max=1 << 31)


def hang(txn: Txn, name: str, payload: bytes, due_ns: int, turn_ns: int) -> int:
    """Let an item wait for a time of the queue's clock; its seq.

    Those that are taken together come by `turn_ns`: for what waits again, the time it waited for
    first.
    """
    keys = keys_of(name)
    check_time("due_ns", due_ns)
    check_time("turn_ns", turn_ns)
    body = (*items.place(txn, payload), 0, None, "", "")
    [seq] = items.insert(txn, keys, [body], due_ns, turn=turn_ns, hung=True)
    return seq


def work_off(
    txn: Txn, clocks: Sequence[tuple[str, int]], act: Operation[..., Any], *args: Any, limit: int
) -> int:
    """Do `act(txn, payload, *args)` for what is due, up to `limit` in all; how many were taken.

    `clocks` are queues, each with what its clock shows. The longest overdue comes first, whichever
    queue it is in.
    """
    check_limit(limit)
    found = [one for name, now_ns in clocks for one in _found(txn, name, now_ns, limit)]
    found.sort(key=_place)
    taken = found[:limit]
    tallies = {name: Tally() for name, _ in clocks}
    for one in taken:
        tally = tallies[one.keys.queue]
        if one.delayed:
            tally.move(State.DELAYED, Event.DUE)
        tally.move(State.READY, Event.CLAIM)
        _take(txn, one, tally, act, args)
    for name, tally in tallies.items():
        tally.save(txn, keys_of(name))
    return len(taken)


def peek(txn: Txn, clocks: Sequence[tuple[str, int]], limit: int) -> list[tuple[str, int, bytes]]:
    """What `work_off` would take: queue, seq and payload of each, in its order."""
    check_limit(limit)
    found = [one for name, now_ns in clocks for one in _due(txn, keys_of(name), now_ns, limit)]
    found.sort(key=_place)
    return [
        (one.keys.queue, seq_of(one.packed_seq), queue.payload_of(txn, one.item))
        for one in found[:limit]
    ]


def is_due(txn: Txn, name: str, seq: int, now_ns: int) -> bool:
    """Whether an item waits no longer, and nobody has it."""
    keys, packed_seq = keys_of(name), pack_int(seq)
    if txn.get(keys.items + packed_seq) is None:
        return False
    item = items.load(txn, keys, packed_seq)
    return _row(txn, keys, item, packed_seq, now_ns) is not None


def end(txn: Txn, name: str, seq: int, now_ns: int) -> None:
    """Take one that is due, and was acted on: it is done."""
    keys, packed_seq, tally = keys_of(name), pack_int(seq), Tally()
    item = items.load(txn, keys, packed_seq)
    row = _row(txn, keys, item, packed_seq, now_ns)
    if row is None:
        raise Conflict(queue=name, seq=seq, why="not due, or taken")
    if row.startswith(keys.delayed):
        tally.move(State.DELAYED, Event.DUE)
    tally.move(State.READY, Event.CLAIM)
    txn.delete(row)
    _done(txn, keys, item, packed_seq, tally)
    tally.save(txn, keys)


# -- inside --------------------------------------------------------------------------------------


class _Due(NamedTuple):
    keys: Keys
    row: bytes
    packed_seq: bytes
    item: Item
    now_ns: int
    delayed: bool


def _found(txn: Txn, name: str, now_ns: int, limit: int) -> Iterator[_Due]:
    """What is due in one queue, the longest overdue of it."""
    queue.reap.fn(txn, name, limit, _CERTAIN)
    return _due(txn, keys_of(name), now_ns, limit)


def _due(txn: Txn, keys: Keys, now_ns: int, limit: int) -> Iterator[_Due]:
    ready = txn.scan(keys.ready, tuples.after(keys.ready), limit)
    until = keys.delayed + pack_int(now_ns + 1)
    due = txn.scan(keys.delayed, until, limit - len(ready)) if len(ready) < limit else []
    for rows, delayed in ((ready, False), (due, True)):
        for key, seq in rows:
            yield _Due(keys, key, seq, items.load(txn, keys, seq), now_ns, delayed)


def _row(txn: Txn, keys: Keys, item: Item, packed_seq: bytes, now_ns: int) -> bytes | None:
    """Where it stands in line, if it is due."""
    ready = keys.ready_key(item.priority, item.turn, packed_seq)
    if txn.get(ready) is not None:
        return ready
    delayed = keys.delayed + pack_int(item.not_before_ns) + packed_seq
    return delayed if item.not_before_ns <= now_ns and txn.get(delayed) is not None else None


def _place(one: _Due) -> tuple[int, int]:
    return one.item.turn - one.now_ns, seq_of(one.packed_seq)


def _take(
    txn: Txn, one: _Due, tally: Tally, act: Operation[..., Any], args: tuple[Any, ...]
) -> None:
    keys, item, packed_seq = one.keys, one.item, one.packed_seq
    txn.delete(one.row)
    raised = attempt(txn, act, queue.payload_of(txn, item), *args)
    if raised is not None:
        _fail(txn, one, raised, tally)
        return
    _done(txn, keys, item, packed_seq, tally)


def _done(txn: Txn, keys: Keys, item: Item, packed_seq: bytes, tally: Tally) -> None:
    txn.delete(keys.items + packed_seq)
    if item.blob:
        blobs.release(txn, item.blob)
    tally.move(State.CLAIMED, Event.ACK)


def _fail(txn: Txn, one: _Due, raised: Exception, tally: Tally) -> None:
    keys, item, packed_seq = one.keys, one.item, one.packed_seq
    code = raised.code if isinstance(raised, HoldfastError) else "failed"
    failures = item.failures + 1
    if not (isinstance(raised, HoldfastError) and raised.retryable):
        after = replace(item, failures=failures)
        dead.inter(txn, keys, packed_seq, after, code, str(raised) or repr(raised))
        tally.move(State.CLAIMED, Event.BURY)
        return
    after = replace(
        item,
        failures=failures,
        code=code[:ERROR_CODE_CHARS_MAX],
        error=str(raised)[:ERROR_TEXT_CHARS_MAX],
        not_before_ns=one.now_ns + AGAIN.delay_ns(failures, 0.0),
    )
    txn.put(keys.items + packed_seq, items.pack(after))
    txn.put(keys.delayed + pack_int(after.not_before_ns) + packed_seq, packed_seq)
    tally.move(State.CLAIMED, Event.DEFER)

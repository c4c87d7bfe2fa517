"""Items that wait for a time, and the end of their wait: taken, acted on and done in one commit.

For what needs nothing but the store, such as a timer that becomes a message. There is no moment
between taking and done in which a worker could die with it, so there are no claims, and whoever asks,
however many do, each item is acted on once.

- What is due is taken in the order of its times, however long nobody asked.
- One whose act fails undoes its own writes alone. It waits and is tried again, or is a dead letter if
  trying again is of no use; the others are done.
- Times are of whatever clock the queue goes by: store time, or another whose reading is given.
- No call costs more for a longer backlog.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from holdfast.config import ERROR_CODE_CHARS_MAX, ERROR_TEXT_CHARS_MAX
from holdfast.durable import dead, queue
from holdfast.durable import item as items
from holdfast.durable.bounds import check_limit, check_time
from holdfast.durable.item import Event, Item, Keys, State, Tally, keys_of, pack_int, seq_of
from holdfast.durable.queue import Budget
from holdfast.errors import HoldfastError
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
    txn: Txn, name: str, act: Operation[..., Any], *args: Any, limit: int, now_ns: int
) -> int:
    """Do `act(txn, payload, *args)` for each item that is due by `now_ns`; how many were taken."""
    keys = keys_of(name)
    check_limit(limit)
    queue.reap.fn(txn, name, limit, _CERTAIN)
    ready = txn.scan(keys.ready, tuples.after(keys.ready), limit)
    until = keys.delayed + pack_int(now_ns + 1)
    due = txn.scan(keys.delayed, until, limit - len(ready)) if len(ready) < limit else []
    tally = Tally()
    done = 0
    taken = [(items.load(txn, keys, seq), key, seq) for key, seq in [*ready, *due]]
    for item, key, packed_seq in sorted(taken, key=_turn):
        txn.delete(key)
        raised = attempt(txn, act, queue.payload_of(txn, item), *args)
        if raised is None:
            txn.delete(keys.items + packed_seq)
            if item.blob:
                blobs.release(txn, item.blob)
            done += 1
        else:
            _fail(txn, keys, packed_seq, item, raised, now_ns, tally)
    if due:
        tally.move(State.DELAYED, Event.DUE, len(due))
    if ready or due:
        tally.move(State.READY, Event.CLAIM, len(ready) + len(due))
        tally.move(State.CLAIMED, Event.ACK, done)
    tally.save(txn, keys)
    return len(ready) + len(due)


def _turn(taken: tuple[Item, bytes, bytes]) -> tuple[int, int]:
    return taken[0].turn, seq_of(taken[2])


def _fail(
    txn: Txn,
    keys: Keys,
    packed_seq: bytes,
    item: Item,
    raised: Exception,
    now_ns: int,
    tally: Tally,
) -> None:
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
        not_before_ns=now_ns + AGAIN.delay_ns(failures, 0.0),
    )
    txn.put(keys.items + packed_seq, items.pack(after))
    txn.put(keys.delayed + pack_int(after.not_before_ns) + packed_seq, packed_seq)
    tally.move(State.CLAIMED, Event.DEFER)

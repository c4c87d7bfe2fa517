"""Dead letters: items that exhausted their retries or were rejected, with their full history.

A dead letter has the seq of its item. Seqs are never reused and an item dies once, so one dead letter
never overwrites another. It stays until it is purged or redriven. A redrive removes it and inserts a new
item that references it in one transaction, so a crash leaves exactly one of the two.

An item may name an `on_dead` operation. It runs with the dead letter in the commit that writes the
letter, whether the item failed, expired or was rejected. So the callback runs exactly once per death.
"""

from __future__ import annotations

import contextlib

from holdfast import codec
from holdfast.codec import Record
from holdfast.config import ERROR_CODE_CHARS_MAX, ERROR_TEXT_CHARS_MAX
from holdfast.durable import error_groups
from holdfast.durable import item as items
from holdfast.durable.item import (
    FailedAttempt,
    ItemState,
    QueueCounterDelta,
    QueueItem,
    QueueKeys,
    keys_of,
    pack,
    pack_int,
    seq_of,
)
from holdfast.durable.validation import check_limit, check_time
from holdfast.errors import HoldfastError, Invalid, NotFound
from holdfast.store import blobs, schema, tuples
from holdfast.store.api import Txn, find_operation, operation
from holdfast.store.txn import run_in_savepoint


class DeadLetter(Record, frozen=True):
    queue: str
    seq: int
    payload: bytes
    code: str
    error: str
    failures: int
    expiries: int
    claims: int
    priority: int
    enqueued_ns: int
    not_before_ns: int
    died_ns: int
    owner: str
    redrive_of: int | None = None
    blob: bytes = b""
    group: str = ""
    on_dead: str = ""
    failed_attempts: tuple[FailedAttempt, ...] = ()


@operation("queue.add_dead_letter")
def add_dead_letter(
    txn: Txn, queue: str, payload: bytes, code: str, error: str, owner: str = ""
) -> int:
    """Append a dead letter for a failure outside the queue. A redrive turns it into an item of the queue."""
    if not code:
        raise Invalid(what="code", why="a dead letter needs a code")
    keys = keys_of(queue)
    seq = txn.count(keys.last_seq) + 1
    txn.put(keys.last_seq, schema.encode_int(seq))
    body, blob = items.inline_or_blob(txn, payload)
    item = QueueItem(body, blob, 0, txn.now_ns, failures=1, owner=owner)
    _store_letter(txn, keys, pack_int(seq), item, code, error)
    delta = QueueCounterDelta()
    delta.add(ItemState.DEAD, 1)
    delta.apply(txn, keys)
    return seq


@operation("queue.add_death_notice")
def add_death_notice(txn: Txn, letter: DeadLetter) -> None:
    """An `on_dead` operation: put the error code into the queue `<queue>/notices`."""
    keys = keys_of(f"{letter.queue}/notices")
    items.insert(txn, keys, [(letter.code.encode(), b"", 0, None, "", "")], not_before_ns=0)


@operation("queue.redrive")
def redrive(txn: Txn, queue: str, seqs: list[int]) -> list[int]:
    """Replace dead letters by new items with reset counters and return their seqs. All or none."""
    keys = keys_of(queue)
    check_limit(len(seqs), "seqs")
    letters = [_remove_letter(txn, keys, seq) for seq in seqs]
    _decrement_count(txn, keys, len(letters))
    bodies = [
        (letter.payload, letter.blob, letter.priority, letter.seq, letter.group, letter.on_dead)
        for letter in letters
    ]
    return items.insert(txn, keys, bodies, not_before_ns=0)


@operation("queue.discard_dead")
def discard_dead(txn: Txn, queue: str, seqs: list[int]) -> None:
    """Remove dead letters by seq. All or none."""
    keys = keys_of(queue)
    check_limit(len(seqs), "seqs")
    for letter in [_remove_letter(txn, keys, seq) for seq in seqs]:
        if letter.blob:
            blobs.release(txn, letter.blob)
    _decrement_count(txn, keys, len(seqs))


@operation("queue.purge_dead")
def purge_dead(txn: Txn, queue: str, before_ns: int, limit: int) -> int:
    """Remove dead letters older than a time, oldest first, and return their number."""
    keys = keys_of(queue)
    check_time("before_ns", before_ns)
    check_limit(limit)
    rows = txn.scan(keys.dead_by_time, keys.dead_by_time + pack_int(before_ns), limit)
    for _, packed_seq in rows:
        letter = _remove_letter(txn, keys, seq_of(packed_seq))
        if letter.blob:
            blobs.release(txn, letter.blob)
    _decrement_count(txn, keys, len(rows))
    return len(rows)


def list_dead(txn: Txn, queue: str, after_seq: int = 0, limit: int = 100) -> list[DeadLetter]:
    """List dead letters by seq. `queue.payload_of` fetches a payload that is stored as a blob."""
    keys = keys_of(queue)
    check_limit(limit)
    rows = txn.scan(keys.dead + pack_int(after_seq + 1), tuples.prefix_end(keys.dead), limit)
    return [_decode_letter(row) for _, row in rows]


def write_letter(
    txn: Txn, keys: QueueKeys, packed_seq: bytes, item: QueueItem, code: str, error: str
) -> None:
    """Replace an item by its dead letter. The caller updates the counters and, for an unclaimed item,
    removes its index row."""
    if item.expires_ns:
        items.delete_claim(txn, keys, item, packed_seq)
    txn.delete(keys.items + packed_seq)
    letter = _store_letter(txn, keys, packed_seq, item, code, error)
    if letter.on_dead:
        # A failing `on_dead` operation must not prevent the dead letter.
        with contextlib.suppress(HoldfastError):
            run_in_savepoint(txn, find_operation(letter.on_dead), letter)


def _store_letter(
    txn: Txn, keys: QueueKeys, packed_seq: bytes, item: QueueItem, code: str, error: str
) -> DeadLetter:
    letter = DeadLetter(
        queue=keys.queue,
        seq=seq_of(packed_seq),
        payload=item.payload,
        code=code[:ERROR_CODE_CHARS_MAX],
        error=error[:ERROR_TEXT_CHARS_MAX],
        failures=item.failures,
        expiries=item.expiries,
        claims=item.claims,
        priority=item.priority,
        enqueued_ns=item.enqueued_ns,
        not_before_ns=item.not_before_ns,
        died_ns=txn.now_ns,
        owner=item.owner,
        redrive_of=item.redrive_of,
        blob=item.blob,
        group=item.group,
        on_dead=item.on_dead,
        failed_attempts=item.failed_attempts,
    )
    txn.put(keys.dead + packed_seq, pack(letter))
    txn.put(keys.dead_by_time + pack_int(letter.died_ns) + packed_seq, packed_seq)
    if universe := universe_of(keys.queue):
        error_groups.add(txn, universe, error_groups.DEAD, *grouped(letter))
    return letter


def _remove_letter(txn: Txn, keys: QueueKeys, seq: int) -> DeadLetter:
    """Read and remove a letter in one step, so that a duplicate seq in one call raises NotFound."""
    if seq < 1:
        raise Invalid(what="seq", why="sequence numbers start at 1", found=seq)
    packed_seq = pack_int(seq)
    row = txn.get(keys.dead + packed_seq)
    if row is None:
        raise NotFound(what="dead letter", queue=keys.queue, seq=seq)
    letter = _decode_letter(row)
    txn.delete(keys.dead + packed_seq)
    txn.delete(keys.dead_by_time + pack_int(letter.died_ns) + packed_seq)
    if universe := universe_of(keys.queue):
        error_groups.remove(txn, universe, error_groups.DEAD, *grouped(letter))
    return letter


def universe_of(queue: str) -> str:
    """The universe of a queue, or "" for a queue that an application named itself."""
    universe, slash, _ = queue.partition("/")
    return universe if slash else ""


def grouped(letter: DeadLetter) -> tuple[str, int, tuple[str, int]]:
    """The text of the error group of a letter, its time, and its queue without the universe with its seq."""
    text = error_groups.group_text(letter.code, letter.error)
    return text, letter.died_ns, (letter.queue.partition("/")[2], letter.seq)


def _decrement_count(txn: Txn, keys: QueueKeys, count: int) -> None:
    delta = QueueCounterDelta()
    delta.add(ItemState.DEAD, -count)
    delta.apply(txn, keys)


_decode_letter = codec.decoder(DeadLetter).decode

"""Dead letters: what a queue gave up on, with everything that was known.

A dead letter has the seq of its item. A seq is never given twice and an item dies once, so none
ever overwrites another. It stays until it is purged, or redriven: then the same transaction removes
it and puts a new item in its place that names it, so a crash leaves one or the other, never both.

An item may have a will: an operation that is given the dead letter, in the commit that makes it,
whether the item failed, expired or was buried. So whoever must hear of a death always does, once.
"""

from __future__ import annotations

import contextlib

from holdfast import codec
from holdfast.codec import Record
from holdfast.config import ERROR_CODE_CHARS_MAX, ERROR_TEXT_CHARS_MAX
from holdfast.durable import item as items
from holdfast.durable.bounds import check_limit, check_time
from holdfast.durable.item import Item, Keys, State, Tally, Tried, keys_of, pack, pack_int, seq_of
from holdfast.errors import HoldfastError, Invalid, NotFound
from holdfast.store import blobs, schema, tuples
from holdfast.store.api import Txn, operation, resolve
from holdfast.store.txn import attempt


class Dead(Record, frozen=True):
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
    will: str = ""
    tried: tuple[Tried, ...] = ()


@operation
def post_dead(txn: Txn, queue: str, payload: bytes, code: str, error: str, owner: str = "") -> int:
    """A dead letter for what failed outside the queue; redriven, it becomes an item of it."""
    if not code:
        raise Invalid(what="code", why="a dead letter has a code")
    keys = keys_of(queue)
    seq = txn.count(keys.last_seq) + 1
    txn.put(keys.last_seq, schema.int_bytes(seq))
    body, blob = items.place(txn, payload)
    item = Item(body, blob, 0, txn.now_ns, failures=1, owner=owner)
    _keep(txn, keys, pack_int(seq), item, code, error)
    tally = Tally()
    tally.enter(State.DEAD, 1)
    tally.save(txn, keys)
    return seq


@operation
def post_notice(txn: Txn, letter: Dead) -> None:
    """A will: put the code of a death into the queue of notices beside the letter's own."""
    keys = keys_of(f"{letter.queue}/notices")
    items.insert(txn, keys, [(letter.code.encode(), b"", 0, None, "", "")], not_before_ns=0)


@operation
def redrive(txn: Txn, queue: str, seqs: list[int]) -> list[int]:
    """Turn dead letters into new items, with fresh counts; their seqs. All or none."""
    keys = keys_of(queue)
    check_limit(len(seqs), "seqs")
    letters = [_take(txn, keys, seq) for seq in seqs]
    _forget(txn, keys, len(letters))
    bodies = [(o.payload, o.blob, o.priority, o.seq, o.group, o.will) for o in letters]
    return items.insert(txn, keys, bodies, not_before_ns=0)


@operation
def discard_dead(txn: Txn, queue: str, seqs: list[int]) -> None:
    """Remove dead letters by number. All or none."""
    keys = keys_of(queue)
    check_limit(len(seqs), "seqs")
    for letter in [_take(txn, keys, seq) for seq in seqs]:
        if letter.blob:
            blobs.release(txn, letter.blob)
    _forget(txn, keys, len(seqs))


@operation
def purge_dead(txn: Txn, queue: str, before_ns: int, limit: int) -> int:
    """Remove dead letters that died before a time, oldest first; how many."""
    keys = keys_of(queue)
    check_time("before_ns", before_ns)
    check_limit(limit)
    rows = txn.scan(keys.died, keys.died + pack_int(before_ns), limit)
    for _, packed_seq in rows:
        letter = _take(txn, keys, seq_of(packed_seq))
        if letter.blob:
            blobs.release(txn, letter.blob)
    _forget(txn, keys, len(rows))
    return len(rows)


def dead(txn: Txn, queue: str, after_seq: int = 0, limit: int = 100) -> list[Dead]:
    """Dead letters by seq. `queue.payload_of` fetches a payload that is too large for the row."""
    keys = keys_of(queue)
    check_limit(limit)
    rows = txn.scan(keys.dead + pack_int(after_seq + 1), tuples.after(keys.dead), limit)
    return [_decode(row) for _, row in rows]


def inter(txn: Txn, keys: Keys, packed_seq: bytes, item: Item, code: str, error: str) -> None:
    """Replace an item by its dead letter. The caller moves the counters, and clears what index
    an unclaimed one is in."""
    if item.expires_ns:
        items.drop_claim(txn, keys, item, packed_seq)
    txn.delete(keys.items + packed_seq)
    letter = _keep(txn, keys, packed_seq, item, code, error)
    if letter.will:
        # A will that cannot be executed must not keep the item from being buried.
        with contextlib.suppress(HoldfastError):
            attempt(txn, resolve(letter.will), letter)


def _keep(txn: Txn, keys: Keys, packed_seq: bytes, item: Item, code: str, error: str) -> Dead:
    letter = Dead(
        keys.queue,
        seq_of(packed_seq),
        item.payload,
        code[:ERROR_CODE_CHARS_MAX],
        error[:ERROR_TEXT_CHARS_MAX],
        item.failures,
        item.expiries,
        item.claims,
        item.priority,
        item.enqueued_ns,
        item.not_before_ns,
        txn.now_ns,
        item.owner,
        item.redrive_of,
        item.blob,
        item.group,
        item.will,
        item.tried,
    )
    txn.put(keys.dead + packed_seq, pack(letter))
    txn.put(keys.died + pack_int(letter.died_ns) + packed_seq, packed_seq)
    return letter


def _take(txn: Txn, keys: Keys, seq: int) -> Dead:
    """Read and remove, at once: named twice, a letter is not there the second time."""
    if seq < 1:
        raise Invalid(what="seq", why="sequence numbers start at 1", found=seq)
    packed_seq = pack_int(seq)
    row = txn.get(keys.dead + packed_seq)
    if row is None:
        raise NotFound(what="dead letter", queue=keys.queue, seq=seq)
    letter = _decode(row)
    txn.delete(keys.dead + packed_seq)
    txn.delete(keys.died + pack_int(letter.died_ns) + packed_seq)
    return letter


def _forget(txn: Txn, keys: Keys, n: int) -> None:
    tally = Tally()
    tally.enter(State.DEAD, -n)
    tally.save(txn, keys)


_decode = codec.decoder(Dead).decode

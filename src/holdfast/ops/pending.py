"""What worlds want and have not got yet: effects by kind and by intent, timers by their time."""

from __future__ import annotations

from typing import NamedTuple

from holdfast import codec
from holdfast.durable import item as items
from holdfast.durable import queue
from holdfast.durable.bounds import check_limit
from holdfast.durable.item import Item, keys_of, pack_int, seq_of
from holdfast.errors import Invalid, NotFound
from holdfast.messages import Intent, TimerSet
from holdfast.ops import inventory
from holdfast.store import tuples
from holdfast.store.api import Txn
from holdfast.store.schema import Space
from holdfast.world import catalog, publish


class KindRow(NamedTuple):
    universe: str
    kind: str
    counts: queue.Counts


class EffectRow(NamedTuple):
    """One intent, and where it is: ready, delayed, claimed, dead, or done."""

    universe: str
    intent_hash: bytes
    dispatched: publish.Dispatched
    state: str
    world: str
    item: Item | None = None
    letter: queue.Dead | None = None


class TimerRow(NamedTuple):
    universe: str
    world: str
    due_ns: int
    intent: Intent
    timer: TimerSet


def kinds(txn: Txn, universe: str | None = None, kind: str | None = None) -> list[KindRow]:
    """Queues of effects, by universe and kind: one seek for each queue that there is."""
    found = []
    for name in inventory.names_after(txn, (int(Space.QUEUE),)):
        where, _, what = name.partition("/effects/")
        if what and universe in (None, where) and kind in (None, what):
            found.append(KindRow(where, what, queue.counts(txn, name)))
    return found


def effect_queue(name: str) -> tuple[str, str] | None:
    """(universe, kind) of a queue of effects; None for another queue."""
    universe, _, kind = name.partition("/effects/")
    return (universe, kind) if universe and kind and "/" not in universe else None


def effect(txn: Txn, intent_hash: str, universe: str | None = None) -> EffectRow:
    """An intent by its hash, in hexadecimal."""
    try:
        raw = bytes.fromhex(intent_hash)
    except ValueError:
        raise Invalid(what="intent", found=intent_hash[:80], expected="hexadecimal") from None
    for where in inventory.universes(txn) if universe is None else [universe]:
        known = publish.dispatched(txn, where, raw) if raw else None
        if known is not None:
            return _effect(txn, where, raw, known)
    raise NotFound(what="intent", found=intent_hash[:80], why="never dispatched, or long ago")


def timers(txn: Txn, universe: str | None = None, limit: int = 100) -> list[TimerRow]:
    """Pending timers, the next one first."""
    check_limit(limit)
    found: list[TimerRow] = []
    for where in inventory.universes(txn) if universe is None else [universe]:
        keys = keys_of(publish.timers(where))
        rows = txn.scan(keys.ready, tuples.after(keys.ready), limit)
        rows += txn.scan(keys.delayed, tuples.after(keys.delayed), limit)
        found += [_timer(txn, where, items.load(txn, keys, packed)) for _, packed in rows]
    return sorted(found, key=lambda row: row.due_ns)[:limit]


def timer(txn: Txn, world: str, key: str, universe: str | None = None) -> TimerRow:
    """What a world's timer key holds."""
    record = inventory.resolve(txn, world, universe)
    slot = publish.slot(txn, record.universe, record.world_id, key)
    if slot is None:
        raise NotFound(what="timer", world=world, key=key)
    keys = keys_of(publish.timers(record.universe))
    return _timer(txn, record.universe, items.load(txn, keys, pack_int(slot.seq)))


# -- inside --------------------------------------------------------------------------------------


def _effect(txn: Txn, universe: str, raw: bytes, known: publish.Dispatched) -> EffectRow:
    name = publish.effects(universe, known.effect_kind)
    keys = keys_of(name)
    packed = pack_int(known.seq)
    world = _world(txn, universe, known.world_id)
    row = txn.get(keys.items + packed)
    if row is None:
        letters = queue.dead(txn, name, known.seq - 1, 1)
        letter = letters[0] if letters and letters[0].seq == seq_of(packed) else None
        state = "done" if letter is None else "dead"
        return EffectRow(universe, raw, known, state, world, letter=letter)
    item = items.decode(row)
    ready = txn.get(keys.ready_key(item.priority, item.turn, packed)) is not None
    state = "claimed" if item.expires_ns else "ready" if ready else "delayed"
    return EffectRow(universe, raw, known, state, world, item)


def _timer(txn: Txn, universe: str, item: Item) -> TimerRow:
    intent = codec.unpack_as(Intent, queue.payload_of(txn, item))
    timer = codec.unpack_as(TimerSet, intent.params)
    return TimerRow(
        universe, _world(txn, universe, intent.world_id), item.not_before_ns, intent, timer
    )


def _world(txn: Txn, universe: str, world_id: str) -> str:
    try:
        record = catalog.record(txn, universe, world_id)
    except NotFound:
        return world_id
    return f"{record.type}/{record.name}"

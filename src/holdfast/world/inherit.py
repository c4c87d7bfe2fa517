"""What a fork takes over of its parent's wishes: effects without a receipt, timers that wait.

    effects   drop      they stay the parent's alone (the default)
              fail      each is answered in the child with the error `dropped_by_fork`
              reissue   each is wanted anew, by the child, under an identity of its own; its receipt
                        names the parent's intent as `redrive_of`
    timers    drop      (the default)
              keep      each is hung for the child, for when the parent's is due; what was due, at once

What counts is what was open after the entry that is forked at. Entries keep hashes of what they
emitted, not the intents, so these are found by repeating the journal from its beginning: a world
whose journal no longer reaches back is refused.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from holdfast import codec
from holdfast.config import SCAN_PAGE
from holdfast.durable import item as items
from holdfast.durable import journal, queue, snapshot
from holdfast.errors import Invalid, KeyConflict
from holdfast.messages import (
    EFFECT_CANCEL,
    RESERVED,
    TIMER_CANCEL,
    TIMER_SET,
    Ingress,
    Intent,
    Kind,
    Receipt,
    Status,
    TimerSet,
    intent_hash,
    receipt_ingress,
)
from holdfast.store.api import Txn, operation
from holdfast.world import entry, every, kernel, publish
from holdfast.world import timers as slots
from holdfast.world.catalog import subject_of
from holdfast.world.ingress import deliver_to
from holdfast.world.kernel import World

EFFECT_POLICIES = ("drop", "fail", "reissue")
TIMER_POLICIES = ("drop", "keep")
CODE = "dropped_by_fork"


class Open(NamedTuple):
    """What a world wanted and had not got, after an entry: effects, and timers by their slot."""

    effects: list[Intent]
    timers: list[Intent]


def check_policies(effects: str, timers: str) -> None:
    if effects not in EFFECT_POLICIES:
        raise Invalid(what="effects", found=effects, expected=list(EFFECT_POLICIES))
    if timers not in TIMER_POLICIES:
        raise Invalid(what="timers", found=timers, expected=list(TIMER_POLICIES))


def open_after(txn: Txn, world: World, height: int) -> Open:
    """Repeat the journal up to an entry and keep what was not answered, fired or cancelled by then."""
    subject = subject_of(world.universe, world.world_id)
    head = journal.head(txn, subject)
    if head.floor == 1:
        state, at = world.program.initial(), 0
    elif head.floor - 1 in snapshot.heights(txn, subject, SCAN_PAGE):
        # It was forked itself: what lies below is its parent's.
        at = head.floor - 1
        state = world.program.load(snapshot.load(txn, subject, at))
    else:
        raise Invalid(what="fork", why="the journal does not reach back", floor=head.floor)
    effects: dict[bytes, Intent] = {}
    timers: dict[str, Intent] = {}
    # A key is dispatched once: wanted again, it is no new wish.
    known: set[bytes] = set()
    while at < height:
        for found in journal.read(txn, subject, at + 1, height + 1, SCAN_PAGE):
            at = found.height
            step = entry.decode(found.body)
            _got(step.ingress, effects, timers)
            emitted: list[Intent] = []
            state = kernel.repeat(world, state, step, height=at, emitted=emitted)
            for intent in emitted:
                if intent.intent_hash not in known:
                    _want(intent, effects, timers, at_ns=found.at_ns)
                known.add(intent.intent_hash)
    return Open(list(effects.values()), list(timers.values()))


@operation
def bequeath(
    txn: Txn, child_id: str, name: str, policy: str, effects: list[Intent], timers: list[Intent]
) -> None:
    """Give a child what it takes over, in the commit that makes it."""
    for intent in effects:
        if policy == "reissue":
            publish.dispatch(txn, _anew(txn, intent, child_id, name))
        else:
            told = Receipt(
                intent.intent_hash,
                intent.effect_kind,
                Status.ERROR,
                code=CODE,
                error="the world was forked before its receipt came",
                attempts=0,
                tag=intent.tag,
            )
            ingress = receipt_ingress(told, correlation_id=intent.correlation_id)
            deliver_to(txn, intent.universe_id, child_id, None, ingress)
    for intent in timers:
        slot = codec.unpack_as(TimerSet, intent.params).key
        pending, due_ns, on_calendar = _due(txn, intent, slot)
        again = _anew(txn, pending, child_id, name)
        slots.hang(txn, again, slot, due_ns, on_calendar=on_calendar)


# -- inside --------------------------------------------------------------------------------------


def _got(ingress: Ingress, effects: dict[bytes, Intent], timers: dict[str, Intent]) -> None:
    kind, named = ingress.kind, ingress.intent_hash
    if named is None:
        return
    if kind is Kind.RECEIPT and codec.unpack_as(Receipt, ingress.value).code == KeyConflict.code:
        return  # it tells of another use of the key, not of the effect
    if kind is Kind.RECEIPT:
        effects.pop(named, None)
    elif kind is Kind.TIMER:
        for slot, intent in list(timers.items()):
            # A timer that repeats is not over when it fires, and its firings have other names.
            if intent.intent_hash == named and not codec.unpack_as(TimerSet, intent.params).cron:
                del timers[slot]


def _want(
    intent: Intent, effects: dict[bytes, Intent], timers: dict[str, Intent], *, at_ns: int
) -> None:
    if intent.effect_kind == TIMER_SET:
        timer = codec.unpack_as(TimerSet, intent.params)
        # A delay counts by store time, from when its entry was made.
        timers[timer.key] = intent if timer.cron else replace(intent, enqueued_at_ns=at_ns)
    elif intent.effect_kind == TIMER_CANCEL:
        timers.pop(codec.unpack(intent.params), None)
    elif intent.effect_kind == EFFECT_CANCEL:
        # Its world has stopped wanting it, whether the receipt that says so came or not.
        effects.pop(intent.params, None)
    elif intent.effect_kind not in RESERVED:
        effects.setdefault(intent.intent_hash, intent)


def _anew(txn: Txn, intent: Intent, child_id: str, name: str) -> Intent:
    """The same wish, of the child. Under its user's key it is what the child would want itself."""
    if intent.key is None:
        identity = codec.digest(b"fork", child_id.encode(), intent.intent_hash)
    else:
        identity = intent_hash(intent.generation, child_id, intent.key)
    return replace(
        intent,
        world_id=child_id,
        origin_name=name,
        intent_hash=identity,
        enqueued_at_ns=txn.now_ns,
        redrive_of=intent.intent_hash,
    )


def _due(txn: Txn, intent: Intent, slot: str) -> tuple[Intent, int, bool]:
    """The timer as it waits now, until when, and whether by the calendar: as the parent's does, if
    that still waits."""
    timer = codec.unpack_as(TimerSet, intent.params)
    held = slots.slot(txn, intent.universe_id, intent.world_id, slot)
    if held is not None and (timer.cron or held.intent_hash == intent.intent_hash):
        keys = items.keys_of(held.queue(intent.universe_id))
        row = txn.get(keys.items + items.pack_int(held.seq))
        if row is not None:
            item = items.decode(row)
            stored = codec.unpack_as(Intent, queue.payload_of(txn, item))
            # Occurrences have other names, but the birth of the timer that was set: what lies in the
            # slot may be another's, set since.
            if _birth(stored) == _birth(intent):
                return stored, item.not_before_ns, held.calendar
    if timer.cron:
        intent, at_ns = every.first(replace(intent, enqueued_at_ns=txn.now_ns), timer)
        return intent, at_ns, True
    if timer.wall_ns is not None:
        return intent, timer.wall_ns, True
    return intent, max(intent.enqueued_at_ns + (timer.delay_ns or 0), txn.now_ns), False


def _birth(intent: Intent) -> tuple[int, int]:
    return intent.generation, intent.from_height

"""What a fork takes over of its parent's wishes: effects without a receipt, timers that wait.

    effects   drop      they stay the parent's alone (the default)
              fail      each is answered in the child with the error `dropped_by_fork`
              reissue   each is wanted anew, by the child, under an identity of its own; its receipt
                        names the parent's intent as `redrive_of`
    timers    drop      (the default)
              keep      each is hung for the child, for when the parent's is due; what was due, at once

What counts is what was open after the entry that is forked at. Entries keep hashes of what they
emitted, not the intents, so these are found by repeating the journal from its beginning: a world
whose journal no longer reaches back is refused. A fork begins with what it was given: that is kept,
as it became the child's, so that forks of forks find it (`Heirloom`).

What had its answer without a worker (`world.answers`) and had not read it yet is answered so in the
child, too, unless it drops all. Identities are those that the child remembers, its parent's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from msgspec.structs import replace

from holdfast import codec
from holdfast.codec import Record
from holdfast.config import SCAN_PAGE
from holdfast.durable import item as items
from holdfast.durable import journal, queue
from holdfast.errors import Invalid, NotFound
from holdfast.messages import (
    EFFECT_CANCEL,
    RESERVED,
    TIMER_CANCEL,
    TIMER_SET,
    Ingress,
    Intent,
    Kind,
    TimerSet,
    keyed_hash,
)
from holdfast.store import schema, tuples
from holdfast.store.api import Txn, operation
from holdfast.world import answers, catalog, entry, every, kernel, publish
from holdfast.world import timers as slots
from holdfast.world.catalog import subject_of
from holdfast.world.ingress import deliver_to
from holdfast.world.kernel import World
from holdfast.world.restore import load_snapshot

EFFECT_POLICIES = ("drop", "fail", "reissue")
TIMER_POLICIES = ("drop", "keep")


class Open(NamedTuple):
    """What a world wanted and had not got, after an entry."""

    effects: tuple[Intent, ...] = ()
    timers: tuple[Intent, ...] = ()
    # Receipts that were certain, and that it had not read.
    answers: tuple[Ingress, ...] = ()
    # By which other names it knows effects: those of its own parent's.
    names: tuple[tuple[bytes, bytes], ...] = ()


class Heirloom(Record, frozen=True):
    """One thing that a fork was given: a wish, now its own, or a receipt."""

    intent: Intent | None = None
    answer: Ingress | None = None
    # The wish has these names in the state that was forked.
    known_as: tuple[bytes, ...] = ()


def check_policies(effects: str, timers: str) -> None:
    if effects not in EFFECT_POLICIES:
        raise Invalid(what="effects", found=effects, expected=list(EFFECT_POLICIES))
    if timers not in TIMER_POLICIES:
        raise Invalid(what="timers", found=timers, expected=list(TIMER_POLICIES))


def open_after(txn: Txn, world: World, height: int) -> Open:
    """Repeat the journal up to an entry and keep what was not answered, fired or cancelled by then."""
    subject = subject_of(world.universe, world.world_id)
    state, at = _root(txn, world, subject)
    wishes = _Wishes(_heirlooms(txn, world.universe, world.world_id))
    while at < height:
        for found in journal.read(txn, subject, at + 1, height + 1, SCAN_PAGE):
            at = found.height
            step = entry.decode(found.body)
            wishes.got(step.ingress)
            emitted: list[Intent] = []
            state = kernel.repeat(world, state, step, height=at, emitted=emitted)
            for intent in emitted:
                wishes.want(intent, at_ns=found.at_ns)
    return wishes.open()


@operation
def bequeath(txn: Txn, universe: str, child_id: str, name: str, policy: str, wishes: Open) -> None:
    """Give a child what it takes over, in the commit that makes it."""
    given: list[Heirloom] = []
    for intent in wishes.effects:
        if policy == "reissue":
            again = _anew(txn, intent, child_id, name)
            known_as = [known for known, named in wishes.names if named == intent.intent_hash]
            known_as.append(intent.intent_hash)
            publish.dispatch(txn, again)
            publish.know(txn, again, known_as)
            given.append(Heirloom(again, known_as=tuple(known_as)))
        else:
            given.append(Heirloom(answer=answers.dropped(intent)))
    given += [Heirloom(answer=answer) for answer in wishes.answers]
    for one in given:
        if one.answer is not None:
            deliver_to(txn, universe, child_id, None, one.answer)
    for intent in wishes.timers:
        timer = codec.unpack_as(TimerSet, intent.params)
        pending, due_ns, on_calendar = _due(txn, intent, timer)
        again = _anew(txn, pending, child_id, name)
        slots.hang(txn, again, timer.key, due_ns, on_calendar=on_calendar)
        # A delay counts from when it was set, whoever asks when it was due.
        set_ns = due_ns - (timer.delay_ns or 0)
        given.append(Heirloom(again if on_calendar else replace(again, enqueued_at_ns=set_ns)))
    prefix = _heirlooms_of(universe, child_id)
    for n, one in enumerate(given):
        txn.put(prefix + tuples.pack_int(n), codec.pack(one))


# -- inside --------------------------------------------------------------------------------------


class _Wishes:
    """What a world has open, entry by entry."""

    def __init__(self, given: Iterable[Heirloom]) -> None:
        self._effects: dict[bytes, Intent] = {}
        self._timers: dict[str, Intent] = {}
        self._answers: dict[bytes, Ingress] = {}
        # What keys stand for: wanted again, it is no new wish.
        self._keys: dict[bytes, bytes] = {}
        self._names: dict[bytes, bytes] = {}
        for one in given:
            if one.answer is not None and one.answer.intent_hash is not None:
                self._answers[one.answer.intent_hash] = one.answer
            elif one.intent is not None:
                self.want(one.intent, at_ns=one.intent.enqueued_at_ns)
                self._names.update(dict.fromkeys(one.known_as, one.intent.intent_hash))

    def open(self) -> Open:
        return Open(
            tuple(self._effects.values()),
            tuple(self._timers.values()),
            tuple(self._answers.values()),
            tuple(self._names.items()),
        )

    def got(self, ingress: Ingress) -> None:
        named = ingress.intent_hash
        if named is None:
            return
        if ingress.kind is Kind.RECEIPT:
            self._effects.pop(named, None)
            self._answers.pop(named, None)
        elif ingress.kind is Kind.TIMER:
            for slot, intent in list(self._timers.items()):
                # A timer that repeats is not over when it fires, and its firings have other names.
                repeats = codec.unpack_as(TimerSet, intent.params).cron
                if intent.intent_hash == named and not repeats:
                    del self._timers[slot]

    def want(self, intent: Intent, *, at_ns: int) -> None:
        kind = intent.effect_kind
        if kind == TIMER_SET:
            timer = codec.unpack_as(TimerSet, intent.params)
            # A delay counts by store time, from when its entry was made.
            kept = intent if timer.cron else replace(intent, enqueued_at_ns=at_ns)
            self._timers[timer.key] = kept
        elif kind == TIMER_CANCEL:
            self._timers.pop(codec.unpack(intent.params), None)
        elif kind == EFFECT_CANCEL:
            self._cancel(intent.params)
        elif self._is_new(intent) and kind not in RESERVED:
            self._effects[intent.intent_hash] = intent

    def _cancel(self, wanted: bytes) -> None:
        """Its world has stopped wanting it, whether the receipt that says so came or not."""
        named = wanted if wanted in self._effects else self._names.get(wanted, wanted)
        gone = self._effects.pop(named, None)
        if gone is not None:
            self._answers[named] = answers.cancelled(
                named,
                gone.effect_kind,
                tag=gone.tag,
                correlation_id=gone.correlation_id,
                redrive_of=gone.redrive_of,
            )

    def _is_new(self, intent: Intent) -> bool:
        if intent.key is None:
            return True
        first = self._keys.get(intent.intent_hash)
        if first is None:
            self._keys[intent.intent_hash] = intent.wanted()
        elif first != intent.wanted():
            self._answers[intent.place_hash()] = answers.refused(intent)
        return first is None


def _root(txn: Txn, world: World, subject: str) -> tuple[Any, int]:
    """The state that a world began with, and at which height."""
    lineage = catalog.record(txn, world.universe, world.world_id).lineage
    height = 0 if lineage is None else lineage.forked_at_height
    floor = journal.head(txn, subject).floor
    if floor != height + 1:
        raise Invalid(what="fork", why="the journal does not reach back", floor=floor)
    if lineage is None:
        return world.program.initial(), 0
    try:
        return world.program.load(load_snapshot(txn, world.world_id, subject, height)[0]), height
    except NotFound:
        raise Invalid(what="fork", why="the journal does not reach back", floor=floor) from None


def _heirlooms(txn: Txn, universe: str, world_id: str) -> Iterator[Heirloom]:
    """What a world was given when it was forked, in order."""
    prefix = _heirlooms_of(universe, world_id)
    lo, end = prefix, tuples.after(prefix)
    while rows := txn.scan(lo, end, SCAN_PAGE):
        for _, row in rows:
            yield codec.unpack_as(Heirloom, row)
        lo = tuples.after(rows[-1][0])


def _heirlooms_of(universe: str, world_id: str) -> bytes:
    return schema.prefix(schema.Space.WORLD, universe, "h", world_id)


def _anew(txn: Txn, intent: Intent, child_id: str, name: str) -> Intent:
    """The same wish, of the child. Under its user's key it is what the child would want itself."""
    if intent.key is None:
        identity = codec.digest(b"fork", child_id.encode(), intent.intent_hash)
    else:
        identity = keyed_hash(child_id, intent.key)
    return replace(
        intent,
        world_id=child_id,
        origin_name=name,
        intent_hash=identity,
        enqueued_at_ns=txn.now_ns,
        # By what its state may know it: that of whoever wanted it first.
        redrive_of=intent.redrive_of or intent.intent_hash,
    )


def _due(txn: Txn, intent: Intent, timer: TimerSet) -> tuple[Intent, int, bool]:
    """The timer as it waits now, until when, and whether by the calendar: as the parent's does, if
    that still waits."""
    held = slots.slot(txn, intent.universe_id, intent.world_id, timer.key)
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

"""Pending intents of a fork: effects without a receipt and pending timers that the child inherits.

    effects   drop      they belong to the parent only (the default)
              fail      each gets the receipt `dropped_by_fork` in the child
              reissue   the child requests each again under a new intent hash; its receipt names
                        the parent's intent as `redrive_of`
    timers    drop      (the default)
              keep      each is scheduled for the child at the parent's due time, or at once if due

The intents that were pending after the forked entry count. Entries store hashes of intents, not the
intents, so these are recomputed by replaying the journal from its start. A world whose journal was
trimmed is refused. The inherited intents of a fork are stored with it, so that forks of forks find
them (`InheritedItem`).

A synthetic receipt (`world.synthetic_receipts`) that the parent had not consumed yet is delivered
to the child too, unless the policy drops all effects. It has the parent's intent hash, which the
child's state refers to.
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
    RESERVED_KINDS,
    TIMER_CANCEL,
    TIMER_SET,
    Ingress,
    IngressKind,
    Intent,
    TimerSet,
    keyed_hash,
)
from holdfast.store import schema, tuples
from holdfast.store.api import Txn, operation
from holdfast.world import (
    catalog,
    intents,
    journal_entry,
    recurring_timers,
    reducer,
    synthetic_receipts,
)
from holdfast.world import timers as slots
from holdfast.world.catalog import subject_of
from holdfast.world.ingress import put_ingress
from holdfast.world.reducer import WorldSpec
from holdfast.world.restore import load_snapshot

EFFECT_POLICIES = ("drop", "fail", "reissue")
TIMER_POLICIES = ("drop", "keep")


class PendingAtHeight(NamedTuple):
    """The pending intents of a world after an entry."""

    effects: tuple[Intent, ...] = ()
    timers: tuple[Intent, ...] = ()
    # Synthetic receipts that the world had not consumed.
    answers: tuple[Ingress, ...] = ()
    # Aliases of effects: the intent hashes of the world's own parent.
    names: tuple[tuple[bytes, bytes], ...] = ()


class InheritedItem(Record, frozen=True):
    """One inherited item of a fork: an intent of the child, or a receipt."""

    intent: Intent | None = None
    answer: Ingress | None = None
    # The intent hashes by which the forked state refers to the intent.
    known_as: tuple[bytes, ...] = ()


def check_policies(effects: str, timers: str) -> None:
    if effects not in EFFECT_POLICIES:
        raise Invalid(what="effects", found=effects, expected=list(EFFECT_POLICIES))
    if timers not in TIMER_POLICIES:
        raise Invalid(what="timers", found=timers, expected=list(TIMER_POLICIES))


def pending_after(txn: Txn, world: WorldSpec, height: int) -> PendingAtHeight:
    """Replay the journal up to an entry and return the intents without a receipt, firing or
    cancellation."""
    subject = subject_of(world.universe, world.world_id)
    state, at = _initial_state(txn, world, subject)
    tracker = _PendingTracker(_inherited_items(txn, world.universe, world.world_id))
    while at < height:
        for found in journal.read(txn, subject, at + 1, height + 1, SCAN_PAGE):
            at = found.height
            step = journal_entry.decode(found.body)
            tracker.on_ingress(step.ingress)
            emitted: list[Intent] = []
            state = reducer.replay_step(world, state, step, height=at, emitted=emitted)
            for intent in emitted:
                tracker.on_intent(intent, at_ns=found.at_ns)
    return tracker.pending()


@operation("fork.copy_to_child")
def copy_to_child(
    txn: Txn, universe: str, child_id: str, name: str, policy: str, pending: PendingAtHeight
) -> None:
    """Copy the inherited intents to the child, in the commit that creates it."""
    inherited: list[InheritedItem] = []
    for intent in pending.effects:
        if policy == "reissue":
            reissued = _reissue(txn, intent, child_id, name)
            known_as = [known for known, named in pending.names if named == intent.intent_hash]
            known_as.append(intent.intent_hash)
            intents.dispatch(txn, reissued)
            intents.add_aliases(txn, reissued, known_as)
            inherited.append(InheritedItem(reissued, known_as=tuple(known_as)))
        else:
            inherited.append(
                InheritedItem(answer=synthetic_receipts.dropped_by_fork_receipt(intent))
            )
    inherited += [InheritedItem(answer=answer) for answer in pending.answers]
    for one in inherited:
        if one.answer is not None:
            put_ingress(txn, universe, child_id, None, one.answer)
    for intent in pending.timers:
        timer = codec.unpack_as(TimerSet, intent.params)
        current, due_ns, on_calendar = _current_schedule(txn, intent, timer)
        reissued = _reissue(txn, current, child_id, name)
        slots.schedule(txn, reissued, timer.key, due_ns, on_calendar=on_calendar)
        # The delay counts from the time at which the parent set the timer.
        set_ns = due_ns - (timer.delay_ns or 0)
        inherited.append(
            InheritedItem(reissued if on_calendar else replace(reissued, enqueued_at_ns=set_ns))
        )
    prefix = _inherited_prefix(universe, child_id)
    for n, one in enumerate(inherited):
        txn.put(prefix + tuples.pack_int(n), codec.pack(one))


# -- inside --------------------------------------------------------------------------------------


class _PendingTracker:
    """A tracker of the pending intents of a world, fed entry by entry."""

    def __init__(self, given: Iterable[InheritedItem]) -> None:
        self._effects: dict[bytes, Intent] = {}
        self._timers: dict[str, Intent] = {}
        self._answers: dict[bytes, Ingress] = {}
        # Digests of keyed intents: a repeated intent under its key is no new intent.
        self._keys: dict[bytes, bytes] = {}
        self._aliases: dict[bytes, bytes] = {}
        for one in given:
            if one.answer is not None and one.answer.intent_hash is not None:
                self._answers[one.answer.intent_hash] = one.answer
            elif one.intent is not None:
                self.on_intent(one.intent, at_ns=one.intent.enqueued_at_ns)
                self._aliases.update(dict.fromkeys(one.known_as, one.intent.intent_hash))

    def pending(self) -> PendingAtHeight:
        return PendingAtHeight(
            tuple(self._effects.values()),
            tuple(self._timers.values()),
            tuple(self._answers.values()),
            tuple(self._aliases.items()),
        )

    def on_ingress(self, ingress: Ingress) -> None:
        named = ingress.intent_hash
        if named is None:
            return
        if ingress.kind is IngressKind.RECEIPT:
            self._effects.pop(named, None)
            self._answers.pop(named, None)
        elif ingress.kind is IngressKind.TIMER:
            for slot, intent in list(self._timers.items()):
                # A timer that repeats is not over when it fires, and its firings have other names.
                repeats = codec.unpack_as(TimerSet, intent.params).cron
                if intent.intent_hash == named and not repeats:
                    del self._timers[slot]

    def on_intent(self, intent: Intent, *, at_ns: int) -> None:
        kind = intent.effect_kind
        if kind == TIMER_SET:
            timer = codec.unpack_as(TimerSet, intent.params)
            # A delay counts in store time from the commit of its entry.
            kept = intent if timer.cron else replace(intent, enqueued_at_ns=at_ns)
            self._timers[timer.key] = kept
        elif kind == TIMER_CANCEL:
            self._timers.pop(codec.unpack(intent.params), None)
        elif kind == EFFECT_CANCEL:
            self._cancel(intent.params)
        elif self._is_new(intent) and kind not in RESERVED_KINDS:
            self._effects[intent.intent_hash] = intent

    def _cancel(self, cancelled_hash: bytes) -> None:
        """Apply a cancellation, whether or not its receipt has been consumed."""
        named = (
            cancelled_hash
            if cancelled_hash in self._effects
            else self._aliases.get(cancelled_hash, cancelled_hash)
        )
        cancelled = self._effects.pop(named, None)
        if cancelled is not None:
            self._answers[named] = synthetic_receipts.cancelled_receipt(
                named,
                cancelled.effect_kind,
                tag=cancelled.tag,
                correlation_id=cancelled.correlation_id,
                redrive_of=cancelled.redrive_of,
            )

    def _is_new(self, intent: Intent) -> bool:
        if intent.key is None:
            return True
        first_digest = self._keys.get(intent.intent_hash)
        if first_digest is None:
            self._keys[intent.intent_hash] = intent.idempotency_digest()
        elif first_digest != intent.idempotency_digest():
            self._answers[intent.positional_id()] = synthetic_receipts.key_conflict_receipt(intent)
        return first_digest is None


def _initial_state(txn: Txn, world: WorldSpec, subject: str) -> tuple[Any, int]:
    """Return the first state of a world and its height."""
    lineage = catalog.get_record(txn, world.universe, world.world_id).lineage
    height = 0 if lineage is None else lineage.forked_at_height
    floor = journal.head(txn, subject).floor
    if floor != height + 1:
        raise Invalid(what="fork", why="the journal does not reach back", floor=floor)
    if lineage is None:
        return world.definition.initial_state(), 0
    try:
        return world.definition.load_state(
            load_snapshot(txn, world.world_id, subject, height)[0]
        ), height
    except NotFound:
        raise Invalid(what="fork", why="the journal does not reach back", floor=floor) from None


def _inherited_items(txn: Txn, universe: str, world_id: str) -> Iterator[InheritedItem]:
    """Yield the inherited items of a fork, in order."""
    prefix = _inherited_prefix(universe, world_id)
    lo, end = prefix, tuples.prefix_end(prefix)
    while rows := txn.scan(lo, end, SCAN_PAGE):
        for _, row in rows:
            yield codec.unpack_as(InheritedItem, row)
        lo = tuples.prefix_end(rows[-1][0])


def _inherited_prefix(universe: str, world_id: str) -> bytes:
    return schema.key_prefix(schema.Space.WORLD, universe, "h", world_id)


def _reissue(txn: Txn, intent: Intent, child_id: str, name: str) -> Intent:
    """Reissue an intent for the child. A keyed intent gets the hash that the child itself would
    compute."""
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
        # The child's state knows the effect by its first intent hash.
        redrive_of=intent.redrive_of or intent.intent_hash,
    )


def _current_schedule(txn: Txn, intent: Intent, timer: TimerSet) -> tuple[Intent, int, bool]:
    """Return the timer as it is scheduled now, its due time, and whether it is in the calendar
    queue. If the parent's timer is still pending, use its schedule."""
    held = slots.find_slot(txn, intent.universe_id, intent.world_id, timer.key)
    if held is not None and (timer.cron or held.intent_hash == intent.intent_hash):
        keys = items.keys_of(held.queue(intent.universe_id))
        row = txn.get(keys.items + items.pack_int(held.seq))
        if row is not None:
            item = items.decode_item(row)
            stored = codec.unpack_as(Intent, queue.payload_of(txn, item))
            # Occurrences have other hashes but the origin of the timer that was set. The slot may
            # hold another timer that was set since.
            if _origin_of(stored) == _origin_of(intent):
                return stored, item.not_before_ns, held.calendar
    if timer.cron:
        intent, at_ns = recurring_timers.first_occurrence(
            replace(intent, enqueued_at_ns=txn.now_ns), timer
        )
        return intent, at_ns, True
    if timer.wall_ns is not None:
        return intent, timer.wall_ns, True
    return intent, max(intent.enqueued_at_ns + (timer.delay_ns or 0), txn.now_ns), False


def _origin_of(intent: Intent) -> tuple[int, int]:
    return intent.generation, intent.from_height

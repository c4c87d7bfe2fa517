"""JSON documents of effects and timers, shared by the HTTP API and the command line."""

from __future__ import annotations

import msgspec

from holdfast.ops.dead_letter_documents import AttemptDocument, attempt_documents
from holdfast.ops.pending_work import EffectRow, IntentRow, KindRow, TimerRow


class EffectKindDocument(msgspec.Struct, frozen=True):
    """The number of effects of one kind in each state."""

    universe: str
    kind: str
    ready: int
    delayed: int
    claimed: int
    dead: int
    done: int


class EffectListItem(msgspec.Struct, frozen=True):
    """An effect. By state, `time_ns` is when it was requested, is due, its claim ends, or it died."""

    seq: int
    intent: str
    kind: str
    state: str
    world: str
    tag: str
    time_ns: int
    attempts: int
    owner: str | None
    code: str | None


class EffectDocument(msgspec.Struct, frozen=True):
    universe: str
    intent: str
    kind: str
    world: str
    state: str
    seq: int
    tag: str
    failures: int | None
    expiries: int | None
    owner: str | None
    not_before_ns: int | None
    code: str | None
    error: str | None
    redrive_of: str | None
    attempts: list[AttemptDocument]


class TimerDocument(msgspec.Struct, frozen=True):
    """A pending timer of a world. A recurring one has a cron rule."""

    universe: str
    world: str
    key: str
    event: str
    due_ns: int
    clock: str
    intent: str
    cron: str | None
    zone: str | None
    missed: str | None


def kind_document(row: KindRow) -> EffectKindDocument:
    counts = row.counts
    return EffectKindDocument(
        row.universe,
        row.kind,
        counts.ready,
        counts.delayed,
        counts.claimed,
        counts.dead,
        counts.done,
    )


def intent_document(row: IntentRow) -> EffectListItem:
    return EffectListItem(
        seq=row.seq,
        intent=row.intent.intent_hash.hex(),
        kind=row.intent.effect_kind,
        state=row.state,
        world=row.world,
        tag=row.intent.tag,
        time_ns=row.time_ns,
        attempts=row.attempts,
        owner=row.owner or None,
        code=row.code or None,
    )


def effect_document(row: EffectRow) -> EffectDocument:
    pending_effect, item, intent = row.pending_effect, row.item, row.intent
    item_or_letter = item or row.letter
    return EffectDocument(
        universe=row.universe,
        intent=row.intent_hash.hex(),
        kind=pending_effect.effect_kind,
        world=row.world,
        state=row.state,
        seq=pending_effect.seq,
        tag=pending_effect.tag,
        failures=item_or_letter.failures if item_or_letter else None,
        expiries=item_or_letter.expiries if item_or_letter else None,
        owner=(item_or_letter.owner if item_or_letter else "") or None,
        not_before_ns=item.not_before_ns if item else None,
        code=(item_or_letter.code if item_or_letter else "") or None,
        error=(item_or_letter.error if item_or_letter else "") or None,
        redrive_of=intent.redrive_of.hex() if intent and intent.redrive_of else None,
        attempts=attempt_documents(item_or_letter),
    )


def timer_document(row: TimerRow) -> TimerDocument:
    repeats = bool(row.timer.cron)
    return TimerDocument(
        universe=row.universe,
        world=row.world,
        key=row.timer.key,
        event=row.timer.type,
        due_ns=row.due_ns,
        clock=row.clock,
        intent=row.intent.intent_hash.hex(),
        cron=row.timer.cron or None,
        zone=row.timer.zone if repeats else None,
        missed=row.timer.missed if repeats else None,
    )

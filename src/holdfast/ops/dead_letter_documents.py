"""JSON documents of dead letters, their payloads and the attempts at them, and their redrive by kind of queue."""

from __future__ import annotations

import base64
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from holdfast import codec
from holdfast.durable import queue
from holdfast.durable.item import QueueItem
from holdfast.durable.queue import DeadLetter
from holdfast.errors import HoldfastError, NotFound
from holdfast.flows import compensation_dead_letters, compensation_redrive
from holdfast.messages import Ingress
from holdfast.ops import pending_work
from holdfast.store.api import Deferred, Store, Txn
from holdfast.workers.effects import receipts
from holdfast.world import catalog, redrive
from holdfast.world.ingress import user_key


class AttemptDocument(msgspec.Struct, frozen=True):
    """An attempt at a queue item. A running one has no end time."""

    attempt: int
    claim: int
    owner: str
    began_ns: int
    ended_ns: int | None
    end: str
    code: str | None
    error: str | None


class PayloadDocument(msgspec.Struct, frozen=True):
    """The bytes of a payload as text, or in base64 if they are not UTF-8."""

    encoding: str
    data: str


class FailedEventDocument(msgspec.Struct, frozen=True):
    """An event of a world whose handler failed. `world` is null if the world is gone."""

    kind: str
    type: str
    key: str | None
    seq: int
    world_id: str
    world: str | None


class DeadLetterDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter. A large payload has a `blob` instead."""

    event: FailedEventDocument | UnsetType = UNSET
    queue: str
    seq: int
    code: str
    error: str
    failures: int
    expiries: int
    claims: int
    priority: int
    enqueued_ns: int
    died_ns: int
    owner: str
    redrive_of: int | None
    payload: PayloadDocument | None
    blob: str | None


class RedrivenLetter(NamedTuple):
    """A redriven dead letter. `what` is the kind of its successor: an item, an intent or a flow."""

    seq: int
    what: str
    made: Any


def attempt_documents(item: QueueItem | DeadLetter | None) -> list[AttemptDocument]:
    """Return the kept attempts, numbered from the very first attempt."""
    if item is None:
        return []
    first_number = item.failures + item.expiries - len(item.failed_attempts) + 1
    attempts = [
        AttemptDocument(
            attempt=first_number + at,
            claim=tried.number,
            owner=tried.owner,
            began_ns=tried.began_ns,
            ended_ns=tried.ended_ns,
            end=tried.end,
            code=tried.code or None,
            error=tried.error or None,
        )
        for at, tried in enumerate(item.failed_attempts)
    ]
    if isinstance(item, QueueItem) and item.expires_ns:
        running = AttemptDocument(
            attempt=first_number + len(item.failed_attempts),
            claim=item.claims,
            owner=item.owner,
            began_ns=item.claimed_ns,
            ended_ns=None,
            end="under way",
            code=None,
            error=None,
        )
        attempts.append(running)
    return attempts


def payload_document(payload: bytes) -> PayloadDocument:
    try:
        return PayloadDocument("utf-8", payload.decode())
    except UnicodeDecodeError:
        return PayloadDocument("base64", base64.b64encode(payload).decode())


def letter_document(letter: DeadLetter, event: FailedEventDocument | None) -> DeadLetterDocument:
    return DeadLetterDocument(
        event=UNSET if event is None else event,
        queue=letter.queue,
        seq=letter.seq,
        code=letter.code,
        error=letter.error,
        failures=letter.failures,
        expiries=letter.expiries,
        claims=letter.claims,
        priority=letter.priority,
        enqueued_ns=letter.enqueued_ns,
        died_ns=letter.died_ns,
        owner=letter.owner,
        redrive_of=letter.redrive_of,
        payload=payload_document(letter.payload) if not letter.blob else None,
        blob=letter.blob.hex() or None,
    )


def find_letter(txn: Txn, name: str, seq: int) -> tuple[DeadLetter, bytes]:
    """Return a dead letter with its payload."""
    letters = queue.list_dead(txn, name, seq - 1, 1) if seq > 0 else []
    if not letters or letters[0].seq != seq:
        raise NotFound(what="dead letter", queue=name, seq=seq)
    return letters[0], queue.payload_of(txn, letters[0])


def failed_events(txn: Txn, letters: list[DeadLetter]) -> dict[int, FailedEventDocument]:
    """Return the failed world events among dead letters, by seq, in readable form."""
    events: dict[int, FailedEventDocument] = {}
    for letter in letters:
        universe = redrive.universe_of(letter.queue)
        if universe is None:
            return events
        try:
            event = codec.unpack_as(redrive.FailedEventRow, queue.payload_of(txn, letter))
            ingress = codec.unpack_as(Ingress, event.ingress)
        except HoldfastError:
            continue
        try:
            record = catalog.get_record(txn, universe, event.world_id)
            world = f"{record.type}/{record.name}"
        except NotFound:
            world = None
        events[letter.seq] = FailedEventDocument(
            ingress.kind.value,
            ingress.type,
            event.key.removeprefix(user_key("") or "") or None,
            event.seq,
            event.world_id,
            world,
        )
    return events


def redrive_letters(store: Store, name: str, seqs: list[int]) -> list[RedrivenLetter]:
    """Redrive dead letters, all or none. An effect becomes a new intent, because its world already has a receipt
    for the old one. A failed compensation continues its flow."""
    what = _successor_of(name)
    made: list[Any] = store.transact(redrive_within, name, seqs)
    return [
        RedrivenLetter(seq, what, new.hex() if what == "intent" else new)
        for seq, new in zip(seqs, made, strict=True)
    ]


def redrive_within(txn: Txn, name: str, seqs: list[int]) -> Deferred[Any]:
    """Redrive dead letters in this transaction."""
    effect_queue = pending_work.effect_queue(name)
    if effect_queue is not None:
        return receipts.redrive_effects(txn, *effect_queue, seqs)
    universe = compensation_dead_letters.universe_of(name)
    if universe is not None:
        return compensation_redrive.redrive_compensations(txn, universe, seqs)
    return queue.redrive(txn, name, seqs)


def _successor_of(name: str) -> str:
    """The kind of item that a redriven dead letter of this queue becomes."""
    if pending_work.effect_queue(name) is not None:
        return "intent"
    return "item" if compensation_dead_letters.universe_of(name) is None else "flow"

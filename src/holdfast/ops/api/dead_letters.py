"""The endpoints of dead letters. A dead letter is named by its queue, percent-encoded as one part, and its seq."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.durable import queue
from holdfast.durable.queue import DeadLetter
from holdfast.errors import Invalid, NotFound
from holdfast.ops import dead_letter_documents, pending_work
from holdfast.ops.api import cursors
from holdfast.ops.api.call import ApiCall
from holdfast.ops.api.endpoint import (
    EmptyBody,
    Endpoint,
    EndpointOptions,
    Page,
    PageQuery,
    Scope,
)
from holdfast.ops.dead_letter_documents import (
    AttemptDocument,
    DeadLetterDocument,
    PayloadDocument,
    failed_events,
    find_letter,
    letter_document,
)
from holdfast.store.api import Txn
from holdfast.workers.effects import receipts


class DeadQueueDocument(msgspec.Struct, frozen=True):
    """A queue with dead letters, and their number."""

    queue: str
    dead: int


class DeadLetterDetails(DeadLetterDocument, frozen=True, kw_only=True):
    """A dead letter with its whole payload and the attempts at it."""

    payload: PayloadDocument
    attempts: list[AttemptDocument]


class RedrivenLetterDocument(msgspec.Struct, frozen=True):
    """`made` is the successor: the seq of an item, the hash of an intent, or the id of a flow, by `what`."""

    queue: str
    seq: int
    what: str
    made: int | str


class DroppedLetterDocument(msgspec.Struct, frozen=True):
    queue: str
    dropped: int


def list_dead_queues(call: ApiCall) -> Page[DeadQueueDocument]:
    limit = cursors.page_limit(call.query)
    after = cursors.decode(call.query.cursor, str) or ""

    def read(txn: Txn) -> list[DeadQueueDocument]:
        return [
            DeadQueueDocument(name, counts.dead)
            for name, counts in pending_work.queues(txn)
            if counts.dead and name > after and _is_of(call.universe, name)
        ][: limit + 1]

    found = call.read(read)
    more = len(found) > limit
    return Page(items=found[:limit], next=cursors.encode(found[limit - 1].queue) if more else None)


def list_dead_letters(call: ApiCall) -> Page[DeadLetterDocument]:
    limit = cursors.page_limit(call.query)
    after = cursors.decode(call.query.cursor, int) or 0
    name = _queue(call)

    def read(txn: Txn) -> list[DeadLetterDocument]:
        letters: list[DeadLetter] = queue.list_dead(txn, name, after, limit + 1)
        events = failed_events(txn, letters)
        return [letter_document(letter, events.get(letter.seq)) for letter in letters]

    found = call.read(read)
    more = len(found) > limit
    return Page(items=found[:limit], next=cursors.encode(found[limit - 1].seq) if more else None)


def show_dead_letter(call: ApiCall) -> DeadLetterDetails:
    name, seq = _queue(call), _seq(call)

    def read(txn: Txn) -> DeadLetterDetails:
        letter, payload = find_letter(txn, name, seq)
        event = failed_events(txn, [letter]).get(seq)
        fields: dict[str, Any] = msgspec.structs.asdict(letter_document(letter, event))
        fields["payload"] = dead_letter_documents.payload_document(payload)
        attempts = dead_letter_documents.attempt_documents(letter)
        return DeadLetterDetails(**fields, attempts=attempts)

    document: DeadLetterDetails = call.read(read)
    return document


def redrive_dead_letter(call: ApiCall) -> RedrivenLetterDocument:
    name, seq = _queue(call), _seq(call)
    call.read(find_letter, name, seq)
    store = call.recording_store(f"dead/{name}/{seq}")
    [redriven] = dead_letter_documents.redrive_letters(store, name, [seq])
    return RedrivenLetterDocument(name, seq, redriven.what, redriven.made)


def drop_dead_letter(call: ApiCall) -> DroppedLetterDocument:
    name, seq = _queue(call), _seq(call)
    call.transact(receipts.delete_dead_letters, name, [seq], subject=f"dead/{name}/{seq}")
    return DroppedLetterDocument(name, seq)


# -- inside ----------------------------------------------------------------------------------------


def _is_of(universe: str, name: str) -> bool:
    """Whether a queue belongs to the universe, or to no universe: a queue that an application made itself."""
    return name.startswith(f"{universe}/") or "/" not in name


def _queue(call: ApiCall) -> str:
    name = call.path["queue"]
    if not _is_of(call.universe, name):
        raise NotFound(what="queue", queue=name[:256], universe=call.universe)
    return name


def _seq(call: ApiCall) -> int:
    text = call.path["seq"]
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise Invalid(what="seq", found=text[:64], expected="a number")
    return int(text)


_LETTER = "/v1/dead/{queue}/{seq}"
_EMPTY = EndpointOptions(body=EmptyBody)

ENDPOINTS = (
    Endpoint("GET", "/v1/dead", Scope.READ, list_dead_queues, Page[DeadQueueDocument],
             "List the queues with dead letters", EndpointOptions(query=PageQuery)),
    Endpoint("GET", "/v1/dead/{queue}", Scope.READ, list_dead_letters, Page[DeadLetterDocument],
             "List the dead letters of a queue by seq", EndpointOptions(query=PageQuery)),
    Endpoint("GET", _LETTER, Scope.READ, show_dead_letter, DeadLetterDetails,
             "Show a dead letter with its payload and the attempts at it"),
    Endpoint("POST", f"{_LETTER}/redrive", Scope.OPERATE, redrive_dead_letter,
             RedrivenLetterDocument, "Retry a dead letter with new attempt counts", _EMPTY),
    Endpoint("POST", f"{_LETTER}/drop", Scope.OPERATE, drop_dead_letter, DroppedLetterDocument,
             "Delete a dead letter permanently", _EMPTY),
)  # fmt: skip

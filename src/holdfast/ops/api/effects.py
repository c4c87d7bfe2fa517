"""The endpoints of effects. An effect is named by the hash of its intent, in hexadecimal."""

from __future__ import annotations

import msgspec

from holdfast.errors import Invalid, NotFound
from holdfast.ops import dead_letter_documents, pending_documents, pending_work
from holdfast.ops.api import cursors
from holdfast.ops.api.call import ApiCall, NoIndex
from holdfast.ops.api.endpoint import (
    EmptyBody,
    Endpoint,
    EndpointOptions,
    Page,
    PageQuery,
    Scope,
)
from holdfast.ops.pending_documents import EffectDocument, EffectKindDocument, EffectListItem
from holdfast.ops.pending_work import EffectRow
from holdfast.world import intents


class EffectListQuery(PageQuery):
    """Effects are indexed by kind and state, and by tag: either `kind` and `state` are both needed, or `tag`. A list by
    tag takes `state` too, and its pages may then be short. States: ready, delayed, claimed, dead."""

    kind: str = ""
    state: str = ""
    tag: str = ""


class RedrivenEffect(msgspec.Struct, frozen=True):
    """`redriven_as` is the new intent."""

    intent: str
    redriven_as: str


def list_effects(call: ApiCall) -> Page[EffectListItem]:
    query: EffectListQuery = call.query
    limit = cursors.page_limit(query)
    if not query.tag and not (query.kind and query.state):
        missing = "state" if query.kind else "kind"
        raise NoIndex(what="list", why=f"needs {missing}, or tag", indexed=["kind", "state", "tag"])
    if query.tag and query.kind:
        raise NoIndex(what="kind", why="a list by tag takes no kind", indexed=["state", "tag"])
    position = cursors.decode(query.cursor, bytes) or b""
    if query.tag:
        rows, last = call.read(
            pending_work.tagged_page, call.universe, query.tag, query.state, position, limit
        )
    else:
        rows, last = call.read(
            pending_work.intents_page, call.universe, query.kind, query.state, position, limit
        )
    items = [pending_documents.intent_document(row) for row in rows]
    return Page(items=items, next=cursors.encode(last) if last else None)


def count_effects(call: ApiCall) -> Page[EffectKindDocument]:
    rows: list[pending_work.KindRow] = call.read(pending_work.kinds, call.universe)
    return Page(items=[pending_documents.kind_document(row) for row in rows])


def show_effect(call: ApiCall) -> EffectDocument:
    return pending_documents.effect_document(_effect(call))


def redrive_effect(call: ApiCall) -> RedrivenEffect:
    row = _effect(call)
    intent = row.intent_hash.hex()
    if row.letter is None:
        raise Invalid(what="effect", why="only dead effects are redriven", state=row.state)
    name = intents.effect_queue(row.universe, row.pending_effect.effect_kind)
    store = call.recording_store(f"effect/{intent}")
    [redriven] = dead_letter_documents.redrive_letters(store, name, [row.letter.seq])
    return RedrivenEffect(intent, redriven.made)


def _effect(call: ApiCall) -> EffectRow:
    row: EffectRow = call.read(pending_work.effect, call.path["intent"], call.universe)
    return row


_EFFECT = "/v1/effects/{intent}"

ENDPOINTS = (
    Endpoint("GET", "/v1/effects", Scope.READ, list_effects, Page[EffectListItem],
             "List the effects of a kind in one state, or with a tag", EndpointOptions(query=EffectListQuery)),
    Endpoint("GET", "/v1/effects/counts", Scope.READ, count_effects, Page[EffectKindDocument],
             "Count effects by kind and state"),
    Endpoint("GET", _EFFECT, Scope.READ, show_effect, EffectDocument,
             "Show the state of an effect and its attempts"),
    Endpoint("POST", f"{_EFFECT}/redrive", Scope.OPERATE, redrive_effect, RedrivenEffect,
             "Retry a dead effect as a new intent",
             EndpointOptions(body=EmptyBody, problems=(NotFound,))),
)  # fmt: skip

"""Redacted responses: the one place where answers of the HTTP API and data of its event streams lose hidden values.

The application (`application`) passes every JSON response of a route through `response`, except those of the worker
protocol: a worker needs the arguments. `events` passes each document through `document`, before its digest.
"""

from __future__ import annotations

import json
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from holdfast.errors import HoldfastError
from holdfast.ops.http.problem import HttpResponse
from holdfast.ops.http.routes import RouteCall
from holdfast.ops.redacted_documents import DocumentRedactor, RedactionRules, read_payload
from holdfast.world import catalog

if TYPE_CHECKING:
    from holdfast.ops.api.universes import UniverseChoice
    from holdfast.store.api import Store

BY_ID = "by-id"
# Documents about the program. Their members have the names of fields, and no values.
_WITHOUT_DATA = frozenset({("v1", "openapi.json")})
_KINDS = {"worlds": "world", "flows": "flow", "tasks": "task", "effects": "effect"}


class ResponseRedactor:
    def __init__(self, store: Store, universes: UniverseChoice) -> None:
        self._store = store
        self._universes = universes
        self.rules: RedactionRules = universes.redaction

    def response(self, call: RouteCall, response: HttpResponse) -> HttpResponse:
        """Return a response without hidden values. It reads the store."""
        if not response.body or "json" not in response.content_type:
            return response
        path = call.request.path
        if path in _WITHOUT_DATA:
            return response
        document = json.loads(response.body)
        try:
            universe = self._universes.resolve(call.request.query.get("universe", ""))
        except HoldfastError:
            universe = ""
        shown = self.document(universe, self._subject(universe, path), document)
        if shown == document:
            return response
        body = json.dumps(shown, ensure_ascii=False, separators=(",", ":"))
        return response._replace(body=body.encode(errors="backslashreplace"))

    def document(self, universe: str, subject: str, document: Any) -> Any:
        """Return a document without hidden values. `subject` is `kind/id`, or empty."""
        read = cache(partial(read_payload, self._store, universe)) if universe else None
        return DocumentRedactor(self.rules, read).hide(document, subject)

    def _subject(self, universe: str, path: tuple[str, ...]) -> str:
        """Return the subject of a request."""
        kind = _KINDS.get(path[1], "") if len(path) > 2 and path[0] == "v1" else ""
        if kind != "world":
            return f"{kind}/{path[2]}" if kind else ""
        if path[2] != BY_ID:
            return f"world/{path[2]}/{path[3]}" if len(path) > 3 else ""
        try:
            record = self._store.read(catalog.get_record, universe, path[3])
        except (HoldfastError, IndexError):
            return "world//"
        return f"world/{record.type}/{record.name}"

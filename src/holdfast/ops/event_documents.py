"""JSON documents of event types: the name, the version and the JSON Schema of the fields."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from holdfast import codec
from holdfast.app.app import App


class EventTypeDocument(msgspec.Struct, frozen=True):
    """An event type of the app. `fields` is the JSON Schema of its fields; null if its types have none."""

    type: str
    version: int
    fields: dict[str, Any] | None


def event_type_documents(app: App, names: Iterable[str]) -> list[EventTypeDocument]:
    """Return the event types with these names, sorted."""
    return [
        EventTypeDocument(name, app.events[name].version, _schema_of(app.events[name].kind))
        for name in sorted(names)
        if name in app.events
    ]


def _schema_of(kind: type[Any]) -> dict[str, Any] | None:
    try:
        if codec.is_model(kind):
            schema: dict[str, Any] = kind.model_json_schema()
            return schema
        return msgspec.json.schema(kind)
    except (TypeError, ValueError):
        # Such as a class of the user with codec hooks: it has no JSON Schema.
        return None

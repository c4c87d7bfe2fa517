"""The rows of dispatches and of their replay as plain data, by a decoding of their own (see `audit`)."""

from __future__ import annotations

from typing import Any

import msgspec

Plain = dict[str, Any]

RECORD = [
    "request_id", "target", "status", "created_at", "notified_at", "delivered_at", "failed_at",
    "reason", "metadata", "digest", "tries", "deferred", "events",
]  # fmt: skip
EVENT = [
    "event_id", "request_id", "target", "transition", "status", "at_ns", "reason", "metadata",
    "digest",
]  # fmt: skip
STATE = ["cursor", "top", "remembered", "deferred"]

_decode = msgspec.msgpack.Decoder().decode


def new_universe() -> Plain:
    return {
        "records": {}, "places": [], "marks": {}, "counts": {}, "deferred": 0, "state": None,
        "seen": [], "order": [],
    }  # fmt: skip


def dispatch_row(found: Plain, path: tuple[Any, ...], value: bytes) -> None:
    space, _, kind, *rest = path
    if space == "replay":
        if kind == "state":
            found["state"] = dict(zip(STATE, _decode(value), strict=False))
        else:
            found[kind].append(rest[0])
    elif kind == "r":
        found["records"][rest[0]] = dict(zip(RECORD, _decode(value), strict=False))
    elif kind == "s":
        found["places"].append(rest)
    elif kind == "m":
        found["marks"][rest[0]] = value.decode()
    elif kind == "n":
        found["counts"][rest[0]] = int.from_bytes(value, "big", signed=True)
    elif kind == "deferred":
        found["deferred"] = int.from_bytes(value, "big", signed=True)


def event_of(body: bytes) -> Plain:
    """An entry of the log."""
    return dict(zip(EVENT, _decode(body), strict=False))

"""Independent decoder of dispatch rows and of their replay rows into plain data (see
`row_decoder`)."""

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
REPLAY_STATE = ["cursor", "top", "remembered", "deferred"]

_decode = msgspec.msgpack.Decoder().decode


def empty_universe() -> Plain:
    return {
        "records": {}, "places": [], "marks": {}, "counts": {}, "deferred": 0, "state": None,
        "seen": [], "order": [],
    }  # fmt: skip


def decode_dispatch_row(rows: Plain, path: tuple[Any, ...], value: bytes) -> None:
    space, _, kind, *rest = path
    if space == "replay":
        if kind == "state":
            rows["state"] = dict(zip(REPLAY_STATE, _decode(value), strict=False))
        else:
            rows[kind].append(rest[0])
    elif kind == "r":
        rows["records"][rest[0]] = dict(zip(RECORD, _decode(value), strict=False))
    elif kind == "s":
        rows["places"].append(rest)
    elif kind == "m":
        rows["marks"][rest[0]] = value.decode()
    elif kind == "n":
        rows["counts"][rest[0]] = int.from_bytes(value, "big", signed=True)
    elif kind == "deferred":
        rows["deferred"] = int.from_bytes(value, "big", signed=True)


def decode_event(body: bytes) -> Plain:
    """Decode an entry of the dispatch log."""
    return dict(zip(EVENT, _decode(body), strict=False))

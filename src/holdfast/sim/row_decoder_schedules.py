"""Independent decoder of the rows of schedules into plain data (see `row_decoder`)."""

from __future__ import annotations

from typing import Any

import msgspec

Plain = dict[str, Any]

SCHEDULE = [
    "definition", "created_ns", "next_ns", "from_code", "declared", "paused", "error", "last_ns",
    "last_seq", "last_generation", "last_is_flow", "queued", "changes", "floor_ns", "key",
]  # fmt: skip
DEFINITION = ["name", "every", "zone", "missed", "overlap", "args", "task", "flow"]
OCCURRENCE = ["state", "cause", "decided_ns", "reason", "seq", "generation", "is_flow"]
QUEUED, STARTED, SKIPPED = 1, 2, 3

_decode = msgspec.msgpack.Decoder().decode


def empty_universe() -> Plain:
    return {"schedules": {}, "occurrences": {}, "queue": {}, "due": []}


def decode_schedule_row(schedules: Plain, path: tuple[Any, ...], value: bytes) -> None:
    kind, rest = path[0], path[1:]
    if kind == "s":
        row = dict(zip(SCHEDULE, _decode(value), strict=False))
        row["definition"] = dict(zip(DEFINITION, row["definition"], strict=False))
        schedules["schedules"][rest[0]] = row
    elif kind == "o":
        name, at_ns = rest
        defaults = {"reason": "", "seq": 0, "is_flow": False}
        row = {**defaults, **dict(zip(OCCURRENCE, _decode(value), strict=False))}
        schedules["occurrences"].setdefault(name, {})[at_ns] = row
    elif kind == "q":
        schedules["queue"].setdefault(rest[0], []).append(rest[1])
    elif kind == "d":
        schedules["due"].append(list(rest))

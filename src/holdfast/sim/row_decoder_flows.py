"""Independent decoder of the rows of flows into plain data (see `row_decoder`).

A record row is [decided_ns, [tag, field, …]]. Tags count from 1, in the order of `RECORDS`.
"""

from __future__ import annotations

from typing import Any

import msgspec

Plain = dict[str, Any]

# The universe of the simulated flows and schedules.
UNIVERSE = "f"
BODY = [
    "spec", "args", "created_ns", "generation", "key", "blob", "parent", "redrive_of", "fork_of",
    "fork_at", "tag",
]  # fmt: skip
SPEC = ["name", "queue", "priority", "lease_ns", "attempts", "expiries_max", "timeout_ns"]
PARENT = ["flow", "run", "name", "occurrence", "cancels", "intent", "schedule"]
HEAD = [
    "state", "run", "records", "task", "failures", "cancelled", "timed_out", "end_state", "code",
    "step", "error_type", "error", "run_started_ns", "ended_ns", "result", "blob", "mail", "args",
    "args_blob", "open_steps", "redriven_by", "code_version", "undone", "unread",
]  # fmt: skip
OPEN_STEP = [
    "kind", "position", "digest", "began_ns", "due_ns", "types", "child", "intent", "cancels_child",
]  # fmt: skip
MAIL = ["type", "value", "blob", "key", "sent_ns", "counted"]
_STEP = ["name", "occurrence", "position", "digest"]
RECORDS: list[tuple[str, list[str]]] = [
    ("completed", [*_STEP, "value", "blob", "attempts", "began_ns", "mail"]),
    ("failure", [*_STEP, "code", "error_type", "error", "attempts", "began_ns"]),
    ("published", ["name", "value"]),
    ("undo", _STEP),
    ("cancel", []),
    ("timed_out", []),
    ("raised", ["error_type", "error", "not_before_ns"]),
    ("compensation", ["state", "code", "step", "error_type", "error", "occurrence"]),
    ("parked", ["step", "why", "code_version", "code"]),
    ("resumed", []),
    ("ended", ["state", "code", "step", "error_type", "error", "digest", "occurrence"]),
    ("redriven", ["name", "occurrence"]),
    ("forked", ["position", "taken", "undos"]),
    ("undo_redriven", ["name", "occurrence"]),
]
RECORD_DEFAULTS = {"mail": 0, "attempts": 1, "occurrence": 0, "code": ""}

_decode = msgspec.msgpack.Decoder().decode


def empty_universe() -> Plain:
    return {
        "bodies": {}, "heads": {}, "records": {}, "open": {}, "due": [], "mail": {}, "children": [],
    }  # fmt: skip


def decode_flow_row(flows: Plain, path: tuple[Any, ...], value: bytes) -> None:
    kind, rest = path[0], path[1:]
    if kind == "b":
        body = dict(zip(BODY, _decode(value), strict=False))
        body["spec"] = dict(zip(SPEC, body["spec"], strict=False))
        if body.get("parent") is not None:
            body["parent"] = dict(zip(PARENT, body["parent"], strict=False))
        flows["bodies"][rest[0]] = body
    elif kind == "h":
        flows["heads"][rest[0]] = dict(zip(HEAD, _decode(value), strict=False))
    elif kind == "r":
        flow, run, number = rest
        flows["records"].setdefault(f"{flow}/{run}", {})[number] = decode_record(value)
    elif kind == "o":
        flow, name, occurrence = rest
        step = dict(zip(OPEN_STEP, _decode(value), strict=False))
        flows["open"].setdefault(flow, {})[f"{name}#{occurrence}"] = step
    elif kind == "d":
        flows["due"].append(list(rest))
    elif kind == "m":
        flow, number = rest
        flows["mail"].setdefault(flow, {})[number] = dict(zip(MAIL, _decode(value), strict=False))
    elif kind == "c":
        flows["children"].append(list(rest))


def decode_record(value: bytes) -> Plain:
    decided_ns, (tag, *values) = _decode(value)
    kind, names = RECORDS[tag - 1]
    defaults = {name: RECORD_DEFAULTS[name] for name in names if name in RECORD_DEFAULTS}
    fields = dict(zip(names, values, strict=False))
    return {"kind": kind, "decided_ns": decided_ns, **defaults, **fields}


def decode_received(value: bytes) -> tuple[str, bytes]:
    """Decode the value of a receive: the type and the body of the event."""
    type, body = _decode(value)
    return type, body


def decode_activation(args: bytes) -> tuple[int, int] | None:
    """Decode the arguments of an activation task: the flow and its run. None for other tasks."""
    match _decode(args):
        case [int(flow), int(run)]:
            return flow, run
    return None

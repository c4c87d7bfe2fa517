"""All rows of a store as plain data, by a decoding of its own.

Checkers must not trust the code they judge. So keys and records are read here from the layout that
`store/schema.py` documents, position by position, without a line of the product's decoding.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from holdfast.sim import audit_dispatch, audit_tasks

Plain = dict[str, Any]


def _names(text: str) -> list[str]:
    """The fields of a record, in their order on disk."""
    return text.split()


ITEM = _names(
    "payload blob priority enqueued_ns not_before_ns claims failures expiries owner expires_ns "
    "redrive_of code error"
)
HOLD = _names("claims owner expires_ns")
DEAD = _names(
    "queue seq payload code error failures expiries claims priority enqueued_ns not_before_ns "
    "died_ns owner redrive_of blob"
)
COUNTS = _names("ready delayed claimed dead done")
LEASE_EVENT = _names(
    "resource kind worker incarnation generation epoch decided_ns expires_ns reason"
)
FENCE = _names("state worker incarnation generation epoch")
HEAD = _names("height hash checkpoint floor below packed")
ENTRY = _names("hash at_ns body blob")
INGRESS = _names("key at_ns body blob")
REMEMBERED = _names("body_hash value time_ns")
SAVED = _names("hash at_ns bytes state")
BASELINE = _names("height hash")
WORLD = _names(
    "universe world_id type name created_ns status blocker lineage stuck_seq stuck_count "
    "stuck_alone deleted_ns purged unknown"
)
BLOCKER = _names("code text height since_ns")
UNKNOWN = _names("side type version seq since_ns waits given_up priority")
LINEAGE = _names("parent_world_id parent_snapshot_hash forked_at_height")
SLOT = _names("intent_hash seq")
PENDING = _names("world_id effect_kind seq correlation_id tag dead")
ASSIGNMENT = _names("desired_worker_id priority reason pinned")

# Rows of a queue that are no items: whose turn it is, its rate, how many were taken from workers.
ASIDE = ("g", "turn", "rate", "withdrawn")

_decode = msgspec.msgpack.Decoder().decode


def audit(rows: Iterable[tuple[bytes, bytes]]) -> Plain:
    queues: defaultdict[str, Plain] = defaultdict(_new_queue)
    journals: defaultdict[str, Plain] = defaultdict(_new_journal)
    inboxes: defaultdict[str, Plain] = defaultdict(_new_inbox)
    snapshots: defaultdict[str, Plain] = defaultdict(lambda: {"states": {}, "baseline": None})
    dedupe: defaultdict[str, Plain] = defaultdict(lambda: {"keys": {}, "times": [], "floor": 0})
    leases: defaultdict[str, Plain] = defaultdict(dict)
    blobs: Plain = {"data": {}, "refs": {}, "idle": []}
    worlds: defaultdict[str, Plain] = defaultdict(_new_universe)
    tasks: defaultdict[str, Plain] = defaultdict(audit_tasks.new_universe)
    dispatch: defaultdict[str, Plain] = defaultdict(audit_dispatch.new_universe)
    log: list[Plain] = []
    last: dict[tuple[Any, ...], int] = {}
    generation = 0
    for raw, value in rows:
        if raw[:1] != b"\x14" and raw[:1] != b"\x15":
            continue  # the schema marker, which stands outside the layout
        key = decode_key(raw)
        space, path = key[0], key[1:]
        if space == 0 and path == ("meta",):
            generation = _decode(value)[1]
        elif space == 0 and path[0] in ("dispatch", "replay"):
            audit_dispatch.dispatch_row(dispatch[path[1]], path, value)
        elif space == 2:
            last[path] = _int(value)
        elif space == 3:
            _blob_row(blobs, path, value)
        elif space == 4:
            _lease_row(leases, path, value)
        elif space == 5:
            log.append(_log_row(path, value))
        elif space == 6:
            _journal_row(journals[path[0]], path[1:], value)
        elif space == 7:
            _inbox_row(inboxes[path[0]], path[1:], value)
        elif space == 8:
            if path[1] not in ASIDE:
                _QUEUE_ROWS[path[1]](queues[path[0]], path[2:], value)
        elif space == 9:
            _dedupe_row(dedupe[path[0]], path[1:], value)
        elif space == 10:
            _snapshot_row(snapshots[path[0]], path[1:], value)
        elif space == 11:
            _world_row(worlds[path[0]], path[1:], value)
        elif space == 12:
            worlds[path[0]]["hints"].append([path[1], path[3]])
        elif space == 15:
            audit_tasks.task_row(tasks[path[0]], path[1:], value)
    for queue in queues.values():
        # A claim of no item is a row too many among the claims.
        for seq, hold in queue.pop("holds").items():
            queue["expiry"].append([hold["expires_ns"], seq])
    for path, number in last.items():
        if path[0] == 8:
            queues[path[1]]["last_seq"] = number
        elif path[0] == 7:
            inboxes[path[1]]["last_seq"] = number
    found: Plain = {
        "queues": queues,
        "journals": journals,
        "inboxes": inboxes,
        "snapshots": snapshots,
        "dedupe": dedupe,
        "leases": leases,
        "worlds": worlds,
        "tasks": tasks,
        "dispatch": dispatch,
    }
    return {**{name: dict(part) for name, part in found.items()}, "blobs": blobs, "lease_log": log,
            "generation": generation}  # fmt: skip


def decode_key(data: bytes) -> tuple[Any, ...]:
    """The tuple layer's layout, for the elements that our keys have."""
    found: list[Any] = []
    at = 0
    while at < len(data):
        code = data[at]
        if code in (1, 2):
            end = data.index(b"\x00", at + 1)
            while data[end + 1 : end + 2] == b"\xff":
                end = data.index(b"\x00", end + 2)
            text = data[at + 1 : end].replace(b"\x00\xff", b"\x00")
            found.append(text.decode() if code == 2 else text)
            at = end + 1
        elif 0x0C <= code <= 0x1C:
            size = abs(code - 0x14)
            value = int.from_bytes(data[at + 1 : at + 1 + size], "big")
            found.append(value if code >= 0x14 else value - (1 << (8 * size)) + 1)
            at += 1 + size
        else:
            raise ValueError(f"unknown type code {code} in key {data!r}")
    return tuple(found)


def _new_queue() -> Plain:
    return {
        "items": {}, "ready": [], "delayed": [], "expiry": [], "owners": [], "dead": {},
        "died": [], "counts": dict.fromkeys(COUNTS, 0), "last_seq": 0, "holds": {},
    }  # fmt: skip


def _new_journal() -> Plain:
    return {"head": None, "entries": {}, "doubled": []}


def _new_inbox() -> Plain:
    return {"rows": {}, "cursor": 0, "last_seq": 0}


def _new_universe() -> Plain:
    return {
        "names": {}, "records": {}, "assignments": {}, "by_worker": [], "counts": {}, "hints": [],
        "stopped": [],
        "pending": {}, "slots": [],
    }  # fmt: skip


def _fields(names: list[str], value: bytes) -> Plain:
    return _named(names, _decode(value))


def _named(names: list[str], values: list[Any]) -> Plain:
    """A record may have grown new fields at its end, and none has ever gone."""
    if len(values) < len(names):
        raise ValueError(f"a record of {len(values)} fields, expected {names}")
    return dict(zip(names, values, strict=False))


def _int(value: bytes) -> int:
    return int.from_bytes(value, "big", signed=True)


def _set_hold(queue: Plain, path: tuple[Any, ...], value: bytes) -> None:
    # Before the items, in the order of keys.
    queue["holds"][path[0]] = _fields(HOLD, value)


def _set_item(queue: Plain, path: tuple[Any, ...], value: bytes) -> None:
    queue["items"][path[0]] = {**_fields(ITEM, value), **queue["holds"].pop(path[0], {})}


def _set_dead(queue: Plain, path: tuple[Any, ...], value: bytes) -> None:
    queue["dead"][path[0]] = _fields(DEAD, value)


def _set_counts(queue: Plain, path: tuple[Any, ...], value: bytes) -> None:
    queue["counts"] = _fields(COUNTS, value)


def _index(name: str) -> Callable[[Plain, tuple[Any, ...], bytes], None]:
    def add(queue: Plain, path: tuple[Any, ...], value: bytes) -> None:
        queue[name].append(list(path))

    return add


_QUEUE_ROWS: dict[str, Callable[[Plain, tuple[Any, ...], bytes], None]] = {
    "h": _set_hold,
    "i": _set_item,
    "r": _index("ready"),
    "d": _index("delayed"),
    "x": _index("expiry"),
    "o": _index("owners"),
    "z": _set_dead,
    "t": _index("died"),
    "n": _set_counts,
}


def _lease_row(leases: defaultdict[str, Plain], path: tuple[Any, ...], value: bytes) -> None:
    if path[0] == "fence":
        leases[path[1]].update(_fields(FENCE, value))
    elif path[0] == "expiry":
        leases[path[1]]["expires_ns"] = _int(value)
    else:
        leases[path[2]].setdefault("by", []).append(path[1])


def _log_row(path: tuple[Any, ...], value: bytes) -> Plain:
    # The record's own number is written as 0: the key has it.
    return {"n": path[0], **_named(LEASE_EVENT, _decode(value)[1:])}


def _journal_row(journal: Plain, path: tuple[Any, ...], value: bytes) -> None:
    if path[0] == "head":
        journal["head"] = _fields(HEAD, value)
    elif path[0] == "e":
        _add_entry(journal, path[1], _fields(ENTRY, value))
    elif path[0] == "s":
        first, packed = _decode(zlib.decompress(value))
        for height, kept in enumerate(packed, first):
            _add_entry(journal, height, _named(ENTRY, kept))


def _add_entry(journal: Plain, height: int, entry: Plain) -> None:
    if height in journal["entries"]:
        journal["doubled"].append(height)
    journal["entries"][height] = entry


def _inbox_row(inbox: Plain, path: tuple[Any, ...], value: bytes) -> None:
    if path[0] == "cursor":
        inbox["cursor"] = _int(value)
    else:
        inbox["rows"][path[1]] = _fields(INGRESS, value)


def _dedupe_row(scope: Plain, path: tuple[Any, ...], value: bytes) -> None:
    if path[0] == "k":
        scope["keys"][path[1]] = _fields(REMEMBERED, value)
    elif path[0] == "t":
        scope["times"].append([path[1], path[2]])
    else:
        scope["floor"] = _int(value)


def _snapshot_row(subject: Plain, path: tuple[Any, ...], value: bytes) -> None:
    if path[0] == "baseline":
        subject["baseline"] = _fields(BASELINE, value)
    else:
        subject["states"][path[1]] = _fields(SAVED, value)


def _world_row(universe: Plain, path: tuple[Any, ...], value: bytes) -> None:
    kind = path[0]
    if kind == "n":
        universe["names"][f"{path[1]}/{path[2]}"] = value.decode()
    elif kind == "w":
        record = _fields(WORLD, value)
        for name, fields in (("blocker", BLOCKER), ("lineage", LINEAGE), ("unknown", UNKNOWN)):
            if record.get(name) is not None:
                record[name] = _named(fields, record[name])
        universe["records"][path[1]] = record
    elif kind == "a":
        universe["assignments"][path[1]] = _fields(ASSIGNMENT, value)
    elif kind == "b":
        universe["by_worker"].append([path[1], path[2]])
    elif kind == "u":
        universe["stopped"].append(path[3])
    elif kind == "c":
        universe["counts"][path[1]] = _int(value)
    elif kind == "t":
        named = {"world_id": path[1], "slot": path[2]}
        universe["slots"].append({**named, **_fields(SLOT, value)})
    elif kind == "i":
        universe["pending"][path[1].hex()] = _fields(PENDING, value)


def _blob_row(blobs: Plain, path: tuple[Any, ...], value: bytes) -> None:
    if path[0] == "data":
        blobs["data"][path[1].hex()] = value
    elif path[0] == "refs":
        blobs["refs"][path[1].hex()] = _decode(value)[0]
    else:
        blobs["idle"].append(path[2].hex())

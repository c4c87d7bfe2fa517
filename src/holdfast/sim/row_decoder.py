"""Independent decoder of all rows of a store into plain data.

Checkers must not trust the code they check. This module therefore reads keys and records from the
layout documented in `store/schema.py`, position by position, without any decoding code of the
product.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import msgspec

from holdfast.sim import (
    row_decoder_dispatch,
    row_decoder_flows,
    row_decoder_schedules,
    row_decoder_tasks,
)

Plain = dict[str, Any]


def _field_names(text: str) -> list[str]:
    """Split the field names of a record, in their order on disk."""
    return text.split()


ITEM = _field_names(
    "payload blob priority enqueued_ns not_before_ns claims failures expiries owner expires_ns "
    "redrive_of code error"
)
CLAIM = _field_names("claims owner expires_ns")
DEAD = _field_names(
    "queue seq payload code error failures expiries claims priority enqueued_ns not_before_ns "
    "died_ns owner redrive_of blob"
)
COUNTS = _field_names("ready delayed claimed dead done")
LEASE_EVENT = _field_names(
    "resource kind worker incarnation generation epoch decided_ns expires_ns reason"
)
FENCE = _field_names("state worker incarnation generation epoch")
HEAD = _field_names("height hash checkpoint floor below packed")
ENTRY = _field_names("hash at_ns body blob")
INGRESS = _field_names("key at_ns body blob")
DEDUPE_RECORD = _field_names("body_hash value time_ns")
SNAPSHOT = _field_names("hash at_ns bytes state")
BASELINE = _field_names("height hash")
WORLD = _field_names(
    "universe world_id type name created_ns status blocker lineage stuck_seq stuck_count "
    "stuck_alone deleted_ns purged unknown"
)
BLOCKER = _field_names("code text height since_ns")
UNKNOWN = _field_names("side type version seq since_ns waits given_up priority")
LINEAGE = _field_names("parent_world_id parent_snapshot_hash forked_at_height")
TIMER_SLOT = _field_names("intent_hash seq")
PENDING_EFFECT = _field_names(
    "world_id effect_kind seq correlation_id tag dead lane redrive_of listed"
)
ASSIGNMENT = _field_names("desired_worker_id priority reason pinned")

# Queue rows other than items: fair-share ranks, rate, number of withdrawn items.
NON_ITEM_ROWS = ("g", "turn", "rate", "withdrawn")

KEYS_CACHED_MAX = 1 << 15

_decode = msgspec.msgpack.Decoder().decode


def decode_rows(rows: Iterable[tuple[bytes, bytes]]) -> Plain:
    queues: defaultdict[str, Plain] = defaultdict(_new_queue)
    journals: defaultdict[str, Plain] = defaultdict(_new_journal)
    inboxes: defaultdict[str, Plain] = defaultdict(_new_inbox)
    snapshots: defaultdict[str, Plain] = defaultdict(lambda: {"states": {}, "baseline": None})
    dedupe: defaultdict[str, Plain] = defaultdict(lambda: {"keys": {}, "times": [], "floor": 0})
    leases: defaultdict[str, Plain] = defaultdict(dict)
    blobs: Plain = {"data": {}, "refs": {}, "idle": []}
    worlds: defaultdict[str, Plain] = defaultdict(_new_universe)
    tasks: defaultdict[str, Plain] = defaultdict(row_decoder_tasks.empty_universe)
    dispatch: defaultdict[str, Plain] = defaultdict(row_decoder_dispatch.empty_universe)
    flows: defaultdict[str, Plain] = defaultdict(row_decoder_flows.empty_universe)
    schedules: defaultdict[str, Plain] = defaultdict(row_decoder_schedules.empty_universe)
    log: list[Plain] = []
    last: dict[tuple[Any, ...], int] = {}
    generation = 0
    for raw, value in rows:
        if raw[:1] != b"\x14" and raw[:1] != b"\x15":
            continue  # the schema marker, which is outside the key layout
        key = decode_key(raw)
        space, path = key[0], key[1:]
        if space == 0 and path == ("meta",):
            generation = _decode(value)[1]
        elif space == 0 and path[0] in ("dispatch", "replay"):
            row_decoder_dispatch.decode_dispatch_row(dispatch[path[1]], path, value)
        elif space == 2:
            last[path] = _decode_int(value)
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
            if path[1] not in NON_ITEM_ROWS:
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
            row_decoder_tasks.decode_task_row(tasks[path[0]], path[1:], value)
        elif space == 16:
            row_decoder_flows.decode_flow_row(flows[path[0]], path[1:], value)
        elif space == 17:
            row_decoder_schedules.decode_schedule_row(schedules[path[0]], path[1:], value)
    for queue in queues.values():
        # A claim row without an item counts as an extra expiry row, so that the checkers report it.
        for seq, hold in queue.pop("holds").items():
            queue["expiry"].append([hold["expires_ns"], seq])
    for path, number in last.items():
        if path[0] == 8:
            queues[path[1]]["last_seq"] = number
        elif path[0] == 7:
            inboxes[path[1]]["last_seq"] = number
    parts: Plain = {
        "queues": queues,
        "journals": journals,
        "inboxes": inboxes,
        "snapshots": snapshots,
        "dedupe": dedupe,
        "leases": leases,
        "worlds": worlds,
        "tasks": tasks,
        "dispatch": dispatch,
        "flows": flows,
        "schedules": schedules,
    }
    return {**{name: dict(part) for name, part in parts.items()}, "blobs": blobs, "lease_log": log,
            "generation": generation}  # fmt: skip


# Each audit of a run decodes mostly the same keys.
@lru_cache(maxsize=KEYS_CACHED_MAX)
def decode_key(data: bytes) -> tuple[Any, ...]:
    """Decode a key of the tuple layer, for the element types that our keys use."""
    elements: list[Any] = []
    at = 0
    while at < len(data):
        code = data[at]
        if code in (1, 2):
            end = data.index(b"\x00", at + 1)
            while data[end + 1 : end + 2] == b"\xff":
                end = data.index(b"\x00", end + 2)
            text = data[at + 1 : end].replace(b"\x00\xff", b"\x00")
            elements.append(text.decode() if code == 2 else text)
            at = end + 1
        elif 0x0C <= code <= 0x1C:
            size = abs(code - 0x14)
            value = int.from_bytes(data[at + 1 : at + 1 + size], "big")
            elements.append(value if code >= 0x14 else value - (1 << (8 * size)) + 1)
            at += 1 + size
        else:
            raise ValueError(f"unknown type code {code} in key {data!r}")
    return tuple(elements)


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


def _decode_record(names: list[str], value: bytes) -> Plain:
    return _name_fields(names, _decode(value))


def _name_fields(names: list[str], values: list[Any]) -> Plain:
    """Name the values of a record. Newer records may have more fields at the end, never fewer."""
    if len(values) < len(names):
        raise ValueError(f"a record of {len(values)} fields, expected {names}")
    return dict(zip(names, values, strict=False))


def _decode_int(value: bytes) -> int:
    return int.from_bytes(value, "big", signed=True)


def _set_claim(queue: Plain, path: tuple[Any, ...], value: bytes) -> None:
    # Claim rows precede items in key order.
    queue["holds"][path[0]] = _decode_record(CLAIM, value)


def _set_item(queue: Plain, path: tuple[Any, ...], value: bytes) -> None:
    queue["items"][path[0]] = {**_decode_record(ITEM, value), **queue["holds"].pop(path[0], {})}


def _set_dead(queue: Plain, path: tuple[Any, ...], value: bytes) -> None:
    queue["dead"][path[0]] = _decode_record(DEAD, value)


def _set_counts(queue: Plain, path: tuple[Any, ...], value: bytes) -> None:
    queue["counts"] = _decode_record(COUNTS, value)


def _append_to_index(name: str) -> Callable[[Plain, tuple[Any, ...], bytes], None]:
    def add(queue: Plain, path: tuple[Any, ...], value: bytes) -> None:
        queue[name].append(list(path))

    return add


_QUEUE_ROWS: dict[str, Callable[[Plain, tuple[Any, ...], bytes], None]] = {
    "h": _set_claim,
    "i": _set_item,
    "r": _append_to_index("ready"),
    "d": _append_to_index("delayed"),
    "x": _append_to_index("expiry"),
    "o": _append_to_index("owners"),
    "z": _set_dead,
    "t": _append_to_index("died"),
    "n": _set_counts,
}


def _lease_row(leases: defaultdict[str, Plain], path: tuple[Any, ...], value: bytes) -> None:
    if path[0] == "fence":
        leases[path[1]].update(_decode_record(FENCE, value))
    elif path[0] == "expiry":
        leases[path[1]]["expires_ns"] = _decode_int(value)
    elif path[0] == "by":
        leases[path[2]].setdefault("by", []).append(path[1])


def _log_row(path: tuple[Any, ...], value: bytes) -> Plain:
    # The record stores its own number as 0. The key holds it.
    return {"n": path[0], **_name_fields(LEASE_EVENT, _decode(value)[1:])}


def _journal_row(journal: Plain, path: tuple[Any, ...], value: bytes) -> None:
    if path[0] == "head":
        journal["head"] = _decode_record(HEAD, value)
    elif path[0] == "e":
        _add_entry(journal, path[1], _decode_record(ENTRY, value))
    elif path[0] == "s":
        first, packed = _decode(zlib.decompress(value))
        for height, kept in enumerate(packed, first):
            _add_entry(journal, height, _name_fields(ENTRY, kept))


def _add_entry(journal: Plain, height: int, entry: Plain) -> None:
    if height in journal["entries"]:
        journal["doubled"].append(height)
    journal["entries"][height] = entry


def _inbox_row(inbox: Plain, path: tuple[Any, ...], value: bytes) -> None:
    if path[0] == "cursor":
        inbox["cursor"] = _decode_int(value)
    else:
        inbox["rows"][path[1]] = _decode_record(INGRESS, value)


def _dedupe_row(scope: Plain, path: tuple[Any, ...], value: bytes) -> None:
    if path[0] == "k":
        scope["keys"][path[1]] = _decode_record(DEDUPE_RECORD, value)
    elif path[0] == "t":
        scope["times"].append([path[1], path[2]])
    else:
        scope["floor"] = _decode_int(value)


def _snapshot_row(subject: Plain, path: tuple[Any, ...], value: bytes) -> None:
    if path[0] == "baseline":
        subject["baseline"] = _decode_record(BASELINE, value)
    else:
        subject["states"][path[1]] = _decode_record(SNAPSHOT, value)


def _world_row(universe: Plain, path: tuple[Any, ...], value: bytes) -> None:
    kind = path[0]
    if kind == "n":
        universe["names"][f"{path[1]}/{path[2]}"] = value.decode()
    elif kind == "w":
        record = _decode_record(WORLD, value)
        for name, fields in (("blocker", BLOCKER), ("lineage", LINEAGE), ("unknown", UNKNOWN)):
            if record.get(name) is not None:
                record[name] = _name_fields(fields, record[name])
        universe["records"][path[1]] = record
    elif kind == "a":
        universe["assignments"][path[1]] = _decode_record(ASSIGNMENT, value)
    elif kind == "b":
        universe["by_worker"].append([path[1], path[2]])
    elif kind == "u":
        universe["stopped"].append(path[3])
    elif kind == "c":
        universe["counts"][path[1]] = _decode_int(value)
    elif kind == "t":
        named = {"world_id": path[1], "slot": path[2]}
        universe["slots"].append({**named, **_decode_record(TIMER_SLOT, value)})
    elif kind == "i":
        universe["pending"][path[1].hex()] = _decode_record(PENDING_EFFECT, value)


def _blob_row(blobs: Plain, path: tuple[Any, ...], value: bytes) -> None:
    if path[0] == "data":
        blobs["data"][path[1].hex()] = value
    elif path[0] == "refs":
        blobs["refs"][path[1].hex()] = _decode(value)[0]
    else:
        blobs["idle"].append(path[2].hex())

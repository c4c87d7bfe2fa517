"""Independent decoder of task rows and of the task log into plain data (see `row_decoder`).

A log entry is [decided_ns, generation, [record, …]]. A record is [tag, column, …]. Tags count from
1 in the order in which document 003 names the kinds. The last one is `TaskDead`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

Plain = dict[str, Any]

# The universe of the simulated tasks.
UNIVERSE = "u"


def _field_names(text: str) -> list[str]:
    """Split the field names of a record, in their order on disk."""
    return text.split()


BODY = _field_names(
    "spec args created_ns generation not_before_ns key limit after redrive_of blob tag"
)
STATUS = _field_names(
    "state attempt failures expiries lease worker expires_ns granted_ns progress_ns not_before_ns "
    "waits awaited ended_ns reason error redriven_by result blob"
)
COUNTS = _field_names("ready suspect parked delayed blocked leased completed failed dead stray")
CHECKPOINT = _field_names("number height last chunks bytes")
CHUNK = _field_names("lo hi height fresh tasks digest")

_decode = msgspec.msgpack.Decoder().decode


def empty_universe() -> Plain:
    return {
        "bodies": {}, "statuses": {}, "held": {}, "held_at": {}, "runs": [], "ready": [], "suspect": [], "parked": [],
        "stray": [], "delayed": [], "dependents": [], "ended": [], "expiries": [], "keys": [], "retained": [],
        "counts": {}, "running": [], "chunks": {}, "before": None, "latest": None, "seq": 0, "lease": 0,
    }  # fmt: skip


def decode_task_row(tasks: Plain, path: tuple[Any, ...], value: bytes) -> None:
    kind = path[0]
    if kind in _ROWS:
        _ROWS[kind](tasks, path[1:], value)


def open_tasks(tasks: Plain) -> list[int]:
    """Tasks that have not ended."""
    statuses = tasks["statuses"]
    return [seq for seq in tasks["bodies"] if seq not in statuses or statuses[seq]["state"] < 2]


def iter_records(body: bytes) -> Iterator[tuple[int, int, list[Any]]]:
    """Iterate over the records of an entry as (tag, task, fields), one per task, in order."""
    _, _, records = _decode(body)
    for tag, *columns in records:
        if tag == 1:
            yield from ((tag, task, []) for task in columns[0])
        elif tag == 2:
            lease, worker, expires_ns, tasks = columns
            yield from ((tag, task, [lease, worker, expires_ns]) for task in tasks)
        elif tag == 3:
            yield from ((tag, task, rest) for task, *rest in zip(*columns, strict=True))
        elif tag == 4:
            yield from ((tag, task, [columns[0]]) for task in columns[1])
        elif tag == 5:
            yield from ((tag, task, [lease]) for task, lease in zip(*columns[:2], strict=True))
        elif tag in (6, 7):
            yield tag, columns[0], columns[1:]
        else:
            yield from ((tag, task, [columns[1]]) for task in columns[0])


def decided_ns(body: bytes) -> int:
    return int(_decode(body)[0])


def _set_record(name: str, fields: list[str]) -> Callable[[Plain, tuple[Any, ...], bytes], None]:
    def put(tasks: Plain, path: tuple[Any, ...], value: bytes) -> None:
        values = _decode(value)
        tasks[name][_printable_key(path[0])] = dict(zip(fields, values, strict=False))

    return put


def _printable_key(part: Any) -> Any:
    return part.hex() if isinstance(part, bytes) else part


def _append_path(name: str) -> Callable[[Plain, tuple[Any, ...], bytes], None]:
    def add(tasks: Plain, path: tuple[Any, ...], value: bytes) -> None:
        tasks[name].append(list(path))

    return add


def _expiry_batch(tasks: Plain, path: tuple[Any, ...], value: bytes) -> None:
    lease, worker, members, rest = _decode(value)
    tasks["expiries"].append([*path, [lease, worker, [*(members or []), *rest]]])


def _append_value(name: str) -> Callable[[Plain, tuple[Any, ...], bytes], None]:
    def add(tasks: Plain, path: tuple[Any, ...], value: bytes) -> None:
        tasks[name].append([*path, _decode(value)])

    return add


def _ready_range(tasks: Plain, path: tuple[Any, ...], value: bytes) -> None:
    """Decode a row of the ready index: it names one task, or the first and last of a range."""
    end = value[0] - 0x13
    first = int.from_bytes(value[1:end], "big")
    last = int.from_bytes(value[end + 1 :], "big") if len(value) > end else first
    tasks["ready"] += [[*path[:-1], seq] for seq in range(first, last + 1)]
    if path[-1] != first:
        tasks["ready"].append([*path[:-1], 0])  # a wrong key: no lookup finds this row
    if first < last:
        tasks["runs"] += range(first, last + 1)


def _fair_turn(tasks: Plain, path: tuple[Any, ...], value: bytes) -> None:
    """Decode a ready task with a limit key. Its rank is not part of the place."""
    queue, kind, priority, _, seq = path
    tasks["ready"].append([queue, kind, priority, seq])


def _range_lease(tasks: Plain, path: tuple[Any, ...], value: bytes) -> None:
    """Decode a range lease into the status that each of its tasks would have."""
    worker, expires_ns, granted_ns, runs, _, _ = _decode(value)
    times = {"expires_ns": expires_ns, "granted_ns": granted_ns, "progress_ns": granted_ns}
    row = {"state": 1, "attempt": 1, "lease": path[0], "worker": worker, **times}
    for first, last, _ in runs:
        tasks["held"].update(dict.fromkeys(range(first, last + 1), row))


def _range_lease_index(tasks: Plain, path: tuple[Any, ...], value: bytes) -> None:
    tasks["held_at"][path[0]] = int.from_bytes(value[1:], "big")


def _idempotency_key(tasks: Plain, path: tuple[Any, ...], value: bytes) -> None:
    tasks["keys"].append([*path, int.from_bytes(value[1:], "big")])


def _running_count(tasks: Plain, path: tuple[Any, ...], value: bytes) -> None:
    tasks["running"].append([*path, int.from_bytes(value, "big", signed=True)])


def _set_number(name: str) -> Callable[[Plain, tuple[Any, ...], bytes], None]:
    def put(tasks: Plain, path: tuple[Any, ...], value: bytes) -> None:
        tasks[name] = int.from_bytes(value, "big", signed=True)

    return put


def _checkpoint(tasks: Plain, path: tuple[Any, ...], value: bytes) -> None:
    if path[0] == "now":
        latest, before, *_ = _decode(value)
        tasks["latest"] = dict(zip(CHECKPOINT, latest, strict=True))
        tasks["before"] = dict(zip(CHECKPOINT, before, strict=True))
    elif path[0] == "c":
        chunk = dict(zip(CHUNK, _decode(zlib.decompress(value)), strict=True))
        tasks["chunks"].setdefault(path[1], []).append(chunk)


_ROWS: dict[str, Callable[[Plain, tuple[Any, ...], bytes], None]] = {
    "b": _set_record("bodies", BODY),
    "t": _set_record("statuses", STATUS),
    "w": _ready_range,
    "f": _fair_turn,
    "l": _range_lease,
    "i": _range_lease_index,
    "y": _append_path("suspect"),
    "p": _append_path("parked"),
    "u": _append_path("stray"),
    "d": _append_path("delayed"),
    "a": _append_path("dependents"),
    "e": _append_path("ended"),
    "x": _expiry_batch,
    "k": _idempotency_key,
    "r": _append_value("retained"),
    "n": _set_record("counts", COUNTS),
    "c": _running_count,
    "h": _checkpoint,
    "seq": _set_number("seq"),
    "lease": _set_number("lease"),
}

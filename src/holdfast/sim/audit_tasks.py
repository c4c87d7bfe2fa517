"""The rows of tasks as plain data, and their log, by a decoding of their own (see `audit`).

A log entry is [decided_ns, generation, [record, …]], a record [tag, column, …]; tags count from 1 in the
order in which document 003 names the kinds, `TaskDead` being the last.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

Plain = dict[str, Any]

# The one universe whose tasks are simulated.
UNIVERSE = "u"


def _names(text: str) -> list[str]:
    """The fields of a record, in their order on disk."""
    return text.split()


BODY = _names("spec args created_ns generation not_before_ns key limit after redrive_of blob")
STATUS = _names(
    "state attempt failures expiries lease worker expires_ns granted_ns progress_ns not_before_ns "
    "waits awaited ended_ns reason error redriven_by result blob"
)
COUNTS = _names("ready suspect parked delayed blocked leased completed failed dead stray")
CHECKPOINT = _names("number height last chunks bytes")
CHUNK = _names("lo hi height fresh tasks digest")

_decode = msgspec.msgpack.Decoder().decode


def new_universe() -> Plain:
    return {
        "bodies": {}, "statuses": {}, "held": {}, "held_at": {}, "runs": [], "ready": [], "suspect": [], "parked": [],
        "stray": [], "delayed": [], "dependents": [], "ended": [], "expiries": [], "keys": [], "retained": [],
        "counts": {}, "running": [], "chunks": {}, "before": None, "latest": None, "seq": 0, "lease": 0,
    }  # fmt: skip


def task_row(tasks: Plain, path: tuple[Any, ...], value: bytes) -> None:
    kind = path[0]
    if kind in _ROWS:
        _ROWS[kind](tasks, path[1:], value)


def open_tasks(tasks: Plain) -> list[int]:
    """Tasks that have not ended."""
    statuses = tasks["statuses"]
    return [seq for seq in tasks["bodies"] if seq not in statuses or statuses[seq]["state"] < 2]


def singles(body: bytes) -> Iterator[tuple[int, int, list[Any]]]:
    """(tag, task, what is said of it) for each task of each record of an entry, in order."""
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


def _set(name: str, fields: list[str]) -> Callable[[Plain, tuple[Any, ...], bytes], None]:
    def put(tasks: Plain, path: tuple[Any, ...], value: bytes) -> None:
        values = _decode(value)
        tasks[name][_name(path[0])] = dict(zip(fields, values, strict=False))

    return put


def _name(part: Any) -> Any:
    return part.hex() if isinstance(part, bytes) else part


def _list(name: str) -> Callable[[Plain, tuple[Any, ...], bytes], None]:
    def add(tasks: Plain, path: tuple[Any, ...], value: bytes) -> None:
        tasks[name].append(list(path))

    return add


def _expiry(tasks: Plain, path: tuple[Any, ...], value: bytes) -> None:
    lease, worker, named, left = _decode(value)
    tasks["expiries"].append([*path, [lease, worker, [*(named or []), *left]]])


def _listed(name: str) -> Callable[[Plain, tuple[Any, ...], bytes], None]:
    def add(tasks: Plain, path: tuple[Any, ...], value: bytes) -> None:
        tasks[name].append([*path, _decode(value)])

    return add


def _runs(tasks: Plain, path: tuple[Any, ...], value: bytes) -> None:
    """A lane: a row names a task, or the first and the last of several."""
    end = value[0] - 0x13
    first = int.from_bytes(value[1:end], "big")
    last = int.from_bytes(value[end + 1 :], "big") if len(value) > end else first
    tasks["ready"] += [[*path[:-1], seq] for seq in range(first, last + 1)]
    if path[-1] != first:
        tasks["ready"].append([*path[:-1], 0])  # nobody finds it by its key
    if first < last:
        tasks["runs"] += range(first, last + 1)


def _held(tasks: Plain, path: tuple[Any, ...], value: bytes) -> None:
    """Tasks that are leased in runs: what the status of each would be."""
    worker, expires_ns, granted_ns, runs, _, _ = _decode(value)
    times = {"expires_ns": expires_ns, "granted_ns": granted_ns, "progress_ns": granted_ns}
    row = {"state": 1, "attempt": 1, "lease": path[0], "worker": worker, **times}
    for first, last, _ in runs:
        tasks["held"].update(dict.fromkeys(range(first, last + 1), row))


def _held_at(tasks: Plain, path: tuple[Any, ...], value: bytes) -> None:
    tasks["held_at"][path[0]] = int.from_bytes(value[1:], "big")


def _key(tasks: Plain, path: tuple[Any, ...], value: bytes) -> None:
    tasks["keys"].append([*path, int.from_bytes(value[1:], "big")])


def _running(tasks: Plain, path: tuple[Any, ...], value: bytes) -> None:
    tasks["running"].append([*path, int.from_bytes(value, "big", signed=True)])


def _number(name: str) -> Callable[[Plain, tuple[Any, ...], bytes], None]:
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
    "b": _set("bodies", BODY),
    "t": _set("statuses", STATUS),
    "w": _runs,
    "l": _held,
    "i": _held_at,
    "y": _list("suspect"),
    "p": _list("parked"),
    "u": _list("stray"),
    "d": _list("delayed"),
    "a": _list("dependents"),
    "e": _list("ended"),
    "x": _expiry,
    "k": _key,
    "r": _listed("retained"),
    "n": _set("counts", COUNTS),
    "c": _running,
    "h": _checkpoint,
    "seq": _number("seq"),
    "lease": _number("lease"),
}

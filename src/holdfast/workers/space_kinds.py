"""The kind of each stored row for the census of the store: its universe, its kind of data, and its type.

The key of a row has its space, which has the kind, and mostly the universe. The type is in the key (the kind of an
effect, a queue), or it is a property of the subject of the row: the type of a world, the name of a task or flow.
`classify` returns such a subject as a reference, and `Types` finds its type with a bounded memory.

    universe   "" for rows that belong to no universe, or to several: blobs, the lease log, answers of commits
    kind       one of `KINDS`
    type       "" for kinds without types, and for rows whose subject is removed
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from holdfast import codec
from holdfast.codec import Record
from holdfast.errors import HoldfastError, Invalid
from holdfast.store import schema, tuples
from holdfast.store.api import Store
from holdfast.store.row_sizes import peek_rows
from holdfast.store.schema import Space
from holdfast.store.tuples import Element

# Subjects whose types a census remembers.
TYPES_MAX = 10_000
WORLD, TASK, FLOW = range(3)


class Reference(NamedTuple):
    """A subject whose type is the type of a row."""

    of: int
    universe: str
    id: Element


class RowKind(NamedTuple):
    universe: str
    kind: str
    type: str | Reference = ""


class Classified(NamedTuple):
    """The kind of a row, and the key prefix that all its neighbours of this kind share."""

    kind: RowKind
    prefix: bytes
    # The prefix up to the subject, if the kind has one: rows of the next subject have it, too.
    head: bytes = b""


def classify(key: bytes) -> Classified:
    """Return the kind of a row. A key that is not of Holdfast is a row of the user."""
    if key == schema.MARKER_KEY:
        return Classified(_STORE, key)
    try:
        parts, ends = _split(key)
        space = Space(parts[0])  # type: ignore[arg-type]
        kind, depth = _KINDS[space](parts)
    except (HoldfastError, ValueError, LookupError):
        return Classified(_USER, key)
    depth = min(depth, len(ends))
    head = key[: ends[depth - 2]] if isinstance(kind.type, Reference) and depth == 4 else b""
    return Classified(kind, key[: ends[depth - 1]], head)


def classify_next(key: bytes, last: Classified) -> Classified:
    """Return the kind of the row after a row of this kind."""
    of = last.kind.type
    if not last.head or not key.startswith(last.head) or not isinstance(of, Reference):
        return classify(key)
    try:
        id, end = tuples.unpack_element(key, len(last.head))
    except HoldfastError:
        return classify(key)
    kind = RowKind(last.kind.universe, last.kind.kind, Reference(of.of, of.universe, id))
    return Classified(kind, key[:end], last.head)


# The first fields of `WorldRecord`, `FlowBodyRow` and `TaskBodyRow`. They are decoded faster than the whole records.


class _WorldHead(Record, frozen=True):
    universe: str
    world_id: str
    type: str


class _NamedSpec(Record, frozen=True):
    name: str


class _FlowHead(Record, frozen=True):
    spec: _NamedSpec


class _TaskHead(Record, frozen=True):
    spec: bytes


class Types:
    """The types of subjects, with a bounded memory."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._types: dict[Reference, str] = {}
        self._names: dict[bytes, str] = {}

    def find(self, wanted: Iterable[Reference]) -> Mapping[Reference, str]:
        """Return the types of subjects, with at most two reads. A removed subject has the type ""."""
        subjects = set(wanted)
        missing = [one for one in subjects if one not in self._types]
        if len(self._types) + len(missing) > TYPES_MAX:
            self._types.clear()
            missing = list(subjects)
        if missing:
            self._read(missing)
        return self._types

    def _read(self, missing: list[Reference]) -> None:
        keys = {one: schema.key_prefix(*_SUBJECT_ROWS[one.of](one)) for one in missing}
        rows = peek_rows(self._store, list(keys.values()))
        specs: dict[Reference, bytes] = {}
        for one, key in keys.items():
            row, self._types[one] = rows.get(key), ""
            if row is None:
                continue
            # A damaged row has no type. `verify` reports it.
            with contextlib.suppress(Invalid):
                if one.of == WORLD:
                    self._types[one] = codec.unpack_as(_WorldHead, row).type
                elif one.of == FLOW:
                    self._types[one] = codec.unpack_as(_FlowHead, row).spec.name
                else:
                    specs[one] = _spec_key(one.universe, codec.unpack_as(_TaskHead, row).spec)
        self._read_specs(specs)

    def _read_specs(self, specs: Mapping[Reference, bytes]) -> None:
        if missing := set(specs.values()) - self._names.keys():
            if len(self._names) + len(missing) > TYPES_MAX:
                self._names.clear()
                missing = set(specs.values())
            for key, row in peek_rows(self._store, list(missing)).items():
                if row is not None:
                    with contextlib.suppress(Invalid):
                        self._names[key] = codec.unpack_as(_NamedSpec, row).name
        for one, key in specs.items():
            self._types[one] = self._names.get(key, "")


_SUBJECT_ROWS: tuple[Callable[[Reference], tuple[Space, str, str, Element]], ...] = (
    lambda one: (Space.WORLD, one.universe, "w", one.id),
    lambda one: (Space.TASK, one.universe, "b", one.id),
    lambda one: (Space.FLOW, one.universe, "b", one.id),
)


@lru_cache(1024)
def _spec_key(universe: str, spec: bytes) -> bytes:
    return schema.key_prefix(Space.TASK, universe, "s", spec)


_STORE = RowKind("", "store")
_USER = RowKind("", "user_rows")
# A kind, and the number of key elements that determine it.
Found = tuple[RowKind, int]
Parts = list[Element]


def _split(key: bytes) -> tuple[Parts, list[int]]:
    """Return the elements of a key and the offsets of their ends."""
    parts: Parts = []
    ends: list[int] = []
    at = 0
    while at < len(key):
        element, at = tuples.unpack_element(key, at)
        parts.append(element)
        ends.append(at)
    return parts, ends


def _fixed(kind: str) -> Callable[[Parts], Found]:
    """Rows of the whole store."""
    return lambda parts: (RowKind("", kind), 1)


def _of_universe(kind: str) -> Callable[[Parts], Found]:
    """Rows whose second key element is their universe."""
    return lambda parts: (RowKind(str(parts[1]), kind), 2)


def _app_state(parts: Parts) -> Found:
    kind = {
        "budget": "budgets", "dispatch": "dispatches", "replay": "dispatches", "code": "declarations",
    }.get(str(parts[1]))  # fmt: skip
    return (_STORE, 2) if kind is None else (RowKind(str(parts[2]), kind), 3)


def _sequence(parts: Parts) -> Found:
    inner = parts[1:]
    universe = ""
    if inner and isinstance(inner[0], int):
        found, _ = _KINDS[Space(inner[0])](inner)
        universe = found.universe
    return RowKind(universe, "sequences"), len(parts)


def _lease(parts: Parts) -> Found:
    universe, slash, _ = str(parts[-1]).partition("/")
    return RowKind(universe if slash else "", "leases"), len(parts)


def _subject(kind: str) -> Callable[[Parts], Found]:
    """Rows of a journal or of its snapshots."""

    def found(parts: Parts) -> Found:
        first, _, rest = str(parts[1]).partition("/")
        if first == "tasks":
            return RowKind(rest, "task_log"), 2
        if first == "run":
            return RowKind("", "ledger"), 2
        other = _LOGS.get(rest)
        if other is not None:
            return RowKind(first, other), 2
        return RowKind(first, kind, Reference(WORLD, first, rest)), 2

    return found


_LOGS = {"authority": "leader_log", "dispatch": "dispatches"}


def _queue(parts: Parts) -> Found:
    name = str(parts[1])
    universe, slash, rest = name.partition("/")
    if not slash:
        universe, rest = "", name
    first, _, effect = rest.partition("/")
    if parts[2] in ("z", "t"):
        return RowKind(universe, "dead_letters", effect if first == "effects" else rest), 3
    if slash and first == "effects":
        # Mail waits in the queues of one effect kind.
        return RowKind(universe, "mail" if effect.startswith("fabric.") else "effects", effect), 3
    if slash and first == "timers":
        return RowKind(universe, "timers", rest), 3
    return RowKind(universe, "queues", rest), 3


def _dedupe(parts: Parts) -> Found:
    scope = str(parts[1])
    universe, slash, rest = scope.partition("/")
    if slash:
        return RowKind(universe, "idempotency_keys", rest), 2
    if len(parts) < 4:
        return RowKind("", "idempotency_keys", scope), len(parts)
    # `<length>:<universe>/<world>:<key>`
    universe, slash, _ = str(parts[-1]).partition(":")[2].partition("/")
    return RowKind(universe if slash else "", "idempotency_keys", scope), len(parts)


def _world(parts: Parts) -> Found:
    universe, row = str(parts[1]), str(parts[2])
    if row == "n":
        return RowKind(universe, "worlds", str(parts[3])), 4
    if row in ("i", "it", "r"):
        return RowKind(universe, "effect_intents"), 3
    if row in ("w", "a", "t", "h", "k", "z", "g"):
        kind = {"t": "timers", "h": "world_snapshots"}.get(row, "worlds")
        return RowKind(universe, kind, Reference(WORLD, universe, parts[3])), 4
    return RowKind(universe, "world_index"), 3


def _task(parts: Parts) -> Found:
    universe, row = str(parts[1]), str(parts[2])
    if row in ("b", "t", "g"):
        return RowKind(universe, "tasks", Reference(TASK, universe, parts[3])), 4
    if row in _QUEUE_ROWS:
        return RowKind(universe, "task_index", str(parts[3])), 4
    return RowKind(universe, "task_log" if row == "h" else "task_index"), 3


# Rows of tasks whose fourth key element is a queue.
_QUEUE_ROWS = frozenset(["w", "f", "fg", "ft", "fn", "y", "p", "u", "n", "q", "c"])
_FLOW_ROWS = {
    "b": "flows", "h": "flows", "p": "flows", "r": "steps", "o": "steps", "m": "flow_inbox", "mk": "flow_inbox",
}  # fmt: skip


def _flow(parts: Parts) -> Found:
    universe, row = str(parts[1]), str(parts[2])
    kind = _FLOW_ROWS.get(row)
    if kind is None:
        return RowKind(universe, "flow_index"), 3
    return RowKind(universe, kind, Reference(FLOW, universe, parts[3])), 4


def _schedule(parts: Parts) -> Found:
    return RowKind(
        str(parts[1]), "schedules", str(parts[3]) if parts[2] in ("s", "o", "q", "c") else ""
    ), 4


def _statistic(parts: Parts) -> Found:
    groups = str(parts[2]).startswith("e")
    return RowKind(str(parts[1]), "error_groups" if groups else "ended_counts"), 3


_KINDS: dict[Space, Callable[[Parts], Found]] = {
    Space.APP_STATE: _app_state,
    Space.OUTCOME: _fixed("outcomes"),
    Space.SEQUENCE: _sequence,
    Space.BLOB: _fixed("blobs"),
    Space.LEASE: _lease,
    Space.LEASE_LOG: _fixed("lease_log"),
    Space.JOURNAL: _subject("world_journal"),
    Space.INBOX: _subject("world_inbox"),
    Space.QUEUE: _queue,
    Space.DEDUPE: _dedupe,
    Space.SNAPSHOT: _subject("world_snapshots"),
    Space.WORLD: _world,
    Space.READY: _of_universe("world_index"),
    Space.WORKER: _of_universe("workers"),
    Space.RUN: _fixed("ledger"),
    Space.TASK: _task,
    Space.FLOW: _flow,
    Space.SCHEDULE: _schedule,
    Space.AUDIT: _of_universe("audit"),
    Space.STATISTIC: _statistic,
    Space.SETTING: _of_universe("settings"),
    Space.JOB: _of_universe("jobs"),
}
KINDS = (
    "audit", "blobs", "budgets", "dead_letters", "declarations", "dispatches", "effect_intents", "effects",
    "ended_counts", "error_groups", "flow_inbox", "flow_index", "flows", "idempotency_keys", "jobs", "leader_log",
    "lease_log", "leases", "ledger", "mail", "outcomes", "queues", "schedules", "sequences", "settings", "steps",
    "store", "task_index", "task_log", "tasks", "timers", "user_rows", "workers", "world_inbox", "world_index",
    "world_journal", "world_snapshots", "worlds",
)  # fmt: skip

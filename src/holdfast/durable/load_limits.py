"""Load limits: how much unfinished work a universe accepts, and the judgement of new work (load shedding).

    tasks               tasks that wait, in the universe
    queues              tasks that wait, by task queue
    effects             effects without an outcome, in the universe
    effect_kinds        effects without an outcome, by kind
    timers              pending timers of worlds
    inbox               unread messages of one world
    flow_inbox          unreceived events of one flow
    bytes_in_flight     arguments of unfinished tasks, unread messages, and unreceived events of open flows
    worlds_per_worker   worlds that the orchestrator assigns to one worker

- A limit bounds new work of clients: task submissions, flow starts, events, schedule occurrences. The commit that
  would exceed it refuses that work with `Overloaded` and changes nothing of it.
- Accepted work is never refused: receipts, timers, heartbeats, reports of workers, steps of flows, cycles of worlds.
  It may therefore exceed a limit. New work is refused until it has fallen below the limit again.
- The judgement reads counters. The counters of a queue exist anyway. Those of a universe (`tasks`, `effects`,
  `bytes_in_flight`) are rows that commits maintain while the limit is set. Without limits an operation reads one absent row.
"""

from __future__ import annotations

from functools import lru_cache

from msgspec import field

from holdfast import codec
from holdfast.codec import Record
from holdfast.errors import Overloaded
from holdfast.store import schema, tuples
from holdfast.store.api import Txn

# The time after which a refused call may be repeated.
RETRY_AFTER_S = 1.0
TASKS, EFFECTS, BYTES = COUNTED = ("tasks", "effects", "bytes_in_flight")


class LoadLimits(Record, frozen=True):
    """The limits of a universe. 0 means unlimited."""

    tasks: int = 0
    queues: dict[str, int] = field(default_factory=dict)
    effects: int = 0
    effect_kinds: dict[str, int] = field(default_factory=dict)
    timers: int = 0
    inbox: int = 0
    bytes_in_flight: int = 0
    worlds_per_worker: int = 0
    # Only work that was accepted since this time counts towards `bytes_in_flight`.
    bytes_since_ns: int = 0
    # The digest of the last declaration in a file. Only a changed file overrides later settings of an operator.
    declared: bytes = b""
    flow_inbox: int = 0


NO_LIMITS = LoadLimits()


def find(txn: Txn, universe: str) -> LoadLimits | None:
    """Return the limits of a universe; None if it has none."""
    return find_at(txn, limits_key(universe))


def find_at(txn: Txn, key: bytes) -> LoadLimits | None:
    """`find` for a caller that keeps the `limits_key` of its universe."""
    row = txn.get(key)
    return None if row is None else _decode(row)


def find_bytes_since(txn: Txn, key: bytes) -> int | None:
    """Return the time since which accepted work counts towards `bytes_in_flight`; None without this limit."""
    limits = find_at(txn, key)
    return limits.bytes_since_ns if limits is not None and limits.bytes_in_flight else None


def counted(txn: Txn, universe: str, name: str) -> int:
    """Return a counter of a universe. It is exact while its limit is set."""
    return txn.count(counter_key(universe, name))


def add_to(txn: Txn, universe: str, name: str, change: int) -> None:
    """Change a counter of a universe, whose limit is set."""
    if change:
        txn.add(counter_key(universe, name), change)


def refuse(what: str, universe: str, found: int, limit: int, **names: str) -> Overloaded:
    """Make the error of refused work."""
    return Overloaded(
        limit=what,
        universe=universe,
        **names,
        found=found,
        limit_max=limit,
        retry_after_s=RETRY_AFTER_S,
    )


@lru_cache(maxsize=1024)
def limits_key(universe: str) -> bytes:
    return schema.key_prefix(schema.Space.SETTING, universe, "limits")


@lru_cache(maxsize=4096)
def counter_key(universe: str, name: str) -> bytes:
    return limits_key(universe) + tuples.pack((name,))


@lru_cache(maxsize=256)
def _decode(row: bytes) -> LoadLimits:
    return codec.unpack_as(LoadLimits, row)

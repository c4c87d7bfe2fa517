"""Readiness facts: the input of `derive_readiness`, read from a store.

`gather_facts` reads one snapshot of one universe. Its cost grows with the number of worlds that are
not ready, up to `SUBJECTS_MAX`. The counters give that number, so a healthy universe is not
scanned, and a scan stops at the last such world. Runs belong to the store and not to a universe:
the latest run of each name, if halted, is listed for every universe.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from msgspec.structs import replace

from holdfast import codec
from holdfast.config import (
    BATCH_MAX,
    SCAN_PAGE,
    STORE_TIME_BEHIND_WARN_NS,
    STORE_TIME_LEAP_WARN_NS,
    S,
)
from holdfast.dispatch import log, notifications
from holdfast.durable import queue
from holdfast.errors import Busy, HoldfastError, NotFound, SchemaMismatch, StoreError
from holdfast.leadership import leader_lease, worker_registry
from holdfast.ledger import runs
from holdfast.ledger.runs import RunRecord
from holdfast.store import schema
from holdfast.store.api import Store, Txn
from holdfast.store.engine import check_schema
from holdfast.workers.readiness import (
    ObservedProblem,
    ReadinessBlocker,
    ReadinessFacts,
    ReadinessReason,
    ReadinessSnapshot,
    ReadinessSubject,
    WaitingMail,
    derive_readiness,
    unreadable_facts,
)
from holdfast.world import catalog, unknown_events
from holdfast.world.catalog import WorldRecord, WorldStatus
from holdfast.world.messaging import outbox

# Subjects that a snapshot lists. Further ones are only counted.
SUBJECTS_MAX = 1000
# World records scanned to find them.
RECORDS_MAX = 100_000
# Universes in other stores that are checked.
ROUTES_MAX = 1000
# Run names that are checked.
RUNS_MAX = 1000

# The error code that the store itself uses when it is unreachable.
UNREACHABLE = "store_unreachable"

_REASONS = {
    WorldStatus.PAUSED: ReadinessReason.WORLD_PAUSED,
    WorldStatus.PARKED: ReadinessReason.WORLD_PARKED,
}


def read_readiness(
    store: Store, universe: str, worker_ttl_ns: int = worker_registry.TTL_NS
) -> ReadinessSnapshot:
    """Return the readiness of a universe. A store failure is part of the result, not an error."""
    try:
        facts = store.read(gather_facts, universe, worker_ttl_ns)
        snapshot = derive_readiness(facts, store.now_ns())
        return replace(snapshot, warnings=[*snapshot.warnings, *store.read(clock_warnings)])
    except (StoreError, Busy) as error:
        return store_away_snapshot(universe, error)


def clock_warnings(txn: Txn) -> list[ReadinessBlocker]:
    """Return a warning if the wall clock at the last boot contradicts the times of earlier commits."""
    row = txn.get(schema.META_KEY)
    leap_ns = 0 if row is None else codec.unpack_as(schema.StoreMeta, row).leap_ns
    days = abs(leap_ns) // (24 * 3600 * S)
    if leap_ns > STORE_TIME_LEAP_WARN_NS:
        text = f"store time went {days} days ahead when the machine started: check the system clock"
    elif -leap_ns > STORE_TIME_BEHIND_WARN_NS:
        text = f"the system clock was {days} days behind store time when the machine started"
    else:
        return []
    return [ReadinessBlocker(ReadinessReason.STORE_TIME, ReadinessReason.STORE_TIME.value, text)]


def store_away_snapshot(universe: str, error: HoldfastError) -> ReadinessSnapshot:
    """Return the readiness of a universe whose store is unavailable, with the start of the outage."""
    trouble = _trouble(error)
    if isinstance(error, Busy):
        fields = error.fields
        where = str(fields.get("url") or fields.get("path") or "")
        trouble = _store_away_trouble(
            error.code, where, str(fields.get("why", "")), fields.get("since_ns", 0)
        )
    return derive_readiness(unreadable_facts(universe, trouble), 0)


def store_silent_snapshot(universe: str, store: Store, waited_s: float) -> ReadinessSnapshot:
    """Return the readiness after a store timeout."""
    since_ns = getattr(store, "away_since_ns", 0)
    trouble = _store_away_trouble(
        UNREACHABLE, store.url, f"no answer within {waited_s:g} s", since_ns
    )
    return derive_readiness(unreadable_facts(universe, trouble), 0)


def gather_facts(
    txn: Txn, universe: str, worker_ttl_ns: int = worker_registry.TTL_NS
) -> ReadinessFacts:
    epoch = leader_lease.epoch(txn, universe)
    counts = catalog.count_by_status(txn, universe)
    blocked = sum(counts[status.value] for status in _REASONS)
    worlds = _blocked_worlds(txn, universe, min(blocked, SUBJECTS_MAX))
    stopped = unknown_events.list_stopped(txn, universe, BATCH_MAX)
    listed_worlds = {world.subject for world in worlds}
    # A stopped world that is also paused or parked has both blockers and is counted once.
    worlds += _stopped_worlds(txn, universe, stopped[:SUBJECTS_MAX])
    blocked += sum(1 for world_id in stopped if world_id not in listed_worlds)
    listed = len({world.subject for world in worlds})
    return ReadinessFacts(
        universe=universe,
        generation=txn.generation,
        authority=leader_lease.current(txn, universe),
        replay_pending=notifications.count_pending(txn, universe),
        deferred=_deferred(txn, universe),
        backlog=log.backlog(txn, universe),
        schema=_schema_trouble(txn),
        workers_live=len(
            worker_registry.list_live(txn, universe, txn.now_ns, worker_ttl_ns, epoch)
        ),
        worlds=counts,
        mail=tuple(_mail(txn, universe)),
        subjects=(*worlds, *_halted_runs(txn)),
        subjects_omitted=max(blocked - listed, 0),
    )


# -- inside --------------------------------------------------------------------------------------


def _blocked_worlds(txn: Txn, universe: str, wanted: int) -> list[ReadinessSubject]:
    found: list[ReadinessSubject] = []
    after, scanned = "", 0
    while len(found) < wanted and scanned < RECORDS_MAX:
        page = catalog.list_worlds(txn, universe, after, SCAN_PAGE)
        if not page:
            break
        after, scanned = page[-1].world_id, scanned + len(page)
        found += [_subject(world) for world in page if world.status in _REASONS]
    return found[:wanted]


def _stopped_worlds(txn: Txn, universe: str, world_ids: list[str]) -> list[ReadinessSubject]:
    """Return worlds that wait for a worker that knows their next item or has their code."""
    found: list[ReadinessSubject] = []
    for world_id in world_ids:
        world = catalog.get_record(txn, universe, world_id)
        if world.unknown is None:
            continue
        why = world.unknown.as_blocker()
        blocker = ReadinessBlocker(
            ReadinessReason(why.code), why.code, why.text, why.height, why.since_ns
        )
        found.append(ReadinessSubject(world_id, f"{world.type}/{world.name}", (blocker,)))
    return found


def _subject(world: WorldRecord) -> ReadinessSubject:
    why = world.blocker
    reason = _REASONS[world.status]
    blocker = (
        ReadinessBlocker(reason, reason.value, "")
        if why is None
        else ReadinessBlocker(reason, why.code, why.text, why.height, why.since_ns)
    )
    return ReadinessSubject(world.world_id, f"{world.type}/{world.name}", (blocker,))


def _halted_runs(txn: Txn) -> list[ReadinessSubject]:
    latest = [runs.get_record(txn, run_id) for _, run_id in runs.list_names(txn, "", RUNS_MAX)]
    return [_halted(run) for run in latest if run and run.status is runs.RunLifecycle.HALTED]


def _halted(run: RunRecord) -> ReadinessSubject:
    text = run.halted or "the run record has no reason"
    blocker = ReadinessBlocker(
        ReadinessReason.RUN_HALTED, ReadinessReason.RUN_HALTED.value, text, since_ns=run.finished_ns
    )
    return ReadinessSubject(runs.subject_of(run.run_id), f"run/{run.name}", (blocker,))


def _mail(txn: Txn, universe: str) -> Iterator[WaitingMail]:
    """Yield the non-empty peer queues of mail to other stores."""
    for to in outbox.announced_universes(txn, universe, ROUTES_MAX):
        counts = queue.counts(txn, outbox.peer_queue_name(universe, to))
        waiting = counts.ready + counts.delayed + counts.claimed
        if waiting:
            yield WaitingMail(to, waiting, delivery_failed=counts.delayed > 0)


def _deferred(txn: Txn, universe: str) -> ObservedProblem | None:
    """Return why the leader was not notified of the events after its cursor."""
    state = notifications.read(txn, universe)
    if state is None or state.deferred is None:
        return None
    why = state.deferred
    return ObservedProblem(why.code, why.text, why.since_ns)


def _schema_trouble(txn: Txn) -> ObservedProblem | None:
    try:
        check_schema(txn.get(schema.MARKER_KEY), schema.SCHEMA_VERSION, bootstrap=False)
    except (SchemaMismatch, NotFound) as error:
        return _trouble(error)
    return None


def _store_away_trouble(code: str, where: str, why: str, since_ns: int) -> ObservedProblem:
    since = f" since {_format_time(since_ns)}" if since_ns else ""
    return ObservedProblem(
        code, f"store {where} does not answer{since}" + (f": {why}" if why else ""), since_ns
    )


def _format_time(wall_ns: int) -> str:
    return datetime.fromtimestamp(wall_ns // S, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _trouble(error: HoldfastError) -> ObservedProblem:
    return ObservedProblem(error.code, str(error))

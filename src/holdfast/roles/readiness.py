"""The facts of readiness, read from a store: what `derive_readiness` derives from.

`gather` reads one snapshot of one universe. Its cost is that of the worlds that are not ready, up to
`SUBJECTS_MAX`: the counters say how many there are to be found, so a universe in which all is well
is not scanned at all, and a scan ends with the last of them. Runs belong to the store and to no
universe: the latest of each name, if it is halted, is told with every one.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from msgspec.structs import replace

from holdfast import codec
from holdfast.authority import authority, dispatch_log, replay, workers
from holdfast.authority.readiness import (
    Blocker,
    Facts,
    Mail,
    ReadinessSnapshot,
    Reason,
    Subject,
    Trouble,
    derive_readiness,
    unread,
)
from holdfast.config import (
    BATCH_MAX,
    SCAN_PAGE,
    STORE_TIME_BEHIND_WARN_NS,
    STORE_TIME_LEAP_WARN_NS,
    S,
)
from holdfast.durable import queue
from holdfast.errors import Busy, HoldfastError, NotFound, SchemaMismatch, StoreError
from holdfast.ledger import runs
from holdfast.ledger.runs import RunRecord
from holdfast.store import schema
from holdfast.store.api import Store, Txn
from holdfast.store.engine import guard_schema
from holdfast.world import catalog, outbox, unknown
from holdfast.world.catalog import Status, WorldRecord

# What a snapshot lists; beyond it there is only a number.
SUBJECTS_MAX = 1000
# World records that are looked at to find those.
RECORDS_MAX = 100_000
# Universes in other stores that are looked at.
ROUTES_MAX = 1000
# Names of runs that are looked at.
RUNS_MAX = 1000

# The code of a store that cannot be reached, as the store itself says it.
UNREACHABLE = "store_unreachable"

_REASONS = {Status.PAUSED: Reason.WORLD_PAUSED, Status.PARKED: Reason.WORLD_PARKED}


def look(store: Store, universe: str, worker_ttl_ns: int = workers.TTL_NS) -> ReadinessSnapshot:
    """Whether a universe is ready now. A store that fails is an answer, not an error."""
    try:
        facts = store.read(gather, universe, worker_ttl_ns)
        found = derive_readiness(facts, store.now_ns())
        return replace(found, warnings=[*found.warnings, *store.read(_calendar)])
    except (StoreError, Busy) as error:
        return away(universe, error)


def _calendar(txn: Txn) -> list[Blocker]:
    """A warning if the calendar of the last boot does not fit to the commits before it."""
    row = txn.get(schema.META_KEY)
    leap_ns = 0 if row is None else codec.unpack_as(schema.Meta, row).leap_ns
    days = abs(leap_ns) // (24 * 3600 * S)
    if leap_ns > STORE_TIME_LEAP_WARN_NS:
        text = f"store time went {days} days ahead when the machine started: is its calendar right?"
    elif -leap_ns > STORE_TIME_BEHIND_WARN_NS:
        text = f"the calendar was {days} days behind store time when the machine started"
    else:
        return []
    return [Blocker(Reason.STORE_TIME, Reason.STORE_TIME.value, text)]


def away(universe: str, error: HoldfastError) -> ReadinessSnapshot:
    """What is known of a universe whose store does not answer: that it does not, and since when."""
    trouble = _trouble(error)
    if isinstance(error, Busy):
        fields = error.fields
        where = str(fields.get("url") or fields.get("path") or "")
        trouble = _silence(error.code, where, str(fields.get("why", "")), fields.get("since_ns", 0))
    return derive_readiness(unread(universe, trouble), 0)


def silent(universe: str, store: Store, waited_s: float) -> ReadinessSnapshot:
    """What there is to say after so long without an answer of the store."""
    since_ns = getattr(store, "away_since_ns", 0)
    trouble = _silence(UNREACHABLE, store.url, f"no answer within {waited_s:g} s", since_ns)
    return derive_readiness(unread(universe, trouble), 0)


def gather(txn: Txn, universe: str, worker_ttl_ns: int = workers.TTL_NS) -> Facts:
    epoch = authority.epoch(txn, universe)
    counts = catalog.counts(txn, universe)
    blocked = sum(counts[status.value] for status in _REASONS)
    worlds = _blocked_worlds(txn, universe, min(blocked, SUBJECTS_MAX))
    stopped = unknown.stopped(txn, universe, BATCH_MAX)
    told = {world.subject for world in worlds}
    # One that is paused or parked as well has both blockers, and is counted once.
    worlds += _stopped_worlds(txn, universe, stopped[:SUBJECTS_MAX])
    blocked += sum(1 for world_id in stopped if world_id not in told)
    listed = len({world.subject for world in worlds})
    return Facts(
        universe=universe,
        generation=txn.generation,
        authority=authority.current(txn, universe),
        replay_pending=replay.pending(txn, universe),
        deferred=_deferred(txn, universe),
        backlog=dispatch_log.backlog(txn, universe),
        schema=_schema_trouble(txn),
        workers_live=len(workers.live(txn, universe, txn.now_ns, worker_ttl_ns, epoch)),
        worlds=counts,
        mail=tuple(_mail(txn, universe)),
        subjects=(*worlds, *_halted_runs(txn)),
        subjects_omitted=max(blocked - listed, 0),
    )


# -- inside --------------------------------------------------------------------------------------


def _blocked_worlds(txn: Txn, universe: str, wanted: int) -> list[Subject]:
    found: list[Subject] = []
    after, looked = "", 0
    while len(found) < wanted and looked < RECORDS_MAX:
        page = catalog.worlds(txn, universe, after, SCAN_PAGE)
        if not page:
            break
        after, looked = page[-1].world_id, looked + len(page)
        found += [_subject(world) for world in page if world.status in _REASONS]
    return found[:wanted]


def _stopped_worlds(txn: Txn, universe: str, world_ids: list[str]) -> list[Subject]:
    """Worlds whose next item no live worker knows, or whose code no live worker has."""
    found: list[Subject] = []
    for world_id in world_ids:
        world = catalog.record(txn, universe, world_id)
        if world.unknown is None:
            continue
        why = world.unknown.told()
        blocker = Blocker(Reason(why.code), why.code, why.text, why.height, why.since_ns)
        found.append(Subject(world_id, f"{world.type}/{world.name}", (blocker,)))
    return found


def _subject(world: WorldRecord) -> Subject:
    why = world.blocker
    reason = _REASONS[world.status]
    blocker = (
        Blocker(reason, reason.value, "")
        if why is None
        else Blocker(reason, why.code, why.text, why.height, why.since_ns)
    )
    return Subject(world.world_id, f"{world.type}/{world.name}", (blocker,))


def _halted_runs(txn: Txn) -> list[Subject]:
    latest = [runs.get(txn, run_id) for _, run_id in runs.names(txn, "", RUNS_MAX)]
    return [_halted(one) for one in latest if one and one.status is runs.Status.HALTED]


def _halted(run: RunRecord) -> Subject:
    text = run.halted or "no reason was kept"
    blocker = Blocker(Reason.RUN_HALTED, Reason.RUN_HALTED.value, text, since_ns=run.finished_ns)
    return Subject(runs.subject_of(run.run_id), f"run/{run.name}", (blocker,))


def _mail(txn: Txn, universe: str) -> Iterator[Mail]:
    """The lanes of mail to other stores that are not empty."""
    for to in outbox.routes(txn, universe, ROUTES_MAX):
        counts = queue.counts(txn, outbox.lane(universe, to))
        waiting = counts.ready + counts.delayed + counts.claimed
        if waiting:
            yield Mail(to, waiting, held_up=counts.delayed > 0)


def _deferred(txn: Txn, universe: str) -> Trouble | None:
    """Why the leader is not told of what lies ahead of its cursor."""
    state = replay.read(txn, universe)
    if state is None or state.deferred is None:
        return None
    why = state.deferred
    return Trouble(why.code, why.text, why.since_ns)


def _schema_trouble(txn: Txn) -> Trouble | None:
    expected = (schema.SCHEMA_MAJOR, schema.SCHEMA_MINOR)
    try:
        guard_schema(txn.get(schema.MARKER_KEY), expected, bootstrap=False)
    except (SchemaMismatch, NotFound) as error:
        return _trouble(error)
    return None


def _silence(code: str, where: str, why: str, since_ns: int) -> Trouble:
    since = f" since {_moment(since_ns)}" if since_ns else ""
    return Trouble(
        code, f"store {where} does not answer{since}" + (f": {why}" if why else ""), since_ns
    )


def _moment(wall_ns: int) -> str:
    return datetime.fromtimestamp(wall_ns // S, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _trouble(error: HoldfastError) -> Trouble:
    return Trouble(error.code, str(error))

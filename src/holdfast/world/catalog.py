"""The catalog of worlds: names, records, assignments and runnable marks.

A world is named by (universe, type, name). The name maps to an id that is chosen when the world is
created. A deleted name that is used again is another world.

A runnable mark is a hint that a world may have work. It is stored under the world's assigned
worker, or under the empty worker, where the orchestrator finds it. Marks are idempotent and the
inbox is authoritative. Only `clear_runnable` removes a mark, in a commit that reads the inbox as
empty.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache

from msgspec.structs import replace

from holdfast import codec
from holdfast.codec import Record
from holdfast.config import KEY_BYTES_MAX, NAME_BYTES_MAX, UNIVERSE_BYTES_MAX
from holdfast.durable import inbox, lease
from holdfast.durable.validation import check_limit, check_name
from holdfast.errors import Invalid, NotFound
from holdfast.store import schema, tuples
from holdfast.store.api import Txn, operation
from holdfast.store.schema import Space
from holdfast.transitions import Transitions
from holdfast.world.code_requirement import CODE, REPLAY, WORLD_TYPE, CodeRequirement, stopped_key

UNASSIGNED = ""
# The code of a world that stopped before an undeclared item, and of that item's dead letter.
UNKNOWN_EVENT = "unknown_event"
# The code of a world that waits for the code of an entry, because other code replays it
# differently.
CODE_MISSING = "code_missing"


class WorldStatus(Enum):
    ACTIVE = "active"
    # Paused by an operator: the world accepts messages and handles none.
    PAUSED = "paused"
    # Parked by the host, with a blocker: continuing would do damage.
    PARKED = "parked"
    DELETED = "deleted"


class WorldEvent(Enum):
    PAUSE = "pause"
    RESUME = "resume"
    PARK = "park"
    DELETE = "delete"


WORLD_TRANSITIONS = Transitions(
    "world",
    WorldStatus.ACTIVE,
    {
        (WorldStatus.ACTIVE, WorldEvent.PAUSE): WorldStatus.PAUSED,
        (WorldStatus.PAUSED, WorldEvent.PAUSE): WorldStatus.PAUSED,
        (WorldStatus.PAUSED, WorldEvent.RESUME): WorldStatus.ACTIVE,
        (WorldStatus.ACTIVE, WorldEvent.RESUME): WorldStatus.ACTIVE,
        (WorldStatus.ACTIVE, WorldEvent.PARK): WorldStatus.PARKED,
        (WorldStatus.PARKED, WorldEvent.PARK): WorldStatus.PARKED,
        (WorldStatus.PARKED, WorldEvent.RESUME): WorldStatus.ACTIVE,
        (WorldStatus.ACTIVE, WorldEvent.DELETE): WorldStatus.DELETED,
        (WorldStatus.PAUSED, WorldEvent.DELETE): WorldStatus.DELETED,
        (WorldStatus.PARKED, WorldEvent.DELETE): WorldStatus.DELETED,
    },
)


class WorldBlocker(Record, frozen=True):
    """The reason why a world is blocked."""

    code: str
    text: str
    height: int = 0
    since_ns: int = 0


class StopReason(Record, frozen=True):
    """The reason of a stop: the inbox item whose type no host of the world declares.

    Seq 0 does not refer to the inbox. The journal after the last snapshot contains a type that the
    code does not declare and cannot replay. Or, with `world` as the side, no live worker has the
    world type. Both wait without a time limit. With `code` or `repeat` as the side, the host
    replays a journal entry of other code differently, and `type` names that other code.
    """

    side: str
    type: str
    version: int
    seq: int
    since_ns: int
    # The world is stopped: no item is handled until a worker declares the type or the item is given
    # up.
    waits: bool = True
    # The wait has timed out: the next host turns the item into a dead letter.
    given_up: bool = False
    # The assignment priority of the world before it stopped.
    priority: int = 0
    # The entry of other code that was replayed differently, and the difference: the blocker if
    # parked.
    height: int = 0
    why: str = ""

    @property
    def code(self) -> str:
        """The code of the blocker that operators see."""
        return CODE_MISSING if self.needs_code else UNKNOWN_EVENT

    @property
    def needs_code(self) -> bool:
        return self.side in (CODE, REPLAY)

    def requirement(self, world: str) -> CodeRequirement:
        """Return the code requirement of a world of this type."""
        return CodeRequirement(world, self.side, self.type, self.version)

    def row_key(self, universe: str, world: str, world_id: str) -> bytes:
        """The index key of the stopped world."""
        return stopped_key(universe, self.requirement(world), self.since_ns, world_id)

    def as_blocker(self) -> WorldBlocker:
        """Format the stop as a blocker for operators."""
        version = f" of version {self.version}" if self.version > 1 else ""
        what = f"{self.side} {self.type!r}{version}"
        text = f"no live worker declares {what}; it is next in the inbox, seq {self.seq}"
        if not self.seq:
            text = f"no live worker declares {what}; its journal after the last snapshot holds one"
        if self.side == WORLD_TYPE:
            text = f"no live worker has the world type {self.type!r}"
        if self.needs_code:
            text = (
                f"no live worker has the code {self.type!r}, which made entry {self.height}; "
                "the code of the last host replays it differently"
            )
        return WorldBlocker(self.code, text, self.height, self.since_ns)


class ForkLineage(Record, frozen=True):
    """The parent of a forked world."""

    parent_world_id: str
    parent_snapshot_hash: bytes
    forked_at_height: int


class WorldRecord(Record, frozen=True):
    """The stored record of a world."""

    universe: str
    world_id: str
    type: str
    name: str
    created_ns: int
    status: WorldStatus = WorldStatus.ACTIVE
    blocker: WorldBlocker | None = None
    lineage: ForkLineage | None = None
    # The number of leases lost while this inbox seq was handled, for poison-event detection.
    stuck_seq: int = 0
    stuck_count: int = 0
    # This seq runs in isolation: a lease lost now counts against this world.
    stuck_alone: bool = False
    # The time of deletion. The rows are erased some time later.
    deleted_ns: int = 0
    # The world is being purged: its erasure leaves a tombstone.
    purged: bool = False
    unknown: StopReason | None = None

    @property
    def stopped(self) -> bool:
        """Whether the world waits for a worker that declares its next item (`unknown_events`)."""
        return self.unknown is not None and self.unknown.waits

    @property
    def blocked_by(self) -> WorldBlocker | None:
        """The reason why the world is blocked, as operators see it."""
        if self.blocker is None and self.unknown is not None and self.unknown.waits:
            return self.unknown.as_blocker()
        return self.blocker


class Assignment(Record, frozen=True):
    """The assignment of a world to a worker."""

    desired_worker_id: str | None = None
    priority: int = 0
    reason: str = ""
    pinned: bool = False


def subject_of(universe: str, world_id: str) -> str:
    """The name of the world for leases, journals, inboxes and snapshots."""
    return f"{universe}/{world_id}"


# -- names and records ---------------------------------------------------------------------------


def find_id(txn: Txn, universe: str, type: str, name: str) -> str | None:
    """Return the id of the world with this name."""
    row = txn.get(_name_key(universe, type, name))
    return None if row is None else row.decode()


def get_record(txn: Txn, universe: str, world_id: str) -> WorldRecord:
    """Return the record of a world; raise NotFound if there is none."""
    row = txn.get(_keys(universe).records + tuples.pack((world_id,)))
    if row is None:
        raise NotFound(what="world", universe=universe, world_id=world_id)
    return _decode_record(row)


def is_deleted(txn: Txn, universe: str, world_id: str) -> bool:
    """Whether a world is deleted or never existed."""
    try:
        return get_record(txn, universe, world_id).status is WorldStatus.DELETED
    except NotFound:
        return True


def create(txn: Txn, universe: str, type: str, name: str, world_id: str) -> WorldRecord:
    """Create a world under a free name. The caller chooses the id, because a replay needs the same
    id."""
    check_text("world id", world_id)
    key = _name_key(universe, type, name)
    for what, taken in (
        ("world name", key),
        ("world id", _keys(universe).records + tuples.pack((world_id,))),
    ):
        if txn.get(taken) is not None:
            raise Invalid(what=what, why="taken", type=type, name=name, world_id=world_id)
    made = WorldRecord(universe, world_id, type, name, txn.now_ns)
    txn.put(key, world_id.encode())
    save_record(txn, made)
    txn.add(_keys(universe).counts + tuples.pack((WorldStatus.ACTIVE.value,)), 1)
    return made


def with_lineage(world: WorldRecord, lineage: ForkLineage) -> WorldRecord:
    return replace(world, lineage=lineage)


def save_record(txn: Txn, world: WorldRecord) -> None:
    txn.put(_keys(world.universe).records + tuples.pack((world.world_id,)), codec.pack(world))


@operation("catalog.change_status")
def change_status(
    txn: Txn, universe: str, world_id: str, event: WorldEvent, blocker: WorldBlocker | None = None
) -> WorldRecord:
    """Change the status of a world by the transition table. The current host is fenced, except on
    resume."""
    was = get_record(txn, universe, world_id)
    status = WORLD_TRANSITIONS.next(was.status, event, world=world_id, name=was.name)
    if blocker is not None:
        blocker = replace(blocker, since_ns=txn.now_ns)
    now = replace(
        was,
        status=status,
        blocker=blocker,
        stuck_seq=0,
        stuck_count=0,
        stuck_alone=False,
        unknown=None if _ends_stop(was, event) else was.unknown,
    )
    if was.stopped and now.unknown is None and was.unknown is not None:
        txn.delete(was.unknown.row_key(universe, was.type, world_id))
    if event is WorldEvent.DELETE:
        now = replace(now, deleted_ns=max(txn.now_ns, 1))
        txn.put(_deleted_key(universe, now.deleted_ns, world_id), b"")
    save_record(txn, now)
    counts = _keys(universe).counts
    txn.add(counts + tuples.pack((was.status.value,)), -1)
    txn.add(counts + tuples.pack((status.value,)), 1)
    if event is WorldEvent.DELETE:
        txn.delete(_name_key(universe, was.type, was.name))
        had = find_assignment(txn, universe, world_id)
        _remove_assignment(txn, universe, world_id)
        if had is not None:
            _mark_former_worker(txn, universe, world_id, had)
    if event is WorldEvent.RESUME:
        mark_runnable(txn, universe, world_id)
    else:
        _force_release_lease(txn, subject_of(universe, world_id), f"the world is {status.value}")
    txn.notify(changes_topic(universe))
    return now


def _ends_stop(was: WorldRecord, event: WorldEvent) -> bool:
    """Whether the event ends the stop of a world. Parking ends a stop that waits for code."""
    by_code = was.unknown is not None and was.unknown.needs_code
    return event is WorldEvent.DELETE or (event is WorldEvent.PARK and by_code)


def list_deleted(txn: Txn, universe: str, until_ns: int, limit: int) -> list[str]:
    """Return worlds that were deleted up to a time and still have rows, purged worlds first."""
    check_limit(limit)
    prefix = schema.key_prefix(Space.WORLD, universe, "x")
    rows = txn.scan(prefix, prefix + tuples.pack_int(until_ns + 1), limit)
    return [str(tuples.unpack(key)[-1]) for key, _ in rows]


def mark_deleted(txn: Txn, record: WorldRecord, deleted_ns: int, purged: bool = False) -> None:
    """Record the time of deletion of a world. A time of 0 means that its rows are erased at
    once."""
    txn.delete(_deleted_key(record.universe, record.deleted_ns, record.world_id))
    txn.put(_deleted_key(record.universe, deleted_ns, record.world_id), b"")
    save_record(txn, replace(record, deleted_ns=deleted_ns, purged=purged or record.purged))


def remove_record(txn: Txn, record: WorldRecord) -> None:
    """Remove a deleted world from the catalog. Later lookups raise NotFound."""
    universe, packed = record.universe, tuples.pack((record.world_id,))
    _remove_assignment(txn, universe, record.world_id)
    txn.delete(_keys(universe).records + packed)
    txn.delete(_deleted_key(universe, record.deleted_ns, record.world_id))
    txn.add(_keys(universe).counts + tuples.pack((record.status.value,)), -1)


def list_worlds(txn: Txn, universe: str, after: str = "", limit: int = 100) -> list[WorldRecord]:
    """Return records ordered by id, including deleted worlds."""
    check_limit(limit)
    prefix = _keys(universe).records
    lo = prefix + tuples.pack((after,)) + b"\x00" if after else prefix
    rows = txn.scan(lo, tuples.prefix_end(prefix), limit)
    return [codec.unpack_as(WorldRecord, row) for _, row in rows]


def list_names(txn: Txn, universe: str, type: str, limit: int) -> list[tuple[str, str]]:
    """Return (name, id) of the worlds of one type."""
    check_limit(limit)
    prefix = schema.key_prefix(Space.WORLD, universe, "n", type)
    rows = txn.scan(prefix, tuples.prefix_end(prefix), limit)
    return [(str(tuples.unpack(key[len(prefix) :])[0]), row.decode()) for key, row in rows]


def count_by_status(txn: Txn, universe: str) -> dict[str, int]:
    """Return the number of worlds by status."""
    prefix = _keys(universe).counts
    return {
        status.value: txn.count(prefix + tuples.pack((status.value,))) for status in WorldStatus
    }


# -- assignment ----------------------------------------------------------------------------------


def find_assignment(txn: Txn, universe: str, world_id: str) -> Assignment | None:
    row = txn.get(_keys(universe).assignments + tuples.pack((world_id,)))
    return None if row is None else _decode_assignment(row)


@operation("catalog.assign")
def assign(
    txn: Txn,
    universe: str,
    world_id: str,
    worker: str,
    priority: int = 0,
    reason: str = "",
    pinned: bool = False,
) -> Assignment:
    """Assign a world to a worker and move its runnable mark. Repeating the same assignment has no
    effect."""
    check_name("worker", worker)
    known = get_record(txn, universe, world_id)
    if known.status is WorldStatus.DELETED:
        raise NotFound(what="world", universe=universe, world_id=world_id, why="it is deleted")
    wanted = Assignment(worker, priority, reason, pinned)
    was = find_assignment(txn, universe, world_id)
    if was == wanted:
        return wanted
    waiting = _remove_assignment(txn, universe, world_id)
    packed = tuples.pack((world_id,))
    keys = _keys(universe)
    txn.put(keys.assignments + packed, codec.pack(wanted))
    txn.put(keys.by_worker + tuples.pack((worker,)) + packed, b"")
    if waiting or inbox.depth(txn, subject_of(universe, world_id)):
        mark_runnable(txn, universe, world_id)
    if was is not None and was.desired_worker_id not in (None, worker):
        _mark_former_worker(txn, universe, world_id, was)
    return wanted


@operation("catalog.unassign")
def unassign(txn: Txn, universe: str, world_id: str) -> bool:
    """Remove the assignment of a world. Return whether it had one."""
    had = find_assignment(txn, universe, world_id)
    if had is None:
        return False
    _remove_assignment(txn, universe, world_id)
    if inbox.depth(txn, subject_of(universe, world_id)):
        mark_runnable(txn, universe, world_id)
    _mark_former_worker(txn, universe, world_id, had)
    return True


def unassign_without_mark(txn: Txn, universe: str, world_id: str) -> None:
    """Remove the assignment of a world that its worker releases itself. No runnable mark is set."""
    _remove_assignment(txn, universe, world_id)


def list_assigned(
    txn: Txn, universe: str, worker: str, after: str = "", limit: int = 1000
) -> list[str]:
    """Return the ids of the worlds that are assigned to a worker."""
    check_limit(limit)
    prefix = _keys(universe).by_worker + tuples.pack((worker,))
    lo = prefix + tuples.pack((after,)) + b"\x00" if after else prefix
    rows = txn.scan(lo, tuples.prefix_end(prefix), limit)
    return [str(tuples.unpack(key[len(prefix) :])[0]) for key, _ in rows]


def assigned_workers(txn: Txn, universe: str) -> list[str]:
    """Return all workers with assigned worlds, live or not, by one seek per worker."""
    prefix = _keys(universe).by_worker
    found: list[str] = []
    at = prefix
    while rows := txn.scan(at, tuples.prefix_end(prefix), 1):
        found.append(str(tuples.unpack(rows[0][0][len(prefix) :])[0]))
        at = tuples.prefix_end(prefix + tuples.pack((found[-1],)))
    return found


# -- runnable marks ------------------------------------------------------------------------------


def runnable_topic(universe: str, worker: str) -> str:
    """The topic that is notified when a world of this worker becomes runnable."""
    return f"ready/{universe}/{worker}"


def changes_topic(universe: str) -> str:
    """The topic that is notified when operators change worlds."""
    return f"worlds/{universe}"


def mark_runnable(txn: Txn, universe: str, world_id: str) -> None:
    """Mark a world as runnable for its assigned worker."""
    mark_runnable_with(txn, universe, world_id, find_assignment(txn, universe, world_id))


def mark_runnable_with(txn: Txn, universe: str, world_id: str, found: Assignment | None) -> None:
    """`mark_runnable` for a caller that has read the assignment in this transaction."""
    if found is None:
        row = txn.get(_keys(universe).records + tuples.pack((world_id,)))
        if row is not None and _decode_record(row).stopped:
            # The orchestrator finds a stopped world by its code requirement.
            return
    worker = UNASSIGNED if found is None else found.desired_worker_id or UNASSIGNED
    key = _runnable_key(universe, worker, 0 if found is None else found.priority, world_id)
    if txn.get(key) is None:
        txn.put(key, b"")
    txn.notify(runnable_topic(universe, worker))


@operation("catalog.clear_runnable")
def clear_runnable(txn: Txn, universe: str, world_id: str, worker: str) -> bool:
    """Clear a worker's runnable mark if the worker has no work for the world. Return whether it was
    cleared.

    The check runs in the commit. There is no work if the inbox is empty, if the world is not
    assigned to this worker, if the world is not active (`resume` sets a new mark), or if it waits
    for a worker that declares its next item (the orchestrator sets a new mark). A worker that still
    holds the lease of a world keeps the mark after a reassignment, because the mark makes it
    release the world.
    """
    found = find_assignment(txn, universe, world_id)
    mine = found is not None and found.desired_worker_id == worker
    if not mine and _holds_lease(txn, universe, world_id, worker):
        return False
    if mine and inbox.depth(txn, subject_of(universe, world_id)):
        known = get_record(txn, universe, world_id)
        if known.status is WorldStatus.ACTIVE and not known.stopped:
            return False
    _remove_marks(txn, universe, world_id, worker, found)
    return True


def remove_marks(txn: Txn, universe: str, world_id: str, worker: str) -> None:
    """Remove a worker's runnable marks of a world that the worker is about to release."""
    _remove_marks(txn, universe, world_id, worker, find_assignment(txn, universe, world_id))


def _remove_marks(
    txn: Txn, universe: str, world_id: str, worker: str, found: Assignment | None
) -> None:
    for priority in {0, 0 if found is None else found.priority}:
        txn.delete(_runnable_key(universe, worker, priority, world_id))


def runnable_from(
    txn: Txn, universe: str, worker: str, start: bytes, limit: int
) -> list[tuple[bytes, str]]:
    """Return (position, world id) of runnable marks from a position on, the highest priority
    first."""
    check_limit(limit)
    prefix = _keys(universe).ready + tuples.pack((worker,))
    rows = txn.scan(start or prefix, tuples.prefix_end(prefix), limit)
    return [(key, str(tuples.unpack(key[len(prefix) :])[1])) for key, _ in rows]


def list_runnable(txn: Txn, universe: str, worker: str, limit: int) -> list[str]:
    """Return runnable worlds by priority."""
    check_limit(limit)
    prefix = _keys(universe).ready + tuples.pack((worker,))
    rows = txn.scan(prefix, tuples.prefix_end(prefix), limit)
    return [str(tuples.unpack(key[len(prefix) :])[1]) for key, _ in rows]


def list_all_runnable(txn: Txn, universe: str, limit: int) -> list[str]:
    """Return runnable worlds of every worker, and of none."""
    check_limit(limit)
    prefix = _keys(universe).ready
    rows = txn.scan(prefix, tuples.prefix_end(prefix), limit)
    return [str(tuples.unpack(key[len(prefix) :])[2]) for key, _ in rows]


# -- name validation -----------------------------------------------------------------------------


def check_text(what: str, text: str, bytes_max: int = NAME_BYTES_MAX) -> None:
    """Raise Invalid unless a name is non-empty UTF-8 text without NUL and within the size limit."""
    why = ""
    if not isinstance(text, str) or not text:
        why = "a name is text of 1 or more bytes"
    elif "\x00" in text:
        why = "it contains NUL"
    else:
        try:
            if len(text.encode()) > bytes_max:
                why = "the name is too long"
        except UnicodeEncodeError:
            why = "it is not UTF-8"
    if why:
        raise Invalid(what=what, why=why, found=ascii(text)[:64], bytes_max=bytes_max)


def check_universe(universe: str) -> None:
    """Check the name of a universe. A slash is refused, because names of queues and subjects are
    prefixed with `universe/`."""
    check_text("universe", universe, UNIVERSE_BYTES_MAX)
    if "/" in universe:
        raise Invalid(what="universe", why="it contains /", found=universe)


def check_address(universe: str, type: str, name: str) -> None:
    """Raise Invalid unless type and name are a valid world address."""
    check_text("world type", type)
    check_text("world name", name)
    if len(_name_key(universe, type, name)) > KEY_BYTES_MAX:
        raise Invalid(
            what="world name",
            why="universe, type and name are too long together",
            found=name[:64],
            bytes_max=KEY_BYTES_MAX,
        )


def drop_runnable(txn: Txn, universe: str, worker: str, limit: int) -> None:
    """Remove the runnable marks of a dead worker. Its worlds have been marked under other
    workers."""
    check_limit(limit)
    prefix = _keys(universe).ready + tuples.pack((worker,))
    for key, _ in txn.scan(prefix, tuples.prefix_end(prefix), limit):
        txn.delete(key)


# -- inside --------------------------------------------------------------------------------------


class _CatalogKeys:
    __slots__ = ("assignments", "by_worker", "counts", "ready", "records")

    def __init__(self, universe: str) -> None:
        check_universe(universe)
        self.records, self.assignments, self.by_worker, self.counts = (
            schema.key_prefix(Space.WORLD, universe, kind) for kind in "wabc"
        )
        self.ready = schema.key_prefix(Space.READY, universe)


_keys = lru_cache(maxsize=1024)(_CatalogKeys)


@lru_cache(maxsize=4096)
def _decode_record(row: bytes) -> WorldRecord:
    """Decode a record. Cached, because every effect reads the record of its world and it rarely
    changes."""
    return codec.unpack_as(WorldRecord, row)


@lru_cache(maxsize=4096)
def _decode_assignment(row: bytes) -> Assignment:
    """Decode an assignment. Cached, because most worlds of a worker have equal assignments."""
    return codec.unpack_as(Assignment, row)


@lru_cache(maxsize=65536)
def _name_key(universe: str, type: str, name: str) -> bytes:
    check_universe(universe)
    check_text("world type", type)
    check_text("world name", name)
    return schema.key_prefix(Space.WORLD, universe, "n", type, name)


def _deleted_key(universe: str, deleted_ns: int, world_id: str) -> bytes:
    return schema.key_prefix(Space.WORLD, universe, "x", deleted_ns, world_id)


def _runnable_key(universe: str, worker: str, priority: int, world_id: str) -> bytes:
    return _keys(universe).ready + tuples.pack((worker, -priority, world_id))


def _force_release_lease(txn: Txn, subject: str, reason: str) -> None:
    """Force-release the hosting lease, so that later commits of the holder are refused."""
    found = lease.current_status(txn, subject)
    if found is not None and found.state is not lease.LeaseState.FREE:
        lease.force_release.fn(txn, subject, reason)


def _mark_former_worker(txn: Txn, universe: str, world_id: str, was: Assignment) -> None:
    """Leave a runnable mark with the former worker, which then finds the new assignment and
    releases the world."""
    worker = was.desired_worker_id or UNASSIGNED
    txn.put(_runnable_key(universe, worker, 0, world_id), b"")
    txn.notify(runnable_topic(universe, worker))


def _holds_lease(txn: Txn, universe: str, world_id: str, worker: str) -> bool:
    held = lease.current_status(txn, subject_of(universe, world_id))
    return held is not None and held.worker == worker and held.is_live(txn.now_ns, txn.generation)


def _remove_assignment(txn: Txn, universe: str, world_id: str) -> bool:
    """Remove assignment, index and runnable mark. Return whether there was a mark."""
    was = find_assignment(txn, universe, world_id)
    worker = UNASSIGNED if was is None else was.desired_worker_id or UNASSIGNED
    key = _runnable_key(universe, worker, 0 if was is None else was.priority, world_id)
    waiting = txn.get(key) is not None
    txn.delete(key)
    if was is not None:
        packed = tuples.pack((world_id,))
        keys = _keys(universe)
        txn.delete(keys.assignments + packed)
        txn.delete(keys.by_worker + tuples.pack((worker,)) + packed)
    return waiting

"""Which worlds there are: names, records, assignments, and hints that one has work.

A world is named by (universe, type, name); the name leads to an id that is minted when the world is
created. A deleted name that is used again is another world.

A hint says that a world may have work. It lies with the worker that the world is assigned to, or
with nobody (the empty worker), where the orchestrator finds it. Hints are idempotent; the truth is
in the inbox. A hint is taken away only by `settle`, at the commit, when the inbox is seen empty.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache

from msgspec.structs import replace

from holdfast import codec
from holdfast.codec import Record
from holdfast.config import KEY_BYTES_MAX, NAME_BYTES_MAX, UNIVERSE_BYTES_MAX
from holdfast.durable import inbox, lease
from holdfast.durable.bounds import check_limit, check_name
from holdfast.errors import Invalid, NotFound
from holdfast.store import schema, tuples
from holdfast.store.api import Txn, operation
from holdfast.store.schema import Space
from holdfast.transitions import Transitions
from holdfast.world.need import CODE, REPEAT, Need, row_key
from holdfast.world.need import WORLD as WORLD_TYPE

NOBODY = ""
# The code of a world that stopped before an item it does not know, and of such an item's dead letter.
UNKNOWN_EVENT = "unknown_event"
# The code of a world that waits for the code that made an entry: other code repeats it otherwise.
CODE_MISSING = "code_missing"


class Status(Enum):
    ACTIVE = "active"
    # By an operator: takes messages, handles none.
    PAUSED = "paused"
    # By the host, with a blocker: going on would do harm.
    PARKED = "parked"
    DELETED = "deleted"


class Event(Enum):
    PAUSE = "pause"
    RESUME = "resume"
    PARK = "park"
    DELETE = "delete"


WORLD = Transitions(
    "world",
    Status.ACTIVE,
    {
        (Status.ACTIVE, Event.PAUSE): Status.PAUSED,
        (Status.PAUSED, Event.PAUSE): Status.PAUSED,
        (Status.PAUSED, Event.RESUME): Status.ACTIVE,
        (Status.ACTIVE, Event.RESUME): Status.ACTIVE,
        (Status.ACTIVE, Event.PARK): Status.PARKED,
        (Status.PARKED, Event.PARK): Status.PARKED,
        (Status.PARKED, Event.RESUME): Status.ACTIVE,
        (Status.ACTIVE, Event.DELETE): Status.DELETED,
        (Status.PAUSED, Event.DELETE): Status.DELETED,
        (Status.PARKED, Event.DELETE): Status.DELETED,
    },
)


class Blocker(Record, frozen=True):
    """Why a world does not go on."""

    code: str
    text: str
    height: int = 0
    since_ns: int = 0


class Unknown(Record, frozen=True):
    """The inbox item that a world stopped before, because no code that hosted it knows the type.

    Seq 0 is none of the inbox: the journal after the last snapshot holds what the code does not know
    and cannot repeat. Or, with `world` in the place of a side, no live worker has the world type. These
    are waited for as long as it takes. With `code` or `repeat` there it is the journal, too: the code
    that hosted it repeats an entry of other code otherwise. `type` is that other code.
    """

    side: str
    type: str
    version: int
    seq: int
    since_ns: int
    # Until a worker that knows it has the world, or the item is given up: nothing is handled.
    waits: bool = True
    # The time for such a worker is over: the next host makes it a dead letter.
    given_up: bool = False
    # What the world had before it stopped.
    priority: int = 0
    # The entry of other code that came out otherwise, and how: the blocker, if it is parked for that.
    height: int = 0
    why: str = ""

    @property
    def code(self) -> str:
        """The code of the blocker that operators are told."""
        return CODE_MISSING if self.by_code else UNKNOWN_EVENT

    @property
    def by_code(self) -> bool:
        return self.side in (CODE, REPEAT)

    def need(self, world: str) -> Need:
        """What a world of this type needs to go on."""
        return Need(world, self.side, self.type, self.version)

    def row_key(self, universe: str, world: str, world_id: str) -> bytes:
        """Where a world that waits is listed."""
        return row_key(universe, self.need(world), self.since_ns, world_id)

    def told(self) -> Blocker:
        version = f" of version {self.version}" if self.version > 1 else ""
        what = f"{self.side} {self.type!r}{version}"
        text = f"no live worker declares {what}; it is next in the inbox, seq {self.seq}"
        if not self.seq:
            text = f"no live worker declares {what}; its journal after the last snapshot holds one"
        if self.side == WORLD_TYPE:
            text = f"no live worker has the world type {self.type!r}"
        if self.by_code:
            text = (
                f"no live worker has the code {self.type!r}, which made entry {self.height}; "
                "the code that tried repeats it otherwise"
            )
        return Blocker(self.code, text, self.height, self.since_ns)


class Lineage(Record, frozen=True):
    parent_world_id: str
    parent_snapshot_hash: bytes
    forked_at_height: int


class WorldRecord(Record, frozen=True):
    universe: str
    world_id: str
    type: str
    name: str
    created_ns: int
    status: Status = Status.ACTIVE
    blocker: Blocker | None = None
    lineage: Lineage | None = None
    # Leases lost while this inbox seq was being handled, for the watchdog.
    stuck_seq: int = 0
    stuck_count: int = 0
    # This seq is being tried by itself: if the lease is lost now, nobody else is to blame.
    stuck_alone: bool = False
    # When it was deleted: its rows go some time after that.
    deleted_ns: int = 0
    # It is being purged: what goes of it leaves a tombstone.
    purged: bool = False
    unknown: Unknown | None = None

    @property
    def stopped(self) -> bool:
        """Whether it waits for a worker that knows its next item (`unknown`)."""
        return self.unknown is not None and self.unknown.waits

    @property
    def blocked_by(self) -> Blocker | None:
        """Why it does not go on, as operators are told."""
        if self.blocker is None and self.unknown is not None and self.unknown.waits:
            return self.unknown.told()
        return self.blocker


class Assignment(Record, frozen=True):
    desired_worker_id: str | None = None
    priority: int = 0
    reason: str = ""
    pinned: bool = False


def subject_of(universe: str, world_id: str) -> str:
    """What leases, journals, inboxes and snapshots call the world."""
    return f"{universe}/{world_id}"


# -- names and records ---------------------------------------------------------------------------


def find(txn: Txn, universe: str, type: str, name: str) -> str | None:
    """The id of the world of this name."""
    row = txn.get(_name_key(universe, type, name))
    return None if row is None else row.decode()


def record(txn: Txn, universe: str, world_id: str) -> WorldRecord:
    row = txn.get(_keys(universe).records + tuples.pack((world_id,)))
    if row is None:
        raise NotFound(what="world", universe=universe, world_id=world_id)
    return _record_of(row)


def gone(txn: Txn, universe: str, world_id: str) -> bool:
    """Whether a world is deleted, or never was."""
    try:
        return record(txn, universe, world_id).status is Status.DELETED
    except NotFound:
        return True


def create(txn: Txn, universe: str, type: str, name: str, world_id: str) -> WorldRecord:
    """A world under a name that is free. The id is minted by the caller: replays need it equal."""
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
    save(txn, made)
    txn.add(_keys(universe).counts + tuples.pack((Status.ACTIVE.value,)), 1)
    return made


def with_lineage(world: WorldRecord, lineage: Lineage) -> WorldRecord:
    return replace(world, lineage=lineage)


def save(txn: Txn, world: WorldRecord) -> None:
    txn.put(_keys(world.universe).records + tuples.pack((world.world_id,)), codec.pack(world))


@operation
def change(
    txn: Txn, universe: str, world_id: str, event: Event, blocker: Blocker | None = None
) -> WorldRecord:
    """Move a world by its table. Whoever hosts it is fenced, unless it goes on."""
    was = record(txn, universe, world_id)
    status = WORLD.next(was.status, event, world=world_id, name=was.name)
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
    if event is Event.DELETE:
        now = replace(now, deleted_ns=max(txn.now_ns, 1))
        txn.put(_deleted_key(universe, now.deleted_ns, world_id), b"")
    save(txn, now)
    counts = _keys(universe).counts
    txn.add(counts + tuples.pack((was.status.value,)), -1)
    txn.add(counts + tuples.pack((status.value,)), 1)
    if event is Event.DELETE:
        txn.delete(_name_key(universe, was.type, was.name))
        had = assignment(txn, universe, world_id)
        _unassign(txn, universe, world_id)
        if had is not None:
            _revoke(txn, universe, world_id, had)
    if event is Event.RESUME:
        hint(txn, universe, world_id)
    else:
        _evict(txn, subject_of(universe, world_id), f"the world is {status.value}")
    txn.notify(changes(universe))
    return now


def _ends_stop(was: WorldRecord, event: Event) -> bool:
    """Whether a stopped world waits no more. A parked one has been waiting for code long enough."""
    by_code = was.unknown is not None and was.unknown.by_code
    return event is Event.DELETE or (event is Event.PARK and by_code)


def deleted(txn: Txn, universe: str, until_ns: int, limit: int) -> list[str]:
    """Worlds that were deleted up to a time and still have rows; those that are purged first."""
    check_limit(limit)
    prefix = schema.prefix(Space.WORLD, universe, "x")
    rows = txn.scan(prefix, prefix + tuples.pack_int(until_ns + 1), limit)
    return [str(tuples.unpack(key)[-1]) for key, _ in rows]


def mark_deleted(txn: Txn, record: WorldRecord, deleted_ns: int, purged: bool = False) -> None:
    """Say since when a world is deleted; a time of 0: its rows go at once."""
    txn.delete(_deleted_key(record.universe, record.deleted_ns, record.world_id))
    txn.put(_deleted_key(record.universe, deleted_ns, record.world_id), b"")
    save(txn, replace(record, deleted_ns=deleted_ns, purged=purged or record.purged))


def remove(txn: Txn, record: WorldRecord) -> None:
    """Take a deleted world out of the catalog. Whoever asks for it from then on finds none."""
    universe, packed = record.universe, tuples.pack((record.world_id,))
    _unassign(txn, universe, record.world_id)
    txn.delete(_keys(universe).records + packed)
    txn.delete(_deleted_key(universe, record.deleted_ns, record.world_id))
    txn.add(_keys(universe).counts + tuples.pack((record.status.value,)), -1)


def worlds(txn: Txn, universe: str, after: str = "", limit: int = 100) -> list[WorldRecord]:
    """Records in the order of ids, those of deleted worlds too."""
    check_limit(limit)
    prefix = _keys(universe).records
    lo = prefix + tuples.pack((after,)) + b"\x00" if after else prefix
    rows = txn.scan(lo, tuples.after(prefix), limit)
    return [codec.unpack_as(WorldRecord, row) for _, row in rows]


def names(txn: Txn, universe: str, type: str, limit: int) -> list[tuple[str, str]]:
    """(name, id) of the worlds of one type."""
    check_limit(limit)
    prefix = schema.prefix(Space.WORLD, universe, "n", type)
    rows = txn.scan(prefix, tuples.after(prefix), limit)
    return [(str(tuples.unpack(key[len(prefix) :])[0]), row.decode()) for key, row in rows]


def counts(txn: Txn, universe: str) -> dict[str, int]:
    prefix = _keys(universe).counts
    return {status.value: txn.count(prefix + tuples.pack((status.value,))) for status in Status}


# -- assignment ----------------------------------------------------------------------------------


def assignment(txn: Txn, universe: str, world_id: str) -> Assignment | None:
    row = txn.get(_keys(universe).assignments + tuples.pack((world_id,)))
    return None if row is None else _assignment_of(row)


@operation
def assign(
    txn: Txn,
    universe: str,
    world_id: str,
    worker: str,
    priority: int = 0,
    reason: str = "",
    pinned: bool = False,
) -> Assignment:
    """Say who shall host a world. Its hint moves along. Saying the same again changes nothing."""
    check_name("worker", worker)
    known = record(txn, universe, world_id)
    if known.status is Status.DELETED:
        raise NotFound(what="world", universe=universe, world_id=world_id, why="it is deleted")
    wanted = Assignment(worker, priority, reason, pinned)
    was = assignment(txn, universe, world_id)
    if was == wanted:
        return wanted
    waiting = _unassign(txn, universe, world_id)
    packed = tuples.pack((world_id,))
    keys = _keys(universe)
    txn.put(keys.assignments + packed, codec.pack(wanted))
    txn.put(keys.by_worker + tuples.pack((worker,)) + packed, b"")
    if waiting or inbox.depth(txn, subject_of(universe, world_id)):
        hint(txn, universe, world_id)
    if was is not None and was.desired_worker_id not in (None, worker):
        _revoke(txn, universe, world_id, was)
    return wanted


@operation
def unassign(txn: Txn, universe: str, world_id: str) -> bool:
    """Take a world away from its worker; whether it had one."""
    had = assignment(txn, universe, world_id)
    if had is None:
        return False
    _unassign(txn, universe, world_id)
    if inbox.depth(txn, subject_of(universe, world_id)):
        hint(txn, universe, world_id)
    _revoke(txn, universe, world_id, had)
    return True


def unplace(txn: Txn, universe: str, world_id: str) -> None:
    """Take a world from the worker that gives it back itself. It leaves no hint."""
    _unassign(txn, universe, world_id)


def worlds_of(
    txn: Txn, universe: str, worker: str, after: str = "", limit: int = 1000
) -> list[str]:
    """Ids of the worlds that are assigned to a worker."""
    check_limit(limit)
    prefix = _keys(universe).by_worker + tuples.pack((worker,))
    lo = prefix + tuples.pack((after,)) + b"\x00" if after else prefix
    rows = txn.scan(lo, tuples.after(prefix), limit)
    return [str(tuples.unpack(key[len(prefix) :])[0]) for key, _ in rows]


def hosts(txn: Txn, universe: str) -> list[str]:
    """Workers that worlds are assigned to, whether they are alive or not: one seek for each."""
    prefix = _keys(universe).by_worker
    found: list[str] = []
    at = prefix
    while rows := txn.scan(at, tuples.after(prefix), 1):
        found.append(str(tuples.unpack(rows[0][0][len(prefix) :])[0]))
        at = tuples.after(prefix + tuples.pack((found[-1],)))
    return found


# -- hints ---------------------------------------------------------------------------------------


def topic(universe: str, worker: str) -> str:
    return f"ready/{universe}/{worker}"


def changes(universe: str) -> str:
    """The topic of what operators do to worlds."""
    return f"worlds/{universe}"


def hint(txn: Txn, universe: str, world_id: str) -> None:
    """Say that a world may have work, to whoever hosts it."""
    found = assignment(txn, universe, world_id)
    if found is None:
        row = txn.get(_keys(universe).records + tuples.pack((world_id,)))
        if row is not None and _record_of(row).stopped:
            # The orchestrator finds it by what it waits for.
            return
    worker = NOBODY if found is None else found.desired_worker_id or NOBODY
    key = _hint_key(universe, worker, 0 if found is None else found.priority, world_id)
    if txn.get(key) is None:
        txn.put(key, b"")
    txn.notify(topic(universe, worker))


@operation
def settle(txn: Txn, universe: str, world_id: str, worker: str) -> bool:
    """Take a worker's hint away if there is no work for it, judged at the commit; whether it was.

    There is none when the inbox is empty, none for a worker that the world is not assigned to, none
    while the world is not active (`resume` leaves a new hint), and none while it waits for a worker
    that knows its next item (the orchestrator leaves one).
    """
    found = assignment(txn, universe, world_id)
    mine = found is not None and found.desired_worker_id == worker
    if mine and inbox.depth(txn, subject_of(universe, world_id)):
        known = record(txn, universe, world_id)
        if known.status is Status.ACTIVE and not known.stopped:
            return False
    for priority in {0, 0 if found is None else found.priority}:
        txn.delete(_hint_key(universe, worker, priority, world_id))
    return True


def hints_from(
    txn: Txn, universe: str, worker: str, start: bytes, limit: int
) -> list[tuple[bytes, str]]:
    """(position, world) of hints from a position on, the highest priority first."""
    check_limit(limit)
    prefix = _keys(universe).ready + tuples.pack((worker,))
    rows = txn.scan(start or prefix, tuples.after(prefix), limit)
    return [(key, str(tuples.unpack(key[len(prefix) :])[1])) for key, _ in rows]


def hints(txn: Txn, universe: str, worker: str, limit: int) -> list[str]:
    """Worlds that may have work, by priority."""
    check_limit(limit)
    prefix = _keys(universe).ready + tuples.pack((worker,))
    rows = txn.scan(prefix, tuples.after(prefix), limit)
    return [str(tuples.unpack(key[len(prefix) :])[1]) for key, _ in rows]


# -- what a name may be --------------------------------------------------------------------------


def check_text(what: str, text: str, bytes_max: int = NAME_BYTES_MAX) -> None:
    """A name is UTF-8 text without NUL, neither empty nor too long."""
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
    """Queues and subjects are called `universe/...`: a slash would let one pass for another."""
    check_text("universe", universe, UNIVERSE_BYTES_MAX)
    if "/" in universe:
        raise Invalid(what="universe", why="it contains /", found=universe)


def check_address(universe: str, type: str, name: str) -> None:
    """Invalid unless a world may be called so."""
    check_text("world type", type)
    check_text("world name", name)
    if len(_name_key(universe, type, name)) > KEY_BYTES_MAX:
        raise Invalid(
            what="world name",
            why="universe, type and name are too long together",
            found=name[:64],
            bytes_max=KEY_BYTES_MAX,
        )


def drop_hints(txn: Txn, universe: str, worker: str, limit: int) -> None:
    """Remove the hints of a worker that is gone: its worlds have theirs elsewhere by now."""
    check_limit(limit)
    prefix = _keys(universe).ready + tuples.pack((worker,))
    for key, _ in txn.scan(prefix, tuples.after(prefix), limit):
        txn.delete(key)


# -- inside --------------------------------------------------------------------------------------


class _Keys:
    __slots__ = ("assignments", "by_worker", "counts", "ready", "records")

    def __init__(self, universe: str) -> None:
        check_universe(universe)
        self.records, self.assignments, self.by_worker, self.counts = (
            schema.prefix(Space.WORLD, universe, kind) for kind in "wabc"
        )
        self.ready = schema.prefix(Space.READY, universe)


_keys = lru_cache(maxsize=1024)(_Keys)


@lru_cache(maxsize=4096)
def _record_of(row: bytes) -> WorldRecord:
    """It is read with every effect of its world, and hardly ever changes."""
    return codec.unpack_as(WorldRecord, row)


@lru_cache(maxsize=4096)
def _assignment_of(row: bytes) -> Assignment:
    """Most worlds of a worker are assigned to it in the same words."""
    return codec.unpack_as(Assignment, row)


@lru_cache(maxsize=65536)
def _name_key(universe: str, type: str, name: str) -> bytes:
    check_universe(universe)
    check_text("world type", type)
    check_text("world name", name)
    return schema.prefix(Space.WORLD, universe, "n", type, name)


def _deleted_key(universe: str, deleted_ns: int, world_id: str) -> bytes:
    return schema.prefix(Space.WORLD, universe, "x", deleted_ns, world_id)


def _hint_key(universe: str, worker: str, priority: int, world_id: str) -> bytes:
    return _keys(universe).ready + tuples.pack((worker, -priority, world_id))


def _evict(txn: Txn, subject: str, reason: str) -> None:
    """Take the lease from whoever has it: what it commits from now on is refused."""
    found = lease.current(txn, subject)
    if found is not None and found.state is not lease.State.FREE:
        lease.force_release.fn(txn, subject, reason)


def _revoke(txn: Txn, universe: str, world_id: str, was: Assignment) -> None:
    """Leave a hint with the former worker: it finds the world assigned elsewhere and lets go."""
    worker = was.desired_worker_id or NOBODY
    txn.put(_hint_key(universe, worker, 0, world_id), b"")
    txn.notify(topic(universe, worker))


def _unassign(txn: Txn, universe: str, world_id: str) -> bool:
    """Remove assignment, index and hint; whether there was a hint."""
    was = assignment(txn, universe, world_id)
    worker = NOBODY if was is None else was.desired_worker_id or NOBODY
    key = _hint_key(universe, worker, 0 if was is None else was.priority, world_id)
    waiting = txn.get(key) is not None
    txn.delete(key)
    if was is not None:
        packed = tuples.pack((world_id,))
        keys = _keys(universe)
        txn.delete(keys.assignments + packed)
        txn.delete(keys.by_worker + tuples.pack((worker,)) + packed)
    return waiting

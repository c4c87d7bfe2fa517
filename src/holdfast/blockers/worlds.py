"""Why a world does not move: its status, the code that it needs, its assignment and its hosting lease."""

from __future__ import annotations

from holdfast.blockers import limits
from holdfast.blockers.answer import Blocker, WhyAnswer, answer, blocker, time_text
from holdfast.blockers.codes import CODES
from holdfast.blockers.live_workers import codes_of, is_live, list_live, none_declares
from holdfast.clock import S
from holdfast.durable import inbox
from holdfast.durable import lease as leases
from holdfast.errors import NotFound
from holdfast.leadership import leader_lease, worker_registry
from holdfast.store.api import Txn
from holdfast.workers.worker_room import read_room
from holdfast.world import catalog
from holdfast.world.catalog import Assignment, WorldRecord, WorldStatus, subject_of
from holdfast.world.code_requirement import WORLD_TYPE


def explain(txn: Txn, universe: str, id: str) -> WhyAnswer:
    record = find(txn, universe, id)
    state, blockers = _judge(txn, record)
    return answer("world", _name(record), state, blockers)


def find(txn: Txn, universe: str, id: str) -> WorldRecord:
    """Return the world named `Type/name`, or by its id."""
    type, slash, name = id.partition("/")
    world_id = catalog.find_id(txn, universe, type, name) if slash and type and name else id
    if not world_id:
        raise NotFound(what="world", universe=universe, found=id[:200])
    return catalog.get_record(txn, universe, world_id)


def _name(record: WorldRecord) -> str:
    return f"{record.type}/{record.name}"


def _judge(txn: Txn, record: WorldRecord) -> tuple[str, list[Blocker]]:
    if record.status is WorldStatus.DELETED:
        return "deleted", []
    if record.status is WorldStatus.PAUSED:
        names = {"world": _name(record), "universe": record.universe}
        return "paused", [blocker("world_paused", "paused by an operator", names=names)]
    if record.status is WorldStatus.PARKED:
        return "parked", [parked(record)]
    if record.stopped:
        return "stopped", [_stopped(txn, record)]
    depth = inbox.depth(txn, subject_of(record.universe, record.world_id))
    if not depth:
        return "idle", []
    figures = limits.inbox_figures(txn, record.universe, depth)
    full = limits.reached(record.universe, figures)
    return "active", [*_hosting_blockers(txn, record), *full]


def parked(record: WorldRecord) -> Blocker:
    """The blocker of a parked world. An error code without an entry here has the code `world_parked`."""
    why = record.blocker
    names = {"world": _name(record), "universe": record.universe}
    names["resume"] = f"holdfast worlds resume {_name(record)} --universe {record.universe}"
    if why is None:
        return blocker("world_parked", "parked without a stored reason", names=names)
    code = why.code if why.code in CODES else "world_parked"
    at = f" at height {why.height}" if why.height else ""
    text = f"parked since {time_text(why.since_ns)}{at} because {why.code}: {why.text}"
    return blocker(code, text, why.since_ns, names=names)


def _stopped(txn: Txn, record: WorldRecord) -> Blocker:
    """The blocker of a world that waits for a worker with other code."""
    unknown = record.unknown
    assert unknown is not None, "a stopped world has a reason"
    why = unknown.as_blocker()
    if unknown.side == WORLD_TYPE:
        return _unknown_type(txn, record, why.since_ns)
    live = none_declares(len(list_live(txn, record.universe, "world")))
    return blocker(why.code, f"{why.text} ({live})", why.since_ns)


def _unknown_type(txn: Txn, record: WorldRecord, since_ns: int = 0) -> Blocker:
    workers = list_live(txn, record.universe, "world")
    text = f"waits for a worker that knows `{record.type}` ({none_declares(len(workers))})"
    return blocker("unknown_event", text, since_ns)


def _hosting_blockers(txn: Txn, record: WorldRecord) -> list[Blocker]:
    """The blockers of an active world with messages."""
    universe = record.universe
    lease = leases.current_status(txn, subject_of(universe, record.world_id))
    holder = lease if lease and lease.is_live(txn.now_ns, txn.generation) else None
    assigned = catalog.find_assignment(txn, universe, record.world_id)
    worker = None if assigned is None else assigned.desired_worker_id
    if holder is not None and worker in (None, holder.worker):
        registered = worker_registry.find(txn, universe, holder.worker)
        if registered is not None and is_live(txn, registered):
            return []
        text = (
            f"worker {holder.worker} has no recent heartbeat, but holds the lease until it expires"
        )
        return [blocker("lease_held", text, until=holder.expires_ns)]
    if assigned is None or worker is None:
        return _placement_blockers(txn, record)
    absent = _absent_worker(txn, record, assigned, worker)
    if absent is not None:
        return [absent, *_no_leader(txn, universe)]
    if holder is not None:
        text = f"assigned to worker {worker}; worker {holder.worker} still holds the lease"
        return [blocker("lease_held", text, until=holder.expires_ns)]
    return [blocker("waits_for_host", f"worker {worker} has not yet acquired its lease")]


def _placement_blockers(txn: Txn, record: WorldRecord) -> list[Blocker]:
    """The blockers of a world without a worker."""
    universe = record.universe
    workers = [one for one in list_live(txn, universe, "world") if not one.draining]
    found = _no_leader(txn, universe)
    if not workers:
        text = "waits for a worker (no live worker with the role `world` accepts worlds)"
        return [*found, blocker("no_live_worker", text, names={"role": "world"})]
    codes = zip(workers, codes_of(txn, universe, workers), strict=True)
    capable = [one.worker for one, code in codes if not code or code.has_world_type(record.type)]
    if not capable:
        return [*found, _unknown_type(txn, record)]
    room = read_room(txn, universe, capable)
    if not found and room is not None and room.is_full():
        text = "every live worker that has its type is at the limit of worlds per worker"
        return [blocker("workers_full", text, names={"universe": universe})]
    return found or [blocker("waits_for_placement", "waits for the orchestrator to assign it")]


def _no_leader(txn: Txn, universe: str) -> list[Blocker]:
    lease = leader_lease.current(txn, universe)
    if lease is not None and lease.live(txn.now_ns, txn.generation):
        return []
    text = "no orchestrator holds the leader lease, so no world is assigned or moved"
    return [blocker("no_leader", text, names={"role": "orchestrator"})]


def _absent_worker(
    txn: Txn, record: WorldRecord, assigned: Assignment, worker: str
) -> Blocker | None:
    """The blocker of a world whose assigned worker is not live."""
    registered = worker_registry.find(txn, record.universe, worker)
    if registered is not None and is_live(txn, registered):
        return None
    silent = "is not registered"
    if registered is not None:
        ago_s = (txn.now_ns - registered.heartbeat_ns) / S
        silent = f"had its last heartbeat {ago_s:,.0f} s ago"
    since_ns = 0 if registered is None else registered.heartbeat_ns
    if assigned.pinned:
        names = {"world": _name(record), "universe": record.universe}
        text = f"pinned to worker {worker}, which {silent}"
        return blocker("worker_pinned_away", text, since_ns, names=names)
    return blocker("worker_dead", f"assigned to worker {worker}, which {silent}", since_ns)

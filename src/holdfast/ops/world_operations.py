"""World operations for external controllers (document 004, section 9), one function each.

    assign_world unassign_world list_worker_worlds       assignment of a world to a worker
    pin_world unpin_world                                the same, kept by the orchestrator
    acquire_lease renew_lease release_lease              the lease that permits a worker to act
    enqueue_ingress event_send receipt_inject            input of a world
    world_fork world_create_from_seed                    creation of a world from another
    world_create                                         creation of a world without a past

- The first argument is the store; the next two identify the world by universe and id.
- An operation is one transaction. A rejected operation changes nothing and raises a typed error.
- Operations are idempotent, because a reply can be lost: a repeat returns the first result and has no
  further effect. Renewing a lease twice has the same effect as once. A message is identified by its key,
  a fork by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import msgspec

from holdfast import codec, traces
from holdfast.clock import SYSTEM, S
from holdfast.codec import Record
from holdfast.durable import journal, snapshot
from holdfast.durable import lease as leases
from holdfast.durable.lease import Lease
from holdfast.durable.validation import check_name
from holdfast.errors import Fenced, Held, Invalid, NotFound
from holdfast.messages import Ingress, IngressKind, IntentReceipt, event_ingress
from holdfast.store.api import Deferred, Store, Txn
from holdfast.world import catalog, fork, hosting_lease, intents
from holdfast.world import ingress as doors
from holdfast.world.catalog import Assignment, ForkLineage, WorldRecord, WorldStatus, subject_of
from holdfast.world.context import TypeRegistry
from holdfast.world.definition import WorldDefinition, cause_of
from holdfast.world.ingress import IngressResult, WorldAddress
from holdfast.world.reducer import WorldSpec
from holdfast.world.restore import load_snapshot

if TYPE_CHECKING:
    from holdfast.app.app import App

LEASE_TTL_S = 10.0


class NotAssigned(Invalid):
    """The world is assigned to another worker."""

    code = "not_assigned"
    hint = "the world is assigned to another worker; assign it to this one first"


class NotActive(Invalid):
    """The world is paused or parked, so no worker may host it."""

    code = "not_active"
    hint = "no worker hosts a world that is paused or parked; resume it first"


class SeedSnapshot(Record, frozen=True):
    """An initial state: the state of a world after an entry. The optional hash must match that state."""

    world_id: str
    height: int
    hash: bytes | None = None


# -- assignment ----------------------------------------------------------------------------------


def assign_world(
    store: Store,
    universe: str,
    world_id: str,
    worker: str,
    *,
    priority: int = 0,
    reason: str = "operator",
    pinned: bool = False,
) -> Assignment:
    """Assign a world to a worker. The orchestrator never moves a pinned world."""
    assignment: Assignment = store.transact(
        catalog.assign, universe, world_id, worker, priority, reason, pinned
    )
    return assignment


def unassign_world(store: Store, universe: str, world_id: str) -> bool:
    """Remove the assignment of a world and return whether it had one. The orchestrator then places it."""

    def unassign(txn: Txn) -> Deferred[bool]:
        _existing_record(txn, universe, world_id)
        return catalog.unassign(txn, universe, world_id)

    return bool(store.transact(unassign))


def pin_world(store: Store, universe: str, world_id: str, worker: str) -> Assignment:
    """Assign a world to a worker; the orchestrator does not move it. It keeps its priority."""

    def pin(txn: Txn) -> Deferred[Assignment]:
        was = catalog.find_assignment(txn, universe, world_id)
        priority = 0 if was is None else was.priority
        return catalog.assign(txn, universe, world_id, worker, priority, "operator", True)

    pinned: Assignment = store.transact(pin)
    return pinned


def unpin_world(store: Store, universe: str, world_id: str) -> bool:
    """Let the orchestrator move a pinned world, and return whether it was pinned. It stays where it is until then."""

    def unpin(txn: Txn) -> bool:
        _existing_record(txn, universe, world_id)
        was = catalog.find_assignment(txn, universe, world_id)
        if was is None or not was.pinned or was.desired_worker_id is None:
            return False
        catalog.assign(
            txn, universe, world_id, was.desired_worker_id, was.priority, "operator", False
        )
        return True

    return bool(store.transact(unpin))


def list_worker_worlds(
    store: Store, universe: str, worker: str, *, after: str = "", limit: int = 1000
) -> list[str]:
    """Return the ids of the worlds assigned to a worker, in order, after an id."""
    check_name("worker", worker)
    return store.read(catalog.list_assigned, universe, worker, after, limit)


# -- leases --------------------------------------------------------------------------------------


def acquire_lease(
    store: Store,
    universe: str,
    world_id: str,
    worker: str,
    incarnation: str,
    *,
    ttl_s: float = LEASE_TTL_S,
) -> Lease:
    """Acquire the lease of a world (protocol A). A repeat by the same incarnation returns the same lease,
    not extended."""
    granted: list[hosting_lease.HostingGrant] = store.transact(
        hosting_lease.acquire, universe, [world_id], worker, incarnation, int(ttl_s * S)
    )
    [grant] = granted
    if grant.lease is not None:
        return grant.lease
    if grant.refusal == "held":
        raise Held(resource=subject_of(universe, world_id), until_ns=grant.retry_at_ns)
    if grant.refusal == hosting_lease.ASSIGNED_ELSEWHERE:
        raise NotAssigned(what="worker", universe=universe, world_id=world_id, worker=worker)
    if grant.refusal == WorldStatus.DELETED.value:
        raise _deleted_error(universe, world_id)
    if grant.refusal == hosting_lease.WORLD_NOT_FOUND:
        raise NotFound(what="world", universe=universe, world_id=world_id)
    raise NotActive(what="world", universe=universe, world_id=world_id, status=grant.refusal)


def renew_lease(
    store: Store,
    universe: str,
    world_id: str,
    worker: str,
    epoch: int,
    *,
    generation: int | None = None,
    ttl_s: float = LEASE_TTL_S,
) -> Lease:
    """Renew the lease for `ttl_s` from now (protocol B). Raise Fenced unless this worker holds it and it is
    live.

    Epochs count within a generation of the store. The default is the current generation.
    """

    def renew(txn: Txn) -> Deferred[list[Lease | None]]:
        lease = _current_lease(txn, universe, world_id, worker, epoch, generation)
        return leases.renew(txn, [lease], int(ttl_s * S))

    [renewed] = store.transact(renew)
    if renewed is None:
        raise Fenced(resource=subject_of(universe, world_id), held=epoch, why="the lease expired")
    assert isinstance(renewed, Lease)
    return renewed


def release_lease(
    store: Store,
    universe: str,
    world_id: str,
    worker: str,
    epoch: int,
    *,
    generation: int | None = None,
) -> bool:
    """Release the lease. Return False if it was already released; raise Fenced after a later grant."""

    def release(txn: Txn) -> bool:
        status = leases.current_status(txn, subject_of(universe, world_id))
        generation_and_epoch = (txn.generation if generation is None else generation, epoch)
        if (
            status is not None
            and status.state is leases.LeaseState.FREE
            and (status.generation, status.epoch) == generation_and_epoch
        ):
            return False
        leases.release(txn, _current_lease(txn, universe, world_id, worker, epoch, generation))
        return True

    return bool(store.transact(release))


# -- input ---------------------------------------------------------------------------------------


def enqueue_ingress(
    store: Store,
    universe: str,
    world_id: str,
    ingress: Ingress,
    *,
    key: str | None = None,
    app: App | None = None,
) -> IngressResult:
    """Put an ingress into a world's inbox, once per key. With the app, an event is validated.

    An ingress that answers an intent uses the intent hash as its key; any other ingress needs a key. A
    receipt goes through `receipt_inject`.
    """
    _check_ingress(ingress)
    if ingress.kind is IngressKind.RECEIPT:
        return receipt_inject(store, universe, world_id, _decode_receipt(ingress))
    if ingress.intent_hash is not None:
        key = f"{ingress.kind.value}:{ingress.intent_hash.hex()}"
    elif key:
        key = doors.user_key(key)
    if not key:
        raise Invalid(what="key", why="a repeated request without a key would be delivered twice")

    trace = traces.current()

    def enqueue(txn: Txn) -> Deferred[IngressResult]:
        record = _existing_record(txn, universe, world_id)
        if app is not None:
            program = definition_of(app, record.type)
            program.handler_argument(ingress)
            app.check_known(record.type, cause_of(ingress)[0])
        return doors.deliver_by_id(txn, universe, world_id, key, ingress, trace)

    delivered: IngressResult = store.transact(enqueue)
    return delivered


def event_send(
    store: Store,
    app: App,
    type: str,
    name: str,
    event: Any,
    *,
    universe: str | None = None,
    key: str | None = None,
    correlation_id: str | None = None,
) -> IngressResult:
    """Send an event to a world by name, once per key. The world is created if it does not exist."""
    definition_of(app, type)
    to = WorldAddress(universe or app.universe, type, name, new_world_id())
    return send_event(store, app, to, event, key=key, correlation_id=correlation_id)


def send_event(
    store: Store,
    app: App,
    to: WorldAddress,
    event: Any,
    *,
    key: str | None = None,
    correlation_id: str | None = None,
) -> IngressResult:
    """Send an event to a world that another process may have the code of, once per key."""
    event_type, value = app.check_event(to.type, event)
    ingress = event_ingress(event_type, value, correlation_id=correlation_id)
    with traces.sending("send", to.type, to.type) as sending:
        delivered: IngressResult = store.transact(
            doors.deliver, to, doors.user_key(key), ingress, sending.context
        )
        sending.sent(delivered.seq)
    return delivered


def event_of(app: App, type: str, fields: Mapping[str, Any]) -> Any:
    """Build an event from its type name and JSON fields. Raise Invalid if they do not match the type."""
    event_type = app.events.get(type)
    if event_type is None:
        raise Invalid(what="event", type=type, why="unknown to the app", known=sorted(app.events))
    try:
        return codec.convert(dict(fields), event_type.kind)
    except msgspec.ValidationError as error:
        raise Invalid(what="event", type=type, why=str(error)) from None


def receipt_inject(
    store: Store, universe: str, world_id: str, receipt: IntentReceipt
) -> IngressResult:
    """Inject a receipt for an intent of a world. It is final: a later receipt of an effect worker is ignored.

    Rejects an unknown intent, an intent of another world such as the fork parent, a receipt for another
    effect kind, and a second receipt with a different value.
    """
    if not isinstance(receipt, IntentReceipt):
        raise Invalid(what="receipt", why="not a receipt", found=_type_name(receipt))
    intent_hash = receipt.intent_hash.hex()
    if not intent_hash:
        raise Invalid(what="receipt", why="it has no intent hash")

    def inject(txn: Txn) -> Deferred[IngressResult]:
        _existing_record(txn, universe, world_id)
        waits = intents.find_pending(txn, universe, receipt.intent_hash)
        if waits is not None and waits.world_id != world_id:
            raise Invalid(
                what="receipt", why="the intent belongs to another world", intent_hash=intent_hash
            )
        if waits is not None and waits.effect_kind != receipt.effect_kind:
            raise Invalid(
                what="receipt",
                why="the intent requests another effect",
                intent_hash=intent_hash,
                found=receipt.effect_kind,
                expected=waits.effect_kind,
            )
        return intents.resolve_manually(txn, universe, world_id, receipt)

    delivered: IngressResult = store.transact(inject)
    return delivered


# -- creation from another world -----------------------------------------------------------------


def world_fork(
    store: Store,
    universe: str,
    world_id: str,
    name: str,
    *,
    at: int | None = None,
    effects: str = "drop",
    timers: str = "drop",
    app: App | None = None,
) -> WorldRecord:
    """Create a world with this world's state after entry `at`; by default the last entry.

    Without a snapshot at that entry the state is computed by replay, which needs the app.
    """
    child_id = new_world_id()

    def make(txn: Txn) -> WorldRecord:
        record = _existing_record(txn, universe, world_id)
        if app is not None:
            parent = WorldSpec(
                universe, world_id, record.name, definition_of(app, record.type), app
            )
        else:
            if (effects, timers) != ("drop", "drop"):
                raise Invalid(what="fork", why="a fork finds pending work by replay: give the app")
            _require_snapshot(txn, record, name, at)
            parent = _spec_without_code(record)
        return fork.fork(txn, parent, name, child_id, at=at, effects=effects, timers=timers)

    child: WorldRecord = store.transact(make)
    return child


def world_create(store: Store, universe: str, type: str, name: str) -> WorldRecord:
    """Create a world without an event, or return the world that has this name."""
    world_id = new_world_id()

    def create(txn: Txn) -> WorldRecord:
        known = catalog.find_id(txn, universe, type, name)
        if known is not None:
            return catalog.get_record(txn, universe, known)
        return catalog.create(txn, universe, type, name, world_id)

    made: WorldRecord = store.transact(create)
    return made


def world_create_from_seed(
    store: Store, universe: str, type: str, name: str, seed_snapshot: SeedSnapshot
) -> WorldRecord:
    """Create a world from a snapshot of another world of the same type and universe."""
    child_id = new_world_id()

    def create(txn: Txn) -> WorldRecord:
        source = _existing_record(txn, universe, seed_snapshot.world_id)
        if source.type != type:
            raise Invalid(
                what="seed snapshot",
                why="its world has another type",
                found=source.type,
                expected=type,
            )
        subject, height = subject_of(universe, source.world_id), seed_snapshot.height
        known = catalog.find_id(txn, universe, type, name)
        if known is not None:
            return _require_same_seed(catalog.get_record(txn, universe, known), seed_snapshot)
        state, _ = load_snapshot(txn, source.world_id, subject, height)
        made = catalog.create(txn, universe, type, name, child_id)
        child = subject_of(universe, child_id)
        hash = snapshot.save(txn, child, height, state)
        if seed_snapshot.hash not in (None, hash):
            raise Invalid(
                what="seed snapshot",
                why="the given hash differs from that of the stored snapshot",
                height=height,
                found=hash.hex(),
            )
        snapshot.set_baseline(txn, child, height)
        journal.start_at(txn, child, height, journal.hash_at(txn, subject, height))
        made = catalog.with_lineage(made, ForkLineage(source.world_id, hash, height))
        catalog.save_record(txn, made)
        return made

    made: WorldRecord = store.transact(create)
    return made


# -- inside --------------------------------------------------------------------------------------


def _existing_record(txn: Txn, universe: str, world_id: str) -> WorldRecord:
    record = catalog.get_record(txn, universe, world_id)
    if record.status is WorldStatus.DELETED:
        raise _deleted_error(universe, world_id)
    return record


def _deleted_error(universe: str, world_id: str) -> NotFound:
    return NotFound(what="world", universe=universe, world_id=world_id, why="it is deleted")


def _current_lease(
    txn: Txn, universe: str, world_id: str, worker: str, epoch: int, generation: int | None
) -> Lease:
    """Return the current lease if it belongs to (worker, epoch); else raise Fenced."""
    catalog.get_record(txn, universe, world_id)
    resource = subject_of(universe, world_id)
    status = leases.current_status(txn, resource)
    expected = (worker, txn.generation if generation is None else generation, epoch)
    if status is None or (status.worker, status.generation, status.epoch) != expected:
        current = None if status is None else f"{status.generation}.{status.epoch}"
        raise Fenced(resource=resource, worker=worker, held=epoch, current=current)
    return Lease(
        resource,
        status.worker,
        status.incarnation,
        status.generation,
        status.epoch,
        status.expires_ns,
    )


def _check_ingress(ingress: Ingress) -> None:
    if not isinstance(ingress, Ingress):
        raise Invalid(what="ingress", why="not an ingress", found=_type_name(ingress))
    if ingress.event_hash != codec.digest(ingress.type.encode(), ingress.value):
        raise Invalid(what="ingress", why="its hash is not that of its body", type=ingress.type)


def _decode_receipt(ingress: Ingress) -> IntentReceipt:
    receipt = codec.unpack_as(IntentReceipt, ingress.value)
    if (receipt.intent_hash, receipt.effect_kind) != (ingress.intent_hash, ingress.type):
        raise Invalid(what="receipt", why="the envelope names another intent", type=ingress.type)
    return receipt


def definition_of(app: App, type: str) -> WorldDefinition:
    definition = app.programs.get(type)
    if definition is None:
        raise Invalid(what="world", type=type, why="unknown to the app", known=sorted(app.programs))
    return definition


def _spec_without_code(record: WorldRecord) -> WorldSpec:
    """Return a world spec without code: its stored state is copied unchanged."""
    program, vocabulary = WorldDefinition(record.type, "", dict, {}, {}), cast(TypeRegistry, None)
    return WorldSpec(record.universe, record.world_id, record.name, program, vocabulary)


def _require_snapshot(txn: Txn, parent: WorldRecord, child: str, at: int | None) -> None:
    subject = subject_of(parent.universe, parent.world_id)
    head = journal.head(txn, subject).height
    height = head if at is None else at
    if not 0 <= height <= head or catalog.find_id(txn, parent.universe, parent.type, child):
        return  # the fork itself reports the error, or finds the existing child
    try:
        snapshot.load(txn, subject, height)
    except NotFound:
        raise NotFound(
            what="snapshot",
            world=parent.world_id,
            height=height,
            why="no snapshot exists: give the app, so that a replay computes the state",
        ) from None


def _require_same_seed(record: WorldRecord, seed: SeedSnapshot) -> WorldRecord:
    lineage = record.lineage
    if (
        lineage is None
        or (lineage.parent_world_id, lineage.forked_at_height) != (seed.world_id, seed.height)
        or seed.hash not in (None, lineage.parent_snapshot_hash)
    ):
        raise Invalid(what="world name", why="it belongs to another world", name=record.name)
    return record


def new_world_id() -> str:
    """Return an unused id for a world."""
    return SYSTEM.entropy(16).hex()


def _type_name(value: object) -> str:
    return type(value).__name__

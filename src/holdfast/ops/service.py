"""The operations by which others drive worlds (document 004, section 9), one function each.

    assign_world unassign_world list_worker_worlds       who shall host a world
    acquire_lease renew_lease release_lease              who may act on it
    enqueue_ingress event_send receipt_inject            what goes into it
    world_fork world_create_from_seed                    another one like it

- The first argument is the store, the next two say which world: its universe and its id.
- An operation is one transaction. What is refused has changed nothing, and the error has a type.
- Each may be repeated, because an answer can get lost: a repeat gives the first answer again and
  does nothing more. A lease that is renewed twice is held as long as one renewed once; a message is
  known by its key, a fork by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import msgspec

from holdfast import codec
from holdfast.clock import SYSTEM, S
from holdfast.codec import Record
from holdfast.durable import journal, snapshot
from holdfast.durable import lease as leases
from holdfast.durable.bounds import check_name
from holdfast.durable.lease import Lease
from holdfast.errors import Fenced, Held, Invalid, NotFound
from holdfast.messages import Ingress, Kind, Receipt, event_ingress
from holdfast.store.api import Pending, Store, Txn
from holdfast.world import catalog, fork, publish, tenure
from holdfast.world import ingress as doors
from holdfast.world.catalog import Assignment, Lineage, Status, WorldRecord, subject_of
from holdfast.world.context import Vocabulary
from holdfast.world.ingress import Address, Delivered
from holdfast.world.kernel import World
from holdfast.world.program import Program, cause_of
from holdfast.world.restore import load_snapshot

if TYPE_CHECKING:
    from holdfast.app.app import App

LEASE_TTL_S = 10.0


class NotAssigned(Invalid):
    """The assignment excludes this worker."""

    code = "not_assigned"
    hint = "the world is assigned to another worker; assign it to this one first"


class NotActive(Invalid):
    """The world is paused or parked, so nobody may host it."""

    code = "not_active"
    hint = "nobody hosts a world that is paused or parked; resume it first"


class SeedSnapshot(Record, frozen=True):
    """A state to start from: a world's, after an entry. The hash, if given, must be that state's."""

    world_id: str
    height: int
    hash: bytes | None = None


# -- who shall host a world ----------------------------------------------------------------------


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
    """Say who shall host a world. Pinned, the orchestrator leaves it there, come what may."""
    found: Assignment = store.transact(
        catalog.assign, universe, world_id, worker, priority, reason, pinned
    )
    return found


def unassign_world(store: Store, universe: str, world_id: str) -> bool:
    """Take a world away from its worker; whether it had one. Then the orchestrator places it."""

    def unassign(txn: Txn) -> Pending[bool]:
        _existing(txn, universe, world_id)
        return catalog.unassign(txn, universe, world_id)

    return bool(store.transact(unassign))


def list_worker_worlds(
    store: Store, universe: str, worker: str, *, after: str = "", limit: int = 1000
) -> list[str]:
    """Ids of the worlds that are assigned to a worker, in order, after one."""
    check_name("worker", worker)
    return store.read(catalog.worlds_of, universe, worker, after, limit)


# -- who may act on it ---------------------------------------------------------------------------


def acquire_lease(
    store: Store,
    universe: str,
    world_id: str,
    worker: str,
    incarnation: str,
    *,
    ttl_s: float = LEASE_TTL_S,
) -> Lease:
    """Protocol A. Again by the same incarnation: the same lease, not extended."""
    granted: list[tenure.Granted] = store.transact(
        tenure.acquire, universe, [world_id], worker, incarnation, int(ttl_s * S)
    )
    [answer] = granted
    if answer.lease is not None:
        return answer.lease
    if answer.refusal == "held":
        raise Held(resource=subject_of(universe, world_id), until_ns=answer.retry_at_ns)
    if answer.refusal == tenure.ELSEWHERE:
        raise NotAssigned(what="worker", universe=universe, world_id=world_id, worker=worker)
    if answer.refusal == Status.DELETED.value:
        raise _deleted(universe, world_id)
    if answer.refusal == tenure.UNKNOWN:
        raise NotFound(what="world", universe=universe, world_id=world_id)
    raise NotActive(what="world", universe=universe, world_id=world_id, status=answer.refusal)


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
    """Protocol B: hold the lease for `ttl_s` from now. Fenced unless it is this worker's and live.

    Epochs count within a generation of the store. Who does not say which speaks of the present one.
    """

    def renew(txn: Txn) -> Pending[list[Lease | None]]:
        held = _held(txn, universe, world_id, worker, epoch, generation)
        return leases.renew(txn, [held], int(ttl_s * S))

    [renewed] = store.transact(renew)
    if renewed is None:
        raise Fenced(resource=subject_of(universe, world_id), held=epoch, why="it ran out")
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
    """Give the lease back; False when that is done already. Fenced when another grant followed."""

    def release(txn: Txn) -> bool:
        found = leases.current(txn, subject_of(universe, world_id))
        wanted = (txn.generation if generation is None else generation, epoch)
        if (
            found is not None
            and found.state is leases.State.FREE
            and (found.generation, found.epoch) == wanted
        ):
            return False
        leases.release(txn, _held(txn, universe, world_id, worker, epoch, generation))
        return True

    return bool(store.transact(release))


# -- what goes into it ---------------------------------------------------------------------------


def enqueue_ingress(
    store: Store,
    universe: str,
    world_id: str,
    ingress: Ingress,
    *,
    key: str | None = None,
    app: App | None = None,
) -> Delivered:
    """Put an ingress into a world's inbox, once per key. With the app, an event is checked by it.

    What answers an intent has the intent for its key; everything else must bring one. A receipt
    has to pass the rules for receipts.
    """
    _check_ingress(ingress)
    if ingress.kind is Kind.RECEIPT:
        return receipt_inject(store, universe, world_id, _receipt_in(ingress))
    if ingress.intent_hash is not None:
        key = f"{ingress.kind.value}:{ingress.intent_hash.hex()}"
    elif key:
        key = doors.user_key(key)
    if not key:
        raise Invalid(what="key", why="without one a repeat would be delivered twice")

    def enqueue(txn: Txn) -> Pending[Delivered]:
        record = _existing(txn, universe, world_id)
        if app is not None:
            program = _program(app, record.type)
            program.message(ingress)
            app.check_known(record.type, cause_of(ingress)[0])
        return doors.enqueue(txn, universe, world_id, key, ingress)

    delivered: Delivered = store.transact(enqueue)
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
) -> Delivered:
    """Send an event to a world by name, which exists from then on. The same key sends once."""
    _program(app, type)
    event_type, value = app.check_event(type, event)
    to = Address(universe or app.universe, type, name, _mint())
    ingress = event_ingress(event_type, value, correlation_id=correlation_id)
    delivered: Delivered = store.transact(doors.deliver, to, doors.user_key(key), ingress)
    return delivered


def event_of(app: App, type: str, fields: Mapping[str, Any]) -> Any:
    """An event from its name and plain fields, as they come in JSON; Invalid if they do not fit."""
    known = app.events.get(type)
    if known is None:
        raise Invalid(what="event", type=type, why="unknown to the app", known=sorted(app.events))
    try:
        return msgspec.convert(dict(fields), known.kind)
    except msgspec.ValidationError as error:
        raise Invalid(what="event", type=type, why=str(error)) from None


def receipt_inject(store: Store, universe: str, world_id: str, receipt: Receipt) -> Delivered:
    """Answer an intent of a world by hand. It is the one answer: no adapter's will count after it.

    Unknown intents are refused, and those of other worlds, such as the one this was forked from;
    so are receipts of another kind of effect, and another receipt where there is one already.
    """
    if not isinstance(receipt, Receipt):
        raise Invalid(what="receipt", why="not a receipt", found=_kind_of(receipt))
    name = receipt.intent_hash.hex()
    if not name:
        raise Invalid(what="receipt", why="it names no intent")

    def inject(txn: Txn) -> Pending[Delivered]:
        _existing(txn, universe, world_id)
        waits = publish.pending(txn, universe, receipt.intent_hash)
        if waits is not None and waits.world_id != world_id:
            raise Invalid(what="receipt", why="the intent is another world's", intent_hash=name)
        if waits is not None and waits.effect_kind != receipt.effect_kind:
            raise Invalid(
                what="receipt",
                why="the intent wants another effect",
                intent_hash=name,
                found=receipt.effect_kind,
                expected=waits.effect_kind,
            )
        return publish.answer(txn, universe, world_id, receipt)

    delivered: Delivered = store.transact(inject)
    return delivered


# -- another one like it -------------------------------------------------------------------------


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
    """A new world with this one's state after entry `at`, or as it is now.

    A state that no snapshot holds is made by replay, and that needs the code: give the app.
    """
    child_id = _mint()

    def make(txn: Txn) -> WorldRecord:
        record = _existing(txn, universe, world_id)
        if app is not None:
            parent = World(universe, world_id, record.name, _program(app, record.type), app)
        else:
            if (effects, timers) != ("drop", "drop"):
                raise Invalid(what="fork", why="what is pending is found by replay: give the app")
            _require_snapshot(txn, record, name, at)
            parent = _codeless(record)
        return fork.fork(txn, parent, name, child_id, at=at, effects=effects, timers=timers)

    made: WorldRecord = store.transact(make)
    return made


def world_create_from_seed(
    store: Store, universe: str, type: str, name: str, seed_snapshot: SeedSnapshot
) -> WorldRecord:
    """A new world that starts from a snapshot of another one, of the same type and universe."""
    child_id = _mint()

    def create(txn: Txn) -> WorldRecord:
        source = _existing(txn, universe, seed_snapshot.world_id)
        if source.type != type:
            raise Invalid(
                what="seed snapshot", why="of another type", found=source.type, expected=type
            )
        subject, height = subject_of(universe, source.world_id), seed_snapshot.height
        known = catalog.find(txn, universe, type, name)
        if known is not None:
            return _made_from(catalog.record(txn, universe, known), seed_snapshot)
        state, _ = load_snapshot(txn, source.world_id, subject, height)
        made = catalog.create(txn, universe, type, name, child_id)
        child = subject_of(universe, child_id)
        hash = snapshot.save(txn, child, height, state)
        if seed_snapshot.hash not in (None, hash):
            raise Invalid(
                what="seed snapshot", why="another state is there", height=height, found=hash.hex()
            )
        snapshot.set_baseline(txn, child, height)
        journal.begin_at(txn, child, height, journal.hash_at(txn, subject, height))
        made = catalog.with_lineage(made, Lineage(source.world_id, hash, height))
        catalog.save(txn, made)
        return made

    made: WorldRecord = store.transact(create)
    return made


# -- inside --------------------------------------------------------------------------------------


def _existing(txn: Txn, universe: str, world_id: str) -> WorldRecord:
    found = catalog.record(txn, universe, world_id)
    if found.status is Status.DELETED:
        raise _deleted(universe, world_id)
    return found


def _deleted(universe: str, world_id: str) -> NotFound:
    return NotFound(what="world", universe=universe, world_id=world_id, why="it is deleted")


def _held(
    txn: Txn, universe: str, world_id: str, worker: str, epoch: int, generation: int | None
) -> Lease:
    """The lease that (worker, epoch) speak of, if it is the one that is written."""
    catalog.record(txn, universe, world_id)
    resource = subject_of(universe, world_id)
    found = leases.current(txn, resource)
    wanted = (worker, txn.generation if generation is None else generation, epoch)
    if found is None or (found.worker, found.generation, found.epoch) != wanted:
        current = None if found is None else f"{found.generation}.{found.epoch}"
        raise Fenced(resource=resource, worker=worker, held=epoch, current=current)
    return Lease(
        resource, found.worker, found.incarnation, found.generation, found.epoch, found.expires_ns
    )


def _check_ingress(ingress: Ingress) -> None:
    if not isinstance(ingress, Ingress):
        raise Invalid(what="ingress", why="not an ingress", found=_kind_of(ingress))
    if ingress.event_hash != codec.digest(ingress.type.encode(), ingress.value):
        raise Invalid(what="ingress", why="its hash is not that of its body", type=ingress.type)


def _receipt_in(ingress: Ingress) -> Receipt:
    receipt = codec.unpack_as(Receipt, ingress.value)
    if (receipt.intent_hash, receipt.effect_kind) != (ingress.intent_hash, ingress.type):
        raise Invalid(what="receipt", why="the envelope names another intent", type=ingress.type)
    return receipt


def _program(app: App, type: str) -> Program:
    found = app.programs.get(type)
    if found is None:
        raise Invalid(what="world", type=type, why="unknown to the app", known=sorted(app.programs))
    return found


def _codeless(record: WorldRecord) -> World:
    """A world whose code is not needed: its state is copied as it is stored."""
    program, vocabulary = Program(record.type, "", dict, {}, {}), cast(Vocabulary, None)
    return World(record.universe, record.world_id, record.name, program, vocabulary)


def _require_snapshot(txn: Txn, parent: WorldRecord, child: str, at: int | None) -> None:
    subject = subject_of(parent.universe, parent.world_id)
    head = journal.head(txn, subject).height
    height = head if at is None else at
    if not 0 <= height <= head or catalog.find(txn, parent.universe, parent.type, child):
        return  # the fork itself says what is wrong, or that it is there already
    try:
        snapshot.load(txn, subject, height)
    except NotFound:
        raise NotFound(
            what="snapshot",
            world=parent.world_id,
            height=height,
            why="give the app: without a snapshot the state is made by replay",
        ) from None


def _made_from(found: WorldRecord, seed: SeedSnapshot) -> WorldRecord:
    lineage = found.lineage
    if (
        lineage is None
        or (lineage.parent_world_id, lineage.forked_at_height) != (seed.world_id, seed.height)
        or seed.hash not in (None, lineage.parent_snapshot_hash)
    ):
        raise Invalid(what="world name", why="it belongs to another world", name=found.name)
    return found


def _mint() -> str:
    return SYSTEM.entropy(16).hex()


def _kind_of(value: object) -> str:
    return type(value).__name__

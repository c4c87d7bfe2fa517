"""A world, from outside: send, ask, look, fork."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from msgspec.structs import replace

from holdfast import codec
from holdfast.app.declare import World
from holdfast.config import SCAN_PAGE
from holdfast.durable import inbox
from holdfast.durable import journal as journals
from holdfast.errors import Invalid, KeyExpired, NoReply, NotFound, Timeout, UnknownEvent
from holdfast.messages import event_ingress
from holdfast.store.api import Txn
from holdfast.world import catalog, entry, ingress, kernel, unknown
from holdfast.world.catalog import Event as Change
from holdfast.world.catalog import Lineage, WorldRecord, subject_of
from holdfast.world.cycle import entries_topic
from holdfast.world.entry import Outcome, Step
from holdfast.world.fork import cut, made_before, plant
from holdfast.world.ingress import Address, Delivered
from holdfast.world.inherit import check_policies
from holdfast.world.redrive import failures
from holdfast.world.restore import restore

if TYPE_CHECKING:
    from holdfast.app.runtime import Runtime

W = TypeVar("W", bound=World)


class JournalEntry(NamedTuple):
    """One line of a world's history, readable."""

    height: int
    type: str
    event: Any
    outcome: str
    error: str
    at_ns: int
    hash: bytes
    step: Step


class Delivery(int):
    """The seq of an event in the inbox of its world, and what became of it.

    `status` is `accepted` for a new event. For a repeat of a key it tells of the first: `waiting`,
    `handled`, `failed` when its handler raised, or `removed` when its entry went with an old part of the
    history. `waits_for` is the type of the event that the world
    has stopped before, because no live worker knows it.
    """

    status: str
    waits_for: str

    def __new__(cls, seq: int, status: str = "accepted", waits_for: str = "") -> Delivery:
        made = super().__new__(cls, seq)
        made.status, made.waits_for = status, waits_for
        return made


class WorldHandle(Generic[W]):
    def __init__(self, runtime: Runtime, kind: type[W], name: str) -> None:
        self._runtime = runtime
        self._kind = kind
        self.name = name
        self.type = runtime.app.world_type(kind)
        catalog.check_address(runtime.universe, self.type, name)

    def __repr__(self) -> str:
        return f"<world {self._runtime.universe}/{self.type}/{self.name}>"

    # -- in ------------------------------------------------------------------------------------

    def create(self) -> str:
        """Make the world exist without an event; its id."""
        found: str = self._runtime.store.transact(self._create, self._runtime.mint())
        return found

    def send(
        self, event: Any, *, key: str | None = None, correlation_id: str | None = None
    ) -> Delivery:
        """Deliver an event, durably; its seq in the inbox. The same key delivers once.

        Invalid for an event that this code does not handle in this world, and does not name in
        `events=`. A repeat of a key says in `status` what became of the first; UnknownEvent when that
        is a dead letter, because no worker knew its type in time.
        """
        put = self._deliver(event, key, correlation_id=correlation_id)
        if put.item is None:
            return Delivery(put.seq)
        if put.item.state == "dead":
            raise self._dead(put.item)
        return Delivery(put.seq, put.item.state, put.item.type)

    def ask(self, event: Any, *, timeout: float = 30.0, key: str | None = None) -> Any:
        """Deliver an event and wait for what its handler replies.

        The reply is in the event's journal entry, so asking again with the same key gets the same
        answer while `keep=` keeps that entry. After that a repeat of the key is KeyExpired: the event was
        handled, and its reply is gone. NoReply when there is no reply. UnknownEvent when no worker knew the event's type in time; a
        Timeout says by `waits_for` that the world has stopped before an unknown one.
        """
        runtime = self._runtime
        put = self._deliver(event, key)
        topic = entries_topic(subject_of(runtime.universe, put.world_id))
        deadline_ns = runtime.clock.mono_ns() + int(timeout * 1e9)
        since = runtime.store.wait(topic, 0, 0.0)
        while (step := runtime.store.read(self._handled, put, key)) is None:
            left = (deadline_ns - runtime.clock.mono_ns()) / 1e9
            if left <= 0:
                runtime.check()
                told = {"what": "reply", "world": self.name, "seq": put.seq, "waited_s": timeout}
                waits = runtime.store.read(unknown.item, runtime.universe, put.world_id, put.seq)
                if waits.type:
                    told["waits_for"] = waits.type
                raise Timeout(**told)
            since = runtime.store.wait(topic, since, left)
        if step.reply is None:
            raise NoReply(world=self.name, event=type(event).__name__, error=step.error)
        return codec.unpack(step.reply)

    # -- look ----------------------------------------------------------------------------------

    def state(self, at: int | None = None) -> W:
        """The state after the last entry, or after entry `at`."""
        found: W = self._runtime.store.read(self._state, at)
        return found

    def wait_for(self, condition: Callable[[W], object], *, timeout: float = 30.0) -> W:
        """The state as soon as it fulfils the condition, looked at after each commit of the world."""
        runtime = self._runtime
        deadline_ns = runtime.clock.mono_ns() + int(timeout * 1e9)
        topic = entries_topic(runtime.store.read(self._subject))
        since = runtime.store.wait(topic, 0, 0.0)
        while not condition(state := self.state()):
            left = (deadline_ns - runtime.clock.mono_ns()) / 1e9
            if left <= 0:
                runtime.check()
                raise Timeout(what="state", world=self.name, waited_s=timeout)
            since = runtime.store.wait(topic, since, left)
        return state

    def journal(self, lo: int | None = None, hi: int | None = None) -> list[JournalEntry]:
        """Entries lo <= height < hi, oldest first; without `lo`, from the first that is kept."""
        found: list[JournalEntry] = self._runtime.store.read(self._journal, lo, hi)
        return found

    def height(self) -> int:
        found: int = self._runtime.store.read(
            lambda txn: journals.head(txn, self._subject(txn)).height
        )
        return found

    def record(self) -> WorldRecord:
        found: WorldRecord = self._runtime.store.read(self._record)
        return found

    def lineage(self) -> list[Lineage]:
        """Where it was forked from, and where that was, and so on."""
        found: list[Lineage] = self._runtime.store.read(self._lineage)
        return found

    # -- operate -------------------------------------------------------------------------------

    def fork(
        self, name: str, *, at: int | None = None, effects: str = "drop", timers: str = "drop"
    ) -> WorldHandle[W]:
        """A new world that starts from this one's state after entry `at` (now, if not given).

        `effects` that have no receipt by then are `drop`ped, `fail` in the child, or are
        `reissue`d for it; pending `timers` are `drop`ped or `keep`.
        """
        check_policies(effects, timers)
        child = WorldHandle(self._runtime, self._kind, name)
        store = self._runtime.store
        if store.read(lambda txn: made_before(txn, self._world(txn), name, at)) is None:
            cutting = store.read(
                lambda txn: cut(txn, self._world(txn), at, effects=effects, timers=timers)
            )
            store.transact(plant, cutting, name, self._runtime.mint())
        return child

    def pause(self) -> None:
        self._change(Change.PAUSE)

    def resume(self) -> None:
        self._change(Change.RESUME)

    def delete(self) -> None:
        self._change(Change.DELETE)

    # -- inside --------------------------------------------------------------------------------

    def address(self) -> Address:
        return Address(self._runtime.universe, self.type, self.name, self._runtime.mint())

    def _deliver(self, event: Any, key: str | None, **fields: Any) -> Delivered:
        name, value = self._runtime.app.check_event(self.type, event)
        for what, text in (("key", key), ("correlation_id", fields.get("correlation_id"))):
            if text is not None:
                catalog.check_text(what, text)
        found: Delivered = self._runtime.store.transact(
            ingress.deliver,
            self.address(),
            ingress.user_key(key),
            event_ingress(name, value, **fields),
        )
        return found

    def _create(self, txn: Txn, world_id: str) -> str:
        found = catalog.find(txn, self._runtime.universe, self.type, self.name)
        if found is not None:
            return found
        made = catalog.create(txn, self._runtime.universe, self.type, self.name, world_id)
        return made.world_id

    def _id(self, txn: Txn) -> str:
        found = catalog.find(txn, self._runtime.universe, self.type, self.name)
        if found is None:
            raise NotFound(what="world", type=self.type, name=self.name)
        return found

    def _subject(self, txn: Txn) -> str:
        return subject_of(self._runtime.universe, self._id(txn))

    def _record(self, txn: Txn) -> WorldRecord:
        return catalog.record(txn, self._runtime.universe, self._id(txn))

    def _world(self, txn: Txn) -> kernel.World:
        app = self._runtime.app
        return kernel.World(
            self._runtime.universe, self._id(txn), self.name, app.programs[self.type], app
        )

    def _handled(self, txn: Txn, put: Delivered, key: str | None) -> Step | None:
        """What became of a delivered event; None while it waits.

        Every ingress is one entry, in order, so the seq tells the height.
        """
        universe = self._runtime.universe
        subject = subject_of(universe, put.world_id)
        if inbox.cursor(txn, subject) < put.seq:
            return None
        lineage = catalog.record(txn, universe, put.world_id).lineage
        height = put.seq + (0 if lineage is None else lineage.forked_at_height)
        try:
            [found] = journals.read(txn, subject, height, height + 1, 1)
        except NotFound as error:
            # Its entry was removed. Where it was given up, something else tells of it.
            if unknown.given_up(txn, universe, put.world_id, put.seq) is None:
                raise self._removed(put.seq, key, error) from None
        else:
            step = entry.decode(found.body)
            if step.outcome is not Outcome.UNKNOWN:
                return step
        # It was given up. Redriven, it has another number.
        item = unknown.item(txn, universe, put.world_id, put.seq)
        if item.state == "dead":
            raise self._dead(item)
        return self._handled(txn, replace(put, seq=item.seq), key)

    def _removed(self, seq: int, key: str | None, error: NotFound) -> KeyExpired | NoReply:
        """The error for a reply that was removed with its entry."""
        floor = error.fields.get("floor")
        why = "the event was handled, and its entry was removed with the reply (keep=)"
        if key is None:
            return NoReply(world=self.name, seq=seq, floor=floor, error=why)
        return KeyExpired(world=self.name, key=key, seq=seq, floor=floor, why=why)

    def _dead(self, item: unknown.Item) -> UnknownEvent:
        return UnknownEvent(
            world=self.name,
            type=item.type,
            seq=item.seq,
            queue=failures(self._runtime.universe),
            letter=item.letter,
        )

    def _state(self, txn: Txn, at: int | None) -> Any:
        world = self._world(txn)
        return world.program.fresh(restore(txn, world, at=at).state)

    def _journal(self, txn: Txn, lo: int | None, hi: int | None) -> list[JournalEntry]:
        subject = self._subject(txn)
        head = journals.head(txn, subject)
        end = head.height + 1 if hi is None else hi
        found: list[JournalEntry] = []
        at = head.floor if lo is None else lo
        while at < end:
            page = journals.read(txn, subject, at, end, SCAN_PAGE)
            if not page:
                break
            found += [self._readable(one) for one in page]
            at = page[-1].height + 1
        return found

    def _readable(self, found: journals.Entry) -> JournalEntry:
        step = entry.decode(found.body)
        program = self._runtime.app.programs[self.type]
        try:
            event = program.message(step.ingress)
        except Invalid:
            # Of a type, or a version, that this code does not know.
            event = step.ingress
        return JournalEntry(
            found.height,
            step.ingress.type,
            event,
            step.outcome.value,
            step.error,
            found.at_ns,
            found.hash,
            step,
        )

    def _lineage(self, txn: Txn) -> list[Lineage]:
        found = []
        record = self._record(txn)
        while record.lineage is not None:
            found.append(record.lineage)
            try:
                record = catalog.record(txn, record.universe, record.lineage.parent_world_id)
            except NotFound:
                break
        return found

    def _change(self, event: Change) -> None:
        world_id = self._runtime.store.read(self._id)
        self._runtime.store.transact(catalog.change, self._runtime.universe, world_id, event)

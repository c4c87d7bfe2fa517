"""The handle of a world: send events, request replies, read state and journal, fork."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, overload

from msgspec.structs import replace

from holdfast import failpoints, traces
from holdfast.app import store_calls
from holdfast.app.definitions import Event, World, decode_reply
from holdfast.app.store_calls import Commit, Listen, Read, Sleep, StoreCall
from holdfast.config import SCAN_PAGE
from holdfast.durable import inbox
from holdfast.durable import journal as journals
from holdfast.errors import Invalid, KeyExpired, NoReply, NotFound, Timeout, UnknownEvent
from holdfast.messages import event_ingress
from holdfast.store.api import Txn
from holdfast.world import catalog, ingress, journal_entry, reducer, unknown_events
from holdfast.world.catalog import ForkLineage, WorldRecord, subject_of
from holdfast.world.catalog import WorldEvent as Change
from holdfast.world.cycle import entries_topic
from holdfast.world.fork import create_fork, find_existing_fork, plan_fork
from holdfast.world.fork_inheritance import check_policies
from holdfast.world.ingress import IngressResult, WorldAddress
from holdfast.world.journal_entry import JournalStep, StepOutcome
from holdfast.world.redrive import failed_events_queue
from holdfast.world.restore import restore

if TYPE_CHECKING:
    from holdfast.app.runtime import Runtime

W = TypeVar("W", bound=World)
R = TypeVar("R")


class JournalEntry(NamedTuple):
    """One decoded journal entry of a world."""

    height: int
    type: str
    event: Any
    outcome: str
    error: str
    at_ns: int
    hash: bytes
    step: JournalStep


class Delivery(int):
    """The inbox seq of a delivered event, with its status.

    `status` is `accepted` for a new event. For a repeated key it is the status of the first delivery:
    `waiting`, `handled`, `failed` if its handler raised, or `removed` if its journal entry was pruned.
    `waits_for` is the type of the event that blocks the world because no live worker can handle it.
    """

    status: str
    waits_for: str

    def __new__(cls, seq: int, status: str = "accepted", waits_for: str = "") -> Delivery:
        delivery = super().__new__(cls, seq)
        delivery.status, delivery.waits_for = status, waits_for
        return delivery


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
        """Create the world without an event if it does not exist, and return its id."""
        world_id: str = self._runtime.store.transact(self._create, self._runtime.mint())
        return world_id

    def send(
        self, event: Any, *, key: str | None = None, correlation_id: str | None = None
    ) -> Delivery:
        """Deliver an event durably and return its inbox seq. An event is delivered once per key.

        Raises Invalid for an event that this world type neither handles nor lists in `events=`. For a
        repeated key `status` describes the first delivery. Raises UnknownEvent if that delivery became a
        dead letter because no worker could handle its type in time.
        """
        with traces.sending("send", self.type, self.type) as sending:
            commit = self._delivery(event, key, sending.context, correlation_id=correlation_id)
            delivered = self._runtime.store.transact(commit.operation, *commit.args)
            sending.sent(delivered.seq)
        return self._delivered(delivered)

    def _delivered(self, delivered: IngressResult) -> Delivery:
        if delivered.item is None:
            return Delivery(delivered.seq)
        if delivered.item.state == "dead":
            raise self._dead_letter_error(delivered.item)
        return Delivery(delivered.seq, delivered.item.state, delivered.item.type)

    @overload
    def ask(self, event: Event[R], *, timeout: float = 30.0, key: str | None = None) -> R: ...
    @overload
    def ask(self, event: object, *, timeout: float = 30.0, key: str | None = None) -> Any: ...

    def ask(self, event: Any, *, timeout: float = 30.0, key: str | None = None) -> Any:
        """Deliver an event and wait for the reply of its handler.

        The reply is stored in the event's journal entry. A repeat with the same key returns the same reply
        while `keep=` retains that entry. Later a repeat raises KeyExpired: the event was handled and its
        reply was deleted. Raises NoReply if the handler sent no reply, and UnknownEvent if no worker could
        handle the event's type in time. A Timeout has `waits_for` if an unknown event blocks the world.
        """
        return store_calls.run(self._runtime.store, self.ask_call(event, timeout, key))

    # -- read ----------------------------------------------------------------------------------

    def state(self, at: int | None = None) -> W:
        """Return the state after the last entry, or after entry `at`."""
        state: W = self._runtime.store.read(self._state, at)
        return state

    def wait_for(self, condition: Callable[[W], object], *, timeout: float = 30.0) -> W:
        """Wait until the state fulfils the condition and return it. The condition is evaluated after each
        commit of the world."""
        return store_calls.run(self._runtime.store, self.wait_for_call(condition, timeout))

    def journal(self, lo: int | None = None, hi: int | None = None) -> list[JournalEntry]:
        """Return the entries lo <= height < hi, oldest first. Without `lo`, start at the oldest kept entry."""
        entries: list[JournalEntry] = self._runtime.store.read(self._journal, lo, hi)
        return entries

    def height(self) -> int:
        height: int = self._runtime.store.read(
            lambda txn: journals.head(txn, self._subject(txn)).height
        )
        return height

    def record(self) -> WorldRecord:
        record: WorldRecord = self._runtime.store.read(self._record)
        return record

    def lineage(self) -> list[ForkLineage]:
        """Return the fork ancestry, the direct parent first."""
        lineage: list[ForkLineage] = self._runtime.store.read(self._lineage)
        return lineage

    # -- operate -------------------------------------------------------------------------------

    def fork(
        self, name: str, *, at: int | None = None, effects: str = "drop", timers: str = "drop"
    ) -> WorldHandle[W]:
        """Create a world that starts with this world's state after entry `at`; by default the last entry.

        Effects that have no receipt at that entry are dropped (`effects="drop"`), fail in the child
        (`"fail"`), or are reissued for the child (`"reissue"`). Pending timers are dropped
        (`timers="drop"`) or kept (`"keep"`).
        """
        check_policies(effects, timers)
        child = WorldHandle(self._runtime, self._kind, name)
        store = self._runtime.store
        if store.read(lambda txn: find_existing_fork(txn, self._world(txn), name, at)) is None:
            plan = store.read(
                lambda txn: plan_fork(txn, self._world(txn), at, effects=effects, timers=timers)
            )
            store.transact(create_fork, plan, name, self._runtime.mint())
        return child

    def pause(self) -> None:
        self._change_status(Change.PAUSE)

    def resume(self) -> None:
        self._change_status(Change.RESUME)

    def delete(self) -> None:
        self._change_status(Change.DELETE)

    # -- calls that threads and coroutines share -----------------------------------------------

    def send_call(self, event: Any, key: str | None) -> StoreCall[Delivery]:
        with traces.sending("send", self.type, self.type) as sending:
            delivered = yield self._delivery(event, key, sending.context)
            sending.sent(delivered.seq)
        return self._delivered(delivered)

    def ask_call(self, event: Any, timeout: float, key: str | None) -> StoreCall[Any]:
        runtime = self._runtime
        with traces.sending("send", self.type, self.type) as sending:
            delivered = yield self._delivery(event, key, sending.context)
            sending.sent(delivered.seq)
        deadline_ns = runtime.clock.mono_ns() + int(timeout * 1e9)
        yield Listen(entries_topic(subject_of(runtime.universe, delivered.world_id)))
        while (step := (yield Read(self._step_of, (delivered, key)))) is None:
            left_s = (deadline_ns - runtime.clock.mono_ns()) / 1e9
            if left_s <= 0:
                runtime.check()
                error_fields = {
                    "what": "reply",
                    "world": self.name,
                    "seq": delivered.seq,
                    "waited_s": timeout,
                }
                item = (runtime.universe, delivered.world_id, delivered.seq)
                blocker = yield Read(unknown_events.item_status, item)
                if blocker.type:
                    error_fields["waits_for"] = blocker.type
                raise Timeout(**error_fields)
            if failpoints.armed:
                failpoints.hit("world.ask_wait", self)
            yield Sleep(left_s)
        if step.reply is None:
            raise NoReply(world=self.name, event=type(event).__name__, error=step.error)
        return decode_reply(type(event), step.reply)

    def state_call(self, at: int | None) -> StoreCall[W]:
        state: W = yield Read(self._state, (at,), is_long=True)
        return state

    def wait_for_call(self, condition: Callable[[W], object], timeout: float) -> StoreCall[W]:
        clock = self._runtime.clock
        deadline_ns = clock.mono_ns() + int(timeout * 1e9)
        yield Listen(entries_topic((yield Read(self._subject))))
        while not condition(state := (yield from self.state_call(None))):
            left_s = (deadline_ns - clock.mono_ns()) / 1e9
            if left_s <= 0:
                self._runtime.check()
                raise Timeout(what="state", world=self.name, waited_s=timeout)
            yield Sleep(left_s)
        return state

    # -- inside --------------------------------------------------------------------------------

    @property
    def runtime(self) -> Runtime:
        return self._runtime

    def address(self) -> WorldAddress:
        return WorldAddress(self._runtime.universe, self.type, self.name, self._runtime.mint())

    def _delivery(self, event: Any, key: str | None, trace: bytes, **fields: Any) -> Commit:
        name, value = self._runtime.app.check_event(self.type, event)
        for what, text in (("key", key), ("correlation_id", fields.get("correlation_id"))):
            if text is not None:
                catalog.check_text(what, text)
        message = event_ingress(name, value, **fields)
        args = (self.address(), ingress.user_key(key), message)
        # A writer process of an older release does not know the argument.
        return Commit(ingress.deliver, (*args, trace) if trace else args)

    def _create(self, txn: Txn, world_id: str) -> str:
        existing_id = catalog.find_id(txn, self._runtime.universe, self.type, self.name)
        if existing_id is not None:
            return existing_id
        record = catalog.create(txn, self._runtime.universe, self.type, self.name, world_id)
        return record.world_id

    def _existing_id(self, txn: Txn) -> str:
        world_id = catalog.find_id(txn, self._runtime.universe, self.type, self.name)
        if world_id is None:
            raise NotFound(what="world", type=self.type, name=self.name)
        return world_id

    def _subject(self, txn: Txn) -> str:
        return subject_of(self._runtime.universe, self._existing_id(txn))

    def _record(self, txn: Txn) -> WorldRecord:
        return catalog.get_record(txn, self._runtime.universe, self._existing_id(txn))

    def _world(self, txn: Txn) -> reducer.WorldSpec:
        app = self._runtime.app
        return reducer.WorldSpec(
            self._runtime.universe, self._existing_id(txn), self.name, app.programs[self.type], app
        )

    def _step_of(self, txn: Txn, delivered: IngressResult, key: str | None) -> JournalStep | None:
        """Return the journal step of a delivered event; None while the event waits.

        Every ingress is one entry, in order, so the height follows from the seq.
        """
        universe = self._runtime.universe
        subject = subject_of(universe, delivered.world_id)
        if inbox.cursor(txn, subject) < delivered.seq:
            return None
        lineage = catalog.get_record(txn, universe, delivered.world_id).lineage
        height = delivered.seq + (0 if lineage is None else lineage.forked_at_height)
        try:
            [stored_entry] = journals.read(txn, subject, height, height + 1, 1)
        except NotFound as error:
            # The entry was pruned. An event that became a dead letter has its own record.
            if (
                unknown_events.find_given_up(txn, universe, delivered.world_id, delivered.seq)
                is None
            ):
                raise self._pruned_error(delivered.seq, key, error) from None
        else:
            step = journal_entry.decode(stored_entry.body)
            if step.outcome is not StepOutcome.UNKNOWN:
                return step
        # The event became a dead letter. A redriven event has a new seq.
        item = unknown_events.item_status(txn, universe, delivered.world_id, delivered.seq)
        if item.state == "dead":
            raise self._dead_letter_error(item)
        return self._step_of(txn, replace(delivered, seq=item.seq), key)

    def _pruned_error(self, seq: int, key: str | None, error: NotFound) -> KeyExpired | NoReply:
        """Build the error for a reply that was pruned with its entry."""
        floor = error.fields.get("floor")
        why = "the event was handled, and its entry was removed with the reply (keep=)"
        if key is None:
            return NoReply(world=self.name, seq=seq, floor=floor, error=why)
        return KeyExpired(world=self.name, key=key, seq=seq, floor=floor, why=why)

    def _dead_letter_error(self, item: unknown_events.InboxItemStatus) -> UnknownEvent:
        return UnknownEvent(
            world=self.name,
            type=item.type,
            seq=item.seq,
            queue=failed_events_queue(self._runtime.universe),
            letter=item.letter,
        )

    def _state(self, txn: Txn, at: int | None) -> Any:
        world = self._world(txn)
        return world.definition.reload_state(restore(txn, world, at=at).state)

    def _journal(self, txn: Txn, lo: int | None, hi: int | None) -> list[JournalEntry]:
        subject = self._subject(txn)
        head = journals.head(txn, subject)
        end = head.height + 1 if hi is None else hi
        entries: list[JournalEntry] = []
        at = head.floor if lo is None else lo
        while at < end:
            page = journals.read(txn, subject, at, end, SCAN_PAGE)
            if not page:
                break
            entries += [self._decode_entry(stored_entry) for stored_entry in page]
            at = page[-1].height + 1
        return entries

    def _decode_entry(self, stored_entry: journals.ChainedEntry) -> JournalEntry:
        step = journal_entry.decode(stored_entry.body)
        program = self._runtime.app.programs[self.type]
        try:
            event = program.handler_argument(step.ingress)
        except Invalid:
            # This code does not know the event's type or version.
            event = step.ingress
        return JournalEntry(
            height=stored_entry.height,
            type=step.ingress.type,
            event=event,
            outcome=step.outcome.value,
            error=step.error,
            at_ns=stored_entry.at_ns,
            hash=stored_entry.hash,
            step=step,
        )

    def _lineage(self, txn: Txn) -> list[ForkLineage]:
        ancestors = []
        record = self._record(txn)
        while record.lineage is not None:
            ancestors.append(record.lineage)
            try:
                record = catalog.get_record(txn, record.universe, record.lineage.parent_world_id)
            except NotFound:
                break
        return ancestors

    def _change_status(self, event: Change) -> None:
        world_id = self._runtime.store.read(self._existing_id)
        self._runtime.store.transact(catalog.change_status, self._runtime.universe, world_id, event)

"""Universes that write to each other: in one store, or each in its own, driven tick by tick."""

from __future__ import annotations

from typing import Any

import msgspec

import holdfast as hf
from holdfast.app.handle import WorldHandle
from holdfast.app.runtime import Runtime
from holdfast.clock import SimClock
from holdfast.durable import queue
from holdfast.errors import StoreBusy
from holdfast.store.api import Store
from holdfast.world import outbox
from tests.roles.rig import Rig
from tests.world import rig as worlds


class Letter(hf.Event):
    text: str = ""


class Parcel(msgspec.Struct, frozen=True):
    weight: int


class Write(hf.Event):
    """Send a letter. `to` is a name, `id` is an id instead of it."""

    to: str = "bob"
    text: str = ""
    universe: str | None = None
    id: str = ""
    message_id: str | None = None
    headers: dict[str, str] = msgspec.field(default_factory=dict)


class Ship(hf.Event):
    """Put something into an inbox of another office."""

    to: str = "bob"
    inbox: str = "parcels"
    payload: Any = None
    universe: str | None = None


class Want(hf.Event):
    """`hf.fabric.send` as an effect, with whatever fields."""

    fields: dict[str, Any]
    key: str | None = None
    tag: str = ""


class Cancel(hf.Event):
    """Stop wanting what was sent last."""


class Office(hf.World):
    read: list[str] = msgspec.field(default_factory=list)
    weights: list[int] = msgspec.field(default_factory=list)
    causes: list[list[Any]] = msgspec.field(default_factory=list)
    sent: list[bytes] = msgspec.field(default_factory=list)
    told: list[str] = msgspec.field(default_factory=list)
    receipts: list[dict[str, Any]] = msgspec.field(default_factory=list)

    @hf.on(Letter)
    def letter(self, event: Letter, cx: hf.Context) -> None:
        self.read.append(event.text)
        self.causes.append([cx.from_universe, cx.from_world, cx.from_height, cx.message_id])
        self.causes[-1] += [cx.headers, cx.correlation_id]

    @hf.on(hf.inbox("parcels", Parcel))
    def parcel(self, mail: hf.Mail[Parcel], cx: hf.Context) -> None:
        self.weights.append(mail.payload.weight)
        self.causes.append([mail.from_universe, mail.from_world, mail.from_height, mail.message_id])
        self.causes[-1] += [mail.headers, mail.correlation_id]

    @hf.on(hf.inbox("anything"))
    def anything(self, mail: hf.Mail[Any], cx: hf.Context) -> None:
        self.read.append(repr(mail.payload))

    @hf.on(Write)
    def write(self, event: Write, cx: hf.Context) -> None:
        options: dict[str, Any] = {
            "universe": event.universe, "message_id": event.message_id, "headers": event.headers,
        }  # fmt: skip
        letter = Letter(event.text)
        if event.id:
            intent = cx.send_to(event.id, letter, **options)
        else:
            intent = cx.send(Office, event.to, letter, **options)
        self.sent.append(intent.intent_hash)

    @hf.on(Ship)
    def ship(self, event: Ship, cx: hf.Context) -> None:
        cx.post(Office, event.to, event.inbox, event.payload, universe=event.universe)

    @hf.on(Want)
    def want(self, event: Want, cx: hf.Context) -> None:
        send = hf.fabric.send.options(key=event.key)
        fields = dict(event.fields)
        if isinstance(fields.get("dest_world"), list):
            fields["dest_world"] = hf.fabric.WorldName(*fields["dest_world"])
        self.sent.append(cx.do(send, fields, tag=event.tag).intent_hash)

    @hf.on(Cancel)
    def cancel(self, event: Cancel, cx: hf.Context) -> None:
        cx.cancel(self.sent[-1])

    @hf.on(hf.sent)
    def heard(self, receipt: hf.Receipt[hf.fabric.FabricSendReceipt], cx: hf.Context) -> None:
        told = receipt.value
        self.told.append(f"{told.status} {receipt.code}".strip())
        self.receipts.append(
            {
                "id": told.message_id, "world": told.dest_world, "seq": told.seq,
                "tag": receipt.tag, "error": receipt.error, "intent": receipt.intent_hash,
            }
        )  # fmt: skip


class Quiet(hf.World):
    """Sends, and does not ask what became of it."""

    @hf.on(Write)
    def write(self, event: Write, cx: hf.Context) -> None:
        if event.id:
            cx.send_to(event.id, Letter(event.text), universe=event.universe)
        else:
            cx.send(Office, event.to, Letter(event.text), universe=event.universe)


def app_of(universe: str) -> hf.App:
    return hf.App(universe, worlds=[Office, Quiet], events=[hf.inbox("cellar")])


class Town(Rig):
    """One universe, its worlds and its pool. It shares the clock of its neighbour, or its store, which is of
    one kind in any case."""

    def __init__(
        self,
        universe: str,
        neighbour: Town | None = None,
        *,
        together: bool = False,
        kind: str = "memory",
    ) -> None:
        clock = SimClock() if neighbour is None else neighbour.clock
        self.kind = kind if neighbour is None else neighbour.kind
        backend = worlds.rows_on("memory" if together else self.kind)
        worlds.Rig.__init__(self, app_of(universe), backend, clock=clock)
        if neighbour is not None and together:
            self.store, self.backend = neighbour.store, neighbour.backend
            self.runtime = Runtime(self.app, self.store, roles=(), clock=self.clock)
        self.host = self.worker(idle_s=1e6)

    def office(self, name: str = "ada", *events: Any) -> WorldHandle[Office]:
        handle: WorldHandle[Office] = self.world(Office, name)
        for event in events:
            handle.send(event)
        self.think()
        return handle

    def lane(self, universe: str) -> queue.Counts:
        return self.store.read(queue.counts, outbox.lane(self.universe, universe))


class Door:
    """Another town's store, as it is seen from here: it may be shut, and counts who comes in."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.shut: Exception | None = None
        self.commits = 0
        self.tries = 0

    def transact(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        self.tries += 1
        if self.shut is not None:
            raise self.shut
        answer = self._store.transact(fn, *args, **kwargs)
        self.commits += 1
        return answer

    def close_door(self, why: Exception | None = None) -> None:
        self.shut = why or StoreBusy(why="a test says so")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

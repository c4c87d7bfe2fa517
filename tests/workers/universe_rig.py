"""Rigs of universes that exchange mail, in one store or in separate stores, driven tick by tick."""

from __future__ import annotations

from typing import Any

import msgspec

import holdfast as hf
from holdfast.app.runtime import Runtime
from holdfast.app.world_handle import WorldHandle
from holdfast.clock import SimClock
from holdfast.durable import queue
from holdfast.errors import StoreBusy
from holdfast.store.api import Store
from holdfast.world.messaging import outbox
from tests.workers.rig import WorkerRig
from tests.world import rig as worlds


class Letter(hf.Event):
    text: str = ""


class Parcel(msgspec.Struct, frozen=True):
    weight: int


class Write(hf.Event):
    """Send a letter to the world named `to`, or to the world id `id`."""

    to: str = "bob"
    text: str = ""
    universe: str | None = None
    id: str = ""
    message_id: str | None = None
    headers: dict[str, str] = msgspec.field(default_factory=dict)


class Ship(hf.Event):
    """Post a payload to an inbox of another office."""

    to: str = "bob"
    inbox: str = "parcels"
    payload: Any = None
    universe: str | None = None


class SendRequested(hf.Event):
    """Emit `hf.fabric.send` as an effect with these fields."""

    fields: dict[str, Any]
    key: str | None = None
    tag: str = ""


class Cancel(hf.Event):
    """Cancel the last sent message."""


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

    @hf.on(SendRequested)
    def want(self, event: SendRequested, cx: hf.Context) -> None:
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
    """A sender without a receipt handler."""

    @hf.on(Write)
    def write(self, event: Write, cx: hf.Context) -> None:
        if event.id:
            cx.send_to(event.id, Letter(event.text), universe=event.universe)
        else:
            cx.send(Office, event.to, Letter(event.text), universe=event.universe)


def app_of(universe: str) -> hf.App:
    return hf.App(universe, worlds=[Office, Quiet], events=[hf.inbox("cellar")])


class UniverseRig(WorkerRig):
    """One universe with its worlds and its pool. It shares the clock of its peer, and its store if
    `shared_store`. Both stores are of one kind."""

    def __init__(
        self,
        universe: str,
        peer: UniverseRig | None = None,
        *,
        shared_store: bool = False,
        kind: str = "memory",
    ) -> None:
        clock = SimClock() if peer is None else peer.clock
        self.kind = kind if peer is None else peer.kind
        backend = worlds.make_backend("memory" if shared_store else self.kind)
        worlds.WorldRig.__init__(self, app_of(universe), backend, clock=clock)
        if peer is not None and shared_store:
            self.store, self.backend = peer.store, peer.backend
            self.runtime = Runtime(self.app, self.store, roles=(), clock=self.clock)
        self.world_worker = self.worker(idle_s=1e6)

    def office(self, name: str = "ada", *events: Any) -> WorldHandle[Office]:
        handle: WorldHandle[Office] = self.world(Office, name)
        for event in events:
            handle.send(event)
        self.run_worlds()
        return handle

    def peer_queue_counts(self, universe: str) -> queue.QueueCounts:
        return self.store.read(queue.counts, outbox.peer_queue_name(self.universe, universe))


class PeerStoreProxy:
    """A proxy of a peer store. It raises an error on demand, and counts attempts and commits."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.error: Exception | None = None
        self.commits = 0
        self.attempts = 0

    def transact(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        self.attempts += 1
        if self.error is not None:
            raise self.error
        answer = self._store.transact(fn, *args, **kwargs)
        self.commits += 1
        return answer

    def make_unreachable(self, error: Exception | None = None) -> None:
        self.error = error or StoreBusy(why="a test says so")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

"""A store, in memory with a clock that moves when told to, and a worker that works when told to."""

from typing import Any

from holdfast import codec
from holdfast import store as stores
from holdfast.app.handle import WorldHandle
from holdfast.app.runtime import Runtime
from holdfast.clock import SYSTEM, Clock, S, SimClock
from holdfast.durable import queue
from holdfast.messages import Intent
from holdfast.roles.world_worker import WorkerPolicy, WorldWorker
from holdfast.store import schema, tuples
from holdfast.store.api import Row, Store, Txn
from holdfast.world import catalog, publish
from tests.ops.app import Account, app

UNIVERSE = "bank"
WORKER = "worker"
TICKS_MAX = 100
WORLDS_MAX = 1000


class Rig:
    def __init__(self, url: str = "memory:") -> None:
        self.clock: Clock = SimClock() if url == "memory:" else SYSTEM
        self.store: Store = stores.open(url, clock=self.clock)
        self.runtime: Runtime = app.open(self.store, roles=())

    def account(self, name: str = "ada") -> WorldHandle[Account]:
        return self.runtime.world(Account, name)

    def world_id(self, name: str = "ada") -> str:
        found = self.store.read(catalog.find, UNIVERSE, "Account", name)
        assert found is not None
        return found

    def work(self, **policy: Any) -> None:
        """Let a worker handle all that waits, take snapshots, and leave."""
        worker = WorldWorker(
            self.store,
            universe=UNIVERSE,
            programs=app.programs,
            vocabulary=app,
            worker=WORKER,
            incarnation=self.runtime.mint(),
            policy=WorkerPolicy(**policy),
            clock=self.clock,
        )
        for record in self.store.read(catalog.worlds, UNIVERSE, "", WORLDS_MAX):
            if record.status is not catalog.Status.DELETED:
                self.store.transact(catalog.assign, UNIVERSE, record.world_id, WORKER)
        for _ in range(TICKS_MAX):
            if not worker.tick():
                break
        worker.finish()

    def intent(self, kind: str = "fx.quote") -> Intent:
        """The one intent that waits for an effect."""
        [(_, payload)] = self.store.read(queue.peek, publish.effects(UNIVERSE, kind), 2)
        return codec.unpack_as(Intent, payload)

    def later(self, seconds: float) -> None:
        assert isinstance(self.clock, SimClock)
        self.clock.advance(int(seconds * S))

    def rows(self) -> list[Row]:
        """Everything that is stored, but what the store says of itself."""
        return self.store.read(_rows)


def _rows(txn: Txn) -> list[Row]:
    own = (schema.META_KEY, schema.MARKER_KEY)
    rows = txn.scan(b"", b"\xff")
    return [
        (key, row) for key, row in rows if key not in own and not key.startswith(schema.OUTCOME)
    ]


def plant(store: Store, key: tuple[tuples.Element, ...], value: bytes | None) -> None:
    """Put a row behind everybody's back, or take one away."""

    def put(txn: Txn) -> None:
        if value is None:
            assert txn.get(key) is not None, "nothing there to take away"
            txn.delete(key)
        else:
            txn.put(key, value)

    store.transact(put)

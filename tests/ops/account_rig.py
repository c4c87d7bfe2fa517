"""A rig with the sample accounts: a store, in memory with a simulated clock by default, and a world worker."""

from typing import Any

from holdfast import codec
from holdfast import store as stores
from holdfast.app.runtime import Runtime
from holdfast.app.world_handle import WorldHandle
from holdfast.clock import SYSTEM, Clock, S, SimClock
from holdfast.durable import queue
from holdfast.messages import Intent
from holdfast.store import schema, tuples
from holdfast.store.api import Row, Store, Txn
from holdfast.workers.world.policy import WorldWorkerPolicy
from holdfast.workers.world.worker import WorldWorker
from holdfast.world import catalog, intents
from tests.ops.app import QuotedAccount, app

UNIVERSE = "bank"
WORKER = "worker"
TICKS_MAX = 100
WORLDS_MAX = 1000


class AccountRig:
    def __init__(self, url: str = "memory:") -> None:
        self.clock: Clock = SimClock() if url == "memory:" else SYSTEM
        self.store: Store = stores.open(url, clock=self.clock)
        self.runtime: Runtime = app.open(self.store, roles=())

    def account(self, name: str = "ada") -> WorldHandle[QuotedAccount]:
        return self.runtime.world(QuotedAccount, name)

    def world_id(self, name: str = "ada") -> str:
        world_id = self.store.read(catalog.find_id, UNIVERSE, "QuotedAccount", name)
        assert world_id is not None
        return world_id

    def run_worker(self, **policy: Any) -> None:
        """Run a world worker until it is idle, then stop it. It takes snapshots."""
        worker = WorldWorker(
            self.store,
            universe=UNIVERSE,
            programs=app.programs,
            vocabulary=app,
            worker=WORKER,
            incarnation=self.runtime.mint(),
            policy=WorldWorkerPolicy(**policy),
            clock=self.clock,
        )
        for record in self.store.read(catalog.list_worlds, UNIVERSE, "", WORLDS_MAX):
            if record.status is not catalog.WorldStatus.DELETED:
                self.store.transact(catalog.assign, UNIVERSE, record.world_id, WORKER)
        for _ in range(TICKS_MAX):
            if not worker.tick():
                break
        worker.shut_down()

    def intent(self, kind: str = "fx.quote") -> Intent:
        """The only queued intent of this effect kind."""
        [(_, payload)] = self.store.read(queue.peek, intents.effect_queue(UNIVERSE, kind), 2)
        return codec.unpack_as(Intent, payload)

    def advance_s(self, seconds: float) -> None:
        assert isinstance(self.clock, SimClock)
        self.clock.advance(int(seconds * S))

    def rows(self) -> list[Row]:
        """All stored rows except the store's own metadata."""
        return self.store.read(_rows)


def _rows(txn: Txn) -> list[Row]:
    store_keys = (schema.META_KEY, schema.MARKER_KEY)
    rows = txn.scan(b"", b"\xff")
    return [
        (key, row)
        for key, row in rows
        if key not in store_keys and not key.startswith(schema.OUTCOME)
    ]


def plant(store: Store, key: tuple[tuples.Element, ...], value: bytes | None) -> None:
    """Write or delete a row directly, without its operation."""

    def put(txn: Txn) -> None:
        if value is None:
            assert txn.get(key) is not None, "nothing there to take away"
            txn.delete(key)
        else:
            txn.put(key, value)

    store.transact(put)

"""Clients and workers of the world benchmarks: `python -m bench.peers.world_load worker|client ARGUMENTS`.

A worker runs the roles of the app until its input ends. A client sends messages and reads journals, as
users do. It writes long histories into the journals directly. Both answer in lines (`answers`).
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
import threading
import time
from typing import Any

import holdfast as hf
from bench.peers.answers import serve
from holdfast.durable import journal, snapshot
from holdfast.durable import lease as leases
from holdfast.messages import event_ingress
from holdfast.store.api import Txn
from holdfast.workers.world.policy import WorldWorkerPolicy
from holdfast.workers.world.worker import WorldWorker
from holdfast.world import catalog, journal_entry, reducer
from holdfast.world.catalog import subject_of
from holdfast.world.cycle import entries_topic
from holdfast.world.host import HostedState

POLL_S = 0.002
# Latency is polled more often than a rate.
LATENCY_POLL_S = 0.0002
WAIT_S = 1.0
APPEND_BATCH = 5_000
STORABLE = HostedState.storable_bytes


class LoadDeposit(hf.Event):
    amount: int


class LoadAccount(hf.World):
    balance: int = 0

    @hf.on(LoadDeposit)
    def deposited(self, event: LoadDeposit, cx: hf.Context) -> None:
        self.balance += event.amount
        cx.reply(self.balance)


app = hf.App("bench", worlds=[LoadAccount])
ONE = LoadDeposit(1)


class Worker:
    """Every role in one process, as `app.open(url)` starts them."""

    def __init__(self, path: str, name: str, policy: dict[str, Any]) -> None:
        self._runtime = app.open(path, worker=name, policy=WorldWorkerPolicy(**policy))
        [self._role] = [role for role in self._runtime.roles if isinstance(role, WorldWorker)]
        self._renewals: list[tuple[int, float]] = []
        self._watch_renewals()

    def hosted(self) -> dict[str, Any]:
        for role in self._runtime.roles:
            if role.failure is not None:
                raise role.failure
        leading = any(getattr(role, "is_leader", False) for role in self._runtime.roles)
        return {"hosted": len(self._role.hosted), "leading": leading}

    def renewals(self) -> dict[str, Any]:
        """(leases, seconds) of each renewal since the last call."""
        renewals, self._renewals = self._renewals, []
        return {"renewals": renewals}

    def renew(self, count: int, per_s: float) -> dict[str, Any]:
        """Renew all hosted worlds, in one commit each time, in addition to the renewals of the role."""
        held_leases = [hosted.host.lease for hosted in list(self._role._hosted.values())]
        ttl_ns = int(self._role.policy.lease_ttl_s * 1e9)
        took = []
        for _ in range(count):
            time.sleep(1 / per_s)
            began = time.perf_counter()
            answers = self._runtime.store.transact(leases.renew, held_leases, ttl_ns)
            took.append(1000 * (time.perf_counter() - began))
            assert None not in answers
        return {"ms": took, "leases": len(held_leases)}

    def digest(self, on: bool) -> dict[str, Any]:
        """Turn the state digest on or off. Without it the worker does not encode, decode or hash the state, and the worlds
        cannot be restored.
        """
        setattr(HostedState, "storable_bytes", STORABLE if on else lambda state: b"")  # noqa: B010
        return {}

    def collect(self) -> dict[str, Any]:
        gc.collect()
        return {}

    def close(self) -> None:
        self._runtime.close()

    def _watch_renewals(self) -> None:
        transact = self._runtime.store.transact

        def timed(fn: Any, *args: Any) -> Any:
            if fn is not leases.renew:
                return transact(fn, *args)
            began = time.perf_counter()
            answer = transact(fn, *args)
            self._renewals.append((len(args[0]), time.perf_counter() - began))
            return answer

        self._runtime.store.transact = timed


class Client:
    def __init__(self, path: str) -> None:
        self._runtime = app.open(path, roles=())
        self._store = self._runtime.store
        self._names = itertools.count()

    # -- rates and latency ---------------------------------------------------------------------

    def worlds(self, count: int) -> dict[str, Any]:
        """New worlds, each with one handled message: placed, leased and restored."""
        names = [f"world-{next(self._names)}" for _ in range(count)]
        self._batches(names, 1, 1000)
        self._until(dict.fromkeys(names, 1))
        return {"names": names}

    def create(self, count: int, size: int) -> dict[str, Any]:
        """New worlds with one message each, delivered but not awaited."""
        names = [f"world-{next(self._names)}" for _ in range(count)]
        self._batches(names, 1, size)
        return {"names": names}

    def heights(self, names: list[str]) -> dict[str, Any]:
        return {"heights": self._heights(names)}

    def batch(self, names: list[str], per_key: int, size: int) -> dict[str, Any]:
        goals = self._goals(names, per_key)
        began = time.perf_counter()
        self._batches(names, per_key, size)
        sent = time.perf_counter()
        self._until(goals)
        took = time.perf_counter() - began
        return {"rate": len(names) * per_key / took, "sent_s": sent - began, "took_s": took}

    def senders(self, names: list[str], per_key: int, callers: int) -> dict[str, Any]:
        """Each thread sends its next message when its last one is durable."""
        goals = self._goals(names, per_key)
        handles = [self._runtime.world(LoadAccount, name) for name in names]
        left = iter([handle for _ in range(per_key) for handle in handles])
        guard = threading.Lock()

        def call() -> None:
            while True:
                with guard:
                    handle = next(left, None)
                if handle is None:
                    return
                handle.send(ONE)

        began = time.perf_counter()
        threads = [threading.Thread(target=call) for _ in range(callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sent = time.perf_counter()
        self._until(goals)
        took = time.perf_counter() - began
        return {"rate": len(names) * per_key / took, "sent_s": sent - began, "took_s": took}

    def latency(self, names: list[str], count: int, per_s: float) -> dict[str, Any]:
        """`send` until the journal's head has moved, and `ask` until its answer, in turn."""
        handles = [self._runtime.world(LoadAccount, name) for name in names]
        journaled, asked, due = [], [], time.perf_counter()
        for at in range(2 * count):
            due += 1 / per_s
            time.sleep(max(due - time.perf_counter(), 0))
            handle = handles[at // 2 % len(handles)]
            height, topic, since = handle.height(), self._topic(handle.name), 0
            began = time.perf_counter()
            if at % 2:
                handle.ask(ONE)
                asked.append(1000 * (time.perf_counter() - began))
            else:
                handle.send(ONE)
                while handle.height() == height:
                    if topic:
                        since = self._store.wait(topic, since, WAIT_S)
                    else:
                        time.sleep(LATENCY_POLL_S)
                journaled.append(1000 * (time.perf_counter() - began))
        return {"journaled": journaled, "asked": asked}

    def _topic(self, name: str) -> str:
        """The topic of a world's journal on a server. Empty for an embedded store, which is polled."""
        if not self._store.url.startswith("postgresql:"):
            return ""
        universe = self._runtime.universe
        world_id: str | None = self._store.read(catalog.find_id, universe, "LoadAccount", name)
        return entries_topic(subject_of(universe, world_id or ""))

    def waiting(self, worker: str) -> dict[str, Any]:
        """The number of worlds that may have work, placed with this worker or not placed yet."""

        def read(txn: Txn) -> int:
            universe = self._runtime.universe
            return sum(
                len(catalog.list_runnable(txn, universe, whose, 1000))
                for whose in (worker, catalog.UNASSIGNED)
            )

        return {"waiting": self._store.read(read)}

    def until_handled(self, name: str) -> dict[str, Any]:
        """Send one message and return the time of its entry, by the clock that all processes share."""
        handle = self._runtime.world(LoadAccount, name)
        height = handle.height()
        handle.send(ONE)
        while handle.height() == height:
            time.sleep(POLL_S)
        return {"at_ns": time.monotonic_ns()}

    # -- long histories ------------------------------------------------------------------------

    def history(self, name: str, entries: int, tail: int) -> dict[str, Any]:
        """A world with this number of entries and a baseline `tail` below its head. No worker hosts it."""
        handle = self._runtime.world(LoadAccount, name)
        world_id = handle.create()
        subject = subject_of(self._runtime.universe, world_id)
        program = app.programs["LoadAccount"]
        world = reducer.WorldSpec(self._runtime.universe, world_id, name, program, app)
        state, base, done = LoadAccount(), entries - tail, 0

        def step(height: int) -> bytes:
            type_name, value = app.encode_event(ONE)
            stepped = reducer.run_step(
                world,
                state,
                event_ingress(type_name, value),
                seq=height,
                height=height,
                wall_ns=time.time_ns(),
                entropy=bytes(16),
                generation=generation,
            )
            return journal_entry.pack(stepped.step)

        def append(txn: Txn, bodies: list[bytes], height: int) -> None:
            journal.append(txn, subject, bodies, expected_head=height)

        def save(txn: Txn) -> None:
            snapshot.save(txn, subject, base, program.dump_state(state))
            snapshot.set_baseline(txn, subject, base)
            journal.checkpoint(txn, subject, base)

        generation = self._store.read(lambda txn: txn.generation)
        while done < base:
            # Below the baseline only the number of entries matters, so that all have the same body.
            count = min(APPEND_BATCH, base - done)
            self._store.transact(append, [step(done + 1)] * count, done)
            state.balance = done = done + count
        self._store.transact(save)
        self._store.transact(append, [step(base + n + 1) for n in range(tail)], base)
        return {"height": handle.height()}

    def restores(self, name: str, count: int) -> dict[str, Any]:
        handle = self._runtime.world(LoadAccount, name)
        took = []
        for _ in range(count):
            began = time.perf_counter()
            state = handle.state()
            took.append(1000 * (time.perf_counter() - began))
        return {"ms": took, "balance": state.balance}

    def forks(self, name: str, at: int, count: int) -> dict[str, Any]:
        handle = self._runtime.world(LoadAccount, name)
        took = []
        for _ in range(count):
            child = f"fork-{next(self._names)}"
            began = time.perf_counter()
            handle.fork(child, at=at)
            took.append(1000 * (time.perf_counter() - began))
        return {"ms": took}

    def close(self) -> None:
        self._runtime.close()

    # -- helpers -------------------------------------------------------------------------------

    def _batches(self, names: list[str], per_key: int, size: int) -> None:
        handles = [self._runtime.world(LoadAccount, name) for name in names]
        sends = [(handle, ONE) for _ in range(per_key) for handle in handles]
        for at in range(0, len(sends), size):
            self._runtime.send_many(sends[at : at + size])

    def _heights(self, names: list[str]) -> list[int]:
        handles = [self._runtime.world(LoadAccount, name) for name in names]

        def read(txn: Txn) -> list[int]:
            return [journal.head(txn, handle._subject(txn)).height for handle in handles]

        heights: list[int] = self._store.read(read)
        return heights

    def _goals(self, names: list[str], more: int) -> dict[str, int]:
        heights = self._heights(names)
        return {name: height + more for name, height in zip(names, heights, strict=True)}

    def _until(self, goals: dict[str, int]) -> None:
        """Wait until the journal of every world has its height."""
        while goals:
            heights = self._heights(list(goals))
            goals = {
                name: goal
                for (name, goal), height in zip(goals.items(), heights, strict=True)
                if height < goal
            }
            if goals:
                time.sleep(POLL_S)


def main() -> None:
    role, arguments = sys.argv[1], json.loads(sys.argv[2])
    load = {"worker": Worker, "client": Client}[role](**arguments)
    parts = {name: getattr(load, name) for name in dir(load) if not name.startswith("_")}
    serve(parts)
    if role == "client":
        load.close()
    # A worker exits without a drain: the release of thousands of worlds is not measured.


if __name__ == "__main__":
    main()

"""Random interleavings of two workers and three worlds with crashes, moves and pauses: acknowledged
events are journaled once and in order, and the replay does not diverge."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from holdfast.clock import S
from holdfast.durable import journal, queue
from holdfast.errors import CommitUnknown, IllegalTransition
from holdfast.workers.world.worker import WorldWorker
from holdfast.world import catalog, restore
from holdfast.world.host import Budgets, SnapshotPolicy
from holdfast.world.intents import effect_queue
from tests.world import bank
from tests.world.rig import FAULTS, Crash, WorldRig

MODULES = ("holdfast.workers.world.worker", "holdfast.world.host", "holdfast.world.hosting_lease")

NAMES = ("x", "y", "z")
WORKERS = ("A", "B")
POLICY = {
    "snapshots": SnapshotPolicy(3),
    "budgets": Budgets(max_inbox_batch=2),
    "worlds_per_tick": 2,
    # Workers are killed often, but never by a reducer.
    "stuck_max": 1000,
}

names = st.sampled_from(NAMES)
workers = st.sampled_from(WORKERS)


class Interleavings(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.rig = WorldRig()
        self.worlds = {name: self.rig.world(name=name) for name in NAMES}
        self.incarnations = 0
        self.workers: dict[str, WorldWorker] = {}
        for name in WORKERS:
            self.restart(name)
        # Sent events by world, in the order of acknowledgement.
        self.sent: dict[str, list[bytes]] = {name: [] for name in NAMES}
        self.number = 0

    def restart(self, name: str) -> None:
        self.incarnations += 1
        self.workers[name] = self.rig.worker(name, str(self.incarnations), **POLICY)

    @rule(name=names, kind=st.sampled_from(["deposit", "pay", "fail", "rate", "query"]))
    def send(self, name: str, kind: str) -> None:
        self.number += 1
        event = {
            "deposit": bank.DepositMade(self.number),
            "pay": bank.PaymentOrdered(str(self.number)),
            "fail": bank.Failing(str(self.number)),
            "rate": bank.Rated(self.number),
            "query": bank.Queried(),
        }[kind]
        seq = self.worlds[name].send(event)
        self.sent[name].append(bank.app.encode_event(event)[1])
        assert seq == len(self.sent[name])

    @rule(worker=workers, fault=st.sampled_from([None, None, *FAULTS]), at=st.integers(1, 3))
    def tick(self, worker: str, fault: str | None, at: int) -> None:
        self.rig.backend.arm({} if fault is None else {at: fault})
        try:
            self.workers[worker].tick()
        except CommitUnknown:
            pass
        except Crash:
            self.restart(worker)
        self.rig.backend.arm({})

    @rule(worker=workers)
    def kill(self, worker: str) -> None:
        self.restart(worker)

    @rule(worker=workers)
    def leave(self, worker: str) -> None:
        self.workers[worker].shut_down()
        self.restart(worker)

    @rule(seconds=st.sampled_from([0.2, 3, 6, 11]))
    def wait(self, seconds: float) -> None:
        self.rig.clock.advance(int(seconds * S))

    @rule(name=names, worker=workers, priority=st.integers(0, 1))
    def move(self, name: str, worker: str, priority: int) -> None:
        self.rig.assign(self.worlds[name], worker, priority)

    @rule(name=names, event=st.sampled_from([catalog.WorldEvent.PAUSE, catalog.WorldEvent.RESUME]))
    def operate(self, name: str, event: catalog.WorldEvent) -> None:
        world_id = self.rig.id(self.worlds[name])
        try:
            self.rig.store.transact(catalog.change_status, "bank", world_id, event)
        except IllegalTransition:
            raise AssertionError("nothing parks here") from None

    def teardown(self) -> None:
        for handle in self.worlds.values():
            handle.resume()
        # Without faults, a bounded number of rounds completes all work.
        for _ in range(60):
            self.rig.clock.advance(1 * S)
            for worker in self.workers.values():
                worker.tick()
        paid = 0
        for name, handle in self.worlds.items():
            self.check(name)
            paid += sum(one.type == "PaymentOrdered" for one in handle.journal())
        queued = self.rig.store.read(queue.counts, effect_queue("bank", "fx.quote"))
        assert queued.ready == paid

    def check(self, name: str) -> None:
        rig, handle = self.rig, self.worlds[name]
        entries = handle.journal()
        assert [one.step.ingress.value for one in entries] == self.sent[name]
        assert [one.height for one in entries] == list(range(1, len(entries) + 1))
        rig.store.read(journal.verify, rig.subject(handle))
        rig.store.read(lambda txn: restore.check_snapshots(txn, rig.world_spec_in(txn, handle)))
        deposits = [one.event.amount for one in entries if one.type == "DepositMade"]
        assert handle.state().balance == sum(deposits)
        assert rig.blocker_code(handle) == ""


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=60, stateful_step_count=40)

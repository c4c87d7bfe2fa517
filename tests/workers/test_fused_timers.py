"""Fused commits of timers: delivered in the commit of the world, with concurrent changes before it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

import holdfast as hf
from holdfast import codec, failpoints
from holdfast.app.runtime import Runtime
from holdfast.clock import S
from holdfast.durable import delayed, inbox, journal, queue
from holdfast.durable.validation import TIME_NS_MAX
from holdfast.errors import CommitUnknown
from holdfast.messages import Intent, TimerSet
from holdfast.ops import pending_work
from holdfast.workers.timers.delivery import deliver_due
from holdfast.workers.timers.worker import BATCH_MAX, FUSION_OFF_S
from holdfast.workers.world.fused_commit import HostedTimer, TimerBatch
from holdfast.world import catalog, journal_entry, timers
from holdfast.world.host import Budgets
from holdfast.world.timers import DueTimerRef
from tests.simulation.source_edits import Edit, Mutant
from tests.workers.rig import WorkerRig
from tests.workers.shop import (
    Buyer,
    Dropped,
    GoodsOrdered,
    Juggled,
    Planned,
    Repeated,
    Slept,
    Unset,
    Woken,
)
from tests.world.rig import FAULTS, UNKNOWN_AFTER, Crash

MODULES = (
    "holdfast.workers.world.fused_commit",
    "holdfast.workers.timers.worker",
    "holdfast.durable.delayed",
)

DELAYS = timers.delay_queue("shop")


class InlineWakeSignal:
    """A wake signal that processes the batch in the calling thread. `before_commit` runs after the batch
    was collected and before it is processed."""

    def __init__(self, rig: FusedTimerRig) -> None:
        self.event = threading.Event()
        self.before_commit: Callable[[], Any] | None = None
        self._rig = rig

    def set(self) -> None:
        if not self._rig.committer._timer_batches:
            return  # The answer of a commit sets the signal, too.
        meanwhile, self.before_commit = self.before_commit, None
        if meanwhile is not None:
            meanwhile()
        self._rig.batches += 1
        self._rig.committer.process(self._rig.clock.mono_ns() + S)


class FusedTimerRig(WorkerRig):
    """A world worker, and a timer worker attached to its fused committer."""

    def __init__(self, **policy: Any) -> None:
        super().__init__()
        self.batches = 0
        self.policy = {"idle_s": 1e6, "lease_ttl_s": 3600.0, **policy}
        self.restart("1")

    def restart(self, incarnation: str) -> None:
        self.world_worker = self.worker(incarnation=incarnation, **self.policy)
        self.committer = self.world_worker.committer
        self.wake_signal = InlineWakeSignal(self)
        self.committer.open(self.wake_signal)
        self.fused_timer_worker = self.timer_worker()
        self.fused_timer_worker.set_commit_owner(self.committer)

    @contextmanager
    def run_before_commit(self, action: Callable[[], Any]) -> Iterator[None]:
        """Run an action once between the read of the inboxes and the fused commit."""
        with failpoints.on("world.inboxes_read", calls=lambda _: action(), times=1):
            yield

    def advance(self, seconds: float = 10.0) -> None:
        self.clock.advance(int(seconds * S))

    def pending_timers(self) -> list[Intent]:
        """The intents of all pending timers, due or not."""
        clocks = [
            (DELAYS, TIME_NS_MAX - 1),
            (timers.calendar_queue(self.universe), TIME_NS_MAX - 1),
        ]
        found = self.store.read(delayed.peek, clocks, 100)
        return [codec.unpack_as(Intent, payload) for _, _, payload in found]

    def timer_slots(self, handle: hf.WorldHandle[Any]) -> list[str]:
        found = self.store.read(timers.list_slots, self.universe, self.id(handle), 100)
        return [key for key, _ in found]

    def deliver_due(self) -> int:
        """Deliver due timers without fusion, as another timer worker does."""
        delivered: int = self.store.transact(deliver_due, self.universe, self.clock.wall_ns(), 100)
        return delivered

    def is_consistent(self, handle: hf.WorldHandle[Any]) -> bool:
        self.store.read(journal.verify, self.subject(handle))
        return self.store.read(inbox.last_seq, self.subject(handle)) == self.cursor(handle)

    def observe(self, handle: hf.WorldHandle[Any]) -> dict[str, Any]:
        """The observable state of a world and its timers, except for the times of the reducer runs."""
        entries = [journal_entry.decode(body) for body in self.entry_bodies(handle)]
        return {
            "journal": [codec.pack(one.ingress) for one in entries],
            "seqs": [one.seq for one in entries],
            "state": codec.pack(handle.state().woken),
            "inbox": (self.store.read(inbox.last_seq, self.subject(handle)), self.cursor(handle)),
            "queues": (self.timer_counts(), self.calendar_counts()),
            "slots": self.timer_slots(handle),
            "listed": len(self.store.read(pending_work.timers, self.universe, 100)),
            "hints": self.runnable(),
        }


@pytest.fixture
def rig() -> FusedTimerRig:
    return FusedTimerRig()


# -- one commit ------------------------------------------------------------------------------------


def test_fused_timer_is_delivered_and_applied_in_one_commit(rig: FusedTimerRig) -> None:
    ada = rig.buyer("ada", Slept(5, name="x"))
    rig.advance()
    before = rig.backend.last_id()
    assert rig.fused_timer_worker.tick()
    assert (rig.batches, rig.backend.last_id()) == (1, before + 1)
    assert ada.state().woken == ["x"]


def test_fused_timers_of_several_worlds_share_one_commit(rig: FusedTimerRig) -> None:
    worlds = [rig.buyer(f"w{n}", Slept(5, name="x"), Slept(4, name="y")) for n in range(5)]
    rig.advance()
    before = rig.backend.last_id()
    rig.fused_timer_worker.tick()
    assert rig.backend.last_id() == before + 1
    assert [one.state().woken for one in worlds] == [["y", "x"]] * 5


def test_timer_slot_is_free_after_fused_delivery(rig: FusedTimerRig) -> None:
    ada = rig.buyer("ada", Juggled(["set a", "set b"]))
    rig.advance(11)
    rig.fused_timer_worker.tick()
    assert (rig.timer_slots(ada), rig.timer_counts()) == ([], queue.QueueCounts(done=2))
    ada.send(Juggled(["set a", "unset b"]))
    rig.run_worlds()
    assert (rig.timer_slots(ada), rig.timer_counts()) == (
        ["a"],
        queue.QueueCounts(delayed=1, done=2),
    )


@pytest.mark.parametrize(
    "events",
    [
        [Slept(5, name="x")],
        [Slept(5, name="x"), Slept(3, name="y"), Slept(50, name="z")],
        [Slept(5, key="k", name="x"), Slept(4, key="k", name="y")],
        [Slept(5, key="k"), Unset("k"), Slept(5, key="l")],
        [Planned(1_700_000_001.0, name="c"), Slept(4, name="d")],
        [Repeated("* * * * *"), Slept(2, name="x"), Slept(3, name="y")],
    ],
)
def test_fused_and_unfused_timers_have_the_same_observable_result(events: list[Any]) -> None:
    observations = []
    for fused in (True, False):
        rig = FusedTimerRig()
        ada = rig.buyer("ada", *events)
        timer = rig.fused_timer_worker if fused else rig.timer_worker()
        for _ in range(3):
            rig.advance(30)
            while timer.tick():
                rig.run_worlds()
            rig.run_worlds()
        assert rig.is_consistent(ada)
        assert bool(rig.batches) == fused
        observations.append(rig.observe(ada))
    assert observations[0] == observations[1]


def test_inbox_events_are_applied_before_the_fused_timer(rig: FusedTimerRig) -> None:
    ada = rig.buyer("ada", Slept(5, name="timer"))
    rig.advance()
    ada.send(Woken("sent"))
    rig.fused_timer_worker.tick()
    assert (ada.state().woken, rig.inbox_depth(ada)) == (["sent", "timer"], 0)
    assert rig.is_consistent(ada)


def test_journal_with_fused_timers_replays_to_the_same_state(rig: FusedTimerRig) -> None:
    ada = rig.buyer("ada", *[Slept(5, name=str(n)) for n in range(5)])
    rig.advance()
    rig.fused_timer_worker.tick()
    before = ada.state().woken
    rig.restart("2")
    rig.advance(4000)
    rig.buyer("ada", Woken("last"))
    assert ada.state().woken == [*before, "last"] == [*map(str, range(5)), "last"]


# -- concurrent changes ----------------------------------------------------------------------------


def cancel(rig: FusedTimerRig) -> None:
    [intent] = rig.pending_timers()
    intent_to_cancel = replace(intent, params=codec.pack("k"))
    rig.store.transact(lambda txn: timers.cancel_timer(txn, intent_to_cancel))


def replace_timer(rig: FusedTimerRig) -> None:
    [intent] = rig.pending_timers()
    timer = replace(codec.unpack_as(TimerSet, intent.params), delay_ns=5 * S)
    new_intent = replace(intent, intent_hash=b"another", params=codec.pack(timer))
    rig.store.transact(lambda txn: timers.set_timer(txn, new_intent))


def change_world(event: catalog.WorldEvent) -> Callable[[FusedTimerRig], None]:
    def action(rig: FusedTimerRig) -> None:
        [intent] = rig.pending_timers()
        rig.store.transact(catalog.change_status, rig.universe, intent.world_id, event)

    return action


def evict_world(rig: FusedTimerRig) -> None:
    change_world(catalog.WorldEvent.PAUSE)(rig)
    change_world(catalog.WorldEvent.RESUME)(rig)


def release_world(rig: FusedTimerRig) -> None:
    """Release the hosted worlds through the worker."""
    rig.world_worker._hosted.release(rig.world_worker.hosted)


CONCURRENT_CHANGES: dict[str, tuple[Callable[[FusedTimerRig], Any], list[str]]] = {
    "cancelled": (cancel, []),
    "replaced": (replace_timer, ["x"]),
    "fired by another": (FusedTimerRig.deliver_due, ["x"]),
    "sent to": (lambda rig: rig.runtime.world(Buyer, "ada").send(Woken("sent")), ["sent", "x"]),
    "evicted": (evict_world, ["x"]),
    "its lease ran out": (lambda rig: rig.advance(4000), ["x"]),
    "paused": (change_world(catalog.WorldEvent.PAUSE), []),
    "parked": (change_world(catalog.WorldEvent.PARK), []),
}


@pytest.mark.parametrize("what", CONCURRENT_CHANGES)
def test_fused_timer_changed_before_its_commit_is_not_delivered(
    rig: FusedTimerRig, what: str
) -> None:
    act, _ = CONCURRENT_CHANGES[what]
    rig.buyer("ada", Slept(5, key="k", name="x"))
    rig.advance()
    rows_after_change: dict[bytes, bytes] = {}

    def meanwhile() -> None:
        act(rig)
        rows_after_change.update(rig.rows())

    with rig.run_before_commit(meanwhile):
        rig.fused_timer_worker.tick()
    assert rig.batches == 1
    assert rig.rows() == rows_after_change


@pytest.mark.parametrize("what", CONCURRENT_CHANGES)
def test_timer_changed_before_its_fused_commit_fires_at_most_once(
    rig: FusedTimerRig, what: str
) -> None:
    act, expected = CONCURRENT_CHANGES[what]
    ada = rig.buyer("ada", Slept(5, key="k", name="x"))
    rig.advance()
    with rig.run_before_commit(lambda: act(rig)):
        rig.run_until_idle(rig.fused_timer_worker, seconds=60)
    rig.run_until_idle(rig.fused_timer_worker, seconds=60)
    assert ada.state().woken == expected
    if what not in ("paused", "parked"):
        assert rig.is_consistent(ada)


@pytest.mark.parametrize("event", [catalog.WorldEvent.PAUSE, catalog.WorldEvent.PARK])
def test_timer_of_a_paused_or_parked_world_fires_after_resume(
    rig: FusedTimerRig, event: catalog.WorldEvent
) -> None:
    ada = rig.buyer("ada", Slept(5, name="x"))
    rig.advance()
    with rig.run_before_commit(lambda: change_world(event)(rig)):
        rig.run_until_idle(rig.fused_timer_worker, seconds=5)
    rig.store.transact(catalog.change_status, rig.universe, rig.id(ada), catalog.WorldEvent.RESUME)
    rig.run_until_idle(rig.fused_timer_worker, seconds=5)
    assert ada.state().woken == ["x"]


def test_timer_of_a_deleted_world_is_not_delivered(rig: FusedTimerRig) -> None:
    ada = rig.buyer("ada", Slept(5, name="x"))
    subject = rig.subject(ada)
    rig.advance()
    height = rig.store.read(journal.head, subject).height
    with rig.run_before_commit(lambda: change_world(catalog.WorldEvent.DELETE)(rig)):
        rig.run_until_idle(rig.fused_timer_worker, seconds=5)
    assert rig.store.read(journal.head, subject).height == height
    assert rig.timer_counts() == queue.QueueCounts(done=1)


def test_timer_of_a_released_world_is_delivered_to_its_inbox(rig: FusedTimerRig) -> None:
    ada = rig.buyer("ada", Slept(5, name="x"))
    rig.advance()
    rig.wake_signal.before_commit = lambda: release_world(rig)
    rig.fused_timer_worker.tick()
    assert (rig.batches, rig.timer_counts().done) == (1, 0)
    rig.run_until_idle(rig.fused_timer_worker)
    assert ada.state().woken == ["x"]


def submit_batch(rig: FusedTimerRig, intent: Intent, due_timer: DueTimerRef) -> TimerBatch:
    batch = TimerBatch([HostedTimer(intent, codec.unpack_as(TimerSet, intent.params), due_timer)])
    rig.committer.submit_timers(batch)
    assert batch.answered.is_set()
    return batch


def test_fused_timer_not_due_by_store_time_is_rejected(rig: FusedTimerRig) -> None:
    ada = rig.buyer("ada", Slept(50, key="k", name="x"))
    [intent] = rig.pending_timers()
    before = rig.rows()
    # The wall clock does not count for a delay.
    batch = submit_batch(rig, intent, DueTimerRef(DELAYS, 1, "k", 1 << 62))
    assert (batch.conflicted, batch.delivered, rig.rows()) == (True, 0, before)
    rig.run_until_idle(rig.fused_timer_worker, seconds=100)
    assert ada.state().woken == ["x"]


def test_fused_timer_not_due_by_the_wall_clock_is_rejected(rig: FusedTimerRig) -> None:
    at_ns = rig.clock.wall_ns() + 50 * S
    ada = rig.buyer("ada", Planned(at_ns / S, key="k", name="x"))
    [intent] = rig.pending_timers()
    before = rig.rows()
    rig.advance(100)
    rig.clock.step_wall(-90 * S)
    due_timer = DueTimerRef(timers.calendar_queue(rig.universe), 1, "k", rig.clock.wall_ns())
    batch = submit_batch(rig, intent, due_timer)
    assert (batch.conflicted, rig.rows()) == (True, before)
    rig.run_until_idle(rig.fused_timer_worker, seconds=100)
    assert ada.state().woken == ["x"]


def test_calendar_timer_is_not_collected_after_the_clock_steps_back(rig: FusedTimerRig) -> None:
    at_ns = rig.clock.wall_ns() + 5 * S
    rig.buyer("ada", Planned(at_ns / S))
    rig.advance()
    rig.clock.step_wall(-3600 * S)
    assert not rig.fused_timer_worker.tick()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda bob, ada: (bob, DueTimerRef(DELAYS, 1, "k", 0)),
        lambda bob, ada: (bob, DueTimerRef(DELAYS, 2, "j", 0)),
        lambda bob, ada: (bob, DueTimerRef(timers.calendar_queue("shop"), 2, "k", 1 << 62)),
        lambda bob, ada: (
            replace(bob, intent_hash=ada.intent_hash),
            DueTimerRef(DELAYS, 1, "k", 0),
        ),
        lambda bob, ada: (replace(bob, intent_hash=b"none"), DueTimerRef(DELAYS, 2, "k", 0)),
        lambda bob, ada: (bob, DueTimerRef("shop/timers/none", 2, "k", 0)),
        lambda bob, ada: (bob, DueTimerRef(DELAYS, 3, "k", 0)),
    ],
)
def test_due_timer_that_names_another_timer_is_rejected(rig: FusedTimerRig, wrong: Any) -> None:
    ada = rig.buyer("ada", Slept(5, key="k", name="a"))
    bob = rig.buyer("bob", Slept(5, key="k", name="b"))
    rig.advance()
    ada_intent, bob_intent = rig.pending_timers()
    before = rig.rows()
    batch = submit_batch(rig, *wrong(bob_intent, ada_intent))
    assert (batch.conflicted, batch.delivered, rig.rows()) == (True, 0, before)
    rig.run_until_idle(rig.fused_timer_worker, seconds=5)
    assert (ada.state().woken, bob.state().woken) == (["a"], ["b"])


def test_rejected_timer_does_not_reject_timers_of_other_worlds(rig: FusedTimerRig) -> None:
    ada, bob = rig.buyer("ada", Slept(5, name="a")), rig.buyer("bob", Slept(5, name="b"))
    rig.advance()
    with rig.run_before_commit(lambda: ada.send(Woken("sent"))):
        rig.fused_timer_worker.tick()
    assert (bob.state().woken, rig.timer_counts()) == (["b"], queue.QueueCounts(delayed=1, done=1))
    rig.run_until_idle(rig.fused_timer_worker)
    assert ada.state().woken == ["sent", "a"]


def test_timers_are_not_fused_for_a_while_after_a_conflict(rig: FusedTimerRig) -> None:
    ada = rig.buyer("ada", Slept(5, name="a"), Slept(11, name="b"), Slept(40, name="c"))
    rig.advance()
    with rig.run_before_commit(lambda: ada.send(Woken("sent"))):
        rig.run_until_idle(rig.fused_timer_worker)
    rig.advance(FUSION_OFF_S / 2)
    rig.run_until_idle(rig.fused_timer_worker)
    assert rig.batches == 1
    rig.advance(30)
    rig.run_until_idle(rig.fused_timer_worker)
    assert rig.batches == 2
    assert ada.state().woken == ["sent", "a", "b", "c"]


@pytest.mark.parametrize("fault", FAULTS)
def test_fused_timer_fires_once_despite_a_commit_fault(rig: FusedTimerRig, fault: str) -> None:
    ada = rig.buyer("ada", Slept(5, name="x"), Slept(30, name="y"))
    rig.advance()
    rig.backend.arm({1: fault})
    try:
        rig.fused_timer_worker.tick()
    except Crash:
        rig.restart("2")
        rig.advance(4000)
    for _ in range(3):
        rig.advance(20)
        rig.run_until_idle(rig.fused_timer_worker)
    assert ada.state().woken == ["x", "y"]
    assert rig.is_consistent(ada)
    assert (rig.timer_counts(), rig.timer_slots(ada)) == (queue.QueueCounts(done=2), [])


# -- timers that are not fused ---------------------------------------------------------------------


def test_timer_of_a_world_hosted_elsewhere_is_delivered_to_its_inbox(rig: FusedTimerRig) -> None:
    ada = rig.buyer("ada", Slept(5, name="a"))
    other = rig.worker("B", idle_s=1e6)
    bob = rig.world(Buyer, "bob")
    rig.assign(bob, "B")
    bob.send(Slept(5, name="b"))
    rig.run(other)
    rig.advance()
    rig.run_until_idle(rig.fused_timer_worker)
    assert (rig.inbox_depth(bob), rig.timer_counts()) == (1, queue.QueueCounts(done=2))
    rig.run(other)
    assert (ada.state().woken, bob.state().woken) == (["a"], ["b"])


def test_recurring_timer_is_delivered_to_the_inbox(rig: FusedTimerRig) -> None:
    ada = rig.buyer("ada", Repeated("* * * * *", missed="all"))
    rig.advance(200)
    rig.run_until_idle(rig.fused_timer_worker)
    assert rig.batches == 0
    assert len(ada.state().woken) == 3


def test_timers_of_a_world_keep_their_order_with_a_recurring_timer(rig: FusedTimerRig) -> None:
    start = rig.clock.wall_ns() // (60 * S) * 60 + 60
    ada = rig.buyer("ada", Repeated("* * * * *"))
    before, after = start - 1, start + 1
    for at_s, name in ((after, "after"), (before, "before")):
        ada.send(Planned(at_s, name=name))
    rig.run_worlds()
    rig.advance(start + 10 - rig.clock.wall_ns() / S)
    rig.run_until_idle(rig.fused_timer_worker)
    assert ada.state().woken == ["before", "* * * * *", "after"]
    assert rig.batches == 1


def test_unfused_timers_wait_for_one_fused_batch_only(rig: FusedTimerRig) -> None:
    """Constantly due timers of local worlds do not starve timers of worlds hosted elsewhere."""
    bob = rig.world(Buyer, "bob")
    rig.assign(bob, "B")
    bob.send(Slept(5, name="b"))
    rig.run(rig.worker("B", idle_s=1e6))
    ada = rig.buyer("ada", *[Slept(1, name=str(n)) for n in range(3)])
    rig.advance()
    for n in range(3):
        rig.fused_timer_worker.tick()
        ada.send(Slept(0, name=f"more {n}"))
        rig.world_worker.tick()
    assert rig.inbox_depth(bob) == 1


def test_more_timers_than_the_inbox_batch_limit_all_fire(rig: FusedTimerRig) -> None:
    rig = FusedTimerRig(budgets=Budgets(max_inbox_batch=8))
    ada = rig.buyer("ada", *[Slept(5, name=str(n)) for n in range(30)])
    rig.advance()
    rig.run_until_idle(rig.fused_timer_worker)
    assert ada.state().woken == [str(n) for n in range(30)]


def test_fused_timer_fires_after_a_commit_of_unknown_outcome(rig: FusedTimerRig) -> None:
    """After a commit of unknown outcome the world is not in memory. Only the timer makes it reload."""
    ada = rig.buyer("ada", Slept(5, name="x"), Slept(15, name="y"))
    rig.advance()
    rig.backend.arm({1: UNKNOWN_AFTER})
    rig.fused_timer_worker.tick()
    rig.advance()
    for _ in range(5):
        rig.fused_timer_worker.tick()
    assert rig.timer_counts() == queue.QueueCounts(done=2)
    rig.run_worlds()
    assert ada.state().woken == ["x", "y"]


def test_failing_event_does_not_prevent_the_fused_timer(rig: FusedTimerRig) -> None:
    ada = rig.buyer("ada", GoodsOrdered(), Slept(5, name="x"))
    rig.advance()
    ada.send(Dropped(99))
    rig.fused_timer_worker.tick()
    assert (ada.state().woken, len(rig.failed_events())) == (["x"], 1)
    assert rig.is_consistent(ada)


def test_one_tick_delivers_at_most_one_batch_of_timers(rig: FusedTimerRig) -> None:
    worlds = [rig.buyer(f"w{n}") for n in range(30)]
    rig.runtime.send_many(
        [(one, Slept(5, name=str(n))) for n in range(10) for one in worlds],
    )
    rig.run_worlds()
    rig.advance()
    rig.fused_timer_worker.tick()
    assert rig.timer_counts().done == BATCH_MAX
    rig.run_until_idle(rig.fused_timer_worker)
    assert [one.state().woken for one in worlds] == [[str(n) for n in range(10)]] * 30


# -- drain and cancel ------------------------------------------------------------------------------


def test_timer_batch_after_drain_is_answered_immediately(rig: FusedTimerRig) -> None:
    ada = rig.buyer("ada", Slept(5, name="x"))
    rig.advance()
    rig.committer.drain()
    assert rig.fused_timer_worker.tick()
    rig.run_worlds()
    assert ada.state().woken == ["x"]


def test_drain_answers_an_unstarted_timer_batch(rig: FusedTimerRig) -> None:
    rig.buyer("ada", Slept(5, name="x"))
    rig.advance()
    rig.committer.open(IgnoredWakeSignal())
    batch = TimerBatch([])
    rig.committer.submit_timers(batch)
    assert not batch.answered.is_set()
    rig.committer.drain()
    assert batch.answered.is_set()


def test_cancelled_timer_batch_is_not_started(rig: FusedTimerRig) -> None:
    rig.buyer("ada", Slept(5, key="k", name="x"))
    rig.advance()
    rig.committer.open(IgnoredWakeSignal())
    [intent] = rig.pending_timers()
    timer = codec.unpack_as(TimerSet, intent.params)
    batch = TimerBatch([HostedTimer(intent, timer, DueTimerRef(DELAYS, 1, "k", 0))])
    rig.committer.submit_timers(batch)
    assert rig.committer.cancel_timers(batch)
    rig.committer.process(rig.clock.mono_ns() + S)
    assert rig.timer_counts() == queue.QueueCounts(delayed=1)


class IgnoredWakeSignal:
    """A wake signal without a listener."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def set(self) -> None:
        return


# -- random histories ------------------------------------------------------------------------------


SEEDS = 25


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_concurrent_changes_fire_each_timer_once(seed: int) -> None:
    """Random sends, cancels, replacements, unfused deliveries and crashes, checked against a model."""
    RandomTimerHistory(seed).run()


_APPLY, _CHECK = "world.cycle:_apply_cycle", "world.cycle:_check"
_COMPLETE, _COMPLETE_ITEM = "world.timers:complete", "durable.delayed:complete"
# Bugs that exactly one check prevents. Two checks guard that a timer is due: its slot and its queue row.
PLANTED_BUGS = {
    "slot not freed": Edit(_COMPLETE, "txn.delete(_key(universe, world_id, timer.slot))", "pass"),
    "neither freed nor ended": Edit(
        _APPLY, "timers.complete(txn, universe, world_id, one.alarm)", "pass"
    ),
    "no number of the inbox taken": Edit(
        _APPLY, "cycle.to_seq, len(cycle.carried)", "cycle.to_seq, 0"
    ),
    "others came first, and nobody looked": Edit(
        _CHECK, "if last != cycle.to_seq - len(cycle.carried):", "if False:"
    ),
    "the item stays in line": Edit(_COMPLETE_ITEM, "txn.delete(index_key)", "pass"),
    "done is not counted": Edit(_COMPLETE_ITEM, "delta.apply(txn, keys)", "pass"),
}


@pytest.mark.parametrize("name", PLANTED_BUGS)
def test_random_history_detects_a_planted_bug(name: str) -> None:
    with Mutant(name, (PLANTED_BUGS[name],)).planted():
        for seed in range(SEEDS):
            try:
                RandomTimerHistory(seed).run()
            except Exception:
                return
    raise AssertionError("nobody noticed")


class RandomTimerHistory:
    """Random actions, and a model of the timers that must have fired."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.rig = FusedTimerRig()
        self.worlds = [self.rig.buyer(f"w{n}") for n in range(3)]
        self.incarnations = 1
        self.names_used = 0
        # By world: the timer of each slot, the timers that must fire, and replaced timers, which may fire.
        self.slots: list[dict[str, str]] = [{} for _ in self.worlds]
        self.must_fire: list[set[str]] = [set() for _ in self.worlds]
        self.may_fire: list[set[str]] = [set() for _ in self.worlds]
        self.sent: list[set[str]] = [set() for _ in self.worlds]

    def run(self) -> None:
        actions = [
            self.sleep,
            self.sleep,
            self.unset,
            self.send,
            self.advance,
            self.advance,
            self.deliver_due,
        ]
        for _ in range(60):
            self.random.choice(actions)()
        for _ in range(4):
            self.rig.advance(30)
            self.rig.run_until_idle(self.rig.fused_timer_worker)
        self.check()

    def advance(self) -> None:
        rig, random = self.rig, self.random
        rig.advance(random.choice([0.01, 1, 5]))
        armed: AbstractContextManager[None] = nullcontext()
        if random.random() < 0.4:
            action = random.choice([self.deliver_due, self.send, self.expire_leases])
            armed = rig.run_before_commit(action)
        elif random.random() < 0.5:
            rig.backend.arm({random.choice([1, 2]): random.choice(FAULTS)})
        try:
            with armed:
                rig.fused_timer_worker.tick()
                if random.random() < 0.5:
                    rig.world_worker.tick()
        except (Crash, CommitUnknown) as error:
            if isinstance(error, Crash):
                self.restart_worker()
        rig.backend.arm({})

    def sleep(self) -> None:
        n, name = self.pick()
        key = self.random.choice(["k", "j", None])
        seconds = self.random.choice([0, 0.5, 3, 10])
        if key is not None:
            self.free_slot(n, key)
            self.slots[n][key] = name
        self.must_fire[n].add(name)
        if self.random.random() < 0.3:
            at_s = self.rig.clock.wall_ns() / S + seconds
            self.worlds[n].send(Planned(at_s, key=key, name=name))
        else:
            self.worlds[n].send(Slept(seconds, key=key, name=name))
        self.rig.run_worlds()

    def unset(self) -> None:
        n, _ = self.pick()
        self.free_slot(n, "k")
        self.worlds[n].send(Unset("k"))

    def free_slot(self, n: int, key: str) -> None:
        replaced = self.slots[n].pop(key, None)
        if replaced is not None:
            self.must_fire[n].discard(replaced)
            self.may_fire[n].add(replaced)

    def send(self) -> None:
        n, name = self.pick()
        self.sent[n].add(name)
        self.worlds[n].send(Woken(name))

    def pick(self) -> tuple[int, str]:
        self.names_used += 1
        return self.random.randrange(len(self.worlds)), str(self.names_used)

    def deliver_due(self) -> None:
        self.rig.deliver_due()

    def expire_leases(self) -> None:
        """Let the leases of the worker expire."""
        self.rig.advance(4000)

    def restart_worker(self) -> None:
        self.incarnations += 1
        self.rig.restart(f"{self.incarnations}")
        self.rig.advance(4000)

    def check(self) -> None:
        rig = self.rig
        for n, world in enumerate(self.worlds):
            woken = world.state().woken
            assert len(woken) == len(set(woken)), "none twice"
            fired = set(woken) - self.sent[n]
            assert self.must_fire[n] <= fired <= self.must_fire[n] | self.may_fire[n]
            assert self.sent[n] <= set(woken)
            assert rig.timer_slots(world) == []
            assert rig.is_consistent(world)
        # A cancelled timer counts as done, too.
        timers_set = sum(map(len, self.must_fire)) + sum(map(len, self.may_fire))
        delays, calendar = rig.timer_counts(), rig.calendar_counts()
        assert delays.done + calendar.done == timers_set
        assert (delays.delayed, calendar.delayed, delays.dead) == (0, 0, 0)
        assert rig.pending_timers() == []


# -- real threads ----------------------------------------------------------------------------------

TIMEOUT_S = 60.0
release_reducer = threading.Event()
reducer_entered = threading.Event()


class Set(hf.Event):
    n: int
    ms: int


class TimerFired(hf.Event):
    n: int


class HoldRequested(hf.Event):
    pass


class Clock(hf.World):
    rang: list[int] = msgspec.field(default_factory=list)

    @hf.on(Set)
    def set(self, event: Set, cx: hf.Context) -> None:
        cx.after(event.ms / 1000, TimerFired(event.n))

    @hf.on(TimerFired)
    def ring(self, event: TimerFired, cx: hf.Context) -> None:
        self.rang.append(event.n)

    @hf.on(HoldRequested)
    def hold(self, event: HoldRequested, cx: hf.Context) -> None:
        reducer_entered.set()
        release_reducer.wait(TIMEOUT_S)


clock_app = hf.App("clocks", worlds=[Clock])


def until(condition: Callable[[], bool], description: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, description
        time.sleep(0.005)


def test_two_runtimes_fire_each_of_two_hundred_timers_once(tmp_path: Path) -> None:
    with (
        clock_app.open(f"lmdb:{tmp_path}/store", worker="one") as first,
        clock_app.open(f"lmdb:{tmp_path}/store", worker="two") as second,
    ):
        worlds = [first.world(Clock, f"c{n}") for n in range(20)]
        first.send_many([(one, Set(n, 20 * n)) for n in range(10) for one in worlds])
        until(lambda: all(len(one.state().rang) >= 10 for one in worlds), "all of them")
        assert [sorted(one.state().rang) for one in worlds] == [list(range(10))] * 20
        done = first.store.read(queue.counts, timers.delay_queue("clocks"))
        assert done == queue.QueueCounts(done=200)
        for runtime in (first, second):
            assert all(role.failure is None for role in runtime.roles)
        for one in worlds:
            subject = catalog.subject_of("clocks", one.create())
            first.store.read(journal.verify, subject)


def test_blocked_reducer_does_not_delay_timers_of_other_worlds(tmp_path: Path) -> None:
    """Timers of worlds in the same process go to their inboxes."""
    release_reducer.clear()
    reducer_entered.clear()
    with clock_app.open(f"lmdb:{tmp_path}/store") as runtime:
        try:
            other, hangs = runtime.world(Clock, "other"), runtime.world(Clock, "hangs")
            other.send(Set(0, 0))
            until(lambda: other.state().rang == [0], "the first")
            # The delay lets the other reducer block first, on a busy machine too.
            other.send(Set(1, 1500))
            until(lambda: pending_count(runtime) == 1, "the second, set")
            hangs.send(HoldRequested())
            assert reducer_entered.wait(TIMEOUT_S)
            until(lambda: pending_count(runtime) == 0, "the second, fired")
        finally:
            release_reducer.set()
        until(lambda: other.state().rang == [0, 1], "the second")


def pending_count(runtime: Runtime) -> int:
    return len(runtime.store.read(pending_work.timers, "clocks", 100))


def wait_for_count(world: hf.WorldHandle[Clock], count: int) -> None:
    until(lambda: len(world.state().rang) >= count, "some of them")


def test_stop_during_timer_batches_loses_and_duplicates_no_timer(tmp_path: Path) -> None:
    random, restarts, each = Random(3), 6, 15
    names: list[int] = []
    for life in range(restarts):
        with clock_app.open(f"lmdb:{tmp_path}/store") as runtime:
            worlds = [runtime.world(Clock, f"c{n}") for n in range(5)]
            fresh = [life * each + n for n in range(each)]
            names += fresh
            runtime.send_many([(w, Set(n, random.randrange(60))) for n in fresh for w in worlds])
            wait_for_count(worlds[0], random.randrange(len(names)))
    with clock_app.open(f"lmdb:{tmp_path}/store") as runtime:
        worlds = [runtime.world(Clock, f"c{n}") for n in range(5)]
        until(lambda: all(len(one.state().rang) >= len(names) for one in worlds), "all")
        assert [sorted(one.state().rang) for one in worlds] == [names] * 5
        until(lambda: pending_count(runtime) == 0, "none left")

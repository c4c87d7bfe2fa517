"""Injected faults of the faulting client: their effect on the caller, and the recorded history."""

from collections.abc import Callable, Iterator

import pytest

from holdfast.clock import SimClock
from holdfast.errors import CommitUnknown, HoldfastError, StoreFull, StoreReplaced
from holdfast.sim.actor_clock import ActorClock
from holdfast.sim.choice_tape import ChoiceTape
from holdfast.sim.faulting_client import FaultingClient
from holdfast.sim.faults import Fault, FaultPlan
from holdfast.sim.history import History, HistoryEvent
from holdfast.sim.scheduler import Scheduler, SimThread, SimThreadPool
from holdfast.sim.sim_store import SimStore
from holdfast.store import schema
from holdfast.store.api import Txn
from holdfast.store.memory_backend import MemoryBackend

KEY = (0, "sim", "x")
LEASE_NS = 2_000_000_000


class FaultRig:
    """One simulated store with actors. An actor is a function of its store handle."""

    def __init__(self, threads: SimThreadPool, forced: dict[int, Fault]) -> None:
        tape = ChoiceTape(3)
        self.clock = SimClock()
        self.scheduler = Scheduler(tape, self.clock, threads)
        self.history = History()
        self.store = SimStore(
            MemoryBackend,
            self.scheduler,
            self.clock,
            self.history,
            FaultPlan(tape, {}, forced),
            lease_ns=LEASE_NS,
            group=False,
        )
        self.caught: list[HoldfastError] = []

    def run(self, *bodies: Callable[[FaultingClient], object]) -> list[SimThread]:
        tasks = []
        for n, body in enumerate(bodies):
            name = f"a{n}"
            clock = ActorClock(self.clock, self.scheduler, name)
            handle = FaultingClient(self.store, name, "1", clock)
            tasks.append(self.scheduler.spawn(name, lambda b=body, h=handle: self._try(b, h)))  # type: ignore[misc]
        self.scheduler.run(lambda: False)
        self.scheduler.close()
        return tasks

    def _try(self, body: Callable[[FaultingClient], object], handle: FaultingClient) -> None:
        try:
            body(handle)
        except HoldfastError as error:
            self.caught.append(error)

    @property
    def value(self) -> int:
        rows = dict(self.store.rows())
        return next((int.from_bytes(v, "big") for k, v in rows.items() if b"sim" in k), 0)

    @property
    def bump_events(self) -> list[HistoryEvent]:
        return [event for event in self.history if event.op == "bump"]


def bump(txn: Txn) -> None:
    stored = txn.get(KEY)
    value = 0 if stored is None else int.from_bytes(stored, "big")
    txn.put(KEY, (value + 1).to_bytes(8, "big"))


def once(store: FaultingClient) -> None:
    store.transact(bump)


@pytest.fixture
def make_rig() -> Iterator[Callable[..., FaultRig]]:
    with SimThreadPool() as threads:
        yield lambda **forced: FaultRig(threads, forced.get("forced", {}))


def test_transaction_without_a_fault_is_applied_and_known(
    make_rig: Callable[..., FaultRig],
) -> None:
    rig = make_rig()
    rig.run(once)
    assert rig.value == 1
    assert [(event.result, event.applied) for event in rig.bump_events] == [("ok", True)]


@pytest.mark.parametrize(
    ("fault", "applied", "known", "error"),
    [
        (Fault.CRASH_BEFORE, False, "unknown", None),
        (Fault.CRASH_AFTER, True, "unknown", None),
        (Fault.UNKNOWN_BEFORE, False, "unknown", CommitUnknown),
        (Fault.UNKNOWN_AFTER, True, "unknown", CommitUnknown),
        (Fault.FULL, False, "fail", StoreFull),
        (Fault.STALL, True, "ok", None),
        (Fault.LOST_BEFORE, True, "ok", None),
        (Fault.LOST_AFTER, True, "ok", None),
    ],
)
def test_fault_determines_whether_a_commit_is_applied_and_known(
    make_rig: Callable[..., FaultRig],
    fault: Fault,
    applied: bool,
    known: str,
    error: type[HoldfastError] | None,
) -> None:
    rig = make_rig(forced={1: fault})
    [task] = rig.run(once)
    assert rig.value == int(applied)
    assert [(event.result, event.applied) for event in rig.bump_events] == [(known, applied)]
    assert [type(caught) for caught in rig.caught] == ([] if error is None else [error])
    assert task.killed == (fault in (Fault.CRASH_BEFORE, Fault.CRASH_AFTER))


def test_conflict_fault_retries_the_transaction(make_rig: Callable[..., FaultRig]) -> None:
    rig = make_rig(forced={1: Fault.CONFLICT})
    rig.run(once)
    assert rig.value == 1
    assert [event.result for event in rig.bump_events] == ["fail", "ok"]


def test_stall_fault_takes_a_quarter_of_a_lease_or_longer(
    make_rig: Callable[..., FaultRig],
) -> None:
    rig = make_rig(forced={1: Fault.STALL})
    before = rig.clock.boot_ns()
    rig.run(once)
    assert rig.clock.boot_ns() - before >= LEASE_NS // 4


def test_concurrent_transactions_conflict_and_all_commit(make_rig: Callable[..., FaultRig]) -> None:
    def many(store: FaultingClient) -> None:
        for _ in range(10):
            store.transact(bump)

    rig = make_rig()
    rig.run(many, many, many)
    assert rig.value == 30
    assert any(event.code == "conflict" for event in rig.bump_events)


def test_killed_actor_commits_nothing_after_its_crash(make_rig: Callable[..., FaultRig]) -> None:
    def stubborn(store: FaultingClient) -> None:
        try:
            store.transact(bump)
        finally:
            store.transact(bump)

    rig = make_rig(forced={1: Fault.CRASH_BEFORE})
    [task] = rig.run(stubborn)
    assert task.killed
    assert rig.value == 0


def test_takeover_is_invisible_to_transactions(make_rig: Callable[..., FaultRig]) -> None:
    rig = make_rig()

    def body(store: FaultingClient) -> None:
        store.transact(bump)
        rig.store.takeover()
        store.transact(bump)

    rig.run(body)
    assert rig.value == 2


def test_restore_starts_a_generation_and_old_handles_raise_store_replaced(
    make_rig: Callable[..., FaultRig],
) -> None:
    rig = make_rig()

    def body(store: FaultingClient) -> None:
        store.transact(bump)
        backup = rig.store.backup()
        store.transact(bump)
        rig.store.restore(backup)
        with pytest.raises(StoreReplaced):
            store.transact(bump)
        store.reopen()
        store.transact(bump)

    rig.run(body)
    assert rig.store.engine.generation == 2
    assert rig.value == 2
    assert rig.caught == []


def test_reboot_never_moves_store_time_backwards(make_rig: Callable[..., FaultRig]) -> None:
    rig = make_rig()
    rig.run(once)
    before = rig.store.engine.now_ns()
    rig.store.reboot(wall_step_ns=-100 * 3600 * 1_000_000_000)
    assert rig.store.engine.now_ns() > before


def test_wrong_marker_is_rejected_and_restored(make_rig: Callable[..., FaultRig]) -> None:
    rig = make_rig()
    rig.run(once)
    original = dict(rig.store.rows())[schema.MARKER_KEY]
    rig.store.try_marker(b"garbage!", bootstrap=True)
    [boot] = [event for event in rig.history if event.op == "boot"]
    assert boot.value == {"outcome": "schema_mismatch", "changed": False}
    assert dict(rig.store.rows())[schema.MARKER_KEY] == original


def test_wait_returns_when_its_topic_is_notified(make_rig: Callable[..., FaultRig]) -> None:
    rig = make_rig()
    woke: list[int] = []

    def waiter(store: FaultingClient) -> None:
        store.wait("news", 0, 3600.0)
        woke.append(rig.clock.boot_ns())

    def notifier(store: FaultingClient) -> None:
        rig.scheduler.sleep(1_000_000_000)
        store.transact(lambda txn: txn.notify("news"))

    began = rig.clock.boot_ns()
    rig.run(waiter, notifier)
    assert 1 <= (woke[0] - began) / 1e9 < 5

"""Each fault does to a caller what it says, and the history tells the truth about it."""

from collections.abc import Callable, Iterator

import pytest

from holdfast.clock import SimClock
from holdfast.errors import CommitUnknown, HoldfastError, StoreFull, StoreReplaced
from holdfast.sim.clocks import ActorClock
from holdfast.sim.faults import Fault, Plan
from holdfast.sim.history import Event, History
from holdfast.sim.machine import SimStore
from holdfast.sim.scheduler import Scheduler, Task, Threads
from holdfast.sim.store import FaultingStore
from holdfast.sim.tape import Tape
from holdfast.store import schema
from holdfast.store.api import Txn
from holdfast.store.memory import MemoryBackend

KEY = (0, "sim", "x")
LEASE_NS = 2_000_000_000


class Bench:
    """One store, and actors that are functions of a handle on it."""

    def __init__(self, threads: Threads, forced: dict[int, Fault]) -> None:
        tape = Tape(3)
        self.clock = SimClock()
        self.scheduler = Scheduler(tape, self.clock, threads)
        self.history = History()
        self.store = SimStore(
            MemoryBackend,
            self.scheduler,
            self.clock,
            self.history,
            Plan(tape, {}, forced),
            lease_ns=LEASE_NS,
            group=False,
        )
        self.caught: list[HoldfastError] = []

    def run(self, *bodies: Callable[[FaultingStore], object]) -> list[Task]:
        tasks = []
        for n, body in enumerate(bodies):
            name = f"a{n}"
            clock = ActorClock(self.clock, self.scheduler, name)
            handle = FaultingStore(self.store, name, "1", clock)
            tasks.append(self.scheduler.spawn(name, lambda b=body, h=handle: self._try(b, h)))  # type: ignore[misc]
        self.scheduler.run(lambda: False)
        self.scheduler.close()
        return tasks

    def _try(self, body: Callable[[FaultingStore], object], handle: FaultingStore) -> None:
        try:
            body(handle)
        except HoldfastError as error:
            self.caught.append(error)

    @property
    def value(self) -> int:
        rows = dict(self.store.rows())
        return next((int.from_bytes(v, "big") for k, v in rows.items() if b"sim" in k), 0)

    @property
    def bumps(self) -> list[Event]:
        return [event for event in self.history if event.op == "bump"]


def bump(txn: Txn) -> None:
    found = txn.get(KEY)
    value = 0 if found is None else int.from_bytes(found, "big")
    txn.put(KEY, (value + 1).to_bytes(8, "big"))


def once(store: FaultingStore) -> None:
    store.transact(bump)


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    with Threads() as threads:
        yield lambda **forced: Bench(threads, forced.get("forced", {}))


def test_without_a_fault_it_is_committed_and_known(bench: Callable[..., Bench]) -> None:
    made = bench()
    made.run(once)
    assert made.value == 1
    assert [(event.result, event.applied) for event in made.bumps] == [("ok", True)]


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
def test_a_fault_decides_what_is_applied_and_what_is_known(
    bench: Callable[..., Bench],
    fault: Fault,
    applied: bool,
    known: str,
    error: type[HoldfastError] | None,
) -> None:
    made = bench(forced={1: fault})
    [task] = made.run(once)
    assert made.value == int(applied)
    assert [(event.result, event.applied) for event in made.bumps] == [(known, applied)]
    assert [type(caught) for caught in made.caught] == ([] if error is None else [error])
    assert task.killed == (fault in (Fault.CRASH_BEFORE, Fault.CRASH_AFTER))


def test_a_conflict_runs_the_function_again(bench: Callable[..., Bench]) -> None:
    made = bench(forced={1: Fault.CONFLICT})
    made.run(once)
    assert made.value == 1
    assert [event.result for event in made.bumps] == ["fail", "ok"]


def test_a_stall_is_longer_than_a_lease_at_times(bench: Callable[..., Bench]) -> None:
    made = bench(forced={1: Fault.STALL})
    before = made.clock.boot_ns()
    made.run(once)
    assert made.clock.boot_ns() - before >= LEASE_NS // 4


def test_others_commit_between_the_snapshot_and_the_commit(bench: Callable[..., Bench]) -> None:
    def many(store: FaultingStore) -> None:
        for _ in range(10):
            store.transact(bump)

    made = bench()
    made.run(many, many, many)
    assert made.value == 30
    assert any(event.code == "conflict" for event in made.bumps)


def test_the_dead_commit_nothing_more(bench: Callable[..., Bench]) -> None:
    def stubborn(store: FaultingStore) -> None:
        try:
            store.transact(bump)
        finally:
            store.transact(bump)

    made = bench(forced={1: Fault.CRASH_BEFORE})
    [task] = made.run(stubborn)
    assert task.killed
    assert made.value == 0


def test_a_takeover_is_noticed_by_nobody(bench: Callable[..., Bench]) -> None:
    made = bench()

    def body(store: FaultingStore) -> None:
        store.transact(bump)
        made.store.takeover()
        store.transact(bump)

    made.run(body)
    assert made.value == 2


def test_a_restored_backup_is_a_new_generation_that_old_handles_refuse(
    bench: Callable[..., Bench],
) -> None:
    made = bench()

    def body(store: FaultingStore) -> None:
        store.transact(bump)
        backup = made.store.backup()
        store.transact(bump)
        made.store.restore(backup)
        with pytest.raises(StoreReplaced):
            store.transact(bump)
        store.reopen()
        store.transact(bump)

    made.run(body)
    assert made.store.engine.generation == 2
    assert made.value == 2
    assert made.caught == []


def test_a_reboot_never_takes_store_time_back(bench: Callable[..., Bench]) -> None:
    made = bench()
    made.run(once)
    before = made.store.engine.now_ns()
    made.store.reboot(wall_step_ns=-100 * 3600 * 1_000_000_000)
    assert made.store.engine.now_ns() > before


def test_a_wrong_marker_is_refused_and_put_right_again(bench: Callable[..., Bench]) -> None:
    made = bench()
    made.run(once)
    genuine = dict(made.store.rows())[schema.MARKER_KEY]
    made.store.try_boot(b"garbage!", bootstrap=True)
    [boot] = [event for event in made.history if event.op == "boot"]
    assert boot.value == {"outcome": "schema_mismatch", "changed": False}
    assert dict(made.store.rows())[schema.MARKER_KEY] == genuine


def test_a_waiter_wakes_when_its_topic_is_notified(bench: Callable[..., Bench]) -> None:
    made = bench()
    woke: list[int] = []

    def waiter(store: FaultingStore) -> None:
        store.wait("news", 0, 3600.0)
        woke.append(made.clock.boot_ns())

    def teller(store: FaultingStore) -> None:
        made.scheduler.sleep(1_000_000_000)
        store.transact(lambda txn: txn.notify("news"))

    began = made.clock.boot_ns()
    made.run(waiter, teller)
    assert 1 <= (woke[0] - began) / 1e9 < 5

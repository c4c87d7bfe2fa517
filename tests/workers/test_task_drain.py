"""`holdfast workers drain` of a task worker: running tasks end, no other task starts, none is lost."""

from __future__ import annotations

import pytest

import holdfast as hf
from holdfast.clock import S
from holdfast.leadership import worker_registry
from holdfast.workers.tasks.upkeep import HEARTBEAT_NS
from tests.workers.task_rig import TaskRig, open_task_rig
from tests.workers.test_task_worker import TaskGates, state

MODULES = ("holdfast.workers.tasks.worker", "holdfast.workers.tasks.demand")
BEAT_S = HEARTBEAT_NS / S + 1


def set_draining(rig: TaskRig, worker: str, draining: bool) -> None:
    universe = rig.app.universe
    rig.store.transact(worker_registry.set_draining, universe, worker, draining)


@pytest.mark.parametrize("id", ["w", "w:task"])
def test_draining_worker_ends_its_task_and_starts_no_other(id: str) -> None:
    gates = TaskGates()

    @hf.task
    def work(n: int) -> int:
        gates.wait_at_gate(n)
        return n

    with open_task_rig(work) as rig:
        worker = rig.worker(concurrency=1)
        first, second = rig.rt.submit(work, 0), rig.rt.submit(work, 1)
        gates.open(1)
        rig.step_until(lambda: gates.running, "the first task", worker)
        set_draining(rig, id, True)
        rig.pass_time(BEAT_S, worker)
        gates.open(0)
        rig.step_until(lambda: state(first) == "COMPLETED", "its end", worker)
        rig.pass_time(2 * BEAT_S, worker)
        assert state(second) == "WAITING"
        assert worker.leased_count == 0
        set_draining(rig, id, False)
        rig.step_until(
            lambda: state(second) == "COMPLETED", "its turn", worker, tick_ns=HEARTBEAT_NS // 10
        )


def test_draining_worker_gets_no_task_from_its_parked_request() -> None:
    @hf.task
    def work(n: int) -> int:
        return n

    with open_task_rig(work) as rig:
        worker, other = rig.worker(), rig.worker("other")
        rig.pass_time(BEAT_S, worker)
        worker._park()
        set_draining(rig, "w", True)
        rig.clock.advance(HEARTBEAT_NS + S)
        worker.step()
        handle = rig.rt.submit(work, 1)
        assert state(handle) == "WAITING"
        rig.pass_time(2 * BEAT_S, worker)
        assert state(handle) == "WAITING"
        rig.step_until(lambda: state(handle) == "COMPLETED", "the other worker", other)


def test_drain_of_a_process_marks_all_of_its_services() -> None:
    @hf.task
    def work(n: int) -> int:
        return n

    with open_task_rig(work) as rig:
        universe = rig.app.universe
        for worker in ("w", "w:task", "w2:task"):
            rig.store.transact(worker_registry.heartbeat, universe, worker, "1", ("task",))
        set_draining(rig, "w", True)
        records = rig.store.read(worker_registry.list_registered, universe)
        assert {record.worker: record.draining for record in records} == {
            "w": True, "w:task": True, "w2:task": False,
        }  # fmt: skip
        set_draining(rig, "w2", True)
        records = rig.store.read(worker_registry.list_registered, universe)
        assert all(record.draining for record in records)

"""Quarantine of tasks that may have killed their workers."""

from __future__ import annotations

from typing import Any

import holdfast as hf
from holdfast.clock import MS
from holdfast.workers.tasks.quarantine_window import FIRST_DRAIN_NS
from tests.workers.task_rig import TaskGates, TaskRig, open_task_rig

MODULES = ("holdfast.workers.tasks.worker", "holdfast.tasks.leases")

LEASE_S = 10


def state(handle: hf.TaskHandle[Any]) -> str:
    return handle.status().state


def gated_task(gates: TaskGates, *, expiries_max: int = 2) -> hf.Task[[str], str]:
    @hf.task(lease_s=LEASE_S, expiries_max=expiries_max)
    def work(name: str) -> str:
        gates.wait_at_gate(name)
        return name

    return work


def lose_workers(
    rig: TaskRig, gates: TaskGates, *handles: hf.TaskHandle[Any], times: int = 1
) -> None:
    """Start all waiting tasks on a worker and abandon it, `times` times."""
    for n in range(times):
        before = len(gates.started)
        lost = rig.worker(f"lost-{n}")
        rig.step_until(
            lambda before=before: len(gates.started) == before + len(handles),
            "that it is begun",
            lost,
            tick_ns=100 * MS,
        )
        # The worker is not stepped again: only its threads remain.
        rig.clock.advance((LEASE_S + 1) * 1000 * MS)
        rig.store.transact(_touch)


def _touch(txn: Any) -> None:
    txn.notify("nobody")


def test_last_lease_of_a_suspect_task_runs_in_quarantine() -> None:
    gates = TaskGates()
    work = gated_task(gates)
    with open_task_rig(work) as rig:
        suspect = rig.rt.submit(work, "suspect")
        lose_workers(rig, gates, suspect)
        worker = rig.worker(concurrency=8)
        rig.step_until(
            lambda: suspect.status().attempt == 2, "its second lease", worker, tick_ns=MS
        )
        others = [rig.rt.submit(work, f"other {n}") for n in range(5)]
        rig.pass_time(60, worker)
        assert [handle.status().where for handle in others] == ["ready"] * 5
        gates.open("suspect")
        rig.step_until(lambda: state(suspect) == "COMPLETED", "its end", worker)
        rig.step_until(lambda: len(gates.running) == 5, "the others", worker, tick_ns=MS)
        gates.open(*(f"other {n}" for n in range(5)))
        rig.step_until(lambda: rig.counts().completed == 6, "all", worker)


def test_quarantined_task_waits_until_no_other_task_runs() -> None:
    gates = TaskGates()
    work = gated_task(gates)
    with open_task_rig(work) as rig:
        suspect = rig.rt.submit(work, "suspect")
        lose_workers(rig, gates, suspect)
        before = rig.rt.submit(work, "before")
        worker = rig.worker(concurrency=8)
        rig.step_until(lambda: "before" in gates.running, "the other", worker)
        after = rig.rt.submit(work, "after")
        rig.pass_time(FIRST_DRAIN_NS / 2e9, worker)
        assert (suspect.status().attempt, state(after)) == (1, "WAITING")
        gates.open("before", "suspect", "after")
        rig.step_until(lambda: rig.counts().completed == 3, "all", worker, tick_ns=MS)
        assert gates.started == ["suspect", "before", "suspect", "after"]
        assert state(before) == "COMPLETED"


def test_new_tasks_go_to_other_workers_during_quarantine() -> None:
    gates = TaskGates()
    work = gated_task(gates)
    with open_task_rig(work) as rig:
        suspect = rig.rt.submit(work, "suspect")
        lose_workers(rig, gates, suspect)
        worker, free = rig.worker(), rig.worker("free")
        rig.step_until(
            lambda: suspect.status().attempt == 2, "its second lease", worker, tick_ns=MS
        )
        others = [rig.rt.submit(work, f"other {n}") for n in range(5)]
        gates.open(*(f"other {n}" for n in range(5)))
        rig.step_until(lambda: rig.counts().completed == 5, "the others", worker, free, tick_ns=MS)
        assert {handle.status().state for handle in others} == {"COMPLETED"}
        assert state(suspect) == "LEASED"
        gates.open("suspect")
        rig.step_until(lambda: state(suspect) == "COMPLETED", "its end", worker)


def test_quarantine_behind_a_long_task_delays_other_tasks_only_briefly() -> None:
    gates = TaskGates()
    work = gated_task(gates)
    with open_task_rig(work) as rig:
        suspect = rig.rt.submit(work, "suspect")
        lose_workers(rig, gates, suspect)
        rig.rt.submit(work, "long")
        worker = rig.worker()
        rig.step_until(lambda: "long" in gates.running, "the long one", worker)
        for n in range(10):
            other = rig.rt.submit(work, f"other {n}")
            gates.open(f"other {n}")
            rig.step_until(
                lambda other=other: state(other) == "COMPLETED", "it", worker, tick_ns=10 * MS
            )
        assert suspect.status().attempt == 1, "it has never been alone so far"
        gates.open("long", "suspect")
        rig.step_until(lambda: state(suspect) == "COMPLETED", "its end", worker, tick_ns=50 * MS)


def test_quarantined_task_runs_under_constant_load() -> None:
    """Under constant load a worker must pause leasing to run the quarantined task."""
    gates = TaskGates()
    work = gated_task(gates)
    with open_task_rig(work) as rig:
        suspect = rig.rt.submit(work, "suspect")
        lose_workers(rig, gates, suspect)
        worker = rig.worker(concurrency=2)
        sent, ends_at_ns = 0, dict[str, int]()

        def flood() -> bool:
            nonlocal sent
            while rig.counts().waiting < 6:
                rig.rt.submit(work, f"other {sent}")
                sent += 1
            now_ns = rig.clock.boot_ns()
            for name in list(gates.running):
                if name != "suspect" and now_ns >= ends_at_ns.setdefault(name, now_ns + 500 * MS):
                    gates.open(name)
            return suspect.status().attempt == 2

        rig.step_until(flood, "its second lease", worker, tick_ns=20 * MS)
        assert sent > 2
        gates.open("suspect", *(f"other {n}" for n in range(sent)))
        rig.step_until(lambda: rig.counts().completed == sent + 1, "all", worker, tick_ns=MS)


def test_many_quarantined_and_new_tasks_all_complete() -> None:
    gates = TaskGates()
    work = gated_task(gates)
    names = [f"suspect {n}" for n in range(16)]
    with open_task_rig(work) as rig:
        suspects = [rig.rt.submit(work, name) for name in names]
        lose_workers(rig, gates, *suspects)
        gates.open(*names, *(f"other {n}" for n in range(10)))
        others = [rig.rt.submit(work, f"other {n}") for n in range(10)]
        worker = rig.worker()
        rig.step_until(lambda: rig.counts().completed == 26, "all", worker, tick_ns=10 * MS)
        assert {handle.status().expiries for handle in suspects} == {1}
        assert {handle.status().expiries for handle in others} == {0}


def test_poison_task_causes_no_other_task_to_die() -> None:
    """Other tasks lose a lease with each killed worker, except for the quarantined last lease."""
    gates = TaskGates()
    work = gated_task(gates, expiries_max=3)
    with open_task_rig(work) as rig:
        poison = rig.rt.submit(work, "poison")
        others = [rig.rt.submit(work, f"other {n}") for n in range(5)]
        for n in range(20):
            if state(poison) == "DEAD":
                break
            worker = rig.worker(f"w{n}")
            # The worker that starts the poison task is lost with all its leases.
            came = gates.started.count("poison")
            rig.step_until(
                lambda came=came: gates.started.count("poison") > came or state(poison) == "DEAD",
                "the poison",
                worker,
                tick_ns=50 * MS,
            )
            rig.clock.advance((LEASE_S + 1) * 1000 * MS)
        last = rig.worker("last")
        gates.open(*(f"other {n}" for n in range(5)))
        rig.step_until(lambda: rig.counts().completed == 5, "the others", last, tick_ns=50 * MS)
        status = poison.status()
        assert (status.state, status.expiries, status.attempt) == ("DEAD", 3, 3)
        assert max(handle.status().expiries for handle in others) <= 2
        gates.open("poison")


def test_tasks_with_one_allowed_expiry_run_without_quarantine() -> None:
    """With `expiries_max=1` the first lease is the last one. No earlier loss makes the task a suspect."""
    gates = TaskGates()
    work = gated_task(gates, expiries_max=1)
    with open_task_rig(work) as rig:
        handles = [rig.rt.submit(work, f"{n}") for n in range(4)]
        worker = rig.worker(concurrency=4)
        rig.step_until(lambda: len(gates.running) == 4, "that all are begun", worker, tick_ns=MS)
        gates.open(*"0123")
        rig.step_until(lambda: rig.counts().completed == 4, "all", worker, tick_ns=MS)
        assert all(state(handle) == "COMPLETED" for handle in handles)

"""Tasks that may have killed their workers: who is beside them, and who waits for them."""

from __future__ import annotations

from typing import Any

import holdfast as hf
from holdfast.clock import MS
from holdfast.roles.task_drain import PATIENCE_NS
from tests.roles.task_rig import Gates, Shift, shift

MODULES = ("holdfast.roles.task_worker", "holdfast.tasks.lease")

LEASE_S = 10


def state(handle: hf.TaskHandle[Any]) -> str:
    return handle.status().state


def work_of(gates: Gates, *, expiries_max: int = 2) -> hf.Task[[str], str]:
    @hf.task(lease_s=LEASE_S, expiries_max=expiries_max)
    def work(name: str) -> str:
        gates.pass_through(name)
        return name

    return work


def lose(rig: Shift, gates: Gates, *handles: hf.TaskHandle[Any], times: int = 1) -> None:
    """Workers begin all that waits, and are lost with it."""
    for n in range(times):
        before = len(gates.came)
        lost = rig.worker(f"lost-{n}")
        rig.until(
            lambda before=before: len(gates.came) == before + len(handles),
            "that it is begun",
            lost,
            tick_ns=100 * MS,
        )
        # It does nothing more: as if it were dead, but for its threads.
        rig.clock.advance((LEASE_S + 1) * 1000 * MS)
        rig.store.transact(_touch)


def _touch(txn: Any) -> None:
    txn.notify("nobody")


def test_the_last_lease_of_a_task_is_granted_with_nothing_beside_it() -> None:
    gates = Gates()
    work = work_of(gates)
    with shift(work) as rig:
        suspect = rig.rt.submit(work, "suspect")
        lose(rig, gates, suspect)
        worker = rig.worker(concurrency=8)
        rig.until(lambda: suspect.status().attempt == 2, "its second lease", worker, tick_ns=MS)
        others = [rig.rt.submit(work, f"other {n}") for n in range(5)]
        rig.pass_time(60, worker)
        assert [handle.status().where for handle in others] == ["ready"] * 5
        gates.open("suspect")
        rig.until(lambda: state(suspect) == "COMPLETED", "its end", worker)
        rig.until(lambda: len(gates.inside) == 5, "the others", worker, tick_ns=MS)
        gates.open(*(f"other {n}" for n in range(5)))
        rig.until(lambda: rig.counts().completed == 6, "all", worker)


def test_a_suspect_waits_until_nothing_else_runs() -> None:
    gates = Gates()
    work = work_of(gates)
    with shift(work) as rig:
        suspect = rig.rt.submit(work, "suspect")
        lose(rig, gates, suspect)
        before = rig.rt.submit(work, "before")
        worker = rig.worker(concurrency=8)
        rig.until(lambda: "before" in gates.inside, "the other", worker)
        after = rig.rt.submit(work, "after")
        rig.pass_time(PATIENCE_NS / 2e9, worker)
        assert (suspect.status().attempt, state(after)) == (1, "WAITING")
        gates.open("before", "suspect", "after")
        rig.until(lambda: rig.counts().completed == 3, "all", worker, tick_ns=MS)
        assert gates.came == ["suspect", "before", "suspect", "after"]
        assert state(before) == "COMPLETED"


def test_what_comes_while_a_suspect_runs_is_for_other_workers() -> None:
    gates = Gates()
    work = work_of(gates)
    with shift(work) as rig:
        suspect = rig.rt.submit(work, "suspect")
        lose(rig, gates, suspect)
        worker, free = rig.worker(), rig.worker("free")
        rig.until(lambda: suspect.status().attempt == 2, "its second lease", worker, tick_ns=MS)
        others = [rig.rt.submit(work, f"other {n}") for n in range(5)]
        gates.open(*(f"other {n}" for n in range(5)))
        rig.until(lambda: rig.counts().completed == 5, "the others", worker, free, tick_ns=MS)
        assert {handle.status().state for handle in others} == {"COMPLETED"}
        assert state(suspect) == "LEASED"
        gates.open("suspect")
        rig.until(lambda: state(suspect) == "COMPLETED", "its end", worker)


def test_a_suspect_that_waits_for_a_long_task_keeps_others_waiting_for_a_while_only() -> None:
    gates = Gates()
    work = work_of(gates)
    with shift(work) as rig:
        suspect = rig.rt.submit(work, "suspect")
        lose(rig, gates, suspect)
        rig.rt.submit(work, "long")
        worker = rig.worker()
        rig.until(lambda: "long" in gates.inside, "the long one", worker)
        for n in range(10):
            other = rig.rt.submit(work, f"other {n}")
            gates.open(f"other {n}")
            rig.until(
                lambda other=other: state(other) == "COMPLETED", "it", worker, tick_ns=10 * MS
            )
        assert suspect.status().attempt == 1, "it has never been alone so far"
        gates.open("long", "suspect")
        rig.until(lambda: state(suspect) == "COMPLETED", "its end", worker, tick_ns=50 * MS)


def test_a_suspect_gets_its_turn_however_much_work_there_is() -> None:
    """There is always more to do, and it takes a while: a worker has to stop leasing for a suspect."""
    gates = Gates()
    work = work_of(gates)
    with shift(work) as rig:
        suspect = rig.rt.submit(work, "suspect")
        lose(rig, gates, suspect)
        worker = rig.worker(concurrency=2)
        sent, ends_at_ns = 0, dict[str, int]()

        def flood() -> bool:
            nonlocal sent
            while rig.counts().waiting < 6:
                rig.rt.submit(work, f"other {sent}")
                sent += 1
            now_ns = rig.clock.boot_ns()
            for name in list(gates.inside):
                if name != "suspect" and now_ns >= ends_at_ns.setdefault(name, now_ns + 500 * MS):
                    gates.open(name)
            return suspect.status().attempt == 2

        rig.until(flood, "its second lease", worker, tick_ns=20 * MS)
        assert sent > 2
        gates.open("suspect", *(f"other {n}" for n in range(sent)))
        rig.until(lambda: rig.counts().completed == sent + 1, "all", worker, tick_ns=MS)


def test_many_suspects_are_all_worked_off_and_new_tasks_with_them() -> None:
    gates = Gates()
    work = work_of(gates)
    names = [f"suspect {n}" for n in range(16)]
    with shift(work) as rig:
        suspects = [rig.rt.submit(work, name) for name in names]
        lose(rig, gates, *suspects)
        gates.open(*names, *(f"other {n}" for n in range(10)))
        others = [rig.rt.submit(work, f"other {n}") for n in range(10)]
        worker = rig.worker()
        rig.until(lambda: rig.counts().completed == 26, "all", worker, tick_ns=10 * MS)
        assert {handle.status().expiries for handle in suspects} == {1}
        assert {handle.status().expiries for handle in others} == {0}


def test_nobody_is_dead_for_what_another_one_did() -> None:
    """A task whose every worker is lost takes others with it until its last lease, and then nobody."""
    gates = Gates()
    work = work_of(gates, expiries_max=3)
    with shift(work) as rig:
        poison = rig.rt.submit(work, "poison")
        others = [rig.rt.submit(work, f"other {n}") for n in range(5)]
        for n in range(20):
            if state(poison) == "DEAD":
                break
            worker = rig.worker(f"w{n}")
            # Whoever begins the poison is lost with all that it has then.
            came = gates.came.count("poison")
            rig.until(
                lambda came=came: gates.came.count("poison") > came or state(poison) == "DEAD",
                "the poison",
                worker,
                tick_ns=50 * MS,
            )
            rig.clock.advance((LEASE_S + 1) * 1000 * MS)
        last = rig.worker("last")
        gates.open(*(f"other {n}" for n in range(5)))
        rig.until(lambda: rig.counts().completed == 5, "the others", last, tick_ns=50 * MS)
        status = poison.status()
        assert (status.state, status.expiries, status.attempt) == ("DEAD", 3, 3)
        assert max(handle.status().expiries for handle in others) <= 2
        gates.open("poison")


def test_tasks_that_may_outlive_no_lease_run_beside_each_other() -> None:
    """With `expiries_max=1` the first lease is the last one: there is no earlier loss to suspect it for."""
    gates = Gates()
    work = work_of(gates, expiries_max=1)
    with shift(work) as rig:
        handles = [rig.rt.submit(work, f"{n}") for n in range(4)]
        worker = rig.worker(concurrency=4)
        rig.until(lambda: len(gates.inside) == 4, "that all are begun", worker, tick_ns=MS)
        gates.open(*"0123")
        rig.until(lambda: rig.counts().completed == 4, "all", worker, tick_ns=MS)
        assert all(state(handle) == "COMPLETED" for handle in handles)

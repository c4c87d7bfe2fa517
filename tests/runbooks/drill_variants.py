"""Variants of the ten faults of the drill, which no test of a page has. Each is a fault with a second one behind it, or the
same fault in another part of the system."""

from __future__ import annotations

import os
import signal
import unittest.mock
from collections.abc import Callable
from pathlib import Path

import holdfast as hf
from holdfast.cli import main
from holdfast.errors import HoldfastError, Overloaded
from tests.process.watch import until, writers_of
from tests.processes import ProcFailed
from tests.runbooks.drill_app import Clerk, DoorOpened, HelpAsked, Priced, Sold, app, print_label
from tests.runbooks.drill_faults import (
    SHORT,
    Drill,
    has,
    language_model,
    till,
    try_send,
)
from tests.runbooks.fault_scene import FaultScene, small_disk
from tests.runbooks.machine_faults import SHIFTED_CLOCK
from tests.runbooks.postgres_login import DATABASE, ROLE, server_with_passwords, write_password

SILENT_S = 1.0


def parked_and_pinned(scene: FaultScene) -> Drill:
    """A world is parked and pinned to a worker that is gone."""
    rt = scene.client(app)
    one = till(rt)
    one.send(Sold(5))
    worker = scene.up("drill:app", "--worker", "old", *SHORT)
    one.wait_for(lambda state: state.cents == 5)
    assert main(["worlds", "pin", "Cashier/a", "old"]) == 0
    worker.kill()
    tax = scene.file("tax-changed")
    worker = scene.up("drill:app", "--worker", "old", *SHORT)
    one.send(Sold(5))
    until(lambda: scene.metric(rt, "holdfast_worlds", status="parked") == 1, "it is parked")
    worker.kill()
    tax.unlink()
    return Drill(
        "The till a books nothing since the release. The release was undone, its machine `old` is gone.",
        lambda: has(one, cents=10),
    )


def failed_events(scene: FaultScene) -> Drill:
    """The reducers of two worlds raised at their events."""
    rt = scene.client(app)
    lost = scene.file("price-list-is-lost")
    scene.up("drill:app")
    tills = [till(rt, name) for name in "ab"]
    for one in tills:
        for _ in range(6):
            one.send(Priced(1))
        one.send(Sold(100))
    for one in tills:
        one.wait_for(lambda state: state.cents == 100)
    lost.unlink()
    return Drill(
        "The price list was lost for an hour, and sales of that hour are missing.",
        lambda: all(has(one, cents=106) for one in tills),
    )


def full_disk_at_the_start(scene: FaultScene) -> Drill:
    """The disk is full, and the machine was restarted: neither a worker nor a writer runs."""
    disk = scene.enter(small_disk(scene.directory / "disk", 24))
    scene.move_store(disk / "store")
    scene.env["DISK"] = str(disk)
    rt = scene.client(app)
    worker = scene.up("drill:app")
    one = till(rt)
    for _ in range(50):
        one.send(Sold(1))
    one.wait_for(lambda state: state.cents == 50)
    worker.kill()
    (disk / "old.log").write_bytes(bytes(scene.free_bytes(disk)))
    for writer in writers_of(Path(scene.store)):
        writer.kill()
    return Drill(
        f"No worker runs after the restart of the machine. The disk {disk} must keep old.log and can be enlarged.",
        lambda: try_send(one) and has(one, cents=50) and handles(one),
    )


def handles(one: hf.WorldHandle[hf.World]) -> bool:
    """Whether a worker handles a message that changes nothing."""
    try:
        before = one.height()
        one.send(Sold(0))
        one.wait_for(lambda _: one.height() > before, timeout=SILENT_S)
    except HoldfastError:
        return False
    return True


def frozen_machine(scene: FaultScene) -> Drill:
    """The writer and the worker of a machine get SIGSTOP."""
    rt = scene.client(app)
    worker = scene.up("drill:app", *SHORT)
    one = till(rt)
    one.send(Sold(1))
    one.wait_for(lambda state: state.cents == 1)
    for writer in writers_of(Path(scene.store)):
        os.kill(writer.pid, signal.SIGSTOP)
    worker.stop()
    one.send(Sold(1))
    return Drill(
        "The sales of the last minutes are missing. The machine is frozen, and nobody can thaw it.",
        lambda: has(one, cents=2),
    )


def read_only_server(scene: FaultScene) -> Drill:
    """The PostgreSQL server accepts connections and refuses writes, as after a wrong failover."""
    server = scene.enter(server_with_passwords("secret-word"))
    passfile = write_password(scene.directory / "pgpass", "secret-word")
    scene.enter(unittest.mock.patch.dict(os.environ, PGPASSFILE=str(passfile)))
    scene.use_store(f"postgresql://{ROLE}@127.0.0.1:{server.port}/{DATABASE}")
    rt = scene.client(app)
    scene.up("drill:app")
    tasks = rt.submit_many(print_label, [(n,) for n in range(10)])
    scene.admin = server.admin
    scene.run_sql(f"ALTER DATABASE {DATABASE} SET default_transaction_read_only = on")
    scene.run_sql(
        f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{ROLE}'"
    )

    def judge() -> bool:
        try:
            more = rt.submit(print_label, 10)
        except HoldfastError:
            return False
        return [task.result(timeout=60) for task in [*tasks, more]] == list(range(11))

    return Drill("Clients get errors since the failover test. `sql` is the administrator.", judge)


def exhausted_budget_of_a_world(scene: FaultScene) -> Drill:
    """One world has used its own budget. The universe has no limit."""
    scene.enter(language_model())
    rt = scene.client(app)
    clerks = [rt.world(Clerk, name) for name in "ab"]
    clerks[1].send(HelpAsked())
    scene.up("drill:app")
    clerks[1].wait_for(lambda state: state.answers == 1)
    hf.llm.set_limit(rt.store, universe="market", world=clerks[1], tokens=1)
    for clerk in clerks:
        for _ in range(3):
            clerk.send(HelpAsked())
    clerks[1].wait_for(lambda state: state.refused == 3)
    return Drill(
        "The clerk b answers nobody, the clerk a does.",
        lambda: [clerk.state().answers for clerk in clerks] == [3, 4],
    )


def two_stuck_reducers(scene: FaultScene) -> Drill:
    """Two worlds are parked by a reducer that does not return, and a third one was on their worker."""
    rt = scene.client(app)
    tills = [till(rt, name) for name in "abc"]
    jammed = scene.file("door-is-jammed")
    for one in tills[:2]:
        one.send(DoorOpened())
    for one in tills:
        one.send(Sold(5))
    stuck = ("--stuck-s", "0.5", "--stuck-max", "3", *SHORT)

    def parked() -> bool:
        return scene.metric(rt, "holdfast_worlds", status="parked") == 2

    while not parked():
        try:
            worker = scene.up("drill:app", *stuck)
        except ProcFailed:
            continue  # It was stuck before its first round.
        until(lambda w=worker: parked() or not w.running, "the worker is stuck", 60.0)  # type: ignore[misc]
    for worker in scene.workers:
        if worker.running:
            worker.kill()
    jammed.unlink()
    return Drill(
        "No till books anything. The doors are mended.",
        lambda: (
            all(has(one, cents=5, opened=1) for one in tills[:2])
            and has(tills[2], cents=5, opened=0)
        ),
    )


def no_worker_for_a_kind(scene: FaultScene) -> Drill:
    """The running worker hosts worlds and runs no effects."""
    scene.enter(language_model())
    rt = scene.client(app)
    scene.up("drill:app", "--role", "orchestrator", "--role", "world", "--role", "task")
    clerk = rt.world(Clerk, "a")
    clerk.send(HelpAsked())
    until(lambda: scene.metric(rt, "holdfast_effects", state="ready") == 1, "the call waits")
    return Drill("The clerk answers nobody, the tills work.", lambda: clerk.state().answers == 1)


def clock_ahead(scene: FaultScene) -> Drill:
    """The only timer worker was on a machine an hour ahead, which is gone. The leader is an hour behind."""
    clock = scene.directory / "clock"
    clock.mkdir()
    (clock / "sitecustomize.py").write_text(SHIFTED_CLOCK)
    rt = scene.client(app)
    rt.schedule("labels", print_label, every="*/5 * * * *", args=(1,))
    workers = []
    for hours, roles in ((1, ("timer", "task")), (-1, ("orchestrator",))):
        words = [word for role in roles for word in ("--role", role)]
        env = {"PYTHONPATH": str(clock), "CLOCK_SHIFT_NS": str(hours * 3600 * 10**9)}
        workers.append(scene.up("drill:app", *words, env=env))
    done = lambda: scene.metric(rt, "holdfast_tasks", state="completed")  # noqa: E731
    until(lambda: done() > 0, "it fires for a time to come", 90.0)
    workers[0].kill()
    before = done()
    return Drill(
        "The schedule `labels` is to run every five minutes. It ran early and then never again.",
        lambda: done() > before,
    )


def full_inbox_of_a_paused_world(scene: FaultScene) -> Drill:
    """Sends are refused, because an operator paused the world and its inbox is full."""
    rt = scene.client(app)
    assert main(["limits", "set", "inbox=20", "--universe", "market"]) == 0
    scene.up("drill:app")
    one = till(rt)
    one.send(Sold(1))
    one.wait_for(lambda state: state.cents == 1)
    assert main(["worlds", "pause", "Cashier/a"]) == 0
    accepted = 1
    try:
        for _ in range(100):
            one.send(Sold(1))
            accepted += 1
    except Overloaded:
        pass
    return Drill(
        "Clients of till a get Overloaded.", lambda: try_send(one) and has(one, cents=accepted)
    )


VARIANTS: dict[str, Callable[[FaultScene], Drill]] = {
    fault.__name__.replace("_", "-"): fault
    for fault in (
        parked_and_pinned, failed_events, full_disk_at_the_start, frozen_machine, read_only_server,
        exhausted_budget_of_a_world, two_stuck_reducers, no_worker_for_a_kind, clock_ahead, full_inbox_of_a_paused_world,
    )
}  # fmt: skip

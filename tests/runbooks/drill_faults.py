"""The ten faults of the newcomer's drill. A fault breaks a real system, and returns its judge.

The judge fails while the subject does not move or when something was lost. It knows the acknowledged messages and tasks
of the fault, and nothing of the remedy.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import unittest.mock
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import holdfast as hf
from holdfast.cli import main
from holdfast.errors import HoldfastError, Overloaded
from tests.process.watch import until, writers_of
from tests.runbooks.drill_app import (
    Cashier,
    Clerk,
    DoorOpened,
    HelpAsked,
    Sold,
    app,
    print_all,
    print_label,
)
from tests.runbooks.fault_scene import FaultScene, small_disk
from tests.runbooks.machine_faults import SHIFTED_CLOCK
from tests.runbooks.postgres_login import DATABASE, ROLE, server_with_passwords, write_password

Judge = Callable[[], bool]
SHORT = ("--lease-s", "1")


class Drill(NamedTuple):
    """The complaint of a user, and the judge."""

    complaint: str
    judge: Judge


def till(rt: hf.Runtime, name: str = "a") -> hf.WorldHandle[Cashier]:
    return rt.world(Cashier, name)


def has(world: hf.WorldHandle[Cashier], **wanted: int) -> bool:
    try:
        state = world.state()
    except HoldfastError:
        # The code of this process does not replay the world.
        return False
    return all(getattr(state, name) == value for name, value in wanted.items())


def parked_worlds(scene: FaultScene) -> Drill:
    """Two worlds are parked, and the release that parked them still runs."""
    rt = scene.client(app)
    tills = [till(rt, name) for name in "ab"]
    for one in tills:
        one.send(Sold(5))
    worker = scene.up("drill:app", *SHORT)
    for one in tills:
        one.wait_for(lambda state: state.cents == 5)
    worker.kill()
    scene.file("tax-changed")
    scene.env["RUNNING"] = str(scene.up("drill:app", *SHORT).pid)
    for one in tills:
        one.send(Sold(5))
    until(lambda: scene.metric(rt, "holdfast_worlds", status="parked") == 2, "both are parked")
    return Drill(
        "The tills a and b book nothing since the release. The former release is the code without the file tax-changed.",
        lambda: all(has(one, cents=10) for one in tills),
    )


def dead_letters(scene: FaultScene) -> Drill:
    """Thirty tasks and a flow failed with one error."""
    rt = scene.client(app)
    off = scene.file("printer-is-off")
    scene.up("drill:app")
    tasks = rt.submit_many(print_label, [(n,) for n in range(30)])
    flow = rt.start(print_all, 3)
    until(lambda: scene.metric(rt, "holdfast_tasks", state="failed") >= 31, "they failed")
    until(lambda: flow.status().state == "FAILED", "the flow failed")
    off.unlink()
    failed = {task.id for task in tasks}

    def judge() -> bool:
        done = scene.metric(rt, "holdfast_tasks", state="completed")
        return done >= len(failed) and flow.status().state == "COMPLETED"

    return Drill("Labels are missing since the printer was off. It is on again.", judge)


def full_disk(scene: FaultScene) -> Drill:
    """The disk fills up under a running worker."""
    disk = scene.enter(small_disk(scene.directory / "disk", 24))
    scene.move_store(disk / "store")
    rt = scene.client(app)
    scene.up("drill:app")
    one = till(rt)
    one.send(Sold(1))
    one.wait_for(lambda state: state.cents == 1)
    (disk / "old.log").write_bytes(bytes(scene.free_bytes(disk)))
    accepted = 1
    with contextlib.suppress(HoldfastError):
        for _ in range(20_000):
            one.send(Sold(1))
            accepted += 1
    return Drill(
        f"Clients cannot send any more. The disk of the store is {disk}.",
        lambda: try_send(one) and has(one, cents=accepted),
    )


def try_send(one: hf.WorldHandle[Cashier]) -> bool:
    """Whether the store accepts a message that changes nothing."""
    try:
        one.send(Sold(0))
    except HoldfastError:
        return False
    return True


def stopped_writer(scene: FaultScene) -> Drill:
    """The writer process of the store gets SIGSTOP."""
    rt = scene.client(app)
    scene.up("drill:app")
    one = till(rt)
    one.send(Sold(1))
    one.wait_for(lambda state: state.cents == 1)
    [writer] = writers_of(Path(scene.store))
    os.kill(writer.pid, signal.SIGSTOP)
    return Drill("Nothing answers since a minute ago.", lambda: try_send(one) and has(one, cents=1))


def lost_server(scene: FaultScene) -> Drill:
    """The PostgreSQL server is down."""
    server = scene.enter(server_with_passwords("secret-word"))
    passfile = write_password(scene.directory / "pgpass", "secret-word")
    scene.enter(unittest.mock.patch.dict(os.environ, PGPASSFILE=str(passfile)))
    scene.use_store(f"postgresql://{ROLE}@127.0.0.1:{server.port}/{DATABASE}")
    rt = scene.client(app)
    scene.up("drill:app")
    tasks = rt.submit_many(print_label, [(n,) for n in range(10)])
    server.stop(immediate=True)
    scene.start_server = server.start
    return Drill(
        "No worker does anything. `start the server` starts the database server.",
        lambda: server.running and [task.result(timeout=60) for task in tasks] == list(range(10)),
    )


def exhausted_budget(scene: FaultScene) -> Drill:
    """Calls of a language model end as over_budget."""
    scene.enter(language_model())
    rt = scene.client(app)
    hf.llm.set_limit(rt.store, universe="market", tokens=1)
    scene.up("drill:app")
    clerk = rt.world(Clerk, "a")
    for _ in range(3):
        clerk.send(HelpAsked())
    clerk.wait_for(lambda state: state.refused == 3)
    return Drill("The clerk answers nobody.", lambda: clerk.state().answers == 3)


class _Answer(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        message = {"role": "assistant", "content": "Gladly."}
        body: dict[str, Any] = {
            "choices": [{"message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8},
            "model": "small",
        }
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def language_model() -> Iterator[None]:
    """A model on a local port, as the endpoint of processes that start from now on."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        former = dict(os.environ)
        os.environ["HOLDFAST_LLM_BASE_URL"] = f"http://127.0.0.1:{server.server_port}"
        try:
            yield
        finally:
            server.shutdown()
            os.environ.clear()
            os.environ.update(former)


def stuck_reducer(scene: FaultScene) -> Drill:
    """A reducer does not return, and the world is parked."""
    rt = scene.client(app)
    one = till(rt)
    jammed = scene.file("door-is-jammed")
    one.send(DoorOpened())
    one.send(Sold(5))
    stuck = ("--stuck-s", "0.5", "--stuck-max", "3", *SHORT)

    def parked() -> bool:
        return scene.metric(rt, "holdfast_worlds", status="parked") == 1

    while not parked():
        worker = scene.up("drill:app", *stuck)
        until(lambda w=worker: parked() or not w.running, "the worker is stuck")  # type: ignore[misc]
    jammed.unlink()
    return Drill("The till hangs. The door is mended.", lambda: has(one, cents=5, opened=1))


def no_worker_for_a_type(scene: FaultScene) -> Drill:
    """The running workers have an app without the world type."""
    rt = scene.client(app)
    scene.enter(language_model())
    scene.up("drill:tills_only")
    clerk = rt.world(Clerk, "a")
    clerk.send(HelpAsked())
    until(lambda: bool(rt.why(clerk)["blockers"]), "it waits")
    return Drill("The clerk answers nobody, the tills work.", lambda: clerk.state().answers == 1)


def skewed_clocks(scene: FaultScene) -> Drill:
    """The only timer worker runs on a machine whose clock is an hour behind, the leader on one an hour ahead."""
    clock = scene.directory / "clock"
    clock.mkdir()
    (clock / "sitecustomize.py").write_text(SHIFTED_CLOCK)
    rt = scene.client(app)
    rt.schedule("labels", print_label, every="* * * * *", args=(1,))
    for hours, roles in ((1, ("orchestrator", "task")), (-1, ("timer",))):
        words = [word for role in roles for word in ("--role", role)]
        env = {"PYTHONPATH": str(clock), "CLOCK_SHIFT_NS": str(hours * 3600 * 10**9)}
        scene.up("drill:app", *words, env=env)
    until(lambda: has_code(rt, "no_timer_worker"), "the minute passes", 90.0)
    return Drill(
        "The schedule `labels` starts nothing. Our machines have different clocks.",
        lambda: scene.metric(rt, "holdfast_tasks", state="completed") > 0,
    )


def has_code(rt: hf.Runtime, code: str) -> bool:
    return any(one["code"] == code for one in rt.why("schedule", "labels")["blockers"])


def backlog_over_its_limit(scene: FaultScene) -> Drill:
    """Submissions are refused, because the only worker serves another queue."""
    rt = scene.client(app)
    assert main(["limits", "set", "tasks=40", "--universe", "market"]) == 0
    scene.up("drill:app", "--queues", "night")
    tasks = []
    with contextlib.suppress(Overloaded):
        for n in range(100):
            tasks.append(rt.submit(print_label, n))
    assert len(tasks) == 40

    def judge() -> bool:
        try:
            more = rt.submit(print_label, 40)
        except Overloaded:
            return False
        return [task.result(timeout=60) for task in [*tasks, more]] == list(range(41))

    return Drill("Clients get Overloaded.", judge)


DRILLS: dict[str, Callable[[FaultScene], Drill]] = {
    fault.__name__.replace("_", "-"): fault
    for fault in (
        parked_worlds, dead_letters, full_disk, stopped_writer, lost_server, exhausted_budget, stuck_reducer,
        no_worker_for_a_type, skewed_clocks, backlog_over_its_limit,
    )
}  # fmt: skip

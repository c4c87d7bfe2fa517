"""`holdfast queues list | pause | resume | drain`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast import codec
from holdfast.cli.queues import ACTOR
from holdfast.ops import audit
from holdfast.store.api import Store
from holdfast.tasks import operations
from holdfast.tasks.model import TaskSpec
from holdfast.tasks.operations import GrantRequest, TaskReport, TaskToSubmit
from tests.cli.conftest import RunCommand
from tests.process.watch import until

MODULES = ("holdfast.cli.queues",)
SHOP = "shop"


@pytest.fixture
def running(store: Store) -> TaskReport:
    """A running task and a waiting one of the queue "mail". Returns the report that ends the running task."""
    spec = TaskSpec("send", queue="mail")
    new = [TaskToSubmit(codec.pack([[], {}]))] * 2
    store.transact(operations.submit, SHOP, spec, new)
    leased = store.transact(operations.lease, SHOP, GrantRequest("worker", ["mail"], 1))
    [grant] = leased.grants
    return TaskReport(grant.seq, grant.lease)


def test_queue_is_paused_listed_and_resumed(
    run: RunCommand, path: Path, store: Store, running: TaskReport
) -> None:
    paused = run("queues", "pause", "mail", "--store", path)
    assert (paused.code, paused.out) == (0, "mail is paused: 1 tasks wait, 1 run\n")
    [row] = run("queues", "list", "--store", path, "--json").document["queues"]
    assert (row["queue"], row["leased"], row["paused_ns"] > 0) == ("mail", 1, True)
    header, line = run("queues", "list", "--store", path).out.splitlines()
    assert header.split() == ["queue", "waiting", "leased", "concurrency", "per", "key", "paused"]
    assert line.split()[:3] == ["mail", "1", "1"]
    assert run("why", "queue", "mail", "--store", path).code == 1
    resumed = run("queues", "resume", "mail", "--store", path, "--json").document
    assert (resumed["changed"], resumed["paused_ns"]) == (True, None)
    entries = store.read(audit.list_entries, SHOP)
    assert [(one.entry.actor, one.entry.action, one.entry.subject) for one in entries] == [
        (ACTOR, "queues.resume", "queue/mail"),
        (ACTOR, "queues.pause", "queue/mail"),
    ]


def test_drain_waits_for_the_running_tasks(
    run: RunCommand, path: Path, store: Store, running: TaskReport
) -> None:
    drained = run("queues", "drain", "mail", "--timeout", 0, "--store", path)
    assert (drained.code, drained.out) == (1, "mail is paused: 1 tasks wait, 1 run\n")

    def end_task() -> None:
        until(lambda: len(store.read(audit.list_entries, SHOP)) == 2, "the second drain begins")
        store.transact(operations.apply_reports, SHOP, "worker", 1, [running])

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(end_task)
        drained = run("queues", "drain", "mail", "--store", path, "--json")
        ended.result(20)
    assert (drained.code, drained.document["drained"]) == (0, True)
    assert (drained.document["changed"], drained.document["leased"]) == (False, 0)
    assert store.transact(operations.lease, SHOP, GrantRequest("w", ["mail"], 1)).grants == []


@pytest.mark.parametrize("timeout", [-1, "nan"])
def test_drain_refuses_an_invalid_timeout(
    run: RunCommand, path: Path, store: Store, running: TaskReport, timeout: object
) -> None:
    result = run("queues", "drain", "mail", f"--timeout={timeout}", "--store", path)
    assert result.error.startswith("invalid: ")


def test_ended_tasks_are_counted_per_minute(
    run: RunCommand, path: Path, store: Store, running: TaskReport
) -> None:
    assert run("queues", "ended", "--store", path).out == "nothing ended\n"
    store.transact(operations.apply_reports, SHOP, "worker", store.generation, [running])
    for options in ((), ("--queue", "mail"), ("--minutes", 1_440)):
        [row] = run("queues", "ended", *options, "--store", path, "--json").document["ended"]
        assert (row["kind"], row["queue"], row["completed"], row["dead"]) == ("task", "mail", 1, 0)
    assert run("queues", "ended", "--queue", "other", "--store", path).out == "nothing ended\n"
    assert run("queues", "ended", "--minutes", 1_441, "--store", path).error.startswith("invalid")

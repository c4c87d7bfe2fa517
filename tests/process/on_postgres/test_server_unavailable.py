"""SIGTERM to `holdfast up` while its PostgreSQL server is unavailable: it exits after its grace and lists unreleased leases."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest

from holdfast.app.runtime import Runtime
from tests.pgcluster import USER, PostgresCluster
from tests.process.on_postgres.hanging_app import PurchaseMade, PurchaseWorld, app, doze
from tests.process.watch import OsProcess, until
from tests.processes import Proc

pytestmark = [pytest.mark.postgresql, pytest.mark.timeout(180)]

UP = [sys.executable, "-m", "holdfast.cli", "up", "tests.process.on_postgres.hanging_app:app"]
GRACE_S = 1.0
# A grace long enough for a restart of the server on a busy machine.
BACK_S = 8
# The grace plus the time-outs of a silent connection and of a connection attempt. Much shorter than the retries
# of a commit.
STOP_S = 25.0
# Longer than calls wait for an unavailable server.
LONG_OUTAGE_S = 45.0

SECOND_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture(scope="module")
def cluster() -> Iterator[PostgresCluster]:
    with PostgresCluster(standby=False) as made:
        yield made


@pytest.fixture
def url(cluster: PostgresCluster) -> Iterator[str]:
    yield new_database(cluster)
    if not cluster.primary.running:
        cluster.primary.start()


def new_database(cluster: PostgresCluster) -> str:
    """Create a database for one worker and return its URL."""
    server, name = cluster.primary, f"worker_{next(_numbers)}"
    with server.admin() as connection:
        connection.execute(f"CREATE DATABASE {name}")
    return f"postgresql://{USER}@{server.host}:{server.port}/{name}"


_numbers = itertools.count(1)


@contextlib.contextmanager
def busy_workers(urls: Sequence[str], grace_s: float) -> Iterator[list[Proc]]:
    """A worker for each URL. It hosts a world and runs an effect and a task."""
    with contextlib.ExitStack() as running:
        options = ["--lease-s", "2", "--grace-s", str(grace_s)]
        workers = [
            running.enter_context(Proc.spawn([*UP, "--store", url, *options], ready=None))
            for url in urls
        ]
        for url, worker in zip(urls, workers, strict=True):
            worker.expect("ready")
            runtime: Runtime = app.open(url, roles=())
            with runtime:
                runtime.submit(doze, 1)
                runtime.world(PurchaseWorld, "a").send(PurchaseMade(1))
                for _ in range(2):
                    worker.expect("begun: ")
        yield workers


class WorkerExit(NamedTuple):
    code: int
    errors: list[str]


def assert_unreleased_leases_are_listed(ended: WorkerExit) -> None:
    assert ended.code == 0
    [line] = [line for line in ended.errors if line.startswith("holdfast: ")]
    assert line.startswith("holdfast: not released: ")
    assert "tasks=1" in line
    assert "leases will expire" in line


@pytest.fixture(scope="module")
def exits_while_frozen(cluster: PostgresCluster) -> dict[str, WorkerExit]:
    """The exits of three workers while the server is frozen: after SIGTERM, and after a second signal of each kind."""
    names = ["SIGTERM", *(f"second {number.name}" for number in SECOND_SIGNALS)]
    with busy_workers([new_database(cluster) for _ in names], GRACE_S) as workers:
        frozen = cluster.primary.freeze()
        try:
            for worker in workers:
                worker.terminate()
            for second, worker in zip(SECOND_SIGNALS, workers[1:], strict=True):
                # Wait until the first signal is handled. Two pending signals would be merged into one.
                until(lambda: not _catches(worker.pid, second), "the first to be heard")  # noqa: B023
                os.kill(worker.pid, second)
            exits = {
                name: WorkerExit(worker.wait(STOP_S), worker.errors)
                for name, worker in zip(names, workers, strict=True)
            }
        finally:
            for process in frozen:
                process.cont()
    return exits


def test_up_exits_after_its_grace_while_the_server_is_frozen(
    exits_while_frozen: dict[str, WorkerExit],
) -> None:
    assert_unreleased_leases_are_listed(exits_while_frozen["SIGTERM"])


@pytest.mark.parametrize("second", SECOND_SIGNALS)
def test_second_signal_ends_up_immediately(
    exits_while_frozen: dict[str, WorkerExit], second: signal.Signals
) -> None:
    """Without it the worker would exit after its grace, with code 0."""
    assert exits_while_frozen[f"second {second.name}"].code == -second


@pytest.mark.parametrize(
    ("how", "since_s"),
    [
        ("stopped", 0.0),
        pytest.param("stopped", LONG_OUTAGE_S, marks=pytest.mark.deep),
        pytest.param("frozen", LONG_OUTAGE_S, marks=pytest.mark.deep),
    ],
)
def test_up_exits_after_its_grace_and_lists_unreleased_leases(
    cluster: PostgresCluster, url: str, how: str, since_s: float
) -> None:
    with busy_workers([url], GRACE_S) as [worker]:
        frozen: list[OsProcess] = []
        if how == "frozen":
            frozen = cluster.primary.freeze()
        else:
            cluster.primary.stop(immediate=True)
        try:
            began = time.monotonic()
            until(lambda: time.monotonic() - began >= since_s, "a while", since_s + 10)
            worker.terminate()
            ended = WorkerExit(worker.wait(STOP_S), worker.errors)
        finally:
            for process in frozen:
                process.cont()
    assert_unreleased_leases_are_listed(ended)


def test_leases_are_released_when_the_server_returns_within_the_grace(
    cluster: PostgresCluster, url: str
) -> None:
    """The task has a long lease, so another worker can run it only if the lease is released."""
    with busy_workers([url], BACK_S) as [worker]:
        cluster.primary.stop(immediate=True)
        worker.terminate()
        cluster.primary.start()
        assert worker.wait(BACK_S + STOP_S) == 0
        assert worker.errors == []
    with Proc.spawn([*UP, "--store", url], ready=None) as other:
        other.expect("begun: the task")


def _catches(pid: int, number: signal.Signals) -> bool:
    with open(f"/proc/{pid}/status") as status:
        [line] = [line for line in status if line.startswith("SigCgt:")]
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)

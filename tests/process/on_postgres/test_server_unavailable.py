"""SIGTERM to `holdfast up` while its PostgreSQL server is unavailable: it exits after its grace and lists unreleased leases."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from holdfast.app.runtime import Runtime
from tests.pgcluster import DATABASE, USER, PostgresCluster
from tests.process.on_postgres.hanging_app import PurchaseMade, PurchaseWorld, app, doze
from tests.process.watch import OsProcess, until
from tests.processes import Proc

pytestmark = [pytest.mark.postgresql, pytest.mark.timeout(180)]

UP = [sys.executable, "-m", "holdfast.cli", "up", "tests.process.on_postgres.hanging_app:app"]
GRACE_S = 2
# A grace long enough for a restart of the server on a busy machine.
BACK_S = 8
# The grace plus the time-outs of a silent connection and of a connection attempt. Much shorter than the retries
# of a commit.
STOP_S = 25.0
# Longer than calls wait for an unavailable server.
LONG_OUTAGE_S = 45.0

Up = Callable[..., Proc]


@pytest.fixture(scope="module")
def cluster() -> Iterator[PostgresCluster]:
    with PostgresCluster(standby=False) as made:
        yield made


@pytest.fixture
def url(cluster: PostgresCluster) -> Iterator[str]:
    server = cluster.primary
    with server.admin() as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    yield f"postgresql://{USER}@{server.host}:{server.port}/{DATABASE}"
    if not server.running:
        server.start()


@contextlib.contextmanager
def busy_worker(url: str, grace_s: int) -> Iterator[Proc]:
    """A worker that hosts a world and runs an effect and a task."""
    argv = [*UP, "--store", url, "--lease-s", "2", "--grace-s", str(grace_s)]
    with Proc.spawn(argv) as proc:
        runtime: Runtime = app.open(url, roles=())
        with runtime:
            runtime.submit(doze, 1)
            runtime.world(PurchaseWorld, "a").send(PurchaseMade(1))
            for _ in range(2):
                proc.expect("begun: ")
        yield proc


@pytest.fixture
def worker(url: str) -> Iterator[Proc]:
    with busy_worker(url, GRACE_S) as proc:
        yield proc


@pytest.fixture
def disable_server(cluster: PostgresCluster) -> Iterator[Callable[[str], None]]:
    """Stops or freezes the server. A frozen server is resumed at the end of the test."""
    frozen: list[OsProcess] = []

    def disable_server(how: str) -> None:
        if how == "frozen":
            frozen.extend(cluster.primary.freeze())
        else:
            cluster.primary.stop(immediate=True)

    yield disable_server
    for process in frozen:
        process.cont()


@pytest.mark.parametrize(
    ("how", "since_s"),
    [
        ("stopped", 0.0),
        ("frozen", 0.0),
        pytest.param("stopped", LONG_OUTAGE_S, marks=pytest.mark.deep),
        pytest.param("frozen", LONG_OUTAGE_S, marks=pytest.mark.deep),
    ],
)
def test_up_exits_after_its_grace_and_lists_unreleased_leases(
    worker: Proc, disable_server: Callable[[str], None], how: str, since_s: float
) -> None:
    disable_server(how)
    began = time.monotonic()
    until(lambda: time.monotonic() - began >= since_s, "a while", since_s + 10)
    worker.terminate()
    assert worker.wait(STOP_S) == 0
    [line] = worker.errors
    assert line.startswith("holdfast: not released: ")
    assert "tasks=1" in line
    assert "leases will expire" in line


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_ends_up_immediately(
    worker: Proc, disable_server: Callable[[str], None], second: signal.Signals
) -> None:
    disable_server("frozen")
    worker.terminate()
    # Wait until the first signal is handled. Two pending signals would be merged into one.
    until(lambda: not _catches(worker.pid, second), "the first to be heard")
    os.kill(worker.pid, second)
    assert worker.wait(GRACE_S) == -second


def test_leases_are_released_when_the_server_returns_within_the_grace(
    cluster: PostgresCluster, url: str
) -> None:
    """The task has a long lease, so another worker can run it only if the lease is released."""
    with busy_worker(url, BACK_S) as worker:
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

"""`holdfast up` is told to stop while its server is away: it ends by itself, soon, and says what it leaves."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from holdfast.app.runtime import Runtime
from tests.pgcluster import DATABASE, USER, Cluster
from tests.process.on_postgres.lingering import Ordered, Shop, app, doze
from tests.process.watch import Seen, until
from tests.processes import Proc

pytestmark = [pytest.mark.postgresql, pytest.mark.timeout(180)]

UP = [sys.executable, "-m", "holdfast.cli", "up", "tests.process.on_postgres.lingering:app"]
GRACE_S = 2
# A grace in which a server has started again, however busy the machine is.
BACK_S = 8
# The grace, and what a silent connection and a try to connect still take; much less than a commit is tried.
STOP_S = 25.0
# Longer than calls wait for a server that is away.
LONG_AWAY_S = 45.0

Up = Callable[..., Proc]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(standby=False) as made:
        yield made


@pytest.fixture
def url(cluster: Cluster) -> Iterator[str]:
    server = cluster.primary
    with server.admin() as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    yield f"postgresql://{USER}@{server.host}:{server.port}/{DATABASE}"
    if not server.running:
        server.start()


@contextlib.contextmanager
def busy(url: str, grace_s: int) -> Iterator[Proc]:
    """A worker that has a world, an effect and a task in hand."""
    argv = [*UP, "--store", url, "--lease-s", "2", "--grace-s", str(grace_s)]
    with Proc.spawn(argv) as proc:
        runtime: Runtime = app.open(url, roles=())
        with runtime:
            runtime.submit(doze, 1)
            runtime.world(Shop, "a").send(Ordered(1))
            for _ in range(2):
                proc.expect("begun: ")
        yield proc


@pytest.fixture
def worker(url: str) -> Iterator[Proc]:
    with busy(url, GRACE_S) as proc:
        yield proc


@pytest.fixture
def away(cluster: Cluster) -> Iterator[Callable[[str], None]]:
    """Takes the server away; it is back when the test ends."""
    still: list[Seen] = []

    def away(how: str) -> None:
        if how == "frozen":
            still.extend(cluster.primary.freeze())
        else:
            cluster.primary.stop(immediate=True)

    yield away
    for process in still:
        process.cont()


@pytest.mark.parametrize(
    ("how", "since_s"),
    [
        ("stopped", 0.0),
        ("frozen", 0.0),
        pytest.param("stopped", LONG_AWAY_S, marks=pytest.mark.deep),
        pytest.param("frozen", LONG_AWAY_S, marks=pytest.mark.deep),
    ],
)
def test_it_ends_by_itself_and_says_what_was_not_given_back(
    worker: Proc, away: Callable[[str], None], how: str, since_s: float
) -> None:
    away(how)
    began = time.monotonic()
    until(lambda: time.monotonic() - began >= since_s, "a while", since_s + 10)
    worker.terminate()
    assert worker.wait(STOP_S) == 0
    [line] = worker.errors
    assert line.startswith("holdfast: not given back: ")
    assert "tasks=1" in line
    assert "leases run out by themselves" in line


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(
    worker: Proc, away: Callable[[str], None], second: signal.Signals
) -> None:
    away("frozen")
    worker.terminate()
    # Not before it has heard the first: what comes meanwhile is one signal.
    until(lambda: not _catches(worker.pid, second), "the first to be heard")
    os.kill(worker.pid, second)
    assert worker.wait(GRACE_S) == -second


def test_a_server_that_comes_back_in_time_gets_everything(cluster: Cluster, url: str) -> None:
    """The task has a lease of minutes: nobody could have it unless it was given back."""
    with busy(url, BACK_S) as worker:
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

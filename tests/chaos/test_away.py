"""The server is away, or stands still, or does not get the last word in: readiness says so, roles go on when
it is back, nobody is held up for good."""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import store as stores
from holdfast.app.runtime import Runtime
from holdfast.errors import CommitUnknown, HoldfastError
from holdfast.store.api import Store, Txn
from tests.chaos.app import RECEIVER, Desk, Ordered, app
from tests.chaos.proxy import Proxy
from tests.chaos.receiver import Receiver
from tests.pgcluster import DATABASE, USER, Cluster
from tests.process.watch import seen, until
from tests.processes import Proc, python_proc

MODULES = (
    "holdfast.store.postgres",
    "holdfast.roles.role",
    "holdfast.roles.readiness",
    "holdfast.cli.ready",
    "holdfast.cli.up",
)

pytestmark = [pytest.mark.postgresql, pytest.mark.timeout(180)]

LONG_S = 60.0
# An answer about readiness comes within this, and a process that is told to stop ends within the other.
BOUND_S = 40.0
STOP_S = 75.0
# A process that stands still in mid-commit, or is cut off in it, holds up the others for less.
HELD_UP_S = 10.0
CUTS = 12

Up = Callable[..., Proc]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(standby=False) as made:
        yield made


@pytest.fixture
def url(cluster: Cluster) -> Iterator[str]:
    if not cluster.primary.running:
        cluster.primary.start()
    with cluster.primary.admin() as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    server = cluster.primary
    yield f"postgresql://{USER}@{server.host}:{server.port}/{DATABASE}"
    if not server.running:
        server.start()


@pytest.fixture
def up(url: str, tmp_path: Path) -> Iterator[Up]:
    started: list[Proc] = []
    with Receiver(tmp_path / "outside") as outside:

        def up(*options: object, ready: str | None = "ready") -> Proc:
            argv = [
                sys.executable, "-m", "holdfast.cli", "up", "tests.chaos.app:app",
                "--store", url, "--worker", "one", *map(str, options),
            ]  # fmt: skip
            proc = Proc.spawn(
                argv, ready=ready, env={RECEIVER: str(outside.path)}, timeout_s=LONG_S
            )
            started.append(proc)
            return proc

        yield up
        for proc in started:
            proc.close()


def asked(url: str, *options: str) -> tuple[int, str]:
    """`holdfast ready`, and what it says."""
    with python_proc("holdfast.cli", "ready", "--store", url, *options, ready=None) as proc:
        code = proc.wait(BOUND_S)
        return code, "\n".join(proc.lines + proc.errors)


def readyz(worker: Proc) -> tuple[int, dict[str, Any]]:
    """What a worker says about itself over HTTP."""
    where = next(word for word in worker.lines[0].split() if word.startswith("http"))
    try:
        with urllib.request.urlopen(f"{where}/readyz", timeout=BOUND_S) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


# -- readiness -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["stopped", pytest.param("frozen", marks=pytest.mark.deep)])
def test_nothing_is_ready_while_the_server_is_away_and_the_blocker_is_named(
    cluster: Cluster, url: str, up: Up, how: str
) -> None:
    up()
    until(lambda: asked(url)[0] == 0, "readiness", LONG_S)
    server = cluster.primary
    still = server.freeze() if how == "frozen" else []
    if how == "stopped":
        server.stop()
    try:
        code, said = asked(url)
    finally:
        for process in still:
            process.cont()
    assert code == 1
    assert "store_failed store_unreachable: store " in said
    assert f"{server.host}" in said
    assert "does not answer" in said
    if how == "stopped":
        server.start()
    until(lambda: asked(url)[0] == 0, "readiness again", LONG_S)


def test_readiness_while_the_server_is_away_as_json(cluster: Cluster, url: str) -> None:
    cluster.primary.stop()
    with python_proc("holdfast.cli", "ready", "--store", url, "--json", ready=None) as proc:
        assert proc.wait(BOUND_S) == 1
        document = json.loads("".join(proc.lines))
    assert document["ready"] is False
    [reason] = document["universes"][0]["reasons"]
    assert (reason["reason"], reason["code"]) == ("store_failed", "store_unreachable")


def test_a_worker_says_over_http_since_when_the_store_is_away_and_when_it_is_back(
    cluster: Cluster, up: Up
) -> None:
    worker = up("--http", "127.0.0.1:0")
    until(lambda: readyz(worker)[0] == 200, "readiness", LONG_S)
    before_ns = time.time_ns()
    cluster.primary.stop()
    _, document = until(
        lambda: found if (found := readyz(worker))[0] == 503 else None, "the blocker", LONG_S
    )
    [reason] = document["reasons"]
    assert (reason["reason"], reason["code"]) == ("store_failed", "store_unreachable")
    assert " does not answer since " in reason["text"]
    # To the second, as it is told; and never in the future.
    assert before_ns - 1e9 <= reason["since_ns"] <= time.time_ns()
    cluster.primary.start()
    until(lambda: readyz(worker)[0] == 200, "readiness again", LONG_S)
    assert worker.running


# -- workers ---------------------------------------------------------------------------------------


@pytest.mark.deep
def test_roles_outlast_a_server_that_is_away_for_longer_than_they_may_stand_still(
    cluster: Cluster, url: str, up: Up
) -> None:
    """`--stuck-s` is about what never comes back. A server does."""
    worker = up("--lease-s", 2, "--stuck-s", 15)
    with app.open(url, roles=()) as runtime:
        desk = runtime.world(Desk, "desk")
        assert desk.ask(Ordered("1", 0.0), timeout=LONG_S) == 1
        cluster.primary.crash()
        until(_passed(20.0), "a while", LONG_S)
        assert worker.running, worker.errors
        cluster.primary.start()
        # The client was away from it as well, and comes back, too.
        assert _insist(lambda: desk.ask(Ordered("2", 0.0), timeout=LONG_S, key="2")) == 2
    assert worker.running


@pytest.mark.deep
def test_a_worker_that_starts_while_the_server_is_away_waits_for_it(
    cluster: Cluster, url: str, up: Up
) -> None:
    cluster.primary.stop()
    worker = up(ready=None)
    until(lambda: any("waiting for the store" in line for line in worker.errors), "it", LONG_S)
    cluster.primary.start()
    worker.expect("ready", LONG_S)


@pytest.mark.deep
def test_a_worker_that_is_told_to_stop_while_the_server_is_away_ends(
    cluster: Cluster, url: str, up: Up
) -> None:
    worker = up()
    with app.open(url, roles=()) as runtime:
        _keep_busy(runtime)
    cluster.primary.stop()
    worker.terminate()
    assert worker.wait(STOP_S) == 0


# -- connections -----------------------------------------------------------------------------------


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[Proxy]:
    with Proxy((cluster.primary.host, cluster.primary.port)) as made:
        yield made


@pytest.fixture
def through(url: str, proxy: Proxy) -> Iterator[Store]:
    """A store that is reached through the proxy."""
    with stores.open(f"postgresql://{USER}@127.0.0.1:{proxy.port}/{DATABASE}") as opened:
        yield opened


def add(txn: Txn) -> int:
    txn.append(b"log", b"")
    return 0


def count(txn: Txn) -> int:
    return len(txn.scan(b"log", b"log\xff"))


def test_a_commit_whose_answer_is_cut_off_happened_once(through: Store, proxy: Proxy) -> None:
    for done in range(1, CUTS + 1):
        proxy.cut_answer()
        through.transact(add)
        assert through.transact(count_written) == done
    assert proxy.done["answer"] == CUTS


@pytest.mark.parametrize("upward", [True, False])
def test_commits_that_are_cut_anywhere_happen_once(
    through: Store, proxy: Proxy, upward: bool
) -> None:
    for cuts in range(1, CUTS + 1):
        proxy.cut_after(150 * cuts, upward=upward)
        through.transact(add)
        assert through.transact(count_written) == cuts


def count_written(txn: Txn) -> int:
    found = count(txn)
    txn.put(b"seen", str(found).encode())
    return found


@pytest.mark.deep
@pytest.mark.parametrize("direction", ["up", "down", "both"])
def test_a_connection_that_carries_nothing_any_more_is_given_up(
    through: Store, proxy: Proxy, direction: str
) -> None:
    through.transact(add)
    assert through.read(count) == 1
    proxy.swallow(up=direction != "down", down=direction != "up")
    began = time.monotonic()
    _insist(lambda: through.read(count))
    _insist(lambda: through.transact(add))
    assert time.monotonic() - began < LONG_S
    assert through.read(count) >= 2


# Stands still when it has the lock of the commit and is about to send what it writes.
HOLDER = """
import os, signal, sys
from holdfast import store as stores
from holdfast.store.pg.engine import PgEngine

def stand_still(engine, *commit):
    print("holds", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)

with stores.open(sys.argv[1]) as store:
    print("ready", flush=True)
    PgEngine._finish = stand_still
    store.transact(lambda txn: txn.put(b"held", b""))
"""


@pytest.mark.deep
def test_a_process_that_stands_still_in_mid_commit_holds_up_others_for_moments_only(
    url: str,
) -> None:
    """It has the lock of the commit, and does not let go of it by itself."""
    with stores.open(url) as store, python_proc(HOLDER, url, ready="ready") as holder:
        holder.expect("holds", LONG_S)
        until(lambda: seen(holder.pid).stopped, "its standstill", LONG_S)
        began = time.monotonic()
        _insist(lambda: store.transact(add))
        assert time.monotonic() - began < HELD_UP_S


# -- inside ----------------------------------------------------------------------------------------


def _insist(do: Callable[[], Any]) -> Any:
    """Until it is done: a store that is away says so, and is asked again."""
    found: list[Any] = []

    def done() -> bool:
        try:
            found.append(do())
        except HoldfastError as error:
            if not (error.retryable or isinstance(error, CommitUnknown)):
                raise
            return False
        return True

    until(done, "its turn", LONG_S)
    return found[0]


def _passed(seconds: float) -> Callable[[], bool]:
    until_s = time.monotonic() + seconds
    return lambda: time.monotonic() >= until_s


def _keep_busy(runtime: Runtime) -> None:
    """Give a worker something to hold."""
    threads = [
        threading.Thread(
            target=lambda n=n: runtime.world(Desk, f"desk-{n}").ask(Ordered(f"{n}", 3.0))
        )
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

"""The PostgreSQL server is down, frozen, or its answers are lost: readiness reports it, roles resume when it returns,
and no client is blocked forever."""

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
from tests.chaos.app import RECEIVER, OrderDesk, OrderPlaced, app
from tests.chaos.proxy import Proxy
from tests.chaos.receiver import Receiver
from tests.pgcluster import DATABASE, USER, PostgresCluster
from tests.process.watch import os_process, until
from tests.processes import Proc, python_proc

MODULES = (
    "holdfast.store.postgres.store",
    "holdfast.workers.service",
    "holdfast.workers.readiness_facts",
    "holdfast.cli.ready",
    "holdfast.cli.up",
)

pytestmark = [pytest.mark.postgresql, pytest.mark.timeout(180)]

LONG_S = 60.0
# `holdfast ready` ends within BOUND_S, and a terminated process within STOP_S.
BOUND_S = 40.0
STOP_S = 75.0
# A process that is stopped or disconnected in mid-commit delays other commits for less than this.
DELAY_MAX_S = 10.0
CUTS = 12

Up = Callable[..., Proc]


@pytest.fixture(scope="module")
def cluster() -> Iterator[PostgresCluster]:
    with PostgresCluster(standby=False) as made:
        yield made


@pytest.fixture
def url(cluster: PostgresCluster) -> Iterator[str]:
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


def run_ready(url: str, *options: str) -> tuple[int, str]:
    """The exit code and the output of `holdfast ready`."""
    with python_proc("holdfast.cli", "ready", "--store", url, *options, ready=None) as proc:
        code = proc.wait(BOUND_S)
        return code, "\n".join(proc.lines + proc.errors)


def get_readyz(worker: Proc) -> tuple[int, dict[str, Any]]:
    """The status and the document of a worker's /readyz."""
    where = next(word for word in worker.lines[0].split() if word.startswith("http"))
    try:
        with urllib.request.urlopen(f"{where}/readyz", timeout=BOUND_S) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


# -- readiness -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["stopped", pytest.param("frozen", marks=pytest.mark.deep)])
def test_ready_reports_store_unreachable_while_the_server_is_down(
    cluster: PostgresCluster, url: str, up: Up, how: str
) -> None:
    up()
    until(lambda: run_ready(url)[0] == 0, "readiness", LONG_S)
    server = cluster.primary
    frozen = server.freeze() if how == "frozen" else []
    if how == "stopped":
        server.stop()
    try:
        code, output = run_ready(url)
    finally:
        for process in frozen:
            process.cont()
    assert code == 1
    assert "store_failed store_unreachable: store " in output
    assert f"{server.host}" in output
    assert "does not answer" in output
    if how == "stopped":
        server.start()
    until(lambda: run_ready(url)[0] == 0, "readiness again", LONG_S)


def test_ready_as_json_reports_store_unreachable(cluster: PostgresCluster, url: str) -> None:
    cluster.primary.stop()
    with python_proc("holdfast.cli", "ready", "--store", url, "--json", ready=None) as proc:
        assert proc.wait(BOUND_S) == 1
        document = json.loads("".join(proc.lines))
    assert document["ready"] is False
    [reason] = document["universes"][0]["reasons"]
    assert (reason["reason"], reason["code"]) == ("store_failed", "store_unreachable")


def test_readyz_reports_since_when_the_store_is_unreachable(
    cluster: PostgresCluster, up: Up
) -> None:
    worker = up("--http", "127.0.0.1:0")
    until(lambda: get_readyz(worker)[0] == 200, "readiness", LONG_S)
    before_ns = time.time_ns()
    cluster.primary.stop()
    _, document = until(
        lambda: found if (found := get_readyz(worker))[0] == 503 else None, "the blocker", LONG_S
    )
    [reason] = document["reasons"]
    assert (reason["reason"], reason["code"]) == ("store_failed", "store_unreachable")
    assert " does not answer since " in reason["text"]
    # The time is rounded to a second and never in the future.
    assert before_ns - 1e9 <= reason["since_ns"] <= time.time_ns()
    cluster.primary.start()
    until(lambda: get_readyz(worker)[0] == 200, "readiness again", LONG_S)
    assert worker.running


# -- workers ---------------------------------------------------------------------------------------


@pytest.mark.deep
def test_roles_survive_a_server_outage_longer_than_stuck_s(
    cluster: PostgresCluster, url: str, up: Up
) -> None:
    """`--stuck-s` is for reducers that never return. A server outage must not count."""
    worker = up("--lease-s", 2, "--stuck-s", 15)
    with app.open(url, roles=()) as runtime:
        desk = runtime.world(OrderDesk, "desk")
        assert desk.ask(OrderPlaced("1", 0.0), timeout=LONG_S) == 1
        cluster.primary.crash()
        until(_time_passed(20.0), "a while", LONG_S)
        assert worker.running, worker.errors
        cluster.primary.start()
        # The client also lost its connection and reconnects.
        assert (
            _retry_until_done(lambda: desk.ask(OrderPlaced("2", 0.0), timeout=LONG_S, key="2")) == 2
        )
    assert worker.running


@pytest.mark.deep
def test_up_waits_for_an_unavailable_server_at_startup(
    cluster: PostgresCluster, url: str, up: Up
) -> None:
    cluster.primary.stop()
    worker = up(ready=None)
    until(lambda: any("waiting for the store" in line for line in worker.errors), "it", LONG_S)
    cluster.primary.start()
    worker.expect("ready", LONG_S)


@pytest.mark.deep
def test_sigterm_ends_up_while_the_server_is_down(
    cluster: PostgresCluster, url: str, up: Up
) -> None:
    worker = up()
    with app.open(url, roles=()) as runtime:
        _send_orders(runtime)
    cluster.primary.stop()
    worker.terminate()
    assert worker.wait(STOP_S) == 0


# -- connections -----------------------------------------------------------------------------------


@pytest.fixture
def proxy(cluster: PostgresCluster) -> Iterator[Proxy]:
    with Proxy((cluster.primary.host, cluster.primary.port)) as made:
        yield made


@pytest.fixture
def proxied_store(url: str, proxy: Proxy) -> Iterator[Store]:
    """A store that is opened through the proxy."""
    with stores.open(f"postgresql://{USER}@127.0.0.1:{proxy.port}/{DATABASE}") as opened:
        yield opened


def add(txn: Txn) -> int:
    txn.append(b"log", b"")
    return 0


def count(txn: Txn) -> int:
    return len(txn.scan(b"log", b"log\xff"))


def test_commit_with_a_lost_answer_is_applied_once(proxied_store: Store, proxy: Proxy) -> None:
    for done in range(1, CUTS + 1):
        proxy.cut_answer()
        proxied_store.transact(add)
        assert proxied_store.transact(count_written) == done
    assert proxy.done["answer"] == CUTS


@pytest.mark.parametrize("upward", [True, False])
def test_commit_on_a_connection_cut_at_any_byte_is_applied_once(
    proxied_store: Store, proxy: Proxy, upward: bool
) -> None:
    for cuts in range(1, CUTS + 1):
        proxy.cut_after(150 * cuts, upward=upward)
        proxied_store.transact(add)
        assert proxied_store.transact(count_written) == cuts


def count_written(txn: Txn) -> int:
    found = count(txn)
    txn.put(b"seen", str(found).encode())
    return found


@pytest.mark.deep
@pytest.mark.parametrize("direction", ["up", "down", "both"])
def test_silent_connection_is_abandoned(proxied_store: Store, proxy: Proxy, direction: str) -> None:
    proxied_store.transact(add)
    assert proxied_store.read(count) == 1
    proxy.swallow(up=direction != "down", down=direction != "up")
    began = time.monotonic()
    _retry_until_done(lambda: proxied_store.read(count))
    _retry_until_done(lambda: proxied_store.transact(add))
    assert time.monotonic() - began < LONG_S
    assert proxied_store.read(count) >= 2


# Stops itself when it holds the commit lock and is about to send its writes.
HOLDER = """
import os, signal, sys
from holdfast import store as stores
from holdfast.store.postgres.engine import PgEngine

def stand_still(engine, *commit):
    print("holds", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)

with stores.open(sys.argv[1]) as store:
    print("ready", flush=True)
    PgEngine._send_commit = stand_still
    store.transact(lambda txn: txn.put(b"held", b""))
"""


@pytest.mark.deep
def test_process_stopped_in_mid_commit_delays_other_commits_only_briefly(
    url: str,
) -> None:
    """The stopped process holds the commit lock and does not release it."""
    with stores.open(url) as store, python_proc(HOLDER, url, ready="ready") as holder:
        holder.expect("holds", LONG_S)
        until(lambda: os_process(holder.pid).stopped, "its standstill", LONG_S)
        began = time.monotonic()
        _retry_until_done(lambda: store.transact(add))
        assert time.monotonic() - began < DELAY_MAX_S


# -- helpers ---------------------------------------------------------------------------------------


def _retry_until_done(call: Callable[[], Any]) -> Any:
    """The result of a call, retried while the store is unavailable."""
    found: list[Any] = []

    def done() -> bool:
        try:
            found.append(call())
        except HoldfastError as error:
            if not (error.retryable or isinstance(error, CommitUnknown)):
                raise
            return False
        return True

    until(done, "its turn", LONG_S)
    return found[0]


def _time_passed(seconds: float) -> Callable[[], bool]:
    until_s = time.monotonic() + seconds
    return lambda: time.monotonic() >= until_s


def _send_orders(runtime: Runtime) -> None:
    """Send orders to four worlds, so that a worker holds leases."""
    threads = [
        threading.Thread(
            target=lambda n=n: runtime.world(OrderDesk, f"desk-{n}").ask(OrderPlaced(f"{n}", 3.0))
        )
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

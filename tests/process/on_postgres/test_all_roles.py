"""Two processes on PostgreSQL, each with every role. They share only the store. When one is killed, no work is
lost or done twice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from holdfast.app.runtime import Runtime
from holdfast.cli import main
from tests.postgres import role_url
from tests.process.on_postgres import full_app
from tests.process.on_postgres.full_app import PurchaseMade, PurchaseWorld, app, double
from tests.process.test_up_http import call
from tests.process.watch import until
from tests.processes import Proc

UP = [sys.executable, "-m", "holdfast.cli", "up", "tests.process.on_postgres.full_app:app"]
SECRET = "sw0rdfish"
ORDERS = 20
MIB = 1 << 20

pytestmark = pytest.mark.timeout(90)

Up = Callable[..., Proc]


@pytest.fixture
def up(home: str, tmp_path: Path) -> Iterator[Up]:
    with contextlib.ExitStack() as running:

        def up(*options: str, store: str = home, ready: str | None = "ready") -> Proc:
            """Start a process. The store URL is in its environment, where other users cannot read it."""
            env = {full_app.LOG: str(tmp_path / "calls"), "HOLDFAST_STORE": store}
            argv = [*UP, "--lease-s", "2", *options]
            return running.enter_context(Proc.spawn(argv, ready=ready, env=env))

        yield up


@pytest.fixture
def client(home: str) -> Iterator[Runtime]:
    runtime: Runtime = app.open(home, roles=())
    with runtime:
        yield runtime


def test_work_is_done_once_when_one_of_two_processes_is_killed(
    up: Up, client: Runtime, tmp_path: Path, home: str
) -> None:
    workers = [up(), up()]
    shops = [client.world(PurchaseWorld, f"shop {n}") for n in range(4)]
    tasks = []
    for n in range(ORDERS):
        shops[n % 4].send(PurchaseMade(n))
        tasks.append(client.submit(double, n))
        if n == ORDERS // 2:
            workers[0].kill()
    assert [task.result(60) for task in tasks] == [2 * n for n in range(ORDERS)]
    until(lambda: sum(len(shop.state().woken) for shop in shops) == ORDERS, "all timers", 60)
    until(lambda: sum(len(shop.state().paid) for shop in shops) == ORDERS, "all receipts", 60)
    for at, shop in enumerate(shops):
        mine = list(range(at, ORDERS, 4))
        assert (sorted(shop.state().paid), sorted(shop.state().woken)) == (mine, mine)
    keys = dict(line.split() for line in (tmp_path / "calls").read_text().splitlines())
    assert len(set(keys.values())) == len(keys) == ORDERS, (
        "one key for each, however often it is called"
    )
    workers[1].terminate()
    assert workers[1].wait() == 0
    assert workers[1].errors == []
    argv = [
        "verify",
        "--app",
        "tests.process.on_postgres.full_app:app",
        "--jobs",
        "1",
        "--store",
        home,
    ]
    assert main(argv) == 0


def test_large_value_is_stored_in_the_database(up: Up, client: Runtime, home: str) -> None:
    """No file beside the database holds the value, so that another machine can read it."""
    up()
    payload = os.urandom(2 * MIB)
    shop = client.world(PurchaseWorld, "large")
    shop.send(PurchaseMade(1, payload))
    until(lambda: shop.state().paid == [1], "its receipt", 60)
    other: Runtime = app.open(home, roles=())
    with other:
        assert other.world(PurchaseWorld, "large").state().payload == payload
    with psycopg.connect(home) as connection:
        [(bytes_,)] = connection.execute("SELECT pg_database_size(current_database())").fetchall()
    assert bytes_ > 2 * MIB


def test_coroutines_submit_tasks_and_await_results(up: Up, client: Runtime) -> None:
    up()

    async def run() -> list[int]:
        handles = await asyncio.gather(*(client.submit_async(double, n) for n in range(50)))
        return list(await asyncio.gather(*handles))

    assert asyncio.run(run()) == [2 * n for n in range(50)]


@pytest.fixture
def guarded(home: str) -> str:
    """The URL of the same database for a role with a password."""
    url = role_url(home, "guarded", SECRET)
    with psycopg.connect(home, autocommit=True) as connection:
        connection.execute("GRANT ALL ON SCHEMA public TO guarded")
    return url


def test_ready_line_hides_the_database_password(up: Up, guarded: str) -> None:
    worker = up("--json", store=guarded, ready='{"ready"')
    document = json.loads(worker.lines[0])
    assert document["store"].startswith("postgresql://guarded:…@")
    assert SECRET not in worker.lines[0]
    worker.terminate()
    assert worker.wait() == 0
    assert worker.errors == []


def test_wrong_database_password_ends_up_with_one_error_line(up: Up, guarded: str) -> None:
    worker = up(store=guarded.replace(SECRET, f"{SECRET}!"), ready=None)
    assert worker.wait() == 1
    [line] = worker.errors
    assert line.startswith("holdfast: store_denied: ")
    assert SECRET not in line


def test_tasks_are_submitted_over_http(up: Up, client: Runtime) -> None:
    worker = up("--http", "127.0.0.1:0")
    made = call(worker, "POST", "/v1/tasks", {"name": "double", "args": [21]})
    assert client.task(made["id"]).result(60) == 42
    until(lambda: call(worker, "GET", "/readyz")["ready"], "readiness")

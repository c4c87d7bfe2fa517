"""Universes routed to different stores by `holdfast.toml`: mail between them, an unreachable store, kills."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from holdfast import store as stores
from holdfast.app.runtime import Runtime
from holdfast.app.world_handle import WorldHandle
from holdfast.durable import queue
from holdfast.world.messaging import outbox
from tests.postgres import admin, fresh_url
from tests.process import mail_app
from tests.process.conftest import LIMITS
from tests.process.mail_app import Office, Write
from tests.process.watch import KILLS, assert_no_client_left, until
from tests.processes import ROOT, Proc

pytestmark = pytest.mark.timeout(90 + 10 * KILLS)

HOLDFAST = [sys.executable, "-m", "holdfast.cli"]
STALLED_MAIL_WORKER = [sys.executable, "-m", "tests.process.stalled_mail_worker"]
EACH = 5
# Another process delivers the mail of a killed one after this time.
LEASE_S = "1"
each_kind = pytest.mark.parametrize("kind", ["lmdb", "postgres"])

Up = Callable[..., Proc]


class RoutedStores:
    """Two stores and the configuration file that routes universes to them."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path
        self.config = path / "holdfast.toml"
        self.north = str(path / "north")
        self.south = fresh_url() if kind == "postgres" else str(path / "south")
        self.write_config(north=self.north, south=self.south)

    def write_config(self, default: str | None = None, **universes: str) -> None:
        lines = [] if default is None else ["[stores]", f"default = {json.dumps(default)}"]
        lines += ["[stores.universes]"]
        lines += [f"{json.dumps(name)} = {json.dumps(url)}" for name, url in universes.items()]
        self.config.write_text("\n".join(lines), encoding="utf-8")

    @property
    def env(self) -> dict[str, str]:
        return {"HOLDFAST_CONFIG": str(self.config), "HOLDFAST_STORE": ""}

    def client(self, universe: str, url: str) -> Runtime:
        runtime: Runtime = mail_app.north.open(
            stores.open(url, limits=LIMITS), universe=universe, roles=()
        )
        return runtime

    def command(self, *argv: str) -> Any:
        command = [*HOLDFAST, *argv, "--json"]
        with Proc.spawn(command, ready=None, env=self.env, cwd=ROOT) as ran:
            ran.wait(60)
        return json.loads("\n".join(ran.lines)) if ran.lines else "\n".join(ran.errors)


@pytest.fixture
def routed_stores(tmp_path: Path, kind: str) -> Iterator[RoutedStores]:
    made = RoutedStores(tmp_path, kind)
    yield made
    for url in (made.north, made.south):
        if "://" not in url:
            assert_no_client_left(Path(url))


@pytest.fixture
def up(routed_stores: RoutedStores) -> Iterator[Up]:
    with contextlib.ExitStack() as running:

        def up(universe: str, *options: str) -> Proc:
            argv = [*HOLDFAST, "up", "tests.process.mail_app:north", "--universe", universe]
            return running.enter_context(
                Proc.spawn([*argv, "--lease-s", LEASE_S, *options], env=routed_stores.env, cwd=ROOT)
            )

        yield up


@contextlib.contextmanager
def clients(
    routed_stores: RoutedStores,
) -> Iterator[tuple[WorldHandle[Office], WorldHandle[Office], Runtime]]:
    """The world ada in north, the world bob in south, and the runtime of north."""
    north, south = (
        routed_stores.client("north", routed_stores.north),
        routed_stores.client("south", routed_stores.south),
    )
    try:
        yield north.world(Office, "ada"), south.world(Office, "bob"), north
    finally:
        for runtime in (north, south):
            runtime.close()
            runtime.store.close()


@each_kind
def test_each_universe_runs_in_its_routed_store_and_exchanges_mail(
    routed_stores: RoutedStores, up: Up
) -> None:
    first = up("north")
    until(lambda: first.errors, "a word about the others")
    assert "not run here: south" in first.errors[0]
    assert "holdfast up MODULE:APP --universe south" in first.errors[0]
    up("south")
    with clients(routed_stores) as (ada, bob, _):
        for n in range(EACH):
            ada.send(Write(n))
        until(lambda: ada.state().answers == EACH, "all receipts")
        until(lambda: len(bob.state().read) >= EACH, "all mail")
        assert sorted(bob.state().read) == list(range(EACH))
        listed = routed_stores.command("worlds", "list", "--universe", "south")
        assert [one["name"] for one in listed["worlds"]] == ["bob"]
        ready = routed_stores.command("ready")
        assert {one["universe"] for one in ready["universes"]} == {"north", "south"}


@each_kind
def test_mail_has_one_delivery_and_receipt_when_its_worker_is_killed(
    routed_stores: RoutedStores, up: Up
) -> None:
    stores.open(routed_stores.south, limits=LIMITS).close()
    up("north", "--role", "world", "--role", "orchestrator")
    delivered = 0
    with clients(routed_stores) as (ada, bob, north):
        for kill in range(KILLS):
            for n in range(EACH):
                ada.send(Write(kill * EACH + n))
            until(lambda: ada.state().sent == (kill + 1) * EACH, "the sending")  # noqa: B023
            with Proc.spawn(
                [*STALLED_MAIL_WORKER, routed_stores.north, routed_stores.south]
            ) as mail_worker:
                delivered += int(mail_worker.expect("delivered").split()[-1])
                mail_worker.kill()
        assert delivered >= KILLS
        assert ada.state().answers == 0, "the pool was killed before the reply"
        up("north", "--role", "adapter")
        up("south")
        total = KILLS * EACH
        until(lambda: ada.state().answers >= total, "all receipts", timeout_s=60)
        until(lambda: len(bob.state().read) >= total, "all mail")
        assert sorted(bob.state().read) == list(range(total)), "each once, and no other"
        statuses = Counter(ada.state().told.values())
        assert statuses["ok"] + statuses["already_enqueued"] == total
        assert statuses["already_enqueued"] >= KILLS
        counts = north.store.read(queue.counts, outbox.peer_queue_name("north", "south"))
        assert counts == queue.QueueCounts(done=total)


@pytest.mark.parametrize("kind", ["postgres"])
def test_mail_to_an_unreachable_store_waits_and_readiness_counts_it(
    routed_stores: RoutedStores, up: Up
) -> None:
    database = psycopg.conninfo.conninfo_to_dict(routed_stores.south)["dbname"]
    stores.open(routed_stores.south).close()
    up("north")
    north = routed_stores.client("north", routed_stores.north)
    with contextlib.ExitStack() as closing:
        closing.callback(north.store.close)
        closing.callback(north.close)
        with admin() as server:
            server.execute(f"ALTER DATABASE {database} ALLOW_CONNECTIONS false")
            server.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s",
                (database,),
            )
        ada: WorldHandle[Office] = north.world(Office, "ada")
        for n in range(EACH):
            ada.send(Write(n))
        until(lambda: ada.state().sent == EACH, "the sending")

        def readiness_counts_mail() -> bool:
            [one] = routed_stores.command("ready", "--universe", "north")["universes"]
            reasons = {warning["reason"] for warning in one["warnings"]}
            return one["ready"] and one["mail"] == {"south": EACH} and "mail_waiting" in reasons

        until(readiness_counts_mail, "the mail that waits, in readiness")
        with admin() as server:
            server.execute(f"ALTER DATABASE {database} ALLOW_CONNECTIONS true")
        until(lambda: ada.state().answers == EACH, "all receipts", timeout_s=60)
        assert Counter(ada.state().told.values()) == {"ok": EACH}


@each_kind
@pytest.mark.deep
def test_moved_universe_resumes_in_the_store_it_is_routed_to(
    routed_stores: RoutedStores, up: Up, kind: str
) -> None:
    """Its worker is killed with claimed mail, its store is copied, and the configuration is changed. No mail
    is lost or delivered twice, and the copy verifies. The copy waits for leases to expire or uses --force."""
    pool, peer = up("north"), up("south")
    with clients(routed_stores) as (ada, _, _):
        for n in range(10 * EACH):
            ada.send(Write(n))
        until(lambda: ada.state().sent, "the first mail")
        assert pool.kill() < 0
        peer.terminate()
        assert peer.wait() == 0
    moved, options = str(routed_stores.path / "moved"), []
    if kind == "postgres":
        moved, options = fresh_url(), ["--force"]

    def copied() -> bool:
        told = routed_stores.command("store", "copy", routed_stores.north, moved, *options)
        assert isinstance(told, dict) or "leases_held" in told or "store_in_use" in told, told
        return isinstance(told, dict)

    until(copied, "leases that ran out", timeout_s=60)
    routed_stores.north = moved
    routed_stores.write_config(north=moved, south=routed_stores.south)
    up("north")
    up("south")
    with clients(routed_stores) as (ada, bob, _):
        until(lambda: ada.state().answers == 10 * EACH, "all receipts", timeout_s=60)
        until(lambda: len(bob.state().read) >= 10 * EACH, "all mail")
        assert sorted(bob.state().read) == list(range(10 * EACH)), "each once, and no other"
        verified = routed_stores.command("verify", "--universe", "north")
        assert verified["sound"] is True, verified


@each_kind
def test_universe_matched_by_a_pattern_is_found_once_it_exists(
    routed_stores: RoutedStores, up: Up
) -> None:
    routed_stores.write_config(**{"north": routed_stores.north, "eu-*": routed_stores.south})
    stores.open(routed_stores.south, limits=LIMITS).close()
    pool = up("north")
    north = routed_stores.client("north", routed_stores.north)
    matched = routed_stores.client("eu-1", routed_stores.south)
    with contextlib.ExitStack() as closing:
        for runtime in (north, matched):
            closing.callback(runtime.store.close)
            closing.callback(runtime.close)
        ada: WorldHandle[Office] = north.world(Office, "ada")
        ada.send(Write(1, universe="eu-1"))
        lane = outbox.peer_queue_name("north", "eu-1")
        until(lambda: north.store.read(queue.counts, lane).delayed, "a look for a universe")
        assert pool.kill() < 0
        ada.send(Write(2, universe="eu-1"))
        matched.world(Office, "first").create()
        up("north")
        until(lambda: ada.state().answers == 2, "all receipts", timeout_s=60)
        up("eu-1")
        bob: WorldHandle[Office] = matched.world(Office, "bob")
        until(lambda: len(bob.state().read) == 2, "all mail")
        assert sorted(bob.state().read) == [1, 2]

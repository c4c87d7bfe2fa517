"""Universes in different stores, by `holdfast.toml`, as processes: mail between them, a store away, kills."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from holdfast import store as stores
from holdfast.app.handle import WorldHandle
from holdfast.app.runtime import Runtime
from holdfast.durable import queue
from holdfast.world import outbox
from tests.postgres import admin, fresh_url
from tests.process import mailing
from tests.process.conftest import LIMITS
from tests.process.mailing import Office, Write
from tests.process.watch import assert_nobody_is_left, until
from tests.processes import ROOT, Proc

pytestmark = pytest.mark.timeout(120)

HOLDFAST = [sys.executable, "-m", "holdfast.cli"]
COURIER = [sys.executable, "-m", "tests.process.courier"]
KILLS, EACH = 4, 5
each_kind = pytest.mark.parametrize("kind", ["lmdb", "postgres"])

Up = Callable[..., Proc]


class Towns:
    """Two stores and the file that maps universes to them."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path
        self.config = path / "holdfast.toml"
        self.north = str(path / "north")
        self.south = fresh_url() if kind == "postgres" else str(path / "south")
        self.write(north=self.north, south=self.south)

    def write(self, default: str | None = None, **universes: str) -> None:
        lines = [] if default is None else ["[stores]", f"default = {json.dumps(default)}"]
        lines += ["[stores.universes]"]
        lines += [f"{json.dumps(name)} = {json.dumps(url)}" for name, url in universes.items()]
        self.config.write_text("\n".join(lines), encoding="utf-8")

    @property
    def env(self) -> dict[str, str]:
        return {"HOLDFAST_CONFIG": str(self.config), "HOLDFAST_STORE": ""}

    def client(self, universe: str, url: str) -> Runtime:
        runtime: Runtime = mailing.north.open(
            stores.open(url, limits=LIMITS), universe=universe, roles=()
        )
        return runtime

    def command(self, *argv: str) -> Any:
        ran = subprocess.run(
            [*HOLDFAST, *argv, "--json"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**_environ(), **self.env},
            timeout=60,
            check=False,
        )
        return json.loads(ran.stdout) if ran.stdout else ran.stderr


def _environ() -> dict[str, str]:
    return dict(os.environ)


@pytest.fixture
def towns(tmp_path: Path, kind: str) -> Iterator[Towns]:
    made = Towns(tmp_path, kind)
    yield made
    for url in (made.north, made.south):
        if "://" not in url:
            assert_nobody_is_left(Path(url), 3.0, slack_s=10)


@pytest.fixture
def up(towns: Towns) -> Iterator[Up]:
    with contextlib.ExitStack() as running:

        def up(universe: str, *options: str) -> Proc:
            argv = [*HOLDFAST, "up", "tests.process.mailing:north", "--universe", universe]
            return running.enter_context(
                Proc.spawn([*argv, "--lease-s", "3", *options], env=towns.env, cwd=ROOT)
            )

        yield up


@contextlib.contextmanager
def clients(towns: Towns) -> Iterator[tuple[WorldHandle[Office], WorldHandle[Office], Runtime]]:
    """ada of the north, bob of the south, and the north."""
    north, south = towns.client("north", towns.north), towns.client("south", towns.south)
    try:
        yield north.world(Office, "ada"), south.world(Office, "bob"), north
    finally:
        for runtime in (north, south):
            runtime.close()
            runtime.store.close()


@each_kind
def test_each_universe_runs_in_its_store_and_mail_goes_between_them(towns: Towns, up: Up) -> None:
    first = up("north")
    until(lambda: first.errors, "a word about the others")
    assert "not run here: south" in first.errors[0]
    assert "holdfast up MODULE:APP --universe south" in first.errors[0]
    up("south")
    with clients(towns) as (ada, bob, _):
        for n in range(EACH):
            ada.send(Write(n))
        until(lambda: ada.state().answers == EACH, "all receipts")
        until(lambda: len(bob.state().read) >= EACH, "all mail")
        assert sorted(bob.state().read) == list(range(EACH))
        listed = towns.command("worlds", "list", "--universe", "south")
        assert [one["name"] for one in listed["worlds"]] == ["bob"]
        ready = towns.command("ready")
        assert {one["universe"] for one in ready["universes"]} == {"north", "south"}


@each_kind
def test_a_carrier_killed_between_its_two_commits_leaves_one_message_and_one_receipt(
    towns: Towns, up: Up
) -> None:
    stores.open(towns.south, limits=LIMITS).close()
    up("north", "--role", "world", "--role", "orchestrator")
    delivered = 0
    with clients(towns) as (ada, bob, north):
        for kill in range(KILLS):
            for n in range(EACH):
                ada.send(Write(kill * EACH + n))
            until(lambda: ada.state().sent == (kill + 1) * EACH, "the sending")  # noqa: B023
            with Proc.spawn([*COURIER, towns.north, towns.south]) as courier:
                delivered += int(courier.expect("delivered").split()[-1])
                courier.kill()
        assert delivered >= KILLS
        assert ada.state().answers == 0, "nobody lived to tell"
        up("north", "--role", "adapter")
        up("south")
        total = KILLS * EACH
        until(lambda: ada.state().answers >= total, "all receipts", timeout_s=60)
        until(lambda: len(bob.state().read) >= total, "all mail")
        assert sorted(bob.state().read) == list(range(total)), "each once, and no other"
        told = Counter(ada.state().told.values())
        assert told["ok"] + told["already_enqueued"] == total
        assert told["already_enqueued"] >= KILLS
        counts = north.store.read(queue.counts, outbox.lane("north", "south"))
        assert counts == queue.Counts(done=total)


@pytest.mark.parametrize("kind", ["postgres"])
def test_while_a_store_is_away_its_mail_waits_and_is_counted_and_the_sender_goes_on(
    towns: Towns, up: Up
) -> None:
    database = psycopg.conninfo.conninfo_to_dict(towns.south)["dbname"]
    stores.open(towns.south).close()
    up("north")
    north = towns.client("north", towns.north)
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

        def told() -> bool:
            [one] = towns.command("ready", "--universe", "north")["universes"]
            reasons = {warning["reason"] for warning in one["warnings"]}
            return one["ready"] and one["mail"] == {"south": EACH} and "mail_waiting" in reasons

        until(told, "the mail that waits, in readiness")
        with admin() as server:
            server.execute(f"ALTER DATABASE {database} ALLOW_CONNECTIONS true")
        until(lambda: ada.state().answers == EACH, "all receipts", timeout_s=60)
        assert Counter(ada.state().told.values()) == {"ok": EACH}


@each_kind
@pytest.mark.deep
def test_a_universe_that_was_moved_after_its_workers_died_goes_on_where_it_is_mapped_now(
    towns: Towns, up: Up, kind: str
) -> None:
    """Its worker is killed with mail in hand, its store copied, the file changed: nothing is lost or
    done twice, and what the copy holds verifies. Leases are waited out, or overruled."""
    pool, peer = up("north"), up("south")
    with clients(towns) as (ada, _, _):
        for n in range(10 * EACH):
            ada.send(Write(n))
        until(lambda: ada.state().sent, "the first mail")
        assert pool.kill() < 0
        peer.terminate()
        assert peer.wait() == 0
    moved, more = str(towns.path / "moved"), []
    if kind == "postgres":
        moved, more = fresh_url(), ["--force"]

    def copied() -> bool:
        told = towns.command("store", "copy", towns.north, moved, *more)
        assert isinstance(told, dict) or "leases_held" in told or "store_in_use" in told, told
        return isinstance(told, dict)

    until(copied, "leases that ran out", timeout_s=60)
    towns.north = moved
    towns.write(north=moved, south=towns.south)
    up("north")
    up("south")
    with clients(towns) as (ada, bob, _):
        until(lambda: ada.state().answers == 10 * EACH, "all receipts", timeout_s=60)
        until(lambda: len(bob.state().read) >= 10 * EACH, "all mail")
        assert sorted(bob.state().read) == list(range(10 * EACH)), "each once, and no other"
        verified = towns.command("verify", "--universe", "north")
        assert verified["sound"] is True, verified


@each_kind
def test_a_universe_that_only_a_pattern_fits_is_found_when_it_is_there_and_by_the_next_pool(
    towns: Towns, up: Up
) -> None:
    towns.write(**{"north": towns.north, "eu-*": towns.south})
    stores.open(towns.south, limits=LIMITS).close()
    pool = up("north")
    north = towns.client("north", towns.north)
    there = towns.client("eu-1", towns.south)
    with contextlib.ExitStack() as closing:
        for runtime in (north, there):
            closing.callback(runtime.store.close)
            closing.callback(runtime.close)
        ada: WorldHandle[Office] = north.world(Office, "ada")
        ada.send(Write(1, universe="eu-1"))
        lane = outbox.lane("north", "eu-1")
        until(lambda: north.store.read(queue.counts, lane).delayed, "a look for a universe")
        assert pool.kill() < 0
        ada.send(Write(2, universe="eu-1"))
        there.world(Office, "first").create()
        up("north")
        until(lambda: ada.state().answers == 2, "all receipts", timeout_s=60)
        up("eu-1")
        bob: WorldHandle[Office] = there.world(Office, "bob")
        until(lambda: len(bob.state().read) == 2, "all mail")
        assert sorted(bob.state().read) == [1, 2]

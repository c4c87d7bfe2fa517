"""`holdfast timers list | show | redrive`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.app.runtime import Runtime
from holdfast.clock import S
from holdfast.durable import due, queue
from holdfast.roles.firing import fire_due
from holdfast.roles.world_worker import WorldWorker
from holdfast.store.api import Store
from holdfast.world import catalog, timers
from tests.cli.conftest import Run
from tests.roles.shop import Buyer, Planned, Repeated, Slept, app

MODULES = ("holdfast.cli.timers", "holdfast.ops.pending")

DELAYS, CALENDAR = timers.delays("shop"), timers.calendar("shop")


@pytest.fixture
def shop(path: Path) -> Iterator[Store]:
    """Ada waits for three things, each of another kind; three that nobody could read have died."""
    with stores.open(path) as store:
        ada = Runtime(app, store, roles=()).world(Buyer, "ada")
        ada.send(Slept(3600, key="nap"))
        ada.send(Planned(4_000_000_000.0, key="party"))
        ada.send(Repeated("0 9 * * mon-fri", key="daily"))
        store.transact(catalog.assign, "shop", ada.record().world_id, "A")
        worker = WorldWorker(
            store, universe="shop", programs=app.programs, vocabulary=app, worker="A",
            incarnation="1",
        )  # fmt: skip
        while worker.tick():
            pass
        for name in (DELAYS, DELAYS, CALENDAR):
            store.transact(due.hang, name, b"nonsense", 1, 1)
        assert store.transact(fire_due, "shop", 2 * S, 10) == 3
        yield store


def test_list_shows_timers_of_both_clocks_by_their_time(run: Run, path: Path, shop: Store) -> None:
    told = run("timers", "list", "--store", path, "--json").document["timers"]
    assert {timer["key"]: timer["clock"] for timer in told} == {
        "nap": "store", "daily": "wall", "party": "wall",
    }  # fmt: skip
    assert [timer["due_ns"] for timer in told] == sorted(timer["due_ns"] for timer in told)
    assert told[-1]["due_ns"] == 4_000_000_000 * S
    header, *rows = run("timers", "list", "--store", path).out.splitlines()
    assert header.split() == ["due", "clock", "world", "key", "event", "every"]
    assert len(rows) == 3


def test_list_stops_at_its_limit(run: Run, path: Path, shop: Store) -> None:
    told = run("timers", "list", "--limit", 2, "--store", path, "--json").document["timers"]
    everything = run("timers", "list", "--store", path, "--json").document["timers"]
    assert told == everything[:2]


@pytest.mark.parametrize(("key", "clock"), [("nap", "store"), ("party", "wall"), ("daily", "wall")])
def test_show_tells_what_a_key_holds(
    run: Run, path: Path, shop: Store, key: str, clock: str
) -> None:
    told = run("timers", "show", "Buyer/ada", key, "--store", path, "--json").document
    assert (told["key"], told["clock"], told["event"]) == (key, clock, "Woken")
    assert told["cron"] == ("0 9 * * mon-fri" if key == "daily" else None)


def test_show_of_a_key_that_holds_nothing(run: Run, path: Path, shop: Store) -> None:
    assert run("timers", "show", "Buyer/ada", "none", "--store", path).error.startswith("not_found")


@pytest.mark.parametrize(("options", "name"), [([], DELAYS), (["--calendar"], CALENDAR)])
def test_redrive_puts_dead_ones_back(
    run: Run, path: Path, shop: Store, options: list[str], name: str
) -> None:
    dead = shop.read(queue.counts, name).dead
    assert dead == (2 if name == DELAYS else 1)
    told = run("timers", "redrive", "--all", *options, "--store", path, "--json").document
    assert (told["queue"], len(told["redriven"])) == (name, dead)
    assert shop.read(queue.counts, name).ready == dead
    shop.transact(fire_due, "shop", 2 * S, 10)
    assert shop.read(queue.counts, name).dead == dead, "they are still nonsense"


def test_redrive_chooses_by_number_and_by_error(run: Run, path: Path, shop: Store) -> None:
    [first, second] = shop.read(queue.dead, DELAYS)
    told = run("timers", "redrive", first.seq, "--store", path, "--json").document
    assert [one["dead"] for one in told["redriven"]] == [first.seq]
    told = run("timers", "redrive", "--code", second.code, "--dry-run", "--store", path, "--json")
    assert told.document["would_redrive"] == [second.seq]
    assert shop.read(queue.counts, DELAYS).dead == 1


def test_redrive_where_nothing_is_dead(run: Run, path: Path, shop: Store) -> None:
    run("timers", "redrive", "--all", "--store", path)
    assert run("timers", "redrive", "--all", "--store", path).out == "no dead timers\n"
    assert run("timers", "redrive", 7, "--store", path).error.startswith("not_found")
    assert run("timers", "redrive", "--store", path).code == 2
    ran = run("timers", "redrive", "--world", "Buyer/ada", "--store", path)
    assert ran.error.startswith("invalid")

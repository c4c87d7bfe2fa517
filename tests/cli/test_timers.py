"""`holdfast timers list | show | redrive`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.app.runtime import Runtime
from holdfast.clock import S
from holdfast.durable import delayed, queue
from holdfast.store.api import Store
from holdfast.workers.timers.delivery import deliver_due
from holdfast.workers.world.worker import WorldWorker
from holdfast.world import catalog, timers
from tests.cli.conftest import RunCommand
from tests.workers.shop import Buyer, Planned, Repeated, Slept, app

MODULES = ("holdfast.cli.timers", "holdfast.ops.pending_work")

DELAYS, CALENDAR = timers.delay_queue("shop"), timers.calendar_queue("shop")


@pytest.fixture
def shop(path: Path) -> Iterator[Store]:
    """Ada has a delay, a calendar and a recurring timer. Three undecodable timers are dead."""
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
            store.transact(delayed.schedule, name, b"nonsense", 1, 1)
        assert store.transact(deliver_due, "shop", 2 * S, 10) == 3
        yield store


def test_timers_list_sorts_timers_of_both_clocks_by_due_time(
    run: RunCommand, path: Path, shop: Store
) -> None:
    timers_listed = run("timers", "list", "--store", path, "--json").document["timers"]
    assert {timer["key"]: timer["clock"] for timer in timers_listed} == {
        "nap": "store", "daily": "wall", "party": "wall",
    }  # fmt: skip
    assert [timer["due_ns"] for timer in timers_listed] == sorted(
        timer["due_ns"] for timer in timers_listed
    )
    assert timers_listed[-1]["due_ns"] == 4_000_000_000 * S
    header, *rows = run("timers", "list", "--store", path).out.splitlines()
    assert header.split() == ["due", "clock", "world", "key", "event", "every"]
    assert len(rows) == 3


def test_timers_list_honours_the_limit(run: RunCommand, path: Path, shop: Store) -> None:
    first_two = run("timers", "list", "--limit", 2, "--store", path, "--json").document["timers"]
    everything = run("timers", "list", "--store", path, "--json").document["timers"]
    assert first_two == everything[:2]


@pytest.mark.parametrize(("key", "clock"), [("nap", "store"), ("party", "wall"), ("daily", "wall")])
def test_timers_show_prints_clock_event_and_cron(
    run: RunCommand, path: Path, shop: Store, key: str, clock: str
) -> None:
    document = run("timers", "show", "Buyer/ada", key, "--store", path, "--json").document
    assert (document["key"], document["clock"], document["event"]) == (key, clock, "Woken")
    assert document["cron"] == ("0 9 * * mon-fri" if key == "daily" else None)


def test_timers_show_of_an_unused_key_is_not_found(
    run: RunCommand, path: Path, shop: Store
) -> None:
    assert run("timers", "show", "Buyer/ada", "none", "--store", path).error.startswith("not_found")


@pytest.mark.parametrize(("options", "name"), [([], DELAYS), (["--calendar"], CALENDAR)])
def test_timers_redrive_returns_dead_timers_to_their_queue(
    run: RunCommand, path: Path, shop: Store, options: list[str], name: str
) -> None:
    dead = shop.read(queue.counts, name).dead
    assert dead == (2 if name == DELAYS else 1)
    document = run("timers", "redrive", "--all", *options, "--store", path, "--json").document
    assert (document["queue"], len(document["redriven"])) == (name, dead)
    assert shop.read(queue.counts, name).ready == dead
    shop.transact(deliver_due, "shop", 2 * S, 10)
    assert shop.read(queue.counts, name).dead == dead, "they are still nonsense"


def test_timers_redrive_selects_by_seq_and_by_code(
    run: RunCommand, path: Path, shop: Store
) -> None:
    [first, second] = shop.read(queue.list_dead, DELAYS)
    output = run("timers", "redrive", first.seq, "--store", path, "--json").document
    assert [redriven["dead"] for redriven in output["redriven"]] == [first.seq]
    output = run("timers", "redrive", "--code", second.code, "--dry-run", "--json", store=path)
    assert output.document["would_redrive"] == [second.seq]
    assert shop.read(queue.counts, DELAYS).dead == 1


def test_timers_redrive_without_dead_timers(run: RunCommand, path: Path, shop: Store) -> None:
    run("timers", "redrive", "--all", "--store", path)
    assert run("timers", "redrive", "--all", "--store", path).out == "no dead timers\n"
    assert run("timers", "redrive", 7, "--store", path).error.startswith("not_found")
    assert run("timers", "redrive", "--store", path).code == 2
    result = run("timers", "redrive", "--world", "Buyer/ada", "--store", path)
    assert result.error.startswith("invalid")

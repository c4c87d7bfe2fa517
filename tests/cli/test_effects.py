"""`holdfast effects list | show | redrive`, `timers list | show`, and `dead` for queues of effects."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.app.runtime import Runtime
from holdfast.durable import queue
from holdfast.roles.world_worker import WorldWorker
from holdfast.store.api import Store
from holdfast.world import catalog, publish
from tests.cli.conftest import Run
from tests.roles.shop import Buyer, Ordered, Repeated, Slept, app

PAY = publish.effects("shop", "pay")
INTENTS = 4


@pytest.fixture
def shop(path: Path) -> Iterator[Store]:
    """Four orders of ada: the first died of `down`, the second of `gone`; and two timers."""
    with stores.open(path) as store:
        runtime = Runtime(app, store, roles=())
        ada = runtime.world(Buyer, "ada")
        ada.send(Ordered(times=INTENTS, tag="t"))
        ada.send(Slept(3600, key="nap"))
        ada.send(Repeated("0 9 * * mon-fri", key="daily"))
        store.transact(catalog.assign, "shop", ada.record().world_id, "A")
        worker = WorldWorker(
            store, universe="shop", programs=app.programs, vocabulary=app, worker="A",
            incarnation="1",
        )  # fmt: skip
        while worker.tick():
            pass
        for claim, code in zip(
            store.transact(queue.claim, PAY, "pool", 2, 10**12), ("down", "gone"), strict=True
        ):
            store.transact(queue.bury, claim, code, f"it is {code}")
        yield store


def intents(store: Store) -> list[str]:
    ada = Runtime(app, store, roles=()).world(Buyer, "ada")
    return [found.hex() for found in ada.state().intents]


def test_list_counts_effects_by_kind(run: Run, path: Path, shop: Store) -> None:
    header, row = run("effects", "list", "--store", path).out.splitlines()
    assert header.split() == ["kind", "ready", "delayed", "claimed", "dead", "done"]
    assert row.split() == ["pay", "2", "0", "0", "2", "0"]
    assert run("effects", "list", "ship", "--store", path).out == "no effects\n"


def test_show_tells_where_an_intent_is(run: Run, path: Path, shop: Store) -> None:
    dead, *_, waiting = intents(shop)
    told = run("effects", "show", dead, "--store", path, "--json").document
    assert (told["state"], told["code"], told["world"]) == ("dead", "down", "Buyer/ada")
    assert (told["kind"], told["tag"]) == ("pay", "t")
    assert "ready" in run("effects", "show", waiting, "--store", path).out
    assert run("effects", "show", "00ff", "--store", path).error.startswith("not_found: ")
    assert run("effects", "show", "what", "--store", path).error.startswith("invalid: ")


def test_redrive_by_error_code_makes_new_intents(run: Run, path: Path, shop: Store) -> None:
    ran = run("effects", "redrive", "pay", "--code", "gone", "--store", path, "--json")
    [made] = ran.document["redriven"]
    assert made["intent"] not in intents(shop)
    told = run("effects", "show", made["intent"], "--store", path, "--json").document
    assert told["state"] == "ready"
    assert [letter.code for letter in shop.read(queue.dead, PAY)] == ["down"]


def test_dead_redrives_effects_as_new_intents_too(run: Run, path: Path, shop: Store) -> None:
    ran = run("dead", "redrive", PAY, "--all", "--rate", "1000", "--store", path, "--json")
    assert [made["dead"] for made in ran.document["redriven"]] == [1, 2]
    assert shop.read(queue.counts, PAY).dead == 0
    assert shop.read(queue.counts, PAY).ready == INTENTS
    assert run("dead", "list", PAY, "--store", path).out == f"no dead letters in {PAY}\n"


def test_redrive_keeps_its_rate(
    run: Run, path: Path, shop: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(
        "holdfast.clock.SystemClock.sleep", lambda _, seconds: slept.append(seconds)
    )
    run("effects", "redrive", "pay", "--all", "--rate", "0.5", "--store", path)
    assert slept == [2.0]
    wrong = run("effects", "redrive", "pay", "--all", "--rate", "0", "--store", path)
    assert wrong.error.startswith("invalid: ")


def test_redrive_of_what_is_not_there(run: Run, path: Path, shop: Store) -> None:
    for argv in (("pay", 99), ("nothing", "--all")):
        ran = run("effects", "redrive", *argv, "--store", path)
        assert ran.error.startswith("not_found: ")
    assert run("effects", "redrive", "pay", "--store", path).code == 2


def test_timers_are_listed_by_their_time_and_shown_by_key(
    run: Run, path: Path, shop: Store
) -> None:
    told = run("timers", "list", "--store", path, "--json").document["timers"]
    assert {timer["key"] for timer in told} == {"nap", "daily"}
    assert [timer["due_ns"] for timer in told] == sorted(timer["due_ns"] for timer in told)
    assert run("timers", "list", "--store", path).out.splitlines()[0].split() == [
        "due", "world", "key", "event", "every",
    ]  # fmt: skip
    shown = run("timers", "show", "Buyer/ada", "daily", "--store", path).out
    assert "0 9 * * mon-fri" in shown
    assert run("timers", "show", "Buyer/ada", "none", "--store", path).error.startswith("not_found")

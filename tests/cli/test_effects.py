"""`holdfast effects list | show | redrive`, `timers list | show`, and `dead` for queues of effects."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.app.runtime import Runtime
from holdfast.cli.output import time_text
from holdfast.durable import queue
from holdfast.roles.adapter import AdapterPool
from holdfast.roles.world_worker import WorldWorker
from holdfast.store.api import Store
from holdfast.world import catalog, publish
from tests.cli.conftest import Run, pause_by
from tests.roles.shop import Buyer, Ordered, Repeated, Slept, app
from tests.roles.towns import Office, Write, app_of

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


def test_show_lists_every_attempt(run: Run, path: Path, shop: Store) -> None:
    *_, waiting = intents(shop)
    shown = run("effects", "show", waiting, "--store", path, "--json").document
    assert shown["attempts"] == []
    for code in ("down", "gone"):
        [claim] = [
            claim
            for claim in shop.transact(queue.claim, PAY, f"pool-{code}", 2, 10**12)
            if claim.seq == shown["seq"]
        ]
        shop.transact(queue.fail, claim, code, f"it is {code}\nand more")
    shop.transact(queue.claim, PAY, "pool-now", 2, 10**12)
    told = run("effects", "show", waiting, "--store", path, "--json").document["attempts"]
    assert [(one["attempt"], one["owner"], one["end"], one["code"]) for one in told] == [
        (1, "pool-down", "failed", "down"),
        (2, "pool-gone", "failed", "gone"),
        (3, "pool-now", "under way", None),
    ]
    assert all(one["began_ns"] <= one["ended_ns"] for one in told[:2])
    text = run("effects", "show", waiting, "--store", path).out
    assert [line.split()[:4] for line in text.splitlines() if "failed" in line] == [
        [str(one["attempt"]), *time_text(one["began_ns"]).split(), time_text(one["ended_ns"])[:10]]
        for one in told[:2]
    ]
    assert "error\n    it is gone\n    and more" in text


def test_a_dead_effect_shows_the_attempt_it_died_of(run: Run, path: Path, shop: Store) -> None:
    [claim] = shop.transact(queue.claim, PAY, "pool", 1, 10**12)
    shop.transact(queue.fail, claim, "no", "never", False)
    dead = intents(shop)[claim.seq - 1]
    [told] = run("effects", "show", dead, "--store", path, "--json").document["attempts"]
    assert (told["attempt"], told["owner"], told["code"]) == (1, "pool", "no")
    shown = run("dead", "show", PAY, claim.seq, "--store", path, "--json").document
    assert shown["attempts"] == [told]
    assert "never" in run("dead", "show", PAY, claim.seq, "--store", path).out


def test_list_shows_the_intents_in_a_state(run: Run, path: Path, shop: Store) -> None:
    first, second, *waiting = intents(shop)
    ready = run("effects", "list", "pay", "--state", "ready", "--store", path, "--json").document
    assert [row["intent"] for row in ready["intents"]] == waiting
    dead = run("effects", "list", "pay", "--state", "dead", "--store", path, "--json").document
    assert [(row["intent"], row["code"]) for row in dead["intents"]] == [
        (first, "down"), (second, "gone"),
    ]  # fmt: skip
    shop.transact(queue.claim, PAY, "pool", 1, 10**12)
    text = run("effects", "list", "pay", "--state", "claimed", "--store", path).out
    assert waiting[0] in text
    assert "Buyer/ada" in text
    nothing = run("effects", "list", "pay", "--state", "delayed", "--store", path)
    assert nothing.out == "no pay is delayed\n"
    assert run("effects", "list", "--state", "dead", "--store", path).error.startswith("invalid: ")


def test_list_of_a_kind_shows_what_waits_and_why(run: Run, path: Path, shop: Store) -> None:
    *_, waiting, _ = intents(shop)
    [claim] = shop.transact(queue.claim, PAY, "pool", 1, 10**12)
    shop.transact(queue.fail, claim, "down", "down: no bank here\nat line 1", True, 10**12)
    [told] = run("effects", "list", "pay", "--store", path, "--json").document["waiting"]
    assert (told["intent"], told["world"], told["code"]) == (waiting, "Buyer/ada", "down")
    text = run("effects", "list", "pay", "--store", path).out
    [line] = [line for line in text.splitlines() if waiting in line]
    assert line.endswith("down: no bank here")
    assert waiting not in run("effects", "list", "--store", path).out


def test_mail_without_a_route_is_listed_with_its_reason(run: Run, path: Path) -> None:
    town = app_of("north")
    with stores.open(path) as store:
        ada = Runtime(town, store, roles=()).world(Office, "ada")
        ada.send(Write("bob", "hi", universe="atlantis"))
        store.transact(catalog.assign, "north", ada.record().world_id, "A")
        worker = WorldWorker(
            store, universe="north", programs=town.programs, vocabulary=town, worker="A",
            incarnation="1",
        )  # fmt: skip
        while worker.tick():
            pass
        pool = AdapterPool(store, universe="north", adapters={}, worker="P", inline=True)
        [sorter] = pool.runners
        sorter.boot()
        sorter.tick()
        [intent] = ada.state().sent
        text = run("effects", "list", "fabric.send", "--store", path).out
    [line] = [line for line in text.splitlines() if intent.hex() in line]
    assert "no_route: universe='atlantis'" in line


def test_lanes_are_listed_with_the_mail(run: Run, path: Path, shop: Store) -> None:
    for name in ("fabric.send", "fabric.send>east"):
        shop.transact(queue.put, publish.effects("shop", name), b"")
    told = run("effects", "list", "fabric.send", "--store", path, "--json").document["effects"]
    assert [row["kind"] for row in told] == ["fabric.send", "fabric.send>east"]


def test_a_redriven_effect_names_the_one_in_whose_place_it_is(
    run: Run, path: Path, shop: Store
) -> None:
    dead, *_ = intents(shop)
    [made] = run("effects", "redrive", "pay", 1, "--store", path, "--json").document["redriven"]
    told = run("effects", "show", made["intent"], "--store", path, "--json").document
    assert told["redrive_of"] == dead
    assert run("effects", "redrive", "pay", 1, "--store", path).error.startswith("not_found: ")
    assert run("effects", "show", dead, "--store", path).error.startswith("not_found: ")


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
    pause_by(monkeypatch, slept.append)
    run("effects", "redrive", "pay", "--all", "--rate", "0.5", "--store", path)
    assert slept == [pytest.approx(2.0, abs=0.9)], "one at once, the other two seconds later"
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
        "due", "clock", "world", "key", "event", "every",
    ]  # fmt: skip
    shown = run("timers", "show", "Buyer/ada", "daily", "--store", path).out
    assert "0 9 * * mon-fri" in shown
    assert run("timers", "show", "Buyer/ada", "none", "--store", path).error.startswith("not_found")

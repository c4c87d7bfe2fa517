"""`holdfast effects list | show | redrive`, `timers list | show`, and `dead` for queues of effects."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.app.runtime import Runtime
from holdfast.cli.output import time_text
from holdfast.durable import queue
from holdfast.store.api import Store
from holdfast.workers.effects.pool import EffectWorkerPool
from holdfast.workers.world.worker import WorldWorker
from holdfast.world import catalog
from holdfast.world import intents as world_intents
from tests.cli.conftest import RunCommand, replace_rate_limit_sleep
from tests.workers.shop import Buyer, GoodsOrdered, Repeated, Slept, app
from tests.workers.universe_rig import Office, Write, app_of

PAY = world_intents.effect_queue("shop", "pay")
INTENTS = 4


@pytest.fixture
def shop(path: Path) -> Iterator[Store]:
    """Four effects of ada and two timers. The first two effects are dead with codes `down` and `gone`."""
    with stores.open(path) as store:
        runtime = Runtime(app, store, roles=())
        ada = runtime.world(Buyer, "ada")
        ada.send(GoodsOrdered(times=INTENTS, tag="t"))
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
            store.transact(queue.dead_letter, claim, code, f"it is {code}")
        yield store


def intents(store: Store) -> list[str]:
    ada = Runtime(app, store, roles=()).world(Buyer, "ada")
    return [intent_hash.hex() for intent_hash in ada.state().intents]


def test_effects_list_prints_queue_counts_by_kind(run: RunCommand, path: Path, shop: Store) -> None:
    header, row = run("effects", "list", "--store", path).out.splitlines()
    assert header.split() == ["kind", "ready", "delayed", "claimed", "dead", "done"]
    assert row.split() == ["pay", "2", "0", "0", "2", "0"]
    assert run("effects", "list", "ship", "--store", path).out == "no effects\n"


def test_effects_are_listed_by_tag_in_pages(run: RunCommand, path: Path, shop: Store) -> None:
    listing = ("effects", "list", "--tag", "t", "--limit", 3, "--store", path)
    first = run(*listing, "--json").document
    rest = run(*listing, "--cursor", first["cursor"], "--json").document
    rows = first["intents"] + rest["intents"]
    assert sorted(row["intent"] for row in rows) == sorted(intents(shop))
    assert sorted(row["state"] for row in rows) == ["dead", "dead", "ready", "ready"]
    assert rest["cursor"] is None
    assert f"--cursor {first['cursor']}" in run(*listing).out
    dead = run(*listing, "--state", "dead", "--limit", 9, "--json").document["intents"]
    assert {row["code"] for row in dead} == {"down", "gone"}
    assert run("effects", "list", "--tag", "u", "--store", path).out == "no such effects\n"
    assert run("effects", "list", "pay", "--tag", "t", "--store", path).error.startswith("invalid")


def test_effects_show_prints_the_state_of_an_intent(
    run: RunCommand, path: Path, shop: Store
) -> None:
    dead, *_, waiting = intents(shop)
    document = run("effects", "show", dead, "--store", path, "--json").document
    assert (document["state"], document["code"], document["world"]) == ("dead", "down", "Buyer/ada")
    assert (document["kind"], document["tag"]) == ("pay", "t")
    assert "ready" in run("effects", "show", waiting, "--store", path).out
    assert run("effects", "show", "00ff", "--store", path).error.startswith("not_found: ")
    assert run("effects", "show", "what", "--store", path).error.startswith("invalid: ")


def test_effects_show_lists_every_attempt(run: RunCommand, path: Path, shop: Store) -> None:
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
    attempts = run("effects", "show", waiting, "--store", path, "--json").document["attempts"]
    assert [
        (attempt["attempt"], attempt["owner"], attempt["end"], attempt["code"])
        for attempt in attempts
    ] == [
        (1, "pool-down", "failed", "down"),
        (2, "pool-gone", "failed", "gone"),
        (3, "pool-now", "under way", None),
    ]
    assert all(attempt["began_ns"] <= attempt["ended_ns"] for attempt in attempts[:2])
    text = run("effects", "show", waiting, "--store", path).out
    assert [line.split()[:4] for line in text.splitlines() if "failed" in line] == [
        [
            str(attempt["attempt"]),
            *time_text(attempt["began_ns"]).split(),
            time_text(attempt["ended_ns"])[:10],
        ]
        for attempt in attempts[:2]
    ]
    assert "error\n    it is gone\n    and more" in text


def test_effects_show_and_dead_show_print_the_fatal_attempt(
    run: RunCommand, path: Path, shop: Store
) -> None:
    [claim] = shop.transact(queue.claim, PAY, "pool", 1, 10**12)
    shop.transact(queue.fail, claim, "no", "never", False)
    dead = intents(shop)[claim.seq - 1]
    [attempt] = run("effects", "show", dead, "--store", path, "--json").document["attempts"]
    assert (attempt["attempt"], attempt["owner"], attempt["code"]) == (1, "pool", "no")
    shown = run("dead", "show", PAY, claim.seq, "--store", path, "--json").document
    assert shown["attempts"] == [attempt]
    assert "never" in run("dead", "show", PAY, claim.seq, "--store", path).out


def test_effects_list_with_state_prints_intents(run: RunCommand, path: Path, shop: Store) -> None:
    first, second, *waiting = intents(shop)
    ready = run("effects", "list", "pay", "--state", "ready", "--json", store=path).document
    assert [row["intent"] for row in ready["intents"]] == waiting
    dead = run("effects", "list", "pay", "--state", "dead", "--json", store=path).document
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


def test_effects_list_of_a_kind_prints_waiting_intents_with_their_error(
    run: RunCommand, path: Path, shop: Store
) -> None:
    *_, waiting, _ = intents(shop)
    [claim] = shop.transact(queue.claim, PAY, "pool", 1, 10**12)
    shop.transact(queue.fail, claim, "down", "down: no bank here\nat line 1", True, 10**12)
    [waiting_intent] = run("effects", "list", "pay", "--store", path, "--json").document["waiting"]
    assert (waiting_intent["intent"], waiting_intent["world"], waiting_intent["code"]) == (
        waiting,
        "Buyer/ada",
        "down",
    )
    text = run("effects", "list", "pay", "--store", path).out
    [line] = [line for line in text.splitlines() if waiting in line]
    assert line.endswith("down: no bank here")
    assert waiting not in run("effects", "list", "--store", path).out


def test_effects_list_prints_no_route_for_unroutable_mail(run: RunCommand, path: Path) -> None:
    app = app_of("north")
    with stores.open(path) as store:
        ada = Runtime(app, store, roles=()).world(Office, "ada")
        ada.send(Write("bob", "hi", universe="atlantis"))
        store.transact(catalog.assign, "north", ada.record().world_id, "A")
        worker = WorldWorker(
            store, universe="north", programs=app.programs, vocabulary=app, worker="A",
            incarnation="1",
        )  # fmt: skip
        while worker.tick():
            pass
        pool = EffectWorkerPool(store, universe="north", adapters={}, worker="P", inline=True)
        [sorter] = pool.runners
        sorter.boot()
        sorter.tick()
        [intent] = ada.state().sent
        text = run("effects", "list", "fabric.send", "--store", path).out
    [line] = [line for line in text.splitlines() if intent.hex() in line]
    assert "no_route: universe='atlantis'" in line


def test_effects_list_includes_the_mail_queues_of_remote_universes(
    run: RunCommand, path: Path, shop: Store
) -> None:
    for name in ("fabric.send", "fabric.send>east"):
        shop.transact(queue.put, world_intents.effect_queue("shop", name), b"")
    rows = run("effects", "list", "fabric.send", "--store", path, "--json").document["effects"]
    assert [row["kind"] for row in rows] == ["fabric.send", "fabric.send>east"]


def test_effects_redrive_links_the_new_intent_to_the_old_one(
    run: RunCommand, path: Path, shop: Store
) -> None:
    dead, *_ = intents(shop)
    [redriven] = run("effects", "redrive", "pay", 1, "--store", path, "--json").document["redriven"]
    document = run("effects", "show", redriven["intent"], "--store", path, "--json").document
    assert document["redrive_of"] == dead
    assert run("effects", "redrive", "pay", 1, "--store", path).error.startswith("not_found: ")
    assert run("effects", "show", dead, "--store", path).error.startswith("not_found: ")


def test_effects_redrive_by_error_code_creates_new_intents(
    run: RunCommand, path: Path, shop: Store
) -> None:
    result = run("effects", "redrive", "pay", "--code", "gone", "--json", store=path)
    [redriven] = result.document["redriven"]
    assert redriven["intent"] not in intents(shop)
    document = run("effects", "show", redriven["intent"], "--store", path, "--json").document
    assert document["state"] == "ready"
    assert [letter.code for letter in shop.read(queue.list_dead, PAY)] == ["down"]


def test_dead_redrive_of_effects_creates_new_intents(
    run: RunCommand, path: Path, shop: Store
) -> None:
    result = run("dead", "redrive", PAY, "--all", "--rate", "1000", "--json", store=path)
    assert [redriven["dead"] for redriven in result.document["redriven"]] == [1, 2]
    assert shop.read(queue.counts, PAY).dead == 0
    assert shop.read(queue.counts, PAY).ready == INTENTS
    assert run("dead", "list", PAY, "--store", path).out == f"no dead letters in {PAY}\n"


def test_effects_redrive_honours_the_rate_option(
    run: RunCommand, path: Path, shop: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    replace_rate_limit_sleep(monkeypatch, slept.append)
    run("effects", "redrive", "pay", "--all", "--rate", "0.5", store=path)
    assert slept == [pytest.approx(2.0, abs=0.9)], "one at once, the other two seconds later"
    wrong = run("effects", "redrive", "pay", "--all", "--rate", "0", store=path)
    assert wrong.error.startswith("invalid: ")


def test_effects_redrive_of_unknown_letters_is_not_found(
    run: RunCommand, path: Path, shop: Store
) -> None:
    for argv in (("pay", 99), ("nothing", "--all")):
        result = run("effects", "redrive", *argv, "--store", path)
        assert result.error.startswith("not_found: ")
    assert run("effects", "redrive", "pay", "--store", path).code == 2


def test_timers_list_sorts_by_due_time_and_show_takes_a_key(
    run: RunCommand, path: Path, shop: Store
) -> None:
    timers = run("timers", "list", "--store", path, "--json").document["timers"]
    assert {timer["key"] for timer in timers} == {"nap", "daily"}
    assert [timer["due_ns"] for timer in timers] == sorted(timer["due_ns"] for timer in timers)
    assert run("timers", "list", "--store", path).out.splitlines()[0].split() == [
        "due", "clock", "world", "key", "event", "every",
    ]  # fmt: skip
    shown = run("timers", "show", "Buyer/ada", "daily", "--store", path).out
    assert "0 9 * * mon-fri" in shown
    assert run("timers", "show", "Buyer/ada", "none", "--store", path).error.startswith("not_found")

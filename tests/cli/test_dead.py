"""`holdfast dead list | show | redrive | drop`."""

from pathlib import Path

import pytest

from holdfast import codec
from holdfast.config import BLOB_THRESHOLD_BYTES
from holdfast.durable import queue
from holdfast.messages import event_ingress
from holdfast.ops.recount import recount
from holdfast.store import blobs
from holdfast.store.api import Store
from holdfast.world.redrive import Letter
from tests.cli.conftest import TTL_NS, Rig, Run
from tests.ops.app import Account, Refused

FAILED = "bank/failed-events"


def test_list_shows_code_and_first_line_of_the_error(
    run: Run, path: Path, letters: list[int]
) -> None:
    ran = run("dead", "list", "mail", "--store", path)
    assert ran.code == 0
    header, *rows = ran.out.splitlines()
    assert header.split() == ["seq", "code", "failures", "expiries", "died", "payload", "error"]
    assert [int(row.split()[0]) for row in rows] == letters
    assert all("no_such_user" in row and "at line 7" not in row for row in rows)


@pytest.mark.parametrize("size", [1, BLOB_THRESHOLD_BYTES + 1], ids=["small", "large"])
def test_a_failed_event_is_shown_with_its_type_key_and_world(
    run: Run, path: Path, rig: Rig, size: int
) -> None:
    """The letter holds the event as it was stored: bytes that say nothing to an operator."""
    ada = rig.runtime.world(Account, "ada")
    ada.send(Refused(), key="order-18")
    rig.work()
    # As the worker leaves it that gives an unknown event up.
    ingress = codec.pack(event_ingress("New", b"\x01" * size))
    for key in ("user:order-17", ""):
        letter = codec.pack(Letter(rig.world_id(), 9, ingress, key))
        rig.store.transact(queue.post_dead, FAILED, letter, "unknown_event", "nobody knew it")
    raised, keyed, plain = run("dead", "list", FAILED, "--store", path).out.splitlines()[1:]
    assert ("reducer_failed" in raised, "Refused key=order-18 of Account/ada" in raised) == (
        True,
        True,
    )
    assert ("unknown_event" in keyed, "New key=order-17 of Account/ada" in keyed) == (True, True)
    assert ("New of Account/ada" in plain, "key=" in plain) == (True, False)
    letters = run("dead", "list", FAILED, "--store", path, "--json").document["letters"]
    world = {"world_id": rig.world_id(), "world": "Account/ada"}
    assert letters[1]["event"] == {
        "kind": "event",
        "type": "New",
        "key": "order-17",
        "seq": 9,
        **world,
    }
    assert letters[2]["event"]["key"] is None
    shown = run("dead", "show", FAILED, letters[1]["seq"], "--store", path)
    told = [line.split(None, 1) for line in shown.out.splitlines()]
    for pair in (["event", "New"], ["key", "order-17"], ["world", "Account/ada"]):
        assert pair in told
    document = run("dead", "show", FAILED, letters[1]["seq"], "--store", path, "--json").document
    assert document["event"] == letters[1]["event"]


def test_a_letter_that_is_none_is_shown_by_its_bytes(run: Run, path: Path, rig: Rig) -> None:
    rig.store.transact(queue.post_dead, FAILED, b"no letter", "unknown_event", "planted")
    assert "no letter" in run("dead", "list", FAILED, "--store", path).out
    [letter] = run("dead", "list", FAILED, "--store", path, "--json").document["letters"]
    assert "event" not in letter


def test_a_letter_of_another_queue_has_no_event(run: Run, path: Path, letters: list[int]) -> None:
    document = run("dead", "list", "mail", "--store", path, "--json").document
    assert "event" not in document["letters"][0]


def test_stored_data_cannot_draw_on_the_screen(run: Run, path: Path, letters: list[int]) -> None:
    assert "\x1b" not in run("dead", "list", "mail", "--store", path).out
    assert "\x1b" not in run("dead", "show", "mail", letters[2], "--store", path).out


def test_list_in_pages(run: Run, path: Path, letters: list[int]) -> None:
    ran = run("dead", "list", "mail", "--limit", 2, "--store", path)
    assert f"2 of 3; more with --after {letters[1]}" in ran.out
    rest = run("dead", "list", "mail", "--after", letters[1], "--json", "--store", path).document
    assert [letter["seq"] for letter in rest["letters"]] == letters[2:]


def test_an_empty_list_says_so(run: Run, path: Path, letters: list[int]) -> None:
    assert run("dead", "list", "other", "--store", path).out == "no dead letters in other\n"


def test_show_tells_everything(run: Run, path: Path, letters: list[int]) -> None:
    ran = run("dead", "show", "mail", letters[0], "--store", path)
    assert "    ValueError: 1\n      at line 7" in ran.out
    assert f"holdfast dead redrive mail {letters[0]}" in ran.out
    told = run("dead", "show", "mail", letters[0], "--store", path, "--json").document
    assert told["payload"] == {"encoding": "utf-8", "data": "first"}
    assert (told["seq"], told["code"], told["owner"]) == (letters[0], "no_such_user", "worker")


def test_show_fetches_a_large_payload(run: Run, path: Path, store: Store) -> None:
    payload = b"\xff" * (BLOB_THRESHOLD_BYTES + 1)
    seq = store.transact(queue.put, "large", payload)
    [claim] = store.transact(queue.claim, "large", "worker", 1, TTL_NS)
    store.transact(queue.bury, claim, "bad", "bad")
    told = run("dead", "show", "large", seq, "--store", path, "--json").document
    assert told["payload"]["encoding"] == "base64"
    assert len(told["payload"]["data"]) > BLOB_THRESHOLD_BYTES
    assert "(large)" in run("dead", "list", "large", "--store", path).out


@pytest.mark.parametrize("seq", [0, 4, 99])
def test_what_is_not_dead_is_not_found(run: Run, path: Path, letters: list[int], seq: int) -> None:
    ran = run("dead", "show", "mail", seq, "--store", path)
    assert ran.code == 1
    assert ran.error.startswith("not_found: what='dead letter'")


def test_redrive_makes_new_items(run: Run, path: Path, store: Store, letters: list[int]) -> None:
    told = run("dead", "redrive", "mail", letters[1], "--store", path, "--json").document
    assert told["redriven"] == [{"dead": letters[1], "item": 5}]
    counts = store.read(queue.counts, "mail")
    assert (counts.ready, counts.dead) == (2, 2)


def test_redrive_all(run: Run, path: Path, store: Store, letters: list[int]) -> None:
    ran = run("dead", "redrive", "mail", "--all", "--store", path)
    assert ran.out.splitlines() == ["1 → 5", "2 → 6", "3 → 7"]
    assert store.read(queue.counts, "mail").dead == 0
    again = run("dead", "redrive", "mail", "--all", "--store", path)
    assert (again.code, again.out) == (0, "no dead letters in mail\n")


def test_redrive_is_all_or_none(run: Run, path: Path, store: Store, letters: list[int]) -> None:
    assert run("dead", "redrive", "mail", letters[0], 99, "--store", path).code == 1
    assert store.read(queue.counts, "mail").dead == 3


def test_redrive_needs_to_know_which(run: Run, path: Path, letters: list[int]) -> None:
    assert run("dead", "redrive", "mail", "--store", path).code == 2
    assert run("dead", "redrive", "mail", letters[0], "--all", "--store", path).code == 2


def test_dropped_letters_are_gone_and_others_stay(
    run: Run, path: Path, letters: list[int], store: Store
) -> None:
    dry = run("dead", "drop", "mail", letters[0], "--dry-run", "--store", path, "--json").document
    assert dry == {"queue": "mail", "would_drop": letters[:1]}
    assert store.read(queue.counts, "mail").dead == 3
    ran = run("dead", "drop", "mail", letters[0], letters[2], "--store", path, "--json")
    assert ran.document["dropped"] == [letters[0], letters[2]]
    assert [one.seq for one in store.read(queue.dead, "mail")] == [letters[1]]
    assert store.read(queue.counts, "mail").dead == 1
    assert store.read(recount) == []


def test_letters_to_drop_are_named_or_chosen_never_all_by_mistake(
    run: Run, path: Path, letters: list[int], store: Store
) -> None:
    assert run("dead", "drop", "mail", "--store", path).code == 2
    assert run("dead", "drop", "mail", letters[0], 99, "--store", path).error.startswith(
        "not_found"
    )
    assert len(store.read(queue.dead, "mail")) == 3
    assert run("dead", "drop", "mail", "--code", "other", "--store", path).code == 0
    assert len(store.read(queue.dead, "mail")) == 3
    assert run("dead", "drop", "mail", "--all", "--store", path).out.count("is gone") == 3
    assert store.read(queue.dead, "mail") == []


def test_a_dropped_letter_takes_its_blob_along(run: Run, path: Path, store: Store) -> None:
    seq = store.transact(queue.put, "large", b"\xff" * (BLOB_THRESHOLD_BYTES + 1))
    [claim] = store.transact(queue.claim, "large", "worker", 1, TTL_NS)
    store.transact(queue.bury, claim, "bad", "bad")
    assert run("dead", "drop", "large", seq, "--store", path).code == 0
    assert store.transact(blobs.collect, 0, 100) == 1

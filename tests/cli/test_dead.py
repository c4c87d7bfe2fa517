"""`holdfast dead list | show | redrive | drop`."""

from pathlib import Path

import pytest

from holdfast import codec
from holdfast.config import BLOB_THRESHOLD_BYTES
from holdfast.durable import queue
from holdfast.messages import event_ingress
from holdfast.ops import audit
from holdfast.ops.verify import find_differences
from holdfast.store import blobs
from holdfast.store.api import Store
from holdfast.world.redrive import FailedEventRow
from tests.cli.conftest import TTL_NS, AccountRig, RunCommand
from tests.ops.app import QuotedAccount, Refused

FAILED_EVENTS = "bank/failed-events"


def test_dead_list_prints_code_and_first_line_of_the_error(
    run: RunCommand, path: Path, letters: list[int]
) -> None:
    result = run("dead", "list", "mail", "--store", path)
    assert result.code == 0
    header, *rows = result.out.splitlines()
    assert header.split() == ["seq", "code", "failures", "expiries", "died", "payload", "error"]
    assert [int(row.split()[0]) for row in rows] == letters
    assert all("no_such_user" in row and "at line 7" not in row for row in rows)


@pytest.mark.parametrize("size", [1, BLOB_THRESHOLD_BYTES + 1], ids=["small", "large"])
def test_dead_list_and_show_decode_a_failed_event_with_type_key_and_world(
    run: RunCommand, path: Path, rig: AccountRig, size: int
) -> None:
    """The dead letter holds the encoded event. The commands print the decoded fields."""
    ada = rig.runtime.world(QuotedAccount, "ada")
    ada.send(Refused(), key="order-18")
    rig.run_worker()
    # The letter that a worker posts for an unknown event after its wait limit.
    ingress = codec.pack(event_ingress("New", b"\x01" * size))
    for key in ("user:order-17", ""):
        letter = codec.pack(FailedEventRow(rig.world_id(), 9, ingress, key))
        rig.store.transact(
            queue.add_dead_letter, FAILED_EVENTS, letter, "unknown_event", "nobody knew it"
        )
    raised, with_key, without_key = run(
        "dead", "list", FAILED_EVENTS, "--store", path
    ).out.splitlines()[1:]
    assert ("reducer_failed" in raised, "Refused key=order-18 of QuotedAccount/ada" in raised) == (
        True,
        True,
    )
    assert ("unknown_event" in with_key, "New key=order-17 of QuotedAccount/ada" in with_key) == (
        True,
        True,
    )
    assert ("New of QuotedAccount/ada" in without_key, "key=" in without_key) == (True, False)
    letters = run("dead", "list", FAILED_EVENTS, "--store", path, "--json").document["letters"]
    world = {"world_id": rig.world_id(), "world": "QuotedAccount/ada"}
    assert letters[1]["event"] == {
        "kind": "event",
        "type": "New",
        "key": "order-17",
        "seq": 9,
        **world,
    }
    assert letters[2]["event"]["key"] is None
    shown = run("dead", "show", FAILED_EVENTS, letters[1]["seq"], "--store", path)
    fields = [line.split(None, 1) for line in shown.out.splitlines()]
    for pair in (["event", "New"], ["key", "order-17"], ["world", "QuotedAccount/ada"]):
        assert pair in fields
    document = run(
        "dead", "show", FAILED_EVENTS, letters[1]["seq"], "--store", path, "--json"
    ).document
    assert document["event"] == letters[1]["event"]


def test_dead_list_prints_the_bytes_of_an_undecodable_failed_event(
    run: RunCommand, path: Path, rig: AccountRig
) -> None:
    rig.store.transact(
        queue.add_dead_letter, FAILED_EVENTS, b"no letter", "unknown_event", "planted"
    )
    assert "no letter" in run("dead", "list", FAILED_EVENTS, "--store", path).out
    [letter] = run("dead", "list", FAILED_EVENTS, "--store", path, "--json").document["letters"]
    assert "event" not in letter


def test_dead_list_of_a_plain_queue_has_no_event_field(
    run: RunCommand, path: Path, letters: list[int]
) -> None:
    document = run("dead", "list", "mail", "--store", path, "--json").document
    assert "event" not in document["letters"][0]


def test_dead_list_and_show_escape_control_characters(
    run: RunCommand, path: Path, letters: list[int]
) -> None:
    assert "\x1b" not in run("dead", "list", "mail", "--store", path).out
    assert "\x1b" not in run("dead", "show", "mail", letters[2], "--store", path).out


def test_dead_list_is_paged_by_limit_and_after(
    run: RunCommand, path: Path, letters: list[int]
) -> None:
    result = run("dead", "list", "mail", "--limit", 2, "--store", path)
    assert f"2 of 3; more with --after {letters[1]}" in result.out
    rest = run("dead", "list", "mail", "--after", letters[1], "--json", store=path).document
    assert [letter["seq"] for letter in rest["letters"]] == letters[2:]


def test_dead_list_of_an_empty_queue_prints_no_dead_letters(
    run: RunCommand, path: Path, letters: list[int]
) -> None:
    assert run("dead", "list", "other", "--store", path).out == "no dead letters in other\n"


def test_dead_show_prints_the_whole_letter_and_the_redrive_command(
    run: RunCommand, path: Path, letters: list[int]
) -> None:
    result = run("dead", "show", "mail", letters[0], "--store", path)
    assert "    ValueError: 1\n      at line 7" in result.out
    assert f"holdfast dead redrive mail {letters[0]}" in result.out
    document = run("dead", "show", "mail", letters[0], "--store", path, "--json").document
    assert document["payload"] == {"encoding": "utf-8", "data": "first"}
    assert (document["seq"], document["code"], document["owner"]) == (
        letters[0],
        "no_such_user",
        "worker",
    )


def test_dead_show_loads_a_payload_stored_as_a_blob(
    run: RunCommand, path: Path, store: Store
) -> None:
    payload = b"\xff" * (BLOB_THRESHOLD_BYTES + 1)
    seq = store.transact(queue.put, "large", payload)
    [claim] = store.transact(queue.claim, "large", "worker", 1, TTL_NS)
    store.transact(queue.dead_letter, claim, "bad", "bad")
    document = run("dead", "show", "large", seq, "--store", path, "--json").document
    assert document["payload"]["encoding"] == "base64"
    assert len(document["payload"]["data"]) > BLOB_THRESHOLD_BYTES
    assert "(large)" in run("dead", "list", "large", "--store", path).out


@pytest.mark.parametrize("seq", [0, 4, 99])
def test_dead_show_of_an_item_that_is_not_dead_is_not_found(
    run: RunCommand, path: Path, letters: list[int], seq: int
) -> None:
    result = run("dead", "show", "mail", seq, "--store", path)
    assert result.code == 1
    assert result.error.startswith("not_found: what='dead letter'")


def test_dead_redrive_creates_new_items(
    run: RunCommand, path: Path, store: Store, letters: list[int]
) -> None:
    document = run("dead", "redrive", "mail", letters[1], "--store", path, "--json").document
    assert document["redriven"] == [{"dead": letters[1], "item": 5}]
    counts = store.read(queue.counts, "mail")
    assert (counts.ready, counts.dead) == (2, 2)


def test_dead_redrive_all(run: RunCommand, path: Path, store: Store, letters: list[int]) -> None:
    result = run("dead", "redrive", "mail", "--all", "--store", path)
    assert result.out.splitlines() == ["1 → 5", "2 → 6", "3 → 7"]
    assert store.read(queue.counts, "mail").dead == 0
    again = run("dead", "redrive", "mail", "--all", "--store", path)
    assert (again.code, again.out) == (0, "no dead letters in mail\n")


def test_dead_redrive_with_an_unknown_seq_redrives_nothing(
    run: RunCommand, path: Path, store: Store, letters: list[int]
) -> None:
    assert run("dead", "redrive", "mail", letters[0], 99, "--store", path).code == 1
    assert store.read(queue.counts, "mail").dead == 3


def test_dead_redrive_requires_seqs_or_all_but_not_both(
    run: RunCommand, path: Path, letters: list[int]
) -> None:
    assert run("dead", "redrive", "mail", "--store", path).code == 2
    assert run("dead", "redrive", "mail", letters[0], "--all", "--store", path).code == 2


def test_dead_drop_deletes_only_the_named_letters(
    run: RunCommand, path: Path, letters: list[int], store: Store
) -> None:
    dry = run("dead", "drop", "mail", letters[0], "--dry-run", "--json", store=path).document
    assert dry == {"queue": "mail", "would_drop": letters[:1]}
    assert store.read(queue.counts, "mail").dead == 3
    result = run("dead", "drop", "mail", letters[0], letters[2], "--json", store=path)
    assert result.document["dropped"] == [letters[0], letters[2]]
    assert [letter.seq for letter in store.read(queue.list_dead, "mail")] == [letters[1]]
    assert store.read(queue.counts, "mail").dead == 1
    assert store.read(find_differences) == []


def test_dead_drop_requires_seqs_a_filter_or_all(
    run: RunCommand, path: Path, letters: list[int], store: Store
) -> None:
    assert run("dead", "drop", "mail", "--store", path).code == 2
    assert run("dead", "drop", "mail", letters[0], 99, "--store", path).error.startswith(
        "not_found"
    )
    assert len(store.read(queue.list_dead, "mail")) == 3
    assert run("dead", "drop", "mail", "--code", "other", "--store", path).code == 0
    assert len(store.read(queue.list_dead, "mail")) == 3
    assert run("dead", "drop", "mail", "--all", "--store", path).out.count("dropped") == 3
    assert store.read(queue.list_dead, "mail") == []


def test_dead_drop_releases_the_blob_of_the_letter(
    run: RunCommand, path: Path, store: Store
) -> None:
    seq = store.transact(queue.put, "large", b"\xff" * (BLOB_THRESHOLD_BYTES + 1))
    [claim] = store.transact(queue.claim, "large", "worker", 1, TTL_NS)
    store.transact(queue.dead_letter, claim, "bad", "bad")
    assert run("dead", "drop", "large", seq, "--store", path).code == 0
    assert store.transact(blobs.collect, 0, 100) == 1


def test_dead_drop_is_audited_in_its_commit(run: RunCommand, path: Path, store: Store) -> None:
    name = "bank/effects/pay"
    seqs = [store.transact(queue.add_dead_letter, name, b"x", "broken", "why") for _ in range(3)]
    assert run("dead", "drop", name, 99, "--store", path).code == 1
    assert store.read(audit.list_entries, "bank") == []
    assert run("dead", "drop", name, *seqs[:2], "--store", path).code == 0
    [entry] = [numbered.entry for numbered in store.read(audit.list_entries, "bank")]
    assert (entry.action, entry.subject) == ("dead.drop", f"queue/{name}")
    assert entry.detail == f"2 dead letters from {seqs[0]} to {seqs[1]}"
    assert [letter.seq for letter in store.read(queue.list_dead, name)] == seqs[2:]

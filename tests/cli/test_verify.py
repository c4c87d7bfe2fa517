"""`holdfast verify`: a sound store is sound, and a difference of each kind is found and named."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast import codec
from holdfast.authority import authority
from holdfast.clock import S
from holdfast.durable import item, journal, queue, snapshot
from holdfast.durable import lease as leases
from holdfast.ops import recount
from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.store.schema import Space
from holdfast.world.catalog import Status, subject_of
from tests.cli.conftest import Run
from tests.ops.app import Asked, Booked, Deposited, Grouped, Ledger, Refused, Sorted
from tests.ops.rig import UNIVERSE, WORKER, Rig, plant

APP = "tests.ops.app:app"
ONE = ("--jobs", "1")
SHARED = "103 worlds, 106 steps replayed, states compared for 106 entries: sound\n"


WORDS = [f"word-{n}" for n in range(40)]


@pytest.fixture
def busy(rig: Rig) -> Rig:
    """Worlds, a fork, dead letters, items in every state, held leases, a leader, unread mail."""
    rig.account().send(Asked("EUR"))
    rig.account().send(Refused())
    rig.work()
    rig.account().fork("child", at=2)
    rig.account("bob").send(Deposited(1))
    rig.account("gone").create()
    rig.account("gone").delete()
    store = rig.store
    store.transact(queue.put_many, "mail", [b"first", b"second", b"third"])
    store.transact(queue.put, "mail", b"later", 0, store.now_ns() + 3600 * S)
    store.transact(queue.claim, "mail", "clerk", 1, 3600 * S)
    store.transact(leases.acquire, "shop", "clerk", "1", 3600 * S)
    store.transact(authority.acquire, UNIVERSE, "leader", "1", 3600 * S)
    return rig


def test_a_sound_store(run: Run, path: Path, busy: Rig) -> None:
    ran = run("verify", "--store", path, *ONE)
    assert (ran.code, ran.out) == (0, "3 worlds: sound\n")


def test_a_replay_of_every_journal_by_the_code_that_wrote_it(
    run: Run, path: Path, busy: Rig
) -> None:
    told = run("verify", "--app", APP, "--store", path, *ONE, "--json")
    assert told.code == 0
    # Five of ada, of which the child repeats none: it starts from a snapshot.
    assert told.document == {
        "sound": True, "worlds": 3, "steps": 5, "compared": 5, "not_compared": 0,
        "findings": [], "differences": [],
    }  # fmt: skip


def test_processes_share_the_worlds(run: Run, path: Path, busy: Rig) -> None:
    for n in range(100):
        busy.account(f"more-{n}").send(Deposited(n))
    busy.work()
    ran = run("verify", "--app", APP, "--store", path, "--jobs", "2")
    assert (ran.code, ran.out) == (0, SHARED)
    changed = run("verify", "--app", "tests.ops.app:app_richer", "--store", path, "--jobs", "2")
    assert changed.code == 1
    *lines, verdict = changed.out.splitlines()
    assert verdict == (
        "103 worlds, 0 steps replayed, states compared for 0 entries: 102 worlds and 0 rows differ"
    )
    assert len(lines) == 101, "a hundred are shown, and how many more there are"


@pytest.mark.parametrize(
    ("app", "height", "what"),
    [("app_richer", 3, "what=state"), ("app_silent", 1, "what=reply"), ("app_other", 0, "unknown")],
)
def test_code_that_does_otherwise_is_named_with_the_first_height(
    run: Run, path: Path, busy: Rig, app: str, height: int, what: str
) -> None:
    told = run("verify", "--app", f"tests.ops.app:{app}", "--store", path, *ONE, "--json")
    assert told.code == 1
    [finding] = [one for one in told.document["findings"] if one["world"] == "Account/ada"]
    assert finding["height"] == height
    assert what in finding["text"]


def test_an_emission_that_is_missing_is_named(run: Run, path: Path, rig: Rig) -> None:
    rig.account("eve").send(Asked("EUR"))
    rig.work()
    ran = run("verify", "--app", "tests.ops.app:app_silent", "--store", path, *ONE)
    assert ran.code == 1
    assert "bank/Account/eve at height 1: replay_diverged: what=emitted" in ran.out


def test_a_reducer_that_ends_its_process_is_blamed_and_the_others_are_checked(
    run: Run, path: Path, busy: Rig
) -> None:
    busy.work()
    ran = run("verify", "--app", "tests.ops.app:app_deadly", "--store", path, *ONE)
    assert ran.code == 1
    assert ran.out.splitlines() == [
        "bank/Account/ada: verifier_lost: replaying it ended the process",
        "3 worlds, 1 step replayed, states compared for 1 entry: 1 world and 0 rows differ",
    ]


# -- states --------------------------------------------------------------------------------------


def test_a_reducer_that_does_neither_reply_nor_emit_is_compared_by_its_state(
    run: Run, path: Path, rig: Rig
) -> None:
    silent = rig.runtime.world(Ledger, "l")
    for _ in range(10):
        silent.send(Booked(100))
    rig.work()
    sound = run("verify", "--app", APP, "--store", path, *ONE)
    assert sound.out.endswith(" 13 steps replayed, states compared for 13 entries: sound\n")
    ran = run("verify", "--app", "tests.ops.app:app_richer", "--store", path, *ONE)
    assert ran.code == 1
    assert "bank/Ledger/l at height 10: replay_diverged: what=state why=digest" in ran.out


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_reducer_that_depends_on_the_order_of_a_set_is_found(
    run: Run, path: Path, rig: Rig, jobs: str
) -> None:
    rig.runtime.world(Ledger, "l").send(Sorted(WORDS))
    rig.work()
    told = run("verify", "--app", APP, "--store", path, "--jobs", jobs, "--json")
    assert told.code == 1
    [finding] = told.document["findings"]
    assert (finding["code"], finding["height"]) == ("replay_diverged", 1)


def test_sets_within_a_set_are_the_same_state_under_both_hash_seeds(
    run: Run, path: Path, rig: Rig
) -> None:
    grouped = rig.runtime.world(Ledger, "l")
    grouped.send(Grouped(WORDS))
    rig.work()
    assert grouped.state().groups
    ran = run("verify", "--app", APP, "--store", path, *ONE)
    assert (ran.code, ran.out.endswith(": sound\n")) == (0, True)


def _as_before(txn: Txn, subject: str) -> None:
    """The journal as it was written before there were digests, and no snapshot."""
    bodies = [one.body for one in journal.read(txn, subject, 1, 100, 100)]
    for space in (Space.JOURNAL, Space.SNAPSHOT):
        prefix = schema.prefix(space, subject)
        for key, _ in txn.scan(prefix, tuples.after(prefix), 1000):
            txn.delete(key)
    journal.append(txn, subject, [codec.pack(codec.unpack(body)[:-2]) for body in bodies])


def test_entries_from_before_there_were_digests_are_counted_as_not_compared(
    run: Run, path: Path, rig: Rig
) -> None:
    silent = rig.runtime.world(Ledger, "l")
    for _ in range(3):
        silent.send(Booked(100))
    rig.work()
    rig.store.transact(_as_before, subject_of(UNIVERSE, silent.create()))
    silent.send(Booked(100))
    rig.work()
    ran = run("verify", "--app", APP, "--store", path, *ONE)
    told = "7 steps replayed, states compared for 4 entries, 3 without a digest: sound\n"
    assert ran.out.endswith(told)
    document = run("verify", "--app", APP, "--store", path, *ONE, "--json").document
    assert (document["steps"], document["compared"], document["not_compared"]) == (7, 4, 3)


def test_two_replays_find_the_order_of_a_set_where_no_digest_tells(
    run: Run, path: Path, rig: Rig
) -> None:
    silent = rig.runtime.world(Ledger, "l")
    silent.send(Sorted(WORDS))
    rig.work()
    rig.store.transact(_as_before, subject_of(UNIVERSE, silent.create()))
    ran = run("verify", "--app", APP, "--store", path, *ONE)
    assert ran.code == 1
    told = "why=two replays end in different states (PYTHONHASHSEED=2)"
    assert f"bank/Ledger/l at height 1: replay_diverged: what=state {told}" in ran.out


def test_the_hash_seeds_of_verify_leave_the_environment_as_it_was(
    run: Run, path: Path, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("77", None):
        if value is None:
            monkeypatch.delenv("PYTHONHASHSEED")
        else:
            monkeypatch.setenv("PYTHONHASHSEED", value)
        assert run("verify", "--app", APP, "--store", path, *ONE).code == 0
        assert os.environ.get("PYTHONHASHSEED") == value


# -- planted -------------------------------------------------------------------------------------


def _change_entry(rig: Rig) -> None:
    subject = subject_of(UNIVERSE, rig.world_id())
    key = (int(Space.JOURNAL), subject, "e", 2)
    row = rig.store.read(lambda txn: txn.get(key))
    kept = codec.unpack_as(journal.Kept, row)
    plant(rig.store, key, codec.pack(journal.Kept(kept.hash, kept.at_ns, kept.body + b"!")))


def _lose_entry(rig: Rig) -> None:
    plant(rig.store, (int(Space.JOURNAL), subject_of(UNIVERSE, rig.world_id()), "e", 2), None)


def _change_snapshot(rig: Rig) -> None:
    subject = subject_of(UNIVERSE, rig.world_id())
    height = rig.store.read(snapshot.heights, subject, 1)[0]
    key = (int(Space.SNAPSHOT), subject, "s", height)
    row = rig.store.read(lambda txn: txn.get(key))
    saved = codec.unpack_as(snapshot.Saved, row)
    wrong = snapshot.Saved(saved.hash, saved.at_ns, saved.size_bytes, b"\x80")
    plant(rig.store, key, codec.pack(wrong))


def _count_queue(rig: Rig) -> None:
    plant(rig.store, (int(Space.QUEUE), "mail", "n"), codec.pack(item.Counts(3, 1, 1, 0, 0)))


def _count_done(rig: Rig) -> None:
    plant(rig.store, (int(Space.QUEUE), "mail", "n"), codec.pack(item.Counts(2, 1, 1, 0, 7)))


def _lose_ready(rig: Rig) -> None:
    prefix = item.keys_of("mail").ready
    rows = rig.store.read(lambda txn: txn.scan(prefix, tuples.after(prefix)))
    [key] = [key for key, packed_seq in rows if item.seq_of(packed_seq) == 2]
    rig.store.transact(lambda txn: txn.delete(key))


def _lose_item(rig: Rig) -> None:
    plant(rig.store, (int(Space.QUEUE), "mail", "i", 2), None)


def _lose_owner(rig: Rig) -> None:
    plant(rig.store, (int(Space.QUEUE), "mail", "o", "clerk", 1), None)


def _lose_dead_by_time(rig: Rig) -> None:
    prefix = item.keys_of(f"{UNIVERSE}/failed-events").died
    [(key, _)] = rig.store.read(lambda txn: txn.scan(prefix, tuples.after(prefix)))
    rig.store.transact(lambda txn: txn.delete(key))


def _count_worlds(rig: Rig) -> None:
    plant(rig.store, (int(Space.WORLD), UNIVERSE, "c", "active"), schema.int_bytes(9))


def _lose_name(rig: Rig) -> None:
    plant(rig.store, (int(Space.WORLD), UNIVERSE, "n", "Account", "ada"), None)


def _name_nothing(rig: Rig) -> None:
    plant(rig.store, (int(Space.WORLD), UNIVERSE, "n", "Account", "ghost"), b"0" * 32)


def _lose_index_of_worker(rig: Rig) -> None:
    plant(rig.store, (int(Space.WORLD), UNIVERSE, "b", WORKER, rig.world_id()), None)


def _index_under_another(rig: Rig) -> None:
    plant(rig.store, (int(Space.WORLD), UNIVERSE, "b", "stranger", rig.world_id()), b"")


def _lose_hint(rig: Rig) -> None:
    plant(rig.store, (int(Space.READY), UNIVERSE, "", 0, rig.world_id("bob")), None)


def _lose_ingress(rig: Rig) -> None:
    plant(rig.store, (int(Space.INBOX), subject_of(UNIVERSE, rig.world_id("bob")), "e", 1), None)


def _lose_index_of_lease(rig: Rig) -> None:
    plant(rig.store, (int(Space.LEASE), "by", "clerk", "shop"), None)


def _index_lease_under_another(rig: Rig) -> None:
    plant(rig.store, (int(Space.LEASE), "by", "stranger", "shop"), b"")


def _change_fence(rig: Rig) -> None:
    fence = leases.Fence(leases.State.HELD, "clerk", "1", 1, 9)
    plant(rig.store, (int(Space.LEASE), "fence", "shop"), codec.pack(fence))


def _change_authority(rig: Rig) -> None:
    plant(
        rig.store, (int(Space.LEASE), "expiry", authority.resource(UNIVERSE)), schema.int_bytes(7)
    )


@pytest.mark.parametrize(
    ("planted", "line"),
    [
        (_change_entry, "bank/Account/ada at height 2: store_corrupt: why=the chain is broken"),
        (_lose_entry, "bank/Account/ada at height 2: store_corrupt: why=the entry is missing"),
        (_change_snapshot, "store_corrupt: why=the snapshot was changed"),
        (_count_queue, "queue mail: counter ready: found 3, expected 2"),
        (_count_done, "queue mail: counter done: found 7, expected 4 items in all"),
        (_lose_ready, "queue mail: item 2 is indexed: found nowhere, expected one index"),
        (_lose_item, "queue mail: indexed items: found 4, expected 3"),
        (_lose_owner, "queue mail: claims by owner: found 0, expected 1"),
        (_lose_dead_by_time, "queue bank/failed-events: dead letters by time: found 0, expected 1"),
        (_count_worlds, "catalog bank: counter active: found 9, expected 3"),
        (_lose_name, "catalog bank/Account/ada: name: found nothing, expected Account/ada"),
        (_name_nothing, "name: found Account/ghost, expected no such world"),
        (_lose_index_of_worker, f"indexed under: found nothing, expected {WORKER}"),
        (_index_under_another, "indexed under: found stranger, expected not assigned to it"),
        (_lose_hint, "bank/Account/bob: hint: found nothing, expected one with the orchestrator"),
        (_lose_ingress, "inbox bank/Account/bob: rows after 0: found 0, expected 1"),
        (_lose_index_of_lease, "lease shop: indexed under: found nothing, expected clerk"),
        (_index_lease_under_another, "lease shop: indexed under: found stranger"),
        (_change_fence, "lease shop: fence: found held clerk 1.9, expected held clerk 1.1"),
        (_change_authority, "authority bank: lease: "),
    ],
)
def test_what_was_planted_is_found_and_named(
    run: Run, path: Path, busy: Rig, planted: Callable[[Rig], None], line: str
) -> None:
    planted(busy)
    ran = run("verify", "--store", path, *ONE)
    assert ran.code == 1
    assert line in ran.out


def test_every_status_is_counted_again(busy: Rig) -> None:
    assert busy.store.read(recount.recount) == []
    for status in Status:
        key = (int(Space.WORLD), UNIVERSE, "c", status.value)
        busy.store.transact(_add_one, key)
    found = busy.store.read(recount.recount)
    assert [one.what for one in found] == [f"counter {status.value}" for status in Status]


def _add_one(txn: Txn, key: tuples.Key) -> None:
    txn.add(key, 1)


@pytest.mark.parametrize("jobs", ["0", "-1"])
def test_at_least_one_process(run: Run, path: Path, busy: Rig, jobs: str) -> None:
    assert run("verify", "--store", path, "--jobs", jobs).error.startswith("invalid: what='jobs'")

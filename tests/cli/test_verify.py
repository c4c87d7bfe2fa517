"""`holdfast verify`: a consistent store passes, and every kind of difference is found and named."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast import codec
from holdfast.clock import S
from holdfast.durable import item, journal, queue, snapshot
from holdfast.durable import lease as leases
from holdfast.leadership import leader_lease
from holdfast.ops import verify, verify_report
from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.store.schema import Space
from holdfast.world.catalog import WorldStatus, subject_of
from tests.cli.conftest import RunCommand
from tests.ops.account_rig import UNIVERSE, WORKER, AccountRig, plant
from tests.ops.app import Booked, Grouped, Ledger, QuotedDeposit, QuoteRequested, Refused, Sorted

APP = "tests.ops.app:app"
ONE_PROCESS = ("--jobs", "1")
SOUND_OUTPUT = "103 worlds, 106 steps replayed, states compared for 106 entries: sound\n"


WORDS = [f"word-{n}" for n in range(40)]


@pytest.fixture
def busy_rig(rig: AccountRig) -> AccountRig:
    """Worlds, a fork, dead letters, items in every state, held leases, a leader, unread mail."""
    rig.account().send(QuoteRequested("EUR"))
    rig.account().send(Refused())
    rig.run_worker()
    rig.account().fork("child", at=2)
    rig.account("bob").send(QuotedDeposit(1))
    rig.account("gone").create()
    rig.account("gone").delete()
    store = rig.store
    store.transact(queue.put_many, "mail", [b"first", b"second", b"third"])
    store.transact(queue.put, "mail", b"later", 0, store.now_ns() + 3600 * S)
    store.transact(queue.claim, "mail", "clerk", 1, 3600 * S)
    store.transact(leases.acquire, "shop", "clerk", "1", 3600 * S)
    store.transact(leader_lease.acquire, UNIVERSE, "leader", "1", 3600 * S)
    return rig


def test_verify_of_a_consistent_store_prints_sound(
    run: RunCommand, path: Path, busy_rig: AccountRig
) -> None:
    result = run("verify", "--store", path, *ONE_PROCESS)
    assert (result.code, result.out) == (0, "3 worlds: sound\n")


def test_verify_save_stores_the_report_until_the_next_one(
    run: RunCommand, path: Path, busy_rig: AccountRig
) -> None:
    store = busy_rig.store
    with pytest.raises(verify_report.NoReport):
        store.read(verify_report.find_last, UNIVERSE)
    run("verify", "--store", path, *ONE_PROCESS)
    with pytest.raises(verify_report.NoReport):
        store.read(verify_report.find_last, UNIVERSE)
    assert run("verify", "--save", "--store", path, *ONE_PROCESS).code == 0
    first = store.read(verify_report.find_last, UNIVERSE)
    assert (first.sound, first.worlds, first.universe, first.app) == (True, 3, None, None)
    plant(store, (int(Space.QUEUE), "mail", "n"), codec.pack(item.QueueCounts(9)))
    result = run("verify", "--save", "--universe", UNIVERSE, "--store", path, *ONE_PROCESS)
    assert result.code == 1
    last = store.read(verify_report.find_last, UNIVERSE)
    assert (last.sound, last.universe) == (False, UNIVERSE)
    assert last.differences_count == len(last.differences) == 4
    assert {difference["where"] for difference in last.differences} == {"mail"}
    assert store.read(verify_report.find_last, "other").sound


def test_saved_verify_report_is_bounded() -> None:
    finding = {"universe": "u", "text": "x" * 9_000}
    many = [finding] * 500
    document = {
        **dict.fromkeys(("worlds", "steps", "compared", "not_compared", "flows"), 0),
        "sound": False, "findings": many, "differences": many, "flow_findings": many, "parks": [],
    }  # fmt: skip
    report = verify_report.make_report(document, 1, None, "m:app")
    assert (report.findings_count, len(report.findings)) == (500, verify_report.FINDINGS_KEPT)
    assert len(codec.pack(report)) < 1_000_000


def test_verify_with_the_app_replays_every_journal(
    run: RunCommand, path: Path, busy_rig: AccountRig
) -> None:
    result = run("verify", "--app", APP, "--store", path, *ONE_PROCESS, "--json")
    assert result.code == 0
    # All five steps are ada's. The fork starts from a snapshot and replays none.
    assert result.document == {
        "sound": True, "worlds": 3, "steps": 5, "compared": 5, "not_compared": 0,
        "findings": [], "differences": [], "flows": 0, "flow_findings": [], "parks": [],
    }  # fmt: skip


def test_verify_jobs_split_the_worlds(run: RunCommand, path: Path, busy_rig: AccountRig) -> None:
    for n in range(100):
        busy_rig.account(f"more-{n}").send(QuotedDeposit(n))
    busy_rig.run_worker()
    result = run("verify", "--app", APP, "--store", path, "--jobs", "2")
    assert (result.code, result.out) == (0, SOUND_OUTPUT)
    changed = run("verify", "--app", "tests.ops.app:app_richer", "--store", path, "--jobs", "2")
    assert changed.code == 1
    *finding_lines, verdict = changed.out.splitlines()
    assert verdict == (
        "103 worlds, 0 steps replayed, states compared for 0 entries: 102 worlds and 0 rows differ"
    )
    assert len(finding_lines) == 101, "a hundred are shown, and how many more there are"


@pytest.mark.parametrize(
    ("app", "height", "what"),
    [("app_richer", 3, "what=state"), ("app_silent", 1, "what=reply"), ("app_other", 0, "unknown")],
)
def test_verify_names_the_first_diverging_height(
    run: RunCommand, path: Path, busy_rig: AccountRig, app: str, height: int, what: str
) -> None:
    result = run("verify", "--app", f"tests.ops.app:{app}", "--store", path, *ONE_PROCESS, "--json")
    assert result.code == 1
    [finding] = [
        each for each in result.document["findings"] if each["world"] == "QuotedAccount/ada"
    ]
    assert finding["height"] == height
    assert what in finding["text"]


def test_verify_finds_a_missing_emission(run: RunCommand, path: Path, rig: AccountRig) -> None:
    rig.account("eve").send(QuoteRequested("EUR"))
    rig.run_worker()
    result = run("verify", "--app", "tests.ops.app:app_silent", "--store", path, *ONE_PROCESS)
    assert result.code == 1
    assert "bank/QuotedAccount/eve at height 1: replay_diverged: what=emitted" in result.out


def test_verify_names_the_world_whose_replay_ended_the_process(
    run: RunCommand, path: Path, busy_rig: AccountRig
) -> None:
    busy_rig.run_worker()
    result = run("verify", "--app", "tests.ops.app:app_deadly", "--store", path, *ONE_PROCESS)
    assert result.code == 1
    assert result.out.splitlines() == [
        "bank/QuotedAccount/ada: verifier_lost: replaying it ended the process",
        "3 worlds, 1 step replayed, states compared for 1 entry: 1 world and 0 rows differ",
    ]


# -- states --------------------------------------------------------------------------------------


def test_verify_compares_states_of_a_world_without_replies_or_emissions(
    run: RunCommand, path: Path, rig: AccountRig
) -> None:
    silent = rig.runtime.world(Ledger, "l")
    for _ in range(10):
        silent.send(Booked(100))
    rig.run_worker()
    sound = run("verify", "--app", APP, "--store", path, *ONE_PROCESS)
    assert sound.out.endswith(" 13 steps replayed, states compared for 13 entries: sound\n")
    result = run("verify", "--app", "tests.ops.app:app_richer", "--store", path, *ONE_PROCESS)
    assert result.code == 1
    assert "bank/Ledger/l at height 10: replay_diverged: what=state why=digest" in result.out


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_verify_finds_a_reducer_that_depends_on_set_order(
    run: RunCommand, path: Path, rig: AccountRig, jobs: str
) -> None:
    rig.runtime.world(Ledger, "l").send(Sorted(WORDS))
    rig.run_worker()
    result = run("verify", "--app", APP, "--jobs", jobs, "--json", store=path)
    assert result.code == 1
    [finding] = result.document["findings"]
    assert (finding["code"], finding["height"]) == ("replay_diverged", 1)


def test_verify_treats_nested_sets_as_equal_under_both_hash_seeds(
    run: RunCommand, path: Path, rig: AccountRig
) -> None:
    grouped = rig.runtime.world(Ledger, "l")
    grouped.send(Grouped(WORDS))
    rig.run_worker()
    assert grouped.state().groups
    result = run("verify", "--app", APP, "--store", path, *ONE_PROCESS)
    assert (result.code, result.out.endswith(": sound\n")) == (0, True)


def _rewrite_without_digests(txn: Txn, subject: str) -> None:
    """Rewrite the journal in the format without digests, and delete the snapshots."""
    bodies = [entry.body for entry in journal.read(txn, subject, 1, 100, 100)]
    for space in (Space.JOURNAL, Space.SNAPSHOT):
        prefix = schema.key_prefix(space, subject)
        for key, _ in txn.scan(prefix, tuples.prefix_end(prefix), 1000):
            txn.delete(key)
    journal.append(txn, subject, [codec.pack(codec.unpack(body)[:-2]) for body in bodies])


def test_verify_counts_entries_without_a_digest_as_not_compared(
    run: RunCommand, path: Path, rig: AccountRig
) -> None:
    silent = rig.runtime.world(Ledger, "l")
    for _ in range(3):
        silent.send(Booked(100))
    rig.run_worker()
    rig.store.transact(_rewrite_without_digests, subject_of(UNIVERSE, silent.create()))
    silent.send(Booked(100))
    rig.run_worker()
    result = run("verify", "--app", APP, "--store", path, *ONE_PROCESS)
    expected = "7 steps replayed, states compared for 4 entries, 3 without a digest: sound\n"
    assert result.out.endswith(expected)
    document = run("verify", "--app", APP, "--store", path, *ONE_PROCESS, "--json").document
    assert (document["steps"], document["compared"], document["not_compared"]) == (7, 4, 3)


def test_verify_finds_set_order_without_digests_by_two_replays(
    run: RunCommand, path: Path, rig: AccountRig
) -> None:
    silent = rig.runtime.world(Ledger, "l")
    silent.send(Sorted(WORDS))
    rig.run_worker()
    rig.store.transact(_rewrite_without_digests, subject_of(UNIVERSE, silent.create()))
    result = run("verify", "--app", APP, "--store", path, *ONE_PROCESS)
    assert result.code == 1
    cause = "why=two replays end in different states (PYTHONHASHSEED=2)"
    assert f"bank/Ledger/l at height 1: replay_diverged: what=state {cause}" in result.out


def test_verify_restores_pythonhashseed(
    run: RunCommand, path: Path, rig: AccountRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("77", None):
        if value is None:
            monkeypatch.delenv("PYTHONHASHSEED")
        else:
            monkeypatch.setenv("PYTHONHASHSEED", value)
        assert run("verify", "--app", APP, "--store", path, *ONE_PROCESS).code == 0
        assert os.environ.get("PYTHONHASHSEED") == value


# -- planted damage ------------------------------------------------------------------------------


def _change_entry(rig: AccountRig) -> None:
    subject = subject_of(UNIVERSE, rig.world_id())
    key = (int(Space.JOURNAL), subject, "e", 2)
    row = rig.store.read(lambda txn: txn.get(key))
    kept = codec.unpack_as(journal.EntryRow, row)
    plant(rig.store, key, codec.pack(journal.EntryRow(kept.hash, kept.at_ns, kept.body + b"!")))


def _lose_entry(rig: AccountRig) -> None:
    plant(rig.store, (int(Space.JOURNAL), subject_of(UNIVERSE, rig.world_id()), "e", 2), None)


def _change_snapshot(rig: AccountRig) -> None:
    subject = subject_of(UNIVERSE, rig.world_id())
    height = rig.store.read(snapshot.heights, subject, 1)[0]
    key = (int(Space.SNAPSHOT), subject, "s", height)
    row = rig.store.read(lambda txn: txn.get(key))
    saved = codec.unpack_as(snapshot.SnapshotRow, row)
    wrong = snapshot.SnapshotRow(saved.hash, saved.at_ns, saved.size_bytes, b"\x80")
    plant(rig.store, key, codec.pack(wrong))


def _change_ready_counter(rig: AccountRig) -> None:
    plant(rig.store, (int(Space.QUEUE), "mail", "n"), codec.pack(item.QueueCounts(3, 1, 1, 0, 0)))


def _change_done_counter(rig: AccountRig) -> None:
    plant(rig.store, (int(Space.QUEUE), "mail", "n"), codec.pack(item.QueueCounts(2, 1, 1, 0, 7)))


def _lose_ready_index(rig: AccountRig) -> None:
    prefix = item.keys_of("mail").ready
    rows = rig.store.read(lambda txn: txn.scan(prefix, tuples.prefix_end(prefix)))
    [key] = [key for key, packed_seq in rows if item.seq_of(packed_seq) == 2]
    rig.store.transact(lambda txn: txn.delete(key))


def _lose_item(rig: AccountRig) -> None:
    plant(rig.store, (int(Space.QUEUE), "mail", "i", 2), None)


def _lose_owner_index(rig: AccountRig) -> None:
    plant(rig.store, (int(Space.QUEUE), "mail", "o", "clerk", 1), None)


def _lose_dead_time_index(rig: AccountRig) -> None:
    prefix = item.keys_of(f"{UNIVERSE}/failed-events").dead_by_time
    [(key, _)] = rig.store.read(lambda txn: txn.scan(prefix, tuples.prefix_end(prefix)))
    rig.store.transact(lambda txn: txn.delete(key))


def _change_world_counter(rig: AccountRig) -> None:
    plant(rig.store, (int(Space.WORLD), UNIVERSE, "c", "active"), schema.encode_int(9))


def _lose_name(rig: AccountRig) -> None:
    plant(rig.store, (int(Space.WORLD), UNIVERSE, "n", "QuotedAccount", "ada"), None)


def _add_name_without_world(rig: AccountRig) -> None:
    plant(rig.store, (int(Space.WORLD), UNIVERSE, "n", "QuotedAccount", "ghost"), b"0" * 32)


def _lose_index_of_worker(rig: AccountRig) -> None:
    plant(rig.store, (int(Space.WORLD), UNIVERSE, "b", WORKER, rig.world_id()), None)


def _index_world_under_another_worker(rig: AccountRig) -> None:
    plant(rig.store, (int(Space.WORLD), UNIVERSE, "b", "stranger", rig.world_id()), b"")


def _lose_hint(rig: AccountRig) -> None:
    plant(rig.store, (int(Space.READY), UNIVERSE, "", 0, rig.world_id("bob")), None)


def _lose_ingress(rig: AccountRig) -> None:
    plant(rig.store, (int(Space.INBOX), subject_of(UNIVERSE, rig.world_id("bob")), "e", 1), None)


def _lose_index_of_lease(rig: AccountRig) -> None:
    plant(rig.store, (int(Space.LEASE), "by", "clerk", "shop"), None)


def _index_lease_under_another_worker(rig: AccountRig) -> None:
    plant(rig.store, (int(Space.LEASE), "by", "stranger", "shop"), b"")


def _change_fence(rig: AccountRig) -> None:
    fence = leases.LeaseFence(leases.LeaseState.HELD, "clerk", "1", 1, 9)
    plant(rig.store, (int(Space.LEASE), "fence", "shop"), codec.pack(fence))


def _change_leader_lease(rig: AccountRig) -> None:
    plant(
        rig.store,
        (int(Space.LEASE), "expiry", leader_lease.resource(UNIVERSE)),
        schema.encode_int(7),
    )


@pytest.mark.parametrize(
    ("planted", "line"),
    [
        (
            _change_entry,
            "bank/QuotedAccount/ada at height 2: store_corrupt: why=the hash chain is broken",
        ),
        (
            _lose_entry,
            "bank/QuotedAccount/ada at height 2: store_corrupt: why=the entry is missing",
        ),
        (_change_snapshot, "store_corrupt: why=the snapshot does not match its hash"),
        (_change_ready_counter, "queue mail: counter ready: found 3, expected 2"),
        (_change_done_counter, "queue mail: counter done: found 7, expected 4 items in all"),
        (_lose_ready_index, "queue mail: item 2 is indexed: found nowhere, expected one index"),
        (_lose_item, "queue mail: indexed items: found 4, expected 3"),
        (_lose_owner_index, "queue mail: claims by owner: found 0, expected 1"),
        (
            _lose_dead_time_index,
            "queue bank/failed-events: dead letters by time: found 0, expected 1",
        ),
        (_change_world_counter, "catalog bank: counter active: found 9, expected 3"),
        (
            _lose_name,
            "catalog bank/QuotedAccount/ada: name: found nothing, expected QuotedAccount/ada",
        ),
        (_add_name_without_world, "name: found QuotedAccount/ghost, expected no such world"),
        (_lose_index_of_worker, f"indexed under: found nothing, expected {WORKER}"),
        (
            _index_world_under_another_worker,
            "indexed under: found stranger, expected not assigned to it",
        ),
        (
            _lose_hint,
            "bank/QuotedAccount/bob: hint: found nothing, expected one with the orchestrator",
        ),
        (_lose_ingress, "inbox bank/QuotedAccount/bob: rows after 0: found 0, expected 1"),
        (_lose_index_of_lease, "lease shop: indexed under: found nothing, expected clerk"),
        (_index_lease_under_another_worker, "lease shop: indexed under: found stranger"),
        (_change_fence, "lease shop: fence: found held clerk 1.9, expected held clerk 1.1"),
        (_change_leader_lease, "authority bank: lease: "),
    ],
)
def test_verify_finds_and_names_planted_damage(
    run: RunCommand,
    path: Path,
    busy_rig: AccountRig,
    planted: Callable[[AccountRig], None],
    line: str,
) -> None:
    planted(busy_rig)
    result = run("verify", "--store", path, *ONE_PROCESS)
    assert result.code == 1
    assert line in result.out


def test_find_differences_recounts_every_world_status(busy_rig: AccountRig) -> None:
    assert busy_rig.store.read(verify.find_differences) == []
    for status in WorldStatus:
        key = (int(Space.WORLD), UNIVERSE, "c", status.value)
        busy_rig.store.transact(_add_one, key)
    differences = busy_rig.store.read(verify.find_differences)
    assert [difference.what for difference in differences] == [
        f"counter {status.value}" for status in WorldStatus
    ]


def _add_one(txn: Txn, key: tuples.Key) -> None:
    txn.add(key, 1)


@pytest.mark.parametrize("jobs", ["0", "-1"])
def test_verify_jobs_must_be_positive(
    run: RunCommand, path: Path, busy_rig: AccountRig, jobs: str
) -> None:
    assert run("verify", "--store", path, "--jobs", jobs).error.startswith("invalid: what='jobs'")

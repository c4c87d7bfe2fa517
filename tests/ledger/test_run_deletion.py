"""Retention and deletion of runs."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.clock import SYSTEM, S
from holdfast.durable import lease
from holdfast.ledger import run_deletion, runs
from holdfast.ledger.runs import RunEvent, RunLifecycle, RunPinned, RunRecord
from holdfast.store import schema, tuples
from holdfast.store.api import Store, Txn

MODULES = ("holdfast.ledger.run_deletion",)

OVER = RunLifecycle.FINISHED


def record(run_id: str, at: int, name: str = "labels", **fields: object) -> RunRecord:
    values = {"status": OVER, "created_ns": at, "finished_ns": at + 5} | fields
    return RunRecord(run_id, name, **values)  # type: ignore[arg-type]


def deletable_run_ids(records: list[RunRecord], **options: object) -> set[str]:
    verdicts = run_deletion.plan_retention(records, **options)  # type: ignore[arg-type]
    return {verdict.record.run_id for verdict in verdicts if verdict.is_deletable}


FIVE = [record(f"r{at}", at) for at in range(5)]
TABLE = {"kind": "table", "table": "cat.db.labels"}
DAILY = [record(f"d{at}", at, base_run=f"d{at - 1}" if at else "") for at in range(10)]


@pytest.mark.parametrize(
    ("records", "options", "gone"),
    [
        (FIVE, {"keep": 3}, {"r0", "r1"}),
        (FIVE, {"keep": 1}, {"r0", "r1", "r2", "r3"}),
        (FIVE, {"keep": 9}, set()),
        # `keep` counts per name.
        ([*FIVE, record("x", 0, "other")], {"keep": 4}, {"r0"}),
        # Only runs that ended before the bound.
        (FIVE, {"keep": 1, "before_ns": 7}, {"r0", "r1"}),
        # A kept run needs its base, its input and the run that it retries, transitively.
        (
            [record("a", 1), record("b", 2, base_run="a"), record("c", 3, retry_of="b")],
            {"keep": 1},
            set(),
        ),
        ([record("a", 1), record("b", 2), record("c", 3, input_run="a")], {"keep": 1}, {"b"}),
        # A base that is kept only as a base needs no base: a name whose input grows every day does not keep all runs.
        (DAILY, {"keep": 3}, {f"d{at}" for at in range(6)}),
        (DAILY, {"keep": 1}, {f"d{at}" for at in range(8)}),
        (DAILY, {"keep": 2}, {f"d{at}" for at in range(7)}),
        # The last run that wrote the output is kept.
        (
            [
                record("a", 1),
                record("b", 2, base_run="a"),
                record("c", 3, base_run="b", status=RunLifecycle.CANCELLED),
                record("d", 4, base_run="c", status=RunLifecycle.CANCELLED),
                record("e", 5, base_run="d", status=RunLifecycle.OPEN),
            ],
            {"keep": 1},
            {"a"},
        ),
        # A driver-written table contains the rows of a run marked as written.
        (
            [
                record("a", 1, sink=TABLE, config={runs.WRITTEN_KEY: "1"}),
                record("b", 2, base_run="a", sink=TABLE),
                record("c", 3, base_run="b", sink=TABLE),
            ],
            {"keep": 1},
            set(),
        ),
        # A run that holds the input of a kept run is kept.
        (
            [record("a", 1), record("b", 2, input_run="a"), record("c", 3, base_run="b")],
            {"keep": 1},
            set(),
        ),
        # Only the newest run can be resumed. The status of an older run does not matter.
        (
            [
                record("a", 1, status=RunLifecycle.OPEN),
                record("b", 2, status=RunLifecycle.OPEN),
                record("c", 3),
            ],
            {"keep": 1},
            {"a", "b"},
        ),
        ([record("a", 1, status=RunLifecycle.OPEN)], {"keep": 1}, set()),
        # A partly deleted run is deleted, however new it is.
        ([record("a", 1), record("b", 2, deleting=True)], {"keep": 3}, {"b"}),
        ([], {}, set()),
    ],
)
def test_plan_retention_deletes_old_runs_that_no_kept_run_needs(
    records: list[RunRecord], options: dict[str, object], gone: set[str]
) -> None:
    assert deletable_run_ids(records, **options) == gone
    assert deletable_run_ids(records[::-1], **options) == gone


def test_plan_retention_gives_a_reason_for_each_kept_run() -> None:
    verdicts = run_deletion.plan_retention(FIVE, keep=2, live=frozenset({"labels"}))
    assert [verdict.reason for verdict in verdicts] == [
        "a driver runs it",
        "it is one of the newest 2 runs",
        "",
        "",
        "",
    ]


def _put(txn: Txn, key: bytes) -> None:
    txn.put(key, b"x")


def create_runs(store: Store, *names: str) -> None:
    """Create runs of one name, oldest first, each with one input block."""
    for at, run_id in enumerate(names):
        store.transact(runs.create, RunRecord(run_id, "labels", created_ns=at))
        store.transact(_put, runs.block_key(run_id, 0))


def rows_left(store: Store) -> int:
    space = schema.key_prefix(schema.Space.RUN)
    return len(store.read(lambda txn: txn.scan(space, tuples.prefix_end(space))))


def test_delete_runs_removes_all_rows_and_releases_the_lease(any_store: Store) -> None:
    create_runs(any_store, "a", "b")
    any_store.transact(runs.change_status, "a", RunEvent.CANCEL)
    assert run_deletion.delete_runs(any_store, "labels", ["a"]) == 2
    assert any_store.read(runs.get_record, "a") is None
    assert any_store.read(runs.get_existing, "b").run_id == "b"
    # A resumable run is deleted when its id is given.
    run_deletion.delete_runs(any_store, "labels", ["b"])
    assert rows_left(any_store) == 0
    any_store.transact(lease.acquire, runs.lease_resource("labels"), "driver", "1", S)


def test_delete_runs_keeps_runs_of_another_name(any_store: Store) -> None:
    create_runs(any_store, "a")
    assert run_deletion.delete_runs(any_store, "other", ["a", "none"]) == 0
    assert any_store.read(runs.get_existing, "a")


def test_delete_runs_raises_run_at_work_while_a_driver_holds_the_lease(any_store: Store) -> None:
    create_runs(any_store, "a")
    run_lease = any_store.transact(
        lease.acquire, runs.lease_resource("labels"), "driver", "1", 100 * S
    )
    assert any_store.read(run_deletion.live_names, ["labels", "other"]) == {"labels"}
    with pytest.raises(runs.RunAtWork):
        run_deletion.delete_runs(any_store, "labels", ["a"])
    assert any_store.read(runs.get_existing, "a")
    any_store.transact(lease.release, run_lease)
    assert run_deletion.delete_runs(any_store, "labels", ["a"])


def test_pinned_run_is_deleted_after_the_run_that_pins_it(any_store: Store) -> None:
    create_runs(any_store, "a", "b")
    assert any_store.transact(runs.pin, "a", "b")
    with pytest.raises(RunPinned):
        run_deletion.delete_runs(any_store, "labels", ["a"])
    run_deletion.delete_runs(any_store, "labels", ["b", "a"])
    assert rows_left(any_store) == 0


def test_input_of_a_pinned_run_is_dropped_and_its_outcomes_are_kept(any_store: Store) -> None:
    create_runs(any_store, "first", "second")
    first = any_store.read(runs.get_existing, "first")
    any_store.transact(_put, runs.match_key(first.run_id, 0))
    any_store.transact(runs.pin, first.run_id, "newer")
    before = rows_left(any_store)
    kept = run_deletion.delete_or_drop_input(any_store, "labels", [first.run_id])
    assert kept == {first.run_id: "rows of run newer rest on it; its input is deleted"}
    after = any_store.read(runs.get_existing, first.run_id)
    assert after.input_dropped
    assert after.blocks == []
    assert not after.deleting
    assert any_store.read(runs.get_block, first.run_id, 0) is None
    assert before - rows_left(any_store) >= 2
    # A repeat has no effect.
    left = rows_left(any_store)
    assert run_deletion.drop_run_input(any_store, "labels", first.run_id)
    assert rows_left(any_store) == left
    any_store.transact(runs.unpin, first.run_id, "newer")
    assert run_deletion.delete_or_drop_input(any_store, "labels", [first.run_id]) == {}


def test_input_of_a_resumable_run_is_not_dropped(any_store: Store) -> None:
    any_store.transact(runs.create, record("r1", 1, status=RunLifecycle.OPEN, blocks=[(0, 5)]))
    assert not run_deletion.drop_run_input(any_store, "labels", "r1")
    assert not any_store.read(runs.get_existing, "r1").input_dropped


def test_input_that_another_run_reads_is_not_dropped(any_store: Store) -> None:
    create_runs(any_store, "first", "second", "third")
    second = any_store.read(runs.get_existing, "second")
    any_store.transact(runs.put_record, msgspec.structs.replace(second, input_run="first"))
    any_store.transact(runs.pin, "first", "second")
    assert run_deletion.delete_or_drop_input(any_store, "labels", ["first"]) == {
        "first": "rows of run second rest on it"
    }
    assert any_store.read(runs.get_block, "first", 0) is not None


def test_slow_deletion_of_objects_renews_its_lease(
    any_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_deletion, "LEASE_NS", S)

    class SlowObjects:
        def reach(self, record: RunRecord) -> None: ...

        def delete(self, record: RunRecord) -> None:
            SYSTEM.sleep(1.6)

        def delete_input(self, record: RunRecord) -> None: ...

        def sweep(self, store: Store, records: object) -> None: ...

    any_store.transact(runs.create, record("a", 1, spool="/spool"))
    assert run_deletion.delete_or_drop_input(any_store, "labels", ["a"], SlowObjects()) == {}
    assert any_store.read(runs.get_record, "a") is None

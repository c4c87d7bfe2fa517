"""Costs of stages by day: the days of a stage add up to what its stored runs have spent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast import store as stores
from holdfast.clock import SimClock
from holdfast.ledger import run_deletion, runs, stage_costs
from holdfast.ledger.runs import RunEvent, RunProgress, RunRecord
from holdfast.ledger.stage_costs import DAY_NS, KEPT_DAYS, MONEY, TOKENS
from holdfast.ops import verify
from holdfast.store import schema, tuples
from holdfast.store.api import Store, Txn
from tests.simulation.source_edits import Edit, Mutant

MODULES = ("holdfast.ledger.stage_costs", "holdfast.ledger.run_deletion")


@pytest.fixture
def clock() -> SimClock:
    return SimClock()


@pytest.fixture
def store(clock: SimClock) -> Iterator[Store]:
    with stores.open("memory:", clock=clock) as store:
        yield store


def start(store: Store, run_id: str, name: str = "labels") -> None:
    store.transact(lambda txn: runs.create(txn, RunRecord(run_id, name)))


def publish(store: Store, run_id: str, cost: float, tokens: int = 0) -> None:
    """Publish what the calls of a run have spent since its start."""
    progress = RunProgress(cost=cost, tokens=tokens)
    store.transact(stage_costs.publish_progress, run_id, progress)


def days(store: Store, name: str = "labels") -> list[tuple[int, str, int]]:
    """Days before today, unit and amount."""
    today = store.now_ns() // DAY_NS
    found = store.read(stage_costs.list_days, name, today - KEPT_DAYS + 1, today)
    return [(today - one.day, one.unit, one.amount) for one in found]


def differences(store: Store) -> list[str]:
    return [one.what for one in store.read(verify.find_differences) if one.where == "stages"]


def rows(txn: Txn) -> list[tuple[bytes, bytes]]:
    prefix = schema.key_prefix(schema.Space.RUN, "e")
    return txn.scan(prefix, tuples.prefix_end(prefix))


def test_each_progress_adds_the_new_costs_to_its_day(store: Store, clock: SimClock) -> None:
    start(store, "r1")
    start(store, "s1", "other")
    publish(store, "r1", 0.5, 100)
    publish(store, "s1", 9.0)
    publish(store, "r1", 0.75, 100)
    clock.advance(DAY_NS)
    publish(store, "r1", 0.75, 130)
    assert days(store) == [(1, MONEY, 750_000), (1, TOKENS, 100), (0, TOKENS, 30)]
    assert days(store, "other") == [(1, MONEY, 9_000_000)]
    assert differences(store) == []


def test_runs_of_a_name_share_its_days(store: Store) -> None:
    for run_id in ("r1", "r2"):
        start(store, run_id)
        publish(store, run_id, 0.1)
    publish(store, "r2", 0.1 + 0.2)
    assert days(store) == [(0, MONEY, 400_000)]
    assert differences(store) == []


def test_expired_days_are_removed_and_stay_in_the_sum(store: Store, clock: SimClock) -> None:
    start(store, "r1")
    counts = []
    for day in range(2 * KEPT_DAYS):
        publish(store, "r1", float(day + 1))
        clock.advance(DAY_NS)
        counts.append(len(store.read(rows)))
    assert max(counts) == counts[-1] <= KEPT_DAYS + 1
    assert differences(store) == []


def test_days_of_a_deleted_run_stay(store: Store) -> None:
    start(store, "r1")
    publish(store, "r1", 2.0, 7)
    store.transact(lambda txn: runs.change_status(txn, "r1", RunEvent.HALT))
    start(store, "r2")
    publish(store, "r2", 1.0)
    before = days(store)
    run_deletion.delete_runs(store, "labels", ["r1"])
    assert store.read(runs.get_record, "r1") is None
    assert days(store) == before == [(0, MONEY, 3_000_000), (0, TOKENS, 7)]
    assert differences(store) == []


def test_amounts_of_an_older_version_belong_to_no_day(store: Store) -> None:
    start(store, "r1")
    store.transact(runs.put_progress, "r1", RunProgress(cost=5.0))
    assert (days(store), differences(store)) == ([], [])
    publish(store, "r1", 7.0)
    assert (days(store), differences(store)) == ([(0, MONEY, 2_000_000)], [])


def test_lost_day_is_found_and_its_amount_kept_by_the_rebuild(store: Store) -> None:
    start(store, "r1")
    publish(store, "r1", 5.0, 10)
    store.transact(lambda txn: txn.delete(rows(txn)[0][0]))
    assert differences(store) == ["money of the days of labels"]
    store.transact(stage_costs.rebuild, "")
    assert (differences(store), days(store)) == ([], [(0, TOKENS, 10)])


BUGS = {
    "adds nothing to the day": Edit("ledger.stage_costs:_add", "txn.add(key, amount)", "pass"),
    "adds the whole cost each time": Edit("ledger.stage_costs:publish_progress", "amount - before[unit]", "amount"),
    "counts days twice at expiry": Edit("ledger.stage_costs:_remove_expired", "txn.delete(key)", "pass"),
    "loses the amounts of expired days": Edit("ledger.stage_costs:_remove_expired", "gone.amount)", "0)"),
    "forgets what a deleted run has spent": Edit("ledger.stage_costs:forget_run", "-amount", "0"),
}  # fmt: skip


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_of_the_days_is_killed(name: str) -> None:
    clock = SimClock()
    with Mutant(name, (BUGS[name],)).planted(), pytest.raises(AssertionError):  # noqa: PT012
        with stores.open("memory:", clock=clock) as store:
            test_each_progress_adds_the_new_costs_to_its_day(store, clock)
        with stores.open("memory:", clock=clock) as store:
            test_expired_days_are_removed_and_stay_in_the_sum(store, clock)
        with stores.open("memory:", clock=clock) as store:
            test_days_of_a_deleted_run_stay(store)

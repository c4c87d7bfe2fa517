"""Task lists by state, queue, name and tag. The pages of a list contain each task once."""

from __future__ import annotations

import random
from typing import Any

import pytest

from holdfast import failpoints
from holdfast.clock import S
from holdfast.config import NAME_BYTES_MAX
from holdfast.durable.tags import INDEXED_BYTES_MAX
from holdfast.errors import Invalid
from holdfast.tasks import operations, task_list
from holdfast.tasks.model import pack_int
from holdfast.tasks.operations import AttemptOutcome, GrantRequest
from holdfast.tasks.queries import TaskRow, get_row
from holdfast.tasks.states import TaskState
from tests.tasks.rig import KEYS, LEASE_NS, UNIVERSE, TaskOperationsRig

SEEDS = range(6)
PAGES_MAX = 500


def list_all_pages(rig: TaskOperationsRig, limit: int = 100, **filters: Any) -> list[int]:
    """Read all pages of a list and return the seqs."""
    seqs: list[int] = []
    cursor = ""
    for _ in range(PAGES_MAX):
        page = rig.store.read(
            task_list.list_tasks, UNIVERSE, **{"cursor": cursor, "limit": limit, **filters}
        )
        seqs += [row.seq for row in page.rows]
        cursor = page.cursor
        if not cursor:
            return seqs
    raise AssertionError("a list without an end")


def read_rows(rig: TaskOperationsRig, last: int) -> list[TaskRow]:
    rows = [rig.store.read(get_row, KEYS, pack_int(seq)) for seq in range(1, last + 1)]
    return [row for row in rows if row is not None]


def matching_seqs(rows: list[TaskRow], where: str, queue: str, name: str) -> set[int]:
    return {
        row.seq
        for row in rows
        if queue in ("", row.spec.queue)
        and name in ("", row.spec.name)
        and (where in ("", row.where) or (where == "waiting" and row.state is TaskState.WAITING))
    }


def create_random_tasks(rig: TaskOperationsRig, seed: int, steps: int = 45) -> int:
    """Create random tasks in all states. Return the last seq."""
    rng = random.Random(seed)
    last = 0
    rig.set_limits("b", per_key=1)
    for _ in range(steps):
        choice = rng.random()
        if choice < 0.5:
            open_ = [seq for seq in range(1, last + 1) if rig.exists(seq)]
            last = rig.submit_one(
                name=rng.choice(["x", "y"]),
                queue=rng.choice(["a", "b"]),
                priority=rng.choice([0, 5]),
                delay_ns=rng.choice([0, 0, 0, 10 * S, 9999 * S]),
                limit=rng.choice(["", "", "k"]),
                after=tuple(rng.sample(open_, 1)) if open_ and rng.random() < 0.2 else (),
                tag=("eu", "us", "")[last % 3],
            )
        elif choice < 0.85:
            names = rng.choice([(), ("x",)])
            limit, alone = rng.randint(1, 3), rng.random() < 0.3
            request = GrantRequest("w", ["a", "b"], limit, alone, names=names)
            for grant in rig.transact(operations.lease, request).grants:
                ending = rng.random()
                if ending < 0.3:
                    rig.complete(grant)
                elif ending < 0.6:
                    rig.fail(
                        grant,
                        rng.choice(
                            [AttemptOutcome.FAILED, AttemptOutcome.REFUSED, AttemptOutcome.RELEASED]
                        ),
                    )
        elif choice < 0.92 and last:
            rig.cancel(rng.randint(1, last))
        else:
            rig.advance(rng.choice([S, LEASE_NS]))
    return last


@pytest.mark.parametrize("seed", SEEDS)
def test_task_list_filters_return_each_matching_task_once(
    rig: TaskOperationsRig, seed: int
) -> None:
    rows = read_rows(rig, create_random_tasks(rig, seed))
    for where in ("", *task_list.STATE_FILTERS):
        for queue in ("", "a", "b"):
            for name in ("", "x"):
                expected = matching_seqs(rows, where, queue, name)
                for limit in (1, 3, 100):
                    for owned in (True, False):
                        filters = {"where": where, "queue": queue, "name": name}
                        found = list_all_pages(rig, limit, owned=owned, **filters)
                        assert sorted(found) == sorted(expected), (filters, limit, owned)


@pytest.mark.parametrize("seed", SEEDS[:2])
def test_task_list_by_tag_returns_each_matching_task_once(
    rig: TaskOperationsRig, seed: int
) -> None:
    rows = read_rows(rig, create_random_tasks(rig, seed))
    for tag in ("eu", "us", "asia"):
        tagged = [row for row in rows if row.body.tag == tag]
        assert bool(tagged) == (tag != "asia")
        for where in ("", "waiting", "ready", "leased", "completed", "dead"):
            for queue in ("", "a"):
                expected = sorted(matching_seqs(tagged, where, queue, ""), reverse=True)
                for limit in (1, 3, 100):
                    found = list_all_pages(rig, limit, tag=tag, where=where, queue=queue)
                    assert found == expected, (tag, where, queue, limit)


def test_redriven_task_keeps_its_tag_and_a_removed_one_leaves_the_list(
    rig: TaskOperationsRig,
) -> None:
    rig.submit_one(tag="eu", retain_ns=S)
    rig.cancel(1)
    assert rig.redrive(1) == [2]
    assert list_all_pages(rig, tag="eu") == [2, 1]
    rig.advance(2 * S)
    assert rig.maintain() == 1
    assert list_all_pages(rig, tag="eu") == [2]


def test_tags_above_the_indexed_size_have_separate_lists(rig: TaskOperationsRig) -> None:
    long = "x" * NAME_BYTES_MAX
    for tag in (long, long[:-1] + "y", "x" * INDEXED_BYTES_MAX):
        rig.submit_one(tag=tag)
    assert list_all_pages(rig, tag=long) == [1]
    assert list_all_pages(rig, tag="x" * INDEXED_BYTES_MAX) == [3]
    with pytest.raises(Invalid):
        rig.submit_one(tag=long + "x")
    with pytest.raises(Invalid):
        list_all_pages(rig, tag=long + "x")


def test_list_by_tag_reads_no_task_of_another_tag(
    rig: TaskOperationsRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.submit_one(tag="eu")
    for _ in range(5):
        rig.submit_one(tag="us")
    monkeypatch.setattr(task_list, "SCANNED_MAX", 1)
    page = rig.store.read(task_list.list_tasks, UNIVERSE, tag="eu")
    assert [row.seq for row in page.rows] == [1]


def test_task_list_continues_after_scanned_max(
    rig: TaskOperationsRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = read_rows(rig, create_random_tasks(rig, 1))
    monkeypatch.setattr(task_list, "SCANNED_MAX", 3)
    for where in ("", *task_list.STATE_FILTERS):
        found = list_all_pages(rig, where=where, name="x")
        assert sorted(found) == sorted(matching_seqs(rows, where, "", "x"))


def test_random_tasks_cover_every_state_filter(rig: TaskOperationsRig) -> None:
    found: set[str] = set()
    for seed in SEEDS:
        found |= {row.where for row in read_rows(rig, create_random_tasks(rig, seed))}
    assert found == set(task_list.STATE_FILTERS) - {"waiting"}


def test_task_list_page_scans_at_most_scanned_max_rows(
    rig: TaskOperationsRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("y", "y", "y", "x"):
        rig.submit_one(name=name)
    monkeypatch.setattr(task_list, "SCANNED_MAX", 2)
    page = rig.store.read(task_list.list_tasks, UNIVERSE, "ready", "", "x")
    assert page.rows == []
    assert page.cursor
    assert list_all_pages(rig, where="ready", name="x") == [4]


def test_task_list_without_a_state_is_newest_first(rig: TaskOperationsRig) -> None:
    for _ in range(4):
        rig.submit_one()
    assert list_all_pages(rig, limit=3) == [4, 3, 2, 1]


def test_ready_task_list_is_in_grant_order(rig: TaskOperationsRig) -> None:
    low, high, next_low = rig.submit_one(), rig.submit_one(priority=5), rig.submit_one()
    assert list_all_pages(rig, where="ready") == [high, low, next_low]
    assert [grant.seq for grant in rig.lease()] == [high, low, next_low]


def test_delayed_task_list_is_in_due_order(rig: TaskOperationsRig) -> None:
    late, soon = rig.submit_one(delay_ns=9 * S), rig.submit_one(delay_ns=3 * S)
    assert list_all_pages(rig, where="delayed") == [soon, late]


def test_task_leased_again_is_listed_once(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    rig.fail(rig.lease_one(seq), AttemptOutcome.RELEASED)
    rig.lease_one(seq)
    assert list_all_pages(rig, limit=1, where="leased") == [seq]


def test_task_list_of_an_empty_state_scans_nothing(rig: TaskOperationsRig) -> None:
    rig.submit_one()
    with failpoints.on("tasks.list_scan") as scan:
        page = rig.store.read(task_list.list_tasks, UNIVERSE, "failed")
    assert (page, scan.hits) == (task_list.TaskPage([], ""), 0)


@pytest.mark.parametrize("cursor", ["?", "AAAA", "kgEC", "a" * 1000])
def test_task_list_rejects_an_invalid_cursor(rig: TaskOperationsRig, cursor: str) -> None:
    rig.submit_one()
    with pytest.raises(Invalid):
        rig.store.read(task_list.list_tasks, UNIVERSE, "ready", "", "", cursor)


def test_task_list_rejects_a_cursor_of_another_state_filter(rig: TaskOperationsRig) -> None:
    for _ in range(3):
        rig.submit_one()
    page = rig.store.read(task_list.list_tasks, UNIVERSE, "ready", limit=1)
    with pytest.raises(Invalid):
        rig.store.read(task_list.list_tasks, UNIVERSE, "", "", "", page.cursor)


def test_task_list_rejects_an_unknown_state_and_a_too_large_limit(rig: TaskOperationsRig) -> None:
    with pytest.raises(Invalid):
        rig.store.read(task_list.list_tasks, UNIVERSE, "lost")
    with pytest.raises(Invalid):
        rig.store.read(task_list.list_tasks, UNIVERSE, limit=1_000_000)

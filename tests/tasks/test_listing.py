"""Lists of tasks: by every condition, in pages that together hold each task once."""

from __future__ import annotations

import random

import pytest

from holdfast.clock import S
from holdfast.errors import Invalid
from holdfast.tasks import coordinator, listing
from holdfast.tasks.coordinator import End
from holdfast.tasks.look import TaskRow, row_of
from holdfast.tasks.rows import pack_int
from holdfast.tasks.states import State
from tests.tasks.rig import KEYS, LEASE_NS, UNIVERSE, Desk

SEEDS = range(6)
PAGES_MAX = 500


def all_of(desk: Desk, limit: int = 100, **asked: str) -> list[int]:
    """All pages of a list."""
    found: list[int] = []
    cursor = ""
    for _ in range(PAGES_MAX):
        page = desk.store.read(
            listing.page, UNIVERSE, **{"cursor": cursor, "limit": limit, **asked}
        )
        found += [row.seq for row in page.rows]
        cursor = page.cursor
        if not cursor:
            return found
    raise AssertionError("a list without an end")


def everything(desk: Desk, last: int) -> list[TaskRow]:
    rows = [desk.store.read(row_of, KEYS, pack_int(seq)) for seq in range(1, last + 1)]
    return [row for row in rows if row is not None]


def fitting(rows: list[TaskRow], where: str, queue: str, name: str) -> set[int]:
    return {
        row.seq
        for row in rows
        if queue in ("", row.spec.queue)
        and name in ("", row.spec.name)
        and (where in ("", row.where) or (where == "waiting" and row.state is State.WAITING))
    }


def history(desk: Desk, seed: int, steps: int = 45) -> int:
    """Tasks in all places, at random; how many."""
    dice = random.Random(seed)
    last = 0
    desk.limit("b", per_key=1)
    for _ in range(steps):
        what = dice.random()
        if what < 0.5:
            open_ = [seq for seq in range(1, last + 1) if desk.kept(seq)]
            last = desk.one(
                name=dice.choice(["x", "y"]),
                queue=dice.choice(["a", "b"]),
                priority=dice.choice([0, 5]),
                delay_ns=dice.choice([0, 0, 0, 10 * S, 9999 * S]),
                limit=dice.choice(["", "", "k"]),
                after=tuple(dice.sample(open_, 1)) if open_ and dice.random() < 0.2 else (),
            )
        elif what < 0.85:
            names = dice.choice([(), ("x",)])
            asked = (["a", "b"], dice.randint(1, 3), dice.random() < 0.3, (), names)
            for grant in desk.do(coordinator.lease, "w", *asked).grants:
                end = dice.random()
                if end < 0.3:
                    desk.complete(grant)
                elif end < 0.6:
                    desk.fail(grant, dice.choice([End.FAILED, End.REFUSED, End.RELEASED]))
        elif what < 0.92 and last:
            desk.cancel(dice.randint(1, last))
        else:
            desk.later(dice.choice([S, LEASE_NS]))
    return last


@pytest.mark.parametrize("seed", SEEDS)
def test_each_list_holds_what_it_says_once(desk: Desk, seed: int) -> None:
    rows = everything(desk, history(desk, seed))
    for where in ("", *listing.WHERE):
        for queue in ("", "a", "b"):
            for name in ("", "x"):
                expected = fitting(rows, where, queue, name)
                for limit in (1, 3, 100):
                    found = all_of(desk, limit, where=where, queue=queue, name=name)
                    assert sorted(found) == sorted(expected), (where, queue, name, limit)


def test_a_walk_that_looks_at_few_goes_on_from_there(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = everything(desk, history(desk, 1))
    monkeypatch.setattr(listing, "LOOKED_MAX", 3)
    for where in ("", *listing.WHERE):
        found = all_of(desk, where=where, name="x")
        assert sorted(found) == sorted(fitting(rows, where, "", "x"))


def test_the_histories_have_tasks_everywhere(desk: Desk) -> None:
    found: set[str] = set()
    for seed in SEEDS:
        found |= {row.where for row in everything(desk, history(desk, seed))}
    assert found == set(listing.WHERE) - {"waiting"}


def test_a_page_looks_at_no_more_than_it_may(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("y", "y", "y", "x"):
        desk.one(name=name)
    monkeypatch.setattr(listing, "LOOKED_MAX", 2)
    page = desk.store.read(listing.page, UNIVERSE, "ready", "", "x")
    assert page.rows == []
    assert page.cursor
    assert all_of(desk, where="ready", name="x") == [4]


def test_lists_without_a_state_are_newest_first(desk: Desk) -> None:
    for _ in range(4):
        desk.one()
    assert all_of(desk, limit=3) == [4, 3, 2, 1]


def test_ready_tasks_are_listed_as_they_will_be_granted(desk: Desk) -> None:
    low, high, next_low = desk.one(), desk.one(priority=5), desk.one()
    assert all_of(desk, where="ready") == [high, low, next_low]
    assert [grant.seq for grant in desk.lease()] == [high, low, next_low]


def test_delayed_tasks_are_listed_by_their_time(desk: Desk) -> None:
    late, soon = desk.one(delay_ns=9 * S), desk.one(delay_ns=3 * S)
    assert all_of(desk, where="delayed") == [soon, late]


def test_a_task_that_was_leased_again_is_listed_once(desk: Desk) -> None:
    seq = desk.one()
    desk.fail(desk.leased(seq), End.RELEASED)
    desk.leased(seq)
    assert all_of(desk, limit=1, where="leased") == [seq]


def test_a_list_that_the_counts_say_is_empty_is_not_walked(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.one()
    monkeypatch.setattr(listing, "_walk", None)
    assert desk.store.read(listing.page, UNIVERSE, "failed") == listing.Page([], "")


@pytest.mark.parametrize("cursor", ["?", "AAAA", "kgEC", "a" * 1000])
def test_a_cursor_that_is_none_of_ours_is_refused(desk: Desk, cursor: str) -> None:
    desk.one()
    with pytest.raises(Invalid):
        desk.store.read(listing.page, UNIVERSE, "ready", "", "", cursor)


def test_a_cursor_of_another_list_is_refused(desk: Desk) -> None:
    for _ in range(3):
        desk.one()
    page = desk.store.read(listing.page, UNIVERSE, "ready", limit=1)
    with pytest.raises(Invalid):
        desk.store.read(listing.page, UNIVERSE, "", "", "", page.cursor)


def test_what_is_asked_for_must_exist(desk: Desk) -> None:
    with pytest.raises(Invalid):
        desk.store.read(listing.page, UNIVERSE, "lost")
    with pytest.raises(Invalid):
        desk.store.read(listing.page, UNIVERSE, limit=1_000_000)

"""Runs: tasks submitted together are one row while they wait, and one while they are leased.

The desk compares the rows with the log, and counts them again, after every step.
"""

from __future__ import annotations

import msgspec
import pytest

from holdfast.errors import Invalid
from holdfast.store.api import Txn
from holdfast.tasks import coordinator as tasks
from holdfast.tasks import giving, listing
from holdfast.tasks import lease as leases
from holdfast.tasks.coordinator import Answer, End, Grant, Hold, New, Report
from holdfast.tasks.rows import Counts, Spec
from holdfast.tasks.runs import Held, Open, next_number, of_runs, run_of, run_row
from holdfast.tasks.verify import rows_of
from tests.tasks.rig import KEYS, LEASE_NS, UNIVERSE, Desk


def rows(desk: Desk, space: bytes) -> int:
    def count(txn: Txn) -> int:
        return len(list(rows_of(txn, space)))

    found: int = desk.store.read(count)
    return found


def waiting(desk: Desk) -> list[tuple[int, int]]:
    def look(txn: Txn) -> list[tuple[int, int]]:
        return [run_of(row) for _, row in rows_of(txn, KEYS.ready)]

    return desk.store.read(look)


def done(*grants: Grant) -> list[Report]:
    return [Report(grant.seq, grant.lease, End.OK, b"%d" % grant.seq) for grant in grants]


def test_tasks_submitted_together_are_one_row(desk: Desk) -> None:
    assert desk.submit(*[b"x"] * 50) == list(range(1, 51))
    assert waiting(desk) == [(1, 50)]
    assert [grant.seq for grant in desk.lease(20)] == list(range(1, 21))
    assert waiting(desk) == [(21, 50)]
    assert desk.counts() == Counts(ready=30, leased=20)


def test_arguments_are_each_task_s_own(desk: Desk) -> None:
    desk.submit(*[b"%d" % n for n in range(300)])
    assert [grant.args for grant in desk.lease(280)] == [b"%d" % n for n in range(280)]
    assert [grant.args for grant in desk.lease(280)] == [b"%d" % n for n in range(280, 300)]


def test_what_is_leased_of_a_run_has_no_status_until_it_ends(desk: Desk) -> None:
    desk.submit(*[b"x"] * 10)
    grants = desk.lease(10)
    assert {grant.lease for grant in grants} == {2}
    assert (rows(desk, KEYS.statuses), rows(desk, KEYS.held), rows(desk, KEYS.held_at)) == (0, 1, 1)
    assert desk.states(1, 10) == ["LEASED", "LEASED"]
    assert desk.settle(*done(*grants)) == [Answer.COMMITTED] * 10
    assert (rows(desk, KEYS.held), rows(desk, KEYS.held_at), rows(desk, KEYS.expiries)) == (0, 0, 0)
    assert [desk.status(seq).result for seq in (1, 10)] == [b"1", b"10"]


@pytest.mark.parametrize("order", [[2, 0, 4, 1, 3], [4, 3, 2, 1, 0], [1, 3, 0, 4, 2]])
def test_they_end_in_any_order(desk: Desk, order: list[int]) -> None:
    desk.submit(*[b"x"] * 5)
    grants = desk.lease(5)
    for at in order:
        assert desk.settle(*done(grants[at])) == [Answer.COMMITTED]
    assert desk.counts() == Counts(completed=5)
    assert rows(desk, KEYS.held) == rows(desk, KEYS.expiries) == 0


def test_the_same_report_again_gets_the_first_answer(desk: Desk) -> None:
    desk.submit(b"a", b"b", b"c")
    first, second, _ = desk.lease(3)
    assert desk.settle(*done(first, first)) == [Answer.COMMITTED] * 2
    wrong = Report(second.seq, second.lease + 2, End.OK, b"")
    assert desk.settle(*done(first), wrong) == [Answer.COMMITTED, Answer.REJECTED]
    assert desk.states(1, 2, 3) == ["COMPLETED", "LEASED", "LEASED"]


def test_a_report_under_another_run_s_lease_is_refused(desk: Desk) -> None:
    desk.submit(b"a", b"b")
    desk.submit(b"c", b"d")
    [a, _], [c, _] = desk.lease(2), desk.lease(2)
    assert a.lease != c.lease
    assert desk.settle(Report(a.seq, c.lease)) == [Answer.CANCELLED]
    assert desk.settle(*done(a, c)) == [Answer.COMMITTED] * 2


def test_a_task_that_fails_leaves_its_run(desk: Desk) -> None:
    desk.submit(b"a", b"b", b"c")
    first, second, third = desk.lease(3)
    assert desk.fail(second, error="no luck") == Answer.COMMITTED
    assert desk.states(1, 2, 3) == ["LEASED", "WAITING", "LEASED"]
    assert desk.settle(*done(first, third)) == [Answer.COMMITTED] * 2
    desk.later(LEASE_NS)
    again = desk.leased(2)
    assert (again.attempt, of_runs(again.lease)) == (2, False)


def test_a_task_is_cancelled_in_the_middle_of_a_run_that_waits(desk: Desk) -> None:
    desk.submit(*[b"x"] * 5)
    assert desk.cancel(3, 5) == [True, True]
    assert waiting(desk) == [(1, 2), (4, 4)]
    assert [grant.seq for grant in desk.lease()] == [1, 2, 4]


def test_a_task_is_cancelled_in_the_middle_of_a_run_that_is_leased(desk: Desk) -> None:
    desk.submit(*[b"x"] * 5)
    grants = desk.lease()
    assert desk.cancel(3) == [True]
    assert desk.settle(*done(*grants)) == [
        Answer.COMMITTED, Answer.COMMITTED, Answer.CANCELLED, Answer.COMMITTED, Answer.COMMITTED,
    ]  # fmt: skip


def test_a_run_expires_but_for_what_was_extended(desk: Desk) -> None:
    desk.submit(*[b"x"] * 4)
    grants = desk.lease()
    desk.later(LEASE_NS // 2)
    assert all(desk.extend(*(Hold(grant.seq, grant.lease) for grant in grants[1:3])))
    desk.settle(*done(grants[0]))
    desk.later(LEASE_NS // 2)
    desk.maintain()
    assert desk.states(1, 2, 3, 4) == ["COMPLETED", "LEASED", "LEASED", "WAITING"]
    assert desk.settle(*done(grants[3])) == [Answer.CANCELLED]
    assert desk.settle(*done(grants[1])) == [Answer.COMMITTED]
    desk.later(LEASE_NS // 2)
    desk.maintain()
    assert desk.states(3) == ["WAITING"]
    assert rows(desk, KEYS.held) == rows(desk, KEYS.held_at) == rows(desk, KEYS.expiries) == 0


def test_a_report_after_its_time_is_refused_though_nobody_has_looked(desk: Desk) -> None:
    desk.submit(b"a", b"b")
    first, _ = desk.lease()
    desk.later(LEASE_NS)
    assert desk.settle(*done(first)) == [Answer.CANCELLED]
    assert desk.states(1, 2) == ["LEASED", "LEASED"]
    desk.maintain()
    assert desk.counts() == Counts(suspect=2)


def test_a_task_that_another_waits_for_leaves_its_run(desk: Desk) -> None:
    desk.submit(*[b"x"] * 4)
    held = desk.lease(2)
    last = desk.one(after=(2, 3))
    assert waiting(desk) == [(3, 3), (4, 4)]
    assert desk.settle(*done(*held)) == [Answer.COMMITTED] * 2
    assert desk.settle(*done(*desk.lease())) == [Answer.COMMITTED] * 2
    assert desk.states(last) == ["WAITING"]
    assert desk.complete(desk.leased(last)) == Answer.COMMITTED


def test_a_task_that_is_leased_and_awaited_still_expires(desk: Desk) -> None:
    desk.submit(b"a", b"b")
    first, second = desk.lease()
    desk.one(after=(1,))
    desk.settle(*done(second))
    desk.later(LEASE_NS)
    desk.maintain()
    assert desk.states(1) == ["WAITING"]
    assert desk.settle(*done(first)) == [Answer.CANCELLED]


def test_a_batch_is_cut_into_runs_by_whatever_is_not_alike(desk: Desk) -> None:
    desk.submit(
        New(b"a"), New(b"b"), New(b"c", key="k"), New(b"d", after=(-3,)), New(b"e"), New(b"f")
    )
    assert waiting(desk) == [(1, 2), (3, 3), (5, 6)]


def test_a_task_may_wait_for_one_before_it_in_its_batch(desk: Desk) -> None:
    desk.submit(New(b"a"), New(b"b"), New(b"c"), New(b"d", after=(-2,)))
    assert waiting(desk) == [(1, 1), (2, 2), (3, 3)]
    desk.settle(*done(*desk.lease()))
    assert desk.complete(desk.leased(4)) == Answer.COMMITTED


def test_runs_of_different_priority_under_one_lease(desk: Desk) -> None:
    desk.submit(b"a", b"b", b"c")
    desk.submit(b"d", b"e", priority=5)
    grants = desk.lease(4)
    assert [grant.seq for grant in grants] == [4, 5, 1, 2]
    assert len({grant.lease for grant in grants}) == 1
    desk.settle(*done(*grants[1:3]))
    desk.later(LEASE_NS)
    desk.maintain()
    assert desk.states(1, 2, 4, 5) == ["COMPLETED", "WAITING", "WAITING", "COMPLETED"]


def test_runs_and_others_have_leases_of_their_own(desk: Desk) -> None:
    desk.submit(b"a")
    desk.submit(b"b", b"c")
    desk.submit(b"d")
    numbers = [grant.lease for grant in desk.lease()]
    assert [of_runs(number) for number in numbers] == [False, True, True, False]
    assert numbers[0] == numbers[3]
    assert [grant.lease for grant in desk.lease()] == []


def test_a_run_that_nobody_here_knows_is_put_aside(desk: Desk) -> None:
    desk.submit(*[b"x"] * 5, name="other")
    desk.submit(b"y")
    assert [grant.seq for grant in desk.lease(2, names=["work"])] == [6]
    assert desk.counts().stray + desk.counts().ready == 5
    assert [grant.seq for grant in desk.lease(names=["other"])] == [1, 2, 3, 4, 5]


def test_a_lease_takes_no_more_of_a_run_than_fits(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (leases, giving):
        monkeypatch.setattr(module, "LEASE_BYTES_MAX", 2_500)
    desk.submit(*[bytes(1_000)] * 7)
    assert [grant.seq for grant in desk.lease()] == [1, 2, 3]
    assert [grant.seq for grant in desk.lease()] == [4, 5, 6]
    assert [grant.seq for grant in desk.lease()] == [7]


def test_a_queue_s_limit_cuts_a_run(desk: Desk) -> None:
    desk.limit(concurrency=3)
    desk.submit(*[b"x"] * 5)
    first, *others = desk.lease()
    assert [first.seq, *(grant.seq for grant in others)] == [1, 2, 3]
    desk.settle(*done(first))
    assert [grant.seq for grant in desk.lease()] == [4]


def test_a_list_of_what_waits_goes_on_though_the_run_has_moved(desk: Desk) -> None:
    desk.submit(*[b"x"] * 10)

    def page(where: str, cursor: str = "") -> tuple[list[int], str]:
        found = desk.store.read(listing.page, UNIVERSE, where, "", "", cursor, 4)
        return [row.seq for row in found.rows], found.cursor

    seqs, cursor = page("ready")
    assert seqs == [1, 2, 3, 4]
    grants = desk.lease(2)
    seqs, cursor = page("ready", cursor)
    assert seqs == [5, 6, 7, 8]
    grants += desk.lease(7)
    assert page("ready", cursor)[0] == [10]
    seqs, cursor = page("leased")
    assert seqs == [1, 2, 3, 4]
    desk.settle(*done(*grants[2:6]))
    assert page("leased", cursor)[0] == [7, 8, 9]


def test_the_numbers_of_leases_tell_runs_from_others() -> None:
    assert [next_number(n, runs=True) for n in (0, 1, 2, 3)] == [2, 2, 4, 4]
    assert [next_number(n, runs=False) for n in (0, 1, 2, 3)] == [1, 3, 3, 5]
    assert [of_runs(n) for n in (-2, 0, 1, 2, 1 << 64)] == [False, False, False, True, False]


def test_a_row_names_its_tasks() -> None:
    for first, last in ((1, 1), (1, 2), (255, 256), (65_535, 70_000), (1, 1 << 40)):
        assert run_of(run_row(first, last)) == (first, last)


def test_tasks_are_taken_out_of_a_lease_one_by_one() -> None:
    one = Open(2, Held("w", 10, 0, [(1, 3, b"a"), (7, 9, b"b")], [1, 7]))
    assert [one.at(seq) for seq in (0, 1, 3, 4, 6, 7, 9, 10)] == [-1, 0, 0, -1, -1, 1, 1, -1]
    assert (one.take(8), one.take(8), one.take(5)) == (b"b", None, None)
    assert one.tasks() == [1, 2, 3, 7, 9]
    assert [one.take(seq) for seq in (9, 1, 3, 2, 7)] == [b"b", b"a", b"a", b"a", b"b"]
    assert one.tasks() == []


def test_tasks_of_different_kinds_in_one_batch_are_different_runs(desk: Desk) -> None:
    specs = [Spec("work", lease_ns=LEASE_NS), Spec("work", priority=1, lease_ns=LEASE_NS)]
    desk.do(tasks.submit_all, specs, [0, 0, 1, 1, 0], [New(b"%d" % n) for n in range(5)])
    assert waiting(desk) == [(3, 4), (1, 2), (5, 5)]
    assert [grant.args for grant in desk.lease()] == [b"2", b"3", b"0", b"1", b"4"]


def test_a_long_run_that_nobody_here_knows_is_put_aside_a_bounded_number_at_a_time(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "PARKED_MAX", 30)
    desk.submit(*[b"x"] * 70, name="other")
    desk.submit(b"y", b"z")
    asks = 0
    while not (grants := desk.lease(2, names=["work"])):
        asks += 1
        assert desk.counts().stray == 30 * asks
    assert ([grant.seq for grant in grants], asks) == ([71, 72], 2)


def test_a_cursor_of_another_list_is_refused(desk: Desk) -> None:
    desk.submit(*[b"x"] * 6)
    desk.lease(3)
    pages = {
        where: desk.store.read(listing.page, UNIVERSE, where, "", "", "", 1)
        for where in ("ready", "leased")
    }
    for where, other in (("ready", "leased"), ("leased", "ready")):
        with pytest.raises(Invalid, match="another list"):
            desk.store.read(listing.page, UNIVERSE, where, "", "", pages[other].cursor, 1)


def test_many_of_a_run_are_cancelled_in_one_go(desk: Desk) -> None:
    """What a scan costs does not grow with what was written before it in its transaction."""
    desk.submit(*[b"x"] * 3_000)
    held = desk.lease(1_000)
    assert desk.cancel(*range(1, 3_000, 2)) == [True] * 1_500
    assert desk.settle(*done(*held[1::2])) == [Answer.COMMITTED] * 500
    assert desk.counts() == Counts(ready=1_000, completed=500, dead=1_500)


def test_a_release_that_knows_no_runs_stops_at_them(desk: Desk) -> None:
    """It must not take what it does not know for a batch of leases without tasks, and delete it."""
    desk.submit(b"a", b"b")
    desk.lease()
    desk.one(after=(1,))
    [(_, row)] = desk.store.read(lambda txn: list(rows_of(txn, KEYS.expiries)))
    before = tuple[int, str, list[int]]
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(row, type=before)


def test_one_task_from_the_front_of_a_run_has_a_status(desk: Desk) -> None:
    """Where kinds take turns, tasks are granted one by one: a run of one would be more rows, not less."""
    desk.submit(*[b"x"] * 3)
    [grant] = desk.lease(1)
    assert (of_runs(grant.lease), rows(desk, KEYS.statuses), rows(desk, KEYS.held)) == (False, 1, 0)
    assert waiting(desk) == [(2, 3)]
    assert desk.settle(*done(grant)) == [Answer.COMMITTED]

"""Looking at one task, at queues, and the names of tasks and leases."""

from __future__ import annotations

import pytest

from holdfast.clock import S
from holdfast.errors import NotFound
from holdfast.tasks import look
from holdfast.tasks.coordinator import End, Hold
from holdfast.tasks.ids import BadLeaseId, BadTaskId, LeaseId, TaskId, parse_lease, parse_task
from tests.tasks.rig import LEASE_NS, UNIVERSE, Desk


def see(desk: Desk, seq: int) -> look.Seen:
    return desk.store.read(look.see, UNIVERSE, TaskId(1, seq))


# -- names -----------------------------------------------------------------------------------------


def test_names_are_read_as_they_are_written() -> None:
    task, lease = TaskId(1, 42), LeaseId(3, 7, 42)
    assert (str(task), str(lease)) == ("1-42", "3-7-42")
    assert (parse_task("1-42"), parse_lease("3-7-42")) == (task, lease)


@pytest.mark.parametrize(
    "text",
    ["", "1", "1-", "-1", "1-0", "0-1", "01-1", "1-01", "1-1-1", "1 -1", "+1-1", "1-1\n", "a-b",
     "१-१", "1-9223372036854775808", "1-99999999999999999999999"],
)  # fmt: skip
def test_a_name_that_is_no_task_is_told_so(text: str) -> None:
    with pytest.raises(BadTaskId):
        parse_task(text)


@pytest.mark.parametrize(
    "text", ["", "1-1", "1-1-0", "1-1-1-1", "x-1-1", "1-1-9223372036854775808"]
)
def test_a_name_that_is_no_lease_is_told_so(text: str) -> None:
    with pytest.raises(BadLeaseId):
        parse_lease(text)


def test_a_task_of_another_generation_is_not_the_one_of_its_number(desk: Desk) -> None:
    seq = desk.one()
    with pytest.raises(NotFound):
        desk.store.read(look.find, UNIVERSE, TaskId(2, seq))


# -- one task --------------------------------------------------------------------------------------


def test_a_task_is_in_one_place_and_says_why(desk: Desk) -> None:
    ready = desk.one()
    seen = see(desk, ready)
    assert (seen.row.where, seen.lease) == ("ready", None)
    grant = desk.leased(ready)
    seen = see(desk, ready)
    assert (seen.row.where, seen.why) == ("leased", "w has it, attempt 1")
    assert seen.lease == LeaseId(1, grant.lease, ready)
    desk.complete(grant, b"\x03")
    seen = see(desk, ready)
    assert (seen.row.where, seen.result, seen.lease) == ("completed", b"\x03", None)


def test_a_delayed_task_says_since_when_it_waits_for_what(desk: Desk) -> None:
    seq = desk.one(delay_ns=5 * S)
    assert (see(desk, seq).row.where, see(desk, seq).why) == (
        "delayed",
        "its time has not come yet",
    )
    failed = desk.one()
    desk.fail(desk.leased(failed))
    assert see(desk, failed).row.where == "delayed"
    assert see(desk, failed).row.not_before_ns > desk.store.now_ns()


def test_a_blocked_task_names_those_that_are_open(desk: Desk) -> None:
    done, open_ = desk.one(), desk.one()
    desk.complete(desk.leased(done))
    seq = desk.one(after=(done, open_))
    seen = see(desk, seq)
    assert seen.row.where == "blocked"
    assert seen.after == (TaskId(1, done), TaskId(1, open_))
    assert f"1-{open_}" in seen.why
    assert f"1-{done}" not in seen.why


def test_a_parked_task_names_its_limit(desk: Desk) -> None:
    desk.limit(per_key=1)
    first, second = desk.one(limit="ada"), desk.one(limit="ada")
    assert [grant.seq for grant in desk.lease()] == [first]
    seen = see(desk, second)
    assert seen.row.where == "parked"
    assert "'ada'" in seen.why


def test_a_task_of_a_full_queue_says_so(desk: Desk) -> None:
    desk.limit(concurrency=1)
    first, second = desk.one(), desk.one()
    desk.leased(first)
    assert "as many as may" in see(desk, second).why


def test_a_suspect_is_told_from_the_others(desk: Desk) -> None:
    seq = desk.one()
    desk.leased(seq)
    desk.later(LEASE_NS)
    assert "is over" in see(desk, seq).why
    desk.maintain()
    assert see(desk, seq).row.where == "suspect"


def test_ends_say_how_it_came_to_them(desk: Desk) -> None:
    failed, dead = desk.one(), desk.one()
    desk.fail(desk.leased(failed), End.REFUSED, reason="declined", error="no")
    desk.cancel(dead, reason="changed our mind")
    assert see(desk, failed).row.where == "failed"
    assert "changed our mind" in see(desk, dead).why


def test_a_redriven_task_and_the_one_in_its_place_know_each_other(desk: Desk) -> None:
    old = desk.one()
    desk.cancel(old)
    [new] = desk.redrive(old)
    assert see(desk, old).redriven_by == TaskId(1, new)
    assert see(desk, new).redrive_of == TaskId(1, old)


def test_large_arguments_and_results_are_seen_whole(desk: Desk) -> None:
    seq = desk.one(b"x" * 10_000)
    desk.complete(desk.leased(seq), b"y" * 10_000)
    seen = see(desk, seq)
    assert (seen.args, seen.result) == (b"x" * 10_000, b"y" * 10_000)


# -- leases and queues -----------------------------------------------------------------------------


def test_a_lease_that_was_given_is_told_from_one_that_never_was(desk: Desk) -> None:
    seq, other = desk.one(), desk.one()
    grant = desk.leased(seq)

    def given(generation: int, lease: int, task: int) -> bool:
        return desk.store.read(look.given, UNIVERSE, LeaseId(generation, lease, task))

    assert given(1, grant.lease, seq)
    desk.complete(grant)
    assert given(1, grant.lease, seq), "also when it is over"
    assert not given(1, grant.lease + 1, seq)
    assert not given(1, grant.lease, other)
    assert not given(2, grant.lease, seq), "of a generation that is yet to come"


def test_queues_are_told_with_counts_and_limits(desk: Desk) -> None:
    desk.one(queue="b")
    desk.limit("a", concurrency=2)
    found = desk.store.read(look.queues, UNIVERSE)
    assert [(row.queue, row.counts.ready, row.limits.concurrency) for row in found] == [
        ("a", 0, 2), ("b", 1, 0),
    ]  # fmt: skip


def test_a_queue_offers_what_is_ready_or_suspect(desk: Desk) -> None:
    def offered() -> list[str]:
        return desk.store.read(look.offering, UNIVERSE, ["a", "b", "c"])

    desk.one(queue="a")
    desk.one(queue="b", delay_ns=S)
    assert offered() == ["a"]
    [grant] = desk.lease(queues=["a"])
    assert offered() == []
    desk.extend(Hold(grant.seq, grant.lease))
    desk.later(LEASE_NS)
    desk.maintain()
    assert offered() == ["a", "b"]

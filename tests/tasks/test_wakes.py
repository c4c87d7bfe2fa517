"""Whoever waits for work is woken by every decision after which there is some, and by no other queue's."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.clock import S
from holdfast.tasks import coordinator as tasks
from holdfast.tasks.coordinator import End, New, Report
from tests.tasks.rig import KEYS, LEASE_NS, Desk


def last(desk: Desk, queue: str = "default") -> int:
    """The commit that last woke those who wait for a queue."""
    return desk.store.wait(KEYS.queue_topic(queue), 0, 0.0)


def woken(desk: Desk, act: Callable[[], object], queue: str = "default") -> bool:
    before = last(desk, queue)
    act()
    return last(desk, queue) > before


def test_a_new_task_wakes_its_queue_and_no_other(desk: Desk) -> None:
    desk.one(queue="other")
    desk.one()
    before = last(desk, "other")
    assert woken(desk, lambda: desk.one())
    assert last(desk, "other") == before


def test_a_delayed_task_wakes_those_who_would_sleep_too_long(desk: Desk) -> None:
    assert woken(desk, lambda: desk.one(delay_ns=S))


def test_a_task_whose_time_has_come_wakes_when_somebody_sweeps(desk: Desk) -> None:
    desk.one(delay_ns=S)
    desk.later(S)
    assert woken(desk, desk.maintain)


def test_a_failed_attempt_wakes_for_the_next(desk: Desk) -> None:
    seq = desk.one()
    grant = desk.leased(seq)
    assert woken(desk, lambda: desk.fail(grant))


def test_a_released_task_wakes(desk: Desk) -> None:
    seq = desk.one()
    grant = desk.leased(seq)
    assert woken(desk, lambda: desk.fail(grant, End.RELEASED))


def test_an_expired_lease_wakes(desk: Desk) -> None:
    desk.leased(desk.one())
    desk.later(LEASE_NS)
    assert woken(desk, desk.maintain)


def test_a_dependent_that_can_run_wakes_its_own_queue(desk: Desk) -> None:
    seq = desk.one()
    desk.one(after=(seq,), queue="other")
    grant = desk.leased(seq)
    assert woken(desk, lambda: desk.complete(grant), "other")


@pytest.mark.parametrize("limit", ["", "a"])
def test_a_place_in_a_limited_queue_wakes(desk: Desk, limit: str) -> None:
    desk.limit(concurrency=1)
    desk.submit(New(b"x", limit=limit), New(b"y"))
    [grant] = desk.lease()
    assert woken(desk, lambda: desk.complete(grant))


def test_a_key_that_is_free_again_wakes(desk: Desk) -> None:
    desk.limit(per_key=1)
    desk.submit(*[New(b"x", limit="a")] * 2)
    [grant] = desk.lease()
    assert woken(desk, lambda: desk.complete(grant))


def test_a_cancelled_task_wakes_for_the_next_of_its_key(desk: Desk) -> None:
    desk.limit(per_key=1)
    first, *_ = desk.submit(*[New(b"x", limit="a")] * 2)
    desk.lease()
    assert woken(desk, lambda: desk.cancel(first))


def test_another_limit_wakes(desk: Desk) -> None:
    desk.limit(concurrency=1)
    desk.submit(b"x", b"y")
    desk.lease()
    assert woken(desk, lambda: desk.limit(concurrency=2))


def test_a_redriven_task_wakes(desk: Desk) -> None:
    seq = desk.one()
    desk.cancel(seq)
    assert woken(desk, lambda: desk.redrive(seq))


def test_a_task_that_is_put_aside_wakes_those_who_may_know_it(desk: Desk) -> None:
    desk.one(name="old")
    assert woken(desk, lambda: desk.lease(names=["new"]))


def test_a_worker_of_something_that_was_cancelled_is_told(desk: Desk) -> None:
    seq = desk.one()
    desk.leased(seq)
    before = desk.store.wait(KEYS.revoked, 0, 0.0)
    desk.cancel(seq)
    assert desk.store.wait(KEYS.revoked, 0, 0.0) > before


@pytest.mark.parametrize("end", ["completed", "failed", "dead"])
def test_whoever_waits_for_a_task_is_woken_by_its_end(desk: Desk, end: str) -> None:
    seq = desk.one()
    grant = desk.leased(seq)
    topic = KEYS.task_topic(seq)
    before = desk.store.wait(topic, 0, 0.0)
    if end == "completed":
        desk.complete(grant)
    elif end == "failed":
        desk.fail(grant, End.REFUSED)
    else:
        desk.cancel(seq)
    assert desk.store.wait(topic, 0, 0.0) > before


def test_a_completion_that_frees_nobody_wakes_nobody(desk: Desk) -> None:
    desk.submit(b"x", b"y")
    first, _ = desk.lease()
    assert not woken(desk, lambda: desk.settle(Report(first.seq, first.lease)))


def test_a_lease_that_grants_what_there_is_wakes_nobody(desk: Desk) -> None:
    desk.one()
    assert not woken(desk, lambda: desk.do(tasks.lease, "w", ["default"], 5))

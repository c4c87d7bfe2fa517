"""Leases: who is granted what, in which order, for how long, and what becomes of it when time is up."""

from __future__ import annotations

import pytest

from holdfast.clock import S
from holdfast.errors import Invalid
from holdfast.tasks import coordinator as tasks
from holdfast.tasks import lease as leases
from holdfast.tasks.coordinator import Answer, End, Hold, Leased, New, Report
from holdfast.tasks.rows import Counts
from tests.tasks.rig import LEASE_NS, UNIVERSE, Desk

# -- who is next ---------------------------------------------------------------------------------


def test_the_oldest_is_granted_first(desk: Desk) -> None:
    seqs = desk.submit(b"a", b"b", b"c")
    assert [grant.seq for grant in desk.lease(2)] == seqs[:2]
    assert [grant.seq for grant in desk.lease(2)] == seqs[2:]


def test_a_higher_priority_goes_before_an_older_task(desk: Desk) -> None:
    low, high, higher = desk.one(priority=-1), desk.one(), desk.one(priority=9)
    assert [grant.seq for grant in desk.lease()] == [higher, high, low]


def test_queues_are_served_in_the_order_asked_for(desk: Desk) -> None:
    a, b = desk.one(queue="a"), desk.one(queue="b")
    assert [grant.seq for grant in desk.lease(queues=["b", "a"])] == [b, a]


def test_a_queue_that_is_not_asked_for_is_left_alone(desk: Desk) -> None:
    desk.one(queue="a")
    assert desk.lease(queues=["b", "a2"]) == []
    assert desk.counts("a") == Counts(ready=1)


def test_nobody_is_granted_what_another_has(desk: Desk) -> None:
    desk.one()
    assert len(desk.lease(worker="v")) == 1
    assert desk.lease(worker="w") == []


def test_a_grant_carries_what_its_worker_needs(desk: Desk) -> None:
    seq = desk.one(b"args", name="resize", queue="q", window_ns=7 * S)
    [grant] = desk.lease(worker="v", queues=["q"])
    assert (grant.seq, grant.name, grant.args, grant.queue) == (seq, "resize", b"args", "q")
    assert (grant.attempt, grant.lease_ns, grant.window_ns) == (1, LEASE_NS, 7 * S)
    assert (grant.generation, grant.suspect) == (desk.store.generation, False)


def test_asking_for_none_grants_none(desk: Desk) -> None:
    desk.one()
    assert desk.lease(0) == []


@pytest.mark.parametrize("limit", [-1, 1_000_000])
def test_asking_for_too_many_is_refused(desk: Desk, limit: int) -> None:
    with pytest.raises(Invalid):
        desk.lease(limit)


@pytest.mark.parametrize("worker", ["", "w" * 1000])
def test_a_worker_has_a_name(desk: Desk, worker: str) -> None:
    with pytest.raises(Invalid):
        desk.lease(worker=worker)


def test_one_grant_is_of_a_thousand_tasks_at_most(desk: Desk) -> None:
    desk.submit(*[b"x"] * 1200)
    assert len(desk.lease(5000)) == leases.LEASE_BATCH_MAX
    assert desk.counts().ready == 200


def test_large_arguments_are_granted_a_few_at_a_time(desk: Desk) -> None:
    desk.submit(*[b"x" * 1_000_000] * 8)
    granted = []
    while grants := desk.lease(100):
        assert sum(len(grant.args) for grant in grants[:-1]) < leases.LEASE_BYTES_MAX
        granted.append(len(grants))
    assert sum(granted) == 8
    assert len(granted) > 1


def test_leases_of_another_length_are_another_batch(desk: Desk) -> None:
    desk.submit(b"a", b"b")
    desk.one(lease_ns=LEASE_NS * 2)
    short, also_short, long = desk.lease()
    assert short.lease == also_short.lease != long.lease


# -- names and kinds -----------------------------------------------------------------------------


def known(desk: Desk, *names: str, limit: int = 100) -> list[int]:
    """What a worker is granted that knows these tasks only."""
    return [grant.seq for grant in desk.lease(limit, names=names)]


def test_a_worker_is_granted_only_what_it_knows(desk: Desk) -> None:
    old, new = desk.one(name="old"), desk.one(name="new")
    assert known(desk, "new") == [new]
    assert desk.counts() == Counts(stray=1, leased=1)
    assert known(desk, "old", "new") == [old]


def test_whoever_names_nothing_knows_all(desk: Desk) -> None:
    old = desk.one(name="old")
    assert known(desk, "new") == []
    assert known(desk) == [old]


def test_what_is_put_aside_keeps_its_priority(desk: Desk) -> None:
    urgent = desk.one(name="old", priority=5)
    assert known(desk, "new") == []
    desk.one(name="new")
    assert known(desk, "new", "old", limit=1) == [urgent]


def test_what_nobody_knows_does_not_hold_up_the_others(desk: Desk) -> None:
    desk.submit(*[b"x"] * 50, name="old")
    new = desk.one(name="new")
    assert known(desk, "new", limit=1) == [new]


def test_a_task_that_is_put_aside_can_be_cancelled(desk: Desk) -> None:
    old = desk.one(name="old")
    known(desk, "new")
    assert desk.cancel(old) == [True]
    assert desk.counts() == Counts(dead=1)


def test_one_that_is_put_aside_does_not_hold_its_limit(desk: Desk) -> None:
    desk.limit(per_key=1)
    first = desk.one(name="new", limit="a")
    desk.one(name="old", limit="a")
    third = desk.one(name="new", limit="a")
    [grant] = desk.lease(1)
    assert grant.seq == first
    assert desk.lease() == []
    desk.complete(grant)
    granted = [*known(desk, "new"), *known(desk, "new")]
    assert granted == [third]


def test_each_kind_is_granted_up_to_its_room(desk: Desk) -> None:
    for kind in (0, 1, 2):
        desk.submit(*[b"x"] * 3, kind=kind)
    leased: Leased = desk.do(tasks.lease, "w", ["default"], 10, False, (1, 0, 2))
    assert [grant.seq for grant in leased.grants] == [1, 7, 8]


def test_rooms_are_for_all_kinds_or_for_none(desk: Desk) -> None:
    with pytest.raises(Invalid):
        desk.do(tasks.lease, "w", ["default"], 10, False, (1, 2))


# -- the end of a lease --------------------------------------------------------------------------


def test_a_lease_that_runs_out_makes_the_task_wait_again(desk: Desk) -> None:
    seq = desk.one()
    desk.leased(seq)
    desk.later(LEASE_NS)
    assert desk.maintain() > 0
    assert desk.states(seq) == ["WAITING"]
    assert desk.status(seq).expiries == 1


def test_a_lease_holds_until_its_last_nanosecond(desk: Desk) -> None:
    seq = desk.one()
    grant = desk.leased(seq)
    desk.until(grant.expires_ns - 1)
    assert desk.complete(grant) is Answer.COMMITTED


def test_a_lease_is_none_when_its_time_is_there(desk: Desk) -> None:
    seq = desk.one()
    grant = desk.leased(seq)
    desk.until(grant.expires_ns)
    assert desk.complete(grant) is Answer.CANCELLED


def test_a_suspect_is_granted_only_to_who_asks_for_one_alone(desk: Desk) -> None:
    seq = desk.one()
    desk.leased(seq)
    desk.later(LEASE_NS)
    asked = desk.ask()
    assert (asked.grants, asked.suspects) == ([], True)
    assert desk.counts() == Counts(suspect=1)
    grant = desk.leased(seq, alone=True)
    assert (grant.attempt, grant.suspect) == (2, True)


@pytest.mark.parametrize(("expiries_max", "suspect"), [(1, []), (2, [1]), (3, [2])])
def test_the_last_lease_of_one_that_outlived_another_is_granted_alone(
    desk: Desk, expiries_max: int, suspect: list[int]
) -> None:
    seq = desk.one(expiries_max=expiries_max)
    alone = []
    for expiries in range(expiries_max):
        if desk.leased(seq, alone=True).suspect:
            alone.append(expiries)
        desk.later(LEASE_NS)
        desk.maintain()
    assert (alone, desk.states(seq)) == (suspect, ["DEAD"])


def test_a_suspect_is_granted_with_nothing_beside_it(desk: Desk) -> None:
    bad = desk.one()
    desk.leased(bad)
    desk.later(LEASE_NS)
    desk.submit(b"a", b"b")
    assert [grant.seq for grant in desk.lease(100, alone=True)] == [bad]


def test_who_asks_alone_gets_the_others_when_there_is_no_suspect(desk: Desk) -> None:
    seqs = desk.submit(b"a", b"b")
    assert [grant.seq for grant in desk.lease(100, alone=True)] == seqs


def test_a_task_that_outlives_too_many_leases_is_dead(desk: Desk) -> None:
    seq = desk.one(expiries_max=3)
    for _ in range(3):
        desk.leased(seq, alone=True)
        desk.later(LEASE_NS)
        desk.maintain()
    assert desk.states(seq) == ["DEAD"]
    assert desk.status(seq).reason == leases.EXPIRIES_EXHAUSTED
    assert desk.said(seq)[-2:] == ["LeaseExpired", "TaskDead"]


def test_the_leases_of_a_batch_run_out_one_by_one(desk: Desk) -> None:
    a, b = desk.submit(b"a", b"b")
    first, _ = desk.lease()
    desk.later(LEASE_NS // 2)
    desk.extend(Hold(first.seq, first.lease))
    desk.later(LEASE_NS // 2)
    desk.maintain()
    assert desk.states(a, b) == ["LEASED", "WAITING"]
    desk.later(LEASE_NS // 2)
    desk.maintain()
    assert desk.states(a, b) == ["WAITING", "WAITING"]


def test_expiries_beyond_a_bound_are_left_to_the_next_decision(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(30):
        desk.submit(*[b"x"] * 20)
        desk.lease(20)
    desk.later(LEASE_NS)
    monkeypatch.setattr(leases, "EXPIRED_MAX", 100)
    desk.lease(1)
    assert desk.counts().leased > 0
    while desk.maintain():
        pass
    assert desk.counts() == Counts(suspect=600)


def test_when_to_look_again_is_the_first_expiry_or_delay(desk: Desk) -> None:
    def due() -> int | None:
        return desk.store.read(leases.next_due_ns, UNIVERSE)

    assert due() is None
    seq = desk.one()
    grant = desk.leased(seq)
    assert due() == grant.expires_ns
    desk.one(delay_ns=S)
    assert due() == desk.store.now_ns() + S


# -- extending -----------------------------------------------------------------------------------


def test_an_extension_lasts_as_long_again_from_now(desk: Desk) -> None:
    seq = desk.one()
    grant = desk.leased(seq)
    desk.later(LEASE_NS // 2)
    [until] = desk.extend(Hold(seq, grant.lease))
    assert until == desk.store.now_ns() + LEASE_NS == desk.status(seq).expires_ns


@pytest.mark.parametrize("wrong", ["lease", "task", "generation"])
def test_what_is_not_held_is_not_extended(desk: Desk, wrong: str) -> None:
    seq = desk.one()
    grant = desk.leased(seq)
    before = desk.status(seq)
    hold = Hold(seq + (wrong == "task"), grant.lease + (wrong == "lease"))
    generation = desk.store.generation + (wrong == "generation")
    assert desk.extend(hold, generation=generation) == [0]
    assert desk.status(seq) == before


def test_a_lease_that_ran_out_is_not_extended(desk: Desk) -> None:
    seq = desk.one()
    grant = desk.leased(seq)
    desk.until(grant.expires_ns)
    assert desk.extend(Hold(seq, grant.lease)) == [0]


def test_each_of_a_batch_has_its_own_answer(desk: Desk) -> None:
    a, b = desk.submit(b"a", b"b")
    first, second = desk.lease()
    desk.complete(first)
    desk.later(S)
    lost, held = desk.extend(Hold(a, first.lease), Hold(b, second.lease))
    assert (lost, held) == (0, desk.status(b).expires_ns)


def test_without_progress_a_lease_ends_with_its_window(desk: Desk) -> None:
    seq = desk.one(window_ns=LEASE_NS * 3 // 2)
    grant = desk.leased(seq)
    granted_ns = desk.status(seq).granted_ns
    desk.later(LEASE_NS * 3 // 4)
    [until] = desk.extend(Hold(seq, grant.lease))
    assert until == granted_ns + LEASE_NS * 3 // 2
    desk.later(LEASE_NS // 2)
    assert desk.extend(Hold(seq, grant.lease)) == [until]
    desk.later(LEASE_NS)
    assert desk.extend(Hold(seq, grant.lease)) == [0]


def test_progress_begins_the_window_anew(desk: Desk) -> None:
    seq = desk.one(window_ns=LEASE_NS)
    grant = desk.leased(seq)
    for _ in range(10):
        desk.later(LEASE_NS * 3 // 4)
        [until] = desk.extend(Hold(seq, grant.lease, True))
        assert until == desk.store.now_ns() + LEASE_NS
    assert desk.complete(grant) is Answer.COMMITTED


def test_an_extension_never_makes_a_lease_shorter(desk: Desk) -> None:
    seq = desk.one(window_ns=S)
    grant = desk.leased(seq)
    assert desk.extend(Hold(seq, grant.lease, True)) == [grant.expires_ns]


# -- limits --------------------------------------------------------------------------------------


def test_no_more_of_a_queue_are_leased_than_its_limit(desk: Desk) -> None:
    desk.limit(concurrency=2)
    desk.submit(*[b"x"] * 5)
    first, second = desk.lease()
    assert desk.lease() == []
    desk.complete(first)
    assert len(desk.lease()) == 1
    desk.settle(Report(second.seq, second.lease, End.FAILED))
    assert len(desk.lease()) == 1


def test_a_turn_may_take_the_place_of_what_it_settles(desk: Desk) -> None:
    desk.limit(concurrency=1)
    desk.submit(b"a", b"b")
    [grant] = desk.lease()
    report = Report(grant.seq, grant.lease)
    turned = desk.do(tasks.turn, "w", desk.store.generation, [report], ["default"], 5)
    assert turned.answers == [Answer.COMMITTED]
    assert [grant.seq for grant in turned.leased.grants] == [2]


def test_a_queue_without_a_limit_is_not_limited(desk: Desk) -> None:
    desk.limit(concurrency=1)
    desk.submit(*[b"x"] * 3, queue="other")
    assert len(desk.lease(queues=["other"])) == 3


def test_no_more_of_a_key_are_leased_than_its_limit(desk: Desk) -> None:
    desk.limit(per_key=1)
    desk.submit(*[New(b"x", limit=limit) for limit in "aabb"], b"free")
    assert [grant.seq for grant in desk.lease()] == [1, 3, 5]
    assert desk.counts().parked == 2


def test_the_next_of_a_key_goes_when_one_has_ended(desk: Desk) -> None:
    desk.limit(per_key=1)
    first, second, third = desk.submit(*[New(b"x", limit="a")] * 3)
    [grant] = desk.lease()
    assert grant.seq == first
    desk.complete(grant)
    assert desk.counts() == Counts(ready=1, parked=1, completed=1)
    assert desk.leased(second)
    assert desk.lease() == []
    assert desk.state(third).name == "WAITING"


@pytest.mark.parametrize("how", ["fail", "expire", "cancel"])
def test_a_key_is_free_again_however_its_lease_ends(desk: Desk, how: str) -> None:
    desk.limit(per_key=1)
    first, second = desk.submit(*[New(b"x", limit="a")] * 2)
    [grant] = desk.lease()
    if how == "fail":
        desk.fail(grant)
    elif how == "expire":
        desk.later(LEASE_NS)
    else:
        desk.cancel(first)
    assert [grant.seq for grant in desk.lease()] == [second]


def test_one_that_was_let_in_and_is_cancelled_gives_its_place_to_the_next(desk: Desk) -> None:
    desk.limit(per_key=1)
    _, second, third = desk.submit(*[New(b"x", limit="a")] * 3)
    [grant] = desk.lease()
    desk.complete(grant)
    desk.cancel(second)
    assert [grant.seq for grant in desk.lease()] == [third]


def test_a_higher_limit_lets_those_in_that_wait(desk: Desk) -> None:
    desk.limit(per_key=1)
    desk.submit(*[New(b"x", limit="a")] * 4)
    assert len(desk.lease()) == 1
    desk.limit(per_key=3)
    assert len(desk.lease()) == 2


def test_a_lower_limit_leaves_what_is_leased(desk: Desk) -> None:
    desk.limit(per_key=3)
    desk.submit(*[New(b"x", limit="a")] * 5)
    grants = desk.lease()
    desk.limit(per_key=1)
    assert len(grants) == 3
    for grant in grants:
        assert desk.lease() == []
        assert desk.complete(grant) is Answer.COMMITTED
    assert len(desk.lease()) == 1


def test_no_limit_lets_all_in(desk: Desk) -> None:
    desk.limit(per_key=1)
    desk.submit(*[New(b"x", limit="a")] * 4)
    desk.lease()
    desk.limit()
    assert len(desk.lease()) == 3


def test_many_of_one_key_are_parked_a_bounded_number_at_a_time(desk: Desk) -> None:
    desk.limit(per_key=1)
    desk.submit(*[New(b"x", limit="a")] * 3000)
    high = desk.one(limit="b", priority=-1)
    assert [grant.seq for grant in desk.lease(10)] == [1]
    assert desk.counts().parked <= leases.PARKED_MAX + 10
    granted: list[int] = []
    for _ in range(5):
        granted += [grant.seq for grant in desk.lease(10)]
    assert granted == [high]


@pytest.mark.parametrize("limits", [{"concurrency": -1}, {"per_key": 1 << 40}])
def test_a_limit_out_of_bounds_is_refused(desk: Desk, limits: dict[str, int]) -> None:
    with pytest.raises(Invalid):
        desk.limit(**limits)

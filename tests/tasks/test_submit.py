"""Submitting: batches, keys, delays, dependencies that cannot be, and what is too large."""

from __future__ import annotations

import pytest

from holdfast.clock import S
from holdfast.config import BATCH_MAX, BLOB_THRESHOLD_BYTES, MESSAGE_BYTES_MAX
from holdfast.errors import Invalid, KeyConflict, NotFound, ValueTooLarge
from holdfast.store import schema
from holdfast.tasks import coordinator as tasks
from holdfast.tasks.coordinator import CyclicDependency, New
from holdfast.tasks.rows import Counts, Spec
from tests.tasks.rig import LEASE_NS, Desk


def nothing_was_written(desk: Desk) -> bool:
    return desk.rows() == {} and desk.entries() == [] and desk.counts() == Counts()


def test_seqs_are_given_in_order_and_never_again(desk: Desk) -> None:
    assert desk.submit(b"a", b"b") == [1, 2]
    grants = desk.lease()
    desk.settle(*(tasks.Report(grant.seq, grant.lease) for grant in grants))
    desk.later(8 * 24 * 3600 * S)
    desk.maintain()
    assert desk.rows() == {}
    assert desk.one() == 3


def test_a_task_waits_without_a_status_until_it_is_touched(desk: Desk) -> None:
    seq = desk.one()
    assert desk.state(seq).name == "WAITING"
    assert desk.counts() == Counts(ready=1)


def test_a_batch_is_one_entry(desk: Desk) -> None:
    desk.submit(*[b"x"] * 50)
    assert len(desk.entries()) == 1
    assert desk.counts().ready == 50


def test_an_empty_batch_writes_nothing(desk: Desk) -> None:
    assert desk.submit() == []
    assert desk.entries() == []


def test_a_batch_of_several_kinds_goes_to_several_queues(desk: Desk) -> None:
    specs = [Spec("a", queue="one"), Spec("b", queue="two", priority=7)]
    assert desk.do(tasks.submit_all, specs, [0, 1, 1], [New(b"x")] * 3) == [1, 2, 3]
    assert (desk.counts("one").ready, desk.counts("two").ready) == (1, 2)


@pytest.mark.parametrize("which", [[0], [0, 2], [0, -1]])
def test_a_batch_whose_specs_do_not_fit_is_refused(desk: Desk, which: list[int]) -> None:
    with pytest.raises(Invalid):
        desk.do(tasks.submit_all, [Spec("a"), Spec("b")], which, [New(b"x")] * 2)
    assert nothing_was_written(desk)


def test_a_batch_that_is_too_large_is_refused_whole(desk: Desk) -> None:
    with pytest.raises(Invalid):
        desk.submit(*[b"x"] * (BATCH_MAX + 1))
    assert nothing_was_written(desk)


def test_a_batch_with_a_bad_one_is_refused_whole(desk: Desk) -> None:
    with pytest.raises(Invalid):
        desk.submit(New(b"x"), New(b"y", delay_ns=-1), New(b"z", key="k"))
    assert nothing_was_written(desk)


@pytest.mark.parametrize(
    "spec",
    [
        {"name": ""},
        {"name": "n" * 1000},
        {"queue": ""},
        {"lease_ns": 0},
        {"lease_ns": -1},
        {"window_ns": 0},
        {"attempts": 0},
        {"expiries_max": 0},
        {"priority": 1 << 40},
        {"retain_ns": -1},
        {"backoff_ns": -1},
    ],
)
def test_a_spec_out_of_bounds_is_refused(desk: Desk, spec: dict[str, object]) -> None:
    with pytest.raises(Invalid):
        desk.one(**spec)
    assert nothing_was_written(desk)


# -- keys ----------------------------------------------------------------------------------------


def test_the_same_key_and_arguments_are_the_same_task(desk: Desk) -> None:
    first = desk.one(b"a", key="k")
    assert desk.one(b"a", key="k") == first
    assert len(desk.entries()) == 1


def test_the_same_key_twice_in_a_batch_is_one_task(desk: Desk) -> None:
    assert desk.submit(New(b"a", key="k"), New(b"a", key="k"), New(b"b", key="l")) == [1, 1, 2]


def test_the_same_key_with_other_arguments_is_a_conflict(desk: Desk) -> None:
    desk.one(b"a", key="k")
    with pytest.raises(KeyConflict) as refused:
        desk.one(b"b", key="k")
    assert (refused.value.key, refused.value.task) == ("k", 1)
    assert len(desk.rows()) == 1


def test_a_key_belongs_to_the_name_of_the_task(desk: Desk) -> None:
    assert desk.one(b"a", key="k", name="f") != desk.one(b"b", key="k", name="g")


def test_a_key_is_known_until_its_task_is_forgotten(desk: Desk) -> None:
    first = desk.one(b"a", key="k", retain_ns=S)
    desk.complete(desk.leased(first))
    assert desk.one(b"a", key="k", retain_ns=S) == first
    desk.later(S)
    desk.maintain()
    assert not desk.kept(first)
    assert desk.one(b"b", key="k") != first


def test_large_arguments_are_told_apart_by_key_too(desk: Desk) -> None:
    large = b"x" * (BLOB_THRESHOLD_BYTES + 1)
    first = desk.one(large, key="k")
    assert desk.one(large, key="k") == first
    with pytest.raises(KeyConflict):
        desk.one(large + b"y", key="k")


def test_a_key_that_is_too_long_is_refused(desk: Desk) -> None:
    with pytest.raises(Invalid):
        desk.one(key="k" * 1000)


# -- size ----------------------------------------------------------------------------------------


def test_large_arguments_are_a_blob_that_goes_with_the_task(desk: Desk) -> None:
    large = b"x" * (BLOB_THRESHOLD_BYTES + 1)
    seq = desk.one(large, retain_ns=S)
    grant = desk.leased(seq)
    assert grant.args == large
    desk.complete(grant, large + b"result")
    desk.later(S)
    desk.maintain()
    assert blobs_in_use(desk) == 0


def blobs_in_use(desk: Desk) -> int:
    """Blobs that something refers to, but for those of the log itself."""
    idle = schema.prefix(schema.Space.BLOB, "idle")
    refs = schema.prefix(schema.Space.BLOB, "refs")
    return desk.store.read(
        lambda txn: len(txn.scan(refs, refs + b"\xff")) - len(txn.scan(idle, idle + b"\xff"))
    )


def test_fifty_megabytes_are_refused_with_their_size(desk: Desk) -> None:
    with pytest.raises(ValueTooLarge) as refused:
        desk.one(b"x" * 50_000_000)
    assert (refused.value.bytes, refused.value.bytes_max) == (50_000_000, MESSAGE_BYTES_MAX)
    assert nothing_was_written(desk)


def test_a_result_of_fifty_megabytes_is_rejected_and_the_lease_goes_on(desk: Desk) -> None:
    seq = desk.one()
    grant = desk.leased(seq)
    assert desk.complete(grant, b"x" * 50_000_000) is tasks.Answer.REJECTED
    assert desk.complete(grant) is tasks.Answer.COMMITTED


# -- delays --------------------------------------------------------------------------------------


def test_a_delayed_task_is_granted_when_its_time_has_come(desk: Desk) -> None:
    seq = desk.one(delay_ns=5 * S)
    assert desk.counts() == Counts(delayed=1)
    due_ns = desk.store.now_ns() + 5 * S
    desk.until(due_ns - 1)
    assert desk.lease() == []
    desk.until(due_ns)
    assert desk.leased(seq).attempt == 1


def test_a_delayed_task_keeps_its_priority(desk: Desk) -> None:
    late = desk.one(delay_ns=S, priority=5)
    desk.one()
    desk.later(S)
    assert desk.leased(late).seq == late


# -- dependencies that cannot be -----------------------------------------------------------------


def test_a_task_after_an_unknown_one_is_refused(desk: Desk) -> None:
    with pytest.raises(NotFound):
        desk.one(after=(77,))
    assert nothing_was_written(desk)


@pytest.mark.parametrize("after", [(-1,), (-2,), (-3,)])
def test_a_batch_that_waits_for_itself_is_cyclic(desk: Desk, after: tuple[int, ...]) -> None:
    with pytest.raises(CyclicDependency):
        desk.submit(New(b"a", after=after), New(b"b", after=(-1,)))
    assert nothing_was_written(desk)


def test_a_task_cannot_name_its_own_number(desk: Desk) -> None:
    desk.one()
    with pytest.raises(CyclicDependency):
        desk.one(after=(2,))


def test_zero_is_no_task(desk: Desk) -> None:
    with pytest.raises(Invalid):
        desk.submit(b"a", New(b"b", after=(0,)))


def test_no_task_waits_for_more_than_a_thousand(desk: Desk) -> None:
    desk.submit(*[b"x"] * 1001)
    with pytest.raises(Invalid):
        desk.one(after=tuple(range(1, 1002)))


def test_a_lease_lasts_as_the_spec_says(desk: Desk) -> None:
    seq = desk.one(lease_ns=LEASE_NS * 2)
    grant = desk.leased(seq)
    assert grant.expires_ns == desk.store.now_ns() + LEASE_NS * 2

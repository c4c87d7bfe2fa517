"""Task submission: batches, idempotency keys, size limits, delays and invalid dependencies."""

from __future__ import annotations

import pytest

from holdfast.clock import S
from holdfast.config import BATCH_MAX, BLOB_THRESHOLD_BYTES, MESSAGE_BYTES_MAX
from holdfast.errors import Invalid, KeyConflict, NotFound, ValueTooLarge
from holdfast.store import schema
from holdfast.tasks import operations as tasks
from holdfast.tasks.model import TaskCounts, TaskSpec
from holdfast.tasks.operations import CyclicDependency, TaskToSubmit
from tests.tasks.rig import LEASE_NS, TaskOperationsRig


def is_store_empty(rig: TaskOperationsRig) -> bool:
    return rig.rows() == {} and rig.entries() == [] and rig.counts() == TaskCounts()


def test_submit_assigns_increasing_seqs_and_never_reuses_them(rig: TaskOperationsRig) -> None:
    assert rig.submit(b"a", b"b") == [1, 2]
    grants = rig.lease()
    rig.report(*(tasks.TaskReport(grant.seq, grant.lease) for grant in grants))
    rig.advance(8 * 24 * 3600 * S)
    rig.maintain()
    assert rig.rows() == {}
    assert rig.submit_one() == 3


def test_submitted_task_is_waiting_and_ready(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    assert rig.state(seq).name == "WAITING"
    assert rig.counts() == TaskCounts(ready=1)


def test_submit_of_a_batch_is_one_log_entry(rig: TaskOperationsRig) -> None:
    rig.submit(*[b"x"] * 50)
    assert len(rig.entries()) == 1
    assert rig.counts().ready == 50


def test_submit_of_an_empty_batch_writes_nothing(rig: TaskOperationsRig) -> None:
    assert rig.submit() == []
    assert rig.entries() == []


def test_submit_all_puts_tasks_into_the_queues_of_their_specs(rig: TaskOperationsRig) -> None:
    specs = [TaskSpec("a", queue="one"), TaskSpec("b", queue="two", priority=7)]
    assert rig.transact(tasks.submit_all, specs, [0, 1, 1], [TaskToSubmit(b"x")] * 3) == [1, 2, 3]
    assert (rig.counts("one").ready, rig.counts("two").ready) == (1, 2)


@pytest.mark.parametrize("which", [[0], [0, 2], [0, -1]])
def test_submit_all_with_wrong_spec_indexes_is_invalid(
    rig: TaskOperationsRig, which: list[int]
) -> None:
    with pytest.raises(Invalid):
        rig.transact(
            tasks.submit_all, [TaskSpec("a"), TaskSpec("b")], which, [TaskToSubmit(b"x")] * 2
        )
    assert is_store_empty(rig)


def test_submit_of_too_many_tasks_is_invalid(rig: TaskOperationsRig) -> None:
    with pytest.raises(Invalid):
        rig.submit(*[b"x"] * (BATCH_MAX + 1))
    assert is_store_empty(rig)


def test_submit_with_one_invalid_task_rejects_the_batch(rig: TaskOperationsRig) -> None:
    with pytest.raises(Invalid):
        rig.submit(TaskToSubmit(b"x"), TaskToSubmit(b"y", delay_ns=-1), TaskToSubmit(b"z", key="k"))
    assert is_store_empty(rig)


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
def test_submit_with_a_spec_out_of_bounds_is_invalid(
    rig: TaskOperationsRig, spec: dict[str, object]
) -> None:
    with pytest.raises(Invalid):
        rig.submit_one(**spec)
    assert is_store_empty(rig)


# -- keys ----------------------------------------------------------------------------------------


def test_same_key_and_arguments_return_the_same_task(rig: TaskOperationsRig) -> None:
    first = rig.submit_one(b"a", key="k")
    assert rig.submit_one(b"a", key="k") == first
    assert len(rig.entries()) == 1


def test_same_key_twice_in_a_batch_is_one_task(rig: TaskOperationsRig) -> None:
    assert rig.submit(
        TaskToSubmit(b"a", key="k"), TaskToSubmit(b"a", key="k"), TaskToSubmit(b"b", key="l")
    ) == [1, 1, 2]


def test_same_key_with_other_arguments_raises_key_conflict(rig: TaskOperationsRig) -> None:
    rig.submit_one(b"a", key="k")
    with pytest.raises(KeyConflict) as caught:
        rig.submit_one(b"b", key="k")
    assert (caught.value.key, caught.value.task) == ("k", 1)
    assert len(rig.rows()) == 1


def test_key_is_scoped_by_task_name(rig: TaskOperationsRig) -> None:
    assert rig.submit_one(b"a", key="k", name="f") != rig.submit_one(b"b", key="k", name="g")


def test_key_is_free_after_its_task_is_removed(rig: TaskOperationsRig) -> None:
    first = rig.submit_one(b"a", key="k", retain_ns=S)
    rig.complete(rig.lease_one(first))
    assert rig.submit_one(b"a", key="k", retain_ns=S) == first
    rig.advance(S)
    rig.maintain()
    assert not rig.exists(first)
    assert rig.submit_one(b"b", key="k") != first


def test_same_key_with_other_large_arguments_raises_key_conflict(rig: TaskOperationsRig) -> None:
    large = b"x" * (BLOB_THRESHOLD_BYTES + 1)
    first = rig.submit_one(large, key="k")
    assert rig.submit_one(large, key="k") == first
    with pytest.raises(KeyConflict):
        rig.submit_one(large + b"y", key="k")


def test_too_long_key_is_invalid(rig: TaskOperationsRig) -> None:
    with pytest.raises(Invalid):
        rig.submit_one(key="k" * 1000)


# -- size ----------------------------------------------------------------------------------------


def test_blob_of_large_arguments_is_removed_with_the_task(rig: TaskOperationsRig) -> None:
    large = b"x" * (BLOB_THRESHOLD_BYTES + 1)
    seq = rig.submit_one(large, retain_ns=S)
    grant = rig.lease_one(seq)
    assert grant.args == large
    rig.complete(grant, large + b"result")
    rig.advance(S)
    rig.maintain()
    assert count_referenced_blobs(rig) == 0


def count_referenced_blobs(rig: TaskOperationsRig) -> int:
    """Number of referenced blobs, without those of the log."""
    idle = schema.key_prefix(schema.Space.BLOB, "idle")
    refs = schema.key_prefix(schema.Space.BLOB, "refs")
    return rig.store.read(
        lambda txn: len(txn.scan(refs, refs + b"\xff")) - len(txn.scan(idle, idle + b"\xff"))
    )


def test_arguments_of_50_mb_raise_value_too_large(rig: TaskOperationsRig) -> None:
    with pytest.raises(ValueTooLarge) as caught:
        rig.submit_one(b"x" * 50_000_000)
    assert (caught.value.bytes, caught.value.bytes_max) == (50_000_000, MESSAGE_BYTES_MAX)
    assert is_store_empty(rig)


def test_result_of_50_mb_is_rejected_and_the_lease_stays(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    grant = rig.lease_one(seq)
    assert rig.complete(grant, b"x" * 50_000_000) is tasks.ReportAnswer.REJECTED
    assert rig.complete(grant) is tasks.ReportAnswer.COMMITTED


# -- delays --------------------------------------------------------------------------------------


def test_delayed_task_is_granted_when_due(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one(delay_ns=5 * S)
    assert rig.counts() == TaskCounts(delayed=1)
    due_ns = rig.store.now_ns() + 5 * S
    rig.advance_to(due_ns - 1)
    assert rig.lease() == []
    rig.advance_to(due_ns)
    assert rig.lease_one(seq).attempt == 1


def test_delayed_task_keeps_its_priority(rig: TaskOperationsRig) -> None:
    late = rig.submit_one(delay_ns=S, priority=5)
    rig.submit_one()
    rig.advance(S)
    assert rig.lease_one(late).seq == late


# -- invalid dependencies ------------------------------------------------------------------------


def test_submit_after_an_unknown_task_raises_not_found(rig: TaskOperationsRig) -> None:
    with pytest.raises(NotFound):
        rig.submit_one(after=(77,))
    assert is_store_empty(rig)


@pytest.mark.parametrize("after", [(-1,), (-2,), (-3,)])
def test_batch_with_a_cyclic_dependency_is_rejected(
    rig: TaskOperationsRig, after: tuple[int, ...]
) -> None:
    with pytest.raises(CyclicDependency):
        rig.submit(TaskToSubmit(b"a", after=after), TaskToSubmit(b"b", after=(-1,)))
    assert is_store_empty(rig)


def test_task_that_depends_on_itself_is_cyclic(rig: TaskOperationsRig) -> None:
    rig.submit_one()
    with pytest.raises(CyclicDependency):
        rig.submit_one(after=(2,))


def test_dependency_on_seq_zero_is_invalid(rig: TaskOperationsRig) -> None:
    with pytest.raises(Invalid):
        rig.submit(b"a", TaskToSubmit(b"b", after=(0,)))


def test_more_than_1000_dependencies_are_invalid(rig: TaskOperationsRig) -> None:
    rig.submit(*[b"x"] * 1001)
    with pytest.raises(Invalid):
        rig.submit_one(after=tuple(range(1, 1002)))


def test_lease_duration_is_taken_from_the_spec(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one(lease_ns=LEASE_NS * 2)
    grant = rig.lease_one(seq)
    assert grant.expires_ns == rig.store.now_ns() + LEASE_NS * 2

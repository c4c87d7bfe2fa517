"""Task queries: task details, queues, and the ids of tasks and leases."""

from __future__ import annotations

import pytest

from holdfast.blockers.tasks import explain_state
from holdfast.clock import S
from holdfast.errors import NotFound
from holdfast.tasks import queries
from holdfast.tasks.ids import BadLeaseId, BadTaskId, LeaseId, TaskId, parse_lease_id, parse_task_id
from holdfast.tasks.operations import AttemptOutcome, HeldLease
from tests.tasks.rig import LEASE_NS, UNIVERSE, TaskOperationsRig


def get_details(rig: TaskOperationsRig, seq: int) -> queries.TaskDetails:
    return rig.store.read(queries.get_details, UNIVERSE, TaskId(1, seq))


# -- ids -------------------------------------------------------------------------------------------


def test_task_id_and_lease_id_round_trip() -> None:
    task, lease = TaskId(1, 42), LeaseId(3, 7, 42)
    assert (str(task), str(lease)) == ("1-42", "3-7-42")
    assert (parse_task_id("1-42"), parse_lease_id("3-7-42")) == (task, lease)


@pytest.mark.parametrize(
    "text",
    ["", "1", "1-", "-1", "1-0", "0-1", "01-1", "1-01", "1-1-1", "1 -1", "+1-1", "1-1\n", "a-b",
     "१-१", "1-9223372036854775808", "1-99999999999999999999999"],
)  # fmt: skip
def test_parse_task_id_rejects_invalid_text(text: str) -> None:
    with pytest.raises(BadTaskId):
        parse_task_id(text)


@pytest.mark.parametrize(
    "text", ["", "1-1", "1-1-0", "1-1-1-1", "x-1-1", "1-1-9223372036854775808"]
)
def test_parse_lease_id_rejects_invalid_text(text: str) -> None:
    with pytest.raises(BadLeaseId):
        parse_lease_id(text)


def test_get_task_with_another_generation_is_not_found(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    with pytest.raises(NotFound):
        rig.store.read(queries.get_task, UNIVERSE, TaskId(2, seq))


def why(rig: TaskOperationsRig, seq: int) -> str:
    row = get_details(rig, seq).row
    return rig.store.read(explain_state, UNIVERSE, row)


# -- one task --------------------------------------------------------------------------------------


def test_details_show_wait_state_reason_and_lease(rig: TaskOperationsRig) -> None:
    ready = rig.submit_one()
    details = get_details(rig, ready)
    assert (details.row.where, details.lease) == ("ready", None)
    grant = rig.lease_one(ready)
    details = get_details(rig, ready)
    assert details.row.where == "leased"
    assert details.lease == LeaseId(1, grant.lease, ready)
    rig.complete(grant, b"\x03")
    details = get_details(rig, ready)
    assert (details.row.where, details.result, details.lease) == ("completed", b"\x03", None)


def test_details_of_a_delayed_task_show_its_due_time(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one(delay_ns=5 * S)
    assert get_details(rig, seq).row.where == "delayed"
    failed = rig.submit_one()
    rig.fail(rig.lease_one(failed))
    assert get_details(rig, failed).row.where == "delayed"
    assert get_details(rig, failed).row.not_before_ns > rig.store.now_ns()


def test_details_of_a_blocked_task_name_its_open_dependencies(rig: TaskOperationsRig) -> None:
    done, open_ = rig.submit_one(), rig.submit_one()
    rig.complete(rig.lease_one(done))
    seq = rig.submit_one(after=(done, open_))
    details = get_details(rig, seq)
    assert details.row.where == "blocked"
    assert details.after == (TaskId(1, done), TaskId(1, open_))
    assert f"1-{open_}" in why(rig, seq)
    assert f"1-{done}" not in why(rig, seq)


def test_details_of_a_throttled_task_name_its_limit_key(rig: TaskOperationsRig) -> None:
    rig.set_limits(per_key=1)
    first, second = rig.submit_one(limit="ada"), rig.submit_one(limit="ada")
    assert [grant.seq for grant in rig.lease()] == [first]
    details = get_details(rig, second)
    assert details.row.where == "parked"
    assert "'ada'" in why(rig, second)


def test_details_of_a_task_in_a_full_queue_name_the_limit(rig: TaskOperationsRig) -> None:
    rig.set_limits(concurrency=1)
    first, second = rig.submit_one(), rig.submit_one()
    rig.lease_one(first)
    assert "the limit allows no more" in why(rig, second)


def test_details_show_an_expired_lease_and_then_quarantine(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one()
    rig.lease_one(seq)
    rig.advance(LEASE_NS)
    assert "is overdue" in why(rig, seq)
    rig.maintain()
    assert get_details(rig, seq).row.where == "suspect"


def test_details_of_ended_tasks_show_their_reason(rig: TaskOperationsRig) -> None:
    failed, dead = rig.submit_one(), rig.submit_one()
    rig.fail(rig.lease_one(failed), AttemptOutcome.REFUSED, reason="declined", error="no")
    rig.cancel(dead, reason="changed our mind")
    assert get_details(rig, failed).row.where == "failed"
    assert "changed our mind" in why(rig, dead)


def test_details_link_a_redriven_task_and_its_successor(rig: TaskOperationsRig) -> None:
    old = rig.submit_one()
    rig.cancel(old)
    [new] = rig.redrive(old)
    assert get_details(rig, old).redriven_by == TaskId(1, new)
    assert get_details(rig, new).redrive_of == TaskId(1, old)


def test_details_contain_large_arguments_and_results(rig: TaskOperationsRig) -> None:
    seq = rig.submit_one(b"x" * 10_000)
    rig.complete(rig.lease_one(seq), b"y" * 10_000)
    details = get_details(rig, seq)
    assert (details.args, details.result) == (b"x" * 10_000, b"y" * 10_000)


# -- leases and queues -----------------------------------------------------------------------------


def test_was_granted_distinguishes_granted_leases(rig: TaskOperationsRig) -> None:
    seq, other = rig.submit_one(), rig.submit_one()
    grant = rig.lease_one(seq)

    def was_granted(generation: int, lease: int, task: int) -> bool:
        return rig.store.read(queries.was_granted, UNIVERSE, LeaseId(generation, lease, task))

    assert was_granted(1, grant.lease, seq)
    rig.complete(grant)
    assert was_granted(1, grant.lease, seq), "also when it is over"
    assert not was_granted(1, grant.lease + 1, seq)
    assert not was_granted(1, grant.lease, other)
    assert not was_granted(2, grant.lease, seq), "of a generation that is yet to come"


def test_list_queues_returns_counts_and_limits(rig: TaskOperationsRig) -> None:
    rig.submit_one(queue="b")
    rig.set_limits("a", concurrency=2)
    queue_rows = rig.store.read(queries.list_queues, UNIVERSE)
    assert [(row.queue, row.counts.ready, row.limits.concurrency) for row in queue_rows] == [
        ("a", 0, 2), ("b", 1, 0),
    ]  # fmt: skip


def test_queues_with_work_have_ready_or_quarantined_tasks(rig: TaskOperationsRig) -> None:
    def queues_with_work() -> list[str]:
        return rig.store.read(queries.queues_with_work, UNIVERSE, ["a", "b", "c"])

    rig.submit_one(queue="a")
    rig.submit_one(queue="b", delay_ns=S)
    assert queues_with_work() == ["a"]
    [grant] = rig.lease(queues=["a"])
    assert queues_with_work() == []
    rig.extend(HeldLease(grant.seq, grant.lease))
    rig.advance(LEASE_NS)
    rig.maintain()
    assert queues_with_work() == ["a", "b"]

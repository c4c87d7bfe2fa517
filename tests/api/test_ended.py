"""Ended tasks and flows per minute, by queue and outcome."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast as hf
from holdfast import store as stores
from holdfast.clock import S, SimClock
from holdfast.durable import ended_counts
from holdfast.durable.ended_counts import KEPT_MINUTES, MINUTE_NS, QUEUES_MAX
from holdfast.errors import Invalid
from holdfast.ops import ended_count_check
from holdfast.ops.api.call import NoIndex
from holdfast.ops.verify import find_differences
from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.store.in_process import InProcessStore
from holdfast.store.memory_backend import MemoryBackend
from holdfast.store.schema import Space
from holdfast.tasks import operations
from holdfast.tasks.model import TaskSpec
from holdfast.tasks.operations import AttemptOutcome, GrantRequest, TaskReport, TaskToSubmit
from tests.api.rig import ApiRig

MODULES = (
    "holdfast.durable.ended_counts",
    "holdfast.ops.api.ended",
    "holdfast.ops.ended_count_check",
)


def end_tasks(rig: ApiRig, *ends: AttemptOutcome, queue: str = "default", **spec: Any) -> None:
    """Submit, lease and report one task for each end, in one commit each."""
    new = [TaskToSubmit(b"\x92\x90\x80")] * len(ends)
    store, universe = rig.store, rig.universe
    store.transact(operations.submit, universe, TaskSpec("print", queue=queue, **spec), new)
    request = GrantRequest("w", [queue], len(ends), True)
    grants = store.transact(operations.lease, universe, request).grants
    reports = [
        TaskReport(grant.seq, grant.lease, end) for grant, end in zip(grants, ends, strict=True)
    ]
    store.transact(operations.apply_reports, universe, "w", store.generation, reports)


COMPLETED, REFUSED = AttemptOutcome.OK, AttemptOutcome.REFUSED


def ended(rig: ApiRig, **query: Any) -> list[tuple[str, str | None, int, int, int, int]]:
    """The ends by kind, queue and outcome, summed over the minutes."""
    sums: dict[tuple[str, str | None], list[int]] = {}
    for one in rig.pages("/v1/ended", **query):
        row = sums.setdefault((one["kind"], one["queue"]), [0, 0, 0, 0])
        for at, outcome in enumerate(("completed", "failed", "dead", "cancelled")):
            row[at] += one[outcome]
    return [(kind, queue, *row) for (kind, queue), row in sums.items()]  # type: ignore[misc]


def differences(rig: ApiRig) -> list[str]:
    return [one.what for one in rig.store.read(find_differences)]


def test_ends_are_counted_by_queue_and_outcome(rig: ApiRig) -> None:
    end_tasks(rig, COMPLETED, COMPLETED, REFUSED)
    end_tasks(rig, COMPLETED, queue="paper")
    id = rig.post("/v1/tasks", {"name": "print"})["id"]
    rig.post(f"/v1/tasks/{id}/cancel")
    flow = rig.post("/v1/flows", {"name": "order", "args": ["book", 5]})["id"]
    [task] = rig.get("/v1/tasks", state="ready")["tasks"]
    rig.post(f"/v1/tasks/{task['id']}/cancel", {"reason": "operator"})
    assert rig.get(f"/v1/flows/{flow}")["state"] == "DEAD"
    assert sorted(ended(rig), key=repr) == [
        ("flow", "default", 0, 0, 1, 0),
        ("task", "default", 2, 1, 1, 0),
        ("task", "paper", 1, 0, 0, 0),
    ]
    assert ended(rig, queue="paper", limit=7) == [("task", "paper", 1, 0, 0, 0)]
    assert ended(rig, queue="default", kind="flow") == [("flow", "default", 0, 0, 1, 0)]
    assert sorted(ended(rig, limit=1), key=repr) == sorted(ended(rig), key=repr)
    assert differences(rig) == []


@pytest.mark.parametrize(
    "query",
    [
        {"since_ns": 1, "until_ns": 2 * KEPT_MINUTES * MINUTE_NS},
        {"since_ns": 600 * S, "until_ns": 60 * S},
        {"since_ns": -MINUTE_NS, "until_ns": 60 * S},
        {"kind": "cat", "queue": "q"},
        {"limit": 0},
    ],
)
def test_range_without_bounds_is_refused(rig: ApiRig, query: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        rig.get("/v1/ended", **query)


def test_kind_without_a_queue_has_no_index(rig: ApiRig) -> None:
    with pytest.raises(NoIndex):
        rig.get("/v1/ended", kind="flow")


def simulated_rig(clock: SimClock) -> ApiRig:
    return ApiRig(InProcessStore("memory:", MemoryBackend(), clock), "shop")


def rows(rig: ApiRig) -> list[Any]:
    prefix = ended_counts.row_prefix(rig.universe)
    return list(rig.store.read(lambda txn: txn.scan(prefix, tuples.prefix_end(prefix))))


def test_counts_of_removed_work_stay_and_old_minutes_are_removed() -> None:
    clock = SimClock()
    with simulated_rig(clock) as rig:
        for _ in range(3):
            end_tasks(rig, COMPLETED, REFUSED, retain_ns=S)
            clock.advance(MINUTE_NS)
            rig.store.transact(operations.maintain, rig.universe, 10)
            assert differences(rig) == []
        assert ended(rig) == [("task", "default", 3, 3, 0, 0)]
        assert len(rows(rig)) == 3
        clock.advance((KEPT_MINUTES - 1) * MINUTE_NS)
        end_tasks(rig, COMPLETED)
        assert len(rows(rig)) == 2
        assert differences(rig) == []


def test_rows_of_a_day_do_not_grow() -> None:
    clock = SimClock()
    counts: list[int] = []
    with simulated_rig(clock) as rig:
        for minute in range(2 * KEPT_MINUTES):
            if minute % 30 == 0:
                end_tasks(rig, COMPLETED, queue=f"q{minute % 7}", retain_ns=S)
                rig.store.transact(operations.maintain, rig.universe, 10)
                counts.append(len(rows(rig)))
            clock.advance(MINUTE_NS)
    assert max(counts) == counts[-1] <= KEPT_MINUTES // 30 + 1


def test_queues_beyond_their_maximum_are_counted_together() -> None:
    clock = SimClock()
    with simulated_rig(clock) as rig:
        for n in range(QUEUES_MAX + 3):
            end_tasks(rig, COMPLETED, queue=f"q{n}", retain_ns=S)
        found = ended(rig, limit=1000)
        assert len(found) == QUEUES_MAX + 1
        assert ("task", None, 3, 0, 0, 0) in found
        assert differences(rig) == []
        clock.advance(2 * S)
        rig.store.transact(operations.maintain, rig.universe, 1000)
        assert sorted(ended(rig, limit=1000), key=repr) == sorted(found, key=repr)
        assert differences(rig) == []


def test_lost_or_changed_count_is_found_and_rebuilt(rig: ApiRig) -> None:
    end_tasks(rig, COMPLETED, REFUSED)
    before = ended(rig)
    prefix = ended_counts.row_prefix(rig.universe)

    def lose(txn: Txn) -> None:
        for key, _ in txn.scan(prefix, tuples.prefix_end(prefix)):
            txn.delete(key)

    rig.store.transact(lose)
    assert len(differences(rig)) == 2
    rig.store.transact(ended_count_check.rebuild, rig.universe)
    assert differences(rig) == []
    assert ended(rig) == before


def test_ends_of_an_older_version_are_not_counted(rig: ApiRig) -> None:
    end_tasks(rig, COMPLETED, REFUSED)

    def age(txn: Txn) -> None:
        """Make the rows that the version before wrote."""
        prefix = schema.key_prefix(Space.STATISTIC, rig.universe)
        for key, _ in txn.scan(prefix, tuples.prefix_end(prefix)):
            txn.delete(key)

    rig.store.transact(age)
    assert (ended(rig), differences(rig)) == ([], [])
    end_tasks(rig, COMPLETED)
    assert (ended(rig), differences(rig)) == ([("task", "default", 1, 0, 0, 0)], [])


def test_flow_that_runs_again_after_a_redrive_stays_counted() -> None:
    """The end of a flow without compensations is counted again when it ends again."""

    @hf.flow(attempts=1)
    async def fails() -> None:
        raise ValueError("no")

    app = hf.App("shop", flows=[fails])
    with app.open(stores.open("memory:")) as rt, ApiRig(rt.store, "shop") as rig:
        flow = rt.start(fails)
        for count in (1, 2):
            with pytest.raises(hf.FlowFailed):
                flow.result(timeout=30)
            assert ended(rig, queue="default", kind="flow") == [("flow", "default", 0, count, 0, 0)]
            assert differences(rig) == []
            flow.redrive()

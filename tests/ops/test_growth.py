"""Growth under churn: a store with bounds has as many rows and bytes after 60 simulated minutes as after 30."""

from __future__ import annotations

from collections import Counter

import pytest

import holdfast as hf
from holdfast.clock import S
from holdfast.durable import queue
from holdfast.flows import operations as flow_operations
from holdfast.flows.model import FlowSpec
from holdfast.flows.new_flow import NewFlow
from holdfast.flows.retention import remove_ended
from holdfast.ops.verify import find_differences
from holdfast.tasks import checkpoint, list_index, operations
from holdfast.tasks.model import TaskSpec
from holdfast.tasks.operations import AttemptOutcome, GrantRequest, TaskReport, TaskToSubmit
from holdfast.workers import orchestrator
from holdfast.workers.space_census import take_census
from holdfast.workers.tasks import upkeep
from holdfast.world.host import Budgets
from tests.simulation.source_edits import Edit, Mutant
from tests.world import bank
from tests.world.rig import WorldRig
from tests.world.test_history import EVERY_5, leader_of, rig_with_keep

UNIVERSE = "bank"
MINUTE_NS = 60 * S
RETAIN_NS = 5 * MINUTE_NS
LETTERS = f"{UNIVERSE}/other"
TICK_S = 3
# Lines of the lease log that the leader of this test leaves.
LEASE_LINES = 40
# Kinds of the census whose bounds are larger than this test: the answers of the last commits, the counts per minute of
# a day, and the log of the leader lease.
LEFT_OUT = ("outcomes", "ended_counts", "leader_log")
ENDS = (AttemptOutcome.OK, AttemptOutcome.OK, AttemptOutcome.REFUSED)


def test_rows_and_bytes_of_bounded_work_do_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orchestrator, "LEASE_LOG_LINES_MAX", LEASE_LINES)
    churn = Churn()
    for _ in range(30):
        churn.run_minute()
    before = churn.sizes()
    for _ in range(30):
        churn.run_minute()
    after = churn.sizes()
    assert grown(before, after) == {}
    assert churn.rig.store.read(find_differences) == []


def grown(before: Counter[str], after: Counter[str]) -> dict[str, tuple[int, int]]:
    """The sizes that grew by more than the phase of their periods, the digits of their numbers, or the bits of two
    bitmaps: the bitmap of a chunk has more bytes at its end."""
    return {
        name: (before[name], after[name])
        for name in after
        if after[name]
        > before[name] * (1.05 if "bytes" in name else 1)
        + (4 if "rows" in name else 2 * list_index.CHUNK // 8)
    }


@pytest.mark.deep
@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("tasks.admin:_remove_task", "tags.remove(txn, keys.tags, body.tag, packed_seq)"),
        ("tasks.admin:_remove_task", "unit.leave_error_group(packed_seq, status)"),
        (
            "workers.orchestrator:collect_expired",
            "removed_counts.append(leases.truncate_excess.fn(txn, LEASE_LOG_LINES_MAX, limit))",
        ),
        ("flows.unit_of_work:FlowUnit.forget", "self._group_error(flow.seq, flow.stored, None)"),
    ],
)
def test_left_row_of_removed_work_fails_the_comparison(
    where: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Mutant("growth", (Edit(where, text, "pass"),)).planted(), pytest.raises(AssertionError):
        test_rows_and_bytes_of_bounded_work_do_not_grow(monkeypatch)


class Churn:
    """Worlds with `keep`, tasks and flows with `retain_s`, and dead letters that are purged after a time."""

    def __init__(self) -> None:
        self.rig: WorldRig = rig_with_keep(hf.Keep(entries=20))
        self.worker = self.rig.worker(snapshots=EVERY_5, budgets=Budgets(max_inbox_batch=5))
        self.leader = leader_of(self.rig)
        self.worlds = [self.rig.world(name=name) for name in ("ada", "bob")]

    def run_minute(self) -> None:
        self._run_worlds()
        self._run_tasks()
        self._run_flows()
        store = self.rig.store
        for n in range(3):
            store.transact(queue.add_dead_letter, LETTERS, b"x", "broken", f"letter {n}")
        store.transact(queue.purge_dead, LETTERS, store.now_ns() - RETAIN_NS, 100)
        for _ in range(60 // TICK_S):
            # Often enough that worker and leader renew their leases.
            self.rig.advance_clock(TICK_S)
            self.leader.tick()
            self.worker.tick()
        upkeep.run_round(store, UNIVERSE)
        # The log of this test reaches the size of a checkpoint only after hours.
        checkpoint.create(store, UNIVERSE)

    def _run_worlds(self) -> None:
        for world in self.worlds:
            for _ in range(5):
                world.send(bank.DepositMade(1))
        self.rig.run(self.worker)

    def _run_tasks(self) -> None:
        store = self.rig.store
        spec = TaskSpec("print", retain_ns=RETAIN_NS)
        new = [TaskToSubmit(b"\x92\x90\x80", tag="eu") for _ in ENDS]
        store.transact(operations.submit, UNIVERSE, spec, new)
        request = GrantRequest("w", ["default"], len(ENDS), True)
        grants = store.transact(operations.lease, UNIVERSE, request).grants
        reports = [
            TaskReport(grant.seq, grant.lease, end, error=f"error {grant.seq}")
            for grant, end in zip(grants, ENDS, strict=True)
        ]
        store.transact(operations.apply_reports, UNIVERSE, "w", store.generation, reports)

    def _run_flows(self) -> None:
        """Start a flow, and end it by the cancellation of its activation."""
        store = self.rig.store
        spec = FlowSpec("order", queue="flows", retain_ns=RETAIN_NS)
        store.transact(flow_operations.start, UNIVERSE, [NewFlow(spec, b"\x92\x90\x80", tag="eu")])
        request = GrantRequest("w", ["flows"], 1, True)
        [grant] = store.transact(operations.lease, UNIVERSE, request).grants
        store.transact(operations.cancel, UNIVERSE, [grant.seq])
        while store.transact(remove_ended, UNIVERSE, 100):
            pass

    def sizes(self) -> Counter[str]:
        """Rows and bytes by kind of the census, without `LEFT_OUT`."""
        found: Counter[str] = Counter()
        # The second census counts the first one.
        take_census(self.rig.store, "growth")
        for figure in take_census(self.rig.store, "growth").figures:
            if figure.kind not in LEFT_OUT:
                found[f"{figure.kind} rows"] += figure.rows
                found[f"{figure.kind} bytes"] += figure.bytes
        return found

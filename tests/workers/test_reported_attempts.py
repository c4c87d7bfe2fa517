"""Attempts whose own commit has completed their task: the worker neither looks after their lease nor reports them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import holdfast as hf
from holdfast.clock import SYSTEM
from holdfast.tasks.operations import ReportAnswer, TaskGrant
from holdfast.workers.tasks.attempt import TaskAttempt
from holdfast.workers.tasks.lease_table import LeaseTable
from holdfast.workers.tasks.worker import TaskWorker
from tests.process.watch import until


@hf.flow
async def triple(n: int) -> int:
    return 3 * n


app = hf.App("reported", flows=[triple])


@pytest.fixture
def rt() -> Iterator[hf.Runtime]:
    with app.open("memory:", roles=("task", "timer")) as runtime:
        yield runtime


def worker_of(rt: hf.Runtime) -> TaskWorker:
    [worker] = [role for role in rt.roles if isinstance(role, TaskWorker)]
    return worker


def test_completed_activation_counts_as_a_committed_report(rt: hf.Runtime) -> None:
    worker = worker_of(rt)
    assert [rt.start(triple, n).result(timeout=30) for n in range(3)] == [0, 3, 6]
    until(lambda: worker.leased_count == 0, "the end of the activations")
    until(lambda: worker.counts[ReportAnswer.COMMITTED] == 3, "the counted reports")
    assert worker.counts[ReportAnswer.CANCELLED] == worker.counts[ReportAnswer.REJECTED] == 0
    assert worker.lease_counters.lost == 0


def test_lease_of_a_reported_attempt_is_not_looked_after(rt: hf.Runtime) -> None:
    executors: Any = None
    table = LeaseTable(rt.store, rt.universe, {}, executors, SYSTEM)
    code: Any = None
    grants = [
        TaskGrant(
            seq=seq,
            lease=2,
            attempt=1,
            name="flow:triple",
            args=b"",
            queue="default",
            lease_ns=1,
            window_ns=1,
            expires_ns=1,
            suspect=False,
            created_ns=1,
            generation=1,
        )
        for seq in (1, 2)
    ]
    running, reported = [TaskAttempt(grant, code) for grant in grants]
    reported.reported = True
    table.attempts.update({one.token: one for one in (running, reported)})
    assert table.held() == [running]

"""The commits of a flow, as docs/flows.md states them."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

import holdfast as hf
from holdfast import codec
from holdfast.clock import SimClock
from holdfast.flows.operations import CONTINUE, END, PARK, SUSPEND, FlowCommit, commit
from holdfast.flows.records import FlowEnded, FlowParked, Published
from holdfast.flows.states import FlowState
from holdfast.store.in_process import InProcessStore
from holdfast.store.memory_backend import MemoryBackend
from holdfast.tasks import operations as task_operations
from holdfast.tasks.grants import TaskGrant
from holdfast.tasks.model import keys_of as task_keys_of
from holdfast.tasks.model import pack_int
from holdfast.tasks.operations import GrantRequest, ReportAnswer, TaskReport
from holdfast.tasks.queries import list_queues
from holdfast.tasks.row_ranges import get_status
from holdfast.tasks.states import TaskState
from holdfast.workers.tasks.worker import TaskWorker
from tests.flows.rig import FlowRig
from tests.process.watch import until

MODULES = ("holdfast.workers.flows.activation", "holdfast.flows.operations")

# A worker that waits for work gets the lease in the commit of the start. The worker of the rig asks for it.
START = Counter({"flows.start": 1, "tasks.lease": 1})
# The commit also ends the activation task.
LAST = Counter({"flows.commit": 1})
# The worker leaves the flow. Another commit brings the outcome, and a worker leases the next activation.
WAIT = Counter({"flows.commit": 1, "tasks.lease": 1})


class Proceed(hf.Event):
    n: int


async def one(n: int) -> int:
    return n


@hf.task
def child(n: int) -> int:
    return n


@hf.flow
async def in_sequence(n: int) -> int:
    for k in range(n):
        await hf.step(one, k)
    return n


@hf.flow
async def at_once(n: int) -> int:
    await asyncio.gather(*(hf.step(one, k) for k in range(n)))
    return n


@hf.flow
async def sleeps(n: int) -> int:
    for _ in range(n):
        await hf.sleep(1)
    return n


@hf.flow
async def receives(n: int) -> int:
    for _ in range(n):
        await hf.receive(Proceed)
    return n


@hf.flow
async def children(n: int) -> int:
    for k in range(n):
        await hf.step(child, k)
    return n


@hf.flow
async def values(n: int) -> int:
    for k in range(n):
        hf.now()
        hf.random()
        hf.uuid()
        hf.undo(one, k)
        hf.publish("k", k)
    return await hf.step(one, n)


app = hf.App(
    "flows",
    flows=[in_sequence, at_once, sleeps, receives, children, values],
    tasks=[child],
    events=[Proceed],
)


def commits_of(flow: Any, n: int, *, sends: int = 0, first: bool = False) -> Counter[str]:
    """Run a flow, and count its commits by operation. Events are sent when it waits, or at `first`."""
    clock = SimClock()
    with InProcessStore("memory:", MemoryBackend(), clock) as store:
        rig = FlowRig(store, clock, app)
        handle = rig.start(flow, n)
        sent = 0
        while not handle.done():
            if sent < sends and (first or rig.is_idle()):
                handle.send(Proceed(sent))
                sent += 1
            elif not rig.run_one():
                rig.pass_time()
        rig.threads.shutdown(wait=True)
        done = rig.crashing_store
        return Counter(done.operations[at - 1] for at in done.points)


@pytest.mark.parametrize("n", [1, 2, 20])
def test_steps_in_sequence_have_one_commit_each(n: int) -> None:
    assert commits_of(in_sequence, n) == START + Counter({"flows.commit": n}) + LAST


@pytest.mark.parametrize("n", [1, 10])
def test_steps_that_end_at_once_share_a_commit(n: int) -> None:
    assert commits_of(at_once, n) == START + Counter({"flows.commit": 1}) + LAST


@pytest.mark.parametrize("n", [1, 3])
def test_each_sleep_has_the_commits_of_a_wait_and_one_of_the_timer(n: int) -> None:
    expected = START + Counter({name: n * count for name, count in WAIT.items()}) + LAST
    assert commits_of(sleeps, n) == expected + Counter({"flows.fire_due": n})


@pytest.mark.parametrize("n", [1, 3])
def test_each_receive_that_waits_has_the_commits_of_a_wait_and_the_send(n: int) -> None:
    expected = START + Counter({name: n * count for name, count in WAIT.items()}) + LAST
    assert commits_of(receives, n, sends=n) == expected + Counter({"flows.send": n})


def test_receive_of_an_event_that_is_there_has_one_commit() -> None:
    expected = START + Counter({"flows.commit": 3, "flows.send": 3}) + LAST
    assert commits_of(receives, 3, sends=3, first=True) == expected


def test_each_child_task_has_the_commits_of_a_wait_and_its_own() -> None:
    expected = START + Counter({name: 2 * count for name, count in WAIT.items()}) + LAST
    own = Counter({"tasks.lease": 2, "tasks.apply_reports": 2})
    assert commits_of(children, 2) == expected + own


def test_values_publications_and_compensations_share_the_next_commit() -> None:
    assert commits_of(values, 5) == commits_of(in_sequence, 1)


def test_flow_of_n_steps_has_n_plus_two_commits_in_a_waiting_worker() -> None:
    """The start with the lease, the steps, the end. A worker also commits its heartbeats, so the least of some counts is
    the cost of the flow."""
    with app.open("memory:", roles=("task", "timer")) as rt:
        backend: Any = rt.store.backend  # type: ignore[attr-defined]

        [worker] = [role for role in rt.roles if isinstance(role, TaskWorker)]

        def waits_for_work() -> bool:
            return worker.leased_count == 0 and worker._parked.is_open

        rt.start(in_sequence, 1).result(timeout=30)
        counts = []
        for _ in range(5):
            until(waits_for_work, "the request of the idle worker")
            before = backend.last_id()
            rt.start(in_sequence, 5).result(timeout=30)
            until(waits_for_work, "the request of the idle worker")
            counts.append(backend.last_id() - before)
        assert min(counts) == 5 + 2


def end_activation(rig: FlowRig, action: int, *records: Any) -> TaskGrant:
    """Start a flow and commit the end of its activation."""
    rig.start(in_sequence, 1)
    request = GrantRequest("worker", ["default"], 1, True)
    [grant] = rig.store.transact(task_operations.lease, rig.universe, request).grants
    seq, run = codec.unpack(grant.args)
    work = FlowCommit(seq, run, grant.seq, grant.lease, 0, list(records), action=action)
    answer = rig.store.transact(commit, rig.universe, rig.store.generation, work)
    assert answer.applied
    assert answer.reported is (action != CONTINUE)
    return grant


@pytest.mark.parametrize(
    ("action", "records"),
    [(SUSPEND, ()), (END, (FlowEnded(FlowState.COMPLETED),)), (PARK, (FlowParked("s", "why"),))],
)
def test_commit_that_ends_an_activation_completes_its_task(
    make_rig: Any, action: int, records: tuple[Any, ...]
) -> None:
    rig = make_rig(app)
    grant = end_activation(rig, action, *records)
    status = rig.store.read(
        lambda txn: get_status(txn, task_keys_of(rig.universe), pack_int(grant.seq))
    )
    assert (status.state, status.lease) == (TaskState.COMPLETED, grant.lease)
    [counts] = [row.counts for row in rig.store.read(list_queues, rig.universe)]
    assert (counts.leased, counts.completed) == (0, 1)


def test_commit_of_a_step_does_not_complete_the_task(make_rig: Any) -> None:
    rig = make_rig(app)
    end_activation(rig, CONTINUE, Published("k", b"1"))
    [counts] = [row.counts for row in rig.store.read(list_queues, rig.universe)]
    assert (counts.leased, counts.completed) == (1, 0)


def test_report_of_an_activation_that_its_commit_has_ended_is_accepted(make_rig: Any) -> None:
    """A worker of a former release reports each activation. It gets the answer of a repeated report."""
    rig = make_rig(app)
    grant = end_activation(rig, SUSPEND)
    report = TaskReport(grant.seq, grant.lease)
    answers = rig.store.transact(
        task_operations.apply_reports, rig.universe, "worker", rig.store.generation, [report]
    )
    assert answers == [ReportAnswer.COMMITTED]


def test_many_flows_at_once_share_commits() -> None:
    flows, steps = 20, 5
    with app.open("memory:", roles=("task", "timer")) as rt:
        backend: Any = rt.store.backend  # type: ignore[attr-defined]
        rt.start(in_sequence, 1).result(timeout=30)
        before = backend.last_id()
        handles = [rt.start(in_sequence, steps) for _ in range(flows)]
        for handle in handles:
            assert handle.result(timeout=30) == steps
        assert backend.last_id() - before < flows * (steps + 2)

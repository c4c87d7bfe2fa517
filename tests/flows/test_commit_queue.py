"""The commit queue: commits of several flows in one operation, and the error of one of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

import holdfast as hf
from holdfast.errors import CommitUnknown, Fenced
from holdfast.flows.commit_batch import commit_many
from holdfast.flows.new_flow import NewFlow
from holdfast.flows.operations import END, FlowCommit, start
from holdfast.flows.records import CancelRequested, FlowEnded, Published
from holdfast.flows.states import FlowState
from holdfast.ops.verify import find_differences
from holdfast.store import tuples
from holdfast.tasks import operations as task_operations
from holdfast.tasks.model import keys_of as task_keys_of
from holdfast.tasks.operations import GrantRequest
from holdfast.tasks.row_ranges import decode_range
from holdfast.workers.flows.commit_queue import COMMITS_MAX, CommitQueue
from tests.flows.rig import UNKNOWN, FlowRig
from tests.flows.test_steps import app_of, double


@hf.flow
async def order() -> int:
    return await hf.step(double, 1)


def leased_flows(make_rig: Any, count: int) -> tuple[FlowRig, list[Any], list[FlowCommit]]:
    """Flows whose activations are leased, and a commit of each."""
    rig = make_rig(app_of(order))
    handles = [rig.start(order) for _ in range(count)]
    leased = rig.store.transact(
        task_operations.lease, rig.universe, GrantRequest("worker", ["default"], count, True)
    )
    grants = sorted(leased.grants, key=lambda grant: grant.seq)
    seqs = [int(handle.id.partition("-")[2]) for handle in handles]
    works = [
        FlowCommit(seq, 1, grant.seq, grant.lease, 0, [Published("state", bytes([number]))])
        for number, (seq, grant) in enumerate(zip(seqs, grants, strict=True))
    ]
    return rig, handles, works


def commit_at_once(rig: FlowRig, works: list[FlowCommit]) -> list[Any]:
    """The answers or errors of commits that are ready in the same turn of the loop."""
    queue = CommitQueue(rig.crashing_store, rig.universe)

    async def commit_all() -> list[Any]:
        commits = (queue.commit(work) for work in works)
        return await asyncio.gather(*commits, return_exceptions=True)

    return asyncio.run(commit_all())


def commits_of(rig: FlowRig) -> list[str]:
    return [name for name in rig.crashing_store.operations if name.startswith("flows.commit")]


def is_recorded(handle: Any) -> bool:
    return "state" in handle.published()


def test_commits_of_one_turn_are_one_operation(make_rig: Any) -> None:
    rig, handles, works = leased_flows(make_rig, 3)
    answers = commit_at_once(rig, works)
    assert commits_of(rig) == ["flows.commit_many"]
    assert [answer.applied for answer in answers] == [True] * 3
    assert [answer.only_own for answer in answers] == [True] * 3
    assert all(is_recorded(handle) for handle in handles)


def test_answer_repeats_the_records_of_the_commit_only_after_records_of_other_commits(
    make_rig: Any,
) -> None:
    rig, handles, works = leased_flows(make_rig, 3)
    handles[0].cancel()
    answers = commit_at_once(rig, works)
    assert [answer.only_own for answer in answers] == [False, True, True]
    assert [answer.records for answer in answers] == [
        [CancelRequested(), *works[0].records],
        [],
        [],
    ]


def test_answer_without_all_records_of_the_commit_has_the_recorded_ones(make_rig: Any) -> None:
    """A cancellation came before the end of the flow, so the end is not recorded. There is one new record, as if it
    were."""
    rig, handles, works = leased_flows(make_rig, 1)
    handles[0].cancel()
    ended = replace(works[0], records=[FlowEnded(FlowState.COMPLETED)], action=END)
    [answer] = commit_at_once(rig, [ended])
    assert (answer.applied, answer.only_own) == (False, False)
    assert answer.records == [CancelRequested()]


def test_flows_that_start_together_share_an_index_row_and_a_lease(make_rig: Any) -> None:
    rig = make_rig(app_of(order))
    keys = task_keys_of(rig.universe)
    rig.store.transact(start, rig.universe, [NewFlow(order.spec, order.pack((), {}))] * 3)
    ready = rig.store.read(lambda txn: txn.scan(keys.ready, tuples.prefix_end(keys.ready)))
    assert [decode_range(row) for _, row in ready] == [(1, 3)]
    leased = rig.store.transact(
        task_operations.lease, rig.universe, GrantRequest("worker", ["default"], 3, True)
    )
    assert len({grant.lease for grant in leased.grants}) == 1
    rig.run_together(leased.grants)
    assert rig.store.read(lambda txn: list(find_differences(txn))) == []


def test_activations_of_different_flows_keep_their_order(make_rig: Any) -> None:
    @hf.flow
    async def other() -> int:
        return await hf.step(double, 2)

    rig = make_rig(app_of(order, other))
    new = {flow: NewFlow(flow.spec, flow.pack((), {})) for flow in (order, other)}
    flows = [order, order, other, order]
    rig.store.transact(start, rig.universe, [new[flow] for flow in flows])
    leased = rig.store.transact(
        task_operations.lease, rig.universe, GrantRequest("worker", ["default"], 9, True)
    )
    assert [grant.name for grant in leased.grants] == [f"flow:{flow.name}" for flow in flows]


def test_single_commit_is_a_separate_operation(make_rig: Any) -> None:
    rig, [handle], works = leased_flows(make_rig, 1)
    [answer] = commit_at_once(rig, works)
    assert answer.applied
    assert commits_of(rig) == ["flows.commit"]
    assert is_recorded(handle)


def test_operation_has_at_most_commits_max_commits(make_rig: Any) -> None:
    rig, handles, works = leased_flows(make_rig, COMMITS_MAX + 2)
    answers = commit_at_once(rig, works)
    assert commits_of(rig) == ["flows.commit_many"] * 2
    assert all(answer.applied for answer in answers)
    assert all(is_recorded(handle) for handle in handles)


def test_full_operation_is_sent_before_the_next_flow_runs(make_rig: Any) -> None:
    """The writer applies it while the loop runs the other flows of the turn."""
    rig, _, works = leased_flows(make_rig, COMMITS_MAX + 1)
    sent: list[int] = []

    class Recording:
        generation = rig.store.generation

        def submit(self, fn: Any, universe: str, generation: int, work: Any) -> Any:
            sent.append(len(work) if isinstance(work, list) else 1)
            return rig.crashing_store.submit(fn, universe, generation, work)

    store: Any = Recording()
    queue = CommitQueue(store, rig.universe)
    seen: list[list[int]] = []

    async def commit_all() -> list[Any]:
        tasks = [asyncio.create_task(queue.commit(work)) for work in works[:-1]]
        # Runs in the same turn of the loop, after these commits and before the last one.
        asyncio.get_running_loop().call_soon(lambda: seen.append(list(sent)))
        tasks.append(asyncio.create_task(queue.commit(works[-1])))
        return await asyncio.gather(*tasks)

    answers = asyncio.run(commit_all())
    assert seen == [[COMMITS_MAX]]
    assert sent == [COMMITS_MAX, 1]
    assert all(answer.applied for answer in answers)


def test_stale_activation_fences_no_other_flow(make_rig: Any) -> None:
    rig, handles, works = leased_flows(make_rig, 3)
    works[1] = replace(works[1], lease=works[1].lease + 1)
    first, stale, last = commit_at_once(rig, works)
    assert first.applied
    assert last.applied
    assert isinstance(stale, Fenced)
    assert [is_recorded(handle) for handle in handles] == [True, False, True]
    assert commits_of(rig) == ["flows.commit_many", *["flows.commit"] * 3]


def test_refused_operation_changes_no_flow(make_rig: Any) -> None:
    rig, handles, works = leased_flows(make_rig, 2)
    works[1] = replace(works[1], lease=works[1].lease + 1)
    with pytest.raises(Fenced):
        rig.store.transact(commit_many, rig.universe, rig.store.generation, works)
    assert not any(is_recorded(handle) for handle in handles)


def test_unknown_outcome_is_unknown_to_each_commit(make_rig: Any) -> None:
    rig, handles, works = leased_flows(make_rig, 2)
    rig.plan["flows.commit_many", 1] = UNKNOWN
    answers = commit_at_once(rig, works)
    assert [type(answer) for answer in answers] == [CommitUnknown] * 2
    assert all(is_recorded(handle) for handle in handles)
    assert commits_of(rig) == ["flows.commit_many"]


def test_cancelled_first_commit_does_not_delay_the_joined_commits(make_rig: Any) -> None:
    rig, handles, works = leased_flows(make_rig, 3)
    queue = CommitQueue(rig.crashing_store, rig.universe)

    async def cancel_first() -> list[Any]:
        tasks = [asyncio.create_task(queue.commit(work)) for work in works]
        asyncio.get_running_loop().call_soon(tasks[0].cancel)
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, *others = asyncio.run(cancel_first())
    assert isinstance(first, asyncio.CancelledError)
    assert [answer.applied for answer in others] == [True] * 2
    assert [is_recorded(handle) for handle in handles] == [False, True, True]


def test_end_of_a_child_and_suspension_of_its_parent_in_one_operation_wake_the_parent(
    make_rig: Any,
) -> None:
    """In both orders the parent runs again, with the outcome of its child."""

    @hf.flow
    async def child() -> int:
        return 7

    @hf.flow
    async def parent() -> int:
        return await hf.step(child) + await hf.step(double, 1)

    rig = make_rig(app_of(parent, child))
    handles = [rig.start(parent) for _ in range(5)]
    # The worker runs all activations that it holds in one event loop.
    rounds = 0
    while not all(handle.done() for handle in handles):
        rounds += 1
        assert rounds < 100
        leased = rig.store.transact(
            task_operations.lease, rig.universe, GrantRequest("worker", ["default"], 20, True)
        )
        rig.run_together(leased.grants)
    assert [handle.result(timeout=0) for handle in handles] == [9] * 5
    assert "flows.commit_many" in rig.crashing_store.operations

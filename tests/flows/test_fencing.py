"""The fence of a flow's commits: the live lease of the present activation, in the present run and generation."""

from typing import Any

import pytest
from msgspec.structs import replace

import holdfast as hf
from holdfast.clock import S
from holdfast.errors import Fenced
from holdfast.flows import operations
from holdfast.flows.operations import FlowCommit
from holdfast.flows.records import Published
from holdfast.tasks import operations as task_operations
from holdfast.tasks.operations import GrantRequest
from tests.flows.rig import FlowRig
from tests.flows.test_steps import app_of, double


def leased_flow(make_rig: Any) -> tuple[FlowRig, Any, FlowCommit]:
    """A flow whose activation is leased, and a commit of its worker."""

    @hf.flow
    async def order() -> int:
        return await hf.step(double, 1)

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    leased = rig.store.transact(
        task_operations.lease, rig.universe, GrantRequest("worker", ["default"], 1, True)
    )
    [grant] = leased.grants
    seq = int(handle.id.partition("-")[2])
    work = FlowCommit(seq, 1, grant.seq, grant.lease, 0, [Published("state", b"\x01")])
    return rig, handle, work


def commit(rig: FlowRig, work: FlowCommit, generation: int = 0) -> Any:
    found = generation or rig.store.generation
    return rig.store.transact(operations.commit, rig.universe, found, work)


def assert_fenced(rig: FlowRig, handle: Any, work: FlowCommit, generation: int = 0) -> None:
    with pytest.raises(Fenced):
        commit(rig, work, generation)
    assert handle.published() == {}


def test_commit_of_the_present_activation_is_applied(make_rig: Any) -> None:
    rig, handle, work = leased_flow(make_rig)
    assert commit(rig, work).applied
    assert handle.published() == {"state": 1}


def test_commit_of_another_run_is_fenced(make_rig: Any) -> None:
    rig, handle, work = leased_flow(make_rig)
    assert_fenced(rig, handle, replace(work, run=2))


def test_commit_of_another_generation_of_the_store_is_fenced(make_rig: Any) -> None:
    rig, handle, work = leased_flow(make_rig)
    assert_fenced(rig, handle, work, rig.store.generation + 1)


def test_commit_under_a_former_lease_is_fenced(make_rig: Any) -> None:
    rig, handle, work = leased_flow(make_rig)
    assert_fenced(rig, handle, replace(work, lease=work.lease - 1))


def test_commit_after_the_lease_is_fenced(make_rig: Any) -> None:
    rig, handle, work = leased_flow(make_rig)
    rig.clock.advance(61 * S)
    assert_fenced(rig, handle, work)


def test_commit_of_a_task_that_is_not_the_present_activation_is_fenced(make_rig: Any) -> None:
    """The task is leased, and it is the activation of another flow."""
    rig, handle, work = leased_flow(make_rig)
    other = rig.start(rig.app.flows["order"])
    leased = rig.store.transact(
        task_operations.lease, rig.universe, GrantRequest("worker", ["default"], 1, True)
    )
    [grant] = leased.grants
    assert_fenced(rig, handle, replace(work, task=grant.seq, lease=grant.lease))
    assert other.published() == {}


def test_commit_of_a_removed_flow_is_fenced(make_rig: Any) -> None:
    rig, _, work = leased_flow(make_rig)
    with pytest.raises(Fenced):
        commit(rig, replace(work, flow=99))

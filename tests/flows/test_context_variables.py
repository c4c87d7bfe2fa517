"""Context variables: a local step and a compensation have those of the code that called them."""

import asyncio
from contextvars import ContextVar
from typing import Any

import pytest

import holdfast as hf
from tests.flows.test_steps import app_of, double, failure

TENANT: ContextVar[str] = ContextVar("tenant", default="none")


def tenant() -> str:
    found = TENANT.get()
    TENANT.set("changed")
    return found


async def async_tenant() -> str:
    await asyncio.sleep(0)
    return tenant()


@pytest.mark.parametrize("read", [tenant, async_tenant])
def test_step_has_a_copy_of_the_context_of_its_call(make_rig: Any, read: Any) -> None:
    @hf.flow
    async def order() -> list[str]:
        TENANT.set("ada")

        async def branch(name: str) -> str:
            TENANT.set(name)
            await hf.sleep(1)
            return await hf.step(read)

        found = await asyncio.gather(branch("bob"), branch("cyd"))
        return [await hf.step(read), *found, TENANT.get()]

    rig = make_rig(app_of(order))
    assert rig.result(rig.start(order)) == ["ada", "bob", "cyd", "ada"]


def test_attempts_of_a_step_have_separate_copies_of_its_context(make_rig: Any) -> None:
    seen: list[str] = []

    def fail_once() -> str:
        seen.append(tenant())
        if len(seen) == 1:
            raise ValueError("again")
        return seen[-1]

    @hf.flow
    async def order() -> str:
        TENANT.set("ada")
        return await hf.step(hf.options(fail_once, attempts=2, backoff_s=0.001))

    rig = make_rig(app_of(order))
    assert rig.result(rig.start(order)) == "ada"
    assert seen == ["ada", "ada"]


def test_compensation_has_the_context_of_its_registration(make_rig: Any) -> None:
    @hf.flow(attempts=1)
    async def order() -> None:
        TENANT.set("ada")
        hf.undo(tenant)
        TENANT.set("bob")
        await hf.step(double, 1)
        raise ValueError("fails")

    rig = make_rig(app_of(order))
    handle = rig.start(order)
    failure(rig, handle)
    assert [step.value for step in handle.steps() if step.name == "undo:tenant"] == ["ada"]


def test_step_is_no_code_of_the_flow(make_rig: Any) -> None:
    async def ask() -> None:
        hf.now()

    @hf.flow
    async def order() -> None:
        await hf.step(ask)

    rig = make_rig(app_of(order))
    assert "called inside a step" in failure(rig, rig.start(order)).error

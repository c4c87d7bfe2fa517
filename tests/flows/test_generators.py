"""Asynchronous generators in the code of a flow."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import holdfast as hf
from tests.flows.test_steps import app_of, double


def test_aclosing_runs_the_steps_of_a_generator_that_is_left_early(make_rig: Any) -> None:
    released: list[int] = []

    def release() -> None:
        released.append(1)

    async def doubled() -> AsyncIterator[int]:
        try:
            for number in range(1, 4):
                yield await hf.step(double, number)
        finally:
            await hf.step(release)

    @hf.flow
    async def order() -> int:
        async with contextlib.aclosing(doubled()) as found:
            async for value in found:
                return value
        return 0

    rig = make_rig(app_of(order))
    assert rig.result(rig.start(order)) == 2
    assert released == [1]

"""The payment service of the simulated flows: what the effect `pay` calls, and how it fails.

Every call gets a number, which is its result, and is recorded with its idempotency key. A call may fail, hang beyond
its timeout, and crash its process before or after the call. After faults have stopped, every call succeeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from holdfast.app.definitions import Call, Effect
from holdfast.clock import MS, S
from holdfast.errors import Busy
from holdfast.sim.actor import Incarnation
from holdfast.sim.inline_effects import inline_effect
from tests.simulation.flow_app import pay

SUCCEEDS, FAILS, HANGS, DIES_BEFORE, DIES_AFTER = range(5)
# By weight.
PAYMENT_OUTCOMES = (*[SUCCEEDS] * 10, *[FAILS] * 4, HANGS, DIES_BEFORE, DIES_AFTER)
HANG_NS = 2 * S + 200 * MS


class PaymentService:
    """The service of one run. It survives every process."""

    def __init__(self) -> None:
        self._numbers: Iterator[int] = itertools.count(1)

    def effects(self, incarnation: Incarnation) -> dict[str, Effect[Any, Any]]:
        """Return the effects as the pool of this incarnation runs them."""

        def paying(call: Call, n: int) -> int:
            stopped = incarnation.faults_stopped
            outcome = SUCCEEDS if stopped else incarnation.tape.pick(PAYMENT_OUTCOMES)
            if outcome == DIES_BEFORE:
                _crash(incarnation)
            number = next(self._numbers)
            incarnation.record(
                "flow.payment", number=number, step=call.world, key=call.idempotency_key, args=[n]
            )
            if outcome == DIES_AFTER:
                _crash(incarnation)
            if outcome == FAILS:
                raise Busy(why="the service is busy")
            if outcome == HANGS:
                incarnation.sleep(HANG_NS)
            return number

        return {pay.kind: inline_effect(pay, paying, incarnation.clock, incarnation.store.now_ns)}


def _crash(incarnation: Incarnation) -> None:
    current = incarnation.scheduler.current
    assert current is not None
    incarnation.scheduler.kill(current)

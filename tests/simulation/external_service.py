"""External service: what the effects of simulated worlds call, and how it fails.

Every call gets a number and is recorded with its idempotency key. Its result is that number, so
that each receipt names its call. A call may fail temporarily or permanently, return a wrong type,
exceed its time-out or its claim, and crash its process before or after the call.

After faults have stopped, every call succeeds.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

from holdfast.app.definitions import Call, Costed, Effect
from holdfast.clock import MS, S
from holdfast.errors import Busy
from holdfast.runner.error_policy import Refused
from holdfast.sim.actor import Incarnation
from holdfast.sim.inline_effects import inline_effect
from tests.simulation.sample_app import EFFECT_TIMEOUT_S, pay, quote

(
    SUCCEEDS,
    FAILS,
    REFUSES,
    WRONG_TYPE,
    HANGS,
    OVERRUNS_CLAIM,
    DIES_BEFORE,
    DIES_AFTER,
    EXITS,
    SLOW,
) = range(10)
# Outcomes of calls by weight.
OUTCOME_WEIGHTS = (
    *[SUCCEEDS] * 13, *[FAILS] * 4, REFUSES, WRONG_TYPE, *[HANGS] * 3, OVERRUNS_CLAIM, DIES_BEFORE, DIES_AFTER, *[EXITS] * 2,
    SLOW,
)  # fmt: skip
# Fewer effects run in co-located runs, so the rare case, an effect whose attempts all hang, gets
# more weight.
COLOCATED_OUTCOME_WEIGHTS = (*OUTCOME_WEIGHTS, *[HANGS] * 5)


class TemporarilyBusy(Busy):
    code = "not_now"


class PermanentlyRefused(Refused):
    code = "never"


class ExternalService:
    """The external service of one run. It survives every process."""

    def __init__(self) -> None:
        self._numbers: Iterator[int] = itertools.count(1)

    def effects(self, incarnation: Incarnation) -> dict[str, Effect[Any, Any]]:
        """Return the effects as the worker pool of this incarnation runs them."""

        def quoting(call: Call, what: str, order: str) -> Any:
            number, fate = self._start_call(incarnation, quote.kind, call, what, order)
            if fate in (HANGS, OVERRUNS_CLAIM):
                incarnation.sleep(_overrun_ns(incarnation, fate))
            return self._finish_call(incarnation, fate, float(number))

        async def paying(call: Call, what: str, order: str) -> Any:
            number, fate = self._start_call(incarnation, pay.kind, call, what, order)
            if fate == SLOW:
                await asyncio.gather(*(asyncio.sleep(0.1 * n) for n in range(3)))
            if fate == HANGS:
                await asyncio.sleep(_overrun_ns(incarnation, fate) / S)
            if fate == OVERRUNS_CLAIM:
                incarnation.sleep(_overrun_ns(incarnation, fate))  # cannot be interrupted
            return self._finish_call(
                incarnation, fate, Costed(number, 0.5) if number % 2 else number
            )

        return {
            quote.kind: inline_effect(quote, quoting, incarnation.clock, incarnation.store.now_ns),
            pay.kind: inline_effect(pay, paying, incarnation.clock, incarnation.store.now_ns),
        }

    def draw_outcome(self, incarnation: Incarnation) -> int:
        """Draw the outcome of a call from the tape."""
        return int(
            incarnation.tape.pick(
                COLOCATED_OUTCOME_WEIGHTS if incarnation.settings.colocated else OUTCOME_WEIGHTS
            )
        )

    def _start_call(
        self, incarnation: Incarnation, kind: str, call: Call, what: str, order: str
    ) -> tuple[int, int]:
        outcome = SUCCEEDS if incarnation.faults_stopped else self.draw_outcome(incarnation)
        if outcome == DIES_BEFORE:
            incarnation.count_coverage("effect: died before the call")
            _crash(incarnation)
        number = next(self._numbers)
        details = {"attempt": call.attempt, "world": call.world, "args": [what, order]}
        if incarnation.store.is_replaced:
            details["late"] = True  # of a former life of the store
        incarnation.record("effect.call", n=number, kind=kind, key=call.idempotency_key, **details)
        if outcome == DIES_AFTER:
            incarnation.count_coverage("effect: died after the call")
            _crash(incarnation)
        return number, outcome

    def _finish_call(self, incarnation: Incarnation, outcome: int, answer: Any) -> Any:
        if outcome == FAILS:
            raise TemporarilyBusy(why="the other end is busy")
        if outcome == REFUSES:
            raise PermanentlyRefused(why="the other end refuses")
        if outcome == EXITS:
            raise SystemExit(3)
        if outcome == WRONG_TYPE:
            incarnation.count_coverage("effect: answered in the wrong shape")
            return "a word"
        return answer


def _overrun_ns(incarnation: Incarnation, outcome: int) -> int:
    """Return a duration longer than the time-out of the call, or than its claim."""
    return (
        int(EFFECT_TIMEOUT_S * S)
        + (100 if outcome == HANGS else 1500 + incarnation.tape.draw(2000)) * MS
    )


def _crash(incarnation: Incarnation) -> None:
    current = incarnation.scheduler.current
    assert current is not None
    incarnation.scheduler.kill(current)

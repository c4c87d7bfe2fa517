"""The world outside: what effects of simulated worlds do there, and how it lets its callers down.

Every call gets a number and is noted with its idempotency key; its answer is that number, so that each
receipt names the call that it is of. A call may fail for now or for good, answer in the wrong shape,
wait beyond its time or its claim, and take its process down: before it was made, or after.

Once faults have stopped, every call is made and answered.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

from holdfast.app.declare import Call, Costed, Effect
from holdfast.clock import MS, S
from holdfast.errors import Busy
from holdfast.runner.faults import Refused
from holdfast.sim.actor import Life
from holdfast.sim.inplace import in_place
from holdfast.sim.world_app import EFFECT_TIMEOUT_S, pay, quote

WELL, FAILS, REFUSES, ODD, HANGS, LATE, DIES_BEFORE, DIES_AFTER, EXITS, DAWDLES = range(10)
# Of so many calls, as many end so.
FATES = (
    *[WELL] * 13, *[FAILS] * 4, REFUSES, ODD, *[HANGS] * 3, LATE, DIES_BEFORE, DIES_AFTER, *[EXITS] * 2,
    DAWDLES,
)  # fmt: skip
# Where worlds want fewer of them, more come to what is rare: an effect all of whose attempts hang.
FATES_AT_HOME = (*FATES, *[HANGS] * 5)


class NotNow(Busy):
    code = "not_now"


class Never(Refused):
    code = "never"


class Outside:
    """What one run's effects find outside. It outlives every process."""

    def __init__(self) -> None:
        self._numbers: Iterator[int] = itertools.count(1)

    def adapters(self, life: Life) -> dict[str, Effect[Any, Any]]:
        """The effects as a pool of this life does them."""

        def quoting(call: Call, what: str, order: str) -> Any:
            number, fate = self._begin(life, quote.kind, call, what, order)
            if fate in (HANGS, LATE):
                life.sleep(_beyond(life, fate))
            return self._end(life, fate, float(number))

        async def paying(call: Call, what: str, order: str) -> Any:
            number, fate = self._begin(life, pay.kind, call, what, order)
            if fate == DAWDLES:
                await asyncio.gather(*(asyncio.sleep(0.1 * n) for n in range(3)))
            if fate == HANGS:
                await asyncio.sleep(_beyond(life, fate) / S)
            if fate == LATE:
                life.sleep(_beyond(life, fate))  # nobody can interrupt it
            return self._end(life, fate, Costed(number, 0.5) if number % 2 else number)

        return {
            quote.kind: in_place(quote, quoting, life.clock, life.store.now_ns),
            pay.kind: in_place(pay, paying, life.clock, life.store.now_ns),
        }

    def fate(self, life: Life) -> int:
        """What becomes of a call, as the tape says."""
        return int(life.tape.pick(FATES_AT_HOME if life.settings.household else FATES))

    def _begin(self, life: Life, kind: str, call: Call, what: str, order: str) -> tuple[int, int]:
        fate = WELL if life.calm else self.fate(life)
        if fate == DIES_BEFORE:
            life.seen("effect: died before the call")
            _die(life)
        number = next(self._numbers)
        told = {"attempt": call.attempt, "world": call.world, "args": [what, order]}
        if life.store.replaced:
            told["late"] = True  # of a life of the store that is over
        life.note("effect.call", n=number, kind=kind, key=call.idempotency_key, **told)
        if fate == DIES_AFTER:
            life.seen("effect: died after the call")
            _die(life)
        return number, fate

    def _end(self, life: Life, fate: int, answer: Any) -> Any:
        if fate == FAILS:
            raise NotNow(why="the other end is busy")
        if fate == REFUSES:
            raise Never(why="the other end refuses")
        if fate == EXITS:
            raise SystemExit(3)
        if fate == ODD:
            life.seen("effect: answered in the wrong shape")
            return "a word"
        return answer


def _beyond(life: Life, fate: int) -> int:
    """Longer than the call may take, or than its claim lasts."""
    return int(EFFECT_TIMEOUT_S * S) + (100 if fate == HANGS else 1500 + life.tape.draw(2000)) * MS


def _die(life: Life) -> None:
    current = life.scheduler.current
    assert current is not None
    life.scheduler.kill(current)

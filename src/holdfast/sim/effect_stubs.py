"""Effect stubs: the effects of a user's app in a simulation, either the user's functions or
replacements.

They run in the simulation's thread, one at a time, in simulated time. The seed picks faults around
a call that an effect worker, and the function, must tolerate:

    before the call    the process dies; another process makes the call later
    after the call     the process dies and the answer is lost; the call is repeated with the same key
    twice              the answer is lost in transit; the call is repeated at once with the same key

These faults use up no attempt of the function. Only exceptions of the function count. `call_protection` bounds the
faults of one call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from holdfast.app.app import App
from holdfast.app.definitions import Call, Effect
from holdfast.errors import Invalid
from holdfast.sim.actor import Incarnation
from holdfast.sim.inline_effects import inline_effect

# One in this many calls suffers each fault.
FAULT_ODDS = 12
BEFORE, AFTER, TWICE = 1, 2, 3

EffectFunction = Callable[..., Any]


class EffectStubs:
    """Wraps the effects of a session's worker pools and injects faults around their calls."""

    def __init__(
        self, app: App, replacements: Mapping[str, EffectFunction], *, faults: bool
    ) -> None:
        unknown = sorted(replacements.keys() - app.effects.keys())
        if unknown:
            raise Invalid(what="effects", found=unknown, expected=sorted(app.effects))
        self._effects = app.effects
        self._replacements = dict(replacements)
        self._faults = faults

    def effects_of(self, incarnation: Incarnation) -> dict[str, Effect[Any, Any]]:
        return {
            kind: inline_effect(
                effect,
                self._with_faults(incarnation, kind, effect.fn),
                incarnation.clock,
                incarnation.store.now_ns,
            )
            for kind, effect in self._effects.items()
        }

    def _with_faults(
        self, incarnation: Incarnation, kind: str, original: EffectFunction
    ) -> EffectFunction:
        fn = self._replacements.get(kind, original)

        async def awaited(
            call_end: ExitStack, fault: int, result: Any, call: Call, args: tuple[Any, ...]
        ) -> Any:
            with call_end:
                answer = await result
                if fault == TWICE:
                    answer = await fn(call, *args)
            _crash_after(incarnation, kind, fault)
            return answer

        def call_it(call: Call, *args: Any) -> Any:
            with ExitStack() as call_end:
                protection = incarnation.simulation.call_protection
                call_end.enter_context(protection.calling(incarnation, call.idempotency_key))
                fault = (
                    incarnation.tape.draw_fault(FAULT_ODDS, (BEFORE, AFTER, TWICE).__contains__)
                    if self._faults and not incarnation.faults_stopped
                    else 0
                )
                if fault == BEFORE:
                    _crash(incarnation, kind, "before the call")
                if fault == TWICE:
                    incarnation.record("fault", kind="the call made twice", effect=kind)
                incarnation.record(
                    "effect.call", kind=kind, key=call.idempotency_key, attempt=call.attempt
                )
                result = fn(call, *args)
                if inspect.isawaitable(result):
                    return awaited(call_end.pop_all(), fault, result, call, args)
                if fault == TWICE:
                    result = fn(call, *args)
            _crash_after(incarnation, kind, fault)
            return result

        return call_it


def _crash_after(incarnation: Incarnation, kind: str, fault: int) -> None:
    if fault == AFTER:
        _crash(incarnation, kind, "after the call")


def _crash(incarnation: Incarnation, kind: str, when: str) -> None:
    incarnation.record("fault", kind=f"crash {when}", effect=kind)
    current = incarnation.scheduler.current
    assert current is not None
    incarnation.scheduler.kill(current)

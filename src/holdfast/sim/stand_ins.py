"""The effects of a user's app in a simulation: the user's own functions, or what stands in for them.

They are called in the simulation's thread, one at a time, in simulated time. What may go wrong around a
call, as the seed picks, is what an adapter pool must get over, and a function with it:

    before the call    the process dies: the call is made later, by another
    after the call     the process dies, nobody hears the answer: the call is made again, same key
    twice              the answer is lost on its way, and asked for again at once, same key

None of it uses up an attempt that the function had: what it raises itself is all that counts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.app.app import App
from holdfast.app.declare import Call, Effect
from holdfast.errors import Invalid
from holdfast.sim.actor import Life
from holdfast.sim.inplace import in_place

# Of so many calls, one goes wrong in each way.
FATES = 12
BEFORE, AFTER, TWICE = 1, 2, 3

Stand = Callable[..., Any]


class StandIns:
    """What a session's pools do, and how it fails."""

    def __init__(self, app: App, instead: Mapping[str, Stand], *, faults: bool) -> None:
        unknown = sorted(instead.keys() - app.effects.keys())
        if unknown:
            raise Invalid(what="effects", found=unknown, expected=sorted(app.effects))
        self._effects = app.effects
        self._instead = dict(instead)
        self._faults = faults

    def adapters(self, life: Life) -> dict[str, Effect[Any, Any]]:
        return {
            kind: in_place(
                effect, self._around(life, kind, effect.fn), life.clock, life.store.now_ns
            )
            for kind, effect in self._effects.items()
        }

    def _around(self, life: Life, kind: str, genuine: Stand) -> Stand:
        fn = self._instead.get(kind, genuine)

        async def awaited(fate: int, result: Any, call: Call, args: tuple[Any, ...]) -> Any:
            answer = await result
            if fate == TWICE:
                answer = await fn(call, *args)
            _after(life, kind, fate)
            return answer

        def call_it(call: Call, *args: Any) -> Any:
            fate = life.tape.draw(FATES) if self._faults and not life.calm else 0
            if fate == BEFORE:
                _die(life, kind, "before the call")
            if fate == TWICE:
                life.note("fault", kind="the call made twice", effect=kind)
            life.note("effect.call", kind=kind, key=call.idempotency_key, attempt=call.attempt)
            result = fn(call, *args)
            if inspect.isawaitable(result):
                return awaited(fate, result, call, args)
            if fate == TWICE:
                result = fn(call, *args)
            _after(life, kind, fate)
            return result

        return call_it


def _after(life: Life, kind: str, fate: int) -> None:
    if fate == AFTER:
        _die(life, kind, "after the call")


def _die(life: Life, kind: str, when: str) -> None:
    life.note("fault", kind=f"crash {when}", effect=kind)
    current = life.scheduler.current
    assert current is not None
    life.scheduler.kill(current)

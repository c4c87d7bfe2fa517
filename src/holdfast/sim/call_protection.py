"""A bound of the faults of one call, so that a flow with a long or unlucky step ends.

Process deaths use up no attempt of a step, a task or an effect. A step of a minute renews its lease a hundred times, and
each of these commits may kill its process, so without a bound its calls would not end. After
`LOST_CALLS_MAX` calls with one idempotency key whose outcome was lost, the process that makes the next call has no
faults until it begins another call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.sim.actor import Incarnation

LOST_CALLS_MAX = 5


class CallProtection:
    """Counts the calls of all processes by idempotency key. `enabled=False` protects no call."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._calls: Counter[str] = Counter()

    @contextmanager
    def calling(self, incarnation: Incarnation, key: str) -> Iterator[None]:
        """A call of a function. A call that raised was not lost: its attempt counts."""
        if not self._enabled:
            yield
            return
        self._calls[key] += 1
        running = incarnation.protected_calls
        if self._calls[key] > LOST_CALLS_MAX:
            running.append(key)
            incarnation.is_protected = True
        elif not running:
            incarnation.is_protected = False
        try:
            yield
        except Exception:
            self._calls[key] -= 1
            raise
        finally:
            if key in running:
                running.remove(key)

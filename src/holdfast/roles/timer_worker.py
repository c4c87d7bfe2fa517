"""The timer worker: delivers what is due, after any downtime, once (document 004, role 4).

Timers are queue items with a time before which they must not run, in an index ordered by that time:
a million pending ones cost nothing while none is due. Firing is committed with the ack, and a timer
has no budget of attempts: however often a worker dies with it in hand, it fires.
"""

from __future__ import annotations

from holdfast import codec
from holdfast.clock import SYSTEM, Clock
from holdfast.messages import Intent
from holdfast.roles.crew import RunnerRole, certain
from holdfast.roles.receipts import fire
from holdfast.runner import Runner, Work
from holdfast.store.api import Store
from holdfast.world import publish


class TimerWorker(RunnerRole):
    name = "timer"

    def __init__(self, store: Store, *, universe: str, worker: str, clock: Clock = SYSTEM) -> None:
        runner = Runner(
            store,
            publish.timers(universe),
            self._fire,
            worker=f"{worker}/timers",
            policy=certain(max_batch=500),
            clock=clock,
        )
        self._clock = clock
        super().__init__([runner])

    def _fire(self, work: Work) -> None:
        work.join(fire, codec.unpack_as(Intent, work.payload), self._clock.wall_ns())

"""The timer worker: delivers what is due, after any downtime, once (document 004, role 4).

Timers wait in two indexes ordered by time, one by store time, one by the clock on the wall: a million
pending ones cost nothing while none is due. What is due is fired in the order of its times, a batch in
one commit; nothing is claimed, so that no timer is ever in the hands of a worker that can die.

It sleeps until the next one is due, but never for long, so that it notices when the wall clock is set.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast import codec
from holdfast.clock import SYSTEM, Clock, S
from holdfast.durable import due, queue
from holdfast.messages import Intent, TimerSet
from holdfast.roles.carrying import Carriage, Ring, Round
from holdfast.roles.firing import fire_due
from holdfast.roles.role import Role
from holdfast.store.api import Store, Txn, glance
from holdfast.world import timers
from holdfast.world.timers import Alarm

# What one commit fires at most: more would keep other commits waiting.
BATCH_MAX = 200
# After a commit that found nothing, although something seemed to be due.
PAUSE_S = 0.01
# How long a round may wait for the world worker to begin with it, and then for its commit.
BEGIN_S = 0.25
ANSWER_S = 2.0
# After a round that did not do, timers fire the ordinary way for this long; twice as long each time.
ALONE_S = 1.0
ALONE_S_MAX = 60.0


class TimerWorker(Role):
    name = "timer"
    idle_s = 1.0

    def __init__(self, store: Store, *, universe: str, clock: Clock = SYSTEM) -> None:
        super().__init__(store, clock)
        self._universe = universe
        self._delays, self._calendar = timers.delays(universe), timers.calendar(universe)
        self._pause_s = 0.0
        self._carriage: Carriage | None = None
        self._alone_until_ns = 0
        self._alone_s = ALONE_S
        # Whether the last round left something that is due: then all of it fires the ordinary way.
        self._left = False

    @property
    def topics(self) -> Sequence[str]:
        return [queue.topic(self._delays), queue.topic(self._calendar)]

    def tick(self) -> bool:
        self._pause_s = 0.0
        # Looking is free, firing is a commit: so look first.
        left_ns = self._left_ns()
        if left_ns is None or left_ns > 0:
            self._left = False
            return False
        if not self._left and self._rides:
            round = self._round()
            if round is not None:
                self._go_round(round)
                self._left = self._left or round.told < len(round.rings)
                return True
        self._left = False
        fired = self.store.transact(fire_due, self._universe, self.clock.wall_ns(), BATCH_MAX)
        self._pause_s = 0.0 if fired else PAUSE_S
        return bool(fired)

    def ride(self, carriage: Carriage) -> None:
        """Worlds of this process hear their timers in the commit in which they go on."""
        self._carriage = carriage

    @property
    def _rides(self) -> bool:
        return self._carriage is not None and self.clock.mono_ns() >= self._alone_until_ns

    def _round(self) -> Round | None:
        """What is due in worlds of this process, if there is any.

        However much of it there always is: what is not in it has its turn after one round.
        """
        wall_ns = self.clock.wall_ns()
        due: list[tuple[str, int, bytes]] = glance(self.store, self._peek, wall_ns)
        rings: list[Ring] = []
        left: set[str] = set()
        for name, seq, payload in due:
            intent = codec.unpack_as(Intent, payload)
            timer = codec.unpack_as(TimerSet, intent.params)
            world_id = intent.world_id
            # A repeating one has more to it, and those of a world are told in their order.
            if timer.cron or world_id in left or not self._rings(world_id):
                left.add(world_id)
            else:
                rings.append(Ring(intent, timer, Alarm(name, seq, timer.key, wall_ns)))
        self._left = bool(left)
        return Round(rings) if rings else None

    def _rings(self, world_id: str) -> bool:
        return self._carriage is not None and self._carriage.rings(world_id)

    def _peek(self, txn: Txn, wall_ns: int) -> list[tuple[str, int, bytes]]:
        clocks = ((self._delays, self.store.now_ns()), (self._calendar, wall_ns))
        return due.peek(txn, clocks, BATCH_MAX)

    def _go_round(self, round: Round) -> None:
        assert self._carriage is not None
        self._carriage.go_round(round)
        self._await(round, self._carriage)
        if round.answered.is_set() and not round.mistaken:
            self._alone_s = ALONE_S
            return
        # Others fire timers, too, or the worker is slow: the ordinary way is better for a while.
        self._alone_until_ns = self.clock.mono_ns() + int(self._alone_s * S)
        self._alone_s = min(2 * self._alone_s, ALONE_S_MAX)

    def _await(self, round: Round, carriage: Carriage) -> None:
        """Wait for a round, but not for long: a worker may hang in a reducer."""
        if not round.answered.wait(BEGIN_S) and not carriage.call_off(round):
            round.answered.wait(ANSWER_S)

    def next_s(self) -> float:
        left_ns = self._left_ns()
        if left_ns is None:
            return self.idle_s
        return max(min(left_ns / S, self.idle_s), self._pause_s)

    def _left_ns(self) -> int | None:
        """How long until something is due by its clock; None for nothing in sight."""
        return glance(self.store, self._look)

    def _look(self, txn: Txn) -> int | None:
        now_ns = self.store.now_ns()
        ahead_ns = self.clock.wall_ns() - now_ns
        found = (
            queue.next_due_ns(txn, self._delays),
            queue.next_due_ns(txn, self._calendar, ahead_ns),
        )
        dues = [due_ns - now_ns for due_ns in found if due_ns is not None]
        return min(dues, default=None)

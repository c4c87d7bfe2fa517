"""The timer worker: delivers due timers exactly once, also after downtime (document 004, role 4). It also fires the
due times of flows and of schedules.

Pending timers are in two indexes ordered by time: store time and wall-clock time. They cost nothing
until due. The worker delivers due timers in time order, a batch per commit. It claims nothing, so a
dead worker holds no timer.

It sleeps until the next timer is due, at most `idle_s`, so that it notices a changed wall clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast import codec
from holdfast.clock import SYSTEM, Clock, S
from holdfast.durable import delayed, queue
from holdfast.flows import due_times, retention
from holdfast.flows.model import keys_of as flow_keys_of
from holdfast.messages import Intent, TimerSet
from holdfast.schedules import operations as schedule_operations
from holdfast.schedules.model import keys_of as schedule_keys_of
from holdfast.store.api import Store, Txn, read_stale
from holdfast.workers.service import TickService
from holdfast.workers.timers.delivery import deliver_due
from holdfast.workers.world.fused_commit import FusedCommitter, HostedTimer, TimerBatch
from holdfast.world import timers
from holdfast.world.timers import DueTimerRef

# Timers per commit. A larger batch would delay other commits.
BATCH_MAX = 200
# The pause after a commit that delivered nothing although a timer seemed due.
EMPTY_COMMIT_PAUSE_S = 0.01
# How long a batch waits for the world worker to start it, and then for its commit.
BEGIN_S = 0.25
ANSWER_S = 2.0
# After a failed fused batch, timers go through the inbox for this long. Doubles each time.
FUSION_OFF_S = 1.0
FUSION_OFF_S_MAX = 60.0


NEVER = float("inf")


class DueTimes(NamedTuple):
    """The time until the next timer, sleep or timeout of a flow, removal of a flow, and occurrence of a schedule.
    `NEVER` if none."""

    timers_in_ns: float
    flows_in_ns: float
    removals_in_ns: float
    schedules_in_ns: float


class TimerWorker(TickService):
    name = "timer"
    idle_s = 1.0

    def __init__(self, store: Store, *, universe: str, clock: Clock = SYSTEM) -> None:
        super().__init__(store, clock)
        self._universe = universe
        self._delays, self._calendar = timers.delay_queue(universe), timers.calendar_queue(universe)
        self._flow_topic = flow_keys_of(universe).due_topic
        self._schedule_topic = schedule_keys_of(universe).due_topic
        self._pause_s = 0.0
        self._committer: FusedCommitter | None = None
        self._fusion_off_until_ns = 0
        self._fusion_off_s = FUSION_OFF_S
        # Whether the last batch left due timers. They are then delivered through the inbox.
        self._has_leftover = False

    @property
    def topics(self) -> Sequence[str]:
        return [
            queue.topic(self._delays),
            queue.topic(self._calendar),
            self._flow_topic,
            self._schedule_topic,
        ]

    def tick(self) -> bool:
        self._pause_s = 0.0
        # Check first: a read is cheap, a delivery is a commit.
        dues = read_stale(self.store, self._read_due_times)
        if self._fire_flows_and_schedules(dues):
            return True
        if dues.timers_in_ns > 0:
            self._has_leftover = False
            return False
        if not self._has_leftover and self._can_fuse:
            batch = self._collect_hosted()
            if batch is not None:
                self._submit_fused(batch)
                self._has_leftover = self._has_leftover or batch.delivered < len(batch.timers)
                return True
        self._has_leftover = False
        fired = self.store.transact(deliver_due, self._universe, self.clock.wall_ns(), BATCH_MAX)
        self._pause_s = 0.0 if fired else EMPTY_COMMIT_PAUSE_S
        return bool(fired)

    def _fire_flows_and_schedules(self, dues: DueTimes) -> bool:
        """End the sleeps and timeouts of flows that are due, remove flows past their retention, and start the due
        occurrences of schedules."""
        fired = 0
        if dues.flows_in_ns <= 0:
            fired += self.store.transact(due_times.fire_due, self._universe, BATCH_MAX)
        if dues.removals_in_ns <= 0:
            fired += self.store.transact(retention.remove_ended, self._universe, BATCH_MAX)
        if dues.schedules_in_ns <= 0:
            wall_ns = self.clock.wall_ns()
            fired += self.store.transact(
                schedule_operations.fire_due, self._universe, wall_ns, BATCH_MAX
            )
        return bool(fired)

    def set_commit_owner(self, committer: FusedCommitter) -> None:
        """Deliver timers of worlds hosted in this process within the commit of their next cycle."""
        self._committer = committer

    @property
    def _can_fuse(self) -> bool:
        return self._committer is not None and self.clock.mono_ns() >= self._fusion_off_until_ns

    def _collect_hosted(self) -> TimerBatch | None:
        """Collect due timers of worlds hosted in this process, or None.

        Timers of other worlds follow after this batch, so a steady load here cannot starve them.
        """
        wall_ns = self.clock.wall_ns()
        due: list[tuple[str, int, bytes]] = read_stale(self.store, self._read_due, wall_ns)
        timers: list[HostedTimer] = []
        skipped_worlds: set[str] = set()
        for name, seq, payload in due:
            intent = codec.unpack_as(Intent, payload)
            timer = codec.unpack_as(TimerSet, intent.params)
            world_id = intent.world_id
            # Recurring timers need the inbox path. The timers of one world must stay in order.
            if timer.cron or world_id in skipped_worlds or not self._is_deliverable(world_id):
                skipped_worlds.add(world_id)
            else:
                timers.append(
                    HostedTimer(intent, timer, DueTimerRef(name, seq, timer.key, wall_ns))
                )
        self._has_leftover = bool(skipped_worlds)
        return TimerBatch(timers) if timers else None

    def _is_deliverable(self, world_id: str) -> bool:
        return self._committer is not None and self._committer.can_deliver_timer(world_id)

    def _read_due(self, txn: Txn, wall_ns: int) -> list[tuple[str, int, bytes]]:
        clocks = ((self._delays, self.store.now_ns()), (self._calendar, wall_ns))
        return delayed.peek(txn, clocks, BATCH_MAX)

    def _submit_fused(self, batch: TimerBatch) -> None:
        assert self._committer is not None
        self._committer.submit_timers(batch)
        self._await_answer(batch, self._committer)
        if batch.answered.is_set() and not batch.conflicted:
            self._fusion_off_s = FUSION_OFF_S
            return
        # Another timer worker delivers, too, or the world worker is slow: back off from fusing.
        self._fusion_off_until_ns = self.clock.mono_ns() + int(self._fusion_off_s * S)
        self._fusion_off_s = min(2 * self._fusion_off_s, FUSION_OFF_S_MAX)

    def _await_answer(self, batch: TimerBatch, committer: FusedCommitter) -> None:
        """Wait for a batch with a timeout, because the world worker may hang in a reducer."""
        if not batch.answered.wait(BEGIN_S) and not committer.cancel_timers(batch):
            batch.answered.wait(ANSWER_S)

    def sleep_s(self) -> float:
        left_ns = min(read_stale(self.store, self._read_due_times))
        return max(min(left_ns / S, self.idle_s), self._pause_s)

    def _read_due_times(self, txn: Txn) -> DueTimes:
        now_ns = self.store.now_ns()
        ahead_ns = self.clock.wall_ns() - now_ns
        timers = (
            queue.next_due_ns(txn, self._delays),
            queue.next_due_ns(txn, self._calendar, ahead_ns),
        )
        sleep_ns = retention.next_sleep_ns(txn, self._universe)
        removal_ns = retention.next_removal_ns(txn, self._universe)
        occurrence_ns = schedule_operations.next_due_ns(txn, self._universe)
        return DueTimes(
            min((due_ns - now_ns for due_ns in timers if due_ns is not None), default=NEVER),
            NEVER if sleep_ns is None else sleep_ns - now_ns,
            NEVER if removal_ns is None else removal_ns - now_ns,
            NEVER if occurrence_ns is None else occurrence_ns - now_ns - ahead_ns,
        )

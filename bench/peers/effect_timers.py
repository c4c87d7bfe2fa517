"""The timer part of a client: set timers, keep them pending, and return their lateness."""

from __future__ import annotations

import time
from typing import Any

from bench.peers.effect_app import EffectChain, TimerDue, Wake
from bench.peers.effect_client import EffectClient
from holdfast import codec
from holdfast.clock import S
from holdfast.durable import queue
from holdfast.messages import TIMER_SET, Intent, TimerSet
from holdfast.workers.timers.delivery import deliver_due
from holdfast.world import timers

HOUR_NS = 3600 * S
# Concurrent commits while a million pending timers are created.
PENDING_COMMITS = 8
PENDING_BATCH = 1_000


class Timers(EffectClient):
    def timers(
        self, worlds: int, count: int, spread_s: float, lead_s: float, after: bool = False
    ) -> dict[str, Any]:
        """Set `count` timers, evenly spread from `lead_s` on. Returns the lateness of each, in ms.

        A timer is handled when its reducer runs: the wall clock in its entry.
        """
        names = self.new(worlds)
        handles = [self.runtime.world(EffectChain, name) for name in names]
        began_ns = time.time_ns()
        first_ns = began_ns + int(lead_s * S)
        every_ns = int(spread_s * S / count)
        wakes = [
            (names[at % worlds], Wake((first_ns + at * every_ns) // 1000 * 1000, after))
            for at in range(count)
        ]
        self.send(wakes)
        each = _each(count, worlds)
        self.until(names, each)
        set_s = (time.time_ns() - began_ns) / 1e9
        if set_s > lead_s:
            raise TimeoutError(f"setting {count} timers took {set_s:.1f} s of {lead_s:.1f} s")
        # The client does not poll while the timers fire, so that it does not disturb the measurement.
        time.sleep(max(first_ns / 1e9 + spread_s - time.time(), 0))
        self.until(names, [2 * n for n in each])
        late = [
            (entry.step.wall_ns - entry.event.due_ns) / 1e6
            for handle in handles
            for entry in handle.journal()
            if isinstance(entry.event, TimerDue)
        ]
        assert len(late) == count, f"{len(late)} of {count} timers fired"
        return {"late": late, "set_s": set_s}

    def afters(self, names: list[str], count: int, per_s: float, wait_s: float) -> dict[str, Any]:
        """Set timers one by one. Returns their lateness by the journal, in ms.

        The lateness includes the commit that sets the timer.
        """
        before = self.heights(names)
        due = time.perf_counter()
        for at in range(count):
            due += 1 / per_s
            time.sleep(max(due - time.perf_counter(), 0))
            due_ns = time.time_ns() + int(wait_s * S)
            self.send([(names[at % len(names)], Wake(due_ns, True))])
        each = _each(count, len(names))
        self.until(names, [was + 2 * n for was, n in zip(before, each, strict=True)])
        late: list[float] = []
        for name, was in zip(names, before, strict=True):
            entries = self.runtime.world(EffectChain, name).journal(was + 1)
            late += [
                (entry.step.wall_ns - entry.event.due_ns) / 1e6
                for entry in entries
                if isinstance(entry.event, TimerDue)
            ]
        assert len(late) == count, f"{len(late)} of {count} timers fired"
        return {"late": late}

    def create_pending(self, count: int) -> dict[str, Any]:
        """Create pending timers, half of them by each clock.

        They are due from an hour on, a second apart for each batch.
        """
        timer = TimerSet("pending", "TimerDue", codec.pack({"due_ns": 0}), delay_ns=HOUR_NS)
        intent = Intent(
            universe_id=self.universe,
            world_id="0" * 32,
            intent_hash=bytes(32),
            effect_kind=TIMER_SET,
            params=codec.pack(timer),
            origin_name="pending",
            policy_context_hash=b"",
            enqueued_at_ns=0,
        )
        payload = codec.pack(intent)
        clocks = (
            (timers.delay_queue(self.universe), self.store.now_ns() + HOUR_NS),
            (timers.calendar_queue(self.universe), time.time_ns() + HOUR_NS),
        )
        began = time.perf_counter()
        ahead: list[Any] = []
        for batch, at in enumerate(range(0, count, PENDING_BATCH)):
            size = min(PENDING_BATCH, count - at)
            name, first_ns = clocks[batch % 2]
            due_ns = first_ns + batch * S
            ahead.append(self.store.submit(queue.put_many, name, [payload] * size, 0, due_ns))
            if len(ahead) >= PENDING_COMMITS:
                ahead.pop(0).result()
        for commit in ahead:
            commit.result()
        return {"seconds": time.perf_counter() - began}

    def fire_due(self, names: list[str], count: int, lead_s: float) -> dict[str, Any]:
        """Timers of worlds become due beside the pending ones, while no timer worker runs.

        Returns the time of the commit that finds and fires them. It is the commit that the timer worker makes.
        """
        before = self.heights(names)
        due_ns = time.time_ns() + int(lead_s * S)
        self.send([(names[at % len(names)], Wake(due_ns)) for at in range(count)])
        each = _each(count, len(names))
        self.until(names, [was + n for was, n in zip(before, each, strict=True)])
        time.sleep(max(due_ns - time.time_ns(), 0) / S + 0.005)
        wall_ns = time.time_ns()
        began = time.perf_counter()
        fired = self.store.transact(deliver_due, self.universe, wall_ns, count)
        took = time.perf_counter() - began
        assert fired == count, f"{fired} of {count} were due"
        self.until(names, [was + 2 * n for was, n in zip(before, each, strict=True)])
        return {"seconds": took}

    def burst(self, names: list[str], count: int, lead_s: float) -> dict[str, Any]:
        """Timers that are all due at once. Returns the time until the last one is handled."""
        before = self.heights(names)
        due_ns = time.time_ns() + int(lead_s * S)
        self.send([(names[at % len(names)], Wake(due_ns)) for at in range(count)])
        each = _each(count, len(names))
        self.until(names, [was + 2 * n for was, n in zip(before, each, strict=True)])
        last_ns = 0
        for name, was in zip(names, before, strict=True):
            for entry in self.runtime.world(EffectChain, name).journal(was + 1):
                if isinstance(entry.event, TimerDue):
                    last_ns = max(last_ns, entry.step.wall_ns)
        return {"seconds": (last_ns - due_ns) / 1e9}


def _each(count: int, worlds: int) -> list[int]:
    """The number of timers of each world, distributed round-robin."""
    return [len(range(at, count, worlds)) for at in range(worlds)]

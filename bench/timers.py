"""Metrics of timers: their lateness, and the cost of a million pending timers.

The processes are those of the effect metrics (`bench.effects`). `bench.peers` measures timers beside the
peers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from statistics import median

from bench.peers.effect_turns import APP, running, shares, spawn
from bench.peers.process import Up
from bench.place import Place, writer_pid
from bench.record import Record, Target, gather
from bench.workers import cpu_ns

AFTER_S = 1.0
AFTERS_PER_S = 200
FEW_WORLDS = 100
BURST_WORLDS = 50
BURST_LEAD_S = 0.5
CLAIM_LEAD_S = 0.3


def timer_lateness(place: Place) -> Record:
    """Timers set in advance for wall-clock times, one per world, and `cx.after`, set one by one."""
    count, spread_s = place.sizes.timers.count, place.sizes.timers.spread_s
    samples = []
    with running(place, "one", "timers") as (client, _, _):
        names = client.ask("worlds", count=min(FEW_WORLDS, count))["names"]
        for _ in range(place.repeats):
            parameters = {"count": count, "spread_s": spread_s, "lead_s": place.sizes.timers.lead_s}
            late = client.ask("timers", worlds=count, **parameters)
            few = client.ask("timers", worlds=min(FEW_WORLDS, count), **parameters)
            after = client.ask(
                "afters", names=names, count=count // 4, per_s=AFTERS_PER_S, wait_s=AFTER_S
            )
            samples.append(
                {
                    **shares("ms", late["late"]),
                    "few_worlds_p95": shares("ms", few["late"])["ms_p95"],
                    "after_p95": shares("ms", after["late"])["ms_p95"],
                    "set_s": late["set_s"],
                }
            )
    late_units = ("ms_p95", "ms_p50", "ms_p99", "few_worlds_p95", "after_p95")
    return Record(
        "timer_lateness",
        f"{count:,} timers over {spread_s:g} s, one in each world; in {FEW_WORLDS} worlds; and "
        f"`after` at {AFTERS_PER_S}/s, the commit that set it included",
        gather(samples, {**dict.fromkeys(late_units, "ms"), "set_s": "s to set them"}),
        # The best measured lateness of a peer.
        (Target("ms_p95", below=7.4),),
    )


def pending_timers(place: Place) -> Record:
    """Two stores, with few and with many pending timers, measured in turn.

    Claiming: the commit that finds and fires the due timers, made directly, without a timer worker.
    Firing: the same by the timer worker, until the last timer is handled.
    """
    sizes = {"few": place.sizes.timers.pending_small, "many": place.sizes.timers.pending_large}
    samples = []
    with _Pending(place, "few") as few, _Pending(place, "many") as many:
        both = {"few": few, "many": many}
        created_s = {
            name: store.client.ask("create_pending", count=sizes[name])["seconds"]
            for name, store in both.items()
        }
        claims = []
        for _ in range(place.repeats):
            # The stores alternate within a repeat, and the median counts: one commit takes only milliseconds.
            turns = [
                {name: store.fire_due() for name, store in both.items()}
                for _ in range(place.sizes.timers.due_batches)
            ]
            claims.append({name: median(turn[name] for turn in turns) for name in both})
        for store in both.values():
            store.start_timers()
        for claimed in claims:
            fired = {name: store.burst() for name, store in both.items()}
            idle = _idle(both, max(place.slice_s * 3, 0.5))
            batch = place.sizes.timers.due_batch
            samples.append(
                {
                    "claim_cost": claimed["many"] / claimed["few"],
                    "fire_cost": fired["many"] / fired["few"],
                    "idle_many": idle["many"],
                    "idle_few": idle["few"],
                    "claim_many_us": 1e6 * claimed["many"] / batch,
                    "claim_few_us": 1e6 * claimed["few"] / batch,
                    "fire_many_ms": 1000 * fired["many"],
                    "fire_few_ms": 1000 * fired["few"],
                }
            )
    units = {
        "claim_cost": "×",
        "fire_cost": "×",
        "idle_many": "% of a core",
        "idle_few": "% of a core",
        "claim_many_us": "µs a timer",
        "claim_few_us": "µs a timer",
        "fire_many_ms": "ms",
        "fire_few_ms": "ms",
    }
    return Record(
        "pending_timers",
        f"{sizes['many']:,} pending timers against {sizes['few']:,}: the commit that fires "
        f"{place.sizes.timers.due_batch} due ones; until the last of them is handled; processor share of "
        "roles and writer while none is due",
        gather(samples, units),
        (
            Target("claim_cost", below=1.3),
            Target("fire_cost", below=1.3),
            Target("idle_many", below=2),
        ),
        {"created_s": round(created_s["many"], 1)},
    )


METRICS: dict[str, Callable[[Place], Record]] = {
    metric.__name__: metric for metric in (timer_lateness, pending_timers)
}


class _Pending:
    """A store with running world roles, one client, and a timer worker that starts later."""

    def __init__(self, place: Place, name: str) -> None:
        self._place = place
        self._name = name

    def __enter__(self) -> _Pending:
        self._stack = contextlib.ExitStack()
        with self._stack:
            self._path = self._stack.enter_context(self._place.store(self._name))
            self.client = self._stack.enter_context(spawn("client", self._path))
            self._ups = [self._up("orchestrator", "world")]
            self._worlds = self.client.ask("worlds", count=BURST_WORLDS, steps=0)["names"]
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    @property
    def pids(self) -> list[int]:
        return [writer_pid(self._path), *(up.pid for up in self._ups)]

    def start_timers(self) -> None:
        self._ups.append(self._up("timer"))

    def fire_due(self) -> float:
        return self._seconds("fire_due", CLAIM_LEAD_S)

    def burst(self) -> float:
        return self._seconds("burst", BURST_LEAD_S)

    def _seconds(self, what: str, lead_s: float) -> float:
        count = self._place.sizes.timers.due_batch
        parameters = {"names": self._worlds, "count": count, "lead_s": lead_s}
        seconds: float = self.client.ask(what, **parameters)["seconds"]
        return seconds

    def _up(self, *roles: str) -> Up:
        return self._stack.enter_context(
            Up(APP, self._path, *roles, worker=f"{self._name}-{len(roles)}")
        )


def _idle(stores: dict[str, _Pending], seconds: float) -> dict[str, float]:
    """Percent of a core that the roles and the writer of each store use while idle."""
    pids = {name: store.pids for name, store in stores.items()}
    before = {name: sum(map(cpu_ns, each)) for name, each in pids.items()}
    began = time.perf_counter()
    time.sleep(seconds)
    took_ns = (time.perf_counter() - began) * 1e9
    return {
        name: 100 * (sum(map(cpu_ns, each)) - before[name]) / took_ns for name, each in pids.items()
    }

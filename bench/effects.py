"""Metrics of effects without a peer: chains, latency, backlog, fairness, and the targets of document 004.

Client, roles and writer are separate processes on one embedded store with fsync. `holdfast up` starts the
roles, as users do. `bench.peers` measures effects beside the peers.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from bench.peers.effect_app import STEPS
from bench.peers.effect_turns import APP, HoldfastTurn, running, shares, spawn
from bench.peers.effect_workload import STEPS_PER_S
from bench.peers.holdfast_turn import spawn as spawn_worlds
from bench.peers.process import Load, Up
from bench.peers.suite import percentile
from bench.place import Place
from bench.record import Record, Sample, Target, against_raw, gather

LEASES = 100
RENEWALS_PER_S = 20
# Effects per event while a backlog is built, and while it is refilled.
WANTED_TOGETHER = 1_000
WANTED_AGAIN = 50
# Number of timed puts. Each puts a part of the shorter backlog.
PUTS = 4


def effect_chains(place: Place) -> Record:
    """All roles in one process, and for comparison the pool in a second one. Also with `async def` effects."""
    count = place.sizes.effects.chains_at_once
    with (
        running(place, "one", "chains") as (client, roles, path),
        running(place, "split", "split") as (other, others, other_path),
    ):
        turn = HoldfastTurn(client, roles, path, worlds=count)
        split = HoldfastTurn(other, others, other_path, worlds=count)

        def run() -> Sample:
            sample = turn.rated(count, seconds=place.slice_s)
            return {
                "rate": sample.pop("chains"),
                **sample,
                "async_rate": turn.rated(count, seconds=place.slice_s, is_async=True)["chains"],
                "split_rate": split.rated(count, seconds=place.slice_s)["chains"],
            }

        samples = against_raw(place, run)
    units = {
        "rate": "steps/s",
        "raw": "fdatasync/s",
        "ratio": "× raw",
        "client_us": "µs",
        "roles_us": "µs",
        "writer_us": "µs",
        "async_rate": "steps/s",
        "split_rate": "steps/s",
    }
    return Record(
        "effect_chains",
        f"{STEPS} no-op effects in sequence, {count} worlds at once; processor time a step; the same "
        "with `async def`, and with the pool in a separate process",
        gather(samples, units),
    )


def effect_latency(place: Place) -> Record:
    samples = []
    with running(place, "one", "latency") as (client, _, _):
        names = client.ask("worlds", count=min(place.sizes.effects.steps, 100))["names"]
        for _ in range(place.repeats):
            parameters = {"names": names, "count": place.sizes.effects.steps, "per_s": STEPS_PER_S}
            times = client.ask("steps", **parameters)
            samples.append(
                {
                    **shares("ms", times["journaled"]),
                    "entries_p95": percentile(times["entries"], 0.95),
                    "whole_p95": percentile(times["whole"], 0.95),
                }
            )
    units = dict.fromkeys(("ms_p95", "ms_p50", "ms_p99", "entries_p95", "whole_p95"), "ms")
    return Record(
        "effect_latency",
        f"dispatch to receipt journaled at {STEPS_PER_S}/s, both commits included; between the two "
        "entries; and from before the send",
        gather(samples, units),
        (Target("ms_p95", below=10),),
    )


def runtime_targets(place: Place) -> Record:
    """The three targets of document 004, at a tenth of its load."""
    samples = []
    steps = place.sizes.effects.steps
    with (
        place.store("worlds") as path,
        spawn_worlds("client", path=str(path)) as client,
        spawn_worlds("worker", path=str(path), name="worker-1", policy={"idle_s": 600.0}) as worker,
        running(place, "one", "effects") as (flows, _, _),
    ):
        accounts = client.ask("worlds", count=LEASES)["names"]
        names = flows.ask("worlds", count=min(steps, 100))["names"]
        for _ in range(place.repeats):
            # The journal part runs first. It keeps the worlds busy, so that all of them hold leases to renew.
            sent = client.ask("latency", names=accounts, count=steps, per_s=STEPS_PER_S)
            renewed = worker.ask("renew", count=max(steps // 5, 5), per_s=RENEWALS_PER_S)
            done = flows.ask("steps", names=names, count=steps, per_s=STEPS_PER_S)
            samples.append(
                {
                    "renewal_p95_ms": percentile(renewed["ms"], 0.95),
                    "journaled_p95_ms": percentile(sent["journaled"], 0.95),
                    "receipt_p95_ms": percentile(done["journaled"], 0.95),
                    "leases": renewed["leases"],
                }
            )
    units = dict.fromkeys(("renewal_p95_ms", "journaled_p95_ms", "receipt_p95_ms"), "ms")
    return Record(
        "runtime_targets",
        "the targets of document 004: renewal of leases, inbox to journal, dispatch to receipt (even journaled, "
        f"which comes after its ingress), the last two at {STEPS_PER_S}/s; a tenth of its figures",
        gather(samples, {**units, "leases": "leases in a commit"}),
        (
            Target("renewal_p95_ms", below=5),
            Target("journaled_p95_ms", below=10),
            Target("receipt_p95_ms", below=20),
        ),
    )


def effect_backlog(place: Place) -> Record:
    """Two stores, one with a short queue and one with a long one, measured in turn.

    A pool drains while the client requests as many new effects. The rate has the whole cost of an effect
    (request, put, claim, call, receipt, journal). The cost of the put alone is measured without a pool.
    """
    sizes = {"short": place.sizes.effects.backlog_small, "long": place.sizes.effects.backlog_large}
    together = min(WANTED_TOGETHER, sizes["short"])
    put = together // PUTS
    samples = []
    with _Bulk(place, "short") as short, _Bulk(place, "long") as long:
        for bulk in (short, long):
            bulk.request_effects(sizes[bulk.name], together)
        for _ in range(place.repeats):
            sample: Sample = {}
            for bulk in (short, long):
                bulk.refill(sizes[bulk.name], together)
                sample[f"put_{bulk.name}"] = put / median(
                    bulk.request_effects(put, put) for _ in range(PUTS)
                )
                sample |= bulk.drained(sizes[bulk.name], place.slice_s)
            samples.append(
                {
                    "cost": sample["rate_short"] / sample["rate_long"],
                    "put_cost": sample["put_short"] / sample["put_long"],
                    **sample,
                }
            )
    rates = ("rate_long", "rate_short", "put_long", "put_short")
    # If a queue is often empty, its rate is that of the requests, not of the pool.
    looks = dict.fromkeys(("dry_long", "dry_short"), "of looks")
    return Record(
        "effect_backlog",
        f"cost of an effect at a backlog of {sizes['long']:,} against {sizes['short']:,}, from request "
        "to journal, and of the put alone",
        gather(
            samples,
            {"cost": "×", "put_cost": "×", **dict.fromkeys(rates, "effects/s"), **looks},
        ),
        (Target("cost", below=1.3), Target("put_cost", below=1.3)),
    )


def effect_fairness(place: Place) -> Record:
    """A pool works on a flood of one world. Other worlds request one effect of the same kind each."""
    flood, singles = place.sizes.effects.flood, place.sizes.effects.singles
    samples = []
    with _Bulk(place, "flood") as bulk:
        others = bulk.client.ask("worlds", count=singles, steps=0)["names"]
        bulk.request_effects(flood, min(WANTED_TOGETHER, flood))
        for _ in range(place.repeats):
            bulk.refill(flood, min(WANTED_TOGETHER, flood))
            bulk.pool.ask("start")
            counts = bulk.client.ask("single", names=others)
            bulk.pool.ask("stop")
            left = bulk.client.ask("left")["left"]
            samples.append(
                {
                    "passed": percentile(counts["passed"], 0.5),
                    "passed_max": max(counts["passed"]),
                    "ms": percentile(counts["ms"], 0.5),
                    "journaled": percentile(counts["journaled"], 0.5),
                    "journaled_ms": percentile(counts["journaled_ms"], 0.5),
                    "left": left,
                }
            )
    units = {
        "passed": "effects",
        "passed_max": "effects",
        "ms": "ms",
        "journaled": "effects",
        "journaled_ms": "ms",
        "left": "of the flood",
    }
    return Record(
        "effect_fairness",
        f"one world has {flood:,} effects waiting, another requests one: the effects of the flood that end "
        "between its dispatch and its receipt, and until the receipt is journaled",
        gather(samples, units),
        # A hundredth of the flood. A first-in-first-out queue would process all of it first.
        (Target("passed", below=1_000),),
        {"flood": flood, "singles": singles},
    )


METRICS: dict[str, Callable[[Place], Record]] = {
    metric.__name__: metric
    for metric in (effect_chains, effect_latency, runtime_targets, effect_backlog, effect_fairness)
}


class _Bulk:
    """A store with running world roles, a pool that can be started and stopped, and one client."""

    def __init__(self, place: Place, name: str) -> None:
        self.name = name
        self._place = place

    def __enter__(self) -> _Bulk:
        self._store = self._place.store(self.name)
        self._open: list[Load | Up] = []
        try:
            path = self._store.__enter__()
            self.client = self._opened(spawn("client", path))
            self.pool = self._opened(spawn("pool", path))
            roles = ("orchestrator", "world")
            self._open.append(Up(APP, path, *roles, worker=f"worker-{self.name}"))
            # One world causes a flood. All worlds share a backlog.
            worlds = 1 if self.name == "flood" else self._place.sizes.effects.chains_at_once
            self._worlds = [f"bulk-{at}" for at in range(worlds)]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for process in reversed(self._open):
            process.close()
        self._store.__exit__(None, None, None)

    def request_effects(self, count: int, together: int) -> float:
        """Seconds until the queue has `count` more effects."""
        parameters = {"names": self._worlds, "count": count, "per_event": together}
        seconds: float = self.client.ask("request_effects", **parameters)["seconds"]
        return seconds

    def refill(self, goal: int, together: int) -> None:
        missing = goal - int(self.client.ask("left")["left"])
        if missing > 0:
            self.request_effects(missing, together)

    def drained(self, backlog: int, seconds: float) -> Sample:
        """Effects per second while the client keeps the backlog constant."""
        self.pool.ask("start")
        parameters = {"names": self._worlds, "per_event": min(WANTED_AGAIN, backlog)}
        # Not counted: the pool starts.
        self.client.ask("churn", backlog=backlog, seconds=seconds / 4, **parameters)
        measures = self.client.ask("churn", backlog=backlog, seconds=seconds, **parameters)
        self.pool.ask("stop")
        return {f"{measure}_{self.name}": value for measure, value in measures.items()}

    def _opened(self, load: Load) -> Load:
        self._open.append(load)
        return load

"""Metrics of worlds without a peer: leases, failover, restore, fork, memory.

Client, worker and writer are separate processes on one embedded store with fsync. `bench.peers` measures
rates and latency beside the peers, with the same processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from bench.memory import rss_anon
from bench.peers.holdfast_turn import spawn
from bench.peers.process import Load
from bench.peers.suite import percentile
from bench.place import Place, writer_pid
from bench.record import Record, Sample, Target, gather
from bench.workers import cpu_ns

POLL_S = 0.2


@dataclass(frozen=True)
class Amounts:
    """The sizes of the measured loads. The defaults are those of the performance targets; smaller ones try a metric."""

    few_leases: int = 100
    leases: int = 10_000
    renewals: int = 100
    watched_s: float = 20.0
    ttl_s: float = 5.0
    restored_entries: int = 100_000
    # The maximum that the snapshot policy leaves above a baseline.
    restored_tail: int = 1_000
    forked_entries: int = 1_000_000
    forks: int = 50
    idle_worlds: int = 100_000
    settled_s: float = 900.0


AMOUNTS = Amounts()


def leases(place: Place, amounts: Amounts = AMOUNTS) -> Record:
    """All worlds stay hosted, so that the processor time is the cost of the renewals."""
    policy = {"lease_ttl_s": 10.0, "idle_s": 3600.0}
    samples = []
    with (
        place.store("leases") as path,
        spawn("client", path=str(path)) as client,
        spawn("worker", path=str(path), name="worker-1", policy=policy) as worker,
    ):
        client.ask("worlds", count=amounts.few_leases)
        few = [
            worker.ask("renew", count=amounts.renewals, per_s=20)["ms"]
            for _ in range(place.repeats)
        ]
        client.ask("create", count=amounts.leases - amounts.few_leases, size=1000)
        _until_hosted(worker, amounts.leases, amounts.settled_s)
        writer = writer_pid(path)
        for took in few:
            worker.ask("renewals")
            used = cpu_ns(worker.pid), cpu_ns(writer)
            began = time.perf_counter()
            time.sleep(amounts.watched_s)
            took_ns = (time.perf_counter() - began) * 1e9
            of_worker, of_writer = cpu_ns(worker.pid) - used[0], cpu_ns(writer) - used[1]
            renewals = worker.ask("renewals")["renewals"]
            samples.append(
                {
                    "renew_p95_ms": percentile(took, 0.95),
                    "share": 100 * (of_worker + of_writer) / took_ns,
                    "worker": 100 * of_worker / took_ns,
                    "writer": 100 * of_writer / took_ns,
                    "renewed": sum(count for count, _ in renewals),
                    "largest": max((count for count, _ in renewals), default=0),
                    "longest_ms": 1000 * max((took for _, took in renewals), default=0.0),
                }
            )
    units = {
        "renew_p95_ms": "ms",
        "share": "% of a core",
        "worker": "% of a core",
        "writer": "% of a core",
        "renewed": "leases",
        "largest": "leases in a commit",
        "longest_ms": "ms",
    }
    return Record(
        "leases",
        f"renewals of {amounts.few_leases} leases in one commit; processor share of worker and "
        f"writer with {amounts.leases:,} leases of 10 s",
        gather(samples, units),
        (Target("renew_p95_ms", below=5), Target("share", below=10)),
    )


def failover(place: Place, amounts: Amounts = AMOUNTS) -> Record:
    """The worker that leads and hosts is killed. The other worker must detect this."""
    policy = {"lease_ttl_s": amounts.ttl_s}
    samples: list[Sample] = []
    for at in range(place.repeats):
        with (
            place.store(f"failover-{at}") as path,
            spawn("client", path=str(path)) as client,
            spawn("worker", path=str(path), name="worker-1", policy=policy) as first,
        ):
            [name] = client.ask("worlds", count=1)["names"]
            with spawn("worker", path=str(path), name="worker-2", policy=policy) as second:
                # Both workers have sent a heartbeat. The age of the lease differs between repeats.
                time.sleep(2 + 0.37 * at)
                client.ask("until_handled", name=name)
                assert first.ask("hosted") == {"hosted": 1, "leading": True}
                killed_ns = time.monotonic_ns()
                first.kill()
                handled = client.ask("until_handled", name=name)
                assert second.ask("hosted")["hosted"] == 1
                took_s = (handled["at_ns"] - killed_ns) / 1e9
                samples.append({"took_s": took_s, "over_ttl_s": took_s - amounts.ttl_s})
    return Record(
        "failover",
        f"SIGKILL of leader and host to the first commit by another; leases of {amounts.ttl_s:g} s",
        gather(samples, {"over_ttl_s": "s over TTL", "took_s": "s"}),
        (Target("over_ttl_s", below=1),),
    )


def restore(place: Place, amounts: Amounts = AMOUNTS) -> Record:
    entries, tail = amounts.restored_entries, amounts.restored_tail
    samples = []
    with place.store("restore") as path, spawn("client", path=str(path)) as builder:
        builder.ask("history", name="long", entries=entries, tail=tail)
        for _ in range(place.repeats):
            # A new process with cold caches: its first restore is like that of a worker.
            with spawn("client", path=str(path)) as client:
                restored = client.ask("restores", name="long", count=5)
                assert restored["balance"] == entries, restored
                samples.append({"first_ms": restored["ms"][0], "again_ms": min(restored["ms"])})
    return Record(
        "restore",
        f"state of a world with {entries:,} entries, {tail:,} of them above the baseline",
        gather(samples, {"first_ms": "ms", "again_ms": "ms"}),
        (Target("first_ms", below=100),),
    )


def fork(place: Place, amounts: Amounts = AMOUNTS) -> Record:
    samples = []
    with place.store("fork") as path, spawn("client", path=str(path)) as client:
        heights = {"small": 100, "large": amounts.forked_entries}
        for name, entries in heights.items():
            client.ask("history", name=name, entries=entries, tail=0)
        for _ in range(place.repeats):
            p50 = {
                name: percentile(
                    client.ask("forks", name=name, at=height, count=amounts.forks)["ms"], 0.5
                )
                for name, height in heights.items()
            }
            samples.append(
                {
                    "large_ms": p50["large"],
                    "small_ms": p50["small"],
                    "cost": p50["large"] / p50["small"],
                }
            )
    return Record(
        "fork",
        f"fork at a snapshot of a world with {amounts.forked_entries:,} entries and one with 100",
        gather(samples, {"large_ms": "ms", "small_ms": "ms", "cost": "×"}),
        (Target("large_ms", below=20), Target("cost", below=1.3)),
    )


def idle_memory(place: Place, amounts: Amounts = AMOUNTS) -> Record:
    """Every world has handled one message on this worker and is idle since."""
    began = time.monotonic()
    peak = 0
    with (
        place.store("idle") as path,
        spawn("client", path=str(path)) as client,
        spawn("worker", path=str(path), name="worker-1", policy={}) as worker,
    ):
        names = client.ask("create", count=amounts.idle_worlds, size=1000)["names"]
        sent_s = time.monotonic() - began
        handled_s = 0.0
        while time.monotonic() - began < amounts.settled_s:
            peak = max(peak, rss_anon(worker.pid))
            if not client.ask("waiting", worker="worker-1")["waiting"]:
                handled_s = handled_s or time.monotonic() - began
                if not worker.ask("hosted")["hosted"]:
                    break
            time.sleep(POLL_S)
        left = worker.ask("hosted")["hosted"]
        sampled = client.ask("heights", names=names[:: max(len(names) // 1000, 1)])["heights"]
        assert left or set(sampled) == {1}, set(sampled)
        worker.ask("collect")
        sample = {
            "worker_mb": rss_anon(worker.pid) / 1e6,
            "peak_mb": max(peak, rss_anon(worker.pid)) / 1e6,
            "writer_mb": rss_anon(writer_pid(path)) / 1e6,
            "still_hosted": float(left),
        }
    return Record(
        "idle_memory",
        f"memory (RssAnon) of a worker with {amounts.idle_worlds:,} idle worlds",
        gather(
            [sample],
            {"worker_mb": "MB", "peak_mb": "MB", "writer_mb": "MB", "still_hosted": "worlds"},
        ),
        (Target("worker_mb", below=300),),
        {
            "sent_s": round(sent_s, 1),
            "handled_s": round(handled_s, 1),
            "idle_s": round(time.monotonic() - began, 1),
        },
    )


METRICS: dict[str, Callable[[Place], Record]] = {
    metric.__name__: metric for metric in (leases, failover, restore, fork, idle_memory)
}


def _until_hosted(worker: Load, wanted: int, within_s: float) -> None:
    until = time.monotonic() + within_s
    while (hosted := worker.ask("hosted")["hosted"]) < wanted:
        if time.monotonic() > until:
            raise TimeoutError(f"{hosted} of {wanted} worlds are hosted")
        time.sleep(POLL_S)

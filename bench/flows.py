"""Metrics of flows without a peer: sleeping flows, a wake-up of many at once, and the resume of a long flow.

Client, worker and writer are separate processes on one embedded store with fsync.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import history
from bench.peers import processors
from bench.peers.effect_workload import STEPS_PER_S
from bench.peers.flow_app import STEPS
from bench.peers.flow_turns import APP, rate_of, running
from bench.peers.process import Load, Up
from bench.peers.suite import percentile
from bench.place import ROOT, FlowSizes, Place, Sizes, new_directory, writer_pid
from bench.record import Record, Sample, Target, gather

# A day: these flows do not wake during the run.
ASLEEP_S = 86_400.0
PARTS = 10
WARM_UP_S = 0.5
# Flows that wake are due this multiple of the duration of their start after it began. All of them sleep before.
LEAD_MARGIN = 2.5
LEAD_S_MIN = 2.0


def flow_sleepers(place: Place) -> Record:
    """Start a large number of sleeping flows in ten equal parts, wake others beside them, then open a new worker."""
    sizes = place.sizes.flows
    part = sizes.sleepers // PARTS
    with running(place, "sleepers") as (client, worker, path):
        # Warm-up: every module runs once before anything is timed.
        client.ask("chains", callers=64, seconds=WARM_UP_S, steps=STEPS)
        rates, latencies, costs_us = [], [], []
        pids = [client.pid, worker.pid, writer_pid(path)]
        for at in range(PARTS):
            used_ns, began = processors.used_ns(pids), time.perf_counter()
            client.ask("start_sleepers", count=part, due_s=time.time() + ASLEEP_S)
            client.ask("until_counts", state="waiting", count=(at + 1) * part)
            rates.append(part / (time.perf_counter() - began))
            costs_us.append((processors.used_ns(pids) - used_ns) / 1000 / part)
            worker.require_running()
            times = client.ask("steps", count=sizes.paced, per_s=STEPS_PER_S)
            latencies.append(percentile(times["whole"], 0.5))
        worked_mb = resident_mb(worker.pid)
        woken = [_wake(client, sizes.waking, rate=min(rates)) for _ in range(place.repeats)]
        worker.require_running()
        with Up(APP, path, worker="worker-2") as idle:
            client.ask("until_counts", state="waiting", count=PARTS * part)
            idle_mb = resident_mb(idle.pid)
    sample: Sample = {
        "flat": max(rates) / min(rates),
        "rate_max": max(rates),
        "rate_min": min(rates),
        "cost_flat": max(costs_us) / min(costs_us),
        "cost_us": max(costs_us),
        "latency_flat": max(latencies) / min(latencies),
        "latency_ms": max(latencies),
        "idle_mb": idle_mb,
        "worked_mb": worked_mb,
    }
    units = {
        "flat": "×",
        "rate_max": "flows/s",
        "rate_min": "flows/s",
        "cost_flat": "×",
        "cost_us": "µs a flow",
        "latency_flat": "×",
        "latency_ms": "ms",
        "idle_mb": "MB",
        "worked_mb": "MB",
    }
    wake_units = {
        "wake_share": "×",
        "wake_rate": "flows/s",
        "task_rate": "tasks/s",
        "run_share": "×",
    }
    return Record(
        "flow_sleepers",
        f"{PARTS * part:,} sleeping flows, started in {PARTS} parts: the highest rate of a part over the lowest one, "
        "from the start until the flows sleep; the same of the processor time of client, worker and writer per flow, "
        "which other processes on the machine disturb less; the same of the median latency of a flow with two steps, "
        f"{sizes.paced} flows after each part; memory of a worker that opens the store, and of the worker that ran "
        f"them; {sizes.waking:,} flows that wake at once over as many tasks with a delay, until the last one has "
        "ended durably (`wake_share`), and until its code has run (`run_share`)",
        {**gather([sample], units), **gather(woken, wake_units)},
        (
            Target("flat", below=1.3),
            Target("idle_mb", below=200),
            Target("wake_share", at_least=0.5),
        ),
        {
            "rates": [round(rate) for rate in rates],
            "costs_us": [round(cost, 1) for cost in costs_us],
            "latencies_ms": [round(latency, 3) for latency in latencies],
        },
    )


def _wake(client: Load, count: int, *, rate: float) -> Sample:
    """Sleeping flows and delayed tasks with one due time each, in turn. `rate` flows start in a second."""
    lead_s = max(LEAD_S_MIN, LEAD_MARGIN * count / rate)
    tasks = client.ask("wake_tasks", count=count, lead_s=lead_s)
    flows = client.ask("wake_flows", count=count, lead_s=lead_s)
    return {
        "wake_rate": count / flows["ended_s"],
        "task_rate": count / tasks["ended_s"],
        "wake_share": tasks["ended_s"] / flows["ended_s"],
        "run_share": rate_of(flows["late"]) / rate_of(tasks["late"]),
    }


def flow_resume(place: Place) -> Record:
    """A flow with many recorded steps gets an event: load, replay and end."""
    steps = place.sizes.flows.recorded_steps
    samples = []
    with running(place, "resume") as (client, worker, _):
        for _ in range(place.repeats):
            flow_id = client.ask("make_long", steps=steps)["id"]
            samples.append({"resume_s": client.ask("resume", id=flow_id, steps=steps)["took_s"]})
            worker.require_running()
    return Record(
        "flow_resume",
        f"resume of a flow with {steps:,} recorded steps: from the send of an event until its result is read",
        gather(samples, {"resume_s": "s"}),
        (Target("resume_s", below=0.2),),
    )


METRICS: dict[str, Callable[[Place], Record]] = {
    metric.__name__: metric for metric in (flow_resume, flow_sleepers)
}


def resident_mb(pid: int) -> float:
    """Resident memory of a process, without the pages of the mapped store."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return int(fields["RssAnon"].split()[0]) / 1024


def main(argv: Sequence[str]) -> int:
    """`python -m bench flows`: these metrics with other sizes, one JSON line each."""
    usual = FlowSizes()
    parser = argparse.ArgumentParser(prog="python -m bench flows", description=main.__doc__)
    parser.add_argument("--sleepers", type=int, default=usual.sleepers, help="sleeping flows")
    parser.add_argument("--waking", type=int, default=usual.waking, help="flows that wake at once")
    parser.add_argument("--steps", type=int, default=usual.recorded_steps, help="recorded steps")
    history.add_save_option(parser)
    parser.add_argument("--dir", type=Path, default=ROOT / "build", help="parent of the store")
    args = parser.parse_args(argv)
    sizes = Sizes(flows=FlowSizes(args.sleepers, args.waking, args.steps))
    load_before, documents = os.getloadavg()[0], []
    with new_directory(args.dir) as directory:
        for metric in METRICS.values():
            documents.append(metric(Place(directory, sizes=sizes)).document())
            print(json.dumps(documents[-1], ensure_ascii=False), flush=True)
    if args.save:
        command = f"flows --sleepers {args.sleepers} --waking {args.waking} --steps {args.steps}"
        run = history.entry(documents, budget_s=0, load_before=load_before, command=command)
        history.save(run, args.save)
    return 0

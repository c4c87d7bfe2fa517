"""Metrics of flows without a peer: sleeping flows, a wake-up of many at once, and the resume of a long flow.

Client, worker and writer are separate processes on one embedded store with fsync.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

from bench.peers.flow_turns import APP, running
from bench.peers.process import Load, Up
from bench.place import ROOT, FlowSizes, Place, Sizes, new_directory
from bench.record import Record, Sample, Target, gather

# A day: these flows do not wake during the run.
ASLEEP_S = 86_400.0
# The waking flows are due this long after their start, and all of them sleep before.
LEAD_S_PER_FLOW = 0.002
LEAD_S_MIN = 2.0


def flow_sleepers(place: Place) -> Record:
    """Start a large number of sleeping flows in ten equal parts, then open a new worker and look at its memory."""
    sizes = place.sizes.flows
    part = sizes.sleepers // 10
    with running(place, "sleepers") as (client, worker, path):
        rates = []
        for at in range(10):
            began = time.perf_counter()
            client.ask("start_sleepers", count=part, due_s=time.time() + ASLEEP_S)
            client.ask("until_counts", state="waiting", count=(at + 1) * part)
            rates.append(part / (time.perf_counter() - began))
            worker.require_running()
        drained = _wake_many(client, sizes.waking, already=10 * part)
        with Up(APP, path, worker="worker-2") as idle:
            client.ask("until_counts", state="waiting", count=10 * part)
            memory_mb = _resident_mb(idle.pid)
        worked_mb = _resident_mb(worker.pid)
    sample: Sample = {
        "flat": max(rates[0], rates[-1]) / min(rates[0], rates[-1]),
        "first_rate": rates[0],
        "last_rate": rates[-1],
        "idle_mb": memory_mb,
        "worked_mb": worked_mb,
        **drained,
    }
    units = {
        "flat": "×",
        "first_rate": "flows/s",
        "last_rate": "flows/s",
        "idle_mb": "MB",
        "worked_mb": "MB",
        "wake_share": "×",
        "wake_rate": "flows/s",
        "task_rate": "tasks/s",
    }
    return Record(
        "flow_sleepers",
        f"{10 * part:,} sleeping flows: rate of the first and of the last tenth, from the start until they "
        f"sleep; memory of a worker that opens the store, and of the worker that ran them; {sizes.waking:,} "
        "that wake at once, against as many tasks",
        gather([sample], units),
        (
            Target("flat", below=1.3),
            Target("idle_mb", below=200),
            Target("wake_share", at_least=0.5),
        ),
    )


def _wake_many(client: Load, count: int, *, already: int) -> Sample:
    """Flows per second from the due time of `count` flows until all have ended, and the rate of tasks."""
    task_rate = client.ask("tasks", count=count)["rate"]
    lead_s = max(LEAD_S_MIN, count * LEAD_S_PER_FLOW)
    due = time.time() + lead_s
    client.ask("start_sleepers", count=count, due_s=due)
    client.ask("until_counts", state="waiting", count=already + count)
    if time.time() > due:
        raise TimeoutError(f"{count} flows do not sleep within {lead_s:g} s")
    ended = client.ask("until_counts", state="completed", count=count)["at_s"]
    wake_rate = count / max(ended - due, 1e-3)
    return {"wake_rate": wake_rate, "task_rate": task_rate, "wake_share": wake_rate / task_rate}


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


def _resident_mb(pid: int) -> float:
    """Resident memory of a process, without the pages of the mapped store."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return int(fields["RssAnon"].split()[0]) / 1024


def main(argv: list[str]) -> int:
    """`python -m bench flows`: these metrics with other sizes, one JSON line each."""
    usual = FlowSizes()
    parser = argparse.ArgumentParser(prog="python -m bench flows", description=main.__doc__)
    parser.add_argument("--sleepers", type=int, default=usual.sleepers, help="sleeping flows")
    parser.add_argument("--waking", type=int, default=usual.waking, help="flows that wake at once")
    parser.add_argument("--steps", type=int, default=usual.recorded_steps, help="recorded steps")
    parser.add_argument("--dir", type=Path, default=ROOT / "build", help="parent of the store")
    args = parser.parse_args(argv)
    sizes = Sizes(flows=FlowSizes(args.sleepers, args.waking, args.steps))
    with new_directory(args.dir) as directory:
        for metric in METRICS.values():
            document = metric(Place(directory, sizes=sizes)).document()
            print(json.dumps(document, ensure_ascii=False), flush=True)
    return 0

"""`python -m bench`: run the metrics, one JSON line each, then the table."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import (
    commits,
    effects,
    history,
    ledger,
    memory,
    queues,
    table,
    task_fairness,
    tasks,
    timers,
    wakeup_latency,
)
from bench.place import ROOT, Place, new_directory
from bench.record import Record

METRICS: dict[str, Callable[[Place], Record]] = {
    metric.__name__: metric
    for metric in (
        commits.floor,
        commits.one_caller,
        commits.callers_64_threads,
        commits.callers_64_tasks,
        commits.processes_4x32,
        commits.batches_1000,
        commits.computing_thread,
        queues.queue_churn,
        queues.contended_queue,
        queues.journal_appends,
        wakeup_latency.wake_up,
        wakeup_latency.idle,
        queues.backlog,
        ledger.ledger_moves,
        ledger.ledger_records,
        ledger.ledger_logged,
        effects.effect_chains,
        effects.effect_latency,
        effects.runtime_targets,
        effects.effect_fairness,
        effects.effect_backlog,
        timers.timer_lateness,
        timers.pending_timers,
        tasks.task_backlog,
        tasks.task_idle,
        tasks.task_cold,
        task_fairness.task_fairness,
        memory.memory,
    )
}
# Each builds a large store or waits for timers. It takes longer than most other metrics together.
LONG = {"memory", "effect_fairness", "effect_backlog", "timer_lateness", "pending_timers"}
LONG |= {"task_backlog", "task_idle", "task_fairness"}
LONG_BUDGET_S = 300.0
# Slices of one second need about this budget. Other budgets scale the slice, between these bounds.
USUAL_BUDGET_S = 120.0
SLICE_S_MIN, SLICE_S_MAX = 0.1, 3.0
# Above this load average before the start, other processes distort the figures.
QUIET_LOAD = 0.5


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] in (
        ["churn"],
        ["console"],
        ["digest"],
        ["flows"],
        ["footprint"],
        ["isolation"],
        ["loop_lag"],
        ["retention"],
        ["single"],
        ["telemetry"],
        ["telemetry_switch"],
    ):
        # Each command parses its options.
        command: int = importlib.import_module(f"bench.{argv[0]}").main(argv[1:])
        return command
    args = _parse(argv)
    names = args.only or [
        name for name in METRICS if name not in LONG or args.budget_s >= LONG_BUDGET_S
    ]
    slice_s = min(max(args.budget_s / USUAL_BUDGET_S, SLICE_S_MIN), SLICE_S_MAX)
    documents: list[dict[str, Any]] = []
    load_before = os.getloadavg()[0]
    if load_before > QUIET_LOAD:
        print(
            f"other processes use this machine (load {load_before:.1f}): expect noise",
            file=sys.stderr,
        )
    began = time.monotonic()
    with new_directory(args.dir) as directory:
        place = Place(directory, slice_s=slice_s, raw_s=slice_s / 4)
        for name in names:
            if time.monotonic() - began > args.budget_s and not args.only:
                print(f"{name}: skipped, the budget is used up", file=sys.stderr)
                continue
            documents.append(METRICS[name](place).document())
            print(json.dumps(documents[-1], ensure_ascii=False), flush=True)
    run = history.entry(documents, budget_s=args.budget_s, load_before=load_before)
    print(f"\n{table.text(documents)}\n\n{time.monotonic() - began:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(run, indent=1, ensure_ascii=False) + "\n", "utf-8")
    if args.save:
        history.save(run)
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure Holdfast.")
    parser.add_argument(
        "--budget-s", type=float, default=USUAL_BUDGET_S, help="approximate duration (120)"
    )
    parser.add_argument(
        "--only",
        type=_names,
        metavar="NAME,…",
        help=f"run only these metrics, of {', '.join(METRICS)}",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the run to FILE")
    parser.add_argument("--save", action="store_true", help="append the run to bench/history.json")
    parser.add_argument(
        "--dir",
        type=Path,
        default=ROOT / "build",
        help="parent of the temporary directory, on the disk to measure (build)",
    )
    return parser.parse_args(argv)


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in METRICS]:
        raise argparse.ArgumentTypeError(f"no such metric: {', '.join(unknown)}")
    return names


if __name__ == "__main__":
    sys.exit(main())

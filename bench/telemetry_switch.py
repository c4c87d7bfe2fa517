"""`python -m bench telemetry_switch`: the cost of traces, logs and scrapes, in one process that switches them on and off.

    python -m bench telemetry_switch [--rounds 40] [--slice-s 1] [--part tasks]

Two processes differ by some percent on a busy machine, whatever they do. So this process works for a slice with all of it
(the SDK samples 1 %, JSON log lines from the level info on, one page of metrics in each second) and for a slice with
none of it, in turn, and the order changes with each round. The ratio is the median of the ratios of the rounds, for the
processor time of one item, the writer included, and for items per second. `python -m bench telemetry` compares processes.
"""

from __future__ import annotations

import argparse
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from opentelemetry import trace

from bench.peers.processors import used_ns
from bench.place import ROOT, new_directory
from bench.telemetry import APP, GOAL, PARTS, SCRAPE_S, THREADS, use_opentelemetry, work
from holdfast.ops import log_format
from holdfast.ops.metrics.exposition import MetricsPage
from holdfast.ops.metrics.runner_metrics import runner_readings

# Rounds that count for nothing.
WARM_UP = 2


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=40, help="rounds of each part (40)")
    parser.add_argument("--slice-s", type=float, default=1.0, help="seconds of a slice (1)")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; repeatable")
    parser.add_argument(
        "--dir", type=Path, default=ROOT / "build", help="parent of the store (build)"
    )
    args = parser.parse_args(argv)
    use_opentelemetry(with_sdk=True)
    worst = 0.0
    with (
        new_directory(args.dir) as directory,
        APP.open(str(directory / "data"), roles=("orchestrator", "world", "task")) as rt,
        ThreadPoolExecutor(THREADS) as threads,
    ):
        page = MetricsPage(
            rt.store, worker=rt.worker, runners=lambda: runner_readings(rt.roles), roles=rt.roles
        )
        for part in args.part or PARTS:
            worst = max(
                worst,
                _measure(args, part, page.render, lambda p: work(rt, threads, p, args.slice_s)),
            )
    print(f"\nprocessor time below {GOAL:.2f}: {'met' if worst < GOAL else 'MISSED'}")
    return 0


def _measure(
    args: argparse.Namespace,
    part: str,
    scrape: Callable[[], object],
    run: Callable[[str], dict[str, Any]],
) -> float:
    cost_us: dict[bool, list[float]] = {True: [], False: []}
    per_s: dict[bool, list[float]] = {True: [], False: []}
    for number in range(args.rounds + WARM_UP):
        for on in (True, False) if number % 2 else (False, True):
            with _switched(on, scrape):
                before = used_ns([os.getpid()])
                done = run(part)
                used = used_ns([os.getpid()]) - before
            if number >= WARM_UP:
                cost_us[on].append(used / done["count"] / 1e3)
                per_s[on].append(done["count"] / done["seconds"])
    ratios = [on / off for on, off in zip(cost_us[True], cost_us[False], strict=True)]
    rates = [on / off for on, off in zip(per_s[True], per_s[False], strict=True)]
    low, _, high = quantiles(ratios, n=4)
    print(
        f"{part}: {median(cost_us[False]):.1f} µs without; processor time {median(ratios):.3f} "
        f"(quartiles {low:.3f}–{high:.3f}), rate {median(rates):.3f}",
        flush=True,
    )
    return median(ratios)


@contextmanager
def _switched(on: bool, scrape: Callable[[], object]) -> Iterator[None]:
    if not on:
        provider, trace._TRACER_PROVIDER = trace._TRACER_PROVIDER, None
        try:
            yield
        finally:
            trace._TRACER_PROVIDER = provider
        return
    stopped = threading.Event()

    def scrape_each_second() -> None:
        while not stopped.wait(SCRAPE_S / 2):
            scrape()
            stopped.wait(SCRAPE_S / 2)

    scraper = threading.Thread(target=scrape_each_second)
    scraper.start()
    with open(os.devnull, "w", encoding="utf-8") as lines:
        log_format.configure("json", "info", {"worker": "bench"}, lines)
        try:
            yield
        finally:
            log_format.configure("text", "warning", {})
            stopped.set()
            scraper.join()

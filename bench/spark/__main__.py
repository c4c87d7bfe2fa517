"""`python -m bench.spark`: measure faults, then speed, with a JSON line each, and write the page."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from bench.place import ROOT, end_writer, new_directory
from bench.spark import faults, report, speed

USUAL_BUDGET_S = 1500.0
# Share of the budget, when both parts are measured.
FAULTS_SHARE = 0.6
PARTITIONINGS = "partitionings"
FAULTS = (*(one.name for one in faults.SCENARIOS), PARTITIONINGS)
NAMES = (*FAULTS, *speed.METRICS)
# Above this load average before the start, other processes distort the figures.
QUIET_LOAD = 0.5


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    # Exit on SIGTERM through the context managers, which end the processes and remove the directories.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began, load = time.monotonic(), os.getloadavg()[0]
    if load > QUIET_LOAD:
        print(f"other processes use this machine (load {load:.1f}): expect noise", file=sys.stderr)
    wanted = args.only or NAMES
    command = "make bench-spark"
    if args.only:
        command = f"python -m bench.spark --only {','.join(args.only)}"
    if names := [name for name in wanted if name in FAULTS]:
        share = FAULTS_SHARE if len(names) < len(wanted) else 1.0
        text = _faults(names, args.dir, began + share * args.budget_s, load, command)
        report.write("faults", text, args.page)
        print(text)
    if names := [name for name in wanted if name in speed.METRICS]:
        with new_directory(args.dir) as directory:
            figures = []
            for figure in speed.measure(names, directory, began + args.budget_s, args.turns):
                figures.append(figure)
                print(json.dumps(msgspec.to_builtins(figure), ensure_ascii=False), flush=True)
            end_writer(directory / "store")
        text = report.speed(figures, load, command)
        report.write("speed", text, args.page)
        print(text)
    print(f"{time.monotonic() - began:.0f} s")
    return 0


def _faults(names: list[str], parent: Path, until_s: float, load: float, command: str) -> str:
    lines, same = [], []
    with new_directory(parent) as directory:
        bench = faults.Bench(directory)
        scenarios = [scenario for scenario in faults.SCENARIOS if scenario.name in names]
        for line in bench.run(scenarios, until_s):
            lines.append(line)
            print(json.dumps(msgspec.to_builtins(line), ensure_ascii=False), flush=True)
        if PARTITIONINGS in names:
            same = list(bench.partitionings(until_s))
        end_writer(directory / "store")
    return report.faults(lines, same, load, command, hosts=bench.on_hosts)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.spark", description="Measure Stage beside naive Spark."
    )
    parser.add_argument(
        "--budget-s", type=float, default=USUAL_BUDGET_S, help="approximate duration"
    )
    parser.add_argument("--turns", type=int, default=3, help="turns of base and stage")
    parser.add_argument("--only", type=_names, metavar="NAME,…", help=", ".join(NAMES))
    parser.add_argument(
        "--page", type=Path, default=report.PAGE, help="the page that gets the tables"
    )
    parser.add_argument(
        "--dir", type=Path, default=ROOT / "build", help="parent of the temporary directory (build)"
    )
    return parser.parse_args(argv)


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in NAMES]:
        raise argparse.ArgumentTypeError(f"unknown name: {', '.join(unknown)}")
    return names


if __name__ == "__main__":
    sys.exit(main())

"""`python -m bench.peers`: run the systems in turns, then the metrics of Holdfast alone, and print both tables."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from bench import history as saved
from bench import table as house
from bench.peers import history, report, table, turns
from bench.peers.effect_turns import LAYOUTS, HoldfastEffects
from bench.peers.suite import Suite
from bench.peers.suites import SUITES, WORLDS
from bench.place import ROOT, Place, new_directory
from bench.record import Record

USUAL_BUDGET_S = 900.0
# Share of the budget. The rest is for the metrics of Holdfast alone.
COMPARED_SHARE = 0.6


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    # Exit on SIGTERM through the context managers, which end the processes and remove the directories.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began, load_before = time.monotonic(), os.getloadavg()[0]
    suite: Suite = args.suite
    wanted = args.only or suite.names
    compared, records = _compare(args, [name for name in suite.parts if name in wanted])
    alone = _alone(args, [name for name in wanted if name in suite.alone], began)
    documents = [record.document() for record in (*records, *alone)]
    run = history.entry(
        compared,
        documents,
        budget_s=args.budget_s,
        load_before=load_before,
        note=args.note,
    )
    print(_text(suite, run) + f"\n\n{time.monotonic() - began:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(run, indent=1, ensure_ascii=False) + "\n", "utf-8")
    if args.save:
        saved.save(run, suite.history)
        report.write(suite, run, suite.page)
    return 0


def _compare(args: argparse.Namespace, parts: list[str]) -> tuple[dict[str, Any], list[Record]]:
    if not parts:
        return {"runs": 0, "measures": {}, "ratios": {}, "settings": {}, "absent": {}}, []
    suite: Suite = args.suite
    HoldfastEffects.layout = args.layout
    chosen = args.systems or list(suite.systems)
    with suite.ground(args.dir):
        return _turns(args, suite, parts, chosen)


def _turns(
    args: argparse.Namespace, suite: Suite, parts: list[str], chosen: list[str]
) -> tuple[dict[str, Any], list[Record]]:
    systems, absent = turns.prepare({name: suite.systems[name] for name in chosen})
    share = len(parts) / len(suite.parts)
    amount_of = turns.amounts(
        suite, systems, runs=args.runs, budget_s=COMPARED_SHARE * args.budget_s / share
    )
    settings = {
        system.name: {**system.settings(), "messages": str(amount_of[system.name])}
        for system in systems
    }
    print(json.dumps(settings, indent=1, ensure_ascii=False), flush=True)
    samples, failed = turns.take(systems, amount_of, parts, runs=args.runs, parent=args.dir)
    compared = {
        "runs": args.runs,
        **table.document(suite, samples),
        "settings": settings,
        "absent": {**absent, **failed},
    }
    return compared, table.records(suite, samples)


def _alone(args: argparse.Namespace, names: list[str], began: float) -> list[Record]:
    records = []
    for name in names:
        if time.monotonic() - began > args.budget_s and not args.only:
            print(f"{name}: skipped, the budget is used up", file=sys.stderr)
            continue
        with new_directory(args.dir) as directory:
            place = Place(directory, repeats=min(args.runs, 3))
            records.append(args.suite.alone[name](place))
        print(json.dumps(records[-1].document(), ensure_ascii=False), flush=True)
    return records


def _text(suite: Suite, run: dict[str, Any]) -> str:
    compared, parts = run["compared"], []
    if compared["measures"]:
        parts.append(table.text([table.header(suite), *table.lines(suite, compared)]))
    parts += [f"{name}: not measured: {why}" for name, why in compared["absent"].items()]
    if run["metrics"]:
        parts.append(house.text(run["metrics"]))
    return "\n\n".join(["", *parts])


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers", description="Measure beside the peers."
    )
    parser.add_argument(
        "--suite",
        choices=SUITES,
        default=WORLDS.name,
        help="worlds, effects with timers, tasks, flows, or all of them on PostgreSQL",
    )
    parser.add_argument("--runs", type=int, default=5, help="turns of every system")
    parser.add_argument(
        "--budget-s", type=float, default=USUAL_BUDGET_S, help="approximate duration"
    )
    parser.add_argument(
        "--only", type=_split, metavar="NAME,…", help="run only these parts and metrics"
    )
    parser.add_argument("--systems", type=_split, metavar="NAME,…", help="run only these systems")
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        default=HoldfastEffects.layout,
        help="processes of our roles, for effects",
    )
    parser.add_argument("--note", default="", help="a note for the page")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the run to FILE")
    parser.add_argument(
        "--save", action="store_true", help="append to the history of the suite and write its page"
    )
    parser.add_argument(
        "--dir", type=Path, default=ROOT / "build", help="parent of the temporary directory (build)"
    )
    args = parser.parse_args(argv)
    args.suite = suite = SUITES[args.suite]
    for given, known in ((args.only, suite.names), (args.systems, suite.systems)):
        if unknown := [name for name in given or () if name not in known]:
            parser.error(f"unknown name: {', '.join(unknown)}; known names: {', '.join(known)}")
    return args


def _split(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    sys.exit(main())

"""`python -m bench.peers`: the systems by turns, then what ours alone has; a table of each."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from bench import table as house
from bench import worlds
from bench.peers import history, report, table, turns
from bench.peers.dbos_turn import Dbos
from bench.peers.holdfast_turn import Holdfast
from bench.peers.restate_turn import Restate
from bench.peers.workload import PARTS
from bench.place import ROOT, Place, new_directory
from bench.record import Record

SYSTEMS = {"holdfast": Holdfast, "restate": Restate, "dbos": Dbos}
NAMES = (*PARTS, *worlds.METRICS)
USUAL_BUDGET_S = 900.0
# Of the budget; the rest is for the measures of ours alone.
COMPARED_SHARE = 0.6


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    # Ended by a signal, it still ends what it started and removes what it made.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began, load_before = time.monotonic(), os.getloadavg()[0]
    wanted = args.only or NAMES
    compared, records = _compare(args, [name for name in wanted if name in PARTS])
    alone = _alone(args, [name for name in wanted if name in worlds.METRICS], began)
    documents = [record.document() for record in (*records, *alone)]
    run = history.entry(
        compared,
        documents,
        budget_s=args.budget_s,
        load_before=load_before,
        note=args.note,
    )
    print(_text(run) + f"\n\n{time.monotonic() - began:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(run, indent=1, ensure_ascii=False) + "\n", "utf-8")
    if args.save:
        history.save(run)
        report.write(run)
    return 0


def _compare(args: argparse.Namespace, parts: list[str]) -> tuple[dict[str, Any], list[Record]]:
    if not parts:
        return {"runs": 0, "measures": {}, "ratios": {}, "settings": {}, "absent": {}}, []
    makers = {name: SYSTEMS[name] for name in args.systems}
    systems, absent = turns.prepare(makers)
    share = len(parts) / len(PARTS)
    amount_of = turns.amounts(
        systems, runs=args.runs, budget_s=COMPARED_SHARE * args.budget_s / share
    )
    settings = {
        system.name: {**system.settings(), "messages": turns.counts(amount_of[system.name])}
        for system in systems
    }
    print(json.dumps(settings, indent=1, ensure_ascii=False), flush=True)
    samples, failed = turns.take(systems, amount_of, parts, runs=args.runs, parent=args.dir)
    compared = {
        "runs": args.runs,
        **table.document(samples),
        "settings": settings,
        "absent": {**absent, **failed},
    }
    return compared, table.records(samples)


def _alone(args: argparse.Namespace, names: list[str], began: float) -> list[Record]:
    records = []
    for name in names:
        if time.monotonic() - began > args.budget_s and not args.only:
            print(f"{name}: left out, the budget is used up", file=sys.stderr)
            continue
        with new_directory(args.dir) as directory:
            place = Place(directory, repeats=min(args.runs, 3))
            records.append(worlds.METRICS[name](place))
        print(json.dumps(records[-1].document(), ensure_ascii=False), flush=True)
    return records


def _text(run: dict[str, Any]) -> str:
    compared, parts = run["compared"], []
    if compared["measures"]:
        parts.append(table.text([table.HEADER, *table.lines(compared)]))
    parts += [f"{name}: not measured: {why}" for name, why in compared["absent"].items()]
    if run["metrics"]:
        parts.append(house.text(run["metrics"]))
    return "\n\n".join(["", *parts])


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers", description="Measure worlds beside Restate and DBOS."
    )
    parser.add_argument("--runs", type=int, default=5, help="how often every system takes a turn")
    parser.add_argument("--budget-s", type=float, default=USUAL_BUDGET_S, help="how long, roughly")
    parser.add_argument("--only", type=_names(NAMES), metavar="NAME,…", help=", ".join(NAMES))
    parser.add_argument(
        "--systems", type=_names(tuple(SYSTEMS)), default=list(SYSTEMS), metavar="NAME,…",
        help=f"of {', '.join(SYSTEMS)}",
    )  # fmt: skip
    parser.add_argument("--note", default="", help="what a reader should know about this run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole run there")
    parser.add_argument(
        "--save", action="store_true", help="append to bench/peers/history.json, write the page"
    )
    parser.add_argument(
        "--dir", type=Path, default=ROOT / "build", help="measure in a new directory there (build)"
    )
    return parser.parse_args(argv)


def _names(known: tuple[str, ...]) -> Any:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"no such name: {', '.join(unknown)}")
        return names

    return parse


if __name__ == "__main__":
    sys.exit(main())

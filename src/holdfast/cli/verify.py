"""`holdfast verify`: is what is stored sound, and does the code repeat it?

Chains and derived rows are checked always; with `--app` every kept journal is replayed, twice and
under different hash seeds, and compared as well. The first difference of each world is printed, and all that derived rows differ in. Exit
code 1 means that there is one.
"""

from __future__ import annotations

import argparse
import os
import sys

from holdfast.cli import EXIT_FAILED, EXIT_OK
from holdfast.cli.application import add_app_option, app_is_usage
from holdfast.cli.output import emit, printable, waiting
from holdfast.cli.target import add_options, directory_of, existing, is_embedded
from holdfast.ops import inventory, recount, verify
from holdfast.ops.recount import Difference
from holdfast.ops.unreadable import as_corrupt
from holdfast.ops.verify import Finding, Target
from holdfast.store.api import Txn
from holdfast.store.readback import read_back

SHOWN_MAX = 100


def configure(parser: argparse.ArgumentParser) -> None:
    add_app_option(parser, "replay every journal with this code, twice")
    parser.add_argument(
        "--jobs", metavar="N", type=int, default=os.cpu_count() or 1, help="processes (one a core)"
    )
    parser.add_argument("--universe", metavar="U", help="worlds of this one only")
    add_options(parser)


@app_is_usage
def run(args: argparse.Namespace) -> int:
    with existing(args) as store:
        if is_embedded(store.url):
            with waiting("reading every page"):
                # In a process of its own: on a damaged file LMDB can end its reader.
                read_back(directory_of(store.url))
        with as_corrupt("catalog"):
            targets = store.read(_targets, args.universe)
        progress = Progress(len(targets))
        findings = verify.verify(
            store, targets, app=args.app, jobs=args.jobs, progress=progress.show
        )
        progress.end()
        with waiting("counting again"), as_corrupt("row"):
            differences = store.read(recount.recount)
    wrong = [finding for finding in findings if finding.code]
    sound = not wrong and not differences
    document = {
        "sound": sound,
        "worlds": len(findings),
        "steps": sum(finding.steps for finding in findings),
        "compared": sum(finding.compared for finding in findings),
        "not_compared": sum(finding.not_compared for finding in findings),
        "findings": [finding._asdict() for finding in wrong],
        "differences": [difference._asdict() for difference in differences],
    }
    emit(args, document, _text(args, findings, wrong, differences))
    return EXIT_OK if sound else EXIT_FAILED


class Progress:
    """One line on a terminal, written over and over."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._shows = sys.stderr.isatty()

    def show(self, done: int) -> None:
        if self._shows:
            line = f"\rverified {done:,} of {self._total:,} worlds "
            print(line, end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._shows:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _targets(txn: Txn, universe: str | None) -> list[Target]:
    names = inventory.universes(txn) if universe is None else [universe]
    return [target for name in names for target in verify.targets(txn, name)]


def _text(
    args: argparse.Namespace,
    findings: list[Finding],
    wrong: list[Finding],
    differences: list[Difference],
) -> str:
    lines = [_finding(finding) for finding in wrong] + [_difference(one) for one in differences]
    shown = lines[:SHOWN_MAX]
    if len(lines) > SHOWN_MAX:
        shown.append(f"… and {len(lines) - SHOWN_MAX:,} more (--json tells all)")
    replayed = _replayed(findings) if args.app else ""
    verdict = "sound"
    if lines:
        verdict = f"{_counted(len(wrong), 'world')} and {_counted(len(differences), 'row')} differ"
    return "\n".join([*shown, f"{_counted(len(findings), 'world')}{replayed}: {verdict}"])


def _replayed(findings: list[Finding]) -> str:
    steps = sum(finding.steps for finding in findings)
    compared = sum(finding.compared for finding in findings)
    without = sum(finding.not_compared for finding in findings)
    entries = f"{compared:,} entry" if compared == 1 else f"{compared:,} entries"
    rest = f", {without:,} without a digest" if without else ""
    return f", {_counted(steps, 'step')} replayed, states compared for {entries}{rest}"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _finding(found: Finding) -> str:
    height = f" at height {found.height}" if found.height else ""
    return printable(f"{found.universe}/{found.world}{height}: {found.code}: {found.text}")


def _difference(found: Difference) -> str:
    return printable(
        f"{found.kind} {found.where}: {found.what}: found {found.found}, expected {found.expected}"
    )

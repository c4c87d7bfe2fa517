"""`holdfast verify`: verifies the stored data and, with `--app`, replays it.

Hash chains and derived rows are always checked. With `--app` every kept journal is replayed twice, under
different hash seeds, and compared. The output has the first difference of each world and all differences of
derived rows. With `--app` every stored flow is replayed too: the output names the flows that a worker with this code
would park, and the recorded steps that it no longer asks for. Exit code 1 means that there is a difference, or that a
flow in flight needs attention. With `--save` the report is stored, and replaces the former one.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from holdfast.cli import EXIT_FAILED, EXIT_OK
from holdfast.cli.app_argument import add_app_option, app_errors_are_usage
from holdfast.cli.output import emit, printable, waiting
from holdfast.cli.store_option import (
    EVERY_UNIVERSE,
    add_options,
    directory_of,
    is_embedded,
    open_existing,
)
from holdfast.clock import SYSTEM
from holdfast.durable.difference import Difference
from holdfast.ops import catalog_queries, flow_replay, verify, verify_report, world_replay
from holdfast.ops.app_loader import load_app
from holdfast.ops.decode_errors import as_corrupt
from holdfast.ops.flow_replay import FlowFinding, FlowTarget
from holdfast.ops.world_replay import WorldFinding, WorldTarget
from holdfast.store.api import Txn
from holdfast.store.lmdb.integrity_check import check_integrity
from holdfast.store.prefix_scan import iter_names
from holdfast.store.schema import Space

SHOWN_MAX = 100


def configure(parser: argparse.ArgumentParser) -> None:
    add_app_option(parser, "replay every journal and every flow twice with this application")
    parser.add_argument(
        "--replay-timeout-s",
        metavar="S",
        type=float,
        default=flow_replay.LIMIT_S,
        help="report a flow whose code runs longer than S seconds (default: 30)",
    )
    parser.add_argument(
        "--jobs",
        metavar="N",
        type=int,
        default=os.cpu_count() or 1,
        help="use N processes (default: one per core)",
    )
    parser.add_argument(
        "--save", action="store_true", help="save the report in the store, for GET /v1/verify"
    )
    add_options(parser, universe=EVERY_UNIVERSE)


@app_errors_are_usage
def run(args: argparse.Namespace) -> int:
    with open_existing(args) as store:
        if is_embedded(store.url):
            with waiting("reading every page"):
                # In a separate process, because LMDB can crash on a damaged file.
                check_integrity(directory_of(store.url))
        with as_corrupt("catalog"):
            targets = store.read(_targets, args.universe)
        progress = VerifyProgress(len(targets))
        findings = world_replay.verify_worlds(
            store, targets, app=args.app, jobs=args.jobs, progress=progress.show
        )
        progress.end()
        flows: list[FlowFinding] = []
        if args.app is not None:
            with as_corrupt("flow"):
                flow_targets = store.read(_flow_targets, args.universe)
            with waiting("replaying flows"):
                flows = flow_replay.verify_flows(
                    store, flow_targets, app=args.app, jobs=args.jobs, limit_s=args.replay_timeout_s
                )
        with waiting("checking derived rows"), as_corrupt("row"):
            differences = store.read(verify.find_differences)
        document = _document(findings, flows, differences)
        if args.save:
            build = None if args.app is None else verify_report.build_of(load_app(args.app))
            report = verify_report.make_report(
                document, SYSTEM.wall_ns(), args.universe, args.app, build
            )
            store.transact(verify_report.save, report)
    wrong = [finding for finding in findings if finding.code]
    reported = [flow for flow in flows if flow.code or flow.removed]
    text = _report_text(args, findings, wrong, differences)
    emit(args, document, "\n".join([*_flow_lines(flows, reported), text]))
    return EXIT_OK if document["sound"] else EXIT_FAILED


def _document(
    findings: list[WorldFinding], flows: list[FlowFinding], differences: list[Difference]
) -> dict[str, Any]:
    wrong = [finding for finding in findings if finding.code]
    reported = [flow for flow in flows if flow.code or flow.removed]
    attention = any(flow.needs_attention for flow in flows)
    return {
        "sound": not wrong and not differences and not attention,
        "worlds": len(findings),
        "steps": sum(finding.steps for finding in findings),
        "compared": sum(finding.compared for finding in findings),
        "not_compared": sum(finding.not_compared for finding in findings),
        "findings": [finding._asdict() for finding in wrong],
        "differences": [difference.document() for difference in differences],
        "flows": len(flows),
        "flow_findings": [flow._asdict() for flow in reported],
        "parks": [flow.flow for flow in flows if flow.parks],
    }


class VerifyProgress:
    """A progress line on a terminal, updated in place."""

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


def _targets(txn: Txn, universe: str | None) -> list[WorldTarget]:
    names = catalog_queries.universes(txn) if universe is None else [universe]
    return [target for name in names for target in world_replay.targets(txn, name)]


def _flow_targets(txn: Txn, universe: str | None) -> list[FlowTarget]:
    names = list(iter_names(txn, (int(Space.FLOW),))) if universe is None else [universe]
    return [target for name in names for target in flow_replay.targets(txn, name)]


def _flow_lines(flows: list[FlowFinding], reported: list[FlowFinding]) -> list[str]:
    if not flows:
        return []
    lines = [_flow_line(flow) for flow in sorted(reported, key=lambda flow: not flow.parks)]
    shown = lines[:SHOWN_MAX]
    if len(lines) > SHOWN_MAX:
        shown.append(f"… and {len(lines) - SHOWN_MAX:,} more flows (--json shows all)")
    steps = sum(flow.steps for flow in flows)
    parked = sum(flow.parks is True for flow in flows)
    attention = sum(flow.needs_attention for flow in flows)
    counts = f"{_count_text(len(flows), 'flow')}, {_count_text(steps, 'recorded step')} replayed"
    return [*shown, f"{counts}: {parked:,} would be parked, {attention:,} need attention"]


def _flow_line(flow: FlowFinding) -> str:
    parts = []
    if flow.code:
        at = f" at {flow.step}" if flow.step else ""
        parts.append(f"{'would be parked' if flow.parks else flow.code}{at}: {flow.text}")
    elif flow.text:
        parts.append(flow.text)
    if flow.removed:
        parts.append(f"no longer asked for: {', '.join(flow.removed)}")
    if flow.inserted and not flow.code:
        parts.append(f"new: {', '.join(flow.inserted)}")
    key = f"/{flow.key}" if flow.key else ""
    return printable(f"{flow.flow} {flow.name}{key} {flow.state}: {'. '.join(parts)}")


def _report_text(
    args: argparse.Namespace,
    findings: list[WorldFinding],
    wrong: list[WorldFinding],
    differences: list[Difference],
) -> str:
    lines = [_finding_line(finding) for finding in wrong] + [
        _difference_line(difference) for difference in differences
    ]
    shown = lines[:SHOWN_MAX]
    if len(lines) > SHOWN_MAX:
        shown.append(f"… and {len(lines) - SHOWN_MAX:,} more (--json shows all)")
    replayed = _replay_text(findings) if args.app else ""
    verdict = "sound"
    if lines:
        verdict = (
            f"{_count_text(len(wrong), 'world')} and {_count_text(len(differences), 'row')} differ"
        )
    return "\n".join([*shown, f"{_count_text(len(findings), 'world')}{replayed}: {verdict}"])


def _replay_text(findings: list[WorldFinding]) -> str:
    steps = sum(finding.steps for finding in findings)
    compared = sum(finding.compared for finding in findings)
    without = sum(finding.not_compared for finding in findings)
    entries = f"{compared:,} entry" if compared == 1 else f"{compared:,} entries"
    rest = f", {without:,} without a digest" if without else ""
    return f", {_count_text(steps, 'step')} replayed, states compared for {entries}{rest}"


def _count_text(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _finding_line(finding: WorldFinding) -> str:
    height = f" at height {finding.height}" if finding.height else ""
    return printable(f"{finding.universe}/{finding.world}{height}: {finding.code}: {finding.text}")


def _difference_line(difference: Difference) -> str:
    line = "{kind} {where}: {what}: found {found}, expected {expected}"
    return printable(line.format(**difference.document()))

"""`holdfast replay FILE --handler module:function`: replays a recording through the current code.

Each attempt runs again, without a store, and its result is compared with the recorded one. Exit code 0
means that all results match; 1 means that some differ, or that the file is damaged.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import Any, cast

from holdfast.cli.output import emit, field_lines, table, waiting
from holdfast.errors import HoldfastError, Invalid
from holdfast.runner import ReplayReport, WorkHandler, replay_file
from holdfast.runner.replay import ReplayedAttempt

SHOWN_MAX = 20


class ReplayDiffers(HoldfastError):
    code = "replay_differs"
    hint = "the handler's results differ from those in the recording"


class NoHandler(Invalid):
    hint = "the handler could not be loaded; give module:function; the current directory is on the module path"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", help="recording written by holdfast.runner.Recorder"
    )
    parser.add_argument(
        "--handler",
        metavar="MODULE:FUNCTION",
        required=True,
        help="handler that runs the recorded attempts",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document to stdout")


def run(args: argparse.Namespace) -> int:
    handler = load_handler(args.handler)
    with waiting("replaying"):
        report = replay_file(args.file, handler)
    emit(args, _document(report), _text(report))
    if report.damage is not None:
        raise report.damage
    if report.mismatches:
        raise ReplayDiffers(mismatches=len(report.mismatches), attempts=report.attempts)
    return 0


def load_handler(name: str) -> WorkHandler:
    module, _, path = name.partition(":")
    if not module or not path:
        raise NoHandler(what="handler", found=name, why="not of the form module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        attribute: Any = importlib.import_module(module)
        for part in path.split("."):
            attribute = getattr(attribute, part)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise NoHandler(what="handler", found=name, why=why) from error
    if not callable(attribute):
        raise NoHandler(what="handler", found=name, why="not callable")
    return cast(WorkHandler, attribute)


def _document(report: ReplayReport) -> dict[str, Any]:
    return {
        "attempts": report.attempts,
        "matched": report.matched,
        "mismatches": _reruns(report.mismatches),
        "unfinished": _reruns(report.unfinished),
        "requeues": report.requeues,
        "dead_letters": report.dead_letters,
        "damage": None if report.damage is None else report.damage.fields,
    }


def _reruns(reruns: list[ReplayedAttempt]) -> list[dict[str, Any]]:
    return [
        {
            "queue": rerun.attempt.queue,
            "seq": rerun.attempt.seq,
            "attempt": rerun.attempt.attempt,
            "recorded": rerun.recorded,
            "result": rerun.result,
        }
        for rerun in reruns
    ]


def _text(report: ReplayReport) -> str:
    text = field_lines(
        [
            ("attempts", report.attempts),
            ("matched", report.matched),
            ("mismatches", len(report.mismatches)),
            ("unfinished when recorded", len(report.unfinished)),
            ("requeues recorded", report.requeues),
            ("dead letters recorded", report.dead_letters),
        ]
    )
    rows = [
        (rerun["queue"], str(rerun["seq"]), rerun["attempt"], rerun["recorded"], rerun["result"])
        for rerun in _reruns([*report.mismatches, *report.unfinished])
    ]
    if rows:
        text += "\n\n" + table(("queue", "seq", "attempt", "recorded", "now"), rows[:SHOWN_MAX])
        text += f"\n… and {len(rows) - SHOWN_MAX:,} more" if len(rows) > SHOWN_MAX else ""
    return text

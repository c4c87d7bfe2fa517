"""`holdfast replay FILE --handler module:function`: a recording once more, through today's code.

Each attempt is run again, without a store, and its result compared with the recorded one. Exit code
0 means that all are alike; 1 that some differ, or that the file is damaged from some point on.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import Any, cast

from holdfast.cli.output import emit, fields, table, waiting
from holdfast.errors import HoldfastError, Invalid
from holdfast.runner import Handler, ReplayReport, replay_file
from holdfast.runner.replay import Rerun

SHOWN_MAX = 20


class Differs(HoldfastError):
    code = "replay_differs"
    hint = "the handler does not do today what it did when this was recorded"


class NoHandler(Invalid):
    hint = "name a function as module:function; modules of this directory are found, too"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", metavar="FILE", help="a recording, made by holdfast.runner.Recorder"
    )
    parser.add_argument("--handler", metavar="MODULE:FUNCTION", required=True)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    handler = handler_of(args.handler)
    with waiting("replaying"):
        report = replay_file(args.file, handler)
    emit(args, _document(report), _text(report))
    if report.damage is not None:
        raise report.damage
    if report.mismatches:
        raise Differs(mismatches=len(report.mismatches), attempts=report.attempts)
    return 0


def handler_of(name: str) -> Handler:
    module, _, path = name.partition(":")
    if not module or not path:
        raise NoHandler(what="handler", found=name, why="not of the form module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise NoHandler(what="handler", found=name, why=why) from error
    if not callable(found):
        raise NoHandler(what="handler", found=name, why="it cannot be called")
    return cast(Handler, found)


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


def _reruns(reruns: list[Rerun]) -> list[dict[str, Any]]:
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
    text = fields(
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
        (it["queue"], str(it["seq"]), it["attempt"], it["recorded"], it["result"])
        for it in _reruns([*report.mismatches, *report.unfinished])
    ]
    if rows:
        text += "\n\n" + table(("queue", "seq", "attempt", "recorded", "now"), rows[:SHOWN_MAX])
        text += f"\n… and {len(rows) - SHOWN_MAX:,} more" if len(rows) > SHOWN_MAX else ""
    return text

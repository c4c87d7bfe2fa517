"""`holdfast schedules`: lists and shows schedules, pauses, resumes and deletes them, and starts occurrences.

Times are wall clock times. `--from` and `--to` without an offset are in the time zone of the schedule.
"""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from holdfast.cli import EXIT_OK
from holdfast.cli.output import emit, field_lines, table, time_text
from holdfast.cli.store_option import EVERY_UNIVERSE, ONE_UNIVERSE, add_options, open_existing
from holdfast.clock import SYSTEM
from holdfast.errors import Invalid, NotFound
from holdfast.ops import schedule_documents
from holdfast.ops.schedule_documents import parse_time
from holdfast.schedules import backfills, operations, queries
from holdfast.schedules.operations import UsedOccurrence
from holdfast.schedules.queries import Occurrence, ScheduleStatus
from holdfast.schedules.states import OccurrenceState
from holdfast.store.api import Store

OCCURRENCES_SHOWN = 10


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listed = actions.add_parser("list", help="list schedules by name")
    add_options(listed, universe=EVERY_UNIVERSE)
    shown = actions.add_parser(
        "show", help="show one schedule, its last occurrences and its changes"
    )
    paused = actions.add_parser("pause", help="stop the start of occurrences until `resume`")
    resumed = actions.add_parser(
        "resume", help="continue with the next occurrence; occurrences of the pause are not started"
    )
    run_now = actions.add_parser(
        "run-now", help="start an extra occurrence now; the overlap policy applies"
    )
    backfill = actions.add_parser(
        "backfill", help="start the occurrences of a past time range that were not started"
    )
    deleted = actions.add_parser("delete", help="delete a schedule; its tasks and flows continue")
    for action in (shown, paused, resumed, run_now, backfill, deleted):
        action.add_argument("name", metavar="NAME", help="name of the schedule")
        add_options(action, universe=ONE_UNIVERSE)
    backfill.add_argument(
        "--from",
        dest="start",
        metavar="TIME",
        required=True,
        help="first occurrence at or after TIME, such as 2026-11-01 or 2026-11-01T03:00",
    )
    backfill.add_argument(
        "--to", dest="end", metavar="TIME", required=True, help="last occurrence before TIME"
    )
    backfill.add_argument(
        "--dry-run", action="store_true", help="print the occurrences and change nothing"
    )


def run(args: argparse.Namespace) -> int:
    with open_existing(args) as store:
        if args.action == "list":
            _list(store, args)
            return EXIT_OK
        universe = args.universe or _universe_of(store, args.name)
        actions = {
            "show": _show,
            "pause": _pause,
            "resume": _resume,
            "run-now": _run_now,
            "backfill": _backfill,
            "delete": _delete,
        }
        actions[args.action](store, universe, args)
    return EXIT_OK


def _list(store: Store, args: argparse.Namespace) -> None:
    names = [args.universe] if args.universe else store.read(queries.universes)
    found = [status for name in names for status in store.read(queries.list_schedules, name)]
    several = len({status.universe for status in found}) > 1
    cells: list[list[Any]] = [
        [
            *[status.universe] * several,
            status.name,
            status.every,
            status.zone,
            f"{status.kind} {status.target}",
            status.state,
            status.source,
            _time(status.next_ns),
            _time(status.last_ns),
        ]
        for status in found
    ]
    header = ["universe"] * several + ["schedule", "every", "zone", "starts", "state", "source"]
    text = table([*header, "next", "last"], cells) if found else "no schedules"
    emit(args, {"schedules": [_document(status) for status in found]}, text)


def _show(store: Store, universe: str, args: argparse.Namespace) -> None:
    status: ScheduleStatus = store.read(queries.get_status, universe, args.name)
    occurrences: list[Occurrence] = store.read(
        queries.last_occurrences, universe, args.name, OCCURRENCES_SHOWN
    )
    changes = store.read(queries.list_changes, universe, args.name)
    pairs: list[tuple[str, object]] = [
        ("schedule", status.name),
        ("universe", status.universe),
        ("every", status.every),
        ("zone", status.zone),
        ("missed", status.missed),
        ("overlap", status.overlap),
        ("starts", f"{status.kind} {status.target}"),
        ("state", status.state),
        ("source", status.source),
        ("next", _time(status.next_ns)),
        ("last", _time(status.last_ns)),
        ("queued", status.queued),
        *([("error", status.error)] if status.error else []),
    ]
    lines = [field_lines(pairs)]
    if occurrences:
        rows = [
            (
                time_text(occurrence_ns),
                OccurrenceState(row.state).name.lower(),
                row.cause,
                row.target_id or row.reason or None,
            )
            for occurrence_ns, row in occurrences
        ]
        lines.append(table(("occurrence", "state", "cause", "task, flow or reason"), rows))
    change_rows = [(time_text(row.at_ns), row.action, row.detail or None) for row in changes]
    lines.append(table(("changed", "action", "detail"), change_rows))
    document = _document(status) | {
        "occurrences": msgspec.to_builtins(
            [schedule_documents.occurrence_document(*occurrence) for occurrence in occurrences]
        ),
        "changes": msgspec.to_builtins(
            [schedule_documents.change_document(row) for row in changes]
        ),
    }
    emit(args, document, "\n\n".join(lines))


def _pause(store: Store, universe: str, args: argparse.Namespace) -> None:
    _set_paused(store, universe, args, paused=True)


def _resume(store: Store, universe: str, args: argparse.Namespace) -> None:
    _set_paused(store, universe, args, paused=False)


def _set_paused(store: Store, universe: str, args: argparse.Namespace, *, paused: bool) -> None:
    changed = store.transact(operations.set_paused, universe, args.name, paused, SYSTEM.wall_ns())
    status = store.read(queries.get_status, universe, args.name)
    text = f"{args.name} {'paused' if paused else 'resumed'}" if changed else "unchanged"
    if status.next_ns is not None:
        text += f"; next {time_text(status.next_ns)}"
    emit(args, {"changed": changed, **_document(status)}, text)


def _run_now(store: Store, universe: str, args: argparse.Namespace) -> None:
    used: UsedOccurrence = store.transact(operations.run_now, universe, args.name, SYSTEM.wall_ns())
    document = schedule_documents.occurrence_document(used.occurrence_ns, used.row)
    outcome = document.target or document.reason or "waits for the end of the last one"
    emit(args, msgspec.to_builtins(document), f"{document.state}: {outcome}")


def _backfill(store: Store, universe: str, args: argparse.Namespace) -> None:
    start, end = parse_time("--from", args.start), parse_time("--to", args.end)
    backfill = backfills.dry_run if args.dry_run else backfills.run
    made = backfill(store, universe, args.name, start, end, wall_ns=SYSTEM.wall_ns())
    rows = [(time_text(one.occurrence_ns), one.state, one.target or None) for one in made]
    documents = msgspec.to_builtins([schedule_documents.backfilled_document(one) for one in made])
    text = table(("occurrence", "state", "task or flow"), rows) if rows else "no occurrences"
    emit(args, {"dry_run": args.dry_run, "occurrences": documents}, text)


def _delete(store: Store, universe: str, args: argparse.Namespace) -> None:
    backfills.delete(store, universe, args.name)
    emit(args, {"deleted": args.name}, f"{args.name} deleted")


def _universe_of(store: Store, name: str) -> str:
    """Return the only universe that has a schedule of this name."""
    found: list[str] = [
        status.universe
        for universe in store.read(queries.universes)
        for status in store.read(queries.list_schedules, universe)
        if status.name == name
    ]
    if not found:
        raise NotFound(what="schedule", name=name[:64])
    if len(found) > 1:
        raise Invalid(what="schedule", why="in several universes: give --universe", found=found)
    return found[0]


def _time(time_ns: int | None) -> str | None:
    return None if time_ns is None else time_text(time_ns)


def _document(status: ScheduleStatus) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(schedule_documents.schedule_document(status))
    return document

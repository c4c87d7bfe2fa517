"""`holdfast runs`: lists and shows stage runs and their failed rows; retries, cancels and prunes runs.

A run is identified by its stage name, which means the latest run of that name, or by its id. No command
needs Spark. `retry` and `cancel` only write a request: the driver is the single writer of a run's ledger,
and the live driver or the next one carries the request out.
"""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from holdfast.cli.output import emit, field_lines, printable, table, time_text
from holdfast.cli.store_option import UNIVERSE_OF_STORE, add_options, open_existing, url_of
from holdfast.ledger import failures, run_deletion, runs, summary
from holdfast.ledger.runs import RunRecord
from holdfast.ops import run_documents
from holdfast.ops.run_documents import CLASSES, RunView, class_name, find_run, rate_of
from holdfast.ops.run_retention import RunPolicyRequest, prune_runs
from holdfast.store.api import Store
from holdfast.store.urls import redact

LIST_MAX = 100
ERRORS_MAX = 5
ERROR_CHARS_MAX = 100


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    listed = actions.add_parser("list", help="list the latest run of each stage name")
    listed.add_argument("--after", metavar="NAME", default="", help="list only names after NAME")
    listed.add_argument(
        "--limit",
        metavar="N",
        type=int,
        default=LIST_MAX,
        help=f"list at most N runs (default {LIST_MAX})",
    )
    add_options(listed, universe=UNIVERSE_OF_STORE)

    shown = actions.add_parser("show", help="show counts, calls, errors, output and the next step")
    _add_run(shown)

    failed = actions.add_parser("failed", help="list the failed rows by seq")
    _add_run(failed)
    failed.add_argument(
        "--class", dest="kind", choices=sorted(CLASSES), help="only rows with this error class"
    )
    failed.add_argument(
        "--after", metavar="SEQ", type=int, default=-1, help="list only rows after SEQ"
    )
    failed.add_argument(
        "--limit",
        metavar="N",
        type=int,
        default=LIST_MAX,
        help=f"list at most N rows (default {LIST_MAX})",
    )

    _add_run(actions.add_parser("retry", help="retry the failed rows when the stage runs next"))
    _add_run(actions.add_parser("cancel", help="start no further rows and end the run"))

    pruned = actions.add_parser("prune", help="delete old runs from the store; outputs stay")
    pruned.add_argument("name", metavar="NAME", nargs="?", help="only runs of this stage")
    pruned.add_argument("--keep", metavar="N", type=int, default=run_deletion.KEEP_DEFAULT,
                        help=f"keep the newest N runs of each name (default {run_deletion.KEEP_DEFAULT})")  # fmt: skip
    pruned.add_argument("--older-than", metavar="DAYS", type=float, dest="days",
                        help="delete only runs that ended more than DAYS days ago")  # fmt: skip
    pruned.add_argument(
        "--dry-run", action="store_true", help="print which runs would be deleted, and delete none"
    )
    add_options(pruned, universe=UNIVERSE_OF_STORE)


def run(args: argparse.Namespace) -> int:
    with open_existing(args) as store:
        actions = {"list": _list, "show": _show, "failed": _failed, "retry": _retry,
                   "cancel": _cancel, "prune": _prune}  # fmt: skip
        actions[args.action](store, args)
    return 0


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="stage name (its latest run) or run id")
    add_options(parser, universe=UNIVERSE_OF_STORE)


# -- queries -------------------------------------------------------------------------------------


def _list(store: Store, args: argparse.Namespace) -> None:
    views = store.read(run_documents.latest_runs, args.after, args.limit + 1)
    more, views = len(views) > args.limit, views[: args.limit]
    now_ns = store.now_ns()
    header = ["name", "run", "status", "rows", "done", "failed", "skipped", "rate", "cost", "age"]
    text = table(header, [_cells(view, now_ns) for view in views]) if views else "no runs"
    if more:
        text += f"\n{len(views)} shown; more with: --after {printable(views[-1].record.name)}"
    emit(args, {"runs": [_document(view) for view in views], "more": more}, text)


def _cells(view: RunView, now_ns: int) -> list[object]:
    record, progress, tally = view.record, view.progress, summary.tally_rows(view.progress)
    return [
        record.name,
        record.run_id,
        _status(view),
        record.size,
        tally.succeeded,
        tally.failed,
        tally.skipped,
        summary.rate_text(rate_of(view)),
        summary.cost_text(progress.cost) if progress.cost else None,
        summary.duration_text(now_ns - record.created_ns),
    ]


def _show(store: Store, args: argparse.Namespace) -> None:
    view = store.read(find_run, args.name)
    record, progress = view.record, view.progress
    pairs: list[tuple[str, object]] = [
        ("run", record.name),
        ("id", record.run_id),
        ("status", _status(view)),
        ("rows", f"{record.size:,}: {summary.counts_text(progress)}"),
        ("committed", summary.tally_rows(progress).committed),
        ("calls", summary.calls_text(progress)),
        ("time", summary.times_text(progress)),
        ("rate", summary.rate_text(rate_of(view))),
        ("reclaimed", f"{progress.reclaims:,} leases, {progress.fenced:,} stale reports refused"),
        ("key", ", ".join(record.key) or None),
        ("output", _output_text(record)),
        ("created", time_text(record.created_ns)),
        ("finished", time_text(record.finished_ns) if record.finished_ns else None),
    ]
    older = store.read(runs.progress_of_retried_runs, record)
    if older:
        in_all = f"{summary.counts_text(progress, older)}, retried runs included"
        pairs += [("retry of", record.retry_of), ("in all", in_all)]
    if record.stopped:
        pairs.append(("stopped", record.stopped))
    if record.halted:
        pairs.append(("halted", record.halted))
    if record.retry_requested_ns:
        pairs.append(("retry asked", time_text(record.retry_requested_ns)))
    pairs += [(f"config {name}", value) for name, value in summary.settings(record)]
    lines = [field_lines([(name, _short(value)) for name, value in pairs])]
    if progress.errors:
        lines.append("errors")
        for group in progress.errors[:ERRORS_MAX]:
            text = _first_line(group.text)
            lines.append(
                printable(f"    {group.count:,} × {class_name(group.error_class)}: {text}")
            )
            if group.examples and group.examples[0] != group.text:
                lines.append(printable(f"        such as {_first_line(group.examples[0])}"))
    steps = summary.next_steps(record, progress, store=args.store or "", live=view.live)
    lines.append("next")
    lines += [printable(f"    {step}") for step in steps]
    in_all_document = summary.tally_retry_chain(progress, older)._asdict()
    emit(args, _document(view) | {"next": steps, "in_all": in_all_document}, "\n".join(lines))


def _failed(store: Store, args: argparse.Namespace) -> None:
    view = store.read(find_run, args.name)
    record, progress = view.record, view.progress
    kind = None if args.kind is None else CLASSES[args.kind]
    rows_page = failures.list_failed_rows(
        store, record, progress, limit=args.limit + 1, after=args.after, error_class=kind,
        read_block=run_documents.block_reader(store, record),
    )  # fmt: skip
    more, rows_page = len(rows_page) > args.limit, rows_page[: args.limit]
    header = ("seq", ", ".join(record.key) or "key", "attempts", "class", "error")
    rows = [
        (str(row.seq), row.key, row.attempts, class_name(row.error_class), _first_line(row.error))
        for row in rows_page
    ]
    total = summary.tally_rows(progress).failed
    text = table(header, rows) if rows else f"no failed rows in {printable(record.name)}"
    if more:
        text += (
            f"\n{len(rows_page):,} shown, {total:,} failed; more with --after {rows_page[-1].seq}"
        )
    document = {
        "name": record.name,
        "run_id": record.run_id,
        "failed": total,
        "rows": msgspec.to_builtins([run_documents.row_document(row) for row in rows_page]),
        "more": more,
    }
    emit(args, document, text)


# -- requests to the driver ----------------------------------------------------------------------


def _retry(store: Store, args: argparse.Namespace) -> None:
    record: RunRecord = store.transact(run_documents.request_retry, args.name)
    view = store.read(find_run, record.run_id)
    count = summary.tally_rows(view.progress).failed
    text = (
        f"{count:,} failed rows of {record.name} are marked for retry\n"
        f"next: run the stage {record.name} again on the same input and store ({redact(url_of(args))})"
    )
    emit(args, _document(view) | {"marked": count}, "\n".join(map(printable, text.splitlines())))


def _cancel(store: Store, args: argparse.Namespace) -> None:
    record: RunRecord = store.transact(run_documents.request_cancel, args.name)
    view = store.read(find_run, record.run_id)
    text = (
        f"{record.name} is being cancelled: no further rows start"
        if view.live
        else f"no driver of {record.name} is alive: the run is cancelled when the stage runs next"
    )
    emit(args, _document(view), printable(text))


# -- deletion ------------------------------------------------------------------------------------


def _prune(store: Store, args: argparse.Namespace) -> None:
    request = RunPolicyRequest(args.name, args.keep, args.days, args.dry_run)
    verdicts = [
        msgspec.structs.replace(verdict, why=printable(verdict.why))
        for verdict in prune_runs(store, request)
    ]
    verb = "would be deleted" if args.dry_run else "deleted"
    cells = [
        (one.name, one.run_id, one.status, f"kept: {one.why}" if one.why else verb)
        for one in verdicts
    ]
    text = table(("name", "run", "status", ""), cells) if cells else "no runs"
    count = sum(not one.why for one in verdicts)
    document = {
        "runs": msgspec.to_builtins(verdicts),
        "deleted": 0 if args.dry_run else count,
    }
    emit(args, document, f"{text}\n{count} {verb}")


# -- inside --------------------------------------------------------------------------------------


def _status(view: RunView) -> str:
    """Format the stored status, with whether the run is stopped, to be cancelled or without a driver."""
    record = view.record
    status = record.status.value
    if record.status in runs.UNFINISHED:
        if record.stopped:
            status += ", stopped"
        if record.cancel_requested_ns:
            status += ", to be cancelled"
        if not view.live:
            status += ", no driver"
    return status


def _output_text(record: RunRecord) -> str | None:
    path = record.sink.get("path") or record.sink.get("table", "")
    kind = record.sink.get("kind", "")
    return f"{path} ({kind})" if path else None


def _short(value: object) -> object:
    if not isinstance(value, str) or len(value) <= ERROR_CHARS_MAX:
        return value
    return value[: ERROR_CHARS_MAX - 1] + "…"


def _first_line(text: str) -> str:
    return str(_short((text.splitlines() or [""])[0]))


def _document(view: RunView) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(run_documents.run_document(view))
    return document

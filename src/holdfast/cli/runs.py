"""`holdfast runs`: lists and shows stage runs and their failed rows; retries, cancels and prunes runs.

A run is identified by its stage name, which means the latest run of that name, or by its id. No command
needs Spark. `retry` and `cancel` only write a request: the driver is the single writer of a run's ledger,
and the live driver or the next one carries the request out.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from holdfast.cli.output import emit, field_lines, printable, table, time_text
from holdfast.cli.store_option import add_options, open_existing, url_of
from holdfast.clock import S
from holdfast.durable import lease
from holdfast.errors import HoldfastError, Invalid, NotFound
from holdfast.ledger import failures, run_deletion, runs, summary
from holdfast.ledger.failures import FailedRow
from holdfast.ledger.run_policy import ErrorClass
from holdfast.ledger.runs import RunProgress, RunRecord
from holdfast.store.api import Deferred, Store, Txn
from holdfast.store.urls import redact

LIST_MAX = 100
ERRORS_MAX = 5
ERROR_CHARS_MAX = 100
DAY_NS = 86_400 * S

CLASSES = {kind.name.lower(): kind for kind in ErrorClass if kind is not ErrorClass.NONE}


class NoRun(NotFound):
    hint = "`holdfast runs list` shows the runs of a store"


class RunView(NamedTuple):
    """A run with its progress and driver state."""

    record: RunRecord
    progress: RunProgress
    # Whether a live driver holds the run's lease.
    live: bool


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
    add_options(listed, universe=True)

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
    add_options(pruned, universe=True)


def run(args: argparse.Namespace) -> int:
    with open_existing(args) as store:
        actions = {"list": _list, "show": _show, "failed": _failed, "retry": _retry,
                   "cancel": _cancel, "prune": _prune}  # fmt: skip
        actions[args.action](store, args)
    return 0


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="stage name (its latest run) or run id")
    add_options(parser, universe=True)


# -- queries -------------------------------------------------------------------------------------


def _list(store: Store, args: argparse.Namespace) -> None:
    views = store.read(_latest_runs, args.after, args.limit + 1)
    more, views = len(views) > args.limit, views[: args.limit]
    now_ns = store.now_ns()
    header = ["name", "run", "status", "rows", "done", "failed", "skipped", "rate", "cost", "age"]
    text = table(header, [_cells(view, now_ns) for view in views]) if views else "no runs"
    if more:
        text += f"\n{len(views)} shown; more with: --after {printable(views[-1].record.name)}"
    emit(args, {"runs": [_document(view) for view in views], "more": more}, text)


def _latest_runs(txn: Txn, after: str, limit: int) -> list[RunView]:
    return [_load_run(txn, run_id) for _, run_id in runs.list_names(txn, after, limit)]


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
        summary.rate_text(_rate(view)),
        summary.cost_text(progress.cost) if progress.cost else None,
        summary.duration_text(now_ns - record.created_ns),
    ]


def _show(store: Store, args: argparse.Namespace) -> None:
    view = store.read(_find_run, args.name)
    record, progress = view.record, view.progress
    pairs: list[tuple[str, object]] = [
        ("run", record.name),
        ("id", record.run_id),
        ("status", _status(view)),
        ("rows", f"{record.size:,}: {summary.counts_text(progress)}"),
        ("committed", summary.tally_rows(progress).committed),
        ("calls", summary.calls_text(progress)),
        ("time", summary.times_text(progress)),
        ("rate", summary.rate_text(_rate(view))),
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
                printable(f"    {group.count:,} × {_class_name(group.error_class)}: {text}")
            )
            if group.examples and group.examples[0] != group.text:
                lines.append(printable(f"        such as {_first_line(group.examples[0])}"))
    steps = summary.next_steps(record, progress, store=args.store or "", live=view.live)
    lines.append("next")
    lines += [printable(f"    {step}") for step in steps]
    in_all_document = summary.tally_retry_chain(progress, older)._asdict()
    emit(args, _document(view) | {"next": steps, "in_all": in_all_document}, "\n".join(lines))


def _failed(store: Store, args: argparse.Namespace) -> None:
    view = store.read(_find_run, args.name)
    record, progress = view.record, view.progress
    kind = None if args.kind is None else CLASSES[args.kind]
    rows_page = failures.list_failed_rows(
        store, record, progress, limit=args.limit + 1, after=args.after, error_class=kind,
        read_block=_block_reader(store, record),
    )  # fmt: skip
    more, rows_page = len(rows_page) > args.limit, rows_page[: args.limit]
    header = ("seq", ", ".join(record.key) or "key", "attempts", "class", "error")
    rows = [
        (str(row.seq), row.key, row.attempts, _class_name(row.error_class), _first_line(row.error))
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
        "rows": [_row_document(row) for row in rows_page],
        "more": more,
    }
    emit(args, document, text)


def _block_reader(store: Store, record: RunRecord) -> failures.ReadBlock | None:
    """Return a reader of row keys for a run with a spool. Without access to the spool, keys are not shown."""
    if not record.spool:
        return None
    try:
        from holdfast.spark.run_data import RunInput

        source = RunInput(store, record)
    except ImportError:
        return None

    def read(n: int) -> Any:
        try:
            return source.keys_of_block(n)
        except HoldfastError:
            return None

    return read


# -- requests to the driver ----------------------------------------------------------------------


def _retry(store: Store, args: argparse.Namespace) -> None:
    record: RunRecord = store.transact(_request_retry, args.name)
    view = store.read(_find_run, record.run_id)
    count = summary.tally_rows(view.progress).failed
    text = (
        f"{count:,} failed rows of {record.name} are marked for retry\n"
        f"next: run the stage {record.name} again on the same input and store ({redact(url_of(args))})"
    )
    emit(args, _document(view) | {"marked": count}, "\n".join(map(printable, text.splitlines())))


def _request_retry(txn: Txn, name: str) -> Deferred[RunRecord]:
    return runs.request_retry(txn, _find_run(txn, name).record.run_id)


def _cancel(store: Store, args: argparse.Namespace) -> None:
    record: RunRecord = store.transact(_request_cancel, args.name)
    view = store.read(_find_run, record.run_id)
    text = (
        f"{record.name} is being cancelled: no further rows start"
        if view.live
        else f"no driver of {record.name} is alive: the run is cancelled when the stage runs next"
    )
    emit(args, _document(view), printable(text))


def _request_cancel(txn: Txn, name: str) -> Deferred[RunRecord]:
    return runs.request_cancel(txn, _find_run(txn, name).record.run_id)


# -- deletion ------------------------------------------------------------------------------------


def _prune(store: Store, args: argparse.Namespace) -> None:
    if args.keep < 1 or (args.days is not None and not args.days >= 0):
        raise Invalid(what="prune", why="--keep must be at least 1, --older-than at least 0")
    records = [
        run_record
        for run_record in run_deletion.all_records(store)
        if args.name in (None, run_record.name)
    ]
    if args.name is not None and not records:
        raise NoRun(what="run", name=args.name)
    names = sorted({record.name for record in records})
    before_ns = None if args.days is None else store.now_ns() - int(args.days * DAY_NS)
    live = frozenset(
        name
        for at in range(0, len(names), LIST_MAX)
        for name in store.read(run_deletion.live_names, names[at : at + LIST_MAX])
    )
    verdicts = run_deletion.plan_retention(records, keep=args.keep, before_ns=before_ns, live=live)
    to_delete = [verdict.record for verdict in verdicts if verdict.is_deletable]
    outcomes: dict[str, str] = {}
    objects = _spool_objects(records)
    for name in names:
        run_ids = [record.run_id for record in to_delete if record.name == name]
        if run_ids and not args.dry_run:
            stayed = run_deletion.delete_or_drop_input(store, name, run_ids, objects)
            outcomes |= {run_id: printable(why) for run_id, why in stayed.items()}
    if objects is not None and not args.dry_run:
        deleted_ids = {record.run_id for record in to_delete} - outcomes.keys()
        objects.sweep(
            store, [run_record for run_record in records if run_record.run_id not in deleted_ids]
        )
    rows = [
        {
            "name": record.name,
            "run_id": record.run_id,
            "status": record.status.value,
            "deleted": not reason and not args.dry_run and not outcomes.get(record.run_id),
            "why": reason or outcomes.get(record.run_id, ""),
        }
        for record, reason in verdicts
    ]
    verb = "would be deleted" if args.dry_run else "deleted"
    cells = [
        (row["name"], row["run_id"], row["status"], f"kept: {row['why']}" if row["why"] else verb)
        for row in rows
    ]
    text = table(("name", "run", "status", ""), cells) if cells else "no runs"
    count = sum(not row["why"] for row in rows)
    emit(args, {"runs": rows, "deleted": 0 if args.dry_run else count}, f"{text}\n{count} {verb}")


def _spool_objects(records: list[RunRecord]) -> run_deletion.RunObjects | None:
    """Return the deleter of spool objects; None if no run has a spool, or its library is not installed."""
    if not any(record.spool for record in records):
        return None
    try:
        from holdfast.spark.spool_maintenance import SpoolDeletion
    except ImportError:
        return None
    return SpoolDeletion()


# -- inside --------------------------------------------------------------------------------------


def _find_run(txn: Txn, name: str) -> RunView:
    record = runs.get_latest(txn, name) or runs.get_record(txn, name)
    if record is None:
        raise NoRun(what="run", name=name)
    return _load_run(txn, record.run_id)


def _load_run(txn: Txn, run_id: str) -> RunView:
    record = runs.get_record(txn, run_id)
    if record is None:
        raise NoRun(what="run", run_id=run_id)
    run_lease = lease.current_status(txn, runs.lease_resource(record.name))
    live = run_lease is not None and run_lease.is_live(txn.now_ns, txn.generation)
    return RunView(record, runs.get_progress(txn, run_id) or RunProgress(), live)


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


def _rate(view: RunView) -> float | None:
    """The recent rate of a running run, else the mean rate."""
    of_late = summary.recent_rate(view.progress.series) if view.live else None
    return of_late if of_late is not None else summary.mean_rate(view.progress)


def _output_text(record: RunRecord) -> str | None:
    path = record.sink.get("path") or record.sink.get("table", "")
    kind = record.sink.get("kind", "")
    return f"{path} ({kind})" if path else None


def _class_name(code: int) -> str:
    return next((name for name, kind in CLASSES.items() if kind == code), f"class {code}")


def _short(value: object) -> object:
    if not isinstance(value, str) or len(value) <= ERROR_CHARS_MAX:
        return value
    return value[: ERROR_CHARS_MAX - 1] + "…"


def _first_line(text: str) -> str:
    return str(_short((text.splitlines() or [""])[0]))


def _document(view: RunView) -> dict[str, Any]:
    record, progress, tally = view.record, view.progress, summary.tally_rows(view.progress)
    return {
        "name": record.name,
        "run_id": record.run_id,
        "status": record.status.value,
        "live": view.live,
        "size": record.size,
        **tally._asdict(),
        "calls": progress.calls,
        "reused": progress.reused,
        "retries": progress.retries,
        "reclaims": progress.reclaims,
        "fenced": progress.fenced,
        "cost": progress.cost,
        "rate_per_s": _rate(view),
        "time_ns": summary.elapsed_ns(progress),
        "setup_ns": progress.setup_ns,
        "calls_ns": progress.calls_ns,
        "failed_by_class": {
            _class_name(code): rows for code, rows in enumerate(progress.failed_by_class) if rows
        },
        "key": record.key,
        "output": record.sink,
        "config": record.config,
        "created_ns": record.created_ns,
        "updated_ns": progress.updated_ns,
        "finished_ns": record.finished_ns,
        "halted": record.halted,
        "stopped": record.stopped,
        "retry_of": record.retry_of,
        "cancel_requested_ns": record.cancel_requested_ns,
        "retry_requested_ns": record.retry_requested_ns,
        "errors": [
            {
                "class": _class_name(group.error_class),
                "error": group.text,
                "count": group.count,
                "rows": group.rows,
                "examples": group.examples,
            }
            for group in progress.errors
        ],
    }


def _row_document(row: FailedRow) -> dict[str, Any]:
    return row._asdict() | {"error_class": _class_name(row.error_class)}

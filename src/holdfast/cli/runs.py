"""`holdfast runs`: the stages that ran, how each one stands, what failed in it, and what to do then.

A run is named as its stage is, which means the latest run of that name, or by its id. Looking needs
no Spark. `retry` and `cancel` write a wish: a run's ledger has one writer, which is its driver, and
the wish is honoured by the driver that is alive or else by the next one.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from holdfast.cli.output import emit, fields, printable, table, time_text
from holdfast.cli.target import add_options, existing, url_of
from holdfast.clock import S
from holdfast.durable import lease
from holdfast.errors import HoldfastError, Invalid, NotFound
from holdfast.ledger import failures, prune, runs, summary
from holdfast.ledger.classes import ErrorClass
from holdfast.ledger.failures import FailedRow
from holdfast.ledger.runs import Progress, RunRecord
from holdfast.store.api import Pending, Store, Txn
from holdfast.store.urls import shown

LIST_MAX = 100
ERRORS_MAX = 5
ERROR_CHARS_MAX = 100
DAY_NS = 86_400 * S

CLASSES = {kind.name.lower(): kind for kind in ErrorClass if kind is not ErrorClass.NONE}


class NoRun(NotFound):
    hint = "`holdfast runs list` shows the runs of a store"


class Seen(NamedTuple):
    """A run at one moment."""

    record: RunRecord
    progress: Progress
    # Whether a driver holds the run's lease.
    live: bool


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    listed = actions.add_parser("list", help="the latest run of each name")
    listed.add_argument("--after", metavar="NAME", default="", help="begin after this name")
    listed.add_argument("--limit", metavar="N", type=int, default=LIST_MAX, help=f"{LIST_MAX}")
    add_options(listed, universe=True)

    shown = actions.add_parser("show", help="counts, calls, errors, output, and the next step")
    _add_run(shown)

    failed = actions.add_parser("failed", help="the rows that failed, by seq")
    _add_run(failed)
    failed.add_argument("--class", dest="kind", choices=sorted(CLASSES), help="of this class only")
    failed.add_argument("--after", metavar="SEQ", type=int, default=-1, help="begin after this one")
    failed.add_argument("--limit", metavar="N", type=int, default=LIST_MAX, help=f"{LIST_MAX}")

    _add_run(actions.add_parser("retry", help="failed rows run again when the stage does"))
    _add_run(actions.add_parser("cancel", help="begin no row any more, and end the run"))

    pruned = actions.add_parser("prune", help="delete old runs from the store; outputs stay")
    pruned.add_argument("name", metavar="NAME", nargs="?", help="of this stage only")
    pruned.add_argument("--keep", metavar="N", type=int, default=prune.KEEP,
                        help=f"keep the newest N runs of each name ({prune.KEEP})")  # fmt: skip
    pruned.add_argument("--older-than", metavar="DAYS", type=float, dest="days",
                        help="delete only runs that ended more than DAYS days ago")  # fmt: skip
    pruned.add_argument("--dry-run", action="store_true", help="show what would be deleted")
    add_options(pruned, universe=True)


def run(args: argparse.Namespace) -> int:
    with existing(args) as store:
        actions = {"list": _list, "show": _show, "failed": _failed, "retry": _retry,
                   "cancel": _cancel, "prune": _prune}  # fmt: skip
        actions[args.action](store, args)
    return 0


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="of the stage, or a run's id")
    add_options(parser, universe=True)


# -- looking -------------------------------------------------------------------------------------


def _list(store: Store, args: argparse.Namespace) -> None:
    found = store.read(_page, args.after, args.limit + 1)
    more, found = len(found) > args.limit, found[: args.limit]
    now_ns = store.now_ns()
    header = ["name", "run", "status", "rows", "done", "failed", "skipped", "rate", "cost", "age"]
    text = table(header, [_cells(seen, now_ns) for seen in found]) if found else "no runs"
    if more:
        text += f"\n{len(found)} shown; more with: --after {printable(found[-1].record.name)}"
    emit(args, {"runs": [_document(seen) for seen in found], "more": more}, text)


def _page(txn: Txn, after: str, limit: int) -> list[Seen]:
    return [_seen(txn, run_id) for _, run_id in runs.names(txn, after, limit)]


def _cells(seen: Seen, now_ns: int) -> list[object]:
    record, progress, tally = seen.record, seen.progress, summary.tally(seen.progress)
    return [
        record.name,
        record.run_id,
        _status(seen),
        record.size,
        tally.succeeded,
        tally.failed,
        tally.skipped,
        summary.rate_text(_rate(seen)),
        summary.cost_text(progress.cost) if progress.cost else None,
        summary.duration_text(now_ns - record.created_ns),
    ]


def _show(store: Store, args: argparse.Namespace) -> None:
    seen = store.read(_found, args.name)
    record, progress = seen.record, seen.progress
    pairs: list[tuple[str, object]] = [
        ("run", record.name),
        ("id", record.run_id),
        ("status", _status(seen)),
        ("rows", f"{record.size:,}: {summary.counts_text(progress)}"),
        ("committed", summary.tally(progress).committed),
        ("calls", summary.calls_text(progress)),
        ("time", summary.times_text(progress)),
        ("rate", summary.rate_text(_rate(seen))),
        ("reclaimed", f"{progress.reclaims:,} leases, {progress.fenced:,} stale reports refused"),
        ("key", ", ".join(record.key) or None),
        ("output", _output(record)),
        ("created", time_text(record.created_ns)),
        ("finished", time_text(record.finished_ns) if record.finished_ns else None),
    ]
    older = store.read(runs.older_progress, record)
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
    lines = [fields([(name, _short(value)) for name, value in pairs])]
    if progress.errors:
        lines.append("errors")
        for group in progress.errors[:ERRORS_MAX]:
            text = _first_line(group.text)
            lines.append(printable(f"    {group.count:,} × {_class(group.error_class)}: {text}"))
            if group.examples and group.examples[0] != group.text:
                lines.append(printable(f"        such as {_first_line(group.examples[0])}"))
    steps = summary.next_steps(record, progress, store=args.store or "", live=seen.live)
    lines.append("next")
    lines += [printable(f"    {step}") for step in steps]
    in_all_document = summary.tally_of_all(progress, older)._asdict()
    emit(args, _document(seen) | {"next": steps, "in_all": in_all_document}, "\n".join(lines))


def _failed(store: Store, args: argparse.Namespace) -> None:
    seen = store.read(_found, args.name)
    record, progress = seen.record, seen.progress
    kind = None if args.kind is None else CLASSES[args.kind]
    found = failures.failed(
        store, record, progress, limit=args.limit + 1, after=args.after, error_class=kind,
        read_block=_block_reader(store, record),
    )  # fmt: skip
    more, found = len(found) > args.limit, found[: args.limit]
    header = ("seq", ", ".join(record.key) or "key", "attempts", "class", "error")
    rows = [
        (str(row.seq), row.key, row.attempts, _class(row.error_class), _first_line(row.error))
        for row in found
    ]
    total = summary.tally(progress).failed
    text = table(header, rows) if rows else f"no failed rows in {printable(record.name)}"
    if more:
        text += f"\n{len(found):,} shown, {total:,} failed; more with --after {found[-1].seq}"
    document = {
        "name": record.name,
        "run_id": record.run_id,
        "failed": total,
        "rows": [_row_document(row) for row in found],
        "more": more,
    }
    emit(args, document, text)


def _block_reader(store: Store, record: RunRecord) -> failures.ReadBlock | None:
    """For a run with a spool: reads keys there. Where it cannot be reached keys are not shown."""
    if not record.spool:
        return None
    try:
        from holdfast.spark.journal import Input

        source = Input(store, record)
    except ImportError:
        return None

    def read(n: int) -> Any:
        try:
            return source.keys_of_block(n)
        except HoldfastError:
            return None

    return read


# -- wishes --------------------------------------------------------------------------------------


def _retry(store: Store, args: argparse.Namespace) -> None:
    record: RunRecord = store.transact(_wish_retry, args.name)
    seen = store.read(_found, record.run_id)
    count = summary.tally(seen.progress).failed
    text = (
        f"{count:,} failed rows of {record.name} are marked for another try\n"
        f"next: run the stage {record.name} again on the same input and store ({shown(url_of(args))})"
    )
    emit(args, _document(seen) | {"marked": count}, "\n".join(map(printable, text.splitlines())))


def _wish_retry(txn: Txn, name: str) -> Pending[RunRecord]:
    return runs.request_retry(txn, _found(txn, name).record.run_id)


def _cancel(store: Store, args: argparse.Namespace) -> None:
    record: RunRecord = store.transact(_wish_cancel, args.name)
    seen = store.read(_found, record.run_id)
    text = (
        f"{record.name} is being cancelled: no row is begun any more"
        if seen.live
        else f"no driver of {record.name} is alive: it is cancelled when the stage is next run"
    )
    emit(args, _document(seen), printable(text))


def _wish_cancel(txn: Txn, name: str) -> Pending[RunRecord]:
    return runs.request_cancel(txn, _found(txn, name).record.run_id)


# -- deletion ------------------------------------------------------------------------------------


def _prune(store: Store, args: argparse.Namespace) -> None:
    if args.keep < 1 or (args.days is not None and not args.days >= 0):
        raise Invalid(what="prune", why="--keep is at least 1, --older-than at least 0")
    records = [one for one in prune.all_records(store) if args.name in (None, one.name)]
    if args.name is not None and not records:
        raise NoRun(what="run", name=args.name)
    names = sorted({record.name for record in records})
    before_ns = None if args.days is None else store.now_ns() - int(args.days * DAY_NS)
    live = frozenset(
        name
        for at in range(0, len(names), LIST_MAX)
        for name in store.read(prune.live_names, names[at : at + LIST_MAX])
    )
    verdicts = prune.judge(records, keep=args.keep, before_ns=before_ns, live=live)
    going = [verdict.record for verdict in verdicts if verdict.goes]
    outcomes: dict[str, str] = {}
    objects = _spool_objects(records)
    for name in names:
        mine = [record.run_id for record in going if record.name == name]
        if mine and not args.dry_run:
            stayed = prune.prune(store, name, mine, objects)
            outcomes |= {run_id: printable(why) for run_id, why in stayed.items()}
    if objects is not None and not args.dry_run:
        gone = {record.run_id for record in going} - outcomes.keys()
        objects.sweep(store, [one for one in records if one.run_id not in gone])
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
    did = "would be deleted" if args.dry_run else "deleted"
    cells = [
        (row["name"], row["run_id"], row["status"], f"kept: {row['why']}" if row["why"] else did)
        for row in rows
    ]
    text = table(("name", "run", "status", ""), cells) if cells else "no runs"
    count = sum(not row["why"] for row in rows)
    emit(args, {"runs": rows, "deleted": 0 if args.dry_run else count}, f"{text}\n{count} {did}")


def _spool_objects(records: list[RunRecord]) -> prune.Objects | None:
    """What deletes objects of spools; None if no run has one, or if there is no library for it."""
    if not any(record.spool for record in records):
        return None
    try:
        from holdfast.spark.spool_upkeep import Deletion
    except ImportError:
        return None
    return Deletion()


# -- inside --------------------------------------------------------------------------------------


def _found(txn: Txn, name: str) -> Seen:
    record = runs.latest(txn, name) or runs.get(txn, name)
    if record is None:
        raise NoRun(what="run", name=name)
    return _seen(txn, record.run_id)


def _seen(txn: Txn, run_id: str) -> Seen:
    record = runs.get(txn, run_id)
    if record is None:
        raise NoRun(what="run", run_id=run_id)
    held = lease.current(txn, runs.lease_resource(record.name))
    live = held is not None and held.live(txn.now_ns, txn.generation)
    return Seen(record, runs.progress(txn, run_id) or Progress(), live)


def _status(seen: Seen) -> str:
    """The stored one, and what it does not say: that nobody works on it, that it shall end."""
    record = seen.record
    status = record.status.value
    if record.status in runs.GOING:
        if record.stopped:
            status += ", stopped"
        if record.cancel_requested_ns:
            status += ", to be cancelled"
        if not seen.live:
            status += ", no driver"
    return status


def _rate(seen: Seen) -> float | None:
    """Of late while it runs, else over all."""
    of_late = summary.pace_of(seen.progress.series) if seen.live else None
    return of_late if of_late is not None else summary.mean_rate(seen.progress)


def _output(record: RunRecord) -> str | None:
    path = record.sink.get("path") or record.sink.get("table", "")
    kind = record.sink.get("kind", "")
    return f"{path} ({kind})" if path else None


def _class(code: int) -> str:
    return next((name for name, kind in CLASSES.items() if kind == code), f"class {code}")


def _short(value: object) -> object:
    if not isinstance(value, str) or len(value) <= ERROR_CHARS_MAX:
        return value
    return value[: ERROR_CHARS_MAX - 1] + "…"


def _first_line(text: str) -> str:
    return str(_short((text.splitlines() or [""])[0]))


def _document(seen: Seen) -> dict[str, Any]:
    record, progress, tally = seen.record, seen.progress, summary.tally(seen.progress)
    return {
        "name": record.name,
        "run_id": record.run_id,
        "status": record.status.value,
        "live": seen.live,
        "size": record.size,
        **tally._asdict(),
        "calls": progress.calls,
        "reused": progress.reused,
        "retries": progress.retries,
        "reclaims": progress.reclaims,
        "fenced": progress.fenced,
        "cost": progress.cost,
        "rate_per_s": _rate(seen),
        "time_ns": summary.took_ns(progress),
        "setup_ns": progress.setup_ns,
        "calls_ns": progress.calls_ns,
        "failed_by_class": {
            _class(code): rows for code, rows in enumerate(progress.failed_by_class) if rows
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
                "class": _class(group.error_class),
                "error": group.text,
                "count": group.count,
                "rows": group.rows,
                "examples": group.examples,
            }
            for group in progress.errors
        ],
    }


def _row_document(row: FailedRow) -> dict[str, Any]:
    return row._asdict() | {"error_class": _class(row.error_class)}

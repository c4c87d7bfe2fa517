"""`holdfast jobs`: lists jobs, starts an action on a selection of subjects, changes its pace and cancels it.

A server of the store runs the jobs, so a job starts only while one runs.
"""

from __future__ import annotations

import argparse

import msgspec

from holdfast.cli import EXIT_OK
from holdfast.cli.output import emit, table, time_text
from holdfast.cli.store_option import add_options, open_existing
from holdfast.cli.why import universe_of
from holdfast.errors import Invalid
from holdfast.ops import audit
from holdfast.ops.api.jobs import job_document
from holdfast.ops.jobs import model, steps
from holdfast.ops.jobs.model import RATE_PER_S, Job, JobRow, selection_text
from holdfast.store.api import Store, Txn

LIST_MAX = 20
# The actor of audit entries of this command.
ACTOR = "command line"


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listed = actions.add_parser("list", help="list jobs, newest first")
    listed.add_argument(
        "--limit", metavar="N", type=int, default=LIST_MAX,
        help=f"list at most N jobs (default {LIST_MAX})",
    )  # fmt: skip
    started = actions.add_parser("start", help="apply an action to a selection of subjects")
    started.add_argument("name", metavar="NAME", help="the action, such as flows.cancel")
    started.add_argument(
        "selection", metavar="FILTER=VALUE", nargs="+", help="the selection, such as state=failed"
    )
    started.add_argument(
        "--rate", metavar="N", type=float, default=RATE_PER_S,
        help=f"process at most N subjects a second (default {RATE_PER_S:g})",
    )  # fmt: skip
    started.add_argument(
        "--limit", metavar="N", type=int, default=0, help="process at most N subjects"
    )
    paced = actions.add_parser("pace", help="change the pace of a job")
    cancelled = actions.add_parser("cancel", help="end a job; processed subjects stay so")
    for action in (paced, cancelled):
        action.add_argument("job", metavar="JOB", type=int, help="number of the job")
    paced.add_argument("rate", metavar="N", type=float, help="subjects a second")
    for action in (listed, started, paced, cancelled):
        action.add_argument("--universe", metavar="U", help="universe, if the store has several")
        add_options(action)


def run(args: argparse.Namespace) -> int:
    with open_existing(args) as store:
        universe = universe_of(store, args, "jobs")
        if args.action == "list":
            return _list(store, universe, args)
        change = {"start": _start, "pace": _pace, "cancel": _cancel}[args.action]
        job: Job = store.transact(change, universe, args)
        emit(args, msgspec.to_builtins(job_document(job)), _text(job))
    return EXIT_OK


def _list(store: Store, universe: str, args: argparse.Namespace) -> int:
    jobs: list[Job] = store.read(model.list_jobs, universe, None, args.limit)
    documents = [job_document(job) for job in jobs]
    header = ("job", "action", "selection", "state", "processed", "refused", "created")
    cells = [
        (one.id, one.action, selection_text(one.selection), one.state, one.processed, one.refused,
         time_text(one.created_ns))
        for one in documents
    ]  # fmt: skip
    text = table(header, cells) if cells else "no jobs"
    emit(args, {"universe": universe, "jobs": msgspec.to_builtins(documents)}, text)
    return EXIT_OK


def _start(txn: Txn, universe: str, args: argparse.Namespace) -> Job:
    selection = dict(_parse(text) for text in args.selection)
    row = JobRow(args.name, selection, ACTOR, 0, rate_per_s=args.rate, limit=args.limit)
    job = model.create(txn, universe, steps.prepare(txn, universe, row))
    detail = f"{args.name} {selection_text(selection)}"[:1_000]
    audit.record(txn, universe, ACTOR, "jobs.start", f"job/{job.number}", detail)
    return job


def _pace(txn: Txn, universe: str, args: argparse.Namespace) -> Job:
    job = model.set_rate(txn, universe, args.job, args.rate)
    audit.record(txn, universe, ACTOR, "jobs.pace", f"job/{args.job}", f"{args.rate:g} per second")
    return job


def _cancel(txn: Txn, universe: str, args: argparse.Namespace) -> Job:
    job, _ = model.cancel(txn, universe, args.job)
    audit.record(txn, universe, ACTOR, "jobs.cancel", f"job/{args.job}")
    return job


def _parse(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise Invalid(what="selection", found=text[:64], expected="FILTER=VALUE")
    return name, value


def _text(job: Job) -> str:
    document = job_document(job)
    return (
        f"job {job.id}: {document.action} {selection_text(document.selection)} is {document.state}"
    )

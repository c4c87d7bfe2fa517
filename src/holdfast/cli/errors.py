"""`holdfast errors`: lists groups of failed work with the same error, and redrives or drops a whole group."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import msgspec

from holdfast.cli import EXIT_OK, selection
from holdfast.cli.output import emit, field_lines, table, time_text
from holdfast.cli.store_option import add_options, open_existing
from holdfast.cli.why import universe_of
from holdfast.durable import error_groups
from holdfast.durable.error_groups import DEAD, KINDS, Member
from holdfast.errors import Invalid
from holdfast.ops import audit, error_group_documents
from holdfast.ops.error_group_documents import ErrorGroupDocument, ErrorSubjectDocument
from holdfast.store.api import Store, Txn

LIST_MAX = 20
PAGE = 500
# The actor of audit entries of this command.
ACTOR = "command line"


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listed = actions.add_parser("list", help="list groups of errors, the largest first")
    listed.add_argument("--kind", choices=KINDS, help="only groups of tasks, flows or dead letters")
    shown = actions.add_parser("show", help="show a group and its oldest subjects")
    redriven = actions.add_parser("redrive", help="redrive the tasks, flows or letters of a group")
    dropped = actions.add_parser("drop", help="delete the dead letters of a group permanently")
    for action in (shown, redriven, dropped):
        action.add_argument("kind", metavar="KIND", choices=KINDS, help=", ".join(KINDS))
        action.add_argument("group", metavar="GROUP", help="id of the group, as `list` prints it")
    for action in (redriven, dropped):
        action.add_argument("--limit", metavar="N", type=int, help="process at most N subjects")
        selection.add_rate(action, "subjects")
        selection.add_dry_run(action, "subjects")
    for action in (listed, shown):
        action.add_argument(
            "--limit", metavar="N", type=int, default=LIST_MAX,
            help=f"list at most N (default {LIST_MAX})",
        )  # fmt: skip
    for action in (listed, shown, redriven, dropped):
        action.add_argument("--universe", metavar="U", help="universe, if the store has several")
        add_options(action)


def run(args: argparse.Namespace) -> int:
    if args.limit is not None and args.limit < 1:
        raise Invalid(what="--limit", found=args.limit, min=1)
    with open_existing(args) as store:
        universe = universe_of(store, args, "errors")
        if args.action == "list":
            return _list(store, universe, args)
        return (
            _show(store, universe, args) if args.action == "show" else _act(store, universe, args)
        )


def _list(store: Store, universe: str, args: argparse.Namespace) -> int:
    kinds = (args.kind,) if args.kind else KINDS

    def read(txn: Txn) -> list[ErrorGroupDocument]:
        found = error_groups.list_groups(txn, universe, kinds)[: args.limit]
        return [error_group_documents.group_document(txn, universe, one) for one in found]

    documents = store.read(read)
    cells = [
        (one.kind, one.count, time_text(one.newest_ns), one.group, one.text) for one in documents
    ]
    text = table(("kind", "count", "newest", "group", "error"), cells) if cells else "no errors"
    emit(args, {"universe": universe, "errors": msgspec.to_builtins(documents)}, text)
    return EXIT_OK


def _show(store: Store, universe: str, args: argparse.Namespace) -> int:
    def read(txn: Txn) -> tuple[ErrorGroupDocument, list[ErrorSubjectDocument]]:
        found = error_group_documents.existing_group(txn, universe, args.kind, args.group)
        group = error_group_documents.parse_group(args.group)
        members = error_groups.list_members(txn, universe, args.kind, group, b"", args.limit)
        subjects = [
            error_group_documents.subject_document(txn, universe, args.kind, member)
            for member in members
        ]
        return error_group_documents.group_document(txn, universe, found), subjects

    group, subjects = store.read(read)
    pairs = [
        ("error", group.text),
        ("count", f"{group.count} of kind {group.kind}"),
        ("oldest", time_text(group.oldest_ns)),
        ("newest", time_text(group.newest_ns)),
    ]
    cells = [(one.id or f"{one.queue} {one.seq}", time_text(one.at_ns)) for one in subjects]
    document = {"group": msgspec.to_builtins(group), "subjects": msgspec.to_builtins(subjects)}
    emit(args, document, field_lines(pairs) + "\n\n" + table(("subject", "time"), cells))
    return EXIT_OK


def _act(store: Store, universe: str, args: argparse.Namespace) -> int:
    selection.check_rate(args)
    if args.action == "drop" and args.kind != DEAD:
        raise Invalid(what="kind", found=args.kind, why="only dead letters are dropped")
    store.read(error_group_documents.existing_group, universe, args.kind, args.group)
    pages = selection.limited(_pages(store, universe, args), args.limit)
    if args.dry_run:
        names = ["/".join(map(str, one.subject)) for page in pages for one in page]
        text = "\n".join([*names, f"{len(names):,} subjects (dry run, nothing was changed)"])
        emit(args, {f"would_{args.action}": names}, text)
        return EXIT_OK

    def commit(txn: Txn, members: list[Member]) -> None:
        subjects = [member.subject for member in members]
        if args.action == "drop":
            error_group_documents.drop_within(txn, universe, subjects)
        else:
            error_group_documents.redrive_within(txn, universe, args.kind, subjects)
        subject, detail = f"errors/{args.kind}/{args.group}", f"{len(members)} subjects"
        audit.record(txn, universe, ACTOR, f"errors.{args.action}", subject, detail)

    def apply(members: list[Member]) -> list[None]:
        store.transact(commit, members)
        return [None] * len(members)

    result = selection.process_selected(
        pages, apply, rate_per_s=args.rate, explicit=False, collect_refused=True
    )
    refused = [
        {"subject": "/".join(map(str, one.subject)), "why": why} for one, why in result.refused
    ]
    verb = "dropped" if args.action == "drop" else "redriven"
    document: dict[str, Any] = {verb: len(result.made), "refused": refused}
    lines = [
        f"{len(result.made):,} {verb}",
        *(f"{one['subject']}: {one['why']}" for one in refused),
    ]
    return selection.print_result(
        args, result, document, lines, stopped_text="the rest is unchanged", empty_text="none"
    )


def _pages(store: Store, universe: str, args: argparse.Namespace) -> Iterator[list[Member]]:
    """Yield pages of the subjects that were in the group at the start."""
    group = error_group_documents.parse_group(args.group)
    until_ns, after = store.now_ns(), b""
    while True:
        page = store.read(error_groups.list_members, universe, args.kind, group, after, PAGE)
        yield [member for member in page if member.at_ns <= until_ns]
        if len(page) < PAGE:
            return
        after = page[-1].position

"""`holdfast budgets`: lists accounts with their limits and their costs by day and model, and sets limits."""

from __future__ import annotations

import argparse

import msgspec

from holdfast.cli import EXIT_OK
from holdfast.cli.output import emit, table, time_text
from holdfast.cli.store_option import add_options, open_existing
from holdfast.cli.why import universe_of
from holdfast.effects import budget, daily_costs
from holdfast.effects.daily_costs import DAY_NS, KEPT_DAYS, DaySpending
from holdfast.errors import Invalid
from holdfast.ops import audit
from holdfast.ops.api.budgets import DAYS, BudgetDocument, budget_document, day_document, stage_days
from holdfast.store.api import Store, Txn

LIST_MAX = 100
# The actor of audit entries of this command.
ACTOR = "command line"


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listed = actions.add_parser("list", help="list the accounts that have a limit or had a call")
    listed.add_argument(
        "--limit", metavar="N", type=int, default=LIST_MAX,
        help=f"list at most N accounts (default {LIST_MAX})",
    )  # fmt: skip
    days = actions.add_parser("days", help="list what an account spent by day and model")
    days.add_argument(
        "--scope", metavar="ID", default="", help="world or flow (default: the whole universe)"
    )
    days.add_argument("--stage", metavar="NAME", default="", help="a stage instead of an account")
    days.add_argument(
        "--days", metavar="N", type=int, default=DAYS,
        help=f"the last N days, at most {KEPT_DAYS} (default {DAYS})",
    )  # fmt: skip
    limited = actions.add_parser("limit", help="set the limit of an account, or remove it")
    limited.add_argument("unit", choices=budget.UNITS, help=" or ".join(budget.UNITS))
    limited.add_argument(
        "amount",
        metavar="AMOUNT",
        help="tokens, or millionths of the currency; `none` removes the limit",
    )
    limited.add_argument(
        "--scope", metavar="ID", default="", help="world or flow (default: the whole universe)"
    )
    for action in (listed, days, limited):
        action.add_argument("--universe", metavar="U", help="universe, if the store has several")
        add_options(action)


def run(args: argparse.Namespace) -> int:
    with open_existing(args) as store:
        # Stages belong to no universe.
        is_stage = args.action == "days" and args.stage
        universe = "" if is_stage else universe_of(store, args, "budgets")
        return {"list": _list, "days": _days, "limit": _limit}[args.action](store, universe, args)


def _list(store: Store, universe: str, args: argparse.Namespace) -> int:
    def read(txn: Txn) -> list[BudgetDocument]:
        names = budget.list_accounts(txn, universe, None, args.limit)
        return [
            budget_document(scope, unit, budget.account(txn, universe, scope, unit))
            for scope, unit in names
        ]

    rows = store.read(read)
    cells = [
        (one.scope or "(universe)", one.unit, one.spent, one.reserved, one.limit) for one in rows
    ]
    text = (
        table(("account", "unit", "spent", "reserved", "limit"), cells) if cells else "no budgets"
    )
    emit(args, {"universe": universe, "budgets": msgspec.to_builtins(rows)}, text)
    return EXIT_OK


def _limit(store: Store, universe: str, args: argparse.Namespace) -> int:
    if args.amount != "none" and not (args.amount.isascii() and args.amount.isdigit()):
        raise Invalid(what="amount", found=args.amount[:64], expected="a number or none")
    amount = None if args.amount == "none" else int(args.amount)

    def change(txn: Txn) -> BudgetDocument:
        account = budget.set_limit.fn(txn, universe, args.scope, args.unit, amount)
        audit.record(
            txn, universe, ACTOR, "budgets.limit", f"budget/{args.scope}", f"{args.unit} {amount}"
        )
        return budget_document(args.scope, args.unit, account)

    document: BudgetDocument = store.transact(change)
    text = f"{args.scope or '(universe)'} {args.unit}: limit {args.amount}"
    emit(args, msgspec.to_builtins(document), text)
    return EXIT_OK


def _days(store: Store, universe: str, args: argparse.Namespace) -> int:
    if not 1 <= args.days <= KEPT_DAYS:
        raise Invalid(what="--days", found=args.days, min=1, max=KEPT_DAYS)
    if args.scope and args.stage:
        raise Invalid(what="--stage", why="a stage has no scope", found=args.scope[:64])

    def read(txn: Txn) -> list[DaySpending]:
        last = txn.now_ns // DAY_NS
        first = last - args.days + 1
        if args.stage:
            return stage_days(txn, args.stage, first, last)
        return daily_costs.list_days(txn, universe, args.scope, first, last)

    rows = store.read(read)
    cells = [
        (time_text(one.day * DAY_NS)[:10], one.model or None, one.unit, one.amount) for one in rows
    ]
    text = table(("day", "model", "unit", "spent"), cells) if cells else "nothing was spent"
    documents = msgspec.to_builtins([day_document(one) for one in rows])
    emit(args, {"universe": universe, "days": documents}, text)
    return EXIT_OK

"""The endpoints of budgets. Amounts are tokens, or millionths of the currency."""

from __future__ import annotations

import msgspec

from holdfast.effects import budget, daily_costs
from holdfast.effects.budget import BudgetAccount
from holdfast.effects.daily_costs import DAY_NS, KEPT_DAYS, DaySpending
from holdfast.errors import Invalid
from holdfast.ledger import stage_costs
from holdfast.ops.api import cursors
from holdfast.ops.api.call import ApiCall
from holdfast.ops.api.endpoint import (
    Endpoint,
    EndpointOptions,
    Page,
    PageQuery,
    RequestModel,
    Scope,
)
from holdfast.store.api import Txn

DAYS = 7


class BudgetLimitBody(RequestModel):
    """`scope` is the id of a world or a flow, `*` for each of them, or empty for the universe. A null `amount`
    removes the limit. `unit` is `money` or `tokens`."""

    unit: str
    amount: int | None
    scope: str = ""


class DaySpendingQuery(PageQuery):
    """Days since 1970, by default the last seven, at most 100. `scope` is that of a budget; empty for the universe, whose
    account has the calls of all worlds and flows. `stage` is the name of a stage of this store, instead of a scope."""

    scope: str = ""
    stage: str = ""
    first_day: int = 0
    last_day: int = 0


class DaySpendingDocument(msgspec.Struct, frozen=True):
    """What the calls of an account to one model spent on a day. `model` is null for calls without a model, and for a stage.
    `scope` is empty for a stage."""

    day: int
    scope: str
    model: str | None
    unit: str
    spent: int


class BudgetDocument(msgspec.Struct, frozen=True):
    """An account. `remaining` is null without a limit."""

    scope: str
    unit: str
    spent: int
    reserved: int
    limit: int | None
    remaining: int | None


def list_budgets(call: ApiCall) -> Page[BudgetDocument]:
    limit = cursors.page_limit(call.query)
    after = cursors.decode(call.query.cursor, tuple[str, str])

    def read(txn: Txn) -> list[BudgetDocument]:
        names = budget.list_accounts(txn, call.universe, after, limit + 1)
        return [
            budget_document(scope, unit, budget.account(txn, call.universe, scope, unit))
            for scope, unit in names
        ]

    found = call.read(read)
    last = (found[limit - 1].scope, found[limit - 1].unit) if len(found) > limit else None
    return Page(items=found[:limit], next=cursors.encode(last) if last else None)


def list_budget_days(call: ApiCall) -> Page[DaySpendingDocument]:
    query: DaySpendingQuery = call.query
    limit, start = cursors.page_limit(query), cursors.decode(query.cursor, int) or 0

    if query.scope and query.stage:
        raise Invalid(what="stage", why="a stage has no scope", found=query.scope[:64])

    def read(txn: Txn) -> list[DaySpending]:
        last = query.last_day or txn.now_ns // DAY_NS
        first = query.first_day or max(last - DAYS + 1, 0)
        if not 0 <= last - first < KEPT_DAYS or first < 0:
            raise Invalid(what="days", found=[first, last], days_max=KEPT_DAYS)
        if query.stage:
            return stage_days(txn, query.stage, first, last)
        return daily_costs.list_days(txn, call.universe, query.scope, first, last)

    found = call.read(read)
    items = [day_document(one) for one in found[start : start + limit]]
    more = len(found) > start + limit
    return Page(items=items, next=cursors.encode(start + limit) if more else None)


def limit_budget(call: ApiCall) -> BudgetDocument:
    body: BudgetLimitBody = call.body
    account: BudgetAccount = call.transact(
        budget.set_limit,
        call.universe,
        body.scope,
        body.unit,
        body.amount,
        subject=f"budget/{body.scope}",
        detail=f"{body.unit} {body.amount}",
    )
    return budget_document(body.scope, body.unit, account)


def stage_days(txn: Txn, stage: str, first: int, last: int) -> list[DaySpending]:
    found = stage_costs.list_days(txn, stage, first, last)
    return [DaySpending(one.day, "", "", one.unit, one.amount) for one in found]


def day_document(row: DaySpending) -> DaySpendingDocument:
    return DaySpendingDocument(row.day, row.scope, row.model or None, row.unit, row.amount)


def budget_document(scope: str, unit: str, account: BudgetAccount) -> BudgetDocument:
    return BudgetDocument(
        scope, unit, account.spent, account.reserved, account.limit, account.remaining()
    )


ENDPOINTS = (
    Endpoint("GET", "/v1/budgets", Scope.READ, list_budgets, Page[BudgetDocument],
             "List the budgets that have a limit or had a call", EndpointOptions(query=PageQuery)),
    Endpoint("GET", "/v1/budgets/days", Scope.READ, list_budget_days, Page[DaySpendingDocument],
             "List what an account or a stage spent by day and model",
             EndpointOptions(query=DaySpendingQuery)),
    Endpoint("POST", "/v1/budgets/limit", Scope.OPERATE, limit_budget, BudgetDocument,
             "Set or remove the limit of a budget", EndpointOptions(body=BudgetLimitBody)),
)  # fmt: skip

"""The endpoints of budgets. Amounts are tokens, or millionths of the currency."""

from __future__ import annotations

import msgspec

from holdfast.effects import budget
from holdfast.effects.budget import BudgetAccount
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


class BudgetLimitBody(RequestModel):
    """`scope` is the id of a world or a flow, `*` for each of them, or empty for the universe. A null `amount`
    removes the limit. `unit` is `money` or `tokens`."""

    unit: str
    amount: int | None
    scope: str = ""


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
            _document(scope, unit, budget.account(txn, call.universe, scope, unit))
            for scope, unit in names
        ]

    found = call.read(read)
    last = (found[limit - 1].scope, found[limit - 1].unit) if len(found) > limit else None
    return Page(items=found[:limit], next=cursors.encode(last) if last else None)


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
    return _document(body.scope, body.unit, account)


def _document(scope: str, unit: str, account: BudgetAccount) -> BudgetDocument:
    return BudgetDocument(
        scope, unit, account.spent, account.reserved, account.limit, account.remaining()
    )


ENDPOINTS = (
    Endpoint("GET", "/v1/budgets", Scope.READ, list_budgets, Page[BudgetDocument],
             "List the budgets that have a limit or had a call", EndpointOptions(query=PageQuery)),
    Endpoint("POST", "/v1/budgets/limit", Scope.OPERATE, limit_budget, BudgetDocument,
             "Set or remove the limit of a budget", EndpointOptions(body=BudgetLimitBody)),
)  # fmt: skip

"""`holdfast budgets list | days`, and the endpoint of the days."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.effects import budget, daily_costs
from holdfast.effects.budget import MONEY, TOKENS, Cost
from holdfast.errors import Invalid
from holdfast.ledger import runs, stage_costs
from holdfast.ledger.runs import RunProgress, RunRecord
from holdfast.ops.verify import find_differences
from tests.api.rig import ApiRig
from tests.cli.conftest import RunCommand

MODULES = ("holdfast.cli.budgets",)


def test_budgets_are_listed_with_their_days(run: RunCommand, path: Path) -> None:
    with stores.open(path) as store, ApiRig(store, "shop") as rig:
        for key, model, amount in (("a", "large", 5), ("b", "small", 3)):
            charges = [Cost(TOKENS, amount, model), Cost(MONEY, 10 * amount, model)]
            answer = store.transact(budget.reserve, "shop", "w", key, charges)
            store.transact(budget.settle, "shop", key, answer.number, charges)
        assert store.read(find_differences) == []
        pages = rig.pages("/v1/budgets/days", limit=1)
        assert [(one["model"], one["unit"], one["spent"]) for one in pages] == [
            ("large", MONEY, 50), ("large", TOKENS, 5), ("small", MONEY, 30), ("small", TOKENS, 3),
        ]  # fmt: skip
        assert len(rig.pages("/v1/budgets/days", scope="w")) == 4
        assert rig.pages("/v1/budgets/days", scope="v") == []
        for query in ({"first_day": 5, "last_day": 3}, {"first_day": 1}, {"last_day": -3}):
            with pytest.raises(Invalid):
                rig.get("/v1/budgets/days", **query)
        prefix = daily_costs.day_prefix("shop")
        store.transact(lambda txn: txn.delete(txn.scan(prefix, prefix + b"\xff", 1)[0][0]))
        assert [one.kind for one in store.read(find_differences)] == ["statistic"]
    where = ("--universe", "shop", "--store", path)
    assert run("budgets", "days", *where, "--json").document["days"] == pages[1:]
    assert "small" in run("budgets", "days", "--scope", "w", *where).out
    assert run("budgets", "days", "--scope", "v", *where).out == "nothing was spent\n"
    assert run("budgets", "days", "--days", 101, *where).error.startswith("invalid")
    accounts = run("budgets", "list", *where, "--json").document["budgets"]
    assert {(one["scope"], one["unit"]): one["spent"] for one in accounts} == {
        ("", MONEY): 80, ("", TOKENS): 8, ("w", MONEY): 80, ("w", TOKENS): 8,
    }  # fmt: skip
    assert "(universe)" in run("budgets", "list", *where).out


def test_costs_of_a_stage_are_listed_by_day(run: RunCommand, path: Path) -> None:
    with stores.open(path) as store, ApiRig(store, "shop") as rig:
        store.transact(lambda txn: runs.create(txn, RunRecord("r1", "labels")))
        for cost in (0.25, 0.75):
            progress = RunProgress(cost=cost, tokens=9)
            store.transact(stage_costs.publish_progress, "r1", progress)
        pages = rig.pages("/v1/budgets/days", stage="labels", limit=1)
        assert [(one["scope"], one["model"], one["unit"], one["spent"]) for one in pages] == [
            ("", None, MONEY, 750_000), ("", None, TOKENS, 9),
        ]  # fmt: skip
        assert rig.pages("/v1/budgets/days") == []
        with pytest.raises(Invalid):
            rig.get("/v1/budgets/days", stage="labels", scope="w")
    days = run("budgets", "days", "--stage=labels", "--store", path, "--json")
    assert days.document["days"] == pages
    both = run("budgets", "days", "--stage=labels", "--scope=w", "--store", path)
    assert both.error.startswith("invalid")

"""`holdfast budgets list | days`, and the endpoint of the days."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.effects import budget, daily_costs
from holdfast.effects.budget import MONEY, TOKENS, Cost
from holdfast.errors import Invalid
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

"""`holdfast jobs`, `holdfast worlds create | send` and `holdfast budgets limit`."""

from __future__ import annotations

from pathlib import Path

from holdfast import store as stores
from holdfast.effects import budget
from holdfast.effects.budget import MONEY
from holdfast.ops import audit
from holdfast.ops.jobs import model
from tests.api.rig import ApiRig
from tests.cli.conftest import RunCommand
from tests.ops.account_rig import UNIVERSE, AccountRig

MODULES = ("holdfast.cli.jobs", "holdfast.cli.world_input", "holdfast.cli.budgets")
APP = "tests.ops.app:app"


def test_job_is_started_paced_listed_and_cancelled(run: RunCommand, path: Path) -> None:
    with stores.open(path) as store:
        ApiRig(store, "shop").post("/v1/tasks", {"name": "print"})
        where = ("--universe", "shop", "--store", path)
        start = ("jobs", "start", "tasks.cancel", "state=ready")
        made = run(*start, "--rate", 5, "--limit", 3, *where, "--json").document
        assert (made["action"], made["selection"], made["state"]) == (
            "tasks.cancel", {"state": "ready"}, "running",
        )  # fmt: skip
        assert (made["rate_per_s"], made["limit"]) == (5.0, 3)
        assert run("jobs", "pace", made["id"], 2.5, *where).code == 0
        assert store.read(model.get, "shop", 1).row.rate_per_s == 2.5
        assert "tasks.cancel state=ready is cancelled" in run("jobs", "cancel", 1, *where).out
        listed = run("jobs", "list", *where, "--json").document["jobs"]
        assert [(one["id"], one["state"]) for one in listed] == [("1", "cancelled")]
        assert "tasks.cancel" in run("jobs", "list", *where).out
        entries = store.read(audit.list_entries, "shop", None, 10)
    assert [(entry.action, entry.subject) for _, entry in entries] == [
        ("jobs.cancel", "job/1"), ("jobs.pace", "job/1"), ("jobs.start", "job/1"),
    ]  # fmt: skip


def test_bad_jobs_are_refused(run: RunCommand, path: Path) -> None:
    with stores.open(path):
        where = ("--universe", "shop", "--store", path)
        for bad in (
            ("tasks.cancel", "ready"),
            ("tasks.cancel", "color=red"),
            ("tasks.paint", "state=ready"),
        ):
            assert run("jobs", "start", *bad, *where).error.startswith("invalid: "), bad
        assert run("jobs", "cancel", 9, *where).error.startswith("not_found: ")
        assert run("jobs", "list", *where).out == "no jobs\n"


def test_world_is_created_and_gets_an_event(run: RunCommand, path: Path, rig: AccountRig) -> None:
    where = ("--store", path)
    made = run("worlds", "create", "QuotedAccount/new", *where, "--json").document
    assert made["name"] == "new"
    again = run("worlds", "create", "QuotedAccount/new", *where, "--json").document
    assert again["world_id"] == made["world_id"]
    send = ("worlds", "send", "QuotedAccount/new", "QuotedDeposit")
    sent = run(*send, '{"amount": 7}', "--key", "k", "--app", APP, *where, "--json").document
    assert sent["world_id"] == made["world_id"]
    repeated = run(*send, '{"amount": 7}', "--key", "k", "--app", APP, *where, "--json").document
    assert repeated["seq"] == sent["seq"]
    rig.run_worker()
    assert rig.account("new").state().balance == 7
    assert run(*send, '{"amount": "much"}', "--app", APP, *where).error.startswith("invalid: ")
    unknown = run("worlds", "send", "QuotedAccount/new", "Nothing", "{}", "--app", APP, *where)
    assert "unknown to the app" in unknown.error
    assert run("worlds", "create", "QuotedAccount", *where).error.startswith("invalid: ")


def test_limit_of_a_budget_is_set_and_removed(run: RunCommand, path: Path) -> None:
    with stores.open(path) as store:
        where = ("--universe", UNIVERSE, "--store", path)
        limit = ("budgets", "limit", "money")
        assert run(*limit, 900, "--scope", "w", *where, "--json").document["limit"] == 900
        assert store.read(budget.account, UNIVERSE, "w", MONEY).limit == 900
        assert run(*limit, "none", "--scope", "w", *where, "--json").document["limit"] is None
        assert run(*limit, "much", *where).error.startswith("invalid: ")
        entries = store.read(audit.list_entries, UNIVERSE, None, 10)
    assert [(entry.action, entry.subject) for _, entry in entries] == [
        ("budgets.limit", "budget/w")
    ] * 2

"""The endpoints of workers, the leader lease, readiness, the audit log, budgets and dispatches."""

from typing import Any

import pytest

from holdfast.clock import S
from holdfast.dispatch.log import DispatchLog
from holdfast.dispatch.outcomes import DispatchOutcomeReason
from holdfast.effects import budget
from holdfast.effects.budget import MONEY, TOKENS, Cost
from holdfast.errors import IllegalTransition, Invalid, NotFound
from holdfast.leadership import leader_lease, worker_registry
from holdfast.ops import verify_report
from holdfast.ops.api.call import NoIndex
from tests.api.rig import ACTOR, ApiRig
from tests.api.shop import app as shop
from tests.ops.app import app as bank

MODULES = (
    "holdfast.ops.api.workers",
    "holdfast.ops.api.authority",
    "holdfast.ops.api.budgets",
    "holdfast.ops.api.dispatches",
    "holdfast.ops.leadership_documents",
    "holdfast.ops.audit",
    "holdfast.ops.verify_report",
)


# -- workers ---------------------------------------------------------------------------------------


def register(rig: ApiRig, *workers: str) -> None:
    for worker in workers:
        rig.store.transact(worker_registry.heartbeat, rig.universe, worker, "i-1", ("world",), 0)


def test_workers_are_listed_by_id_in_pages(rig: ApiRig) -> None:
    register(rig, "w-2", "w-1", "w-3")
    for limit in (1, 2, 3):
        found = rig.pages("/v1/workers", limit=limit)
        assert [worker["worker"] for worker in found] == ["w-1", "w-2", "w-3"]
    assert rig.get("/v1/workers/w-1") == found[0]
    assert (found[0]["roles"], found[0]["draining"]) == (["world"], False)


def test_worker_is_drained_and_undrained(rig: ApiRig) -> None:
    register(rig, "w-1")
    for _ in range(2):
        assert rig.post("/v1/workers/w-1/drain")["draining"] is True
    assert rig.post("/v1/workers/w-1/undrain")["draining"] is False
    assert [entry.action for entry in rig.audit_entries()] == [
        "drain_worker",
        "drain_worker",
        "undrain_worker",
    ]


def test_unknown_worker_is_not_found(rig: ApiRig) -> None:
    with pytest.raises(NotFound):
        rig.get("/v1/workers/w-1")
    for verb in ("drain", "undrain"):
        with pytest.raises(NotFound):
            rig.post(f"/v1/workers/w-1/{verb}")
    assert rig.audit_entries() == []


# -- leader lease ----------------------------------------------------------------------------------


def test_leader_lease_is_shown_and_released(rig: ApiRig) -> None:
    rig.store.transact(leader_lease.acquire, rig.universe, "w-1", "i-1", 60 * S)
    shown = rig.get("/v1/authority")
    assert (shown["owner"], shown["epoch"], shown["live"]) == ("w-1", 1, True)
    assert rig.post("/v1/authority/mark-stale")["marked"] is False
    released = rig.post("/v1/authority/force-release", {"reason": "it hangs"})
    assert (released["released"], released["owner"], released["live"]) == ("w-1", None, False)
    assert released["events"][-1]["reason"] == "it hangs"
    again = rig.post("/v1/authority/force-release")
    assert (again["released"], again["epoch"]) == (None, released["epoch"])
    assert [entry.detail for entry in rig.audit_entries()] == [
        "",
        "it hangs",
        "forced by an operator",
    ]


def test_expired_leader_lease_is_marked_stale(rig: ApiRig) -> None:
    rig.store.transact(leader_lease.acquire, rig.universe, "w-1", "i-1", 1)
    marked = rig.post("/v1/authority/mark-stale")
    assert (marked["marked"], marked["state"]) == (True, "stale")


def test_leader_lease_of_an_unknown_universe_is_not_found(rig: ApiRig) -> None:
    with pytest.raises(NotFound):
        rig.get("/v1/authority")
    for verb in ("force-release", "mark-stale"):
        with pytest.raises(NotFound):
            rig.post(f"/v1/authority/{verb}")
    assert rig.audit_entries() == []


def test_readiness_lists_the_blockers(rig: ApiRig) -> None:
    rig.post("/v1/worlds", {"type": "ShopAccount", "name": "ada"})
    shown = rig.get("/v1/readiness")
    assert (shown["universe"], shown["ready"]) == (rig.universe, False)
    assert shown["reasons"][0]["code"]


def test_audit_log_is_listed_newest_first_in_pages(rig: ApiRig) -> None:
    register(rig, "w-1")
    for verb in ("drain", "undrain", "drain"):
        rig.post(f"/v1/workers/w-1/{verb}")
    for limit in (1, 2, 3):
        found = rig.pages("/v1/audit", limit=limit)
        assert [entry["number"] for entry in found] == [3, 2, 1]
    assert {entry["actor"] for entry in found} == {ACTOR}
    assert [entry["action"] for entry in found][1] == "undrain_worker"
    with pytest.raises(NoIndex):
        rig.get("/v1/audit", actor=ACTOR)


def test_last_verify_report_is_shown(rig: ApiRig) -> None:
    with pytest.raises(NotFound):
        rig.get("/v1/verify")
    document: dict[str, Any] = dict.fromkeys(
        ("worlds", "steps", "compared", "not_compared", "flows"), 3
    )
    document |= {"sound": True, "findings": [], "differences": [], "flow_findings": [], "parks": []}
    build = verify_report.build_of(shop)
    report = verify_report.make_report(document, 7, rig.universe, "shop:app", build)
    rig.store.transact(verify_report.save, report)
    shown = rig.get("/v1/verify")
    assert (shown["at_ns"], shown["sound"], shown["worlds"]) == (7, True, 3)
    assert shown["build"] == build
    # Other code is another build.
    assert verify_report.build_of(bank) != build


# -- budgets ---------------------------------------------------------------------------------------


def test_budgets_are_listed_in_pages(rig: ApiRig) -> None:
    rig.store.transact(budget.reserve, rig.universe, "w1", "k", [Cost(MONEY, 5)])
    rig.post("/v1/budgets/limit", {"scope": "w1", "unit": "tokens", "amount": 100})
    expected = [("", MONEY, 5, None), ("w1", MONEY, 5, None), ("w1", TOKENS, 0, 100)]
    for limit in (1, 2, 3):
        found = rig.pages("/v1/budgets", limit=limit)
        assert [(b["scope"], b["unit"], b["reserved"], b["limit"]) for b in found] == expected
    assert found[2]["remaining"] == 100


def test_budget_limit_is_set_and_removed(rig: ApiRig) -> None:
    body = {"unit": "money", "amount": 9}
    limited = rig.post("/v1/budgets/limit", body)
    assert (limited["scope"], limited["limit"], limited["remaining"]) == ("", 9, 9)
    assert rig.post("/v1/budgets/limit", {**body, "amount": None})["limit"] is None
    for bad in ({"unit": "gold", "amount": 1}, {"unit": "money"}, {"unit": "money", "amount": -1}):
        with pytest.raises(Invalid):
            rig.post("/v1/budgets/limit", bad)
    assert [entry.detail for entry in rig.audit_entries()] == ["money 9", "money None"]


# -- dispatches ------------------------------------------------------------------------------------


def test_dispatches_are_listed_by_status_in_pages(rig: ApiRig) -> None:
    log = DispatchLog(rig.store, rig.universe)
    for name in ("d-1", "d-2", "d-3"):
        log.request(name, "pane")
    for limit in (1, 2, 3):
        found = rig.pages("/v1/dispatches", status="pending", limit=limit)
        assert [one["request_id"] for one in found] == ["d-1", "d-2", "d-3"]
    assert rig.get("/v1/dispatches/counts")["pending"] == 3
    shown = rig.get("/v1/dispatches/d-1")
    assert rig.get(f"/v1/dispatches/{shown['mark']}") == shown
    with pytest.raises(NoIndex):
        rig.get("/v1/dispatches")
    with pytest.raises(Invalid):
        rig.get("/v1/dispatches", status="lost")


def test_dispatch_is_confirmed_or_rejected(rig: ApiRig) -> None:
    log = DispatchLog(rig.store, rig.universe)
    for name in ("d-1", "d-2"):
        log.request(name, "pane")
        log.concluded(name, DispatchOutcomeReason.CONFIRMED, retries_left=1)
    for _ in range(2):
        assert rig.post("/v1/dispatches/d-1/deliver", key="k")["status"] == "delivered"
    failed = rig.post("/v1/dispatches/d-2/fail", {"reason": "busy"})
    assert (failed["status"], failed["reason"]) == ("failed", "busy")
    with pytest.raises(IllegalTransition):
        rig.post("/v1/dispatches/d-2/deliver")
    with pytest.raises(Invalid):
        rig.post("/v1/dispatches/d-2/fail")
    assert {entry.subject for entry in rig.audit_entries()} == {"dispatch/d-1", "dispatch/d-2"}


def test_unknown_dispatch_is_not_found(rig: ApiRig) -> None:
    with pytest.raises(NotFound):
        rig.get("/v1/dispatches/d-9")
    for verb, body in (("deliver", None), ("fail", {"reason": "x"})):
        with pytest.raises(NotFound):
            rig.post(f"/v1/dispatches/d-9/{verb}", body)


def test_leader_pane_is_shown(rig: ApiRig) -> None:
    assert rig.get("/v1/dispatches/leader")["pane"] is None

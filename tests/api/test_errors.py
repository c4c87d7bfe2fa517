"""Error groups: failed tasks, flows and dead letters by their normalised error."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast import store as stores
from holdfast.clock import S, SimClock
from holdfast.durable import error_groups, queue
from holdfast.durable.error_groups import GROUPS_MAX, OTHER_TEXT
from holdfast.errors import Invalid, NotFound
from holdfast.flows import operations as flow_operations
from holdfast.ops import error_group_check
from holdfast.ops.jobs.runner import JobRunner
from holdfast.ops.verify import find_differences
from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.store.schema import Space
from holdfast.tasks import operations
from holdfast.tasks.operations import AttemptOutcome, GrantRequest, TaskReport
from tests.api.rig import ApiRig

MODULES = (
    "holdfast.durable.error_groups",
    "holdfast.durable.error_text",
    "holdfast.ops.error_group_check",
    "holdfast.ops.error_group_documents",
    "holdfast.ops.api.errors",
)
LETTERS = "other"
TICKS_MAX = 3


def fail_tasks(rig: ApiRig, *errors: str, **options: Any) -> list[str]:
    """Submit a task for each error, and let it fail with it."""
    rig.post("/v1/tasks", {"tasks": [{"name": "print", "options": options} for _ in errors]})
    request = GrantRequest("w", ["default"], len(errors), True)
    grants = rig.store.transact(operations.lease, rig.universe, request).grants
    reports = [
        TaskReport(grant.seq, grant.lease, AttemptOutcome.REFUSED, error=error)
        for grant, error in zip(grants, errors, strict=True)
    ]
    generation = rig.store.generation
    rig.store.transact(operations.apply_reports, rig.universe, "w", generation, reports)
    return [f"{generation}-{grant.seq}" for grant in grants]


def bury(rig: ApiRig, code: str, error: str) -> int:
    name = f"{rig.universe}/{LETTERS}"
    seq: int = rig.store.transact(queue.add_dead_letter, name, b"payload", code, error)
    return seq


def groups(rig: ApiRig, **query: Any) -> list[tuple[str, int, str]]:
    return [(one["kind"], one["count"], one["text"]) for one in rig.pages("/v1/errors", **query)]


def differences(rig: ApiRig) -> list[str]:
    return [one.what for one in rig.store.read(find_differences)]


def test_failed_tasks_with_the_same_error_form_a_group(rig: ApiRig) -> None:
    ids = fail_tasks(
        rig, "OSError: no file '/tmp/17'", "OSError: no file '/tmp/18'", "ValueError: row 4 is odd"
    )
    assert groups(rig) == [
        ("task", 2, "OSError: no file <text>"),
        ("task", 1, "ValueError: row <n> is odd"),
    ]
    assert groups(rig, limit=1) == groups(rig)
    assert groups(rig, kind="flow") == []
    [largest, _] = rig.pages("/v1/errors", kind="task")
    path = f"/v1/errors/task/{largest['group']}"
    assert rig.get(path) == largest
    for limit in (1, 2):
        assert [one["id"] for one in rig.pages(f"{path}/subjects", limit=limit)] == ids[:2]
    assert largest["example"]["id"] == ids[1]
    assert largest["oldest_ns"] <= largest["newest_ns"] == largest["example"]["at_ns"]
    assert differences(rig) == []


def test_dead_letters_and_flows_form_groups(rig: ApiRig) -> None:
    for n in (1, 2):
        bury(rig, "broken", f"no reply from host {n}")
    bury(rig, "misrouted", "")
    flow = rig.post("/v1/flows", {"name": "order", "args": ["book", 5]})["id"]
    seq = int(flow.partition("-")[2])
    for _ in range(2):
        rig.store.transact(flow_operations.cancel, rig.universe, seq, rig.store.generation)
    [task] = rig.get("/v1/tasks", state="ready")["tasks"]
    rig.post(f"/v1/tasks/{task['id']}/cancel", {"reason": "operator"})
    assert rig.get(f"/v1/flows/{flow}")["state"] == "DEAD"
    assert groups(rig) == [
        ("dead", 2, "no reply from host <n>"),
        ("dead", 1, "misrouted"),
        ("flow", 1, "operator"),
    ]
    [found] = rig.pages("/v1/errors", kind="flow")
    assert found["example"]["id"] == flow
    assert differences(rig) == []


def test_redriven_or_removed_subject_leaves_its_group(rig: ApiRig) -> None:
    ids = fail_tasks(rig, "bad 1", "bad 2", retain_s=0.0)
    rig.post(f"/v1/tasks/{ids[0]}/redrive")
    assert groups(rig) == [("task", 1, "bad <n>")]
    while rig.store.transact(operations.maintain, rig.universe, 100):
        pass
    assert groups(rig) == []
    name = f"{rig.universe}/{LETTERS}"
    seqs = [bury(rig, "broken", f"letter {n}") for n in range(3)]
    rig.post(f"/v1/dead/{rig.universe}%2F{LETTERS}/{seqs[0]}/drop")
    rig.store.transact(queue.redrive, name, seqs[1:2])
    assert groups(rig) == [("dead", 1, "letter <n>")]
    assert rig.store.transact(queue.purge_dead, name, rig.store.now_ns() + S, 10) == 1
    assert groups(rig) == []
    assert differences(rig) == []


def test_jobs_redrive_and_drop_a_group(rig: ApiRig) -> None:
    fail_tasks(rig, "bad 1", "bad 2", "worse")
    for n in range(3):
        bury(rig, "broken", f"letter {n}")
    bury(rig, "lost", "nobody asked")
    by_text = {one["text"]: one["group"] for one in rig.pages("/v1/errors")}
    for action, kind, text in (
        ("errors.redrive", "task", "bad <n>"),
        ("errors.drop", "dead", "letter <n>"),
        ("errors.redrive", "dead", "nobody asked"),
    ):
        selection = {"kind": kind, "group": by_text[text]}
        job = rig.post("/v1/jobs", {"action": action, "selection": selection})
        clock = SimClock()
        runner = JobRunner(rig.store, clock)
        for _ in range(TICKS_MAX):
            runner.tick()
            clock.advance(S)
        runner.shut_down()
        assert rig.get(f"/v1/jobs/{job['id']}")["state"] == "done"
    assert groups(rig) == [("task", 1, "worse")]
    assert rig.store.read(queue.counts, f"{rig.universe}/{LETTERS}").ready == 1
    selection = {"kind": "task", "group": by_text["worse"]}
    with pytest.raises(Invalid):
        rig.post("/v1/jobs", {"action": "errors.drop", "selection": selection})
    assert differences(rig) == []


def test_groups_beyond_their_maximum_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # In this process, because the writer of another store has its own maximum.
    with stores.open("memory:") as store, ApiRig(store, "shop") as rig:
        check_groups_beyond_their_maximum(rig, monkeypatch)


def check_groups_beyond_their_maximum(rig: ApiRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_groups, "GROUPS_MAX", 2)
    ids = [id for error in "abcdb" for id in fail_tasks(rig, error)]
    assert sorted(groups(rig)) == [("task", 1, "a"), ("task", 2, OTHER_TEXT), ("task", 2, "b")]
    assert differences(rig) == []
    rig.post(f"/v1/tasks/{ids[2]}/redrive")
    rig.post(f"/v1/tasks/{ids[0]}/redrive")
    assert sorted(groups(rig)) == [("task", 1, OTHER_TEXT), ("task", 2, "b")]
    assert differences(rig) == []
    rig.store.transact(error_group_check.rebuild, rig.universe)
    assert sorted(groups(rig)) == [("task", 1, OTHER_TEXT), ("task", 2, "b")]
    assert GROUPS_MAX == 1_000


def lose(prefix: bytes) -> Any:
    def change(txn: Txn) -> None:
        txn.delete(txn.scan(prefix, tuples.prefix_end(prefix), 1)[0][0])

    return change


@pytest.mark.parametrize("what", ["members", "groups", "numbers"])
def test_lost_row_of_a_group_is_found_and_rebuilt(rig: ApiRig, what: str) -> None:
    fail_tasks(rig, "bad 1", "bad 2", "worse")
    before = groups(rig)
    rig.store.transact(lose(getattr(error_groups.keys_of(rig.universe), what)["task"]))
    assert differences(rig) != []
    rig.store.transact(error_group_check.rebuild, rig.universe)
    assert differences(rig) == []
    assert groups(rig) == before


def test_failures_of_an_older_version_are_grouped_by_a_rebuild(rig: ApiRig) -> None:
    ids = fail_tasks(rig, "bad 1", "bad 2")
    bury(rig, "broken", "letter 1")

    def age(txn: Txn) -> None:
        """Make the rows that the version before wrote."""
        prefix = schema.key_prefix(Space.STATISTIC, rig.universe)
        for key, _ in txn.scan(prefix, tuples.prefix_end(prefix)):
            txn.delete(key)

    rig.store.transact(age)
    assert groups(rig) == []
    assert differences(rig) == []
    fail_tasks(rig, "bad 3")
    rig.post(f"/v1/tasks/{ids[0]}/redrive")
    assert groups(rig) == [("task", 1, "bad <n>")]
    assert differences(rig) == []
    rig.store.transact(error_group_check.rebuild, rig.universe)
    assert groups(rig) == [("task", 2, "bad <n>"), ("dead", 1, "letter <n>")]
    assert differences(rig) == []


@pytest.mark.parametrize("path", ["task/zz", "task/" + "0" * 32, "cat/" + "0" * 32])
def test_unknown_group_is_refused(rig: ApiRig, path: str) -> None:
    for suffix in ("", "/subjects"):
        with pytest.raises((Invalid, NotFound)):
            rig.get(f"/v1/errors/{path}{suffix}")

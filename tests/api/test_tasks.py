"""The endpoints of tasks and queues."""

from typing import Any

import pytest

from holdfast.errors import Invalid, KeyConflict, NotFound
from tests.api.rig import ApiRig

MODULES = ("holdfast.ops.api.tasks",)


def submit(rig: ApiRig, page: int = 1, **options: Any) -> str:
    body = {"name": "print_page", "args": [page], "options": options}
    return str(rig.post("/v1/tasks", body)["id"])


def test_submitted_task_is_shown(rig: ApiRig) -> None:
    id = submit(rig, 7, queue="paper", key="k")
    shown = rig.get(f"/v1/tasks/{id}")
    assert (shown["id"], shown["name"], shown["queue"]) == (id, "print_page", "paper")
    assert (shown["state"], shown["args"], shown["key"]) == ("WAITING", [7], "k")
    assert "result" not in shown


def test_several_tasks_are_submitted_in_one_commit(rig: ApiRig) -> None:
    tasks = [{"name": "print", "args": [n], "options": {"after": [0] * n}} for n in range(2)]
    made = rig.post("/v1/tasks", {"tasks": tasks}, key="k")
    assert rig.post("/v1/tasks", {"tasks": tasks}, key="k") == made
    listed = rig.get("/v1/tasks")["tasks"]
    assert [task["id"] for task in listed] == made["ids"][::-1]
    assert rig.get(f"/v1/tasks/{made['ids'][1]}")["after"] == [made["ids"][0]]
    with pytest.raises(KeyConflict):
        rig.post("/v1/tasks", {"tasks": tasks[:1]}, key="k")


def test_key_in_use_compares_the_arguments_of_a_task_by_value(rig: ApiRig) -> None:
    keyed = {"name": "print_page", "options": {"key": "k"}}
    first = rig.post("/v1/tasks", {**keyed, "args": [1]})
    assert rig.post("/v1/tasks", {**keyed, "kwargs": {"page": 1}}) == first
    batch = {"tasks": [{**keyed, "kwargs": {"page": 1}}, {"name": "print_page", "args": [2]}]}
    assert rig.post("/v1/tasks", batch)["ids"][0] == first["id"]
    with pytest.raises(KeyConflict):
        rig.post("/v1/tasks", {**keyed, "kwargs": {"page": 2}})
    rig.app = None  # without the code the bytes are compared
    with pytest.raises(KeyConflict):
        rig.post("/v1/tasks", {**keyed, "kwargs": {"page": 1}})


def test_idempotency_key_of_the_request_is_the_key_of_the_task(rig: ApiRig) -> None:
    first = rig.post("/v1/tasks", {"name": "print", "args": [1]}, key="k-1")
    assert rig.post("/v1/tasks", {"name": "print", "args": [1]}, key="k-1") == first
    assert rig.get(f"/v1/tasks/{first['id']}")["key"] == "k-1"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"name": "print_page", "args": []},
        {"name": "print", "tasks": []},
        {"name": "print", "options": {"attempts": "many"}},
        {"name": "print", "options": {"after": ["x"]}},
        {"tasks": [{"args": []}]},
    ],
)
def test_bad_submission_is_refused(rig: ApiRig, body: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        rig.post("/v1/tasks", body)
    assert rig.get("/v1/tasks")["tasks"] == []


def test_tasks_are_listed_by_state_queue_and_name_in_pages(rig: ApiRig) -> None:
    ids = [submit(rig, n, queue="paper" if n % 2 else "default") for n in range(4)]
    found: list[str] = []
    cursor = ""
    while cursor is not None:
        page = rig.get("/v1/tasks", limit=3, cursor=cursor)
        found += [task["id"] for task in page["tasks"]]
        cursor = page["cursor"]
    assert found == ids[::-1]
    paper = rig.get("/v1/tasks", queue="paper", state="ready")["tasks"]
    assert [task["id"] for task in paper] == [ids[1], ids[3]]
    assert rig.get("/v1/tasks", state="failed") == {"tasks": [], "cursor": None}
    assert len(rig.get("/v1/tasks", name="print_page")["tasks"]) == 4
    with pytest.raises(Invalid):
        rig.get("/v1/tasks", state="lost")


def test_tasks_are_listed_by_tag(rig: ApiRig) -> None:
    ids = [submit(rig, tag=tag) for tag in ("eu", "us", "eu")]
    submit(rig)
    found = rig.get("/v1/tasks", tag="eu", limit=1)
    assert [task["id"] for task in found["tasks"]] == [ids[2]]
    [last] = rig.get("/v1/tasks", tag="eu", limit=1, cursor=found["cursor"])["tasks"]
    assert (last["id"], last["tag"]) == (ids[0], "eu")
    rig.post(f"/v1/tasks/{ids[0]}/cancel")
    [dead] = rig.get("/v1/tasks", tag="eu", state="dead")["tasks"]
    assert dead["id"] == ids[0]
    with pytest.raises(Invalid):
        rig.get("/v1/tasks", tag="us", cursor=found["cursor"])


def test_cancelled_task_is_dead(rig: ApiRig) -> None:
    id = submit(rig)
    assert rig.post(f"/v1/tasks/{id}/cancel", {"reason": "no ink"}) == {"id": id, "cancelled": True}
    assert rig.post(f"/v1/tasks/{id}/cancel") == {"id": id, "cancelled": False}
    shown = rig.get(f"/v1/tasks/{id}")
    assert (shown["state"], shown["reason"]) == ("DEAD", "no ink")
    entries = [(entry.subject, entry.detail) for entry in rig.audit_entries()]
    assert entries == [(f"task/{id}", "no ink"), (f"task/{id}", "cancelled")]


def test_dead_task_is_redriven_as_a_new_task(rig: ApiRig) -> None:
    id = submit(rig)
    with pytest.raises(Invalid):
        rig.post(f"/v1/tasks/{id}/redrive")
    rig.post(f"/v1/tasks/{id}/cancel")
    made = rig.post(f"/v1/tasks/{id}/redrive")
    assert made["redrive_of"] == id
    assert rig.post(f"/v1/tasks/{id}/redrive") == made
    assert rig.get(f"/v1/tasks/{id}")["redriven_by"] == made["id"]


@pytest.mark.parametrize("id", ["1-999", "9-1"])
def test_unknown_task_is_not_found(rig: ApiRig, id: str) -> None:
    with pytest.raises(NotFound):
        rig.get(f"/v1/tasks/{id}")
    for verb in ("cancel", "redrive"):
        with pytest.raises(NotFound):
            rig.post(f"/v1/tasks/{id}/{verb}")
    with pytest.raises(Invalid):
        rig.get("/v1/tasks/seven")
    assert rig.audit_entries() == []


def test_queue_is_listed_with_counts_and_limits(rig: ApiRig) -> None:
    submit(rig, queue="paper")
    [queue] = rig.get("/v1/queues")["queues"]
    assert (queue["queue"], queue["waiting"], queue["concurrency"]) == ("paper", 1, None)
    assert rig.get("/v1/queues/paper") == queue
    limited = rig.post("/v1/queues/paper/limit", {"concurrency": 3})
    assert limited == {"queue": "paper", "concurrency": 3, "per_key": 0}
    assert rig.post("/v1/queues/paper/limit", {"per_key": 2}) == {**limited, "per_key": 2}
    assert rig.get("/v1/queues/paper")["concurrency"] == 3
    with pytest.raises(Invalid):
        rig.post("/v1/queues/paper/limit", {"concurrency": -1})
    assert [entry.subject for entry in rig.audit_entries()] == ["queue/paper"] * 2


def test_queue_is_paused_resumed_and_audited(rig: ApiRig) -> None:
    paused = rig.post("/v1/queues/paper/pause")
    assert (paused["changed"], paused["waiting"], paused["paused_ns"] > 0) == (True, 0, True)
    submit(rig, queue="paper")
    shown = rig.get("/v1/queues/paper")
    assert rig.post("/v1/queues/paper/pause") == {**shown, "changed": False}
    assert rig.get("/v1/why/queue/paper")["blockers"][0]["code"] == "queue_paused"
    resumed = rig.post("/v1/queues/paper/resume")
    assert resumed == {**shown, "paused_ns": None, "changed": True}
    entries = [(entry.action, entry.subject) for entry in rig.audit_entries()]
    verbs = ["pause_queue", "pause_queue", "resume_queue"]
    assert entries == [(verb, "queue/paper") for verb in verbs]


def test_unknown_queue_is_not_found(rig: ApiRig) -> None:
    with pytest.raises(NotFound):
        rig.get("/v1/queues/paper")

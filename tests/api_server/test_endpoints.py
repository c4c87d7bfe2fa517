"""The endpoints of `ops.api` over HTTP: bodies, queries, problems, idempotency keys, cursors, entity tags, universes."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast import store as stores
from holdfast.ops.api.registry import endpoints
from holdfast.ops.http.endpoint_routes import route_path
from tests.api_server.served_rig import BANK, ServedRig, client, create, rig
from tests.ops.app import app
from tests.ops.http_rig import JsonClient

__all__ = ["client", "rig"]

pytestmark = pytest.mark.timeout(60)

WORLDS = "/v1/worlds"


def key_header(key: str) -> dict[str, str]:
    return {"Idempotency-Key": key}


def test_every_declared_endpoint_is_served_with_its_scope(rig: ServedRig) -> None:
    served = {(route.method, route.path): route.scopes for route in rig.bank().routes}
    assert endpoints()
    for endpoint in endpoints():
        assert served[endpoint.method, route_path(endpoint)] == endpoint.scopes


def test_world_is_created_listed_and_shown(client: JsonClient) -> None:
    created = create(client, "ada")
    page = client.get(WORLDS).document
    assert [world["name"] for world in page["items"]] == ["ada"]
    assert client.get(f"{WORLDS}/QuotedAccount/ada").document == created
    by_id = client.get(f"{WORLDS}/by-id/{created['world_id']}")
    assert by_id.document == created


def test_slash_in_a_name_is_percent_encoded_in_its_path(client: JsonClient) -> None:
    created = create(client, "a/b c")
    response = client.get(f"{WORLDS}/QuotedAccount/a%2Fb%20c")
    assert response.document["world_id"] == created["world_id"]
    assert client.get(f"{WORLDS}/QuotedAccount/a/b%20c").document["code"] == "no_route"


def test_head_of_an_endpoint_has_the_headers_without_the_body(client: JsonClient) -> None:
    response = client.call("HEAD", WORLDS)
    assert (response.status, response.document) == (200, None)
    assert int(response.headers["content-length"]) > 0


@pytest.mark.parametrize(
    ("method", "path", "document", "status", "code"),
    [
        ("POST", WORLDS, {"type": "QuotedAccount"}, 422, "invalid"),
        ("POST", WORLDS, {"type": "QuotedAccount", "name": "x", "more": 1}, 422, "invalid"),
        ("POST", WORLDS, {"type": "Nothing", "name": "x"}, 422, "invalid"),
        ("GET", f"{WORLDS}?limit=x", None, 422, "invalid"),
        ("GET", f"{WORLDS}?limit=1001", None, 422, "invalid"),
        ("GET", f"{WORLDS}?cursor=%25", None, 422, "invalid"),
        ("GET", f"{WORLDS}?color=red", None, 400, "no_index"),
        ("GET", "/v1/tasks?color=red", None, 400, "no_index"),
        ("GET", "/v1/queues?color=red", None, 400, "no_index"),
        ("GET", f"{WORLDS}/QuotedAccount/none", None, 404, "not_found"),
        ("GET", f"{WORLDS}?universe=none", None, 404, "not_found"),
        ("DELETE", WORLDS, {}, 405, "method_not_allowed"),
        ("POST", f"{WORLDS}/QuotedAccount/none/pause", {}, 404, "not_found"),
    ],
)
def test_invalid_request_is_a_problem(
    client: JsonClient, method: str, path: str, document: Any, status: int, code: str
) -> None:
    headers = {"Content-Type": "application/json"}
    body = None if document is None else json.dumps(document).encode()
    response = client.call(method, path, headers=headers, body=body)
    assert (response.status, response.document["code"]) == (status, code)
    assert response.headers["content-type"] == "application/problem+json"
    assert response.document["retryable"] is False


def test_illegal_transition_is_a_conflict(client: JsonClient) -> None:
    create(client, "ada")
    assert client.post(f"{WORLDS}/QuotedAccount/ada/pause").document["status"] == "paused"
    world = client.post(f"{WORLDS}/QuotedAccount/ada/delete").document
    response = client.post(f"{WORLDS}/by-id/{world['world_id']}/resume")
    assert (response.status, response.document["code"]) == (409, "illegal_transition")


# -- idempotency keys ------------------------------------------------------------------------------


def test_repeated_key_gets_the_first_answer_and_changes_nothing(client: JsonClient) -> None:
    first = client.post(WORLDS, {"type": "QuotedAccount", "name": "ada"}, headers=key_header("k-1"))
    again = client.post(WORLDS, {"type": "QuotedAccount", "name": "ada"}, headers=key_header("k-1"))
    assert (first.status, again.status) == (201, 201)
    assert again.document == first.document
    plain = client.post(WORLDS, {"type": "QuotedAccount", "name": "ada"})
    assert plain.status == 200


def test_key_with_another_request_is_a_key_conflict(client: JsonClient) -> None:
    create(client, "ada", headers=key_header("k-1"))
    other_body = client.post(
        WORLDS, {"type": "QuotedAccount", "name": "bob"}, headers=key_header("k-1")
    )
    other_path = client.post(f"{WORLDS}/QuotedAccount/ada/pause", headers=key_header("k-1"))
    for response in (other_body, other_path):
        assert (response.status, response.document["code"]) == (409, "key_conflict")
    assert len(client.get(WORLDS).document["items"]) == 1


def test_order_of_the_members_of_a_repeated_request_has_no_meaning(client: JsonClient) -> None:
    job = {"action": "tasks.cancel", "selection": {"state": "ready", "queue": "paper"}}
    reordered = {"selection": {"queue": "paper", "state": "ready"}, "action": "tasks.cancel"}
    first = client.post("/v1/jobs", job, headers=key_header("k-1"))
    again = client.post("/v1/jobs", reordered, headers=key_header("k-1"))
    assert first.status == 202, first.document
    assert again.document == first.document
    other = {**job, "selection": {"state": "parked", "queue": "paper"}}
    refused = client.post("/v1/jobs", other, headers=key_header("k-1"))
    assert refused.document["code"] == "key_conflict"


def test_key_of_a_refused_request_is_free(client: JsonClient) -> None:
    refused = client.post(WORLDS, {"type": "Nothing", "name": "ada"}, headers=key_header("k-1"))
    assert refused.status == 422
    create(client, "ada", headers=key_header("k-1"))


@pytest.mark.parametrize("key", ["x" * 256, "tab\tinside"])
def test_invalid_key_is_refused(client: JsonClient, key: str) -> None:
    response = client.post(
        WORLDS, {"type": "QuotedAccount", "name": "ada"}, headers=key_header(key)
    )
    assert (response.status, response.document["code"]) == (422, "invalid")
    assert client.get(WORLDS).document["items"] == []


def test_repeated_operate_action_is_audited_once(client: JsonClient) -> None:
    create(client, "ada")
    for _ in range(2):
        response = client.post(f"{WORLDS}/QuotedAccount/ada/pause", headers=key_header("pause-1"))
        assert response.document["status"] == "paused"
    assert len(client.get("/v1/audit").document["items"]) == 1


def test_key_survives_a_restart_of_the_server_and_its_store(tmp_path: Path) -> None:
    documents = []
    for _ in range(2):
        with stores.open(tmp_path / "data") as store:
            served = ServedRig(store)
            try:
                client = served.client(served.bank())
                documents.append(
                    (create(client, "ada", headers=key_header("k-1")),
                     client.post("/v1/tasks", {"name": "add"}, headers=key_header("k-2")).document)
                )  # fmt: skip
            finally:
                served.close()
    assert documents[0] == documents[1]


def test_submit_cancel_and_redrive_of_tasks_take_a_key(client: JsonClient) -> None:
    def post(path: str, document: Any, key: str) -> Any:
        response = client.post(path, document, headers=key_header(key))
        return response.status, response.document

    first = post("/v1/tasks", {"name": "add", "args": [1]}, "s")
    assert first[0] == 201
    assert post("/v1/tasks", {"name": "add", "args": [1]}, "s") == first
    assert post("/v1/tasks", {"name": "add", "args": [2]}, "s")[1]["code"] == "key_conflict"
    task = first[1]["id"]
    cancelled = post(f"/v1/tasks/{task}/cancel", {}, "c")
    assert cancelled == (200, {"id": task, "cancelled": True})
    assert post(f"/v1/tasks/{task}/cancel", {}, "c") == cancelled
    assert client.post(f"/v1/tasks/{task}/cancel").document["cancelled"] is False
    redriven = post(f"/v1/tasks/{task}/redrive", {}, "r")
    assert post(f"/v1/tasks/{task}/redrive", {}, "r") == redriven
    assert len(client.get("/v1/tasks").document["tasks"]) == 2


# -- lists and entity tags -------------------------------------------------------------------------


def test_list_continues_at_its_cursor(client: JsonClient) -> None:
    names = [f"w{number}" for number in range(7)]
    for name in names:
        create(client, name)
    seen: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        page = client.get(f"{WORLDS}?limit=3&cursor={cursor}").document
        assert len(page["items"]) <= 3
        seen += [world["name"] for world in page["items"]]
        cursor = page["next"]
    assert seen == names


def test_unchanged_state_is_304_without_a_body() -> None:
    with app.open("memory:") as runtime:
        served = ServedRig(runtime.store)
        try:
            client = served.client(served.bank())
            path = f"{WORLDS}/QuotedAccount/ada"
            event = {"type": "QuotedDeposit", "event": {"amount": 5}}
            asked = client.post(f"{path}/ask", {**event, "timeout_s": 20})
            assert asked.document == {"reply": 5}
            state = client.get(f"{path}/state")
            etag = {"If-None-Match": state.headers["etag"]}
            assert state.document["state"]["balance"] == 5
            unchanged = client.get(f"{path}/state", headers=etag)
            assert (unchanged.status, unchanged.document) == (304, None)
            client.post(f"{path}/ask", {**event, "timeout_s": 20})
            changed = client.get(f"{path}/state", headers=etag)
            assert (changed.status, changed.document["state"]["balance"]) == (200, 10)
        finally:
            served.close()


# -- universes and applications --------------------------------------------------------------------


def test_request_needs_a_universe_if_the_store_has_several(rig: ServedRig) -> None:
    for universe in ("east", "west"):
        writer = rig.client(rig.serve(default=universe))
        create(writer, "ada")
        writer.submit(universe)
    client = rig.client(rig.serve())
    for path in (WORLDS, "/v1/tasks", "/v1/queues", "/readyz"):
        response = client.get(path)
        assert (response.status, response.document["code"]) == (400, "universe_required")
        assert "east" in response.document["detail"]
        assert client.get(f"{path}?universe=west").status in (200, 503)
    [task] = client.get("/v1/tasks?universe=west").document["tasks"]
    assert task["name"] == "west"
    names = [item["universe"] for item in client.get("/v1/universes").document["items"]]
    assert names == ["east", "west"]


def test_only_universe_of_the_store_needs_no_name(rig: ServedRig) -> None:
    create(rig.client(rig.serve(default="east")), "ada")
    assert len(rig.client(rig.serve()).get(WORLDS).document["items"]) == 1


def test_request_that_needs_code_is_409_needs_app_without_it(rig: ServedRig) -> None:
    client = rig.client(rig.serve(default=BANK))
    create(client, "ada")
    for method, path, document in (
        ("GET", f"{WORLDS}/QuotedAccount/ada/state", None),
        ("POST", f"{WORLDS}/QuotedAccount/ada/send", {"type": "QuotedDeposit"}),
    ):
        response = client.call(method, path, document)
        assert (response.status, response.document["code"]) == (409, "needs_app")


def test_each_universe_has_the_code_of_its_app(rig: ServedRig) -> None:
    other = hf.App("other", worlds=[])
    client = rig.client(rig.serve(apps={BANK: app, "other": other}))
    event = {"type": "QuotedDeposit", "event": {"amount": 1}}
    path = f"{WORLDS}/QuotedAccount/ada/send"
    assert client.post(f"{path}?universe={BANK}", event).status == 200
    assert client.post(f"{path}?universe=other", event).status >= 400
    items = client.get("/v1/universes").document["items"]
    assert [(item["universe"], item["has_app"]) for item in items] == [
        (BANK, True),
        ("other", True),
    ]


# -- jobs ------------------------------------------------------------------------------------------


def test_server_runs_jobs_and_stops_them_with_it(rig: ServedRig) -> None:
    client = rig.client(rig.bank())
    tasks = [{"name": "print"} for _ in range(3)]
    ids = client.post("/v1/tasks", {"tasks": tasks}).document["ids"]
    body = {"action": "tasks.cancel", "selection": {"state": "ready"}}
    response = client.post("/v1/jobs", body, headers=key_header("k"))
    assert response.status == 202
    since = rig.store.wait("jobs", 0, 0.0)
    while (job := client.get("/v1/jobs/1").document)["state"] == "running":
        since = rig.store.wait("jobs", since, 0.5)
    assert (job["state"], job["processed"]) == ("done", 3)
    assert [client.get(f"/v1/tasks/{id}").document["state"] for id in ids] == ["DEAD"] * 3
    rig.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "holdfast-jobs"]

"""Idempotency keys of requests that send input: the key commits with the change, and a repeat finds the first result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import msgspec
import pytest

from holdfast.errors import KeyConflict, Timeout
from holdfast.ops.api import call as calls
from holdfast.ops.api.call import ApiCall
from holdfast.ops.api.idempotency import AnswerPending
from tests.api.rig import ACTOR, ApiRig, find_endpoint

MODULES = ("holdfast.ops.api.call", "holdfast.ops.api.idempotency")

DEPOSIT = {"type": "Deposit", "event": {"amount": 1}}
ITEM = {"kind": "event", "type": "Deposit", "value": {"amount": 1}}


def world_names(rig: ApiRig) -> list[str]:
    return [world["name"] for world in rig.get("/v1/worlds")["items"]]


def depths(rig: ApiRig) -> list[int]:
    return [rig.get(f"/v1/worlds/ShopAccount/{name}")["depth"] for name in world_names(rig)]


def task_names(rig: ApiRig) -> list[str]:
    return [task["name"] for task in rig.get("/v1/tasks")["tasks"]]


def flow_keys(rig: ApiRig) -> list[str | None]:
    return [flow["key"] for flow in rig.get("/v1/flows")["items"]]


def mail_counts(rig: ApiRig) -> list[int]:
    ids = [flow["id"] for flow in rig.get("/v1/flows")["items"]]
    return sorted(len(rig.get(f"/v1/flows/{id}")["events"]) for id in ids)


def order(item: str) -> dict[str, Any]:
    return {"name": "order", "args": [item, 5]}


def send_requests(rig: ApiRig) -> list[tuple[str, Any]]:
    return [(f"/v1/worlds/ShopAccount/{name}/send", DEPOSIT) for name in ("a", "b")]


def event_send_requests(rig: ApiRig) -> list[tuple[str, Any]]:
    path = "/v1/operations/event_send"
    return [(path, {"world": f"ShopAccount/{name}", **DEPOSIT}) for name in ("a", "b")]


def enqueue_requests(rig: ApiRig) -> list[tuple[str, Any]]:
    for name in ("a", "b"):
        rig.post("/v1/worlds", {"type": "ShopAccount", "name": name})
    path = "/v1/operations/enqueue_ingress"
    return [(path, {"world": f"ShopAccount/{name}", "item": ITEM}) for name in ("a", "b")]


def task_requests(rig: ApiRig) -> list[tuple[str, Any]]:
    return [("/v1/tasks", {"name": name, "args": [1]}) for name in ("print", "scan")]


def flow_requests(rig: ApiRig) -> list[tuple[str, Any]]:
    return [("/v1/flows", {**order("book"), "options": {"key": key}}) for key in ("o-1", "o-2")]


def mail_requests(rig: ApiRig) -> list[tuple[str, Any]]:
    ids = [rig.post("/v1/flows", order(item))["id"] for item in ("book", "pen")]
    return [(f"/v1/flows/{id}/send", {"type": "Review", "event": {"stars": 1}}) for id in ids]


REQUESTS: list[tuple[Callable[[ApiRig], list[tuple[str, Any]]], Callable[[ApiRig], Any], Any]] = [
    (send_requests, lambda rig: (world_names(rig), depths(rig)), (["b"], [1])),
    (event_send_requests, lambda rig: (world_names(rig), depths(rig)), (["b"], [1])),
    (enqueue_requests, depths, [0, 1]),
    (task_requests, task_names, ["scan"]),
    (flow_requests, flow_keys, ["o-2"]),
    (mail_requests, mail_counts, [0, 1]),
]
IDS = ["send", "event_send", "enqueue_ingress", "tasks", "flows", "flow_send"]


def make_call(rig: ApiRig, path: str, body: Any, key: str) -> ApiCall:
    endpoint, parameters = find_endpoint("POST", path)
    assert endpoint.options.body is not None
    return ApiCall(
        endpoint=endpoint,
        store=rig.store,
        universe=rig.universe,
        app=rig.app,
        path=parameters,
        body=msgspec.convert(body, endpoint.options.body),
        actor=ACTOR,
        key=key,
    )


def before_handler(call: ApiCall, act: Callable[[], Any]) -> ApiCall:
    """The same call, with another action after the lookup of its key and before its commit."""
    handler = call.endpoint.handler

    @wraps(handler)
    def act_then_handle(call: ApiCall) -> Any:
        act()
        return handler(call)

    return replace(call, endpoint=replace(call.endpoint, handler=act_then_handle))


@pytest.mark.parametrize(("requests", "changes", "expected"), REQUESTS, ids=IDS)
def test_simultaneous_request_with_the_key_of_another_is_refused_and_changes_nothing(
    rig: ApiRig, requests: Any, changes: Any, expected: Any
) -> None:
    first, second = requests(rig)
    other = make_call(rig, *second, "k")
    with pytest.raises(KeyConflict):
        calls.run(before_handler(make_call(rig, *first, "k"), lambda: calls.run(other)))
    assert changes(rig) == expected


@pytest.mark.parametrize(("requests", "changes", "expected"), REQUESTS, ids=IDS)
def test_simultaneous_repeat_gets_the_result_of_the_first_request(
    rig: ApiRig, requests: Any, changes: Any, expected: Any
) -> None:
    _, request = requests(rig)
    answers = []
    first = make_call(rig, *request, "k")
    again = before_handler(first, lambda: answers.append(calls.run(first)))
    assert calls.run(again).status == answers[0].status
    assert changes(rig) == expected


@pytest.mark.parametrize(("requests", "changes", "expected"), REQUESTS, ids=IDS)
def test_repeat_finds_the_result_of_a_request_whose_answer_was_not_stored(
    rig: ApiRig, requests: Any, changes: Any, expected: Any
) -> None:
    first, second = requests(rig)
    lost = make_call(rig, *second, "k")
    value = lost.endpoint.handler(lost)  # commits the change, and stores no answer
    with pytest.raises(KeyConflict):
        calls.run(make_call(rig, *first, "k"))
    again = calls.run(make_call(rig, *second, "k"))
    assert changes(rig) == expected
    assert calls.run(make_call(rig, *second, "k")).status == again.status
    assert type(again.value) is type(getattr(value, "value", value))


def test_key_of_an_ask_that_timed_out_belongs_to_its_request(rig: ApiRig) -> None:
    body = {**DEPOSIT, "timeout_s": 0.05}
    for _ in range(2):
        with pytest.raises(Timeout):
            rig.post("/v1/worlds/ShopAccount/a/ask", body, key="k")
    with pytest.raises(KeyConflict):
        rig.post("/v1/worlds/ShopAccount/b/ask", body, key="k")
    assert (world_names(rig), depths(rig)) == (["a"], [1])
    rig.run_worlds()
    assert rig.post("/v1/worlds/ShopAccount/a/ask", body, key="k") == {"reply": 1}


def test_repeat_that_would_change_something_is_refused_as_pending(rig: ApiRig) -> None:
    lost = make_call(rig, "/v1/worlds/ShopAccount/a/send", DEPOSIT, "k")
    lost.endpoint.handler(lost)
    rig.post("/v1/worlds/ShopAccount/a/delete")
    with pytest.raises(AnswerPending):
        calls.run(make_call(rig, "/v1/worlds/ShopAccount/a/send", DEPOSIT, "k"))
    assert world_names(rig) == []


def test_batch_whose_answer_was_not_stored_is_not_submitted_again(rig: ApiRig) -> None:
    body = {"tasks": [{"name": "print"}, {"name": "scan"}]}
    lost = make_call(rig, "/v1/tasks", body, "k")
    lost.endpoint.handler(lost)
    with pytest.raises(AnswerPending):
        calls.run(make_call(rig, "/v1/tasks", body, "k"))
    assert len(task_names(rig)) == 2

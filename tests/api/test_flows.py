"""The endpoints of flows."""

from collections.abc import Iterator
from typing import Any

import pytest

from holdfast import traces
from holdfast.clock import SYSTEM, S
from holdfast.effects import budget
from holdfast.effects.budget import MONEY, Cost
from holdfast.errors import Invalid, KeyConflict, NotFound
from holdfast.ops.api.call import NeedsApp, NoIndex
from tests.api import shop
from tests.api.rig import ApiRig

MODULES = ("holdfast.ops.api.flows",)
UNKNOWN = ("f1-999", "order%2Fo-9")
WAIT_S = 30


def start(rig: ApiRig, key: str | None = "o-1", item: str = "book") -> str:
    body = {"name": "order", "args": [item], "kwargs": {"cents": 5}, "options": {"key": key}}
    return str(rig.post("/v1/flows", body)["id"])


def wait_for(rig: ApiRig, flow: str, state: str) -> Any:
    """Wait until the flow has the state, and return it."""
    until_ns = SYSTEM.mono_ns() + WAIT_S * S
    since = 0
    while (shown := rig.get(f"/v1/flows/{flow}"))["state"] != state:
        assert SYSTEM.mono_ns() < until_ns, shown
        topic = f"flow/{rig.universe}"
        since = rig.store.wait(topic, since, 0.02)
    return shown


@pytest.fixture
def fails() -> Iterator[None]:
    """The step `charge` fails."""
    shop.failing.add("charge")
    yield
    shop.failing.discard("charge")


def test_started_flow_is_shown_by_id_and_by_key(rig: ApiRig) -> None:
    id = start(rig)
    shown = rig.get(f"/v1/flows/{id}")
    assert (shown["id"], shown["name"], shown["key"]) == (id, "order", "o-1")
    assert (shown["state"], shown["args"], shown["kwargs"]) == ("RUNNING", ["book"], {"cents": 5})
    assert shown["blockers"][0]["code"] == "no_live_worker"
    assert "result" not in shown
    assert rig.get("/v1/flows/order%2Fo-1")["id"] == id


def test_starting_a_flow_again_with_its_key_returns_the_same_flow(rig: ApiRig) -> None:
    assert start(rig) == start(rig)
    with pytest.raises(KeyConflict):
        start(rig, item="other")
    assert len(rig.pages("/v1/flows")) == 1


def test_flows_are_listed_by_tag(rig: ApiRig) -> None:
    body = {"name": "order", "args": ["book"], "kwargs": {"cents": 5}}
    ids = [
        rig.post("/v1/flows", body | {"options": {"tag": tag}})["id"]
        for tag in ("eu", "us", "eu", None)
    ]
    for limit in (1, 2):
        found = rig.pages("/v1/flows", tag="eu", limit=limit)
        assert [flow["id"] for flow in found] == [ids[2], ids[0]]
    assert {flow["tag"] for flow in found} == {"eu"}
    assert [flow["id"] for flow in rig.pages("/v1/flows", tag="us")] == [ids[1]]
    assert rig.pages("/v1/flows", tag="eu", state="completed") == []
    assert len(rig.pages("/v1/flows", tag="eu", state="running")) == 2
    with pytest.raises(Invalid):
        rig.post("/v1/flows", body | {"options": {"tag": ""}})


def test_flows_are_listed_by_name(rig: ApiRig) -> None:
    ids = [start(rig, f"o-{n}") for n in range(3)]
    other = rig.post("/v1/flows", {"name": "restock", "options": {"tag": "eu"}})["id"]
    for limit in (1, 2, 3):
        found = rig.pages("/v1/flows", name="order", limit=limit)
        assert [flow["id"] for flow in found] == ids[::-1]
    assert [flow["id"] for flow in rig.pages("/v1/flows", name="restock")] == [other]
    assert [flow["id"] for flow in rig.pages("/v1/flows", name="restock", tag="eu")] == [other]
    assert rig.pages("/v1/flows", name="order", tag="eu") == []
    assert len(rig.pages("/v1/flows", name="order", state="running")) == 3
    assert rig.pages("/v1/flows", name="order", state="completed") == []
    assert rig.pages("/v1/flows", name="unheard") == []


def test_idempotency_key_of_the_request_is_the_key_of_the_flow(rig: ApiRig) -> None:
    body = {"name": "order", "args": ["book", 5]}
    first = rig.post("/v1/flows", body, key="k-1")
    assert first["key"] == "k-1"
    assert rig.post("/v1/flows", body, key="k-1") == first
    assert rig.get("/v1/flows/order%2Fk-1")["id"] == first["id"]


def test_key_in_use_compares_the_arguments_of_a_flow_by_value(rig: ApiRig) -> None:
    options = {"key": "o-1"}
    id = start(rig)
    for body in (
        {"args": ["book", 5]},
        {"kwargs": {"cents": 5, "item": "book"}},
        {"args": ["book"], "kwargs": {"cents": 5}},
    ):
        made = rig.post("/v1/flows", {"name": "order", "options": options, **body}, key=str(body))
        assert made["id"] == id
    with pytest.raises(KeyConflict) as caught:
        rig.post("/v1/flows", {"name": "order", "options": options, "args": ["book", 6]})
    assert caught.value.fields["flow"] == id


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"name": "unheard"},
        {"name": "order", "args": []},
        {"name": "order", "args": ["book", "much"]},
        {"name": "order", "args": ["book", 5], "options": {"key": ""}, "extra": 1},
        {"name": "order", "args": ["book", 5], "options": {"retries": 1}},
        {"name": "order", "args": ["book", 5], "options": {"timeout_s": -1}},
    ],
)
def test_bad_start_is_refused(rig: ApiRig, body: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        rig.post("/v1/flows", body)
    assert rig.pages("/v1/flows") == []


def test_flows_are_listed_newest_first_in_pages(rig: ApiRig) -> None:
    ids = [start(rig, f"o-{n}") for n in range(3)]
    for limit in (1, 2, 3):
        assert [flow["id"] for flow in rig.pages("/v1/flows", limit=limit)] == ids[::-1]
    assert [flow["id"] for flow in rig.pages("/v1/flows", limit=2, state="running")] == ids[::-1]
    assert rig.pages("/v1/flows", state="failed") == []
    [counts] = rig.get("/v1/flows/counts")["items"]
    assert (counts["name"], counts["running"], counts["failed"]) == ("order", 3, 0)
    with pytest.raises(NoIndex):
        rig.get("/v1/flows", queue="default")
    with pytest.raises(Invalid):
        rig.get("/v1/flows", state="sleeping")


def test_open_step_shows_its_due_time_its_event_types_and_its_child(rig: ApiRig) -> None:
    rig.start("task")
    id = start(rig)
    wait_for(rig, id, "WAITING")
    charged, receive = rig.pages(f"/v1/flows/{id}/steps")
    assert (charged["types"], charged["due_ns"], charged["child"]) == ([], None, None)
    assert (receive["kind"], receive["types"]) == ("receive", ["Review"])
    assert receive["due_ns"] is None
    # Its child task stays open.
    rig.post("/v1/queues/paused/pause")
    body = {"name": "dinner", "args": [3600.0]}
    dinner = rig.post("/v1/flows", body)["id"]
    until_ns = SYSTEM.mono_ns() + WAIT_S * S
    while len(open_steps := rig.pages(f"/v1/flows/{dinner}/steps")) < 4:
        assert SYSTEM.mono_ns() < until_ns, open_steps
        rig.store.wait(f"flow/{rig.universe}", 0, 0.02)
    steps = {one["kind"]: one for one in open_steps}
    assert steps["sleep"]["due_ns"] - steps["sleep"]["began_ns"] == 3600 * S
    [child] = rig.get(f"/v1/flows/{dinner}")["children"]
    assert (child["name"], steps["flow"]["child"]) == ("order", child["id"])
    assert rig.get(f"/v1/flows/{child['id']}")["parent"] == dinner
    page = steps["task"]["child"]
    assert rig.get(f"/v1/tasks/{page}")["name"] == "slow_page"
    effect = steps["effect"]["child"]
    assert rig.get(f"/v1/effects/{effect}")["kind"] == "fx.quote"


def test_flow_that_waits_for_a_worker_shows_its_activation(rig: ApiRig) -> None:
    id = start(rig)
    shown = rig.get(f"/v1/flows/{id}")["activation"]
    assert (shown["state"], shown["worker"], shown["lease"]) == ("ready", None, None)
    assert rig.get(f"/v1/tasks/{shown['task']}")["name"] == "flow:order"
    rig.start("task")
    assert wait_for(rig, id, "WAITING")["activation"] is None


def test_flow_and_task_show_the_trace_of_their_start(rig: ApiRig) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    context = traces.parse(f"00-{trace}-00f067aa0ba902b7-01")
    token = traces.receive(context)
    try:
        flow = start(rig)
        task = rig.post("/v1/tasks", {"name": "print_page", "args": [1]})["id"]
    finally:
        traces.forget(token)
    assert rig.get(f"/v1/flows/{flow}")["trace_id"] == trace
    assert rig.get(f"/v1/tasks/{task}")["trace_id"] == trace
    assert rig.get(f"/v1/flows/{start(rig, 'o-2')}")["trace_id"] is None


def test_flow_shows_what_its_effects_spent(rig: ApiRig) -> None:
    id = start(rig)
    assert rig.get(f"/v1/flows/{id}")["cost"] == []
    scope = f"flow/{id.partition('-')[2]}"
    rig.store.transact(budget.reserve, rig.universe, scope, "k", [Cost(MONEY, 70)])
    assert rig.get(f"/v1/flows/{id}")["cost"] == [{"unit": "money", "spent": 0, "reserved": 70}]


@pytest.mark.parametrize("verb", ["send", "cancel", "resume", "fork", "redrive"])
def test_acting_on_an_unknown_flow_is_not_found(rig: ApiRig, verb: str) -> None:
    body = {"send": {"type": "Review", "event": {"stars": 1}}, "fork": {"key": "k"}}.get(verb)
    for flow in UNKNOWN:
        with pytest.raises(NotFound):
            rig.post(f"/v1/flows/{flow}/{verb}", body)
    assert rig.audit_entries() == []


def test_reading_an_unknown_flow_is_not_found(rig: ApiRig) -> None:
    for flow in UNKNOWN:
        for verb in ("", "/steps"):
            with pytest.raises(NotFound):
                rig.get(f"/v1/flows/{flow}{verb}")
    with pytest.raises(Invalid):
        rig.get("/v1/flows/17")


def test_cancelled_flow_is_cancelled_once(rig: ApiRig) -> None:
    id = start(rig)
    assert rig.post(f"/v1/flows/{id}/cancel") == {"id": id, "cancelled": True}
    assert rig.post(f"/v1/flows/{id}/cancel") == {"id": id, "cancelled": False}
    assert rig.get(f"/v1/flows/{id}")["cancelled"]
    assert [entry.subject for entry in rig.audit_entries()] == [f"flow/{id}"] * 2


def test_sent_event_waits_in_the_mailbox(rig: ApiRig) -> None:
    id = start(rig)
    body = {"type": "Review", "event": {"stars": 4}, "key": "r-1"}
    first = rig.post(f"/v1/flows/{id}/send", body)
    assert first == {"id": id, "type": "Review", "number": 1}
    assert rig.post("/v1/flows/order%2Fo-1/send", body) == first
    assert rig.get(f"/v1/flows/{id}")["events"] == [{"type": "Review", "event": {"stars": 4}}]
    for bad in ({"type": "Unheard"}, {"type": "Review", "event": {}}, {}):
        with pytest.raises(Invalid):
            rig.post(f"/v1/flows/{id}/send", bad)
    rig.app = None
    with pytest.raises(NeedsApp):
        rig.post(f"/v1/flows/{id}/send", body)
    with pytest.raises(NeedsApp):
        start(rig, "o-2")


def test_flow_runs_to_its_result_and_shows_its_steps(rig: ApiRig) -> None:
    rig.start("task")
    id = start(rig)
    wait_for(rig, id, "WAITING")
    steps = rig.pages(f"/v1/flows/{id}/steps", limit=1)
    assert [(step["name"], step["state"]) for step in steps] == [
        ("charge", "completed"),
        ("hf.receive", "open"),
    ]
    assert steps[0]["value"] == 5
    fork = rig.post(f"/v1/flows/{id}/fork", {"key": "o-1b", "at": "charge"})
    assert (fork["fork_of"], fork["fork_at"]) == (id, "charge")
    assert rig.post(f"/v1/flows/{id}/fork", {"key": "o-1b", "at": "charge"}) == fork
    assert rig.post(f"/v1/flows/{id}/resume") == {"id": id, "resumed": False}
    rig.post(f"/v1/flows/{id}/send", {"type": "Review", "event": {"stars": 3}})
    assert wait_for(rig, id, "COMPLETED")["result"] == "book: 3"
    assert rig.get(f"/v1/flows/{fork['id']}")["fork_of"] == id
    for run in (0, 2):
        with pytest.raises(Invalid):
            rig.get(f"/v1/flows/{id}/steps", run=run)


def test_failed_flow_is_redriven(rig: ApiRig, fails: None) -> None:
    runtime = rig.start("task")
    id = start(rig)
    with pytest.raises(Invalid):
        rig.post(f"/v1/flows/{id}/redrive")
    failed = wait_for(rig, id, "FAILED")
    assert (failed["code"], failed["step"], failed["error_type"]) == (
        "step_failed",
        "charge",
        "ValueError",
    )
    runtime.close()
    assert rig.post(f"/v1/flows/{id}/redrive") == {"id": id, "flow": id}
    assert rig.get(f"/v1/flows/{id}")["state"] == "RUNNING"
    assert [entry.action for entry in rig.audit_entries()] == ["redrive_flow"]

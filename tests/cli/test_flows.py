"""`holdfast flows list | show | steps | why | send | fork | cancel | resume | redrive`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast import failpoints
from holdfast.clock import SimClock
from holdfast.flows import flow_list, name_index
from holdfast.store import tuples
from holdfast.store.api import Store, Txn
from holdfast.tasks import operations as task_operations
from holdfast.tasks.model import TaskSpec
from holdfast.tasks.operations import TaskToSubmit
from tests.cli import flow_app
from tests.cli.conftest import RunCommand
from tests.cli.flow_app import app, count, measured, order
from tests.flows.rig import FlowRig

APP = "tests.cli.flow_app:app"
WITH_APP = ("--app", APP)
ADA = '{"by": "ada"}'


@pytest.fixture
def rig(store: Store) -> Iterator[FlowRig]:
    made = FlowRig(store, SimClock(), app)
    yield made
    flow_app.failing.clear()
    made.threads.shutdown(wait=True)


@pytest.fixture
def flows(path: Path, run: RunCommand) -> Any:
    """A function that runs `holdfast flows … --json` and returns its document."""

    def flows(*argv: object) -> Any:
        result = run("flows", *argv, "--store", path, "--json")
        assert result.code == 0, result.err
        return result.document

    return flows


def run_all(rig: FlowRig) -> None:
    """Run activations until none is ready."""
    while rig.run_one():
        pass


def start(rig: FlowRig, key: str, **options: Any) -> str:
    return rig.start(order.options(key=key), "book", 700, **options).id


@pytest.fixture
def shop(rig: FlowRig) -> dict[str, str]:
    """The id of one flow in each of five states."""
    ids = {"waiting": start(rig, "o-1"), "completed": rig.start(count, 3).id}
    run_all(rig)
    flow_app.failing.add("charge")
    ids |= {"failed": start(rig, "o-3"), "undone": start(rig, "o-4", undoes=True)}
    run_all(rig)
    flow_app.failing.clear()
    ids["running"] = start(rig, "o-5")
    return ids


def park(rig: FlowRig, monkeypatch: pytest.MonkeyPatch) -> str:
    """Start a flow that waits, and run it with code that charges another amount."""
    flow = rig.start(order.options(key="o-1"), "book", 700)
    run_all(rig)
    code: Any = rig.codes["flow:order"]

    def bind(args: bytes, upcast: Any) -> Any:
        return code.bind(args.replace(b"\xcd\x02\xbc", b"\xcd\x02\xbd"), upcast)

    rig.codes["flow:order"] = SimpleNamespace(**{**vars(code), "bind": bind})  # type: ignore[assignment]
    flow.send(flow_app.OrderApproved("ada"))
    run_all(rig)
    rig.codes["flow:order"] = code
    assert flow.status().state == "PARKED"
    return flow.id


# -- list and show ---------------------------------------------------------------------------------


def test_flows_list_prints_counts_by_name_and_newest_flows_first(
    run: RunCommand, path: Path, flows: Any, shop: dict[str, str]
) -> None:
    document = flows("list")
    assert {row["name"]: row["failed"] for row in document["names"]} == {"count": 0, "order": 2}
    assert [row["id"] for row in document["flows"]] == ["f1-5", "f1-4", "f1-3", "f1-2", "f1-1"]
    text = run("flows", "list", "--store", path).out
    assert text.splitlines()[0].split()[:3] == ["name", "running", "waiting"]
    assert "card 7 was declined" in text


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("waiting", ["waiting"]),
        ("completed", ["completed"]),
        ("failed", ["undone", "failed"]),
        ("running", ["running"]),
        ("dead", []),
    ],
)
def test_flows_list_filters_by_state(
    flows: Any, shop: dict[str, str], state: str, expected: list[str]
) -> None:
    document = flows("list", "--state", state)
    assert [row["id"] for row in document["flows"]] == [shop[name] for name in expected]


def test_flows_list_filters_by_name_and_continues_from_its_cursor(
    run: RunCommand, path: Path, flows: Any, shop: dict[str, str]
) -> None:
    first = flows("list", "--name", "order", "--limit", 3)
    assert [row["id"] for row in first["flows"]] == ["f1-5", "f1-4", "f1-3"]
    assert first["cursor"] in run("flows", "list", "--limit", 3, "--store", path).out
    rest = flows("list", "--name", "order", "--cursor", first["cursor"])
    assert ([row["id"] for row in rest["flows"]], rest["cursor"]) == (["f1-1"], None)
    assert "no such flows" in run("flows", "list", "--name", "x", "--store", path).out
    error = run("flows", "list", "--cursor", "x", "--store", path).error
    assert error.startswith("invalid: ")


def test_flows_and_tasks_are_listed_by_tag(
    run: RunCommand, path: Path, rig: FlowRig, flows: Any
) -> None:
    tagged = rig.start(order.options(key="o-8", tag="eu"), "book", 700)
    start(rig, "o-9")
    assert [row["id"] for row in flows("list", "--tag", "eu")["flows"]] == [tagged.id]
    assert flows("list", "--tag", "us")["flows"] == []
    assert flows("cancel", "--tag", "eu", "--dry-run")["would_cancel"] == [tagged.id]
    assert "tag        eu" in run("flows", "show", tagged.id, "--store", path).out
    task = TaskToSubmit(b"\x92\x90\x80", tag="eu")
    rig.store.transact(task_operations.submit, rig.universe, TaskSpec("count"), [task])
    listed = run("tasks", "list", "--tag", "eu", "--store", path, "--json").document["tasks"]
    assert [(row["name"], row["tag"]) for row in listed] == [("count", "eu")]


def test_flows_list_by_state_reads_only_flows_in_that_state(
    rig: FlowRig, store: Store, shop: dict[str, str]
) -> None:
    read: list[int] = []
    with failpoints.on("flows.read_listed", calls=read.append):
        store.read(flow_list.list_flows, rig.universe, "waiting")
    assert read == [1]


def test_flows_list_by_name_reads_only_flows_of_that_name(
    rig: FlowRig, store: Store, shop: dict[str, str]
) -> None:
    """The list of a name and a state reads the index with fewer flows."""
    for filters, expected in (
        (("", "order"), [5, 4, 3, 1]),
        (("failed", "order"), [4, 3]),
        (("waiting", "order"), [1]),
    ):
        read: list[int] = []
        with failpoints.on("flows.read_listed", calls=read.append):
            store.read(flow_list.list_flows, rig.universe, *filters)
        assert read == expected


def test_flows_of_an_older_version_are_listed_by_name(
    run: RunCommand, path: Path, rig: FlowRig, flows: Any, shop: dict[str, str]
) -> None:
    """An older version wrote no index of names. The list reads the heads until the rows are rebuilt."""
    prefix = name_index.prefix_of(rig.universe)

    def remove_index(txn: Txn) -> None:
        txn.delete(name_index.mark_key(rig.universe))
        for key, _ in txn.scan(prefix, tuples.prefix_end(prefix)):
            txn.delete(key)

    rig.store.transact(remove_index)
    start(rig, "o-9")
    listed = [row["id"] for row in flows("list", "--name", "order")["flows"]]
    assert listed == ["f1-6", "f1-5", "f1-4", "f1-3", "f1-1"]


def test_flows_show_and_why_name_a_failed_compensation_until_its_letter_is_gone(
    run: RunCommand, path: Path, rig: FlowRig, flows: Any
) -> None:
    flow_app.failing |= {"charge", "release"}
    handle = rig.start(order.options(key="o-1"), "book", 700, undoes=True)
    rig.run(handle.done)
    flow_app.failing.clear()
    reason = "the compensation undo:release#1 failed: ValueError: the shelf is locked"
    assert reason in run("flows", "show", handle.id, "--store", path).out
    shown, why = flows("show", handle.id)["blockers"], flows("why", handle.id)["blockers"]
    assert shown == why == handle.why()
    assert [one["code"] for one in why] == ["flow_failed", "undo_failed"]
    command = why[1]["action"].split("`")[1].split()
    assert command == ["holdfast", "dead", "redrive", "flows/undo-failed", "1"]
    assert run(*command[1:], "--store", path).code == 0
    run_all(rig)
    assert [one["code"] for one in flows("why", handle.id)["blockers"]] == ["flow_failed"]


def test_flows_list_of_a_store_without_flows_is_not_found(
    run: RunCommand, path: Path, store: Store
) -> None:
    result = run("flows", "list", "--store", path)
    assert (result.code, result.error[:11]) == (1, "not_found: ")


def test_tasks_list_and_selection_leave_out_the_activations_of_flows(
    run: RunCommand, path: Path, shop: dict[str, str]
) -> None:
    assert run("tasks", "list", "--store", path, "--json").document["tasks"] == []
    assert run("tasks", "cancel", "--all", "--store", path, "--json").document["cancelled"] == []
    named = run("tasks", "list", "--name", "flow:order", "--store", path, "--json").document
    assert "ready" in {row["where"] for row in named["tasks"]}


def test_flows_show_prints_state_cause_arguments_and_values(
    run: RunCommand, path: Path, flows: Any, shop: dict[str, str]
) -> None:
    expected = {
        "waiting": [
            "waits for an event: OrderApproved",
            "arguments",
            '"book", 700',
            "published state",
        ],
        "completed": ["COMPLETED", "result"],
        "failed": [
            "step_failed",
            "    ValueError: card 7 was declined",
            "retry it: holdfast flows",
        ],
        "running": ["waits for a worker of queue default"],
    }
    for name, texts in expected.items():
        text = run("flows", "show", shop[name], "--store", path).out
        assert [part for part in texts if part not in text] == [], text
    document = flows("show", "order/o-1")
    assert (document["id"], document["key"], document["published"]) == (
        shop["waiting"],
        "o-1",
        {"state": "paid"},
    )
    assert document["blockers"][0]["code"] == "waits_for_event"
    assert flows("show", shop["completed"])["result"] == 3


@pytest.mark.parametrize("action", ["show", "steps", "why"])
@pytest.mark.parametrize(
    ("name", "code"), [("f1-99", "not_found"), ("order/x", "not_found"), ("17", "bad_flow_id")]
)
def test_unknown_flow_is_refused_in_one_line(
    run: RunCommand, path: Path, shop: dict[str, str], action: str, name: str, code: str
) -> None:
    assert run("flows", action, name, "--store", path).error.startswith(f"{code}: ")


def test_flow_key_may_contain_slashes(rig: FlowRig, flows: Any) -> None:
    id = start(rig, "eu/2026/o-7")
    assert flows("show", "order/eu/2026/o-7")["id"] == id


# -- steps and why ---------------------------------------------------------------------------------


def test_flows_steps_lists_outcomes_in_the_order_of_positions(
    run: RunCommand, path: Path, rig: FlowRig, flows: Any, shop: dict[str, str]
) -> None:
    document = flows("steps", "order/o-1")
    assert [(step["name"], step["state"]) for step in document["steps"]] == [
        ("reserve", "completed"),
        ("charge", "completed"),
        ("hf.receive", "open"),
    ]
    assert document["steps"][0]["value"] == "book reserved"
    failed = flows("steps", shop["failed"])["steps"][-1]
    assert (failed["error_type"], failed["error"]) == ("ValueError", "card 7 was declined")
    flows("send", "order/o-1", "OrderApproved", ADA, *WITH_APP)
    run_all(rig)
    text = run("flows", "steps", "order/o-1", "--store", path).out
    assert "reserve#1" in text
    assert '["OrderApproved", {"by": "ada"}]' in text


def test_flows_steps_continues_at_its_cursor(
    run: RunCommand, path: Path, shop: dict[str, str], flows: Any
) -> None:
    everything = flows("steps", "order/o-1")
    assert everything["cursor"] is None
    found, cursor = [], ""
    for _ in everything["steps"]:
        page = flows("steps", "order/o-1", "--limit", 1, "--cursor", cursor)
        found += page["steps"]
        cursor = page["cursor"]
    assert (found, cursor) == (everything["steps"], None)
    text = run("flows", "steps", "order/o-1", "--limit", 1, "--store", path).out
    assert text.splitlines()[-1] == f"there are more: --cursor {found[0]['position']}"
    for option in (("--limit", 0), ("--limit", 10_001), ("--cursor", "x")):
        refused = run("flows", "steps", "order/o-1", *option, "--store", path)
        assert refused.error.startswith("invalid: ")


def test_flows_steps_of_a_former_run(run: RunCommand, path: Path, rig: FlowRig, flows: Any) -> None:
    id = rig.start(count, 1).id
    run_all(rig)
    values = {n: flows("steps", id, "--run", n)["steps"][0]["value"] for n in (1, 2, 3)}
    assert values == {1: "1 reserved", 2: "2 reserved", 3: "3 reserved"}
    assert flows("steps", id)["run"] == 3
    assert run("flows", "steps", id, "--run", 4, "--store", path).error.startswith("invalid: ")


def test_flows_why_prints_blockers_with_their_action_or_the_end(
    run: RunCommand, path: Path, flows: Any, shop: dict[str, str]
) -> None:
    assert "holdfast flows send" in run("flows", "why", "order/o-1", "--store", path).out
    assert [row["code"] for row in flows("why", shop["running"])["blockers"]] == ["no_live_worker"]
    text = run("flows", "why", shop["failed"], "--store", path).out
    assert "step_failed at step charge: ValueError: card 7 was declined" in text
    assert flows("why", shop["completed"])["blockers"] == []


# -- send and fork ---------------------------------------------------------------------------------


def test_flows_send_delivers_an_event_once_per_key(
    run: RunCommand, path: Path, rig: FlowRig, flows: Any
) -> None:
    id = start(rig, "o-1")
    sent = [
        flows("send", id, "Note", '{"text": "hi"}', "--key", "k", *WITH_APP)["number"]
        for _ in range(2)
    ]
    assert sent == [1, 1]
    assert flows("show", id)["events"] == [{"type": "Note", "event": {"text": "hi"}}]
    flows("send", id, "OrderApproved", ADA, "--app", APP)
    run_all(rig)
    assert flows("show", id)["result"] == "book reserved, approved by ada"
    error = run("flows", "send", id, "Note", "{}", *WITH_APP, store=path).error
    assert error.startswith("flow_ended: ")


def test_flows_start_starts_a_flow_once_per_key(
    run: RunCommand, path: Path, rig: FlowRig, flows: Any
) -> None:
    by_position = flows("start", "order", '["book", 5]', "--key", "o-9", *WITH_APP)
    by_name = flows("start", "order", '{"cents": 5, "item": "book"}', "--key", "o-9", *WITH_APP)
    assert by_position == by_name == {"id": by_name["id"], "name": "order", "key": "o-9"}
    assert flows("show", "order/o-9")["args"] == ["book", 5]
    text = run("flows", "start", "measured", *WITH_APP, store=path).out
    assert text.endswith(" measured\n")
    run_all(rig)
    assert flows("show", text.split()[0])["result"] == 1
    options = ("--queue", "slow", "--priority", 3, "--timeout-s", 60, "--tag", "mine")
    slow = flows("start", "count", "[1]", *options, *WITH_APP)["id"]
    shown = flows("show", slow)
    assert (shown["queue"], shown["priority"]) == ("slow", 3)
    assert shown["timeout_ns"]
    for words, begin in (
        (("order", '["book", 6]', "--key", "o-9"), "key_conflict: "),
        (("order", '["book", "much"]'), "invalid: what='flow arguments'"),
        (("order", "5"), "invalid: what='flow arguments'"),
        (("order", "{"), "invalid: what='flow arguments'"),
        (("unheard",), "invalid: what='flow'"),
    ):
        refused = run("flows", "start", *words, *WITH_APP, store=path)
        assert (refused.code, refused.out) == (1, "")
        assert refused.error.startswith(begin)


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["Gone", "{}", "--app", APP], 1, "type='Gone' why='unknown to the app'"),
        (["OrderApproved", '{"by": 7}', "--app", APP], 1, "Expected `str`, got `int`"),
        (["OrderApproved", "{", "--app", APP], 1, "why='Input data was truncated'"),
        (["OrderApproved", ADA, "--app", "tests.cli.flow_app:nothing"], 2, "no_app: "),
    ],
)
def test_flows_send_refuses_bad_events_in_one_line(
    run: RunCommand, path: Path, rig: FlowRig, words: list[str], code: int, text: str
) -> None:
    result = run("flows", "send", start(rig, "o-1"), *words, "--store", path)
    assert result.code == code
    assert text in result.error


def test_flows_fork_takes_over_the_steps_before_a_step(
    run: RunCommand, path: Path, rig: FlowRig, flows: Any, shop: dict[str, str]
) -> None:
    made = flows("fork", "order/o-1", "o-1b", "--at", "charge")
    assert made == {
        "id": "f1-6", "name": "order", "key": "o-1b", "fork_of": shop["waiting"], "fork_at": "charge",
    }  # fmt: skip
    assert [step["name"] for step in flows("steps", made["id"])["steps"]] == ["reserve"]
    assert flows("fork", "order/o-1", "o-1b", "--at", "charge")["id"] == made["id"]
    document = flows("show", "order/o-1b")
    assert (document["fork_of"], document["fork_at"]) == (shop["waiting"], "charge")
    text = run("flows", "fork", "order/o-1", "o-1c", "--store", path).out
    assert text == f"f1-7 order/o-1c has all recorded steps of {shop['waiting']}\n"
    refused = run("flows", "fork", "order/o-1", "o-1d", "--at", "pack", store=path)
    assert refused.error.startswith("not_found: ")


# -- cancel, resume, redrive -----------------------------------------------------------------------


def test_flows_cancel_by_name_state_and_id(
    run: RunCommand, path: Path, rig: FlowRig, flows: Any, shop: dict[str, str]
) -> None:
    selection = ("--name", "order")
    assert flows("cancel", *selection, "--dry-run")["would_cancel"] == [
        shop["running"],
        shop["waiting"],
    ]
    assert flows("show", shop["waiting"])["state"] == "WAITING"
    assert flows("cancel", "--state", "waiting", "--limit", 1)["cancelled"] == [
        {"id": shop["waiting"], "cancelled": True}
    ]
    # The cancelled flow runs now. A second cancellation is not the cause of its end.
    assert flows("cancel", *selection)["cancelled"] == [
        {"id": shop["running"], "cancelled": True},
        {"id": shop["waiting"], "cancelled": False},
    ]
    run_all(rig)
    assert flows("list", "--state", "CANCELLED")["names"][1]["cancelled"] == 2
    text = run("flows", "cancel", shop["completed"], "--store", path).out
    assert "had ended" in text


def test_flows_redrive_continues_at_the_failed_step_or_from_the_top(
    run: RunCommand, path: Path, rig: FlowRig, flows: Any, shop: dict[str, str]
) -> None:
    assert flows("redrive", "--error", "DECLINED", "--dry-run")["would_redrive"] == [
        shop["undone"],
        shop["failed"],
    ]
    assert flows("redrive", "--all")["redriven"] == [
        {"id": shop["undone"], "flow": "f1-6"},
        {"id": shop["failed"], "flow": shop["failed"]},
    ]
    run_all(rig)
    assert flows("show", shop["failed"])["state"] == "WAITING"
    assert flows("show", "f1-6")["redrive_of"] == shop["undone"]
    assert flows("show", shop["undone"])["redriven_by"] == "f1-6"
    # A redriven flow is not selected again.
    assert flows("redrive", "--all")["redriven"] == []


def test_flows_redrive_changes_nothing_if_one_named_flow_is_refused(
    run: RunCommand, path: Path, flows: Any, shop: dict[str, str]
) -> None:
    result = run("flows", "redrive", shop["failed"], shop["waiting"], "--store", path)
    assert result.error.startswith("invalid: what='flow'")
    assert flows("show", shop["failed"])["state"] == "FAILED"


def test_flows_resume_runs_a_parked_flow_again(
    run: RunCommand, path: Path, rig: FlowRig, flows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = park(rig, monkeypatch)
    text = run("flows", "why", id, "--store", path).out
    assert "replay_diverged: parked at step charge#1: it is recorded with other arguments" in text
    assert flows("resume", "--all")["resumed"] == [{"id": id, "resumed": True}]
    run_all(rig)
    assert flows("show", id)["result"] == "book reserved, approved by ada"
    assert "was not parked" in run("flows", "resume", id, "--store", path).out


@pytest.mark.parametrize("action", ["cancel", "resume", "redrive"])
def test_flows_selection_without_a_condition_is_wrong_usage(
    run: RunCommand, path: Path, shop: dict[str, str], action: str
) -> None:
    result = run("flows", action, "--store", path)
    assert result.code == 2
    assert "nothing selected" in result.err
    assert run("flows", action, "f1-1", "--name", "order", "--store", path).code == 2


def test_flows_need_a_universe_if_the_store_has_several(
    run: RunCommand, path: Path, store: Store, rig: FlowRig, flows: Any
) -> None:
    first = start(rig, "o-1")
    rig.universe = "other"
    start(rig, "o-1")
    assert "give --universe" in run("flows", "list", "--store", path).error
    assert flows("show", first, "--universe", "other")["universe"] == "other"
    refused = run("flows", "list", "--universe", "third", "--store", path)
    assert refused.error.startswith("not_found: ")


def test_steps_with_bytes_and_times_are_printed(rig: FlowRig, flows: Any, run: Any) -> None:
    id = rig.start(measured).id
    run_all(rig)
    [step] = flows("steps", id)["steps"]
    assert step["value"] == {"body": "AAE=", "at": "2026-03-01T00:00:00Z"}
    assert "AAE=" in run("flows", "steps", id, "--store", rig.store.url).out

"""`holdfast tasks list | show | cancel | redrive | limit`."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import Any

import pytest

from holdfast import codec
from holdfast.cli import selection, task_selection
from holdfast.clock import S
from holdfast.errors import NotFound
from holdfast.store.api import Store
from holdfast.tasks import operations
from holdfast.tasks.ids import TaskId, parse_task_id
from holdfast.tasks.model import QueueLimits, TaskSpec, get_limits, keys_of
from holdfast.tasks.operations import AttemptOutcome, GrantRequest, TaskReport, TaskToSubmit
from tests.cli.conftest import RunCommand, replace_rate_limit_sleep

SHOP = "shop"


def submit(store: Store, name: str, *args: Any, universe: str = SHOP, **spec: Any) -> str:
    options = {
        option: spec.pop(option)
        for option in ("key", "limit", "after", "delay_ns")
        if option in spec
    }
    new = TaskToSubmit(codec.pack([list(args), {}]), **options)
    [seq] = store.transact(operations.submit, universe, TaskSpec(name, **spec), [new])
    return f"1-{seq}"


def report_all(store: Store, queue: str, end: AttemptOutcome, **fields: Any) -> None:
    """Lease all ready tasks of a queue and report the same end for each."""
    leased = store.transact(operations.lease, SHOP, GrantRequest("worker", [queue], 100))
    reports = [TaskReport(grant.seq, grant.lease, end, **fields) for grant in leased.grants]
    store.transact(operations.apply_reports, SHOP, "worker", 1, reports)


@pytest.fixture
def shop(store: Store) -> dict[str, str]:
    """The id of one task per state."""
    ids = {"completed": submit(store, "count", 3, queue="done")}
    report_all(store, "done", AttemptOutcome.OK, result=codec.pack({"n": 3}))
    ids["failed"] = submit(store, "pay", 700, queue="bad")
    report_all(
        store,
        "bad",
        AttemptOutcome.REFUSED,
        reason="declined",
        error="card 7 was declined\nat line 3",
    )
    ids["leased"] = submit(store, "pay", 1, queue="busy")
    store.transact(operations.lease, SHOP, GrantRequest("worker", ["busy"], 1))
    ids["dead"] = submit(store, "pay", 800)
    store.transact(operations.cancel, SHOP, [4], "changed our mind")
    ids["ready"] = submit(store, "pay", 900, priority=3)
    ids["delayed"] = submit(store, "pay", 900, delay_ns=3600 * S)
    ids["blocked"] = submit(store, "pay", 900, after=(3,))
    return ids


# -- list and show ---------------------------------------------------------------------------------


def test_tasks_list_prints_queue_counts_and_newest_tasks_first(
    run: RunCommand, path: Path, store: Store, shop: dict[str, str]
) -> None:
    document = run("tasks", "list", "--store", path, "--json").document
    counts = {row["queue"]: row for row in document["queues"]}
    assert counts["bad"]["failed"] == 1
    assert counts["default"]["waiting"] == 3
    assert [row["id"] for row in document["tasks"]] == [f"1-{n}" for n in range(7, 0, -1)]
    text = run("tasks", "list", "--store", path).out
    assert text.splitlines()[0].split()[:3] == ["queue", "ready", "suspect"]
    assert "card 7 was declined" in text
    assert "at line 3" not in text


@pytest.mark.parametrize(
    "where", ["completed", "failed", "leased", "dead", "ready", "delayed", "blocked"]
)
def test_tasks_list_filters_by_state(
    run: RunCommand, path: Path, store: Store, shop: dict[str, str], where: str
) -> None:
    document = run("tasks", "list", "--state", where, "--store", path, "--json").document
    assert [row["id"] for row in document["tasks"]] == [shop[where]]


def test_tasks_list_filters_by_queue_and_name(
    run: RunCommand, path: Path, store: Store, shop: dict[str, str]
) -> None:
    document = run("tasks", "list", "--queue", "done", "--store", path, "--json").document
    assert [row["queue"] for row in document["queues"]] == ["done"]
    assert [row["id"] for row in document["tasks"]] == [shop["completed"]]
    document = run("tasks", "list", "--name", "count", "--store", path, "--json").document
    assert [row["id"] for row in document["tasks"]] == [shop["completed"]]
    assert "no such tasks" in run("tasks", "list", "--name", "x", "--store", path).out


def test_tasks_list_continues_from_its_cursor(run: RunCommand, path: Path, store: Store) -> None:
    for _ in range(3):
        submit(store, "pay")
    first = run("tasks", "list", "--limit", 2, "--store", path, "--json").document
    assert [row["id"] for row in first["tasks"]] == ["1-3", "1-2"]
    rest = run("tasks", "list", "--cursor", first["cursor"], "--store", path, "--json").document
    assert ([row["id"] for row in rest["tasks"]], rest["cursor"]) == (["1-1"], None)
    assert first["cursor"] in run("tasks", "list", "--limit", 2, "--store", path).out


def test_tasks_list_of_a_store_without_tasks_is_not_found(
    run: RunCommand, path: Path, store: Store
) -> None:
    assert run("tasks", "list", "--store", path).error.startswith("not_found: ")


def test_tasks_show_prints_the_state_and_its_cause(
    run: RunCommand, path: Path, store: Store, shop: dict[str, str]
) -> None:
    expected = {
        "completed": '{"n": 3}',
        "failed": "    at line 3",
        "leased": "worker holds its lease, attempt 1",
        "dead": "it is dead, reason: changed our mind",
        "ready": "priority 3",
        "delayed": "not before",
        "blocked": f"it waits until these tasks complete: {shop['leased']}",
    }
    for state, word in expected.items():
        text = run("tasks", "show", shop[state], "--store", path).out
        assert word in text, text
        assert (
            run("tasks", "show", shop[state], "--store", path, "--json").document["where"] == state
        )


def test_tasks_show_prints_arguments_as_in_a_call(
    run: RunCommand, path: Path, store: Store
) -> None:
    args = codec.pack([["a.png", 80], {"crop": True}])
    store.transact(operations.submit, SHOP, TaskSpec("resize"), [TaskToSubmit(args)])
    assert 'arguments  "a.png", 80, crop=true' in run("tasks", "show", "1-1", "--store", path).out


def test_tasks_show_prints_the_redrive_command_for_a_failed_task(
    run: RunCommand, path: Path, store: Store, shop: dict[str, str]
) -> None:
    text = run("tasks", "show", shop["failed"], "--store", path).out
    command = text.splitlines()[-1].partition("holdfast ")[2]
    assert run(*command.split()).code == 0
    assert "retry it" not in run("tasks", "show", shop["failed"], "--store", path).out


@pytest.mark.parametrize(
    ("id", "code"), [("1-99", "not_found"), ("2-1", "not_found"), ("7", "bad_task_id")]
)
def test_tasks_show_of_an_unknown_or_malformed_id(
    run: RunCommand, path: Path, store: Store, shop: dict[str, str], id: str, code: str
) -> None:
    assert run("tasks", "show", id, "--store", path).error.startswith(f"{code}: ")


def test_tasks_list_and_show_escape_control_characters(
    run: RunCommand, path: Path, store: Store
) -> None:
    submit(store, "pay\x1b[31m", "\x1b[32m")
    for command in (("list",), ("show", "1-1")):
        assert "\x1b" not in run("tasks", *command, "--store", path).out


# -- cancel ----------------------------------------------------------------------------------------


def test_tasks_cancel_by_id_ends_waiting_and_leased_tasks(
    run: RunCommand, path: Path, store: Store, shop: dict[str, str]
) -> None:
    ids = [shop[state] for state in ("ready", "leased", "completed")]
    result = run("tasks", "cancel", *ids, "--reason", "too late", "--store", path, "--json")
    assert [task["cancelled"] for task in result.document["cancelled"]] == [True, True, False]
    document = run("tasks", "show", shop["ready"], "--store", path, "--json").document
    assert (document["state"], document["reason"]) == ("DEAD", "too late")


def test_tasks_cancel_filters_by_queue_state_and_name(
    run: RunCommand, path: Path, store: Store, shop: dict[str, str]
) -> None:
    def cancelled(*argv: object) -> list[str]:
        result = run("tasks", "cancel", *argv, "--store", path, "--json")
        return [task["id"] for task in result.document["cancelled"]]

    assert cancelled("--queue", "busy") == [shop["leased"]]
    assert cancelled("--state", "delayed") == [shop["delayed"]]
    # The dependent of the cancelled task is dead already.
    assert cancelled("--name", "pay") == [shop["ready"]]
    assert cancelled("--all") == []


def test_tasks_cancel_of_hundreds_honours_the_limit(
    run: RunCommand, path: Path, store: Store
) -> None:
    new = [TaskToSubmit(codec.pack([[n], {}])) for n in range(750)]
    store.transact(operations.submit, SHOP, TaskSpec("pay"), new)
    result = run("tasks", "cancel", "--all", "--limit", 620, "--json", store=path)
    assert len(result.document["cancelled"]) == 620
    queues = run("tasks", "list", "--store", path, "--json").document["queues"]
    assert [(row["ready"], row["dead"]) for row in queues] == [(130, 620)]


def test_tasks_cancel_and_redrive_dry_run_change_nothing(
    run: RunCommand, path: Path, store: Store, shop: dict[str, str]
) -> None:
    document = run("tasks", "cancel", "--queue", "busy", "--dry-run", "--json", store=path).document
    assert document == {"would_cancel": [shop["leased"]]}
    document = run("tasks", "redrive", "--all", "--dry-run", "--store", path, "--json").document
    assert document == {"would_redrive": [shop["failed"], shop["dead"]]}
    shown = run("tasks", "show", shop["leased"], "--store", path, "--json").document
    assert shown["state"] == "LEASED"


# -- redrive ---------------------------------------------------------------------------------------


def test_tasks_redrive_by_id_creates_one_linked_task(
    run: RunCommand, path: Path, store: Store, shop: dict[str, str]
) -> None:
    result = run("tasks", "redrive", shop["failed"], "--store", path, "--json")
    assert result.document["redriven"] == [{"id": shop["failed"], "task": "1-8"}]
    document = run("tasks", "show", "1-8", "--store", path, "--json").document
    assert (document["redrive_of"], document["args"], document["where"]) == (
        shop["failed"],
        [700],
        "ready",
    )
    again = run("tasks", "redrive", shop["failed"], "--store", path)
    assert again.out == f"{shop['failed']} → 1-8\n"


def test_tasks_redrive_filters_by_error_text(
    run: RunCommand, path: Path, store: Store, shop: dict[str, str]
) -> None:
    def redriven(*argv: object) -> list[str]:
        result = run("tasks", "redrive", *argv, "--store", path, "--json")
        return [task["id"] for task in result.document["redriven"]]

    assert redriven("--error", "no such words") == []
    assert redriven("--error", "CARD 7") == [shop["failed"]]
    assert redriven("--error", "our mind", "--state", "DEAD") == [shop["dead"]]
    assert redriven("--all") == [], "each of them once"


def test_tasks_redrive_honours_the_rate_option(
    run: RunCommand, path: Path, store: Store, shop: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    replace_rate_limit_sleep(monkeypatch, slept.append)
    run("tasks", "redrive", "--all", "--rate", "0.5", "--store", path)
    assert slept == [pytest.approx(2.0, abs=0.9)], "one at once, the other two seconds later"
    wrong = run("tasks", "redrive", "--all", "--rate", "0", "--store", path)
    assert wrong.error.startswith("invalid: ")


def test_tasks_redrive_stopped_by_sigint_exits_with_130(
    run: RunCommand, path: Path, store: Store, shop: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_rate_limit_sleep(monkeypatch, lambda _: signal.raise_signal(signal.SIGINT))
    result = run("tasks", "redrive", "--all", "--rate", "1", "--store", path)
    assert result.code == 130
    first, last = result.out.splitlines()
    assert first == f"{shop['failed']} → 1-8"
    assert last.startswith("stopped: ")
    rest = run("tasks", "redrive", "--all", "--store", path, "--json").document
    assert [task["id"] for task in rest["redriven"]] == [shop["dead"]]


def test_tasks_are_processed_page_by_page(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_selection, "PAGE", 2)
    new = [TaskToSubmit(codec.pack([[n], {}])) for n in range(5)]
    store.transact(operations.submit, SHOP, TaskSpec("pay"), new)
    args = argparse.Namespace(ids=[], limit=None, queue="", state="", name="", tag="", error="")
    batches: list[int] = []

    def record(tasks: list[TaskId]) -> list[None]:
        batches.append(len(tasks))
        return [None] * len(tasks)

    result = task_selection.for_each(
        store, SHOP, args, task_selection.OPEN_STATES, record, rate_per_s=1000.0
    )
    assert [task.seq for task, _ in result.made] == [1, 2, 3, 4, 5]
    assert batches == [2, 2, 1]


def test_process_batch_skips_selected_tasks_that_no_longer_exist(
    store: Store, shop: dict[str, str]
) -> None:
    result: selection.SelectionResult[TaskId, int] = selection.SelectionResult()
    missing = TaskId(1, 99)

    def redrive(tasks: list[TaskId]) -> list[int]:
        new_seqs: list[int] = store.transact(operations.redrive, SHOP, [task.seq for task in tasks])
        return new_seqs

    selected = [parse_task_id(shop["failed"]), missing, parse_task_id(shop["dead"])]
    selection.process_batch(redrive, selected, result, explicit=False)
    assert [str(task) for task, _ in result.made] == [shop["failed"], shop["dead"]]
    with pytest.raises(NotFound):
        selection.process_batch(redrive, selected, result, explicit=True)


def test_tasks_redrive_of_a_waiting_task_is_refused(
    run: RunCommand, path: Path, store: Store, shop: dict[str, str]
) -> None:
    assert run("tasks", "redrive", shop["ready"], "--store", path).error.startswith("invalid: ")


@pytest.mark.parametrize("action", ["cancel", "redrive"])
def test_tasks_cancel_and_redrive_require_one_valid_selection(
    run: RunCommand, path: Path, store: Store, shop: dict[str, str], action: str
) -> None:
    for argv in ((), ("1-1", "--queue", "x"), ("1-1", "--all"), ("--state", "completed")):
        assert run("tasks", action, *argv, "--store", path).code == 2
    assert run("tasks", action, "1-99", "--store", path).error.startswith("not_found: ")
    assert run("tasks", action, "x", "--store", path).error.startswith("bad_task_id: ")
    assert run("tasks", action, "--all", "--limit", 0, "--store", path).error.startswith("invalid")


# -- limits ----------------------------------------------------------------------------------------


def test_tasks_limit_sets_one_limit_and_prints_both(
    run: RunCommand, path: Path, store: Store, shop: dict[str, str]
) -> None:
    run("tasks", "limit", "mail", "--concurrency", 4, "--store", path)
    document = run("tasks", "limit", "mail", "--per-key", 1, "--json", store=path).document
    assert document == {"queue": "mail", "concurrency": 4, "per_key": 1}
    assert store.read(lambda txn: get_limits(txn, keys_of(SHOP), "mail")) == QueueLimits(4, 1)
    assert "any number" in run("tasks", "limit", "bad", "--store", path).out
    wrong = run("tasks", "limit", "mail", "--concurrency", -1, "--store", path)
    assert wrong.error.startswith("invalid: ")


def test_tasks_list_requires_a_universe_when_there_are_several(
    run: RunCommand, path: Path, store: Store
) -> None:
    submit(store, "pay", universe="east")
    submit(store, "pay", universe="west")
    assert "east" in run("tasks", "list", "--store", path).error
    document = run("tasks", "list", "--universe", "west", "--store", path, "--json").document
    assert (document["universe"], len(document["tasks"])) == ("west", 1)
    assert run("tasks", "list", "--universe", "south", "--store", path).error.startswith(
        "not_found"
    )


def test_tasks_list_does_not_create_a_store(run: RunCommand, tmp_path: Path) -> None:
    assert run("tasks", "list", "--store", tmp_path / "none").error.startswith("not_found: ")
    assert not (tmp_path / "none").exists()

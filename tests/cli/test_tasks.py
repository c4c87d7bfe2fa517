"""`holdfast tasks list | show | cancel | redrive | limit`."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from holdfast import codec
from holdfast.cli import task_selection
from holdfast.clock import S
from holdfast.errors import NotFound
from holdfast.store.api import Store
from holdfast.tasks import coordinator
from holdfast.tasks.coordinator import End, New, Report
from holdfast.tasks.ids import TaskId, parse_task
from holdfast.tasks.rows import Limits, Spec, keys_of, limits_of
from tests.cli.conftest import Run, pause_by

SHOP = "shop"


def submit(store: Store, name: str, *args: Any, universe: str = SHOP, **spec: Any) -> str:
    options = {one: spec.pop(one) for one in ("key", "limit", "after", "delay_ns") if one in spec}
    new = New(codec.pack([list(args), {}]), **options)
    [seq] = store.transact(coordinator.submit, universe, Spec(name, **spec), [new])
    return f"1-{seq}"


def end(store: Store, queue: str, how: End, **said: Any) -> None:
    """Lease what is there of a queue, and report it all alike."""
    leased = store.transact(coordinator.lease, SHOP, "worker", [queue], 100)
    reports = [Report(one.seq, one.lease, how, **said) for one in leased.grants]
    store.transact(coordinator.settle, SHOP, "worker", 1, reports)


@pytest.fixture
def shop(store: Store) -> dict[str, str]:
    """A task in every place."""
    found = {"completed": submit(store, "count", 3, queue="done")}
    end(store, "done", End.OK, result=codec.pack({"n": 3}))
    found["failed"] = submit(store, "pay", 700, queue="bad")
    end(store, "bad", End.REFUSED, reason="declined", error="card 7 was declined\nat line 3")
    found["leased"] = submit(store, "pay", 1, queue="busy")
    store.transact(coordinator.lease, SHOP, "worker", ["busy"], 1)
    found["dead"] = submit(store, "pay", 800)
    store.transact(coordinator.cancel, SHOP, [4], "changed our mind")
    found["ready"] = submit(store, "pay", 900, priority=3)
    found["delayed"] = submit(store, "pay", 900, delay_ns=3600 * S)
    found["blocked"] = submit(store, "pay", 900, after=(3,))
    return found


# -- looking ---------------------------------------------------------------------------------------


def test_list_counts_by_queue_and_shows_the_newest_first(
    run: Run, path: Path, store: Store, shop: dict[str, str]
) -> None:
    told = run("tasks", "list", "--store", path, "--json").document
    counts = {row["queue"]: row for row in told["queues"]}
    assert counts["bad"]["failed"] == 1
    assert counts["default"]["waiting"] == 3
    assert [row["id"] for row in told["tasks"]] == [f"1-{n}" for n in range(7, 0, -1)]
    text = run("tasks", "list", "--store", path).out
    assert text.splitlines()[0].split()[:3] == ["queue", "ready", "suspect"]
    assert "card 7 was declined" in text
    assert "at line 3" not in text


@pytest.mark.parametrize(
    "where", ["completed", "failed", "leased", "dead", "ready", "delayed", "blocked"]
)
def test_list_shows_what_is_somewhere(
    run: Run, path: Path, store: Store, shop: dict[str, str], where: str
) -> None:
    told = run("tasks", "list", "--state", where, "--store", path, "--json").document
    assert [row["id"] for row in told["tasks"]] == [shop[where]]


def test_list_takes_a_queue_and_a_name(
    run: Run, path: Path, store: Store, shop: dict[str, str]
) -> None:
    told = run("tasks", "list", "--queue", "done", "--store", path, "--json").document
    assert [row["queue"] for row in told["queues"]] == ["done"]
    assert [row["id"] for row in told["tasks"]] == [shop["completed"]]
    told = run("tasks", "list", "--name", "count", "--store", path, "--json").document
    assert [row["id"] for row in told["tasks"]] == [shop["completed"]]
    assert "no such tasks" in run("tasks", "list", "--name", "x", "--store", path).out


def test_list_goes_on_from_its_cursor(run: Run, path: Path, store: Store) -> None:
    for _ in range(3):
        submit(store, "pay")
    first = run("tasks", "list", "--limit", 2, "--store", path, "--json").document
    assert [row["id"] for row in first["tasks"]] == ["1-3", "1-2"]
    rest = run("tasks", "list", "--cursor", first["cursor"], "--store", path, "--json").document
    assert ([row["id"] for row in rest["tasks"]], rest["cursor"]) == (["1-1"], None)
    assert first["cursor"] in run("tasks", "list", "--limit", 2, "--store", path).out


def test_a_store_without_tasks_says_so(run: Run, path: Path, store: Store) -> None:
    assert run("tasks", "list", "--store", path).error.startswith("not_found: ")


def test_show_tells_where_a_task_is_and_why(
    run: Run, path: Path, store: Store, shop: dict[str, str]
) -> None:
    words = {
        "completed": '{"n": 3}',
        "failed": "    at line 3",
        "leased": "worker has it, attempt 1",
        "dead": "it was given up: changed our mind",
        "ready": "priority 3",
        "delayed": "not before",
        "blocked": f"others have to complete first: {shop['leased']}",
    }
    for where, word in words.items():
        text = run("tasks", "show", shop[where], "--store", path).out
        assert word in text, text
        assert (
            run("tasks", "show", shop[where], "--store", path, "--json").document["where"] == where
        )


def test_show_writes_arguments_as_in_a_call(run: Run, path: Path, store: Store) -> None:
    args = codec.pack([["a.png", 80], {"crop": True}])
    store.transact(coordinator.submit, SHOP, Spec("resize"), [New(args)])
    assert 'arguments  "a.png", 80, crop=true' in run("tasks", "show", "1-1", "--store", path).out


def test_show_names_the_next_step_for_what_has_failed(
    run: Run, path: Path, store: Store, shop: dict[str, str]
) -> None:
    text = run("tasks", "show", shop["failed"], "--store", path).out
    command = text.splitlines()[-1].partition("holdfast ")[2]
    assert run(*command.split()).code == 0
    assert "another try" not in run("tasks", "show", shop["failed"], "--store", path).out


@pytest.mark.parametrize(
    ("id", "code"), [("1-99", "not_found"), ("2-1", "not_found"), ("7", "bad_task_id")]
)
def test_show_of_what_is_not_there(
    run: Run, path: Path, store: Store, shop: dict[str, str], id: str, code: str
) -> None:
    assert run("tasks", "show", id, "--store", path).error.startswith(f"{code}: ")


def test_control_characters_do_not_reach_the_screen(run: Run, path: Path, store: Store) -> None:
    submit(store, "pay\x1b[31m", "\x1b[32m")
    for command in (("list",), ("show", "1-1")):
        assert "\x1b" not in run("tasks", *command, "--store", path).out


# -- cancel ----------------------------------------------------------------------------------------


def test_cancel_by_id_ends_waiting_and_running_tasks(
    run: Run, path: Path, store: Store, shop: dict[str, str]
) -> None:
    ids = [shop[where] for where in ("ready", "leased", "completed")]
    ran = run("tasks", "cancel", *ids, "--reason", "too late", "--store", path, "--json")
    assert [one["cancelled"] for one in ran.document["cancelled"]] == [True, True, False]
    told = run("tasks", "show", shop["ready"], "--store", path, "--json").document
    assert (told["state"], told["reason"]) == ("DEAD", "too late")


def test_cancel_by_condition(run: Run, path: Path, store: Store, shop: dict[str, str]) -> None:
    def cancelled(*argv: object) -> list[str]:
        ran = run("tasks", "cancel", *argv, "--store", path, "--json")
        return [one["id"] for one in ran.document["cancelled"]]

    assert cancelled("--queue", "busy") == [shop["leased"]]
    assert cancelled("--state", "delayed") == [shop["delayed"]]
    # What waited for the one that was cancelled is dead already.
    assert cancelled("--name", "pay") == [shop["ready"]]
    assert cancelled("--all") == []


def test_cancel_of_hundreds(run: Run, path: Path, store: Store) -> None:
    new = [New(codec.pack([[n], {}])) for n in range(750)]
    store.transact(coordinator.submit, SHOP, Spec("pay"), new)
    ran = run("tasks", "cancel", "--all", "--limit", 620, "--store", path, "--json")
    assert len(ran.document["cancelled"]) == 620
    told = run("tasks", "list", "--store", path, "--json").document["queues"]
    assert [(row["ready"], row["dead"]) for row in told] == [(130, 620)]


def test_a_dry_run_changes_nothing(
    run: Run, path: Path, store: Store, shop: dict[str, str]
) -> None:
    told = run(
        "tasks", "cancel", "--queue", "busy", "--dry-run", "--store", path, "--json"
    ).document
    assert told == {"would_cancel": [shop["leased"]]}
    told = run("tasks", "redrive", "--all", "--dry-run", "--store", path, "--json").document
    assert told == {"would_redrive": [shop["failed"], shop["dead"]]}
    shown = run("tasks", "show", shop["leased"], "--store", path, "--json").document
    assert shown["state"] == "LEASED"


# -- redrive ---------------------------------------------------------------------------------------


def test_redrive_by_id_makes_a_task_in_its_place(
    run: Run, path: Path, store: Store, shop: dict[str, str]
) -> None:
    ran = run("tasks", "redrive", shop["failed"], "--store", path, "--json")
    assert ran.document["redriven"] == [{"id": shop["failed"], "task": "1-8"}]
    told = run("tasks", "show", "1-8", "--store", path, "--json").document
    assert (told["redrive_of"], told["args"], told["where"]) == (shop["failed"], [700], "ready")
    again = run("tasks", "redrive", shop["failed"], "--store", path)
    assert again.out == f"{shop['failed']} → 1-8\n"


def test_redrive_by_words_of_the_error(
    run: Run, path: Path, store: Store, shop: dict[str, str]
) -> None:
    def redriven(*argv: object) -> list[str]:
        ran = run("tasks", "redrive", *argv, "--store", path, "--json")
        return [one["id"] for one in ran.document["redriven"]]

    assert redriven("--error", "no such words") == []
    assert redriven("--error", "CARD 7") == [shop["failed"]]
    assert redriven("--error", "our mind", "--state", "dead") == [shop["dead"]]
    assert redriven("--all") == [], "each of them once"


def test_redrive_keeps_its_rate(
    run: Run, path: Path, store: Store, shop: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    pause_by(monkeypatch, slept.append)
    run("tasks", "redrive", "--all", "--rate", "0.5", "--store", path)
    assert slept == [pytest.approx(2.0, abs=0.9)], "one at once, the other two seconds later"
    wrong = run("tasks", "redrive", "--all", "--rate", "0", "--store", path)
    assert wrong.error.startswith("invalid: ")


def test_an_interrupt_ends_it_between_two_commits_and_says_so(
    run: Run, path: Path, store: Store, shop: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pause_by(monkeypatch, lambda _: signal.raise_signal(signal.SIGINT))
    ran = run("tasks", "redrive", "--all", "--rate", "1", "--store", path)
    assert ran.code == 130
    first, last = ran.out.splitlines()
    assert first == f"{shop['failed']} → 1-8"
    assert last.startswith("stopped: ")
    rest = run("tasks", "redrive", "--all", "--store", path, "--json").document
    assert [one["id"] for one in rest["redriven"]] == [shop["dead"]]


def test_what_is_forgotten_meanwhile_stops_no_other(store: Store, shop: dict[str, str]) -> None:
    done = task_selection.Done()
    gone = TaskId(1, 99)

    def redrive(some: list[TaskId]) -> list[int]:
        made: list[int] = store.transact(coordinator.redrive, SHOP, [task.seq for task in some])
        return made

    wanted = [parse_task(shop["failed"]), gone, parse_task(shop["dead"])]
    task_selection.take(redrive, wanted, done, named=False)
    assert [str(task) for task, _ in done.made] == [shop["failed"], shop["dead"]]
    with pytest.raises(NotFound):
        task_selection.take(redrive, wanted, done, named=True)


def test_a_task_that_waits_is_not_redriven(
    run: Run, path: Path, store: Store, shop: dict[str, str]
) -> None:
    assert run("tasks", "redrive", shop["ready"], "--store", path).error.startswith("invalid: ")


@pytest.mark.parametrize("action", ["cancel", "redrive"])
def test_it_must_be_said_which(
    run: Run, path: Path, store: Store, shop: dict[str, str], action: str
) -> None:
    for argv in ((), ("1-1", "--queue", "x"), ("1-1", "--all"), ("--state", "completed")):
        assert run("tasks", action, *argv, "--store", path).code == 2
    assert run("tasks", action, "1-99", "--store", path).error.startswith("not_found: ")
    assert run("tasks", action, "x", "--store", path).error.startswith("bad_task_id: ")
    assert run("tasks", action, "--all", "--limit", 0, "--store", path).error.startswith("invalid")


# -- limits ----------------------------------------------------------------------------------------


def test_limits_are_set_one_at_a_time_and_told(
    run: Run, path: Path, store: Store, shop: dict[str, str]
) -> None:
    run("tasks", "limit", "mail", "--concurrency", 4, "--store", path)
    told = run("tasks", "limit", "mail", "--per-key", 1, "--store", path, "--json").document
    assert told == {"queue": "mail", "concurrency": 4, "per_key": 1}
    assert store.read(lambda txn: limits_of(txn, keys_of(SHOP), "mail")) == Limits(4, 1)
    assert "any number" in run("tasks", "limit", "bad", "--store", path).out
    wrong = run("tasks", "limit", "mail", "--concurrency", -1, "--store", path)
    assert wrong.error.startswith("invalid: ")


def test_of_several_universes_one_must_be_named(run: Run, path: Path, store: Store) -> None:
    submit(store, "pay", universe="east")
    submit(store, "pay", universe="west")
    assert "east" in run("tasks", "list", "--store", path).error
    told = run("tasks", "list", "--universe", "west", "--store", path, "--json").document
    assert (told["universe"], len(told["tasks"])) == ("west", 1)
    assert run("tasks", "list", "--universe", "south", "--store", path).error.startswith(
        "not_found"
    )


def test_no_store_is_made_by_looking(run: Run, tmp_path: Path) -> None:
    assert run("tasks", "list", "--store", tmp_path / "none").error.startswith("not_found: ")
    assert not (tmp_path / "none").exists()

"""Each blocker code: caused, explained, and gone when its condition is mended. The page of the codes."""

from __future__ import annotations

import argparse
import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from holdfast.blockers.codes import CODES
from holdfast.blockers.effects import amount_text
from holdfast.blockers.explain import explain
from holdfast.blockers.runbooks import PAGES, path_of
from holdfast.cli import COMMANDS
from holdfast.clock import S
from holdfast.effects.budget import MONEY
from holdfast.tasks import operations as task_operations
from holdfast.tasks.model import TaskSpec, get_counts, keys_of
from holdfast.tasks.operations import TaskToSubmit
from tests.blockers import work_cases, world_cases
from tests.blockers.scene import CASES, Case

MODULES = ("holdfast.blockers.explain", "holdfast.blockers.codes", "holdfast.blockers.runbooks")

ALL = [
    pytest.param(code, fn, id=f"{code}-{fn.__name__}")
    for code, cases in CASES.items()
    for fn in cases
]


def test_every_code_has_a_case() -> None:
    assert world_cases, work_cases
    assert set(CASES) == set(CODES)


@pytest.mark.parametrize(("code", "fn"), ALL)
def test_blocker_appears_with_its_condition_and_goes_with_it(code: str, fn: Case) -> None:
    steps = fn()
    scene = next(steps)
    answer = scene.why()
    assert answer["subject"] == f"{scene.kind}/{scene.id}" or scene.kind == "run"
    [found, *_] = [one for one in answer["blockers"] if one["code"] == code]
    assert found["text"]
    is_flow = scene.kind == "flow" and code == "replay_diverged"
    assert found["runbook"] == path_of("flows-parked" if is_flow else PAGES[code])
    assert "{" not in found["action"]
    assert all(found[name] is None or found[name] > 0 for name in ("since", "until"))
    assert answer["moving"] == all(CODES[one["code"]].passes for one in answer["blockers"])
    assert next(steps, None) is None
    assert code not in [one["code"] for one in scene.blockers()]


# -- the page --------------------------------------------------------------------------------------


def page_rows() -> dict[str, tuple[str, str, str]]:
    """The table of `docs/why.md`: runbook, meaning and action by code."""
    text = (Path(__file__).parents[2] / "docs" / "why.md").read_text(encoding="utf-8")
    pattern = r"^\| \[`([a-z_]+)`\]\((.*?)\) \| (.*?) \| (.*?) \|$"
    return {code: (runbook, *rest) for code, runbook, *rest in re.findall(pattern, text, re.M)}


def test_page_and_registry_have_the_same_codes_meanings_and_actions() -> None:
    registry = {
        one.code: (
            f"runbooks/{PAGES[one.code]}.md",
            one.meaning,
            re.sub(r"\{(\w+)\}", lambda m: m[1].upper(), one.action) or "wait",
        )
        for one in CODES.values()
    }
    assert page_rows() == registry


PARSED = re.compile(r"`(holdfast [^`]+)`")


@pytest.mark.parametrize("code", [one for one in CODES if "`holdfast" in CODES[one].action])
def test_command_of_an_action_is_a_command_of_the_product(code: str) -> None:
    """Replace the words for the operator by values, and parse the command."""
    for text in PARSED.findall(CODES[code].action):
        filled = re.sub(r"\{(\w+)\}", lambda m: "--calendar" if m[1] == "flag" else "3", text)
        words = re.sub(r"\b(N|TYPE|JSON|MODULE:APP)\b", "3", filled).split()[1:]
        parser = argparse.ArgumentParser()
        importlib.import_module(COMMANDS[words[0]].module).configure(parser)
        if words[0] == "why":
            words[1:3] = ["queue", "3"]
        parser.parse_args(words[1:])


# -- sentences -------------------------------------------------------------------------------------


def text_of(fn: Case) -> str:
    return next(fn()).blockers()[0]["text"]


def test_world_without_capable_workers_names_its_type_and_the_workers() -> None:
    assert text_of(world_cases.no_worker_has_the_world_type) == (
        "waits for a worker that knows `Buyer` (2 workers live, neither declares it)"
    )


def test_parked_world_names_the_time_and_the_reason() -> None:
    found = next(world_cases.stuck()).blockers()[0]
    assert re.match(
        r"parked since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC because reducer_stuck: the lease was lost",
        found["text"],
    )
    assert found["action"].endswith("`holdfast worlds resume Buyer/ada --universe shop`")


def test_budget_names_its_amounts_its_calls_and_the_oldest_of_them() -> None:
    scene = next(world_cases.effect_behind_the_reservation_of_another())
    tokens = world_cases.COST_BOUND[world_cases.TOKENS]
    assert scene.blockers()[0]["text"].startswith(
        f"budget `talk`: {tokens:,} of {tokens + 1:,} tokens set aside by 1 call, oldest "
    )
    assert amount_text(MONEY, 480_000) == "0.48"
    assert amount_text(MONEY, 500_000) == "0.50"
    assert amount_text(MONEY, 123) == "0.000123"


# -- bounds ----------------------------------------------------------------------------------------


class RowCount:
    """A read transaction that counts the rows that it returns and the keys that it reads."""

    def __init__(self, txn: Any) -> None:
        self._txn = txn
        self.rows = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._txn, name)

    def get(self, key: bytes) -> bytes | None:
        self.rows += 1
        row: bytes | None = self._txn.get(key)
        return row

    def count(self, key: bytes) -> int:
        self.rows += 1
        n: int = self._txn.count(key)
        return n

    def scan(self, *args: Any) -> Any:
        found = self._txn.scan(*args)
        self.rows += len(found) + 1
        return found


def rows_read(rig: Any, kind: str, id: str) -> int:
    def read(txn: Any) -> int:
        counted = RowCount(txn)
        explain(counted, "u", kind, id, 0)  # type: ignore[arg-type]
        return counted.rows

    rows: int = rig.store.read(read)
    return rows


def test_reads_do_not_grow_with_a_backlog_of_100_000_tasks() -> None:
    rig = work_cases.task_rig()
    rows: list[dict[str, int]] = []
    spec = TaskSpec("work")
    subjects = (("task", "1-1"), ("queue", "default"), ("universe", "u"))
    for batches in (1, 99):
        for _ in range(batches):
            new = [TaskToSubmit(b"")] * 1_000
            rig.store.transact(task_operations.submit, "u", spec, new)
            rig.store.transact(task_operations.submit, "u", spec, [TaskToSubmit(b"", 9 * S)])
        rows.append({kind: rows_read(rig, kind, id) for kind, id in subjects})
    few, many = rows
    assert rig.store.read(get_counts, keys_of("u"), "default").ready == 100_000
    # A range of tasks may take one more seek than a single task.
    assert all(many[kind] <= few[kind] + 2 for kind in few), (few, many)
    assert max(many.values()) < 60

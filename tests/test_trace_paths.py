"""The trace of module paths: a short run in real processes, checked against the stored limits."""

from __future__ import annotations

import re
import sys

import pytest

from tests.processes import Proc
from tools import trace_paths
from tools.trace_paths import Module, TracedCall

ROUNDS = 8


@pytest.fixture(scope="module")
def printed() -> dict[str, list[str]]:
    """The lines of each path, printed by one short run of the tool."""
    command = [sys.executable, str(trace_paths.ROOT / "tools" / "trace_paths.py")]
    with Proc.spawn([*command, "--check", "--rounds", str(ROUNDS)], ready=None) as tool:
        code = tool.wait(timeout_s=240)
        lines = list(tool.lines)
    assert code == 0, "\n".join(lines)
    paths: dict[str, list[str]] = {}
    for line in lines:
        if start := re.match(r"(\w+): \d+ modules", line):
            paths[start[1]] = []
        paths[list(paths)[-1]].append(line)
    return paths


def test_each_traced_path_stays_within_its_module_limit(printed):
    counts = {
        path: len([line for line in lines if " functions " in line])
        for path, lines in printed.items()
    }
    assert set(counts) == set(trace_paths.LIMITS)
    assert all(0 < counts[path] <= trace_paths.LIMITS[path] for path in counts), counts


@pytest.mark.parametrize(
    ("path", "modules"),
    [
        ("task", ["app/submission.py", "tasks/submit.py", "tasks/reports.py"]),
        ("message", ["app/world_handle.py", "durable/inbox.py", "world/reducer.py"]),
        ("effect", ["world/context.py", "world/intents.py", "workers/effects/handler.py"]),
    ],
)
def test_traced_path_contains_the_steps_of_its_documented_flow_in_order(printed, path, modules):
    names = [line.split()[1] for line in printed[path] if " functions " in line]
    assert [name for name in names if name in modules] == modules


def test_trace_covers_the_client_the_worker_and_the_writer(printed):
    for path, lines in printed.items():
        processes = {
            name
            for line in lines
            for name in re.findall(r"client|worker|writer", line.rpartition(" ms ")[2])
        }
        assert {"worker", "writer"} <= processes
        assert ("client" in processes) is (path != "effect")


def test_module_that_runs_in_half_of_the_rounds_is_occasional():
    often, rarely = Module("a.py", rounds={1, 2, 3}), Module("b.py", rounds={1, 2})
    assert trace_paths.split_by_frequency([often, rarely], 4) == ([often], [rarely])


def test_modules_of_a_trace_are_ordered_by_their_first_call_in_a_round():
    calls = [
        TracedCall(10, 1, "client", "a.py", "f"),
        TracedCall(12, 1, "writer", "b.py", "g"),
        TracedCall(19, 1, "worker", "a.py", "h"),
        TracedCall(30, 2, "client", "c.py", "f"),
    ]
    modules = trace_paths.modules_of(calls, range(1, 2))
    assert [(module.name, module.offsets_ns) for module in modules] == [
        ("a.py", [0]),
        ("b.py", [2]),
    ]
    assert set(modules[0].processes) == {"client", "worker"}
    assert set(modules[0].functions) == {"f", "h"}


def test_parts_of_a_path_count_store_modules_as_the_commit():
    modules = [Module("tasks/submit.py"), Module("store/txn.py"), Module("clock.py")]
    assert trace_paths.count_parts(modules) == {"feature": 1, "commit": 1, "base": 1}

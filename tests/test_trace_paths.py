"""The trace of module paths: a short run in real processes, checked against the stored limits."""

from __future__ import annotations

import re
import sys

import pytest

from tests.processes import Proc
from tools import trace_paths
from tools.trace_paths import Module, TracedCall

ROUNDS = 8


# Steps of the paths in ARCHITECTURE.md, in their order.
STEPS = {
    "task": ["app/submission.py", "tasks/submit.py", "tasks/reports.py"],
    "message": ["app/world_handle.py", "durable/inbox.py", "world/reducer.py"],
    "effect": ["world/context.py", "world/intents.py", "workers/effects/handler.py"],
}


@pytest.mark.slow
def test_traced_paths_follow_their_flows_within_their_module_limits():
    command = [sys.executable, str(trace_paths.ROOT / "tools" / "trace_paths.py"), "--check"]
    with Proc.spawn([*command, "--rounds", str(ROUNDS)], ready=None) as tool:
        code = tool.wait(timeout_s=240)
        printed = "\n".join([*tool.lines, *tool.errors])
    assert code == 0, printed
    paths = dict(re.findall(r"(?m)^(\w+): \d+ modules(.*(?:\n .*)*)", printed))
    assert set(paths) == set(trace_paths.LIMITS)
    for path, text in paths.items():
        lines = [line for line in text.splitlines() if " functions " in line]
        names = [line.split()[1] for line in lines]
        assert 0 < len(names) <= trace_paths.LIMITS[path]
        assert [name for name in names if name in STEPS[path]] == STEPS[path]
        processes = {word for line in lines for word in line.rpartition(" ms ")[2].split(", ")}
        expected = {"worker", "writer"} | ({"client"} if path != "effect" else set())
        assert {process.strip() for process in processes} == expected


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

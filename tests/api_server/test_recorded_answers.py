"""Task list, task and queues over HTTP, and events sent in two ways: one implementation each, the recorded answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.api_server import recorded_answers
from tests.api_server.served_rig import ServedRig, rig

__all__ = ["rig"]

MODULES = (
    "holdfast.ops.api.tasks",
    "holdfast.ops.http.task_routes",
    "holdfast.ops.world_operations",
)


@pytest.mark.timeout(60)
@pytest.mark.spec("DESIGN", "15", "one implementation of a route keeps the recorded answers")
def test_answers_are_the_recorded_ones(rig: ServedRig) -> None:
    recorded = json.loads(recorded_answers.FILE.read_text(encoding="utf-8"))
    found = recorded_answers.answers(rig.client(recorded_answers.serve(rig)))
    assert [one["request"] for one in found] == [one["request"] for one in recorded]
    differing = [pair for pair in zip(recorded, found, strict=True) if not contains(*pair)]
    assert not differing


def contains(recorded: Any, found: Any) -> bool:
    """Whether an answer is the recorded one. Its objects may have further members."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        return all(name in found and contains(one, found[name]) for name, one in recorded.items())
    if isinstance(recorded, list) and isinstance(found, list):
        return len(recorded) == len(found) and all(map(contains, recorded, found))
    return bool(recorded == found)

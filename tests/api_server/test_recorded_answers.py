"""Task list, task and queues over HTTP, and events sent in two ways: one implementation each, the recorded answers."""

from __future__ import annotations

import json

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
    differing = [(was, now) for was, now in zip(recorded, found, strict=True) if was != now]
    assert not differing

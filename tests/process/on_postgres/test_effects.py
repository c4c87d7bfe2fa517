"""Adapters and timer workers on PostgreSQL: killed between call and receipt, stopped, restarted late."""

from __future__ import annotations

import pytest

from tests.process import test_effects_killed
from tests.process.test_effects_killed import (
    store,
    test_adapter_stopped_during_its_call_delivers_no_second_receipt,
    test_each_effect_has_one_receipt_when_adapters_are_killed_before_the_receipt,
    test_timers_due_without_a_timer_worker_fire_once_later,
    till,
    up,
    worlds,
)

__all__ = [
    "store",
    "test_adapter_stopped_during_its_call_delivers_no_second_receipt",
    "test_each_effect_has_one_receipt_when_adapters_are_killed_before_the_receipt",
    "test_timers_due_without_a_timer_worker_fire_once_later",
    "till",
    "up",
    "worlds",
]


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_effects_killed, "KILLS", 4)
    monkeypatch.setattr(test_effects_killed, "ADAPTERS", 2)

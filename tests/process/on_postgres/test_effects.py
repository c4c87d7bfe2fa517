"""Adapters and timer workers on PostgreSQL, killed between call and receipt, stopped, away for a while."""

from __future__ import annotations

import pytest

from tests.process import test_effects_killed
from tests.process.test_effects_killed import (
    store,
    test_adapters_killed_between_call_and_receipt_leave_one_receipt_for_each_intent,
    test_an_adapter_that_stood_still_during_its_call_brings_no_second_receipt,
    test_timers_that_fell_due_while_nobody_was_there_fire_once,
    till,
    up,
    worlds,
)

__all__ = [
    "store",
    "test_adapters_killed_between_call_and_receipt_leave_one_receipt_for_each_intent",
    "test_an_adapter_that_stood_still_during_its_call_brings_no_second_receipt",
    "test_timers_that_fell_due_while_nobody_was_there_fire_once",
    "till",
    "up",
    "worlds",
]


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_effects_killed, "KILLS", 4)
    monkeypatch.setattr(test_effects_killed, "ADAPTERS", 2)

"""Worlds and their effects in one process on PostgreSQL, which is killed during steps."""

from __future__ import annotations

import pytest

from tests.process import test_steps_killed
from tests.process.test_steps_killed import (
    test_steps_are_neither_lost_nor_repeated_when_their_process_is_killed,
)

__all__ = ["test_steps_are_neither_lost_nor_repeated_when_their_process_is_killed"]


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_steps_killed, "KILLS", 2)
    monkeypatch.setattr(test_steps_killed, "BETWEEN", 30)

"""Worlds and their effects in one process on PostgreSQL, killed while steps are under way."""

from __future__ import annotations

import pytest

from tests.process import test_steps_killed
from tests.process.test_steps_killed import (
    test_a_process_killed_in_the_middle_of_steps_loses_none_and_doubles_none,
)

__all__ = ["test_a_process_killed_in_the_middle_of_steps_loses_none_and_doubles_none"]


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_steps_killed, "KILLS", 2)
    monkeypatch.setattr(test_steps_killed, "BETWEEN", 30)

"""Fixtures: a store directory, checked at the end of the test for a writer or any other process left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.config import WriterLimits
from tests.process.watch import assert_no_client_left

# Short, so that a test does not wait long for its writer to exit.
LIMITS = WriterLimits(idle_exit_s=0.2, reader_check_s=0.2)


@pytest.fixture
def limits() -> WriterLimits:
    return LIMITS


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "store"
    yield path
    assert_no_client_left(path)

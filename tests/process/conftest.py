"""A directory for a store; when the test ends, its writer has left and nobody else is there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.config import WriterLimits
from tests.process.watch import assert_nobody_is_left

# Short, so that a test need not wait for its writer to leave.
LIMITS = WriterLimits(linger_s=0.2, reader_check_s=0.2)


@pytest.fixture
def limits() -> WriterLimits:
    return LIMITS


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "store"
    yield path
    assert_nobody_is_left(path, LIMITS.linger_s, slack_s=10)

"""The SDK of OpenTelemetry for one test, with its in-memory exporter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.traces.recorded import Recorded, configure_sdk, remove_sdk


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    """The finished spans of a process that samples every trace."""
    try:
        yield configure_sdk()
    finally:
        remove_sdk()

"""The tests with real processes, on PostgreSQL instead of a store directory.

A module here imports tests from `tests/process` unchanged, together with their fixtures. The fixture `home` is
the URL of their store.
"""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from tests.postgres import fresh_url
from tests.process.watch import until


@pytest.fixture
def home() -> Iterator[str]:
    """The URL of a new database. At the end of the test it must have no client connections."""
    url = fresh_url(empty=True)
    yield url
    with psycopg.connect(url, autocommit=True) as connection:
        # The server detects the end of a killed process with a delay.
        until(
            lambda: (
                connection.execute(
                    "SELECT count(*) = 0 FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> pg_backend_pid() "
                    "AND backend_type = 'client backend'"
                ).fetchone()
                == (True,)
            ),
            "the end of all connections",
            timeout_s=15,
        )

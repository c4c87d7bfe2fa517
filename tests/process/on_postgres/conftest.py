"""The tests of real processes, with a database where the others have a directory.

A module here takes tests from the one beside it as they are, with the fixtures that they ask for; `home` is
where their store lives.
"""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from tests.postgres import fresh_url
from tests.process.watch import until


@pytest.fixture
def home() -> Iterator[str]:
    """The URL of a database of its own; when the test ends, nobody is connected to it any more."""
    url = fresh_url()
    yield url
    with psycopg.connect(url, autocommit=True) as connection:
        # A killed process is gone before the server has noticed.
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

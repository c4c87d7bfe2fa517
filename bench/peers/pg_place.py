"""Stores on PostgreSQL: one server for all runs of a suite, a new database for each turn.

`serving` starts and ends the server. Inside it, `server()` returns the server, and a `PgPlace` creates its
stores there. A `UrlPlace` uses a given store.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers import install
from bench.peers.process import Load, ProcessFailed
from bench.place import Place, new_directory

SCRIPT = Path(__file__).with_name("pg_server.py")
# Duration of the reference measurement. pgbench takes whole seconds.
INSERT_S = 2


class PostgresServer:
    def __init__(self, directory: Path) -> None:
        self._load = Load([install.interpreter(), SCRIPT, directory / "pg"])
        self._numbers = itertools.count(1)
        self.settings: dict[str, str] = self._load.ask("settings")

    @contextlib.contextmanager
    def database(self, name: str) -> Iterator[str]:
        """The URL of a new database, which is dropped afterwards."""
        unique = f"{name}_{next(self._numbers)}"
        url: str = self._load.ask("create", name=unique)["url"]
        try:
            yield url
        finally:
            self._load.ask("drop", name=unique)

    def inserts_per_s(self, connections: int, seconds: int = INSERT_S) -> float:
        """One INSERT and its commit per transaction, on `connections` connections."""
        rate: float = self._load.ask("insert", connections=connections, seconds=seconds)["rate"]
        return rate

    def close(self) -> None:
        self._load.close(60.0)


_serving: list[PostgresServer] = []


def server() -> PostgresServer:
    if not _serving:
        raise ProcessFailed("no PostgreSQL server runs: use `serving`")
    return _serving[-1]


@contextlib.contextmanager
def serving(parent: Path) -> Iterator[PostgresServer]:
    with new_directory(parent) as directory:
        started = PostgresServer(directory)
        _serving.append(started)
        try:
            yield started
        finally:
            _serving.remove(started)
            started.close()


@contextlib.contextmanager
def given_or_new_database(url: str | None, parent: Path) -> Iterator[str]:
    """The given store, or a new database on a separate server."""
    if url:
        yield url
        return
    with serving(parent) as started, started.database("alone") as made:
        yield made


@dataclass(frozen=True)
class PgPlace(Place):
    """Each store is the URL of a new database."""

    @contextlib.contextmanager
    def store(self, name: str) -> Iterator[Any]:
        with server().database(f"holdfast_{name}") as url:
            yield url


@dataclass(frozen=True)
class UrlPlace(Place):
    """An existing store, which is kept."""

    url: str = ""

    @contextlib.contextmanager
    def store(self, name: str) -> Iterator[Any]:
        yield self.url

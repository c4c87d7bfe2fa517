"""DBOS on PostgreSQL, which listens on a private socket alone. Worker and client are processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.peers import install
from bench.peers.process import Load
from bench.peers.suite import percentile
from bench.peers.workload import BATCH, KEYS, LATENCY_PER_S, SENDERS, Amount

SCRIPT = Path(__file__).with_name("dbos_load.py")


class Dbos:
    name = "dbos"
    amount = Amount(per_key=10, hot=200, latency=100)

    def __init__(self) -> None:
        self._python = install.interpreter()

    def settings(self) -> dict[str, str]:
        with (
            TemporaryDirectory(dir=install.HOME) as directory,
            self._load("postgres", str(Path(directory) / "pg")) as postgres,
        ):
            server_settings = postgres.ask("settings")
        version = server_settings.pop("server_version")
        return {
            "version": f"{install.version(self._python, 'dbos')}, PostgreSQL {version}",
            "durability": ", ".join(f"{name} {value}" for name, value in server_settings.items()),
            **self.ways(),
        }

    def ways(self) -> dict[str, str]:
        """How the system performs each part of the workload."""
        return {
            "handler": "a workflow, one step a message; queues polled every 20 ms (default 1 s)",
            "batch": f"send_bulk of {BATCH} messages to {KEYS} workflows",
            "senders": f"{SENDERS} threads enqueue, a partition a key, one at a time in each",
            "latency": "enqueue, until the result, polled every 5 ms (default 1 s)",
        }

    @contextlib.contextmanager
    def turn(self, directory: Path) -> Iterator[Any]:
        with (
            self.database(directory) as url,
            self._load("worker", url),
            self._load("client", url) as client,
        ):
            yield DbosTurn(client)

    @contextlib.contextmanager
    def database(self, directory: Path) -> Iterator[str]:
        with self._load("postgres", str(directory / "pg")) as postgres:
            yield postgres.ask("url")["url"]

    def _load(self, role: str, argument: str) -> Load:
        return Load([self._python, SCRIPT, role, argument])


class DbosTurn:
    def __init__(self, client: Load) -> None:
        self._client = client
        client.ask("senders", keys=KEYS, per_key=1, callers=SENDERS)

    def batch(self, amount: Amount) -> dict[str, float]:
        answer = self._client.ask("batch", keys=KEYS, per_key=amount.per_key, size=BATCH)
        return {"batch": answer["answer"]}

    def senders(self, amount: Amount) -> dict[str, float]:
        answer = self._client.ask("senders", keys=KEYS, per_key=amount.per_key, callers=SENDERS)
        return {"senders": answer["answer"]}

    def hot(self, amount: Amount) -> dict[str, float]:
        answer = self._client.ask("batch", keys=1, per_key=amount.hot, size=BATCH)
        return {"hot": answer["answer"]}

    def latency(self, amount: Amount) -> dict[str, float]:
        answer = self._client.ask("latency", keys=KEYS, count=amount.latency, per_s=LATENCY_PER_S)
        took = answer["answer"]
        return {"p50": percentile(took, 0.5), "p95": percentile(took, 0.95)}

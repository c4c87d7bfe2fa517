"""Restate: the server with its default settings, one node, its Python SDK behind hypercorn, all on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from bench.peers import install
from bench.peers.process import Load, Process, ProcessFailed, free_port
from bench.peers.suite import percentile
from bench.peers.workload import BATCH, KEYS, LATENCY_PER_S, SENDERS, Amount

HERE = Path(__file__).parent
START_S = 60.0
SHOWN = ("rocksdb-disable-wal = ", "rocksdb-disable-wal-fsync", "default-num-partitions")


class Restate:
    name = "restate"
    amount = Amount(hot=2000)
    service = "restate_service.py"
    load = "restate_load.py"

    def __init__(self) -> None:
        self._python = install.interpreter()
        self._server = install.restate_server()
        self._services = os.cpu_count() or 1

    def settings(self) -> dict[str, str]:
        dumped = subprocess.run(
            [self._server, "--dump-config"],
            capture_output=True,
            text=True,
            env=_quiet(),
            timeout=60,
        ).stdout
        shown = sorted({line for line in dumped.splitlines() if line.startswith(SHOWN)})
        return {
            "version": f"server {install.RESTATE_VERSION}, {install.version(self._python, 'restate-sdk')}, "
            f"{install.version(self._python, 'hypercorn')}",
            "durability": f"as shipped: {', '.join(shown)}",
            **self.ways(),
        }

    def ways(self) -> dict[str, str]:
        """How the system performs each part of the workload."""
        return {
            "handler": f"virtual object over HTTP/2, {self._services} hypercorn processes",
            "batch": f"one invocation forwards {BATCH} messages, {KEYS} objects",
            "senders": f"{SENDERS} connections (asyncio), one-way sends to the HTTP ingress",
            "latency": "a call to the handler, until its answer",
        }

    @contextlib.contextmanager
    def turn(self, directory: Path) -> Iterator[Any]:
        with self.running(directory) as load:
            yield RestateTurn(load)

    @contextlib.contextmanager
    def running(self, directory: Path, *arguments: str) -> Iterator[Load]:
        """RestateServer, service and client process. `arguments` are for service and client."""
        service = free_port()
        serve = [self._python, HERE / self.service, str(service), str(self._services), *arguments]
        with Process(serve), self.server(directory) as server:
            server.register(service)
            client = [self._python, HERE / self.load, str(server.ingress), *arguments]
            with Load(client) as load:
                yield load

    @contextlib.contextmanager
    def server(self, directory: Path) -> Iterator[RestateServer]:
        node, ingress, admin = (free_port() for _ in range(3))
        base = directory / "restate"
        base.mkdir()
        env = {
            **_quiet(),
            "RESTATE_LISTEN_MODE": "tcp",
            "RESTATE_BIND_IP": "127.0.0.1",
            "RESTATE_BIND_PORT": str(node),
            "RESTATE_INGRESS__BIND_ADDRESS": f"127.0.0.1:{ingress}",
            "RESTATE_ADMIN__BIND_ADDRESS": f"127.0.0.1:{admin}",
        }
        argv = [self._server, "--no-logo", "--node-name", "bench", "--base-dir", base]
        with Process(argv, env=env, cwd=base) as process:
            try:
                _until_up(f"http://127.0.0.1:{admin}/health")
                _until_up(f"http://127.0.0.1:{ingress}/restate/health")
            except ProcessFailed as error:
                raise ProcessFailed(f"{error}: {process.errors()}") from None
            yield RestateServer(process, ingress, admin)


@dataclass(frozen=True)
class RestateServer:
    process: Process
    ingress: int
    admin: int

    def register(self, service: int) -> None:
        """Make the services known that are served at this port."""
        try:
            _register(self.admin, service)
        except ProcessFailed as error:
            raise ProcessFailed(f"{error}: {self.process.errors()}") from None


class RestateTurn:
    def __init__(self, load: Load) -> None:
        self._load = load
        self._names = count()
        # Warm-up: use every partition and every connection before anything is timed.
        self._run("senders", self._keys(KEYS), per_key=2)

    def batch(self, amount: Amount) -> dict[str, float]:
        return {"batch": self._run("batch", self._keys(KEYS), per_key=amount.per_key, size=BATCH)}

    def senders(self, amount: Amount) -> dict[str, float]:
        return {"senders": self._run("senders", self._keys(KEYS), per_key=amount.per_key)}

    def hot(self, amount: Amount) -> dict[str, float]:
        return {"hot": self._run("senders", self._keys(1), per_key=amount.hot)}

    def latency(self, amount: Amount) -> dict[str, float]:
        took = self._run(
            "latency", self._keys(KEYS), connections=1, count=amount.latency, per_s=LATENCY_PER_S
        )
        return {"p50": percentile(took, 0.5), "p95": percentile(took, 0.95)}

    def _keys(self, wanted: int) -> list[str]:
        round = next(self._names)
        return [f"{round}-{n}" for n in range(wanted)]

    def _run(
        self, part: str, keys: list[str], connections: int = SENDERS, **parameters: Any
    ) -> Any:
        return self._load.ask(part, keys=keys, connections=connections, **parameters)["answer"]


def _quiet() -> dict[str, str]:
    return {"DO_NOT_TRACK": "1", "RESTATE_DISABLE_TELEMETRY": "true", "RESTATE_LOG_FILTER": "warn"}


def _until_up(url: str) -> None:
    until = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError) as error:
            if time.monotonic() > until:
                raise ProcessFailed(f"Restate did not start: {error}") from None
            time.sleep(0.1)


def _register(admin: int, service: int) -> None:
    body = json.dumps({"uri": f"http://127.0.0.1:{service}"}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{admin}/deployments", body, {"Content-Type": "application/json"}
    )
    until = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=START_S):
                return
        except urllib.error.URLError as error:
            if time.monotonic() > until:
                raise ProcessFailed(f"Restate does not see the service: {error}") from None
            time.sleep(0.2)

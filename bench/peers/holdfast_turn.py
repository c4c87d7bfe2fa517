"""Holdfast: client, worker and writer are separate processes on one embedded store."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb

from bench.peers.process import Load
from bench.peers.suite import percentile
from bench.peers.workload import BATCH, KEYS, LATENCY_PER_S, SENDERS, Amount
from bench.place import Place
from holdfast import __version__


class Holdfast:
    name = "holdfast"
    amount = Amount()
    # Creates the store.
    place = Place

    def settings(self) -> dict[str, str]:
        engine = ".".join(str(part) for part in lmdb.version())
        return {
            "version": f"holdfast {__version__}, py-lmdb {lmdb.__version__}, LMDB {engine}",
            "durability": "embedded store, fsync on (a redo log, one fdatasync a group commit)",
            **self.ways(),
        }

    def ways(self) -> dict[str, str]:
        return {
            "handler": "a world's reducer, journaled; every role of app.open in one worker process",
            "batch": f"send_many of {BATCH} messages to {KEYS} worlds, one client",
            "senders": f"{SENDERS} threads of one client process calling send",
            "latency": "send, until the journal's head has moved, read every 0.2 ms",
        }

    @contextlib.contextmanager
    def turn(self, directory: Path) -> Iterator[HoldfastTurn]:
        place = self.place(directory)
        with (
            place.store("holdfast") as path,
            spawn("client", path=str(path)) as client,
            spawn("worker", path=str(path), name="worker-1", policy={}) as worker,
        ):
            yield HoldfastTurn(client, worker)


class HoldfastTurn:
    def __init__(self, client: Load, worker: Load) -> None:
        self._client = client
        self._worker = worker
        self._worlds: list[str] = client.ask("worlds", count=KEYS)["names"]

    def batch(self, amount: Amount) -> dict[str, float]:
        answer = self._ask("batch", self._worlds, per_key=amount.per_key, size=BATCH)
        return {"batch": answer["rate"]}

    def senders(self, amount: Amount) -> dict[str, float]:
        answer = self._ask("senders", self._worlds, per_key=amount.per_key, callers=SENDERS)
        return {"senders": answer["rate"]}

    def hot(self, amount: Amount) -> dict[str, float]:
        answer = self._ask("batch", self._worlds[:1], per_key=amount.hot, size=BATCH)
        return {"hot": answer["rate"]}

    def latency(self, amount: Amount) -> dict[str, float]:
        answer = self._ask("latency", self._worlds, count=amount.latency, per_s=LATENCY_PER_S)
        return {
            "p50": percentile(answer["journaled"], 0.5),
            "p95": percentile(answer["journaled"], 0.95),
            "ask_p95": percentile(answer["asked"], 0.95),
        }

    def _ask(self, what: str, names: list[str], **parameters: Any) -> dict[str, Any]:
        answer = self._client.ask(what, names=names, **parameters)
        # Without this check a dead role would look like a slow one.
        self._worker.ask("hosted")
        return answer


def spawn(role: str, **arguments: Any) -> Load:
    return Load([sys.executable, "-m", "bench.peers.world_load", role, json.dumps(arguments)])

"""The common part of the clients of the effect benchmarks: send to worlds, read journals, wait for entries."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

from bench.peers.effect_app import EffectChain, app
from holdfast.durable import journal
from holdfast.store.api import Txn
from holdfast.world import catalog
from holdfast.world.catalog import subject_of
from holdfast.world.cycle import entries_topic

SEND_BATCH = 500
# Poll interval for rates. It grows so that polling uses at most a tenth of a core.
POLL_S = 0.002
POLL_SHARE = 0.1
# Latency is polled more often than a rate.
LATENCY_POLL_S = 0.0002
WAIT_S = 1.0
WITHIN_S = 300.0


class EffectClient:
    def __init__(self, path: str) -> None:
        self.runtime = app.open(path, roles=())
        self.store = self.runtime.store
        self.universe = self.runtime.universe
        self._names = itertools.count()
        self._subjects: dict[str, str] = {}
        self._served = path.startswith("postgresql:")

    def new(self, count: int) -> list[str]:
        """Names of new worlds."""
        return [f"chain-{next(self._names)}" for _ in range(count)]

    def send(self, sends: Sequence[tuple[str, Any]]) -> None:
        for at in range(0, len(sends), SEND_BATCH):
            part = sends[at : at + SEND_BATCH]
            self.runtime.send_many(
                (self.runtime.world(EffectChain, name), event) for name, event in part
            )

    def subjects(self, names: Sequence[str]) -> list[str]:
        def read(txn: Txn, unknown: Sequence[str]) -> list[str]:
            world_ids = [
                catalog.find_id(txn, self.universe, "EffectChain", name) for name in unknown
            ]
            return [subject_of(self.universe, world_id or "") for world_id in world_ids]

        unknown = [name for name in names if name not in self._subjects]
        if unknown:
            self._subjects.update(zip(unknown, self.store.read(read, unknown), strict=True))
        return [self._subjects[name] for name in names]

    def heights(self, names: Sequence[str]) -> list[int]:
        subjects = self.subjects(names)

        def read(txn: Txn) -> list[int]:
            return [journal.head(txn, subject).height for subject in subjects]

        heights: list[int] = self.store.read(read)
        return heights

    def until(self, names: Sequence[str], heights: Sequence[int]) -> None:
        """Wait until the journal of every world has its height."""
        goals = dict(zip(names, heights, strict=True))
        began = time.perf_counter()
        while goals:
            looked = time.perf_counter()
            current = self.heights(list(goals))
            goals = {
                name: goal
                for (name, goal), height in zip(goals.items(), current, strict=True)
                if height < goal
            }
            in_time(began)
            if goals:
                time.sleep(max(POLL_S, (time.perf_counter() - looked) / POLL_SHARE))

    def until_height(self, subject: str, height: int) -> None:
        """Wait until the journal of one world has this height.

        It polls an embedded store. On a server it waits for the topic, since polling would load the server.
        """
        began, since = time.perf_counter(), 0
        while self.store.read(journal.head, subject).height < height:
            in_time(began)
            if self._served:
                since = self.store.wait(entries_topic(subject), since, WAIT_S)
            else:
                time.sleep(LATENCY_POLL_S)

    def close(self) -> None:
        self.runtime.close()


def in_time(began: float) -> None:
    if time.perf_counter() - began > WITHIN_S:
        raise TimeoutError(f"not finished after {WITHIN_S:g} s")

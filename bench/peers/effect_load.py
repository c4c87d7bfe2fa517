"""Clients and pools of the effect benchmarks: `python -m bench.peers.effect_load client|pool ARGUMENTS`.

`holdfast up` starts the roles in other processes. A client sends events and reads journals. Its measures
come from the journals, or from frequent polling of them. It answers in lines (`answers`).
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any

from bench.peers.answers import serve
from bench.peers.effect_app import STEPS, Go, StepsRequested, TimerDue, app, bulk
from bench.peers.effect_client import LATENCY_POLL_S, POLL_S, POLL_SHARE, in_time
from bench.peers.effect_timers import Timers
from holdfast.durable import inbox, journal, queue
from holdfast.store.api import Txn
from holdfast.world import intents


class Client(Timers):
    # -- chains --------------------------------------------------------------------------------

    def worlds(self, count: int, steps: int = 1) -> dict[str, Any]:
        """Create worlds and run one chain in each, so that they are placed, leased and warm.

        With `steps=0`, for stores without a pool, each world gets only an event.
        """
        names = self.new(count)
        self.send([(name, Go(steps) if steps else TimerDue(0)) for name in names])
        self.until(names, [1 + steps] * count)
        return {"names": names}

    def chains(self, names: list[str], seconds: float, is_async: bool = False) -> dict[str, Any]:
        """Run one chain per name at once. When a chain ends, the next one starts."""
        go = Go(STEPS, is_async)
        before = self.heights(names)
        goals = {name: height + 1 + STEPS for name, height in zip(names, before, strict=True)}
        began = time.perf_counter()
        self.send([(name, go) for name in names])
        chains = 0
        while goals:
            looked = time.perf_counter()
            heights = self.heights(list(goals))
            ended = [
                name
                for (name, goal), height in zip(list(goals.items()), heights, strict=True)
                if height >= goal
            ]
            chains += len(ended)
            took = time.perf_counter() - looked
            if ended and looked - began < seconds:
                self.send([(name, go) for name in ended])
                for name in ended:
                    goals[name] += 1 + STEPS
            else:
                for name in ended:
                    del goals[name]
            in_time(began)
            if goals:
                time.sleep(max(POLL_S, took / POLL_SHARE))
        took = time.perf_counter() - began
        return {"rate": chains * STEPS / took, "steps": chains * STEPS, "took_s": took}

    def fresh(self, count: int, batch: int) -> dict[str, Any]:
        """A new world for each chain, all at once. The rate includes creation, placement and lease."""
        names = self.new(count)
        began = time.perf_counter()
        for at in range(0, count, batch):
            self.send([(name, Go(STEPS)) for name in names[at : at + batch]])
        self.until(names, [1 + STEPS] * count)
        took = time.perf_counter() - began
        return {"rate": count * STEPS / took, "steps": count * STEPS, "took_s": took}

    # -- one step ------------------------------------------------------------------------------

    def steps(self, names: list[str], count: int, per_s: float) -> dict[str, Any]:
        """One effect every 1/per_s seconds, in the worlds in turn. Three durations for each, in ms.

        journaled   from the transaction of the entry that requests the effect until the client reads the
                    durable entry with its receipt: includes both commits
        entries     between these two entries, by the times in the journal
        whole       from before the send
        """
        subjects = self.subjects(names)
        now_ns, due = self.store.now_ns, time.perf_counter()
        observed: list[tuple[str, int, int, int]] = []
        for at in range(count):
            due += 1 / per_s
            time.sleep(max(due - time.perf_counter(), 0))
            name, subject = names[at % len(names)], subjects[at % len(names)]
            height = self.store.read(journal.head, subject).height
            sent_ns = now_ns()
            self.send([(name, Go(1))])
            self.until_height(subject, height + 2)
            observed.append((subject, height, sent_ns, now_ns()))
        times: dict[str, list[float]] = {"journaled": [], "entries": [], "whole": []}
        for subject, height, sent_ns, seen_ns in observed:
            request, receipt = self.store.read(journal.read, subject, height + 1, height + 3, 2)
            times["journaled"].append((seen_ns - request.at_ns) / 1e6)
            times["entries"].append((receipt.at_ns - request.at_ns) / 1e6)
            times["whole"].append((seen_ns - sent_ns) / 1e6)
        return times

    # -- backlog and fairness ------------------------------------------------------------------

    def request_effects(self, names: list[str], count: int, per_event: int) -> dict[str, Any]:
        """Request `count` effects. Returns the seconds until the last of them is in the queue."""
        goal = _all_of(self._counts()) + count
        events = [min(per_event, count - at) for at in range(0, count, per_event)]
        began = time.perf_counter()
        self.send([(names[at % len(names)], StepsRequested(n)) for at, n in enumerate(events)])
        while _all_of(self._counts()) < goal:
            in_time(began)
            time.sleep(LATENCY_POLL_S)
        return {"seconds": time.perf_counter() - began}

    def churn(
        self, names: list[str], seconds: float, backlog: int, per_event: int
    ) -> dict[str, Any]:
        """A pool drains, and the client requests as many effects again, so that the backlog stays constant.

        Returns the effects per second, and the share of polls that found an empty queue.
        """
        turn = itertools.cycle(names)
        began = time.perf_counter()
        first = last = self._counts()
        requested = _all_of(first)
        polls = dry = 0
        while time.perf_counter() - began < seconds or last.done == first.done:
            in_time(began)
            last = self._counts()
            polls += 1
            dry += last.ready == 0
            # Claimed effects do not count as backlog. Requested effects on their way to the queue do.
            missing = backlog - last.ready - (requested - _all_of(last))
            if missing >= per_event:
                sends = [
                    (next(turn), StepsRequested(per_event)) for _ in range(missing // per_event)
                ]
                self.send(sends)
                requested += per_event * len(sends)
            time.sleep(POLL_S)
        last, passed = self._counts(), time.perf_counter() - began
        return {"rate": (last.done - first.done) / passed, "dry": dry / polls}

    def single(self, names: list[str]) -> dict[str, Any]:
        """One effect of each world in turn, in a queue that another world floods.

        Counts the effects of the flood that end between the dispatch and the receipt of this effect, and until
        the receipt is journaled. Also returns both durations.
        """
        measures: dict[str, list[float]] = {
            "passed": [],
            "ms": [],
            "journaled": [],
            "journaled_ms": [],
        }
        began, first = time.perf_counter(), self._counts().done
        while self._counts().done == first:
            # Wait until the pool works, before anything is timed.
            in_time(began)
            time.sleep(POLL_S)
        for name, subject in zip(names, self.subjects(names), strict=True):
            height = self.store.read(journal.head, subject).height
            self.send([(name, StepsRequested(1))])
            self.until_height(subject, height + 1)
            dispatched, at = self._counts().done, time.perf_counter()
            while self.store.read(_delivered, subject) < height + 2:
                in_time(at)
                time.sleep(LATENCY_POLL_S)
            measures["passed"].append(max(self._counts().done - dispatched - 1, 0))
            measures["ms"].append(1000 * (time.perf_counter() - at))
            self.until_height(subject, height + 2)
            measures["journaled"].append(max(self._counts().done - dispatched - 1, 0))
            measures["journaled_ms"].append(1000 * (time.perf_counter() - at))
        return measures

    def left(self) -> dict[str, Any]:
        counts = self._counts()
        return {"left": counts.ready + counts.delayed + counts.claimed}

    # -- helpers -------------------------------------------------------------------------------

    def _counts(self) -> queue.QueueCounts:
        counts: queue.QueueCounts = self.store.read(
            queue.counts, intents.effect_queue(self.universe, bulk.kind)
        )
        return counts


class Pool:
    """An adapter pool that can be stopped, so that a backlog stays while another one is measured."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._runtime: Any = None

    def start(self) -> None:
        self._runtime = app.open(self._path, roles=("adapter",), worker="pool")

    def stop(self) -> None:
        self._runtime.close()

    def close(self) -> None:
        pass


def _delivered(txn: Txn, subject: str) -> int:
    """The number of messages that were delivered to a world. Each one becomes a journal entry."""
    return inbox.cursor(txn, subject) + inbox.depth(txn, subject)


def _all_of(counts: queue.QueueCounts) -> int:
    return counts.ready + counts.delayed + counts.claimed + counts.dead + counts.done


def main() -> None:
    role, arguments = sys.argv[1], json.loads(sys.argv[2])
    roles: dict[str, Any] = {"client": Client, "pool": Pool}
    load = roles[role](**arguments)
    serve({name: getattr(load, name) for name in dir(load) if not name.startswith("_")})
    load.close()


if __name__ == "__main__":
    main()

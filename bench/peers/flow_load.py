"""What clients and pools of effects do: `python -m bench.peers.flow_load client|pool ARGUMENTS`.

The roles run elsewhere, started by `holdfast up`. A client sends and looks at journals; what it
measures is read from them, or seen in them by looking often. It answers by lines (`answers`).
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any

from bench.peers.answers import serve
from bench.peers.flow_client import LATENCY_POLL_S, POLL_S, POLL_SHARE, in_time
from bench.peers.flow_timers import Timers
from bench.peers.flows import STEPS, Go, Want, Woken, app, bulk
from holdfast.durable import inbox, journal, queue
from holdfast.store.api import Txn
from holdfast.world import publish


class Client(Timers):
    # -- chains --------------------------------------------------------------------------------

    def worlds(self, count: int, steps: int = 1) -> dict[str, Any]:
        """New worlds, each with a chain behind it: placed, leased, and warm. Without a pool there
        can be no step, and an event is all."""
        names = self.new(count)
        self.send([(name, Go(steps) if steps else Woken(0)) for name in names])
        self.until(names, [1 + steps] * count)
        return {"names": names}

    def chains(self, names: list[str], seconds: float, is_async: bool = False) -> dict[str, Any]:
        """As many chains at once as there are names; one that ends is followed by the next."""
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
        """A new world for each chain: it is created, placed and leased on the way. All at once."""
        names = self.new(count)
        began = time.perf_counter()
        for at in range(0, count, batch):
            self.send([(name, Go(STEPS)) for name in names[at : at + batch]])
        self.until(names, [1 + STEPS] * count)
        took = time.perf_counter() - began
        return {"rate": count * STEPS / took, "steps": count * STEPS, "took_s": took}

    # -- one step ------------------------------------------------------------------------------

    def steps(self, names: list[str], count: int, per_s: float) -> dict[str, Any]:
        """One effect every 1/per_s, by turns of the worlds; three times for each, in ms.

        journaled   from the transaction of the entry that wants the effect, to the entry with its
                    receipt being durable and seen here: both commits are in it
        entries     between these two entries, as the journal has their times
        whole       from before the send that causes it all
        """
        subjects = self.subjects(names)
        now_ns, due = self.store.now_ns, time.perf_counter()
        seen: list[tuple[str, int, int, int]] = []
        for at in range(count):
            due += 1 / per_s
            time.sleep(max(due - time.perf_counter(), 0))
            name, subject = names[at % len(names)], subjects[at % len(names)]
            height = self.store.read(journal.head, subject).height
            sent_ns = now_ns()
            self.send([(name, Go(1))])
            self.until_height(subject, height + 2)
            seen.append((subject, height, sent_ns, now_ns()))
        found: dict[str, list[float]] = {"journaled": [], "entries": [], "whole": []}
        for subject, height, sent_ns, seen_ns in seen:
            wanted, got = self.store.read(journal.read, subject, height + 1, height + 3, 2)
            found["journaled"].append((seen_ns - wanted.at_ns) / 1e6)
            found["entries"].append((got.at_ns - wanted.at_ns) / 1e6)
            found["whole"].append((seen_ns - sent_ns) / 1e6)
        return found

    # -- backlog and fairness ------------------------------------------------------------------

    def want(self, names: list[str], count: int, per_event: int) -> dict[str, Any]:
        """Want so many more effects; how long until the last of them is in the queue."""
        goal = _all_of(self._counts()) + count
        events = [min(per_event, count - at) for at in range(0, count, per_event)]
        began = time.perf_counter()
        self.send([(names[at % len(names)], Want(n)) for at, n in enumerate(events)])
        while _all_of(self._counts()) < goal:
            in_time(began)
            time.sleep(LATENCY_POLL_S)
        return {"seconds": time.perf_counter() - began}

    def churn(
        self, names: list[str], seconds: float, backlog: int, per_event: int
    ) -> dict[str, Any]:
        """A pool drains; as much is wanted again, so that the backlog stays. How many end a second,
        and at which share of looks there was nothing to claim."""
        turn = itertools.cycle(names)
        began = time.perf_counter()
        first = last = self._counts()
        asked = _all_of(first)
        looks = dry = 0
        while time.perf_counter() - began < seconds or last.done == first.done:
            in_time(began)
            last = self._counts()
            looks += 1
            dry += last.ready == 0
            # What is claimed is no backlog any more, and what is on its way will be.
            missing = backlog - last.ready - (asked - _all_of(last))
            if missing >= per_event:
                sends = [(next(turn), Want(per_event)) for _ in range(missing // per_event)]
                self.send(sends)
                asked += per_event * len(sends)
            time.sleep(POLL_S)
        last, passed = self._counts(), time.perf_counter() - began
        return {"rate": (last.done - first.done) / passed, "dry": dry / looks}

    def single(self, names: list[str]) -> dict[str, Any]:
        """One effect of each world in turn, in the queue that others flood: how many of theirs end
        between its dispatch and its receipt, and until that is journaled; and the time of both."""
        found: dict[str, list[float]] = {
            "passed": [],
            "ms": [],
            "journaled": [],
            "journaled_ms": [],
        }
        began, first = time.perf_counter(), self._counts().done
        while self._counts().done == first:
            # The pool is at work before anything is timed.
            in_time(began)
            time.sleep(POLL_S)
        for name, subject in zip(names, self.subjects(names), strict=True):
            height = self.store.read(journal.head, subject).height
            self.send([(name, Want(1))])
            self.until_height(subject, height + 1)
            dispatched, at = self._counts().done, time.perf_counter()
            while self.store.read(_delivered, subject) < height + 2:
                in_time(at)
                time.sleep(LATENCY_POLL_S)
            found["passed"].append(max(self._counts().done - dispatched - 1, 0))
            found["ms"].append(1000 * (time.perf_counter() - at))
            self.until_height(subject, height + 2)
            found["journaled"].append(max(self._counts().done - dispatched - 1, 0))
            found["journaled_ms"].append(1000 * (time.perf_counter() - at))
        return found

    def left(self) -> dict[str, Any]:
        counts = self._counts()
        return {"left": counts.ready + counts.delayed + counts.claimed}

    # -- inside --------------------------------------------------------------------------------

    def _counts(self) -> queue.Counts:
        found: queue.Counts = self.store.read(
            queue.counts, publish.effects(self.universe, bulk.kind)
        )
        return found


class Pool:
    """An adapter pool that can be stopped: a backlog must stay while another is measured."""

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
    """How many messages a world has been given. Each is an entry, or will be."""
    return inbox.cursor(txn, subject) + inbox.depth(txn, subject)


def _all_of(counts: queue.Counts) -> int:
    return counts.ready + counts.delayed + counts.claimed + counts.dead + counts.done


def main() -> None:
    role, arguments = sys.argv[1], json.loads(sys.argv[2])
    roles: dict[str, Any] = {"client": Client, "pool": Pool}
    one = roles[role](**arguments)
    serve({name: getattr(one, name) for name in dir(one) if not name.startswith("_")})
    one.close()


if __name__ == "__main__":
    main()

"""What clients and pools of effects do: `python -m bench.peers.flow_load client|pool ARGUMENTS`.

The roles run elsewhere, started by `holdfast up`. A client sends and looks at journals; what it
measures is read from them, or seen in them by looking often. It answers by lines (`answers`).
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from bench.peers.answers import serve
from bench.peers.flows import STEPS, Flow, Go, Wake, Want, Woken, app, bulk
from holdfast import codec
from holdfast.clock import S
from holdfast.durable import journal, queue
from holdfast.messages import TIMER_SET, Intent, TimerSet
from holdfast.roles.firing import fire_due
from holdfast.store.api import Txn
from holdfast.world import catalog, publish, timers
from holdfast.world.catalog import subject_of

SEND_BATCH = 500
# Rates are looked at this often, or seldom enough that looking takes a tenth of a core at most.
POLL_S = 0.002
POLL_SHARE = 0.1
# Latency is looked at more often than a rate.
LATENCY_POLL_S = 0.0002
WITHIN_S = 300.0
# Commits that are on their way at once while a million timers are hung.
HANGING = 8
HANG_BATCH = 1_000
HOUR_NS = 3600 * S


class Client:
    def __init__(self, path: str) -> None:
        self._runtime = app.open(path, roles=())
        self._store = self._runtime.store
        self._universe = self._runtime.universe
        self._names = itertools.count()

    # -- chains --------------------------------------------------------------------------------

    def worlds(self, count: int, steps: int = 1) -> dict[str, Any]:
        """New worlds, each with a chain behind it: placed, leased, and warm. Without a pool there
        can be no step, and an event is all."""
        names = self._new(count)
        self._send([(name, Go(steps) if steps else Woken(0)) for name in names])
        self._until(names, [1 + steps] * count)
        return {"names": names}

    def chains(self, names: list[str], seconds: float, is_async: bool = False) -> dict[str, Any]:
        """As many chains at once as there are names; one that ends is followed by the next."""
        go = Go(STEPS, is_async)
        before = self._heights(names)
        goals = {name: height + 1 + STEPS for name, height in zip(names, before, strict=True)}
        began = time.perf_counter()
        self._send([(name, go) for name in names])
        chains = 0
        while goals:
            looked = time.perf_counter()
            heights = self._heights(list(goals))
            ended = [
                name
                for (name, goal), height in zip(list(goals.items()), heights, strict=True)
                if height >= goal
            ]
            chains += len(ended)
            took = time.perf_counter() - looked
            if ended and looked - began < seconds:
                self._send([(name, go) for name in ended])
                for name in ended:
                    goals[name] += 1 + STEPS
            else:
                for name in ended:
                    del goals[name]
            _in_time(began)
            if goals:
                time.sleep(max(POLL_S, took / POLL_SHARE))
        took = time.perf_counter() - began
        return {"rate": chains * STEPS / took, "steps": chains * STEPS, "took_s": took}

    def fresh(self, count: int, batch: int) -> dict[str, Any]:
        """A new world for each chain: it is created, placed and leased on the way. All at once."""
        names = self._new(count)
        began = time.perf_counter()
        for at in range(0, count, batch):
            self._send([(name, Go(STEPS)) for name in names[at : at + batch]])
        self._until(names, [1 + STEPS] * count)
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
        subjects = self._subjects(names)
        now_ns, due = self._store.now_ns, time.perf_counter()
        seen: list[tuple[str, int, int, int]] = []
        for at in range(count):
            due += 1 / per_s
            time.sleep(max(due - time.perf_counter(), 0))
            name, subject = names[at % len(names)], subjects[at % len(names)]
            height = self._store.read(journal.head, subject).height
            sent_ns = now_ns()
            self._send([(name, Go(1))])
            began = time.perf_counter()
            while self._store.read(journal.head, subject).height < height + 2:
                _in_time(began)
                time.sleep(LATENCY_POLL_S)
            seen.append((subject, height, sent_ns, now_ns()))
        found: dict[str, list[float]] = {"journaled": [], "entries": [], "whole": []}
        for subject, height, sent_ns, seen_ns in seen:
            wanted, got = self._store.read(journal.read, subject, height + 1, height + 3, 2)
            found["journaled"].append((seen_ns - wanted.at_ns) / 1e6)
            found["entries"].append((got.at_ns - wanted.at_ns) / 1e6)
            found["whole"].append((seen_ns - sent_ns) / 1e6)
        return found

    # -- timers --------------------------------------------------------------------------------

    def timers(
        self, worlds: int, count: int, spread_s: float, lead_s: float, after: bool = False
    ) -> dict[str, Any]:
        """So many timers, evenly spread from `lead_s` on; how late each was handled, in ms.

        Handled is when its reducer ran: the wall clock that its entry holds.
        """
        names = self._new(worlds)
        handles = [self._runtime.world(Flow, name) for name in names]
        began_ns = time.time_ns()
        first_ns = began_ns + int(lead_s * S)
        every_ns = int(spread_s * S / count)
        wakes = [
            (names[at % worlds], Wake((first_ns + at * every_ns) // 1000 * 1000, after))
            for at in range(count)
        ]
        self._send(wakes)
        each = [len(range(at, count, worlds)) for at in range(worlds)]
        self._until(names, each)
        set_s = (time.time_ns() - began_ns) / 1e9
        if set_s > lead_s:
            raise TimeoutError(f"setting {count} timers took {set_s:.1f} s of {lead_s:.1f} s")
        # Nobody looks while they fire: it is the system that is measured.
        time.sleep(max(first_ns / 1e9 + spread_s - time.time(), 0))
        self._until(names, [2 * n for n in each])
        late = [
            (one.step.wall_ns - one.event.due_ns) / 1e6
            for handle in handles
            for one in handle.journal()
            if isinstance(one.event, Woken)
        ]
        assert len(late) == count, f"{len(late)} of {count} timers fired"
        return {"late": late, "set_s": set_s}

    def afters(self, names: list[str], count: int, per_s: float, wait_s: float) -> dict[str, Any]:
        """Timers set one by one; lateness by the journal alone, in ms, the commit that set them
        included."""
        before = self._heights(names)
        due = time.perf_counter()
        for at in range(count):
            due += 1 / per_s
            time.sleep(max(due - time.perf_counter(), 0))
            due_ns = time.time_ns() + int(wait_s * S)
            self._send([(names[at % len(names)], Wake(due_ns, True))])
        each = [len(range(at, count, len(names))) for at in range(len(names))]
        self._until(names, [was + 2 * n for was, n in zip(before, each, strict=True)])
        late: list[float] = []
        for name, was in zip(names, before, strict=True):
            found = self._runtime.world(Flow, name).journal(was + 1)
            late += [
                (one.step.wall_ns - one.event.due_ns) / 1e6
                for one in found
                if isinstance(one.event, Woken)
            ]
        assert len(late) == count, f"{len(late)} of {count} timers fired"
        return {"late": late}

    def hang(self, count: int) -> dict[str, Any]:
        """Timers that are pending, half of them by each clock: from an hour on, a second apart for
        each batch."""
        timer = TimerSet("pending", "Woken", codec.pack({"due_ns": 0}), delay_ns=HOUR_NS)
        intent = Intent(
            self._universe, "0" * 32, bytes(32), TIMER_SET, codec.pack(timer), "pending", b"", 0
        )
        payload = codec.pack(intent)
        clocks = (
            (timers.delays(self._universe), self._store.now_ns() + HOUR_NS),
            (timers.calendar(self._universe), time.time_ns() + HOUR_NS),
        )
        began = time.perf_counter()
        ahead: list[Any] = []
        for batch, at in enumerate(range(0, count, HANG_BATCH)):
            size = min(HANG_BATCH, count - at)
            name, first_ns = clocks[batch % 2]
            due_ns = first_ns + batch * S
            ahead.append(self._store.submit(queue.put_many, name, [payload] * size, 0, due_ns))
            if len(ahead) >= HANGING:
                ahead.pop(0).result()
        for one in ahead:
            one.result()
        return {"seconds": time.perf_counter() - began}

    def fire_due(self, names: list[str], count: int, lead_s: float) -> dict[str, Any]:
        """Timers of worlds become due beside all that is pending, and no timer worker runs: what
        the commit takes that finds and fires them, as the timer worker makes it."""
        before = self._heights(names)
        due_ns = time.time_ns() + int(lead_s * S)
        self._send([(names[at % len(names)], Wake(due_ns)) for at in range(count)])
        each = [len(range(at, count, len(names))) for at in range(len(names))]
        self._until(names, [was + n for was, n in zip(before, each, strict=True)])
        time.sleep(max(due_ns - time.time_ns(), 0) / S + 0.005)
        wall_ns = time.time_ns()
        began = time.perf_counter()
        fired = self._store.transact(fire_due, self._universe, wall_ns, count)
        took = time.perf_counter() - began
        assert fired == count, f"{fired} of {count} were due"
        self._until(names, [was + 2 * n for was, n in zip(before, each, strict=True)])
        return {"seconds": took}

    def burst(self, names: list[str], count: int, lead_s: float) -> dict[str, Any]:
        """Timers that are all due at once; how long after that the last was handled."""
        before = self._heights(names)
        due_ns = time.time_ns() + int(lead_s * S)
        self._send([(names[at % len(names)], Wake(due_ns)) for at in range(count)])
        each = [len(range(at, count, len(names))) for at in range(len(names))]
        self._until(names, [was + 2 * n for was, n in zip(before, each, strict=True)])
        last_ns = 0
        for name, was in zip(names, before, strict=True):
            for one in self._runtime.world(Flow, name).journal(was + 1):
                if isinstance(one.event, Woken):
                    last_ns = max(last_ns, one.step.wall_ns)
        return {"seconds": (last_ns - due_ns) / 1e9}

    # -- backlog and fairness ------------------------------------------------------------------

    def want(self, names: list[str], count: int, per_event: int) -> dict[str, Any]:
        """Want so many more effects; how long until the last of them is in the queue."""
        goal = self._wanted() + count
        events = [min(per_event, count - at) for at in range(0, count, per_event)]
        began = time.perf_counter()
        self._send([(names[at % len(names)], Want(n)) for at, n in enumerate(events)])
        while self._wanted() < goal:
            _in_time(began)
            time.sleep(LATENCY_POLL_S)
        return {"seconds": time.perf_counter() - began}

    def churn(
        self, names: list[str], seconds: float, backlog: int, per_event: int
    ) -> dict[str, Any]:
        """A pool drains; as much is wanted again, so that the backlog stays. How many ended."""
        turn = itertools.cycle(names)
        began = time.perf_counter()
        first = self._counts()
        asked = self._wanted()
        last = first
        while (passed := time.perf_counter() - began) < seconds or last.done == first.done:
            _in_time(began)
            last = self._counts()
            missing = backlog - (asked - last.done)
            if missing >= per_event:
                sends = [(next(turn), Want(per_event)) for _ in range(missing // per_event)]
                self._send(sends)
                asked += per_event * len(sends)
            time.sleep(POLL_S)
        last, passed = self._counts(), time.perf_counter() - began
        return {"rate": (last.done - first.done) / passed, "ended": last.done - first.done}

    def single(self, names: list[str]) -> dict[str, Any]:
        """One effect of each world in turn, in the queue that others flood: how many of theirs end
        between its dispatch and its receipt being journaled, and how long that takes."""
        passed, took = [], []
        for name, subject in zip(names, self._subjects(names), strict=True):
            height = self._store.read(journal.head, subject).height
            self._send([(name, Want(1))])
            began = time.perf_counter()
            self._until_height(subject, height + 1, began)
            dispatched, at = self._counts().done, time.perf_counter()
            self._until_height(subject, height + 2, began)
            took.append(1000 * (time.perf_counter() - at))
            passed.append(max(self._counts().done - dispatched - 1, 0))
        return {"passed": passed, "ms": took}

    def left(self) -> dict[str, Any]:
        counts = self._counts()
        return {"left": counts.ready + counts.delayed + counts.claimed}

    def close(self) -> None:
        self._runtime.close()

    # -- inside --------------------------------------------------------------------------------

    def _new(self, count: int) -> list[str]:
        return [f"flow-{next(self._names)}" for _ in range(count)]

    def _send(self, sends: Sequence[tuple[str, Any]]) -> None:
        for at in range(0, len(sends), SEND_BATCH):
            part = sends[at : at + SEND_BATCH]
            self._runtime.send_many(
                (self._runtime.world(Flow, name), event) for name, event in part
            )

    def _subjects(self, names: Sequence[str]) -> list[str]:
        def read(txn: Txn) -> list[str]:
            found = [catalog.find(txn, self._universe, "Flow", name) for name in names]
            return [subject_of(self._universe, world_id or "") for world_id in found]

        subjects: list[str] = self._store.read(read)
        return subjects

    def _heights(self, names: Sequence[str]) -> list[int]:
        subjects = self._cached_subjects(names)

        def read(txn: Txn) -> list[int]:
            return [journal.head(txn, subject).height for subject in subjects]

        found: list[int] = self._store.read(read)
        return found

    def _cached_subjects(self, names: Sequence[str]) -> list[str]:
        unknown = [name for name in names if name not in _SUBJECTS]
        _SUBJECTS.update(zip(unknown, self._subjects(unknown), strict=True))
        return [_SUBJECTS[name] for name in names]

    def _until(self, names: Sequence[str], heights: Sequence[int]) -> None:
        """Until the journal of every world has its height."""
        goals = dict(zip(names, heights, strict=True))
        began = time.perf_counter()
        while goals:
            looked = time.perf_counter()
            found = self._heights(list(goals))
            goals = {
                name: goal
                for (name, goal), height in zip(goals.items(), found, strict=True)
                if height < goal
            }
            _in_time(began)
            if goals:
                time.sleep(max(POLL_S, (time.perf_counter() - looked) / POLL_SHARE))

    def _until_height(self, subject: str, height: int, began: float) -> None:
        while self._store.read(journal.head, subject).height < height:
            _in_time(began)
            time.sleep(LATENCY_POLL_S)

    def _counts(self) -> queue.Counts:
        found: queue.Counts = self._store.read(
            queue.counts, publish.effects(self._universe, bulk.kind)
        )
        return found

    def _wanted(self) -> int:
        counts = self._counts()
        return counts.ready + counts.delayed + counts.claimed + counts.dead + counts.done


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


_SUBJECTS: dict[str, str] = {}


def _in_time(began: float) -> None:
    if time.perf_counter() - began > WITHIN_S:
        raise TimeoutError(f"not over after {WITHIN_S:g} s")


def main() -> None:
    role, arguments = sys.argv[1], json.loads(sys.argv[2])
    roles: dict[str, Any] = {"client": Client, "pool": Pool}
    one = roles[role](**arguments)
    serve({name: getattr(one, name) for name in dir(one) if not name.startswith("_")})
    one.close()


if __name__ == "__main__":
    main()

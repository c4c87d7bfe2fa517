"""The client of the flow benchmarks: `python -m bench.peers.flow_load STORE LATENESS_FILE`. It answers in lines."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.peers import lateness
from bench.peers.answers import serve
from bench.peers.flow_app import Proceed, app, chain, delayed, long, single, sleeper
from holdfast.flows.model import keys_of
from holdfast.flows.new_flow import NewFlow
from holdfast.flows.operations import start
from holdfast.flows.unit_of_work import get_counts
from holdfast.tasks import model as task_model

POLL_S = 0.005
# The poll interval grows so that polling uses at most this share of a core.
POLL_SHARE = 0.1
START_BATCH = 1_000
WITHIN_S = 300.0


class FlowClient:
    def __init__(self, path: str, lateness_file: str) -> None:
        self._runtime = app.open(path, roles=())
        self._lateness_file = Path(lateness_file)

    def chains(self, callers: int, seconds: float, steps: int) -> dict[str, Any]:
        """Each coroutine starts its next flow when its last one ends."""
        return asyncio.run(self._chains(callers, seconds, steps))

    async def _chains(self, callers: int, seconds: float, steps: int) -> dict[str, Any]:
        aio, ended = self._runtime.aio, 0
        commits, began = self._commits(), time.perf_counter()

        async def call() -> None:
            nonlocal ended
            while time.perf_counter() - began < seconds:
                handle = await aio.start(chain, steps)
                assert await handle == steps
                ended += 1

        await asyncio.gather(*(call() for _ in range(callers)))
        took = time.perf_counter() - began
        return {
            "rate": ended * steps / took,
            "steps": ended * steps,
            "took_s": took,
            "commits": self._commits() - commits,
        }

    def steps(self, count: int, per_s: float) -> dict[str, Any]:
        """Flows at a fixed pace. A flow measures its first step and its second step."""
        times: dict[str, list[float]] = {"first": [], "journaled": [], "whole": []}
        due = time.perf_counter()
        for _ in range(count):
            due += 1 / per_s
            time.sleep(max(due - time.perf_counter(), 0))
            began = time.perf_counter()
            first_ms, step_ms = self._runtime.start(single, time.time()).result(WITHIN_S)
            times["whole"].append(1000 * (time.perf_counter() - began))
            times["first"].append(first_ms)
            times["journaled"].append(step_ms)
        return times

    def start_sleepers(self, count: int, due_s: float) -> dict[str, Any]:
        """Start sleeping flows in batches. Returns the seconds that it took until all of them are durable."""
        args = sleeper.pack((due_s,), {})
        began = time.perf_counter()
        for at in range(0, count, START_BATCH):
            new = [NewFlow(sleeper.spec, args)] * min(START_BATCH, count - at)
            self._runtime.store.transact(start, self._runtime.universe, new)
        return {"took_s": time.perf_counter() - began}

    def until_counts(self, state: str, count: int) -> dict[str, Any]:
        """Wait until this many sleeping flows are in a state."""
        return {"at_s": self._until(self._count, state, count)}

    def wake_flows(self, count: int, lead_s: float) -> dict[str, Any]:
        """Sleeping flows that are all due at once. Returns the lateness of each, and when the last one has ended."""
        waiting, completed = self._count("waiting"), self._count("completed")

        def start_all(due_s: float) -> None:
            self.start_sleepers(count, due_s)
            self._until(self._count, "waiting", waiting + count, within_s=due_s - time.time())

        def until_ended() -> float:
            return self._until(self._count, "completed", completed + count)

        return self._wake(start_all, until_ended, count, lead_s)

    def wake_tasks(self, count: int, lead_s: float) -> dict[str, Any]:
        """The same with delayed tasks instead of sleeping flows."""
        completed = self._count_tasks("completed")

        def submit_all(due_s: float) -> None:
            for at in range(0, count, START_BATCH):
                task = delayed.options(delay_s=max(due_s - time.time(), 0))
                self._runtime.submit_many(task, [(due_s,)] * min(START_BATCH, count - at))

        def until_ended() -> float:
            return self._until(self._count_tasks, "completed", completed + count)

        return self._wake(submit_all, until_ended, count, lead_s)

    def _wake(
        self,
        create: Callable[[float], None],
        until_ended: Callable[[], float],
        count: int,
        lead_s: float,
    ) -> dict[str, Any]:
        lateness.clear(self._lateness_file)
        due_s = time.time() + lead_s
        create(due_s)
        if time.time() > due_s:
            raise TimeoutError(
                f"{count} do not wait before their due time, {lead_s:g} s after the first one"
            )
        # The client reads nothing until the due time.
        time.sleep(max(due_s - time.time(), 0))
        ended_s = until_ended() - due_s
        late = lateness.lines(self._lateness_file)
        assert len(late) == count, f"{len(late)} of {count} ran"
        return {"late": late, "ended_s": ended_s}

    def make_long(self, steps: int) -> dict[str, Any]:
        """Run a flow that records its steps and then waits."""
        handle = self._runtime.start(long, steps)
        began = time.perf_counter()
        while handle.status().state != "WAITING":
            if time.perf_counter() - began > WITHIN_S:
                raise TimeoutError("the flow does not wait")
            time.sleep(POLL_S)
        return {"id": handle.id}

    def resume(self, id: str, steps: int) -> dict[str, Any]:
        """Send the event that the flow waits for. Returns the seconds until the flow has ended."""
        handle = self._runtime.flow(id)
        began = time.perf_counter()
        handle.send(Proceed())
        assert handle.result(WITHIN_S) == steps
        return {"took_s": time.perf_counter() - began}

    def close(self) -> None:
        self._runtime.close()

    def _until(
        self,
        counter: Callable[[str], int],
        state: str,
        count: int,
        *,
        within_s: float = WITHIN_S,
    ) -> float:
        """Wait until a counter has this value. Returns the time."""
        began = looked = time.perf_counter()
        while (current := counter(state)) < count:
            took = time.perf_counter() - looked
            if looked - began > within_s:
                raise TimeoutError(f"{current} of {count} are {state} after {within_s:.1f} s")
            time.sleep(max(POLL_S, took / POLL_SHARE))
            looked = time.perf_counter()
        return time.time()

    def _count_tasks(self, state: str) -> int:
        keys = task_model.keys_of(self._runtime.universe)
        queue = delayed.spec.queue
        counts = self._runtime.store.read(task_model.get_counts, keys, queue)
        assert counts.failed == counts.dead == 0, counts
        found: int = getattr(counts, state)
        return found

    def _count(self, state: str) -> int:
        keys = keys_of(self._runtime.universe)
        counts = self._runtime.store.read(get_counts, keys, sleeper.name)
        found: int = getattr(counts, state)
        return found

    def _commits(self) -> int:
        """The number of commits of the store so far."""
        commits: int = self._runtime.store._backend.last_id()
        return commits


def main() -> None:
    client = FlowClient(*sys.argv[1:])
    serve({name: getattr(client, name) for name in dir(client) if not name.startswith("_")})
    client.close()


if __name__ == "__main__":
    main()

"""The client of the flow benchmarks: `python -m bench.peers.flow_load STORE`. It answers in lines."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from bench.peers.answers import serve
from bench.peers.flow_app import Proceed, app, chain, long, nothing, single, sleeper
from holdfast.flows.model import keys_of
from holdfast.flows.operations import NewFlow, start
from holdfast.flows.unit_of_work import get_counts

POLL_S = 0.005
START_BATCH = 1_000
WITHIN_S = 300.0


class FlowClient:
    def __init__(self, path: str) -> None:
        self._runtime = app.open(path, roles=())

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
        began = time.perf_counter()
        while self._count(state) < count:
            if time.perf_counter() - began > WITHIN_S:
                raise TimeoutError(f"{self._count(state)} of {count} flows are {state}")
            time.sleep(POLL_S)
        return {"at_s": time.time()}

    def tasks(self, count: int) -> dict[str, Any]:
        """Tasks per second, from the first submit of a backlog until all are completed."""
        began = time.perf_counter()
        handles = []
        for at in range(0, count, START_BATCH):
            part = [()] * min(START_BATCH, count - at)
            handles += self._runtime.submit_many(nothing, part)
        for handle in handles:
            handle.result(WITHIN_S)
        return {"rate": count / (time.perf_counter() - began)}

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
    client = FlowClient(sys.argv[1])
    serve({name: getattr(client, name) for name in dir(client) if not name.startswith("_")})
    client.close()


if __name__ == "__main__":
    main()

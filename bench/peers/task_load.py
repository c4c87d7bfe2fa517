"""The Holdfast producer of the task benchmarks: `python -m bench.peers.task_load producer|embedded STORE`.

It reads commands from stdin and prints one line with the answer to each. `embedded` opens a store with every role in
one process and completes one task.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from bench.peers.answers import serve
from bench.peers.producers import by_tasks, by_threads, paced_calls, rate
from bench.peers.tally import NOTE
from bench.peers.task_app import app, run
from holdfast.tasks.model import get_counts, keys_of


class Producer:
    def __init__(self, path: str) -> None:
        self._runtime = app.open(path, roles=())

    def single(self, callers: int, seconds: float) -> dict[str, Any]:
        """Enqueue from coroutines, as with the peers."""

        async def one(sent_ns: int) -> None:
            await self._runtime.submit_async(run, sent_ns, NOTE)

        return asyncio.run(by_tasks(one, callers, seconds))

    def threads(self, callers: int, seconds: float) -> dict[str, Any]:
        return by_threads(self._one, callers, seconds)

    def batched(self, count: int, size: int) -> dict[str, Any]:
        began = time.perf_counter()
        for at in range(0, count, size):
            sent = (time.monotonic_ns(), NOTE)
            self._runtime.submit_many(run, [sent] * min(size, count - at))
        return rate(count, began)

    def paced(self, count: int, per_s: float) -> dict[str, Any]:
        return paced_calls(self._one, count, per_s)

    def left(self) -> dict[str, Any]:
        """Tasks that are not COMPLETED yet. FAILED or DEAD would be an error of the benchmark."""
        keys = keys_of(self._runtime.universe)
        counts = self._runtime.store.read(get_counts, keys, run.spec.queue)
        assert counts.failed == counts.dead == 0, counts
        return {"left": counts.waiting + counts.leased}

    def _one(self, sent_ns: int) -> None:
        self._runtime.submit(run, sent_ns, NOTE)


def main() -> None:
    role, path = sys.argv[1:]
    if role == "embedded":
        with app.open(path) as runtime:
            runtime.submit(run, time.monotonic_ns(), NOTE).result(60)
            serve({})
        return
    producer = Producer(path)
    serve({name: getattr(producer, name) for name in dir(producer) if not name.startswith("_")})


if __name__ == "__main__":
    main()

"""Run by the peers' interpreter: procrastinate's producer or its worker.

    python procrastinate_tasks.py producer|worker DATABASE_URL TALLY

Succeeded jobs stay in its table, as by default.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import procrastinate
import uvloop
from answers import serve, serve_beside
from producers import by_tasks, in_batches, on_loop, paced
from tally import NOTE, Tally

NAME = "run"
# Tuned by trial. A worker fetches jobs one by one, so several workers share a process.
PRODUCERS, WORKERS, CONCURRENCY, WORKER_CONNECTIONS = 8, 4, 8, 12
LOAD_BATCH = 1000
# A notification wakes the worker. The poll covers lost notifications.
POLL_S = 1.0
LEFT = "select count(*) as left from procrastinate_jobs where status in ('todo', 'doing')"


def _app(url: str, connections: int) -> procrastinate.App:
    connector = procrastinate.PsycopgConnector(
        conninfo=url, min_size=connections, max_size=connections
    )
    return procrastinate.App(connector=connector)


def producer(url: str, _tally: str) -> None:
    loop = uvloop.new_event_loop()
    app = _app(url, PRODUCERS)
    loop.run_until_complete(app.open_async())
    deferrer = app.configure_task(NAME)

    async def one(sent_ns: int) -> None:
        await deferrer.defer_async(sent_ns=sent_ns, note=NOTE)

    async def batch(sent: list[int]) -> None:
        jobs = [{"sent_ns": sent_ns, "note": NOTE} for sent_ns in sent]
        await deferrer.batch_defer_async(*jobs)

    async def load(count: int) -> None:
        await in_batches(batch, count, LOAD_BATCH)
        await app.connector.execute_query_async("analyze procrastinate_jobs")

    async def left() -> dict[str, Any]:
        return dict(await app.connector.execute_query_one_async(LEFT))

    bodies = {
        "install": app.schema_manager.apply_schema_async,
        "load": load,
        "single": lambda **asked: by_tasks(one, **asked),
        "batched": lambda **asked: in_batches(batch, **asked),
        "paced": lambda **asked: paced(one, **asked),
        "left": left,
    }
    serve(on_loop(loop, bodies))


def worker(url: str, path: str) -> None:
    tally = Tally(path)
    app = _app(url, WORKER_CONNECTIONS)

    @app.task(name=NAME)
    async def run(sent_ns: int, note: str) -> None:
        tally.mark(sent_ns)

    async def body() -> None:
        async with app.open_async():
            serve_beside()
            options: Any = {
                "concurrency": CONCURRENCY,
                "fetch_job_polling_interval": POLL_S,
                "install_signal_handlers": False,
            }
            await asyncio.gather(*(app.run_worker_async(**options) for _ in range(WORKERS)))

    uvloop.run(body())


if __name__ == "__main__":
    {"producer": producer, "worker": worker}[sys.argv[1]](*sys.argv[2:])

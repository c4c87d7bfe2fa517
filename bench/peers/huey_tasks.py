"""Run by the peers' interpreter: huey's producer, its worker, or both in one process, on SQLite.

    python huey_tasks.py producer|worker|both FILE TALLY

`fsync=True` is `synchronous=FULL` for huey: with the write-ahead log, a commit is on disk when it
returns. huey has no acknowledgement: it deletes a task when a worker takes it. It has no batch either, so
a backlog is written into its table directly, as its own code would write it.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from answers import serve
from huey import SqliteHuey
from producers import by_threads, paced_calls
from tally import NOTE, Tally

# Poll interval of the consumer, the shortest that is still cheap. The default starts at 0.1 s.
POLL_S = 0.001

role, filename, tally_path = sys.argv[1:]
huey = SqliteHuey("tasks", filename=filename, fsync=True, cache_mb=64, timeout=60, results=False)
tally = Tally(tally_path) if role != "producer" else None


@huey.task()
def run(sent_ns: int, note: str) -> None:
    assert tally
    tally.mark(sent_ns)


def enqueue(sent_ns: int) -> None:
    run(sent_ns, NOTE)


def load(count: int) -> dict[str, Any]:
    rows = (
        (huey.storage.name, huey.serialize_task(run.s(time.monotonic_ns(), NOTE)))
        for _ in range(count)
    )
    with huey.storage.db(commit=True) as cursor:
        cursor.executemany("insert into task (queue, data, priority) values (?, ?, 0)", rows)
    return {"count": count}


def producer() -> None:
    serve(
        {
            "single": lambda **asked: by_threads(enqueue, **asked),
            "load": load,
            "paced": lambda **asked: paced_calls(enqueue, **asked),
            "left": lambda: {"left": huey.storage.queue_size()},
        }
    )


def worker() -> None:
    _consume()
    serve({})
    os._exit(0)


def both() -> None:
    """The minimum: a consumer and one task for it."""
    _consume()
    enqueue(time.monotonic_ns())
    serve({})
    os._exit(0)


def _consume() -> None:
    # One thread: each dequeue is a commit, and SQLite serializes commits.
    huey.create_consumer(workers=1, initial_delay=POLL_S, max_delay=POLL_S, periodic=False).start()


if __name__ == "__main__":
    {"producer": producer, "worker": worker, "both": both}[role]()

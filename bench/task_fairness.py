"""The metric of fair turns between limit keys: the wait of one tenant alone, and beside the flood of another.

A worker with four threads runs tasks of five milliseconds. The tenant submits at random times, with about a fifth
of the capacity. Its wait is the time from the submission to the end of the task.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import holdfast as hf
from bench.place import Place
from bench.record import Record, Sample, Target, gather
from holdfast.app.runtime import Runtime

THREADS = 4
TASK_S = 0.005
# Between two submissions of the tenant, on average.
PAUSE_S = TASK_S / THREADS * 5


@hf.task
def work() -> float:
    time.sleep(TASK_S)
    return time.time()


APP = hf.App("fairness", tasks=[work])


def task_fairness(place: Place) -> Record:
    """The 95th percentile of the tenant's wait must stay below twice its value alone."""
    flood, singles = place.sizes.tasks_small, place.sizes.wakes
    samples: list[Sample] = []
    for _ in range(place.repeats):
        with place.store("fairness") as path, _open(path) as rt:
            _waits_ms(rt, THREADS)
            alone = _waits_ms(rt, singles)
            rt.submit_many(work.options(limit_key="flood"), [()] * flood)
            beside = _waits_ms(rt, singles)
        samples.append(
            {"alone": _p95(alone), "beside": _p95(beside), "times": _p95(beside) / _p95(alone)}
        )
    return Record(
        "task_fairness",
        f"95th percentile of the wait of {singles} tasks of one limit key, alone, and beside {flood:,} waiting tasks "
        "of another",
        gather(samples, {"alone": "ms", "beside": "ms", "times": "×"}),
        (Target("times", below=2),),
        {"flood": flood, "singles": singles},
    )


def _open(path: Path) -> Runtime:
    return APP.open(str(path), roles=("task",), concurrency=THREADS)


def _waits_ms(rt: Runtime, count: int) -> list[float]:
    chance = random.Random(7)
    began: list[float] = []
    handles = []
    for _ in range(count):
        time.sleep(chance.expovariate(1 / PAUSE_S))
        began.append(time.time())
        handles.append(rt.submit(work.options(limit_key="tenant")))
    ends = [handle.result(timeout=60) for handle in handles]
    return sorted((end - start) * 1_000 for start, end in zip(began, ends, strict=True))


def _p95(values: list[float]) -> float:
    return values[int(len(values) * 0.95)]

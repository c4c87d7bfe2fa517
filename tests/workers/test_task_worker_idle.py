"""A worker without runnable tasks sleeps: no kind of waiting task causes busy polling."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import holdfast as hf
from tests.process.watch import until

MODULES = ("holdfast.workers.tasks.worker",)

MEASURED_S = 0.5
# Well above the rounds of lease upkeep, and well below those of a busy loop.
ROUNDS_MAX = 60

Scene = Callable[[hf.Runtime, hf.Runtime], Any]

release_tasks = threading.Event()


@hf.task(lease_s=3)
def hold(n: int) -> None:
    release_tasks.wait(60)


@hf.task
def quick(n: int) -> int:
    return n


@hf.task(expiries_max=1)
def alone(n: int) -> int:
    return n


@hf.task
def stranger(n: int) -> int:
    return n


def nothing(rt: hf.Runtime, ahead: hf.Runtime) -> None: ...


def more_than_hands(rt: hf.Runtime, ahead: hf.Runtime) -> None:
    rt.submit_many(hold, [(n,) for n in range(50)])


def a_full_queue(rt: hf.Runtime, ahead: hf.Runtime) -> None:
    held = rt.submit(hold.options(queue="narrow"), 1)
    until(lambda: held.status().attempt, "that the queue is full")
    rt.submit_many(quick.options(queue="narrow"), [(n,) for n in range(50)])


def a_full_limit(rt: hf.Runtime, ahead: hf.Runtime) -> None:
    for n in range(20):
        rt.submit(hold.options(queue="narrow", limit_key="x"), n)


def much_later(rt: hf.Runtime, ahead: hf.Runtime) -> None:
    rt.submit(quick.options(delay_s=3600), 1)


def strays(rt: hf.Runtime, ahead: hf.Runtime) -> None:
    rt.submit(hold, 1)
    ahead.submit_many(stranger, [(n,) for n in range(50)])


def suspects(rt: hf.Runtime, ahead: hf.Runtime) -> None:
    held = rt.submit(hold, 1)
    until(lambda: held.status().attempt, "that something runs")
    rt.submit_many(alone, [(n,) for n in range(20)])


@pytest.mark.parametrize(
    "scene",
    [nothing, more_than_hands, a_full_queue, a_full_limit, much_later, strays, suspects],
    ids=lambda scene: scene.__name__,
)
def test_worker_without_runnable_tasks_sleeps(scene: Scene) -> None:
    release_tasks.clear()
    app = hf.App(
        "jobs",
        tasks=[hold, quick, alone],
        queues=[hf.Queue("default"), hf.Queue("narrow", concurrency=1, per_key=1)],
    )
    with app.open("memory:", roles=("task",)) as rt:
        try:
            ahead = hf.App("jobs", tasks=[stranger]).open(rt.store, roles=())
            [worker] = rt.roles
            scene(rt, ahead)
            rounds = wait_until_stable(lambda: worker.rounds)
            began_s = time.monotonic()
            until(lambda: time.monotonic() - began_s > MEASURED_S, "the measured time")
            assert worker.rounds - rounds < ROUNDS_MAX
            assert worker.failure is None
        finally:
            release_tasks.set()


def wait_until_stable(read_value: Callable[[], int]) -> int:
    """Return the value after it has been stable for 50 ms. A busy loop never gets there."""
    found, since_s = read_value(), time.monotonic()

    def quiet() -> bool:
        nonlocal found, since_s
        if read_value() != found:
            found, since_s = read_value(), time.monotonic()
        return time.monotonic() - since_s > 0.05

    until(quiet, "that it rests")
    return found

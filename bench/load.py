"""The code of a load process: `python -m bench.load ARGUMENTS`, started by `workers`.

A role is a generator function. It opens its store and yields once when it is ready. Then it receives the
parameters of a repeat, yields its answer, and repeats this until its input ends.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Generator
from functools import cache, partial
from typing import Any

from holdfast import store as stores
from holdfast.clock import S
from holdfast.durable import journal, queue
from holdfast.store.api import Store, Txn
from holdfast.store.schema import Space, key_prefix
from holdfast.store.tuples import pack_int

Answer = dict[str, Any]
Role = Generator[Answer, dict[str, Any], None]

ROWS_PER_CALLER = 10_000
VALUE = b"v" * 100
PAYLOAD = b"p" * 64
CLAIM_TTL_NS = 60 * S
LOAD_BATCH = 5_000
TOPIC = "bench"


def main() -> int:
    arguments = json.loads(sys.argv[1])
    role = ROLES[arguments.pop("role")](**arguments)
    next(role)
    print("ready", flush=True)
    for line in sys.stdin:
        # Collect here, so that no collection falls into a repeat.
        gc.collect()
        print(json.dumps(role.send(json.loads(line))), flush=True)
    role.close()
    return 0


# -- commits -------------------------------------------------------------------------------------


def op(txn: Txn, caller: int, n: int) -> None:
    """The operation of the targets: one read and three puts, on rows of this caller alone.

    A batch of 1,000 operations writes about 2,600 different rows.
    """
    rows = rows_of(caller)
    txn.get(rows + pack_int(n))
    for step in range(3):
        txn.put(rows + pack_int(n + step), VALUE)


@cache
def rows_of(caller: int) -> bytes:
    """The packed prefix, cached as the modules of `durable` cache theirs."""
    return key_prefix(Space.APP_STATE, "bench", caller)


def ops(txn: Txn, caller: int, numbers: list[int]) -> None:
    for n in numbers:
        op(txn, caller, n)


def threads(path: str, number: int, callers: int) -> Role:
    """Callers as threads. Each waits for its commit. A single caller is the main thread."""
    store = stores.open(path)
    names = range(number * 1000, number * 1000 + callers)
    parameters = yield {}
    while True:
        with _computing(parameters.get("computing", False)):
            answer = _threaded(partial(_call_until, store), names, parameters["seconds"])
        parameters = yield answer


def tasks(path: str, number: int, callers: int) -> Role:
    """The same as asyncio tasks that await `submit`."""
    store = stores.open(path)
    names = range(number * 1000, number * 1000 + callers)

    async def caller_task(caller: int, until: float) -> list[float]:
        pick = random.Random(caller).randrange
        took = []
        while (began := time.perf_counter()) < until or not took:
            await store.submit(op, caller, pick(ROWS_PER_CALLER))
            took.append(time.perf_counter() - began)
        return took

    async def all_tasks(seconds: float) -> Answer:
        watch = Watch()
        runs = [caller_task(caller, watch.began + seconds) for caller in names]
        return watch.rated([each for run in await asyncio.gather(*runs) for each in run])

    parameters = yield {}
    while True:
        parameters = yield asyncio.run(all_tasks(parameters["seconds"]))


def batches(path: str, number: int, size: int) -> Role:
    """One caller with many operations per transaction."""
    store = stores.open(path)
    pick = random.Random(number).randrange
    parameters = yield {}
    while True:
        took, watch = [], Watch()
        while (at := time.perf_counter()) < watch.began + parameters["seconds"] or not took:
            store.transact(ops, number, [pick(ROWS_PER_CALLER) for _ in range(size)])
            took.append(time.perf_counter() - at)
        parameters = yield watch.rated(took, per_call=size)


# -- queue and journal ---------------------------------------------------------------------------


def loader(path: str, number: int) -> Role:
    """Fills queues."""
    store = stores.open(path)
    parameters = yield {}
    while True:
        began = time.perf_counter()
        for at in range(0, parameters["items"], LOAD_BATCH):
            count = min(LOAD_BATCH, parameters["items"] - at)
            store.transact(queue.put_many, parameters["queue"], [PAYLOAD] * count)
        parameters = yield {"seconds": time.perf_counter() - began}


def claimers(path: str, number: int, batch: int) -> Role:
    """One of several processes that empty a queue: claim a batch, acknowledge it, until the queue is empty."""
    store = stores.open(path)
    parameters = yield {}
    while True:
        count, began = 0, time.perf_counter()
        while claims := _claim(store, parameters["queue"], f"claimer-{number}", batch):
            store.transact(queue.ack, [claim.token for claim in claims])
            count += len(claims)
        parameters = yield {"count": count, "began": began, "ended": time.perf_counter()}


def churn(path: str, number: int, callers: int, batch: int) -> Role:
    """Callers put a batch, claim a batch and acknowledge it. The backlog keeps its length."""
    store = stores.open(path)
    parameters = yield {}
    while True:
        name = parameters["queue"]

        def turn(caller: int, until: float, name: str = name) -> list[float]:
            took = []
            while (began := time.perf_counter()) < until or not took:
                store.transact(queue.put_many, name, [PAYLOAD] * batch)
                claims = _claim(store, name, f"caller-{caller}", batch)
                store.transact(queue.ack, [claim.token for claim in claims])
                took.append(time.perf_counter() - began)
            return took

        parameters = yield _threaded(turn, range(callers), parameters["seconds"], per_call=batch)


def appends(path: str, number: int, callers: int, batch: int) -> Role:
    """Each caller appends to its journal, a batch of entries per transaction."""
    store = stores.open(path)
    bodies = [PAYLOAD] * batch
    heights = [0] * callers

    def turn(caller: int, until: float) -> list[float]:
        took = []
        while (began := time.perf_counter()) < until or not took:
            head = store.transact(_append, f"subject-{caller}", bodies, heights[caller])
            heights[caller] = head.height
            took.append(time.perf_counter() - began)
        return took

    parameters = yield {}
    while True:
        parameters = yield _threaded(turn, range(callers), parameters["seconds"], per_call=batch)


def _append(txn: Txn, subject: str, bodies: list[bytes], height: int) -> journal.JournalHead:
    return journal.append(txn, subject, bodies, expected_head=height)


def _claim(store: Store, name: str, owner: str, batch: int) -> list[queue.Claim]:
    claims: list[queue.Claim] = store.transact(queue.claim, name, owner, batch, CLAIM_TTL_NS)
    return claims


# -- waiting -------------------------------------------------------------------------------------


def waiter(path: str, number: int) -> Role:
    """Waits for a topic and returns its wake-up time, by the clock that all processes share."""
    store = stores.open(path)
    since = store.wait(TOPIC, 0, 0)
    parameters = yield {}
    while True:
        since = store.wait(TOPIC, since, parameters["timeout_s"])
        parameters = yield {"woke_ns": time.monotonic_ns()}


def notifier(path: str, number: int) -> Role:
    store = stores.open(path)
    parameters = yield {}
    while True:
        time.sleep(parameters["after_s"])
        called_ns = time.monotonic_ns()
        store.transact(lambda txn: txn.notify(TOPIC))
        parameters = yield {"called_ns": called_ns, "answered_ns": time.monotonic_ns()}


def idler(path: str, number: int) -> Role:
    """An idle worker: a runner on an empty queue."""
    from holdfast.runner.runner import Runner

    store = stores.open(path)
    runner = Runner(store, "nothing", lambda work: None, worker="idler", bootstrap=True)
    runner.boot()
    threading.Thread(target=runner.run, daemon=True).start()
    parameters = yield {}
    while True:
        began, used = time.perf_counter(), time.process_time()
        time.sleep(parameters["seconds"])
        share = (time.process_time() - used) / (time.perf_counter() - began)
        parameters = yield {"share": share}


# -- memory --------------------------------------------------------------------------------------


def opener(path: str, number: int) -> Role:
    """Opens a store on request and returns the time that this took."""
    parameters = yield {}
    began = time.perf_counter()
    with stores.open(path, bootstrap=False) as store:
        opened_s = time.perf_counter() - began
        store.transact(op, 0, 0)
        parameters = yield {"opened_s": opened_s, "usable_s": time.perf_counter() - began}
        del parameters
        while True:
            yield {}


# -- measuring -----------------------------------------------------------------------------------


def _call_until(store: Store, caller: int, until: float) -> list[float]:
    pick = random.Random(caller).randrange
    took = []
    while (began := time.perf_counter()) < until or not took:
        store.transact(op, caller, pick(ROWS_PER_CALLER))
        took.append(time.perf_counter() - began)
    return took


def _threaded(
    turn: Callable[[int, float], list[float]], callers: range, seconds: float, *, per_call: int = 1
) -> Answer:
    """Run `turn(caller, until)` for all callers at once."""
    watch = Watch()
    until = watch.began + seconds
    took: list[float] = []
    if len(callers) == 1:
        took += turn(callers[0], until)
    else:
        runs = [
            threading.Thread(target=lambda caller=caller: took.extend(turn(caller, until)))
            for caller in callers
        ]
        for run in runs:
            run.start()
        for run in runs:
            run.join()
    return watch.rated(took, per_call=per_call)


class Watch:
    """Wall time and processor time since its creation."""

    def __init__(self) -> None:
        self.began, self._used = time.perf_counter(), time.process_time()

    def rated(self, took: list[float], *, per_call: int = 1) -> Answer:
        """`took` has the duration of each call. A call may hold several operations."""
        seconds, used = time.perf_counter() - self.began, time.process_time() - self._used
        took.sort()
        return {
            "count": len(took) * per_call,
            "rate": len(took) * per_call / seconds,
            "cpu_s": used,
            "p50_ms": 1000 * took[len(took) // 2],
            "p99_ms": 1000 * took[len(took) * 99 // 100],
        }


class _computing:
    """A CPU-bound thread of this process, while the block runs."""

    def __init__(self, wanted: bool) -> None:
        self._stop = not wanted
        self._thread = threading.Thread(target=self._compute, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._stop = True
        self._thread.join()

    def _compute(self) -> None:
        while not self._stop:
            sum(n * n for n in range(100))


ROLES: dict[str, Callable[..., Role]] = {
    role.__name__: role
    for role in (
        threads, tasks, batches, loader, claimers, churn, appends, waiter, notifier, idler, opener,
    )
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())

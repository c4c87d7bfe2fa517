"""Metrics of the commit path. An operation is one read and three puts, durable when it returns."""

from __future__ import annotations

import random
import time

import lmdb

from bench.load import ROWS_PER_CALLER, VALUE, rows_of
from bench.place import Place
from bench.record import Record, Sample, Target, against_raw, gather
from bench.workers import WorkerGroup
from holdfast.config import MAP_BYTES
from holdfast.store.tuples import pack_int

RATED = {
    "rate": "ops/s",
    "raw": "fdatasync/s",
    "ratio": "× raw",
    "p50_ms": "ms",
    "p99_ms": "ms",
    "client_us": "µs",
    "writer_us": "µs",
}
BATCH = 1000


def floor(place: Place) -> Record:
    """LMDB alone: the same operation, committed in this process without a writer process."""
    keys = [rows_of(0) + pack_int(n) for n in range(ROWS_PER_CALLER + 3)]
    pick = random.Random(0).randrange

    def one(env: lmdb.Environment) -> None:
        n = pick(ROWS_PER_CALLER)
        with env.begin(write=True) as txn:
            txn.get(keys[n])
            for step in range(3):
                txn.put(keys[n + step], VALUE)

    def run() -> Sample:
        count, began = 0, time.perf_counter()
        while (now := time.perf_counter()) < began + place.slice_s:
            one(env)
            count += 1
        return {"rate": count / (now - began)}

    with place.store("floor") as path:
        path.mkdir()
        with lmdb.open(str(path), map_size=MAP_BYTES, readahead=False) as env:
            samples = against_raw(place, run)
    units = {name: RATED[name] for name in ("rate", "raw", "ratio")}
    return Record(
        "floor", "plain py-lmdb, one commit an op, no process hop", gather(samples, units)
    )


def one_caller(place: Place) -> Record:
    with place.store("one") as path, WorkerGroup("threads", 1, path, callers=1) as group:
        samples = against_raw(place, lambda: group.rated(seconds=place.slice_s))
    return Record(
        "one_caller",
        "one caller, one op a transaction",
        gather(samples, RATED),
        (Target("ratio", at_least=0.3),),
    )


def callers_64_threads(place: Place) -> Record:
    return _many(place, "callers_64_threads", "threads", "64 threads calling transact")


def callers_64_tasks(place: Place) -> Record:
    return _many(place, "callers_64_tasks", "tasks", "64 asyncio tasks awaiting submit")


def _many(place: Place, name: str, role: str, what: str) -> Record:
    with place.store(name) as path, WorkerGroup(role, 1, path, callers=64) as group:
        samples = against_raw(place, lambda: group.rated(seconds=place.slice_s))
    return Record(
        name,
        f"{what}, one client process",
        gather(samples, RATED),
        (Target("ratio", at_least=3), Target("p99_ms", below=10)),
    )


def processes_4x32(place: Place) -> Record:
    with place.store("4x32") as path, WorkerGroup("threads", 4, path, callers=32) as group:
        samples = against_raw(place, lambda: group.rated(seconds=place.slice_s))
    return Record(
        "processes_4x32",
        "4 client processes of 32 threads each",
        gather(samples, RATED),
        (Target("ratio", at_least=2.5),),
    )


def batches_1000(place: Place) -> Record:
    with place.store("batches") as path, WorkerGroup("batches", 1, path, size=BATCH) as group:
        samples = against_raw(place, lambda: group.rated(seconds=place.slice_s))
    return Record(
        "batches_1000",
        "one caller, 1,000 ops a transaction",
        gather(samples, RATED),
        (Target("ratio", at_least=10),),
    )


def computing_thread(place: Place) -> Record:
    """Measure one caller with and without a CPU-bound thread in its process."""
    samples = []
    with place.store("computing") as path, WorkerGroup("threads", 1, path, callers=1) as group:
        for _ in range(place.repeats):
            [quiet] = group.go(seconds=place.slice_s)
            [beside] = group.go(seconds=place.slice_s, computing=True)
            samples.append(
                {
                    "kept": beside["rate"] / quiet["rate"],
                    "rate": beside["rate"],
                    "rate_alone": quiet["rate"],
                    "p99_ms": beside["p99_ms"],
                }
            )
    return Record(
        "computing_thread",
        "one caller beside a CPU-bound thread, against alone",
        gather(samples, {"kept": "×", "rate": "ops/s", "rate_alone": "ops/s", "p99_ms": "ms"}),
        (Target("kept", at_least=0.5),),
    )

"""Metrics of a large store: the time to open it, and its memory apart from mapped files."""

from __future__ import annotations

from pathlib import Path

import lmdb

from bench.load import VALUE
from bench.place import Place, end_writer, writer_pid
from bench.record import Record, Target, gather
from bench.workers import WorkerGroup
from holdfast import store as stores
from holdfast.config import MAP_BYTES
from holdfast.store import tuples
from holdfast.store.lmdb.backend import LmdbBackend
from holdfast.store.schema import Space

ROWS_PER_COMMIT = 100_000


def memory(place: Place) -> Record:
    samples = []
    with place.store("memory") as path:
        with stores.open(path):
            pass
        end_writer(path)
        build(path, place.sizes.memory_keys)
        for _ in range(place.repeats):
            with WorkerGroup("opener", 1, path) as group:
                # No process has the store open yet, so this starts the writer, too.
                [opened] = group.go()
                client, writer = group.members[0].pid, writer_pid(path)
                samples.append(
                    {
                        "open_s": opened["opened_s"],
                        "rss_anon_mb": (rss_anon(client) + rss_anon(writer)) / 1e6,
                        "client_mb": rss_anon(client) / 1e6,
                        "writer_mb": rss_anon(writer) / 1e6,
                    }
                )
            end_writer(path)
        size = (path / "data.mdb").stat().st_size
    units = {"open_s": "s", "rss_anon_mb": "MB", "client_mb": "MB", "writer_mb": "MB"}
    return Record(
        "memory",
        f"a store of {place.sizes.memory_keys:,} keys: time to open, memory of client and writer",
        gather(samples, units),
        (Target("open_s", below=1), Target("rss_anon_mb", below=100)),
        {"file_mb": round(size / 1e6)},
    )


def build(path: Path, keys: int) -> None:
    """Append rows in key order and sync once at the end. No other process has the store open."""
    prefix = tuples.pack((int(Space.APP_STATE), "bench-memory"))
    # Apply and close the redo log of the writer first: the code below bypasses the log.
    LmdbBackend(path, readonly=False).close()
    with lmdb.open(str(path), map_size=MAP_BYTES, readahead=False, sync=False) as env:
        for start in range(0, keys, ROWS_PER_COMMIT):
            with env.begin(write=True) as txn, txn.cursor() as cursor:
                numbers = range(start, min(start + ROWS_PER_COMMIT, keys))
                cursor.putmulti((prefix + tuples.pack_int(n), VALUE) for n in numbers)
        env.sync(True)


def rss_anon(pid: int) -> int:
    """Anonymous resident memory in bytes, without mapped files."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0

"""Store bytes per row and memory of the ledger service with a spool: `python -m bench.spark.spool`.

    python -m bench.spark.spool --sizes 8:1000000,8:100000,4096:100000 [--save]

Each size is the bytes of a result and a number of rows. The function takes batches and returns incompressible bytes.
There is no output, so the driver has only the ledger. The spool is a directory. Memory is the maximum of `Pss_Anon`
of the service, without pages of mapped files. The store is measured after the run, as blocks on the disk. Bytes per
row are of a compacted copy: a fast run leaves more free pages in the file than a slow one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import pyarrow as pa

from bench.place import ROOT, end_writer, new_directory
from bench.spark import report
from holdfast.spark import Stage, session

SAMPLE_S = 0.2
SERVICE = "holdfast.spark.service"
DEFAULT = "8:1000000,8:100000,4096:100000"
STORE_BYTES_MAX = 3_000_000_000
SERVICE_BYTES_MAX = 1_000_000_000
STORE_RATIO_MAX = 1.1


def returns(size: int) -> Callable[[pa.Table], pa.Table]:
    def work(table: pa.Table) -> pa.Table:
        rows = table.num_rows
        data = pa.py_buffer(os.urandom(rows * size))
        if size == 8:
            return pa.table({"y": pa.Array.from_buffers(pa.int64(), rows, [None, data])})
        fixed = pa.Array.from_buffers(pa.binary(size), rows, [None, data])
        return pa.table({"y": fixed.cast(pa.binary())})

    return work


class Memory:
    """The maximum memory of the ledger services of this process."""

    def __init__(self) -> None:
        self.most_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self.most_bytes = max([self.most_bytes, *map(anonymous_bytes, services())])


def services() -> Iterator[int]:
    me = os.getpid()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == me and SERVICE.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                yield int(entry.name)
        except OSError:
            continue


def anonymous_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    sizes = [line.split()[1] for line in lines if line.startswith("Pss_Anon:")]
    return int(sizes[0]) * 1024 if sizes else 0


def on_disk(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def compacted(directory: Path) -> int:
    """Bytes of the rows in the store, without the free pages that a fast run leaves in its file."""
    env = lmdb.open(str(directory), readonly=True, lock=False, max_dbs=8)
    with tempfile.TemporaryDirectory() as copy:
        env.copy(copy, compact=True)
        size = on_disk(Path(copy))
    env.close()
    return size


def measure(spark: Any, directory: Path, size: int, rows: int) -> dict[str, Any]:
    store, spool = directory / f"store-{size}-{rows}", directory / f"spool-{size}-{rows}"
    stage = Stage(
        "bench", returns(size), key="id", schema="y bigint" if size == 8 else "y binary",
        store=store, spool=spool, batch=True, progress="quiet",
    )  # fmt: skip
    began = time.monotonic()
    with Memory() as memory, stage.run(spark.range(rows)) as run:
        seconds = time.monotonic() - began
        done = run.counts()["TERMINAL_SUCCESS"]
    assert done == rows, done
    end_writer(store)
    figures = {
        "result_bytes": size,
        "rows": rows,
        "seconds": round(seconds, 1),
        "store_bytes": on_disk(store),
        "store_bytes_a_row": round(compacted(store) / rows, 3),
        "spool_bytes": on_disk(spool),
        "spool_objects": sum(path.is_file() for path in spool.rglob("*")),
        "service_anonymous_mib": round(memory.most_bytes / (1 << 20), 1),
    }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.spark.spool", description=__doc__)
    parser.add_argument("--sizes", default=DEFAULT, help="BYTES:ROWS,… of results")
    parser.add_argument(
        "--dir", type=Path, default=ROOT / "build", help="parent of the temporary directory"
    )
    parser.add_argument("--save", action="store_true", help="also write docs/benchmarks-spark.md")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    sizes = [tuple(map(int, text.split(":"))) for text in args.sizes.split(",")]
    spark = session("local[2]", app="bench", config={"spark.ui.enabled": "false"})
    results = []
    with new_directory(args.dir) as directory:
        for size, rows in sizes:
            results.append(measure(spark, directory, size, rows))
            print(json.dumps(results[-1]), flush=True)
            shutil.rmtree(directory / f"spool-{size}-{rows}")
    spark.stop()
    remarks = list(goal_remarks(results))
    print("\n".join(remarks))
    if args.save:
        command = f"python -m bench.spark.spool --sizes {args.sizes}"
        report.write(
            "spool", report.spool([line(result) for result in results], remarks, load, command)
        )


def goal_remarks(results: list[dict[str, Any]]) -> Iterator[str]:
    """The goals, and whether they are met."""
    store = max(result["store_bytes"] for result in results)
    service = max(result["service_anonymous_mib"] for result in results) * (1 << 20)
    met = store < STORE_BYTES_MAX and service < SERVICE_BYTES_MAX
    yield (
        f"Goals: the store under {STORE_BYTES_MAX / 1e9:g} GB, the ledger service under "
        f"{SERVICE_BYTES_MAX / 1e9:g} GB: {'met' if met else 'NOT met'}."
    )
    by_rows: dict[int, list[dict[str, Any]]] = {}
    for result in results:
        by_rows.setdefault(result["rows"], []).append(result)
    for rows, same in by_rows.items():
        if len(same) > 1:
            sizes = [result["store_bytes_a_row"] for result in same]
            ratio = max(sizes) / min(sizes)
            yield (
                f"{rows:,} rows with small and with large results: the store differs by {ratio:.2f} × "
                f"(goal ≤ {STORE_RATIO_MAX}). It has a constant part, which counts more with fewer rows."
            )


def line(result: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{result['rows']:,} of {result['result_bytes']:,} bytes",
        f"{result['seconds']:.0f} s",
        f"{result['store_bytes'] / 1e9:.2f} GB",
        f"{result['store_bytes_a_row']:.2f} bytes",
        f"{result['spool_bytes'] / 1e9:.1f} GB in {result['spool_objects']:,} objects",
        f"{result['service_anonymous_mib']:,.0f} MiB",
    )


if __name__ == "__main__":
    main()

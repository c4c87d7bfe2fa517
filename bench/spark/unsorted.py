"""An input of random UUID keys, end to end, beside Spark's own sort, `mapInArrow` and `write.parquet`.

    python -m bench.spark.unsorted --gb 1,2 [--spool] [--turns 1] [--save]

A row is a key of 36 characters and 964 incompressible random bytes. The function returns the length and the
first byte of the payload, so that it reads all of each row. Both sides read the same Parquet files and write
key and result in the order of the key. The benchmark compares the two outputs. For two sizes it also prints
the growth of the stage's time from the smaller to the larger.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bench.place import ROOT, end_writer, new_directory
from bench.spark import report

PAYLOAD_BYTES = 964
ROW_BYTES = 36 + PAYLOAD_BYTES
PART_BYTES = 128 * 1024 * 1024
MASTER = "local[2]"
CONFIG = {"spark.driver.memory": "4g", "spark.ui.enabled": "false"}
SCHEMA = "length int, first int"
KEYED_SCHEMA = "id string, length int, first int"
RATIO_MAX = 1.5
GROWTH_MAX = 2.3


def made(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        rows = batch.num_rows
        noise = os.urandom(16 * rows)
        keys = [str(uuid.UUID(bytes=noise[at : at + 16])) for at in range(0, 16 * rows, 16)]
        offsets = pa.array(range(0, (rows + 1) * PAYLOAD_BYTES, PAYLOAD_BYTES), pa.int32())
        data = pa.py_buffer(os.urandom(rows * PAYLOAD_BYTES))
        payload = pa.Array.from_buffers(pa.binary(), rows, [None, offsets.buffers()[1], data])
        yield pa.RecordBatch.from_arrays([pa.array(keys), payload], names=["id", "payload"])


def measured(table: pa.Table) -> pa.Table:
    payload = table.column("payload")
    first = [ord(byte) for byte in pc.binary_slice(payload, 0, 1).to_pylist()]
    return pa.table({"length": pc.binary_length(payload), "first": pa.array(first, pa.int32())})


def base_measured(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        table = pa.Table.from_batches([batch])
        result = measured(table)
        columns = [table.column("id"), *result.columns]
        yield from pa.Table.from_arrays(columns, names=["id", "length", "first"]).to_batches()


def base(spark: Any, source: Path, output: Path) -> float:
    began = time.monotonic()
    df = spark.read.parquet(str(source))
    ordered = df.repartitionByRange("id").sortWithinPartitions("id")
    ordered.mapInArrow(base_measured, KEYED_SCHEMA).write.parquet(str(output))
    return time.monotonic() - began


def stage(spark: Any, source: Path, output: Path, store: Path, name: str, spool: str) -> float:
    from holdfast.spark import Stage

    options: dict[str, Any] = {"spool": spool} if spool else {}
    began = time.monotonic()
    df = spark.read.parquet(str(source))
    work = Stage(
        name, measured, key="id", schema=SCHEMA, store=str(store), batch=True, progress="quiet", **options
    )  # fmt: skip
    with work.run(df, output=output):
        return time.monotonic() - began


def same(one: Path, two: Path) -> bool:
    """Whether both outputs have the same rows in the same order, file by file in the order of their names."""
    return all(read(one, column).equals(read(two, column)) for column in ("id", "length", "first"))


def read(output: Path, column: str) -> pa.ChunkedArray:
    files = sorted(output.glob("part-*.parquet"))
    return pa.concat_tables(
        pq.read_table(file, columns=[column]) for file in files
    ).column(column).combine_chunks()  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.spark.unsorted", description=__doc__)
    parser.add_argument("--gb", default="1,2", help="sizes of the input in GB (1,2)")
    parser.add_argument("--turns", type=int, default=1, help="turns of the two sides (1)")
    parser.add_argument("--spool", action="store_true", help="keep the data in a spool directory")
    parser.add_argument(
        "--dir", type=Path, default=ROOT / "build", help="parent of the temporary directory (build)"
    )
    parser.add_argument("--save", action="store_true", help="also write docs/benchmarks-spark.md")
    args = parser.parse_args(argv)
    load = os.getloadavg()[0]
    from holdfast.spark.session import session

    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    medians: dict[float, float] = {}
    rows: list[tuple[str, ...]] = []
    with new_directory(args.dir) as directory:
        spark = session(MASTER, app="bench", config=CONFIG)
        try:
            for gb in (float(text) for text in args.gb.split(",")):
                base_s, medians[gb], ratio = turns(
                    spark, directory, gb, args.turns, spool=args.spool
                )
                met = "yes" if ratio <= RATIO_MAX else "NO"
                cells = (f"{gb:g} GB", f"{base_s:.1f} s", f"{medians[gb]:.1f} s", f"{ratio:.2f}")
                rows.append((*cells, f"\u2264 {RATIO_MAX:g} \u00d7", met))
        finally:
            spark.stop()
            end_writer(directory / "store")
    sizes = sorted(medians)
    remarks = []
    for small, large in itertools.pairwise(sizes):
        growth = medians[large] / medians[small]
        goal = f"goal ≤ {GROWTH_MAX} for twice"
        remarks.append(f"{large:g} GB takes {growth:.2f} × the time of {small:g} GB ({goal}).")
    print("\n".join(remarks))
    if args.save:
        command = f"python -m bench.spark.unsorted --gb {args.gb}{' --spool' if args.spool else ''}"
        report.write("unsorted", report.unsorted(rows, remarks, load, command))
    return 0


def turns(
    spark: Any, directory: Path, gb: float, count: int, *, spool: bool
) -> tuple[float, float, float]:
    """Medians: the time of the base, the time of the stage, their ratio."""
    rows = int(gb * 1e9 / ROW_BYTES)
    source = directory / "input"
    parts = max(int(gb * 1e9 / PART_BYTES), 2)
    spark.range(0, rows, 1, parts).mapInArrow(made, "id string, payload binary").write.option(
        "compression", "none"
    ).parquet(str(source))
    times: list[tuple[float, float]] = []
    for turn in range(count):
        plain, ordered = directory / "plain", directory / "ordered"
        base_s = base(spark, source, plain)
        place = str(directory / "spool") if spool else ""
        stage_s = stage(spark, source, ordered, directory / "store", f"sort-{gb}-{turn}", place)
        equal = same(plain, ordered)
        times.append((base_s, stage_s))
        figures = {"gb": gb, "rows": rows, "base_s": round(base_s, 1), "stage_s": round(stage_s, 1)}
        print(
            json.dumps(figures | {"ratio": round(stage_s / base_s, 2), "same": equal}), flush=True
        )
        assert equal, "the outputs differ"
        for path in (plain, ordered, directory / "spool"):
            shutil.rmtree(path, ignore_errors=True)
        end_writer(directory / "store")
        shutil.rmtree(directory / "store", ignore_errors=True)
    shutil.rmtree(source)
    ratio = median(stage_s / base_s for base_s, stage_s in times)
    print(f"{gb:g} GB: {ratio:.2f} × Spark's own sort (goal ≤ {RATIO_MAX})")
    base_s, stage_s = (median(values) for values in zip(*times, strict=True))
    return base_s, stage_s, ratio


if __name__ == "__main__":
    sys.exit(main())

"""Writers of a sink that kill themselves at a given step, each in a forked process.

    python -m tests.sinks.killed_writer
    < ["parquet", "/tmp/out", "log-fsync", 2]
    > ended -9

The start of a Python with the modules of a sink takes half a second, a fork a few milliseconds. The process that
forks opens no sink and has no other thread, so a fork lacks nothing.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback

import deltalake  # noqa: F401  # every fork has it
import pyarrow as pa

from holdfast.spark.sinks import DeltaSink, ParquetSink, Part, Sink

SCHEMA = pa.schema([("id", pa.int64()), ("label", pa.string())])
CUT = 100


def part(number: int, *, rows: int = CUT) -> Part:
    lo = number * CUT
    ids = range(lo, lo + rows)
    columns = {"id": list(ids), "label": [f"label {i % 7}" for i in ids]}
    return Part(lo, lo + CUT, pa.table(columns, schema=SCHEMA))


def write(kind: str, path: str, step: str, count: int) -> None:
    """Begin, commit four parts in two commits, and kill the process at a step."""
    seen = 0

    def die(name: str) -> None:
        nonlocal seen
        seen += name == step
        if seen == count:
            os.kill(os.getpid(), signal.SIGKILL)

    sink: Sink
    sink = ParquetSink(path, step=die) if kind == "parquet" else DeltaSink(path, step=die)
    sink.begin("run-1", "labels", SCHEMA)
    sink.commit_many([part(0), part(1)])
    sink.commit_many([part(2), part(3)])
    sink.finish()


def main() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            try:
                write(*json.loads(line))
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        print("ended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()

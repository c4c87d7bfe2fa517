"""`docs/benchmarks-spark.md`: tables between markers, the text around them is written by hand.

A page that is not there is made from a template. What a run did not measure stays as it was.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from bench.place import ROOT
from bench.spark.faults import CONCURRENCY, FLUSH_ROWS, ROWS, TASKS, Line, Seen
from bench.spark.speed import Figure
from holdfast import __version__

PAGE = ROOT / "docs" / "benchmarks-spark.md"

TEMPLATE = f"""\
# Stage beside naive Spark

Between the markers: written by `make bench-spark`, which measures on your own machine. Naive Spark
is `mapInArrow` + `write.parquet` of the same function, in the same run and the same session.

## What faults cost

{ROWS:,} paid calls of 5 ms on a standalone cluster of two Workers with a core each, started from the
PySpark wheel; {CONCURRENCY} calls at once in a task. Every call is a line in a log outside of
Spark and of the store, written when the call begins: the log is the bill. *Repeated* is calls beyond
the first of a row. The promise: at most `flush_rows + concurrency` = {FLUSH_ROWS} + {CONCURRENCY} for each task in
flight ({TASKS}), for each fault; of a row that kills its interpreter each of its attempts is one.

A line is in the table only if the stage's output held exactly the answers of the rows that did not
fail, in the order of the key, and if its Parquet part files were the same bytes as those of an
undisturbed run.

<!-- faults:begin -->
<!-- faults:end -->

## How fast it is

On `local[2]`, warm, base and stage by turns; medians over the turns, with the least and the greatest.
Taking the input in, the ledger and the ordered commit are in the stage's time. *Ratio* is stage / base.

<!-- speed:begin -->
<!-- speed:end -->

## Large inputs

Random UUID keys, rows of 1 KB that nothing compresses, on `local[2]` with a spool directory. *Base* is Spark's own
sort, `mapInArrow` and `write.parquet`. Both outputs have the same rows in the same order. The stage also writes the
sorted input durably into the spool, and reads it back.

<!-- unsorted:begin -->
<!-- unsorted:end -->

## Large results

A batch function on `local[2]` with a spool directory and no output. The store is what the driver keeps: its size does
not depend on the size of a result. Memory is the most of `Pss_Anon` of the ledger service: without pages of mapped files.

<!-- spool:begin -->
<!-- spool:end -->
"""

FAULT_HEADER = (
    "fault", "naive: rows out", "calls", "repeated", "s",
    "stage: rows out", "calls", "repeated", "at most", "s", "part files",
)  # fmt: skip
SPEED_HEADER = ("work", "base", "stage", "ratio", "goal", "met")


def write(part: str, text: str, page: Path = PAGE) -> None:
    """Put the text between the markers of a part."""
    whole = page.read_text(encoding="utf-8") if page.exists() else TEMPLATE
    begin, end = f"<!-- {part}:begin -->", f"<!-- {part}:end -->"
    before, _, rest = whole.partition(begin)
    after = rest.partition(end)[2]
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def faults(
    lines: Sequence[Line], partitionings: Sequence[str], load: float, command: str, *, hosts: bool
) -> str:
    where = (
        "The two Workers are on two hosts, each with a network, mounts and a /tmp of its own; the directory of the "
        "benchmark is the one that both have."
        if hosts
        else "The two Workers are on the loopback of one machine: two hosts need root."
    )
    told = [one for line in lines for one in _told(line)]
    same = ", ".join(partitionings)
    return "\n".join(
        [
            "",
            measured(load, command),
            "",
            *markdown([FAULT_HEADER, *map(_fault, lines)]),
            "",
            f"- {where}",
            *told,
            "- Times are of `run` or of the naive job; where it is run again, of the second one alone.",
            *([f"- The part files are the same bytes with {same}, too."] if same else []),
            "",
        ]
    )


def speed(figures: Sequence[Figure], load: float, command: str) -> str:
    rows = [
        (one.what, one.base_text, one.stage_text, one.ratio_text, one.goal_text, one.met_text)
        for one in figures
    ]
    return "\n".join(["", measured(load, command), "", *markdown([SPEED_HEADER, *rows]), ""])


def unsorted(
    rows: Sequence[tuple[str, ...]], told: Sequence[str], load: float, command: str
) -> str:
    head = ("input", "base", "stage", "ratio", "goal", "met")
    lines = [f"- {line}" for line in told]
    return "\n".join(["", measured(load, command), "", *markdown([head, *rows]), "", *lines, ""])


def spool(rows: Sequence[tuple[str, ...]], told: Sequence[str], load: float, command: str) -> str:
    head = ("results", "time", "store", "store, a row", "spool", "ledger service")
    lines = [f"- {line}" for line in told]
    return "\n".join(["", measured(load, command), "", *markdown([head, *rows]), "", *lines, ""])


def markdown(rows: Sequence[tuple[str, ...]]) -> list[str]:
    head, *body = rows
    return ["| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *body)]


def _fault(line: Line) -> tuple[str, ...]:
    naive, stage = line.naive, line.stage
    return (
        line.what,
        *(_side(naive) if naive is not None else ("\u2013",) * 4),
        *_side(stage)[:3],
        f"{line.bound:,}",
        _side(stage)[3],
        "identical" if line.identical else "\u2013",
    )


def _side(seen: Seen) -> tuple[str, str, str, str]:
    rows = f"{seen.distinct:,}"
    if seen.rows != seen.distinct:
        rows += f" + {seen.rows - seen.distinct:,} twice"
    if seen.error:
        rows = "none: the job aborts"
    if seen.failed:
        rows += f", {seen.failed} failed"
    return rows, f"{seen.calls:,}", f"{seen.repeated:,}", f"{seen.wall_s:.1f}"


def _told(line: Line) -> list[str]:
    """What a reader should know about a line."""
    told = []
    if line.naive is not None and line.naive.error:
        told.append(
            f"- {line.what}: naive Spark gives the job up after four attempts of a task, and has no "
            f"output after {line.naive.calls:,} calls."
        )
    return told


def measured(load: float, command: str) -> str:
    import pyarrow
    import pyspark

    return (
        f"Measured on {datetime.now(UTC):%Y-%m-%d} by `{command}` with Holdfast {__version__}, "
        f"PySpark {pyspark.__version__}, PyArrow {pyarrow.__version__}, "
        f"Python {platform.python_version()}, {os.cpu_count()} cores, at a load of {load:.2f} before "
        "it began."
    )

"""`docs/benchmarks-spark.md`: tables between markers. The text around them is written by hand.

A missing page is created from a template. The tables of unmeasured parts stay unchanged.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from bench.place import ROOT
from bench.spark.faults import CONCURRENCY, FLUSH_ROWS, ROWS, TASKS, Line, ScenarioOutcome
from bench.spark.speed import Figure
from holdfast import __version__

PAGE = ROOT / "docs" / "benchmarks-spark.md"

TEMPLATE = f"""\
# Stage beside naive Spark

`make bench-spark` measures on your machine and writes the text between the markers. Naive Spark
is `mapInArrow` + `write.parquet` of the same function, in the same run and the same session.

## Cost of faults

{ROWS:,} paid calls of 5 ms on a standalone cluster of two Workers with a core each, started from the
PySpark wheel. Each task makes {CONCURRENCY} calls at once. Every call writes a line to a log outside of
Spark and of the store at its start. The log is the bill. *Repeated* counts the calls of a row after its
first. The promise: at most `flush_rows + concurrency` = {FLUSH_ROWS} + {CONCURRENCY} for each task in
flight ({TASKS}), for each fault. Of a row that kills its interpreter, each attempt counts as one fault.

A line is in the table only if the stage's output held exactly the answers of the rows that did not
fail, in the order of the key, and if its Parquet part files were the same bytes as those of an
undisturbed run.

<!-- faults:begin -->
<!-- faults:end -->

## Speed

On `local[2]`, warm. Base and stage take turns. Figures are medians over the turns, with the minimum and the
maximum. The stage's time includes the ingest of the input, the ledger and the ordered commit. *Ratio* is
stage / base.

<!-- speed:begin -->
<!-- speed:end -->

## Large inputs

Random UUID keys and incompressible rows of 1 KB, on `local[2]` with a spool directory. *Base* is Spark's own
sort, `mapInArrow` and `write.parquet`. Both outputs have the same rows in the same order. The stage also writes the
sorted input durably into the spool, and reads it back.

<!-- unsorted:begin -->
<!-- unsorted:end -->

## Large results

A batch function on `local[2]` with a spool directory and no output. The store is at the driver. Its size does
not depend on the size of a result. Memory is the maximum of `Pss_Anon` of the ledger service, without pages of mapped
files.

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
        "The two Workers are on two hosts, each with a separate network, mounts and /tmp. They share only the "
        "directory of the benchmark."
        if hosts
        else "The two Workers are on the loopback of one machine, because two hosts need root."
    )
    remarks = [remark for line in lines for remark in _remarks(line)]
    same = ", ".join(partitionings)
    return "\n".join(
        [
            "",
            measured(load, command),
            "",
            *markdown([FAULT_HEADER, *map(_fault, lines)]),
            "",
            f"- {where}",
            *remarks,
            "- Times are of `run` or of the naive job. If it is run again, the time is that of the second run alone.",
            *([f"- The part files are the same bytes with {same}, too."] if same else []),
            "",
        ]
    )


def speed(figures: Sequence[Figure], load: float, command: str) -> str:
    rows = [
        (
            figure.what,
            figure.base_text,
            figure.stage_text,
            figure.ratio_text,
            figure.goal_text,
            figure.met_text,
        )
        for figure in figures
    ]
    return "\n".join(["", measured(load, command), "", *markdown([SPEED_HEADER, *rows]), ""])


def unsorted(
    rows: Sequence[tuple[str, ...]], remarks: Sequence[str], load: float, command: str
) -> str:
    head = ("input", "base", "stage", "ratio", "goal", "met")
    lines = [f"- {line}" for line in remarks]
    return "\n".join(["", measured(load, command), "", *markdown([head, *rows]), "", *lines, ""])


def spool(
    rows: Sequence[tuple[str, ...]], remarks: Sequence[str], load: float, command: str
) -> str:
    head = ("results", "time", "store", "store, a row", "spool", "ledger service")
    lines = [f"- {line}" for line in remarks]
    return "\n".join(["", measured(load, command), "", *markdown([head, *rows]), "", *lines, ""])


def markdown(rows: Sequence[tuple[str, ...]]) -> list[str]:
    head, *body = rows
    return ["| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *body)]


def _fault(line: Line) -> tuple[str, ...]:
    naive, stage = line.naive, line.stage
    return (
        line.what,
        *(_outcome_cells(naive) if naive is not None else ("\u2013",) * 4),
        *_outcome_cells(stage)[:3],
        f"{line.bound:,}",
        _outcome_cells(stage)[3],
        "identical" if line.identical else "\u2013",
    )


def _outcome_cells(outcome: ScenarioOutcome) -> tuple[str, str, str, str]:
    rows = f"{outcome.distinct:,}"
    if outcome.rows != outcome.distinct:
        rows += f" + {outcome.rows - outcome.distinct:,} twice"
    if outcome.error:
        rows = "none: the job aborts"
    if outcome.failed:
        rows += f", {outcome.failed} failed"
    return rows, f"{outcome.calls:,}", f"{outcome.repeated:,}", f"{outcome.wall_s:.1f}"


def _remarks(line: Line) -> list[str]:
    """Remarks about a line."""
    remarks = []
    if line.naive is not None and line.naive.error:
        remarks.append(
            f"- {line.what}: naive Spark aborts the job after four attempts of a task, and has no "
            f"output after {line.naive.calls:,} calls."
        )
    return remarks


def measured(load: float, command: str) -> str:
    import pyarrow
    import pyspark

    return (
        f"Measured on {datetime.now(UTC):%Y-%m-%d} by `{command}` with Holdfast {__version__}, "
        f"PySpark {pyspark.__version__}, PyArrow {pyarrow.__version__}, "
        f"Python {platform.python_version()}, {os.cpu_count()} cores, at a load of {load:.2f} before "
        "it began."
    )

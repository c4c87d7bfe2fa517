"""`holdfast store usage`: shows rows and bytes by universe, kind and type, from the last census, without a scan.

`--count` takes a census first: it reads the keys of all rows in short snapshots, at full speed.
"""

from __future__ import annotations

import argparse
import os

import msgspec

from holdfast.cli import EXIT_OK
from holdfast.cli.output import bytes_text, emit, field_lines, table, time_text, waiting
from holdfast.cli.store_option import add_options, open_existing
from holdfast.ops import usage_documents
from holdfast.ops.usage_documents import UsageDocument
from holdfast.workers import space_census

HELP = "show rows and bytes by universe, kind and type, from the last census"
NO_CENSUS = (
    "no census yet: a process with the role orchestrator or task takes one a minute after its start; "
    "`holdfast store usage --count` takes one now"
)


def configure(parser: argparse.ArgumentParser) -> None:
    add_options(parser, universe="only the figures of this universe")
    parser.add_argument(
        "--count", action="store_true", help="count all rows now, at full speed, in short snapshots"
    )


def run(args: argparse.Namespace) -> int:
    with open_existing(args) as store:
        if args.count:
            with waiting("counting the rows"):
                space_census.take_census(store, f"holdfast store usage, pid {os.getpid()}")
        document = usage_documents.read_usage(store, args.universe or "")
    emit(args, msgspec.to_builtins(document), _text(document))
    return EXIT_OK


def _text(document: UsageDocument) -> str:
    lines: list[tuple[str, object]] = []
    census = document.census
    if census is not None:
        taken = f"{time_text(census.ended_ns)} UTC, {census.age_s:,.0f} s ago"
        lines += [
            ("census", taken),
            ("rows", census.rows),
            ("keys and values", bytes_text(census.bytes)),
        ]
    if document.counted_rows is not None:
        lines.append(("next census", f"{document.counted_rows:,} rows so far"))
    lines += [(part.name, bytes_text(part.bytes)) for part in document.parts]
    if document.free_bytes is not None:
        lines.append(("free in data.mdb", bytes_text(document.free_bytes)))
    if document.dead_rows is not None:
        lines.append(("dead rows", document.dead_rows))
    text = field_lines(lines) if lines else ""
    if census is None:
        return "\n\n".join(filter(None, [text, NO_CENSUS]))
    cells = [
        (one.universe or "-", one.kind, one.type or "-", one.rows, one.bytes)
        for one in document.figures
    ]
    return f"{text}\n\n{table(('universe', 'kind', 'type', 'rows', 'bytes'), cells)}"

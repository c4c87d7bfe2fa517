"""Our writer or worker with timestamps: `python -m bench.single_probe writer|worker NOTES ARGUMENT…` (see `bench.single`).

The processes are the normal ones, except that a few functions record their start and end, by the clock of
`tally`, which all processes share. The process writes its notes when it stops.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from holdfast.cli import main as holdfast
from holdfast.config import WriterLimits
from holdfast.store import engine
from holdfast.store.lmdb import redo_log, writer
from holdfast.store.lmdb.writer_address import WriterArguments
from holdfast.workers.tasks import executors

Note = tuple[str, int, int]


def timed(notes: list[Note], what: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    now = time.monotonic_ns

    @functools.wraps(fn)
    def noted(*args: Any, **kwargs: Any) -> Any:
        began_ns = now()
        try:
            return fn(*args, **kwargs)
        finally:
            notes.append((what, began_ns, now()))

    return noted


def watch(notes: list[Note], what: str, owner: Any, name: str) -> None:
    setattr(owner, name, timed(notes, what, getattr(owner, name)))


def write(notes: list[Note], store: str) -> None:
    watch(notes, "receive", writer.Writer, "_receive")
    watch(notes, "commit", engine.StoreEngine, "apply_batch")
    watch(notes, "log", redo_log.RedoLog, "append")
    limits = WriterLimits()
    arguments = WriterArguments(
        store, True, limits.idle_exit_s, limits.backlog_bytes, limits.reader_check_s
    )
    writer.main([msgspec.json.encode(arguments).decode()])


def work(notes: list[Note], *argv: str) -> None:
    watch(notes, "run", executors, "run_attempt")
    holdfast(list(argv))


def main() -> None:
    role, path, *arguments = sys.argv[1:]
    notes: list[Note] = []
    try:
        (write if role == "writer" else work)(notes, *arguments)
    finally:
        Path(path).write_text(json.dumps(notes))


if __name__ == "__main__":
    main()

"""Ours, taking notes: `python -m bench.single_probe writer|worker NOTES ARGUMENT…` (see `bench.single`).

The same writer and the same worker as ever, but for a few functions that note when they began and ended, by
the clock of `tally`, which all processes share. The notes are written when the process is told to stop.
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
from holdfast.roles import task_hands
from holdfast.store import engine, redo, writer
from holdfast.store.address import Arguments

Note = tuple[str, int, int]


def noting(notes: list[Note], what: str, fn: Callable[..., Any]) -> Callable[..., Any]:
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
    setattr(owner, name, noting(notes, what, getattr(owner, name)))


def write(notes: list[Note], store: str) -> None:
    watch(notes, "receive", writer.Writer, "_receive")
    watch(notes, "commit", engine.Engine, "decide")
    watch(notes, "log", redo.Redo, "append")
    limits = WriterLimits()
    arguments = Arguments(store, True, limits.linger_s, limits.backlog_bytes, limits.reader_check_s)
    writer.main([msgspec.json.encode(arguments).decode()])


def work(notes: list[Note], *argv: str) -> None:
    watch(notes, "run", task_hands, "attempt")
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

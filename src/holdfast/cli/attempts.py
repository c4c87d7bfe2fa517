"""The recorded attempts at a queue item: worker, times, outcome and error of each.

Only the last few attempts are kept, but all are counted. A running attempt is the last line.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.cli.output import printable, table, time_text
from holdfast.durable.item import QueueItem
from holdfast.durable.queue import DeadLetter
from holdfast.ops.dead_letter_documents import attempt_documents

ERROR_CHARS_MAX = 60


def attempts_document(item: QueueItem | DeadLetter | None) -> list[dict[str, Any]]:
    """Return the kept attempts, numbered from the very first attempt."""
    documents: list[dict[str, Any]] = msgspec.to_builtins(attempt_documents(item))
    return documents


def attempts_text(item: QueueItem | DeadLetter | None) -> str:
    """Format the attempts as a table below the item's fields; empty without attempts."""
    rows = [
        (
            str(tried["attempt"]),
            time_text(tried["began_ns"]),
            time_text(tried["ended_ns"]) if tried["ended_ns"] else None,
            tried["owner"],
            tried["end"],
            tried["code"],
            _first_line(tried["error"] or ""),
        )
        for tried in attempts_document(item)
    ]
    if not rows:
        return ""
    header = ("attempt", "began", "ended", "by", "how", "code", "error")
    return "\n\n" + table(header, rows)


def error_text(error: str | None) -> str:
    """Format an error as an indented block."""
    if not error:
        return ""
    return "\nerror\n" + "\n".join(f"    {printable(line)}" for line in error.splitlines())


def _first_line(text: str) -> str | None:
    line = (text.splitlines() or [""])[0]
    return (line if len(line) <= ERROR_CHARS_MAX else line[: ERROR_CHARS_MAX - 1] + "…") or None

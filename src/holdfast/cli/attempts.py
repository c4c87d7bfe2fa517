"""The recorded attempts at a queue item: worker, times, outcome and error of each.

Only the last few attempts are kept, but all are counted. A running attempt is the last line.
"""

from __future__ import annotations

from typing import Any

from holdfast.cli.output import printable, table, time_text
from holdfast.durable.item import QueueItem
from holdfast.durable.queue import DeadLetter

ERROR_CHARS_MAX = 60


def attempts_document(item: QueueItem | DeadLetter | None) -> list[dict[str, Any]]:
    """Return the kept attempts, numbered from the very first attempt."""
    if item is None:
        return []
    first_number = item.failures + item.expiries - len(item.failed_attempts) + 1
    attempts: list[dict[str, Any]] = [
        {
            "attempt": first_number + at,
            "claim": tried.number,
            "owner": tried.owner,
            "began_ns": tried.began_ns,
            "ended_ns": tried.ended_ns,
            "end": tried.end,
            "code": tried.code or None,
            "error": tried.error or None,
        }
        for at, tried in enumerate(item.failed_attempts)
    ]
    if isinstance(item, QueueItem) and item.expires_ns:
        under_way = {
            "attempt": first_number + len(item.failed_attempts),
            "claim": item.claims,
            "owner": item.owner,
            "began_ns": item.claimed_ns,
            "ended_ns": None,
            "end": "under way",
            "code": None,
            "error": None,
        }
        attempts.append(under_way)
    return attempts


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

"""The attempts at an item of a queue, as they were written down: who, when, how each ended, and why.

Kept are the last few; counted are all. What is under way is the last line.
"""

from __future__ import annotations

from typing import Any

from holdfast.cli.output import printable, table, time_text
from holdfast.durable.item import Item
from holdfast.durable.queue import Dead

ERROR_CHARS_MAX = 60


def attempts_document(held: Item | Dead | None) -> list[dict[str, Any]]:
    """Numbered from the first attempt there was, though it may not be kept any more."""
    if held is None:
        return []
    first = held.failures + held.expiries - len(held.tried) + 1
    found: list[dict[str, Any]] = [
        {
            "attempt": first + at,
            "claim": tried.number,
            "owner": tried.owner,
            "began_ns": tried.began_ns,
            "ended_ns": tried.ended_ns,
            "end": tried.end,
            "code": tried.code or None,
            "error": tried.error or None,
        }
        for at, tried in enumerate(held.tried)
    ]
    if isinstance(held, Item) and held.expires_ns:
        under_way = {
            "attempt": first + len(held.tried),
            "claim": held.claims,
            "owner": held.owner,
            "began_ns": held.claimed_ns,
            "ended_ns": None,
            "end": "under way",
            "code": None,
            "error": None,
        }
        found.append(under_way)
    return found


def attempts_text(held: Item | Dead | None) -> str:
    """A table to stand below the fields of what was tried; empty if nothing was."""
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
        for tried in attempts_document(held)
    ]
    if not rows:
        return ""
    header = ("attempt", "began", "ended", "by", "how", "code", "error")
    return "\n\n" + table(header, rows)


def error_text(error: str | None) -> str:
    """An error as it is, set in below its name."""
    if not error:
        return ""
    return "\nerror\n" + "\n".join(f"    {printable(line)}" for line in error.splitlines())


def _first_line(text: str) -> str | None:
    line = (text.splitlines() or [""])[0]
    return (line if len(line) <= ERROR_CHARS_MAX else line[: ERROR_CHARS_MAX - 1] + "…") or None

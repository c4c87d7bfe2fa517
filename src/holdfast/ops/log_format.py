"""The log lines of a process of ours: as text or as one JSON object per line, with the ids of the running code.

A line of the user's code inside a reducer, task, effect or step has the ids of that reducer, task, effect or step.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

from holdfast import logs, traces
from holdfast.workers.flows.step_runs import CURRENT_STEP
from holdfast.workers.tasks.attempt import CURRENT

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")


def configure(format: str, level: str, process_ids: logs.Ids, stream: TextIO | None = None) -> None:
    """Log to standard error. Replaces the handlers of the root logger. `process_ids` are on every line."""
    handler = logging.StreamHandler(stream or sys.stderr)
    formatter = JsonFormatter if format == "json" else TextFormatter
    handler.setFormatter(formatter(process_ids))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def running_ids() -> dict[str, object]:
    """Return the ids of the code that runs in this thread or coroutine."""
    ids: dict[str, object] = dict(logs.RUNNING.get()())
    attempt = CURRENT.get(None)
    if attempt is not None:
        ids |= {"task": attempt.id, "name": attempt.grant.name, "attempt": attempt.attempt}
    step = CURRENT_STEP.get()
    if step is not None:
        ids |= {"flow": step.flow_id, "step": step.name, "attempt": step.attempt}
    return ids | traces.log_ids(traces.current())


class _IdsFormatter(logging.Formatter):
    def __init__(self, process_ids: logs.Ids) -> None:
        super().__init__()
        self._process_ids = process_ids

    def ids_of(self, record: logging.LogRecord) -> dict[str, object]:
        ids: logs.Ids | None = getattr(record, logs.IDS_ATTRIBUTE, None)
        return {**self._process_ids, **(running_ids() if ids is None else ids)}


class TextFormatter(_IdsFormatter):
    """`2026-11-19T10:00:00.000Z WARNING holdfast.worlds event failed: universe=bank world=Account/ada …`"""

    def format(self, record: logging.LogRecord) -> str:
        message = logs.line_text(_one_line(_message(record)), self.ids_of(record))
        text = f"{_time_text(record)} {record.levelname} {record.name} {message}"
        if record.exc_info:
            # Indented, so that the text of an error cannot look like another log line.
            lines = self.formatException(record.exc_info).splitlines()
            text += "".join(f"\n    {_one_line(line)}" for line in lines)
        return text


class JsonFormatter(_IdsFormatter):
    """One object per line: `time`, `level`, `logger`, `message`, then the ids, and `exception` for a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        fixed: dict[str, object] = {
            "time": _time_text(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
        }
        ids = self.ids_of(record)
        document = fixed | {name: value for name, value in ids.items() if name not in fixed}
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document, ensure_ascii=True, default=str)


def _message(record: logging.LogRecord) -> str:
    line = record.args[0] if isinstance(record.args, tuple) and record.args else None
    return line.message if isinstance(line, logs.LogLine) else record.getMessage()


def _time_text(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _one_line(text: str) -> str:
    """Escape control characters, so that a message cannot forge a line or control a terminal."""
    return (
        text
        if text.isprintable()
        else "".join(
            char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
        )
    )

"""The log lines of a process of ours: as text or as one JSON object per line, with the ids of the running code.

A line of the user's code inside a reducer, task, effect or step has the ids of that reducer, task, effect or step.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TextIO

from holdfast import logs, traces
from holdfast.ops.redacted_documents import RedactionRules
from holdfast.redaction import error_class
from holdfast.workers.flows.step_runs import CURRENT_STEP
from holdfast.workers.tasks.attempt import CURRENT

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
# The ids that name a type of a redaction path.
_TYPE_IDS = ("name", "effect", "kind", "type", "event")
# The ids whose values are names, and no texts of errors.
_SAFE_IDS = frozenset({
    "universe", "world", "world_id", "effect", "intent", "task", "name", "flow", "step", "queue", "worker", "code", "type",
    "event", "trace_id", "span_id", "job", "action", "store", "used", "incarnation", "kind", "run", "schedule",
})  # fmt: skip


def configure(
    format: str,
    level: str,
    process_ids: logs.Ids,
    stream: TextIO | None = None,
    rules: Callable[[], RedactionRules] | None = None,
) -> None:
    """Log to standard error. Replaces the handlers of the root logger. `process_ids` are on every line. `rules` returns
    what the lines of Holdfast hide."""
    handler = logging.StreamHandler(stream or sys.stderr)
    formatter = JsonFormatter if format == "json" else TextFormatter
    handler.setFormatter(formatter(process_ids, rules))
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
    def __init__(
        self, process_ids: logs.Ids, rules: Callable[[], RedactionRules] | None = None
    ) -> None:
        super().__init__()
        self._process_ids = process_ids
        self._rules = rules

    def ids_of(self, record: logging.LogRecord) -> dict[str, object]:
        ids: logs.Ids | None = getattr(record, logs.IDS_ATTRIBUTE, None)
        if ids is not None and self._rules is not None:
            ids = _hide(ids, self._rules())
        return {**self._process_ids, **(running_ids() if ids is None else ids)}

    def exception_of(self, record: logging.LogRecord) -> str:
        """Return the traceback of a record. The class of the exception only, if the text may quote hidden values."""
        assert record.exc_info
        text = self.formatException(record.exc_info)
        is_ours = record.name == "holdfast" or record.name.startswith("holdfast.")
        return error_class(text) if is_ours and self._rules is not None and self._rules() else text


class TextFormatter(_IdsFormatter):
    """`2026-11-19T10:00:00.000Z WARNING holdfast.worlds event failed: universe=bank world=Account/ada …`"""

    def format(self, record: logging.LogRecord) -> str:
        message = logs.line_text(_one_line(_message(record)), self.ids_of(record))
        text = f"{_time_text(record)} {record.levelname} {record.name} {message}"
        if record.exc_info:
            # Indented, so that the text of an error cannot look like another log line.
            lines = self.exception_of(record).splitlines()
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
            document["exception"] = self.exception_of(record)
        return json.dumps(document, ensure_ascii=True, default=str)


def _hide(ids: logs.Ids, rules: RedactionRules) -> logs.Ids:
    """Return the ids without the texts that may quote hidden values of their subject."""
    if not rules:
        return ids
    world = ids.get("world")
    names = [str(ids[name]) for name in _TYPE_IDS if name in ids]
    if world is not None or names:
        # The error of a flow may quote values of its children, whose types are not known here.
        hides = "flow" in ids or rules.may_hide(*names)
        if world is not None:
            hides = hides or rules.may_hide_world(str(world).partition("/")[0])
        if not hides:
            return ids
    return {
        name: error_class(value) if isinstance(value, str) and name not in _SAFE_IDS else value
        for name, value in ids.items()
    }


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

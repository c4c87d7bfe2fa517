"""Log lines about subjects: what happened, and the ids of the world, task, effect, flow or store that it happened to.

    logs.warn("worlds", "reducer failed", universe="shop", world="Account/ada", code="reducer_failed", error=text)

- The logger is `holdfast.<area>` of the standard `logging`. A line has its ids in the attribute `holdfast_ids` of its
  record. `ops.log_format` writes them as text or JSON.
- `RUNNING` has a function that returns the ids of the code that runs in this thread or coroutine, for log lines of the
  user's own code.
- The product logs outside of transactions only: the store may run an operation twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

IDS_ATTRIBUTE = "holdfast_ids"
TEXT_CHARS_MAX = 4_000

Ids = Mapping[str, object]

RUNNING: ContextVar[Callable[[], Ids]] = ContextVar("holdfast_running_ids", default=dict)
_silenced = 0


def warn(area: str, message: str, **ids: object) -> None:
    _log(logging.WARNING, area, message, ids)


def inform(area: str, message: str, **ids: object) -> None:
    _log(logging.INFO, area, message, ids)


@contextmanager
def silence() -> Iterator[None]:
    """Log nothing in this process during the block: a simulation injects the errors itself."""
    global _silenced
    _silenced += 1
    try:
        yield
    finally:
        _silenced -= 1


def _log(level: int, area: str, message: str, ids: dict[str, object]) -> None:
    if _silenced:
        return
    shown = {name: value for name, value in ids.items() if value not in ("", None)}
    for name, value in shown.items():
        if isinstance(value, str) and len(value) > TEXT_CHARS_MAX:
            shown[name] = value[:TEXT_CHARS_MAX] + "…"
    logger = logging.getLogger(f"holdfast.{area}")
    # The subject is in the text too, for handlers that know nothing of the ids.
    logger.log(level, "%s", LogLine(message, shown), extra={IDS_ATTRIBUTE: shown})


class LogLine:
    """A message with its ids as text. Formatted only if a handler writes the record."""

    def __init__(self, message: str, ids: Ids) -> None:
        self.message = message
        self.ids = ids

    def __str__(self) -> str:
        return line_text(self.message, self.ids)


def line_text(message: str, ids: Ids) -> str:
    pairs = " ".join(f"{name}={_value_text(value)}" for name, value in ids.items())
    return f"{message}: {pairs}" if pairs else message


def _value_text(value: object) -> str:
    """Return a value on one line. Text with spaces or control characters is quoted, so that it cannot forge a line."""
    text = value if isinstance(value, str) else str(value)
    return text if text and text.isprintable() and " " not in text else repr(text)

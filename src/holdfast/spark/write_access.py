"""How a Spark task reaches the output that it writes to. Light to import: every task has it."""

from __future__ import annotations

import msgspec


class WriteAccess(msgspec.Struct, frozen=True):
    """Credentials of outputs and spools by URL. They travel to executors with the function, and are shown nowhere."""

    options: dict[str, dict[str, str]] = {}

    def __repr__(self) -> str:
        return "WriteAccess()"

"""The output of commands: tables and JSON on stdout; progress on stderr if it is a terminal."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from holdfast.cli.redaction import hide_result

# Shorter waits show no progress.
PROGRESS_DELAY_S = 0.4
TICK_S = 0.5


def emit(args: argparse.Namespace, document: Any, text: str) -> None:
    """Print the result without hidden values: one JSON document with `--json`, else text."""
    shown = hide_result(args, document, text)
    print(json.dumps(shown.document, indent=2, ensure_ascii=False) if args.json else shown.text)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format rows as a table, with numbers aligned right."""
    cells = [list(header), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(line[at]) for line in cells) for at in range(len(header))]
    right = [all(isinstance(row[at], int | float) for row in rows) for at in range(len(header))]
    return "\n".join(
        "  ".join(
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in cells
    )


def field_lines(pairs: Sequence[tuple[str, object]]) -> str:
    width = max(len(name) for name, _ in pairs)
    return "\n".join(f"{name.ljust(width)}  {_cell(value)}" for name, value in pairs)


def bytes_text(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def time_text(time_ns: int) -> str:
    """Format store time as UTC. It follows the boot clock, so wall clock adjustments make it differ."""
    moment = datetime.fromtimestamp(time_ns // 1_000_000_000, UTC)
    return moment.strftime("%Y-%m-%d %H:%M:%S")


def printable(text: str) -> str:
    """Replace control characters, so that stored data cannot control the terminal."""
    return "".join(char if char.isprintable() else "�" for char in text)


def payload_text(payload: bytes, chars_max: int) -> str:
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        text = "0x" + payload[:chars_max].hex()
    return text if len(text) <= chars_max else text[: chars_max - 1] + "…"


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show on a terminal what the command waits for, and the elapsed time."""
    if not sys.stderr.isatty():
        yield
        return
    done = threading.Event()

    def show() -> None:
        waited_s = PROGRESS_DELAY_S
        if done.wait(PROGRESS_DELAY_S):
            return
        while True:
            print(f"\r{what} … {waited_s:.0f} s ", end="", file=sys.stderr, flush=True)
            if done.wait(TICK_S):
                print("\r\033[K", end="", file=sys.stderr, flush=True)
                return
            waited_s += TICK_S

    progress_thread = threading.Thread(target=show, daemon=True)
    progress_thread.start()
    try:
        yield
    finally:
        done.set()
        progress_thread.join()


def _cell(value: object) -> str:
    if value is None:
        return "-"
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return printable(text)

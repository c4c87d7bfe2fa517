"""`holdfast store copy FROM TO`: moves or copies a store between directories and PostgreSQL databases.

Progress goes to stderr: updated in place on a terminal, line by line elsewhere. The result lists each key
space with the hash that both stores have.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from holdfast.cli import EXIT_INTERRUPTED, EXIT_OK
from holdfast.cli.output import bytes_text, emit, printable, table
from holdfast.clock import MS, SYSTEM, S
from holdfast.ops.store_copy import copy_store
from holdfast.store.admin.copy import CopyPhase, CopyResult
from holdfast.store.urls import redact

# The interval of progress updates on a terminal, and of progress lines elsewhere.
DRAW_S = 0.2
WRITE_S = 5.0
HASH_CHARS = 16


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="FROM", help="directory or URL of a store that no process uses"
    )
    parser.add_argument("target", metavar="TO", help="directory or URL without a store")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="copy instead of move: FROM stays usable and TO is an independent store; pending work "
        "exists in both and runs in both",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="copy even if leases are live; after a move the source rejects commits of their holders",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document to stdout")


def run(args: argparse.Namespace) -> int:
    began_ns = SYSTEM.mono_ns()
    progress = CopyProgress()
    try:
        with progress.cleared_at_end():
            done = copy_store(
                args.source,
                args.target,
                keep=args.keep,
                force=args.force,
                progress=progress.progress,
            )
    except KeyboardInterrupt:
        hint = "nothing is lost; repeat the command to continue the copy"
        print(f"holdfast: interrupted: {hint}", file=sys.stderr)
        return EXIT_INTERRUPTED
    took_ns = SYSTEM.mono_ns() - began_ns
    emit(args, copy_document(args, done, took_ns), copy_text(args, done, took_ns))
    return EXIT_OK


def copy_document(args: argparse.Namespace, done: CopyResult, took_ns: int) -> dict[str, Any]:
    return {
        "from": redact(args.source),
        "to": redact(args.target),
        "kept": args.keep,
        "generation": done.generation,
        "commit_no": done.last_commit.commit_no,
        "resumed": done.resumed,
        "rows": done.rows,
        "bytes": done.size,
        "took_ms": took_ns // MS,
        "spaces": [
            {"space": name, "rows": space.rows, "bytes": space.size, "sha256": space.sha256}
            for name, space in sorted(done.spaces.items())
        ],
    }


def copy_text(args: argparse.Namespace, done: CopyResult, took_ns: int) -> str:
    source, target = redact(args.source), redact(args.target)
    if done.finished:
        return f"{source} was already copied and verified; {target} is open, generation {done.generation}"
    rows = [
        (name, space.rows, bytes_text(space.size), space.sha256[:HASH_CHARS])
        for name, space in sorted(done.spaces.items())
    ]
    after = (
        f"{source} stays usable; {target} is now an independent store"
        if args.keep
        else f"{source} is closed; use {target}"
    )
    counted = f"{done.rows:,} rows, {bytes_text(done.size)} in {took_ns / S:.1f} s"
    return "\n".join(
        [
            *([table(("space", "rows", "size", "sha256 of both"), rows), ""] if rows else []),
            f"copied {source} to {target}: {counted}, generation {done.generation}",
            printable(after),
        ]
    )


class CopyProgress:
    """The progress display: rows, bytes and rate of the current phase."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._phase: CopyPhase | None = None
        self._began_ns = self._printed_ns = SYSTEM.mono_ns()
        self._drawn = False

    def progress(self, phase: CopyPhase, rows: int, size: int, about: int | None) -> None:
        now_ns = SYSTEM.mono_ns()
        if phase is not self._phase:
            self._phase, self._began_ns = phase, self._printed_ns
        every_s = DRAW_S if self._terminal else WRITE_S
        if now_ns - self._printed_ns < every_s * S:
            return
        self._printed_ns = now_ns
        rate = size / max((now_ns - self._began_ns) / S, 1e-3)
        of = f" of about {about:,}" if about is not None and about >= rows else ""
        text = f"{phase.value}: {rows:,}{of} rows, {bytes_text(size)}, {bytes_text(int(rate))}/s"
        if self._terminal:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
            self._drawn = True
        else:
            print(text, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def cleared_at_end(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self._drawn:
                print("\r\033[K", end="", file=sys.stderr, flush=True)

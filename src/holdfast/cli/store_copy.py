"""`holdfast store copy FROM TO`: move a store, from a directory to PostgreSQL, back, or to its like.

Progress is told on stderr, in place on a terminal and line by line elsewhere. What was copied is told at
the end, space by space, with the hash that both places gave.
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
from holdfast.ops.copying import copy
from holdfast.store.copy import Copied, Phase
from holdfast.store.urls import shown

# On a terminal a line is drawn anew this often; elsewhere a line is written this often.
DRAW_S = 0.2
WRITE_S = 5.0
HASH_CHARS = 16


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="FROM", help="a directory or URL; nothing may run on it")
    parser.add_argument("target", metavar="TO", help="a directory or URL without a store")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="FROM stays in use, and TO becomes another store: what waits in both is done by both",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="though leases have not run out; what their holders still commit is refused",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    began_ns = SYSTEM.mono_ns()
    told = Told()
    try:
        with told.at_end():
            done = copy(
                args.source, args.target, keep=args.keep, force=args.force, progress=told.progress
            )
    except KeyboardInterrupt:
        again = "nothing is lost; the same command goes on where this one ended"
        print(f"holdfast: interrupted: {again}", file=sys.stderr)
        return EXIT_INTERRUPTED
    took_ns = SYSTEM.mono_ns() - began_ns
    emit(args, document_of(args, done, took_ns), text_of(args, done, took_ns))
    return EXIT_OK


def document_of(args: argparse.Namespace, done: Copied, took_ns: int) -> dict[str, Any]:
    return {
        "from": shown(args.source),
        "to": shown(args.target),
        "kept": args.keep,
        "generation": done.generation,
        "commit_no": done.last.commit_no,
        "resumed": done.resumed,
        "rows": done.rows,
        "bytes": done.size,
        "took_ms": took_ns // MS,
        "spaces": [
            {"space": name, "rows": one.rows, "bytes": one.size, "sha256": one.sha256}
            for name, one in sorted(done.spaces.items())
        ],
    }


def text_of(args: argparse.Namespace, done: Copied, took_ns: int) -> str:
    source, target = shown(args.source), shown(args.target)
    if done.finished:
        return f"{source} was copied and proved before; {target} is open now, generation {done.generation}"
    rows = [
        (name, one.rows, bytes_text(one.size), one.sha256[:HASH_CHARS])
        for name, one in sorted(done.spaces.items())
    ]
    after = (
        f"{source} stays in use; {target} is another store from now on"
        if args.keep
        else f"{source} is closed down; use {target}"
    )
    counted = f"{done.rows:,} rows, {bytes_text(done.size)} in {took_ns / S:.1f} s"
    return "\n".join(
        [
            *([table(("space", "rows", "size", "sha256 of both"), rows), ""] if rows else []),
            f"copied {source} to {target}: {counted}, generation {done.generation}",
            printable(after),
        ]
    )


class Told:
    """How far it is: rows, megabytes and the rate of the phase that runs."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._phase: Phase | None = None
        self._began_ns = self._told_ns = SYSTEM.mono_ns()
        self._drawn = False

    def progress(self, phase: Phase, rows: int, size: int, about: int | None) -> None:
        now_ns = SYSTEM.mono_ns()
        if phase is not self._phase:
            self._phase, self._began_ns = phase, self._told_ns
        every_s = DRAW_S if self._terminal else WRITE_S
        if now_ns - self._told_ns < every_s * S:
            return
        self._told_ns = now_ns
        rate = size / max((now_ns - self._began_ns) / S, 1e-3)
        of = f" of about {about:,}" if about is not None and about >= rows else ""
        text = f"{phase.value}: {rows:,}{of} rows, {bytes_text(size)}, {bytes_text(int(rate))}/s"
        if self._terminal:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
            self._drawn = True
        else:
            print(text, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def at_end(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self._drawn:
                print("\r\033[K", end="", file=sys.stderr, flush=True)

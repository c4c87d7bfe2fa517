"""Fault injection: random corruption of the files of a store, and its outcome.

A *case* is one corruption: a flipped bit, a zeroed block, two swapped blocks or a truncation. The harness copies and
damages the store. A child process opens, reads and verifies it, because corruption can crash the reader. The child
writes one line for each case:

    refused     the open raised a typed error
    read        the open succeeded; reading the rows raised a typed error
    verify      the open succeeded, rows have changed, and `holdfast verify` reports it
    unchanged   the open succeeded, and every acknowledged row is unchanged
    nothing     the open succeeded, rows have changed, and no check reports it
    killed      SIGSEGV, SIGBUS or SIGABRT killed the reader, and `check_integrity` in the parent reports `store_corrupt`
    failed      an untyped error: a bug

Run it by hand: `python -m tests.store.corruption --cases 1000 --seed 1`.
"""

from __future__ import annotations

import argparse
import collections
import functools
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from holdfast.errors import StoreCorrupt
from holdfast.store.lmdb.integrity_check import check_integrity
from holdfast.store.lmdb.page_reader import PageReader, newest_meta

PAGE = 4096
SECTOR = 512
FILES = ("data.mdb", "redo.0", "redo.1", "lock.mdb")
# The share of each file in the cases, weighted towards files with much data.
FILE_SHARES = {"data.mdb": 0.6, "redo.0": 0.17, "redo.1": 0.17, "lock.mdb": 0.06}
IN_USE_SHARE = 0.85
KINDS = ("bit flip", "zeroed block", "truncation", "swapped blocks")
ROWS = "rows.msgpack"


class Damage(NamedTuple):
    state: str
    file: str
    kind: str
    at: int
    size: int
    other: int = 0


class CorruptionResult(NamedTuple):
    damage: Damage
    outcome: str
    why: str
    # Files that differ after a refused open.
    changed: list[str]


def choose_damage(rng: random.Random, templates: dict[str, Path]) -> Damage:
    state = rng.choice(sorted(templates))
    file = rng.choices(list(FILE_SHARES), list(FILE_SHARES.values()))[0]
    size = (templates[state] / file).stat().st_size
    used = size if file == "data.mdb" else min(size, used_bytes(templates[state] / file))
    kind = rng.choice(KINDS)
    if file == "data.mdb" and kind != "truncation" and rng.random() < IN_USE_SHARE:
        # Most pages of the file are free: damage to them has no effect.
        pages = pages_in_use(templates[state] / file)
        page, other = (rng.choice(pages) * PAGE for _ in range(2))
        if kind == "bit flip":
            return Damage(state, file, kind, page + rng.randrange(PAGE), 1 << rng.randrange(8))
        return Damage(state, file, kind, page, PAGE, other)
    if kind == "bit flip":
        return Damage(state, file, kind, rng.randrange(used), 1 << rng.randrange(8))
    if kind == "truncation":
        return Damage(state, file, kind, rng.randrange(used), 0)
    block = rng.choice((SECTOR, PAGE)) if file != "data.mdb" else PAGE
    blocks = max(used // block, 1)
    at = rng.randrange(blocks) * block
    if kind == "zeroed block":
        return Damage(state, file, kind, at, block)
    return Damage(state, file, kind, at, block, rng.randrange(blocks) * block)


@functools.cache
def pages_in_use(file: Path) -> list[int]:
    """List the page numbers of the latest commit and the meta pages."""
    fd = os.open(file, os.O_RDONLY)
    try:
        return [0, 1, *sorted(PageReader(fd, newest_meta(fd)).check_all())]
    finally:
        os.close(fd)


def used_bytes(file: Path) -> int:
    """Return the length up to the last non-zero byte, plus a margin of 64 bytes."""
    return min(len(file.read_bytes().rstrip(b"\0")) + 64, file.stat().st_size)


def apply_damage(damage: Damage, home: Path) -> bool:
    """Damage the file. Return False if its bytes did not change."""
    path = home / damage.file
    data = bytearray(path.read_bytes())
    before = bytes(data)
    if damage.kind == "bit flip":
        data[damage.at] ^= damage.size
    elif damage.kind == "zeroed block":
        end = min(damage.at + damage.size, len(data))
        data[damage.at : end] = bytes(end - damage.at)
    elif damage.kind == "truncation":
        del data[damage.at :]
    else:
        a, b, n = damage.at, damage.other, damage.size
        one, two = bytes(data[a : a + n]), bytes(data[b : b + n])
        if len(one) == len(two):
            data[a : a + n], data[b : b + n] = two, one
    path.write_bytes(data)
    return bytes(data) != before


def file_hashes(home: Path) -> dict[str, str]:
    return {
        one.name: hashlib.sha256(one.read_bytes()).hexdigest()
        for one in sorted(home.iterdir())
        if one.is_file()
    }


# -- the child ---------------------------------------------------------------------------------------


class CorruptionReader:
    """A child process that opens damaged stores in sequence. It is restarted after a crash."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def check_store(self, home: Path, rows: Path) -> tuple[str, str]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.store.corruption_reader"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=Path(__file__).parents[2],
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{home}\t{rows}\n".encode())
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if line:
            outcome, why = msgspec.json.decode(line, type=tuple[str, str])
            return outcome, why
        code = self._process.wait()
        self._process = None
        if code >= 0:
            return "failed", f"exit code {code}"
        try:
            check_integrity(home)
        except StoreCorrupt as error:
            return "killed", f"{signal.Signals(-code).name}; {error}"
        return "failed", f"{signal.Signals(-code).name}, and its parent was not told"

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()
            self._process = None


# -- many cases --------------------------------------------------------------------------------------


@contextmanager
def create_templates() -> Iterator[dict[str, Path]]:
    """Create a cleanly closed store and a store whose processes were killed, each with a list of its rows."""
    with tempfile.TemporaryDirectory(prefix="holdfast-corruption-") as directory:
        by_state: dict[str, Path] = {}
        for state in ("closed", "killed"):
            home = Path(directory) / state
            completed = subprocess.run(
                [sys.executable, "-m", "tests.store.corruption_store", str(home), state],
                cwd=Path(__file__).parents[2],
                timeout=120,
            )
            assert completed.returncode == (-signal.SIGKILL if state == "killed" else 0)
            by_state[state] = home
        yield by_state


def run_cases(cases: int, seed: int, templates: dict[str, Path]) -> list[CorruptionResult]:
    rng = random.Random(seed)
    reader = CorruptionReader()
    results: list[CorruptionResult] = []
    shared = Path("/dev/shm")
    parent = shared if shared.is_dir() and os.access(shared, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="holdfast-corruption-", dir=parent) as directory:
        while len(results) < cases:
            damage = choose_damage(rng, templates)
            home = Path(directory) / "store"
            shutil.copytree(templates[damage.state], home, ignore=lambda *_: [ROWS])
            if apply_damage(damage, home):
                before = file_hashes(home)
                outcome, why = reader.check_store(home, templates[damage.state] / ROWS)
                changed: list[str] = []
                if outcome == "refused":
                    after = file_hashes(home)
                    names = before.keys() | after.keys()
                    changed = sorted(one for one in names if before.get(one) != after.get(one))
                results.append(CorruptionResult(damage, outcome, why, changed))
            shutil.rmtree(home)
        reader.close()
    return results


def format_table(results: list[CorruptionResult]) -> str:
    outcomes = ("refused", "read", "killed", "verify", "unchanged", "nothing", "failed")
    lines = [
        "| file | damage | " + " | ".join(outcomes) + " |",
        "|---|---|" + "---|" * len(outcomes),
    ]
    counts = collections.Counter((one.damage.file, one.damage.kind, one.outcome) for one in results)
    for file in ("data.mdb", "redo.*", "lock.mdb"):
        for kind in KINDS:
            row = [
                sum(
                    count
                    for (name, of, found), count in counts.items()
                    if (name if not name.startswith("redo") else "redo.*") == file
                    and (of, found) == (kind, outcome)
                )
                for outcome in outcomes
            ]
            lines.append(f"| `{file}` | {kind} | " + " | ".join(map(str, row)) + " |")
    total = collections.Counter(one.outcome for one in results)
    lines.append("| all | | " + " | ".join(str(total[one]) for one in outcomes) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with create_templates() as by_state:
        results = run_cases(args.cases, args.seed, by_state)
    print(format_table(results))
    for one in results:
        if one.outcome in ("nothing", "failed") or one.changed:
            print(one)
    return 0


if __name__ == "__main__":
    sys.exit(main())

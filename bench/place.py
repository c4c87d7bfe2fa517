"""The directory of a run, the length of its slices and the sizes of its data.

`Sizes` holds the sizes of the targets. The tests run the same metrics with small sizes.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp

from holdfast.child_process import kill_verified
from holdfast.store.lmdb.writer_process import connect, peer_of

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class EffectSizes:
    chains_at_once: int = 64
    steps: int = 250
    backlog_small: int = 1_000
    backlog_large: int = 200_000
    flood: int = 100_000
    singles: int = 20


@dataclass(frozen=True)
class TimerSizes:
    count: int = 2_000
    spread_s: float = 10.0
    # All timers are set before the first one is due.
    lead_s: float = 4.0
    pending_small: int = 1_000
    pending_large: int = 1_000_000
    due_batch: int = 500
    due_batches: int = 10


@dataclass(frozen=True)
class FlowSizes:
    # The target is for 1,000,000: `python -m bench flows --sleepers 1000000`, about ten minutes.
    sleepers: int = 50_000
    waking: int = 10_000
    recorded_steps: int = 10_000
    # Flows at a fixed pace after each part of the sleepers.
    paced: int = 50


@dataclass(frozen=True)
class Sizes:
    claimer_items: int = 60_000
    backlog_small: int = 10_000
    backlog_large: int = 1_000_000
    wakes: int = 300
    memory_keys: int = 5_000_000
    churn_callers: int = 4
    journal_callers: int = 4
    ledger_rows: int = 10_000_000
    ledger_logged_rows: int = 2_000_000
    tasks_small: int = 10_000
    tasks_large: int = 200_000
    idle_s: float = 10.0
    effects: EffectSizes = field(default_factory=EffectSizes)
    timers: TimerSizes = field(default_factory=TimerSizes)
    flows: FlowSizes = field(default_factory=FlowSizes)


@dataclass(frozen=True)
class Place:
    directory: Path
    slice_s: float = 1.0
    raw_s: float = 0.25
    repeats: int = 3
    sizes: Sizes = field(default_factory=Sizes)

    @contextlib.contextmanager
    def store(self, name: str) -> Iterator[Path]:
        """A directory for one store. It is removed afterwards, and its writer is ended."""
        path = self.directory / name
        try:
            yield path
        finally:
            end_writer(path)
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def new_directory(parent: Path) -> Iterator[Path]:
    parent.mkdir(parents=True, exist_ok=True)
    path = Path(mkdtemp(prefix="bench-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def writer_pid(path: Path | str) -> int:
    """The writer process of a store. For a PostgreSQL server on this machine, its parent process."""
    if isinstance(path, str):
        import psycopg

        with psycopg.connect(path) as connection:
            row = connection.execute("select pg_read_file('postmaster.pid')").fetchone()
        assert row is not None
        return int(row[0].split()[0])
    with connect(path) as sock:
        return peer_of(sock)[0]


def end_writer(path: Path) -> None:
    """Kill the writer of a store, so that it does not linger."""
    with contextlib.suppress(OSError), connect(path) as sock:
        kill_verified(*peer_of(sock))

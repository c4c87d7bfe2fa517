"""`python -m bench single`: the time of a single task, stage by stage.

    python -m bench single [--tasks 300] [--per-s 50,500]

A producer submits tasks at a fixed rate, and a waiting worker runs them. Producer, worker and the writer of the
store are separate processes. For each stage the command prints the median and the 95th percentile in
microseconds. At a lower rate the processor caches are colder, and each stage takes longer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.peers import tally
from bench.peers.process import Load, Process, ProcessFailed
from bench.peers.suite import percentile
from bench.peers.task_holdfast import APP
from bench.peers.task_turn import tally_file
from bench.place import ROOT, new_directory

WARM_TASKS = 40
# Every timestamp of a task is within this time after its submission.
WITHIN_NS = 50_000_000
SETTLE_S = 0.5
STOP_S = 20.0

Stages = dict[str, float]
STAGES = (
    "submit, until the writer is woken",
    "received",
    "operations: submit and lease",
    "logged, on disk",
    "LMDB's commit",
    "answered, until the task begins",
    "run",
    "all of it",
    "until the submitter is answered",
)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    results = [(per_s, measure(args.dir, args.tasks, per_s)) for per_s in args.per_s]
    print(
        "µs, median (95th percentile)".ljust(36) + "".join(f"{n:g}/s".rjust(18) for n, _ in results)
    )
    for stage in STAGES:
        cells = [[times[stage] for times in stages] for _, stages in results]
        texts = [f"{percentile(cell, 0.5):,.0f} ({percentile(cell, 0.95):,.0f})" for cell in cells]
        print(stage.ljust(36) + "".join(text.rjust(18) for text in texts))
    return 0


def measure(parent: Path, count: int, per_s: float) -> list[Stages]:
    with new_directory(parent) as directory, tally_file(directory) as done:
        notes = {role: directory / f"{role}.json" for role in ("writer", "worker")}
        with running(directory / "store", notes, done) as producer:
            producer.ask("paced", count=WARM_TASKS, per_s=per_s)
            time.sleep(SETTLE_S)
            os.truncate(done, 0)
            sent = producer.ask("paced", count=count, per_s=per_s)["acks"]
            time.sleep(SETTLE_S)
        noted = [note for path in notes.values() for note in json.loads(path.read_text())]
        ran = dict(tally.records(done))
    by_kind: dict[str, list[list[int]]] = {}
    for kind, *times in sorted(noted):
        by_kind.setdefault(kind, []).append(times)
    return [
        stages
        for sent_ns, acked_ns in sent
        if sent_ns in ran and (stages := _stages(by_kind, sent_ns, acked_ns)) is not None
    ]


@contextlib.contextmanager
def running(store: Path, notes: dict[str, Path], done: Path) -> Iterator[Load]:
    """A writer, a worker and a producer. The note files exist after the context exits."""
    probe = [sys.executable, "-m", "bench.single_probe"]
    with Process([*probe, "writer", notes["writer"], store], talks=True, hears=False) as writer:
        if (line := writer.line()) != "ready":
            raise ProcessFailed(f"the writer printed {line!r} instead of ready")
        up = ["up", APP, "--store", str(store), "--role", "task"]
        env = {tally.VARIABLE: str(done)}
        worker = Process([*probe, "worker", notes["worker"], *up], talks=True, hears=False, env=env)
        try:
            worker.line()
            argv = [sys.executable, "-m", "bench.peers.task_load", "producer", str(store)]
            with Load(argv) as producer:
                yield producer
        finally:
            worker.close(STOP_S)


def _stages(noted: dict[str, list[list[int]]], sent_ns: int, acked_ns: int) -> Stages | None:
    """The stages of one task, or None if other work overlaps with it."""
    first: dict[str, list[int]] = {}
    for kind, all_of_kind in noted.items():
        at = bisect_left(all_of_kind, [sent_ns])
        if at == len(all_of_kind) or all_of_kind[at][0] > sent_ns + WITHIN_NS:
            return None
        first[kind] = all_of_kind[at]
    received, commit, log, run = (first[kind] for kind in ("receive", "commit", "log", "run"))
    times = (
        (sent_ns, received[0]),
        (received[0], commit[0]),
        (commit[0], log[0]),
        (log[0], log[1]),
        (log[1], commit[1]),
        (commit[1], run[0]),
        (run[0], run[1]),
        (sent_ns, run[1]),
        (sent_ns, acked_ns),
    )
    if any(end < begin for begin, end in times):
        return None
    return {stage: (end - begin) / 1e3 for stage, (begin, end) in zip(STAGES, times, strict=True)}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    def rates(text: str) -> list[float]:
        values = [float(part) for part in text.split(",")]
        if not all(0 < rate <= 10_000 for rate in values):
            raise ValueError(text)
        return values

    parser = argparse.ArgumentParser(
        prog="python -m bench single", description="The time of a single task, stage by stage."
    )
    parser.add_argument("--tasks", type=int, default=300, help="tasks per rate (300)")
    parser.add_argument(
        "--per-s",
        type=rates,
        default=[50.0, 500.0],
        metavar="N,…",
        help="rates in tasks per second (50,500)",
    )
    parser.add_argument(
        "--dir", type=Path, default=ROOT / "build", help="parent of the temporary directory (build)"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

"""Many seeds, on all cores: what `holdfast sim --seeds` does, and the kill table.

Workers are spawned processes that get numbers and answer with plain data. Whatever fails is run
again here, where it can be looked at: a seed is all there is to know about a run.
"""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from holdfast.clock import SYSTEM, S
from holdfast.sim.checkers import CHECKERS
from holdfast.sim.mutants import MUTANTS, concerns
from holdfast.sim.run import run_seed
from holdfast.sim.scheduler import Threads
from holdfast.sim.settings import swarm
from holdfast.sim.tape import Tape

T = TypeVar("T")
A = TypeVar("A")

CHUNK = 20


class Batch(NamedTuple):
    """What came of some seeds."""

    seeds: int
    steps: int
    failed: list[tuple[int, list[str]]]
    sometimes: Counter[str]


class Kill(NamedTuple):
    """The first seed that catches a mutant, and by which checkers; None if none does."""

    mutant: str
    seed: int | None
    checkers: list[str]


def run_batch(job: tuple[range, str]) -> Batch:
    seeds, backend = job
    failed: list[tuple[int, list[str]]] = []
    sometimes: Counter[str] = Counter()
    steps = 0
    with Threads() as threads:
        for seed in seeds:
            result = run_seed(seed, backend, threads=threads)
            sometimes.update(result.sometimes)
            steps += result.steps
            if result.violations:
                failed.append((seed, result.checkers))
    return Batch(len(seeds), steps, failed, sometimes)


def run_many(
    seeds: range,
    *,
    jobs: int,
    backend: str = "memory",
    until_ns: int | None = None,
    progress: Callable[[Batch], None] = lambda total: None,
) -> Batch:
    """All of these seeds, or as many as there is time for."""
    chunks = (
        (seeds[at : at + CHUNK], backend)
        for at in range(0, len(seeds), CHUNK)
        if until_ns is None or SYSTEM.mono_ns() < until_ns
    )
    total = Batch(0, 0, [], Counter())
    for batch in spread(run_batch, chunks, jobs=jobs):
        total = Batch(
            total.seeds + batch.seeds,
            total.steps + batch.steps,
            sorted(total.failed + batch.failed),
            total.sometimes + batch.sometimes,
        )
        progress(total)
    return total


def first_kill(job: tuple[str, int], start: int = 0) -> Kill:
    """The first of `seeds_max` seeds whose run finds a planted bug. Only a checker's number counts: that
    some actor died of it may be luck."""
    name, seeds_max = job
    with Threads() as threads:
        for seed in range(start, start + seeds_max):
            if not concerns(name, swarm(Tape(seed))):
                continue
            result = run_seed(seed, mutant=name, threads=threads)
            numbers = [number for number in result.checkers if number in CHECKERS]
            if numbers:
                return Kill(name, seed, numbers)
    return Kill(name, None, [])


def kill_table(
    seeds_max: int, *, jobs: int, told: Callable[[Kill], None] = lambda kill: None
) -> list[Kill]:
    """Mutant → first seed → checkers, in the order of the registry."""
    kills: dict[str, Kill] = {}
    for kill in spread(first_kill, ((name, seeds_max) for name in MUTANTS), jobs=jobs):
        kills[kill.mutant] = kill
        told(kill)
    return [kills[name] for name in MUTANTS]


def spread(work: Callable[[A], T], jobs_to_do: Iterable[A], *, jobs: int) -> Iterator[T]:
    """`work` on each, over so many processes, in whatever order they finish."""
    if jobs <= 1:
        yield from map(work, jobs_to_do)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs) as pool:
        yield from _bounded(pool, work, iter(jobs_to_do), jobs)


def _bounded(pool: Any, work: Callable[[A], T], todo: Iterator[A], jobs: int) -> Iterator[T]:
    """Hand out as results come in, so that a time limit is noticed."""
    running = []
    for job in todo:
        running.append(pool.apply_async(work, (job,)))
        if len(running) >= 2 * jobs:
            yield running.pop(0).get()
    for result in running:
        yield result.get()


def deadline_ns(minutes: float | None) -> int | None:
    return None if minutes is None else SYSTEM.mono_ns() + int(minutes * 60 * S)

"""Swarm: many seeds on all cores (`holdfast sim --seeds`), and the kill table of the mutants.

Worker processes are spawned. They receive seed numbers and return plain data. The parent reruns
failing seeds to report them: the seed determines the run.
"""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from holdfast.clock import SYSTEM, S
from holdfast.sim.choice_tape import ChoiceTape
from holdfast.sim.scheduler import SimThreadPool
from holdfast.sim.settings import draw_settings
from tests.simulation.checkers import CHECKERS
from tests.simulation.mutants import MUTANTS, can_reach
from tests.simulation.seed_run import run_seed

T = TypeVar("T")
A = TypeVar("A")

SEEDS_PER_JOB = 20


class SeedSummary(NamedTuple):
    """Summary of some seeds."""

    seeds: int
    steps: int
    failed: list[tuple[int, list[str]]]
    coverage: Counter[str]


class MutantKill(NamedTuple):
    """The first seed that catches a mutant, with the checkers that report it. The seed is None if
    none does."""

    mutant: str
    seed: int | None
    checkers: list[str]


def run_seeds(job: tuple[range, str]) -> SeedSummary:
    seeds, backend = job
    failed: list[tuple[int, list[str]]] = []
    coverage: Counter[str] = Counter()
    steps = 0
    with SimThreadPool() as threads:
        for seed in seeds:
            result = run_seed(seed, backend, threads=threads)
            coverage.update(result.coverage)
            steps += result.steps
            if result.violations:
                failed.append((seed, result.checkers))
    return SeedSummary(len(seeds), steps, failed, coverage)


def run_many(
    seeds: range,
    *,
    jobs: int,
    backend: str = "memory",
    until_ns: int | None = None,
    progress: Callable[[SeedSummary], None] = lambda total: None,
) -> SeedSummary:
    """Run these seeds, or as many as fit before the deadline."""
    chunks = (
        (seeds[at : at + SEEDS_PER_JOB], backend)
        for at in range(0, len(seeds), SEEDS_PER_JOB)
        if until_ns is None or SYSTEM.mono_ns() < until_ns
    )
    total = SeedSummary(0, 0, [], Counter())
    for batch in map_parallel(run_seeds, chunks, jobs=jobs):
        total = SeedSummary(
            total.seeds + batch.seeds,
            total.steps + batch.steps,
            sorted(total.failed + batch.failed),
            total.coverage + batch.coverage,
        )
        progress(total)
    return total


def first_kill(job: tuple[str, int], start: int = 0) -> MutantKill:
    """Find the first of `seeds_max` seeds whose run catches a planted bug. Only the number of a
    checker counts: an actor may die of the bug by chance."""
    name, seeds_max = job
    with SimThreadPool() as threads:
        for seed in range(start, start + seeds_max):
            if not can_reach(name, draw_settings(ChoiceTape(seed))):
                continue
            result = run_seed(seed, mutant=name, threads=threads)
            numbers = [number for number in result.checkers if number in CHECKERS]
            if numbers:
                return MutantKill(name, seed, numbers)
    return MutantKill(name, None, [])


def kill_table(
    seeds_max: int, *, jobs: int, on_kill: Callable[[MutantKill], None] = lambda kill: None
) -> list[MutantKill]:
    """Return mutant, first seed and checkers, in the order of the registry."""
    kills: dict[str, MutantKill] = {}
    for kill in map_parallel(first_kill, ((name, seeds_max) for name in MUTANTS), jobs=jobs):
        kills[kill.mutant] = kill
        on_kill(kill)
    return [kills[name] for name in MUTANTS]


def map_parallel(work: Callable[[A], T], jobs_to_do: Iterable[A], *, jobs: int) -> Iterator[T]:
    """Apply `work` to each job, over `jobs` processes. Results are in completion order."""
    if jobs <= 1:
        yield from map(work, jobs_to_do)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs) as pool:
        yield from _bounded_map(pool, work, iter(jobs_to_do), jobs)


def _bounded_map(pool: Any, work: Callable[[A], T], todo: Iterator[A], jobs: int) -> Iterator[T]:
    """Submit jobs as results arrive, so that a deadline takes effect."""
    ended: SimpleQueue[T | BaseException] = SimpleQueue()
    running = 0
    for job in todo:
        pool.apply_async(work, (job,), callback=ended.put, error_callback=ended.put)
        running += 1
        if running >= 2 * jobs:
            yield _result(ended.get())
            running -= 1
    for _ in range(running):
        yield _result(ended.get())


def _result(value: T | BaseException) -> T:
    if isinstance(value, BaseException):
        raise value
    return value


def deadline_ns(minutes: float | None) -> int | None:
    return None if minutes is None else SYSTEM.mono_ns() + int(minutes * 60 * S)

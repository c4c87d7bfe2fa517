"""Killers: for each planted bug the seed whose run makes a checker report it.

    python -m tests.simulation.killers               rerun the stored seeds, search others where one fails
    python -m tests.simulation.killers --seeds 4000  search more seeds for the bugs without one

`killers.json` has one entry per planted bug. `make test` runs the stored seeds. An entry has one of
three forms:

    seed, checkers       the run of this seed violates these invariants
    test, seeds_tried    no seed below `seeds_tried` kills the bug; this test fails while it is planted
    seeds_tried          a survivor

The search tries seeds with few steps first and keeps the shortest run among the first kills.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.sim.choice_tape import ChoiceTape
from holdfast.sim.scheduler import SimThreadPool
from holdfast.sim.settings import draw_settings
from tests.simulation.checkers import CHECKERS
from tests.simulation.mutants import MUTANTS, can_reach
from tests.simulation.seed_run import run_seed
from tests.simulation.swarm import map_parallel

PATH = Path(__file__).with_name("killers.json")
SEEDS_DEFAULT = 1000
# The search sorts this many seeds by their steps.
SEEDS_SORTED = 200
# The search ends at this number of kills and keeps the shortest run.
KILLS_COMPARED = 2


class Killer(NamedTuple):
    """A seed that kills a planted bug. Without a seed: the number of seeds tried, and a unit test
    that kills the bug, if any."""

    seed: int | None = None
    checkers: list[str] = []  # noqa: RUF012
    test: str | None = None
    seeds_tried: int = 0

    def to_json(self) -> dict[str, Any]:
        if self.seed is not None:
            return {"seed": self.seed, "checkers": self.checkers}
        tried = {"seeds_tried": self.seeds_tried}
        return tried if self.test is None else {"test": self.test, **tried}


class SearchJob(NamedTuple):
    mutant: str
    known: Killer
    seeds_max: int


class SearchResult(NamedTuple):
    mutant: str
    killer: Killer


def load() -> dict[str, Killer]:
    stored = json.loads(PATH.read_text(encoding="utf-8"))
    return {name: Killer(**entry) for name, entry in stored.items()}


def save(killers: dict[str, Killer]) -> None:
    """Write the entries in the order of the registry, one per line."""
    lines = [
        f"{json.dumps(name)}: {json.dumps(killers[name].to_json())}"
        for name in MUTANTS
        if name in killers
    ]
    unfinished = PATH.with_suffix(".tmp")
    unfinished.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    unfinished.replace(PATH)


def checkers_that_report(name: str, seed: int, threads: SimThreadPool) -> tuple[list[str], int]:
    """Run a seed with a planted bug. Return the violated invariants and the steps of the run. An
    actor that dies of the bug does not count."""
    result = run_seed(seed, mutant=name, threads=threads)
    return [number for number in result.checkers if number in CHECKERS], result.steps


def search(job: SearchJob) -> SearchResult:
    """Confirm the known killer, or search for another one."""
    name, known, seeds_max = job
    with SimThreadPool() as threads:
        if known.seed is not None:
            checkers, _ = checkers_that_report(name, known.seed, threads)
            if checkers:
                return SearchResult(name, Killer(known.seed, checkers))
        kills: list[tuple[int, int, list[str]]] = []
        for seed in _seeds_to_try(name, known.seeds_tried, seeds_max):
            checkers, steps = checkers_that_report(name, seed, threads)
            if checkers:
                kills.append((steps, seed, checkers))
            if len(kills) == KILLS_COMPARED:
                break
    if kills:
        _, seed, checkers = min(kills)
        return SearchResult(name, Killer(seed, checkers))
    return SearchResult(name, known._replace(seed=None, checkers=[], seeds_tried=seeds_max))


def _seeds_to_try(name: str, start: int, stop: int) -> Iterator[int]:
    for at in range(start, stop, SEEDS_SORTED):
        seeds = range(at, min(at + SEEDS_SORTED, stop))
        for _, seed in sorted(
            (_settings_of(seed).steps, seed)
            for seed in seeds
            if can_reach(name, _settings_of(seed))
        ):
            yield seed


@cache
def _settings_of(seed: int) -> Any:
    return draw_settings(ChoiceTape(seed))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.killers")
    parser.add_argument("--seeds", type=int, default=SEEDS_DEFAULT, help="number of seeds to try")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes (default 2)")
    args = parser.parse_args()
    killers = load() if PATH.exists() else {}
    jobs = (SearchJob(name, killers.get(name, Killer()), args.seeds) for name in MUTANTS)
    for name, killer in map_parallel(search, jobs, jobs=args.jobs):
        if killer != killers.get(name):
            print(f"{name}: {killer.to_json()}", flush=True)
            killers[name] = killer
            save(killers)
    survivors = [name for name, killer in killers.items() if killer.seed is None]
    print(f"{len(killers) - len(survivors)} of {len(killers)} planted bugs have a killing seed")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`holdfast sim`: run seeds, print violations and the commands that reproduce them.

    holdfast sim --seeds 2000            random seeds, then the coverage counts
    holdfast sim --seed 17               one seed, with the history around a violation
    holdfast sim --replay FILE           a saved choice tape
    holdfast sim --exhaustive            every single crash point of small scenarios, and pairs
    holdfast sim --mutants               the kill table of the planted bugs

The exit status is 0 without violations, 1 with violations, 2 if a coverage point was never reached.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path

from holdfast.clock import SYSTEM, S
from holdfast.sim import choice_tape
from holdfast.sim.scheduler import SimThreadPool
from holdfast.store.urls import redact, scheme_of
from tests.simulation import crash_points, swarm
from tests.simulation.coverage import COVERAGE_POINTS, SEEDS_MIN, uncovered_points
from tests.simulation.mutants import MUTANTS
from tests.simulation.seed_run import SeedResult, replay_tape, run_seed

REPORTS_MAX = 5
SEEDS_MAX = 10_000_000


def configure(parser: ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--seeds", type=int, metavar="N", help="number of seeds (default 400; with --mutants 1000)"
    )
    what.add_argument("--seed", type=int, metavar="K", help="run one seed and print its history")
    what.add_argument("--replay", type=Path, metavar="FILE", help="replay a saved choice tape")
    parser.add_argument("--exhaustive", action="store_true", help="try every single crash point")
    parser.add_argument(
        "--mutants", action="store_true", help="print the kill table of the planted bugs"
    )
    parser.add_argument("--start", type=int, default=0, metavar="K", help="first seed (default 0)")
    parser.add_argument(
        "--jobs", type=int, default=2, metavar="N", help="number of processes (default 2)"
    )
    parser.add_argument(
        "--backend",
        type=_backend,
        default="memory",
        metavar="URL",
        help="memory (default), lmdb, or postgresql://… (uses temporary schemas, dropped at the end)",
    )
    parser.add_argument("--minutes", type=float, metavar="M", help="run seeds for M minutes")
    parser.add_argument(
        "--mutant", choices=tuple(MUTANTS), metavar="NAME", help="plant this bug (with --seed)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="directory for the tapes of failing seeds",
    )


def run(args: Namespace) -> int:
    if args.replay is not None:
        return _run_replay(args)
    if args.seed is not None:
        return _run_one(args)
    if args.mutants:
        return _run_mutants(args)
    if args.exhaustive:
        return _run_exhaustive(args)
    return _run_many(args)


def _backend(text: str) -> str:
    if text not in ("memory", "lmdb") and scheme_of(text) != "postgresql":
        raise ArgumentTypeError("one of memory, lmdb, postgresql://…")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(prog="holdfast sim", description=(__doc__ or "").split("\n")[0])
    configure(parser)
    return run(parser.parse_args(argv))


def _run_many(args: Namespace) -> int:
    began = SYSTEM.mono_ns()
    until_ns = swarm.deadline_ns(args.minutes)
    count = args.seeds or (SEEDS_MAX if until_ns else SEEDS_MIN)

    def progress(total: swarm.SeedSummary) -> None:
        rate = total.seeds * S / max(1, SYSTEM.mono_ns() - began)
        _show_progress(f"{total.seeds} of {count} seeds, {rate:.0f}/s, {len(total.failed)} failed")

    seeds = range(args.start, args.start + count)
    total = swarm.run_many(
        seeds, jobs=args.jobs, backend=args.backend, until_ns=until_ns, progress=progress
    )
    _show_progress("")
    seconds = (SYSTEM.mono_ns() - began) / S
    print(
        f"{total.seeds} seeds from {args.start} on {redact(args.backend)}: {total.steps} steps in "
        f"{seconds:.0f} s ({total.seeds / seconds:.1f} seeds/s), {len(total.failed)} failed"
    )
    for seed, _ in total.failed[:REPORTS_MAX]:
        _report_failure(run_seed(seed, args.backend), args)
    return 1 if total.failed else _print_coverage(total)


def _print_coverage(total: swarm.SeedSummary) -> int:
    width = max(map(len, COVERAGE_POINTS))
    for name in sorted(COVERAGE_POINTS):
        print(f"  {name:{width}} {total.coverage[name]:8}")
    uncovered = uncovered_points(total.coverage)
    if uncovered and total.seeds >= SEEDS_MIN:
        print(f"never happened in {total.seeds} seeds: {', '.join(uncovered)}")
        return 2
    return 0


def _run_one(args: Namespace) -> int:
    result = run_seed(args.seed, args.backend, args.mutant)
    print(f"seed {args.seed}: {result.steps} steps, history {result.history_hash[:16]}, "
          f"state {result.state_hash[:16]}")  # fmt: skip
    return _report_failure(result, args)


def _run_replay(args: Namespace) -> int:
    saved = choice_tape.load_tape(args.replay)
    result = replay_tape(saved["tape"], saved.get("backend", "memory"), saved.get("mutant"))
    print(f"{args.replay}: {result.steps} steps, history {result.history_hash[:16]}")
    for event in result.history:
        if event.op != "audit":
            print(event)
    return _print_violations(result)


def _report_failure(result: SeedResult, args: Namespace) -> int:
    """Print the violations and the commands that reproduce them. Save the shrunk tape to a file."""
    if _print_violations(result) == 0:
        return 0
    first = result.violations[0]
    for event in result.history.slice(first.at, 10):
        print(f"  {event}")
    planted = f" --mutant '{args.mutant}'" if args.mutant else ""
    print(f"again:  holdfast sim --seed {result.seed} --backend {redact(args.backend)}{planted}")
    path = args.out / f"holdfast-sim-{result.seed}-{first.number}.json"
    shrunk = shrink(result, first.number, args.backend, args.mutant)
    choice_tape.save_tape(
        path,
        shrunk,
        seed=result.seed,
        backend=redact(args.backend),
        mutant=args.mutant,
        checker=first.number,
    )
    calls = f"{len(result.tape)} decisions shrunk to {len(shrunk)}"
    print(f"or:     holdfast sim --replay {path}    ({calls})")
    return 1


def shrink(
    result: SeedResult, number: str, backend: str, mutant: str | None, *, runs_max: int = 150
) -> list[int]:
    """Return the shortest tape found in `runs_max` runs that still violates the same invariant."""
    with SimThreadPool() as threads:

        def fails(candidate: Sequence[int]) -> bool:
            return number in replay_tape(candidate, backend, mutant, threads=threads).checkers

        return choice_tape.shrink_tape(result.tape, fails, runs_max=runs_max)


def _print_violations(result: SeedResult) -> int:
    for violation in result.violations[:REPORTS_MAX]:
        print(f"VIOLATION {violation}")
    if not result.violations:
        print("no violation")
    return 1 if result.violations else 0


def _run_mutants(args: Namespace) -> int:
    seeds = args.seeds or 1000
    width = max(map(len, MUTANTS))
    print(f"{'planted bug':{width}}  first seed  caught by")

    def told(kill: swarm.MutantKill) -> None:
        seed = "survived" if kill.seed is None else kill.seed
        print(f"{kill.mutant:{width}}  {seed!s:>10}  {' '.join(kill.checkers)}", flush=True)

    kills = swarm.kill_table(seeds, jobs=args.jobs, on_kill=told)
    survivors = [kill.mutant for kill in kills if kill.seed is None]
    print(f"{len(kills) - len(survivors)} of {len(kills)} caught within {seeds} seeds")
    return 1 if survivors else 0


def _run_exhaustive(args: Namespace) -> int:
    return max(_try_crash_points(args, scenario) for scenario in crash_points.SCENARIOS)


def _try_crash_points(args: Namespace, scenario: str) -> int:
    broken = tried = 0
    with SimThreadPool() as threads:

        def run(forced: crash_points.FaultsByCommit) -> tuple[SeedResult, int]:
            return crash_points.run_with_faults(
                forced, threads=threads, backend=args.backend, scenario=scenario
            )

        _, boundaries = run({})
        for forced in [
            *crash_points.single_faults(boundaries),
            *crash_points.fault_pairs(boundaries),
        ]:
            result, _ = run(forced)
            tried += 1
            if result.violations:
                broken += 1
                faults = ", ".join(f"{fault.value} commit {at}" for at, fault in forced.items())
                print(f"VIOLATION {result.violations[0]} with {faults}")
            _show_progress(f"{scenario}: {tried} runs")
    _show_progress("")
    print(f"{scenario}: {boundaries} commits, {tried} runs with one or two faults, {broken} broken")
    return 1 if broken else 0


def _show_progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

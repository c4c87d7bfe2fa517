"""`holdfast sim`: run seeds, print what broke and how to see it again.

    holdfast sim --seeds 2000            random seeds, then what was seen at times
    holdfast sim --seed 17               one seed, with its history where it broke
    holdfast sim --replay FILE           a saved decision tape
    holdfast sim --exhaustive            every single crash point of a small scenario, and pairs
    holdfast sim --mutants               the kill table of the planted bugs

The exit status is 0 when nothing broke, 1 when something did, 2 when nothing broke but something
that must happen at times never did.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path

from holdfast.clock import SYSTEM, S
from holdfast.sim import exhaustive, swarm, tape
from holdfast.sim.mutants import MUTANTS
from holdfast.sim.run import Result, replay, run_seed
from holdfast.sim.scheduler import Threads
from holdfast.sim.sometimes import SEEDS_MIN, SOMETIMES, never
from holdfast.store.urls import scheme_of, shown

SHOWN_MAX = 5
SEEDS_BY_TIME = 10_000_000


def configure(parser: ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--seeds", type=int, help="how many seeds (default 400; mutants: 1000)")
    what.add_argument("--seed", type=int, metavar="K", help="this one seed, with its history")
    what.add_argument("--replay", type=Path, metavar="FILE", help="a saved decision tape")
    parser.add_argument("--exhaustive", action="store_true", help="every single crash point")
    parser.add_argument("--mutants", action="store_true", help="the kill table of planted bugs")
    parser.add_argument("--start", type=int, default=0, metavar="K", help="the first seed")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument(
        "--backend",
        type=_backend,
        default="memory",
        metavar="WHERE",
        help="memory (default), lmdb, or postgresql://… for schemas of a database, which are dropped again",
    )
    parser.add_argument("--minutes", type=float, metavar="M", help="seeds for this long")
    parser.add_argument(
        "--mutant", choices=tuple(MUTANTS), metavar="BUG", help="plant this bug (with --seed)"
    )
    parser.add_argument("--out", type=Path, default=Path(), help="where failing tapes are written")


def run(args: Namespace) -> int:
    if args.replay is not None:
        return _replay(args)
    if args.seed is not None:
        return _one(args)
    if args.mutants:
        return _mutants(args)
    if args.exhaustive:
        return _exhaustive(args)
    return _many(args)


def _backend(text: str) -> str:
    if text not in ("memory", "lmdb") and scheme_of(text) != "postgresql":
        raise ArgumentTypeError("one of memory, lmdb, postgresql://…")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(prog="holdfast sim", description=(__doc__ or "").split("\n")[0])
    configure(parser)
    return run(parser.parse_args(argv))


def _many(args: Namespace) -> int:
    began = SYSTEM.mono_ns()
    until_ns = swarm.deadline_ns(args.minutes)
    count = args.seeds or (SEEDS_BY_TIME if until_ns else SEEDS_MIN)

    def progress(total: swarm.Batch) -> None:
        rate = total.seeds * S / max(1, SYSTEM.mono_ns() - began)
        _line(f"{total.seeds} of {count} seeds, {rate:.0f}/s, {len(total.failed)} failed")

    seeds = range(args.start, args.start + count)
    total = swarm.run_many(
        seeds, jobs=args.jobs, backend=args.backend, until_ns=until_ns, progress=progress
    )
    _line("")
    seconds = (SYSTEM.mono_ns() - began) / S
    print(
        f"{total.seeds} seeds from {args.start} on {shown(args.backend)}: {total.steps} steps in "
        f"{seconds:.0f} s ({total.seeds / seconds:.1f} seeds/s), {len(total.failed)} failed"
    )
    for seed, _ in total.failed[:SHOWN_MAX]:
        _report(run_seed(seed, args.backend), args)
    return 1 if total.failed else _at_times(total)


def _at_times(total: swarm.Batch) -> int:
    width = max(map(len, SOMETIMES))
    for name in sorted(SOMETIMES):
        print(f"  {name:{width}} {total.sometimes[name]:8}")
    missed = never(total.sometimes)
    if missed and total.seeds >= SEEDS_MIN:
        print(f"never happened in {total.seeds} seeds: {', '.join(missed)}")
        return 2
    return 0


def _one(args: Namespace) -> int:
    result = run_seed(args.seed, args.backend, args.mutant)
    print(f"seed {args.seed}: {result.steps} steps, history {result.history_hash[:16]}, "
          f"state {result.state_hash[:16]}")  # fmt: skip
    return _report(result, args)


def _replay(args: Namespace) -> int:
    saved = tape.load(args.replay)
    result = replay(saved["tape"], saved.get("backend", "memory"), saved.get("mutant"))
    print(f"{args.replay}: {result.steps} steps, history {result.history_hash[:16]}")
    for event in result.history:
        if event.op != "audit":
            print(event)
    return _verdict(result)


def _report(result: Result, args: Namespace) -> int:
    """What broke, where, and how to see it again; the shrunk tape goes to a file."""
    if _verdict(result) == 0:
        return 0
    first = result.violations[0]
    for event in result.history.slice(first.at, 10):
        print(f"  {event}")
    planted = f" --mutant '{args.mutant}'" if args.mutant else ""
    print(f"again:  holdfast sim --seed {result.seed} --backend {shown(args.backend)}{planted}")
    path = args.out / f"holdfast-sim-{result.seed}-{first.number}.json"
    shrunk = shrink(result, first.number, args.backend, args.mutant)
    tape.save(
        path,
        shrunk,
        seed=result.seed,
        backend=shown(args.backend),
        mutant=args.mutant,
        checker=first.number,
    )
    calls = f"{len(result.tape)} decisions shrunk to {len(shrunk)}"
    print(f"or:     holdfast sim --replay {path}    ({calls})")
    return 1


def shrink(result: Result, number: str, backend: str, mutant: str | None) -> list[int]:
    """The shortest tape found that still breaks the same predicate."""
    with Threads() as threads:

        def fails(candidate: Sequence[int]) -> bool:
            return number in replay(candidate, backend, mutant, threads=threads).checkers

        return tape.shrink(result.tape, fails)


def _verdict(result: Result) -> int:
    for violation in result.violations[:SHOWN_MAX]:
        print(f"VIOLATION {violation}")
    if not result.violations:
        print("no violation")
    return 1 if result.violations else 0


def _mutants(args: Namespace) -> int:
    seeds = args.seeds or 1000
    width = max(map(len, MUTANTS))
    print(f"{'planted bug':{width}}  first seed  caught by")

    def told(kill: swarm.Kill) -> None:
        seed = "survived" if kill.seed is None else kill.seed
        print(f"{kill.mutant:{width}}  {seed!s:>10}  {' '.join(kill.checkers)}", flush=True)

    kills = swarm.kill_table(seeds, jobs=args.jobs, told=told)
    alive = [kill.mutant for kill in kills if kill.seed is None]
    print(f"{len(kills) - len(alive)} of {len(kills)} caught within {seeds} seeds")
    return 1 if alive else 0


def _exhaustive(args: Namespace) -> int:
    return max(_every_crash(args, scenario) for scenario in exhaustive.SCENARIOS)


def _every_crash(args: Namespace, scenario: str) -> int:
    broken = tried = 0
    with Threads() as threads:

        def run(forced: exhaustive.Forced) -> tuple[Result, int]:
            return exhaustive.run_forced(
                forced, threads=threads, backend=args.backend, scenario=scenario
            )

        _, boundaries = run({})
        for forced in [*exhaustive.singles(boundaries), *exhaustive.pairs(boundaries)]:
            result, _ = run(forced)
            tried += 1
            if result.violations:
                broken += 1
                told = ", ".join(f"{fault.value} commit {at}" for at, fault in forced.items())
                print(f"VIOLATION {result.violations[0]} with {told}")
            _line(f"{scenario}: {tried} runs")
    _line("")
    print(f"{scenario}: {boundaries} commits, {tried} runs with one or two faults, {broken} broken")
    return 1 if broken else 0


def _line(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

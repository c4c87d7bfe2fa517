"""Trace the modules on the way of one task, one message and one effect, in all processes.

    python tools/trace_paths.py                    print every path with its modules and processes
    python tools/trace_paths.py --rounds N         repeat each item N times (default 20)
    python tools/trace_paths.py --functions        also print the functions of each module that run
    python tools/trace_paths.py --check            fail if a path has more modules than its limit

A client process submits the items. A worker process (`holdfast up`) runs them. The writer process of the embedded
store commits for both. A profile function in every thread of every process records calls (`path_trace`).

A module is on the way of an item when a function of it runs between the start and the end of the item:

    task      from `submit` in the client to the result in the client
    message   from `send` in the client to the commit of the cycle that handles the message
    effect    from `cx.do` in a handler to the commit of the cycle that handles the receipt

- Imports and start-up do not count: the items before the first recorded one import everything.
- A module counts once per path, also when it runs in several processes. A package's `__init__.py` counts only if a
  function of it runs. A module of which only a constant or a class without Python code is used does not count.
- Periodic work of the processes (heartbeats, lease renewal, upkeep) is not on the way. It falls into some rounds by
  chance. So a module counts when it runs in more than half of the rounds. Modules that run less often are printed as occasional.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
HOOK = ROOT / "tools" / "path_trace"
PACKAGE = f"{ROOT / 'src' / 'holdfast'}/"
PATHS = ("task", "message", "effect")
# The goals, and the limits: the counts of a quiet machine plus one, because a busy machine runs rare branches in more
# rounds. Only a feature that belongs on each path raises them (decision 0050).
GOALS = {"task": 25, "message": 25, "effect": 30}
LIMITS = {"task": 60, "message": 50, "effect": 76}
# The parts of a path. Every path contains the path "A commit on LMDB" of ARCHITECTURE.md.
PARTS = {
    "store/": "commit",
    "clock.py": "base",
    "codec.py": "base",
    "errors.py": "base",
    "gc_control.py": "base",
}
ROUNDS = 20
WARM_UP = 10
ROUNDS_MAX = 255 // len(PATHS) - WARM_UP


class TracedCall(NamedTuple):
    """The first call of a function in a round and a process."""

    time_ns: int
    round: int
    process: str
    module: str
    function: str


@dataclass
class Module:
    """One module on a path: its rounds, its first call in each, its processes and functions with their rounds."""

    name: str
    rounds: set[int] = field(default_factory=set)
    offsets_ns: list[int] = field(default_factory=list)
    processes: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    functions: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))


def trace(rounds: int, directory: Path, paths: tuple[str, ...] = PATHS) -> dict[str, list[Module]]:
    """Run the items and return the modules of each path, in the order of their first calls."""
    (directory / "window").write_bytes(bytes(3))
    store = directory / "store"
    up = ["-m", "holdfast.cli", "up", "traced_app:app", "--store", str(store)]
    with _spawn("worker", directory, up) as worker:
        try:
            _expect_line(worker, "ready")
            submit = [str(HOOK / "client.py"), str(store), "1", str(WARM_UP), str(rounds), *paths]
            with _spawn("client", directory, submit) as client:
                try:
                    _expect_line(client, "done")
                finally:
                    client.kill()
        finally:
            worker.terminate()
    calls = _read_calls(directory)
    return {
        path: modules_of(calls, range(start + WARM_UP, start + WARM_UP + rounds))
        for path, start in zip(paths, range(1, 255, WARM_UP + rounds), strict=False)
    }


def split_by_frequency(modules: list[Module], rounds: int) -> tuple[list[Module], list[Module]]:
    """The modules on the way, and the occasional ones."""
    on_path = [module for module in modules if 2 * len(module.rounds) > rounds]
    return on_path, [module for module in modules if module not in on_path]


def _spawn(process: str, directory: Path, arguments: list[str]) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(HOOK),
        "HOLDFAST_TRACE_DIRECTORY": str(directory),
        "HOLDFAST_TRACE_PACKAGE": PACKAGE,
        "HOLDFAST_TRACE_PROCESS": process,
    }
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=HOOK,
    )


def _expect_line(process: subprocess.Popen[str], start: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(start):
            return
    raise SystemExit(f"the process {process.args} ended with code {process.wait()}")


def _read_calls(directory: Path) -> list[TracedCall]:
    """All records in the order of their times."""
    calls = []
    for file in directory.glob("calls.*"):
        process = file.name.split(".")[1]
        for line in file.read_text("utf-8").splitlines():
            number, time_ns, module, function = line.split()
            calls.append(TracedCall(int(time_ns), int(number), process, module, function))
    return sorted(calls)


def modules_of(calls: list[TracedCall], numbers: range) -> list[Module]:
    modules: dict[str, Module] = {}
    starts_ns: dict[int, int] = {}
    for time_ns, number, process, name, function in calls:
        if number not in numbers:
            continue
        starts_ns.setdefault(number, time_ns)
        module = modules.setdefault(name, Module(name))
        if number not in module.rounds:
            module.rounds.add(number)
            module.offsets_ns.append(time_ns - starts_ns[number])
        module.processes[process].add(number)
        module.functions[function].add(number)
    return sorted(modules.values(), key=_median_offset_ns)


def count_parts(modules: list[Module]) -> dict[str, int]:
    """The number of modules of the feature itself, of the commit below it, and of the base."""
    counts = {"feature": 0, "commit": 0, "base": 0}
    for module in modules:
        part = [part for start, part in PARTS.items() if module.name.startswith(start)]
        counts[part[0] if part else "feature"] += 1
    return counts


def _median_offset_ns(module: Module) -> int:
    return sorted(module.offsets_ns)[len(module.offsets_ns) // 2]


def _lines_of(module: str) -> int:
    return Path(PACKAGE, module).read_text("utf-8").count("\n")


def print_path(path: str, modules: list[Module], rounds: int, *, show_functions: bool) -> int:
    on_path, occasional = split_by_frequency(modules, rounds)
    parts = ", ".join(f"{part} {count}" for part, count in count_parts(on_path).items())
    print(f"{path}: {len(on_path)} modules ({parts}), limit {LIMITS[path]}, goal {GOALS[path]}")
    for number, module in enumerate(on_path, start=1):
        processes = [
            name for name, numbers in module.processes.items() if 2 * len(numbers) > rounds
        ]
        functions = [
            name for name, numbers in module.functions.items() if 2 * len(numbers) > rounds
        ]
        print(
            f"  {number:3}  {module.name:38} {len(functions):3} functions {_lines_of(module.name):4} lines"
            f" {_median_offset_ns(module) / 1e6:8.2f} ms  {', '.join(processes)}"
        )
        if show_functions:
            print(f"       {', '.join(functions)}")
    if occasional:
        names = [f"{module.name} ({len(module.rounds)})" for module in occasional]
        print(f"       occasional: {', '.join(names)}")
    return len(on_path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help="items per path")
    parser.add_argument(
        "--functions", action="store_true", help="also print the functions that run"
    )
    parser.add_argument("--check", action="store_true", help="fail if a path exceeds its limit")
    options = parser.parse_args()
    if not 1 <= options.rounds <= ROUNDS_MAX:
        parser.error(f"--rounds: from 1 to {ROUNDS_MAX}")
    with tempfile.TemporaryDirectory(prefix="trace-paths-") as directory:
        traced = trace(options.rounds, Path(directory))
    exceeded = [
        path
        for path, modules in traced.items()
        if print_path(path, modules, options.rounds, show_functions=options.functions)
        > LIMITS[path]
    ]
    return 1 if options.check and exceeded else 0


if __name__ == "__main__":
    sys.exit(main())

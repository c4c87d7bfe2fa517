"""Kill and stop real processes at random while they commit to one store, then check the invariants.

    python -m tests.process.chaos --kills 200 [--seconds S] [--seed K] [--processes 4] [--keep]

The run kills workers and the writer process at any moment, also during startup. It also stops and
resumes them. A killed worker is restarted immediately with a new incarnation. The run ends when both
`--kills` and `--seconds` are reached; then `invariant_checks` reports the broken invariants. A failed run
prints its seed and keeps the store and the logs. The seed fixes the sequence of faults, not the
scheduling of the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from holdfast import store as stores
from tests.process import invariant_checks
from tests.process.load_worker import LIMITS
from tests.process.watch import OsProcess, assert_no_process_left, until, writers_of
from tests.processes import Proc, ProcFailed, python_proc

PROGRESS_S = 5.0
# Pause between two faults.
PAUSE_S = (0.02, 0.45)
STOP_S = (0.02, 2.5)
# A worker may have to find a writer before it can exit.
END_TIMEOUT_S = 60.0
# The store counts as stuck after this time without an acknowledgement. Longer than a stop may last.
STALL_MAX_S = 20.0


@dataclass
class LoadProcess:
    name: str
    incarnation: int
    proc: Proc
    log: Path
    stopped: bool = False

    @property
    def opened(self) -> bool:
        return "ready" in self.proc.lines

    @property
    def failure(self) -> str:
        """The output of a worker that exited unexpectedly."""
        return "\n".join(line for line in self.proc.lines if line != "ready")


@dataclass
class KillRun:
    """One run: the fault injection, its counts, and the killed processes that are not yet closed."""

    folder: Path
    seed: int
    processes: int
    out: Callable[[str], None] = print
    done: Counter[str] = field(default_factory=Counter)
    breaches: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.path = self.folder / "store"
        self.logs = self.folder / "logs"
        self.logs.mkdir(parents=True)
        self.workers: list[LoadProcess] = []
        self.dead: list[Proc] = []
        # Monotonic time at which to resume each stopped process, and the function that resumes it.
        self.stopped: list[tuple[float, Callable[[], object]]] = []
        self.began = time.monotonic()
        self.logged = 0
        self.progressed_at = self.began

    @property
    def kills(self) -> int:
        return self.done["worker kills"] + self.done["writer kills"]

    def run(self, kills: int, seconds: float) -> None:
        try:
            self.workers = [self.start(f"w{n}", 0) for n in range(self.processes)]
            until(
                lambda: all(
                    worker.opened or self.report_if_exited(worker) for worker in self.workers
                ),
                "the first opening",
            )
            reported_at = time.monotonic()
            while not self.breaches and (
                self.kills < kills or time.monotonic() - self.began < seconds
            ):
                time.sleep(self.random.uniform(*PAUSE_S))
                self.resume_due()
                self.inject_fault()
                self.check_progress()
                if time.monotonic() - reported_at > PROGRESS_S:
                    reported_at = time.monotonic()
                    self.out(self.progress())
            self.end()
            if not self.breaches:
                self.check_invariants()
        finally:
            for worker in self.workers:
                worker.proc.close()
            for proc in self.dead:
                proc.close()

    # -- faults ------------------------------------------------------------------------------------

    def inject_fault(self) -> None:
        [fault] = self.random.choices(
            (self.kill_worker, self.kill_writer, self.stop_worker, self.stop_writer),
            (4, 4, 1, 1),
        )
        fault()

    def kill_worker(self) -> None:
        worker = self.random.choice(self.workers)
        worker.proc.kill()
        self.done["worker kills"] += 1
        self.replace(worker)

    def kill_writer(self) -> None:
        writer = self.pick_writer()
        if writer is not None and writer.kill():
            self.done["writer kills"] += 1

    def stop_worker(self) -> None:
        running = [worker for worker in self.workers if not worker.stopped]
        if len(running) > 1:  # at least one running worker must detect a stopped writer
            worker = self.random.choice(running)
            worker.proc.stop()
            worker.stopped = True
            self.done["worker stops"] += 1
            self.schedule_resume(lambda: self.resume(worker))

    def stop_writer(self) -> None:
        writer = self.pick_writer()
        if writer is not None and writer.stop():
            self.done["writer stops"] += 1
            self.schedule_resume(writer.cont)

    def pick_writer(self) -> OsProcess | None:
        """The writer, or a starting writer process that may still lose the lock."""
        writers = writers_of(self.path)
        return self.random.choice(writers) if writers else None

    def schedule_resume(self, resume: Callable[[], object]) -> None:
        self.stopped.append((time.monotonic() + self.random.uniform(*STOP_S), resume))

    def resume(self, worker: LoadProcess) -> None:
        if worker in self.workers and worker.stopped:
            worker.proc.cont()
            worker.stopped = False

    def resume_due(self, *, all: bool = False) -> None:
        due = [one for one in self.stopped if all or one[0] <= time.monotonic()]
        for one in due:
            self.stopped.remove(one)
            one[1]()

    # -- workers -----------------------------------------------------------------------------------

    def start(self, name: str, incarnation: int) -> LoadProcess:
        log = self.logs / f"{name}-{incarnation:04}.log"
        full_name = f"{name}#{incarnation}"
        seed = str(self.random.randrange(1 << 30))
        proc = python_proc(
            "tests.process.load_worker", str(self.path), str(log), full_name, seed, ready=None
        )
        return LoadProcess(name, incarnation, proc, log)

    def replace(self, worker: LoadProcess) -> None:
        self.dead.append(worker.proc)
        self.workers[self.workers.index(worker)] = self.start(worker.name, worker.incarnation + 1)
        # Closing a `Proc` kills its surviving children, and one of them may be the shared writer.
        # A killed process is therefore closed only when it has no surviving child.
        for proc in list(self.dead):
            if not proc.survivors():
                proc.close()
                self.dead.remove(proc)

    def report_if_exited(self, worker: LoadProcess) -> bool:
        """Report a breach and return True if the worker exited before it was stopped."""
        if worker.proc.running:
            return False
        code = worker.proc.wait()
        self.breaches.append(f"{worker.name} ended with {code}: {worker.failure or 'silent'}")
        return True

    def check_progress(self) -> None:
        for worker in self.workers:
            self.report_if_exited(worker)
        logged = sum(log.stat().st_size for log in self.logs.iterdir())
        if logged != self.logged:
            self.logged, self.progressed_at = logged, time.monotonic()
        elif time.monotonic() - self.progressed_at > STALL_MAX_S:
            self.breaches.append(f"no process made progress for {STALL_MAX_S} s")

    # -- the end -----------------------------------------------------------------------------------

    def end(self) -> None:
        """Resume the stopped workers and end all workers in order."""
        self.resume_due(all=True)
        for worker in self.workers:
            with contextlib.suppress(BrokenPipeError):
                worker.proc.send("end")
        for worker in self.workers:
            try:
                code = worker.proc.wait(END_TIMEOUT_S)
            except ProcFailed as error:
                self.breaches.append(f"{worker.name} does not end: {error}")
                continue
            if code:
                self.breaches.append(f"{worker.name} ended with {code}: {worker.failure}")

    def check_invariants(self) -> None:
        logs = invariant_checks.WorkerLogs.read(self.logs)
        with stores.open(self.path, limits=LIMITS) as store:
            self.breaches += invariant_checks.breaches(store, logs)
            if not self.breaches:
                invariant_checks.drain(store)
                self.breaches += invariant_checks.breaches(store, logs)
            counts = store.read(invariant_checks.queue.counts, invariant_checks.load_worker.QUEUE)
        if not self.breaches and (counts.ready or counts.delayed or counts.claimed):
            self.breaches.append(f"items remain that no worker can complete: {counts}")
        try:
            assert_no_process_left(self.path, LIMITS.idle_exit_s)
        except AssertionError as error:
            self.breaches.append(str(error))
        for how in ("acked", "unknown", "refused"):
            self.done[how] = logs.count(how)
        self.done["items done"] = counts.done
        self.done["dead letters"] = counts.dead

    def progress(self) -> str:
        spent_s = time.monotonic() - self.began
        faults = ", ".join(f"{count} {deed}" for deed, count in sorted(self.done.items()))
        return f"{spent_s:6.1f} s  {faults}"


def run(folder: Path, *, kills: int, seconds: float, seed: int, processes: int) -> KillRun:
    chaos = KillRun(folder, seed, processes, out=lambda line: print(line, flush=True))
    chaos.run(kills, seconds)
    print(chaos.progress(), flush=True)
    return chaos


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Kill real processes and count what is there.")
    parser.add_argument("--kills", type=int, default=200, help="at least so many kills (200)")
    parser.add_argument("--seconds", type=float, default=0.0, help="at least so long (0)")
    parser.add_argument("--seed", type=int, default=None, help="what is done to whom (random)")
    parser.add_argument("--processes", type=int, default=4, help="workers at a time (4)")
    parser.add_argument("--keep", action="store_true", help="keep the store and the logs")
    options = parser.parse_args(argv)
    seed = random.SystemRandom().randrange(1 << 31) if options.seed is None else options.seed
    folder = Path(tempfile.mkdtemp(prefix="holdfast-chaos-"))
    print(f"seed {seed}, {options.processes} processes, at least {options.kills} kills", flush=True)
    kept = True
    try:
        chaos = run(
            folder,
            kills=options.kills,
            seconds=options.seconds,
            seed=seed,
            processes=options.processes,
        )
        kept = options.keep or bool(chaos.breaches)
    finally:
        if kept:
            print(f"kept: {folder}", flush=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    for breach in chaos.breaches:
        print(f"BREACH {breach}")
    if chaos.breaches:
        print(f"FAILED: python -m tests.process.chaos --kills {options.kills} --seed {seed}")
        return 1
    print("no acknowledged commit is lost, no item is done twice, no process is left")
    return 0


if __name__ == "__main__":
    sys.exit(main())

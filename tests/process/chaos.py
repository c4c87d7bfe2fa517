"""Kill and stop real processes at random while they hammer one store; then count what is there.

    python -m tests.process.chaos --kills 200 [--seconds S] [--seed K] [--processes 4] [--keep]

Workers are killed, and so is the writer process, at any moment, its start included; both are also
stopped for a while and continued. Workers are restarted at once, under a new incarnation. It ends
after so many kills, or seconds, whichever comes last, and then `verdict` says what did not hold. On
failure the seed is printed, and the store and the logs are kept; the seed fixes what is done to
whom, not how the machine schedules it.
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
from tests.process import verdict
from tests.process.watch import Seen, assert_nobody_is_left, until, writers_of
from tests.process.worker import LIMITS
from tests.processes import Proc, ProcFailed, python_proc

PROGRESS_S = 5.0
# Between one deed and the next.
PAUSE_S = (0.02, 0.45)
STOP_S = (0.02, 2.5)
# A worker that is told to end may first have to find a writer.
END_TIMEOUT_S = 60.0
# Without any acknowledgement for so long, the store is stuck. Above what a stop may cost.
QUIET_MAX_S = 20.0


@dataclass
class Worker:
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
        """What it said when it ended by itself."""
        return "\n".join(line for line in self.proc.lines if line != "ready")


@dataclass
class Chaos:
    """One run: the deeds, what was done so far, and who is still to be buried."""

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
        self.workers: list[Worker] = []
        self.graves: list[Proc] = []
        # When to continue what, by the monotonic clock.
        self.asleep: list[tuple[float, Callable[[], object]]] = []
        self.began = time.monotonic()
        self.logged = 0
        self.heard = self.began

    @property
    def kills(self) -> int:
        return self.done["worker kills"] + self.done["writer kills"]

    def run(self, kills: int, seconds: float) -> None:
        try:
            self.workers = [self.start(f"w{n}", 0) for n in range(self.processes)]
            until(
                lambda: all(worker.opened or self.bury_if_dead(worker) for worker in self.workers),
                "the first opening",
            )
            told = time.monotonic()
            while not self.breaches and (
                self.kills < kills or time.monotonic() - self.began < seconds
            ):
                time.sleep(self.random.uniform(*PAUSE_S))
                self.wake_due()
                self.deed()
                self.watch()
                if time.monotonic() - told > PROGRESS_S:
                    told = time.monotonic()
                    self.out(self.progress())
            self.end()
            if not self.breaches:
                self.judge()
        finally:
            for worker in self.workers:
                worker.proc.close()
            for grave in self.graves:
                grave.close()

    # -- deeds -------------------------------------------------------------------------------------

    def deed(self) -> None:
        [deed] = self.random.choices(
            (self.kill_worker, self.kill_writer, self.stop_worker, self.stop_writer),
            (4, 4, 1, 1),
        )
        deed()

    def kill_worker(self) -> None:
        worker = self.random.choice(self.workers)
        worker.proc.kill()
        self.done["worker kills"] += 1
        self.replace(worker)

    def kill_writer(self) -> None:
        writer = self.some_writer()
        if writer is not None and writer.kill():
            self.done["writer kills"] += 1

    def stop_worker(self) -> None:
        awake = [worker for worker in self.workers if not worker.stopped]
        if len(awake) > 1:  # somebody has to notice
            worker = self.random.choice(awake)
            worker.proc.stop()
            worker.stopped = True
            self.done["worker stops"] += 1
            self.later(lambda: self.wake(worker))

    def stop_writer(self) -> None:
        writer = self.some_writer()
        if writer is not None and writer.stop():
            self.done["writer stops"] += 1
            self.later(writer.cont)

    def some_writer(self) -> Seen | None:
        """The writer, or one that is about to become it or to find that there is one."""
        writers = writers_of(self.path)
        return self.random.choice(writers) if writers else None

    def later(self, wake: Callable[[], object]) -> None:
        self.asleep.append((time.monotonic() + self.random.uniform(*STOP_S), wake))

    def wake(self, worker: Worker) -> None:
        if worker in self.workers and worker.stopped:
            worker.proc.cont()
            worker.stopped = False

    def wake_due(self, *, all: bool = False) -> None:
        due = [one for one in self.asleep if all or one[0] <= time.monotonic()]
        for one in due:
            self.asleep.remove(one)
            one[1]()

    # -- workers -----------------------------------------------------------------------------------

    def start(self, name: str, incarnation: int) -> Worker:
        log = self.logs / f"{name}-{incarnation:04}.log"
        full_name = f"{name}#{incarnation}"
        seed = str(self.random.randrange(1 << 30))
        proc = python_proc(
            "tests.process.worker", str(self.path), str(log), full_name, seed, ready=None
        )
        return Worker(name, incarnation, proc, log)

    def replace(self, worker: Worker) -> None:
        self.graves.append(worker.proc)
        self.workers[self.workers.index(worker)] = self.start(worker.name, worker.incarnation + 1)
        # To close a grave is to kill what it left behind, and that may be the writer that all use:
        # so the grave stays open until nothing of it lives.
        for grave in list(self.graves):
            if not grave.survivors():
                grave.close()
                self.graves.remove(grave)

    def bury_if_dead(self, worker: Worker) -> bool:
        """Whether it ended by itself, which none should before it is told to."""
        if worker.proc.running:
            return False
        code = worker.proc.wait()
        self.breaches.append(f"{worker.name} ended with {code}: {worker.failure or 'silent'}")
        return True

    def watch(self) -> None:
        for worker in self.workers:
            self.bury_if_dead(worker)
        logged = sum(log.stat().st_size for log in self.logs.iterdir())
        if logged != self.logged:
            self.logged, self.heard = logged, time.monotonic()
        elif time.monotonic() - self.heard > QUIET_MAX_S:
            self.breaches.append(f"nobody got anything done for {QUIET_MAX_S} s")

    # -- the end -----------------------------------------------------------------------------------

    def end(self) -> None:
        """Let all that live finish what they do, and leave."""
        self.wake_due(all=True)
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

    def judge(self) -> None:
        logs = verdict.Logs.read(self.logs)
        with stores.open(self.path, limits=LIMITS) as store:
            self.breaches += verdict.breaches(store, logs)
            if not self.breaches:
                verdict.drain(store)
                self.breaches += verdict.breaches(store, logs)
            counts = store.read(verdict.queue.counts, verdict.worker.QUEUE)
        if not self.breaches and (counts.ready or counts.delayed or counts.claimed):
            self.breaches.append(f"items are left that nobody can do: {counts}")
        try:
            assert_nobody_is_left(self.path, LIMITS.linger_s)
        except AssertionError as error:
            self.breaches.append(str(error))
        for how in ("acked", "unknown", "refused"):
            self.done[how] = logs.count(how)
        self.done["items done"] = counts.done
        self.done["dead letters"] = counts.dead

    def progress(self) -> str:
        spent_s = time.monotonic() - self.began
        deeds = ", ".join(f"{count} {deed}" for deed, count in sorted(self.done.items()))
        return f"{spent_s:6.1f} s  {deeds}"


def run(folder: Path, *, kills: int, seconds: float, seed: int, processes: int) -> Chaos:
    chaos = Chaos(folder, seed, processes, out=lambda line: print(line, flush=True))
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
    print("nothing acknowledged is lost, nothing is done twice, nobody is left behind")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Chaos on PostgreSQL: servers restart, crash and fail over, connections are cut in mid-commit, workers are
killed, while worlds, effects, timers and tasks of separate processes go on.

    python -m tests.chaos.run --seconds 600            ten minutes
    python -m tests.chaos.run --seed 7 --keep          the same deeds again; keep the logs

Workers are `holdfast up` processes and clients are processes of their own (`tests.chaos.client`); all of
them reach the servers through proxies (`tests.chaos.proxy`) by one URL with two hosts, of which the one that
takes writes is asked. What is done to whom follows from the seed. When the time is up, the faults stop;
everything must then come to rest by itself, and `tests.chaos.verdict` judges.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from holdfast.app.runtime import Runtime
from tests.chaos import verdict
from tests.chaos.app import RECEIVER, WHO, app
from tests.chaos.proxy import Proxy
from tests.chaos.receiver import Receiver
from tests.pgcluster import DATABASE, USER, Cluster
from tests.process.watch import Seen
from tests.processes import Proc, ProcFailed, python_proc

LEASE_S = 3.0
# The server is struck so often, and is away for so long.
STRIKE_S = (5.0, 40.0)
# Each of these once before any again; and every third strike is a promotion.
STRIKES = (
    "server stops", "immediate stops", "server crashes", "server freezes", "standby restarts",
    "immediate stops", "server crashes",
)  # fmt: skip
PROMOTION_EVERY = 3
AWAY_S = (0.0, 4.0)
LONG_AWAY_S = 12.0
DEED_S = (0.3, 2.5)
SWALLOW_S = (1.0, 8.0)
STOP_S = (0.5, 2.5 * LEASE_S)
PROGRESS_S = 20.0
# A question about readiness is answered within this, server or not.
READY_S = 30.0
REST_S = 180.0
QUIET_MAX_S = 90.0


class Chaos:
    def __init__(
        self,
        folder: Path,
        *,
        seed: int,
        workers: int,
        clients: int,
        rate: float,
        strike_s: tuple[float, float],
    ) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.breaches: list[str] = []
        self.told = verdict.Told()
        self._rate = rate
        self._strike_s = strike_s
        self._counts = (workers, clients)
        self._logs = folder / "logs"
        self._logs.mkdir()
        self._stack = contextlib.ExitStack()
        self._later: list[tuple[float, Callable[[], object]]] = []
        self._strikes = 0
        self._bag: list[str] = []
        self._heard = (0, time.monotonic())

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._receiver = stack.enter_context(Receiver(self.folder / "outside"))
            self._cluster = stack.enter_context(Cluster())
            self._proxies = [
                stack.enter_context(Proxy((server.host, server.port)))
                for server in self._cluster.servers
            ]
            self._workers: list[_Worker] = []
            self._clients: list[_Client] = []
            stack.callback(self._close)
            self._workers = [self._worker(f"w{n}", 0) for n in range(self._counts[0])]
            self._clients = [self._client(f"c{n}", 0) for n in range(self._counts[1])]
            for worker in self._workers:
                worker.proc.expect("ready", 60)
            for client in self._clients:
                client.proc.expect("ready", 60)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _close(self) -> None:
        for one in (*self._workers, *self._clients):
            one.proc.close()

    @property
    def url(self) -> str:
        """Both servers, through their proxies: whoever connects finds the one that takes writes."""
        hosts = ",".join(f"127.0.0.1:{proxy.port}" for proxy in self._proxies)
        return f"postgresql://{USER}@{hosts}/{DATABASE}?target_session_attrs=read-write"

    @property
    def direct(self) -> str:
        """The primary itself, past the proxies."""
        host, port = self._cluster.folder, self._cluster.primary.port
        return f"postgresql://{USER}@/{DATABASE}?host={host}&port={port}"

    # -- running -----------------------------------------------------------------------------------

    def run(self, seconds: float, strikes_min: int, out: Callable[[str], object]) -> None:
        began = time.monotonic()
        strike_at = began + self.random.uniform(*self._strike_s) / 2
        told_at = began
        while not self.breaches and (
            time.monotonic() - began < seconds or self._strikes < strikes_min
        ):
            time.sleep(self.random.uniform(*DEED_S))
            self._do_due()
            if time.monotonic() >= strike_at:
                self._strike()
                strike_at = time.monotonic() + self.random.uniform(*self._strike_s)
            else:
                self._deed()
            self._watch()
            if time.monotonic() - told_at > PROGRESS_S:
                told_at = time.monotonic()
                out(self.progress(began))
        self._rest()
        if not self.breaches:
            self._judge()
        out(self.progress(began))

    def progress(self, began: float) -> str:
        self.told = verdict.Told.read(self._logs)
        for what in {what for proxy in self._proxies for what in proxy.done}:
            self.done[f"connections: {what}"] = sum(p.done[what] for p in self._proxies)
        told = self.told
        deeds = ", ".join(f"{count} {deed}" for deed, count in sorted(self.done.items()))
        return (
            f"{time.monotonic() - began:6.1f} s  {told.count('acked')} acknowledged, "
            f"{told.count('unknown')} unknown, {told.count('refused')} refused, "
            f"{told.retries} asked again, {len(self._receiver.calls)} calls outside, "
            f"longest {told.longest_s:.1f} s; {deeds}"
        )

    # -- strikes: what happens to a server ---------------------------------------------------------

    def _strike(self) -> None:
        self._strikes += 1
        if self._strikes % PROMOTION_EVERY == 0:
            self._promote()
            return
        if not self._bag:
            self._bag = self.random.sample(STRIKES, len(STRIKES))
        how = self._bag.pop()
        self.done[how] += 1
        away_s = self.random.uniform(*AWAY_S)
        if self.random.random() < 0.15:
            away_s = LONG_AWAY_S
        primary, standby = self._cluster.primary, self._cluster.standby
        if how == "server freezes":
            still = primary.freeze()
            self._away(away_s)
            _continue(still)
            return
        if how == "standby restarts":
            assert standby is not None
            standby.stop(immediate=True)
            self._away(min(away_s, 2.0), asks=False)
            standby.start()
        elif how == "server crashes":
            primary.crash()
            self._away(away_s)
            primary.start()
        else:
            primary.stop(immediate=how == "immediate stops")
            self._away(away_s)
            primary.start()
        self._cluster.await_synchronous()

    def _promote(self) -> None:
        """The primary is gone with its data; the standby leads, and is given a standby of its own."""
        lost = self._cluster.fail_over()
        self.done["promotions"] += 1
        time.sleep(self.random.uniform(0.0, 3.0))
        self._cluster.attach(lost)

    def _away(self, seconds: float, *, asks: bool = True) -> None:
        """Let it be away for a while; if there is time enough, ask whether all is ready."""
        until = time.monotonic() + seconds
        if asks and seconds > 2.0:
            self._ask_ready()
        while time.monotonic() < until:
            self._do_due()
            time.sleep(0.05)

    def _ask_ready(self) -> None:
        """Nothing is ready while the server is away, and the answer says why."""
        began = time.monotonic()
        with python_proc(
            "holdfast.cli", "ready", "--store", self.url, ready=None, timeout_s=READY_S
        ) as asked:
            try:
                code = asked.wait(READY_S)
            except ProcFailed:
                self.breaches.append(f"`holdfast ready` has no answer after {READY_S} s")
                return
            said = " ".join([*asked.lines, *asked.errors])
        self.done["asked while away"] += 1
        took_s = time.monotonic() - began
        if code != 1 or "does not answer" not in said:
            self.breaches.append(f"`holdfast ready` ended with {code} after {took_s:.1f} s: {said}")

    # -- deeds: what happens to connections and workers --------------------------------------------

    def _deed(self) -> None:
        [deed] = self.random.choices(
            (self._cut, self._cut_after, self._cut_answer, self._swallow, self._refuse,
             self._kill_worker, self._stop_worker, self._kill_client),
            (2, 4, 5, 1, 1, 2, 1, 1),
        )  # fmt: skip
        deed()

    def _proxy(self) -> Proxy:
        """Of the server that is asked at present."""
        return self._proxies[self._cluster.servers.index(self._cluster.primary)]

    def _cut(self) -> None:
        self._proxy().cut()

    def _cut_after(self) -> None:
        self._proxy().cut_after(self.random.choice((100, 3000)), upward=self.random.random() < 0.5)

    def _cut_answer(self) -> None:
        proxy = self._proxy()
        if not proxy.answers_due:
            proxy.cut_answer()

    def _swallow(self) -> None:
        proxy = self._proxy()
        [(up, down)] = self.random.choices([(True, True), (True, False), (False, True)])
        proxy.swallow(up=up, down=down)
        self._in(self.random.uniform(*SWALLOW_S), proxy.cut)

    def _refuse(self) -> None:
        proxy = self._proxy()
        proxy.refuse()
        proxy.cut()
        self.done["refusals"] += 1
        self._in(self.random.uniform(0.5, 3.0), lambda: proxy.refuse(False))

    def _kill_worker(self) -> None:
        worker = self.random.choice(self._workers)
        worker.proc.kill()
        worker.proc.close()
        self.done["workers killed"] += 1
        self._workers[self._workers.index(worker)] = self._worker(worker.name, worker.life + 1)

    def _stop_worker(self) -> None:
        awake = [worker for worker in self._workers if not worker.stopped]
        if len(awake) > 1:
            worker = self.random.choice(awake)
            worker.proc.stop()
            worker.stopped = True
            self.done["workers stopped"] += 1
            self._in(self.random.uniform(*STOP_S), lambda: self._wake(worker))

    def _kill_client(self) -> None:
        client = self.random.choice(self._clients)
        client.proc.kill()
        client.proc.close()
        self.done["clients killed"] += 1
        self._clients[self._clients.index(client)] = self._client(client.name, client.life + 1)

    def _wake(self, worker: _Worker) -> None:
        if worker in self._workers and worker.stopped:
            worker.proc.cont()
            worker.stopped = False

    def _in(self, seconds: float, do: Callable[[], object]) -> None:
        self._later.append((time.monotonic() + seconds, do))

    def _do_due(self, *, all: bool = False) -> None:
        for one in [one for one in self._later if all or one[0] <= time.monotonic()]:
            self._later.remove(one)
            one[1]()

    # -- processes ---------------------------------------------------------------------------------

    def _worker(self, name: str, life: int) -> _Worker:
        who = f"{name}#{life}"
        proc = python_proc(
            "holdfast.cli", "up", "tests.chaos.app:app", "--store", self.url, "--worker", name,
            "--lease-s", f"{LEASE_S:g}",
            ready=None,
            env={RECEIVER: str(self._receiver.path), WHO: who},
        )  # fmt: skip
        return _Worker(name, life, proc)

    def _client(self, name: str, life: int) -> _Client:
        who = f"{name}-{life}"
        proc = python_proc(
            "tests.chaos.client", self.url, str(self._logs / f"{who}.log"), who,
            str(self.random.randrange(1 << 30)), f"{self._rate:g}",
            ready=None,
        )  # fmt: skip
        return _Client(name, life, proc)

    def _watch(self) -> None:
        """Nobody ends by itself, and things go on."""
        for one in (*self._workers, *self._clients):
            if not one.proc.running:
                code = one.proc.wait()
                said = " | ".join([*one.proc.lines[-3:], *one.proc.errors[-12:]])
                self.breaches.append(f"{one.name}#{one.life} ended by itself with {code}: {said}")
        acked = sum(path.stat().st_size for path in self._logs.iterdir())
        if acked != self._heard[0]:
            self._heard = (acked, time.monotonic())
        elif time.monotonic() - self._heard[1] > QUIET_MAX_S:
            self.breaches.append(f"nothing went on for {QUIET_MAX_S} s")

    # -- the end -----------------------------------------------------------------------------------

    def _rest(self) -> None:
        """The faults stop; all that was begun comes to its end without help."""
        self._do_due(all=True)
        for proxy in self._proxies:
            proxy.refuse(False)
        for client in self._clients:
            with contextlib.suppress(BrokenPipeError):
                client.proc.send("end")
        for client in self._clients:
            self._expect_end(client)
            client.proc.close()
        self._clients = []
        if self.breaches:
            return
        with self._look() as runtime:
            deadline = time.monotonic() + REST_S
            while not verdict.settled(runtime):
                self._watch()
                if self.breaches:
                    return
                if time.monotonic() > deadline:
                    self.breaches.append(f"not everything came to its end within {REST_S} s")
                    return
                time.sleep(0.1)
        self._expect_ready()
        for worker in self._workers:
            # Who was started a moment ago does not listen to signals yet.
            worker.expect_ready()
            worker.proc.terminate()
        for worker in self._workers:
            self._expect_end(worker)

    def _expect_ready(self) -> None:
        """After the last fault a worker may still be on its way back."""
        deadline = time.monotonic() + READY_S
        while True:
            with python_proc("holdfast.cli", "ready", "--store", self.url, ready=None) as asked:
                if asked.wait(READY_S) == 0:
                    return
            if time.monotonic() > deadline:
                self.breaches.append(f"not ready in the end: {asked.lines} {asked.errors}")
                return

    def _expect_end(self, one: _Worker | _Client) -> None:
        try:
            code = one.proc.wait(REST_S)
        except ProcFailed as error:
            self.breaches.append(f"{one.name} does not end: {error}")
            return
        if code:
            said = " | ".join(one.proc.errors[-12:])
            self.breaches.append(f"{one.name}#{one.life} ended with {code}: {said}")

    def _judge(self) -> None:
        with self._look() as runtime:
            self.told = verdict.Told.read(self._logs)
            self.breaches += verdict.breaches(runtime, self.told, self._receiver)
        with python_proc(
            "holdfast.cli", "verify", "--store", self.direct, "--app", "tests.chaos.app:app",
            "--jobs", "1", ready=None,
        ) as verified:  # fmt: skip
            if verified.wait(REST_S):
                self.breaches.append(f"holdfast verify: {verified.lines} {verified.errors}")

    @contextlib.contextmanager
    def _look(self) -> Iterator[Runtime]:
        runtime: Runtime = app.open(self.direct, roles=())
        with runtime:
            yield runtime


class _Process:
    def __init__(self, name: str, life: int, proc: Proc) -> None:
        self.name = name
        self.life = life
        self.proc = proc
        self.stopped = False


class _Worker(_Process):
    def expect_ready(self) -> None:
        if not any(line.startswith("ready") for line in list(self.proc.lines)):
            self.proc.expect("ready", REST_S)


class _Client(_Process):
    pass


def _continue(still: list[Seen]) -> None:
    for process in still:
        process.cont()


def run(
    folder: Path,
    *,
    seconds: float,
    seed: int,
    strikes_min: int = 0,
    workers: int = 3,
    clients: int = 2,
    rate: float = 8.0,
    strike_s: tuple[float, float] = STRIKE_S,
) -> Chaos:
    with Chaos(
        folder, seed=seed, workers=workers, clients=clients, rate=rate, strike_s=strike_s
    ) as chaos:
        chaos.run(seconds, strikes_min, lambda line: print(line, flush=True))
    return chaos


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Break servers, connections and workers; count.")
    parser.add_argument("--seconds", type=float, default=600.0, help="faults for so long (600)")
    parser.add_argument("--seed", type=int, default=None, help="what is done to whom (random)")
    parser.add_argument("--workers", type=int, default=3, help="`holdfast up` processes (3)")
    parser.add_argument("--clients", type=int, default=2, help="clients (2)")
    parser.add_argument("--rate", type=float, default=8.0, help="orders a second and client (8)")
    parser.add_argument("--keep", action="store_true", help="keep the logs")
    options = parser.parse_args(argv)
    seed = random.SystemRandom().randrange(1 << 31) if options.seed is None else options.seed
    folder = Path(tempfile.mkdtemp(prefix="holdfast-chaos-"))
    print(f"seed {seed}, at least {options.seconds:g} s", flush=True)
    kept = True
    try:
        chaos = run(
            folder,
            seconds=options.seconds,
            seed=seed,
            workers=options.workers,
            clients=options.clients,
            rate=options.rate,
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
        print(f"FAILED: python -m tests.chaos.run --seconds {options.seconds:g} --seed {seed}")
        return 1
    print("nothing acknowledged is lost, nothing is done twice, epochs only grow, all came back")
    return 0


if __name__ == "__main__":
    sys.exit(main())

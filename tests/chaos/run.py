"""Chaos on PostgreSQL: servers restart, crash and fail over, connections are cut in mid-commit, and workers are
killed, while separate processes run worlds, effects, timers and tasks.

    python -m tests.chaos.run --seconds 600            ten minutes
    python -m tests.chaos.run --seed 7 --keep          the same faults again; keep the logs

Workers are `holdfast up` processes, and clients are separate processes (`tests.chaos.client`). They connect through
proxies (`tests.chaos.proxy`) with one URL of two hosts, and libpq selects the host that accepts writes. The seed
fixes the sequence of faults. When the time is up, the faults stop and all work must complete. Then
`tests.chaos.invariant_checks` checks the invariants.
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
from tests.chaos import invariant_checks
from tests.chaos.app import CALLER, RECEIVER, app
from tests.chaos.proxy import Proxy
from tests.chaos.receiver import Receiver
from tests.pgcluster import DATABASE, USER, PostgresCluster
from tests.process.watch import OsProcess
from tests.processes import Proc, ProcFailed, python_proc

LEASE_S = 3.0
# Seconds between two server faults. An outage lasts OUTAGE_S, or sometimes LONG_OUTAGE_S.
SERVER_FAULT_INTERVAL_S = (5.0, 40.0)
# Drawn without replacement until all are used. Every third server fault is a promotion.
SERVER_FAULTS = (
    "server stops", "immediate stops", "server crashes", "server freezes", "standby restarts",
    "immediate stops", "server crashes",
)  # fmt: skip
PROMOTION_EVERY = 3
OUTAGE_S = (0.0, 4.0)
LONG_OUTAGE_S = 12.0
# During a longer outage `holdfast ready` is run.
CHECKED_OUTAGE_S = 2.0
PROMOTION_PAUSE_S = (0.0, 3.0)
REFUSE_S = (0.5, 3.0)
FAULT_INTERVAL_S = (0.3, 2.5)
SWALLOW_S = (1.0, 8.0)
STOP_S = (0.5, 2.5 * LEASE_S)
PROGRESS_S = 20.0
# `holdfast ready` must end within this time, with or without a server.
READY_S = 30.0
DRAIN_S = 180.0
STALL_MAX_S = 90.0


class PostgresChaosRun:
    def __init__(
        self,
        folder: Path,
        *,
        seed: int,
        workers: int,
        clients: int,
        rate: float,
        server_fault_interval_s: tuple[float, float],
        time_scale: float,
    ) -> None:
        """`time_scale` multiplies the pauses between faults and the duration of each fault."""
        self.folder = folder
        self.random = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.breaches: list[str] = []
        self.client_logs = invariant_checks.ClientLogs()
        self._rate = rate
        self._server_fault_interval_s = server_fault_interval_s
        self._time_scale = time_scale
        self._counts = (workers, clients)
        self._logs = folder / "logs"
        self._logs.mkdir()
        self._stack = contextlib.ExitStack()
        self._scheduled: list[tuple[float, Callable[[], object]]] = []
        self._server_faults = 0
        self._remaining_faults: list[str] = []
        self._last_progress = (0, time.monotonic())

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._receiver = stack.enter_context(Receiver(self.folder / "outside"))
            self._cluster = stack.enter_context(PostgresCluster())
            self._proxies = [
                stack.enter_context(Proxy((server.host, server.port)))
                for server in self._cluster.servers
            ]
            self._workers: list[_WorkerProcess] = []
            self._clients: list[_ClientProcess] = []
            stack.callback(self._close)
            self._workers = [self._start_worker(f"w{n}", 0) for n in range(self._counts[0])]
            self._clients = [self._start_client(f"c{n}", 0) for n in range(self._counts[1])]
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
        """The URL of both servers through their proxies. A client connects to the one that accepts writes."""
        hosts = ",".join(f"127.0.0.1:{proxy.port}" for proxy in self._proxies)
        return f"postgresql://{USER}@{hosts}/{DATABASE}?target_session_attrs=read-write"

    @property
    def direct(self) -> str:
        """The URL of the primary without a proxy."""
        host, port = self._cluster.folder, self._cluster.primary.port
        return f"postgresql://{USER}@/{DATABASE}?host={host}&port={port}"

    # -- running -----------------------------------------------------------------------------------

    def run(self, seconds: float, server_faults_min: int, out: Callable[[str], object]) -> None:
        began = time.monotonic()
        next_server_fault_at = began + self.random.uniform(*self._server_fault_interval_s) / 2
        reported_at = began
        while not self.breaches and (
            time.monotonic() - began < seconds or self._server_faults < server_faults_min
        ):
            time.sleep(self._seconds(FAULT_INTERVAL_S))
            self._run_due()
            if time.monotonic() >= next_server_fault_at:
                self._inject_server_fault()
                next_server_fault_at = time.monotonic() + self.random.uniform(
                    *self._server_fault_interval_s
                )
            else:
                self._inject_fault()
            self._check_progress()
            if time.monotonic() - reported_at > PROGRESS_S:
                reported_at = time.monotonic()
                out(self.progress(began))
        self._drain()
        if not self.breaches:
            self._check_invariants()
        out(self.progress(began))

    def progress(self, began: float) -> str:
        self.client_logs = invariant_checks.ClientLogs.read(self._logs)
        for what in {what for proxy in self._proxies for what in proxy.done}:
            self.done[f"connections: {what}"] = sum(p.done[what] for p in self._proxies)
        logs = self.client_logs
        faults = ", ".join(f"{count} {deed}" for deed, count in sorted(self.done.items()))
        return (
            f"{time.monotonic() - began:6.1f} s  {logs.count('acked')} acknowledged, "
            f"{logs.count('unknown')} unknown, {logs.count('refused')} refused, "
            f"{logs.retries} asked again, {len(self._receiver.calls)} calls outside, "
            f"longest {logs.longest_s:.1f} s; {faults}"
        )

    # -- server faults -----------------------------------------------------------------------------

    def _inject_server_fault(self) -> None:
        self._server_faults += 1
        if self._server_faults % PROMOTION_EVERY == 0:
            self._promote()
            return
        if not self._remaining_faults:
            self._remaining_faults = self.random.sample(SERVER_FAULTS, len(SERVER_FAULTS))
        fault = self._remaining_faults.pop()
        self.done[fault] += 1
        outage_s = self._seconds(OUTAGE_S)
        if self.random.random() < 0.15:
            outage_s = LONG_OUTAGE_S * self._time_scale
        primary, standby = self._cluster.primary, self._cluster.standby
        if fault == "server freezes":
            frozen = primary.freeze()
            self._wait_unavailable(outage_s)
            _resume_all(frozen)
            return
        if fault == "standby restarts":
            assert standby is not None
            standby.stop(immediate=True)
            self._wait_unavailable(min(outage_s, 2.0), check_ready=False)
            standby.start()
        elif fault == "server crashes":
            primary.crash()
            self._wait_unavailable(outage_s)
            primary.start()
        else:
            primary.stop(immediate=fault == "immediate stops")
            self._wait_unavailable(outage_s)
            primary.start()
        self._cluster.await_synchronous()

    def _promote(self) -> None:
        """Drop the primary with its data, promote the standby, and attach a new standby."""
        lost = self._cluster.fail_over()
        self.done["promotions"] += 1
        time.sleep(self._seconds(PROMOTION_PAUSE_S))
        self._cluster.attach(lost)

    def _wait_unavailable(self, seconds: float, *, check_ready: bool = True) -> None:
        """Wait during an outage. If it is long enough, check that `holdfast ready` fails."""
        end_s = time.monotonic() + seconds
        if check_ready and seconds > CHECKED_OUTAGE_S * self._time_scale:
            self._check_not_ready()
        while time.monotonic() < end_s:
            self._run_due()
            time.sleep(0.05)

    def _check_not_ready(self) -> None:
        """Check that `holdfast ready` fails during an outage and names the reason."""
        began = time.monotonic()
        with python_proc(
            "holdfast.cli", "ready", "--store", self.url, ready=None, timeout_s=READY_S
        ) as proc:
            try:
                code = proc.wait(READY_S)
            except ProcFailed:
                self.breaches.append(f"`holdfast ready` has no answer after {READY_S} s")
                return
            output = " ".join([*proc.lines, *proc.errors])
        self.done["asked while away"] += 1
        took_s = time.monotonic() - began
        if code != 1 or "does not answer" not in output:
            self.breaches.append(
                f"`holdfast ready` ended with {code} after {took_s:.1f} s: {output}"
            )

    # -- faults of connections, workers and clients ------------------------------------------------

    def _inject_fault(self) -> None:
        [fault] = self.random.choices(
            (self._cut, self._cut_after, self._cut_answer, self._swallow, self._refuse,
             self._kill_worker, self._stop_worker, self._kill_client),
            (2, 4, 5, 1, 1, 2, 1, 1),
        )  # fmt: skip
        fault()

    def _proxy(self) -> Proxy:
        """The proxy of the current primary."""
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
        self._schedule(self._seconds(SWALLOW_S), proxy.cut)

    def _refuse(self) -> None:
        proxy = self._proxy()
        proxy.refuse()
        proxy.cut()
        self.done["refusals"] += 1
        self._schedule(self._seconds(REFUSE_S), lambda: proxy.refuse(False))

    def _kill_worker(self) -> None:
        worker = self.random.choice(self._workers)
        worker.proc.kill()
        worker.proc.close()
        self.done["workers killed"] += 1
        self._workers[self._workers.index(worker)] = self._start_worker(
            worker.name, worker.incarnation + 1
        )

    def _stop_worker(self) -> None:
        running = [worker for worker in self._workers if not worker.stopped]
        if len(running) > 1:
            worker = self.random.choice(running)
            worker.proc.stop()
            worker.stopped = True
            self.done["workers stopped"] += 1
            self._schedule(self._seconds(STOP_S), lambda: self._resume(worker))

    def _kill_client(self) -> None:
        client = self.random.choice(self._clients)
        client.proc.kill()
        client.proc.close()
        self.done["clients killed"] += 1
        self._clients[self._clients.index(client)] = self._start_client(
            client.name, client.incarnation + 1
        )

    def _resume(self, worker: _WorkerProcess) -> None:
        if worker in self._workers and worker.stopped:
            worker.proc.cont()
            worker.stopped = False

    def _seconds(self, between: tuple[float, float]) -> float:
        """A random duration within these bounds, in the time scale of the run."""
        return self.random.uniform(*between) * self._time_scale

    def _schedule(self, seconds: float, action: Callable[[], object]) -> None:
        self._scheduled.append((time.monotonic() + seconds, action))

    def _run_due(self, *, all: bool = False) -> None:
        for one in [one for one in self._scheduled if all or one[0] <= time.monotonic()]:
            self._scheduled.remove(one)
            one[1]()

    # -- processes ---------------------------------------------------------------------------------

    def _start_worker(self, name: str, incarnation: int) -> _WorkerProcess:
        caller = f"{name}#{incarnation}"
        options = ["--store", self.url, "--worker", name, "--lease-s", f"{LEASE_S:g}"]
        proc = python_proc(
            "holdfast.cli",
            "up",
            "tests.chaos.app:app",
            *options,
            ready=None,
            env={RECEIVER: str(self._receiver.path), CALLER: caller},
        )
        return _WorkerProcess(name, incarnation, proc)

    def _start_client(self, name: str, incarnation: int) -> _ClientProcess:
        full_name = f"{name}-{incarnation}"
        proc = python_proc(
            "tests.chaos.client", self.url, str(self._logs / f"{full_name}.log"), full_name,
            str(self.random.randrange(1 << 30)), f"{self._rate:g}",
            ready=None,
        )  # fmt: skip
        return _ClientProcess(name, incarnation, proc)

    def _check_progress(self) -> None:
        """Report a breach if a process has exited or no client has logged anything for STALL_MAX_S."""
        for one in (*self._workers, *self._clients):
            if not one.proc.running:
                code = one.proc.wait()
                output = " | ".join([*one.proc.lines[-3:], *one.proc.errors[-12:]])
                self.breaches.append(
                    f"{one.name}#{one.incarnation} ended by itself with {code}: {output}"
                )
        log_bytes = sum(path.stat().st_size for path in self._logs.iterdir())
        if log_bytes != self._last_progress[0]:
            self._last_progress = (log_bytes, time.monotonic())
        elif time.monotonic() - self._last_progress[1] > STALL_MAX_S:
            self.breaches.append(f"nothing went on for {STALL_MAX_S} s")

    # -- the end -----------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Stop the faults and wait until all work is complete. Then end the workers."""
        self._run_due(all=True)
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
        with self._open_runtime() as runtime:
            deadline = time.monotonic() + DRAIN_S
            while not invariant_checks.is_settled(runtime):
                self._check_progress()
                if self.breaches:
                    return
                if time.monotonic() > deadline:
                    self.breaches.append(f"not everything came to its end within {DRAIN_S} s")
                    return
                time.sleep(0.1)
        self._expect_ready()
        for worker in self._workers:
            # A worker that has just started does not handle signals yet.
            worker.expect_ready()
            worker.proc.terminate()
        for worker in self._workers:
            self._expect_end(worker)

    def _expect_ready(self) -> None:
        """Wait until `holdfast ready` succeeds. After the last fault a worker may still be reconnecting."""
        deadline = time.monotonic() + READY_S
        while True:
            with python_proc("holdfast.cli", "ready", "--store", self.url, ready=None) as proc:
                if proc.wait(READY_S) == 0:
                    return
            if time.monotonic() > deadline:
                self.breaches.append(f"not ready in the end: {proc.lines} {proc.errors}")
                return

    def _expect_end(self, one: _WorkerProcess | _ClientProcess) -> None:
        try:
            code = one.proc.wait(DRAIN_S)
        except ProcFailed as error:
            self.breaches.append(f"{one.name} does not end: {error}")
            return
        if code:
            output = " | ".join(one.proc.errors[-12:])
            self.breaches.append(f"{one.name}#{one.incarnation} ended with {code}: {output}")

    def _check_invariants(self) -> None:
        with self._open_runtime() as runtime:
            self.client_logs = invariant_checks.ClientLogs.read(self._logs)
            self.breaches += invariant_checks.breaches(runtime, self.client_logs, self._receiver)
        options = ["--store", self.direct, "--app", "tests.chaos.app:app", "--jobs", "1"]
        with python_proc("holdfast.cli", "verify", *options, ready=None) as verified:
            if verified.wait(DRAIN_S):
                self.breaches.append(f"holdfast verify: {verified.lines} {verified.errors}")

    @contextlib.contextmanager
    def _open_runtime(self) -> Iterator[Runtime]:
        runtime: Runtime = app.open(self.direct, roles=())
        with runtime:
            yield runtime


class _ChaosProcess:
    def __init__(self, name: str, incarnation: int, proc: Proc) -> None:
        self.name = name
        self.incarnation = incarnation
        self.proc = proc
        self.stopped = False


class _WorkerProcess(_ChaosProcess):
    def expect_ready(self) -> None:
        if not any(line.startswith("ready") for line in list(self.proc.lines)):
            self.proc.expect("ready", DRAIN_S)


class _ClientProcess(_ChaosProcess):
    pass


def _resume_all(frozen: list[OsProcess]) -> None:
    for process in frozen:
        process.cont()


def run(
    folder: Path,
    *,
    seconds: float,
    seed: int,
    server_faults_min: int = 0,
    workers: int = 3,
    clients: int = 2,
    rate: float = 8.0,
    server_fault_interval_s: tuple[float, float] = SERVER_FAULT_INTERVAL_S,
    time_scale: float = 1.0,
) -> PostgresChaosRun:
    with PostgresChaosRun(
        folder,
        seed=seed,
        workers=workers,
        clients=clients,
        rate=rate,
        server_fault_interval_s=server_fault_interval_s,
        time_scale=time_scale,
    ) as chaos:
        chaos.run(seconds, server_faults_min, lambda line: print(line, flush=True))
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

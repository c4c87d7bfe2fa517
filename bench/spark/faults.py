"""4,000 paid calls on a real two-worker cluster with a fault: naive Spark, then Stage.

- The cluster is a standalone one from the PySpark wheel, on two hosts that share only the directory of the
  benchmark (`tests/spark/hosts.py`; without root: on the loopback of this machine). The driver is on the
  first host. Every fault is a signal to a real process. The external log of calls times the faults, never
  a clock.
- Naive Spark is `mapInArrow` + `write.parquet` of the same function with as many threads per task.
- The output of a stage must have exactly the answers, in the order of the key, and its part files must be
  the same bytes as those of an undisturbed run. A scenario with another output is a failure, not a row
  of the table.
- Calls are repeated at most `flush_rows + concurrency` for each task in flight, for each fault.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from tests.process.watch import until
from tests.spark.clusters import Executor, SparkCluster, cluster
from tests.spark.driver_process import Driver
from tests.spark.hosts import NamespaceHost, assert_isolated, hosts
from tests.spark.job_driver import Done, Job
from tests.spark.paid_calls import Bill, answer, calls
from tests.spark.paid_output import WrongOutput, check_answers, keys_of, output_of, part_digests

ROWS = 4_000
POISON = 50
ATTEMPTS = 3
TASKS = 2
CONCURRENCY = 4
FLUSH_ROWS = 100
LEASE_S = 3.0
RUN_S = 300.0

SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "1.5",
}


# --- processes ----------------------------------------------------------------------------------


@dataclass
class JobRun:
    """One run of a scenario: a job of a driver on a cluster, and the log of its calls."""

    spark: SparkCluster
    driver: Driver
    job: Job
    config: dict[str, str]
    stack: contextlib.ExitStack
    host: NamespaceHost | None = None
    repaired: list[Callable[[], object]] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return Path(self.job.log)

    @property
    def is_stage(self) -> bool:
        return self.job.how.startswith("stage")

    def reached(self, share: float) -> None:
        """Wait until this share of the rows has been called."""
        until(lambda: calls(self.log) >= share * self.job.rows, "calls", RUN_S)

    def executors(self) -> list[Executor]:
        return self.spark.executors(self.driver.app_id)

    def caller(self) -> int:
        """A process that makes calls: the child of a task, or Spark's Python worker."""
        last = self.log.read_text("ascii").splitlines()[-1]
        return int(last.split()[2])

    def drive_again(self) -> None:
        self.driver = new_driver(self.spark.url, self.config, self.stack, self.host)
        self.driver.begin(self.job)


def new_driver(
    master: str,
    config: dict[str, str],
    stack: contextlib.ExitStack,
    host: NamespaceHost | None = None,
) -> Driver:
    driver = Driver(master, config, host)
    stack.enter_context(driver.proc)
    return driver.ready()


# --- the faults ---------------------------------------------------------------------------------


def nothing(run: JobRun) -> None:
    pass


def kill_executor(run: JobRun) -> None:
    run.reached(1 / 3)
    os.kill(run.executors()[0].pid, signal.SIGKILL)


def kill_worker(run: JobRun) -> None:
    run.reached(1 / 3)
    pid = run.executors()[0].worker_pid
    [worker] = [candidate for candidate in run.spark.workers if candidate.pid == pid]
    worker.kill()
    run.repaired.append(partial(run.spark.replace_worker, worker))


def stop_caller(run: JobRun) -> None:
    """Stop a caller until another process has called one of its rows, then continue it as a zombie."""
    run.reached(1 / 8)
    pid = run.caller()
    os.kill(pid, signal.SIGSTOP)
    try:
        until(
            lambda: Bill.read(run.log).called_elsewhere,
            "calls of the stopped caller's rows",
            RUN_S,
        )
    finally:
        os.kill(pid, signal.SIGCONT)


def kill_driver(run: JobRun) -> None:
    run.reached(1 / 2)
    run.driver.proc.kill()
    run.drive_again()


def kill_service(run: JobRun) -> None:
    if run.is_stage:
        run.reached(1 / 2)
        os.kill(run.driver.service(), signal.SIGKILL)


def kill_both(run: JobRun) -> None:
    run.reached(1 / 2)
    service = run.driver.service()
    os.kill(run.driver.proc.pid, signal.SIGKILL)
    if service:
        os.kill(service, signal.SIGKILL)
    run.driver.proc.wait()
    run.drive_again()


# --- scenarios ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    name: str
    what: str
    fault: Callable[[JobRun], None] = nothing
    # How often a task in flight is lost. The bound of repeated calls applies to each loss.
    faults: int = 1
    speculation: bool = False
    changes: dict[str, Any] = field(default_factory=dict)
    reference: str = "undisturbed"
    has_naive: bool = True
    ordered: bool = False


_POISON = [at * (ROWS // POISON) + 5 for at in range(POISON)]

SCENARIOS = (
    Scenario("undisturbed", "no fault", faults=0),
    Scenario("executor", "SIGKILL of an executor", kill_executor),
    Scenario("worker", "SIGKILL of a Worker daemon, whose executor goes with it", kill_worker),
    Scenario("service", "SIGKILL of the ledger service, which restarts", kill_service,
             has_naive=False),
    Scenario("poison", f"{POISON} rows that SIGKILL their interpreter, {ATTEMPTS} attempts each",
             faults=POISON * ATTEMPTS, changes={"poison": _POISON}, reference="failing"),
    Scenario("ordered", "`orderBy` and a self-join after the stage", faults=0, ordered=True),
    Scenario("driver", "SIGKILL of the driver, run again", kill_driver),
    Scenario("both", "SIGKILL of driver and ledger service, run again", kill_both),
    Scenario("slow", "speculation, and one node 20 × slower", faults=0, speculation=True,
             changes={"slow_node": "1"}),
    Scenario("zombie", f"a caller SIGSTOPped beyond its lease of {LEASE_S:g} s, then continued; "
             "speculation on", stop_caller, speculation=True, changes={"lease_s": LEASE_S}),
)  # fmt: skip

# Fault-free runs of the stage whose part files must be the same bytes.
REFERENCES = {"undisturbed": {}, "failing": {"poison": _POISON, "mild": True}}
PARTITIONINGS: dict[str, dict[str, Any]] = {
    "input in 1 partition": {"parts": 1, "shuffled": True},
    "input in 3 partitions": {"parts": 3, "shuffled": True},
    "input in 17 partitions": {"parts": 17, "shuffled": True},
    "1 task": {"tasks": 1},
    "2 tasks": {"tasks": 2},
    "5 tasks": {"tasks": 5},
}


class ScenarioOutcome(msgspec.Struct):
    """The outcome of one run. `rows` counts its output, `distinct` excludes duplicates."""

    rows: int
    distinct: int
    calls: int
    repeated: int
    wall_s: float
    error: str = ""
    failed: int = 0
    reclaims: int = 0
    fenced: int = 0


class Line(msgspec.Struct):
    """The table line of a scenario."""

    name: str
    what: str
    bound: int
    stage: ScenarioOutcome
    naive: ScenarioOutcome | None = None
    identical: bool | None = None


class Bench:
    """All scenarios on one cluster, with a driver for each required configuration."""

    def __init__(self, directory: Path, rows: int = ROWS, say: Callable[[str], None] = print):
        self.directory = directory
        self.rows = rows
        self.say = say
        self.references: dict[str, dict[str, str]] = {}
        self._count = 0
        # The host of the drivers: the first of two hosts, or this machine.
        self._host: NamespaceHost | None = None
        # Whether the Workers are on separate hosts.
        self.on_hosts = False

    def run(self, scenarios: list[Scenario], until_s: float) -> Iterator[Line]:
        with contextlib.ExitStack() as stack:
            spark = self._cluster("cluster", stack)
            for speculation in (False, True):
                these = [
                    candidate for candidate in scenarios if candidate.speculation is speculation
                ]
                if not these or time.monotonic() > until_s:
                    continue
                config = {**spark.config, **(SPECULATION if speculation else {})}
                with contextlib.ExitStack() as drivers:
                    driver = new_driver(spark.url, config, drivers, self._host)
                    for scenario in these:
                        if time.monotonic() > until_s:
                            self.say(f"{scenario.name}: skipped, the budget is used up")
                            continue
                        line, driver = self._scenario(scenario, spark, driver, config, drivers)
                        yield line

    def partitionings(self, until_s: float) -> Iterator[str]:
        """Names of the partitionings whose part files equal those of the undisturbed run."""
        with contextlib.ExitStack() as stack:
            spark = self._cluster("cluster-2", stack)
            driver = new_driver(spark.url, spark.config, stack, self._host)
            for name, changes in PARTITIONINGS.items():
                if time.monotonic() > until_s:
                    self.say(f"{name}: skipped, the budget is used up")
                    continue
                job = self._job("stage", "partitioning", changes)
                self._reference("undisturbed", spark, driver, spark.config, stack)
                self._run_job(JobRun(spark, driver, job, spark.config, stack, self._host), nothing)
                self._same(job, "undisturbed")
                yield name

    def _cluster(self, name: str, stack: contextlib.ExitStack) -> SparkCluster:
        if os.geteuid() != 0:
            return stack.enter_context(cluster(self.directory / name))
        shared = {str(self.directory): self.directory}
        # The directories of the hosts are not below the shared directory.
        apart = stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-hosts-"))
        both = stack.enter_context(hosts(Path(apart), shared=shared))
        assert_isolated(*both)
        self._host, self.on_hosts = both[0], True
        return stack.enter_context(cluster(self.directory / name, on=both))

    # --- one scenario -----------------------------------------------------------------------

    def _scenario(
        self,
        scenario: Scenario,
        spark: SparkCluster,
        driver: Driver,
        config: dict[str, str],
        stack: contextlib.ExitStack,
    ) -> tuple[Line, Driver]:
        naive: ScenarioOutcome | None = None
        if not scenario.ordered:
            self._reference(scenario.reference, spark, driver, config, stack)
        ordered = "-ordered" if scenario.ordered else ""
        if scenario.has_naive:
            job = self._job(f"naive{ordered}", scenario.name, scenario.changes)
            run = JobRun(spark, driver, job, config, stack, self._host)
            done = self._run_job(run, scenario.fault)
            naive, driver = self._naive(job, done), run.driver
        job = self._job(f"stage{ordered}", scenario.name, scenario.changes)
        run = JobRun(spark, driver, job, config, stack, self._host)
        stage = self._stage(job, self._run_job(run, scenario.fault))
        if not scenario.ordered:
            self._same(job, scenario.reference)
        bound = (FLUSH_ROWS + CONCURRENCY) * (
            scenario.faults if scenario.changes.get("poison") else scenario.faults * TASKS
        )
        identical = None if scenario.ordered else True
        return Line(scenario.name, scenario.what, bound, stage, naive, identical), run.driver

    def _job(self, how: Any, name: str, changes: dict[str, Any]) -> Job:
        self._count += 1
        home = self.directory / f"{self._count:02d}-{name}-{how}"
        home.mkdir()
        return Job(
            how=how,
            name=f"{name}-{self._count}",
            log=str(home / "calls.log"),
            store=str(self.directory / "store"),
            output=str(home / "output"),
            rows=self.rows,
            concurrency=CONCURRENCY,
            flush_rows=FLUSH_ROWS,
            **changes,
        )

    def _run_job(self, run: JobRun, fault: Callable[[JobRun], None]) -> Done:
        run.driver.begin(run.job)
        fault(run)
        done = run.driver.end()
        for repair in run.repaired:
            repair()
        return done

    def _reference(
        self,
        name: str,
        spark: SparkCluster,
        driver: Driver,
        config: dict[str, str],
        stack: contextlib.ExitStack,
    ) -> None:
        if name not in self.references:
            job = self._job("stage", name, REFERENCES[name])
            done = self._run_job(JobRun(spark, driver, job, config, stack, self._host), nothing)
            self._stage(job, done)
            self.references[name] = part_digests(Path(job.output))

    def _same(self, job: Job, reference: str) -> None:
        digests, expected = part_digests(Path(job.output)), self.references[reference]
        if digests != expected:
            other = sorted(name for name in digests.keys() | expected.keys()
                           if digests.get(name) != expected.get(name))  # fmt: skip
            raise WrongOutput(f"{job.name}: other bytes in {other}")

    def _naive(self, job: Job, done: Done) -> ScenarioOutcome:
        bill = Bill.read(Path(job.log))
        files = sorted(Path(job.output).glob("part-*.parquet"))
        complete = (Path(job.output) / "_SUCCESS").exists()
        keys = keys_of(pa.concat_tables(map(pq.read_table, files))) if files and complete else []
        return ScenarioOutcome(
            len(keys), len(set(keys)), bill.calls, bill.repeated, done.wall_s, done.error
        )

    def _stage(self, job: Job, done: Done) -> ScenarioOutcome:
        """The figures of a stage. Raises if the output is not exactly right."""
        if done.error:
            raise WrongOutput(f"{job.name}: {done.error}")
        bill = Bill.read(Path(job.log))
        poison = set(job.poison)
        keys = [key for key in range(job.rows) if key not in poison]
        if job.how == "stage":
            output = output_of(Path(job.output))
        else:
            keys.sort(key=answer)
            output = pq.read_table(job.output)
            if done.joined != job.rows:
                raise WrongOutput(f"{job.name}: the self-join has {done.joined} rows")
        check_answers(job.name, output, keys)
        failed = done.counts.get("TERMINAL_FAIL", 0)
        if failed != len(poison):
            raise WrongOutput(f"{job.name}: {failed} rows failed")
        return ScenarioOutcome(
            output.num_rows,
            len(set(keys_of(output))),
            bill.calls,
            bill.repeated,
            done.wall_s,
            failed=failed,
            reclaims=done.reclaims,
            fenced=done.fenced,
        )

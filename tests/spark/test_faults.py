"""Faults during a stage: the output has the same bytes, and the number of repeated calls is bounded.

The tests use a real two-worker cluster, or `local[2]` for tests of a local session. A log outside Spark and the store
has one line per call. Faults are timed by this log. `make bench-spark` runs the same with five times the calls and
more kinds of faults, and compares with naive Spark.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from holdfast.spark import Stage
from holdfast.spark.run import Run
from tests.process.watch import os_process, until
from tests.spark.clusters import SparkCluster, service_pid
from tests.spark.conftest import LOCAL
from tests.spark.driver_process import Driver
from tests.spark.job_driver import Job
from tests.spark.paid_calls import SCHEMA, Bill, PaidCall, answer, calls
from tests.spark.paid_output import check_answers, output_of, part_digests

ROWS = 800
FILE_ROWS = 100
CONCURRENCY = 4
FLUSH_ROWS = 20
TASKS = 2
# The maximum of repeated calls per fault and running task.
REPEATED_MAX_PER_TASK = FLUSH_ROWS + CONCURRENCY
ATTEMPTS = 3
POISON = [5, 6, 333, 500, 799]
LEASE_S = 2.0
RUN_S = 100.0

# The time-out includes the start of sessions and clusters, which is most of the time on a busy machine.
pytestmark = [pytest.mark.timeout(400), pytest.mark.xdist_group("cluster")]


@pytest.fixture(scope="module")
def spark(cluster_spark: SparkSession) -> SparkSession:
    return cluster_spark


@pytest.fixture(scope="module")
def undisturbed(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, str]]:
    """The part digests of runs without a fault: with all rows, and with all but the poison rows."""
    digests = {}
    for name, poison in (("all", ()), ("failing", POISON)):
        trial = FaultTrial(spark, tmp_path_factory.mktemp(name), poison=poison, mild=True)
        trial.run()
        assert Bill.read(trial.log).repeated == 0
        digests[name] = trial.checked_digests()
    return digests


@dataclass
class FaultTrial:
    """A stage that runs in a separate thread."""

    spark: SparkSession
    directory: Path
    poison: Any = ()
    mild: bool = False
    lease_s: float = 15.0
    tasks: int = 0
    parts: int = 8
    result: Run | None = None
    error: list[BaseException] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return self.directory / "calls.log"

    @property
    def output(self) -> Path:
        return self.directory / "output"

    def stage(self) -> Stage:
        return Stage(
            "paid",
            PaidCall(str(self.log), poison=frozenset(self.poison), mild=self.mild),
            key="id",
            schema=SCHEMA,
            store=str(self.directory / "store"),
            attempts=ATTEMPTS,
            concurrency=CONCURRENCY,
            flush_rows=FLUSH_ROWS,
            file_rows=FILE_ROWS,
            lease_s=self.lease_s,
            tasks=self.tasks,
            progress="quiet",
        )

    def run(self, fault: Callable[[], object] = lambda: None) -> None:
        """Run the stage to its end and inject `fault` while it runs."""
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        fault()
        thread.join(RUN_S)
        assert not thread.is_alive()
        if self.error:
            raise self.error[0]

    def _run(self) -> None:
        try:
            df = self.spark.range(0, ROWS, 1, self.parts).repartition(self.parts)
            with self.stage().run(df, output=self.output) as run:
                self.result = run
                assert run.counts()["TERMINAL_FAIL"] == len(self.poison)
        except BaseException as error:
            self.error.append(error)

    def wait_for_calls(self, count: int) -> None:
        until(lambda: calls(self.log) >= count or self.error, f"{count} calls", RUN_S)

    def checked_digests(self) -> dict[str, str]:
        """Check that the part files contain every answer once and in order, and return their digests."""
        poison = set(self.poison)
        expected_keys = [key for key in range(ROWS) if key not in poison]
        check_answers("paid", output_of(self.output), expected_keys)
        return part_digests(self.output)


def test_killed_executor_repeats_only_the_begun_calls_of_its_task(
    spark: SparkSession,
    two_workers: SparkCluster,
    undisturbed: dict[str, dict[str, str]],
    tmp_path: Path,
) -> None:
    trial = FaultTrial(spark, tmp_path)

    def kill() -> None:
        trial.wait_for_calls(ROWS // 3)
        os.kill(two_workers.executors(spark.conf.get("spark.app.id"))[0].pid, signal.SIGKILL)

    trial.run(kill)
    assert trial.checked_digests() == undisturbed["all"]
    assert Bill.read(trial.log).repeated <= REPEATED_MAX_PER_TASK


def test_child_paused_beyond_its_lease_is_fenced(
    spark: SparkSession, undisturbed: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    trial = FaultTrial(spark, tmp_path, lease_s=LEASE_S)

    def stop() -> None:
        trial.wait_for_calls(ROWS // 4)
        zombie = os_process(int(trial.log.read_text().split()[-1]))
        assert zombie.stop()
        until(lambda: Bill.read(trial.log).called_elsewhere, "calls of its rows", RUN_S)
        zombie.cont()

    trial.run(stop)
    assert trial.checked_digests() == undisturbed["all"]
    assert Bill.read(trial.log).repeated <= REPEATED_MAX_PER_TASK


def test_killed_ledger_service_restarts_without_repeated_calls(
    spark: SparkSession, undisturbed: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    trial = FaultTrial(spark, tmp_path)

    def kill() -> None:
        trial.wait_for_calls(ROWS // 3)
        os.kill(service_pid(os.getpid(), trial.directory / "store"), signal.SIGKILL)

    trial.run(kill)
    assert trial.checked_digests() == undisturbed["all"]
    assert Bill.read(trial.log).repeated == 0


def test_rows_that_kill_their_interpreter_fail_alone_on_a_cluster(
    spark: SparkSession, undisturbed: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    trial = FaultTrial(spark, tmp_path, poison=POISON)
    trial.run()
    assert trial.checked_digests() == undisturbed["failing"]
    bill = Bill.read(trial.log)
    # A row that was begun when another row killed the interpreter has used an attempt, too.
    assert all(1 <= bill.by_key[key] <= ATTEMPTS for key in POISON)
    assert bill.repeated <= REPEATED_MAX_PER_TASK * ATTEMPTS * len(POISON)


def test_sort_and_self_join_of_the_lazy_form_call_each_row_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    trial = FaultTrial(spark, tmp_path)
    lazy = spark.range(0, ROWS, 1, 8).transform(trial.stage())
    rows = lazy.orderBy("answer").collect()
    assert [row.id for row in rows] == sorted(range(ROWS), key=answer)
    assert lazy.alias("a").join(lazy.alias("b"), "id").count() == ROWS
    assert Bill.read(trial.log).calls == ROWS


@pytest.mark.parametrize(("parts", "tasks"), [(17, 5), pytest.param(1, 1, marks=pytest.mark.deep)])
def test_output_bytes_do_not_depend_on_partitions_and_tasks(
    spark: SparkSession,
    undisturbed: dict[str, dict[str, str]],
    tmp_path: Path,
    parts: int,
    tasks: int,
) -> None:
    trial = FaultTrial(spark, tmp_path, parts=parts, tasks=tasks)
    trial.run()
    assert trial.checked_digests() == undisturbed["all"]
    assert Bill.read(trial.log).repeated == 0


# --- in local[2], in a process that can be killed ---------------------------------------------


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    bench_driver = Driver("local[2]", LOCAL)
    with bench_driver.proc:
        yield bench_driver.ready()


def local_job(directory: Path, poison: list[int]) -> Job:
    return Job(
        how="stage",
        name="paid",
        log=str(directory / "calls.log"),
        store=str(directory / "store"),
        output=str(directory / "output"),
        rows=ROWS,
        concurrency=CONCURRENCY,
        flush_rows=FLUSH_ROWS,
        file_rows=FILE_ROWS,
        poison=poison,
    )


@pytest.mark.deep
def test_rows_that_kill_their_interpreter_fail_alone_in_a_local_session(
    driver: Driver, undisturbed: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    driver.begin(local_job(tmp_path, POISON))
    done = driver.end()
    assert done.error == ""
    assert done.counts["TERMINAL_FAIL"] == len(POISON)
    assert part_digests(tmp_path / "output") == undisturbed["failing"]
    assert Bill.read(tmp_path / "calls.log").repeated <= REPEATED_MAX_PER_TASK * ATTEMPTS * len(
        POISON
    )


def test_restarted_driver_repeats_only_begun_calls(
    spark: SparkSession,
    driver: Driver,
    undisturbed: dict[str, dict[str, str]],
    tmp_path: Path,
) -> None:
    driver.begin(local_job(tmp_path, []))  # the last job of this driver
    until(lambda: calls(tmp_path / "calls.log") >= ROWS // 2, "calls", RUN_S)
    driver.proc.kill()
    # This process is the second driver, on the cluster.
    trial = FaultTrial(spark, tmp_path)
    trial.run()
    assert trial.checked_digests() == undisturbed["all"]
    assert Bill.read(trial.log).repeated <= REPEATED_MAX_PER_TASK * TASKS


def test_check_answers_finds_missing_duplicate_and_misplaced_rows() -> None:
    def table(keys: list[int]) -> pa.Table:
        return pa.table({"id": keys, "answer": [answer(key) for key in keys]})

    check_answers("good", table([0, 1, 2]), [0, 1, 2])
    for bad in ([0, 2], [0, 1, 1, 2], [1, 0, 2]):
        with pytest.raises(Exception, match="missing"):
            check_answers("bad", table(bad), [0, 1, 2])

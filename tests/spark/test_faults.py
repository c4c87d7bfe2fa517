"""Whatever dies while a stage runs: the output is the same bytes, and hardly a call is paid twice.

On a real two-worker cluster, or in `local[2]` where that is the point. The bill is a log outside of
Spark and of the store, a line a call; faults are timed by it. `make bench-spark` does the same with
five times the calls and more kinds of faults, beside naive Spark.
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

from bench.spark import report
from bench.spark.calls import SCHEMA, Bill, Paid, answer, calls
from bench.spark.driver import Job
from bench.spark.faults import Driver, Line, Seen, check_answers, output_of, part_digests
from bench.spark.speed import Figure
from holdfast.spark import Stage
from holdfast.spark.run import Run
from holdfast.spark.session import session
from tests.process.watch import seen, until
from tests.spark.clusters import Cluster, cluster, service_of
from tests.spark.conftest import LOCAL

ROWS = 800
FILE_ROWS = 100
CONCURRENCY = 4
FLUSH_ROWS = 20
TASKS = 2
# A fault may cost so many calls for each task in flight.
BOUND = FLUSH_ROWS + CONCURRENCY
ATTEMPTS = 3
POISON = [5, 6, 333, 500, 799]
LEASE_S = 2.0
RUN_S = 100.0

# Sessions and clusters start up in here: on a busy machine that is most of the time.
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture(scope="module")
def spark(two_workers: Cluster) -> Iterator[SparkSession]:
    made = session(two_workers.url, app="tests", config=two_workers.config)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def undisturbed(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, str]]:
    """The part files of runs without a fault: of all rows, and of all but the poisonous ones."""
    found = {}
    for name, poison in (("all", ()), ("failing", POISON)):
        trial = Trial(spark, tmp_path_factory.mktemp(name), poison=poison, mild=True)
        trial.run()
        assert Bill.read(trial.log).repeated == 0
        found[name] = trial.checked()
    return found


@dataclass
class Trial:
    """A stage at work in a thread of its own."""

    spark: SparkSession
    home: Path
    poison: Any = ()
    mild: bool = False
    lease_s: float = 15.0
    tasks: int = 0
    parts: int = 8
    result: Run | None = None
    error: list[BaseException] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return self.home / "calls.log"

    @property
    def output(self) -> Path:
        return self.home / "output"

    def stage(self) -> Stage:
        return Stage(
            "paid",
            Paid(str(self.log), poison=frozenset(self.poison), mild=self.mild),
            key="id",
            schema=SCHEMA,
            store=str(self.home / "store"),
            attempts=ATTEMPTS,
            concurrency=CONCURRENCY,
            flush_rows=FLUSH_ROWS,
            file_rows=FILE_ROWS,
            lease_s=self.lease_s,
            tasks=self.tasks,
            progress="quiet",
        )

    def run(self, fault: Callable[[], object] = lambda: None) -> None:
        """Run it to its end, with a fault amid it."""
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

    def reached(self, count: int) -> None:
        until(lambda: calls(self.log) >= count or self.error, f"{count} calls", RUN_S)

    def checked(self) -> dict[str, str]:
        """The digests of its part files, which hold every answer once and in order."""
        poison = set(self.poison)
        wanted = [key for key in range(ROWS) if key not in poison]
        check_answers("paid", output_of(self.output), wanted)
        return part_digests(self.output)


def test_an_executor_that_is_killed_costs_what_its_task_had_begun(
    spark: SparkSession,
    two_workers: Cluster,
    undisturbed: dict[str, dict[str, str]],
    tmp_path: Path,
) -> None:
    trial = Trial(spark, tmp_path)

    def kill() -> None:
        trial.reached(ROWS // 3)
        os.kill(two_workers.executors(spark.conf.get("spark.app.id"))[0].pid, signal.SIGKILL)

    trial.run(kill)
    assert trial.checked() == undisturbed["all"]
    assert Bill.read(trial.log).repeated <= BOUND


def test_a_child_that_is_stopped_beyond_its_lease_and_continued_spoils_nothing(
    spark: SparkSession, undisturbed: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    trial = Trial(spark, tmp_path, lease_s=LEASE_S)

    def stop() -> None:
        trial.reached(ROWS // 4)
        zombie = seen(int(trial.log.read_text().split()[-1]))
        assert zombie.stop()
        until(lambda: Bill.read(trial.log).called_elsewhere, "calls of its rows", RUN_S)
        zombie.cont()

    trial.run(stop)
    assert trial.checked() == undisturbed["all"]
    assert Bill.read(trial.log).repeated <= BOUND


def test_a_ledger_service_that_is_killed_comes_back_and_nothing_is_called_again(
    spark: SparkSession, undisturbed: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    trial = Trial(spark, tmp_path)

    def kill() -> None:
        trial.reached(ROWS // 3)
        os.kill(service_of(os.getpid(), trial.home / "store"), signal.SIGKILL)

    trial.run(kill)
    assert trial.checked() == undisturbed["all"]
    assert Bill.read(trial.log).repeated == 0


def test_rows_that_kill_their_interpreter_fail_alone_on_a_cluster(
    spark: SparkSession, undisturbed: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    trial = Trial(spark, tmp_path, poison=POISON)
    trial.run()
    assert trial.checked() == undisturbed["failing"]
    bill = Bill.read(trial.log)
    # A row that was begun when another one killed the interpreter has used up an attempt, too.
    assert all(1 <= bill.by_key[key] <= ATTEMPTS for key in POISON)
    assert bill.repeated <= BOUND * ATTEMPTS * len(POISON)


def test_sorting_and_a_self_join_after_the_stage_call_each_row_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    trial = Trial(spark, tmp_path)
    lazy = spark.range(0, ROWS, 1, 8).transform(trial.stage())
    rows = lazy.orderBy("answer").collect()
    assert [row.id for row in rows] == sorted(range(ROWS), key=answer)
    assert lazy.alias("a").join(lazy.alias("b"), "id").count() == ROWS
    assert Bill.read(trial.log).calls == ROWS


@pytest.mark.parametrize(("parts", "tasks"), [(1, 1), (17, 5)])
def test_the_bytes_of_the_output_do_not_depend_on_partitions_and_tasks(
    spark: SparkSession,
    undisturbed: dict[str, dict[str, str]],
    tmp_path: Path,
    parts: int,
    tasks: int,
) -> None:
    trial = Trial(spark, tmp_path, parts=parts, tasks=tasks)
    trial.run()
    assert trial.checked() == undisturbed["all"]
    assert Bill.read(trial.log).repeated == 0


# --- in local[2], in a process that can be killed ---------------------------------------------


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    made = Driver("local[2]", LOCAL)
    with made.proc:
        yield made.ready()


def local_job(home: Path, poison: list[int]) -> Job:
    return Job(
        how="stage",
        name="paid",
        log=str(home / "calls.log"),
        store=str(home / "store"),
        output=str(home / "output"),
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
    assert Bill.read(tmp_path / "calls.log").repeated <= BOUND * ATTEMPTS * len(POISON)


def test_a_driver_that_is_killed_and_run_again_pays_for_what_was_begun(
    driver: Driver, undisturbed: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    job = local_job(tmp_path, [])  # the last one of this driver
    driver.begin(job)
    until(lambda: calls(tmp_path / "calls.log") >= ROWS // 2, "calls", RUN_S)
    driver.proc.kill()
    second = Driver("local[2]", LOCAL)
    with second.proc:
        second.ready().begin(job)
        done = second.end()
    assert done.error == ""
    assert part_digests(tmp_path / "output") == undisturbed["all"]
    assert Bill.read(tmp_path / "calls.log").repeated <= BOUND * TASKS


def test_the_check_of_an_output_sees_a_missing_a_doubled_and_a_misplaced_row() -> None:
    def table(keys: list[int]) -> pa.Table:
        return pa.table({"id": keys, "answer": [answer(key) for key in keys]})

    check_answers("good", table([0, 1, 2]), [0, 1, 2])
    for bad in ([0, 2], [0, 1, 1, 2], [1, 0, 2]):
        with pytest.raises(Exception, match="missing"):
            check_answers("bad", table(bad), [0, 1, 2])


def test_tables_go_between_their_markers_and_the_text_around_them_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    seen_by = Seen(4000, 4000, 4004, 4, 1.5)
    aborted = Seen(0, 0, 360, 240, 4.0, "aborted")
    line = Line("poison", "50 rows", 208, seen_by, aborted, True)
    figure = Figure("batch", "a million rows", [3.0, 2.0], [1.0, 2.0], ratio_max=3.0)
    for hosts, told in ((True, "on two hosts"), (False, "two hosts need root")):
        table = report.faults([line], ["1 task"], 0.1, "make bench-spark", hosts=hosts)
        assert told in table
        report.write("faults", table, page)
    page.write_text(page.read_text() + "\nby hand\n")
    report.write("speed", report.speed([figure], 0.1, "make bench-spark"), page)
    report.write("faults", "again", page)
    text = page.read_text()
    assert text.startswith("# Stage beside naive Spark")
    assert text.endswith("\nby hand\n")
    assert "| a million rows | 1.50 s | 2.50 s | 2.00 (1.00 … 3.00) | ≤ 3 × | yes |" in text
    assert "50 rows" not in text
    assert "<!-- faults:begin -->\nagain\n<!-- faults:end -->" in text

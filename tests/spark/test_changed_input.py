"""Changed input on Spark: only new and changed rows are called, and the output equals a run from scratch.

An external HTTP server counts the calls and records the idempotency keys of each (key, content).
"""

from __future__ import annotations

import http.server
import json
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession

from holdfast.ledger import runs
from holdfast.spark import Stage
from holdfast.spark.errors import InputChanged, NotAStage, RunChanged
from holdfast.spark.sinks import DeltaSink, ParquetSink
from holdfast.store import open as open_store
from tests.deep_variants import deep_after
from tests.processes import python_proc
from tests.spark.row_functions import LabelOverHttp

InputRows = dict[int, int]
SCHEMA = "label string"


class CallCountingServer(http.server.ThreadingHTTPServer):
    """Answers each call and records its row and idempotency key."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _CountingHandler)
        self.calls: Counter[tuple[int, int]] = Counter()
        self.keys: dict[tuple[int, int], set[str]] = defaultdict(set)
        self.changed = threading.Condition()
        self.poison = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class _CountingHandler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        assert isinstance(server, CallCountingServer)
        row = (request["id"], request["text"])
        with server.changed:
            server.calls[row] += 1
            server.keys[row].add(request["key"])
            server.changed.notify_all()
        body = json.dumps({"label": label(*row), "poison": server.poison}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


def label(key: int, text: int) -> str:
    return f"{key}/{text}"


def ends_without_failure(text: int) -> bool:
    return text % 7 == 6 or text % 11 != 10


def expected_output(input_rows: InputRows) -> list[tuple[int, str]]:
    return [
        (key, label(key, text))
        for key, text in sorted(input_rows.items())
        if text % 7 != 6 and text % 11 != 10
    ]


@pytest.fixture
def server() -> Iterator[CallCountingServer]:
    counting_server = CallCountingServer()
    thread = threading.Thread(target=counting_server.serve_forever, daemon=True)
    thread.start()
    yield counting_server
    counting_server.shutdown()
    counting_server.server_close()
    thread.join()


def make_stage(server: CallCountingServer, store: Path, **options: Any) -> Stage:
    options = {"concurrency": 4, "flush_rows": 8, "attempts": 1, "progress": "quiet"} | options
    return Stage(
        "grow", LabelOverHttp(server.url), key="id", schema=SCHEMA, store=store, tasks=2, **options
    )


def frame(spark: SparkSession, input_rows: InputRows, note: int = 0) -> DataFrame:
    rows = [(key, text, note) for key, text in input_rows.items()]
    random.Random(len(rows)).shuffle(rows)
    return spark.createDataFrame(rows, "id long, text long, note long").repartition(2)


def output_rows(df: DataFrame) -> list[tuple[int, str]]:
    return [(row.id, row.label) for row in df.collect()]


def sorted_ids(df: DataFrame) -> list[int]:
    return sorted(row.id for row in df.collect())


def test_changed_input_is_refused_without_changed_extend(
    spark: SparkSession, server: CallCountingServer, tmp_path: Path
) -> None:
    stage = make_stage(server, tmp_path / "store")
    first = {n: n for n in range(30)}
    stage.run(frame(spark, first)).close()
    grown = frame(spark, {**first, 30: 30})
    with pytest.raises(InputChanged):
        stage.run(grown)
    with pytest.raises(NotAStage, match="changed"):
        stage.run(grown, changed="grow")  # type: ignore[arg-type]
    with pytest.raises(NotAStage, match="match"):
        stage.run(grown, changed="extend", match=["texts"])
    other = make_stage(server, tmp_path / "store", version="2")
    with pytest.raises(RunChanged) as refused:
        other.run(grown, changed="extend")
    assert refused.value.fields["what"] == "version"
    assert sum(server.calls.values()) == 30


def test_extended_run_counts_reused_new_changed_and_gone_rows(
    spark: SparkSession, server: CallCountingServer, tmp_path: Path
) -> None:
    stage = make_stage(server, tmp_path / "store")
    first = {n: n for n in range(40)}
    out = ParquetSink(tmp_path / "out", grace_s=0)
    with stage.run(frame(spark, first), output=out) as run:
        assert output_rows(run.output()) == expected_output(first)
        assert sorted_ids(run.reused()) == sorted_ids(run.changed()) == sorted_ids(run.gone()) == []
    # 10, 21 and 32 are poison. 3 and 4 are removed, 5 is changed, 100 and -1 are new.
    second = {n: n for n in range(40) if n not in (3, 4)} | {5: 500, 100: 1, -1: 1}
    plan = stage.explain(frame(spark, second))
    assert (plan.rows, plan.reused, plan.new, plan.changed) == (40, 34, 2, 1)
    assert (plan.failed, plan.gone, plan.to_call, plan.cost) == (3, 2, 6, 3.0)
    assert "40 rows: 34 reused, 2 new, 1 changed, 3 failed, 2 gone" in str(plan)
    assert sum(server.calls.values()) == 40, "asking calls nothing"
    with stage.run(frame(spark, second), output=out, changed="extend") as run:
        assert output_rows(run.output()) == expected_output(second)
        read = spark.read.parquet(str(tmp_path / "out")).orderBy("id")
        assert output_rows(read) == expected_output(second), "a plain listing has the same rows"
        assert sorted_ids(run.gone()) == [3, 4]
        assert sorted_ids(run.changed()) == [5]
        assert sorted_ids(run.reused()) == [n for n in range(40) if n not in (3, 4, 5, 10, 21, 32)]
        assert run.progress().reused == 34
        assert sorted_ids(run.failed()) == [10, 21, 32]
    assert sum(server.calls.values()) == 46
    # It is the latest run of the name: the same input again makes no call.
    with stage.run(frame(spark, second), output=out) as run:
        assert run.progress().calls == 6
    assert all(len(keys) == 1 for keys in server.keys.values())


def test_stages_that_share_a_delta_table_replace_only_their_own_rows(
    spark: SparkSession, server: CallCountingServer, tmp_path: Path
) -> None:
    def run(name: str, input_rows: InputRows) -> None:
        stage = Stage(
            name,
            LabelOverHttp(server.url),
            key="id",
            schema=SCHEMA,
            store=tmp_path / "store",
            progress="quiet",
        )
        table = DeltaSink(tmp_path / "table", append=True)
        stage.run(frame(spark, input_rows), output=table, changed="extend").close()

    first, second = dict.fromkeys(range(8), 1), dict.fromkeys(range(100, 106), 2)
    run("first", first)
    run("second", second)
    # The other stage wrote the newest rows of the table.
    first = {key: 3 if key == 2 else 1 for key in range(12) if key != 5}
    run("first", first)
    second[104] = 4
    run("second", second)
    table_rows = DeltaTable(tmp_path / "table").to_pyarrow_table().to_pylist()
    assert sorted((row["id"], row["label"]) for row in table_rows) == expected_output(
        first | second
    )
    assert sum(server.calls.values()) == 8 + 6 + 5 + 1


def test_match_columns_decide_which_rows_are_changed(
    spark: SparkSession, server: CallCountingServer, tmp_path: Path
) -> None:
    stage = make_stage(server, tmp_path / "store")
    input_rows = dict.fromkeys(range(20), 1)
    stage.run(frame(spark, input_rows)).close()
    # The first run was hashed over all columns. It is hashed again over the match columns.
    noted = frame(spark, {**input_rows, 20: 1}, note=1)
    with stage.run(noted, changed="extend", match=["text"]) as run:
        assert len(sorted_ids(run.reused())) == 20
        assert sorted_ids(run.changed()) == []
    assert sum(server.calls.values()) == 21
    with stage.run(frame(spark, input_rows, note=2), changed="extend") as run:
        assert len(sorted_ids(run.changed())) == 20
    assert sum(server.calls.values()) == 41
    # The outcomes of the first note are still stored.
    with stage.run(frame(spark, input_rows), changed="extend") as run:
        assert len(sorted_ids(run.reused())) == 20
    assert sum(server.calls.values()) == 41


def test_retry_keeps_seqs_and_idempotency_keys(
    spark: SparkSession, server: CallCountingServer, tmp_path: Path
) -> None:
    stage = make_stage(server, tmp_path / "store")
    input_rows = {n: n for n in range(30)}
    out = ParquetSink(tmp_path / "out", grace_s=0)
    with stage.run(frame(spark, input_rows), output=out) as run:
        failed = {row.id: row._seq for row in run.failed().collect()}
        first = run.run_id
    assert failed == {10: 10, 21: 21}
    server.poison = False
    with open_store(str(tmp_path / "store")) as store:
        store.transact(runs.request_retry, first)
    with stage.resume(spark) as run:
        assert run.run_id != first
        assert sorted_ids(run.failed()) == []
        assert len(output_rows(run.output())) == sum(1 for n in input_rows.values() if n % 7 != 6)
        assert run.progress().calls == 2
        read = spark.read.parquet(str(tmp_path / "out"))
        assert sorted_ids(read) == [row[0] for row in output_rows(run.output())]
    assert all(len(keys) == 1 for keys in server.keys.values())
    assert server.keys[10, 10] == {f"{first}:10"}


# --- chains ---------------------------------------------------------------------------------------

# The maximum of rows that a killed driver has begun and not reported: `flush_rows` plus `concurrency` of two tasks.
KILL_BOUND = 2 * (8 + 4)


def random_inputs(draw: random.Random, steps: int, keys: int) -> list[InputRows]:
    """Inputs with inserts, updates, reverted updates, deletes, returning rows and poison rows."""
    inputs: list[InputRows] = [
        {draw.randrange(keys): draw.randrange(1, 99) for _ in range(keys // 2)}
    ]
    while len(inputs) < steps:
        after = dict(inputs[-1])
        for _ in range(draw.randrange(1, keys // 3)):
            key, kind = draw.randrange(keys), draw.randrange(5)
            if kind == 0:
                after.pop(key, None)
            elif kind in (1, 2) and key in (older := draw.choice(inputs)):
                after[key] = older[key]
            else:
                after[key] = draw.randrange(1, 99)
        inputs.append(after)
    return inputs


def check_calls(server: CallCountingServer, done: list[InputRows], killed: list[InputRows]) -> None:
    """Check the external call counts: each (key, content) once until it ends without failure, plus repeats by a kill."""
    repeated = 0
    for row in {row for input_rows in [*done, *killed] for row in input_rows.items()}:
        times = sum(1 for input_rows in done if row in input_rows.items())
        calls = server.calls[row]
        if ends_without_failure(row[1]):
            assert calls >= (times > 0), f"{row} was never called"
            repeated += max(calls - 1, 0)
        else:
            assert times <= calls <= times + len(killed), f"poison {row}: {calls} calls"
    assert repeated <= KILL_BOUND * len(killed), f"{repeated} calls for rows that had ended"
    assert all(len(keys) == 1 for keys in server.keys.values()), "one key for each row outside"
    rows = {row for input_rows in [*done, *killed] for row in input_rows.items()}
    assert set(server.calls) <= rows


@pytest.mark.parametrize("seed", [1, 2])
def test_short_chain_of_changed_inputs_equals_runs_from_scratch(
    spark: SparkSession, server: CallCountingServer, tmp_path: Path, seed: int
) -> None:
    stage = make_stage(server, tmp_path / "store", file_rows=16)
    out = ParquetSink(tmp_path / "out", grace_s=0)
    chain = random_inputs(random.Random(seed), 4, keys=60)
    for input_rows in chain:
        with stage.run(frame(spark, input_rows), output=out, changed="extend") as run:
            assert output_rows(run.output()) == expected_output(input_rows)
    check_calls(server, chain, [])


@pytest.mark.deep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(40))
def test_chain_with_a_killed_driver_equals_runs_from_scratch(
    server: CallCountingServer, tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    chain = random_inputs(draw, 10, keys=120)
    fatal = draw.randrange(10)
    # After the kill the same input is run again, or the next input reuses the stored outcomes.
    same = draw.random() < 0.5 or fatal == 9
    done: list[InputRows] = []
    killed: list[InputRows] = []
    driver = ChangedInputDriver(server, tmp_path)
    try:
        for step, input_rows in enumerate(chain):
            if step == fatal:
                before = sum(server.calls.values())
                driver.start(input_rows)
                driver.wait_for_calls(before + draw.randrange(1, 12))
                driver.close()
                killed.append(input_rows)
                driver = ChangedInputDriver(server, tmp_path)
                if not same:
                    continue
            assert driver.run(input_rows) == expected_output(input_rows), f"step {step}"
            done.append(input_rows)
    finally:
        driver.close()
    check_calls(server, done, killed)


class ChangedInputDriver:
    """A driver in a separate process."""

    def __init__(self, server: CallCountingServer, directory: Path) -> None:
        self._server = server
        self._directory = directory
        self._proc = python_proc("tests.spark.changed_input_driver", timeout_s=600)

    def start(self, input_rows: InputRows) -> None:
        job = {"url": self._server.url, "world": input_rows}
        job |= {"store": str(self._directory / "store"), "out": str(self._directory / "out")}
        self._proc.send(json.dumps(job))

    def run(self, input_rows: InputRows) -> list[tuple[int, str]]:
        self.start(input_rows)
        line = self._proc.expect("done ", timeout_s=600)
        return [(key, label_text) for key, label_text in json.loads(line.removeprefix("done "))]

    def wait_for_calls(self, calls: int) -> None:
        """Wait until the server has counted `calls` calls, or the run has ended with fewer."""
        lines_before = len(self._proc.lines)
        with self._server.changed:
            while (
                sum(self._server.calls.values()) < calls and len(self._proc.lines) == lines_before
            ):
                self._server.changed.wait(0.1)

    def close(self) -> None:
        self._proc.close()


# --- retention ------------------------------------------------------------------------------------


@pytest.mark.parametrize("spool", deep_after(1, [False, True]))
def test_keep_runs_drops_old_inputs_and_keeps_outcomes(
    spark: SparkSession, server: CallCountingServer, tmp_path: Path, spool: bool
) -> None:
    options: dict[str, Any] = {"spool": tmp_path / "spool"} if spool else {}
    stage = make_stage(server, tmp_path / "store", file_rows=16, keep_runs=2, **options)
    out = ParquetSink(tmp_path / "out", grace_s=0)
    input_rows = dict.fromkeys(range(20), 1)
    assert ends_without_failure(1)
    for day in range(5):
        input_rows = input_rows | {100 + day: 1}
        with stage.run(frame(spark, input_rows), output=out, changed="extend") as run:
            assert output_rows(run.output()) == expected_output(input_rows)
            assert run.reused().count() == (len(input_rows) - 1 if day else 0)
    with open_store(tmp_path / "store") as store:
        records = store.read(runs.list_runs_of, "grow")
    with_input = [record for record in records if not record.input_dropped]
    # The newest two runs and the base of the older one have their input. The first runs have only outcomes.
    assert len(with_input) == 3
    assert len(records) == 5
    if spool:
        for record in records:
            blocks = tmp_path / "spool" / record.run_id / "i"
            assert record.input_dropped != bool(list(blocks.glob("*")) if blocks.exists() else [])
    check_calls(server, [input_rows], [])
    # Outcomes of runs without input are still reused, and a kept run can be read completely.
    with stage.run(frame(spark, input_rows | {7: 2}), output=out, changed="extend") as run:
        assert run.reused().count() == len(input_rows) - 1
        assert output_rows(run.output()) == expected_output(input_rows | {7: 2})

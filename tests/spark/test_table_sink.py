"""The table sink: Spark writes a PostgreSQL table through its JDBC catalog. Delivery is at least once."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg.conninfo import conninfo_to_dict
from pyspark.sql import SparkSession

from holdfast import failpoints
from holdfast.errors import Invalid
from holdfast.failpoints import Failpoint
from holdfast.spark.sinks import OutputError, OutputUnknown, Part, TableSink, open_sink
from tests.deep_variants import deep_after
from tests.postgres import drop_databases, fresh_url
from tests.spark.conftest import JDBC_JAR
from tests.spark.row_functions import append_line
from tests.spark.test_stage import StageRig, tuples

pytestmark = [pytest.mark.timeout(240), pytest.mark.postgresql]

_numbers = count(1)
SCHEMA = pa.schema([("id", pa.int64()), ("y", pa.int64())])


class TableSinkKilled(BaseException):
    """Simulates a kill of the process."""


def proxy_unix_socket(path: str) -> int:
    """Proxy a loopback TCP port to a Unix socket. JDBC cannot connect to a Unix socket."""
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65_536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def serve() -> None:
        while True:
            near, _ = listener.accept()
            far = socket.socket(socket.AF_UNIX)
            far.connect(path)
            for pair in ((near, far), (far, near)):
                threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])


class JdbcDatabase:
    def __init__(self, spark: SparkSession) -> None:
        if not os.path.exists(JDBC_JAR):
            pytest.fail(
                "this needs PostgreSQL's JDBC driver: apt-get install -y libpostgresql-jdbc-java"
            )
        self.url = fresh_url()
        conninfo = conninfo_to_dict(self.url)
        port = proxy_unix_socket(f"{conninfo['host']}/.s.PGSQL.{conninfo.get('port') or 5432}")
        self.catalog = f"pg{next(_numbers)}"
        name = f"spark.sql.catalog.{self.catalog}"
        kind = "org.apache.spark.sql.execution.datasources.v2.jdbc.JDBCTableCatalog"
        spark.conf.set(name, kind)
        jdbc = f"jdbc:postgresql://127.0.0.1:{port}/{conninfo['dbname']}?user={conninfo['user']}"
        spark.conf.set(f"{name}.url", jdbc)
        spark.conf.set(f"{name}.driver", "org.postgresql.Driver")
        self.table = f"{self.catalog}.public.labels"

    def query(self, sql: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            found = connection.execute(sql)
            return found.fetchall() if found.description else []

    def rows(self) -> list[tuple[Any, ...]]:
        return self.query("SELECT id, y FROM labels ORDER BY id")


@pytest.fixture
def database(spark: SparkSession) -> Iterator[JdbcDatabase]:
    yield JdbcDatabase(spark)
    drop_databases()


@pytest.fixture
def place(tmp_path: Path) -> StageRig:
    return StageRig(tmp_path)


def part(lo: int, hi: int) -> Part:
    numbers = list(range(lo, hi))
    return Part(lo, hi, pa.table({"id": numbers, "y": numbers}, schema=SCHEMA))


@pytest.fixture
def spool_reads() -> Iterator[Failpoint]:
    """Count the objects of a spool that this process reads."""
    with failpoints.on("spool.read") as reads:
        yield reads


@pytest.mark.parametrize("spool", deep_after(1, [True, False]))
def test_stage_resumes_after_a_spark_table_refused_rows(
    spark: SparkSession,
    database: JdbcDatabase,
    place: StageRig,
    spool_reads: Failpoint,
    spool: bool,
) -> None:
    """With a spool, executors read the rows and the driver reads none."""
    log, mended = place.log, place.path / "mended"

    def work(row: Any) -> Any:
        append_line(log, row.id)
        if row.id == 3 and not mended.exists():
            raise ValueError("bad")
        return {"y": row.id * 2}

    options: dict[str, Any] = {"spool": place.path / "spool"} if spool else {}
    stage = place.stage(work, file_rows=4, carry=["name"], **options)
    df = spark.range(10).selectExpr("id", "concat('n', id) as name")
    database.query(
        "CREATE TABLE labels (id bigint, name text, y bigint CHECK (y <> 12), _holdfast_part text)"
    )
    sink = TableSink(database.table)
    with pytest.raises(OutputError):
        stage.run(df, output=sink)
    assert database.rows() == [(i, i * 2) for i in range(4) if i != 3], "the parts before it"
    database.query("ALTER TABLE labels DROP CONSTRAINT labels_y_check")
    with stage.run(df, output=sink) as run:
        want = [(i, f"n{i}", i * 2) for i in range(10) if i != 3]
        assert tuples(run.output()) == want
        assert database.query("SELECT id, name, y FROM labels ORDER BY id") == want
    assert len(place.calls()) == 10, "nothing is called again"
    # The retried row is added to the same table. No other row is written twice.
    mended.touch()
    grown = spark.range(11).selectExpr("id", "concat('n', id) as name")
    with stage.run(grown, output=sink, changed="extend") as run:
        assert run.counts()["TERMINAL_SUCCESS"] == 11
    assert database.rows() == [(i, i * 2) for i in range(11)]
    with stage.run(grown, output=sink) as run:
        run.write(TableSink(f"{database.catalog}.public.again"))
    assert len(database.rows()) == 11
    assert spool_reads.hits == 0
    assert len(database.query("SELECT id FROM again")) == 11


@pytest.mark.parametrize("step", ["append-before", "append"])
def test_restarted_table_sink_appends_no_part_twice(
    spark: SparkSession, database: JdbcDatabase, step: str
) -> None:
    seen = 0

    def die(name: str) -> None:
        nonlocal seen
        seen += name == step
        if seen == 2:
            raise TableSinkKilled

    sink = TableSink(database.table, step=die)
    sink.begin("run-1", "labels", SCHEMA)
    parts = [part(0, 4), Part(4, 6, SCHEMA.empty_table()), part(6, 8), part(8, 9)]
    with pytest.raises(TableSinkKilled):
        sink.commit_many(parts)
    again: Any = open_sink(sink.spec())
    again.begin("run-1", "labels", SCHEMA)
    again.commit_many(parts)
    again.finish()
    assert [row[0] for row in database.rows()] == [0, 1, 2, 3, 6, 7, 8]
    named = database.query("SELECT DISTINCT _holdfast_part FROM labels ORDER BY 1")
    assert named == [("run-1/0-4",), ("run-1/6-8",), ("run-1/8-9",)]
    # Another run appends the same interval.
    other = TableSink(database.table)
    other.begin("run-10", "labels", SCHEMA)
    other.commit_many([part(0, 4)])
    assert len(database.rows()) == 11


def test_table_sink_rewrites_a_partly_written_part(
    spark: SparkSession, database: JdbcDatabase
) -> None:
    sink = TableSink(database.table)
    sink.begin("run-1", "labels", SCHEMA)
    database.query("INSERT INTO labels VALUES (0, 0, 'run-1/0-4')")
    again = TableSink(database.table)
    again.begin("run-1", "labels", SCHEMA)
    again.commit_many([part(0, 4)])
    assert {row[0] for row in database.rows()} == {0, 1, 2, 3}


def test_unfit_spark_table_is_refused_before_the_first_call(
    spark: SparkSession, database: JdbcDatabase, place: StageRig
) -> None:
    database.query("CREATE TABLE labels (id bigint, y boolean, _holdfast_part text)")
    missing = TableSink("nowhere.public.labels")
    parted = TableSink(f"{database.catalog}.public.other", partition_by="nothing")
    for sink in (TableSink(database.table), missing, parted):
        with pytest.raises(Invalid):
            place.stage(place.counting_function()).run(spark.range(3), output=sink)
    stage = place.stage(lambda row: {"y": {"a": 1}}, schema="y map<string, int>")
    with pytest.raises(Invalid):
        stage.run(spark.range(3), output=TableSink(f"{database.catalog}.public.maps"))
    assert place.calls() == []


@pytest.mark.parametrize("name", ["labels/", "s3://b/labels", "./labels", "", "a b"])
def test_table_sink_refuses_a_path_as_name(name: str) -> None:
    with pytest.raises(OutputUnknown):
        TableSink(name)
    with pytest.raises(Invalid):
        TableSink("labels", mode="upsert")

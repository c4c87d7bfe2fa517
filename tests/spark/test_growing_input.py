"""Input that grows, on Spark: only what is new or changed is called, and the output is as from scratch.

An HTTP server outside counts the calls and remembers the idempotency key of each (key, content).
"""

from __future__ import annotations

import http.server
import json
import random
import threading
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession

from holdfast.ledger import runs
from holdfast.spark import Skip, Stage
from holdfast.spark.errors import InputChanged, NotAStage, RunChanged
from holdfast.spark.sinks import DeltaSink, ParquetSink
from holdfast.store import open as open_store
from tests.processes import python_proc

World = dict[int, int]
SCHEMA = "label string"


class Counting(http.server.ThreadingHTTPServer):
    """Answers each call, and keeps what was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.calls: Counter[tuple[int, int]] = Counter()
        self.keys: dict[tuple[int, int], set[str]] = defaultdict(set)
        self.changed = threading.Condition()
        self.poison = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        assert isinstance(server, Counting)
        row = (asked["id"], asked["text"])
        with server.changed:
            server.calls[row] += 1
            server.keys[row].add(asked["key"])
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


class Ask:
    """The function of the stage: a call outside for each row; some are poison, some are skipped."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __call__(self, row: Any, call: Any) -> Any:
        asked = {"id": row.id, "text": row.text, "key": call.idempotency_key}
        request = urllib.request.Request(self.url, data=json.dumps(asked).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            told = json.load(answer)
        call.cost = 0.5
        if row.text % 7 == 6:
            return Skip("seven")
        if row.text % 11 == 10 and told["poison"]:
            raise ValueError("poison")
        return {"label": told["label"]}


def ends_well(text: int) -> bool:
    return text % 7 == 6 or text % 11 != 10


def expected(world: World) -> list[tuple[int, str]]:
    return [
        (key, label(key, text))
        for key, text in sorted(world.items())
        if text % 7 != 6 and text % 11 != 10
    ]


@pytest.fixture
def server() -> Iterator[Counting]:
    made = Counting()
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def stage_of(server: Counting, store: Path, **options: Any) -> Stage:
    options = {"concurrency": 4, "flush_rows": 8, "attempts": 1, "progress": "quiet"} | options
    return Stage("grow", Ask(server.url), key="id", schema=SCHEMA, store=store, tasks=2, **options)


def frame(spark: SparkSession, world: World, note: int = 0) -> DataFrame:
    rows = [(key, text, note) for key, text in world.items()]
    random.Random(len(rows)).shuffle(rows)
    return spark.createDataFrame(rows, "id long, text long, note long").repartition(2)


def rows_of(found: DataFrame) -> list[tuple[int, str]]:
    return [(row.id, row.label) for row in found.collect()]


def ids(found: DataFrame) -> list[int]:
    return sorted(row.id for row in found.collect())


def test_a_grown_input_is_refused_unless_it_extends(
    spark: SparkSession, server: Counting, tmp_path: Path
) -> None:
    stage = stage_of(server, tmp_path / "store")
    first = {n: n for n in range(30)}
    stage.run(frame(spark, first)).close()
    grown = frame(spark, {**first, 30: 30})
    with pytest.raises(InputChanged):
        stage.run(grown)
    with pytest.raises(NotAStage, match="changed"):
        stage.run(grown, changed="grow")  # type: ignore[arg-type]
    with pytest.raises(NotAStage, match="match"):
        stage.run(grown, changed="extend", match=["texts"])
    other = stage_of(server, tmp_path / "store", version="2")
    with pytest.raises(RunChanged) as refused:
        other.run(grown, changed="extend")
    assert refused.value.fields["what"] == "version"
    assert sum(server.calls.values()) == 30


def test_rows_are_reused_new_changed_and_gone(
    spark: SparkSession, server: Counting, tmp_path: Path
) -> None:
    stage = stage_of(server, tmp_path / "store")
    first = {n: n for n in range(40)}
    out = ParquetSink(tmp_path / "out", grace_s=0)
    with stage.run(frame(spark, first), output=out) as run:
        assert rows_of(run.output()) == expected(first)
        assert ids(run.reused()) == ids(run.changed()) == ids(run.gone()) == []
    # 10, 21 and 32 are poison; 3 and 4 leave, 5 changes, 100 and -1 come.
    second = {n: n for n in range(40) if n not in (3, 4)} | {5: 500, 100: 1, -1: 1}
    plan = stage.explain(frame(spark, second))
    assert (plan.rows, plan.reused, plan.new, plan.changed) == (40, 34, 2, 1)
    assert (plan.failed, plan.gone, plan.to_call, plan.cost) == (3, 2, 6, 3.0)
    assert "40 rows: 34 reused, 2 new, 1 changed, 3 failed, 2 gone" in str(plan)
    assert sum(server.calls.values()) == 40, "asking calls nothing"
    with stage.run(frame(spark, second), output=out, changed="extend") as run:
        assert rows_of(run.output()) == expected(second)
        read = spark.read.parquet(str(tmp_path / "out")).orderBy("id")
        assert rows_of(read) == expected(second), "a plain listing has the same rows"
        assert ids(run.gone()) == [3, 4]
        assert ids(run.changed()) == [5]
        assert ids(run.reused()) == [n for n in range(40) if n not in (3, 4, 5, 10, 21, 32)]
        assert run.progress().reused == 34
        assert ids(run.failed()) == [10, 21, 32]
    assert sum(server.calls.values()) == 46
    # It is the run of the name now: the same input again does nothing.
    with stage.run(frame(spark, second), output=out) as run:
        assert run.progress().calls == 6
    assert all(len(keys) == 1 for keys in server.keys.values())


def test_two_stages_that_share_a_table_each_follow_their_own_input(
    spark: SparkSession, server: Counting, tmp_path: Path
) -> None:
    def run(name: str, world: World) -> None:
        stage = Stage(
            name,
            Ask(server.url),
            key="id",
            schema=SCHEMA,
            store=tmp_path / "store",
            progress="quiet",
        )
        table = DeltaSink(tmp_path / "table", append=True)
        stage.run(frame(spark, world), output=table, changed="extend").close()

    first, second = dict.fromkeys(range(8), 1), dict.fromkeys(range(100, 106), 2)
    run("first", first)
    run("second", second)
    # The newest rows of the table are of the other stage.
    first = {key: 3 if key == 2 else 1 for key in range(12) if key != 5}
    run("first", first)
    second[104] = 4
    run("second", second)
    found = DeltaTable(tmp_path / "table").to_pyarrow_table().to_pylist()
    assert sorted((row["id"], row["label"]) for row in found) == expected(first | second)
    assert sum(server.calls.values()) == 8 + 6 + 5 + 1


def test_only_the_columns_that_are_matched_count(
    spark: SparkSession, server: Counting, tmp_path: Path
) -> None:
    stage = stage_of(server, tmp_path / "store")
    world = dict.fromkeys(range(20), 1)
    stage.run(frame(spark, world)).close()
    # The first run was hashed over all columns: it is hashed again over what counts now.
    noted = frame(spark, {**world, 20: 1}, note=1)
    with stage.run(noted, changed="extend", match=["text"]) as run:
        assert len(ids(run.reused())) == 20
        assert ids(run.changed()) == []
    assert sum(server.calls.values()) == 21
    with stage.run(frame(spark, world, note=2), changed="extend") as run:
        assert len(ids(run.changed())) == 20
    assert sum(server.calls.values()) == 41
    # 1: 1 with the first note is known still.
    with stage.run(frame(spark, world), changed="extend") as run:
        assert len(ids(run.reused())) == 20
    assert sum(server.calls.values()) == 41


def test_a_retry_keeps_numbers_and_keys(
    spark: SparkSession, server: Counting, tmp_path: Path
) -> None:
    stage = stage_of(server, tmp_path / "store")
    world = {n: n for n in range(30)}
    out = ParquetSink(tmp_path / "out", grace_s=0)
    with stage.run(frame(spark, world), output=out) as run:
        failed = {row.id: row._seq for row in run.failed().collect()}
        first = run.run_id
    assert failed == {10: 10, 21: 21}
    server.poison = False
    with open_store(str(tmp_path / "store")) as store:
        store.transact(runs.request_retry, first)
    with stage.resume(spark) as run:
        assert run.run_id != first
        assert ids(run.failed()) == []
        assert len(rows_of(run.output())) == sum(1 for n in world.values() if n % 7 != 6)
        assert run.progress().calls == 2
        read = spark.read.parquet(str(tmp_path / "out"))
        assert ids(read) == [row[0] for row in rows_of(run.output())]
    assert all(len(keys) == 1 for keys in server.keys.values())
    assert server.keys[10, 10] == {f"{first}:10"}


# --- chains ---------------------------------------------------------------------------------------

# Rows that a killed driver may have begun and not reported: `flush_rows` and `concurrency` of two tasks.
KILL_BOUND = 2 * (8 + 4)


def worlds(draw: random.Random, steps: int, keys: int) -> list[World]:
    """Inputs with inserts, updates, updates back, deletes, rows that come back, poison rows."""
    found: list[World] = [{draw.randrange(keys): draw.randrange(1, 99) for _ in range(keys // 2)}]
    while len(found) < steps:
        after = dict(found[-1])
        for _ in range(draw.randrange(1, keys // 3)):
            key, kind = draw.randrange(keys), draw.randrange(5)
            if kind == 0:
                after.pop(key, None)
            elif kind in (1, 2) and key in (older := draw.choice(found)):
                after[key] = older[key]
            else:
                after[key] = draw.randrange(1, 99)
        found.append(after)
    return found


def check_calls(server: Counting, done: list[World], killed: list[World]) -> None:
    """Calls counted outside: each (key, content) until it ended well, and what a kill repeats."""
    repeated = 0
    for row in {row for world in [*done, *killed] for row in world.items()}:
        times = sum(1 for world in done if row in world.items())
        calls = server.calls[row]
        if ends_well(row[1]):
            assert calls >= (times > 0), f"{row} was never called"
            repeated += max(calls - 1, 0)
        else:
            assert times <= calls <= times + len(killed), f"poison {row}: {calls} calls"
    assert repeated <= KILL_BOUND * len(killed), f"{repeated} calls for rows that had ended"
    assert all(len(keys) == 1 for keys in server.keys.values()), "one key for each row outside"
    rows = {row for world in [*done, *killed] for row in world.items()}
    assert set(server.calls) <= rows


@pytest.mark.parametrize("seed", [1, 2])
def test_a_short_chain_equals_runs_from_scratch(
    spark: SparkSession, server: Counting, tmp_path: Path, seed: int
) -> None:
    stage = stage_of(server, tmp_path / "store", file_rows=16)
    out = ParquetSink(tmp_path / "out", grace_s=0)
    chain = worlds(random.Random(seed), 4, keys=60)
    for world in chain:
        with stage.run(frame(spark, world), output=out, changed="extend") as run:
            assert rows_of(run.output()) == expected(world)
    check_calls(server, chain, [])


@pytest.mark.deep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(40))
def test_a_chain_with_a_killed_driver_equals_runs_from_scratch(
    server: Counting, tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    chain = worlds(draw, 10, keys=120)
    fatal = draw.randrange(10)
    # After the kill the same input comes again, or the next one takes over what there is.
    same = draw.random() < 0.5 or fatal == 9
    done: list[World] = []
    killed: list[World] = []
    driver = Driver(server, tmp_path)
    try:
        for step, world in enumerate(chain):
            if step == fatal:
                before = sum(server.calls.values())
                driver.start(world)
                driver.reached(before + draw.randrange(1, 12))
                driver.close()
                killed.append(world)
                driver = Driver(server, tmp_path)
                if not same:
                    continue
            assert driver.run(world) == expected(world), f"step {step}"
            done.append(world)
    finally:
        driver.close()
    check_calls(server, done, killed)


class Driver:
    """A driver in a process of its own."""

    def __init__(self, server: Counting, home: Path) -> None:
        self._server = server
        self._home = home
        self._proc = python_proc("tests.spark.growing_driver", timeout_s=600)

    def start(self, world: World) -> None:
        job = {"url": self._server.url, "world": world}
        job |= {"store": str(self._home / "store"), "out": str(self._home / "out")}
        self._proc.send(json.dumps(job))

    def run(self, world: World) -> list[tuple[int, str]]:
        self.start(world)
        line = self._proc.expect("done ", timeout_s=600)
        return [(key, told) for key, told in json.loads(line.removeprefix("done "))]

    def reached(self, calls: int) -> None:
        """Until so many calls were made, or the run is over: it may make fewer."""
        told = len(self._proc.lines)
        with self._server.changed:
            while sum(self._server.calls.values()) < calls and len(self._proc.lines) == told:
                self._server.changed.wait(0.1)

    def close(self) -> None:
        self._proc.close()


# --- retention ------------------------------------------------------------------------------------


@pytest.mark.parametrize("spool", [False, True])
def test_a_daily_run_keeps_a_few_inputs_and_each_outcome_once(
    spark: SparkSession, server: Counting, tmp_path: Path, spool: bool
) -> None:
    options: dict[str, Any] = {"spool": tmp_path / "spool"} if spool else {}
    stage = stage_of(server, tmp_path / "store", file_rows=16, keep_runs=2, **options)
    out = ParquetSink(tmp_path / "out", grace_s=0)
    world = dict.fromkeys(range(20), 1)
    assert ends_well(1)
    for day in range(6):
        world = world | {100 + day: 1}
        with stage.run(frame(spark, world), output=out, changed="extend") as run:
            assert rows_of(run.output()) == expected(world)
            assert run.reused().count() == (len(world) - 1 if day else 0)
    with open_store(tmp_path / "store") as store:
        records = store.read(runs.of_name, "grow")
    with_input = [one for one in records if not one.input_dropped]
    # The newest two, and the base of the older of them; the first days have outcomes alone.
    assert len(with_input) == 3
    assert len(records) == 6
    if spool:
        for one in records:
            blocks = tmp_path / "spool" / one.run_id / "i"
            assert one.input_dropped != bool(list(blocks.glob("*")) if blocks.exists() else [])
    check_calls(server, [world], [])
    # What the stripped runs hold is still reused, and a kept run can be read as a whole.
    with stage.run(frame(spark, world | {7: 2}), output=out, changed="extend") as run:
        assert run.reused().count() == len(world) - 1
        assert rows_of(run.output()) == expected(world | {7: 2})

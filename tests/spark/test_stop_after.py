"""Stages with `stop_after`. A real HTTP server counts the calls."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from holdfast.cli import main
from holdfast.spark import Run, RunStopped, Stage, Stop
from holdfast.spark.errors import NotAStage

pytestmark = pytest.mark.timeout(900)

FLUSH_ROWS, CONCURRENCY, TASKS = 20, 4, 2
IN_FLIGHT = TASKS * (FLUSH_ROWS + CONCURRENCY)


class LabelApiServer(ThreadingHTTPServer):
    """An HTTP server that returns 401 until the key is valid, and records the row of each call."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _LabelApiHandler)
        self.is_key_valid = False
        self.calls: list[int] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _LabelApiHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"
    server: LabelApiServer

    def do_GET(self) -> None:
        with self.server.lock:
            self.server.calls.append(int(self.path[1:]))
        body = b'{"y": 1}'
        self.send_response(200 if self.server.is_key_valid else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def model() -> Iterator[LabelApiServer]:
    made = LabelApiServer()
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()


def calling_function(url: str) -> Callable[[Any, Any], Any]:
    def work(row: Any, call: Any) -> Any:
        call.cost = 0.5
        with urllib.request.urlopen(f"{url}/{row.id}", timeout=60) as response:
            return {"y": row.id + json.load(response)["y"]}

    return work


def stage_of(fn: Any, store: Path, **options: Any) -> Stage:
    return Stage(
        "labels", fn, key="id", schema="y bigint", store=store, progress="quiet", tasks=TASKS,
        concurrency=CONCURRENCY, flush_rows=FLUSH_ROWS, **options,
    )  # fmt: skip


def runs_show_document(capsys: pytest.CaptureFixture[str], store: Path) -> Any:
    capsys.readouterr()
    assert main(["runs", "show", "labels", "--store", str(store), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("rows", "bound"), [(400, 60), pytest.param(50_000, 1000, marks=pytest.mark.deep)]
)
def test_stop_after_same_error_bounds_the_calls_with_a_wrong_key(
    spark: SparkSession,
    tmp_path: Path,
    model: LabelApiServer,
    capsys: pytest.CaptureFixture[str],
    rows: int,
    bound: int,
) -> None:
    store, output = tmp_path / "data", tmp_path / "out"
    stage = stage_of(calling_function(model.url), store, stop_after=Stop(same_error=bound))
    df = spark.range(rows)
    with pytest.raises(RunStopped) as stopped:
        stage.run(df, output=output)
    paid = len(model.calls)
    assert bound <= paid <= bound + IN_FLIGHT
    reason = stopped.value.fields["why"]
    assert "with the same error, input: HTTPError: HTTP Error 401: Unauthorized" in reason
    assert f"same_error={bound}" in reason
    # The run is open, calls in flight ended and are recorded. Every view shows the reason.
    with Run.of("labels", spark, store) as run:
        assert run.status == "open"
        assert run.status().reason == reason
        counts = run.counts()
        assert counts["TERMINAL_FAIL"] == paid
        assert counts["IN_FLIGHT"] == 0
        assert sum(counts.values()) == rows
    document = runs_show_document(capsys, store)
    assert (document["status"], document["stopped"]) == ("open", reason)
    assert any("runs retry" in step for step in document["next"])
    assert reason in str(stage.explain())
    # The key is valid now. The retry includes the failed rows.
    model.is_key_valid = True
    assert main(["runs", "retry", "labels", "--store", str(store)]) == 0
    first = set(model.calls)
    model.calls.clear()
    with stage.run(df, output=output) as run:
        assert run.status == "finished"
        assert run.status().reason == ""
        counts = run.counts()
        assert (counts["TERMINAL_SUCCESS"], counts["TERMINAL_FAIL"]) == (rows, 0)
        assert run.output().count() == rows
    # Each row was called once: first the rows without a call, then the failed rows.
    assert sorted(model.calls) == list(range(rows))
    assert set(model.calls[: rows - paid]).isdisjoint(first)


def test_run_stopped_by_cost_resumes_with_a_new_count(
    spark: SparkSession, tmp_path: Path, model: LabelApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    store, rows = tmp_path / "data", 400
    df = spark.range(rows)
    stage = stage_of(calling_function(model.url), store, stop_after=Stop(cost=20))
    for paid_before in (0, 1):
        before = len(model.calls)
        with pytest.raises(RunStopped, match="the calls cost"):
            stage.run(df)
        # 40 calls at a cost of 0.5, and another 40 after the resume.
        assert 40 <= len(model.calls) - before <= 40 + IN_FLIGHT
        assert bool(before) == bool(paid_before)
    paid = len(model.calls)
    model.is_key_valid = True
    with stage_of(calling_function(model.url), store).run(df) as run:
        counts = run.counts()
        assert (counts["TERMINAL_FAIL"], counts["TERMINAL_SUCCESS"]) == (paid, rows - paid)
    assert len(model.calls) == len(set(model.calls)) == rows
    assert runs_show_document(capsys, store)["stopped"] == ""


def test_stop_after_applies_to_the_lazy_form(
    spark: SparkSession, tmp_path: Path, model: LabelApiServer
) -> None:
    stage = stage_of(calling_function(model.url), tmp_path / "data", stop_after=Stop(failures=20))
    rows = 300
    df = spark.range(rows)
    with pytest.raises(Exception, match="RunStopped"):
        df.transform(stage).count()
    assert 20 <= len(model.calls) <= 20 + IN_FLIGHT
    paid = len(model.calls)
    model.is_key_valid = True
    mended = stage_of(calling_function(model.url), tmp_path / "data", on_fail="keep")
    assert df.transform(mended).count() == rows - paid


@pytest.mark.parametrize(
    "wrong",
    [
        Stop(), Stop(failures=-1), Stop(share=2.0), Stop(cost=float("inf")), Stop(same_error=1.5),
        "soon",
    ],
)  # fmt: skip
def test_invalid_stop_after_bounds_are_refused(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(NotAStage):
        stage_of(lambda row: {"y": 1}, tmp_path, stop_after=wrong)

"""`holdfast up --http` in real processes: its address, its invalid options and its shutdown."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from holdfast.ops.http.auth import TOKEN_VARIABLE
from tests.process.watch import assert_no_client_left, until, writer_of
from tests.processes import Proc

APP = "import holdfast as hf\n\n@hf.task\ndef double(n: int) -> int:\n    return 2 * n\n\napp = hf.App('shop', tasks=[double])\n"

Up = Callable[..., Proc]

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    (tmp_path / "shop.py").write_text(APP, encoding="utf-8")
    started: list[Proc] = []

    def up(*options: str, ready: str | None = "ready", token: str = "") -> Proc:
        argv = [sys.executable, "-m", "holdfast.cli", "up", "shop:app", "--store", "data", *options]
        started.append(Proc.spawn(argv, ready=ready, cwd=tmp_path, env={TOKEN_VARIABLE: token}))
        return started[-1]

    yield up
    for proc in started:
        proc.close()
    assert_no_client_left(tmp_path / "data")


def call(proc: Proc, method: str, path: str, document: Any = None) -> Any:
    """Send a request to the last address that the process has printed."""
    host, _, port = proc.lines[-1].rpartition("://")[2].rstrip('"}').rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=50)
    try:
        body = None if document is None else json.dumps(document)
        connection.request(method, path, body, {"Content-Type": "application/json"})
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def test_up_http_runs_a_task_submitted_over_http(up: Up) -> None:
    proc = up("--http", "127.0.0.1:0", "--worker", "one")
    assert proc.lines[0].startswith("ready one http://127.0.0.1:")
    made = call(proc, "POST", "/v1/tasks", {"name": "double", "args": [21]})
    assert call(proc, "GET", f"/v1/tasks/{made['id']}?wait_s=30")["result"] == 42
    until(lambda: call(proc, "GET", "/readyz")["ready"], "readiness")


def test_up_http_exports_metrics(up: Up) -> None:
    proc = up("--http", "127.0.0.1:0", "--worker", "one")
    made = call(proc, "POST", "/v1/tasks", {"name": "double", "args": [21]})
    call(proc, "GET", f"/v1/tasks/{made['id']}?wait_s=30")
    host, _, port = proc.lines[0].rpartition("://")[2].rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=50)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    assert 'holdfast_tasks{queue="default",state="completed",universe="shop"} 1.0' in lines
    # The roles register one after the other.
    [live] = [line for line in lines if line.startswith('holdfast_workers{state="live"')]
    assert float(live.split()[-1]) >= 1
    assert any(
        line.startswith('holdfast_runner_attempts_total{outcome="successes"')
        and 'worker="one"' in line
        for line in lines
    )


def test_up_http_ready_line_as_json_contains_the_address(up: Up) -> None:
    proc = up("--http", "127.0.0.1:0", "--json", ready='{"ready"')
    assert json.loads(proc.lines[0])["http"].startswith("http://127.0.0.1:")


def test_up_without_http_option_does_not_listen(up: Up) -> None:
    assert "http" not in up("--worker", "one").lines[0]


@pytest.mark.parametrize(
    ("options", "token", "code"),
    [
        (["--http", "0.0.0.0:0"], "", "no_token"),
        (["--http", "localhost:x"], "", "invalid"),
        (["--http", "127.0.0.1:0"], "short", "invalid"),
        (["--http", "127.0.0.1:0", "--http-token-file", "none"], "", "not_found"),
        (["--http-name", "here"], "", "invalid"),
        (["--http-trace-url", "http://traces.example/{trace_id}"], "", "invalid"),
        (["--http", "127.0.0.1:0", "--http-trace-url", "http://traces.example/"], "", "invalid"),
        (["--http", "127.0.0.1:0", "--http-trace-url", "javascript:{trace_id}"], "", "invalid"),
    ],
)
def test_up_http_refuses_invalid_options_before_opening_the_store(
    up: Up, tmp_path: Path, options: list[str], token: str, code: str
) -> None:
    proc = up(*options, ready=None, token=token)
    assert proc.wait() == 1
    [line] = proc.errors
    assert line.startswith(f"holdfast: {code}: ")
    assert not (tmp_path / "data").exists()


def test_up_http_without_the_ops_extra_names_the_install_command(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(APP, encoding="utf-8")
    code = (
        "import sys; sys.modules['uvicorn'] = None; from holdfast.cli import main; "
        "sys.exit(main(['up', 'shop:app', '--store', 'data', '--http']))"
    )
    proc = Proc.spawn([sys.executable, "-c", code], ready=None, cwd=tmp_path)
    try:
        assert proc.wait() == 1
        [line] = proc.errors
        assert line.startswith("holdfast: not_installed: ")
        assert "pip install 'holdfast[ops]'" in line
    finally:
        proc.close()
    assert not (tmp_path / "data").exists()


def test_up_http_exits_when_the_port_is_in_use(up: Up) -> None:
    port = up("--http", "127.0.0.1:0").lines[0].rpartition(":")[2]
    second = up("--http", f"127.0.0.1:{port}", ready=None)
    assert second.wait() == 1
    [line] = second.errors
    assert "in use" in line


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_waiting_lease_request_survives_a_writer_restart(
    up: Up, tmp_path: Path, number: signal.Signals
) -> None:
    proc = up("--http", "127.0.0.1:0", "--role", "orchestrator")
    with ThreadPoolExecutor(1) as pool:
        lease_request = {"worker": "w", "queues": ["other"], "wait_s": 50}
        waiting = pool.submit(call, proc, "POST", "/v1/tasks/lease", lease_request)
        call(proc, "POST", "/v1/tasks", {"name": "double", "args": [1]})
        former = writer_of(tmp_path / "data")
        former.send(number)
        task = {"name": "add", "options": {"queue": "other"}}
        made = call(proc, "POST", "/v1/tasks", task)
        [granted] = waiting.result(40)["tasks"]
        assert (granted["id"], granted["attempt"]) == (made["id"], 1)
        writer_of(tmp_path / "data", other_than=former)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_answers_a_waiting_lease_request_and_exits(up: Up, number: signal.Signals) -> None:
    proc = up("--http", "127.0.0.1:0", "--role", "orchestrator")
    lease_request = {"worker": "w", "wait_s": 50}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(call, proc, "POST", "/v1/tasks/lease", lease_request)
        made = call(proc, "POST", "/v1/tasks", {"name": "double", "args": [1]})
        [granted] = waiting.result(20)["tasks"]
        assert granted["id"] == made["id"]
        waiting = pool.submit(call, proc, "POST", "/v1/tasks/lease", lease_request)
        # This request is sent after the lease request. Its answer shows that the lease request waits.
        assert call(proc, "GET", "/v1/queues")["queues"][0]["leased"] == 1
        os.kill(proc.pid, number)
        assert proc.wait() == 0
        assert proc.errors == []
        with contextlib.suppress(ConnectionError, http.client.HTTPException, KeyError):
            # The lease request may also arrive after the server closed, and then it fails.
            assert waiting.result(20)["tasks"] == []

"""`holdfast serve` and `holdfast audit` in real processes."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast import store as stores
from holdfast.ops.http.auth import TOKEN_VARIABLE
from holdfast.ops.world_operations import world_create
from tests.process.watch import assert_no_client_left
from tests.processes import Proc

pytestmark = pytest.mark.timeout(60)

APP = "import holdfast as hf\n\nclass Account(hf.World):\n    balance: int = 0\n\napp = hf.App('bank', worlds=[Account])\n"

Run = Callable[..., Proc]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    (tmp_path / "bank.py").write_text(APP, encoding="utf-8")
    with stores.open(tmp_path / "data") as store:
        world_create(store, "bank", "Account", "ada")
    started: list[Proc] = []

    def run(*argv: str, ready: str | None = "ready", token: str = "") -> Proc:
        command = [sys.executable, "-m", "holdfast.cli", *argv, "--store", "data"]
        started.append(Proc.spawn(command, ready=ready, cwd=tmp_path, env={TOKEN_VARIABLE: token}))
        return started[-1]

    yield run
    for proc in started:
        proc.close()
    assert_no_client_left(tmp_path / "data")


def page(proc: Proc) -> str:
    with urllib.request.urlopen(proc.lines[0].split()[-1] + "/metrics", timeout=50) as answer:
        return str(answer.read().decode())


def call(proc: Proc, method: str, path: str, document: Any = None, token: str = "") -> Any:
    host, _, port = proc.lines[0].rpartition("://")[2].rstrip('"}').rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=50)
    try:
        body = None if document is None else json.dumps(document)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
        connection.request(method, path, body, headers)
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def test_serve_answers_for_a_store_without_roles_and_stops_on_sigterm(run: Run) -> None:
    proc = run("serve", "--http", "127.0.0.1:0")
    [world] = call(proc, "GET", "/v1/worlds")["items"]
    assert (world["type"], world["name"]) == ("Account", "ada")
    assert call(proc, "GET", "/v1/worlds/Account/ada/state")["code"] == "needs_app"
    os.kill(proc.pid, signal.SIGTERM)
    assert proc.wait() == 0
    assert proc.errors == []


def test_serve_exports_the_metrics_of_its_process(run: Run) -> None:
    proc = run("serve", "--http", "127.0.0.1:0")
    for path, answered in (
        ("/v1/worlds/Account/ada/pause", {}),
        ("/v1/worlds/Account/bob/pause", {}),
    ):
        call(proc, "POST", path, answered)
    families = {one.name: one for one in text_string_to_metric_families(page(proc))}
    [commits] = [
        one for one in families["holdfast_commit_seconds"].samples if one.name.endswith("_count")
    ]
    assert commits.value >= 1
    worker = commits.labels["worker"]
    assert re.fullmatch("server-[0-9a-f]{8}", worker)
    responses = {
        (one.labels["worker"], one.labels["status"]): one.value
        for one in families["holdfast_http_responses"].samples
    }
    assert (responses[worker, "2xx"], responses[worker, "4xx"]) == (1, 1)


def test_serve_exits_with_one_line_when_the_store_directory_is_gone(
    run: Run, tmp_path: Path
) -> None:
    proc = run("serve", "--http", "127.0.0.1:0")
    (tmp_path / "data").rename(tmp_path / "moved")
    assert proc.wait() == 1
    [line] = proc.errors
    assert line.startswith("holdfast: store_gone: ")


def test_serve_with_an_app_answers_requests_that_need_its_code(run: Run) -> None:
    proc = run("serve", "--app", "bank:app", "--http", "127.0.0.1:0", "--json", ready='{"ready"')
    document = json.loads(proc.lines[0])
    assert document["http"].startswith("http://127.0.0.1:")
    assert call(proc, "GET", "/v1/worlds/Account/ada/state")["state"] == {"balance": 0}


def test_token_file_is_preferred_to_the_environment(run: Run, tmp_path: Path) -> None:
    ours, other = "from-the-file-0123456789", "from-the-environment-1"
    (tmp_path / "token").write_text(f"{ours}\n", encoding="utf-8")
    with_file = run("serve", "--http", "127.0.0.1:0", "--http-token-file", "token", token=other)
    assert call(with_file, "GET", "/v1/worlds", token=other)["code"] == "unauthorized"
    assert call(with_file, "GET", "/v1/worlds", token=ours)["items"]
    without = run("serve", "--http", "127.0.0.1:0", token=other)
    assert call(without, "GET", "/v1/worlds", token=other)["items"]
    assert call(without, "GET", "/v1/worlds")["code"] == "unauthorized"


def test_audit_prints_the_actions_of_operators(run: Run) -> None:
    proc = run("serve", "--http", "127.0.0.1:0")
    call(proc, "POST", "/v1/worlds/Account/ada/pause", {})
    listed = run("audit", "--json", ready=None)
    assert listed.wait() == 0
    [entry] = json.loads("\n".join(listed.lines))["entries"]
    assert (entry["actor"], entry["action"], entry["subject"]) == (
        "local",
        "pause_world",
        "world/Account/ada",
    )
    text = run("audit", ready=None)
    assert text.wait() == 0
    assert "pause_world  world/Account/ada" in text.lines[1]


@pytest.mark.parametrize(
    ("options", "status", "code"),
    [
        (["--http", "0.0.0.0:0"], 1, "no_token"),
        (["--app", "none:app"], 2, "no_app"),
        (["--app", "bank:app", "--app", "bank:app"], 1, "invalid"),
        (["--http-key", "key.pem"], 1, "invalid"),
        (["--http-cert", "none.pem"], 1, "not_found"),
    ],
)
def test_serve_refuses_invalid_options(
    run: Run, options: list[str], status: int, code: str
) -> None:
    proc = run("serve", *options, ready=None)
    assert proc.wait() == status
    [line] = proc.errors
    assert line.startswith(f"holdfast: {code}: ")


def test_serve_does_not_create_a_store(run: Run, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "holdfast.cli", "serve", "--store", "elsewhere"]
    proc = Proc.spawn(command, ready=None, cwd=tmp_path)
    try:
        assert proc.wait() == 1
        assert not (tmp_path / "elsewhere").exists()
    finally:
        proc.close()

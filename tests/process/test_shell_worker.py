"""The shell worker of `examples/shell-worker` against a real server: tasks, retries, kills, cancellation."""

from __future__ import annotations

import http.client
import itertools
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.watch import assert_no_client_left, until
from tests.processes import ROOT, Proc, require_programs

EXAMPLE = ROOT / "examples" / "shell-worker"
WORKER = EXAMPLE / "worker.sh"
QUEUE = "shell"
TOKEN = "a-token-for-the-shell"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(90),
]


class TaskApiClient:
    def __init__(self, port: int, queue: str) -> None:
        self._port = port
        self._queue = queue

    def call(self, method: str, path: str, document: Any = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=70)
        try:
            body = None if document is None else json.dumps(document)
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
            connection.request(method, f"/v1/{path}", body, headers)
            answer = connection.getresponse()
            data = answer.read()
            assert answer.status < 300, data
            return json.loads(data)
        finally:
            connection.close()

    def submit(self, name: str, *args: Any, **options: Any) -> str:
        task = {"name": name, "args": args, "options": {"queue": self._queue, **options}}
        return str(self.call("POST", "tasks", task)["id"])

    def wait_for_end(self, id: str) -> Any:
        found = self.call("GET", f"tasks/{id}?wait_s=30")
        assert found["state"] in ("COMPLETED", "FAILED", "DEAD"), found
        return found

    def state(self, id: str) -> str:
        return str(self.call("GET", f"tasks/{id}")["state"])


class TaskServer:
    """A server with its store. It starts again on the same port."""

    def __init__(self, path: Path) -> None:
        self.path = path
        shutil.copy(EXAMPLE / "app.py", path / "app.py")
        self.port = 0
        self._started: list[Proc] = []
        self.proc = self.start()

    def start(self) -> Proc:
        argv = [sys.executable, "-m", "holdfast.cli", "up", "app:app", "--store", "data"]
        self.proc = Proc.spawn(
            [*argv, "--http", f"127.0.0.1:{self.port}"],
            cwd=self.path,
            env={"HOLDFAST_TOKEN": TOKEN},
        )
        self._started.append(self.proc)
        self.port = int(self.proc.lines[0].rpartition(":")[2])
        return self.proc

    def close(self) -> None:
        for proc in self._started:
            proc.close()
        assert_no_client_left(self.path / "data")


class ShellWorkerRig:
    """A rig with a separate queue, a directory of jobs, and shell workers."""

    def __init__(self, server: TaskServer, path: Path, queue: str) -> None:
        self.server = server
        self.path = path
        self.queue = queue
        self.jobs = path / "jobs"
        shutil.copytree(EXAMPLE / "jobs", self.jobs)
        self._started: list[Proc] = []
        self.api = TaskApiClient(server.port, queue)

    def start_worker(self, name: str, *, token: str = TOKEN) -> Proc:
        url = f"http://127.0.0.1:{self.server.port}"
        proc = Proc.spawn(
            ["sh", str(WORKER), str(self.jobs), self.queue],
            env={"HOLDFAST_URL": url, "HOLDFAST_TOKEN": token, "WORKER": name},
            cwd=self.path,
        )
        self._started.append(proc)
        return proc

    def add_job(self, name: str, script: str) -> None:
        file = self.jobs / name
        file.write_text("#!/bin/sh\n" + script, encoding="utf-8")
        file.chmod(0o755)

    def close(self) -> None:
        for proc in reversed(self._started):
            proc.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TaskServer]:
    require_programs("curl")
    made = TaskServer(tmp_path_factory.mktemp("server"))
    yield made
    made.close()


@pytest.fixture
def home(server: TaskServer, tmp_path: Path) -> Iterator[ShellWorkerRig]:
    made = ShellWorkerRig(server, tmp_path, f"{QUEUE}-{next(_numbers)}")
    try:
        yield made
    finally:
        made.close()


_numbers = itertools.count(1)


def expect_end(worker: Proc, job: str, id: str, end: str) -> None:
    """Wait for the line of the first task of this worker. A lease has the number of its grant inside the task id."""
    store, number = id.split("-")
    line = worker.expect(f"{job} {store}-")
    assert re.fullmatch(rf"{job} {store}-\d+-{number} {end}", line), line


def test_shell_worker_runs_tasks_of_its_queue(home: ShellWorkerRig) -> None:
    worker = home.start_worker("one")
    done = home.api.wait_for_end(home.api.submit("checksum", "hello"))
    assert done["result"].startswith("2cf24dba5fb0a30e")
    assert (done["worker"], done["attempt"]) == ("one", 1)
    expect_end(worker, "checksum", done["id"], "COMMITTED")


def test_refused_task_fails_with_the_error_output_of_the_job(home: ShellWorkerRig) -> None:
    home.start_worker("one")
    failed = home.api.wait_for_end(home.api.submit("checksum", 5))
    assert (failed["state"], failed["reason"]) == ("FAILED", "refused")
    assert "one argument, plain text" in failed["error"]


@pytest.mark.deep
def test_task_without_a_job_program_stays_waiting(home: ShellWorkerRig) -> None:
    home.start_worker("one")
    others = [home.api.submit("../worker.sh"), home.api.submit("resize")]
    home.api.wait_for_end(home.api.submit("checksum", "a"))
    assert [home.api.state(id) for id in others] == ["WAITING", "WAITING"]
    home.add_job("resize", "echo 5")
    assert home.api.wait_for_end(others[1])["result"] == 5


def test_failed_job_is_retried(home: ShellWorkerRig) -> None:
    home.add_job(
        "flaky", 'if [ -f again ]; then echo 7; else : > again; echo "no \\"ink\\"" >&2; exit 3; fi'
    )
    home.start_worker("one")
    done = home.api.wait_for_end(home.api.submit("flaky"))
    assert (done["result"], done["attempt"], done["failures"]) == (7, 2, 1)


def test_job_output_without_json_fails_with_bad_result(home: ShellWorkerRig) -> None:
    home.add_job("chatty", "echo this is no JSON")
    home.start_worker("one")
    failed = home.api.wait_for_end(home.api.submit("chatty"))
    assert (failed["state"], failed["reason"]) == ("FAILED", "bad_result")


def test_task_arguments_cannot_inject_a_lease(home: ShellWorkerRig) -> None:
    home.add_job("echo", "cat")
    home.start_worker("one")
    trap = '","lease":"1-99-99","name":"other'
    done = home.api.wait_for_end(home.api.submit("echo", trap))
    assert (done["state"], done["result"]["args"]) == ("COMPLETED", [trap])


def test_lease_is_renewed_while_the_job_runs(home: ShellWorkerRig) -> None:
    # The job takes longer than its lease. The lease is long enough to be renewed on a busy machine.
    home.add_job("slow", "for n in 1 2 3 4 5 6 7 8 9 10; do sleep 0.5; echo $n >&2; done; echo 1")
    home.start_worker("one")
    home.start_worker("two")
    done = home.api.wait_for_end(home.api.submit("slow", lease_s=4, execution_window_s=4))
    assert (done["result"], done["attempt"], done["expiries"]) == (1, 1, 0)


def test_task_of_a_killed_worker_is_leased_to_another_worker(home: ShellWorkerRig) -> None:
    home.add_job("once", "if [ -f began ]; then echo 2; else : > began; sleep 100; fi")
    first = home.start_worker("one")
    id = home.api.submit("once", lease_s=3)
    until(lambda: (home.path / "began").exists(), "it is begun")
    first.close()
    home.start_worker("two")
    done = home.api.wait_for_end(id)
    assert (done["result"], done["worker"], done["attempt"]) == (2, "two", 2)


def test_cancelled_task_terminates_its_job(home: ShellWorkerRig) -> None:
    home.add_job("long", "trap ': > ended; exit 1' TERM; : > began; sleep 100 & wait $!")
    worker = home.start_worker("one")
    id = home.api.submit("long", lease_s=3)
    until(lambda: (home.path / "began").exists(), "it is begun")
    home.api.call("POST", f"tasks/{id}/cancel", {})
    until(lambda: (home.path / "ended").exists(), "its job is told")
    expect_end(worker, "long", id, "CANCELLED")


def test_sigterm_lets_the_worker_finish_its_job(home: ShellWorkerRig) -> None:
    home.add_job("gate", ": > began; until [ -f open ]; do sleep 0.05; done; echo 3")
    worker = home.start_worker("one")
    id = home.api.submit("gate")
    until(lambda: (home.path / "began").exists(), "it is begun")
    worker.terminate()
    (home.path / "open").touch()
    assert home.api.wait_for_end(id)["result"] == 3
    assert worker.wait() == 0


def test_sigterm_of_an_idle_worker_leases_no_task(home: ShellWorkerRig) -> None:
    worker = home.start_worker("one")
    home.api.wait_for_end(home.api.submit("checksum", "a"))
    worker.terminate()
    assert worker.wait() == 0
    id = home.api.submit("checksum", "b")
    home.start_worker("two")
    assert home.api.wait_for_end(id)["attempt"] == 1


def test_worker_survives_a_restart_of_the_server(home: ShellWorkerRig) -> None:
    home.add_job("gate", ": > began; until [ -f open ]; do sleep 0.05; done; echo 3")
    home.start_worker("one")
    id = home.api.submit("gate")
    until(lambda: (home.path / "began").exists(), "it is begun")
    home.server.proc.kill()
    (home.path / "open").touch()
    home.server.start()
    done = home.api.wait_for_end(id)
    assert (done["result"], done["attempt"]) == (3, 1)


def test_worker_without_a_token_gets_no_task(home: ShellWorkerRig) -> None:
    home.start_worker("one", token="")
    id = home.api.submit("checksum", "a")
    home.start_worker("two")
    assert home.api.wait_for_end(id)["worker"] == "two"

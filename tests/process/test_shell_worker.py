"""The worker in plain sh, against a real server: it does tasks, is killed, is told, and nothing is lost."""

from __future__ import annotations

import http.client
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.watch import assert_nobody_is_left, until
from tests.processes import ROOT, Proc, need

EXAMPLE = ROOT / "examples" / "shell-worker"
WORKER = EXAMPLE / "worker.sh"
LINGER_S = 3.0
QUEUE = "shell"
TOKEN = "a-token-for-the-shell"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(90),
]


class Api:
    def __init__(self, port: int) -> None:
        self._port = port

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
        task = {"name": name, "args": args, "options": {"queue": QUEUE, **options}}
        return str(self.call("POST", "tasks", task)["id"])

    def ended(self, id: str) -> Any:
        found = self.call("GET", f"tasks/{id}?wait_s=30")
        assert found["state"] in ("COMPLETED", "FAILED", "DEAD"), found
        return found

    def state(self, id: str) -> str:
        return str(self.call("GET", f"tasks/{id}")["state"])


class Home:
    """A server, a directory of jobs, and workers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.jobs = path / "jobs"
        shutil.copytree(EXAMPLE / "jobs", self.jobs)
        self.port = 0
        self._started: list[Proc] = []
        self.server = self.serve()
        self.api = Api(self.port)

    def serve(self) -> Proc:
        argv = [sys.executable, "-m", "holdfast.cli", "up", "app:app", "--store", "data"]
        proc = Proc.spawn(
            [*argv, "--http", f"127.0.0.1:{self.port}"],
            cwd=self.path,
            env={"HOLDFAST_TOKEN": TOKEN},
        )
        self._started.append(proc)
        self.port = int(proc.lines[0].rpartition(":")[2])
        return proc

    def work(self, name: str, *, token: str = TOKEN) -> Proc:
        url = f"http://127.0.0.1:{self.port}"
        proc = Proc.spawn(
            ["sh", str(WORKER), str(self.jobs), QUEUE],
            env={"HOLDFAST_URL": url, "HOLDFAST_TOKEN": token, "WORKER": name},
            cwd=self.path,
        )
        self._started.append(proc)
        return proc

    def job(self, name: str, script: str) -> None:
        file = self.jobs / name
        file.write_text("#!/bin/sh\n" + script, encoding="utf-8")
        file.chmod(0o755)

    def close(self) -> None:
        for proc in reversed(self._started):
            proc.close()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    need("curl")
    shutil.copy(EXAMPLE / "app.py", tmp_path / "app.py")
    made = Home(tmp_path)
    try:
        yield made
    finally:
        made.close()
    assert_nobody_is_left(tmp_path / "data", LINGER_S)


def test_it_does_the_tasks_of_its_queue(home: Home) -> None:
    worker = home.work("one")
    done = home.api.ended(home.api.submit("checksum", "hello"))
    assert done["result"].startswith("2cf24dba5fb0a30e")
    assert (done["worker"], done["attempt"]) == ("one", 1)
    worker.expect(f"checksum {done['id'].replace('-', '-1-')} COMMITTED")


def test_what_cannot_be_done_is_refused_with_what_was_said(home: Home) -> None:
    home.work("one")
    failed = home.api.ended(home.api.submit("checksum", 5))
    assert (failed["state"], failed["reason"]) == ("FAILED", "refused")
    assert "one argument, plain text" in failed["error"]


@pytest.mark.deep
def test_what_it_has_no_program_for_is_left_to_others(home: Home) -> None:
    home.work("one")
    others = [home.api.submit("../worker.sh"), home.api.submit("resize")]
    home.api.ended(home.api.submit("checksum", "a"))
    assert [home.api.state(id) for id in others] == ["WAITING", "WAITING"]
    home.job("resize", "echo 5")
    assert home.api.ended(others[1])["result"] == 5


def test_what_fails_is_tried_again(home: Home) -> None:
    home.job(
        "flaky", 'if [ -f again ]; then echo 7; else : > again; echo "no \\"ink\\"" >&2; exit 3; fi'
    )
    home.work("one")
    done = home.api.ended(home.api.submit("flaky"))
    assert (done["result"], done["attempt"], done["failures"]) == (7, 2, 1)


def test_what_prints_no_json_is_refused(home: Home) -> None:
    home.job("chatty", "echo this is no JSON")
    home.work("one")
    failed = home.api.ended(home.api.submit("chatty"))
    assert (failed["state"], failed["reason"]) == ("FAILED", "bad_result")


def test_text_in_the_arguments_is_not_taken_for_the_lease(home: Home) -> None:
    home.job("echo", "cat")
    home.work("one")
    trap = '","lease":"1-99-99","name":"other'
    done = home.api.ended(home.api.submit("echo", trap))
    assert (done["state"], done["result"]["args"]) == ("COMPLETED", [trap])


def test_a_lease_is_kept_while_the_job_goes_on(home: Home) -> None:
    # Longer than its lease, which is long enough for a busy machine to keep it.
    home.job("slow", "for n in 1 2 3 4 5 6 7 8 9 10; do sleep 0.5; echo $n >&2; done; echo 1")
    home.work("one")
    home.work("two")
    done = home.api.ended(home.api.submit("slow", lease_s=4, execution_window_s=4))
    assert (done["result"], done["attempt"], done["expiries"]) == (1, 1, 0)


def test_the_task_of_a_killed_worker_goes_to_another(home: Home) -> None:
    home.job("once", "if [ -f began ]; then echo 2; else : > began; sleep 100; fi")
    first = home.work("one")
    id = home.api.submit("once", lease_s=3)
    until(lambda: (home.path / "began").exists(), "it is begun")
    first.close()
    home.work("two")
    done = home.api.ended(id)
    assert (done["result"], done["worker"], done["attempt"]) == (2, "two", 2)


def test_a_cancelled_task_ends_its_job(home: Home) -> None:
    home.job("long", "trap ': > ended; exit 1' TERM; : > began; sleep 100 & wait $!")
    worker = home.work("one")
    id = home.api.submit("long", lease_s=3)
    until(lambda: (home.path / "began").exists(), "it is begun")
    home.api.call("POST", f"tasks/{id}/cancel", {})
    until(lambda: (home.path / "ended").exists(), "its job is told")
    worker.expect(f"long {id.replace('-', '-1-')} CANCELLED")


def test_a_worker_that_is_told_to_stop_finishes_its_job(home: Home) -> None:
    home.job("gate", ": > began; until [ -f open ]; do sleep 0.05; done; echo 3")
    worker = home.work("one")
    id = home.api.submit("gate")
    until(lambda: (home.path / "began").exists(), "it is begun")
    worker.terminate()
    (home.path / "open").touch()
    assert home.api.ended(id)["result"] == 3
    assert worker.wait() == 0


def test_an_idle_worker_that_is_told_to_stop_takes_nothing_with_it(home: Home) -> None:
    worker = home.work("one")
    home.api.ended(home.api.submit("checksum", "a"))
    worker.terminate()
    assert worker.wait() == 0
    id = home.api.submit("checksum", "b")
    home.work("two")
    assert home.api.ended(id)["attempt"] == 1


def test_workers_outlive_a_restart_of_the_server(home: Home) -> None:
    home.job("gate", ": > began; until [ -f open ]; do sleep 0.05; done; echo 3")
    home.work("one")
    id = home.api.submit("gate")
    until(lambda: (home.path / "began").exists(), "it is begun")
    home.server.kill()
    (home.path / "open").touch()
    home.serve()
    done = home.api.ended(id)
    assert (done["result"], done["attempt"]) == (3, 1)


def test_without_the_token_a_worker_gets_nothing(home: Home) -> None:
    home.work("one", token="")
    id = home.api.submit("checksum", "a")
    home.work("two")
    assert home.api.ended(id)["worker"] == "two"

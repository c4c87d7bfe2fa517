"""These have a log line with their ids: failed events, parked worlds, lost leases, fenced writes, dead
effects, failed tasks, parked flows, replaced writers, stores without space."""

from __future__ import annotations

import ast
import io
import json
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast import logs
from holdfast.app.task_handle import TaskFailedError
from holdfast.cli.process_log import SpaceWatch
from holdfast.durable import lease as leases
from holdfast.ops import log_format
from holdfast.ops.store_size import StoreSpace
from holdfast.world import catalog
from tests.process.watch import until, writer_of
from tests.processes import Proc
from tests.tidy_rules import ROOT


class Struck(hf.Event):
    how: str


@hf.effect("ring", attempts=1)
def ring(call: hf.Call, how: str) -> str:
    logging.getLogger("user.effects").warning("ringing")
    if how == "broken":
        raise ValueError("no bell")
    return how


class Bell(hf.World):
    rung: int = 0

    @hf.on(Struck)
    def struck(self, event: Struck, cx: hf.Context) -> None:
        logging.getLogger("user.worlds").warning("struck %s", event.how)
        if event.how == "raise":
            raise ValueError("cracked")
        self.rung += 1
        if event.how != "quiet":
            cx.do(ring, event.how)

    @hf.on(ring)
    def rang(self, receipt: Any, cx: hf.Context) -> None:
        self.rung += 1


@hf.task(attempts=1)
def polish(what: str) -> str:
    logging.getLogger("user.tasks").warning("polishing")
    raise ValueError(f"cannot polish {what}")


@hf.flow
async def tune(what: str) -> str:
    return await hf.step(tighten, what)


def tighten(what: str) -> str:
    logging.getLogger("user.steps").warning("tightening")
    return what


APP = hf.App("tower", worlds=[Bell], effects=[ring], tasks=[polish], flows=[tune])

Line = dict[str, Any]
ReadLines = Callable[[], list[Line]]


@pytest.fixture
def lines() -> Iterator[ReadLines]:
    """Log as JSON into memory. Return the lines so far."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(log_format.JsonFormatter({"worker": "w1"}))
    root = logging.getLogger()
    root.addHandler(handler)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.removeHandler(handler)


def one(lines: ReadLines, message: str) -> Line:
    """Wait for a message and return its only line."""
    until(lambda: [line for line in lines() if line["message"] == message], message)
    [line] = [line for line in lines() if line["message"] == message]
    return line


def test_failed_event_is_logged_with_its_world_and_error(tmp_path: Path, lines: ReadLines) -> None:
    with APP.open(str(tmp_path / "store")) as rt:
        rt.world(Bell, "big").send(Struck("raise"))
        line = one(lines, "event failed")
    assert line["level"] == "warning"
    assert line["logger"] == "holdfast.worlds"
    assert (line["universe"], line["world"]) == ("tower", "Bell/big")
    assert line["code"] == "reducer_failed"
    assert "ValueError: cracked" in line["error"]
    assert line["seq"] == 1


def test_dead_effect_is_logged_with_its_kind(tmp_path: Path, lines: ReadLines) -> None:
    with APP.open(str(tmp_path / "store")) as rt:
        rt.world(Bell, "big").send(Struck("broken"))
        line = one(lines, "dead letter")
    assert line["logger"] == "holdfast.effects"
    assert (line["universe"], line["kind"], line["failures"]) == ("tower", "ring", 1)
    assert line["error"] == "ValueError: no bell"


def test_failed_attempt_of_a_task_is_logged(tmp_path: Path, lines: ReadLines) -> None:
    with APP.open(str(tmp_path / "store")) as rt:
        handle = rt.submit(polish, "brass")
        with pytest.raises(TaskFailedError):
            handle.result(timeout=30)
        line = one(lines, "attempt failed")
    assert (line["task"], line["name"], line["attempt"]) == (handle.id, "polish", 1)
    assert line["error"] == "ValueError: cannot polish brass"


def test_lines_of_user_code_have_the_ids_of_what_runs(tmp_path: Path, lines: ReadLines) -> None:
    with APP.open(str(tmp_path / "store")) as rt:
        rt.world(Bell, "big").send(Struck("soft"))
        task = rt.submit(polish, "brass")
        flow = rt.start(tune, "rope")
        assert flow.result(timeout=30) == "rope"
        reducer = one(lines, "struck soft")
        effect = one(lines, "ringing")
        attempt = one(lines, "polishing")
        step = one(lines, "tightening")
    assert (reducer["world"], reducer["universe"]) == ("Bell/big", "tower")
    assert (effect["effect"], effect["attempt"]) == ("ring", 1)
    assert len(effect["intent"]) == 64
    assert (attempt["task"], attempt["name"], attempt["attempt"]) == (task.id, "polish", 1)
    assert (step["flow"], step["step"]) == (flow.id, "tighten")
    assert reducer["worker"] == "w1"
    # The ids end with the code that they belong to.
    logging.getLogger("user").warning("outside")
    assert "world" not in lines()[-1]


def test_lost_lease_is_logged(tmp_path: Path, lines: ReadLines) -> None:
    with APP.open(str(tmp_path / "store")) as rt:
        world = rt.world(Bell, "big")
        world.send(Struck("quiet"))
        until(lambda: world.state().rung == 1, "the event")
        world_id = rt.store.read(catalog.find_id, "tower", "Bell", "big")
        assert world_id is not None
        subject = catalog.subject_of("tower", world_id)
        rt.store.transact(leases.force_release, subject, "taken by the test")
        world.send(Struck("quiet"))
        lost = ("lease lost", "write fenced")
        [line] = until(lambda: [line for line in lines() if line["message"] in lost], "the line")
    assert (line["world"], line["epoch"]) == ("Bell/big", 1)


def test_replaced_writer_is_logged(tmp_path: Path, lines: ReadLines) -> None:
    with APP.open(str(tmp_path / "store"), roles=()) as rt:
        rt.world(Bell, "big").send(Struck("quiet"))
        os.kill(writer_of(tmp_path / "store").pid, signal.SIGKILL)
        rt.world(Bell, "big").send(Struck("quiet"))
        line = one(lines, "writer replaced")
    assert line["logger"] == "holdfast.store"
    assert line["store"] == str(tmp_path / "store")


def test_store_that_fills_up_is_logged_once_for_each_limit(
    tmp_path: Path, lines: ReadLines
) -> None:
    with APP.open(str(tmp_path / "store"), roles=()) as rt:
        free = iter((50, 19, 18, 9, 8, 60, 15))
        watch = SpaceWatch(rt.store, 0, lambda store: StoreSpace(1 << 40, 100, next(free)))
        for _ in range(7):
            watch.check()
    shown = [(line["message"], line["used"]) for line in lines()]
    assert shown == [
        ("store fills up", "81%"),
        ("store fills up", "91%"),
        ("store has room again", "40%"),
        ("store fills up", "85%"),
    ]


def test_silenced_process_logs_nothing(lines: ReadLines) -> None:
    with logs.silence():
        logs.warn("worlds", "event failed", world="Bell/big")
    assert lines() == []
    logs.warn("worlds", "event failed", world="Bell/big")
    assert len(lines()) == 1


@pytest.mark.parametrize("text", ["a\nb", "\x1b[2J", "a b", "", "\u2028", 'say "x"'])
def test_text_lines_cannot_be_forged_by_values(text: str) -> None:
    record = logging.LogRecord("user", logging.WARNING, "", 0, text, (), None)
    record.holdfast_ids = {"error": text, "world": f"Bell/{text}"}
    line = log_format.TextFormatter({}).format(record)
    assert line.isprintable()
    document = json.loads(log_format.JsonFormatter({}).format(record))
    assert (document["message"], document["error"]) == (text, text)


def test_traceback_cannot_look_like_another_line() -> None:
    forged = "2026-01-01T00:00:00.000Z WARNING holdfast.worlds world parked: world=Bell/big"
    try:
        raise ValueError(f"x\n{forged}\r{forged}")
    except ValueError:
        record = logging.LogRecord("user", logging.ERROR, "", 0, "failed", (), sys.exc_info())
    first, *rest = log_format.TextFormatter({}).format(record).split("\n")
    assert first.endswith("ERROR user failed")
    assert len(rest) > 3
    assert all(line.startswith("    ") and line.isprintable() for line in rest)


def test_long_values_are_cut(lines: ReadLines) -> None:
    logs.warn("worlds", "event failed", error="x" * 10_000)
    assert len(lines()[0]["error"]) == logs.TEXT_CHARS_MAX + 1


def test_ids_of_threads_do_not_mix(lines: ReadLines) -> None:
    def log_in_thread(name: str) -> None:
        mark = logs.RUNNING.set(lambda: {"world": name})
        logging.getLogger("user").warning("in %s", name)
        logs.RUNNING.reset(mark)

    threads = [threading.Thread(target=log_in_thread, args=(f"w{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {line["message"]: line["world"] for line in lines()} == {f"in w{n}": f"w{n}" for n in range(8)}  # fmt: skip


UP_APP = """
import logging
import holdfast as hf

@hf.task(attempts=1)
def polish(what: str) -> str:
    logging.getLogger("mine").info("polishing %s", what)
    raise ValueError("no polish")

app = hf.App("tower", tasks=[polish])
"""


@pytest.mark.parametrize("level", ["info", "warning"])
def test_up_logs_json_lines_on_standard_error(tmp_path: Path, level: str) -> None:
    (tmp_path / "tower.py").write_text(UP_APP, encoding="utf-8")
    up = [
        sys.executable,
        "-m",
        "holdfast.cli",
        "up",
        "tower:app",
        "--store",
        "data",
        "--worker",
        "w1",
    ]
    options = ["--log", "json", "--log-level", level]
    submit = (
        "import tower\nwith tower.app.open('data', roles=()) as rt:\n"
        "    try:\n        rt.submit(tower.polish, 'brass').result(timeout=30)\n"
        "    except Exception:\n        print('ended', flush=True)\n"
    )
    with Proc.spawn([*up, *options], ready="ready", cwd=tmp_path) as process:
        with Proc.spawn([sys.executable, "-c", submit], ready=None, cwd=tmp_path) as client:
            assert client.wait(60) == 0
        until(lambda: any("attempt failed" in line for line in process.errors), "the line")
        documents = [json.loads(line) for line in process.errors]
    [failed] = [one for one in documents if one["message"] == "attempt failed"]
    assert (failed["universe"], failed["worker"], failed["name"]) == ("tower", "w1:task", "polish")
    users = [one for one in documents if one["logger"] == "mine"]
    assert [one["message"] for one in users] == (["polishing brass"] if level == "info" else [])
    assert all(one["task"] == failed["task"] for one in users)


def test_documented_messages_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "logs.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `([a-z ]+)` \| `holdfast", page, re.M))
    in_code = {
        text
        for path in (ROOT / "src" / "holdfast").rglob("*.py")
        if path.name != "logs.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and (at := MESSAGE_ARGUMENT.get(ast.unparse(node.func), 9)) <= len(node.args)
        for part in ast.walk(node.args[at - 1])
        if isinstance(part, ast.Constant) and " " in (text := str(part.value))
    }
    assert documented == in_code


# The functions that log, and the position of the message among their arguments, from 1.
MESSAGE_ARGUMENT = {
    "log": 2,
    "logs.warn": 2,
    "logs.inform": 2,
    "_log_line": 2,
    "host.warn": 1,
    "hosted.host.warn": 1,
}

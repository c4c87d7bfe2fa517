"""`holdfast replay`."""

from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.durable import queue
from holdfast.runner import Recorder, Runner
from tests.cli import handlers
from tests.cli.conftest import Run


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Three items that were handled well."""
    file = tmp_path / "steps"
    with stores.open("memory:") as store, Recorder(file) as recorder:
        store.transact(queue.put_many, "mail", [b"a", b"b", b"c"])
        runner = Runner(store, "mail", handlers.accept, worker="w", replay=recorder, bootstrap=True)
        runner.boot()
        assert runner.tick().done == 3
    return file


def test_a_handler_that_does_the_same_matches(run: Run, recording: Path) -> None:
    ran = run("replay", recording, "--handler", "tests.cli.handlers:accept", "--json")
    assert ran.code == 0
    assert (ran.document["attempts"], ran.document["matched"]) == (3, 3)


def test_one_that_does_not_is_exit_code_1(run: Run, recording: Path) -> None:
    ran = run("replay", recording, "--handler", "tests.cli.handlers:refuse")
    assert ran.code == 1
    assert ran.error.startswith("replay_differs: mismatches=3 ")
    assert ran.out.splitlines()[-1].split() == ["mail", "3", "1", "ok", "refused"]


@pytest.mark.parametrize(
    "name",
    [
        "handlers",
        "tests.cli.handlers:missing",
        "no_such_module:f",
        "tests.cli.handlers:not_a_function",
    ],
)
def test_a_handler_that_is_none(run: Run, recording: Path, name: str) -> None:
    ran = run("replay", recording, "--handler", name)
    assert ran.code == 1
    assert ran.error.startswith("invalid: what='handler'")
    assert "name a function as module:function" in ran.error


def test_a_damaged_recording_is_replayed_up_to_the_damage(run: Run, recording: Path) -> None:
    recording.write_bytes(recording.read_bytes()[:-3])
    ran = run("replay", recording, "--handler", "tests.cli.handlers:accept", "--json")
    assert ran.code == 1
    assert ran.document["attempts"] == 3
    assert ran.document["damage"]["offset"] > 0
    assert ran.error.startswith("recording_damaged: ")


def test_no_recording(run: Run, tmp_path: Path) -> None:
    ran = run("replay", tmp_path / "none", "--handler", "tests.cli.handlers:accept")
    assert ran.code == 1
    assert ran.error.startswith("not_found: what='recording'")

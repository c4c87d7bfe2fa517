"""`holdfast replay`."""

from pathlib import Path

import pytest

from holdfast import store as stores
from holdfast.durable import queue
from holdfast.runner import Recorder, Runner
from tests.cli import handlers
from tests.cli.conftest import RunCommand


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """A recording of three items that were handled successfully."""
    file = tmp_path / "steps"
    with stores.open("memory:") as store, Recorder(file) as recorder:
        store.transact(queue.put_many, "mail", [b"a", b"b", b"c"])
        runner = Runner(store, "mail", handlers.accept, worker="w", replay=recorder, bootstrap=True)
        runner.boot()
        assert runner.tick().done == 3
    return file


def test_replay_of_an_equivalent_handler_matches(run: RunCommand, recording: Path) -> None:
    result = run("replay", recording, "--handler", "tests.cli.handlers:accept", "--json")
    assert result.code == 0
    assert (result.document["attempts"], result.document["matched"]) == (3, 3)


def test_replay_of_a_differing_handler_exits_with_1(run: RunCommand, recording: Path) -> None:
    result = run("replay", recording, "--handler", "tests.cli.handlers:refuse")
    assert result.code == 1
    assert result.error.startswith("replay_differs: mismatches=3 ")
    assert result.out.splitlines()[-1].split() == ["mail", "3", "1", "ok", "refused"]


@pytest.mark.parametrize(
    "name",
    [
        "handlers",
        "tests.cli.handlers:missing",
        "no_such_module:f",
        "tests.cli.handlers:not_a_function",
    ],
)
def test_replay_with_an_invalid_handler_name_is_refused(
    run: RunCommand, recording: Path, name: str
) -> None:
    result = run("replay", recording, "--handler", name)
    assert result.code == 1
    assert result.error.startswith("invalid: what='handler'")
    assert "give module:function" in result.error


def test_replay_of_a_damaged_recording_stops_at_the_damage(
    run: RunCommand, recording: Path
) -> None:
    recording.write_bytes(recording.read_bytes()[:-3])
    result = run("replay", recording, "--handler", "tests.cli.handlers:accept", "--json")
    assert result.code == 1
    assert result.document["attempts"] == 3
    assert result.document["damage"]["offset"] > 0
    assert result.error.startswith("recording_damaged: ")


def test_replay_of_a_missing_recording_is_not_found(run: RunCommand, tmp_path: Path) -> None:
    result = run("replay", tmp_path / "none", "--handler", "tests.cli.handlers:accept")
    assert result.code == 1
    assert result.error.startswith("not_found: what='recording'")

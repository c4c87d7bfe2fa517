"""The texts that a user sees: typed errors of one line with the remedy, and the lines of the commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.cli import main
from holdfast.errors import NotFound
from holdfast.flows.model import FlowEndedError, FlowNotFound

MISSING = (
    "it was never started here, or it was removed after its retention; "
    "`holdfast flows list` lists the flows"
)
NAMED = "a flow is named by its id, such as f1-17, or by NAME/KEY; `holdfast flows list` lists them"


class Reminder(hf.Event):
    text: str


async def cannot_refund() -> None:
    raise OSError("the bank is down")


async def out_of_stock() -> None:
    raise ValueError("no stock")


@hf.flow
async def done() -> int:
    return 1


@hf.flow
async def broken() -> None:
    hf.undo(hf.options(cannot_refund, name="refund", backoff_s=0.001))
    await hf.step(out_of_stock)


app = hf.App("shop", flows=[done, broken], events=[Reminder])


@pytest.fixture
def rt(tmp_path: Path) -> Iterator[Any]:
    with app.open(str(tmp_path)) as runtime:
        yield runtime


def error_line(capsys: pytest.CaptureFixture[str], path: Path, *argv: str) -> str:
    """Run a command that fails, and return its only line."""
    capsys.readouterr()
    assert main([*argv, "--store", str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    [line] = err.splitlines()
    return str(line)


def test_unknown_flow_is_not_found_by_id_and_by_key(rt: Any) -> None:
    with pytest.raises(FlowNotFound) as by_id:
        rt.flow("f1-99")
    assert str(by_id.value) == f"not_found: what='flow' flow='f1-99' ({MISSING})"
    with pytest.raises(NotFound) as by_key:
        rt.flow(done, key="o-1")
    assert str(by_key.value) == f"not_found: what='flow' name='done' key='o-1' ({MISSING})"


def test_unknown_flow_is_one_line_of_a_command(
    rt: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rt.start(done).result(timeout=30)
    for action in ("show", "steps", "why", "cancel", "resume", "redrive"):
        line = error_line(capsys, tmp_path, "flows", action, "f1-99")
        assert line == f"holdfast: not_found: what='flow' flow='f1-99' ({NAMED})"


def test_send_to_an_ended_flow_names_the_remedy(
    rt: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handle = rt.start(done)
    handle.result(timeout=30)
    text = (
        "flow_ended: what='flow' flow='f1-1' state='COMPLETED' "
        "(the flow has ended; start a new one, or redrive it)"
    )
    with pytest.raises(FlowEndedError) as refused:
        handle.send(Reminder("late"))
    assert str(refused.value) == text
    argv = ("flows", "send", "f1-1", "Reminder", '{"text": "late"}', "--app", f"{__name__}:app")
    assert error_line(capsys, tmp_path, *argv) == f"holdfast: {text}"


def test_failed_undo_is_in_the_result_the_steps_and_the_dead_letters(
    rt: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handle = rt.start(broken)
    with pytest.raises(hf.FlowFailed) as failed:
        handle.result(timeout=30)
    # The cause of the end is the failed step, not the failed compensation.
    assert str(failed.value) == (
        "flow_failed: flow='f1-1' name='broken' state='FAILED' code='step_failed' step='out_of_stock' "
        "error_type='ValueError' error='no stock' "
        "(inspect it with `holdfast flows show`, retry it with `holdfast flows redrive`)"
    )
    undo = handle.steps()[-1]
    assert (undo.name, undo.state, undo.code) == ("undo:refund", "failed", "undo_failed")
    assert (undo.error_type, undo.error, undo.attempts) == ("OSError", "the bank is down", 5)
    assert main(["flows", "steps", "f1-1", "--store", str(tmp_path)]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if "undo:" in line]
    assert line.split()[1:4] == ["undo:refund#1", "failed", "5"]
    assert line.endswith("OSError: the bank is down")
    assert main(["dead", "list", "shop/undo-failed", "--store", str(tmp_path)]) == 0
    [_, line] = capsys.readouterr().out.splitlines()
    assert line.split()[:2] == ["1", "undo_failed"]
    assert line.endswith("OSError: the bank is down")

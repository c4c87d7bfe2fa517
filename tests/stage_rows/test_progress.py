"""The progress display: plain lines, terminal, notebook and quiet."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from holdfast.clock import MS, S
from holdfast.errors import Invalid
from holdfast.ledger.runs import RunProgress
from holdfast.spark import progress as display
from holdfast.spark.progress import (
    MODES,
    PLAIN_EVERY_NS,
    SORTING,
    TERMINAL_EVERY_NS,
    ProgressDisplay,
    ProgressFrame,
)

SIZE = 2000
START_NS = 1_790_000_000 * S


def progress_at(ns: int, done: int, *, committed: int = 0, **more: Any) -> RunProgress:
    counts = [SIZE - done, 0, 0, done - committed, 0, 0, 0, committed]
    return RunProgress(
        updated_ns=START_NS + ns,
        started_ns=START_NS,
        counts=counts,
        ended=[done, 0, 0, 0],
        calls=done,
        **more,
    )


class TerminalStream(io.StringIO):
    def isatty(self) -> bool:
        return True


# -- plain lines ------------------------------------------------------------------------------------


def lines_of(*updates: RunProgress, mode: Any = "plain", **options: Any) -> list[str]:
    stream = io.StringIO()
    with ProgressDisplay("labels", SIZE, mode, stream=stream, **options) as bar:
        for update in updates:
            bar.update(update)
    return stream.getvalue().splitlines()


def test_plain_progress_prints_the_first_and_the_last_update() -> None:
    lines = lines_of(*(progress_at(ms * MS, ms) for ms in range(1, 1001)))
    assert len(lines) == 2
    assert lines[0].startswith("labels run 1/2,000 (0 %); 1 done;")
    assert lines[1].startswith("labels run 1,000/2,000 (50 %); 1,000 done; 1,000/s, 1 s left")


def test_plain_progress_prints_lines_at_a_bounded_rate() -> None:
    updates = [progress_at(second * S, second) for second in range(101)]
    assert len(lines_of(*updates)) == 100 * S // PLAIN_EVERY_NS + 1


def test_plain_progress_prints_a_new_phase_immediately() -> None:
    lines = lines_of(
        progress_at(0, 0), progress_at(S, SIZE), progress_at(2 * S, SIZE, committed=SIZE)
    )
    assert [line.split()[1] for line in lines] == ["run", "commit", "commit"]
    assert "2,000/2,000 (100 %)" in lines[2]


def test_plain_progress_prints_the_spark_ui_link_once() -> None:
    lines = lines_of(progress_at(0, 0), progress_at(60 * S, 9), ui_url="http://driver:4040")
    assert [line.count("http://driver:4040") for line in lines] == [1, 0]


def test_progress_prints_ingest_before_the_first_update() -> None:
    stream = io.StringIO()
    with ProgressDisplay("labels", mode="plain", stream=stream) as bar:
        bar.update_ingest(START_NS)
        bar.update(progress_at(S, 0), size=SIZE)
    ingest, run = stream.getvalue().splitlines()
    assert ingest == "labels ingest: reading the input"
    assert run.startswith("labels run 0/2,000")


@pytest.mark.parametrize(
    ("step", "line"),
    [
        ("", "labels ingest: reading the input, 12 MB stored"),
        (SORTING, "labels ingest: sorting the input with Spark, 12 MB stored"),
    ],
)
def test_ingest_progress_shows_the_stored_bytes(step: str, line: str) -> None:
    stream = io.StringIO()
    with ProgressDisplay("labels", mode="plain", stream=stream) as bar:
        bar.update_ingest(START_NS, 12_345_678, step=step)
    assert stream.getvalue().splitlines() == [line]


def test_ingest_progress_prints_periodically_and_at_a_new_step() -> None:
    stream = io.StringIO()
    with ProgressDisplay("labels", mode="plain", stream=stream) as bar:
        for at_s in range(25):
            bar.update_ingest(START_NS + at_s * S, at_s * 10_000_000)
        # A new step is printed immediately.
        bar.update_ingest(START_NS + 25 * S, 0, step=SORTING)
        bar.update_ingest(START_NS + 36 * S, 50_000_000, step=SORTING)
        shown = stream.getvalue().splitlines()
    assert shown == [
        "labels ingest: reading the input",
        "labels ingest: reading the input, 100 MB stored",
        "labels ingest: reading the input, 200 MB stored",
        "labels ingest: sorting the input with Spark",
        "labels ingest: sorting the input with Spark, 50 MB stored",
    ]


def test_progress_removes_control_characters_from_the_run_name() -> None:
    stream = io.StringIO()
    with ProgressDisplay("\x1b[31mred\n", SIZE, "plain", stream=stream) as bar:
        bar.update(progress_at(0, 0))
    assert "\x1b" not in stream.getvalue()
    assert len(stream.getvalue().splitlines()) == 1


def test_quiet_progress_prints_nothing() -> None:
    assert lines_of(progress_at(0, 0), progress_at(60 * S, 9), mode="quiet") == []


def test_progress_display_without_updates_prints_nothing() -> None:
    assert lines_of() == []


def test_progress_display_ignores_a_closed_stream() -> None:
    stream = io.StringIO()
    with ProgressDisplay("labels", SIZE, "plain", stream=stream) as bar:
        stream.close()
        bar.update(progress_at(0, 0))
        bar.update(progress_at(60 * S, 9))


def test_unknown_progress_mode_lists_the_allowed_modes() -> None:
    with pytest.raises(Invalid) as raised:
        ProgressDisplay("labels", SIZE, "loud")  # type: ignore[arg-type]
    assert raised.value.allowed == list(MODES)


# -- in a terminal -------------------------------------------------------------------------------


def test_auto_progress_is_plain_without_a_terminal() -> None:
    assert ProgressDisplay("labels", SIZE, stream=io.StringIO()).mode == "plain"


def test_auto_progress_uses_terminal_mode_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert ProgressDisplay("labels", SIZE, stream=TerminalStream()).mode == "terminal"
    monkeypatch.setenv("TERM", "dumb")
    assert ProgressDisplay("labels", SIZE, stream=TerminalStream()).mode == "plain"


def rendered_text(frame: ProgressFrame, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as captured:
        console.print(display.render_rich(frame))
    return captured.get()


def test_terminal_frame_contains_every_figure() -> None:
    progress = RunProgress(
        counts=[750, 0, 16, 0, 0, 0, 0, 1234],
        ended=[1200, 30, 4, 0],
        calls=1250,
        reused=10,
        cost=3.5,
    )
    text = rendered_text(
        ProgressFrame("[bold]", SIZE, progress, "run", 48.25, "http://driver:4040")
    )
    for figure in (
        "[bold] run",
        "61 %",
        "1,234/2,000",
        "48.2/s, 15 s left",
        "1,200 done, 4 failed, 30 skipped, 16 in flight",
        "1,250 calls, 10 reused, cost 3.50",
        "http://driver:4040",
    ):
        assert figure in text


def test_terminal_progress_redraws_at_a_bounded_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = TerminalStream()
    with ProgressDisplay("labels", SIZE, "terminal", stream=stream) as bar:
        bar.update(progress_at(0, 0))
        drawn = len(stream.getvalue())
        bar.update(progress_at(TERMINAL_EVERY_NS - 1, 1))
        assert len(stream.getvalue()) == drawn
        bar.update(progress_at(TERMINAL_EVERY_NS, 7))
        assert "7/2,000" in stream.getvalue()[drawn:]


PROGRAM = """
from holdfast.ledger.runs import RunProgress
from holdfast.spark.progress import ProgressDisplay
with ProgressDisplay("labels", 10) as bar:
    for at in range(11):
        counts = [10 - at, 0, 0, 0, 0, 0, 0, at]
        bar.update(RunProgress(updated_ns=at * 10**9, counts=counts, ended=[at, 0, 0, 0]))
        if at == 5:
            print("output of the program")
"""


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    leader, follower = pty.openpty()
    yield leader, follower
    os.close(leader)
    os.close(follower)


def test_terminal_progress_writes_nothing_to_stdout(terminal: tuple[int, int]) -> None:
    leader, follower = terminal
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=follower,
        env=os.environ | {"TERM": "xterm"},
        timeout=60,
        check=True,
    )
    assert done.stdout == b"output of the program\n"
    drawn = os.read(leader, 1 << 20).decode()
    assert "━" in drawn
    assert "10/10" in drawn


def test_terminal_progress_without_rich_prints_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rich", "rich.console", "rich.live"):
        monkeypatch.setitem(sys.modules, name, None)
    stream = TerminalStream()
    with ProgressDisplay("labels", SIZE, "terminal", stream=stream) as bar:
        bar.update(progress_at(0, 0))
    assert stream.getvalue().startswith("labels run 0/2,000")
    assert "\x1b" not in stream.getvalue()


def test_progress_import_does_not_load_rich() -> None:
    code = "import sys, holdfast.spark.progress; sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# -- in a notebook -------------------------------------------------------------------------------


def test_notebook_cell_shows_shares_counts_and_the_ui_link() -> None:
    progress = RunProgress(counts=[10, 0, 0, 8, 0, 2, 0, 0], ended=[8, 0, 2, 0], calls=12)
    cell = display.render_cell_html(
        ProgressFrame("<labels>", 20, progress, "run", 2.0, "http://driver:4040/")
    )
    assert "<b>&lt;labels&gt;</b> run 50 %" in cell
    assert "width:40.0000%" in cell
    assert "8 done, 2 failed" in cell
    assert "2.0/s, 5 s left" in cell
    assert '<a href="http://driver:4040/">Spark UI</a>' in cell


def test_notebook_cell_omits_a_link_that_is_not_http() -> None:
    cell = display.render_cell_html(
        ProgressFrame("labels", 20, RunProgress(), "run", None, "javascript:alert(1)")
    )
    assert "javascript" not in cell


def test_notebook_progress_outside_a_kernel_prints_lines() -> None:
    assert lines_of(progress_at(0, 0), mode="notebook")[0].startswith("labels run 0/2,000")

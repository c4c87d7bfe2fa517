"""The live display: in a terminal, in a notebook, in a log, and nowhere."""

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
from holdfast.ledger.runs import Progress
from holdfast.spark import progress as display
from holdfast.spark.progress import MODES, PLAIN_EVERY_NS, SORTING, TERMINAL_EVERY_NS, Bar, Shown

SIZE = 2000
START_NS = 1_790_000_000 * S


def at(ns: int, done: int, *, committed: int = 0, **more: Any) -> Progress:
    counts = [SIZE - done, 0, 0, done - committed, 0, 0, 0, committed]
    return Progress(
        updated_ns=START_NS + ns,
        started_ns=START_NS,
        counts=counts,
        ended=[done, 0, 0, 0],
        calls=done,
        **more,
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# -- in a log ------------------------------------------------------------------------------------


def lines_of(*updates: Progress, mode: Any = "plain", **options: Any) -> list[str]:
    stream = io.StringIO()
    with Bar("labels", SIZE, mode, stream=stream, **options) as bar:
        for update in updates:
            bar.update(update)
    return stream.getvalue().splitlines()


def test_a_log_gets_a_line_at_the_first_and_at_the_last_update() -> None:
    lines = lines_of(*(at(ms * MS, ms) for ms in range(1, 1001)))
    assert len(lines) == 2
    assert lines[0].startswith("labels run 1/2,000 (0 %); 1 done;")
    assert lines[1].startswith("labels run 1,000/2,000 (50 %); 1,000 done; 1,000/s, 1 s left")


def test_a_log_gets_lines_at_a_bounded_rate() -> None:
    updates = [at(second * S, second) for second in range(101)]
    assert len(lines_of(*updates)) == 100 * S // PLAIN_EVERY_NS + 1


def test_a_new_phase_is_told_at_once() -> None:
    lines = lines_of(at(0, 0), at(S, SIZE), at(2 * S, SIZE, committed=SIZE))
    assert [line.split()[1] for line in lines] == ["run", "commit", "commit"]
    assert "2,000/2,000 (100 %)" in lines[2]


def test_the_link_to_the_spark_ui_is_told_once() -> None:
    lines = lines_of(at(0, 0), at(60 * S, 9), ui_url="http://driver:4040")
    assert [line.count("http://driver:4040") for line in lines] == [1, 0]


def test_reading_the_input_is_told_before_there_are_figures() -> None:
    stream = io.StringIO()
    with Bar("labels", mode="plain", stream=stream) as bar:
        bar.ingesting(START_NS)
        bar.update(at(S, 0), size=SIZE)
    ingest, run = stream.getvalue().splitlines()
    assert ingest == "labels ingest: reading the input"
    assert run.startswith("labels run 0/2,000")


@pytest.mark.parametrize(
    ("step", "told"),
    [
        ("", "labels ingest: reading the input, 12 MB stored"),
        (SORTING, "labels ingest: sorting the input with Spark, 12 MB stored"),
    ],
)
def test_the_size_of_the_stored_input_is_shown(step: str, told: str) -> None:
    stream = io.StringIO()
    with Bar("labels", mode="plain", stream=stream) as bar:
        bar.ingesting(START_NS, 12_345_678, step=step)
    assert stream.getvalue().splitlines() == [told]


def test_progress_of_the_input_is_drawn_again_and_again() -> None:
    stream = io.StringIO()
    with Bar("labels", mode="plain", stream=stream) as bar:
        for at_s in range(25):
            bar.ingesting(START_NS + at_s * S, at_s * 10_000_000)
        # Another step is told at once.
        bar.ingesting(START_NS + 25 * S, 0, step=SORTING)
        bar.ingesting(START_NS + 36 * S, 50_000_000, step=SORTING)
        shown = stream.getvalue().splitlines()
    assert shown == [
        "labels ingest: reading the input",
        "labels ingest: reading the input, 100 MB stored",
        "labels ingest: reading the input, 200 MB stored",
        "labels ingest: sorting the input with Spark",
        "labels ingest: sorting the input with Spark, 50 MB stored",
    ]


def test_a_name_cannot_draw_on_the_screen() -> None:
    stream = io.StringIO()
    with Bar("\x1b[31mred\n", SIZE, "plain", stream=stream) as bar:
        bar.update(at(0, 0))
    assert "\x1b" not in stream.getvalue()
    assert len(stream.getvalue().splitlines()) == 1


def test_quiet_says_nothing() -> None:
    assert lines_of(at(0, 0), at(60 * S, 9), mode="quiet") == []


def test_a_bar_that_was_never_fed_says_nothing() -> None:
    assert lines_of() == []


def test_a_stream_that_is_closed_does_not_stop_the_run() -> None:
    stream = io.StringIO()
    with Bar("labels", SIZE, "plain", stream=stream) as bar:
        stream.close()
        bar.update(at(0, 0))
        bar.update(at(60 * S, 9))


def test_an_unknown_mode_names_those_that_there_are() -> None:
    with pytest.raises(Invalid) as raised:
        Bar("labels", SIZE, "loud")  # type: ignore[arg-type]
    assert raised.value.allowed == list(MODES)


# -- in a terminal -------------------------------------------------------------------------------


def test_auto_is_plain_where_there_is_no_terminal() -> None:
    assert Bar("labels", SIZE, stream=io.StringIO()).mode == "plain"


def test_auto_draws_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert Bar("labels", SIZE, stream=Terminal()).mode == "terminal"
    monkeypatch.setenv("TERM", "dumb")
    assert Bar("labels", SIZE, stream=Terminal()).mode == "plain"


def drawn_text(shown: Shown, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as captured:
        console.print(display.drawn(shown))
    return captured.get()


def test_a_drawing_holds_every_figure() -> None:
    progress = Progress(
        counts=[750, 0, 16, 0, 0, 0, 0, 1234],
        ended=[1200, 30, 4, 0],
        calls=1250,
        reused=10,
        cost=3.5,
    )
    told = drawn_text(Shown("[bold]", SIZE, progress, "run", 48.25, "http://driver:4040"))
    for figure in (
        "[bold] run",
        "61 %",
        "1,234/2,000",
        "48.2/s, 15 s left",
        "1,200 done, 4 failed, 30 skipped, 16 in flight",
        "1,250 calls, 10 reused, cost 3.50",
        "http://driver:4040",
    ):
        assert figure in told


def test_a_terminal_is_redrawn_at_a_bounded_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with Bar("labels", SIZE, "terminal", stream=stream) as bar:
        bar.update(at(0, 0))
        drawn = len(stream.getvalue())
        bar.update(at(TERMINAL_EVERY_NS - 1, 1))
        assert len(stream.getvalue()) == drawn
        bar.update(at(TERMINAL_EVERY_NS, 7))
        assert "7/2,000" in stream.getvalue()[drawn:]


PROGRAM = """
from holdfast.ledger.runs import Progress
from holdfast.spark.progress import Bar
with Bar("labels", 10) as bar:
    for at in range(11):
        counts = [10 - at, 0, 0, 0, 0, 0, 0, at]
        bar.update(Progress(updated_ns=at * 10**9, counts=counts, ended=[at, 0, 0, 0]))
        if at == 5:
            print("a word of the program")
"""


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    leader, follower = pty.openpty()
    yield leader, follower
    os.close(leader)
    os.close(follower)


def test_in_a_real_terminal_stdout_is_left_to_the_program(terminal: tuple[int, int]) -> None:
    leader, follower = terminal
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=follower,
        env=os.environ | {"TERM": "xterm"},
        timeout=60,
        check=True,
    )
    assert done.stdout == b"a word of the program\n"
    drawn = os.read(leader, 1 << 20).decode()
    assert "━" in drawn
    assert "10/10" in drawn


def test_without_rich_a_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rich", "rich.console", "rich.live"):
        monkeypatch.setitem(sys.modules, name, None)
    stream = Terminal()
    with Bar("labels", SIZE, "terminal", stream=stream) as bar:
        bar.update(at(0, 0))
    assert stream.getvalue().startswith("labels run 0/2,000")
    assert "\x1b" not in stream.getvalue()


def test_rich_is_not_loaded_until_something_is_drawn_with_it() -> None:
    code = "import sys, holdfast.spark.progress; sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# -- in a notebook -------------------------------------------------------------------------------


def test_a_cell_shows_shares_words_and_a_link() -> None:
    progress = Progress(counts=[10, 0, 0, 8, 0, 2, 0, 0], ended=[8, 0, 2, 0], calls=12)
    cell = display.cell_html(Shown("<labels>", 20, progress, "run", 2.0, "http://driver:4040/"))
    assert "<b>&lt;labels&gt;</b> run 50 %" in cell
    assert "width:40.0000%" in cell
    assert "8 done, 2 failed" in cell
    assert "2.0/s, 5 s left" in cell
    assert '<a href="http://driver:4040/">Spark UI</a>' in cell


def test_a_link_that_is_none_is_not_made_one() -> None:
    cell = display.cell_html(Shown("labels", 20, Progress(), "run", None, "javascript:alert(1)"))
    assert "javascript" not in cell


def test_outside_a_kernel_the_notebook_mode_falls_back_to_lines() -> None:
    assert lines_of(at(0, 0), mode="notebook")[0].startswith("labels run 0/2,000")

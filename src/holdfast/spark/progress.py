"""The live progress display of a run: a bar in a terminal, a cell in a notebook, lines in a log.

    with ProgressDisplay("labels", 2_000) as display:
        display.update(progress)            # call it often: drawing is rate-limited

- The display is read-only and renders `ledger.summary`. Time comes with the `RunProgress`, so this
  module reads no clock.
- A display error never affects the run. If rich is missing or the stream is closed, the display
  falls back or turns silent.
- It writes to stderr. stdout belongs to the program.

A notebook gets plain HTML through IPython's display handle instead of rich's live display. The
latter needs ipywidgets, which many notebook services lack, and shows nothing without them.
"""

from __future__ import annotations

import contextlib
import html
import importlib
import os
import sys
from typing import Any, Literal, NamedTuple, Protocol, TextIO, get_args

import msgspec

from holdfast.clock import MS, S
from holdfast.errors import Invalid
from holdfast.ledger import summary
from holdfast.ledger.runs import RunProgress
from holdfast.ledger.summary import SmoothedRate

Mode = Literal["auto", "terminal", "notebook", "plain", "quiet"]
MODES: tuple[str, ...] = get_args(Mode)

# Minimum interval between two drawings.
TERMINAL_EVERY_NS = 100 * MS
NOTEBOOK_EVERY_NS = 500 * MS
PLAIN_EVERY_NS = 10 * S

BAR_CHARS = 16
EMPTY_PROGRESS = RunProgress()
# Steps of the ingest.
READING = "reading the input"
SORTING = "sorting the input with Spark"
COMPARING = "ordering the input and comparing it with earlier runs"


class ProgressView(Protocol):
    """A drawing target."""

    every_ns: int

    def draw(self, frame: ProgressFrame) -> None: ...
    def close(self) -> None: ...


class ProgressFrame(NamedTuple):
    """The content of one drawing."""

    name: str
    size: int
    progress: RunProgress
    phase: str
    per_s: float | None
    ui_url: str
    # Of the input, during the ingest.
    taken_bytes: int = 0
    step: str = ""

    @property
    def ingest_text(self) -> str:
        stored = f", {self.taken_bytes / 1e6:,.0f} MB stored" if self.taken_bytes else ""
        return f"{self.step}{stored}"

    @property
    def rows_done(self) -> int:
        """Rows completed in this phase."""
        tally = summary.tally_rows(self.progress)
        return tally.committed if self.phase == "commit" else tally.ended

    @property
    def speed_text(self) -> str:
        """`48.2/s, 16 s left`; empty outside the run phase."""
        if self.phase != "run":
            return ""
        remaining = self.size - summary.tally_rows(self.progress).ended
        remaining_ns = summary.eta_ns(remaining, self.per_s)
        remaining_text = (
            "? left" if remaining_ns is None else f"{summary.duration_text(remaining_ns)} left"
        )
        return f"{summary.rate_text(self.per_s)}, {remaining_text}"

    @property
    def text_line(self) -> str:
        if self.phase == "ingest":
            return f"{self.name} ingest: {self.ingest_text}"
        return summary.one_line_text(
            self.name, self.size, self.progress, phase=self.phase, per_s=self.per_s
        )


class ProgressDisplay:
    """The progress display of one run. `size` may be 0 while the input is read."""

    def __init__(
        self,
        name: str,
        size: int = 0,
        mode: Mode = "auto",
        *,
        ui_url: str = "",
        stream: TextIO | None = None,
    ) -> None:
        if mode not in MODES:
            raise Invalid(what="progress mode", mode=mode, allowed=list(MODES))
        self.name = name
        self.size = size
        self._taken_bytes = 0
        self._step = READING
        self.ui_url = ui_url
        self._stream = sys.stderr if stream is None else stream
        self.mode = _resolve_mode(mode, self._stream)
        self._view: ProgressView | None = None
        self._rate: SmoothedRate | None = None
        self._drawn_ns: int | None = None
        self._drawn_phase = self._drawn_step = ""
        self._last_frame: ProgressFrame | None = None
        self._last_is_drawn = True

    def __enter__(self) -> ProgressDisplay:
        self._view = _open_view(self.mode, self._stream)
        return self

    def __exit__(self, *exc: object) -> None:
        """Draw the last figures and close the view."""
        view, self._view = self._view, None
        if view is None:
            return
        with contextlib.suppress(OSError, ValueError):
            if self._last_frame is not None and not self._last_is_drawn:
                view.draw(self._last_frame)
            view.close()

    def update_ingest(self, now_ns: int, taken_bytes: int = 0, *, step: str = "") -> None:
        """Show how much of the input is stored, before row counts exist. `step` is the current
        ingest step.
        """
        self._taken_bytes, self._step = taken_bytes, step or READING
        self.update(msgspec.structs.replace(EMPTY_PROGRESS, updated_ns=now_ns), phase="ingest")

    def update(self, progress: RunProgress, *, phase: str = "", size: int | None = None) -> None:
        """Show these figures, unless the view was drawn just now. Called from one thread."""
        if size is not None:
            self.size = size
        now_ns = progress.updated_ns
        shown_phase = phase or summary.phase_of(self.size, progress)
        if shown_phase != "ingest":
            self._rate = summary.smoothed(self._rate, summary.tally_rows(progress).ended, now_ns)
        per_s = None if self._rate is None else self._rate.per_s
        frame = ProgressFrame(
            name=self.name,
            size=self.size,
            progress=progress,
            phase=shown_phase,
            per_s=per_s,
            ui_url=self.ui_url,
            taken_bytes=self._taken_bytes,
            step=self._step,
        )
        self._last_frame, self._last_is_drawn = frame, False
        if self._view is None or not self._is_due(frame, now_ns, self._view.every_ns):
            return
        self._drawn_ns, self._drawn_phase, self._drawn_step = now_ns, frame.phase, frame.step
        try:
            self._view.draw(frame)
            self._last_is_drawn = True
        except (OSError, ValueError):
            self._view = None  # the view is closed

    def _is_due(self, frame: ProgressFrame, now_ns: int, every_ns: int) -> bool:
        """Return whether to draw: at once for a new phase, otherwise at the view's rate."""
        return (
            self._drawn_ns is None
            or frame.phase != self._drawn_phase
            or (frame.phase == "ingest" and frame.step != self._drawn_step)
            or not 0 <= now_ns - self._drawn_ns < every_ns
        )


# -- views ---------------------------------------------------------------------------------------


def _resolve_mode(mode: Mode, stream: TextIO) -> str:
    if mode != "auto":
        return mode
    if _ipython_display() is not None:
        return "notebook"
    try:
        terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):
        terminal = False
    return "terminal" if terminal else "plain"


def _open_view(mode: str, stream: TextIO) -> ProgressView | None:
    if mode == "quiet":
        return None
    if mode == "notebook" and (display := _ipython_display(forced=True)) is not None:
        return NotebookView(display)
    if mode == "terminal":
        with contextlib.suppress(ImportError):
            return TerminalView(stream)
    return PlainView(stream)


def _ipython_display(forced: bool = False) -> Any:
    """Return IPython's `display` if this process is a notebook kernel, else None."""
    ipython = sys.modules.get("IPython")
    if ipython is None:
        return None
    shell = ipython.get_ipython()
    if shell is None or not (forced or hasattr(shell, "kernel")):
        return None
    return importlib.import_module("IPython.display").display


class PlainView:
    """One line per update, for logs."""

    every_ns = PLAIN_EVERY_NS

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._ui_url_printed = False

    def draw(self, frame: ProgressFrame) -> None:
        line = frame.text_line
        if frame.ui_url and not self._ui_url_printed:
            self._ui_url_printed = True
            line += f"; {frame.ui_url}"
        print(_one_line(line), file=self._stream, flush=True)

    def close(self) -> None:
        pass


class TerminalView:
    """Three lines updated in place by rich."""

    every_ns = TERMINAL_EVERY_NS

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(
            console=Console(file=stream),
            auto_refresh=False,
            # Otherwise redirected stdout of the program would appear on the terminal.
            redirect_stdout=sys.stdout.isatty(),
        )
        self._live.start()

    def draw(self, frame: ProgressFrame) -> None:
        self._live.update(render_rich(frame), refresh=True)

    def close(self) -> None:
        self._live.stop()


def render_rich(frame: ProgressFrame) -> Any:
    """Render with rich. Lines never wrap, because a wrapped line cannot be overwritten."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    def text(words: str = "", style: str = "") -> Text:
        return Text(words, style, no_wrap=True, overflow="ellipsis")

    head = Table.grid(padding=(0, 1))
    cells: list[Any] = [text(_one_line(frame.name), "bold"), text(frame.phase, "cyan")]
    if frame.phase == "ingest":
        head.add_row(*cells, text(frame.ingest_text, "dim"))
        return head
    bar = ProgressBar(total=max(frame.size, 1), completed=frame.rows_done, width=BAR_CHARS)
    cells += [bar, text(summary.percent_text(frame.rows_done, frame.size), "bold")]
    cells += [text(f"{frame.rows_done:,}/{frame.size:,}"), text(frame.speed_text, "magenta")]
    head.add_row(*cells)
    tally = summary.tally_rows(frame.progress)
    counts = text("  ").append(f"{tally.succeeded:,} done", "green")
    for count, word, style in (
        (tally.failed, "failed", "red"),
        (tally.skipped, "skipped", "yellow"),
        (tally.cancelled, "cancelled", "yellow"),
        (tally.in_flight, "in flight", "blue"),
    ):
        if count:
            counts.append(", ").append(f"{count:,} {word}", style)
    calls = text("  ").append(summary.calls_text(frame.progress), "dim")
    if frame.ui_url:
        calls.append(" · ", "dim").append(frame.ui_url, f"dim link {frame.ui_url}")
    return Group(head, counts, calls)


class NotebookView:
    """A cell output that is replaced in place."""

    every_ns = NOTEBOOK_EVERY_NS

    def __init__(self, display: Any) -> None:
        self._display = display
        self._handle: Any = None

    def draw(self, frame: ProgressFrame) -> None:
        data = {"text/html": render_cell_html(frame), "text/plain": _one_line(frame.text_line)}
        if self._handle is None:
            self._handle = self._display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

    def close(self) -> None:
        pass


def render_cell_html(frame: ProgressFrame) -> str:
    """Render a bar with a segment per outcome. The colours work on light and dark pages."""
    tally, size = summary.tally_rows(frame.progress), max(frame.size, 1)
    segments = "".join(
        f'<span style="display:inline-block;height:100%;width:{count / size:.4%};'
        f'background:{colour}"></span>'
        for count, colour in (
            (tally.succeeded, "#2e9e6b"),
            (tally.skipped, "#c9a227"),
            (tally.failed, "#d1495b"),
            (tally.cancelled, "#8d8d8d"),
            (tally.in_flight, "#4c86c6"),
        )
        if count
    )
    words = [summary.counts_text(frame.progress), summary.calls_text(frame.progress)]
    if frame.phase == "ingest":
        words = [frame.ingest_text]
    text = html.escape(" · ".join(word for word in (*words, frame.speed_text) if word))
    if frame.ui_url.startswith(("http://", "https://")):
        text += f' · <a href="{html.escape(frame.ui_url, quote=True)}">Spark UI</a>'
    share = "" if frame.phase == "ingest" else summary.percent_text(frame.rows_done, frame.size)
    return (
        '<div style="font-family:system-ui,sans-serif;font-size:13px;max-width:52em">'
        f"<div><b>{html.escape(frame.name)}</b> {html.escape(frame.phase)} {share}</div>"
        '<div style="height:10px;margin:4px 0;border-radius:3px;overflow:hidden;'
        f'line-height:0;background:rgba(128,128,128,.25)">{segments}</div>'
        f'<div style="opacity:.8">{text}</div></div>'
    )


def _one_line(text: str) -> str:
    """Replace control characters: names come from the user and must not control the terminal."""
    return "".join(char if char.isprintable() else "�" for char in text)

"""The live display of a run: a bar in a terminal, a cell in a notebook, lines in a log.

    with Bar("labels", 2_000) as bar:
        bar.update(progress)                # as often as you like: drawing is bounded by time

- The display only ever reads: what it shows is `ledger.summary`, drawn. Time comes with the
  `Progress`, so nothing here looks at a clock.
- Display must never break work: where rich is missing, or the stream is closed, it falls back or
  goes silent, and the run goes on.
- It writes to stderr. What a program prints on stdout is the program's own.

A notebook gets plain HTML through IPython's display handle and not rich's live display: that one
needs ipywidgets, which many notebook services do not have, and shows nothing without them.
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
from holdfast.ledger.runs import Progress
from holdfast.ledger.summary import Pace

Mode = Literal["auto", "terminal", "notebook", "plain", "quiet"]
MODES: tuple[str, ...] = get_args(Mode)

# At most one drawing within these.
TERMINAL_EVERY_NS = 100 * MS
NOTEBOOK_EVERY_NS = 500 * MS
PLAIN_EVERY_NS = 10 * S

BAR_CHARS = 16
EMPTY = Progress()
# What is done with the input before there are rows.
READING = "reading the input"
SORTING = "sorting the input with Spark"
COMPARING = "ordering the input and comparing it with earlier runs"


class View(Protocol):
    """Somewhere to draw."""

    every_ns: int

    def draw(self, shown: Shown) -> None: ...
    def close(self) -> None: ...


class Shown(NamedTuple):
    """What is to be seen at one moment."""

    name: str
    size: int
    progress: Progress
    phase: str
    per_s: float | None
    ui_url: str
    # Of the input, while it is read.
    taken_bytes: int = 0
    step: str = ""

    @property
    def ingest_text(self) -> str:
        stored = f", {self.taken_bytes / 1e6:,.0f} MB stored" if self.taken_bytes else ""
        return f"{self.step}{stored}"

    @property
    def at(self) -> int:
        """Rows behind us, in this phase."""
        found = summary.tally(self.progress)
        return found.committed if self.phase == "commit" else found.ended

    @property
    def speed(self) -> str:
        """`48.2/s, 16 s left`; empty where there is none to tell."""
        if self.phase != "run":
            return ""
        left = self.size - summary.tally(self.progress).ended
        left_ns = summary.eta_ns(left, self.per_s)
        told = "? left" if left_ns is None else f"{summary.duration_text(left_ns)} left"
        return f"{summary.rate_text(self.per_s)}, {told}"

    @property
    def line(self) -> str:
        if self.phase == "ingest":
            return f"{self.name} ingest: {self.ingest_text}"
        return summary.line(self.name, self.size, self.progress, phase=self.phase, per_s=self.per_s)


class Bar:
    """The display of one run. `size` may be 0 while the input is still being read."""

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
        self.mode = _resolved(mode, self._stream)
        self._view: View | None = None
        self._pace: Pace | None = None
        self._drawn_ns: int | None = None
        self._drawn_phase = self._drawn_step = ""
        self._last: Shown | None = None
        self._last_is_drawn = True

    def __enter__(self) -> Bar:
        self._view = _view(self.mode, self._stream)
        return self

    def __exit__(self, *exc: object) -> None:
        """The last figures stay to be seen."""
        view, self._view = self._view, None
        if view is None:
            return
        with contextlib.suppress(OSError, ValueError):
            if self._last is not None and not self._last_is_drawn:
                view.draw(self._last)
            view.close()

    def ingesting(self, now_ns: int, taken_bytes: int = 0, *, step: str = "") -> None:
        """Show how much of the input is stored, before there are figures of rows. `step` is what is done with it."""
        self._taken_bytes, self._step = taken_bytes, step or READING
        self.update(msgspec.structs.replace(EMPTY, updated_ns=now_ns), phase="ingest")

    def update(self, progress: Progress, *, phase: str = "", size: int | None = None) -> None:
        """Show these figures, unless others were drawn just now. Called from one thread."""
        if size is not None:
            self.size = size
        now_ns = progress.updated_ns
        shown_phase = phase or summary.phase_of(self.size, progress)
        if shown_phase != "ingest":
            self._pace = summary.paced(self._pace, summary.tally(progress).ended, now_ns)
        per_s = None if self._pace is None else self._pace.per_s
        shown = Shown(
            self.name,
            self.size,
            progress,
            shown_phase,
            per_s,
            self.ui_url,
            self._taken_bytes,
            self._step,
        )
        self._last, self._last_is_drawn = shown, False
        if self._view is None or not self._due(shown, now_ns, self._view.every_ns):
            return
        self._drawn_ns, self._drawn_phase, self._drawn_step = now_ns, shown.phase, shown.step
        try:
            self._view.draw(shown)
            self._last_is_drawn = True
        except (OSError, ValueError):
            self._view = None  # nobody looks any more

    def _due(self, shown: Shown, now_ns: int, every_ns: int) -> bool:
        """A new phase is told at once; else as often as the view allows."""
        return (
            self._drawn_ns is None
            or shown.phase != self._drawn_phase
            or (shown.phase == "ingest" and shown.step != self._drawn_step)
            or not 0 <= now_ns - self._drawn_ns < every_ns
        )


# -- where to draw -------------------------------------------------------------------------------


def _resolved(mode: Mode, stream: TextIO) -> str:
    if mode != "auto":
        return mode
    if _display() is not None:
        return "notebook"
    try:
        terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
    except (AttributeError, ValueError):
        terminal = False
    return "terminal" if terminal else "plain"


def _view(mode: str, stream: TextIO) -> View | None:
    if mode == "quiet":
        return None
    if mode == "notebook" and (display := _display(forced=True)) is not None:
        return NotebookView(display)
    if mode == "terminal":
        with contextlib.suppress(ImportError):
            return TerminalView(stream)
    return PlainView(stream)


def _display(forced: bool = False) -> Any:
    """IPython's `display` when this process is a notebook's kernel, else None."""
    ipython = sys.modules.get("IPython")
    if ipython is None:
        return None
    shell = ipython.get_ipython()
    if shell is None or not (forced or hasattr(shell, "kernel")):
        return None
    return importlib.import_module("IPython.display").display


class PlainView:
    """One line at a time, for logs."""

    every_ns = PLAIN_EVERY_NS

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._told_ui = False

    def draw(self, shown: Shown) -> None:
        line = shown.line
        if shown.ui_url and not self._told_ui:
            self._told_ui = True
            line += f"; {shown.ui_url}"
        print(_one_line(line), file=self._stream, flush=True)

    def close(self) -> None:
        pass


class TerminalView:
    """Three lines that stay where they are, by rich."""

    every_ns = TERMINAL_EVERY_NS

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(
            console=Console(file=stream),
            auto_refresh=False,
            # Else what the program prints into a file would end up on the terminal.
            redirect_stdout=sys.stdout.isatty(),
        )
        self._live.start()

    def draw(self, shown: Shown) -> None:
        self._live.update(drawn(shown), refresh=True)

    def close(self) -> None:
        self._live.stop()


def drawn(shown: Shown) -> Any:
    """As rich draws it: lines that never wrap, for a wrapped line cannot be drawn over."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    def text(words: str = "", style: str = "") -> Text:
        return Text(words, style, no_wrap=True, overflow="ellipsis")

    head = Table.grid(padding=(0, 1))
    cells: list[Any] = [text(_one_line(shown.name), "bold"), text(shown.phase, "cyan")]
    if shown.phase == "ingest":
        head.add_row(*cells, text(shown.ingest_text, "dim"))
        return head
    bar = ProgressBar(total=max(shown.size, 1), completed=shown.at, width=BAR_CHARS)
    cells += [bar, text(summary.percent_text(shown.at, shown.size), "bold")]
    cells += [text(f"{shown.at:,}/{shown.size:,}"), text(shown.speed, "magenta")]
    head.add_row(*cells)
    found = summary.tally(shown.progress)
    counts = text("  ").append(f"{found.succeeded:,} done", "green")
    for count, word, style in (
        (found.failed, "failed", "red"),
        (found.skipped, "skipped", "yellow"),
        (found.cancelled, "cancelled", "yellow"),
        (found.in_flight, "in flight", "blue"),
    ):
        if count:
            counts.append(", ").append(f"{count:,} {word}", style)
    calls = text("  ").append(summary.calls_text(shown.progress), "dim")
    if shown.ui_url:
        calls.append(" · ", "dim").append(shown.ui_url, f"dim link {shown.ui_url}")
    return Group(head, counts, calls)


class NotebookView:
    """A cell output that is replaced in place."""

    every_ns = NOTEBOOK_EVERY_NS

    def __init__(self, display: Any) -> None:
        self._display = display
        self._handle: Any = None

    def draw(self, shown: Shown) -> None:
        data = {"text/html": cell_html(shown), "text/plain": _one_line(shown.line)}
        if self._handle is None:
            self._handle = self._display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

    def close(self) -> None:
        pass


def cell_html(shown: Shown) -> str:
    """A bar whose segments are what became of the rows. Colours hold on light and dark pages."""
    found, size = summary.tally(shown.progress), max(shown.size, 1)
    segments = "".join(
        f'<span style="display:inline-block;height:100%;width:{count / size:.4%};'
        f'background:{colour}"></span>'
        for count, colour in (
            (found.succeeded, "#2e9e6b"),
            (found.skipped, "#c9a227"),
            (found.failed, "#d1495b"),
            (found.cancelled, "#8d8d8d"),
            (found.in_flight, "#4c86c6"),
        )
        if count
    )
    words = [summary.counts_text(shown.progress), summary.calls_text(shown.progress)]
    if shown.phase == "ingest":
        words = [shown.ingest_text]
    told = html.escape(" · ".join(word for word in (*words, shown.speed) if word))
    if shown.ui_url.startswith(("http://", "https://")):
        told += f' · <a href="{html.escape(shown.ui_url, quote=True)}">Spark UI</a>'
    share = "" if shown.phase == "ingest" else summary.percent_text(shown.at, shown.size)
    return (
        '<div style="font-family:system-ui,sans-serif;font-size:13px;max-width:52em">'
        f"<div><b>{html.escape(shown.name)}</b> {html.escape(shown.phase)} {share}</div>"
        '<div style="height:10px;margin:4px 0;border-radius:3px;overflow:hidden;'
        f'line-height:0;background:rgba(128,128,128,.25)">{segments}</div>'
        f'<div style="opacity:.8">{told}</div></div>'
    )


def _one_line(text: str) -> str:
    """Names are the user's: a control character in one must not draw on the screen."""
    return "".join(char if char.isprintable() else "�" for char in text)

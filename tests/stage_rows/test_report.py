"""The HTML report of a run: complete, and escaped for any stored text."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from holdfast.clock import S
from holdfast.ledger.error_groups import ErrorGroup
from holdfast.ledger.failures import FailedRow
from holdfast.ledger.runs import RunLifecycle, RunProgress, RunRecord
from holdfast.spark import plots, report
from holdfast.spark.plots import PlotColumn, PlotLine
from holdfast.spark.report import Report

START_NS = 1_790_000_000 * S
EVIL = '<script>alert(\'x\')</script><img src=x onerror="y">\x1b[31m\x00 & "quoted"'

VOID = {"meta", "img", "br", "line", "rect", "polygon", "polyline"}


class ParsedPage(HTMLParser):
    """An HTML parser that records tags and text and checks the nesting of tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def count(self, tag: str) -> int:
        return sum(1 for name, _ in self.tags if name == tag)


def record(**more: Any) -> RunRecord:
    given: dict[str, Any] = {
        "run_id": "r-1",
        "name": "labels",
        "status": RunLifecycle.FINISHED,
        "created_ns": START_NS,
        "finished_ns": START_NS + 100 * S,
        "size": 1000,
        "key": ["doc_id"],
        "config": {"attempts": "3"},
        "sink": {"kind": "parquet", "path": "/data/labels"},
    }
    return RunRecord(**given | more)


def progress(**more: Any) -> RunProgress:
    given: dict[str, Any] = {
        "started_ns": START_NS,
        "updated_ns": START_NS + 100 * S,
        "counts": [0, 0, 0, 0, 0, 0, 0, 1000],
        "ended": [900, 60, 40, 0],
        "calls": 1010,
        "reused": 25,
        "cost": 12.5,
        "series": [(t * 1000, t * 9, t * 2 // 5, t * 3 // 5, 16, t / 8) for t in range(101)],
        "latency_log2_us": [0] * 12 + [10, 900, 90, 10],
        "errors": [
            ErrorGroup(1, "TimeoutError: slow", 30, 30, ["TimeoutError: slow"]),
            ErrorGroup(4, "ValueError: bad <n>", 10, 10, ["ValueError: bad 7"]),
        ],
        "failed_by_class": [0, 30, 0, 0, 10, 0, 0, 0],
        "time_ns": 100 * S,
        "setup_ns": 20 * S,
        "calls_ns": 80 * S,
        "calls_rows": 1000,
    }
    return RunProgress(**given | more)


def parsed_page(
    record: RunRecord, progress: RunProgress, sample: list[FailedRow] | None = None
) -> ParsedPage:
    return ParsedPage(report.render_html(record, progress, failed_sample=sample or []))


def test_report_shows_figures_plots_errors_and_the_next_step() -> None:
    seen = parsed_page(record(), progress(), [FailedRow(7, "doc-7", 3, 4, "ValueError: bad")])
    assert seen.count("svg") == 6
    for words in (
        "Rows over time",
        "Throughput",
        "In flight",
        "Cost over time",
        "Time of a call",
        "Failures by class",
        "finished",
        "1,010",
        "12.50",
        "TimeoutError: slow",
        "doc-7",
        "/data/labels (parquet)",
        "holdfast runs failed labels",
    ):
        assert words in seen.text


def test_report_of_an_ingesting_run_has_no_plots() -> None:
    seen = parsed_page(
        record(status=RunLifecycle.INGESTING, size=0, finished_ns=0, sink={}), RunProgress()
    )
    assert seen.count("svg") == 0
    assert "ingesting" in seen.text


@pytest.mark.parametrize("status", list(RunLifecycle))
def test_report_renders_for_every_status(status: RunLifecycle) -> None:
    assert status.value in parsed_page(record(status=status), progress()).text


def test_report_without_cost_omits_cost() -> None:
    series = [(*point[:5], 0.0) for point in progress().series]
    seen = parsed_page(record(), progress(cost=0.0, series=series))
    assert "ost" not in seen.text.replace("Most", "")


def test_report_escapes_all_stored_text() -> None:
    evil = record(
        run_id=EVIL,
        name=EVIL,
        status=RunLifecycle.HALTED,
        halted=EVIL,
        key=[EVIL],
        config={EVIL: EVIL},
        input_hash=EVIL,
        retry_of=EVIL,
        sink={"kind": EVIL, "path": EVIL},
    )
    evil_progress = progress(errors=[ErrorGroup(1, EVIL, 3, 3, [EVIL]), ErrorGroup(99, EVIL, 1)])
    seen = parsed_page(evil, evil_progress, [FailedRow(1, EVIL, 1, 4, EVIL)])
    assert seen.count("script") == seen.count("img") == 0
    assert not any(name.startswith("on") for _, attrs in seen.tags for name in attrs)
    assert "alert('x')" in seen.text
    assert not {"\x1b", "\x00"} & set(seen.text)


def test_report_repr_html_is_a_sandboxed_iframe() -> None:
    evil_report = Report(record(name=EVIL), progress())
    [(tag, attrs)] = ParsedPage(evil_report._repr_html_()).tags
    assert tag == "iframe"
    assert "sandbox" in attrs
    assert attrs["srcdoc"] == evil_report.html


def test_report_loads_no_external_resource() -> None:
    text = report.render_html(record(), progress(), failed_sample=[])
    assert "default-src 'none'" in text
    assert not re.search(r"https?://|url\(|@import|<script|<link", text)


def test_report_supports_light_and_dark_mode() -> None:
    assert "prefers-color-scheme:dark" in report.render_html(record(), progress(), failed_sample=[])


def test_report_size_is_bounded_for_a_long_run() -> None:
    series = [(t * 1000, t, 0, 0, 16, t / 8) for t in range(20_000)]
    errors = [ErrorGroup(1, "x" * 100_000, 1, 1, ["y" * 100_000])] * 20
    sample = [FailedRow(n, "k" * 1000, 1, 1, "y" * 100_000) for n in range(1000)]
    text = report.render_html(
        record(), progress(series=series, errors=errors), failed_sample=sample
    )
    assert len(text) < 250_000


def test_report_as_text_has_few_lines() -> None:
    lines = str(Report(record(), progress(), store="./data")).splitlines()
    assert lines[0] == "labels: finished, run r-1"
    assert "1,000: 900 done, 40 failed, 60 skipped" in lines[1]
    assert lines[-1].endswith("holdfast runs retry labels --store ./data")
    assert len(lines) < 12


def test_report_save_replaces_the_file(tmp_path: Path) -> None:
    saved_report = Report(record(), progress())
    path = saved_report.save(tmp_path / "deep" / "report.html")
    assert path.read_text(encoding="utf-8") == saved_report.html
    again = Report(record(name="other"), progress()).save(str(path))
    assert "other" in again.read_text(encoding="utf-8")
    assert [found.name for found in path.parent.iterdir()] == ["report.html"]


# -- figures and plots ---------------------------------------------------------------------------


def test_report_quantile_is_the_upper_end_of_its_bucket() -> None:
    assert report.quantile_us([0, 0, 50, 50], 0.5) == 8
    assert report.quantile_us([0, 0, 50, 50], 0.51) == 16
    assert report.quantile_us([1], 0.99) == 2


@pytest.mark.parametrize("most", [0, 0.00007, 1, 3, 7.5, 99, 100, 101, 123_456, 9e9])
def test_plot_axis_ends_at_or_above_the_maximum(most: float) -> None:
    svg = plots.line_plot(
        [0, 1], [PlotLine("x", "ok", [0, most])], label="l", text=lambda value: f"{value:.9f}"
    )
    ticks = [float(t) for t in re.findall(r'text-anchor="end">([\d.]+)<', svg)]
    assert max(ticks) >= most * 0.999999
    assert 2 <= len(ticks) <= 7


@pytest.mark.parametrize("seconds", [0, 0.004, 1, 59, 3600, 90_000, 10_000_000])
def test_plot_time_axis_has_at_most_eight_marks(seconds: float) -> None:
    svg = plots.line_plot(
        [0, seconds], [PlotLine("x", "ok", [1, 1])], label="l", text=lambda value: ""
    )
    marks = re.findall(r">[\d:.]+ (?:s|min|h|d)<", svg)
    assert 1 <= len(marks) <= 8


def test_plot_points_stay_within_the_frame() -> None:
    values = [PlotLine("a", "ok", [0, 5, 9]), PlotLine("b", "fail", [0, 5, 9])]
    svg = plots.line_plot([0, 1, 2], values, label="l", text=str, stacked=True)
    for points in re.findall(r'points="([^"]+)"', svg):
        for pair in points.split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= plots.WIDTH
            assert 0 <= y <= plots.HEIGHT


def test_plot_without_columns_has_no_bars() -> None:
    assert "<rect" not in plots.histogram_plot([], label="l", style="ok")
    assert "<rect" not in plots.bar_plot([], label="l", style="ok")
    assert "&lt;b&gt;" in plots.bar_plot([PlotColumn("<b>", 0, "<i>")], label="l", style="ok")

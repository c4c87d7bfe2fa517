"""The report of a run: a self-contained HTML page, and a text version.

    report = run.report()
    report.save("labels.html")              # displays in a notebook, print() gives a short text

- The page loads nothing and runs no script, and its content security policy enforces this: stored
  text may be anything that a model or a web page returned.
- Every text from the store is escaped by `_escape`. No other path leads into the page.
- In a notebook the page is in an iframe, so that its style does not affect the notebook.
"""

from __future__ import annotations

import html as markup
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from holdfast.clock import S
from holdfast.ledger import summary
from holdfast.ledger.failures import FailedRow
from holdfast.ledger.run_policy import ErrorClass
from holdfast.ledger.runs import RunLifecycle, RunProgress, RunRecord
from holdfast.ledger.states import RowState
from holdfast.spark import plots
from holdfast.spark.plots import PlotColumn, PlotLine

ERRORS_MAX = 10
SAMPLE_MAX = 20
ERROR_CHARS_MAX = 300
KEY_CHARS_MAX = 48
FRAME_PX = 900


class Report:
    """A snapshot of a run. It does not change afterwards."""

    def __init__(
        self,
        record: RunRecord,
        progress: RunProgress,
        failed_sample: Sequence[FailedRow] = (),
        *,
        store: str = "",
        live: bool = False,
        older: Sequence[RunProgress] = (),
    ) -> None:
        self.record = record
        self.progress = progress
        self.failed_sample = list(failed_sample)
        self.store = store
        self.live = live
        # The progress of the runs that this run retries.
        self.older = list(older)

    @property
    def html(self) -> str:
        return render_html(
            self.record,
            self.progress,
            failed_sample=self.failed_sample,
            store=self.store,
            live=self.live,
            older=self.older,
        )

    def save(self, path: str | Path) -> Path:
        """Write the page atomically: a concurrent reader gets the old file or the new one."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        part.write_text(self.html, encoding="utf-8")
        part.replace(target)
        return target

    def _repr_html_(self) -> str:
        return (
            f'<iframe srcdoc="{_escape(self.html)}" sandbox title="{_escape(self.record.name)}" '
            f'style="width:100%;height:{FRAME_PX}px;border:1px solid #8884;border-radius:6px">'
            "</iframe>"
        )

    def __repr__(self) -> str:
        return f"<Report of {self.record.name}: {self.record.status.value}>"

    def __str__(self) -> str:
        record, progress = self.record, self.progress
        lines = [
            f"{record.name}: {record.status.value}, run {record.run_id}",
            f"  rows    {record.size:,}: {summary.counts_text(progress)}",
            f"  calls   {summary.calls_text(progress)}",
            f"  time    {summary.times_text(progress)}, "
            f"{summary.rate_text(summary.mean_rate(progress))} on average",
        ]
        if self.older:
            lines.insert(
                2, f"  in all  {summary.counts_text(progress, self.older)}, retried runs included"
            )
        if where := output_place_text(record):
            lines.append(f"  output  {where}")
        if unread := uncalled_rows_text(record, progress):
            lines.append(f"  unread  {unread}")
        for group in progress.errors[:3]:
            lines.append(f"  error   {group.count:,} × {_shorten(group.text, 100)}")
            if group.examples and group.examples[0] != group.text:
                lines.append(f"          such as {_shorten(group.examples[0], 100)}")
        steps = summary.next_steps(record, progress, store=self.store, live=self.live)
        return "\n".join([*lines, *(f"  next    {step}" for step in steps)])


def uncalled_rows_text(record: RunRecord, progress: RunProgress) -> str:
    """Describe the rows without a call in a lazy run: it calls only the intervals that are read."""
    unseen = progress.counts[RowState.UNSEEN] if progress.counts else 0
    if not unseen or record.sink or record.status is not RunLifecycle.OPEN:
        return ""
    return f"{unseen:,} rows were not called; the lazy form calls only the intervals that are read"


def output_place_text(record: RunRecord) -> str:
    """Return the place of the output: `labels/ (parquet)`."""
    path = record.sink.get("path", "") or record.sink.get("table", "")
    kind = record.sink.get("kind", "")
    return f"{path} ({kind})" if path and kind else str(path or "")


def render_html(
    record: RunRecord,
    progress: RunProgress,
    *,
    failed_sample: Sequence[FailedRow],
    store: str = "",
    live: bool = False,
    older: Sequence[RunProgress] = (),
) -> str:
    """Render the page."""
    steps = summary.next_steps(record, progress, store=store, live=live)
    sections = [
        _header(record, progress, live),
        _tiles(record, progress),
        _outcome_bar(record, progress, older),
        _list("What to do next", steps),
        _plots(progress),
        _errors(progress),
        _sample(record, progress, failed_sample),
        f'<div class="pair">{_counters(record, progress)}{_config(record)}</div>',
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{_escape(record.name)}: run report</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(sections)}</main></body></html>\n"
    )


# -- sections ------------------------------------------------------------------------------------


def _header(record: RunRecord, progress: RunProgress, live: bool) -> str:
    status = record.status.value
    facts = [f"run {record.run_id}", f"started {_utc_text(record.created_ns)} UTC"]
    if record.finished_ns:
        facts.append(f"ended {_utc_text(record.finished_ns)} UTC")
    else:
        facts.append(f"as of {_utc_text(progress.updated_ns)} UTC")
    if live:
        facts.append("a driver runs it")
    halted = f'<p class="halt">{_escape(record.halted)}</p>' if record.halted else ""
    status_style = _STATUS_STYLES.get(record.status, "calm")
    return (
        f'<header><h1>{_escape(record.name)} <span class="chip {status_style}">{_escape(status)}</span></h1>'
        f"<p>{_escape(' · '.join(facts))}</p>{halted}</header>"
    )


_STATUS_STYLES = {
    RunLifecycle.FINISHED: "good",
    RunLifecycle.HALTED: "bad",
    RunLifecycle.CANCELLED: "warn",
}


def _tiles(record: RunRecord, progress: RunProgress) -> str:
    tally = summary.tally_rows(progress)
    tiles = [
        (f"{record.size:,}", "rows", ""),
        (f"{tally.succeeded:,}", "done", ""),
        (f"{tally.failed:,}", "failed", "bad" if tally.failed else ""),
        (f"{tally.skipped:,}", "skipped", ""),
        (f"{progress.calls:,}", "calls made", ""),
        (f"{progress.reused:,}", "outcomes reused", ""),
        (summary.duration_text(summary.elapsed_ns(progress)), "time", ""),
        (summary.duration_text(progress.setup_ns), "until the first call", ""),
        (summary.duration_text(progress.calls_ns), "time of calls", ""),
        (summary.rate_text(summary.mean_rate(progress)), "rows while calls were made", ""),
    ]
    if progress.tokens:
        tiles.append((f"{progress.tokens:,}", "tokens", ""))
    if progress.cost > 0:
        tiles.append((summary.cost_text(progress.cost), "cost", ""))
        a_call = progress.cost / max(progress.calls, 1)
        tiles.append((summary.cost_text(a_call), "cost a call", ""))
    return (
        f'<section class="tiles by{len(tiles) // 2}">'
        + "".join(
            f'<div class="tile {mood}"><b>{_escape(value)}</b><span>{_escape(label)}</span></div>'
            for value, label, mood in tiles
        )
        + "</section>"
    )


def _outcome_bar(record: RunRecord, progress: RunProgress, older: Sequence[RunProgress]) -> str:
    """Render one bar of all rows by outcome."""
    tally, size = summary.tally_rows(progress), max(record.size, 1)
    parts = [
        (tally.succeeded, "done", "ok"),
        (tally.skipped, "skipped", "skip"),
        (tally.failed, "failed", "fail"),
        (tally.cancelled, "cancelled", "gone"),
        (tally.in_flight, "in flight", "flight"),
    ]
    remaining = record.size - tally.ended - tally.in_flight
    if remaining > 0:
        parts.append((remaining, "to do", "todo"))
    shown = [part for part in parts if part[0]]
    bar = "".join(
        f'<i class="{style}" style="width:{count / size:.4%}" title="{count:,} {word}"></i>'
        for count, word, style in shown
    )
    legend = _legend([(word, style) for _, word, style in shown])
    in_all = ""
    if older:
        total_text = (
            f"In all, with the runs that this is a retry of: {summary.counts_text(progress, older)}"
        )
        in_all = f"<p>{_escape(total_text)}</p>"
    return f'<section><div class="share">{bar}</div>{legend}{in_all}</section>'


def _plots(progress: RunProgress) -> str:
    figures: list[tuple[str, str, str]] = []
    series = progress.series
    if len(series) > 1:
        seconds = [point[0] / 1000 for point in series]
        rows = [
            PlotLine("done", "ok", [point[1] for point in series]),
            PlotLine("skipped", "skip", [point[3] for point in series]),
            PlotLine("failed", "fail", [point[2] for point in series]),
        ]
        rows = [rows[0], *(line for line in rows[1:] if any(line.values))]
        drawn_rows = plots.line_plot(
            seconds, rows, label="rows over time", text=plots.count_text, stacked=True
        )
        figures.append(("Rows over time", _legend([(x.label, x.style) for x in rows]), drawn_rows))
        if steps := summary.throughput(series):
            times = [edge for begin, end, _ in steps for edge in (begin, end)]
            rates = PlotLine("rows/s", "ok", [rate for _, _, rate in steps for _ in range(2)])
            drawn = plots.line_plot(times, [rates], label="throughput", text=plots.count_text)
            note = f"rows/s in each of {len(steps):,} intervals from the first call on"
            figures.append(("Throughput", f"<small>{_escape(note)}</small>", drawn))
        for title, line, text in (
            (
                "In flight",
                PlotLine("rows begun", "flight", [p[4] for p in series]),
                plots.count_text,
            ),
            ("Cost over time", PlotLine("", "money", [p[5] for p in series]), summary.cost_text),
        ):
            if any(line.values):
                drawn = plots.line_plot(seconds, [line], label=title.lower(), text=text)
                figures.append((title, f"<small>{_escape(line.label)}</small>", drawn))
    if any(progress.latency_log2_us):
        figures.append(_latency_plot(progress.latency_log2_us))
    if failed_rows_by_class(progress):
        figures.append(_failures_by_class_plot(progress))
    return (
        '<section class="plots">'
        + "".join(
            f"<figure><figcaption><b>{_escape(title)}</b>{note}</figcaption>{drawn}</figure>"
            for title, note, drawn in figures
        )
        + "</section>"
        if figures
        else ""
    )


def _latency_plot(buckets: Sequence[int]) -> tuple[str, str, str]:
    filled = [at for at, count in enumerate(buckets) if count]
    columns = [
        PlotColumn(
            _microseconds_text(1 << at),
            buckets[at],
            f"{buckets[at]:,} calls took {_microseconds_text(1 << at)} to {_microseconds_text(2 << at)}",
        )
        for at in range(filled[0], filled[-1] + 1)
    ]
    # Quantiles show a few slow calls that the histogram hides.
    shares = [
        (share, _microseconds_text(quantile_us(buckets, share))) for share in (0.5, 0.95, 0.99)
    ]
    note = ", ".join(f"{share:.0%} under {limit_text}" for share, limit_text in shares)
    drawn = plots.histogram_plot(columns, label="time of a call", style="flight")
    return "Time of a call", f"<small>{_escape(note)}</small>", drawn


def _failures_by_class_plot(progress: RunProgress) -> tuple[str, str, str]:
    columns = [
        PlotColumn(class_text(code), count, f"{count:,} rows: {class_text(code)}")
        for code, count in sorted(
            failed_rows_by_class(progress).items(), key=lambda item: (-item[1], item[0])
        )
    ]
    drawn = plots.bar_plot(columns, label="failures by class", style="fail")
    return "Failures by class", "<small>rows that finally failed</small>", drawn


def failed_rows_by_class(progress: RunProgress) -> dict[int, int]:
    """Return failed rows by error class. Older records have only their error groups."""
    if any(progress.failed_by_class):
        return {code: rows for code, rows in enumerate(progress.failed_by_class) if rows}
    totals: dict[int, int] = {}
    for group in progress.errors:
        totals[group.error_class] = totals.get(group.error_class, 0) + group.count
    return totals


def _errors(progress: RunProgress) -> str:
    rows = [
        (
            f"{group.count:,}",
            f"{group.rows:,}",
            class_text(group.error_class),
            _shorten(group.text, ERROR_CHARS_MAX),
            _shorten("; ".join(group.examples), ERROR_CHARS_MAX),
        )
        for group in progress.errors[:ERRORS_MAX]
    ]
    header = ("attempts", "rows", "class", "error", "such as")
    return _table("Most frequent errors", header, rows, right=1) if rows else ""


def _sample(record: RunRecord, progress: RunProgress, sample: Sequence[FailedRow]) -> str:
    rows = [
        (
            f"{row.seq}",
            _shorten(row.key, KEY_CHARS_MAX),
            f"{row.attempts}",
            class_text(row.error_class),
            _shorten(row.error, ERROR_CHARS_MAX),
        )
        for row in sample[:SAMPLE_MAX]
    ]
    if not rows:
        return ""
    title = (
        f"Failed rows ({len(rows):,} of {max(summary.tally_rows(progress).failed, len(rows)):,})"
    )
    key = ", ".join(record.key) or "key"
    return _table(title, ("seq", key, "attempts", "class", "error"), rows, right=1)


def _counters(record: RunRecord, progress: RunProgress) -> str:
    tally = summary.tally_rows(progress)
    pairs = [
        ("rows", record.size),
        ("succeeded", tally.succeeded),
        ("skipped", tally.skipped),
        ("failed", tally.failed),
        ("cancelled", tally.cancelled),
        ("in flight", tally.in_flight),
        ("committed to the output", tally.committed),
        ("calls made", progress.calls),
        ("outcomes reused", progress.reused),
        ("attempts retried", progress.retries),
        ("leases reclaimed", progress.reclaims),
        ("stale reports refused", progress.fenced),
        ("tasks connected", progress.tasks),
    ]
    return _table("Counters", ("what", "count"), [(name, f"{n:,}") for name, n in pairs], right=2)


def _config(record: RunRecord) -> str:
    pairs = [("output", output_place_text(record)), ("key", ", ".join(record.key))]
    pairs += summary.settings(record)
    pairs += [("input", record.input_hash), ("retry of", record.retry_of)]
    rows = [(name, _shorten(value, ERROR_CHARS_MAX)) for name, value in pairs if value]
    return _table("Configuration", ("what", "value"), rows)


# -- figures -------------------------------------------------------------------------------------


def quantile_us(buckets: Sequence[int], share: float) -> int:
    """The upper bound of the bucket that contains this share of all calls."""
    wanted, seen = share * sum(buckets), 0
    for at, count in enumerate(buckets):
        seen += count
        if seen >= wanted:
            return 2 << at
    return 2 << max(len(buckets) - 1, 0)


def class_text(code: int) -> str:
    try:
        return ErrorClass(code).name.lower()
    except ValueError:
        return f"class {code}"


def _microseconds_text(us: int) -> str:
    """Format with two digits, which suffice for bucket bounds that are powers of two."""
    for by, unit in ((60_000_000, "min"), (1_000_000, "s"), (1_000, "ms")):
        if us >= by:
            value = us / by
            return (
                f"{value:.1f}".removesuffix(".0") + f" {unit}"
                if value < 10
                else f"{value:.0f} {unit}"
            )
    return f"{us} µs"


def _utc_text(ns: int) -> str:
    return datetime.fromtimestamp(ns // S, UTC).strftime("%Y-%m-%d %H:%M:%S")


# -- markup --------------------------------------------------------------------------------------


def _escape(text: object) -> str:
    """Escape text for content and attributes. Control characters are replaced."""
    printable = "".join(c if c.isprintable() or c in "\n\t" else "�" for c in str(text))
    return markup.escape(printable, quote=True)


def _shorten(text: str, chars_max: int) -> str:
    one_line = " ".join(text.split())
    return one_line if len(one_line) <= chars_max else one_line[: chars_max - 1] + "…"


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(
        f'<span><i class="{style}"></i>{_escape(word)}</span>' for word, style in entries
    )
    return f'<div class="legend">{items}</div>'


def _list(title: str, lines: Sequence[str]) -> str:
    items = "".join(f"<li>{_escape(line)}</li>" for line in lines)
    return f'<section class="next"><h2>{_escape(title)}</h2><ul>{items}</ul></section>'


def _table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, right: int = 0
) -> str:
    """Render a table. `right` is the number of the right-aligned column, from 1; 0 for none."""
    number = ' class="n"'

    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{number if at == right else ''}>{_escape(value)}</{tag}>"
            for at, value in enumerate(values, 1)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f'<section><h2>{_escape(title)}</h2><div class="wide"><table><thead><tr>{cells("th", header)}'
        f"</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


STYLE = """
:root{--page:#f6f7f8;--card:#fff;--ink:#1d2329;--soft:#5d6873;--rule:#e2e6ea;--ok:#23875a;--skip:#b58a12;
--fail:#c53b50;--gone:#8a929a;--flight:#3273b8;--money:#7a55b8;--todo:#d8dde2}
@media (prefers-color-scheme:dark){:root{--page:#14181c;--card:#1d2228;--ink:#e6e9ec;--soft:#9aa5b0;
--rule:#30373f;--ok:#3fb67f;--skip:#d3aa3a;--fail:#e8697b;--gone:#7d868f;--flight:#68a4e0;--money:#a98be0;
--todo:#39414a}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",
Roboto,"DejaVu Sans",sans-serif}
main{max-width:1080px;margin:0 auto;padding:28px 20px 48px}
header p{margin:0;color:var(--soft)}
h1{font-size:26px;margin:0 0 4px;display:flex;gap:12px;align-items:center;flex-wrap:wrap;
overflow-wrap:anywhere}
h2{font-size:16px;margin:0 0 8px}
section{margin-top:22px}
.chip{font-size:13px;font-weight:600;padding:2px 10px;border-radius:99px;color:#fff;background:var(--flight)}
.chip.good{background:var(--ok)}.chip.bad{background:var(--fail)}.chip.warn{background:var(--skip)}
@media (prefers-color-scheme:dark){.chip{color:#14181c}}
.halt{color:var(--fail)!important;margin-top:8px!important;overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(130px,1fr));gap:10px}
@media (min-width:760px){.by4{grid-template-columns:repeat(4,1fr)}.by5{grid-template-columns:repeat(5,1fr)}}
.tile{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:10px 12px}
.tile b{display:block;font-size:20px;line-height:1.3;font-variant-numeric:tabular-nums;white-space:nowrap}
.tile span{color:var(--soft);font-size:13px}
.tile.bad b{color:var(--fail)}
.share{display:flex;height:14px;border-radius:7px;overflow:hidden;background:var(--todo)}
.share i{display:block;height:100%;min-width:2px}
.legend{display:flex;flex-wrap:wrap;gap:4px 14px;font-size:13px;color:var(--soft);margin-top:6px}
.legend span{display:inline-flex;align-items:center;gap:5px}
.legend i{width:10px;height:10px;border-radius:3px;display:inline-block}
i.ok{background:var(--ok)}i.skip{background:var(--skip)}i.fail{background:var(--fail)}
i.gone{background:var(--gone)}i.flight{background:var(--flight)}i.todo{background:var(--todo)}
i.money{background:var(--money)}
.next{background:var(--card);border:1px solid var(--rule);border-left:4px solid var(--flight);
border-radius:8px;padding:12px 16px}
.next ul{margin:0;padding-left:18px}.next li{overflow-wrap:anywhere}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:14px}
figure{margin:0;background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:12px 14px 8px}
figcaption{display:flex;flex-wrap:wrap;justify-content:space-between;align-items:baseline;gap:2px 12px}
figcaption .legend{margin:0}
small{font-size:13px;color:var(--soft)}
svg{display:block;width:100%;height:auto;margin-top:6px}
svg text{font-size:12px;fill:var(--soft)}
.ok{--hue:var(--ok)}.skip{--hue:var(--skip)}.fail{--hue:var(--fail)}.flight{--hue:var(--flight)}
.money{--hue:var(--money)}
.grid{stroke:var(--rule);stroke-width:1}
.line{fill:none;stroke:var(--hue);stroke-width:2;stroke-linejoin:round}
.area{fill:var(--hue);fill-opacity:.16}
.bar{fill:var(--hue);fill-opacity:.85}
.hover{fill:transparent}.hover:hover{fill:var(--soft);fill-opacity:.14}
.wide{overflow-x:auto;background:var(--card);border:1px solid var(--rule);border-radius:8px}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{text-align:left;padding:6px 12px;border-top:1px solid var(--rule);vertical-align:top}
td:not(:last-child){white-space:nowrap}td:last-child{overflow-wrap:anywhere}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:0 14px}
thead th{border-top:0;color:var(--soft);font-weight:600;white-space:nowrap}
.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap;width:1%}
@media print{body{background:#fff}.tile,figure,.wide,.next{break-inside:avoid}}
"""

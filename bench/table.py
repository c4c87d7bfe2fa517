"""A run as a table: one line per metric with its ratio or figure, its spread and its target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

HEADER = ("metric", "figure", "× raw", "spread", "other", "target", "met")
# The main measure of a metric comes first.
SHOWN_APART = ("raw", "ratio", "p50_ms")


def lines(documents: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    return [_line(document) for document in documents]


def text(documents: Sequence[dict[str, Any]]) -> str:
    rows = [HEADER, *lines(documents)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(HEADER))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _line(document: dict[str, Any]) -> tuple[str, ...]:
    measures = document["measures"]
    first = next(iter(measures))
    compared = measures.get("ratio", measures[first])
    others = [name for name in measures if name != first and name not in SHOWN_APART]
    return (
        document["metric"],
        _figure(measures[first]),
        f"{measures['ratio']['median']:.2f}" if "ratio" in measures else "",
        f"{compared['min']:,g} … {compared['max']:,g}",
        ", ".join(f"{name} {measures[name]['median']:,g}" for name in others),
        " and ".join(document["targets"]),
        {True: "yes", False: "NO", None: ""}[document["met"]],
    )


def _figure(measure: dict[str, Any]) -> str:
    value = measure["median"]
    return f"{value:,.0f} {measure['unit']}" if value >= 100 else f"{value:,g} {measure['unit']}"

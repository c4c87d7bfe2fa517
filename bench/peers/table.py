"""A run as a table: one line a measure, each system's median and spread, ours as a ratio to Restate."""

from __future__ import annotations

from typing import Any

from bench.peers.workload import GOALS, MEASURES, WHAT, Goal
from bench.record import Record, Spread, Target

OURS = "holdfast"
SYSTEMS = (OURS, "restate", "dbos")
HEADER = ("measure", "unit", *SYSTEMS, "ours / Restate's", "ours / DBOS's", "goal", "met")
Samples = dict[str, dict[str, list[float]]]
EXTRA = {"ask_p95": "ms", "raw": "fdatasync/s"}


def document(samples: Samples) -> dict[str, Any]:
    """Median, least and greatest of each measure by system, and of our ratios to each peer.

    A ratio is taken within a run, where both had much the same machine.
    """
    units = {**MEASURES, **EXTRA}
    measures = {
        name: {
            measure: Spread(units[measure], tuple(found[measure])).document()
            for measure in units
            if measure in found
        }
        for name, found in samples.items()
    }
    pairs = {measure: (measure, measure) for measure in MEASURES}
    pairs |= {_key(goal): (goal.ours, goal.restate) for goal in GOALS}
    ratios = {
        peer: {
            key: Spread("×", values).document()
            for key, (ours, theirs) in pairs.items()
            if (values := _ratios(samples, ours, peer, theirs))
        }
        for peer in samples
        if peer != OURS
    }
    return {"measures": measures, "ratios": ratios}


def lines(compared: dict[str, Any]) -> list[tuple[str, ...]]:
    measures = compared["measures"]
    return [
        _line(measures, compared["ratios"], measure, unit)
        for measure, unit in {**MEASURES, **EXTRA}.items()
        if any(measure in found for found in measures.values())
    ]


def text(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def records(samples: Samples) -> list[Record]:
    """Ours beside Restate, in the form that all metrics of the house have."""
    found = []
    for goal in GOALS:
        ours = samples.get(OURS, {}).get(goal.ours)
        ratios = _ratios(samples, goal.ours, "restate", goal.restate)
        if not ours:
            continue
        measures = {goal.ours: Spread(MEASURES[goal.ours], tuple(ours))}
        targets: tuple[Target, ...] = ()
        if ratios:
            measures["to_restate"] = Spread("×", ratios)
            targets = (Target("to_restate", at_least=goal.at_least, below=goal.below),)
        what = f"{WHAT[goal.ours]}, against Restate's {goal.restate}"
        found.append(Record(f"worlds_{goal.ours}", what, measures, targets))
    return found


def _ratios(samples: Samples, ours: str, peer: str, theirs: str) -> tuple[float, ...]:
    mine, other = samples.get(OURS, {}).get(ours, []), samples.get(peer, {}).get(theirs, [])
    return tuple(a / b for a, b in zip(mine, other, strict=False))


def _line(measures: Any, ratios: Any, measure: str, unit: str) -> tuple[str, ...]:
    goal = next((goal for goal in GOALS if goal.ours == measure), None)
    to_restate = ratios.get("restate", {})
    judged = to_restate.get(_key(goal)) if goal else None
    shown = _times(to_restate.get(measure))
    if goal and judged and goal.ours != goal.restate:
        shown += f"; {_times(judged)} of its {goal.restate}"
    return (
        measure,
        unit,
        *(_figure(measures.get(name, {}).get(measure)) for name in SYSTEMS),
        shown,
        _times(ratios.get("dbos", {}).get(measure)),
        str(goal) if goal else "",
        "" if not goal or not judged else "yes" if goal.met(judged["median"]) else "NO",
    )


def _key(goal: Goal) -> str:
    return goal.ours if goal.ours == goal.restate else f"{goal.ours}/{goal.restate}"


def _figure(found: dict[str, Any] | None) -> str:
    if found is None:
        return "–"
    return f"{found['median']:,g} ({found['min']:,g} … {found['max']:,g})"


def _times(found: dict[str, Any] | None) -> str:
    return (
        "" if found is None else f"{found['median']:.2f} ({found['min']:.2f} … {found['max']:.2f})"
    )

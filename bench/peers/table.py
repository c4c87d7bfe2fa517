"""A run as a table: one line per measure, with the median and spread of each system and our ratio to each peer."""

from __future__ import annotations

from typing import Any

from bench.peers.suite import Suite
from bench.record import Record, Spread, Target

OURS = "holdfast"
TITLES = {"restate": "Restate's", "dbos": "DBOS's", "best": "the best peer's"}
# With more peers, the table compares ours with the best peer alone.
PEERS_SHOWN_MAX = 2
LESS_IS_BETTER = ("ms",)
Samples = dict[str, dict[str, list[float]]]


def header(suite: Suite) -> tuple[str, ...]:
    ratios = (f"ours / {TITLES[peer]}" for peer in _shown(suite))
    return ("measure", "unit", *suite.systems, *ratios, "goal", "met")


def document(suite: Suite, samples: Samples) -> dict[str, Any]:
    """Median, minimum and maximum of each measure by system, and of our ratios to each peer.

    A ratio is taken within a run, where the state of the machine was similar. `best` is the best peer of that
    run.
    """
    units = suite.units
    measures = {
        name: {
            measure: Spread(units[measure], tuple(found[measure])).document()
            for measure in units
            if measure in found
        }
        for name, found in samples.items()
    }
    pairs = {measure: (measure, measure) for measure in suite.measures}
    pairs |= {goal.key: (goal.ours, goal.theirs) for goal in suite.goals}
    ratios = {
        peer: {
            key: Spread("×", values).document()
            for key, (ours, theirs) in pairs.items()
            if (values := _ratios(suite, samples, ours, peer, theirs))
        }
        for peer in samples
        if peer != OURS
    }
    ratios["best"] = {
        goal.key: Spread("×", values).document()
        for goal in suite.goals
        if goal.best and (values := _ratios(suite, samples, goal.ours, "best", goal.theirs))
    }
    return {"measures": measures, "ratios": ratios}


def lines(suite: Suite, compared: dict[str, Any]) -> list[tuple[str, ...]]:
    measures = compared["measures"]
    return [
        _line(suite, measures, compared["ratios"], measure, unit)
        for measure, unit in suite.units.items()
        if any(measure in found for found in measures.values())
    ]


def slower(suite: Suite, compared: dict[str, Any]) -> list[str]:
    """A sentence for each measure in which the median ratio is worse for Holdfast than for a peer."""
    return [
        f"`{measure}`: {ratio['median']:.2f} × {TITLES.get(peer, peer)}"
        for measure, unit in suite.measures.items()
        for peer, ratios in compared["ratios"].items()
        if peer != "best"
        and (ratio := ratios.get(measure)) is not None
        and (ratio["median"] > 1 if unit in LESS_IS_BETTER else ratio["median"] < 1)
    ]


def text(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def records(suite: Suite, samples: Samples) -> list[Record]:
    """Our measures with their goals, as records of the common form."""
    result = []
    for goal in suite.goals:
        ours = samples.get(OURS, {}).get(goal.ours)
        ratios = _ratios(suite, samples, goal.ours, goal.peer, goal.theirs)
        if not ours:
            continue
        measures = {goal.ours: Spread(suite.measures[goal.ours], tuple(ours))}
        targets: tuple[Target, ...] = ()
        if ratios:
            measure = f"to_{goal.peer}"
            measures[measure] = Spread("×", ratios)
            targets = (Target(measure, at_least=goal.at_least, below=goal.below),)
        whose = "that of the best peer" if goal.best else f"{TITLES[goal.of]} {goal.theirs}"
        what = f"{suite.what[goal.ours]}, against {whose}"
        name = f"{suite.name}_{goal.ours}" + (f"_{goal.of}" if goal.of != "restate" else "")
        result.append(Record(name, what, measures, targets))
    return result


def _ratios(suite: Suite, samples: Samples, ours: str, peer: str, theirs: str) -> tuple[float, ...]:
    mine = samples.get(OURS, {}).get(ours, [])
    if peer != "best":
        other = samples.get(peer, {}).get(theirs, [])
        return tuple(a / b for a, b in zip(mine, other, strict=False))
    others = [found[theirs] for name, found in samples.items() if name != OURS and theirs in found]
    # The best time is the minimum, the best rate the maximum.
    best = min if suite.units[theirs] in LESS_IS_BETTER else max
    return tuple(a / best(run) for a, *run in zip(mine, *others, strict=False)) if others else ()


def _line(suite: Suite, measures: Any, ratios: Any, measure: str, unit: str) -> tuple[str, ...]:
    goals = [goal for goal in suite.goals if goal.ours == measure]
    goal = goals[0] if goals else None
    ratio = ratios.get(goal.peer, {}).get(goal.key) if goal else None
    met = [
        goal.met(found["median"])
        for goal in goals
        if (found := ratios.get(goal.peer, {}).get(goal.key)) is not None
    ]
    shown = {peer: _times(ratios.get(peer, {}).get(measure)) for peer in _shown(suite)}
    if goal and ratio and goal.ours != goal.theirs and goal.peer in shown:
        against = f"{_times(ratio)} of its {goal.theirs}"
        shown[goal.peer] = "; ".join(filter(None, (shown[goal.peer], against)))
    return (
        measure,
        unit,
        *(_figure(measures.get(name, {}).get(measure)) for name in suite.systems),
        *shown.values(),
        ", ".join(map(str, goals)),
        "" if not met else "yes" if all(met) else "NO",
    )


def _shown(suite: Suite) -> tuple[str, ...]:
    peers = tuple(name for name in suite.systems if name != OURS)
    return peers if len(peers) <= PEERS_SHOWN_MAX else ("best",)


def _figure(figure: dict[str, Any] | None) -> str:
    if figure is None:
        return "–"
    return f"{figure['median']:,g} ({figure['min']:,g} … {figure['max']:,g})"


def _times(ratio: dict[str, Any] | None) -> str:
    return (
        "" if ratio is None else f"{ratio['median']:.2f} ({ratio['min']:.2f} … {ratio['max']:.2f})"
    )

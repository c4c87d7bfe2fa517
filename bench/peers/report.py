"""`python -m bench.peers.report`: write the page of each suite from its last saved run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from bench import history
from bench import table as house
from bench.peers import table
from bench.peers.suite import Suite
from bench.peers.suites import SUITES


def page(suite: Suite, run: dict[str, Any]) -> str:
    compared = run["compared"]
    parts = [
        suite.introduction,
        f"Measured on {run['date']} with Holdfast {run['holdfast']}, Python {run['python']}, "
        f"{run['cpu_count']} cores, {compared['runs']} runs, a budget of {run['budget_s']:g} s, "
        f"at a load of {run['load_before']:g} before it began.",
        *(["", run["note"]] if run.get("note") else []),
        "",
        *_markdown([table.header(suite), *table.lines(suite, compared)]),
        "",
        *(f"- {name}: not measured: {why}" for name, why in compared["absent"].items()),
        *_slower(suite, compared),
        "## Settings",
        "",
    ]
    for name, settings in compared["settings"].items():
        parts += [f"**{name}**", "", *(f"- {key}: {text}" for key, text in settings.items()), ""]
    parts.append(suite.fairness)
    if run["metrics"]:
        parts += [
            "## Ours, with targets",
            "",
            *_markdown([house.HEADER, *house.lines(run["metrics"])]),
            "",
            *(f"- `{metric['metric']}`: {metric['what']}" for metric in run["metrics"]),
            "",
        ]
    for command in suite.commands:
        parts += _command(command)
    return "\n".join(parts)


def _slower(suite: Suite, compared: dict[str, Any]) -> list[str]:
    if not suite.commands:
        return []
    found = table.slower(suite, compared) or ["nothing in this run"]
    return [
        "Slower than a peer, by the median of the ratios:",
        "",
        *(f"- {line}" for line in found),
        "",
    ]


def _command(command: str) -> list[str]:
    """The last saved run of a command of `python -m bench`."""
    runs = [run for run in history.load() if run.get("command", "").split(" ")[0] == command]
    if not runs:
        return []
    run = runs[-1]
    return [
        f"## `python -m bench {run['command']}`",
        "",
        f"Measured on {run['date']} with Holdfast {run['holdfast']}, Python {run['python']}, {run['cpu_count']} cores, "
        f"at a load of {run['load_before']:g} before it began.",
        "",
        *_markdown([house.HEADER, *house.lines(run["metrics"])]),
        "",
        *(f"- `{metric['metric']}`: {metric['what']}" for metric in run["metrics"]),
        "",
        *(
            f"- `{metric['metric']}`, {name}: {value}"
            for metric in run["metrics"]
            for name, value in metric["notes"].items()
        ),
        "",
    ]


def main() -> int:
    for suite in SUITES.values():
        runs = history.load(suite.history)
        if runs:
            write(suite, runs[-1], suite.page)
        else:
            hint = f"run `python -m bench.peers --suite {suite.name} --save` first"
            print(f"{suite.name}: no saved run: {hint}", file=sys.stderr)
    return 0


def write(suite: Suite, run: dict[str, Any], target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    target.write_text(page(suite, run), encoding="utf-8")


def _markdown(rows: list[tuple[str, ...]]) -> list[str]:
    head, *body = rows
    return ["| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *body)]


if __name__ == "__main__":
    sys.exit(main())

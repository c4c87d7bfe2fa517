"""The interleaved runs. In each run, every system takes a turn: it starts with an empty state on the same disk."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.peers.install import CannotInstall
from bench.peers.process import ProcessFailed
from bench.peers.suite import Suite, System
from bench.peers.table import Samples
from bench.place import new_directory
from bench.raw import raw_per_s

RAW_S = 0.5


def prepare(makers: Mapping[str, Callable[[], System]]) -> tuple[list[System], dict[str, str]]:
    """The systems that could be installed, and the reasons for missing ones."""
    systems, absent = [], {}
    for name, make in makers.items():
        try:
            systems.append(make())
        except (CannotInstall, ProcessFailed, OSError) as error:
            absent[name] = str(error)
            print(f"{name}: not measured: {error}", file=sys.stderr, flush=True)
    return systems, absent


def amounts(
    suite: Suite, systems: Sequence[System], *, runs: int, budget_s: float
) -> dict[str, Any]:
    share = budget_s / (runs * suite.usual_run_s)
    return {system.name: system.amount.scaled(share) for system in systems}


def take(
    systems: Sequence[System],
    amount_of: dict[str, Any],
    parts: Sequence[str],
    *,
    runs: int,
    parent: Path,
) -> tuple[Samples, dict[str, str]]:
    """All runs: samples by system and measure, and the systems that failed with their error."""
    samples: Samples = {system.name: {} for system in systems}
    failed: dict[str, str] = {}
    for run in range(runs):
        for system in systems:
            if system.name in failed:
                continue
            with new_directory(parent) as directory:
                before = raw_per_s(directory, RAW_S)
                began = time.monotonic()
                try:
                    measures = _turn(system, directory, amount_of[system.name], parts)
                except (ProcessFailed, OSError) as error:
                    failed[system.name] = str(error)
                    print(f"{system.name}: failed in run {run + 1}: {error}", file=sys.stderr)
                    continue
                measures["raw"] = fmean((before, raw_per_s(directory, RAW_S)))
            for measure, value in measures.items():
                samples[system.name].setdefault(measure, []).append(value)
            _print(run, system.name, measures, time.monotonic() - began)
    return samples, failed


def _turn(system: System, directory: Path, amount: Any, parts: Sequence[str]) -> dict[str, Any]:
    measures: dict[str, float] = {}
    with system.turn(directory) as turn:
        for part in parts:
            measures.update(getattr(turn, part)(amount))
    if ways := [measures[way] for way in ("batch", "senders") if way in measures]:
        measures["total"] = max(ways)
    return measures


def _print(run: int, name: str, measures: dict[str, float], took_s: float) -> None:
    shown = "  ".join(f"{measure} {value:,.4g}" for measure, value in measures.items())
    print(f"run {run + 1}  {name:<9} {took_s:5.0f} s  {shown}", flush=True)

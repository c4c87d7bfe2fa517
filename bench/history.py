"""The saved runs: `bench/history.json`, oldest first. They hold no host names and no paths."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from holdfast import __version__

FILE = Path(__file__).with_name("history.json")


def entry(
    documents: Sequence[dict[str, Any]],
    *,
    budget_s: float,
    load_before: float,
    command: str = "",
) -> dict[str, Any]:
    """`load_before` is the load average at the start of the run. It shows how quiet the machine was.

    `command` is a command of `python -m bench` with its options. The metrics without a command have none.
    """
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "holdfast": __version__,
        "python": platform.python_version(),
        "cpu_count": os.cpu_count(),
        "load_before": round(load_before, 2),
        "budget_s": budget_s,
        **({"command": command} if command else {}),
        "metrics": list(documents),
    }


def load(file: Path = FILE) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    runs: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return runs


def add_save_option(parser: argparse.ArgumentParser) -> None:
    """`--save`, for a command that keeps its runs among those of the metrics."""
    parser.add_argument(
        "--save",
        type=Path,
        nargs="?",
        const=FILE,
        metavar="FILE",
        help="append the run to FILE (bench/history.json)",
    )


def save(run: dict[str, Any], file: Path = FILE) -> None:
    runs = [*load(file), run]
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(runs, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(file)

"""The saved runs: `bench/history.json`, oldest first. They hold no host names and no paths."""

from __future__ import annotations

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
    documents: Sequence[dict[str, Any]], *, budget_s: float, load_before: float
) -> dict[str, Any]:
    """`load_before` is the load average at the start of the run. It shows how quiet the machine was."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "holdfast": __version__,
        "python": platform.python_version(),
        "cpu_count": os.cpu_count(),
        "load_before": round(load_before, 2),
        "budget_s": budget_s,
        "metrics": list(documents),
    }


def load(file: Path = FILE) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    runs: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return runs


def save(run: dict[str, Any], file: Path = FILE) -> None:
    runs = [*load(file), run]
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(runs, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(file)

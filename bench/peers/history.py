"""The saved runs: `bench/peers/history.json`, oldest first, in the form of `bench.history`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench import history

FILE = Path(__file__).with_name("history.json")


def entry(
    compared: dict[str, Any],
    documents: list[dict[str, Any]],
    *,
    budget_s: float,
    load_before: float,
    note: str,
) -> dict[str, Any]:
    run = history.entry(documents, budget_s=budget_s, load_before=load_before)
    return {**run, "note": note, "compared": compared}


def load() -> list[dict[str, Any]]:
    return history.load(FILE)


def save(run: dict[str, Any]) -> None:
    history.save(run, FILE)

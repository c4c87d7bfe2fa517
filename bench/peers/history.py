"""The saved form of a suite run: that of `bench.history` with additions."""

from __future__ import annotations

from typing import Any

from bench import history


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

"""Validation of stage arguments: invalid values raise `NotAStage`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.spark.errors import NotAStage


def checked_number(name: str, value: Any, low: float, high: float | None = None) -> Any:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise NotAStage(what=name, why="must be a number", found=value)
    if not low <= value < float("inf") or (high is not None and value > high):
        raise NotAStage(what=name, why="out of bounds", found=value, min=low, max=high)
    return value


def checked_int(name: str, value: Any, low: int, high: int | None = None) -> int:
    if not isinstance(value, int):
        raise NotAStage(what=name, why="must be a whole number", found=value)
    return int(checked_number(name, value, low, high))


def checked_key(key: Any) -> list[str]:
    columns = [key] if isinstance(key, str) else list(key) if isinstance(key, Sequence) else []
    if not columns or not all(isinstance(one, str) and one for one in columns):
        raise NotAStage(
            what="key", why="must be the name of a column, or a list of names", found=key
        )
    if len(set(columns)) < len(columns):
        raise NotAStage(what="key", why="a column is named twice", found=key)
    return columns

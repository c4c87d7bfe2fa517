"""Arguments of a stage, checked when it is made: what is no good is refused as `NotAStage`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.spark.errors import NotAStage


def checked_number(what: str, found: Any, low: float, high: float | None = None) -> Any:
    if not isinstance(found, int | float) or isinstance(found, bool):
        raise NotAStage(what=what, why="a number", found=found)
    if not low <= found < float("inf") or (high is not None and found > high):
        raise NotAStage(what=what, why="out of bounds", found=found, min=low, max=high)
    return found


def whole_number(what: str, found: Any, low: int, high: int | None = None) -> int:
    if not isinstance(found, int):
        raise NotAStage(what=what, why="a whole number", found=found)
    return int(checked_number(what, found, low, high))


def checked_key(key: Any) -> list[str]:
    found = [key] if isinstance(key, str) else list(key) if isinstance(key, Sequence) else []
    if not found or not all(isinstance(one, str) and one for one in found):
        raise NotAStage(what="key", why="the name of a column, or a list of them", found=key)
    if len(set(found)) < len(found):
        raise NotAStage(what="key", why="a column is named twice", found=key)
    return found

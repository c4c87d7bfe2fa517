"""Variants of one test: `make test` runs the first `count` variants. `make chaos` and `make sim` run the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def deep_after(count: int, values: Iterable[Any]) -> list[Any]:
    """Return the values as parameters. Those after the first `count` are marked `deep`."""
    return [
        value if at < count else pytest.param(value, marks=pytest.mark.deep)
        for at, value in enumerate(values)
    ]

"""Test case ids that are equal in every process: pytest-xdist compares them."""

from __future__ import annotations

import re


def stable_repr(value: object) -> str:
    """Return the repr of a value without memory addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))

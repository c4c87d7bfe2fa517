"""Ids of test cases that every process gives alike: pytest-xdist compares them."""

from __future__ import annotations

import re


def stable(value: object) -> str:
    """The value's text without addresses in memory."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))

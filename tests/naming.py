"""Names of parameters: the same in every process, so that several can run the tests of one file list."""

from __future__ import annotations

import re


def named(value: object) -> str:
    """What it looks like, but for where it lies."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))

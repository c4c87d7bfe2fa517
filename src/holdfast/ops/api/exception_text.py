"""The exception in a stored traceback, for clients that must not see the source paths of the application.

Traceback (most recent call last):
  File "/srv/bank.py", line 9, in deposited
    raise ValueError("no credit")
ValueError: no credit                           ← `exception_text` returns this
"""

from __future__ import annotations

import re

from holdfast.config import ERROR_TEXT_CHARS_MAX

# A frame of a traceback. The text may begin within one, because only its tail is stored.
_FRAME = re.compile(r'^.*", line \d+(?:, in .*)?$', re.MULTILINE)
# The margin of an exception group.
_MARGIN = re.compile(r"^[ |+]+", re.MULTILINE)
_GROUP_HEAD = "Exception Group Traceback (most recent call last):"


def exception_text(stored: str) -> str:
    """Return type and text of the exception whose traceback a reducer's step stores. Return a text without a
    traceback, such as that of a typed error, unchanged."""
    if _GROUP_HEAD in stored:
        return _group_text(stored.rpartition(_GROUP_HEAD)[2])
    frames = list(_FRAME.finditer(stored))
    if frames:
        return _after_source(stored[frames[-1].end() + 1 :])
    is_cut = len(stored) >= ERROR_TEXT_CHARS_MAX
    return _after_source(stored.partition("\n")[2] or stored) if is_cut else stored


def _after_source(text: str) -> str:
    """Return the text after the indented source lines of the last frame."""
    lines = text.splitlines()
    while len(lines) > 1 and (not lines[0] or lines[0].startswith(" ")):
        lines.pop(0)
    return "\n".join(lines).strip()


def _group_text(text: str) -> str:
    """Return type and text of an exception group, without its parts."""
    lines = [line for line in text.splitlines() if line.startswith("  | ") and line[4] != " "]
    return _MARGIN.sub("", lines[0]) if lines else "ExceptionGroup"

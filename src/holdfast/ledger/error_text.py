"""Error texts that differ only in their particulars, as one text: the key that errors are grouped by.

    normalise("ValueError: no label for document 107")    # "ValueError: no label for document <n>"

Replaced are UUIDs, URLs, paths, quoted text, long identifiers, hexadecimal and decimal numbers. A status code of
HTTP stays (`HTTP Error 401`): 401 and 503 are two errors. The report of a run and the rule `same_error` of
`Stop` use this one function, so they count alike.
"""

from __future__ import annotations

import re
from functools import lru_cache

# Longer texts are alike when their beginnings are.
TEXT_CHARS_MAX = 1000
NORMALISED_CHARS_MAX = 200

_STATUS = re.compile(
    r"(?i)\b((?:http(?:/\d(?:\.\d)?)?(?:[ _]?(?:status|error))*|status(?:[ _]?code)?|(?:response|error) code)"
    r"[ :=]{1,3})([1-5]\d\d)\b(?![.,]?\d)"
)
_RULES = (
    (re.compile(r"(?i)\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), "<id>"),
    (re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s'\"<>]+"), "<url>"),
    # An apostrophe inside a word is no quote.
    (re.compile(r"(?<!\w)(?:b|r|u)?'(?:[^'\\]|\\.)*'(?!\w)"), "<text>"),
    (re.compile(r'"(?:[^"\\]|\\.)*"'), "<text>"),
    (re.compile(r"`[^`]*`"), "<text>"),
    (
        re.compile(r"(?<![\w<>/.])(?:[A-Za-z]:)?(?:~|\.{1,2})?(?:[/\\][\w.@~+%=-]+)+[/\\]?"),
        "<path>",
    ),
    (re.compile(r"(?i)\b0x[0-9a-f]+\b"), "<hex>"),
    (re.compile(r"(?i)\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{8,}\b"), "<hex>"),
    # Request ids and the like: long words with digits in them.
    (re.compile(r"\b(?=[A-Za-z_-]*\d)[\w-]{16,}\b"), "<id>"),
    (re.compile(r"[-+]?\d+(?:[.,:]\d+)*(?:[eE][-+]?\d+)?"), "<n>"),
)
_KEPT = re.compile("[\ue000-\uf8ff]")


def normalise(text: str) -> str:
    """The text with its particulars replaced; the same for errors that differ in nothing else."""
    return _normalised(text[:TEXT_CHARS_MAX])


@lru_cache(maxsize=4096)
def _normalised(text: str) -> str:
    found = _KEPT.sub("?", " ".join(text.split()))
    # A status code is carried past the rules as one character of its own.
    found = _STATUS.sub(lambda match: match[1] + chr(0xE000 + int(match[2])), found)
    for pattern, replacement in _RULES:
        found = pattern.sub(replacement, found)
    found = _KEPT.sub(lambda match: str(ord(match[0]) - 0xE000), found)
    if len(found) <= NORMALISED_CHARS_MAX:
        return found
    return found[: NORMALISED_CHARS_MAX - 1] + "…"

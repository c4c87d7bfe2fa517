"""Error normalisation: the grouping key of error texts that differ only in variable parts.

    normalise("ValueError: no label for document 107")    # "ValueError: no label for document <n>"

The function replaces UUIDs, URLs, paths, quoted text, long identifiers, hexadecimal and decimal
numbers. It keeps HTTP status codes (`HTTP Error 401`), because 401 and 503 are different errors.
The report of a run, the rule `same_error` of `Stop` and the error groups of a universe use this
function, so their groups agree.
"""

from __future__ import annotations

import re
from functools import lru_cache

# Only this prefix of a text is compared.
TEXT_CHARS_MAX = 1000
NORMALISED_CHARS_MAX = 200

_STATUS = re.compile(
    r"(?i)\b((?:http(?:/\d(?:\.\d)?)?(?:[ _]?(?:status|error))*|status(?:[ _]?code)?|(?:response|error) code)"
    r"[ :=]{1,3})([1-5]\d\d)\b(?![.,]?\d)"
)
_RULES = (
    (re.compile(r"(?i)\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), "<id>"),
    (re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s'\"<>]+"), "<url>"),
    # An apostrophe inside a word is not a quote.
    (re.compile(r"(?<!\w)(?:b|r|u)?'(?:[^'\\]|\\.)*'(?!\w)"), "<text>"),
    (re.compile(r'"(?:[^"\\]|\\.)*"'), "<text>"),
    (re.compile(r"`[^`]*`"), "<text>"),
    (
        re.compile(r"(?<![\w<>/.])(?:[A-Za-z]:)?(?:~|\.{1,2})?(?:[/\\][\w.@~+%=-]+)+[/\\]?"),
        "<path>",
    ),
    (re.compile(r"(?i)\b0x[0-9a-f]+\b"), "<hex>"),
    (re.compile(r"(?i)\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{8,}\b"), "<hex>"),
    # Request ids and similar: long words that contain digits.
    (re.compile(r"\b(?=[A-Za-z_-]*\d)[\w-]{16,}\b"), "<id>"),
    (re.compile(r"[-+]?\d+(?:[.,:]\d+)*(?:[eE][-+]?\d+)?"), "<n>"),
)
_PLACEHOLDER = re.compile("[\ue000-\uf8ff]")


def normalise(text: str) -> str:
    """Return the text with its variable parts replaced."""
    return _normalised(text[:TEXT_CHARS_MAX])


@lru_cache(maxsize=4096)
def _normalised(text: str) -> str:
    normalised = _PLACEHOLDER.sub("?", " ".join(text.split()))
    # Encode a status code as one private-use character so that the rules skip it.
    normalised = _STATUS.sub(lambda match: match[1] + chr(0xE000 + int(match[2])), normalised)
    for pattern, replacement in _RULES:
        normalised = pattern.sub(replacement, normalised)
    normalised = _PLACEHOLDER.sub(lambda match: str(ord(match[0]) - 0xE000), normalised)
    if len(normalised) <= NORMALISED_CHARS_MAX:
        return normalised
    return normalised[: NORMALISED_CHARS_MAX - 1] + "…"

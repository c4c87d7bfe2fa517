"""The files of the console and their headers. They are in the wheel, have no build step and load nothing from other hosts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import NamedTuple

PAGE = "index.html"
CONTENT_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = (
    ("Content-Security-Policy", POLICY),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
)


class ConsoleFile(NamedTuple):
    content: bytes
    content_type: str
    etag: str


@cache
def console_files() -> Mapping[str, ConsoleFile]:
    """Return every file by its name."""
    found: dict[str, ConsoleFile] = {}
    for file in (resources.files("holdfast.ops.console") / "assets").iterdir():
        content_type = CONTENT_TYPES.get(file.name.rpartition(".")[2])
        if content_type is not None:
            content = file.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found[file.name] = ConsoleFile(content, content_type, etag)
    return found

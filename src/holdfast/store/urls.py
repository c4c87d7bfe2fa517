"""URLs of stores: which kind one names, and how it is shown.

A URL may hold a password, in its authority or among its parameters. Whatever is printed, logged or put
into an error shows `…` in its place.
"""

from __future__ import annotations

import re

from holdfast.errors import BadUrl

HIDDEN = "…"
# After the user's name, to the last @: a password may hold anything that somebody forgot to escape.
_AUTHORITY = re.compile(r"(?<=://)([^/?#@:]*):.*(?=@)", re.DOTALL)
# `sslpassword` opens the client's key: a secret as well.
_PARAMETER = re.compile(r"(?<=[?&])((?:ssl)?password=)[^&#]*", re.IGNORECASE)


def shown(url: str) -> str:
    """The URL without its passwords."""
    return _PARAMETER.sub(rf"\1{HIDDEN}", _AUTHORITY.sub(rf"\1:{HIDDEN}", url))


def scheme_of(url: str) -> str:
    """What kind of store a URL names: `lmdb` for a directory, `memory`, `postgresql`."""
    scheme, _ = split(url)
    return "postgresql" if scheme == "postgres" else scheme


def split(url: str) -> tuple[str, str]:
    """The scheme and the rest; a path has the scheme `lmdb`."""
    if not url:
        raise BadUrl(url=url, why="empty")
    scheme, colon, rest = url.partition(":")
    # A single letter is a drive, and a path with a separator before the colon is a path.
    if not colon or len(scheme) < 2 or "/" in scheme or "." in scheme:
        return "lmdb", url
    if scheme == "lmdb" and not rest:
        raise BadUrl(url=url, why="no directory")
    return scheme, rest

"""URLs of stores: which kind one names, and how it is shown.

A URL may hold a password, in its authority or among its parameters. Whatever is printed, logged or put
into an error shows `…` in its place.
"""

from __future__ import annotations

import re

from holdfast.errors import BadUrl

HIDDEN = "…"
# After the user's name, to the last @: a password may hold anything that somebody forgot to escape, and
# he may have forgotten a slash.
_AUTHORITY = re.compile(r"^([a-zA-Z][\w+.-]+:/*[^/?#@:]*):.*(?=@)", re.DOTALL)
# `sslpassword` opens the client's key: a secret as well. Of a name that is none of those that are known, who
# knows what it was to be.
_PARAMETER = re.compile(r"(?<=[?&])([^=&#]*=)([^&#]*)")
_SHOWN = frozenset({
    "options", "sslmode", "sslcert", "sslkey", "sslrootcert", "host", "port", "dbname", "user", "application_name",
    "connect_timeout", "target_session_attrs", "load_balance_hosts", "gssencmode", "channel_binding", "client_encoding",
})  # fmt: skip


def shown(url: str) -> str:
    """The URL without its passwords."""
    if url.startswith("lmdb:"):
        return url
    return _PARAMETER.sub(_parameter, _AUTHORITY.sub(rf"\1:{HIDDEN}", url))


def _parameter(found: re.Match[str]) -> str:
    return found[0] if found[1][:-1].lower() in _SHOWN else f"{found[1]}{HIDDEN}"


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

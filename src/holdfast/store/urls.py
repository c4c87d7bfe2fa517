"""Store URLs: their scheme, and their redacted form.

A URL may contain a password in its authority or parameters. Output, logs and errors show `…` instead. A connection string
of libpq (`host=… password=…`) is refused and redacted too.
"""

from __future__ import annotations

import re

from holdfast.errors import BadUrl

REDACTED = "…"
# After the user name, up to the last @: an unescaped password may contain any character, also a slash.
_AUTHORITY = re.compile(r"^(\s*[a-zA-Z][\w+.-]+:/*[^/?#@:]*):.*(?=@)", re.DOTALL)
# A URL without @ whose port is no number: the host is missing, and the text is the password.
_NO_HOST = re.compile(r"^(\s*[a-zA-Z][\w+.-]+://[^/?#@:,\[]*):(?!\d*([,/?#:]|$)).*$", re.DOTALL)
# A connection string of libpq, which is no URL.
_KEYWORD = re.compile(r"(?i)(\b\w*(?:password|secret|token)\w*\s*=\s*)('(?:[^'\\]|\\.)*'|[^\s&]+)")
_SECRET_OPTION = re.compile(r"(?i)password|secret|token|key|credential")
# `sslpassword` decrypts the client key and is a secret too. An unknown parameter may be a misspelled secret.
_PARAMETER = re.compile(r"(?<=[?&])([^=&#]*=)([^&#]*)")
_VISIBLE_PARAMETERS = frozenset({
    "options", "sslmode", "sslcert", "sslkey", "sslrootcert", "host", "port", "dbname", "user", "application_name",
    "connect_timeout", "target_session_attrs", "load_balance_hosts", "gssencmode", "channel_binding", "client_encoding",
})  # fmt: skip


def redact(url: str) -> str:
    """The URL with its passwords redacted."""
    if url.startswith("lmdb:"):
        return url
    if "://" not in url and _KEYWORD.search(url):
        return _KEYWORD.sub(rf"\1{REDACTED}", url)
    authority = _NO_HOST if "@" not in url else _AUTHORITY
    return _PARAMETER.sub(_redact_parameter, authority.sub(rf"\1:{REDACTED}", url))


def _redact_parameter(parameter: re.Match[str]) -> str:
    is_visible = parameter[1][:-1].lower() in _VISIBLE_PARAMETERS
    if is_visible and not _SECRET_OPTION.search(parameter[2]):
        return parameter[0]
    return f"{parameter[1]}{REDACTED}"


def scheme_of(url: str) -> str:
    """The normalized scheme of a URL: `lmdb` for a directory, `memory`, `postgresql`."""
    scheme, _ = split_scheme(url)
    return "postgresql" if scheme == "postgres" else scheme


def split_scheme(url: str) -> tuple[str, str]:
    """Split a URL into its scheme and the rest. A path has the scheme `lmdb`."""
    if not url:
        raise BadUrl(url=url, why="empty")
    if "://" not in url and _KEYWORD.search(url):
        why = "a connection string of libpq; write it as postgresql://USER@HOST/DATABASE"
        raise BadUrl(url=redact(url), why=why)
    scheme, colon, rest = url.partition(":")
    # A single letter is a drive, and a separator before the colon means a path.
    if not colon or len(scheme) < 2 or "/" in scheme or "." in scheme:
        return "lmdb", url
    if scheme == "lmdb" and not rest:
        raise BadUrl(url=url, why="no directory")
    return scheme, rest

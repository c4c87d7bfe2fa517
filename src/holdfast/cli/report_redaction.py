"""Redaction for `holdfast doctor`: a report for a bug tracker has no secrets and no payloads.

- Configuration: the value of a variable or a key is shown only if its name is listed here.
- The log of the writer: a line is shown only if it has the form of a traceback or of a line of the writer. The text
  of an error is removed, because it may quote a payload. Its type or code remains.
- `SecretFilter` removes the known secrets of this process from every text of the report, as a second check.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from holdfast.config import CONFIG_FILE, CONFIG_VARIABLE
from holdfast.store.admin.routing import STORE_VARIABLE
from holdfast.store.urls import REDACTED, redact

LOG_BYTES_READ = 64 * 1024
LOG_LINES = 20
# Shorter values are no secrets that a search could find without hits in other words.
SECRET_CHARS_MIN = 4

_PREFIXES = ("HOLDFAST_", "PG")
_VISIBLE_VARIABLES = frozenset({
    "HOLDFAST_CONFIG", "HOLDFAST_DEBUG", "HOLDFAST_STORE_MODE", "HOLDFAST_STORE_TIME_UNTIL",
    "PGHOST", "PGPORT", "PGUSER", "PGDATABASE", "PGSSLMODE", "PGSSLROOTCERT", "PGPASSFILE", "PGCONNECT_TIMEOUT",
    "PGAPPNAME", "PGTARGETSESSIONATTRS",
})  # fmt: skip
# The values of a connection string of libpq.
_KEYWORD_VALUE = re.compile(r"(?i)(?:password|secret|token)\w*\s*=\s*'?([^\s']+)")
_SECRET_NAME = re.compile(r"PASSWORD|TOKEN|SECRET|KEY|CREDENTIAL", re.IGNORECASE)

# The structure of a traceback, of `faulthandler` and of the lines of the writer, without texts of errors.
_STRUCTURE = re.compile(
    r'\s*File "[^"]+", line \d+(, in [\w<>.]+| in [\w<>.]+)?'
    r"|Traceback \(most recent call last\):"
    r"|(Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):"
    r"|Fatal Python error: [A-Za-z ]+"
)
_WRITER_LINE = re.compile(r"((?:holdfast: the writer ends|dropped a client): ?)([a-z_]+)?(?=:|$)")
_ERROR_LINE = re.compile(r"([A-Za-z_][\w.]*(?:Error|Exception|Warning|Interrupt|Exit)\b)(?=:|$)")


class SecretFilter:
    """Removes the secrets that this process knows from texts."""

    def __init__(self, environment: Mapping[str, str], urls: Iterable[str] = ()) -> None:
        secrets = {value for name, value in environment.items() if _SECRET_NAME.search(name)}
        for url in (*urls, *environment.values()):
            secrets |= _url_secrets(url)
        self._secrets = sorted(
            (secret for secret in secrets if len(secret) >= SECRET_CHARS_MIN), key=len, reverse=True
        )

    def clean(self, value: Any) -> Any:
        """Return a JSON value without the secrets."""
        if isinstance(value, str):
            for secret in self._secrets:
                value = value.replace(secret, REDACTED)
            return value
        if isinstance(value, dict):
            return {key: self.clean(item) for key, item in value.items()}
        return [self.clean(item) for item in value] if isinstance(value, list) else value


def _url_secrets(url: str) -> set[str]:
    """Return the password of a URL and the values of its hidden parameters, as written and decoded."""
    if "://" not in url:
        return set() if redact(url) == url else set(_KEYWORD_VALUE.findall(url))
    try:
        parts = urlsplit(url)
        written = {parts.netloc.rpartition("@")[0].partition(":")[2]}
    except ValueError:
        return set()
    written |= {value for name, value in parse_qsl(parts.query) if _SECRET_NAME.search(name)}
    return {text for secret in written for text in (secret, unquote(secret)) if text}


# -- configuration -------------------------------------------------------------------------------


def configuration(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the variables and the file that configure Holdfast, without secrets."""
    variables = {
        name: _variable_text(name, value)
        for name, value in sorted(environment.items())
        if name.startswith(_PREFIXES)
    }
    path = Path(environment.get(CONFIG_VARIABLE) or CONFIG_FILE)
    file: dict[str, Any] | None = None
    if path.is_file() or CONFIG_VARIABLE in environment:
        file = {"path": str(path), **_file_content(path)}
    return {"variables": variables, "file": file}


def _variable_text(name: str, value: str) -> str:
    if name == STORE_VARIABLE:
        return redact(value)
    return value if name in _VISIBLE_VARIABLES else REDACTED


def _file_content(path: Path) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return {"error": error.strerror or type(error).__name__}
    except ValueError:
        # The text of a parse error quotes the file.
        return {"error": "not valid TOML"}
    return {"content": {name: _toml_value(name, value) for name, value in document.items()}}


def _toml_value(section: str, value: Any) -> Any:
    """Show numbers, switches and the URLs of stores. Hide any other text."""
    if isinstance(value, dict):
        return {key: _toml_value(section, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_toml_value(section, item) for item in value]
    if isinstance(value, str):
        return redact(value) if section == "stores" else REDACTED
    return value if isinstance(value, int | float) else REDACTED


# -- the log of the writer -----------------------------------------------------------------------


def writer_log_tail(path: Path) -> list[str]:
    """Return the last lines of a writer's log without payloads. Empty without a log."""
    try:
        with path.open("rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - LOG_BYTES_READ, 0))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [redact_log_line(line) for line in lines[-LOG_LINES:]]


def redact_log_line(line: str) -> str:
    """Return a line without the text that an error quotes."""
    if _STRUCTURE.fullmatch(line):
        return line
    if found := _WRITER_LINE.match(line) or _ERROR_LINE.match(line):
        rest = len(line) - found.end()
        return found[0] + (f": {_removed(rest)}" if rest else "")
    return _removed(len(line))


def _removed(count: int) -> str:
    return f"({count} characters removed)"

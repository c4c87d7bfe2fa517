"""Tokens with scopes: their file format, their comparison, and the reload of a changed file.

    # name  scopes          digest
    press   submit,work     sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
    ops     operate         sha256:60303ae22b998861bce3b28f33eec1be758a213c86c93c076dbe9f558c11c752

- A file or variable whose only line has a single word is one bare token with all scopes. Comments and blank lines are
  skipped before. The bare token of a file mixes two of lower-case letters, upper-case letters and digits, so that a lone
  name is not a token.
- A presented token is hashed and compared with every digest in constant time.
- A changed file replaces the tokens without a restart. A file that cannot be read or parsed leaves the former tokens in
  force, and the server logs a warning. So does a file of lines that has become a bare token: an incomplete line must
  not get all scopes.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import HoldfastError, Invalid, NotFound
from holdfast.ops.api.call import LOCAL_ACTOR
from holdfast.ops.api.endpoint import Scope

TOKEN_CHARS_MIN = 16
TOKEN_CHARS_MAX = 4096
TOKENS_MAX = 1_000
FILE_BYTES_MAX = 256 * 1024
ALL_SCOPES = frozenset(Scope)
BARE_NAME = "token"

_TOKEN = re.compile(r"[\x21-\x7e]+")
_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,63}")
_BARE_KINDS = (re.compile("[a-z]"), re.compile("[A-Z]"), re.compile("[0-9]"))
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_log = logging.getLogger("holdfast.http")


class Token(NamedTuple):
    """What a client may do, and its name in the audit log."""

    name: str
    scopes: frozenset[Scope]
    digest: bytes = b""
    is_bare: bool = False

    def permits(self, scope: Scope) -> bool:
        return scope in self.scopes or (scope is Scope.READ and Scope.OPERATE in self.scopes)


# The client of a server without tokens, which only loopback permits.
LOCAL = Token(LOCAL_ACTOR, ALL_SCOPES)


class TokenSet:
    def __init__(self, tokens: Iterable[Token] = ()) -> None:
        self.tokens = tuple(tokens)

    @property
    def is_bare(self) -> bool:
        """Whether this is one bare token with all scopes."""
        return len(self.tokens) == 1 and self.tokens[0].is_bare

    def find(self, text: bytes) -> Token | None:
        """Return the token with this text."""
        return self.find_digest(hashlib.sha256(text).digest())

    def find_digest(self, digest: bytes) -> Token | None:
        """Return the token with this digest. Compares with every token, so that the time depends on no token."""
        found: Token | None = None
        for token in self.tokens:
            if hmac.compare_digest(token.digest, digest):
                found = token
        return found


class TokenFile:
    """The tokens of a file, read again when it changes."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        if not self._path.is_file():
            raise NotFound(what="--http-token-file", path=path)
        self._stamp = _stamp(self._path)
        self.tokens = TokenSet(_read(self._path))

    def refresh(self) -> None:
        """Read the file again if it changed."""
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            tokens = TokenSet(_read(self._path))
            if tokens.is_bare and not self.tokens.is_bare:
                raise Invalid(
                    what="token file",
                    why="it had lines NAME SCOPES sha256:HEX and has one word now; restart the server to use a bare token",
                )
            self.tokens = tokens
        except (HoldfastError, OSError) as error:
            _log.warning("the former tokens stay in force: %s: %s", self._path, error)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


def _read(path: Path) -> list[Token]:
    with open(path, "rb", opener=_open_nonblocking) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise Invalid(what="token file", path=str(path), why="not a regular file")
        data = file.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise Invalid(what="token file", path=str(path), why="too large", bytes_max=FILE_BYTES_MAX)
    text = data.decode("latin-1")
    if not text.strip():
        raise Invalid(what="token file", path=str(path), why="empty")
    tokens = parse_tokens(text)
    if tokens[0].is_bare:
        [[word]] = _words_of_lines(text).values()
        if sum(kind.search(word) is not None for kind in _BARE_KINDS) < 2:
            raise Invalid(
                what="token file",
                path=str(path),
                why="its only word looks like a name; a bare token mixes lower-case letters, upper-case letters and digits",
            )
    return tokens


def _open_nonblocking(path: str, flags: int) -> int:
    """Open a file. The blocking open of a FIFO would wait for its writer."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _words_of_lines(text: str) -> dict[int, list[str]]:
    """Return the words of each line by its number, without comments and blank lines."""
    lines = {number: line.split() for number, line in enumerate(text.splitlines(), 1)}
    return {number: words for number, words in lines.items() if words and words[0][0] != "#"}


def parse_tokens(text: str) -> list[Token]:
    """Return the tokens of a file or variable; empty for an empty text. Errors never contain a token."""
    if not text.strip():
        return []
    lines = _words_of_lines(text)
    if [len(words) for words in lines.values()] == [1]:
        [[word]] = lines.values()
        return [Token(BARE_NAME, ALL_SCOPES, _digest(check_token(word)), is_bare=True)]
    tokens = [_parse_line(number, words) for number, words in lines.items()]
    names = [token.name for token in tokens]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise Invalid(what="token", name=twice[0], why="given twice")
    if not 0 < len(tokens) <= TOKENS_MAX:
        raise Invalid(what="tokens", found=len(tokens), min=1, max=TOKENS_MAX)
    return tokens


def _parse_line(number: int, words: list[str]) -> Token:
    expected = "a bare token with at least 16 printable characters and no spaces, or lines NAME SCOPES sha256:HEX"
    if len(words) != 3:
        raise Invalid(what="token", line=number, expected=expected)
    name, scopes, digest = words
    hexadecimal = _DIGEST.fullmatch(digest)
    if not _NAME.fullmatch(name) or hexadecimal is None:
        raise Invalid(what="token", line=number, expected=expected)
    return Token(name, parse_scopes(scopes), bytes.fromhex(hexadecimal[1]))


def parse_scopes(text: str) -> frozenset[Scope]:
    try:
        return frozenset(Scope(word) for word in text.split(","))
    except ValueError:
        raise Invalid(
            what="scopes", found=text[:64], expected=[scope.value for scope in Scope]
        ) from None


def check_token(text: str) -> str:
    if not (TOKEN_CHARS_MIN <= len(text) <= TOKEN_CHARS_MAX and _TOKEN.fullmatch(text)):
        raise Invalid(
            what="token",
            why=f"must have at least {TOKEN_CHARS_MIN} printable characters without spaces",
            found=f"{len(text)} characters",
        )
    return text


def token_line(name: str, scopes: frozenset[Scope], text: str) -> str:
    """Return the line of a token for the token file."""
    if not _NAME.fullmatch(name):
        raise Invalid(what="name", found=name[:64], expected="letters, digits, `.`, `_` and `-`")
    ordered = ",".join(scope.value for scope in Scope if scope in scopes)
    return f"{name} {ordered} sha256:{_digest(check_token(text)).hex()}"


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("latin-1")).digest()

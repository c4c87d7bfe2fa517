"""Sessions of browsers: a browser sends a token once and gets a cookie with the token's scopes.

- The cookie has a random number of 256 bits. The server keeps its digest, and the digest of the token. So a session ends
  when its token is rotated, after SESSION_S, and with the process of the server.
- A request that changes something under a cookie, or ends its session, needs the header `X-Holdfast-CSRF` with the value of
  its session. A page of another site can neither read this value nor send the header.
- Browsers send a cookie to every port of a host, so its name has the port.
- With TLS the name begins with `__Host-`. Browsers then accept the cookie only from this host, over TLS and for all paths, so
  neither a sibling domain nor a server without TLS can set it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import NamedTuple

from holdfast.ops.http.problem import CsrfMissing
from holdfast.ops.http.request_head import HttpRequest
from holdfast.ops.http.tokens import Token

SESSION_S = 12 * 3600
# Above these numbers, in all and of one token, the oldest session ends.
SESSIONS_MAX = 1_000
TOKEN_SESSIONS_MAX = 50
CSRF_HEADER = "x-holdfast-csrf"


class BrowserSession(NamedTuple):
    token_digest: bytes
    csrf: str
    # In seconds of the server's event loop.
    until_s: float


class BrowserSessions:
    """Used in the event loop of the server."""

    def __init__(self, port: int, *, is_secure: bool) -> None:
        self._cookie = f"{'__Host-' if is_secure else ''}holdfast_session_{port}"
        self._is_secure = is_secure
        # By the digest of the cookie's value, oldest first.
        self._sessions: dict[bytes, BrowserSession] = {}

    def start(self, token: Token, now_s: float) -> tuple[str, BrowserSession]:
        """Start a session of this token; return the header `Set-Cookie` and the session."""
        same = [key for key, one in self._sessions.items() if one.token_digest == token.digest]
        for key in same[: max(len(same) - TOKEN_SESSIONS_MAX + 1, 0)]:
            del self._sessions[key]
        while len(self._sessions) >= SESSIONS_MAX:
            del self._sessions[next(iter(self._sessions))]
        value = secrets.token_urlsafe(32)
        session = BrowserSession(token.digest, secrets.token_urlsafe(32), now_s + SESSION_S)
        self._sessions[_digest(value)] = session
        return self._set_cookie(value, SESSION_S), session

    def end(self, request: HttpRequest, now_s: float) -> str:
        """End the session of a request, if it has one; return the header that removes the cookie. Raise CsrfMissing
        without the header of the session."""
        session = self.find(request, now_s)
        if session is not None:
            _check_csrf(request, session)
            self._sessions = {key: one for key, one in self._sessions.items() if one != session}
        return self._set_cookie("", 0)

    def find(self, request: HttpRequest, now_s: float) -> BrowserSession | None:
        """Return the session of a request. A request with the header `Authorization` has none."""
        if "authorization" in request.headers:
            return None
        # Another server on this host may have set a cookie of the same name.
        for key in map(_digest, self._values(request)):
            session = self._sessions.get(key)
            if session is not None and session.until_s > now_s:
                return session
            self._sessions.pop(key, None)
        return None

    def token_digest(
        self, request: HttpRequest, now_s: float, *, checks_csrf: bool
    ) -> bytes | None:
        """Return the digest of the token of a session. Raise CsrfMissing for a change without the header."""
        session = self.find(request, now_s)
        if session is None:
            return None
        if checks_csrf and request.method not in ("GET", "HEAD"):
            _check_csrf(request, session)
        return session.token_digest

    def _values(self, request: HttpRequest) -> list[str]:
        pairs = (
            part.strip().partition("=") for part in request.headers.get("cookie", "").split(";")
        )
        return [value for name, _, value in pairs if name == self._cookie]

    def _set_cookie(self, value: str, age_s: int) -> str:
        secure = "; Secure" if self._is_secure else ""
        return f"{self._cookie}={value}; Path=/; Max-Age={age_s}; HttpOnly; SameSite=Strict{secure}"


def _check_csrf(request: HttpRequest, session: BrowserSession) -> None:
    sent = request.headers.get(CSRF_HEADER, "")
    if not hmac.compare_digest(sent.encode("latin-1"), session.csrf.encode()):
        raise CsrfMissing(what=CSRF_HEADER, why="wrong" if sent else "missing")


def _digest(value: str) -> bytes:
    return hashlib.sha256(value.encode("latin-1")).digest()

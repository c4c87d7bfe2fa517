"""Authentication and request origin checks of the HTTP server, and its listen address.

- The default address is loopback. Any other address requires a token. If there is a token, every client
  needs one, with the scope of its request (`tokens`).
- `Host` must be an IP address, `localhost`, the listen name, or a configured name. This blocks DNS
  rebinding, where the request carries the attacker's host name. `Origin`, which browsers send, must match
  `Host`. For browser requests without `Origin`, such as images, `Sec-Fetch-Site` is checked. Every request
  is checked, on every route. A link on another site may open the page of the console, which has no data.
- A body needs the JSON content type, which a form of another site cannot send.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from typing import NamedTuple

from holdfast.errors import Invalid
from holdfast.ops.api.endpoint import Scope
from holdfast.ops.http.problem import Forbidden, ScopeMissing, Unauthorized, WrongContentType
from holdfast.ops.http.request_head import HttpRequest
from holdfast.ops.http.sessions import BrowserSessions
from holdfast.ops.http.tokens import LOCAL, Token, TokenFile, TokenSet, parse_tokens

HOST = "127.0.0.1"
PORT = 8787
TOKEN_VARIABLE = "HOLDFAST_TOKEN"


class NoToken(Invalid):
    code = "no_token"
    hint = f"set {TOKEN_VARIABLE}, or use --http-token-file, or listen on {HOST}"


class ListenAddress(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        return self.host == "localhost" or _is_loopback(self.host)


def parse_address(text: str) -> ListenAddress:
    """Parse `HOST:PORT`, `HOST`, `:PORT` or `[v6]:PORT`; omitted parts have their defaults."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, ""
    host = host.strip()
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise Invalid(what="--http", found=text[:64], expected="HOST:PORT or [ADDRESS]:PORT")
    if port and not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise Invalid(what="--http", found=text[:64], expected="a port below 65536")
    return ListenAddress(host or HOST, int(port) if port else PORT)


class RequestGuard:
    """`tokens` is the text of tokens (`tokens.parse_tokens`), or a file with them."""

    def __init__(
        self, address: ListenAddress, tokens: str | TokenFile, names: Iterable[str] = ()
    ) -> None:
        self._file = tokens if isinstance(tokens, TokenFile) else None
        self._tokens = TokenSet(parse_tokens(tokens)) if isinstance(tokens, str) else tokens.tokens
        if not self._tokens.tokens and not address.loopback:
            raise NoToken(what="--http", address=str(address))
        hostname = socket.gethostname()
        self._names = {name.lower() for name in ("localhost", hostname, address.host, *names)}
        # The sessions of browsers. The server sets them when it knows its port.
        self.sessions: BrowserSessions | None = None

    def refresh(self) -> None:
        """Read the token file again if it changed."""
        if self._file is not None:
            self._file.refresh()
            self._tokens = self._file.tokens

    def check(self, request: HttpRequest) -> None:
        """Reject cross-site requests by Host, Origin, Sec-Fetch-Site and content type."""
        host = request.headers.get("host", "")
        if not self._is_own_host(host):
            raise Forbidden(what="host", found=host[:64], why="not a name of this server")
        origin = request.headers.get("origin")
        if origin is not None and origin.lower() not in (
            f"http://{host.lower()}",
            f"https://{host.lower()}",
        ):
            raise Forbidden(what="origin", found=origin[:64], why="of another site")
        site = request.headers.get("sec-fetch-site", "none").lower()
        if site not in ("none", "same-origin") and not _opens_console(request):
            raise Forbidden(what="sec-fetch-site", found=site[:64], why="of another site")
        if request.method not in ("GET", "HEAD"):
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise WrongContentType(what="content-type", found=kind[:64])

    def find_token(self, request: HttpRequest, now_s: float, *, checks_csrf: bool) -> Token | None:
        """Return the token of a request: of its header `Authorization` or of the session of its browser. Return None
        without a valid one. A server without tokens accepts every client."""
        if not self.has_tokens:
            return LOCAL
        if self.sessions is not None:
            digest = self.sessions.token_digest(request, now_s, checks_csrf=checks_csrf)
            if digest is not None:
                return self._tokens.find_digest(digest)
        scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        return self.find_text(credentials.strip().encode("latin-1"))

    def find_text(self, text: bytes) -> Token | None:
        """Return the valid token with this text."""
        return self._tokens.find(text)

    @property
    def has_tokens(self) -> bool:
        return bool(self._tokens.tokens)

    def require_scope(self, request: HttpRequest, token: Token | None, *scopes: Scope) -> None:
        """Raise ScopeMissing unless the token permits one of the scopes."""
        if token is None:
            has_header = "authorization" in request.headers
            raise Unauthorized(what="token", why="wrong" if has_header else "missing")
        if not any(map(token.permits, scopes)):
            raise ScopeMissing(
                missing=scopes[0].value,
                token=token.name,
                scopes=sorted(scope.value for scope in token.scopes),
            )

    def _is_own_host(self, host: str) -> bool:
        name = re.sub(r":[0-9]*$", "", host.lower()) if not host.endswith("]") else host.lower()
        if name.startswith("[") and name.endswith("]"):
            name = name[1:-1]
        return name in self._names or _is_address(name)


def _opens_console(request: HttpRequest) -> bool:
    """Whether a browser opens the page of the console in a tab, and not in a frame."""
    headers = request.headers
    return (
        request.method == "GET"
        and request.path == ("",)
        and headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
    )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    # The zone of an address may be any text.
    return "%" not in name


def _is_loopback(name: str) -> bool:
    return _is_address(name) and ipaddress.ip_address(name).is_loopback

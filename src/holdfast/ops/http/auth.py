"""Authentication and request origin checks of the HTTP server, and its listen address.

- The default address is loopback. Any other address requires a token. If there is a token, every client
  needs it.
- `Host` must be an IP address, `localhost`, the listen name, or a configured name. This blocks DNS
  rebinding, where the request carries the attacker's host name. `Origin`, which browsers send, must match
  `Host`. For browser requests without `Origin`, such as images, `Sec-Fetch-Site` is checked. Every request
  is checked, on every route.
- A body needs the JSON content type, which a form of another site cannot send.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import Invalid, NotFound
from holdfast.ops.http.problem import Forbidden, Unauthorized, WrongContentType
from holdfast.ops.http.request_head import HttpRequest

HOST = "127.0.0.1"
PORT = 8787
TOKEN_VARIABLE = "HOLDFAST_TOKEN"
TOKEN_CHARS_MIN = 16
TOKEN_BYTES_MAX = 4096

_TOKEN = re.compile(r"[\x21-\x7e]+")


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


def read_token(variable: str | None, file: str | None) -> str:
    """Return the token from the file if one is given, else from the environment; empty for none."""
    token = variable or ""
    if file is not None:
        path = Path(file)
        if not path.is_file():
            raise NotFound(what="--http-token-file", path=file)
        token = path.read_bytes()[: TOKEN_BYTES_MAX + 1].decode("latin-1").strip()
        if not token:
            raise Invalid(what="--http-token-file", path=file, why="empty")
    if token and not (TOKEN_CHARS_MIN <= len(token) <= TOKEN_BYTES_MAX and _TOKEN.fullmatch(token)):
        raise Invalid(
            what="token",
            why=f"must have at least {TOKEN_CHARS_MIN} printable characters without spaces",
            found=f"{len(token)} characters",
        )
    return token


class RequestGuard:
    def __init__(self, address: ListenAddress, token: str, names: Iterable[str] = ()) -> None:
        if not token and not address.loopback:
            raise NoToken(what="--http", address=str(address))
        self._token = token.encode()
        hostname = socket.gethostname()
        self._names = {name.lower() for name in ("localhost", hostname, address.host, *names)}

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
        if site not in ("none", "same-origin"):
            raise Forbidden(what="sec-fetch-site", found=site[:64], why="of another site")
        if request.method not in ("GET", "HEAD"):
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise WrongContentType(what="content-type", found=kind[:64])

    def is_trusted(self, request: HttpRequest) -> bool:
        """Whether the request has the token, or no token is configured."""
        if not self._token:
            return True
        scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(credentials.strip().encode("latin-1"), self._token)
        return scheme.lower() == "bearer" and same

    def require_token(self, request: HttpRequest) -> None:
        if not self.is_trusted(request):
            has_header = "authorization" in request.headers
            raise Unauthorized(what="token", why="wrong" if has_header else "missing")

    def _is_own_host(self, host: str) -> bool:
        name = re.sub(r":[0-9]*$", "", host.lower()) if not host.endswith("]") else host.lower()
        if name.startswith("[") and name.endswith("]"):
            name = name[1:-1]
        return name in self._names or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(name: str) -> bool:
    return _is_address(name) and ipaddress.ip_address(name).is_loopback

"""Who may speak to the HTTP server, and where it listens.

- Loopback by default. Anywhere else it wants a token, or it does not start; where there is a token,
  everybody needs it.
- `Host` must be an address, `localhost`, the name that we listen on, or one that was named: a page whose
  name was made to point here (DNS rebinding) says its own name. `Origin`, which browsers send, must be
  ours; where they send none (an image of another page), `Sec-Fetch-Site` tells. All of them are looked at
  with every request, whatever it asks for.
- A body must say that it is JSON, which a form of another page cannot.
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
from holdfast.ops.http.problem import Forbidden, Unauthorized, WrongType
from holdfast.ops.http.wire import Request

HOST = "127.0.0.1"
PORT = 8787
TOKEN_VARIABLE = "HOLDFAST_TOKEN"
TOKEN_CHARS_MIN = 16
TOKEN_BYTES_MAX = 4096

_TOKEN = re.compile(r"[\x21-\x7e]+")


class NoToken(Invalid):
    code = "no_token"
    hint = f"set {TOKEN_VARIABLE} or give --http-token-file, or listen on {HOST}"


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        return self.host == "localhost" or _is_loopback(self.host)


def address_of(text: str) -> Address:
    """`HOST:PORT`, `HOST`, `:PORT` or `[v6]:PORT`; what is left out is as by default."""
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
    return Address(host or HOST, int(port) if port else PORT)


def token_of(variable: str | None, file: str | None) -> str:
    """The token, from the file if one is named, else from the environment; empty for none."""
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
            why=f"{TOKEN_CHARS_MIN} or more visible characters without a space",
            found=f"{len(token)} characters",
        )
    return token


class Guard:
    def __init__(self, address: Address, token: str, names: Iterable[str] = ()) -> None:
        if not token and not address.loopback:
            raise NoToken(what="--http", address=str(address))
        self._token = token.encode()
        own = socket.gethostname()
        self._names = {name.lower() for name in ("localhost", own, address.host, *names)}

    def check(self, request: Request) -> None:
        """Refuse what comes from somewhere else: by its Host, by its Origin, by its kind of body."""
        host = request.headers.get("host", "")
        if not self._knows(host):
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
                raise WrongType(what="content-type", found=kind[:64])

    def trusts(self, request: Request) -> bool:
        """Whether it brings the token, or none is needed."""
        if not self._token:
            return True
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode("latin-1"), self._token)
        return scheme.lower() == "bearer" and same

    def require_trust(self, request: Request) -> None:
        if not self.trusts(request):
            told = "authorization" in request.headers
            raise Unauthorized(what="token", why="wrong" if told else "missing")

    def _knows(self, host: str) -> bool:
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

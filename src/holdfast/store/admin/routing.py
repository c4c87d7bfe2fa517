"""Store routing: the mapping of universes to store URLs in `holdfast.toml`.

    [stores]
    default = "./data"                                  # universes without a rule below

    [stores.universes]
    billing = "postgresql://db.example/billing"
    "eu-*" = "postgresql://eu.example/holdfast"         # every universe with this prefix

A name takes precedence over a pattern, and a longer pattern over a shorter one. A `*` is allowed only at
the end, so of two patterns that match one universe one extends the other, and the choice is unambiguous.
Directories are relative to the file. One store must have one spelling, because two spellings would count
as two stores.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from holdfast.config import CONFIG_FILE, CONFIG_VARIABLE, UNIVERSE_BYTES_MAX
from holdfast.errors import BadUrl, Invalid, NotFound
from holdfast.store import urls

STORE_VARIABLE = "HOLDFAST_STORE"
STORE_DEFAULT = "./data"
# A host, or several hosts with commas, which are not split here.
_ADDRESS = re.compile(r"(?P<host>.*?)(?::(?P<port>\d+))?")
_LOCAL_HOSTS = frozenset({"", "localhost", "127.0.0.1", "::1"})


class BadStores(Invalid):
    code = "bad_stores"
    hint = "correct [stores] in the file; docs/stores.md describes the format"


class NoStoreFor(NotFound):
    code = "no_store_for_universe"
    hint = "add it under [stores.universes], or set a default in [stores]"


class SeveralStores(Invalid):
    code = "several_stores"
    hint = "choose one: --universe U selects the store of a universe, --store URL any store"


class RoutingRule(NamedTuple):
    """A universe name or prefix pattern, and its store."""

    pattern: str
    url: str

    @property
    def prefix(self) -> str | None:
        return self.pattern[:-1] if self.pattern.endswith("*") else None


class StoreRouting:
    def __init__(self, path: str, default: str | None, rules: list[RoutingRule]) -> None:
        self.path = path
        self.default = default
        self.named = {rule.pattern: rule.url for rule in rules if rule.prefix is None}
        self._patterns = sorted(
            (rule for rule in rules if rule.prefix is not None),
            key=lambda rule: len(rule.pattern),
            reverse=True,
        )

    def url_of(self, universe: str) -> str:
        """The store of a universe; NoStoreFor if no rule matches and there is no default."""
        url = self.find_url(universe)
        if url is None:
            raise NoStoreFor(universe=universe, file=self.path)
        return url

    def find_url(self, universe: str) -> str | None:
        if universe in self.named:
            return self.named[universe]
        for rule in self._patterns:
            if universe.startswith(rule.prefix or ""):
                return rule.url
        return self.default

    def urls(self) -> list[str]:
        """The distinct stores."""
        listed = [self.default, *self.named.values(), *(rule.url for rule in self._patterns)]
        return list(dict.fromkeys(url for url in listed if url is not None))

    def by_store(self) -> dict[str, list[str]]:
        """Each store with the universes mapped to it by name."""
        return {
            url: [name for name in self.named if self.named[name] == url] for url in self.urls()
        }

    def single_url(self) -> str:
        """The only store; SeveralStores if there is more than one."""
        listed = self.urls()
        if len(listed) != 1:
            raise SeveralStores(file=self.path, stores=[urls.redact(url) for url in listed])
        return listed[0]

    def universes_of_other_stores(self, universe: str) -> dict[str, str]:
        """The universes mapped by name to a store other than that of this universe."""
        own_url = self.url_of(universe)
        return {name: url for name, url in self.named.items() if url != own_url}

    def remote_url(self, universe: str, to: str) -> str | None:
        """The store of another universe; None if it is the same store or unknown."""
        url = self.find_url(to)
        return None if url == self.url_of(universe) else url


class StoreLocation(NamedTuple):
    """A store URL and the routing that determined it; None if the URL was explicit."""

    url: str
    routing: StoreRouting | None = None


def locate_store(universe: str | None, explicit_url: str | None = None) -> StoreLocation:
    """Choose the store: the explicit URL, else the environment's, else that of the universe, else the only one."""
    url = explicit_url or os.environ.get(STORE_VARIABLE)
    if url:
        return StoreLocation(url)
    routing = load_configured()
    if routing is None:
        return StoreLocation(STORE_DEFAULT)
    return StoreLocation(
        routing.single_url() if universe is None else routing.url_of(universe), routing
    )


def load_unless_overridden() -> StoreRouting | None:
    """The configured routing, unless the environment sets one store for all universes."""
    return None if os.environ.get(STORE_VARIABLE) else load_configured()


def load_configured() -> StoreRouting | None:
    """Load the routing from the file of `HOLDFAST_CONFIG`, or from the current directory; None without a file."""
    named = os.environ.get(CONFIG_VARIABLE)
    path = Path(named or CONFIG_FILE)
    if not named and not path.is_file():
        return None
    return load_file(path)


def load_file(path: Path) -> StoreRouting | None:
    """Read a file; None if it has no [stores] table."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadStores(file=str(path), why=error.strerror or str(error)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadStores(file=str(path), why=str(error)) from None
    stores = document.get("stores")
    return None if stores is None else parse_routing(stores, str(path), path.absolute().parent)


def parse_routing(stores: Any, path: str, directory: Path) -> StoreRouting:
    """Parse the `[stores]` table of a file in `directory`."""
    if not isinstance(stores, dict):
        raise BadStores(file=path, why="[stores] is not a table")
    unknown = sorted(stores.keys() - {"default", "universes"})
    if unknown:
        raise BadStores(file=path, unknown=unknown, expected=["default", "universes"])
    universes = stores.get("universes", {})
    if not isinstance(universes, dict):
        raise BadStores(file=path, why="[stores.universes] is not a table")
    if "default" not in stores and not universes:
        raise BadStores(file=path, why="[stores] names no store")
    default = None
    if "default" in stores:
        default = _parse_url(path, directory, "default", stores["default"])
    rules = [_parse_rule(path, directory, text, url) for text, url in universes.items()]
    routing = StoreRouting(path, default, rules)
    _require_one_spelling(path, routing.urls())
    return routing


def _parse_rule(path: str, directory: Path, text: str, url: Any) -> RoutingRule:
    if not text or "/" in text or "\0" in text or len(text.encode()) > UNIVERSE_BYTES_MAX:
        raise BadStores(file=path, universe=text[:64], why="not a valid universe name")
    if "*" in text[:-1] or any(letter in text for letter in "?["):
        why = "a pattern is a prefix followed by one *"
        raise BadStores(file=path, universe=text, why=why)
    return RoutingRule(text, _parse_url(path, directory, text, url))


def _parse_url(path: str, directory: Path, what: str, url: Any) -> str:
    if not isinstance(url, str):
        raise BadStores(file=path, universe=what, why="a store is a directory or a URL, as text")
    if url != url.strip() or not url.isprintable():
        raise BadStores(
            file=path, universe=what, why="surrounding whitespace, or an unprintable character"
        )
    try:
        scheme, rest = urls.split_scheme(url)
        store_identity(url)
    except BadUrl as error:
        raise BadStores(file=path, universe=what, why=f"not a store: {error}") from None
    except ValueError as error:
        raise BadStores(file=path, universe=what, why=f"not a URL: {error}") from None
    if scheme == "lmdb":
        return str(directory / Path(rest).expanduser())
    if scheme not in ("postgresql", "postgres"):
        why = f"other processes cannot open a store with the scheme {scheme}"
        raise BadStores(file=path, universe=what, why=why)
    return url


def _require_one_spelling(path: str, listed: list[str]) -> None:
    seen: dict[object, str] = {}
    for url in listed:
        other = seen.setdefault(store_identity(url), url)
        if other != url:
            why = "one store has two spellings: use only one of them"
            raise BadStores(file=path, why=why, stores=[urls.redact(other), urls.redact(url)])


def store_identity(url: str) -> object:
    """A value that is equal for URLs of the same store, as far as the text alone shows it."""
    scheme, rest = urls.split_scheme(url)
    if scheme == "lmdb":
        return ("lmdb", os.path.realpath(rest))
    if scheme not in ("postgresql", "postgres"):
        return (scheme, rest)
    parts = urlsplit(url)
    parameters = dict(parse_qsl(parts.query))
    # The authority is percent-encoded. Parameters of the query override it.
    login, _, address = parts.netloc.rpartition("@")
    authority = _ADDRESS.fullmatch(address)
    host = (
        parameters.get("host")
        or parameters.get("hostaddr")
        or unquote(authority["host"] if authority else address)
    )
    port = parameters.get("port") or (authority["port"] if authority else None) or "5432"
    user = parameters.get("user") or unquote(login.partition(":")[0])
    return (
        "postgresql",
        "" if host.strip("[]") in _LOCAL_HOSTS else host.lower(),
        port,
        parameters.get("dbname") or unquote(parts.path.strip("/")) or user,
        _search_path(parameters.get("options", "")),
    )


def _search_path(options: str) -> str:
    found = re.search(r"-c\s*search_path\s*=\s*(\S+)", options)
    return found[1] if found else ""

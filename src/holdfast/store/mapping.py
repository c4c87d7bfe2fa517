"""Which store each universe lives in, as `holdfast.toml` says.

    [stores]
    default = "./data"                                  # universes that nothing below names

    [stores.universes]
    billing = "postgresql://db.example/billing"
    "eu-*" = "postgresql://eu.example/holdfast"         # every universe whose name begins so

A name goes before a pattern, and of two patterns the longer one counts: a `*` stands at the end and only
there, so two patterns that fit one universe lie one within the other, and none is in doubt. Directories
are meant from where the file is. A store is spelled in one way, for what is spelled in two would be two.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from holdfast.config import UNIVERSE_BYTES_MAX
from holdfast.errors import BadUrl, Invalid, NotFound
from holdfast.store import urls

VARIABLE = "HOLDFAST_CONFIG"
FILE = "holdfast.toml"
STORE_VARIABLE = "HOLDFAST_STORE"
STORE_DEFAULT = "./data"
# A host, or several with commas, which are one text to us.
_ADDRESS = re.compile(r"(?P<host>.*?)(?::(?P<port>\d+))?")
_LOCAL = frozenset({"", "localhost", "127.0.0.1", "::1"})


class BadStores(Invalid):
    code = "bad_stores"
    hint = "mend [stores] in the file; docs/stores.md shows how it is written"


class NoStoreFor(NotFound):
    code = "no_store_for_universe"
    hint = "name it under [stores.universes], or give [stores] a default"


class SeveralStores(Invalid):
    code = "several_stores"
    hint = "say which: --universe U takes the store of a universe, --store URL any other"


class Rule(NamedTuple):
    """A name, or the beginning of names, and their store."""

    text: str
    url: str

    @property
    def beginning(self) -> str | None:
        return self.text[:-1] if self.text.endswith("*") else None


class StoreMap:
    def __init__(self, path: str, default: str | None, rules: list[Rule]) -> None:
        self.path = path
        self.default = default
        self.named = {rule.text: rule.url for rule in rules if rule.beginning is None}
        self._patterns = sorted(
            (rule for rule in rules if rule.beginning is not None),
            key=lambda rule: len(rule.text),
            reverse=True,
        )

    def url_of(self, universe: str) -> str:
        """The store of a universe; NoStoreFor if nothing fits and there is no default."""
        found = self.find(universe)
        if found is None:
            raise NoStoreFor(universe=universe, file=self.path)
        return found

    def find(self, universe: str) -> str | None:
        if universe in self.named:
            return self.named[universe]
        for rule in self._patterns:
            if universe.startswith(rule.beginning or ""):
                return rule.url
        return self.default

    def urls(self) -> list[str]:
        """Every store, once."""
        listed = [self.default, *self.named.values(), *(rule.url for rule in self._patterns)]
        return list(dict.fromkeys(url for url in listed if url is not None))

    def by_store(self) -> dict[str, list[str]]:
        """Every store, with the universes that are named there."""
        return {
            url: [name for name in self.named if self.named[name] == url] for url in self.urls()
        }

    def only(self) -> str:
        """The one store; SeveralStores if there are more."""
        found = self.urls()
        if len(found) != 1:
            raise SeveralStores(file=self.path, stores=[urls.shown(url) for url in found])
        return found[0]

    def elsewhere(self, universe: str) -> dict[str, str]:
        """The universes that are named and live in another store than this one."""
        here = self.url_of(universe)
        return {name: url for name, url in self.named.items() if url != here}

    def route(self, universe: str, to: str) -> str | None:
        """The store of another universe; None if it is the same one, or none."""
        found = self.find(to)
        return None if found == self.url_of(universe) else found


class Located(NamedTuple):
    """A store, and what says so: None if it was named by itself."""

    url: str
    stores: StoreMap | None = None


def locate(universe: str | None, given: str | None = None) -> Located:
    """The store that was given, else that of the environment, of the universe, or of everybody."""
    url = given or os.environ.get(STORE_VARIABLE)
    if url:
        return Located(url)
    stores = found()
    if stores is None:
        return Located(STORE_DEFAULT)
    return Located(stores.only() if universe is None else stores.url_of(universe), stores)


def found_for_all() -> StoreMap | None:
    """What is mapped, unless the environment names one store for everything."""
    return None if os.environ.get(STORE_VARIABLE) else found()


def found() -> StoreMap | None:
    """What the file says that `HOLDFAST_CONFIG` names, or the one in this directory; None without."""
    named = os.environ.get(VARIABLE)
    path = Path(named or FILE)
    if not named and not path.is_file():
        return None
    return load(path)


def load(path: Path) -> StoreMap | None:
    """Read a file; None if it has nothing about stores."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadStores(file=str(path), why=error.strerror or str(error)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadStores(file=str(path), why=str(error)) from None
    stores = document.get("stores")
    return None if stores is None else parse(stores, str(path), path.absolute().parent)


def parse(stores: Any, path: str, directory: Path) -> StoreMap:
    """The table `[stores]` of a file that lies in a directory."""
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
        default = _url(path, directory, "default", stores["default"])
    rules = [_rule(path, directory, text, url) for text, url in universes.items()]
    made = StoreMap(path, default, rules)
    _refuse_two_spellings(path, made.urls())
    return made


def _rule(path: str, directory: Path, text: str, url: Any) -> Rule:
    if not text or "/" in text or "\0" in text or len(text.encode()) > UNIVERSE_BYTES_MAX:
        raise BadStores(file=path, universe=text[:64], why="no universe is called so")
    if "*" in text[:-1] or any(letter in text for letter in "?["):
        why = "a pattern is the beginning of a name and one * at its end"
        raise BadStores(file=path, universe=text, why=why)
    return Rule(text, _url(path, directory, text, url))


def _url(path: str, directory: Path, what: str, url: Any) -> str:
    if not isinstance(url, str):
        raise BadStores(file=path, universe=what, why="a store is a directory or a URL, as text")
    if url != url.strip() or not url.isprintable():
        raise BadStores(file=path, universe=what, why="a space around it, or a sign that is none")
    try:
        scheme, rest = urls.split(url)
        identity(url)
    except BadUrl as error:
        raise BadStores(file=path, universe=what, why=f"no store: {error}") from None
    except ValueError as error:
        raise BadStores(file=path, universe=what, why=f"no URL: {error}") from None
    if scheme == "lmdb":
        return str(directory / Path(rest).expanduser())
    if scheme not in ("postgresql", "postgres"):
        why = f"no store that others can open: {scheme}"
        raise BadStores(file=path, universe=what, why=why)
    return url


def _refuse_two_spellings(path: str, listed: list[str]) -> None:
    seen: dict[object, str] = {}
    for url in listed:
        other = seen.setdefault(identity(url), url)
        if other != url:
            why = "one store is spelled in two ways: spell it alike"
            raise BadStores(file=path, why=why, stores=[urls.shown(other), urls.shown(url)])


def identity(url: str) -> object:
    """What two URLs of one store have in common, as far as it can be seen without opening it."""
    scheme, rest = urls.split(url)
    if scheme == "lmdb":
        return ("lmdb", os.path.realpath(rest))
    if scheme not in ("postgresql", "postgres"):
        return (scheme, rest)
    parts = urlsplit(url)
    said = dict(parse_qsl(parts.query))
    # Names in the authority lack nothing but their escapes; the query overrules them.
    login, _, address = parts.netloc.rpartition("@")
    at = _ADDRESS.fullmatch(address)
    host = said.get("host") or said.get("hostaddr") or unquote(at["host"] if at else address)
    port = said.get("port") or (at["port"] if at else None) or "5432"
    user = said.get("user") or unquote(login.partition(":")[0])
    return (
        "postgresql",
        "" if host.strip("[]") in _LOCAL else host.lower(),
        port,
        said.get("dbname") or unquote(parts.path.strip("/")) or user,
        _search_path(said.get("options", "")),
    )


def _search_path(options: str) -> str:
    found = re.search(r"-c\s*search_path\s*=\s*(\S+)", options)
    return found[1] if found else ""

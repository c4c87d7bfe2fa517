"""The store option: `--store`, else `HOLDFAST_STORE`, else the store that `holdfast.toml` configures for
`--universe`, else `./data`.

Commands that read, copy or repair need an existing store, so that a mistyped path does not create an empty
one.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from holdfast.cli.output import waiting
from holdfast.cli.redaction import add_redact
from holdfast.errors import Invalid, NotFound
from holdfast.store import open as open_store
from holdfast.store.admin import routing
from holdfast.store.admin.routing import STORE_DEFAULT, STORE_VARIABLE, locate_store
from holdfast.store.api import Store
from holdfast.store.lmdb import permissions
from holdfast.store.urls import redact, scheme_of

ENVIRONMENT_VARIABLE = STORE_VARIABLE
DEFAULT_URL = STORE_DEFAULT


class NoStore(NotFound):
    hint = (
        f"no store exists at this URL; check --store or {ENVIRONMENT_VARIABLE}; "
        "`holdfast up module:app --store URL` creates a store, "
        "`holdfast demo --store DIR` creates a sample one"
    )


# Help texts of --universe.
ONE_UNIVERSE = "the universe (can be omitted if the store has only one)"
EVERY_UNIVERSE = "only this universe (default: all universes of the store)"
UNIVERSE_OF_STORE = "the universe whose store is used"


def add_options(
    parser: argparse.ArgumentParser, *, universe: str = "", universe_required: bool = False
) -> None:
    """Add --store and --json, and --universe with this help text, if given."""
    if universe:
        parser.add_argument("--universe", metavar="U", required=universe_required, help=universe)
    parser.add_argument(
        "--store",
        metavar="URL",
        help=f"store URL (default: ${ENVIRONMENT_VARIABLE}, then holdfast.toml, then {DEFAULT_URL})",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document to stdout")
    add_redact(parser)


def url_of(args: argparse.Namespace) -> str:
    return locate_store(getattr(args, "universe", None), args.store).url


class StoreChoice(NamedTuple):
    """The arguments for one store, and the universes that the configuration maps to it."""

    args: argparse.Namespace
    universes: list[str]
    mapped: bool = False


def each_store(args: argparse.Namespace) -> list[StoreChoice]:
    """Return the selected store, or all configured stores if none is selected."""
    mapped = None if args.store or args.universe else routing.load_unless_overridden()
    if mapped is None:
        return [StoreChoice(args, [args.universe] if args.universe else [])]
    return [
        StoreChoice(argparse.Namespace(**{**vars(args), "store": url}), names, mapped=True)
        for url, names in mapped.by_store().items()
    ]


def is_embedded(url: str) -> bool:
    """Whether the store is a local directory."""
    return scheme_of(url) == "lmdb"


def directory_of(url: str) -> Path:
    """Return the directory of an embedded store."""
    if not is_embedded(url):
        raise Invalid(
            what="store", why="this command needs an embedded store", scheme=scheme_of(url)
        )
    return Path(url.removeprefix("lmdb:"))


def check_store(store: Store) -> None:
    """Raise if the store is gone. A process without roles would not notice it otherwise."""
    check = getattr(store, "check", None)
    if check is not None:
        check()


@contextlib.contextmanager
def open_existing(args: argparse.Namespace) -> Iterator[Store]:
    """Open the store, which must exist."""
    url = url_of(args)
    if scheme_of(url) == "memory":
        raise Invalid(what="store", why="a memory store ends with its process", scheme="memory")
    if is_embedded(url):
        permissions.check_access(directory_of(url).absolute())
        if not (directory_of(url) / "data.mdb").exists():
            raise NoStore(what="store", url=url)
    try:
        with waiting("opening the store"):
            store = open_store(url, bootstrap=False)
    except NotFound as error:
        if is_embedded(url) or error.fields.get("what") == "database":
            raise
        raise NoStore(what="store", url=redact(url)) from None
    with store:
        yield store

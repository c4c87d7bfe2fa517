"""Which store a command works on: `--store`, else `HOLDFAST_STORE`, else what `holdfast.toml` says of
`--universe`, else `./data`.

Commands that look, copy or repair need a store that is there: a mistyped path must not become a new
and empty store.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from holdfast.cli.output import waiting
from holdfast.errors import Invalid, NotFound
from holdfast.store import access, mapping
from holdfast.store import open as open_store
from holdfast.store.api import Store
from holdfast.store.mapping import STORE_DEFAULT, STORE_VARIABLE, locate
from holdfast.store.urls import scheme_of, shown

VARIABLE = STORE_VARIABLE
DEFAULT = STORE_DEFAULT


class NoStore(NotFound):
    hint = (
        f"give --store URL, or set {VARIABLE}; `holdfast up module:app --store URL` makes a store, "
        "`holdfast demo --store DIR` one to look at"
    )


def add_options(parser: argparse.ArgumentParser, *, universe: bool = False) -> None:
    """`universe`: the command asks nothing about universes, so one only says whose store is meant."""
    if universe:
        parser.add_argument("--universe", metavar="U", help="take the store of this universe")
    parser.add_argument(
        "--store",
        metavar="URL",
        help=f"the store; else ${VARIABLE}, else by holdfast.toml, else {DEFAULT}",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def url_of(args: argparse.Namespace) -> str:
    return locate(getattr(args, "universe", None), args.store).url


class Chosen(NamedTuple):
    """Arguments that name one store, and the universes that are known to be there."""

    args: argparse.Namespace
    universes: list[str]
    mapped: bool = False


def each_store(args: argparse.Namespace) -> list[Chosen]:
    """The store that is meant, or each one that is mapped, if nothing says which."""
    mapped = None if args.store or args.universe else mapping.found_for_all()
    if mapped is None:
        return [Chosen(args, [args.universe] if args.universe else [])]
    return [
        Chosen(argparse.Namespace(**{**vars(args), "store": url}), names, mapped=True)
        for url, names in mapped.by_store().items()
    ]


def is_embedded(url: str) -> bool:
    """Whether the store is a directory of this machine."""
    return scheme_of(url) == "lmdb"


def directory_of(url: str) -> Path:
    """Where an embedded store lives."""
    if not is_embedded(url):
        raise Invalid(
            what="store", why="this command needs an embedded store", scheme=scheme_of(url)
        )
    return Path(url.removeprefix("lmdb:"))


@contextlib.contextmanager
def existing(args: argparse.Namespace) -> Iterator[Store]:
    """Open the store, which must exist."""
    url = url_of(args)
    if scheme_of(url) == "memory":
        raise Invalid(
            what="store", why="a store in memory is gone with its process", scheme="memory"
        )
    if is_embedded(url):
        access.check(directory_of(url).absolute())
        if not (directory_of(url) / "data.mdb").exists():
            raise NoStore(what="store", url=url)
    try:
        with waiting("opening the store"):
            store = open_store(url, bootstrap=False)
    except NotFound as error:
        if is_embedded(url) or error.fields.get("what") == "database":
            raise
        raise NoStore(what="store", url=shown(url)) from None
    with store:
        yield store

"""Which store a command works on: `--store`, else `HOLDFAST_STORE`, else `./data`.

Commands that look, copy or repair need a store that is there: a mistyped path must not become a new
and empty store.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from holdfast.cli.output import waiting
from holdfast.errors import Invalid, NotFound
from holdfast.store import open as open_store
from holdfast.store.api import Store

VARIABLE = "HOLDFAST_STORE"
DEFAULT = "./data"


class NoStore(NotFound):
    hint = f"give --store DIR, or set {VARIABLE}; `holdfast demo --store DIR` makes one to look at"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store", metavar="URL", help=f"the store; else ${VARIABLE}, else {DEFAULT}"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def url_of(args: argparse.Namespace) -> str:
    return args.store or os.environ.get(VARIABLE) or DEFAULT


def directory_of(url: str) -> Path:
    """Where an embedded store lives."""
    scheme, colon, _ = url.partition(":")
    if colon and scheme in ("memory", "postgresql", "postgres"):
        raise Invalid(what="store", why="this command needs an embedded store", scheme=scheme)
    return Path(url.removeprefix("lmdb:"))


@contextlib.contextmanager
def existing(args: argparse.Namespace) -> Iterator[Store]:
    """Open the store, which must exist."""
    url = url_of(args)
    if not (directory_of(url) / "data.mdb").exists():
        raise NoStore(what="store", url=url)
    with waiting("opening the store"):
        store = open_store(url, bootstrap=False)
    with store:
        yield store

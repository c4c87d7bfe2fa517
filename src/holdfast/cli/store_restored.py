"""`holdfast store restored`: told after PostgreSQL's own tools have set a database back in time."""

from __future__ import annotations

import argparse

from holdfast.cli import EXIT_OK
from holdfast.cli.output import emit, waiting
from holdfast.cli.target import add_options, url_of
from holdfast.store.restored import renew

HELP = "make a store in a restored database a new generation; nothing may run on it"


def configure(parser: argparse.ArgumentParser) -> None:
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    with waiting("waiting until nobody has the store open"):
        done = renew(url_of(args))
    document = {
        "store": done.url,
        "before": done.before,
        "generation": done.generation,
        "commit_no": done.commit_no,
    }
    emit(
        args,
        document,
        f"{done.url}: generation {done.generation} (was {done.before})\n"
        "leases and claims that were granted before are refused from now on",
    )
    return EXIT_OK

"""`holdfast store restored`: starts a new generation after PostgreSQL's own tools restored the database."""

from __future__ import annotations

import argparse

from holdfast.cli import EXIT_OK
from holdfast.cli.output import emit, waiting
from holdfast.cli.store_option import add_options, url_of
from holdfast.store.admin.new_generation import start_new_generation

HELP = "start a new generation in a restored database; no process may use the store"


def configure(parser: argparse.ArgumentParser) -> None:
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    with waiting("waiting until no process has the store open"):
        done = start_new_generation(url_of(args))
    document = {
        "store": done.url,
        "before": done.former,
        "generation": done.generation,
        "commit_no": done.commit_no,
    }
    emit(
        args,
        document,
        f"{done.url}: generation {done.generation} (was {done.former})\n"
        "leases and claims granted before are now rejected",
    )
    return EXIT_OK

"""`holdfast restore SRC`: replace a store by a backup. The result is a new generation.

Whatever was granted after the backup was taken belongs to an older generation and is refused. The
writer process of a store lingers for a while after its last client; a restore waits for that long,
then it says that the store is in use.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from holdfast.cli.output import emit, waiting
from holdfast.cli.target import add_options, directory_of, url_of
from holdfast.clock import SYSTEM, S
from holdfast.config import WriterLimits
from holdfast.errors import Invalid, StoreBusy
from holdfast.store.backup import restore
from holdfast.store.urls import scheme_of, shown

# Beyond the time that an idle writer lingers, before the store counts as in use.
GRACE_S = 1.0
LOOK_S = 0.1


class NotByUs(Invalid):
    hint = (
        "a store on PostgreSQL is restored as its database is: pg_restore, or base backup and archive; "
        "stop every process first, and run `holdfast store restored` after it"
    )


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", metavar="SRC", help="a directory that `holdfast backup` made")
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    if scheme_of(url_of(args)) == "postgresql":
        raise NotByUs(what="restore", url=shown(url_of(args)))
    source = Path(args.src)
    target = directory_of(url_of(args))
    with waiting("restoring (an idle writer leaves after a few seconds)"):
        generation = _restore(source, target)
    document = {
        "store": f"lmdb:{target.absolute()}",
        "backup": str(source),
        "generation": generation,
    }
    emit(
        args,
        document,
        f"restored {target} from {source}: generation {generation}\n"
        "leases and claims that were granted after the backup are refused from now on",
    )
    return 0


def _restore(source: Path, target: Path) -> int:
    deadline_ns = SYSTEM.mono_ns() + int((WriterLimits().linger_s + GRACE_S) * S)
    while True:
        try:
            return restore(source, target)
        except StoreBusy:
            if SYSTEM.mono_ns() > deadline_ns:
                raise
            SYSTEM.sleep(LOOK_S)

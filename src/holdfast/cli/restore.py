"""`holdfast restore SRC`: replaces a store with a backup, as a new generation.

Leases and claims that were granted after the backup belong to an older generation and are rejected. The
writer process of a store stays for a while after its last client. A restore waits for that time, then
fails because the store is in use.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from holdfast.cli.output import emit, waiting
from holdfast.cli.store_option import add_options, directory_of, url_of
from holdfast.clock import SYSTEM, S
from holdfast.config import WriterLimits
from holdfast.errors import Invalid, StoreBusy
from holdfast.store.lmdb.backup import restore_backup
from holdfast.store.urls import redact, scheme_of

# How long to wait beyond the idle timeout of the writer process, before the store counts as in use.
GRACE_S = 1.0
RETRY_S = 0.1


class UsePostgresRestore(Invalid):
    hint = (
        "restore a PostgreSQL store with PostgreSQL's own tools (pg_restore, or base backup and archive); "
        "stop every process first, and run `holdfast store restored` afterwards"
    )


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", metavar="SRC", help="backup directory made by `holdfast backup`")
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    if scheme_of(url_of(args)) == "postgresql":
        raise UsePostgresRestore(what="restore", url=redact(url_of(args)))
    source = Path(args.src)
    target = directory_of(url_of(args))
    with waiting("restoring (an idle writer process exits after a few seconds)"):
        generation = _restore_when_idle(source, target)
    document = {
        "store": f"lmdb:{target.absolute()}",
        "backup": str(source),
        "generation": generation,
    }
    emit(
        args,
        document,
        f"restored {target} from {source}: generation {generation}\n"
        "leases and claims granted after the backup are now rejected",
    )
    return 0


def _restore_when_idle(source: Path, target: Path) -> int:
    deadline_ns = SYSTEM.mono_ns() + int((WriterLimits().idle_exit_s + GRACE_S) * S)
    while True:
        try:
            return restore_backup(source, target)
        except StoreBusy:
            if SYSTEM.mono_ns() > deadline_ns:
                raise
            SYSTEM.sleep(RETRY_S)

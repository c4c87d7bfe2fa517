"""The read-only inspection of an embedded store before an open writes anything.

It runs every check that can refuse an open: the headers and records of the redo log, the schema marker, the rows that
the engine reads, the wall clock, and the pages that a replay touches. A refused open leaves every file unchanged.
"""

from __future__ import annotations

from pathlib import Path

from holdfast.clock import SYSTEM
from holdfast.errors import HoldfastError, StoreCorrupt
from holdfast.store import clock_leap, schema
from holdfast.store.engine import StoredRows, check_outcomes, check_schema, read_meta_row
from holdfast.store.lmdb.backend import storage_error
from holdfast.store.lmdb.permissions import STORE_FILES
from holdfast.store.lmdb.redo_log import RedoRecovery


def inspect_store(path: Path, *, bootstrap: bool) -> RedoRecovery:
    """Return the recovery of an openable store; raise the error that refuses the open."""
    try:
        check_file_kinds(path)
        recovery = RedoRecovery(path)
        with recovery.open_view() as view:
            if view is None:
                check_schema(None, schema.SCHEMA_VERSION, bootstrap=bootstrap)
            else:
                check_rows(view, bootstrap=bootstrap)
        return recovery
    except OSError as error:
        raise storage_error(error, path) from None
    except HoldfastError as error:
        error.fields.setdefault("path", str(path))
        raise


def check_file_kinds(path: Path) -> None:
    """Refuse a directory in place of a file: the open would fail after it had written other files."""
    for name in STORE_FILES:
        if (path / name).is_dir():
            raise StoreCorrupt(path=str(path / name), why="a directory is in the place of a file")


def check_rows(rows: StoredRows, *, bootstrap: bool) -> None:
    marker = rows.get(schema.MARKER_KEY)
    check_schema(marker, schema.SCHEMA_VERSION, bootstrap=bootstrap, allow_upgrade=True)
    meta, last_ns = read_meta_row(rows), check_outcomes(rows)
    clock_leap.checked_leap_ns(SYSTEM, meta, max(last_ns, 0 if meta is None else meta.floor_ns))

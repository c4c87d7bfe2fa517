"""The inspection of an embedded store before the first byte is written.

Everything that can refuse an open is asked here: the headers and records of the redo log, the schema marker, the
rows that the engine reads, the calendar, and the pages that a replay touches. A refused open leaves every file as it was.
"""

from __future__ import annotations

from pathlib import Path

from holdfast.clock import SYSTEM
from holdfast.errors import HoldfastError, StoreCorrupt
from holdfast.store import calendar, schema
from holdfast.store.access import NAMES
from holdfast.store.engine import Rows, check_outcomes, guard_schema, meta_row
from holdfast.store.redo import Recovery
from holdfast.store.rows import storage_error

EXPECTED = (schema.SCHEMA_MAJOR, schema.SCHEMA_MINOR)


def inspect(path: Path, *, bootstrap: bool) -> Recovery:
    """The recovery of a store that may be opened; raises what refuses it."""
    try:
        check_kinds(path)
        recovery = Recovery(path)
        with recovery.looking() as view:
            if view is None:
                guard_schema(None, EXPECTED, bootstrap=bootstrap)
            else:
                check_rows(view, bootstrap=bootstrap)
        return recovery
    except OSError as error:
        raise storage_error(error, path) from None
    except HoldfastError as error:
        error.fields.setdefault("path", str(path))
        raise


def check_kinds(path: Path) -> None:
    """A directory in the place of a file would end the open after others were written."""
    for name in NAMES:
        if (path / name).is_dir():
            raise StoreCorrupt(path=str(path / name), why="a directory is in the place of a file")


def check_rows(rows: Rows, *, bootstrap: bool) -> None:
    guard_schema(rows.get(schema.MARKER_KEY), EXPECTED, bootstrap=bootstrap)
    meta, last_ns = meta_row(rows), check_outcomes(rows)
    calendar.leap_ns(SYSTEM, meta, max(last_ns, 0 if meta is None else meta.floor_ns))

"""The integrity check of an embedded store: a child process reads every row.

LMDB has no checksums and trusts its pages. A damaged file can crash its reader with SIGSEGV or SIGBUS. The reader is
therefore a child process, and `check_integrity` reports its crash as `StoreCorrupt`. The child first checks the
structure of all pages without LMDB, on one snapshot, while commits continue.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import lmdb
import msgspec

from holdfast.errors import Busy, HoldfastError, StoreCorrupt, StoreError, from_wire, to_wire
from holdfast.store.api import Row
from holdfast.store.lmdb.backend import LmdbBackend, storage_error
from holdfast.store.lmdb.page_reader import META_BYTES, META_COUNT, PageReader, decode_meta_page
from holdfast.store.lmdb.redo_log import DATA_FILE

# Two commits after the snapshot its meta page is overwritten, and the check takes another snapshot.
_SNAPSHOT_TRIES_MAX = 100
_CHECK_CODE = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from holdfast.store.lmdb.integrity_check import main; sys.exit(main(sys.argv[1:]))"
)
_CRASH_SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)


def check_integrity(path: Path, *, structure: bool = True) -> None:
    """Raise StoreCorrupt if the file of an open store is not completely readable. Without `structure`, only LMDB
    reads it."""
    source = str(Path(__file__).resolve().parents[3])
    child = subprocess.run(
        [sys.executable, "-P", "-c", _CHECK_CODE, source, str(path), "1" if structure else "0"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
    if child.returncode == 0:
        return
    if -child.returncode in _CRASH_SIGNALS:
        name = signal.Signals(-child.returncode).name
        raise StoreCorrupt(path=str(path / DATA_FILE), why=f"its reader crashed with {name}")
    status_line = (child.stdout.decode(errors="replace").splitlines() or [""])[-1]
    if not status_line.startswith("error "):
        raise StoreError(path=str(path), why=f"its reader ended with code {child.returncode}")
    raise from_wire(msgspec.json.decode(status_line[6:]))


def check_structure(backend: LmdbBackend) -> None:
    """Check every page of the latest commit without LMDB."""
    fd = os.open(backend.path / DATA_FILE, os.O_RDONLY | os.O_CLOEXEC)
    page_bytes = int(backend.env.stat()["psize"])
    try:
        for _ in range(_SNAPSHOT_TRIES_MAX):
            # While this snapshot is open, LMDB reuses none of its pages.
            with backend.env.begin() as snapshot:
                meta = os.pread(fd, META_BYTES, (snapshot.id() % META_COUNT) * page_bytes)
                if decode_meta_page(meta).txn == snapshot.id():
                    PageReader(fd, meta).check_all()
                    return
        raise Busy(path=str(backend.path), why="too many commits during the page check")
    except HoldfastError as error:
        error.fields.setdefault("path", str(backend.path / DATA_FILE))
        raise
    finally:
        os.close(fd)


def iter_rows(backend: LmdbBackend) -> Iterator[Row]:
    """Yield every row through LMDB. The row count bounds the loop: cyclic page references would never end."""
    with backend.env.begin() as txn, txn.cursor() as cursor:
        rows_left = int(txn.stat()["entries"])
        for key, value in cursor:
            if not rows_left:
                raise StoreCorrupt(
                    path=str(backend.path / DATA_FILE), why="more rows than its row count"
                )
            rows_left -= 1
            yield bytes(key), bytes(value)


def main(argv: list[str]) -> int:
    path = Path(argv[0])
    try:
        backend = LmdbBackend(path, readonly=True)
        try:
            if argv[1] == "1":
                check_structure(backend)
            for _ in iter_rows(backend):
                pass
        except lmdb.Error as error:
            raise storage_error(error, path) from None
        finally:
            backend.close()
    except HoldfastError as error:
        print("error " + msgspec.json.encode(to_wire(error)).decode(), flush=True)
        return 1
    return 0

"""A read of every row of an embedded store, in a process of its own.

LMDB has no checksums and follows what a page says. On a damaged file its reader can be ended by SIGSEGV or SIGBUS.
So the reader is a child, and `read_back` reports its end as `StoreCorrupt`. The child first checks the structure of
all pages without LMDB, on one snapshot, while others go on.
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
from holdfast.store.pages import META_BYTES, META_COUNT, Pages, read_meta
from holdfast.store.redo import DATA
from holdfast.store.rows import LmdbBackend, storage_error

# Two commits later its meta page is written over: then another snapshot is taken.
_TRIES_MAX = 100
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from holdfast.store.readback import main; sys.exit(main(sys.argv[1:]))"
)
_KILLED = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)


def read_back(path: Path, *, structure: bool = True) -> None:
    """Raise StoreCorrupt if the file of an open store cannot be read as a whole. Without `structure`, LMDB alone
    reads it."""
    source = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-P", "-c", _BOOT, source, str(path), "1" if structure else "0"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
    if done.returncode == 0:
        return
    if -done.returncode in _KILLED:
        name = signal.Signals(-done.returncode).name
        raise StoreCorrupt(path=str(path / DATA), why=f"its reader was ended by {name}")
    last = (done.stdout.decode(errors="replace").splitlines() or [""])[-1]
    if not last.startswith("error "):
        raise StoreError(path=str(path), why=f"its reader ended with code {done.returncode}")
    raise from_wire(msgspec.json.decode(last[6:]))


def check_structure(backend: LmdbBackend) -> None:
    """Check every page of the latest commit, without LMDB."""
    fd = os.open(backend.path / DATA, os.O_RDONLY | os.O_CLOEXEC)
    page_bytes = int(backend.env.stat()["psize"])
    try:
        for _ in range(_TRIES_MAX):
            # As long as it is open, none of its pages is used again.
            with backend.env.begin() as kept:
                meta = os.pread(fd, META_BYTES, (kept.id() % META_COUNT) * page_bytes)
                if read_meta(meta).txn == kept.id():
                    Pages(fd, meta).check_all()
                    return
        raise Busy(path=str(backend.path), why="commits outran the check of its pages")
    except HoldfastError as error:
        error.fields.setdefault("path", str(backend.path / DATA))
        raise
    finally:
        os.close(fd)


def rows_of(backend: LmdbBackend) -> Iterator[Row]:
    """Every row by LMDB. Pages that refer to each other in a circle would be read for ever."""
    with backend.env.begin() as txn, txn.cursor() as cursor:
        left = int(txn.stat()["entries"])
        for key, value in cursor:
            if not left:
                raise StoreCorrupt(
                    path=str(backend.path / DATA), why="it has more rows than it counts"
                )
            left -= 1
            yield bytes(key), bytes(value)


def main(argv: list[str]) -> int:
    path = Path(argv[0])
    try:
        backend = LmdbBackend(path, readonly=True)
        try:
            if argv[1] == "1":
                check_structure(backend)
            for _ in rows_of(backend):
                pass
        except lmdb.Error as error:
            raise storage_error(error, path) from None
        finally:
            backend.close()
    except HoldfastError as error:
        print("error " + msgspec.json.encode(to_wire(error)).decode(), flush=True)
        return 1
    return 0

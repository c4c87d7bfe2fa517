"""Forged redo records: recovery never replays the bytes of a stored value as a record.

A log is overwritten from its beginning in each epoch. Bytes of an earlier epoch remain behind the last record, and
recovery reads them. A caller can place a value exactly there.
"""

from __future__ import annotations

import struct
import zlib
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from holdfast.store.lmdb import redo_log
from holdfast.store.lmdb.backend import LmdbBackend
from holdfast.store.lmdb.redo_log import LOG_FILES

MODULES = ("holdfast.store.lmdb.redo_log",)

PATTERN = bytes(range(1, 251)) * 4


def put(backend: LmdbBackend, key: bytes, value: bytes) -> int:
    txn = backend.begin()
    txn.put_many([(key, value)])
    txn.commit()
    return txn.id


def reuse_log_file(backend: LmdbBackend) -> None:
    """Run two checkpoints, so that the same log file is in use again."""
    assert backend._redo_log is not None
    for _ in range(len(LOG_FILES)):
        backend._redo_log.checkpoint()
        backend._redo_log._wait_for_checkpoint()


def forge_unsalted_record(epoch: int, id: int) -> bytes:
    """Forge a record without a salt: it needs only the epoch and the commit number."""
    body = msgspec.msgpack.encode([[b"forged", b"1"]])
    tail = struct.pack("<IQQ", len(body), epoch, id)
    return struct.pack("<I", zlib.crc32(body, zlib.crc32(tail))) + tail + body


def forge_salted_record(salt: bytes, epoch: int, id: int) -> bytes:
    """Forge a record with the salt of an earlier epoch."""
    body = msgspec.msgpack.encode([[b"forged", b"1"]])
    tail = struct.pack("<IQQ", len(body), epoch, id)
    crc = zlib.crc32(body, zlib.crc32(tail, zlib.crc32(salt)))
    return salt + struct.pack("<I", crc) + tail + body


@pytest.mark.parametrize("guess", ["no salt", "the salt of an earlier round"])
def test_recovery_does_not_replay_a_forged_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guess: str
) -> None:
    monkeypatch.setattr(redo_log, "REDO_COMMITS", 10**9)
    backend = LmdbBackend(tmp_path, readonly=False, logged=True)
    log = backend._redo_log
    assert log is not None
    # Find the offset of a large value in the log, and the end of the record of a small one.
    put(backend, b"large", PATTERN)
    file = tmp_path / LOG_FILES[log._epoch % len(LOG_FILES)]
    begins = file.read_bytes().index(PATTERN)
    reuse_log_file(backend)
    put(backend, b"small", bytes(200))
    ends = log._append_at
    assert begins < ends < begins + len(PATTERN) - 100
    reuse_log_file(backend)
    id = backend.last_id() + 1
    epoch = log._epoch + len(LOG_FILES)
    earlier_salt = getattr(log, "_salt", b"")
    forged = (
        forge_unsalted_record(epoch, id + 2)
        if guess == "no salt"
        else forge_salted_record(earlier_salt, epoch, id + 2)
    )
    value = PATTERN[: ends - begins] + forged
    assert put(backend, b"large", value.ljust(len(PATTERN), b"\0")) == id
    reuse_log_file(backend)
    assert (log._epoch, put(backend, b"small", bytes(200))) == (epoch, id + 1)
    assert file.read_bytes()[ends:].startswith(forged)
    log.close_files()
    backend.env.close()
    again = LmdbBackend(tmp_path, readonly=False, logged=True)
    with closing(again), closing(again.snapshot()) as rows:
        assert rows.get(b"forged") is None
        assert rows.get(b"small") == bytes(200)
        assert rows.id == id + 1

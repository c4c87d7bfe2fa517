"""Bytes that a caller stored are never taken for a record of the redo log.

A log is written over and over from its beginning. What an earlier round wrote stays behind the last record, and
recovery reads on there. A value can be made to lie exactly at that place.
"""

from __future__ import annotations

import struct
import zlib
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from holdfast.store import redo
from holdfast.store.redo import FILES
from holdfast.store.rows import LmdbBackend

MODULES = ("holdfast.store.redo",)

PATTERN = bytes(range(1, 251)) * 4


def put(backend: LmdbBackend, key: bytes, value: bytes) -> int:
    txn = backend.begin()
    txn.put_many([(key, value)])
    txn.commit()
    return txn.id


def next_round(backend: LmdbBackend) -> None:
    """Begin the log anew, twice: the same file is in use after it."""
    assert backend._redo is not None
    for _ in range(len(FILES)):
        backend._redo.checkpoint()
        backend._redo._wait()


def record(round: int, id: int) -> bytes:
    """A record as anybody can compute it who counts rounds and commits."""
    body = msgspec.msgpack.encode([[b"forged", b"1"]])
    tail = struct.pack("<IQQ", len(body), round, id)
    return struct.pack("<I", zlib.crc32(body, zlib.crc32(tail))) + tail + body


def salted(salt: bytes, round: int, id: int) -> bytes:
    """The same with a salt that was seen in an earlier round."""
    body = msgspec.msgpack.encode([[b"forged", b"1"]])
    tail = struct.pack("<IQQ", len(body), round, id)
    crc = zlib.crc32(body, zlib.crc32(tail, zlib.crc32(salt)))
    return salt + struct.pack("<I", crc) + tail + body


@pytest.mark.parametrize("guess", ["no salt", "the salt of an earlier round"])
def test_a_stored_value_is_not_taken_for_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guess: str
) -> None:
    monkeypatch.setattr(redo, "REDO_COMMITS", 10**9)
    backend = LmdbBackend(tmp_path, readonly=False, logged=True)
    log = backend._redo
    assert log is not None
    # Where a large value lies in the log, and where the record of a small one ends.
    put(backend, b"large", PATTERN)
    file = tmp_path / FILES[log._round % len(FILES)]
    begins = file.read_bytes().index(PATTERN)
    next_round(backend)
    put(backend, b"small", bytes(200))
    ends = log._at
    assert begins < ends < begins + len(PATTERN) - 100
    next_round(backend)
    id = backend.last_id() + 1
    round = log._round + len(FILES)
    seen = getattr(log, "_salt", b"")
    forged = record(round, id + 2) if guess == "no salt" else salted(seen, round, id + 2)
    value = PATTERN[: ends - begins] + forged
    assert put(backend, b"large", value.ljust(len(PATTERN), b"\0")) == id
    next_round(backend)
    assert (log._round, put(backend, b"small", bytes(200))) == (round, id + 1)
    assert file.read_bytes()[ends:].startswith(forged)
    log.abandon()
    backend.env.close()
    again = LmdbBackend(tmp_path, readonly=False, logged=True)
    with closing(again), closing(again.snapshot()) as rows:
        assert rows.get(b"forged") is None
        assert rows.get(b"small") == bytes(200)
        assert rows.id == id + 1

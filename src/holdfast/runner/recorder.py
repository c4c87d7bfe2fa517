"""Recordings: the steps of a runner in a file, for replay in a post-mortem.

    header     "HOLDFAST STEPS 1\\n"
    record     length u32, crc32 of the body u32, both little-endian; then the body, a `Step` in msgpack

A record is one unbuffered write, so a killed process loses no earlier step. A power failure may truncate
the last record. A reader yields every step before the damage and then raises `RecordingDamaged` with the
offset. A recorder refuses to append to a damaged file, because no reader would reach the new records.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import zlib
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from holdfast import codec
from holdfast.config import FRAME_BYTES_MAX
from holdfast.errors import Busy, Invalid, NotFound, StoreFull
from holdfast.runner.hooks import RecordedStep

HEADER = b"HOLDFAST STEPS 1\n"
_PREFIX = struct.Struct("<II")


class RecordingDamaged(Invalid):
    code = "recording_damaged"
    hint = "the records before the offset are valid; record into another file"


class Recorder:
    """A replay hook that writes to a file. A file has one recorder. Several runners may share it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._file = _open_to_append(self.path)
        self._end = self._file.seek(0, os.SEEK_END)
        if self._end == 0:
            self._append(HEADER)

    def __call__(self, step: RecordedStep) -> None:
        body = codec.pack(step)
        with self._lock:
            self._append(_PREFIX.pack(len(body), zlib.crc32(body)) + body)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _append(self, data: bytes) -> None:
        try:
            written = self._file.write(data)
        except OSError as error:
            written, why = 0, str(error)
        else:
            why = "the write was incomplete"
        if written != len(data):
            # A partial record would hide all records after it.
            self._file.truncate(self._end)
            raise StoreFull(path=str(self.path), why=why)
        self._end += len(data)


def read_steps(path: str | os.PathLike[str]) -> Iterator[RecordedStep]:
    """Yield the steps of a recording in order. Raises `RecordingDamaged` at the first damaged record."""
    with _open_to_read(path) as file:
        found = file.read(len(HEADER))
        if found != HEADER:
            cut_off = HEADER.startswith(found)
            raise _damaged(path, 0, "cut off" if cut_off else "not a recording")
        while (step := _read_step(file, path)) is not None:
            yield step


@contextlib.contextmanager
def _open_to_read(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    try:
        with open(path, "rb") as file:
            yield file
    except FileNotFoundError:
        raise NotFound(what="recording", path=str(path)) from None
    except OSError as error:
        raise Invalid(what="recording", path=str(path), why=str(error)) from None


def _read_step(file: BinaryIO, path: str | os.PathLike[str]) -> RecordedStep | None:
    offset = file.tell()
    prefix = file.read(_PREFIX.size)
    if not prefix:
        return None
    if len(prefix) < _PREFIX.size:
        raise _damaged(path, offset, "cut off")
    length, checksum = _PREFIX.unpack(prefix)
    if length > FRAME_BYTES_MAX:
        raise _damaged(path, offset, "the length is impossible")
    body = file.read(length)
    if len(body) < length:
        raise _damaged(path, offset, "cut off")
    if zlib.crc32(body) != checksum:
        raise _damaged(path, offset, "the checksum does not match")
    try:
        return codec.unpack_as(RecordedStep, body)
    except Invalid as error:
        raise _damaged(path, offset, str(error.why)) from None


def _open_to_append(path: Path) -> FileIO:
    if path.exists() and path.stat().st_size > 0:
        for _ in read_steps(path):
            pass
    try:
        file = FileIO(path, "ab")
    except OSError as error:
        raise Invalid(what="recording", path=str(path), why=str(error)) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise Busy(what="recording", path=str(path), why="another recorder has it open") from None
    return file


def _damaged(path: str | os.PathLike[str], offset: int, why: str) -> RecordingDamaged:
    return RecordingDamaged(path=str(path), offset=offset, why=why)

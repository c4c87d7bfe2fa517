"""The spool of a run: its input blocks and its outcomes, as objects in shared or object storage.

    SPOOL/RUN/i/…      blocks of the input, written by the tasks that read it
    SPOOL/RUN/o/…      results, written by the children that made the calls

Executors write and read objects themselves. The ledger keeps a `Stored` of each: name, size and hash. An object
is named to the ledger once it is durable; one that the ledger does not name does not count, and is deleted later
(`spool_upkeep`). Nothing is written twice under a name, so a `Stored` never comes to mean something else.

A block has two parts, key columns and hashes before the others, so that readers of keys fetch no more than these.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from holdfast import codec
from holdfast.clock import SYSTEM
from holdfast.errors import Invalid, ValueTooLarge
from holdfast.ledger import runs
from holdfast.ledger.ranges import Range
from holdfast.ledger.runs import Chunk, Other, Stored, StoredBlock
from holdfast.spark import merge
from holdfast.spark.errors import NotAStage, SpoolLost, SpoolUnreachable
from holdfast.spark.match import HASHES
from holdfast.spark.rows import table_of
from holdfast.spark.sinks.location import OutputUnknown, locate
from holdfast.spark.sinks.object_store import keep_options, options_of
from holdfast.spark.spool_access import SpoolAccess
from holdfast.spark.spool_place import Buffer, SpoolPlace, open_place

# Smaller than in a store: every child reads the blocks of its rows.
BLOCK_BYTES = 2 << 20
RANGES_SHOWN = 20
NAME_BYTES_MAX = 200
_CHUNK = struct.Struct("<QQ")

_places: dict[tuple[str, tuple[tuple[str, str], ...]], SpoolPlace] = {}


class ObjectLost(Exception):
    """An object is gone, or has other bytes; the argument says which of them."""


def checked_url(spool: str | os.PathLike[str] | None) -> str:
    """The URL of a spool, or empty for none."""
    if spool is None or spool == "":
        return ""
    try:
        return locate(spool).url
    except OutputUnknown as error:
        shown = {what: told for what, told in error.fields.items() if what == "output"}
        raise NotAStage(what="spool", why=error.fields["why"], found=shown.get("output")) from None


def kept_url(spool: str | os.PathLike[str] | None, options: Mapping[str, str] | None) -> str:
    """The URL of a stage's spool. The process keeps the options, not the stage: nothing shows them."""
    url = checked_url(spool)
    keep_options(url, options)
    return url


def access_of(record: runs.RunRecord) -> SpoolAccess | None:
    """For processes elsewhere: with the options that this one was given."""
    if not record.spool:
        return None
    return SpoolAccess(record.spool, list(record.key), options_of(record.spool))


class Spool:
    """The objects of one run."""

    def __init__(self, place: SpoolPlace, url: str, run_id: str) -> None:
        self.place = place
        self.url = url
        self.run_id = run_id

    @classmethod
    def at(cls, url: str, run_id: str) -> Spool:
        options = options_of(url)
        known = (url, tuple(sorted(options.items())))
        if known not in _places:
            # By its URL, which may be a directory of any name.
            _places[known] = open_place(locate(url if "://" in url else f"file:{url}"))
        return cls(_places[known], url, run_id)

    @classmethod
    def by(cls, access: SpoolAccess, run_id: str) -> Spool:
        keep_options(access.url, access.options or None)
        return cls.at(access.url, run_id)

    def path(self, name: str) -> str:
        return f"{self.run_id}/{name}"

    def put(self, name: str, *parts: Buffer, raws: bool = False) -> Stored:
        """Write an object of these bytes, one after another; durable when this returns."""
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
        return self._put(name, parts, digest.digest(), raws=raws)

    def put_block(self, name: str, keys: Buffer, rest: Buffer, rows: int) -> StoredBlock:
        """Write a block: the part that readers of keys fetch, and the other. Each byte is hashed once."""
        digest = hashlib.sha256(keys)
        keys_sha256 = digest.digest()
        digest.update(rest)
        at = self._put(name, (keys, rest), digest.digest())
        return StoredBlock(rows, at, len(keys), keys_sha256)

    def _put(
        self, name: str, parts: Sequence[Buffer], sha256: bytes, *, raws: bool = False
    ) -> Stored:
        tag = self.place.put(self.path(name), *parts)
        return Stored(name, sum(map(len, parts)), sha256, tag, raws)

    def get(self, at: Stored) -> bytes:
        """All of an object, checked; or ObjectLost."""
        return self._checked(at, 0, None, at.size, at.sha256)

    def keys(self, block: StoredBlock) -> bytes:
        """The first part of a block, checked; or ObjectLost."""
        return self._checked(block.at, 0, block.keys_size, block.keys_size, block.keys_sha256)

    def _checked(self, at: Stored, lo: int, hi: int | None, size: int, sha256: bytes) -> bytes:
        data = self.place.get(self.path(at.name), lo, hi)
        if data is None:
            raise ObjectLost("missing")
        if len(data) != size:
            raise ObjectLost(f"it has {len(data):,} bytes instead of {size:,}")
        if hashlib.sha256(data).digest() != sha256:
            raise ObjectLost("its bytes are others")
        return data


def lost(spool: Spool, what: str, ranges: Iterable[Range], name: str, why: str) -> SpoolLost:
    """The error for one object, with the rows that it was of."""
    return all_lost(spool, [(what, one, name, why) for one in ranges])


def all_lost(spool: Spool, found: Sequence[tuple[str, Range, str, str]]) -> SpoolLost:
    """The error for (what it held, its rows, its name, why) of each object."""
    seqs = joined([rows for _, rows, _, _ in found])
    _, _, name, why = found[0]
    return SpoolLost(
        run_id=spool.run_id,
        spool=spool.url,
        what=" and ".join(sorted({what for what, *_ in found})),
        objects=len({name for _, _, name, _ in found}),
        seqs=[list(one) for one in seqs[:RANGES_SHOWN]],
        more=max(len(seqs) - RANGES_SHOWN, 0),
        name=name,
        why=why,
    )


def joined(ranges: Iterable[Range]) -> list[Range]:
    """Ascending ranges, those that touch as one."""
    found: list[Range] = []
    for lo, hi in sorted(ranges):
        if found and lo <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], hi))
        else:
            found.append((lo, hi))
    return found


# --- names --------------------------------------------------------------------------------------


def writer_id() -> str:
    """No other writer has it, so no two of them write under one name."""
    return SYSTEM.entropy(6).hex()


def block_name(task: int, attempt: int, n: int, writer: str) -> str:
    return f"i/{task}-{attempt}-{n}-{writer}"


def chunk_name(epoch: int, n: int, writer: str) -> str:
    """Of the grant and of its report. Directories are kept small."""
    return f"o/{epoch % 256:02x}/{epoch:x}-{n:x}-{writer}"


def check_stored(at: Stored, kind: str) -> None:
    """Refuse a name that leads elsewhere, and what cannot be checked later."""
    parts = at.name.split("/")
    plain = all(part and part not in (".", "..") and part.isprintable() for part in parts)
    if parts[0] != kind or not plain or len(at.name.encode()) > NAME_BYTES_MAX:
        raise Invalid(what="spool object", why="no name of an object of this run", found=at.name)
    if at.size <= 0 or len(at.sha256) != hashlib.sha256().digest_size:
        raise Invalid(what="spool object", why="without its length or its hash", found=at.name)


# --- blocks of the input ------------------------------------------------------------------------


def put_block(
    spool: Spool, name: str, batch: pa.RecordBatch, key: Sequence[str], bytes_max: int = 1 << 62
) -> StoredBlock:
    """Store a batch; `ValueTooLarge` above so many bytes."""
    first = {*key, *HASHES}
    names = batch.schema.names
    keys = merge.encoded(batch.select([one for one in names if one in first]))
    rest = [one for one in names if one not in first]
    others = merge.encoded(batch.select(rest)) if rest else memoryview(b"")
    if len(keys) + len(others) > bytes_max:
        # A block is cut by its rows: this is one of them.
        raise ValueTooLarge(what="input row", bytes=len(keys) + len(others), max=bytes_max)
    return spool.put_block(name, keys, others, batch.num_rows)


def read_block(spool: Spool, block: StoredBlock, *, keys_only: bool = False) -> pa.Table:
    """The columns of a block, those of the key first; or ObjectLost."""
    if keys_only:
        return table_of(spool.keys(block))
    data = memoryview(spool.get(block.at))
    table = table_of(data[: block.keys_size])
    if len(data) > block.keys_size:
        rest = table_of(data[block.keys_size :])
        for field, column in zip(rest.schema, rest.columns, strict=True):
            table = table.append_column(field, column)
    return table


class BlockCache:
    """Blocks that were read last, by number."""

    def __init__(self, blocks_max: int) -> None:
        self._max = blocks_max
        self._held: OrderedDict[tuple[object, bool], pa.Table] = OrderedDict()

    def get(self, n: object, keys_only: bool, read: Callable[[], pa.Table]) -> pa.Table:
        for known in ((n, False), (n, keys_only)):
            if known in self._held:
                self._held.move_to_end(known)
                return self._held[known]
        table = self._held[n, keys_only] = read()
        if len(self._held) > self._max:
            self._held.popitem(last=False)
        return table


# --- outcomes -----------------------------------------------------------------------------------


def chunk_bytes(seqs: bytes, batch: bytes | memoryview, raws: Mapping[int, str]) -> bytes:
    """The object of a report: places of results, results, and texts of those that did not fit."""
    told = codec.pack(sorted(raws.items())) if raws else b""
    return b"".join([_CHUNK.pack(len(seqs), len(batch)), seqs, batch, told])


def whole_chunk(spool: Spool, chunk: Chunk) -> Chunk:
    """A chunk with what its object holds; or SpoolLost."""
    if chunk.at is None:
        return chunk
    try:
        data = memoryview(spool.get(chunk.at))
    except ObjectLost as why:
        raise lost(spool, "outcomes", [extent(chunk)], chunk.at.name, str(why)) from None
    places, size = _CHUNK.unpack_from(data)
    at = _CHUNK.size + places
    seqs, batch, told = bytes(data[_CHUNK.size : at]), data[at : at + size], data[at + size :]
    raws: dict[int, str] = dict(codec.unpack(bytes(told))) if told else {}
    others = [
        msgspec.structs.replace(one, raw=raws[one.seq]) if one.seq in raws else one
        for one in chunk.others
    ]
    # A view of the object is enough for Arrow.
    results: Any = batch
    return msgspec.structs.replace(chunk, seqs=seqs, batch=results, others=others)


def with_raws(spool: Spool | None, chunk: Chunk) -> Sequence[Other]:
    """The rows without a result, with the texts of those that did not fit the schema."""
    if spool is None or chunk.at is None or not chunk.at.raws:
        return chunk.others
    return whole_chunk(spool, chunk).others


def spooled(spool: Spool, chunk: Chunk, name: str) -> Chunk:
    """A chunk whose texts are in an object, for records that are copied from another run."""
    raws = {one.seq: one.raw for one in chunk.others if one.raw}
    if not raws:
        return chunk
    at = spool.put(name, chunk_bytes(b"", b"", raws), raws=True)
    others = [msgspec.structs.replace(one, raw="") for one in chunk.others]
    return msgspec.structs.replace(chunk, others=others, at=at)


def extent(chunk: Chunk) -> Range:
    """The rows that a chunk with an object says something of: from the first to the last."""
    seqs = [seq for one in chunk.others for seq in (one.seq, one.seq + 1)]
    if chunk.hi > chunk.lo:
        seqs += [chunk.lo, chunk.hi]
    return (min(seqs), max(seqs)) if seqs else (0, 0)


def spool_of(record: runs.RunRecord) -> Spool | None:
    return Spool.at(record.spool, record.run_id) if record.spool else None


def check_usable(record: runs.RunRecord) -> None:
    """Write an object, read it and delete it, before anything is read or called."""
    with marker(record):
        pass


@contextlib.contextmanager
def marker(record: runs.RunRecord) -> Iterator[bytes]:
    """An object in the run's spool while this lasts, for executors to find (`look_at`)."""
    spool = spool_of(record)
    if spool is None:
        yield b""
        return
    name = f"p/{writer_id()}"
    at = spool.put(name, b"probe")
    try:
        spool.get(at)
        yield codec.pack(at)
    finally:
        spool.place.delete([spool.path(name)])


def look_at(access: SpoolAccess, run_id: str, marked: bytes) -> None:
    """On an executor: the spool is the driver's, and can be written to."""
    spool = Spool.by(access, run_id)
    try:
        spool.get(codec.unpack_as(Stored, marked))
    except ObjectLost:
        raise SpoolUnreachable(
            spool=access.url, why="it is not the driver's: an object is missing"
        ) from None
    name = f"p/{writer_id()}"
    spool.put(name, b"probe")
    spool.place.delete([spool.path(name)])

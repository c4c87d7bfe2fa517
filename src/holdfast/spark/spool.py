"""The spool of a run: input blocks and outcomes as objects in shared or object storage.

    SPOOL/RUN/i/…      input blocks, written by the tasks that read the input
    SPOOL/RUN/o/…      results, written by the children that made the calls

Executors write and read objects directly. The ledger keeps a `SpoolObject` for each: name, size and hash. An
object is reported to the ledger after it is durable. Unreferenced objects do not count and are deleted
later (`spool_maintenance`). A name is written only once, so a `SpoolObject` never changes its meaning.

A block has two parts, with key columns and hashes first, so that readers of keys fetch only that
part.
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

from holdfast import codec, failpoints
from holdfast.clock import SYSTEM
from holdfast.errors import Invalid, ValueTooLarge
from holdfast.ledger import runs
from holdfast.ledger.ranges import Range
from holdfast.ledger.runs import OutcomeChunk, ResultlessRow, SpoolBlock, SpoolObject
from holdfast.spark import block_merge
from holdfast.spark.arrow_rows import decode_table
from holdfast.spark.errors import NotAStage, SpoolLost, SpoolUnreachable
from holdfast.spark.row_match import HASH_COLUMNS
from holdfast.spark.sinks.location import OutputUnknown, locate
from holdfast.spark.sinks.object_store import keep_options, options_of
from holdfast.spark.spool_access import SpoolAccess
from holdfast.spark.spool_storage import Buffer, SpoolStorage, open_storage

# Smaller than in a store, since every child reads the blocks of its rows.
BLOCK_BYTES = 2 << 20
LOST_RANGES_SHOWN = 20
NAME_BYTES_MAX = 200
_CHUNK = struct.Struct("<QQ")

_open_storages: dict[tuple[str, tuple[tuple[str, str], ...]], SpoolStorage] = {}


def close_storages() -> None:
    """Forget the open storages with their credentials."""
    _open_storages.clear()


class ObjectLost(Exception):
    """An object is missing or has different bytes; the argument is the reason."""


def checked_spool_url(spool: str | os.PathLike[str] | None) -> str:
    """Validate the URL of a spool; empty for none."""
    if spool is None or spool == "":
        return ""
    try:
        return locate(spool).url
    except OutputUnknown as error:
        shown = {what: value for what, value in error.fields.items() if what == "output"}
        raise NotAStage(what="spool", why=error.fields["why"], found=shown.get("output")) from None


def register_spool(spool: str | os.PathLike[str] | None, options: Mapping[str, str] | None) -> str:
    """Validate the spool of a stage and register its storage options in the process. The stage does
    not hold them, so they are never displayed.
    """
    url = checked_spool_url(spool)
    keep_options(url, options)
    return url


def make_spool_access(record: runs.RunRecord) -> SpoolAccess | None:
    """Build the spool access for other processes, with the storage options of this process."""
    if not record.spool:
        return None
    return SpoolAccess(record.spool, list(record.key), options_of(record.spool))


class Spool:
    """The objects of one run."""

    def __init__(self, storage: SpoolStorage, url: str, run_id: str) -> None:
        self.storage = storage
        self.url = url
        self.run_id = run_id

    @classmethod
    def open(cls, url: str, run_id: str) -> Spool:
        options = options_of(url)
        cache_key = (url, tuple(sorted(options.items())))
        if cache_key not in _open_storages:
            # By URL: a directory may have any name.
            _open_storages[cache_key] = open_storage(locate(url if "://" in url else f"file:{url}"))
        return cls(_open_storages[cache_key], url, run_id)

    @classmethod
    def open_with(cls, access: SpoolAccess, run_id: str) -> Spool:
        keep_options(access.url, access.options or None)
        return cls.open(access.url, run_id)

    def path(self, name: str) -> str:
        return f"{self.run_id}/{name}"

    def put(self, name: str, *parts: Buffer, raws: bool = False) -> SpoolObject:
        """Write an object from these parts. It is durable when this returns."""
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
        return self._put(name, parts, digest.digest(), raws=raws)

    def put_block(self, name: str, keys: Buffer, rest: Buffer, rows: int) -> SpoolBlock:
        """Write a block: the key part, then the rest. Each byte is hashed once."""
        digest = hashlib.sha256(keys)
        keys_sha256 = digest.digest()
        digest.update(rest)
        at = self._put(name, (keys, rest), digest.digest())
        return SpoolBlock(rows, at, len(keys), keys_sha256)

    def _put(
        self, name: str, parts: Sequence[Buffer], sha256: bytes, *, raws: bool = False
    ) -> SpoolObject:
        tag = self.storage.put(self.path(name), *parts)
        return SpoolObject(name, sum(map(len, parts)), sha256, tag, raws)

    def get(self, at: SpoolObject) -> bytes:
        """Read an object and verify it; or raise ObjectLost."""
        return self._checked(at, 0, None, at.size, at.sha256)

    def get_keys(self, block: SpoolBlock) -> bytes:
        """Read the key part of a block and verify it; or raise ObjectLost."""
        return self._checked(block.at, 0, block.keys_size, block.keys_size, block.keys_sha256)

    def _checked(self, at: SpoolObject, lo: int, hi: int | None, size: int, sha256: bytes) -> bytes:
        if failpoints.armed:
            failpoints.hit("spool.read", at)
        data = self.storage.get(self.path(at.name), lo, hi)
        if data is None:
            raise ObjectLost("missing")
        if len(data) != size:
            raise ObjectLost(f"it has {len(data):,} bytes instead of {size:,}")
        if hashlib.sha256(data).digest() != sha256:
            raise ObjectLost("its bytes differ")
        return data


def lost_error(spool: Spool, what: str, ranges: Iterable[Range], name: str, why: str) -> SpoolLost:
    """Build the error for one lost object, with its rows."""
    return lost_objects_error(spool, [(what, one, name, why) for one in ranges])


def lost_objects_error(
    spool: Spool, lost_objects: Sequence[tuple[str, Range, str, str]]
) -> SpoolLost:
    """Build the error for lost objects, each as (kind, rows, name, reason)."""
    seqs = join_ranges([rows for _, rows, _, _ in lost_objects])
    _, _, name, why = lost_objects[0]
    return SpoolLost(
        run_id=spool.run_id,
        spool=spool.url,
        what=" and ".join(sorted({what for what, *_ in lost_objects})),
        objects=len({name for _, _, name, _ in lost_objects}),
        seqs=[list(one) for one in seqs[:LOST_RANGES_SHOWN]],
        more=max(len(seqs) - LOST_RANGES_SHOWN, 0),
        name=name,
        why=why,
    )


def join_ranges(ranges: Iterable[Range]) -> list[Range]:
    """Sort ranges and join adjacent ones."""
    merged: list[Range] = []
    for lo, hi in sorted(ranges):
        if merged and lo <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], hi))
        else:
            merged.append((lo, hi))
    return merged


# --- names --------------------------------------------------------------------------------------


def writer_id() -> str:
    """Return a unique writer id, so that no two writers use the same object name."""
    return SYSTEM.entropy(6).hex()


def block_name(task: int, attempt: int, n: int, writer: str) -> str:
    return f"i/{task}-{attempt}-{n}-{writer}"


def chunk_name(epoch: int, n: int, writer: str) -> str:
    """Name the object of a report by its grant. Objects are spread over subdirectories."""
    return f"o/{epoch % 256:02x}/{epoch:x}-{n:x}-{writer}"


def check_stored(at: SpoolObject, kind: str) -> None:
    """Refuse a name outside the run's prefix, and an entry without length or hash."""
    parts = at.name.split("/")
    plain = all(part and part not in (".", "..") and part.isprintable() for part in parts)
    if parts[0] != kind or not plain or len(at.name.encode()) > NAME_BYTES_MAX:
        raise Invalid(
            what="spool object", why="not the name of an object of this run", found=at.name
        )
    if at.size <= 0 or len(at.sha256) != hashlib.sha256().digest_size:
        raise Invalid(what="spool object", why="its length or its hash is missing", found=at.name)


# --- blocks of the input ------------------------------------------------------------------------


def write_block(
    spool: Spool, name: str, batch: pa.RecordBatch, key: Sequence[str], bytes_max: int = 1 << 62
) -> SpoolBlock:
    """Store a batch. Raise `ValueTooLarge` above `bytes_max`."""
    first = {*key, *HASH_COLUMNS}
    names = batch.schema.names
    keys = block_merge.encode_block_view(batch.select([one for one in names if one in first]))
    rest = [one for one in names if one not in first]
    others = block_merge.encode_block_view(batch.select(rest)) if rest else memoryview(b"")
    if len(keys) + len(others) > bytes_max:
        # Blocks are cut at rows, so this is a single row.
        raise ValueTooLarge(what="input row", bytes=len(keys) + len(others), max=bytes_max)
    return spool.put_block(name, keys, others, batch.num_rows)


def read_block(spool: Spool, block: SpoolBlock, *, keys_only: bool = False) -> pa.Table:
    """Read the columns of a block, key columns first; or raise ObjectLost."""
    if keys_only:
        return decode_table(spool.get_keys(block))
    data = memoryview(spool.get(block.at))
    table = decode_table(data[: block.keys_size])
    if len(data) > block.keys_size:
        rest = decode_table(data[block.keys_size :])
        for field, column in zip(rest.schema, rest.columns, strict=True):
            table = table.append_column(field, column)
    return table


class BlockCache:
    """An LRU cache of blocks by number."""

    def __init__(self, blocks_max: int) -> None:
        self._max = blocks_max
        self._blocks: OrderedDict[tuple[object, bool], pa.Table] = OrderedDict()

    def get(self, n: object, keys_only: bool, read: Callable[[], pa.Table]) -> pa.Table:
        for known in ((n, False), (n, keys_only)):
            if known in self._blocks:
                self._blocks.move_to_end(known)
                return self._blocks[known]
        table = self._blocks[n, keys_only] = read()
        if len(self._blocks) > self._max:
            self._blocks.popitem(last=False)
        return table


# --- outcomes -----------------------------------------------------------------------------------


def encode_chunk(seqs: bytes, batch: bytes | memoryview, raws: Mapping[int, str]) -> bytes:
    """Encode the object of a report: result offsets, results, and raw texts of results that did not
    fit.
    """
    raw_data = codec.pack(sorted(raws.items())) if raws else b""
    return b"".join([_CHUNK.pack(len(seqs), len(batch)), seqs, batch, raw_data])


def read_chunk(spool: Spool, chunk: OutcomeChunk) -> OutcomeChunk:
    """Load a chunk's data from its object; or raise SpoolLost."""
    if chunk.at is None:
        return chunk
    try:
        data = memoryview(spool.get(chunk.at))
    except ObjectLost as why:
        raise lost_error(spool, "outcomes", [chunk_range(chunk)], chunk.at.name, str(why)) from None
    offsets_size, size = _CHUNK.unpack_from(data)
    at = _CHUNK.size + offsets_size
    seqs, batch, raw_data = bytes(data[_CHUNK.size : at]), data[at : at + size], data[at + size :]
    raws: dict[int, str] = dict(codec.unpack(bytes(raw_data))) if raw_data else {}
    others = [
        msgspec.structs.replace(one, raw=raws[one.seq]) if one.seq in raws else one
        for one in chunk.resultless
    ]
    # Arrow reads from a view of the object.
    results: Any = batch
    return msgspec.structs.replace(chunk, seqs=seqs, batch=results, resultless=others)


def resultless_with_raws(spool: Spool | None, chunk: OutcomeChunk) -> Sequence[ResultlessRow]:
    """Return the rows without a result, including the raw texts of schema failures."""
    if spool is None or chunk.at is None or not chunk.at.raws:
        return chunk.resultless
    return read_chunk(spool, chunk).resultless


def move_raws_to_spool(spool: Spool, chunk: OutcomeChunk, name: str) -> OutcomeChunk:
    """Move the raw texts of a chunk into an object, for records copied from another run."""
    raws = {one.seq: one.raw for one in chunk.resultless if one.raw}
    if not raws:
        return chunk
    at = spool.put(name, encode_chunk(b"", b"", raws), raws=True)
    others = [msgspec.structs.replace(one, raw="") for one in chunk.resultless]
    return msgspec.structs.replace(chunk, resultless=others, at=at)


def chunk_range(chunk: OutcomeChunk) -> Range:
    """Return the row range of a chunk with an object: from its first to its last row."""
    seqs = [seq for one in chunk.resultless for seq in (one.seq, one.seq + 1)]
    if chunk.hi > chunk.lo:
        seqs += [chunk.lo, chunk.hi]
    return (min(seqs), max(seqs)) if seqs else (0, 0)


def open_spool(record: runs.RunRecord) -> Spool | None:
    return Spool.open(record.spool, record.run_id) if record.spool else None


def check_usable(record: runs.RunRecord) -> None:
    """Write, read and delete an object before any row is read or called."""
    with marker_object(record):
        pass


@contextlib.contextmanager
def marker_object(record: runs.RunRecord) -> Iterator[bytes]:
    """Keep a marker object in the run's spool for the duration of the context; executors look for
    it (`check_executor_access`).
    """
    spool = open_spool(record)
    if spool is None:
        yield b""
        return
    name = f"p/{writer_id()}"
    at = spool.put(name, b"probe")
    try:
        spool.get(at)
        yield codec.pack(at)
    finally:
        spool.storage.delete([spool.path(name)])


def check_executor_access(access: SpoolAccess, run_id: str, marker_data: bytes) -> None:
    """Check on an executor that the spool is the driver's and is writable."""
    spool = Spool.open_with(access, run_id)
    try:
        spool.get(codec.unpack_as(SpoolObject, marker_data))
    except ObjectLost:
        raise SpoolUnreachable(
            spool=access.url, why="it is not the driver's spool: an object is missing"
        ) from None
    name = f"p/{writer_id()}"
    spool.put(name, b"probe")
    spool.storage.delete([spool.path(name)])

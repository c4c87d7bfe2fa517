"""What the ledger service takes of a run with a spool: names of durable objects, and no data.

A row ends well only with an object that holds its result, reported with its length and hash.
"""

from __future__ import annotations

from msgspec.structs import replace

from holdfast import codec
from holdfast.errors import Invalid
from holdfast.ledger.runs import RunRecord, StoredBlock
from holdfast.ledger.states import State
from holdfast.spark import wire
from holdfast.spark.journal import Input
from holdfast.spark.rows import stream_of
from holdfast.spark.spool import check_stored


def block_value(record: RunRecord, data: memoryview, at: StoredBlock | None) -> tuple[int, bytes]:
    """The bytes of a block of the input, and what the store keeps of it."""
    if not record.spool and at is None:
        return len(data), bytes(data)
    if not record.spool or at is None or len(data):
        raise Invalid(what="block", why="a run with a spool takes names of objects, others none")
    check_stored(at.at, "i")
    if not 0 < at.keys_size <= at.at.size or at.rows <= 0:
        raise Invalid(what="block", why="its parts do not fit", found=at.at.name)
    return at.at.size, codec.pack(at)


def check_report(record: RunRecord, move: wire.Move) -> None:
    """Refuse results that are not in the spool; without one, names of objects."""
    if not record.spool:
        if move.at is not None:
            raise Invalid(what="report", why="the run has no spool", found=move.at.name)
        return
    if move.size or move.seqs or any(other.raw for other in move.others):
        raise Invalid(what="report", why="results of this run belong into its spool")
    good = [done for done in move.done if done.code == State.TERMINAL_SUCCESS]
    if move.at is not None:
        check_stored(move.at, "o")
    elif good:
        raise Invalid(what="report", why="results without the object that holds them")
    if good and not move.lo <= good[0].lo < good[-1].hi <= move.hi:
        raise Invalid(what="report", why="its rows are not those of its object")


def with_rows(granted: wire.Granted, source: Input) -> tuple[wire.Granted, bytes]:
    """The rows of a grant, for its frame; with a spool the blocks that hold them are named instead."""
    ranges = [(part.lo, part.hi) for part in granted.parts]
    if not source.is_spooled:
        return granted, stream_of(source.rows(ranges))
    blocks = [wire.BlockRef(*place) for place in source.places(ranges)]
    columns = source.schema.names
    return replace(granted, blocks=blocks, blocks_run=source.run_id, columns=columns), b""

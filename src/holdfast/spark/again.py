"""The failed rows of a finished run, as the input of another.

A retry of a whole run is a run of its own, over the rows that failed, linked by `retry_of`: what
was committed stays as it is. The name leads to the newest; `chain` gives it and its ancestors, and
what users see of a run is all of them together.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from msgspec.structs import replace

from holdfast.ledger import runs
from holdfast.spark import merge
from holdfast.spark.journal import Input, Outcomes
from holdfast.spark.match import HASHES
from holdfast.spark.rows import stream_of
from holdfast.store.api import Store

# In the configuration of a retry run whose rows end by a mapping of what was kept.
REMAP = "remap"


def chain(store: Store, record: runs.RunRecord) -> list[runs.RunRecord]:
    """The run and those it is a retry of, newest first."""
    found = [record]
    while found[-1].retry_of and len(found) < runs.CHAIN_MAX:
        older = store.read(runs.get, found[-1].retry_of)
        if older is None:
            break
        found.append(older)
    return found


def failed_blocks(store: Store, record: runs.RunRecord) -> Iterator[tuple[bytes, int]]:
    """Input blocks (an Arrow stream, rows) of the rows that failed, in order."""
    source = Input(store, record)
    outcomes = Outcomes(store, record, Input(store, record))
    page_rows = record.policy.page_rows
    columns = [*source.schema.names, *(HASHES if record.match_digest else ())]
    for lo in range(0, record.size, page_rows):
        seqs = outcomes.failed(lo, min(lo + page_rows, record.size)).column("_seq").to_pylist()
        if not seqs:
            continue
        table = source.rows([(seq, seq + 1) for seq in seqs], columns).combine_chunks()
        for batch in table.to_batches():
            for piece in merge.cut(batch, merge.BLOCK_ROWS, merge.BLOCK_BYTES):
                yield stream_of(pa.Table.from_batches([piece])), piece.num_rows


def retry_of(store: Store, old: runs.RunRecord, new: runs.RunRecord) -> runs.RunRecord:
    """A new run as the retry of an old one: the same settings, its rows beside the old one's."""
    older = chain(store, old)
    return replace(
        new,
        config={what: told for what, told in old.config.items() if what != REMAP},
        sink=sink_of(older[-1], len(older)),
        retry_of=old.run_id,
    )


def remap_of(
    store: Store, old: runs.RunRecord, new: runs.RunRecord, *, follows: bool
) -> runs.RunRecord:
    """A new run as the remap of an old one. Where the output follows (`follows`), it is a run over
    the same input that takes over what ended well, so its rows join those of the old one."""
    if not follows:
        made = retry_of(store, old, new)
    else:
        config = {**new.config, "output": old.config.get("output", "")}
        made = replace(
            new, config=config, sink=old.sink, base_run=old.run_id, input_run=old.blocks_run
        )
    # One try each, row by row: nothing that was kept changes from one to the next.
    policy = replace(made.policy, attempts_max=1, batch_rows=0)
    return replace(made, policy=policy, config={**made.config, REMAP: "1"})


def sink_of(record: runs.RunRecord, number: int) -> dict[str, str | int | bool]:
    """Where a retry puts its rows: beside what is committed, or into the same table."""
    spec = dict(record.sink)
    if spec.get("kind") == "parquet":
        spec["path"] = f"{spec['path']}/_holdfast/retry-{number}"
    elif spec.get("kind") == "delta":
        spec["append"] = True
    return spec

"""Retry runs: a run over the failed rows of a finished run.

A retry run is a separate run, linked by `retry_of`. Committed output of the older run stays
unchanged. The name points to the newest run. `retry_chain` returns it with its predecessors, and
users see all of them as one run.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from msgspec.structs import replace

from holdfast.ledger import runs
from holdfast.spark import block_merge
from holdfast.spark.arrow_rows import encode_stream
from holdfast.spark.row_match import HASH_COLUMNS
from holdfast.spark.run_data import RunInput, RunOutcomes
from holdfast.store.api import Store

# Set in the configuration of a run that maps stored values instead of calling the function.
REMAP_KEY = "remap"


def retry_chain(store: Store, record: runs.RunRecord) -> list[runs.RunRecord]:
    """Return the run and the runs that it retries, newest first."""
    records = [record]
    while records[-1].retry_of and len(records) < runs.RETRY_CHAIN_MAX:
        older = store.read(runs.get_record, records[-1].retry_of)
        if older is None:
            break
        records.append(older)
    return records


def failed_blocks(store: Store, record: runs.RunRecord) -> Iterator[tuple[bytes, int]]:
    """Yield input blocks (an Arrow stream, rows) of the failed rows, in order."""
    source = RunInput(store, record)
    outcomes = RunOutcomes(store, record, RunInput(store, record))
    page_rows = record.policy.page_rows
    columns = [*source.schema.names, *(HASH_COLUMNS if record.match_digest else ())]
    for lo in range(0, record.size, page_rows):
        seqs = outcomes.failed(lo, min(lo + page_rows, record.size)).column("_seq").to_pylist()
        if not seqs:
            continue
        table = source.rows([(seq, seq + 1) for seq in seqs], columns).combine_chunks()
        for batch in table.to_batches():
            for piece in block_merge.split_batch(
                batch, block_merge.BLOCK_ROWS, block_merge.BLOCK_BYTES
            ):
                yield encode_stream(pa.Table.from_batches([piece])), piece.num_rows


def make_retry_record(store: Store, old: runs.RunRecord, new: runs.RunRecord) -> runs.RunRecord:
    """Build the record of a retry run: the same settings, its output beside that of the old run."""
    older = retry_chain(store, old)
    return replace(
        new,
        config={what: value for what, value in old.config.items() if what != REMAP_KEY},
        sink=retry_sink_spec(older[-1], len(older)),
        retry_of=old.run_id,
    )


def make_remap_record(
    store: Store, old: runs.RunRecord, new: runs.RunRecord, *, follows: bool
) -> runs.RunRecord:
    """Build the record of a remap run. If the sink supports a successor run (`follows`), it is a
    run over the same input that adopts the successful outcomes, so that the output holds all rows.
    """
    if not follows:
        record = make_retry_record(store, old, new)
    else:
        config = {**new.config, "output": old.config.get("output", "")}
        record = replace(
            new, config=config, sink=old.sink, base_run=old.run_id, input_run=old.blocks_run
        )
    # One try per row: a stored value does not change between tries.
    policy = replace(record.policy, attempts_max=1, batch_rows=0)
    return replace(record, policy=policy, config={**record.config, REMAP_KEY: "1"})


def retry_sink_spec(record: runs.RunRecord, number: int) -> dict[str, str | int | bool]:
    """Return the sink spec of a retry: a directory beside the committed output, or the same table."""
    spec = dict(record.sink)
    if spec.get("kind") == "parquet":
        spec["path"] = f"{spec['path']}/_holdfast/retry-{number}"
    elif spec.get("kind") == "delta":
        spec["append"] = True
    return spec

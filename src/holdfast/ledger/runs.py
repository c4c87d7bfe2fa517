"""Runs: stored records of stage executions, with their progress, input blocks and outcome chunks.

The functions take a transaction. The run's log (`log`) has the subject `run/<run>`. A writer must
hold the lease on `run/<name>`, so one run per name is active at a time.

- A name points to its latest run. Run ids are never reused, because external idempotency keys
  contain them.
- The status of a run changes only by its transition table.
- An outcome chunk is keyed by its page and the height of its log entry. A scan of a page returns
  its chunks in decision order.
- A chunk above `CHUNK_PART_BYTES` is stored in parts, because one result may exceed the store's
  value limit.
- `delete_rows` works in bounded steps and removes the record last, so a half-deleted run can still
  be found by name.
- A run that other runs depend on is pinned and is not deleted while one of them exists.
- The blocks and results of a run with a spool are objects there (`spark/spool`). The rows here
  reference them by `SpoolObject`, so their size does not depend on the results.

This module needs neither NumPy nor Arrow: blocks and batches are bytes.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from msgspec import field
from msgspec.structs import replace

from holdfast import codec
from holdfast.codec import Record
from holdfast.config import SCAN_PAGE
from holdfast.durable.journal import EntryRow
from holdfast.durable.snapshot import SnapshotRow
from holdfast.durable.validation import check_limit, check_name
from holdfast.errors import Held, Invalid, NotFound, StoreCorrupt
from holdfast.ledger.error_groups import ErrorGroup
from holdfast.ledger.events import RowRange
from holdfast.ledger.run_policy import RunPolicy
from holdfast.store import blobs, schema, tuples
from holdfast.store.api import Row, Txn, operation
from holdfast.transitions import Transitions

CHUNK_PART_BYTES = 8 * 1024 * 1024


class RunLifecycle(Enum):
    INGESTING = "ingesting"
    OPEN = "open"
    CANCELLING = "cancelling"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    HALTED = "halted"
    SUPERSEDED = "superseded"


class RunEvent(Enum):
    SEAL = "seal"
    CANCEL = "cancel"
    FINISH = "finish"
    HALT = "halt"
    SUPERSEDE = "supersede"


RUN = Transitions(
    "run",
    RunLifecycle.INGESTING,
    {
        (RunLifecycle.INGESTING, RunEvent.SEAL): RunLifecycle.OPEN,
        (RunLifecycle.INGESTING, RunEvent.CANCEL): RunLifecycle.CANCELLED,
        (RunLifecycle.INGESTING, RunEvent.HALT): RunLifecycle.HALTED,
        (RunLifecycle.OPEN, RunEvent.CANCEL): RunLifecycle.CANCELLING,
        (RunLifecycle.OPEN, RunEvent.FINISH): RunLifecycle.FINISHED,
        (RunLifecycle.OPEN, RunEvent.HALT): RunLifecycle.HALTED,
        (RunLifecycle.CANCELLING, RunEvent.FINISH): RunLifecycle.CANCELLED,
        (RunLifecycle.CANCELLING, RunEvent.HALT): RunLifecycle.HALTED,
        # A run over a changed input adopts the outcomes of this one.
        (RunLifecycle.OPEN, RunEvent.SUPERSEDE): RunLifecycle.SUPERSEDED,
        (RunLifecycle.CANCELLING, RunEvent.SUPERSEDE): RunLifecycle.SUPERSEDED,
    },
)

# Maximum length of a chain of retry runs.
RETRY_CHAIN_MAX = 1000

UNFINISHED = frozenset({RunLifecycle.INGESTING, RunLifecycle.OPEN, RunLifecycle.CANCELLING})


class RunAtWork(Held):
    code = "run_at_work"
    hint = "another driver runs this stage; wait for it or stop that process"


class RunPinned(Invalid):
    code = "run_pinned"
    hint = "a newer run uses outcomes of this one; delete the newer run first or keep both"


class RunRecord(Record, frozen=True):
    run_id: str
    name: str
    status: RunLifecycle = RunLifecycle.INGESTING
    created_ns: int = 0
    finished_ns: int = 0
    generation: int = 0
    size: int = 0
    key: list[str] = field(default_factory=list)
    # Serialised Arrow schemas.
    input_schema: bytes = b""
    result_schema: bytes = b""
    # (n, rows) of the input blocks in seq order.
    blocks: list[tuple[int, int]] = field(default_factory=list)
    # Settings that must be equal when the run is resumed.
    config: dict[str, str] = field(default_factory=dict)
    # A cheap fingerprint of the input's plan, and the hash of its content.
    plan: str = ""
    input_hash: str = ""
    sink: dict[str, str | int | bool] = field(default_factory=dict)
    policy: RunPolicy = RunPolicy()
    halted: str = ""
    retry_of: str = ""
    cancel_requested_ns: int = 0
    retry_requested_ns: int = 0
    # The run whose outcomes this one adopts, and the run that holds its input blocks if not this
    # one.
    base_run: str = ""
    input_run: str = ""
    # The columns that identify equal content, and the digest of their names and types.
    match: list[str] = field(default_factory=list)
    match_digest: str = ""
    # Whether rows that failed in earlier runs are called again.
    retry_failed: bool = True
    # A deletion of the run has begun.
    deleting: bool = False
    # The description of the stop rule reached. The run is open and grants no rows.
    stopped: str = ""
    # The URL of the spool that holds its blocks and results, without credentials. Empty: the store
    # holds them.
    spool: str = ""
    # The input was deleted. The outcomes stay for the runs that depend on them.
    input_dropped: bool = False

    @property
    def blocks_run(self) -> str:
        """The run whose key prefix holds the input blocks."""
        return self.input_run or self.run_id


class RunProgress(Record, frozen=True):
    """Published figures of a run. Derived data: losing the last update loses nothing."""

    updated_ns: int = 0
    started_ns: int = 0
    # Row counts by state code, 0 to 7.
    counts: list[int] = field(default_factory=list)
    calls: int = 0
    reused: int = 0
    retries: int = 0
    reclaims: int = 0
    fenced: int = 0
    cost: float = 0.0
    tasks: int = 0
    # (t_ms, done, failed, skipped, in flight, cost). t_ms is driver time, as `time_ns`.
    series: list[tuple[int, int, int, int, int, float]] = field(default_factory=list)
    # Histogram: calls that took [2^i, 2^(i+1)) microseconds.
    latency_log2_us: list[int] = field(default_factory=list)
    # By class and normalised text, most frequent first.
    errors: list[ErrorGroup] = field(default_factory=list)
    # Rows succeeded, skipped, failed, cancelled; committed or not.
    ended: list[int] = field(default_factory=list)
    # Failed rows by error class, 0 to 7. They add up to `ended[2]`.
    failed_by_class: list[int] = field(default_factory=list)
    # Driver time, without the gaps between drivers: in total, before the first call, and from the
    # first call to the last finished row; then the rows finished in that last interval. 0 in older
    # records.
    time_ns: int = 0
    setup_ns: int = 0
    calls_ns: int = 0
    calls_rows: int = 0
    # The log height of `counts` and `ended`; -1 if unknown.
    height: int = -1
    # Tokens that calls reported, and the remaining token budget (negative: overdrawn).
    tokens: int = 0
    tokens_left: float = 0.0


class ResultlessRow(Record, frozen=True):
    """A row that ended without a result: skipped, finally failed, or cancelled."""

    seq: int
    state: int
    attempts: int
    error_class: int
    error: str
    # The text of a result that did not match the schema.
    raw: str = ""


class SpoolObject(Record, frozen=True):
    """An object in a run's spool: its name below the run's prefix and its identity."""

    name: str
    size: int
    sha256: bytes
    # The version tag at write time. A reader hashes an object with another tag before it trusts it.
    tag: bytes
    # For outcomes: the object contains texts of results that did not match the schema.
    raws: bool = False


class SpoolBlock(Record, frozen=True):
    """An input block in the spool: key columns and hashes first, then the other columns."""

    rows: int
    at: SpoolObject
    keys_size: int
    keys_sha256: bytes


class DeletedRunSpool(Record, frozen=True):
    """A deleted run whose spool may still receive objects of late writers."""

    run_id: str
    spool: str
    deleted_ns: int


class OutcomeChunk(Record, frozen=True):
    """Outcomes of one page that were reported together.

    `seqs` are little-endian u32 offsets from `lo`, ascending, one for each row of `batch`. They are
    empty if the rows are consecutive.
    """

    lo: int
    seqs: bytes
    # One Arrow IPC message with a batch of the run's result schema, in seq order.
    batch: bytes
    resultless: list[ResultlessRow]
    # Successes that took more than one attempt.
    attempts: list[RowRange]
    cost: float
    calls: int
    spent_us_log2: list[int]
    # Above 0: the chunk is stored in this many rows (`part_key`), and this row holds nothing else.
    parts: int = 0
    # The spool object with the seqs and the batch, which are empty here. Its results are of [lo,
    # hi).
    at: SpoolObject | None = None
    hi: int = 0


# -- names and records ---------------------------------------------------------------------------


def subject_of(run_id: str) -> str:
    """The subject of a run's log."""
    check_name("run", run_id)
    return f"run/{run_id}"


def lease_resource(name: str) -> str:
    check_name("name", name)
    return f"run/{name}"


def topic_of(run_id: str) -> str:
    """The topic notified when a cancel or retry of the run is requested."""
    return f"run/{run_id}"


def create(txn: Txn, record: RunRecord) -> None:
    """Store a new run and point its name to it."""
    check_name("run", record.run_id)
    check_name("name", record.name)
    if get_record(txn, record.run_id) is not None:
        raise Invalid(what="run", why="a run with this id exists already", found=record.run_id)
    txn.put(_key("n", record.name), record.run_id.encode())
    put_record(txn, record)


def set_latest(txn: Txn, name: str, run_id: str) -> None:
    """Point a name to another of its runs."""
    get_existing(txn, run_id)
    txn.put(_key("n", name), run_id.encode())


def put_record(txn: Txn, record: RunRecord) -> None:
    """Write the record unchanged. Use `change_status` to change its status."""
    txn.put(*record_row(record))


def record_row(record: RunRecord) -> Row:
    return _key("r", record.run_id), codec.pack(record)


def get_record(txn: Txn, run_id: str) -> RunRecord | None:
    row = txn.get(_key("r", run_id))
    return None if row is None else codec.unpack_as(RunRecord, row)


def get_existing(txn: Txn, run_id: str) -> RunRecord:
    """Return the run's record or raise NotFound."""
    record = get_record(txn, run_id)
    if record is None:
        raise NotFound(what="run", found=run_id)
    return record


def get_latest(txn: Txn, name: str) -> RunRecord | None:
    """Return the latest run of a name."""
    row = txn.get(_key("n", name))
    return None if row is None else get_record(txn, row.decode())


def list_names(txn: Txn, after: str = "", limit: int = 100) -> list[tuple[str, str]]:
    """Return (name, latest run id), ordered by name."""
    check_limit(limit)
    prefix = _key("n")
    lo = tuples.prefix_end(_key("n", after)) if after else prefix
    rows = txn.scan(lo, tuples.prefix_end(prefix), limit)
    return [(str(tuples.unpack(key[len(prefix) :])[0]), row.decode()) for key, row in rows]


def list_runs(txn: Txn, after: str = "", limit: int = 100) -> list[RunRecord]:
    """Return all runs, ordered by id."""
    check_limit(limit)
    prefix = _key("r")
    lo = tuples.prefix_end(_key("r", after)) if after else prefix
    rows = txn.scan(lo, tuples.prefix_end(prefix), limit)
    return [codec.unpack_as(RunRecord, row) for _, row in rows]


def list_runs_of(txn: Txn, name: str) -> list[RunRecord]:
    """Return all stored runs of a name, newest first."""
    records: list[RunRecord] = []
    after = ""
    while page := list_runs(txn, after):
        records += [record for record in page if record.name == name]
        after = page[-1].run_id
    return sorted(records, key=lambda record: (record.created_ns, record.run_id), reverse=True)


def change_status(txn: Txn, run_id: str, event: RunEvent, **changes: Any) -> RunRecord:
    """Change a run's status by its transition table. A final status gets a timestamp."""
    before = get_existing(txn, run_id)
    status = RUN.next(before.status, event, run=run_id)
    if status not in UNFINISHED:
        changes.setdefault("finished_ns", txn.now_ns)
    after = replace(before, status=status, **changes)
    put_record(txn, after)
    txn.notify(topic_of(run_id))
    return after


# Set in the configuration of a run when its driver has written the output.
WRITTEN_KEY = "written"


@operation("runs.mark_written")
def mark_written(txn: Txn, run_id: str) -> RunRecord:
    """Record that the driver has completely written the output of a finished run."""
    before = get_existing(txn, run_id)
    record = replace(before, config={**before.config, WRITTEN_KEY: "1"})
    put_record(txn, record)
    return record


@operation("runs.request_cancel")
def request_cancel(txn: Txn, run_id: str) -> RunRecord:
    """Request cancellation from the driver of the run. Idempotent."""
    record = get_existing(txn, run_id)
    if record.status not in UNFINISHED:
        raise Invalid(what="run", why="the run has ended", run=run_id, status=record.status.value)
    if record.cancel_requested_ns:
        return record
    return _put_and_notify(txn, replace(record, cancel_requested_ns=txn.now_ns))


@operation("runs.request_retry")
def request_retry(txn: Txn, run_id: str) -> RunRecord:
    """Request that the next run of this name retries the failed rows. A run stopped by its rules
    continues first and retries them afterwards.
    """
    record = get_existing(txn, run_id)
    if record.status is not RunLifecycle.FINISHED and not (
        record.status is RunLifecycle.OPEN and record.stopped
    ):
        why = (
            "it is not finished"
            if record.status in UNFINISHED
            else "only a finished run is retried"
        )
        raise Invalid(what="run", why=why, run=run_id, status=record.status.value)
    return _put_and_notify(txn, replace(record, retry_requested_ns=txn.now_ns))


def get_progress(txn: Txn, run_id: str) -> RunProgress | None:
    row = txn.get(_key("c", run_id))
    return None if row is None else codec.unpack_as(RunProgress, row)


def progress_of_retried_runs(txn: Txn, record: RunRecord) -> list[RunProgress]:
    """Return the progress of the runs that this run retries, newest first."""
    retried: list[RunProgress] = []
    while record.retry_of and len(retried) < RETRY_CHAIN_MAX:
        retried.append(get_progress(txn, record.retry_of) or RunProgress())
        older = get_record(txn, record.retry_of)
        if older is None:
            break
        record = older
    return retried


def put_progress(txn: Txn, run_id: str, progress: RunProgress) -> None:
    txn.put(_key("c", run_id), codec.pack(progress))


# -- input blocks, outcome chunks ----------------------------------------------------------------


def block_key(run_id: str, n: int) -> bytes:
    return _key("i", run_id) + tuples.pack_int(n)


def get_block(txn: Txn, run_id: str, n: int) -> bytes | None:
    return txn.get(block_key(run_id, n))


def next_block(txn: Txn, run_id: str) -> int:
    """Return the number after the last stored block."""
    prefix = _key("i", run_id)
    last_row = txn.scan(prefix, tuples.prefix_end(prefix), 1, reverse=True)
    return tuples.unpack_last_int(last_row[0][0], len(prefix)) + 1 if last_row else 0


def get_spool_block(txn: Txn, run_id: str, n: int) -> SpoolBlock | None:
    """Return the spool location of a block."""
    row = txn.get(block_key(run_id, n))
    return None if row is None else codec.unpack_as(SpoolBlock, row)


def list_spool_blocks(
    txn: Txn, run_id: str, after: int = -1, limit: int = SCAN_PAGE
) -> list[tuple[int, SpoolBlock]]:
    """Return (number, location) of the spooled blocks, by number."""
    prefix = _key("i", run_id)
    rows = txn.scan(prefix + tuples.pack_int(after + 1), tuples.prefix_end(prefix), limit)
    return [
        (tuples.unpack_last_int(key, len(prefix)), codec.unpack_as(SpoolBlock, row))
        for key, row in rows
    ]


def chunk_key(run_id: str, page: int, height: int) -> bytes:
    return _key("o", run_id, page) + tuples.pack_int(height)


def part_key(run_id: str, page: int, height: int, n: int) -> bytes:
    return _key("d", run_id, page) + tuples.pack_int(height) + tuples.pack_int(n)


def chunk_rows(run_id: str, page: int, height: int, chunk: OutcomeChunk) -> list[Row]:
    """Return the store rows of a chunk: one row, or its parts and a row with their number."""
    data = codec.pack(chunk)
    key = chunk_key(run_id, page, height)
    if len(data) <= CHUNK_PART_BYTES:
        return [(key, data)]
    cuts = range(0, len(data), CHUNK_PART_BYTES)
    rows = [
        (part_key(run_id, page, height, n), data[at : at + CHUNK_PART_BYTES])
        for n, at in enumerate(cuts)
    ]
    return [
        *rows,
        (
            key,
            codec.pack(
                OutcomeChunk(
                    lo=0,
                    seqs=b"",
                    batch=b"",
                    resultless=[],
                    attempts=[],
                    cost=0.0,
                    calls=0,
                    spent_us_log2=[],
                    parts=len(rows),
                )
            ),
        ),
    ]


def list_chunks(
    txn: Txn, run_id: str, page: int, after_height: int = -1, limit: int | None = None
) -> list[tuple[int, OutcomeChunk]]:
    """Return (height, chunk) of a page in decision order; all of them without a limit."""
    prefix = _key("o", run_id, page)
    lo = prefix + tuples.pack_int(after_height + 1)
    listed: list[tuple[int, OutcomeChunk]] = []
    for key, row in txn.scan(lo, tuples.prefix_end(prefix), limit):
        height = tuples.unpack_last_int(key, len(prefix))
        chunk = codec.unpack_as(OutcomeChunk, row)
        listed.append(
            (height, _join_parts(txn, run_id, page, height, chunk) if chunk.parts else chunk)
        )
    return listed


def get_chunk(txn: Txn, run_id: str, page: int, height: int) -> OutcomeChunk | None:
    """Return one chunk with its parts joined."""
    row = txn.get(chunk_key(run_id, page, height))
    if row is None:
        return None
    found = codec.unpack_as(OutcomeChunk, row)
    return _join_parts(txn, run_id, page, height, found) if found.parts else found


# -- dependencies between runs --------------------------------------------------------------------


def pin(txn: Txn, run_id: str, by: str) -> bool:
    """Keep a run while run `by` exists. Returns False if the run is deleted or being deleted."""
    record = get_record(txn, run_id)
    if record is None or record.deleting:
        return False
    txn.put(_key("p", run_id, by), b"")
    txn.put(_key("q", by, run_id), b"")
    return True


def unpin(txn: Txn, run_id: str, by: str) -> None:
    txn.delete(_key("p", run_id, by))
    txn.delete(_key("q", by, run_id))


def list_pinning_runs(txn: Txn, run_id: str, limit: int = 100) -> list[str]:
    """Return the runs that depend on this one."""
    return _list_ids(txn, _key("p", run_id), limit)


def list_pinned_runs(txn: Txn, run_id: str, limit: int = 100) -> list[str]:
    """Return the runs that this one depends on."""
    return _list_ids(txn, _key("q", run_id), limit)


def lineage_key(run_id: str, page: int) -> bytes:
    return _key("a", run_id) + tuples.pack_int(page)


def match_key(run_id: str, n: int) -> bytes:
    """The key of the row hashes of a block that were computed after the run."""
    return _key("m", run_id) + tuples.pack_int(n)


def mark_deleting(txn: Txn, run_id: str, *, resumable: bool = False) -> RunRecord | None:
    """Mark a run as being deleted, so that no driver resumes it. Returns None if the run does not
    exist.

    `resumable` also allows an unfinished run. The caller holds the lease of the name.
    """
    record = get_record(txn, run_id)
    if record is None:
        return None
    if record.status in UNFINISHED and not resumable:
        raise Invalid(what="run", why="it is not finished", run=run_id, status=record.status.value)
    if pins := list_pinning_runs(txn, run_id, 1):
        raise RunPinned(what="run", run=run_id, by=pins[0])
    if not record.deleting:
        record = replace(record, deleting=True)
        put_record(txn, record)
    return record


def delete_input(txn: Txn, run_id: str, limit: int) -> int:
    """Delete up to `limit` rows of the input of a finished run and return their number. The
    outcomes stay, and later runs do not compare their input with this one. The caller holds the
    lease of the name.
    """
    check_limit(limit)
    record = get_record(txn, run_id)
    if record is None:
        return 0
    if not record.input_dropped:
        put_record(txn, replace(record, input_dropped=True, blocks=[]))
    removed = 0
    for prefix in (_key("i", run_id), _key("m", run_id)):
        rows = (
            txn.scan(prefix, tuples.prefix_end(prefix), limit - removed) if limit > removed else []
        )
        for key, _ in rows:
            txn.delete(key)
        removed += len(rows)
    return removed


def put_deleted_spool(txn: Txn, record: RunRecord) -> None:
    """Record the spool of a deleted run, so that objects of late writers are deleted later."""
    deleted = DeletedRunSpool(record.run_id, record.spool, txn.now_ns)
    txn.put(_key("g", record.run_id), codec.pack(deleted))


def remove_deleted_spool(txn: Txn, run_id: str) -> None:
    txn.delete(_key("g", run_id))


def list_deleted_spools(txn: Txn, after: str = "", limit: int = 100) -> list[DeletedRunSpool]:
    check_limit(limit)
    prefix = _key("g")
    lo = tuples.prefix_end(_key("g", after)) if after else prefix
    rows = txn.scan(lo, tuples.prefix_end(prefix), limit)
    return [codec.unpack_as(DeletedRunSpool, row) for _, row in rows]


def delete_rows(txn: Txn, run_id: str, limit: int, *, resumable: bool = False) -> int:
    """Delete up to `limit` rows of a finished run and return their number. 0 means that nothing is
    left.

    `resumable` also allows an unfinished run. The caller holds the lease of the name.
    """
    check_limit(limit)
    record = mark_deleting(txn, run_id, resumable=resumable)
    if record is None:
        return 0
    subject = subject_of(run_id)
    removed = 0
    for prefix in (
        _key("o", run_id),
        _key("d", run_id),
        _key("i", run_id),
        _key("a", run_id),
        _key("m", run_id),
        schema.key_prefix(schema.Space.JOURNAL, subject),
        schema.key_prefix(schema.Space.SNAPSHOT, subject),
        _key("c", run_id),
    ):
        rows = (
            txn.scan(prefix, tuples.prefix_end(prefix), limit - removed) if limit > removed else []
        )
        for key, row in rows:
            _release_blobs(txn, (key, row), subject)
            txn.delete(key)
        removed += len(rows)
    if removed < limit:
        for other in list_pinned_runs(txn, run_id, SCAN_PAGE):
            unpin(txn, other, run_id)
        if record.spool:
            put_deleted_spool(txn, record)
        txn.delete(_key("r", run_id))
        if txn.get(_key("n", record.name)) == run_id.encode():
            txn.delete(_key("n", record.name))
        removed += 1
    return removed


# -- internals -----------------------------------------------------------------------------------


def _key(kind: str, *path: tuples.Element) -> bytes:
    return schema.key_prefix(schema.Space.RUN, kind, *path)


def _list_ids(txn: Txn, prefix: bytes, limit: int) -> list[str]:
    rows = txn.scan(prefix, tuples.prefix_end(prefix), limit)
    return [str(tuples.unpack(key[len(prefix) :])[0]) for key, _ in rows]


def _join_parts(txn: Txn, run_id: str, page: int, height: int, head: OutcomeChunk) -> OutcomeChunk:
    parts = [txn.get(part_key(run_id, page, height, n)) for n in range(head.parts)]
    if any(part is None for part in parts):
        raise StoreCorrupt(what="outcome part", run_id=run_id, page=page, height=height)
    return codec.unpack_as(OutcomeChunk, b"".join(part for part in parts if part is not None))


def _put_and_notify(txn: Txn, record: RunRecord) -> RunRecord:
    put_record(txn, record)
    txn.notify(topic_of(record.run_id))
    return record


def _release_blobs(txn: Txn, row: Row, subject: str) -> None:
    """Release the blobs that a log or checkpoint row references."""
    key, value = row
    if key.startswith(schema.key_prefix(schema.Space.JOURNAL, subject, "e")):
        if (kept := codec.unpack_as(EntryRow, value)).blob:
            blobs.release(txn, kept.blob)
    elif key.startswith(schema.key_prefix(schema.Space.SNAPSHOT, subject, "s")):
        for name in codec.unpack_as(SnapshotRow, value).blobs:
            blobs.release(txn, name)

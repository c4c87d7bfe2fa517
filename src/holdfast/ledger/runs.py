"""Runs: one execution of a stage, by name; its record, its progress, its input and its outcomes.

Functions over a transaction. The run's log is beside them (`log`), under the subject `run/<run>`;
who may write any of it holds the lease on `run/<name>`, so a name has one run at work at a time.

- A name leads to its latest run. A run id is unique for ever: keys that go outside are made of it.
- A run's status moves by its table, and only there.
- An outcome chunk lies under its page and the height of the log entry that took it, so reading a page
  gives its chunks in the order they were decided.
- A chunk above `PART_BYTES` is stored in parts: one result may be larger than a value of the store.
- `delete` goes in bounded steps, the record last: a run that is half deleted can still be named.
- A run that others rest on is pinned: it is not deleted while one of them is there.
- The blocks and results of a run with a spool are objects there (`spark/spool`). The rows here name them by
  `Stored`, and take no more room for large results than for small ones.

Nothing here needs NumPy or Arrow: blocks and batches are bytes.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

from msgspec import field
from msgspec.structs import replace

from holdfast import codec
from holdfast.codec import Record
from holdfast.config import SCAN_PAGE
from holdfast.durable.bounds import check_limit, check_name
from holdfast.durable.journal import Kept
from holdfast.durable.snapshot import Saved
from holdfast.errors import Held, Invalid, NotFound, StoreCorrupt
from holdfast.ledger.classes import Policy
from holdfast.ledger.error_groups import ErrorGroup
from holdfast.ledger.records import Part
from holdfast.store import blobs, schema, tuples
from holdfast.store.api import Row, Txn, operation
from holdfast.transitions import Transitions

PART_BYTES = 8 * 1024 * 1024


class Status(Enum):
    INGESTING = "ingesting"
    OPEN = "open"
    CANCELLING = "cancelling"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    HALTED = "halted"
    SUPERSEDED = "superseded"


class Event(Enum):
    SEAL = "seal"
    CANCEL = "cancel"
    FINISH = "finish"
    HALT = "halt"
    SUPERSEDE = "supersede"


RUN = Transitions(
    "run",
    Status.INGESTING,
    {
        (Status.INGESTING, Event.SEAL): Status.OPEN,
        (Status.INGESTING, Event.CANCEL): Status.CANCELLED,
        (Status.INGESTING, Event.HALT): Status.HALTED,
        (Status.OPEN, Event.CANCEL): Status.CANCELLING,
        (Status.OPEN, Event.FINISH): Status.FINISHED,
        (Status.OPEN, Event.HALT): Status.HALTED,
        (Status.CANCELLING, Event.FINISH): Status.CANCELLED,
        (Status.CANCELLING, Event.HALT): Status.HALTED,
        # A run over a grown input takes over what this one has.
        (Status.OPEN, Event.SUPERSEDE): Status.SUPERSEDED,
        (Status.CANCELLING, Event.SUPERSEDE): Status.SUPERSEDED,
    },
)

# Retries of retries that are followed.
CHAIN_MAX = 1000

GOING = frozenset({Status.INGESTING, Status.OPEN, Status.CANCELLING})


class RunAtWork(Held):
    code = "run_at_work"
    hint = "another driver is running this stage; wait for it, or end that process"


class RunPinned(Invalid):
    code = "run_pinned"
    hint = "rows of a newer run rest on this one: delete that run first, or keep both"


class RunRecord(Record, frozen=True):
    run_id: str
    name: str
    status: Status = Status.INGESTING
    created_ns: int = 0
    finished_ns: int = 0
    generation: int = 0
    size: int = 0
    key: list[str] = field(default_factory=list)
    # Serialised Arrow schemas.
    input_schema: bytes = b""
    result_schema: bytes = b""
    # (n, rows) of the input blocks, in the order of seqs.
    blocks: list[tuple[int, int]] = field(default_factory=list)
    # What must be the same when the run is resumed.
    config: dict[str, str] = field(default_factory=dict)
    # A cheap fingerprint of the input, and the hash of all of it.
    plan: str = ""
    input_hash: str = ""
    sink: dict[str, str | int | bool] = field(default_factory=dict)
    policy: Policy = Policy()
    halted: str = ""
    retry_of: str = ""
    cancel_requested_ns: int = 0
    retry_requested_ns: int = 0
    # The run whose rows this one takes over, and the one that holds its input blocks if not itself.
    base_run: str = ""
    input_run: str = ""
    # The columns that make a row the same, and the digest of their names and types.
    match: list[str] = field(default_factory=list)
    match_digest: str = ""
    # Whether rows that failed in the runs before are called again.
    retry_failed: bool = True
    # Its rows are being removed.
    deleting: bool = False
    # The stop rule that was reached, in words; the run is open and nothing is handed out.
    stopped: str = ""
    # The URL of the place that holds its blocks and results, without credentials. Empty: they are here.
    spool: str = ""
    # Its input was deleted. Its outcomes stay for the runs that rest on it.
    input_dropped: bool = False

    @property
    def blocks_run(self) -> str:
        """The run under which the input blocks lie."""
        return self.input_run or self.run_id


class Progress(Record, frozen=True):
    """How a run stands, for people. Derived: losing the last of it loses nothing."""

    updated_ns: int = 0
    started_ns: int = 0
    # By state, 0 to 7.
    counts: list[int] = field(default_factory=list)
    calls: int = 0
    reused: int = 0
    retries: int = 0
    reclaims: int = 0
    fenced: int = 0
    cost: float = 0.0
    tasks: int = 0
    # (t_ms, done, failed, skipped, in flight, cost); t_ms is time of the drivers, as `time_ns`
    series: list[tuple[int, int, int, int, int, float]] = field(default_factory=list)
    # Calls that took [2^i, 2^(i+1)) microseconds.
    latency_log2_us: list[int] = field(default_factory=list)
    # By class and normalised text, most frequent first.
    errors: list[ErrorGroup] = field(default_factory=list)
    # Succeeded, skipped, failed, cancelled; committed or not.
    ended: list[int] = field(default_factory=list)
    # Failed rows by error class, 0 to 7: they add up to `ended[2]`.
    failed_by_class: list[int] = field(default_factory=list)
    # Time of the drivers so far, without the gaps between them: in all, before their first calls, and
    # from the first call to the last end; and the rows that ended in the last. 0 in older records.
    time_ns: int = 0
    setup_ns: int = 0
    calls_ns: int = 0
    calls_rows: int = 0
    # The head of the run's log that `counts` and `ended` are of; -1: not known.
    height: int = -1
    # Tokens that calls said they used; and what the limit has left, below 0 what is owed to it.
    tokens: int = 0
    tokens_left: float = 0.0


class Other(Record, frozen=True):
    """A row that ended without a result: skipped, failed for good, or cancelled."""

    seq: int
    state: int
    attempts: int
    error_class: int
    error: str
    # The text of a result that did not fit the schema.
    raw: str = ""


class Stored(Record, frozen=True):
    """An object of a run's spool: its name there, below the run's own prefix, and how it is known again."""

    name: str
    size: int
    sha256: bytes
    # Of the version that was written: another one is read and hashed before it is believed.
    tag: bytes
    # Outcomes: texts of results that did not fit the schema are in it.
    raws: bool = False


class StoredBlock(Record, frozen=True):
    """A block of the input in the spool: the key columns and hashes come first, then the other columns."""

    rows: int
    at: Stored
    keys_size: int
    keys_sha256: bytes


class Leftover(Record, frozen=True):
    """A run that was deleted, whose spool may get objects of late writers."""

    run_id: str
    spool: str
    deleted_ns: int


class Chunk(Record, frozen=True):
    """Outcomes that were reported together, all of one page.

    `seqs` are little-endian u32 distances from `lo`, ascending, one for each row of `batch`; empty
    when the rows are consecutive.
    """

    lo: int
    seqs: bytes
    # One Arrow IPC message, a batch of the run's result schema, in the order of seqs.
    batch: bytes
    others: list[Other]
    # Successes that took more than one attempt.
    attempts: list[Part]
    cost: float
    calls: int
    spent_us_log2: list[int]
    # Above 0: the number of rows that hold the chunk (`part_key`). This row then holds nothing else.
    parts: int = 0
    # The object with the seqs and the batch, which are empty here; its results are of [lo, hi).
    at: Stored | None = None
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
    """Notified when somebody asked something of a run."""
    return f"run/{run_id}"


def create(txn: Txn, record: RunRecord) -> None:
    """Put a new run, and let its name lead to it."""
    check_name("run", record.run_id)
    check_name("name", record.name)
    if get(txn, record.run_id) is not None:
        raise Invalid(what="run", why="it exists already", found=record.run_id)
    txn.put(_key("n", record.name), record.run_id.encode())
    put(txn, record)


def point(txn: Txn, name: str, run_id: str) -> None:
    """Let a name lead to another run of it."""
    the(txn, run_id)
    txn.put(_key("n", name), run_id.encode())


def put(txn: Txn, record: RunRecord) -> None:
    """Write the record as it is; its status is `move`'s to change."""
    txn.put(*record_row(record))


def record_row(record: RunRecord) -> Row:
    return _key("r", record.run_id), codec.pack(record)


def get(txn: Txn, run_id: str) -> RunRecord | None:
    row = txn.get(_key("r", run_id))
    return None if row is None else codec.unpack_as(RunRecord, row)


def the(txn: Txn, run_id: str) -> RunRecord:
    """The run's record, or NotFound."""
    found = get(txn, run_id)
    if found is None:
        raise NotFound(what="run", found=run_id)
    return found


def latest(txn: Txn, name: str) -> RunRecord | None:
    """The last run of a name."""
    row = txn.get(_key("n", name))
    return None if row is None else get(txn, row.decode())


def names(txn: Txn, after: str = "", limit: int = 100) -> list[tuple[str, str]]:
    """(name, latest run), by name."""
    check_limit(limit)
    prefix = _key("n")
    lo = tuples.after(_key("n", after)) if after else prefix
    rows = txn.scan(lo, tuples.after(prefix), limit)
    return [(str(tuples.unpack(key[len(prefix) :])[0]), row.decode()) for key, row in rows]


def runs(txn: Txn, after: str = "", limit: int = 100) -> list[RunRecord]:
    """All runs, by their ids."""
    check_limit(limit)
    prefix = _key("r")
    lo = tuples.after(_key("r", after)) if after else prefix
    rows = txn.scan(lo, tuples.after(prefix), limit)
    return [codec.unpack_as(RunRecord, row) for _, row in rows]


def of_name(txn: Txn, name: str) -> list[RunRecord]:
    """Every run of a name that is kept, newest first."""
    found: list[RunRecord] = []
    after = ""
    while page := runs(txn, after):
        found += [record for record in page if record.name == name]
        after = page[-1].run_id
    return sorted(found, key=lambda record: (record.created_ns, record.run_id), reverse=True)


def move(txn: Txn, run_id: str, event: Event, **changes: Any) -> RunRecord:
    """Change a run's status by its table; an end is dated."""
    was = the(txn, run_id)
    status = RUN.next(was.status, event, run=run_id)
    if status not in GOING:
        changes.setdefault("finished_ns", txn.now_ns)
    now = replace(was, status=status, **changes)
    put(txn, now)
    txn.notify(topic_of(run_id))
    return now


# In the configuration of a run whose output was written by the driver.
WRITTEN = "written"


@operation
def mark_written(txn: Txn, run_id: str) -> RunRecord:
    """The output of a run that is over, which its driver writes, is complete."""
    was = the(txn, run_id)
    record = replace(was, config={**was.config, WRITTEN: "1"})
    put(txn, record)
    return record


@operation
def request_cancel(txn: Txn, run_id: str) -> RunRecord:
    """Ask whoever runs it to cancel; asking again changes nothing."""
    was = the(txn, run_id)
    if was.status not in GOING:
        raise Invalid(what="run", why="it is over", run=run_id, status=was.status.value)
    if was.cancel_requested_ns:
        return was
    return _asked(txn, replace(was, cancel_requested_ns=txn.now_ns))


@operation
def request_retry(txn: Txn, run_id: str) -> RunRecord:
    """Ask that the next run of this name tries the failed rows again. A run that was stopped by its rules
    goes on first; the rows that had failed are tried when it is through."""
    was = the(txn, run_id)
    if was.status is not Status.FINISHED and not (was.status is Status.OPEN and was.stopped):
        why = "it is still going" if was.status in GOING else "only a finished run is retried"
        raise Invalid(what="run", why=why, run=run_id, status=was.status.value)
    return _asked(txn, replace(was, retry_requested_ns=txn.now_ns))


def progress(txn: Txn, run_id: str) -> Progress | None:
    row = txn.get(_key("c", run_id))
    return None if row is None else codec.unpack_as(Progress, row)


def older_progress(txn: Txn, record: RunRecord) -> list[Progress]:
    """The figures of the runs that this one is a retry of, the newest first."""
    found: list[Progress] = []
    while record.retry_of and len(found) < CHAIN_MAX:
        found.append(progress(txn, record.retry_of) or Progress())
        older = get(txn, record.retry_of)
        if older is None:
            break
        record = older
    return found


def put_progress(txn: Txn, run_id: str, told: Progress) -> None:
    txn.put(_key("c", run_id), codec.pack(told))


# -- input blocks, outcome chunks ----------------------------------------------------------------


def block_key(run_id: str, n: int) -> bytes:
    return _key("i", run_id) + tuples.pack_int(n)


def block(txn: Txn, run_id: str, n: int) -> bytes | None:
    return txn.get(block_key(run_id, n))


def next_block(txn: Txn, run_id: str) -> int:
    """The number after that of the last block which is there."""
    prefix = _key("i", run_id)
    found = txn.scan(prefix, tuples.after(prefix), 1, reverse=True)
    return tuples.unpack_last_int(found[0][0], len(prefix)) + 1 if found else 0


def stored_block(txn: Txn, run_id: str, n: int) -> StoredBlock | None:
    """Where a block of a run with a spool lies."""
    row = txn.get(block_key(run_id, n))
    return None if row is None else codec.unpack_as(StoredBlock, row)


def stored_blocks(
    txn: Txn, run_id: str, after: int = -1, limit: int = SCAN_PAGE
) -> list[tuple[int, StoredBlock]]:
    """(number, place) of the blocks of a run with a spool, by number."""
    prefix = _key("i", run_id)
    rows = txn.scan(prefix + tuples.pack_int(after + 1), tuples.after(prefix), limit)
    return [
        (tuples.unpack_last_int(key, len(prefix)), codec.unpack_as(StoredBlock, row))
        for key, row in rows
    ]


def chunk_key(run_id: str, page: int, height: int) -> bytes:
    return _key("o", run_id, page) + tuples.pack_int(height)


def part_key(run_id: str, page: int, height: int, n: int) -> bytes:
    return _key("d", run_id, page) + tuples.pack_int(height) + tuples.pack_int(n)


def chunk_rows(run_id: str, page: int, height: int, chunk: Chunk) -> list[Row]:
    """The rows that keep a chunk: one, or its parts and one that counts them."""
    data = codec.pack(chunk)
    key = chunk_key(run_id, page, height)
    if len(data) <= PART_BYTES:
        return [(key, data)]
    cuts = range(0, len(data), PART_BYTES)
    rows = [
        (part_key(run_id, page, height, n), data[at : at + PART_BYTES]) for n, at in enumerate(cuts)
    ]
    return [*rows, (key, codec.pack(Chunk(0, b"", b"", [], [], 0.0, 0, [], len(rows))))]


def chunks(
    txn: Txn, run_id: str, page: int, after_height: int = -1, limit: int | None = None
) -> list[tuple[int, Chunk]]:
    """(height, chunk) of a page, in the order they were decided; all of them without a limit."""
    prefix = _key("o", run_id, page)
    lo = prefix + tuples.pack_int(after_height + 1)
    found: list[tuple[int, Chunk]] = []
    for key, row in txn.scan(lo, tuples.after(prefix), limit):
        height = tuples.unpack_last_int(key, len(prefix))
        chunk = codec.unpack_as(Chunk, row)
        found.append((height, _joined(txn, run_id, page, height, chunk) if chunk.parts else chunk))
    return found


def chunk(txn: Txn, run_id: str, page: int, height: int) -> Chunk | None:
    """One chunk, whole: its parts are joined."""
    row = txn.get(chunk_key(run_id, page, height))
    if row is None:
        return None
    found = codec.unpack_as(Chunk, row)
    return _joined(txn, run_id, page, height, found) if found.parts else found


# -- runs that rest on others ---------------------------------------------------------------------


def pin(txn: Txn, run_id: str, by: str) -> bool:
    """Keep a run while another is there; False when it is gone or going."""
    found = get(txn, run_id)
    if found is None or found.deleting:
        return False
    txn.put(_key("p", run_id, by), b"")
    txn.put(_key("q", by, run_id), b"")
    return True


def unpin(txn: Txn, run_id: str, by: str) -> None:
    txn.delete(_key("p", run_id, by))
    txn.delete(_key("q", by, run_id))


def pinned_by(txn: Txn, run_id: str, limit: int = 100) -> list[str]:
    """The runs that rest on this one."""
    return _named(txn, _key("p", run_id), limit)


def rests_on(txn: Txn, run_id: str, limit: int = 100) -> list[str]:
    """The runs that this one rests on."""
    return _named(txn, _key("q", run_id), limit)


def lineage_key(run_id: str, page: int) -> bytes:
    return _key("a", run_id) + tuples.pack_int(page)


def match_key(run_id: str, n: int) -> bytes:
    """Where the row hashes of a block lie that were computed after the run."""
    return _key("m", run_id) + tuples.pack_int(n)


def mark_deleting(txn: Txn, run_id: str, *, resumable: bool = False) -> RunRecord | None:
    """Mark a run as being deleted: no driver resumes it. None if the run does not exist.

    `resumable`: also of a run that is not over. The caller holds the lease of its name.
    """
    was = get(txn, run_id)
    if was is None:
        return None
    if was.status in GOING and not resumable:
        raise Invalid(what="run", why="it is still going", run=run_id, status=was.status.value)
    if pins := pinned_by(txn, run_id, 1):
        raise RunPinned(what="run", run=run_id, by=pins[0])
    if not was.deleting:
        was = replace(was, deleting=True)
        put(txn, was)
    return was


def drop_input(txn: Txn, run_id: str, limit: int) -> int:
    """Remove up to `limit` rows of the input of a run that is over; how many. Its outcomes stay, and no later run
    compares its rows with those of this one. The caller holds the lease of its name."""
    check_limit(limit)
    was = get(txn, run_id)
    if was is None:
        return 0
    if not was.input_dropped:
        put(txn, replace(was, input_dropped=True, blocks=[]))
    removed = 0
    for prefix in (_key("i", run_id), _key("m", run_id)):
        rows = txn.scan(prefix, tuples.after(prefix), limit - removed) if limit > removed else []
        for key, _ in rows:
            txn.delete(key)
        removed += len(rows)
    return removed


def put_leftover(txn: Txn, record: RunRecord) -> None:
    """Remember the spool of a run that goes: what late writers put there is deleted later."""
    found = Leftover(record.run_id, record.spool, txn.now_ns)
    txn.put(_key("g", record.run_id), codec.pack(found))


def drop_leftover(txn: Txn, run_id: str) -> None:
    txn.delete(_key("g", run_id))


def leftovers(txn: Txn, after: str = "", limit: int = 100) -> list[Leftover]:
    check_limit(limit)
    prefix = _key("g")
    lo = tuples.after(_key("g", after)) if after else prefix
    rows = txn.scan(lo, tuples.after(prefix), limit)
    return [codec.unpack_as(Leftover, row) for _, row in rows]


def delete(txn: Txn, run_id: str, limit: int, *, resumable: bool = False) -> int:
    """Remove up to `limit` rows of a run that is over; how many. 0: nothing is left of it.

    `resumable`: also of a run that is not over. The caller holds the lease of its name.
    """
    check_limit(limit)
    was = mark_deleting(txn, run_id, resumable=resumable)
    if was is None:
        return 0
    subject = subject_of(run_id)
    removed = 0
    for prefix in (
        _key("o", run_id),
        _key("d", run_id),
        _key("i", run_id),
        _key("a", run_id),
        _key("m", run_id),
        schema.prefix(schema.Space.JOURNAL, subject),
        schema.prefix(schema.Space.SNAPSHOT, subject),
        _key("c", run_id),
    ):
        rows = txn.scan(prefix, tuples.after(prefix), limit - removed) if limit > removed else []
        for key, row in rows:
            _release(txn, (key, row), subject)
            txn.delete(key)
        removed += len(rows)
    if removed < limit:
        for other in rests_on(txn, run_id, SCAN_PAGE):
            unpin(txn, other, run_id)
        if was.spool:
            put_leftover(txn, was)
        txn.delete(_key("r", run_id))
        if txn.get(_key("n", was.name)) == run_id.encode():
            txn.delete(_key("n", was.name))
        removed += 1
    return removed


# -- inside --------------------------------------------------------------------------------------


def _key(kind: str, *path: tuples.Element) -> bytes:
    return schema.prefix(schema.Space.RUN, kind, *path)


def _named(txn: Txn, prefix: bytes, limit: int) -> list[str]:
    rows = txn.scan(prefix, tuples.after(prefix), limit)
    return [str(tuples.unpack(key[len(prefix) :])[0]) for key, _ in rows]


def _joined(txn: Txn, run_id: str, page: int, height: int, head: Chunk) -> Chunk:
    parts = [txn.get(part_key(run_id, page, height, n)) for n in range(head.parts)]
    if any(part is None for part in parts):
        raise StoreCorrupt(what="outcome part", run_id=run_id, page=page, height=height)
    return codec.unpack_as(Chunk, b"".join(part for part in parts if part is not None))


def _asked(txn: Txn, record: RunRecord) -> RunRecord:
    put(txn, record)
    txn.notify(topic_of(record.run_id))
    return record


def _release(txn: Txn, row: Row, subject: str) -> None:
    """Release the blobs that a row of the log or of a checkpoint references."""
    key, value = row
    if key.startswith(schema.prefix(schema.Space.JOURNAL, subject, "e")):
        if (kept := codec.unpack_as(Kept, value)).blob:
            blobs.release(txn, kept.blob)
    elif key.startswith(schema.prefix(schema.Space.SNAPSHOT, subject, "s")):
        for name in codec.unpack_as(Saved, value).blobs:
            blobs.release(txn, name)

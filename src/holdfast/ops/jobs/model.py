"""The rows of jobs: creation, lookup, cancellation and pace.

    job <u> "j" <number>     the job
    job <u> "o" <number>     index: jobs that run
    job <u> "seq"            the number of the last job

The last `JOBS_KEPT` jobs of a universe are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from msgspec import field
from msgspec.structs import replace

from holdfast import codec
from holdfast.codec import Record
from holdfast.config import BATCH_MAX
from holdfast.durable.validation import check_limit
from holdfast.errors import Busy, Invalid, NotFound
from holdfast.ops.jobs.states import JOB_TRANSITIONS, JobEvent, JobState
from holdfast.store import schema, tuples
from holdfast.store.api import Txn
from holdfast.store.schema import Space

JOBS_KEPT = 1_000
RUNNING_MAX = 100
RATE_PER_S = 100.0
# One subject in 1,000 seconds.
RATE_PER_S_MIN = 0.001
# The topic of new and changed jobs.
TOPIC = "jobs"


class TooManyJobs(Busy):
    code = "too_many_jobs"
    hint = "wait until a job of this universe ends, or cancel one"


class JobRow(Record, frozen=True):
    """A job and its progress. Only subjects up to `last` are selected, which existed at its creation."""

    action: str
    selection: dict[str, str]
    actor: str
    created_ns: int
    last: int = 0
    rate_per_s: float = RATE_PER_S
    # The most subjects to process; 0: no limit.
    limit: int = 0
    state: int = JobState.RUNNING
    # Where the selection continues.
    cursor: str = ""
    processed: int = 0
    refused: int = 0
    ended_ns: int = 0
    error: str = ""
    # The last refused subjects, each with the reason.
    refusals: list[tuple[str, str]] = field(default_factory=list)

    @property
    def is_running(self) -> bool:
        return self.state == JobState.RUNNING


class Job(NamedTuple):
    universe: str
    number: int
    row: JobRow

    @property
    def id(self) -> str:
        return str(self.number)

    @property
    def resource(self) -> str:
        """The name of the lease of a process that runs the job."""
        return f"job/{self.universe}/{self.number}"


def create(txn: Txn, universe: str, row: JobRow) -> Job:
    """Create a job. A server runs it after the commit."""
    check_rate(row.rate_per_s)
    if not 0 <= row.limit < 1 << 62:
        raise Invalid(what="limit", found=row.limit, min=0)
    running = _key(universe, "o")
    if len(txn.scan(running, tuples.prefix_end(running), RUNNING_MAX)) >= RUNNING_MAX:
        raise TooManyJobs(what="jobs", universe=universe, max=RUNNING_MAX)
    counter = _key(universe, "seq")
    number = txn.count(counter) + 1
    txn.put(counter, schema.encode_int(number))
    txn.put(_key(universe, "o", number), b"")
    oldest = find(txn, universe, number - JOBS_KEPT)
    if oldest is not None and not oldest.row.is_running:
        txn.delete(_key(universe, "j", oldest.number))
    return save(txn, Job(universe, number, row))


def find(txn: Txn, universe: str, number: int) -> Job | None:
    row = txn.get(_key(universe, "j", number)) if number > 0 else None
    return None if row is None else Job(universe, number, codec.unpack_as(JobRow, row))


def get(txn: Txn, universe: str, number: int) -> Job:
    job = find(txn, universe, number)
    if job is None:
        raise NotFound(what="job", universe=universe, job=number)
    return job


def list_jobs(txn: Txn, universe: str, before: int | None, limit: int) -> list[Job]:
    """Return jobs below a number, newest first."""
    check_limit(limit)
    prefix = _key(universe, "j")
    end = tuples.prefix_end(prefix) if before is None else _key(universe, "j", before)
    rows = txn.scan(prefix, end, limit, True)
    return [Job(universe, _number(key), codec.unpack_as(JobRow, row)) for key, row in rows]


def list_running(txn: Txn, universe: str) -> list[Job]:
    prefix = _key(universe, "o")
    rows = txn.scan(prefix, tuples.prefix_end(prefix), RUNNING_MAX)
    return [get(txn, universe, _number(key)) for key, _ in rows]


def end(txn: Txn, job: Job, event: JobEvent, error: str = "") -> Job:
    """End a job that runs."""
    state = JOB_TRANSITIONS.next(JobState(job.row.state), event, job=job.id)
    txn.delete(_key(job.universe, "o", job.number))
    row = replace(job.row, state=state, ended_ns=txn.now_ns, error=error)
    return save(txn, job._replace(row=row))


def cancel(txn: Txn, universe: str, number: int) -> tuple[Job, bool]:
    """Cancel a job. Return whether it was running."""
    job = get(txn, universe, number)
    if not job.row.is_running:
        return job, False
    return end(txn, job, JobEvent.CANCEL), True


def set_rate(txn: Txn, universe: str, number: int, rate_per_s: float) -> Job:
    """Change the pace of a job."""
    check_rate(rate_per_s)
    job = get(txn, universe, number)
    return save(txn, job._replace(row=replace(job.row, rate_per_s=rate_per_s)))


def save(txn: Txn, job: Job) -> Job:
    txn.put(_key(job.universe, "j", job.number), codec.pack(job.row))
    txn.notify(TOPIC)
    return job


def check_rate(rate_per_s: float) -> None:
    """Refuse a pace outside its bounds. NaN is outside, too."""
    if not RATE_PER_S_MIN <= rate_per_s <= BATCH_MAX:
        raise Invalid(what="rate_per_s", found=rate_per_s, min=RATE_PER_S_MIN, max=BATCH_MAX)


def selection_text(selection: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(selection.items()))


def _key(universe: str, *path: tuples.Element) -> bytes:
    return schema.key_prefix(Space.JOB, universe, *path)


def _number(key: bytes) -> int:
    return int(tuples.unpack(key)[-1])

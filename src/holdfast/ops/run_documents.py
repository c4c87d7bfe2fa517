"""JSON documents of stage runs and their failed rows, shared by the HTTP API and the command line.

A run is named by its stage, which means the latest run of that name, or by its id.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from holdfast.durable import lease
from holdfast.errors import HoldfastError, NotFound
from holdfast.ledger import failures, runs, summary
from holdfast.ledger.failures import FailedRow
from holdfast.ledger.run_policy import ErrorClass
from holdfast.ledger.runs import RunProgress, RunRecord
from holdfast.store.api import Deferred, Store, Txn

CLASSES = {kind.name.lower(): kind for kind in ErrorClass if kind is not ErrorClass.NONE}


class NoRun(NotFound):
    hint = "`holdfast runs list` shows the runs of a store"


class RunView(NamedTuple):
    """A run with its progress and driver state."""

    record: RunRecord
    progress: RunProgress
    # Whether a live driver holds the run's lease.
    live: bool


class RunErrorDocument(msgspec.Struct, frozen=True, rename={"error_class": "class"}):
    """A group of similar errors of a run."""

    error_class: str
    error: str
    count: int
    rows: int
    examples: list[str]


class RunRowsDocument(msgspec.Struct, frozen=True):
    """A stage run with its row counts. `live`: a driver runs it."""

    name: str
    run_id: str
    status: str
    live: bool
    size: int
    succeeded: int
    skipped: int
    failed: int
    cancelled: int
    in_flight: int
    committed: int


class RunCallsDocument(RunRowsDocument, frozen=True):
    """A stage run with its counts of rows and calls."""

    calls: int
    reused: int
    retries: int
    reclaims: int
    fenced: int
    cost: float
    rate_per_s: float | None
    time_ns: int
    setup_ns: int
    calls_ns: int
    failed_by_class: dict[str, int]


class RunDocument(RunCallsDocument, frozen=True):
    """A stage run."""

    key: list[str]
    output: dict[str, str | int | bool]
    config: dict[str, str]
    created_ns: int
    updated_ns: int
    finished_ns: int
    halted: str
    stopped: str
    retry_of: str
    cancel_requested_ns: int
    retry_requested_ns: int
    errors: list[RunErrorDocument]


class RunPoint(msgspec.Struct, frozen=True):
    """The rows of a run and its cost, `t_ms` milliseconds of driver time after its start."""

    t_ms: int
    succeeded: int
    failed: int
    skipped: int
    in_flight: int
    cost: float


class RunThroughput(msgspec.Struct, frozen=True):
    """The rows that ended in each second of an interval."""

    begin_s: float
    end_s: float
    rows_per_s: float


class RunLatency(msgspec.Struct, frozen=True):
    """The calls that took `from_us` microseconds to less than twice as long."""

    from_us: int
    calls: int


class RunPlots(msgspec.Struct, frozen=True):
    """The series of the plots of a run, as the stage report draws them."""

    run_id: str
    points: list[RunPoint]
    throughput: list[RunThroughput]
    latency: list[RunLatency]
    failed_by_class: dict[str, int]


class FailedRowDocument(msgspec.Struct, frozen=True):
    seq: int
    key: str
    attempts: int
    error_class: str
    error: str


def latest_runs(txn: Txn, after: str, limit: int) -> list[RunView]:
    """Return the latest run of each stage name, after a name."""
    return [load_run(txn, run_id) for _, run_id in runs.list_names(txn, after, limit)]


def find_run(txn: Txn, name: str) -> RunView:
    record = runs.get_latest(txn, name) or runs.get_record(txn, name)
    if record is None:
        raise NoRun(what="run", name=name)
    return load_run(txn, record.run_id)


def load_run(txn: Txn, run_id: str) -> RunView:
    record = runs.get_record(txn, run_id)
    if record is None:
        raise NoRun(what="run", run_id=run_id)
    run_lease = lease.current_status(txn, runs.lease_resource(record.name))
    live = run_lease is not None and run_lease.is_live(txn.now_ns, txn.generation)
    return RunView(record, runs.get_progress(txn, run_id) or RunProgress(), live)


def retried_runs(txn: Txn, record: RunRecord) -> list[RunProgress]:
    """Return the progress of the runs that this run retries, newest first."""
    return runs.progress_of_retried_runs(txn, record)


def request_retry(txn: Txn, name: str) -> Deferred[RunRecord]:
    """Ask the next run of the stage to retry the failed rows."""
    return runs.request_retry(txn, find_run(txn, name).record.run_id)


def request_cancel(txn: Txn, name: str) -> Deferred[RunRecord]:
    """Ask the driver to end the run."""
    return runs.request_cancel(txn, find_run(txn, name).record.run_id)


def rate_of(view: RunView) -> float | None:
    """The recent rate of a running run, else the mean rate."""
    of_late = summary.recent_rate(view.progress.series) if view.live else None
    return of_late if of_late is not None else summary.mean_rate(view.progress)


def class_name(code: int) -> str:
    return next((name for name, kind in CLASSES.items() if kind == code), f"class {code}")


def run_document(view: RunView) -> RunDocument:
    record, progress, tally = view.record, view.progress, summary.tally_rows(view.progress)
    return RunDocument(
        name=record.name,
        run_id=record.run_id,
        status=record.status.value,
        live=view.live,
        size=record.size,
        **tally._asdict(),
        calls=progress.calls,
        reused=progress.reused,
        retries=progress.retries,
        reclaims=progress.reclaims,
        fenced=progress.fenced,
        cost=progress.cost,
        rate_per_s=rate_of(view),
        time_ns=summary.elapsed_ns(progress),
        setup_ns=progress.setup_ns,
        calls_ns=progress.calls_ns,
        failed_by_class=failed_by_class(progress),
        key=record.key,
        output=record.sink,
        config=record.config,
        created_ns=record.created_ns,
        updated_ns=progress.updated_ns,
        finished_ns=record.finished_ns,
        halted=record.halted,
        stopped=record.stopped,
        retry_of=record.retry_of,
        cancel_requested_ns=record.cancel_requested_ns,
        retry_requested_ns=record.retry_requested_ns,
        errors=[
            RunErrorDocument(
                class_name(group.error_class), group.text, group.count, group.rows, group.examples
            )
            for group in progress.errors
        ],
    )


def run_plots(view: RunView) -> RunPlots:
    progress = view.progress
    return RunPlots(
        view.record.run_id,
        [
            RunPoint(t_ms, succeeded, failed, skipped, in_flight, cost)
            for t_ms, succeeded, failed, skipped, in_flight, cost in progress.series
        ],
        [RunThroughput(*interval) for interval in summary.throughput(progress.series)],
        [
            RunLatency(1 << at, calls)
            for at, calls in enumerate(progress.latency_log2_us)
            if any(progress.latency_log2_us[: at + 1]) and any(progress.latency_log2_us[at:])
        ],
        failed_by_class(progress),
    )


def failed_by_class(progress: RunProgress) -> dict[str, int]:
    return {class_name(code): rows for code, rows in enumerate(progress.failed_by_class) if rows}


def row_document(row: FailedRow) -> FailedRowDocument:
    return FailedRowDocument(row.seq, row.key, row.attempts, class_name(row.error_class), row.error)


def block_reader(store: Store, record: RunRecord) -> failures.ReadBlock | None:
    """Return a reader of row keys for a run with a spool. Without access to the spool, keys are not shown."""
    if not record.spool:
        return None
    try:
        from holdfast.spark.run_data import RunInput

        source = RunInput(store, record)
    except ImportError:
        return None

    def read(n: int) -> Any:
        try:
            return source.keys_of_block(n)
        except HoldfastError:
            return None

    return read

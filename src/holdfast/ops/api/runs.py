"""The endpoints of stage runs. A run is named by its stage, which means its latest run, or by its id."""

from __future__ import annotations

import msgspec

from holdfast.errors import Invalid
from holdfast.ledger import failures, run_deletion, summary
from holdfast.ledger.runs import RunRecord
from holdfast.ops import run_documents, run_retention
from holdfast.ops.api import cursors
from holdfast.ops.api.call import ApiCall, NoIndex
from holdfast.ops.api.endpoint import (
    EmptyBody,
    Endpoint,
    EndpointOptions,
    Page,
    PageQuery,
    RequestModel,
    Scope,
)
from holdfast.ops.run_documents import FailedRowDocument, RunDocument, RunPlots, find_run
from holdfast.ops.run_retention import PruneDocument, RunPolicyRequest


class RunTallyDocument(msgspec.Struct, frozen=True):
    """The rows of a run and of the runs that it retries."""

    succeeded: int
    skipped: int
    failed: int
    cancelled: int
    in_flight: int
    committed: int


class PruneBody(RequestModel):
    """Keep the newest `keep` runs of each stage. With `older_than_days`, delete only runs that ended before."""

    name: str | None = None
    keep: int = run_deletion.KEEP_DEFAULT
    older_than_days: float | None = None
    dry_run: bool = False


class PrunedRuns(msgspec.Struct, frozen=True):
    runs: list[PruneDocument]
    deleted: int


class RunDetails(RunDocument, frozen=True, kw_only=True):
    """A run with the next steps for its operator. `in_all` includes the runs that it retries."""

    next: list[str]
    in_all: RunTallyDocument


class MarkedRun(RunDocument, frozen=True, kw_only=True):
    """A run whose failed rows are retried when its stage runs next, and their number."""

    marked: int


def list_runs(call: ApiCall) -> Page[RunDocument]:
    limit = cursors.page_limit(call.query)
    after = cursors.decode(call.query.cursor, str) or ""
    views = call.read(run_documents.latest_runs, after, limit + 1)
    items = [run_documents.run_document(view) for view in views[:limit]]
    return Page(items=items, next=cursors.encode(items[-1].name) if len(views) > limit else None)


def show_run(call: ApiCall) -> RunDetails:
    view: run_documents.RunView = call.read(find_run, call.path["run"])
    older = call.read(run_documents.retried_runs, view.record)
    steps = summary.next_steps(view.record, view.progress, store="", live=view.live)
    tally = summary.tally_retry_chain(view.progress, older)
    return RunDetails(
        **msgspec.structs.asdict(run_documents.run_document(view)),
        next=steps,
        in_all=RunTallyDocument(**tally._asdict()),
    )


def show_run_plots(call: ApiCall) -> RunPlots:
    view: run_documents.RunView = call.read(find_run, call.path["run"])
    return run_documents.run_plots(view)


def list_failed_rows(call: ApiCall) -> Page[FailedRowDocument]:
    limit = cursors.page_limit(call.query)
    after = cursors.decode(call.query.cursor, int)
    view: run_documents.RunView = call.read(find_run, call.path["run"])
    rows = failures.list_failed_rows(
        call.store,
        view.record,
        view.progress,
        limit=limit + 1,
        after=-1 if after is None else after,
        read_block=run_documents.block_reader(call.store, view.record),
    )
    items = [run_documents.row_document(row) for row in rows[:limit]]
    return Page(items=items, next=cursors.encode(items[-1].seq) if len(rows) > limit else None)


def retry_run(call: ApiCall) -> MarkedRun:
    name = call.path["run"]
    record: RunRecord = call.transact(run_documents.request_retry, name, subject=f"run/{name}")
    view = call.read(find_run, record.run_id)
    return MarkedRun(
        **msgspec.structs.asdict(run_documents.run_document(view)),
        marked=summary.tally_rows(view.progress).failed,
    )


def cancel_run(call: ApiCall) -> RunDocument:
    name = call.path["run"]
    record: RunRecord = call.transact(run_documents.request_cancel, name, subject=f"run/{name}")
    return run_documents.run_document(call.read(find_run, record.run_id))


def prune_runs(call: ApiCall) -> PrunedRuns:
    body: PruneBody = call.body
    request = RunPolicyRequest(body.name, body.keep, body.older_than_days, body.dry_run)
    subject = f"run/{body.name or '*'}"
    verdicts = run_retention.prune_runs(call.recording_store(subject, f"keep {body.keep}"), request)
    return PrunedRuns(verdicts, sum(one.deleted for one in verdicts))


_RUN = "/v1/runs/{run}"
_EMPTY = EndpointOptions(body=EmptyBody, problems=(Invalid,))

ENDPOINTS = (
    Endpoint("GET", "/v1/runs", Scope.READ, list_runs, Page[RunDocument],
             "List the latest run of each stage", EndpointOptions(query=PageQuery)),
    Endpoint("POST", "/v1/runs/prune", Scope.OPERATE, prune_runs, PrunedRuns,
             "Delete old runs from the store; outputs stay", EndpointOptions(body=PruneBody)),
    Endpoint("GET", _RUN, Scope.READ, show_run, RunDetails,
             "Show counts, calls, errors, output and the next steps of a run"),
    Endpoint("GET", f"{_RUN}/plots", Scope.READ, show_run_plots, RunPlots,
             "Show the series of the plots of a run: rows, throughput, cost, and times of calls"),
    Endpoint("GET", f"{_RUN}/failed", Scope.READ, list_failed_rows, Page[FailedRowDocument],
             "List the failed rows of a run by seq",
             EndpointOptions(query=PageQuery, problems=(NoIndex,))),
    Endpoint("POST", f"{_RUN}/retry", Scope.OPERATE, retry_run, MarkedRun,
             "Retry the failed rows of a run when its stage runs next", _EMPTY),
    Endpoint("POST", f"{_RUN}/cancel", Scope.OPERATE, cancel_run, RunDocument,
             "Start no further rows of a run and end it", _EMPTY),
)  # fmt: skip

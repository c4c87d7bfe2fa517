"""A step of a job: one page of its selection, applied in one commit together with the progress.

If the action refuses a subject, the subjects of the page are applied one by one, and the refused ones are counted. The
commits require the lease of the process, so that a process that lost it changes nothing.
"""

from __future__ import annotations

from msgspec.structs import replace

from holdfast import failpoints
from holdfast.durable.lease import Lease
from holdfast.errors import HoldfastError, IllegalTransition, Invalid, NotFound
from holdfast.ops import audit
from holdfast.ops.jobs import model
from holdfast.ops.jobs.actions import JobAction, Subject, SubjectPage, check_selection, find_action
from holdfast.ops.jobs.model import Job, JobRow
from holdfast.ops.jobs.states import JobEvent
from holdfast.store.api import Store, Txn

PAGE_MAX = 100
PAGES_PER_S = 10
REFUSALS_KEPT = 20
REASON_CHARS_MAX = 200
# The errors of an action that concern one subject, not the job.
_REFUSED = (Invalid, NotFound, IllegalTransition)


def prepare(txn: Txn, universe: str, row: JobRow) -> JobRow:
    """Check action and selection of a new job, and fix the subjects that it may select."""
    action = find_action(row.action)
    check_selection(action, row.selection)
    return replace(row, created_ns=txn.now_ns, last=action.last(txn, universe, row.selection))


def page_size(rate_per_s: float) -> int:
    return max(1, min(PAGE_MAX, int(rate_per_s) // PAGES_PER_S))


def step(store: Store, job: Job, lease: Lease) -> int:
    """Process one page of a job. Return the number of its subjects."""
    action = find_action(job.row.action)
    left = job.row.limit - job.row.processed - job.row.refused if job.row.limit else PAGE_MAX
    limit = min(page_size(job.row.rate_per_s), left)
    page: SubjectPage = store.read(action.select, job.universe, job.row, limit)
    if failpoints.armed:
        failpoints.hit("jobs.page", job)
    try:
        store.transact(_apply_page, action, job, lease, page)
    except _REFUSED:
        refused = _apply_one_by_one(store, action, job, lease, page.subjects)
        store.transact(_advance, job, lease, page, refused)
    return len(page.subjects)


def fail(store: Store, job: Job, lease: Lease, error: Exception) -> None:
    """End a job that cannot continue."""

    def end(txn: Txn) -> None:
        txn.require_live(lease)
        current = model.get(txn, job.universe, job.number)
        if current.row.is_running:
            _end(txn, current, JobEvent.FAIL, error_text(error))

    store.transact(end)


def error_text(error: Exception) -> str:
    text = str(error) if isinstance(error, HoldfastError) else f"{type(error).__name__}: {error}"
    return text[:REASON_CHARS_MAX]


# -- inside ----------------------------------------------------------------------------------------


def _apply_page(txn: Txn, action: JobAction, job: Job, lease: Lease, page: SubjectPage) -> None:
    _apply(txn, action, job, lease, page.subjects)
    _advance(txn, job, lease, page, [])


def _apply(txn: Txn, action: JobAction, job: Job, lease: Lease, subjects: list[Subject]) -> None:
    txn.require_live(lease)
    if subjects and model.get(txn, job.universe, job.number).row.is_running:
        action.apply(txn, job.universe, job.row, [subject.key for subject in subjects])


def _apply_one_by_one(
    store: Store, action: JobAction, job: Job, lease: Lease, subjects: list[Subject]
) -> list[tuple[str, str]]:
    """Return the refused subjects, each with the reason."""
    refused: list[tuple[str, str]] = []
    for subject in subjects:
        try:
            store.transact(_apply, action, job, lease, [subject])
        except _REFUSED as error:
            refused.append((subject.name, str(error)[:REASON_CHARS_MAX]))
    return refused


def _advance(
    txn: Txn, job: Job, lease: Lease, page: SubjectPage, refused: list[tuple[str, str]]
) -> None:
    txn.require_live(lease)
    current = model.get(txn, job.universe, job.number)
    if not current.row.is_running or current.row.cursor != job.row.cursor:
        return
    processed = current.row.processed + len(page.subjects) - len(refused)
    row = replace(
        current.row,
        cursor=page.cursor,
        processed=processed,
        refused=current.row.refused + len(refused),
        refusals=[*current.row.refusals, *refused][-REFUSALS_KEPT:],
    )
    is_full = row.limit and row.processed + row.refused >= row.limit
    if page.cursor and not is_full:
        model.save(txn, current._replace(row=row))
    else:
        _end(txn, current._replace(row=row), JobEvent.FINISH)


def _end(txn: Txn, job: Job, event: JobEvent, error: str = "") -> None:
    ended = model.end(txn, job, event, error)
    detail = f"{ended.row.processed} processed, {ended.row.refused} refused"
    audit.record(txn, job.universe, job.row.actor, "end_job", f"job/{job.id}", detail)

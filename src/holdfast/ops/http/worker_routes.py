"""The worker routes of the HTTP API: lease, heartbeat, complete, fail.

The reply to a report is COMMITTED, CANCELLED (the lease was lost: discard the work) or REJECTED (no such
lease: a bug in the worker). These are results, not errors: the HTTP status is 200.

A grant whose response cannot be delivered is released at once and does not count as an attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import UNSET

from holdfast import traces
from holdfast.clock import S
from holdfast.config import ERROR_CODE_CHARS_MAX, ERROR_TEXT_CHARS_MAX
from holdfast.durable.validation import check_limit
from holdfast.errors import Invalid
from holdfast.ops.http.json_values import arguments_to_json, decode, pack_json
from holdfast.ops.http.long_poll import LongPoller
from holdfast.ops.http.problem import HttpResponse, encode_json
from holdfast.ops.http.request_schemas import (
    CompletionBody,
    FailureBody,
    HeartbeatBody,
    LeaseBody,
    check_wait,
)
from holdfast.ops.http.routes import ClientDisconnect, RouteCall
from holdfast.ops.http.server import HttpServer
from holdfast.ops.http.worker_registry import HttpWorkerRegistry
from holdfast.store.api import Deferred, Store, Txn
from holdfast.tasks import operations as tasks
from holdfast.tasks import queries
from holdfast.tasks.ids import LeaseId, TaskId, parse_lease_id
from holdfast.tasks.leases import LEASE_BATCH_MAX
from holdfast.tasks.operations import (
    AttemptOutcome,
    GrantRequest,
    HeldLease,
    LeaseResult,
    ReportAnswer,
    TaskGrant,
    TaskReport,
)

QUEUES_MAX = 100
NAMES_MAX = 1_000
PROGRESS_BYTES_MAX = 4096
# The most store generations in one request. Each needs its own commit, and no worker lives through many.
GENERATIONS_MAX = 8
_OUTCOMES = {
    "failed": AttemptOutcome.FAILED,
    "refused": AttemptOutcome.REFUSED,
    "released": AttemptOutcome.RELEASED,
    "exited": AttemptOutcome.EXITED,
}


class WorkerRoutes:
    def __init__(self, server: HttpServer, store: Store, universe: str) -> None:
        self._server = server
        self._store = store
        self._universe = universe
        self._long_poller = LongPoller(store, universe, server.loop, server.run_in_thread)
        registry = self._registry = HttpWorkerRegistry(store, universe)
        self._heartbeats = server.loop.create_task(registry.run(server.run_in_thread))

    def close(self) -> None:
        self._heartbeats.cancel()
        self._long_poller.close()

    async def until_ended(self, task: TaskId, wait_s: float, disconnect: ClientDisconnect) -> None:
        """Wait until a task has ended or the time is up."""
        check_wait(wait_s)

        async def has_ended() -> bool:
            found = self._server.run_in_thread(
                self._store.read, queries.finished_among, self._universe, [task.seq]
            )
            return bool(await found)

        await self._long_poller.until_ended(task.seq, wait_s, has_ended, disconnect)

    async def lease(self, call: RouteCall) -> HttpResponse:
        body = await self._server.parse(len(call.body), decode, LeaseBody, call.body)
        if not 1 <= len(body.queues) <= QUEUES_MAX:
            raise Invalid(what="queues", found=len(body.queues), min=1, max=QUEUES_MAX)
        if len(body.names) > NAMES_MAX:
            raise Invalid(what="names", found=len(body.names), max=NAMES_MAX)
        if not 1 <= body.limit <= LEASE_BATCH_MAX:
            raise Invalid(what="limit", found=body.limit, min=1, max=LEASE_BATCH_MAX)
        check_wait(body.wait_s)
        store, universe = self._store, self._universe
        request = GrantRequest(
            body.worker, body.queues, body.limit, body.alone, names=tuple(body.names)
        )

        async def attempt() -> LeaseResult:
            while True:
                leased: LeaseResult = await store.submit(tasks.lease, universe, request)
                if not leased.overdue:
                    return leased

        with self._registry.request_open(body.worker):
            leased = await self._long_poller.lease(
                body.queues, body.names, body.wait_s, attempt, call.disconnect
            )
        generation, now_ns = store.generation, store.now_ns()
        document = {
            "tasks": [_grant_document(grant, generation, now_ns) for grant in leased.grants],
            "suspects": leased.suspects,
        }

        async def give_back() -> None:
            reports = [
                TaskReport(released.seq, released.lease, AttemptOutcome.RELEASED)
                for released in leased.grants
            ]
            await store.submit(tasks.apply_reports, universe, body.worker, generation, reports)

        return HttpResponse(200, encode_json(document), undo=give_back if leased.grants else None)

    async def heartbeat(self, call: RouteCall) -> HttpResponse:
        sent = await self._server.parse(len(call.body), decode, HeartbeatBody, call.body)
        check_limit(len(sent.leases), "leases")
        store, universe = self._store, self._universe
        leases = [parse_lease_id(beat.lease) for beat in sent.leases]
        progress_by_generation: dict[int, list[tuple[int, int, bytes]]] = {}
        for beat, lease in zip(sent.leases, leases, strict=True):
            if beat.progress is not None:
                text = pack_json("progress", beat.progress)
                if len(text) > PROGRESS_BYTES_MAX:
                    raise Invalid(what="progress", bytes=len(text), bytes_max=PROGRESS_BYTES_MAX)
                progress_by_generation.setdefault(lease.generation, []).append(
                    (lease.seq, lease.lease, text)
                )
        holds = [
            HeldLease(lease.seq, lease.lease, beat.progressed or beat.progress is not None)
            for beat, lease in zip(sent.leases, leases, strict=True)
        ]

        def keep(txn: Txn, generation: int, some: list[HeldLease]) -> Deferred[list[int]]:
            until = tasks.extend(txn, universe, generation, some)
            if generation in progress_by_generation and generation == txn.generation:
                tasks.report_progress(txn, universe, progress_by_generation[generation])
            return until

        until = await self._by_generation(leases, holds, keep)
        lost = [lease for lease, expires_ns in zip(leases, until, strict=True) if not expires_ns]
        granted_before = dict(
            zip(
                lost,
                await self._server.run_in_thread(store.read, _were_granted, universe, lost),
                strict=True,
            )
            if lost
            else ()
        )
        now_ns = store.now_ns()
        documents = []
        for lease, expires_ns in zip(leases, until, strict=True):
            result = ReportAnswer.COMMITTED
            if not expires_ns:
                result = ReportAnswer.CANCELLED if granted_before[lease] else ReportAnswer.REJECTED
            left_s = max(expires_ns - now_ns, 0) / S
            documents.append({"lease": str(lease), "answer": result.name, "expires_in_s": left_s})
        return HttpResponse(200, encode_json({"leases": documents}))

    async def complete(self, call: RouteCall) -> HttpResponse:
        sent = await self._server.parse(len(call.body), decode, CompletionBody, call.body)
        _reject_mixed(sent, CompletionBody(worker=sent.worker, reports=sent.reports))
        if sent.lease is not UNSET:
            [result] = await self._report(
                sent.worker,
                [(sent.lease, AttemptOutcome.OK, pack_json("result", sent.result), "", "")],
            )
            return HttpResponse(200, encode_json({"answer": result}))
        reports = _require_reports(sent.reports)
        ends = await self._server.parse(len(call.body), _to_outcomes, reports)
        results = await self._report(sent.worker, ends)
        return HttpResponse(200, encode_json({"answers": results}))

    async def fail(self, call: RouteCall) -> HttpResponse:
        sent = await self._server.parse(len(call.body), decode, FailureBody, call.body)
        _reject_mixed(sent, FailureBody(worker=sent.worker, reports=sent.reports))
        if sent.lease is not UNSET:
            [result] = await self._report(
                sent.worker, [(sent.lease, _parse_end(sent.end), b"", sent.reason, sent.error)]
            )
            return HttpResponse(200, encode_json({"answer": result}))
        reports = _require_reports(sent.reports)
        results = await self._report(
            sent.worker,
            [
                (report.lease, _parse_end(report.end), b"", report.reason, report.error)
                for report in reports
            ],
        )
        return HttpResponse(200, encode_json({"answers": results}))

    async def _report(
        self, worker: str, sent: Sequence[tuple[str, AttemptOutcome, bytes, str, str]]
    ) -> list[str]:
        check_limit(len(sent), "reports")
        leases = [parse_lease_id(text) for text, *_ in sent]
        reports = [
            TaskReport(
                lease.seq,
                lease.lease,
                end,
                result,
                reason[:ERROR_CODE_CHARS_MAX],
                error[:ERROR_TEXT_CHARS_MAX],
            )
            for lease, (_, end, result, reason, error) in zip(leases, sent, strict=True)
        ]

        def settle(txn: Txn, generation: int, some: list[TaskReport]) -> Deferred[list[int]]:
            return tasks.apply_reports(txn, self._universe, worker, generation, some)

        with self._registry.request_open(worker):
            results = await self._by_generation(leases, reports, settle)
        return [ReportAnswer(code).name for code in results]

    async def _by_generation(
        self,
        leases: Sequence[LeaseId],
        items: Sequence[Any],
        operation: Callable[[Txn, int, list[Any]], Deferred[list[int]]],
    ) -> list[int]:
        """Return one result per lease, with one commit per generation. All leases have the same generation
        unless the store was restored."""
        results: dict[int, list[int]] = {}
        positions: dict[int, list[int]] = {}
        for at, lease in enumerate(leases):
            positions.setdefault(lease.generation, []).append(at)
        if len(positions) > GENERATIONS_MAX:
            raise Invalid(what="generations", found=len(positions), max=GENERATIONS_MAX)
        for generation, indexes in positions.items():
            group = [items[at] for at in indexes]
            results[generation] = await self._store.submit(operation, generation, group)
        ordered = [0] * len(leases)
        for generation, indexes in positions.items():
            for at, result in zip(indexes, results[generation], strict=True):
                ordered[at] = result
        return ordered


# -- inside ---------------------------------------------------------------------------------------


def _were_granted(txn: Txn, universe: str, leases: list[LeaseId]) -> list[bool]:
    return [queries.was_granted(txn, universe, lease) for lease in leases]


def _grant_document(grant: TaskGrant, generation: int, now_ns: int) -> dict[str, Any]:
    args, kwargs = arguments_to_json(grant.args)
    task = TaskId(grant.generation, grant.seq)
    return {
        "id": str(task),
        "lease": str(LeaseId(generation, grant.lease, grant.seq)),
        "name": grant.name,
        "args": args,
        "kwargs": kwargs,
        "queue": grant.queue,
        "attempt": grant.attempt,
        "suspect": grant.suspect,
        "idempotency_key": f"task-{task}",
        "lease_s": grant.lease_ns / S,
        "execution_window_s": grant.window_ns / S,
        "expires_in_s": max(grant.expires_ns - now_ns, 0) / S,
        **traces.headers(grant.trace),
    }


def _to_outcomes(reports: Any) -> list[tuple[str, AttemptOutcome, bytes, str, str]]:
    return [
        (report.lease, AttemptOutcome.OK, pack_json("result", report.result), "", "")
        for report in reports
    ]


def _parse_end(text: str) -> AttemptOutcome:
    outcome = _OUTCOMES.get(text)
    if outcome is None:
        raise Invalid(what="end", found=text[:64], expected=sorted(_OUTCOMES))
    return outcome


def _require_reports(reports: Any) -> Any:
    if reports is UNSET:
        raise Invalid(what="body", why="needs lease for one task, or reports for several")
    return reports


def _reject_mixed(
    sent: CompletionBody | FailureBody, reports: CompletionBody | FailureBody
) -> None:
    """Reject fields next to `reports`, which would be ignored."""
    if sent.reports is not UNSET and sent != reports:
        raise Invalid(
            what="body", why="lease for one task and reports for several exclude each other"
        )

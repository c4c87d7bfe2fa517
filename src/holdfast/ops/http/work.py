"""Doing tasks over HTTP: lease, heartbeat, complete, fail.

A report is answered COMMITTED, CANCELLED (the lease was lost: throw the work away) or REJECTED (there was
no such lease: a mistake of the worker). Those are answers, not errors: the status is 200.

A grant whose answer cannot be delivered is given back at once, and counts as nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import UNSET

from holdfast.clock import S
from holdfast.config import ERROR_CODE_CHARS_MAX, ERROR_TEXT_CHARS_MAX
from holdfast.durable.bounds import check_limit
from holdfast.errors import Invalid
from holdfast.ops.http.bell import Bell
from holdfast.ops.http.bodies import Completion, Failure, Heartbeat, LeaseRequest
from holdfast.ops.http.problem import Response, encode
from holdfast.ops.http.roll import Roll
from holdfast.ops.http.route import Call, Gone
from holdfast.ops.http.server import HttpServer
from holdfast.ops.http.values import arguments, decode, packed
from holdfast.store.api import Pending, Store, Txn
from holdfast.tasks import coordinator as tasks
from holdfast.tasks import look
from holdfast.tasks.coordinator import Answer, End, Grant, Hold, Leased, Report
from holdfast.tasks.ids import LeaseId, TaskId, parse_lease
from holdfast.tasks.lease import LEASE_BATCH_MAX

WAIT_S_MAX = 60.0
QUEUES_MAX = 100
NAMES_MAX = 1_000
PROGRESS_BYTES_MAX = 4096
# Of the leases in one request: each is a commit of its own, and no worker outlives many.
GENERATIONS_MAX = 8
_ENDS = {
    "failed": End.FAILED,
    "refused": End.REFUSED,
    "released": End.RELEASED,
    "exited": End.EXITED,
}


class Work:
    def __init__(self, server: HttpServer, store: Store, universe: str) -> None:
        self._server = server
        self._store = store
        self._universe = universe
        self._bell = Bell(store, universe, server.loop)
        roll = self._roll = Roll(store, universe)
        self._keeping = server.loop.create_task(roll.keep(server.aside))

    def close(self) -> None:
        self._keeping.cancel()
        self._bell.close()

    async def until_ended(self, task: TaskId, wait_s: float, gone: Gone) -> None:
        """Until a task has ended, or the time is up."""
        check_wait(wait_s)

        async def has_ended() -> bool:
            found = self._server.aside(self._store.read, look.ended_of, self._universe, [task.seq])
            return bool(await found)

        await self._bell.until_ended(task.seq, wait_s, has_ended, gone)

    async def lease(self, call: Call) -> Response:
        asked = await self._server.parse(len(call.body), decode, LeaseRequest, call.body)
        if not 1 <= len(asked.queues) <= QUEUES_MAX:
            raise Invalid(what="queues", found=len(asked.queues), min=1, max=QUEUES_MAX)
        if len(asked.names) > NAMES_MAX:
            raise Invalid(what="names", found=len(asked.names), max=NAMES_MAX)
        if not 1 <= asked.limit <= LEASE_BATCH_MAX:
            raise Invalid(what="limit", found=asked.limit, min=1, max=LEASE_BATCH_MAX)
        check_wait(asked.wait_s)
        store, universe = self._store, self._universe

        async def attempt() -> Leased:
            while True:
                leased: Leased = await store.submit(
                    tasks.lease,
                    universe,
                    asked.worker,
                    asked.queues,
                    asked.limit,
                    asked.alone,
                    (),
                    tuple(asked.names),
                )
                if not leased.overdue:
                    return leased

        with self._roll.present(asked.worker):
            leased = await self._bell.lease(
                asked.queues, asked.names, asked.wait_s, attempt, call.gone
            )
        generation, now_ns = store.generation, store.now_ns()
        document = {
            "tasks": [_granted(grant, generation, now_ns) for grant in leased.grants],
            "suspects": leased.suspects,
        }

        async def give_back() -> None:
            reports = [Report(one.seq, one.lease, End.RELEASED) for one in leased.grants]
            await store.submit(tasks.settle, universe, asked.worker, generation, reports)

        return Response(200, encode(document), undo=give_back if leased.grants else None)

    async def heartbeat(self, call: Call) -> Response:
        sent = await self._server.parse(len(call.body), decode, Heartbeat, call.body)
        check_limit(len(sent.leases), "leases")
        store, universe = self._store, self._universe
        leases = [parse_lease(beat.lease) for beat in sent.leases]
        said: dict[int, list[tuple[int, int, bytes]]] = {}
        for beat, lease in zip(sent.leases, leases, strict=True):
            if beat.progress is not None:
                text = packed("progress", beat.progress)
                if len(text) > PROGRESS_BYTES_MAX:
                    raise Invalid(what="progress", bytes=len(text), bytes_max=PROGRESS_BYTES_MAX)
                said.setdefault(lease.generation, []).append((lease.seq, lease.lease, text))
        holds = [
            Hold(lease.seq, lease.lease, beat.progressed or beat.progress is not None)
            for beat, lease in zip(sent.leases, leases, strict=True)
        ]

        def keep(txn: Txn, generation: int, some: list[Hold]) -> Pending[list[int]]:
            until = tasks.extend(txn, universe, generation, some)
            if generation in said and generation == txn.generation:
                tasks.report_progress(txn, universe, said[generation])
            return until

        until = await self._by_generation(leases, holds, keep)
        lost = [lease for lease, expires_ns in zip(leases, until, strict=True) if not expires_ns]
        known = dict(
            zip(lost, await self._server.aside(store.read, _given, universe, lost), strict=True)
            if lost
            else ()
        )
        now_ns = store.now_ns()
        answers = []
        for lease, expires_ns in zip(leases, until, strict=True):
            answer = Answer.COMMITTED
            if not expires_ns:
                answer = Answer.CANCELLED if known[lease] else Answer.REJECTED
            left_s = max(expires_ns - now_ns, 0) / S
            answers.append({"lease": str(lease), "answer": answer.name, "expires_in_s": left_s})
        return Response(200, encode({"leases": answers}))

    async def complete(self, call: Call) -> Response:
        sent = await self._server.parse(len(call.body), decode, Completion, call.body)
        _only_reports(sent, Completion(worker=sent.worker, reports=sent.reports))
        if sent.lease is not UNSET:
            [answer] = await self._settle(
                sent.worker, [(sent.lease, End.OK, packed("result", sent.result), "", "")]
            )
            return Response(200, encode({"answer": answer}))
        reports = _required(sent.reports)
        ends = await self._server.parse(len(call.body), _completions, reports)
        answers = await self._settle(sent.worker, ends)
        return Response(200, encode({"answers": answers}))

    async def fail(self, call: Call) -> Response:
        sent = await self._server.parse(len(call.body), decode, Failure, call.body)
        _only_reports(sent, Failure(worker=sent.worker, reports=sent.reports))
        if sent.lease is not UNSET:
            [answer] = await self._settle(
                sent.worker, [(sent.lease, _end(sent.end), b"", sent.reason, sent.error)]
            )
            return Response(200, encode({"answer": answer}))
        reports = _required(sent.reports)
        answers = await self._settle(
            sent.worker,
            [(one.lease, _end(one.end), b"", one.reason, one.error) for one in reports],
        )
        return Response(200, encode({"answers": answers}))

    async def _settle(
        self, worker: str, sent: Sequence[tuple[str, End, bytes, str, str]]
    ) -> list[str]:
        check_limit(len(sent), "reports")
        leases = [parse_lease(text) for text, *_ in sent]
        reports = [
            Report(
                lease.seq,
                lease.lease,
                end,
                result,
                reason[:ERROR_CODE_CHARS_MAX],
                error[:ERROR_TEXT_CHARS_MAX],
            )
            for lease, (_, end, result, reason, error) in zip(leases, sent, strict=True)
        ]

        def settle(txn: Txn, generation: int, some: list[Report]) -> Pending[list[int]]:
            return tasks.settle(txn, self._universe, worker, generation, some)

        with self._roll.present(worker):
            answers = await self._by_generation(leases, reports, settle)
        return [Answer(answer).name for answer in answers]

    async def _by_generation(
        self,
        leases: Sequence[LeaseId],
        items: Sequence[Any],
        judge: Callable[[Txn, int, list[Any]], Pending[list[int]]],
    ) -> list[int]:
        """An answer for each. All leases are of one generation, unless the store was restored."""
        answers: dict[int, list[int]] = {}
        places: dict[int, list[int]] = {}
        for at, lease in enumerate(leases):
            places.setdefault(lease.generation, []).append(at)
        if len(places) > GENERATIONS_MAX:
            raise Invalid(what="generations", found=len(places), max=GENERATIONS_MAX)
        for generation, mine in places.items():
            some = [items[at] for at in mine]
            answers[generation] = await self._store.submit(judge, generation, some)
        found = [0] * len(leases)
        for generation, mine in places.items():
            for at, answer in zip(mine, answers[generation], strict=True):
                found[at] = answer
        return found


# -- inside ---------------------------------------------------------------------------------------


def check_wait(wait_s: float) -> None:
    if not 0 <= wait_s <= WAIT_S_MAX:
        raise Invalid(what="wait_s", found=wait_s, min=0, max=WAIT_S_MAX)


def _given(txn: Txn, universe: str, leases: list[LeaseId]) -> list[bool]:
    return [look.given(txn, universe, lease) for lease in leases]


def _granted(grant: Grant, generation: int, now_ns: int) -> dict[str, Any]:
    args, kwargs = arguments(grant.args)
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
    }


def _completions(reports: Any) -> list[tuple[str, End, bytes, str, str]]:
    return [(one.lease, End.OK, packed("result", one.result), "", "") for one in reports]


def _end(text: str) -> End:
    found = _ENDS.get(text)
    if found is None:
        raise Invalid(what="end", found=text[:64], expected=sorted(_ENDS))
    return found


def _required(reports: Any) -> Any:
    if reports is UNSET:
        raise Invalid(what="body", why="a lease, or reports")
    return reports


def _only_reports(sent: Completion | Failure, reports: Completion | Failure) -> None:
    """What is said beside reports would be passed over."""
    if sent.reports is not UNSET and sent != reports:
        raise Invalid(what="body", why="a lease, or reports, and not both")

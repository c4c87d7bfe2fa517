"""Tasks over HTTP: for those who submit them, those who do them, and those who watch.

    POST /v1/tasks                 submit one, or a batch, all or none
    POST /v1/tasks/lease           take some to do; waits for up to `wait_s` until there are any
    POST /v1/tasks/heartbeat       keep leases; say how far it is
    POST /v1/tasks/complete        report that they are done, with their results
    POST /v1/tasks/fail            report that they are not, and whether another try may help
    GET  /v1/tasks                 list, by queue, state and name
    GET  /v1/tasks/{id}            everything that is known of one
    POST /v1/tasks/{id}/cancel     end it, wherever it is
    POST /v1/tasks/{id}/redrive    another task in the place of one that has failed
    GET  /v1/queues                counts and limits
    GET  /healthz, /readyz         whether this process is alive; whether the universe is ready

A report is answered COMMITTED, CANCELLED (the lease was lost: throw the work away) or REJECTED (there was
no such lease: a mistake of the worker). Those are answers, not errors: the status is 200.

A grant whose answer cannot be delivered is given back at once, and counts as nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from msgspec import UNSET

from holdfast.clock import S
from holdfast.config import ERROR_CODE_CHARS_MAX, ERROR_TEXT_CHARS_MAX
from holdfast.durable.bounds import check_limit
from holdfast.errors import Invalid
from holdfast.ops.http_bell import Bell
from holdfast.ops.http_bodies import (
    Cancel,
    Completion,
    Failure,
    Heartbeat,
    LeaseRequest,
    NewTask,
    Nothing,
    Submission,
)
from holdfast.ops.http_json import arguments, decode, packed
from holdfast.ops.http_server import HttpServer
from holdfast.ops.http_submit import batch_of, require
from holdfast.ops.http_wire import Api, Call, Response, Route, encode
from holdfast.ops.task_document import queue_document, row_document, seen_document
from holdfast.roles import readiness
from holdfast.store.api import Pending, Store, Txn
from holdfast.tasks import coordinator as tasks
from holdfast.tasks import listing, look
from holdfast.tasks.coordinator import Answer, End, Grant, Hold, Leased, Report
from holdfast.tasks.ids import LeaseId, TaskId, parse_lease, parse_task
from holdfast.tasks.lease import LEASE_BATCH_MAX
from holdfast.tasks.rows import Spec

WAIT_S_MAX = 60.0
QUEUES_MAX = 100
PROGRESS_BYTES_MAX = 4096
LIST_MAX = 1_000
_ENDS = {
    "failed": End.FAILED,
    "refused": End.REFUSED,
    "released": End.RELEASED,
    "exited": End.EXITED,
}


# -- the routes --------------------------------------------------------------------------------------


class TaskApi(Api):
    def __init__(
        self, server: HttpServer, store: Store, universe: str, specs: Mapping[str, Spec]
    ) -> None:
        """`specs` is what the app declares of its tasks; others may be submitted all the same, for
        workers that the app does not know."""
        self._server = server
        self._store = store
        self._universe = universe
        self._specs = specs
        self._bell = Bell(store, universe, server.loop)
        post, get = "POST", "GET"
        self.routes = (
            Route(get, ("healthz",), self._healthz, open=True),
            Route(get, ("readyz",), self._readyz, open=True),
            Route(post, ("v1", "tasks"), self._submit),
            Route(get, ("v1", "tasks"), self._list),
            Route(post, ("v1", "tasks", "lease"), self._lease),
            Route(post, ("v1", "tasks", "heartbeat"), self._heartbeat),
            Route(post, ("v1", "tasks", "complete"), self._complete),
            Route(post, ("v1", "tasks", "fail"), self._fail),
            Route(get, ("v1", "tasks", "*"), self._show),
            Route(post, ("v1", "tasks", "*", "cancel"), self._cancel),
            Route(post, ("v1", "tasks", "*", "redrive"), self._redrive),
            Route(get, ("v1", "queues"), self._queues),
        )

    def close(self) -> None:
        self._bell.close()

    # -- submit ------------------------------------------------------------------------------------

    async def _submit(self, call: Call) -> Response:
        sent = decode(Submission, call.body)
        if sent.tasks is UNSET:
            if sent.name is UNSET:
                raise Invalid(what="body", why="one task with a name, or tasks")
            [task] = await self._create(
                [NewTask(name=sent.name, args=sent.args, kwargs=sent.kwargs, options=sent.options)]
            )
            return Response(201, encode({"id": str(task)}), (("Location", f"/v1/tasks/{task}"),))
        if sent.name is not UNSET:
            raise Invalid(what="body", why="one task with a name, or tasks, and not both")
        made = await self._create(sent.tasks)
        return Response(201, encode({"ids": [str(task) for task in made]}))

    async def _create(self, wanted: Sequence[NewTask]) -> list[TaskId]:
        store, universe = self._store, self._universe
        batch = batch_of(wanted, self._specs)
        if batch.awaited:
            await self._server.aside(store.read, require, universe, batch.awaited)
        seqs = await store.submit(
            tasks.submit_all, universe, batch.specs, batch.spec_of_each, batch.new
        )
        if batch.keyed:
            return await self._server.aside(store.read, look.ids_of, universe, seqs)
        return [TaskId(store.generation, seq) for seq in seqs]

    # -- work --------------------------------------------------------------------------------------

    async def _lease(self, call: Call) -> Response:
        asked = decode(LeaseRequest, call.body)
        if not 1 <= len(asked.queues) <= QUEUES_MAX:
            raise Invalid(what="queues", found=len(asked.queues), min=1, max=QUEUES_MAX)
        if not 1 <= asked.limit <= LEASE_BATCH_MAX:
            raise Invalid(what="limit", found=asked.limit, min=1, max=LEASE_BATCH_MAX)
        if not 0 <= asked.wait_s <= WAIT_S_MAX:
            raise Invalid(what="wait_s", found=asked.wait_s, min=0, max=WAIT_S_MAX)
        store, universe = self._store, self._universe

        def attempt() -> Awaitable[Leased]:
            return store.submit(
                tasks.lease, universe, asked.worker, asked.queues, asked.limit, asked.alone
            )

        leased = await self._bell.lease(asked.queues, asked.wait_s, attempt, call.gone)
        generation, now_ns = store.generation, store.now_ns()
        document = {
            "tasks": [_granted(grant, generation, now_ns) for grant in leased.grants],
            "suspects": leased.suspects,
        }

        async def give_back() -> None:
            reports = [Report(one.seq, one.lease, End.RELEASED) for one in leased.grants]
            if reports:
                await store.submit(tasks.settle, universe, asked.worker, generation, reports)

        return Response(200, encode(document), undo=give_back)

    async def _heartbeat(self, call: Call) -> Response:
        sent = decode(Heartbeat, call.body)
        check_limit(len(sent.leases), "leases")
        store, universe = self._store, self._universe
        leases = [parse_lease(beat.lease) for beat in sent.leases]
        said: list[tuple[int, int, bytes]] = []
        for beat, lease in zip(sent.leases, leases, strict=True):
            if beat.progress is not None:
                text = packed("progress", beat.progress)
                if len(text) > PROGRESS_BYTES_MAX:
                    raise Invalid(what="progress", bytes=len(text), bytes_max=PROGRESS_BYTES_MAX)
                if lease.generation == store.generation:
                    said.append((lease.seq, lease.lease, text))
        holds = [
            Hold(lease.seq, lease.lease, beat.progressed or beat.progress is not None)
            for beat, lease in zip(sent.leases, leases, strict=True)
        ]

        def keep(generation: int, some: list[Hold]) -> Callable[[Txn], Pending[list[int]]]:
            return lambda txn: tasks.extend(txn, universe, generation, some)

        until = await self._by_generation(leases, holds, keep)
        if said:
            await store.submit(tasks.report_progress, universe, said)
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

    async def _complete(self, call: Call) -> Response:
        sent = decode(Completion, call.body)
        if sent.lease is not UNSET:
            _not_both(sent.reports)
            [answer] = await self._settle(
                sent.worker, [(sent.lease, End.OK, packed("result", sent.result), "", "")]
            )
            return Response(200, encode({"answer": answer}))
        reports = _required(sent.reports)
        answers = await self._settle(
            sent.worker,
            [(one.lease, End.OK, packed("result", one.result), "", "") for one in reports],
        )
        return Response(200, encode({"answers": answers}))

    async def _fail(self, call: Call) -> Response:
        sent = decode(Failure, call.body)
        if sent.lease is not UNSET:
            _not_both(sent.reports)
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

        def settle(generation: int, some: list[Report]) -> Callable[[Txn], Pending[list[int]]]:
            return lambda txn: tasks.settle(txn, self._universe, worker, generation, some)

        answers = await self._by_generation(leases, reports, settle)
        return [Answer(answer).name for answer in answers]

    async def _by_generation(
        self,
        leases: Sequence[LeaseId],
        items: Sequence[Any],
        make: Callable[[int, list[Any]], Callable[[Txn], Pending[list[int]]]],
    ) -> list[int]:
        """An answer for each. All leases are of one generation, unless the store was restored."""
        answers: dict[int, list[int]] = {}
        places: dict[int, list[int]] = {}
        for at, lease in enumerate(leases):
            places.setdefault(lease.generation, []).append(at)
        for generation, mine in places.items():
            some = [items[at] for at in mine]
            answers[generation] = await self._store.submit(make(generation, some))
        found = [0] * len(leases)
        for generation, mine in places.items():
            for at, answer in zip(mine, answers[generation], strict=True):
                found[at] = answer
        return found

    # -- look and steer ------------------------------------------------------------------------------

    async def _show(self, call: Call) -> Response:
        _only(call, ())
        task = parse_task(call.names[0])
        seen = await self._server.aside(self._store.read, look.see, self._universe, task)
        return Response(200, encode(seen_document(seen)))

    async def _list(self, call: Call) -> Response:
        _only(call, ("state", "queue", "name", "cursor", "limit"))
        query = call.request.query
        limit = query.get("limit", "100")
        if not (limit.isascii() and limit.isdigit() and int(limit) <= LIST_MAX):
            raise Invalid(what="limit", found=limit[:64], min=0, max=LIST_MAX)
        found = await self._server.aside(
            self._store.read,
            listing.page,
            self._universe,
            query.get("state", "").lower(),
            query.get("queue", ""),
            query.get("name", ""),
            query.get("cursor", ""),
            int(limit),
        )
        document = {
            "tasks": [row_document(row) for row in found.rows],
            "cursor": found.cursor or None,
        }
        return Response(200, encode(document))

    async def _queues(self, call: Call) -> Response:
        _only(call, ())
        found = await self._server.aside(self._store.read, look.queues, self._universe)
        return Response(200, encode({"queues": [queue_document(row) for row in found]}))

    async def _cancel(self, call: Call) -> Response:
        task = parse_task(call.names[0])
        sent = decode(Cancel, call.body or b"{}")
        await self._server.aside(self._store.read, look.find, self._universe, task)
        [ended] = await self._store.submit(tasks.cancel, self._universe, [task.seq], sent.reason)
        return Response(200, encode({"id": str(task), "cancelled": ended}))

    async def _redrive(self, call: Call) -> Response:
        task = parse_task(call.names[0])
        decode(Nothing, call.body or b"{}")
        await self._server.aside(self._store.read, look.find, self._universe, task)
        seqs = await self._store.submit(tasks.redrive, self._universe, [task.seq])
        [made] = await self._server.aside(self._store.read, look.ids_of, self._universe, seqs)
        return Response(201, encode({"id": str(made), "redrive_of": str(task)}))

    # -- health --------------------------------------------------------------------------------------

    async def _healthz(self, call: Call) -> Response:
        return Response(200, encode({"ok": True}))

    async def _readyz(self, call: Call) -> Response:
        found = await self._server.aside(readiness.look, self._store, self._universe)
        document: Any = found if call.trusted else {"ready": found.ready}
        return Response(200 if found.ready else 503, encode(document))


# -- inside ------------------------------------------------------------------------------------------


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


def _end(text: str) -> End:
    found = _ENDS.get(text)
    if found is None:
        raise Invalid(what="end", found=text[:64], expected=sorted(_ENDS))
    return found


def _required(reports: Any) -> Any:
    if reports is UNSET:
        raise Invalid(what="body", why="a lease, or reports")
    return reports


def _not_both(reports: Any) -> None:
    if reports is not UNSET:
        raise Invalid(what="body", why="a lease, or reports, and not both")


def _only(call: Call, known: Sequence[str]) -> None:
    unknown = sorted(set(call.request.query) - set(known))
    if unknown:
        raise Invalid(what="query", found=unknown[0][:64], expected=list(known))

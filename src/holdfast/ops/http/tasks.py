"""Tasks over HTTP: for those who submit them, those who do them, and those who watch.

    POST /v1/tasks                 submit one, or a batch, all or none
    POST /v1/tasks/lease           take some to do; waits for up to `wait_s` until there are any
    POST /v1/tasks/heartbeat       keep leases; say how far it is
    POST /v1/tasks/complete        report that they are done, with their results
    POST /v1/tasks/fail            report that they are not, and whether another try may help
    GET  /v1/tasks                 list, by queue, state and name
    GET  /v1/tasks/{id}            everything that is known of one; waits up to `wait_s` for its end
    POST /v1/tasks/{id}/cancel     end it, wherever it is
    POST /v1/tasks/{id}/redrive    another task in the place of one that has failed
    GET  /v1/queues                counts and limits
    GET  /healthz, /readyz         whether this process is alive; whether the universe is ready

Reports are answered by `work`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET

from holdfast.clock import S
from holdfast.errors import HoldfastError, Invalid
from holdfast.ops.http.bodies import Cancel, NewTask, Nothing, Submission
from holdfast.ops.http.problem import Response, encode
from holdfast.ops.http.route import Api, Call, Route
from holdfast.ops.http.server import HttpServer
from holdfast.ops.http.submit import Declared, batch_of, require
from holdfast.ops.http.values import decode
from holdfast.ops.http.work import Work, check_wait
from holdfast.ops.task_document import queue_document, row_document, seen_document
from holdfast.roles import readiness
from holdfast.roles.task_upkeep import OFTEN_NS, tend
from holdfast.store.api import Store
from holdfast.tasks import coordinator as tasks
from holdfast.tasks import listing, look
from holdfast.tasks.ids import TaskId, parse_task
from holdfast.tasks.states import State

LIST_MAX = 1_000
# How long an answer about readiness may take.
READY_S = 3.0
# Between two looks for tasks to be forgotten, and for a checkpoint of the log.
UPKEEP_S = OFTEN_NS / S


class TaskApi(Api):
    def __init__(
        self, server: HttpServer, store: Store, universe: str, declared: Mapping[str, Declared]
    ) -> None:
        """`declared` is what the app declares of its tasks; others may be submitted all the same, for
        workers that the app does not know."""
        self._server = server
        self._store = store
        self._universe = universe
        self._declared = declared
        work = self._work = Work(server, store, universe)
        self._closing = threading.Event()
        self._upkeep = server.loop.create_task(self._keep_up())
        post, get = "POST", "GET"
        self.routes = (
            Route(get, ("healthz",), self._healthz, open=True, always=True),
            Route(get, ("readyz",), self._readyz, open=True),
            Route(post, ("v1", "tasks"), self._submit),
            Route(get, ("v1", "tasks"), self._list),
            Route(post, ("v1", "tasks", "lease"), work.lease),
            Route(post, ("v1", "tasks", "heartbeat"), work.heartbeat),
            Route(post, ("v1", "tasks", "complete"), work.complete),
            Route(post, ("v1", "tasks", "fail"), work.fail),
            Route(get, ("v1", "tasks", "*"), self._show),
            Route(post, ("v1", "tasks", "*", "cancel"), self._cancel),
            Route(post, ("v1", "tasks", "*", "redrive"), self._redrive),
            Route(get, ("v1", "queues"), self._queues),
        )

    def close(self) -> None:
        self._closing.set()
        self._upkeep.cancel()
        self._work.close()

    # -- submit ------------------------------------------------------------------------------------

    async def _submit(self, call: Call) -> Response:
        size = len(call.body)
        sent = await self._server.parse(size, decode, Submission, call.body)
        if sent.tasks is UNSET:
            if sent.name is UNSET:
                raise Invalid(what="body", why="one task with a name, or tasks")
            [task] = await self._create(
                [NewTask(name=sent.name, args=sent.args, kwargs=sent.kwargs, options=sent.options)],
                size,
            )
            return Response(201, encode({"id": str(task)}), (("Location", f"/v1/tasks/{task}"),))
        if sent != Submission(tasks=sent.tasks):
            # Arguments or options beside the tasks would be passed over.
            raise Invalid(what="body", why="one task with a name, or tasks, and not both")
        made = await self._create(sent.tasks, size)
        return Response(201, encode({"ids": [str(task) for task in made]}))

    async def _create(self, wanted: Sequence[NewTask], size: int) -> list[TaskId]:
        store, universe = self._store, self._universe
        batch = await self._server.parse(size, batch_of, wanted, self._declared)
        if batch.awaited:
            await self._server.aside(store.read, require, universe, batch.awaited)
        seqs = await store.submit(
            tasks.submit_all, universe, batch.specs, batch.spec_of_each, batch.new
        )
        if batch.keyed:
            return await self._server.aside(store.read, look.ids_of, universe, seqs)
        return [TaskId(store.generation, seq) for seq in seqs]

    # -- look and steer ------------------------------------------------------------------------------

    async def _show(self, call: Call) -> Response:
        _only(call, ("wait_s",))
        task = parse_task(call.names[0])
        wait_s = _seconds(call.request.query.get("wait_s", "0"))
        seen = await self._server.aside(self._store.read, look.see, self._universe, task)
        if wait_s and seen.row.state in (State.WAITING, State.LEASED):
            await self._work.until_ended(task, wait_s, call.gone)
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
        try:
            async with asyncio.timeout(READY_S):
                found = await self._server.aside(readiness.look, self._store, self._universe)
        except TimeoutError:
            # The store may take its time to give up. Whoever probes us does not.
            found = readiness.silent(self._universe, self._store, READY_S)
        document: Any = found if call.trusted else {"ready": found.ready}
        return Response(200 if found.ready else 503, encode(document))

    async def _keep_up(self) -> None:
        """Where all workers are HTTP clients, no other process forgets tasks or makes checkpoints."""
        more = False
        while True:
            await asyncio.sleep(0.0 if more else UPKEEP_S)
            more = False
            with contextlib.suppress(HoldfastError):
                more = await self._server.aside(tend, self._store, self._universe, self._going)

    def _going(self) -> bool:
        return not self._closing.is_set()


# -- inside ------------------------------------------------------------------------------------------


def _seconds(text: str) -> float:
    try:
        found = float(text)
        check_wait(found)
    except ValueError:
        raise Invalid(what="wait_s", found=text[:64], expected="seconds") from None
    return found


def _only(call: Call, known: Sequence[str]) -> None:
    unknown = sorted(set(call.request.query) - set(known))
    if unknown:
        raise Invalid(what="query", found=unknown[0][:64], expected=list(known))

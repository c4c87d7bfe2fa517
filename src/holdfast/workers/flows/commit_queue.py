"""The commit queue of a worker: the commits of flows that are ready in one turn of the event loop are one operation.

The first commit waits for one turn of the loop, and the commits of other activations join it. An operation with
`COMMITS_MAX` commits is sent at once, so that the writer applies it while the loop runs the next flows. If the store
refuses the operation, each of its commits is sent alone, so that one stale activation fences no other flow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import NamedTuple

from holdfast.errors import CommitUnknown, HoldfastError
from holdfast.flows import commit_batch, operations
from holdfast.flows.operations import FlowAnswer, FlowCommit
from holdfast.store.api import Store

# Commits in one operation. With larger operations the writer and the loop wait for each other.
COMMITS_MAX = 16


class QueuedCommit(NamedTuple):
    work: FlowCommit
    answer: asyncio.Future[FlowAnswer]


class CommitQueue:
    def __init__(self, store: Store, universe: str) -> None:
        self._store = store
        self._universe = universe
        # The commits that join the first one in this turn of the loop. None if no commit waits.
        self._joining: list[QueuedCommit] | None = None
        # The event loop holds only weak references to its tasks.
        self._sends: set[asyncio.Task[None]] = set()

    async def commit(self, work: FlowCommit) -> FlowAnswer:
        """Commit, possibly together with other flows. Raises the error of this commit only."""
        queued = QueuedCommit(work, asyncio.get_running_loop().create_future())
        if self._joining is not None:
            self._join(self._joining, queued)
            return await queued.answer
        self._joining = joined = [queued]
        try:
            await asyncio.sleep(0)
        except GeneratorExit:
            # The loop is closed, so no activation waits for an answer.
            raise
        except BaseException:
            # The activation of the first commit is cancelled. The joined commits are still sent.
            if self._joining is joined:
                self._joining = None
                if len(joined) > 1:
                    self._start_send(joined[1:])
            raise
        if self._joining is joined:
            self._joining = None
            if len(joined) == 1:
                alone: FlowAnswer = await self._store.submit(
                    operations.commit, self._universe, self._store.generation, work
                )
                return alone
            self._start_send(joined)
        return await queued.answer

    def _join(self, joined: list[QueuedCommit], queued: QueuedCommit) -> None:
        """Add a commit. A full operation is sent at once: the writer applies it while this loop runs other flows."""
        joined.append(queued)
        if len(joined) >= COMMITS_MAX:
            self._joining = None
            self._start_send(joined)

    def _start_send(self, batch: list[QueuedCommit]) -> None:
        submitted = self._store.submit(
            commit_batch.commit_many,
            self._universe,
            self._store.generation,
            [queued.work for queued in batch],
        )
        task = asyncio.get_running_loop().create_task(self._send(batch, submitted))
        self._sends.add(task)
        task.add_done_callback(self._sends.discard)

    async def _send(
        self, batch: list[QueuedCommit], submitted: Awaitable[list[FlowAnswer]]
    ) -> None:
        try:
            answers = await submitted
        except CommitUnknown as error:
            _fail(batch, error)
        except HoldfastError:
            await self._send_each(batch)
        except BaseException as error:
            _fail(batch, error)
            raise
        else:
            for queued, answer in zip(batch, answers, strict=True):
                if not queued.answer.done():
                    queued.answer.set_result(answer)

    async def _send_each(self, batch: list[QueuedCommit]) -> None:
        with self._store.batched():
            submitted = [
                self._store.submit(
                    operations.commit, self._universe, self._store.generation, queued.work
                )
                for queued in batch
            ]
        for queued, result in zip(batch, submitted, strict=True):
            try:
                answer = await result
            except Exception as error:
                _fail([queued], error)
            except BaseException as error:
                _fail(batch, error)
                raise
            else:
                if not queued.answer.done():
                    queued.answer.set_result(answer)


def _fail(batch: list[QueuedCommit], error: BaseException) -> None:
    for queued in batch:
        if not queued.answer.done():
            queued.answer.set_exception(error)

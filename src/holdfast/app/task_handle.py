"""The handle of a submitted task: read its status, wait for its result, cancel it."""

from __future__ import annotations

import typing
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from holdfast import codec
from holdfast.app import store_calls
from holdfast.app.store_calls import Commit, Read, StoreCall
from holdfast.app.tasks import Task
from holdfast.clock import S
from holdfast.config import TTL_NS_MAX
from holdfast.errors import HoldfastError, Invalid, NotFound, TaskForgotten, Timeout
from holdfast.store.api import Txn
from holdfast.tasks import operations, queries
from holdfast.tasks.ids import TaskId
from holdfast.tasks.model import keys_of
from holdfast.tasks.states import TaskState
from holdfast.workers.tasks.attempt import waiting_for_tasks

if TYPE_CHECKING:
    from holdfast.app.runtime import Runtime

T = TypeVar("T")

TIMEOUT_S_MAX = TTL_NS_MAX / S


class TaskFailedError(HoldfastError):
    """The task ended as FAILED or DEAD. `error` is the text of its last error."""

    code = "task_failed"
    hint = "inspect it with `holdfast tasks show`, retry it with `holdfast tasks redrive`"


class TaskStatus(NamedTuple):
    """The status of a task. `where` is its state or, for a waiting task, its wait state."""

    id: str
    name: str
    queue: str
    state: str
    where: str
    attempt: int
    failures: int
    expiries: int
    reason: str
    error: str
    progress: Any = None


def check_timeout(timeout: Any) -> None:
    if timeout is not None and not (isinstance(timeout, int | float) and timeout <= TIMEOUT_S_MAX):
        raise Invalid(what="timeout", found=repr(timeout)[:64], max=TIMEOUT_S_MAX)


class TaskHandle(Generic[T]):
    """A submitted task."""

    def __init__(self, runtime: Runtime, id: TaskId, task: Task[Any, T] | None = None) -> None:
        self._runtime = runtime
        self._id = id
        self._task = task

    @property
    def id(self) -> str:
        return str(self._id)

    def __repr__(self) -> str:
        return f"<task {self.id}>"

    @property
    def runtime(self) -> Runtime:
        return self._runtime

    def status(self) -> TaskStatus:
        return store_calls.run(self._runtime.store, self.status_call())

    def done(self) -> bool:
        return store_calls.run(self._runtime.store, self.done_call())

    def result(self, timeout: float | None = None) -> T:
        """Wait for the task and return its result. Raises TaskFailedError with the task's error, Timeout, or
        TaskForgotten if the task ended more than `retain_s` ago and was deleted."""
        check_timeout(timeout)
        details: queries.TaskDetails | None = self._runtime.store.read(self._finished_details)
        if details is not None:
            return self._decode_result(details)
        with waiting_for_tasks():
            return self._decode_result(self._wait_until_finished(timeout))

    def _wait_until_finished(self, timeout: float | None) -> queries.TaskDetails:
        runtime = self._runtime
        store = runtime.store
        topic = keys_of(runtime.universe).task_topic(self._id.seq)
        until_ns = None if timeout is None else runtime.clock.mono_ns() + int(timeout * S)
        since = store.wait(topic, 0, 0.0)
        while (details := store.read(self._finished_details)) is None:
            left_s = 1.0
            if until_ns is not None:
                left_s = min(left_s, (until_ns - runtime.clock.mono_ns()) / S)
                if left_s <= 0:
                    runtime.check()
                    raise Timeout(what="task", task=self.id, waited_s=timeout)
            since = store.wait(topic, since, left_s)
            runtime.check()
        return details

    async def result_async(self, timeout: float | None = None) -> T:
        """`result` for a coroutine; `await handle` does the same."""
        check_timeout(timeout)
        runtime = self._runtime
        details = await runtime.waiting.until(self._finished_details, self._id.seq, timeout)
        if details is None:
            runtime.check()
            raise Timeout(what="task", task=self.id, waited_s=timeout)
        return self._decode_result(details)

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    def cancel(self) -> bool:
        """Cancel the task, even while it runs. Return whether this call cancelled it."""
        return store_calls.run(self._runtime.store, self.cancel_call())

    # -- calls that threads and coroutines share -----------------------------------------------

    def status_call(self) -> StoreCall[TaskStatus]:
        status: TaskStatus = yield Read(self._status)
        return status

    def done_call(self) -> StoreCall[bool]:
        status: TaskStatus = yield Read(self._status)
        return status.state not in (TaskState.WAITING.name, TaskState.LEASED.name)

    def cancel_call(self) -> StoreCall[bool]:
        # Check the full id with its generation: after a restore another task may have the same seq.
        yield Read(queries.get_task, (self._runtime.universe, self._id))
        cancelled = yield Commit(operations.cancel, (self._runtime.universe, [self._id.seq]))
        return bool(cancelled[0])

    # -- inside ------------------------------------------------------------------------------------

    def _finished_details(self, txn: Txn) -> queries.TaskDetails | None:
        try:
            row = queries.get_task(txn, self._runtime.universe, self._id)
        except NotFound:
            if queries.was_removed(txn, self._runtime.universe, self._id):
                raise TaskForgotten(task=self.id, universe=self._runtime.universe) from None
            raise
        if row.state in (TaskState.WAITING, TaskState.LEASED):
            return None
        return queries.get_details(txn, self._runtime.universe, self._id)

    def _decode_result(self, details: queries.TaskDetails) -> T:
        row = details.row
        if row.state is not TaskState.COMPLETED:
            raise TaskFailedError(
                task=self.id,
                name=row.spec.name,
                state=row.state.name,
                reason=row.status.reason,
                error=row.status.error,
                attempts=row.status.attempt,
            )
        task = self._task or self._runtime.app.tasks.get(row.spec.name)
        return typing.cast(
            T, codec.unpack(details.result) if task is None else task.value(details.result)
        )

    def _status(self, txn: Txn) -> TaskStatus:
        details = queries.get_details(txn, self._runtime.universe, self._id)
        row = details.row
        status = row.status
        return TaskStatus(
            id=self.id,
            name=row.spec.name,
            queue=row.spec.queue,
            state=row.state.name,
            where=row.where,
            attempt=status.attempt,
            failures=status.failures,
            expiries=status.expiries,
            reason=status.reason,
            error=status.error,
            progress=codec.unpack(details.progress) if details.progress else None,
        )

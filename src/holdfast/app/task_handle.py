"""A submitted task, from outside: look, wait, cancel."""

from __future__ import annotations

import typing
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from holdfast import codec
from holdfast.app.tasks import Task
from holdfast.clock import S
from holdfast.config import TTL_NS_MAX
from holdfast.errors import HoldfastError, Invalid, NotFound, TaskForgotten, Timeout
from holdfast.roles.task_run import waiting
from holdfast.store.api import Txn
from holdfast.tasks import coordinator, look
from holdfast.tasks.ids import TaskId
from holdfast.tasks.rows import keys_of
from holdfast.tasks.states import State

if TYPE_CHECKING:
    from holdfast.app.runtime import Runtime

T = TypeVar("T")

TIMEOUT_S_MAX = TTL_NS_MAX / S


class TaskFailedError(HoldfastError):
    """The task has ended, and not well: FAILED, or DEAD. `error` is the text of its last error."""

    code = "task_failed"
    hint = "look at it with `holdfast tasks show`, and try it anew with `holdfast tasks redrive`"


class TaskStatus(NamedTuple):
    """How far a task is. `where` is its state, or where it waits."""

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

    def status(self) -> TaskStatus:
        return self._runtime.store.read(self._status)

    def done(self) -> bool:
        return self.status().state not in (State.WAITING.name, State.LEASED.name)

    def result(self, timeout: float | None = None) -> T:
        """What the task returned. Raises TaskFailedError with the task's own error, Timeout, or
        TaskForgotten if the task has ended and `retain_s` has passed since."""
        if timeout is not None and not (
            isinstance(timeout, int | float) and timeout <= TIMEOUT_S_MAX
        ):
            raise Invalid(what="timeout", found=repr(timeout)[:64], max=TIMEOUT_S_MAX)
        found: look.Seen | None = self._runtime.store.read(self._ended)
        if found is not None:
            return self._value(found)
        with waiting():
            return self._value(self._await_end(timeout))

    def _await_end(self, timeout: float | None) -> look.Seen:
        runtime = self._runtime
        store = runtime.store
        topic = keys_of(runtime.universe).task_topic(self._id.seq)
        until_ns = None if timeout is None else runtime.clock.mono_ns() + int(timeout * S)
        since = store.wait(topic, 0, 0.0)
        while (found := store.read(self._ended)) is None:
            left_s = 1.0
            if until_ns is not None:
                left_s = min(left_s, (until_ns - runtime.clock.mono_ns()) / S)
                if left_s <= 0:
                    runtime.check()
                    raise Timeout(what="task", task=self.id, waited_s=timeout)
            since = store.wait(topic, since, left_s)
            runtime.check()
        return found

    async def result_async(self) -> T:
        """`result`, for coroutines: `await handle` is the same."""
        return self._value(await self._runtime.waiting.until(self._ended, self._id.seq))

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    def cancel(self) -> bool:
        """End it, also while it runs; whether it was ended by this."""
        return bool(self._runtime.store.transact(self._cancel)[0])

    # -- inside ------------------------------------------------------------------------------------

    def _cancel(self, txn: Txn) -> Any:
        # By its whole name: after a restore another task may have its number.
        look.find(txn, self._runtime.universe, self._id)
        return coordinator.cancel(txn, self._runtime.universe, [self._id.seq])

    def _ended(self, txn: Txn) -> look.Seen | None:
        try:
            row = look.find(txn, self._runtime.universe, self._id)
        except NotFound:
            if look.was_forgotten(txn, self._runtime.universe, self._id):
                raise TaskForgotten(task=self.id, universe=self._runtime.universe) from None
            raise
        if row.state in (State.WAITING, State.LEASED):
            return None
        return look.see(txn, self._runtime.universe, self._id)

    def _value(self, found: look.Seen) -> T:
        row = found.row
        if row.state is not State.COMPLETED:
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
            T, codec.unpack(found.result) if task is None else task.value(found.result)
        )

    def _status(self, txn: Txn) -> TaskStatus:
        seen = look.see(txn, self._runtime.universe, self._id)
        row = seen.row
        status = row.status
        return TaskStatus(
            self.id,
            row.spec.name,
            row.spec.queue,
            row.state.name,
            row.where,
            status.attempt,
            status.failures,
            status.expiries,
            status.reason,
            status.error,
            codec.unpack(seen.progress) if seen.progress else None,
        )

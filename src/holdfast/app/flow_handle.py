"""The handle of a flow: wait for its result, send it events, read its steps and published values, cancel it."""

from __future__ import annotations

import typing
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from holdfast import codec
from holdfast.app import store_calls
from holdfast.app.flow_definition import Flow
from holdfast.app.store_calls import Commit, Read, StoreCall
from holdfast.app.task_handle import check_timeout
from holdfast.clock import S
from holdfast.errors import Invalid, NotFound, Timeout
from holdfast.flows import fork, mailbox, operations, queries, redrive, step_list
from holdfast.flows.model import FlowFailed, FlowId, FlowNotFound, MailRow, StartedFlow, keys_of
from holdfast.flows.queries import FlowDetails
from holdfast.flows.states import ENDED, FlowState
from holdfast.flows.step_list import FlowStep, StepPage
from holdfast.store.api import Txn
from holdfast.workers.tasks.attempt import waiting_for_tasks

if TYPE_CHECKING:
    from holdfast.app.runtime import Runtime
    from holdfast.blockers.answer import Blocker

T = TypeVar("T")
V = TypeVar("V")


class FlowStatus(NamedTuple):
    """The state of a flow, and why it ended or is parked."""

    id: str
    name: str
    key: str
    state: str
    run: int
    code: str
    step: str
    error_type: str
    error: str
    failures: int


class FlowHandle(Generic[T]):
    """A started flow."""

    def __init__(self, runtime: Runtime, id: FlowId, flow: Flow[Any, T] | None = None) -> None:
        self._runtime = runtime
        self._id = id
        self._flow = flow

    @property
    def id(self) -> str:
        return str(self._id)

    @property
    def key(self) -> str:
        return self._details().body.key

    def __repr__(self) -> str:
        return f"<flow {self.id}>"

    @property
    def runtime(self) -> Runtime:
        return self._runtime

    def status(self) -> FlowStatus:
        return self._run(self.status_call())

    def done(self) -> bool:
        return self._run(self.done_call())

    def result(self, timeout: float | None = None) -> T:
        """Wait for the flow and return its result. Raises FlowFailed, or Timeout after `timeout` seconds."""
        check_timeout(timeout)
        details = self._runtime.store.read(self._ended)
        if details is None:
            with waiting_for_tasks():
                details = self._wait_until_ended(timeout)
        return self._decode(details)

    def _wait_until_ended(self, timeout: float | None) -> FlowDetails:
        runtime = self._runtime
        store, clock = runtime.store, runtime.clock
        topic = keys_of(runtime.universe).topic(self._id.seq)
        until_ns = None if timeout is None else clock.mono_ns() + int(timeout * S)
        since = store.wait(topic, 0, 0.0)
        while (details := store.read(self._ended)) is None:
            left_s = 1.0
            if until_ns is not None:
                left_s = min(left_s, (until_ns - clock.mono_ns()) / S)
                if left_s <= 0:
                    runtime.check()
                    raise Timeout(what="flow", flow=self.id, waited_s=timeout)
            since = store.wait(topic, since, left_s)
            runtime.check()
        return details

    async def result_async(self, timeout: float | None = None) -> T:
        """`result` for a coroutine; `await handle` does the same."""
        check_timeout(timeout)
        runtime = self._runtime
        details = await runtime.flow_waiting.until(self._ended, self._id.seq, timeout)
        if details is None:
            runtime.check()
            raise Timeout(what="flow", flow=self.id, waited_s=timeout)
        return self._decode(details)

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    def send(self, event: Any, *, key: str | None = None) -> int:
        """Put an event into the flow's inbox. With a key the event is sent once. Returns its number."""
        return self._run(self.send_call(event, key))

    def cancel(self) -> bool:
        """Cancel the flow. Its compensations run. Returns whether this call caused the cancellation."""
        return self._run(self.cancel_call())

    def steps(
        self, run: int | None = None, *, after: int = 0, limit: int | None = None
    ) -> list[FlowStep]:
        """The recorded and open steps of a run, in the order of their positions. `limit` ends the list at a position,
        and `after=steps[-1].position` continues it."""
        return self._run(self.steps_call(run, after, limit))

    def events(self) -> list[tuple[str, Any]]:
        """The events that wait in the inbox: (type, value), oldest first."""
        return self._run(self.events_call())

    def published(self, name: str | None = None, default: Any = None) -> Any:
        """The last value published under a name, or all of them."""
        return self._run(self.published_call(name, default))

    def fork(self, key: str, *, at: str | None = None) -> FlowHandle[T]:
        """Start a new flow with the recorded steps before `at`: "charge", or "charge#3" for the third. "undo:refund" is the
        registration of a compensation. Without `at` all recorded steps are taken over."""
        return self._run(self.fork_call(key, at))

    def resume(self) -> bool:
        """Run a PARKED flow again. Returns whether it was parked."""
        return self._run(self.resume_call())

    def redrive(self) -> FlowHandle[T]:
        """Run a FAILED or DEAD flow again."""
        return self._run(self.redrive_call())

    def why(self) -> list[Blocker]:
        """What the flow waits for: a list of blockers with code, text and action."""
        from holdfast.blockers.flows import list_blockers

        return self._runtime.store.read(list_blockers, self._runtime.universe, self._id.seq)

    # -- calls that threads and coroutines share -----------------------------------------------

    def status_call(self) -> StoreCall[FlowStatus]:
        details: FlowDetails = yield Read(self._read)
        head = details.head
        return FlowStatus(
            id=self.id,
            name=details.body.spec.name,
            key=details.body.key,
            state=FlowState(head.state).name,
            run=head.run,
            code=head.code,
            step=head.step,
            error_type=head.error_type,
            error=head.error,
            failures=head.failures,
        )

    def done_call(self) -> StoreCall[bool]:
        details: FlowDetails = yield Read(self._read)
        return details.head.state in ENDED

    def send_call(self, event: Any, key: str | None) -> StoreCall[int]:
        name, value = self._runtime.app.encode_event(event)
        mail = MailRow(name, value, key=key or "")
        number: int = yield self._commit(mailbox.send, mail)
        return number

    def cancel_call(self) -> StoreCall[bool]:
        caused: bool = yield self._commit(operations.cancel)
        return caused

    def steps_call(
        self, run: int | None, after: int, limit: int | None
    ) -> StoreCall[list[FlowStep]]:
        if limit is not None and limit < 1:
            raise Invalid(what="limit", found=limit, min=1, max=step_list.PAGE_STEPS_MAX)
        page: StepPage = yield self._query(step_list.list_steps, run, after, limit or 0)
        return page.steps

    def events_call(self) -> StoreCall[list[tuple[str, Any]]]:
        events: list[tuple[str, Any]] = yield self._query(queries.list_mail)
        return events

    def published_call(self, name: str | None, default: Any) -> StoreCall[Any]:
        values: dict[str, Any] = yield self._query(queries.published_values)
        return values if name is None else values.get(name, default)

    def fork_call(self, key: str, at: str | None) -> StoreCall[FlowHandle[T]]:
        started: StartedFlow = yield self._commit(fork.fork, key, at or "")
        return self._of(started)

    def resume_call(self) -> StoreCall[bool]:
        yield Read(self._read)
        resumed: bool = yield Commit(operations.resume, (self._runtime.universe, self._id.seq))
        return resumed

    def redrive_call(self) -> StoreCall[FlowHandle[T]]:
        yield Read(self._read)
        started: StartedFlow = yield Commit(redrive.redrive, (self._runtime.universe, self._id.seq))
        return self._of(started)

    # -- inside ------------------------------------------------------------------------------------

    def exists_call(self) -> StoreCall[FlowHandle[T]]:
        """Return the handle. Raise NotFound if there is no such flow."""
        yield Read(self._read)
        return self

    def _run(self, call: StoreCall[V]) -> V:
        return store_calls.run(self._runtime.store, call)

    def _commit(self, operation: Callable[..., Any], *args: Any) -> Commit:
        """An operation that checks the generation of the flow."""
        return Commit(operation, (self._runtime.universe, self._id.seq, self._id.generation, *args))

    def _query(self, fn: Callable[..., Any], *args: Any) -> Read:
        """A read of the flow. Raises NotFound if there is no such flow."""

        def read(txn: Txn) -> Any:
            self._read(txn)
            return fn(txn, self._runtime.universe, self._id.seq, *args)

        return Read(read)

    def _of(self, started: StartedFlow) -> FlowHandle[T]:
        return FlowHandle(self._runtime, FlowId(started.generation, started.seq), self._flow)

    def _details(self) -> FlowDetails:
        return self._runtime.store.read(self._read)

    def _read(self, txn: Txn) -> FlowDetails:
        try:
            details = queries.get_details(txn, self._runtime.universe, self._id.seq)
        except NotFound:
            raise FlowNotFound(what="flow", flow=self.id) from None
        if details.body.generation != self._id.generation:
            raise FlowNotFound(what="flow", flow=self.id)
        return details

    def _ended(self, txn: Txn) -> FlowDetails | None:
        details = self._read(txn)
        return details if details.head.state in ENDED else None

    def _decode(self, details: FlowDetails) -> T:
        head = details.head
        if head.state != FlowState.COMPLETED:
            raise FlowFailed(
                flow=self.id,
                name=details.body.spec.name,
                state=FlowState(head.state).name,
                code=head.code,
                step=head.step,
                error_type=head.error_type,
                error=head.error,
            )
        flow = self._flow or self._runtime.app.flows.get(details.body.spec.name)
        if flow is None:
            return typing.cast(T, codec.unpack(details.result))
        return typing.cast(T, flow.value(details.result))


def by_key_call(runtime: Runtime, flow: Flow[Any, T], key: str) -> StoreCall[FlowHandle[T]]:
    """Return the handle of the flow with a key. Raise NotFound if there is none."""
    found = yield Read(queries.find_by_key, (runtime.universe, flow.name, key))
    if found is None:
        raise FlowNotFound(what="flow", name=flow.name, key=key)
    return FlowHandle(runtime, found, flow)


def check_key(key: Any) -> str:
    if not isinstance(key, str) or not key:
        raise Invalid(what="key", found=repr(key)[:64], expected="text")
    return key

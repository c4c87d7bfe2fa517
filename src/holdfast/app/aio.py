"""`rt.aio`: the calls of a runtime for coroutines.

    handle = await rt.aio.submit(resize, "a.png", 80)
    path = await handle                                   # or rt.aio.result(handle, timeout=30)
    balance = await rt.aio.ask(ada, BalanceAsked())
    async for path in rt.aio.map(resize, paths): ...

No call blocks the event loop. Commits are futures of the store. Reads that may block run in the reader threads of
`result_waiter`. The calls are those of `Runtime` and of the handles: both run the same code (`store_calls`,
`submission`, `flow_start`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    ParamSpec,
    TypeVar,
    TypeVarTuple,
    Unpack,
    overload,
)

from holdfast.app import store_calls, submission
from holdfast.app.definitions import Event, World
from holdfast.app.flow_handle import FlowHandle
from holdfast.app.task_handle import TaskHandle

if TYPE_CHECKING:
    from holdfast.app.flow_definition import Flow, FlowCall
    from holdfast.app.flow_handle import FlowStatus
    from holdfast.app.runtime import Runtime
    from holdfast.app.store_calls import StoreCall
    from holdfast.app.task_handle import TaskStatus
    from holdfast.app.tasks import AsyncTask, Task, TaskCall
    from holdfast.app.world_handle import Delivery, WorldHandle
    from holdfast.blockers.answer import WhyAnswer
    from holdfast.flows.step_list import FlowStep

T = TypeVar("T")
V = TypeVar("V")
R = TypeVar("R")
W = TypeVar("W", bound=World)
P = ParamSpec("P")
A = TypeVarTuple("A")


class AsyncRuntime:
    """The asyncio face of a runtime. It is stateless, and several event loops may use it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    # -- tasks and flows -----------------------------------------------------------------------

    @overload
    async def submit(
        self, task: Task[P, T] | TaskCall[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> TaskHandle[T]: ...
    @overload
    async def submit(
        self, task: Task[..., T] | TaskCall[..., T], /, *args: Any, key: str, **kwargs: Any
    ) -> TaskHandle[T]: ...

    async def submit(self, task: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Submit a task. Coroutines of one event loop share commits. Await the handle for the result."""
        return await submission.submit_async(self._runtime, task, args, kwargs)

    @overload
    async def submit_many(
        self, task: AsyncTask[..., T], many: Iterable[Sequence[Any]], /
    ) -> list[TaskHandle[T]]: ...
    @overload
    async def submit_many(
        self, task: Callable[[Unpack[A]], T], many: Iterable[tuple[*A]], /
    ) -> list[TaskHandle[T]]: ...
    @overload
    async def submit_many(
        self, task: TaskCall[..., T], many: Iterable[Sequence[Any]], /
    ) -> list[TaskHandle[T]]: ...

    async def submit_many(self, task: Any, many: Iterable[Any], /) -> list[Any]:
        """Submit a task for each tuple of arguments."""
        return await submission.submit_many_async(self._runtime, task, many)

    async def start(
        self, flow: Flow[P, T] | FlowCall[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> FlowHandle[T]:
        """Start a flow, or `flow.options(…)`. The flow is durable on return."""
        from holdfast.app import flow_start

        return await flow_start.start_async(self._runtime, flow, args, kwargs)

    @overload
    async def flow(self, id: str) -> FlowHandle[Any]: ...
    @overload
    async def flow(self, id: Flow[..., T], *, key: str) -> FlowHandle[T]: ...

    async def flow(self, id: Any, *, key: str | None = None) -> FlowHandle[Any]:
        """Return the handle of a flow by id, or of a declared flow by key. Raise NotFound if there is none."""
        from holdfast.app import flow_start

        call = flow_start.find_call(self._runtime, id, key)
        return await store_calls.run_async(self._runtime.store, self._runtime.waiting, call)

    async def result(
        self, handle: TaskHandle[T] | FlowHandle[T], *, timeout: float | None = None
    ) -> T:
        """Wait for a task or a flow and return its result. Raises the errors of `handle.result`."""
        return await handle.result_async(timeout)

    @overload
    def map(
        self,
        task: Callable[[V], Coroutine[Any, Any, T]],
        values: Iterable[V],
        /,
        *,
        timeout: float | None = None,
    ) -> AsyncIterator[T]: ...
    @overload
    def map(
        self, task: Callable[[V], T], values: Iterable[V], /, *, timeout: float | None = None
    ) -> AsyncIterator[T]: ...
    @overload
    def map(
        self, task: TaskCall[..., T], values: Iterable[Any], /, *, timeout: float | None = None
    ) -> AsyncIterator[T]: ...

    async def map(
        self, task: Any, values: Iterable[Any], /, *, timeout: float | None = None
    ) -> AsyncIterator[Any]:
        """Submit a task for each value when the iteration starts. Iterate over the results in order."""
        arguments = ((value,) for value in values)
        for handle in await submission.submit_many_async(self._runtime, task, arguments):
            yield await handle.result_async(timeout)

    async def why(self, of: Any, id: str | None = None, /) -> WhyAnswer:
        """Return why a subject does not move: of a handle, or of a kind and an id."""
        from holdfast.app.why_call import subject_of, why_call

        subject = subject_of(self._runtime, of, id)
        store, waiting = subject.runtime.store, subject.runtime.waiting
        return await store_calls.run_async(store, waiting, why_call(subject))

    async def done(self, handle: TaskHandle[Any] | FlowHandle[Any]) -> bool:
        """Whether a task or a flow has ended."""
        return await _run(handle, handle.done_call())

    @overload
    async def status(self, handle: TaskHandle[Any]) -> TaskStatus: ...
    @overload
    async def status(self, handle: FlowHandle[Any]) -> FlowStatus: ...

    async def status(self, handle: TaskHandle[Any] | FlowHandle[Any]) -> TaskStatus | FlowStatus:
        if isinstance(handle, TaskHandle):
            return await _run(handle, handle.status_call())
        return await _run(handle, handle.status_call())

    async def cancel(self, handle: TaskHandle[Any] | FlowHandle[Any]) -> bool:
        """Cancel a task or a flow. Returns whether this call cancelled it."""
        return await _run(handle, handle.cancel_call())

    # -- flows ---------------------------------------------------------------------------------

    async def steps(
        self,
        flow: FlowHandle[Any],
        run: int | None = None,
        *,
        after: int = 0,
        limit: int | None = None,
    ) -> list[FlowStep]:
        """The recorded and open steps of a run, in the order of their positions, or a page of them."""
        return await _run(flow, flow.steps_call(run, after, limit))

    async def events(self, flow: FlowHandle[Any]) -> list[tuple[str, Any]]:
        """The events that wait in the inbox of a flow: (type, value), oldest first."""
        return await _run(flow, flow.events_call())

    async def published(
        self, flow: FlowHandle[Any], name: str | None = None, default: Any = None
    ) -> Any:
        """The last value that a flow published under a name, or all of them."""
        return await _run(flow, flow.published_call(name, default))

    async def fork(self, flow: FlowHandle[T], key: str, *, at: str | None = None) -> FlowHandle[T]:
        """Start a new flow with the recorded steps of a flow before `at`, or with all of them."""
        return await _run(flow, flow.fork_call(key, at))

    async def resume(self, flow: FlowHandle[Any]) -> bool:
        """Run a PARKED flow again. Returns whether it was parked."""
        return await _run(flow, flow.resume_call())

    async def redrive(self, flow: FlowHandle[T]) -> FlowHandle[T]:
        """Run a FAILED or DEAD flow again."""
        return await _run(flow, flow.redrive_call())

    # -- worlds --------------------------------------------------------------------------------

    @overload
    async def send(
        self, to: WorldHandle[Any], event: Any, *, key: str | None = None
    ) -> Delivery: ...
    @overload
    async def send(self, to: FlowHandle[Any], event: Any, *, key: str | None = None) -> int: ...

    async def send(
        self, to: WorldHandle[Any] | FlowHandle[Any], event: Any, *, key: str | None = None
    ) -> int:
        """Deliver an event durably to a world or a flow, once per key. Returns its number in the inbox."""
        if isinstance(to, FlowHandle):
            return await _run(to, to.send_call(event, key))
        return await _run(to, to.send_call(event, key))

    @overload
    async def ask(
        self,
        world: WorldHandle[Any],
        event: Event[R],
        *,
        timeout: float = 30.0,
        key: str | None = None,
    ) -> R: ...
    @overload
    async def ask(
        self,
        world: WorldHandle[Any],
        event: object,
        *,
        timeout: float = 30.0,
        key: str | None = None,
    ) -> Any: ...

    async def ask(
        self, world: WorldHandle[Any], event: Any, *, timeout: float = 30.0, key: str | None = None
    ) -> Any:
        """Deliver an event and wait for the reply of its handler. Raises the errors of `world.ask`."""
        return await _run(world, world.ask_call(event, timeout, key))

    async def state(self, world: WorldHandle[W], *, at: int | None = None) -> W:
        """Return the state after the last entry, or after entry `at`."""
        return await _run(world, world.state_call(at))

    async def wait_for(
        self, world: WorldHandle[W], condition: Callable[[W], object], *, timeout: float = 30.0
    ) -> W:
        """Wait until the state fulfils the condition and return it. The condition runs in the event loop."""
        return await _run(world, world.wait_for_call(condition, timeout))


async def _run(
    handle: WorldHandle[Any] | FlowHandle[Any] | TaskHandle[Any], call: StoreCall[T]
) -> T:
    # The handle of a world in another universe has its own runtime.
    runtime = handle.runtime
    return await store_calls.run_async(runtime.store, runtime.waiting, call)

"""The two faces of a runtime under one interface: blocking calls, and `rt.aio` in an event loop. One suite runs on both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Protocol

import holdfast as hf

LONG_S = 60.0


class Face(Protocol):
    def submit(self, task: Any, *args: Any, **kwargs: Any) -> hf.TaskHandle[Any]: ...
    def submit_many(self, task: Any, many: Iterable[Any]) -> list[hf.TaskHandle[Any]]: ...
    def map(self, task: Any, values: Iterable[Any]) -> list[Any]: ...
    def start(self, flow: Any, *args: Any, **kwargs: Any) -> hf.FlowHandle[Any]: ...
    def flow(self, id: Any, **options: Any) -> hf.FlowHandle[Any]: ...
    def result(self, handle: Any, timeout: float | None = LONG_S) -> Any: ...
    def status(self, handle: Any) -> Any: ...
    def done(self, handle: Any) -> bool: ...
    def cancel(self, handle: Any) -> bool: ...
    def steps(self, flow: Any, *args: Any, **options: Any) -> list[Any]: ...
    def events(self, flow: Any) -> list[tuple[str, Any]]: ...
    def published(self, flow: Any, *args: Any) -> Any: ...
    def fork(self, flow: Any, key: str, **options: Any) -> hf.FlowHandle[Any]: ...
    def resume(self, flow: Any) -> bool: ...
    def redrive(self, flow: Any) -> hf.FlowHandle[Any]: ...
    def send(self, to: Any, event: Any, **options: Any) -> Any: ...
    def ask(self, world: Any, event: Any, **options: Any) -> Any: ...
    def state(self, world: Any, at: int | None = None) -> Any: ...
    def wait_for(self, world: Any, condition: Callable[[Any], object], **options: Any) -> Any: ...
    def close(self) -> None: ...


class BlockingFace:
    def __init__(self, runtime: hf.Runtime) -> None:
        self.submit = runtime.submit
        self.submit_many = runtime.submit_many
        self.start = runtime.start
        self.flow = runtime.flow
        self._map = runtime.map

    def map(self, task: Any, values: Iterable[Any]) -> list[Any]:
        return list(self._map(task, values, timeout=LONG_S))

    def result(self, handle: Any, timeout: float | None = LONG_S) -> Any:
        return handle.result(timeout)

    def status(self, handle: Any) -> Any:
        return handle.status()

    def done(self, handle: Any) -> bool:
        done: bool = handle.done()
        return done

    def cancel(self, handle: Any) -> bool:
        caused: bool = handle.cancel()
        return caused

    def steps(self, flow: Any, *args: Any, **options: Any) -> list[Any]:
        steps: list[Any] = flow.steps(*args, **options)
        return steps

    def events(self, flow: Any) -> list[tuple[str, Any]]:
        events: list[tuple[str, Any]] = flow.events()
        return events

    def published(self, flow: Any, *args: Any) -> Any:
        return flow.published(*args)

    def fork(self, flow: Any, key: str, **options: Any) -> hf.FlowHandle[Any]:
        forked: hf.FlowHandle[Any] = flow.fork(key, **options)
        return forked

    def resume(self, flow: Any) -> bool:
        resumed: bool = flow.resume()
        return resumed

    def redrive(self, flow: Any) -> hf.FlowHandle[Any]:
        redriven: hf.FlowHandle[Any] = flow.redrive()
        return redriven

    def send(self, to: Any, event: Any, **options: Any) -> Any:
        return to.send(event, **options)

    def ask(self, world: Any, event: Any, **options: Any) -> Any:
        return world.ask(event, **options)

    def state(self, world: Any, at: int | None = None) -> Any:
        return world.state(at)

    def wait_for(self, world: Any, condition: Callable[[Any], object], **options: Any) -> Any:
        return world.wait_for(condition, **options)

    def close(self) -> None:
        pass


class AsyncioFace:
    """Runs each call of `rt.aio` in its event loop, with a limit on its time."""

    def __init__(self, runtime: hf.Runtime) -> None:
        self._aio = runtime.aio
        self._loop = asyncio.Runner()

    def _run(self, call: Any) -> Any:
        async def limited() -> Any:
            return await asyncio.wait_for(call, 2 * LONG_S)

        return self._loop.run(limited())

    def submit(self, task: Any, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._aio.submit(task, *args, **kwargs))

    def submit_many(self, task: Any, many: Iterable[Any]) -> Any:
        return self._run(self._aio.submit_many(task, many))

    def map(self, task: Any, values: Iterable[Any]) -> Any:
        return self._run(_collect(self._aio.map(task, values, timeout=LONG_S)))

    def start(self, flow: Any, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._aio.start(flow, *args, **kwargs))

    def flow(self, id: Any, **options: Any) -> Any:
        return self._run(self._aio.flow(id, **options))

    def result(self, handle: Any, timeout: float | None = LONG_S) -> Any:
        return self._run(self._aio.result(handle, timeout=timeout))

    def status(self, handle: Any) -> Any:
        return self._run(self._aio.status(handle))

    def done(self, handle: Any) -> Any:
        return self._run(self._aio.done(handle))

    def cancel(self, handle: Any) -> Any:
        return self._run(self._aio.cancel(handle))

    def steps(self, flow: Any, *args: Any, **options: Any) -> Any:
        return self._run(self._aio.steps(flow, *args, **options))

    def events(self, flow: Any) -> Any:
        return self._run(self._aio.events(flow))

    def published(self, flow: Any, *args: Any) -> Any:
        return self._run(self._aio.published(flow, *args))

    def fork(self, flow: Any, key: str, **options: Any) -> Any:
        return self._run(self._aio.fork(flow, key, **options))

    def resume(self, flow: Any) -> Any:
        return self._run(self._aio.resume(flow))

    def redrive(self, flow: Any) -> Any:
        return self._run(self._aio.redrive(flow))

    def send(self, to: Any, event: Any, **options: Any) -> Any:
        return self._run(self._aio.send(to, event, **options))

    def ask(self, world: Any, event: Any, **options: Any) -> Any:
        return self._run(self._aio.ask(world, event, **options))

    def state(self, world: Any, at: int | None = None) -> Any:
        return self._run(self._aio.state(world, at=at))

    def wait_for(self, world: Any, condition: Callable[[Any], object], **options: Any) -> Any:
        return self._run(self._aio.wait_for(world, condition, **options))

    def close(self) -> None:
        self._loop.close()


async def _collect(values: AsyncIterator[Any]) -> list[Any]:
    return [value async for value in values]


FACES: dict[str, Callable[[hf.Runtime], Face]] = {"blocking": BlockingFace, "asyncio": AsyncioFace}

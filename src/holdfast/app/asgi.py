"""`hf.asgi.lifespan`: a runtime that opens and closes with a FastAPI or Starlette application.

    api = FastAPI(lifespan=hf.asgi.lifespan(app, "./data"))

    @api.post("/orders/{id}")
    async def place(id: str, request: Request) -> str:
        rt = hf.asgi.runtime(request)
        return (await rt.aio.start(order, id)).id

The runtime runs the roles of the app, unless `roles=()` leaves them to other processes (`holdfast up`). Several server
processes may use one store.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

from holdfast.errors import Invalid

if TYPE_CHECKING:
    from holdfast.app.app import App
    from holdfast.app.runtime import Runtime
    from holdfast.store.api import Store

__all__ = ["lifespan", "runtime"]

# The name of the runtime in the state of the application and of each request.
STATE_NAME = "holdfast"


def lifespan(
    app: App, url: str | Store | None = None, **options: Any
) -> Callable[[Any], AbstractAsyncContextManager[dict[str, Any]]]:
    """Return a lifespan for `FastAPI(lifespan=…)` or `Starlette(lifespan=…)`. Arguments as for `app.open`.

    The event loop runs while the store opens and while the roles stop.
    """

    @asynccontextmanager
    async def opened(server: Any) -> AsyncIterator[dict[str, Any]]:
        rt = await asyncio.to_thread(app.open, url, **options)
        try:
            server.state.holdfast = rt
            yield {STATE_NAME: rt}
        finally:
            await asyncio.to_thread(rt.close)

    return opened


def runtime(request: Any) -> Runtime:
    """Return the runtime of a request or of an application."""
    found: Runtime | None = getattr(request.state, STATE_NAME, None)
    if found is None:
        raise Invalid(
            what="runtime",
            why="the application has no lifespan of hf.asgi.lifespan, or it has not started",
        )
    return found

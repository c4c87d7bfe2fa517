"""Run by the peers' interpreter: the counter as a Restate virtual object, over HTTP/2 by hypercorn.

    python restate_service.py PORT WORKERS

`add` is the message: it reads the object's state and writes it, as the reducer of our world does.
`get` queues behind earlier messages, so that its answer confirms their completion.
`fan` sends many messages from inside one durable invocation, which is the nearest equivalent of a batch.
"""

from __future__ import annotations

import sys

import restate
from hypercorn.config import Config
from hypercorn.run import run

UNBOUNDED = 2**31 - 1

counter = restate.VirtualObject("Counter")
fan = restate.Service("Fan")


@counter.handler()
async def add(ctx: restate.ObjectContext, amount: int) -> int:
    total = (await ctx.get("total") or 0) + amount
    ctx.set("total", total)
    return total


@counter.handler()
async def get(ctx: restate.ObjectContext) -> int:
    return await ctx.get("total") or 0


@counter.handler(kind="shared")
async def peek(ctx: restate.ObjectSharedContext) -> int:
    return await ctx.get("total") or 0


@fan.handler()
async def out(ctx: restate.Context, keys: list[str]) -> int:
    for key in keys:
        ctx.object_send(add, key, arg=1)
    return len(keys)


app = restate.app(services=[counter, fan])


def serve_app(path: str, port: int, workers: int) -> None:
    config = Config()
    config.application_path = path
    config.bind = [f"127.0.0.1:{port}"]
    config.workers = workers
    config.accesslog = None
    config.errorlog = None
    # By default hypercorn closes a connection after 1,000 requests, and Restate retries half a second later.
    config.keep_alive_max_requests = UNBOUNDED
    config.keep_alive_timeout = 3600
    config.h2_max_concurrent_streams = UNBOUNDED
    run(config)


if __name__ == "__main__":
    serve_app(f"{__file__}:app", int(sys.argv[1]), int(sys.argv[2]))

"""What the replay processes of these tests run: a function with planned outcomes, and flows that end or block their process."""

import os
import time
from pathlib import Path
from typing import Any

import holdfast as hf
from holdfast.errors import NotFound
from holdfast.ops.replay_process import replay_function
from holdfast.store.api import Store


@replay_function(str, str)
def act(store: Store, app: Any, action: str, limit_s: float | None) -> str:
    name, _, argument = action.partition(" ")
    match name:
        case "exit":
            os._exit(9)
        case "hang":
            Path(argument).write_text(str(os.getpid()))
            time.sleep(600)
        case "fork":
            # The forked process keeps the descriptors of the child open.
            if os.fork() == 0:
                time.sleep(600)
            os._exit(9)
        case "print":
            print(argument, flush=True)
        case "raise":
            raise KeyError(argument)
        case "not-found":
            raise NotFound(what=argument)
        case "seed":
            return os.environ["PYTHONHASHSEED"]
        case "app":
            return str(app and app.name)
    return argument


async def reserve(item: str) -> str:
    return item


@hf.flow(name="order")
async def order(item: str) -> str:
    return await hf.step(reserve, item)


@hf.flow(name="order")
async def order_that_exits(item: str) -> str:
    if item == "lamp":
        os._exit(9)
    return await hf.step(reserve, item)


@hf.flow(name="order")
async def order_that_blocks(item: str) -> str:
    if item == "lamp":
        if marker := os.environ.get("HOLDFAST_TEST_BLOCKED"):
            Path(marker).touch()
        time.sleep(600)
    return await hf.step(reserve, item)


app = hf.App("shop", flows=[order])
app_exits = hf.App("shop", flows=[order_that_exits])
app_blocks = hf.App("shop", flows=[order_that_blocks])

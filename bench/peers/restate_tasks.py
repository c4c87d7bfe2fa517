"""Run by the peers' interpreter: the tasks of Restate, or their fan-out, over HTTP/2 by hypercorn.

    python restate_tasks.py tasks|fan PORT WORKERS TALLY

The services have separate endpoints, so that tasks can be sent while no worker runs them. `out` sends
many tasks from inside one durable invocation, which is the nearest equivalent of a batch.
"""

from __future__ import annotations

import os
import sys

import restate
from restate_service import serve_app
from tally import VARIABLE, Tally

task = restate.Service("Task")
fan = restate.Service("Fan")
_tally: list[Tally] = []


@task.handler()
async def run(ctx: restate.Context, arguments: tuple[int, str]) -> None:
    sent_ns, _note = arguments
    if not _tally:
        _tally.append(Tally(os.environ[VARIABLE]))
    _tally[0].mark(sent_ns)


@fan.handler()
async def out(ctx: restate.Context, many: list[tuple[int, str]]) -> int:
    for arguments in many:
        ctx.service_send(run, arg=arguments)
    return len(many)


tasks_app = restate.app(services=[task])
fan_app = restate.app(services=[fan])

if __name__ == "__main__":
    which, port, workers, os.environ[VARIABLE] = sys.argv[1:]
    serve_app(f"{__file__}:{which}_app", int(port), int(workers))

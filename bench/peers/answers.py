"""The server side of `process.Load`. It imports none of our code: the peers' interpreter runs it, too."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

ERROR_CHARS = 2000


def serve(answers: Mapping[str, Callable[..., Any]]) -> None:
    """Call the function that a line names and answer with a line, until the input ends.

    If the input ends during a call, no process waits for the answer. The process then exits at once.
    """
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    busy = threading.Event()
    threading.Thread(target=_listen, args=(lines, busy), daemon=True).start()
    print("ready", flush=True)
    while (line := lines.get()) is not None:
        request = json.loads(line)
        try:
            answer = answers[request.pop("what")](**request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:ERROR_CHARS]}
        busy.clear()
        print(json.dumps(answer or {}), flush=True)


def serve_beside() -> None:
    """For a process with other work: print `ready`, and exit when the input ends."""
    threading.Thread(target=_end_with_input, daemon=True).start()


def _end_with_input() -> None:
    serve({})
    os._exit(0)


def _listen(lines: queue.SimpleQueue[str | None], busy: threading.Event) -> None:
    for line in sys.stdin:
        busy.set()
        lines.put(line)
    if busy.is_set():
        os._exit(1)
    lines.put(None)

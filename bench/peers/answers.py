"""The other side of `process.Load`. It imports nothing of ours: the peers' interpreter runs it, too."""

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
    """Call the function that a line names, answer with a line, until the input ends.

    An input that ends in the middle of a call means that nobody waits for its answer any more: the
    process leaves at once, rather than work on for ever.
    """
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    busy = threading.Event()
    threading.Thread(target=_listen, args=(lines, busy), daemon=True).start()
    print("ready", flush=True)
    while (line := lines.get()) is not None:
        asked = json.loads(line)
        try:
            answer = answers[asked.pop("what")](**asked)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:ERROR_CHARS]}
        busy.clear()
        print(json.dumps(answer or {}), flush=True)


def serve_beside() -> None:
    """For a process that has something else to do: says `ready`, ends it when the input ends."""
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

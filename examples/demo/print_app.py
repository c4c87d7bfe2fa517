"""Application of part 5 of the demo: tasks that print pages, and one that kills its worker."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import holdfast as hf

BOOK = "PRESS_BOOK"
BOOKBINDERS = 2


@hf.task(lease_s=1, attempts=3, expiries_max=4, backoff_s=0.05)
def print_page(page: int) -> int:
    """Print a page: append a line to the book. A line may occur twice if a worker died in
    between."""
    with Path(os.environ[BOOK]).open("a") as book:
        book.write(f"{page}\n")
    return page


@hf.task(lease_s=1, expiries_max=2)
def jam() -> None:
    """Kill the worker process."""
    os.kill(os.getpid(), signal.SIGKILL)


@hf.task(queue="bindery")
async def bind(pages: int) -> str:
    return f"a book of {pages} pages"


app = hf.App("press", tasks=[print_page, jam, bind], queues=[hf.Queue("bindery", BOOKBINDERS)])

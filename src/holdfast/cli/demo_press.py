"""The application of the demo's fifth act: pages to print, one of which breaks the press."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from holdfast.app.app import App
from holdfast.app.tasks import Queue, task

BOOK = "PRESS_BOOK"
BOOKBINDERS = 2


@task(lease_s=1, attempts=3, expiries_max=4, backoff_s=0.05)
def print_page(page: int) -> int:
    """Prints a page: a line in the book, which may be there twice if a worker died in between."""
    with Path(os.environ[BOOK]).open("a") as book:
        book.write(f"{page}\n")
    return page


@task(lease_s=1, expiries_max=2)
def jam() -> None:
    """Breaks the press: its whole process is gone."""
    os.kill(os.getpid(), signal.SIGKILL)


@task(queue="bindery")
async def bind(pages: int) -> str:
    return f"a book of {pages} pages"


app = App("press", tasks=[print_page, jam, bind], queues=[Queue("bindery", BOOKBINDERS)])

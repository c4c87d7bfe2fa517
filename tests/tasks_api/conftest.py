"""Apps with tasks, opened on a store in memory: with a worker, or without one, so that tasks stay where
they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import holdfast as hf

Open = Callable[..., hf.Runtime]


@pytest.fixture
def running() -> Iterator[Open]:
    """Open an app of these tasks with a task worker; it has not failed by the end of the test."""
    with ExitStack() as stack:

        def start(*tasks: hf.Task[Any, Any], url: Any = "memory:", **options: Any) -> hf.Runtime:
            app = hf.App("jobs", tasks=tasks, queues=options.pop("limits", ()))
            return stack.enter_context(app.open(url, **{"roles": ("task",), **options}))

        opened: list[hf.Runtime] = []
        yield lambda *tasks, **options: opened.append(start(*tasks, **options)) or opened[-1]
        for runtime in opened:
            runtime.check()


@pytest.fixture
def resting(running: Open) -> Open:
    """The same without a worker."""
    return lambda *tasks, **options: running(*tasks, **{"roles": (), **options})

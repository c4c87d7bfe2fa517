"""Fixtures that open an app with tasks on a memory store, with or without a task worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import holdfast as hf

OpenApp = Callable[..., hf.Runtime]


@pytest.fixture
def open_with_worker() -> Iterator[OpenApp]:
    """Open an app of these tasks with a task worker. The fixture checks at the end that no role failed."""
    with ExitStack() as exit_stack:

        def start(*tasks: hf.Task[Any, Any], url: Any = "memory:", **options: Any) -> hf.Runtime:
            app = hf.App("jobs", tasks=tasks, queues=options.pop("limits", ()))
            return exit_stack.enter_context(app.open(url, **{"roles": ("task",), **options}))

        opened: list[hf.Runtime] = []
        yield lambda *tasks, **options: opened.append(start(*tasks, **options)) or opened[-1]
        for runtime in opened:
            runtime.check()


@pytest.fixture
def open_without_worker(open_with_worker: OpenApp) -> OpenApp:
    """Open an app of these tasks without a worker, so that tasks stay submitted."""
    return lambda *tasks, **options: open_with_worker(*tasks, **{"roles": (), **options})

"""The hooks that an app installs for every runner and task worker of a process (see `runner.hooks`).

This module imports nothing, so that a declaration of an app loads no part of the runtime.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class AppHooks(NamedTuple):
    """An error of a hook is counted and dropped. A hook must not wait: the worker calls it."""

    # Called with a `runner.hooks.LogEvent`.
    log: Callable[[Any], object] | None = None
    # Called with a `runner.counters.Metrics`.
    metrics: Callable[[Any], object] | None = None
    # Called with a `runner.hooks.RecordedStep`.
    replay: Callable[[Any], object] | None = None


NO_HOOKS = AppHooks()

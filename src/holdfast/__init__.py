"""Holdfast: a durable runtime for work that must happen once.

    import holdfast as hf

The names below are loaded when they are first used, so that importing this costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from holdfast.app.app import App as App
    from holdfast.app.declare import Call as Call
    from holdfast.app.declare import Costed as Costed
    from holdfast.app.declare import Effect as Effect
    from holdfast.app.declare import Event as Event
    from holdfast.app.declare import Inbox as Inbox
    from holdfast.app.declare import Mail as Mail
    from holdfast.app.declare import Receipt as Receipt
    from holdfast.app.declare import Upcast as Upcast
    from holdfast.app.declare import World as World
    from holdfast.app.declare import effect as effect
    from holdfast.app.declare import inbox as inbox
    from holdfast.app.declare import on as on
    from holdfast.app.declare import upcast as upcast
    from holdfast.app.handle import Delivery as Delivery
    from holdfast.app.handle import WorldHandle as WorldHandle
    from holdfast.app.keep import Keep as Keep
    from holdfast.app.runtime import Runtime as Runtime
    from holdfast.app.shipped import agent as agent
    from holdfast.app.shipped import email as email
    from holdfast.app.shipped import fabric as fabric
    from holdfast.app.shipped import http as http
    from holdfast.app.shipped import llm as llm
    from holdfast.app.shipped.fabric import sent as sent
    from holdfast.app.simulate import simulate as simulate
    from holdfast.app.task_handle import TaskFailedError as TaskFailedError
    from holdfast.app.task_handle import TaskHandle as TaskHandle
    from holdfast.app.tasks import Queue as Queue
    from holdfast.app.tasks import Task as Task
    from holdfast.app.tasks import task as task
    from holdfast.roles.task_run import TaskRun as TaskRun
    from holdfast.roles.task_run import current_task as current_task
    from holdfast.runner.faults import Refused as Refused
    from holdfast.world.context import Context as Context

_HOMES = {
    "App": "holdfast.app.app",
    "Call": "holdfast.app.declare",
    "Costed": "holdfast.app.declare",
    "Context": "holdfast.world.context",
    "Delivery": "holdfast.app.handle",
    "Effect": "holdfast.app.declare",
    "Event": "holdfast.app.declare",
    "Inbox": "holdfast.app.declare",
    "Keep": "holdfast.app.keep",
    "Mail": "holdfast.app.declare",
    "Queue": "holdfast.app.tasks",
    "Receipt": "holdfast.app.declare",
    "Refused": "holdfast.runner.faults",
    "Runtime": "holdfast.app.runtime",
    "Task": "holdfast.app.tasks",
    "TaskFailedError": "holdfast.app.task_handle",
    "TaskHandle": "holdfast.app.task_handle",
    "TaskRun": "holdfast.roles.task_run",
    "Upcast": "holdfast.app.declare",
    "World": "holdfast.app.declare",
    "WorldHandle": "holdfast.app.handle",
    "agent": "holdfast.app.shipped.agent",
    "current_task": "holdfast.roles.task_run",
    "effect": "holdfast.app.declare",
    "email": "holdfast.app.shipped.email",
    "fabric": "holdfast.app.shipped.fabric",
    "http": "holdfast.app.shipped.http",
    "inbox": "holdfast.app.declare",
    "llm": "holdfast.app.shipped.llm",
    "on": "holdfast.app.declare",
    "sent": "holdfast.app.shipped.fabric",
    "simulate": "holdfast.app.simulate",
    "task": "holdfast.app.tasks",
    "upcast": "holdfast.app.declare",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    import importlib

    module = importlib.import_module(home)
    # The shipped effects are modules: `hf.http` is the module itself.
    found = module if home.endswith(f".shipped.{name}") else getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)

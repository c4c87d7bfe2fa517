"""Holdfast: a durable runtime for work that must happen once.

    import holdfast as hf

Public names load lazily, on first use. This keeps `import holdfast` cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from holdfast.app import asgi as asgi
    from holdfast.app.app import App as App
    from holdfast.app.builtin_effects import agent as agent
    from holdfast.app.builtin_effects import email as email
    from holdfast.app.builtin_effects import fabric as fabric
    from holdfast.app.builtin_effects import http as http
    from holdfast.app.builtin_effects import llm as llm
    from holdfast.app.builtin_effects.fabric import sent as sent
    from holdfast.app.definitions import Call as Call
    from holdfast.app.definitions import Costed as Costed
    from holdfast.app.definitions import Effect as Effect
    from holdfast.app.definitions import Event as Event
    from holdfast.app.definitions import Inbox as Inbox
    from holdfast.app.definitions import Mail as Mail
    from holdfast.app.definitions import Receipt as Receipt
    from holdfast.app.definitions import Upcast as Upcast
    from holdfast.app.definitions import World as World
    from holdfast.app.definitions import effect as effect
    from holdfast.app.definitions import inbox as inbox
    from holdfast.app.definitions import on as on
    from holdfast.app.definitions import upcast as upcast
    from holdfast.app.flow_definition import Flow as Flow
    from holdfast.app.flow_definition import flow as flow
    from holdfast.app.flow_handle import FlowHandle as FlowHandle
    from holdfast.app.flows import again as again
    from holdfast.app.flows import cancelled as cancelled
    from holdfast.app.flows import now as now
    from holdfast.app.flows import options as options
    from holdfast.app.flows import publish as publish
    from holdfast.app.flows import random as random
    from holdfast.app.flows import receive as receive
    from holdfast.app.flows import sleep as sleep
    from holdfast.app.flows import step as step
    from holdfast.app.flows import undo as undo
    from holdfast.app.flows import uuid as uuid
    from holdfast.app.history_limit import Keep as Keep
    from holdfast.app.runtime import Runtime as Runtime
    from holdfast.app.schedules import ScheduleHandle as ScheduleHandle
    from holdfast.app.simulator import simulate as simulate
    from holdfast.app.task_handle import TaskFailedError as TaskFailedError
    from holdfast.app.task_handle import TaskHandle as TaskHandle
    from holdfast.app.tasks import Queue as Queue
    from holdfast.app.tasks import Task as Task
    from holdfast.app.tasks import task as task
    from holdfast.app.world_handle import Delivery as Delivery
    from holdfast.app.world_handle import WorldHandle as WorldHandle
    from holdfast.app.world_reference import world as world
    from holdfast.app_hooks import AppHooks as AppHooks
    from holdfast.errors import Overloaded as Overloaded
    from holdfast.errors import Timeout as Timeout
    from holdfast.flows.execution import StepFailed as StepFailed
    from holdfast.flows.model import FlowFailed as FlowFailed
    from holdfast.runner.error_policy import Refused as Refused
    from holdfast.workers.flows.step_runs import current_step as current_step
    from holdfast.workers.tasks.attempt import TaskRun as TaskRun
    from holdfast.workers.tasks.attempt import current_task as current_task
    from holdfast.world.context import Context as Context

_HOMES = {
    "Flow": "holdfast.app.flow_definition",
    "FlowFailed": "holdfast.flows.model",
    "FlowHandle": "holdfast.app.flow_handle",
    "Overloaded": "holdfast.errors",
    "StepFailed": "holdfast.flows.execution",
    "Timeout": "holdfast.errors",
    "again": "holdfast.app.flows",
    "cancelled": "holdfast.app.flows",
    "current_step": "holdfast.workers.flows.step_runs",
    "flow": "holdfast.app.flow_definition",
    "now": "holdfast.app.flows",
    "options": "holdfast.app.flows",
    "publish": "holdfast.app.flows",
    "random": "holdfast.app.flows",
    "receive": "holdfast.app.flows",
    "sleep": "holdfast.app.flows",
    "step": "holdfast.app.flows",
    "undo": "holdfast.app.flows",
    "uuid": "holdfast.app.flows",
    "world": "holdfast.app.world_reference",
    "App": "holdfast.app.app",
    "AppHooks": "holdfast.app_hooks",
    "Call": "holdfast.app.definitions",
    "Costed": "holdfast.app.definitions",
    "Context": "holdfast.world.context",
    "Delivery": "holdfast.app.world_handle",
    "Effect": "holdfast.app.definitions",
    "Event": "holdfast.app.definitions",
    "Inbox": "holdfast.app.definitions",
    "Keep": "holdfast.app.history_limit",
    "Mail": "holdfast.app.definitions",
    "Queue": "holdfast.app.tasks",
    "Receipt": "holdfast.app.definitions",
    "Refused": "holdfast.runner.error_policy",
    "Runtime": "holdfast.app.runtime",
    "ScheduleHandle": "holdfast.app.schedules",
    "Task": "holdfast.app.tasks",
    "TaskFailedError": "holdfast.app.task_handle",
    "TaskHandle": "holdfast.app.task_handle",
    "TaskRun": "holdfast.workers.tasks.attempt",
    "Upcast": "holdfast.app.definitions",
    "World": "holdfast.app.definitions",
    "WorldHandle": "holdfast.app.world_handle",
    "asgi": "holdfast.app.asgi",
    "agent": "holdfast.app.builtin_effects.agent",
    "current_task": "holdfast.workers.tasks.attempt",
    "effect": "holdfast.app.definitions",
    "email": "holdfast.app.builtin_effects.email",
    "fabric": "holdfast.app.builtin_effects.fabric",
    "http": "holdfast.app.builtin_effects.http",
    "inbox": "holdfast.app.definitions",
    "llm": "holdfast.app.builtin_effects.llm",
    "on": "holdfast.app.definitions",
    "sent": "holdfast.app.builtin_effects.fabric",
    "simulate": "holdfast.app.simulator",
    "task": "holdfast.app.tasks",
    "upcast": "holdfast.app.definitions",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    import importlib

    module = importlib.import_module(home)
    # Built-in effects and `asgi` are modules: `hf.http` is the module, not an attribute of one.
    found = module if home.endswith(f".{name}") else getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)

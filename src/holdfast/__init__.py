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
    from holdfast.app.declare import Receipt as Receipt
    from holdfast.app.declare import Upcast as Upcast
    from holdfast.app.declare import World as World
    from holdfast.app.declare import effect as effect
    from holdfast.app.declare import on as on
    from holdfast.app.declare import upcast as upcast
    from holdfast.app.handle import WorldHandle as WorldHandle
    from holdfast.app.runtime import Runtime as Runtime
    from holdfast.world.context import Context as Context

_HOMES = {
    "App": "holdfast.app.app",
    "Call": "holdfast.app.declare",
    "Costed": "holdfast.app.declare",
    "Context": "holdfast.world.context",
    "Effect": "holdfast.app.declare",
    "Event": "holdfast.app.declare",
    "Receipt": "holdfast.app.declare",
    "Runtime": "holdfast.app.runtime",
    "Upcast": "holdfast.app.declare",
    "World": "holdfast.app.declare",
    "WorldHandle": "holdfast.app.handle",
    "effect": "holdfast.app.declare",
    "on": "holdfast.app.declare",
    "upcast": "holdfast.app.declare",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    import importlib

    found = getattr(importlib.import_module(home), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)

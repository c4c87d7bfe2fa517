"""The list of all endpoints under `/v1` that are declared as data. The HTTP server and the OpenAPI document read it.

A module of this package that declares endpoints has a tuple `ENDPOINTS`.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from holdfast.ops import api
from holdfast.ops.api.endpoint import Endpoint


@cache
def endpoints() -> tuple[Endpoint, ...]:
    """Return every endpoint. A fixed path precedes a path with a parameter."""
    found: list[Endpoint] = []
    for module in sorted(info.name for info in pkgutil.iter_modules(api.__path__)):
        found += getattr(importlib.import_module(f"{api.__name__}.{module}"), "ENDPOINTS", ())
    return tuple(sorted(found, key=lambda endpoint: _parameters_last(endpoint.segments)))


def _parameters_last(segments: tuple[str, ...]) -> tuple[bool, ...]:
    return tuple(segment.startswith("{") for segment in segments)

"""The list of all endpoints under `/v1` that are declared as data. The HTTP server and the OpenAPI document read it.

A module of this package that declares endpoints has a tuple `ENDPOINTS` and its name in `MODULES`.
"""

from __future__ import annotations

import importlib
from functools import cache

from holdfast.ops.api.endpoint import Endpoint

MODULES: tuple[str, ...] = ()


@cache
def endpoints() -> tuple[Endpoint, ...]:
    """Return every endpoint, in the order of the modules. A fixed path precedes a path with a parameter."""
    found: list[Endpoint] = []
    for name in MODULES:
        found += importlib.import_module(f"{__package__}.{name}").ENDPOINTS
    return tuple(sorted(found, key=lambda endpoint: _parameters_last(endpoint.segments)))


def _parameters_last(segments: tuple[str, ...]) -> tuple[bool, ...]:
    return tuple(segment.startswith("{") for segment in segments)

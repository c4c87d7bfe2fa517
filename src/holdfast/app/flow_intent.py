"""Intents that start flows: the request of `cx.start`, and the receipt that a world's handler gets."""

from __future__ import annotations

from typing import Any

from holdfast import codec
from holdfast.app.flow_definition import Flow, FlowCall
from holdfast.errors import Invalid
from holdfast.world.step_inputs import EffectCall


def to_effect_call(flow: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> EffectCall:
    """Return a flow, or a flow with options, and its arguments as a world requests it."""
    has_options = isinstance(flow, FlowCall)
    declared, key, tag = (flow.flow, flow.key, flow.tag) if has_options else (flow, "", "")
    if not isinstance(declared, Flow):
        raise Invalid(what="flow", found=repr(flow)[:64], why="not made by @hf.flow")
    packed = (
        declared.pack(*_by_position(declared, args, kwargs)) if key else declared.pack(args, kwargs)
    )
    spec = codec.pack(flow.spec)
    return EffectCall(declared.kind, packed, tag=tag, key=key or None, flow_spec=spec)


def _by_position(
    flow: Flow[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments by position where possible: the commit compares those of a key by their bytes. Defaults are not filled
    in, because a replay of the handler by a release with another default must request the same."""
    try:
        bound = flow.signature.bind(*args, **kwargs)
    except TypeError:  # `pack` raises the error
        return args, kwargs
    return bound.args, bound.kwargs

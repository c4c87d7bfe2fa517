"""Starting flows, and finding them by id or key."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast import traces
from holdfast.app.call_arguments import stored_if_equal
from holdfast.app.flow_definition import Flow, FlowCall
from holdfast.app.flow_handle import FlowHandle, by_key_call, check_key
from holdfast.app.start_batches import StartBatches
from holdfast.app.store_calls import StoreCall
from holdfast.errors import Invalid, KeyConflict
from holdfast.flows import operations
from holdfast.flows.model import FlowId, StartedFlow, parse_flow_id

if TYPE_CHECKING:
    from holdfast.app.runtime import Runtime


def start(
    runtime: Runtime, flow: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> FlowHandle[Any]:
    call = to_call(runtime, flow)
    store, packed = runtime.store, call.flow.pack(args, kwargs)
    started = start_packed(store.transact, store.read, runtime.universe, call, packed)
    return _handle(runtime, call, started)


def start_packed(
    transact: Callable[..., Any],
    read: Callable[..., Any],
    universe: str,
    call: FlowCall[Any, Any],
    packed: bytes,
) -> StartedFlow:
    """Start a flow, or return the flow of its key if it was started with equal arguments."""
    started: list[StartedFlow]
    with _sending(call) as sending:
        trace = sending.context
        try:
            started = transact(operations.start, universe, [call.new_flow(packed, trace)])
        except KeyConflict as conflict:
            stored = read(stored_if_equal, universe, call.flow, packed, conflict)
            if stored is None:
                raise
            started = transact(operations.start, universe, [call.new_flow(stored, trace)])
        sending.sent(FlowId(started[0].generation, started[0].seq))
    return started[0]


def _sending(call: FlowCall[Any, Any]) -> traces.Sending:
    return traces.sending("start", call.spec.name, call.spec.queue)


async def start_async(
    runtime: Runtime, flow: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> FlowHandle[Any]:
    call = to_call(runtime, flow)
    packed, universe = call.flow.pack(args, kwargs), runtime.universe
    with _sending(call) as sending:
        new, started = call.new_flow(packed, sending.context), None
        try:
            if new.key:
                [started] = await runtime.store.submit(operations.start, universe, [new])
            else:
                started = await _batches_of(runtime).start(new)
        except KeyConflict as error:
            conflict = error
        if started is None:
            stored = await runtime.waiting.read(
                lambda txn: stored_if_equal(txn, universe, call.flow, packed, conflict)
            )
            if stored is None:
                raise conflict
            new = call.new_flow(stored, sending.context)
            [started] = await runtime.store.submit(operations.start, universe, [new])
        sending.sent(FlowId(started.generation, started.seq))
    return _handle(runtime, call, started)


def _batches_of(runtime: Runtime) -> StartBatches:
    batches = _batches.get(runtime)
    if batches is None:
        batches = _batches[runtime] = StartBatches(runtime.store, runtime.universe)
    return batches


# By runtime.
_batches: weakref.WeakKeyDictionary[Runtime, StartBatches] = weakref.WeakKeyDictionary()


def _handle(runtime: Runtime, call: FlowCall[Any, Any], started: StartedFlow) -> FlowHandle[Any]:
    return FlowHandle(runtime, FlowId(started.generation, started.seq), call.flow)


def to_call(runtime: Runtime, flow: Any) -> FlowCall[Any, Any]:
    call = flow.options() if isinstance(flow, Flow) else flow
    if not isinstance(call, FlowCall):
        raise Invalid(what="flow", found=repr(flow)[:64], why="not made by @hf.flow")
    if runtime.app.flows.get(call.flow.name) is not call.flow:
        raise Invalid(
            what="flow", name=call.flow.name, why="unknown to the app; name it in App(flows=…)"
        )
    return call


def find_call(runtime: Runtime, id: Any, key: str | None) -> StoreCall[FlowHandle[Any]]:
    if isinstance(id, Flow):
        return by_key_call(runtime, id, check_key(key))
    return FlowHandle[Any](runtime, parse_flow_id(id)).exists_call()

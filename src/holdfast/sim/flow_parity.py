"""Parity check of flows: each flow, run again from the top with its records, does the same.

- each recorded step is asked for, with the recorded arguments
- the code asks for no step and no value that the records do not have
- the result of a completed flow is the same

Then each flow runs again with every prefix of its records, as after a crash (`flows.record_prefixes`), and must ask for the
next steps with their recorded arguments.

The check detects flows that read a clock, randomness or anything else between steps. It names the
flow and the step. It cannot detect an outside value that no step, value or result depends on.
"""

from __future__ import annotations

import datetime
import heapq
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from holdfast import codec
from holdfast.app.app import App
from holdfast.flows import record_prefixes
from holdfast.flows.execution import FlowExecution, FlowRunId
from holdfast.flows.model import FlowId, keys_of
from holdfast.flows.records import FlowEnded, FlowParked, StepCompleted, StepFailure
from holdfast.flows.states import ENDED, FlowState
from holdfast.store import tuples
from holdfast.store.api import Txn
from holdfast.workers.flows.activation import LoadedFlow, load_flow

ReadFunction = Callable[..., Any]

# Rounds of one replay: timers of the flow's own code, and code that computes for long.
ROUNDS_MAX = 10_000
# The values of a replay behind the recorded ones. No recorded step depends on them.
VALUES = {
    "hf.now": datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC),
    "hf.uuid": uuid.UUID(int=0),
    "hf.random": 0.0,
}


class FlowDisparity(AssertionError):
    """A flow that is run again from the top does not do what its records say."""

    def __init__(self, flow: str, step: str, what: str) -> None:
        super().__init__(f"flow {flow} at step {step}: run again from the top, {what}")
        self.flow = flow
        self.step = step
        self.what = what


def check_flows(read: ReadFunction, app: App) -> None:
    """Raise FlowDisparity for the first flow that differs."""
    universe = app.universe
    for seq in read(_flow_seqs, universe):
        loaded = read(load_flow, universe, seq)
        if loaded is not None and loaded.body.spec.name in app.flows:
            _check_flow(app, loaded, seq)
            _check_prefixes(app, loaded, seq)


class _Replay:
    """The run of a flow's code with its records and no steps."""

    def __init__(self, app: App, loaded: LoadedFlow, seq: int) -> None:
        body = loaded.body
        self.label = f"{body.spec.name}/{body.key or FlowId(body.generation, seq)}"
        self.code = app.flows[body.spec.name].within(app.universe, app)
        self.host = _ReplayHost()
        self.execution = FlowExecution(
            self.code.bind(loaded.args, {}),
            id=FlowRunId(body.generation, seq, loaded.head.run),
            host=self.host,
            on_ready=lambda: None,
            values=self._make_value,
            code=self.code,
        )
        self.execution.feed(loaded.records)

    def _make_value(self, name: str) -> Any:
        raise FlowDisparity(
            self.label, name, "the code calls this step more often than it is recorded"
        )

    def run(self) -> None:
        """Run the code until it waits for an outcome. Its own timers fire at once."""
        for _ in range(ROUNDS_MAX):
            if self.execution.advance() and not self.host.fire_next():
                return


class _PrefixReplay(_Replay):
    """A replay behind whose records the code may go on: a former worker made no values there."""

    def _make_value(self, name: str) -> Any:
        return VALUES[name]


def _check_flow(app: App, loaded: LoadedFlow, seq: int) -> None:
    is_settled = loaded.head.task == 0 or loaded.head.state in ENDED
    is_settled = is_settled and loaded.head.state != FlowState.DEAD
    # A worker that was lost may not have recorded what its code did last.
    replay = (_Replay if is_settled else _PrefixReplay)(app, loaded, seq)
    execution, label = replay.execution, replay.label
    if loaded.head.state == FlowState.PARKED:
        parked = next(one for one in reversed(loaded.records) if isinstance(one, FlowParked))
        raise FlowDisparity(label, parked.step, parked.why)
    try:
        replay.run()
        if execution.divergence is not None:
            fields = execution.divergence.fields
            raise FlowDisparity(label, fields["step"], fields["why"])
        if is_settled:
            _check_steps(replay, loaded)
        if loaded.head.state == FlowState.COMPLETED:
            _check_result(replay, loaded)
    finally:
        execution.close()


def _check_prefixes(app: App, loaded: LoadedFlow, seq: int) -> None:
    """Run the flow's code with the first records only, as a worker does after a crash."""
    records = loaded.records
    for length in record_prefixes.prefix_lengths(len(records)):
        prefix = loaded._replace(records=record_prefixes.prefix_of(records, length))
        replay = _PrefixReplay(app, prefix, seq)
        execution, after = replay.execution, f"with its first {length} of {len(records)} records"
        try:
            replay.run()
            if execution.divergence is not None:
                fields = execution.divergence.fields
                raise FlowDisparity(replay.label, fields["step"], f"{after}, {fields['why']}")
            calls = execution.take_new_steps()
            other = record_prefixes.find_other_arguments(calls, records, length)
            if other is not None:
                what = f"{after}, the code asks for it with other arguments"
                raise FlowDisparity(replay.label, other.label, what)
        finally:
            execution.close()


def _check_steps(replay: _Replay, loaded: LoadedFlow) -> None:
    execution = replay.execution
    unrequested = [
        f"{one.name}#{one.occurrence}"
        for one in execution.records.undelivered
        if isinstance(one, StepCompleted | StepFailure)
    ]
    unknown = [
        call.label for call in execution.take_new_steps() if call.identity not in loaded.open_steps
    ]
    if unrequested:
        instead = f"; it asks for {unknown[0]} instead" if unknown else ""
        raise FlowDisparity(
            replay.label, unrequested[0], f"the code does not ask for this step{instead}"
        )
    if unknown and not (loaded.head.cancelled or loaded.head.timed_out):
        raise FlowDisparity(replay.label, unknown[0], "the code asks for a step without a record")


def _check_result(replay: _Replay, loaded: LoadedFlow) -> None:
    execution = replay.execution
    ended = next(one for one in reversed(loaded.records) if isinstance(one, FlowEnded))
    if not execution.done:
        raise FlowDisparity(replay.label, "(end)", "the code does not return")
    try:
        packed = replay.code.dump(execution.result())
    except Exception as error:
        raise FlowDisparity(replay.label, "(end)", f"the code raises {error!r}") from None
    if codec.digest(packed)[:16] != ended.digest:
        result = codec.unpack(packed)
        raise FlowDisparity(replay.label, "(end)", f"its result differs: it is {result!r}")


class _ReplayHost:
    """Event loop of a replay: timers fire in the order of their times, without waiting."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._count = 0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []

    def time(self) -> float:
        return self._now_s

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any) -> None:
        self._count += 1
        at_s = self._now_s + delay
        heapq.heappush(self._timers, (at_s, self._count, lambda: callback(*args)))

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any) -> None:
        self.call_later(0.0, callback, *args)

    def run_in_executor(self, executor: Any, fn: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def fire_next(self) -> bool:
        if not self._timers:
            return False
        self._now_s, _, callback = heapq.heappop(self._timers)
        callback()
        return True


def _flow_seqs(txn: Txn, universe: str) -> list[int]:
    bodies = keys_of(universe).bodies
    return [
        tuples.unpack_last_int(key, len(bodies))
        for key, _ in txn.scan(bodies, tuples.prefix_end(bodies))
    ]

"""Flow replay: replays stored flows on the given code and predicts which of them would be parked.

A replay feeds the records of a flow to the flow's code, as a worker does (`workers.flows.activation`). It runs no
step and writes nothing. The code itself runs, so a replay runs in a child process (`ops.replay_process`) with a time
limit per flow. Code that hangs, ends its process or raises is a finding of its flow.

`parks` of a finding: True if a worker with this code parks the flow when it runs it next. None if this depends on the
result of a new step: the recorded steps behind that step were not asked for. Ended flows are never parked.

A flow in progress is also replayed with each prefix of its records, as a worker runs it after a crash
(`flows.record_prefixes`), in half of the time limit of the flow at most.

Each flow is replayed under two hash seeds, so that code which depends on the order of a set is found.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from holdfast import codec
from holdfast.app.app import App
from holdfast.clock import SYSTEM, S
from holdfast.errors import Invalid, NotFound, Timeout
from holdfast.flows import record_prefixes
from holdfast.flows.execution import (
    Divergence,
    FlowExecution,
    NextRun,
    StepCall,
    StepFailed,
    reason_of,
)
from holdfast.flows.model import RECEIVE_NAME, FlowId, decode_mail, keys_of, pack_int
from holdfast.flows.records import AnyRecord, FlowEnded, StepCompleted
from holdfast.flows.states import ENDED, FlowState
from holdfast.ops.app_loader import load_app
from holdfast.ops.replay_process import (
    HASH_SEEDS,
    PROCESS_LOST,
    TIME_LIMIT,
    LostReplay,
    ReplayLane,
    ReplayPool,
    replay_function,
)
from holdfast.store import blobs, tuples
from holdfast.store.api import Store, Txn, connection_url
from holdfast.store.prefix_scan import iter_rows
from holdfast.value_versions import UnreadableValue
from holdfast.workers.flows.activation import LoadedFlow, load_flow, new_execution
from holdfast.workers.flows.definition import RecordedValues
from holdfast.workers.tasks.attempt import error_text

DIVERGED = Divergence.code
VALUE_UNREADABLE = UnreadableValue.code
FLOW_UNKNOWN = "flow_unknown"
RAISED = "raised"
RESULT_CHANGED = "result_changed"

SHARE_SIZE = 64
LIMIT_S = 30.0
# The part of the time limit of a flow for its prefixes, after the replay of all records.
PREFIX_SHARE = 0.5
# New steps without a value that one replay passes.
ASSUMED_MAX = 1_000


class FlowTarget(NamedTuple):
    universe: str
    seq: int


class FlowFinding(NamedTuple):
    """The result for one flow. `code` is empty if nothing needs attention. `removed` are the recorded steps that the
    code does not ask for. `inserted` are the steps without a record that it asks for."""

    universe: str
    flow: str
    name: str
    key: str
    state: str
    steps: int
    code: str = ""
    step: str = ""
    text: str = ""
    parks: bool | None = False
    removed: tuple[str, ...] = ()
    inserted: tuple[str, ...] = ()

    @property
    def ended(self) -> bool:
        return FlowState[self.state] in ENDED

    @property
    def needs_attention(self) -> bool:
        return bool(self.code) and not self.ended


def targets(txn: Txn, universe: str) -> list[FlowTarget]:
    """Return the stored flows of a universe, oldest first."""
    heads = iter_rows(txn, keys_of(universe).heads)
    return [FlowTarget(universe, int(tuples.unpack(key)[-1])) for key, _ in heads]


def verify_flows(
    store: Store,
    targets: Sequence[FlowTarget],
    *,
    app: str,
    jobs: int = 1,
    limit_s: float = LIMIT_S,
) -> list[FlowFinding]:
    """Replay flows on the code of `module:attribute`. Returns a finding for each flow that is still stored."""
    if jobs < 1:
        raise Invalid(what="jobs", why="must be at least 1", found=jobs)
    if limit_s <= 0:
        raise Invalid(what="replay timeout", why="must be more than 0", found=limit_s)
    load_app(app)
    shares = [targets[at : at + SHARE_SIZE] for at in range(0, len(targets), SHARE_SIZE)]
    findings: dict[FlowTarget, FlowFinding] = {}
    pool = ReplayPool(connection_url(store), app, jobs)
    for found in pool.run(_ShareCheck(store, limit_s), shares):
        findings |= found
    return [findings[target] for target in targets if target in findings]


def replay_flow(
    store: Store, app: App, target: FlowTarget, limit_s: float = LIMIT_S
) -> FlowFinding | None:
    """Replay one flow in this process. Returns None if the flow was removed."""
    loaded = store.read(load_flow, target.universe, target.seq)
    if loaded is None:
        return None
    finding = _new_finding(target, loaded)
    flow = app.flows.get(loaded.body.spec.name)
    if flow is None:
        text = "the app does not declare it: it waits for a worker that does"
        return finding._replace(code=FLOW_UNKNOWN, text=text)
    replay = _FlowReplay(flow.within(target.universe, app), loaded, target.seq)
    try:
        asyncio.run(replay.run(limit_s))
    except TimeoutError:
        text = f"its code did not come to rest within {limit_s:g} s"
        return finding._replace(code=TIME_LIMIT, text=text)
    finding = replay.judge(finding)
    if not finding.code and not finding.ended:
        finding = _check_prefixes(app, target, loaded, finding, limit_s * PREFIX_SHARE)
    if not finding.code and not finding.ended:
        finding = store.read(_check_inbox, app, target, finding)
    return finding


def _check_prefixes(
    app: App, target: FlowTarget, loaded: LoadedFlow, finding: FlowFinding, limit_s: float
) -> FlowFinding:
    """Replay the flow with the first records only, as a worker does after a crash. It ends at the time limit."""
    flow, records = app.flows[loaded.body.spec.name], loaded.records
    deadline_ns = SYSTEM.mono_ns() + int(limit_s * S)
    for length in record_prefixes.prefix_lengths(len(records)):
        first = record_prefixes.prefix_of(records, length)
        prefix = loaded._replace(records=first, open_steps={})
        replay = _FlowReplay(flow.within(target.universe, app), prefix, target.seq)
        left_s = (deadline_ns - SYSTEM.mono_ns()) / S
        if left_s <= 0:
            return finding
        try:
            asyncio.run(replay.run(left_s))
        except TimeoutError:
            return finding
        step, why = replay.difference_to(records, length)
        if step:
            text = f"with its first {length} of {len(records)} records, {why}"
            return finding._replace(code=DIVERGED, step=step, text=text, parks=None)
    return finding


def _check_inbox(txn: Txn, app: App, target: FlowTarget, finding: FlowFinding) -> FlowFinding:
    """Find an event in the inbox that the code cannot read. The flow is parked if its code receives the event."""
    prefix = keys_of(target.universe).mail + pack_int(target.seq)
    for key, row in iter_rows(txn, prefix):
        mail = decode_mail(row)
        event_type = app.events.get(mail.type)
        if event_type is None:
            continue  # it stays in the inbox
        try:
            event_type.decode(blobs.get(txn, mail.blob) if mail.blob else mail.value)
        except Invalid as error:
            number = tuples.unpack_last_int(key, len(prefix))
            text = f"event {number} of its inbox cannot be read: {reason_of(error)}"
            return finding._replace(code=VALUE_UNREADABLE, step=RECEIVE_NAME, text=text, parks=None)
    return finding


def _new_finding(target: FlowTarget, loaded: LoadedFlow) -> FlowFinding:
    body, head = loaded.body, loaded.head
    return FlowFinding(
        target.universe,
        str(FlowId(body.generation, target.seq)),
        body.spec.name,
        body.key,
        FlowState(head.state).name,
        0,
    )


class _FlowReplay:
    """One replay of a flow, on a separate event loop."""

    def __init__(self, code: Any, loaded: LoadedFlow, seq: int) -> None:
        self._code = code
        self._loaded = loaded
        self._seq = seq
        # New steps: all labels, and those whose value is not known.
        self._new_steps: list[StepCall] = []
        self._inserted: list[str] = []
        self._pending: list[StepCall] = []
        self._assumed = 0
        self._execution: FlowExecution

    async def run(self, limit_s: float) -> None:
        """Run the flow's code until it waits for something that is not recorded."""
        wake = asyncio.Event()
        self._execution = execution = new_execution(
            self._code,
            self._loaded,
            self._seq,
            host=asyncio.get_running_loop(),
            on_ready=wake.set,
            values=RecordedValues(SYSTEM),
        )
        try:
            async with asyncio.timeout(limit_s):
                while execution.divergence is None:
                    wake.clear()
                    if not execution.advance():
                        await asyncio.sleep(0)
                    elif execution.divergence is not None or execution.done:
                        return
                    elif not self._pass_new_steps():
                        if not execution.loop.foreign_waits:
                            return
                        await wake.wait()
        finally:
            execution.close()

    def _pass_new_steps(self) -> bool:
        """Assume the outcome of new steps that have no value, if recorded steps may follow. Returns whether the
        replay continues."""
        execution = self._execution
        for call in execution.take_new_steps():
            self._new_steps.append(call)
            if call.identity not in self._loaded.open_steps:
                self._inserted.append(call.label)
                self._pending.append(call)
        known = [call for call in self._pending if call.returns_none]
        if not known or self._assumed >= ASSUMED_MAX or not execution.unrequested_steps():
            return False
        self._assumed += len(known)
        self._pending = [call for call in self._pending if not call.returns_none]
        none = codec.pack(None)
        execution.feed(
            [StepCompleted(*call.identity, call.position, call.digest, none) for call in known]
        )
        return True

    def difference_to(self, records: Sequence[AnyRecord], length: int) -> tuple[str, str]:
        """The first step that differs from the records behind a prefix, and how. Two empty texts: none."""
        divergence = self._execution.divergence
        if divergence is not None:
            return str(divergence.fields["step"]), str(divergence.fields["why"])
        other = record_prefixes.find_other_arguments(self._new_steps, records, length)
        return ("", "") if other is None else (other.label, "it is asked for with other arguments")

    def judge(self, finding: FlowFinding) -> FlowFinding:
        execution = self._execution
        unrequested = tuple(execution.unrequested_steps())
        finding = finding._replace(
            steps=len(execution.records.outcomes) - self._assumed,
            removed=unrequested,
            inserted=tuple(self._inserted),
        )
        if execution.divergence is not None:
            fields = execution.divergence.fields
            return finding._replace(
                code=str(fields["code"]),
                step=str(fields["step"]),
                text=str(fields["why"]),
                parks=not finding.ended,
                removed=(),
            )
        if execution.done:
            return self._judge_end(finding)
        if unrequested and self._pending and not finding.ended:
            return finding._replace(
                parks=None, text=f"not checked behind the new step {self._pending[0].label}"
            )
        return finding

    def _judge_end(self, finding: FlowFinding) -> FlowFinding:
        """Compare the end of the code with the stored flow. An error is a finding, unless the stored flow failed too."""
        try:
            value = self._execution.result()
            if self._execution.compensation is not None or isinstance(value, NextRun):
                return finding
            packed = self._code.dump(value)
        except (asyncio.CancelledError, StepFailed, Timeout):
            return finding
        except Exception as error:
            if finding.ended and finding.state != "COMPLETED":
                return finding
            text = f"its code raised {type(error).__name__}: {error_text(error)}"
            return finding._replace(code=RAISED, text=text)
        for record in self._loaded.records:
            if isinstance(record, FlowEnded) and record.state == FlowState.COMPLETED:
                if record.digest != codec.digest(packed)[:16]:
                    return finding._replace(
                        code=RESULT_CHANGED,
                        text="the flow returns another result than the recorded one",
                    )
        return finding


# -- in processes ----------------------------------------------------------------------------------


class _ShareCheck:
    """Replays a share of flows under both hash seeds."""

    def __init__(self, store: Store, limit_s: float) -> None:
        self._store = store
        self._limit_s = limit_s

    def __call__(
        self, lane: ReplayLane, share: Sequence[FlowTarget]
    ) -> dict[FlowTarget, FlowFinding]:
        """Return a finding for each flow that is still stored."""
        findings = self._replay(lane, HASH_SEEDS[0], share)
        again = [target for target, finding in findings.items() if not finding.code]
        for target, second in self._replay(lane, HASH_SEEDS[1], again).items():
            if second.code:
                text = f"{second.text} (PYTHONHASHSEED={HASH_SEEDS[1]})"
                findings[target] = second._replace(text=text)
        return findings

    def _replay(
        self, lane: ReplayLane, hash_seed: str, targets: Sequence[FlowTarget]
    ) -> dict[FlowTarget, FlowFinding]:
        answers = lane.replay(_replay_in_child, hash_seed, targets, self._limit_s)
        findings: dict[FlowTarget, FlowFinding] = {}
        for target, answer in zip(targets, answers, strict=True):
            if isinstance(answer, FlowFinding):
                findings[target] = answer
            elif answer is not None:
                code = answer.code if isinstance(answer, LostReplay) else PROCESS_LOST
                findings[target] = self._lost(target, code)
        return findings

    def _lost(self, target: FlowTarget, code: str) -> FlowFinding:
        loaded = self._store.read(load_flow, target.universe, target.seq)
        if loaded is None:
            raise NotFound(what="flow", flow=target.seq)
        text = "replaying it ended the process"
        if code == TIME_LIMIT:
            text = f"its code did not come to rest within {self._limit_s:g} s"
        return _new_finding(target, loaded)._replace(code=code, text=text)


@replay_function(FlowTarget, FlowFinding | None)
def _replay_in_child(
    store: Store, app: App, target: FlowTarget, limit_s: float | None
) -> FlowFinding | None:
    assert limit_s is not None
    return replay_flow(store, app, target, limit_s)

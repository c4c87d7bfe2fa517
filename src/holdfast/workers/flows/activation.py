"""The activation of a flow: one run of its code under the lease of an activation task.

    load the records
    advance the execution, start its new steps
    commit the outcomes of finished steps and the requests for open steps, in one commit
    repeat; suspend when only outcomes from outside are missing; end with the flow

The commit requires the live lease of the task and that the task is the flow's present activation, so a worker that
lost its lease records nothing. A suspended flow is rows only: a later commit brings an outcome and a new activation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

from msgspec.structs import replace

from holdfast import codec, failpoints, logs, traces
from holdfast.errors import CommitUnknown, Fenced, HoldfastError, Invalid, NotFound, Timeout
from holdfast.flows import operations, step_threads
from holdfast.flows.execution import (
    Divergence,
    FlowExecution,
    FlowRunId,
    NextRun,
    StepCall,
    StepCallKind,
    StepFailed,
    reason_of,
)
from holdfast.flows.loop import LoopHost
from holdfast.flows.model import (
    FlowBodyRow,
    FlowHeadRow,
    FlowId,
    decode_open,
    get_body,
    get_head,
    keys_of,
    pack_int,
)
from holdfast.flows.operations import FlowAnswer, FlowCommit, OpenRequest
from holdfast.flows.records import (
    AnyRecord,
    AttemptRaised,
    CompensationStarted,
    FlowEnded,
    FlowParked,
    StepCompleted,
    StepOutcome,
    decode_record,
)
from holdfast.flows.states import ENDED, FlowState
from holdfast.flows.step_threads import StepThreadRow
from holdfast.retry import Backoff, jitter
from holdfast.store import blobs, tuples
from holdfast.store.api import Store, Txn, reads_block
from holdfast.value_versions import UnreadableValue, UpcastObjects
from holdfast.workers.flows.commit_queue import CommitQueue
from holdfast.workers.flows.long_waits import LongWaits
from holdfast.workers.flows.step_runs import (
    StepInvoker,
    StepRun,
    completed_outcome,
    failed_outcome,
    invoke_step,
    run_step,
    start_coroutine,
)
from holdfast.workers.flows.wake_flag import WakeFlag
from holdfast.workers.tasks.attempt import TaskAttempt, error_text

# A flow that runs this long without a commit listens for outcomes from outside.
LISTEN_AFTER_S = 0.05
RETRY_PAUSE_S = 0.05
LISTEN_S = 5.0
# The longest wait for a future that belongs to no step.
FOREIGN_WAIT_S = 60.0
# Errors of one activation that reached no code of the flow.
LOGGED_ERRORS_MAX = 10


class ActivationCode(Protocol):
    """The interface between an activation and the code of a flow: its name, its function and its result encoding."""

    name: str
    code_version: str

    def bind(self, args: bytes, upcast: UpcastObjects) -> Callable[[], Coroutine[Any, Any, Any]]:
        """Return a function that creates the coroutine of the flow. `upcast` collects upcast arguments."""

    def dump(self, value: Any) -> bytes:
        """Check and encode the result."""


class LoadedFlow(NamedTuple):
    body: FlowBodyRow
    head: FlowHeadRow
    args: bytes
    records: list[AnyRecord]
    # The digests of the arguments of the open steps.
    open_steps: dict[tuple[str, int], bytes]


def load_flow(txn: Txn, universe: str, seq: int) -> LoadedFlow | None:
    """Read a flow with the records of its present run, or None if it was removed."""
    keys = keys_of(universe)
    try:
        body, head = get_body(txn, keys, seq), get_head(txn, keys, seq)
    except NotFound:
        return None
    args, blob = (body.args, body.blob) if head.args is None else (head.args, head.args_blob)
    prefix = keys.records_of(seq, head.run)
    records: list[AnyRecord] = []
    for _, row in txn.scan(prefix, tuples.prefix_end(prefix)):
        record = decode_record(row).record
        if isinstance(record, StepCompleted) and record.blob:
            record = replace(record, value=blobs.get(txn, record.blob))
        records.append(record)
    open_prefix = keys.open_steps + pack_int(seq)
    opens: dict[tuple[str, int], bytes] = {}
    for key, row in txn.scan(open_prefix, tuples.prefix_end(open_prefix)):
        *_, name, occurrence = tuples.unpack(key)
        assert isinstance(name, str)
        assert isinstance(occurrence, int)
        opens[name, occurrence] = decode_open(row).digest
    return LoadedFlow(body, head, blobs.get(txn, blob) if blob else args, records, opens)


def new_execution(
    code: ActivationCode,
    loaded: LoadedFlow,
    seq: int,
    *,
    host: LoopHost,
    on_ready: Callable[[], None],
    values: Callable[[str], Any],
) -> FlowExecution:
    """Return the execution of a stored flow. Arguments that do not fit the code are a divergence."""
    upcast: UpcastObjects = {}
    try:
        body, misfit = code.bind(loaded.args, upcast), ""
    except Exception as error:
        body, misfit = _no_body, f"its arguments do not fit the code: {reason_of(error)}"
    execution = FlowExecution(
        body,
        id=FlowRunId(loaded.body.generation, seq, loaded.head.run),
        host=host,
        on_ready=on_ready,
        values=values,
        code=code,
    )
    execution.records.upcast = upcast
    execution.feed(loaded.records)
    execution.feed_open(loaded.open_steps)
    if misfit:
        execution.divergence = Divergence(step=code.name, why=misfit, code=UnreadableValue.code)
    return execution


class _LocalStep(NamedTuple):
    task: asyncio.Task[Any]
    run: StepRun

    def cancel(self) -> None:
        """Cancel the step once: a second cancellation would interrupt its cleanup."""
        if not self.run.cancel_requested:
            self.run.cancel_requested = True
            self.task.cancel()


@dataclass
class FlowEnvironment:
    """The objects that all activations of one worker share."""

    store: Store
    universe: str
    threads: Executor
    make_value: Callable[[str], Any]
    # Calls the function of a step. The simulator adds faults.
    invoke: StepInvoker = invoke_step
    # The name of the worker in the worker registry, and its incarnation.
    worker: tuple[str, str] = ("", "")
    foreign_wait_s: float = FOREIGN_WAIT_S

    def __post_init__(self) -> None:
        self.commits = CommitQueue(self.store, self.universe)
        self.long_waits = LongWaits(LISTEN_AFTER_S)


class Activation:
    def __init__(
        self,
        environment: FlowEnvironment,
        code: ActivationCode,
        attempt: TaskAttempt,
        loaded: LoadedFlow,
        seq: int,
    ) -> None:
        self._environment = environment
        self._store = environment.store
        self._code = code
        self._attempt = attempt
        self._flow = loaded
        self._seq = seq
        self._id = str(FlowId(loaded.body.generation, seq))
        self._loop = asyncio.get_running_loop()
        self._wake = WakeFlag(self._loop)
        self._local: dict[tuple[str, int], _LocalStep] = {}
        self._finished: list[StepOutcome] = []
        self._open = set(loaded.open_steps)
        self._requests: list[OpenRequest] = []
        self._cancels: list[tuple[str, int]] = []
        self._listener: asyncio.Task[None] | None = None
        # Whether other commits have brought records.
        self._has_new_records = False
        self._execution = new_execution(
            code,
            loaded,
            seq,
            host=self._loop,
            on_ready=self._wake.set,
            values=environment.make_value,
        )

    async def run(self) -> None:
        try:
            while not await self._round():
                pass
        except Fenced:
            return  # another worker has the flow; nothing of this activation counts
        finally:
            if self._listener is not None:
                self._listener.cancel()
            for step in self._local.values():
                step.cancel()
            self._close_code()

    def _close_code(self) -> None:
        name = self._code.name
        if self._execution.close():
            logs.warn("flows", "flow code abandoned", flow=self._id, name=name,
                      **traces.log_ids(traces.current()))  # fmt: skip
        for error in self._execution.unhandled_errors[:LOGGED_ERRORS_MAX]:
            logs.warn(
                "flows",
                "error of flow code ignored",
                flow=self._id,
                name=name,
                error=error_text(error),
                **traces.log_ids(traces.current()),
            )
        self._execution.dispose()

    async def _round(self) -> bool:
        """Advance the flow by one commit, or wait for a step. Returns whether the activation is over."""
        execution = self._execution
        self._wake.clear()
        if self._has_new_records:
            await self._read_new_records()
        if execution.divergence is None and not execution.advance():
            await asyncio.sleep(0)
            return False
        if execution.cancelled or execution.timed_out:
            self._request_cancel()
        if execution.divergence is not None:
            return await self._park(execution.divergence)
        if execution.done:
            return await self._end()
        if dropped := execution.take_dropped():
            self._drop_steps(dropped)
        self._start_steps(execution.take_new_steps())
        if not (self._finished or self._requests or self._local or execution.loop.foreign_waits):
            if execution.waits_for_outcome:
                return await self._suspend()
            return await self._wait_for_nothing()
        if self._finished or self._requests:
            return await self._commit_progress()
        if not self._wake.is_set:
            await self._wait()
        return False

    # -- steps -----------------------------------------------------------------------------------

    def _start_steps(self, calls: list[StepCall]) -> None:
        for call in calls:
            if call.kind is StepCallKind.OPEN:
                if call.identity not in self._open:
                    self._open.add(call.identity)
                    self._requests.append(call.work(call))
                continue
            run = StepRun(call, self._id, self._is_lost)
            began_ns = self._store.now_ns()
            # A replaced `invoke` gets every attempt.
            is_plain = self._environment.invoke is invoke_step
            task = start_coroutine(call, run, self._loop) if is_plain else None
            if task is None:
                self._run_step(call, run, began_ns)
            else:
                self._local[call.identity] = _LocalStep(task, run)
                task.add_done_callback(partial(self._on_coroutine_done, call, run, began_ns))

    def _run_step(
        self, call: StepCall, run: StepRun, began_ns: int, *, is_retry: bool = False
    ) -> None:
        environment = self._environment
        task = self._loop.create_task(
            run_step(
                call,
                run,
                environment.threads,
                environment.invoke,
                self._report_thread,
                began_ns=began_ns,
                is_retry=is_retry,
            )
        )
        self._local[call.identity] = _LocalStep(task, run)
        task.add_done_callback(partial(self._on_step_done, call.identity))

    def _on_coroutine_done(
        self, call: StepCall, run: StepRun, began_ns: int, task: asyncio.Task[Any]
    ) -> None:
        """Take the outcome of the first attempt of a coroutine function. Another attempt is a new asyncio task."""
        outcome: StepOutcome | None
        try:
            outcome = completed_outcome(call, run, began_ns, task.result())
        except asyncio.CancelledError as error:
            if run.cancel_requested:
                self._end_step(call.identity, None)
                return
            outcome = failed_outcome(call, run, began_ns, error)
        except (Exception, GeneratorExit) as error:
            outcome = failed_outcome(call, run, began_ns, error)
        if outcome is None:
            self._run_step(call, run, began_ns, is_retry=True)
        else:
            self._end_step(call.identity, outcome)

    def _on_step_done(self, identity: tuple[str, int], task: asyncio.Task[StepOutcome]) -> None:
        self._end_step(identity, None if task.cancelled() else task.result())

    def _end_step(self, identity: tuple[str, int], outcome: StepOutcome | None) -> None:
        self._local.pop(identity, None)
        if outcome is not None:
            self._finished.append(outcome)
        self._wake.set()

    async def _report_thread(self, attempt: StepRun) -> None:
        """Store that the thread of a timed-out attempt still runs, until it ends. The row is only information, so an
        error of the store is ignored."""
        thread, store, worker = attempt.thread, self._store, self._environment.worker
        if thread is None:
            return
        named = (self._environment.universe, self._seq, attempt.idempotency_key, attempt.attempt)
        row = StepThreadRow(f"{attempt.name}#{attempt.occurrence}", *worker)

        def on_end(_: Any) -> None:
            with suppress(HoldfastError):
                store.transact(step_threads.remove_thread, *named)

        try:
            with suppress(HoldfastError):
                await store.submit(step_threads.add_thread, *named, row)
        finally:
            thread.add_done_callback(on_end)

    def _is_lost(self) -> bool:
        return self._attempt.cancelled

    async def _cancel_steps(self) -> None:
        """Cancel the steps in progress and wait for their end. Steps in threads run to their end."""
        self._request_cancel()
        while self._local:
            self._wake.clear()
            await self._wake.wait()

    def _request_cancel(self) -> None:
        if self._execution.compensation is not None:
            return
        for step in self._local.values():
            step.cancel()

    def _drop_steps(self, identities: list[tuple[str, int]]) -> None:
        """Cancel the steps that the flow's code cancelled."""
        for identity in identities:
            if (step := self._local.get(identity)) is not None:
                step.cancel()
            elif identity in self._open or self._execution.has_event(identity):
                self._cancels.append(identity)

    # -- commits ---------------------------------------------------------------------------------

    async def _commit(self, records: list[AnyRecord], action: int, **fields: Any) -> FlowAnswer:
        execution = self._execution
        finished, self._finished = self._finished, []
        requests, self._requests = self._requests, []
        cancels, self._cancels = self._cancels, []
        work = FlowCommit(
            flow=self._seq,
            run=self._flow.head.run,
            task=self._attempt.grant.seq,
            lease=self._attempt.grant.lease,
            known=execution.known_records,
            records=[*execution.take_buffer(), *finished, *records],
            opens=tuple(requests),
            cancels=tuple(cancels),
            action=action,
            **fields,
        )
        answer = await self._send(work)
        if answer.reported:
            self._attempt.reported = True
        execution.feed(work.records if answer.only_own else answer.records)
        while answer.more:
            more = await self._read(self._records_after, execution.known_records)
            execution.feed(more)
            answer = FlowAnswer(
                [], answer.applied, suspended=answer.suspended, reported=answer.reported
            )
        return answer

    async def _send(self, work: FlowCommit) -> FlowAnswer:
        """Commit, and repeat it while the store is busy and the lease is live."""
        while True:
            try:
                answer = await self._environment.commits.commit(work)
                if failpoints.armed:
                    failpoints.hit("flows.committed", work)
                return answer
            except (CommitUnknown, Fenced):
                raise
            except HoldfastError as error:
                if not error.retryable or self._is_lost():
                    raise
                await asyncio.sleep(RETRY_PAUSE_S)

    def _records_after(self, txn: Txn, known: int) -> list[AnyRecord]:
        loaded = load_flow(txn, self._environment.universe, self._seq)
        return [] if loaded is None else loaded.records[known:]

    async def _commit_progress(self) -> bool:
        # After the loss of a worker, a recorded step starts a new activation: the expiries that were counted against
        # this one belong to the former step.
        renews = (
            self._attempt.attempt > 1 and self._finished and not self._local and not self._requests
        )
        quiet = not (self._finished or self._local or self._execution.loop.foreign_waits)
        action = (
            operations.RENEW if renews else operations.SUSPEND if quiet else operations.CONTINUE
        )
        answer = await self._commit([], action)
        return answer.applied and action != operations.CONTINUE

    async def _suspend(self) -> bool:
        return (await self._commit([], operations.SUSPEND)).applied

    async def _park(self, divergence: Divergence) -> bool:
        await self._cancel_steps()
        self._finished.clear()
        self._requests.clear()
        self._cancels.clear()
        self._execution.take_buffer()
        record = FlowParked(
            divergence.fields["step"],
            divergence.fields["why"],
            self._code.code_version,
            divergence.fields["code"],
        )
        await self._commit([record], operations.PARK)
        logs.warn("flows", "flow parked", flow=self._id, **divergence.fields,
                  **traces.log_ids(traces.current()))  # fmt: skip
        return True

    # -- the end ---------------------------------------------------------------------------------

    async def _end(self) -> bool:
        execution = self._execution
        if self._local:
            await self._cancel_steps()
        self._requests.clear()
        if execution.compensation is not None:
            ended = _ended_by(execution.compensation)
            return (await self._commit([ended], operations.END)).applied
        is_stopped = execution.cancelled or execution.timed_out
        value, packed, failure = None, b"", None
        try:
            value = execution.result()
            if not (is_stopped or isinstance(value, NextRun)):
                packed = self._code.dump(value)
        except (Exception, asyncio.CancelledError) as error:
            failure = error
        # Outside of the `try`: an error of a commit is no error of the flow's code.
        if is_stopped:
            return await self._fail(self._stopped())
        if failure is not None:
            return await self._end_failed(failure)
        if isinstance(value, NextRun):
            answer = await self._commit([], operations.AGAIN, result=value.packed_args)
            return answer.applied
        ended = FlowEnded(FlowState.COMPLETED, digest=codec.digest(packed)[:16])
        return (await self._commit([ended], operations.END, result=packed)).applied

    async def _end_failed(self, failure: BaseException) -> bool:
        step_error = _step_error(failure) if isinstance(failure, Exception) else None
        if step_error is not None:
            return await self._fail(_failed_by_step(step_error))
        return await self._on_own_error(failure)

    def _stopped(self) -> CompensationStarted:
        if self._execution.cancelled:
            return CompensationStarted(FlowState.CANCELLED, "cancelled")
        return CompensationStarted(FlowState.FAILED, "timeout")

    async def _on_own_error(self, error: BaseException) -> bool:
        """The flow's own code raised: run it again, or fail."""
        text = error_text(error) if isinstance(error, Exception) else type(error).__name__
        if isinstance(error, RuntimeError) and "attached to a different loop" in text:
            text += " (a flow awaits steps only; call the function with hf.step)"
        kind, spec = type(error).__name__, self._flow.body.spec
        failures = self._flow.head.failures + 1
        if failures >= spec.attempts:
            return await self._fail(CompensationStarted(FlowState.FAILED, "raised", "", kind, text))
        backoff = Backoff(spec.backoff_ns, 2.0, spec.backoff_ns_max)
        due_ns = self._store.now_ns() + backoff.delay_ns(failures, jitter(self._seq, failures))
        record = AttemptRaised(kind, text, due_ns)
        answer = await self._commit([record], operations.RETRY, not_before_ns=due_ns)
        return answer.applied

    async def _fail(self, started: CompensationStarted) -> bool:
        """End the flow, after its compensations if it has some. Open steps are cancelled first."""
        self._cancels = sorted(self._open)
        if self._execution.has_undos:
            # Child flows end first, with their own compensations.
            return (await self._commit([started], operations.CONTINUE)).suspended
        return (await self._commit([_ended_by(started)], operations.END)).applied

    # -- waiting ---------------------------------------------------------------------------------

    async def _wait(self) -> None:
        """Wait for a step, a foreign wait of the flow's code, or an outcome from outside."""
        if self._listener is not None:
            await self._wake.wait()
            return
        waits = self._environment.long_waits
        waits.add(self._start_listener, self._loop)
        try:
            await self._wake.wait()
        finally:
            waits.remove(self._start_listener)

    async def _wait_for_nothing(self) -> bool:
        """Wait, up to a limit, for a future that belongs to no step: only code in this process can complete it."""
        try:
            async with asyncio.timeout(self._environment.foreign_wait_s):
                await self._wait()
        except TimeoutError:
            if self._execution.cancelled or self._execution.timed_out:
                return await self._fail(self._stopped())
            return await self._on_own_error(
                Invalid(
                    what="flow",
                    why="its code waits for something that is not a step; "
                    "use hf.step, hf.sleep or hf.receive",
                )
            )
        return False

    def _start_listener(self) -> None:
        if self._listener is None:
            self._listener = self._loop.create_task(self._listen())

    async def _listen(self) -> None:
        """Notice outcomes that other commits bring while a step runs. The next round reads them."""
        topic = keys_of(self._environment.universe).topic(self._seq)
        with self._store.subscribe(topic) as subscription:
            while True:
                try:
                    head = await self._read(self._read_head)
                except HoldfastError:
                    # The store does not answer at present.
                    await asyncio.sleep(RETRY_PAUSE_S)
                    continue
                if head is None or head.task != self._attempt.grant.seq or head.state in ENDED:
                    return  # the next commit is fenced
                if head.records > self._execution.known_records:
                    self._has_new_records = True
                    self._wake.set()
                await subscription.wait_async(LISTEN_S)

    async def _read_new_records(self) -> None:
        self._has_new_records = False
        self._execution.feed(await self._read(self._records_after, self._execution.known_records))

    def _read_head(self, txn: Txn) -> FlowHeadRow | None:
        try:
            return get_head(txn, keys_of(self._environment.universe), self._seq)
        except NotFound:
            return None

    async def _read(self, fn: Callable[..., Any], *args: Any) -> Any:
        if reads_block(self._store):
            return await asyncio.to_thread(self._store.read, fn, *args)
        return self._store.read(fn, *args)


async def run_activation(
    environment: FlowEnvironment, code: ActivationCode, attempt: TaskAttempt, args: bytes
) -> None:
    """Run the flow of an activation task, unless the task is no longer its activation."""
    seq, run = codec.unpack(args)
    store = environment.store
    if reads_block(store):
        loaded = await asyncio.to_thread(store.read, load_flow, environment.universe, seq)
    else:
        loaded = store.read(load_flow, environment.universe, seq)
    if loaded is None or loaded.head.task != attempt.grant.seq or loaded.head.run != run:
        return
    await Activation(environment, code, attempt, loaded, seq).run()


async def _no_body() -> None:
    """The code of a flow whose arguments do not fit. It never runs."""


def _step_error(error: Exception) -> StepFailed | Timeout | None:
    """The failure of a step that ended the flow. A group, as `asyncio.TaskGroup` raises it, counts if it has no other
    error."""
    if isinstance(error, ExceptionGroup):
        found = [_step_error(one) for one in error.exceptions]
        return found[0] if all(found) else None
    if isinstance(error, StepFailed) or (isinstance(error, Timeout) and "step" in error.fields):
        return error
    return None


def _failed_by_step(error: StepFailed | Timeout) -> CompensationStarted:
    step, occurrence = _split_label(error)
    if isinstance(error, Timeout):
        code, kind, text = "timeout", "Timeout", str(error)
    else:
        code, fields = "step_failed", error.fields
        kind, text = str(fields.get("error_type", "")), str(fields.get("error", ""))
    return CompensationStarted(FlowState.FAILED, code, step, kind, text, occurrence)


def _split_label(error: HoldfastError) -> tuple[str, int]:
    """The name and the occurrence of the step of an error. The flow's code may have made the error itself."""
    label = str(error.fields.get("step", ""))
    step, _, occurrence = label.rpartition("#")
    return (step, int(occurrence)) if occurrence.isdecimal() else (label, 0)


def _ended_by(started: CompensationStarted) -> FlowEnded:
    return FlowEnded(
        started.state,
        started.code,
        started.step,
        started.error_type,
        started.error,
        occurrence=started.occurrence,
    )

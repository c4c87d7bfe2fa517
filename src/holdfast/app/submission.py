"""Task submission from threads and coroutines, with group commit.

Callers that submit while a commit is in flight share the next commit. One thread submits for all threads
(`SubmitCoalescer`, with the leader/followers coalescer of the store). Coroutines share a batch per event loop
(`AsyncSubmitCoalescer`). A rejected submission does not affect the rest of its batch, because
`submit_each` returns one result per task. Tasks with a key or with dependencies can be rejected because of
other tasks, so each of them gets its own commit.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from holdfast import traces
from holdfast.app.keyed_tasks import KeyedTasks
from holdfast.app.task_handle import TaskHandle
from holdfast.app.tasks import Submission, Task, TaskCall
from holdfast.config import BATCH_MAX
from holdfast.errors import CommitUnknown, HoldfastError, Invalid, from_wire
from holdfast.store.api import Store, Txn
from holdfast.store.coalescer import CoalescedCall, Coalescer
from holdfast.tasks import operations, queries
from holdfast.tasks.ids import TaskId, parse_task_id
from holdfast.tasks.model import TaskSpec, get_body, keys_of, pack_int
from holdfast.tasks.operations import CyclicDependency, SubmitEachResult, TaskToSubmit

if TYPE_CHECKING:
    from holdfast.app.runtime import Runtime

T = TypeVar("T")

# The most tasks, and argument bytes, in one commit. `submit_many` splits larger batches.
SUBMIT_BATCH_MAX = 1_000
SUBMIT_BYTES_MAX = 4 * 1024 * 1024
# The most commits in flight per event loop.
COMMITS_IN_FLIGHT_MAX = 2
# The most arguments that `submit_many` of a coroutine encodes before other coroutines run.
ARGUMENTS_PER_TURN = 100


def submit(
    runtime: Runtime, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> TaskHandle[Any]:
    call, packed, after = _prepare_call(runtime, task, args, kwargs)
    with _sending(call) as sending:
        new = call.new_task(packed, after, sending.context)
        if new.key or new.after:
            [seq] = _submit_keyed(runtime, KeyedTasks([call.spec], [0], [new]))
        else:
            seq = runtime.submitter.submit(call.spec, new)
        sending.sent(seq)
    return to_handle(runtime, call.task, seq, keyed=bool(new.key))


async def submit_async(
    runtime: Runtime, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> TaskHandle[Any]:
    call, packed = _pack_call(runtime, task, args, kwargs)
    after = await _read_seqs(runtime, [_task_id(dependency) for dependency in call.after])
    with _sending(call) as sending:
        new = call.new_task(packed, after, sending.context)
        if new.key or new.after:
            [seq] = await KeyedTasks([call.spec], [0], [new]).submit_async(
                runtime.store.submit,
                lambda fn, *args: runtime.waiting.read(lambda txn: fn(txn, *args)),
                runtime.universe,
                runtime.app.tasks,
            )
        else:
            seq = await runtime.async_submitter.submit(call.spec, new)
        sending.sent(seq)
    if not new.key:
        return to_handle(runtime, call.task, seq)
    generation = await runtime.waiting.read(partial(_task_generation, runtime, seq))
    return TaskHandle(runtime, TaskId(generation, seq), call.task)


def _sending(call: TaskCall[Any, Any]) -> traces.Sending:
    return traces.sending("submit", call.spec.name, call.spec.queue)


def _prepare_call(
    runtime: Runtime, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[TaskCall[Any, Any], bytes, tuple[int, ...]]:
    call, packed = _pack_call(runtime, task, args, kwargs)
    after = (
        tuple([_dependency_seq(runtime, dependency) for dependency in call.after])
        if call.after
        else ()
    )
    return call, packed, after


def _pack_call(
    runtime: Runtime, task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[TaskCall[Any, Any], bytes]:
    call = to_call(runtime, task)
    if "key" in kwargs and "key" not in call.task.signature.parameters:
        options = dict(call.options, key=kwargs["key"])
        kwargs = {name: value for name, value in kwargs.items() if name != "key"}
        call = TaskCall(call.task, options)
    return call, call.task.pack(args, kwargs)


def _submit_keyed(runtime: Runtime, tasks: KeyedTasks) -> list[int]:
    store = runtime.store
    return tasks.submit(store.transact, store.read, runtime.universe, runtime.app.tasks)


class SubmitCoalescer:
    """A coalescer of submissions from many threads: one thread commits the submissions of all."""

    def __init__(self, store: Store, universe: str) -> None:
        self._store = store
        self._universe = universe
        self._coalescer: Coalescer[_ThreadSubmission] = Coalescer(
            self._commit, _to_unknown, _take_batch
        )

    def submit(self, spec: TaskSpec, new: TaskToSubmit) -> int:
        if threading.current_thread() is threading.main_thread():
            # A signal handler may raise in the main thread. It must not lead a commit for other threads.
            [seq] = self._store.transact(operations.submit, self._universe, spec, [new])
            return int(seq)
        submission = _ThreadSubmission(spec, new)
        self._coalescer.run(submission)
        return submission.seq

    def _commit(self, batch: Sequence[_ThreadSubmission]) -> None:
        try:
            results = self._store.transact(
                operations.submit_each, self._universe, *_to_columns(batch)
            )
        except HoldfastError as error:
            if isinstance(error, Invalid) and len(batch) > 1:
                for half in _halves(batch):
                    self._commit(half)
                return
            for submission in batch:
                submission.error = type(error)(**error.fields)
                submission.done = True
            return
        rejections = _rejections(results)
        for index, submission in enumerate(batch):
            submission.error = rejections.get(index)
            submission.seq = results.seqs[index]
            submission.done = True


def _to_unknown(error: BaseException) -> CommitUnknown:
    """The error of submissions whose commit raised an unexpected error or was interrupted."""
    return CommitUnknown(why="the submitting thread was interrupted")


class AsyncSubmitCoalescer:
    """A coalescer of submissions from coroutines, one batch queue per event loop."""

    def __init__(self, store: Store, universe: str) -> None:
        self._store = store
        self._universe = universe
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopState] = (
            weakref.WeakKeyDictionary()
        )

    async def submit(self, spec: TaskSpec, new: TaskToSubmit) -> int:
        loop = asyncio.get_running_loop()
        state = self._loops.get(loop)
        if state is None:
            state = self._loops[loop] = _LoopState()
        submission = _AwaitedSubmission(spec, new, loop.create_future())
        state.waiting.append(submission)
        if state.in_flight < COMMITS_IN_FLIGHT_MAX and not state.scheduled:
            state.scheduled = True
            loop.call_soon(self._start, state)
        return await submission.future

    def _start(self, state: _LoopState) -> None:
        state.scheduled = False
        if state.waiting and state.in_flight < COMMITS_IN_FLIGHT_MAX:
            state.in_flight += 1
            task = asyncio.ensure_future(self._commit(state, _take_batch(state.waiting)))
            state.tasks.add(task)
            task.add_done_callback(state.tasks.discard)

    async def _commit(self, state: _LoopState, batch: list[_AwaitedSubmission]) -> None:
        try:
            await self._submit(batch)
        finally:
            state.in_flight -= 1
            self._start(state)

    async def _submit(self, batch: Sequence[_AwaitedSubmission]) -> None:
        try:
            results = await self._store.submit(
                operations.submit_each, self._universe, *_to_columns(batch)
            )
        except Invalid as error:
            if len(batch) > 1:
                for half in _halves(batch):
                    await self._submit(half)
            else:
                batch[0].fail(error)
        except HoldfastError as error:
            for submission in batch:
                submission.fail(type(error)(**error.fields))
        except BaseException as error:
            reported = error if isinstance(error, Exception) else CommitUnknown(why="cancelled")
            for submission in batch:
                submission.fail(reported)
        else:
            rejections = _rejections(results)
            for index, submission in enumerate(batch):
                if index in rejections:
                    submission.fail(rejections[index])
                elif not submission.future.done():
                    submission.future.set_result(results.seqs[index])


class _LoopState:
    def __init__(self) -> None:
        self.waiting: list[_AwaitedSubmission] = []
        self.tasks: set[asyncio.Future[None]] = set()
        self.in_flight = 0
        self.scheduled = False


class _AwaitedSubmission:
    __slots__ = ("future", "new", "spec")

    def __init__(self, spec: TaskSpec, new: TaskToSubmit, future: asyncio.Future[int]) -> None:
        self.spec = spec
        self.new = new
        self.future = future

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class _ThreadSubmission(CoalescedCall):
    __slots__ = ("new", "seq", "spec")

    def __init__(self, spec: TaskSpec, new: TaskToSubmit) -> None:
        super().__init__()
        self.spec = spec
        self.new = new
        self.seq = 0


def _take_batch(waiting: list[Any]) -> list[Any]:
    """Remove one commit's batch from the front of the list and return it."""
    size = 0
    count = 0
    for count, submission in enumerate(waiting[:SUBMIT_BATCH_MAX], start=1):
        size += len(submission.new.args)
        if size > SUBMIT_BYTES_MAX and count > 1:
            count -= 1
            break
    batch = waiting[:count]
    del waiting[:count]
    return batch


def _halves(batch: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """Split a batch that was rejected as a whole and changed nothing.

    The operation reports rejected tasks individually, so a whole batch fails only if a task cannot be
    encoded or sent. Bisection finds that task among n in 2 log n commits.
    """
    middle = len(batch) // 2
    return batch[:middle], batch[middle:]


def _rejections(results: SubmitEachResult) -> dict[int, HoldfastError]:
    return {index: from_wire([code, fields]) for index, code, fields in results.refused}


def _to_columns(batch: Sequence[Any]) -> tuple[list[TaskSpec], list[int], list[TaskToSubmit]]:
    specs: list[TaskSpec] = []
    spec_indexes: list[int] = []
    for submission in batch:
        # Usually all tasks of a batch share one spec.
        if not specs or (submission.spec is not specs[-1] and submission.spec != specs[-1]):
            specs.append(submission.spec)
        spec_indexes.append(len(specs) - 1)
    return specs, spec_indexes, [submission.new for submission in batch]


def submit_many(runtime: Runtime, task: Any, many: Iterable[Any]) -> list[Any]:
    """Submit in atomic commits of up to SUBMIT_BATCH tasks, with several commits in flight."""
    call = _to_call_without_key(runtime, task)
    after = tuple(_dependency_seq(runtime, item) for item in call.after)
    # Validate all arguments before the first commit.
    packed = [call.task.pack(*_check_arguments(item)) for item in many]
    handles: list[Any] = []
    in_flight: list[Any] = []
    with _sending(call) as sending:
        trace = sending.context
        for batch in _split_batches(packed):
            new = [call.new_task(item, after, trace) for item in batch]
            commit = runtime.store.submit(operations.submit, runtime.universe, call.spec, new)
            in_flight.append(commit)
            if len(in_flight) > 2:
                handles += [to_handle(runtime, call.task, seq) for seq in in_flight.pop(0).result()]
        for future in in_flight:
            handles += [to_handle(runtime, call.task, seq) for seq in future.result()]
        sending.sent_batch(len(handles))
    return handles


async def submit_many_async(runtime: Runtime, task: Any, many: Iterable[Any]) -> list[Any]:
    """`submit_many` for a coroutine. Other coroutines run between batches of arguments."""
    call = _to_call_without_key(runtime, task)
    dependencies = [_task_id(item) for item in call.after]
    after = await _read_seqs(runtime, dependencies)
    packed: list[bytes] = []
    for item in many:
        packed.append(call.task.pack(*_check_arguments(item)))
        if len(packed) % ARGUMENTS_PER_TURN == 0:
            await asyncio.sleep(0)
    seqs: list[int] = []
    in_flight: list[Any] = []
    with _sending(call) as sending:
        trace = sending.context
        for batch in _split_batches(packed):
            new = [call.new_task(item, after, trace) for item in batch]
            commit = runtime.store.submit(operations.submit, runtime.universe, call.spec, new)
            in_flight.append(commit)
            if len(in_flight) > 2:
                seqs += await in_flight.pop(0)
        for future in in_flight:
            seqs += await future
        sending.sent_batch(len(seqs))
    return [to_handle(runtime, call.task, seq) for seq in seqs]


def _to_call_without_key(runtime: Runtime, task: Any) -> TaskCall[Any, Any]:
    call = to_call(runtime, task)
    if call.key:
        raise Invalid(what="key", why="a key names one task; submit_many submits several")
    return call


async def _read_seqs(runtime: Runtime, tasks: list[TaskId]) -> Any:
    # The read runs outside the event loop, because a remote store may be slow.
    return await runtime.waiting.read(partial(_existing_seqs, runtime, tasks)) if tasks else ()


def submit_all(runtime: Runtime, submissions: Iterable[Submission]) -> list[Any]:
    """Submit different tasks in one atomic commit. `after` may name other tasks of the batch by their key, in
    any order. A cycle raises CyclicDependency."""
    batch = list(submissions)
    if len(batch) > BATCH_MAX:
        raise Invalid(what="tasks", why="too many for one commit", found=len(batch), max=BATCH_MAX)
    for item in batch:
        if not isinstance(item, Submission):
            raise Invalid(what="task", found=repr(item)[:64], expected="fn.options(…).call(…)")
        to_call(runtime, item.call)
    index_by_key = _index_by_key(batch)
    order = _topological_order(batch, index_by_key)
    positions = {index: at for at, index in enumerate(order)}
    specs: list[TaskSpec] = []
    spec_indexes: list[int] = []
    new: list[TaskToSubmit] = []
    for index in order:
        call, packed = batch[index]
        if call.spec not in specs:
            specs.append(call.spec)
        spec_indexes.append(specs.index(call.spec))
        after = tuple(
            -(positions[index_by_key[item]] + 1)
            if item in index_by_key
            else _dependency_seq(runtime, item)
            for item in call.after
        )
        new.append(call.new_task(packed, after, b""))
    with traces.sending("submit", "tasks", specs[0].queue if specs else "") as sending:
        if trace := sending.context:
            new = [replace(one, trace=trace) for one in new]
        seqs = _submit_keyed(runtime, KeyedTasks(specs, spec_indexes, new))
        sending.sent_batch(len(seqs))
    seq_by_index = dict(zip(order, seqs, strict=True))
    return [
        to_handle(runtime, item.call.task, seq_by_index[index], keyed=bool(item.call.key))
        for index, item in enumerate(batch)
    ]


def map_results(runtime: Runtime, task: Any, values: Iterable[Any], timeout: float | None) -> Any:
    handles = submit_many(runtime, task, ((value,) for value in values))

    def results() -> Iterator[Any]:
        for handle in handles:
            yield handle.result(timeout)

    return results()


def to_call(runtime: Runtime, task: Any) -> TaskCall[Any, Any]:
    call = task.plain if isinstance(task, Task) else task
    if not isinstance(call, TaskCall):
        raise Invalid(what="task", found=repr(task)[:64], why="not made by @hf.task")
    if runtime.app.tasks.get(call.task.name) is not call.task:
        raise Invalid(
            what="task", name=call.task.name, why="unknown to the app; name it in App(tasks=…)"
        )
    return call


def to_handle(
    runtime: Runtime, task: Task[Any, Any] | None, seq: int, *, keyed: bool = False
) -> TaskHandle[Any]:
    store = runtime.store
    generation = store.read(partial(_task_generation, runtime, seq)) if keyed else store.generation
    return TaskHandle(runtime, TaskId(generation, seq), task)


def _task_generation(runtime: Runtime, seq: int, txn: Txn) -> int:
    """Return the generation of a task with a key, which may be older than the store's generation."""
    body = get_body(txn, keys_of(runtime.universe), pack_int(seq))
    return runtime.store.generation if body is None else body.generation


def _dependency_seq(runtime: Runtime, task: Any) -> int:
    [seq] = runtime.store.read(partial(_existing_seqs, runtime, [_task_id(task)]))
    return int(seq)


def _existing_seqs(runtime: Runtime, tasks: Sequence[TaskId], txn: Txn) -> tuple[int, ...]:
    """Return the seqs of existing tasks. A task of another generation raises NotFound."""
    return tuple(queries.get_task(txn, runtime.universe, task).seq for task in tasks)


def _task_id(task: Any) -> TaskId:
    if isinstance(task, TaskHandle):
        task = task.id
    if not isinstance(task, str):
        raise Invalid(what="after", found=repr(task)[:64], expected="handles or ids of tasks")
    return parse_task_id(task)


def _index_by_key(batch: list[Submission]) -> dict[str, int]:
    """Map each key to the index of its first submission. Raise Invalid if `after` names an ambiguous key."""
    named_keys = {
        item for submission in batch for item in submission.call.after if isinstance(item, str)
    }
    index_by_key: dict[str, int] = {}
    for at, item in enumerate(batch):
        key = item.call.key
        first = index_by_key.setdefault(key, at) if key else at
        if key in named_keys and batch[first].call.task is not item.call.task:
            raise Invalid(what="after", key=key, why="two different tasks have this key")
    return index_by_key


def _topological_order(batch: list[Submission], index_by_key: dict[str, int]) -> list[int]:
    """Return the indexes in topological order: each task after its dependencies."""
    order: list[int] = []
    state: dict[int, int] = {}
    for start in range(len(batch)):
        stack = [start]
        while stack:
            index = stack[-1]
            if state.get(index) == 2:
                stack.pop()
                continue
            state[index] = 1
            waits = [
                index_by_key[item]
                for item in batch[index].call.after
                if isinstance(item, str) and item in index_by_key
            ]
            todo = [item for item in waits if state.get(item) != 2]
            if any(state.get(item) == 1 for item in todo):
                raise CyclicDependency(
                    task=batch[index].call.key, waits_for=batch[todo[0]].call.key
                )
            if todo:
                stack += todo
            else:
                state[index] = 2
                order.append(index)
                stack.pop()
    return order


def _check_arguments(arguments: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    if not isinstance(arguments, tuple | list):
        raise Invalid(
            what="task arguments",
            found=repr(arguments)[:64],
            expected="a tuple of arguments for each task",
        )
    return arguments, {}


def _split_batches(packed: list[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for arguments in packed:
        if batch and (len(batch) >= SUBMIT_BATCH_MAX or size + len(arguments) > SUBMIT_BYTES_MAX):
            yield batch
            batch, size = [], 0
        batch.append(arguments)
        size += len(arguments)
    if batch:
        yield batch

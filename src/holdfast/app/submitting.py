"""Submitting tasks: one, many, different ones at once; by threads and by coroutines.

One submission is one commit, and many callers would be many. So those who come while a commit is under
way wait for it, and all go into the next one: threads by appointing one of them to submit for all
(`Submitter`), coroutines by the loop they share (`AsyncSubmitter`). A submission that is refused fails
alone: the operation answers each by itself (`coordinator.submit_each`). What may be refused because of what
others did, a key or a dependency, goes by itself.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.app.task_handle import TaskHandle
from holdfast.app.tasks import Submission, Task, TaskCall
from holdfast.config import BATCH_MAX
from holdfast.errors import CommitUnknown, HoldfastError, Invalid, from_wire
from holdfast.store.api import Store, Txn
from holdfast.tasks import coordinator, look
from holdfast.tasks.coordinator import CyclicDependency, Each, New
from holdfast.tasks.ids import TaskId, parse_task
from holdfast.tasks.rows import Spec, body_of, keys_of, pack_int

if TYPE_CHECKING:
    from holdfast.app.runtime import Runtime

T = TypeVar("T")

# Submitted in one commit, at most; `submit_many` takes any number.
SUBMIT_BATCH = 1_000
SUBMIT_BYTES = 4 * 1024 * 1024
# Commits of one event loop that are under way at a time.
UNDER_WAY_MAX = 2


def submit(
    runtime: Runtime, wanted: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> TaskHandle[Any]:
    call, new = _prepare(runtime, wanted, args, kwargs)
    if new.key or new.after:
        [seq] = runtime.store.transact(coordinator.submit, runtime.universe, call.spec, [new])
    else:
        seq = runtime.submitter.submit(call.spec, new)
    return handle_of(runtime, call.task, seq, keyed=bool(new.key))


async def submit_async(
    runtime: Runtime, wanted: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> TaskHandle[Any]:
    call, packed = _pack(runtime, wanted, args, kwargs)
    tasks = [_task_id(one) for one in call.after]
    # The event loop reads nothing itself: a server may take its time.
    after = await runtime.waiting.read(partial(_seqs, runtime, tasks)) if tasks else ()
    new = call.new(packed, after)
    if new.key or new.after:
        [seq] = await runtime.store.submit(coordinator.submit, runtime.universe, call.spec, [new])
    else:
        seq = await runtime.async_submitter.submit(call.spec, new)
    if not new.key:
        return handle_of(runtime, call.task, seq)
    generation = await runtime.waiting.read(partial(_generation, runtime, seq))
    return TaskHandle(runtime, TaskId(generation, seq), call.task)


def _prepare(
    runtime: Runtime, wanted: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[TaskCall[Any, Any], New]:
    call, packed = _pack(runtime, wanted, args, kwargs)
    after = tuple([_dependency(runtime, one) for one in call.after]) if call.after else ()
    return call, call.new(packed, after)


def _pack(
    runtime: Runtime, wanted: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[TaskCall[Any, Any], bytes]:
    call = call_of(runtime, wanted)
    if "key" in kwargs and "key" not in call.task.parameters:
        options = dict(call.given, key=kwargs["key"])
        kwargs = {name: value for name, value in kwargs.items() if name != "key"}
        call = TaskCall(call.task, options)
    return call, call.task.pack(args, kwargs)


class Submitter:
    """Submissions of many threads, in one commit as many as have come while the last was made.

    Whoever finds nobody submitting does so for all who wait, and then appoints the next.
    """

    def __init__(self, store: Store, universe: str) -> None:
        self._store = store
        self._universe = universe
        self._lock = threading.Lock()
        self._waiting: list[_Single] = []
        self._led = False

    def submit(self, spec: Spec, new: New) -> int:
        if threading.current_thread() is threading.main_thread():
            # Handlers of signals run here, and may raise: nobody else is to hear of it.
            [seq] = self._store.transact(coordinator.submit, self._universe, spec, [new])
            return int(seq)
        single = _Single(spec, new)
        try:
            with self._lock:
                self._waiting.append(single)
                single.leads, self._led = not self._led, True
            if not single.leads:
                single.gate.acquire()
            if single.leads:
                self._lead(single)
        except BaseException:
            # Interrupted, by a signal's handler: the others must not wait for this thread.
            self._abandon(single)
            raise
        if single.error is not None:
            raise single.error
        assert single.seq is not None
        return single.seq

    def _lead(self, leader: _Single) -> None:
        batch: list[_Single] = []
        try:
            with self._lock:
                batch = _cut(self._waiting)
            self._commit(batch)
        finally:
            for one in batch:
                if one.seq is None and one.error is None:
                    one.error = CommitUnknown(why="the thread that submits was interrupted")
            self._abandon(leader)
            for one in batch:
                if one is not leader:
                    one.gate.release()

    def _commit(self, batch: Sequence[_Single]) -> None:
        try:
            each = self._store.transact(coordinator.submit_each, self._universe, *_columns(batch))
        except HoldfastError as error:
            if isinstance(error, Invalid) and len(batch) > 1:
                for half in _halves(batch):
                    self._commit(half)
                return
            for one in batch:
                one.error = type(error)(**error.fields)
            return
        refused = _refusals(each)
        for index, one in enumerate(batch):
            one.error = refused.get(index)
            if one.error is None:
                one.seq = each.seqs[index]

    def _abandon(self, single: _Single) -> None:
        """Have nothing more to do with it; if it leads, the next one does."""
        with self._lock:
            if single in self._waiting:
                self._waiting.remove(single)
            if not single.leads:
                return
            single.leads = False
            following = self._waiting[0] if self._waiting else None
            self._led = following is not None
            if following is not None:
                following.leads = True
                following.gate.release()


class AsyncSubmitter:
    """Submissions of the coroutines of an event loop, in one commit as many as have come together."""

    def __init__(self, store: Store, universe: str) -> None:
        self._store = store
        self._universe = universe
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Loop] = (
            weakref.WeakKeyDictionary()
        )

    async def submit(self, spec: Spec, new: New) -> int:
        loop = asyncio.get_running_loop()
        mine = self._loops.get(loop)
        if mine is None:
            mine = self._loops[loop] = _Loop()
        one = _Awaited(spec, new, loop.create_future())
        mine.waiting.append(one)
        if mine.under_way < UNDER_WAY_MAX and not mine.called:
            mine.called = True
            loop.call_soon(self._start, mine)
        return await one.future

    def _start(self, mine: _Loop) -> None:
        mine.called = False
        if mine.waiting and mine.under_way < UNDER_WAY_MAX:
            mine.under_way += 1
            task = asyncio.ensure_future(self._commit(mine, _cut(mine.waiting)))
            mine.tasks.add(task)
            task.add_done_callback(mine.tasks.discard)

    async def _commit(self, mine: _Loop, batch: list[_Awaited]) -> None:
        try:
            await self._submit(batch)
        finally:
            mine.under_way -= 1
            self._start(mine)

    async def _submit(self, batch: Sequence[_Awaited]) -> None:
        try:
            each = await self._store.submit(
                coordinator.submit_each, self._universe, *_columns(batch)
            )
        except Invalid as error:
            if len(batch) > 1:
                for half in _halves(batch):
                    await self._submit(half)
            else:
                batch[0].refuse(error)
        except HoldfastError as error:
            for one in batch:
                one.refuse(type(error)(**error.fields))
        except BaseException as error:
            told = error if isinstance(error, Exception) else CommitUnknown(why="cancelled")
            for one in batch:
                one.refuse(told)
        else:
            refused = _refusals(each)
            for index, one in enumerate(batch):
                if index in refused:
                    one.refuse(refused[index])
                elif not one.future.done():
                    one.future.set_result(each.seqs[index])


class _Loop:
    def __init__(self) -> None:
        self.waiting: list[_Awaited] = []
        self.tasks: set[asyncio.Future[None]] = set()
        self.under_way = 0
        self.called = False


class _Awaited:
    __slots__ = ("future", "new", "spec")

    def __init__(self, spec: Spec, new: New, future: asyncio.Future[int]) -> None:
        self.spec = spec
        self.new = new
        self.future = future

    def refuse(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class _Single:
    __slots__ = ("error", "gate", "leads", "new", "seq", "spec")

    def __init__(self, spec: Spec, new: New) -> None:
        self.spec = spec
        self.new = new
        self.seq: int | None = None
        self.error: HoldfastError | None = None
        # Whether it is this one's turn to submit for all.
        self.leads = False
        self.gate = threading.Lock()
        self.gate.acquire()


def _cut(waiting: list[Any]) -> list[Any]:
    """Take as many from the list as belong into one commit."""
    size = 0
    count = 0
    for count, one in enumerate(waiting[:SUBMIT_BATCH], start=1):
        size += len(one.new.args)
        if size > SUBMIT_BYTES and count > 1:
            count -= 1
            break
    batch = waiting[:count]
    del waiting[:count]
    return batch


def _halves(batch: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """The two halves of a batch that was refused as a whole, which changed nothing.

    The operation answers each task by itself, so this is for tasks that cannot even be sent: the search for
    one among n takes 2 log n commits.
    """
    middle = len(batch) // 2
    return batch[:middle], batch[middle:]


def _refusals(each: Each) -> dict[int, HoldfastError]:
    return {index: from_wire([code, fields]) for index, code, fields in each.refused}


def _columns(batch: Sequence[Any]) -> tuple[list[Spec], list[int], list[New]]:
    specs: list[Spec] = []
    which: list[int] = []
    for one in batch:
        # Almost always they are all alike.
        if not specs or (one.spec is not specs[-1] and one.spec != specs[-1]):
            specs.append(one.spec)
        which.append(len(specs) - 1)
    return specs, which, [one.new for one in batch]


def submit_many(runtime: Runtime, wanted: Any, many: Iterable[Any]) -> list[Any]:
    """In commits of up to SUBMIT_BATCH, each all or none, several under way at a time."""
    call = call_of(runtime, wanted)
    if call.key:
        raise Invalid(what="key", why="one key names one task; submit_many has many")
    after = tuple(_dependency(runtime, one) for one in call.after)
    # All arguments are checked before anything is submitted.
    packed = [call.task.pack(*_arguments(one)) for one in many]
    handles: list[Any] = []
    under_way: list[Any] = []
    for batch in _batches(packed):
        new = [call.new(one, after) for one in batch]
        under_way.append(runtime.store.submit(coordinator.submit, runtime.universe, call.spec, new))
        if len(under_way) > 2:
            handles += [handle_of(runtime, call.task, seq) for seq in under_way.pop(0).result()]
    for future in under_way:
        handles += [handle_of(runtime, call.task, seq) for seq in future.result()]
    return handles


def submit_all(runtime: Runtime, submissions: Iterable[Submission]) -> list[Any]:
    """Different tasks in one commit, all or none. `after` may name others of these by their key, in
    any order; a circle of them is CyclicDependency."""
    given = list(submissions)
    if len(given) > BATCH_MAX:
        raise Invalid(what="tasks", why="too many for one commit", found=len(given), max=BATCH_MAX)
    for one in given:
        if not isinstance(one, Submission):
            raise Invalid(what="task", found=repr(one)[:64], expected="fn.options(…).call(…)")
        call_of(runtime, one.call)
    keyed = _by_key(given)
    order = _in_order(given, keyed)
    place = {index: at for at, index in enumerate(order)}
    specs: list[Spec] = []
    which: list[int] = []
    new: list[New] = []
    for index in order:
        call, packed = given[index]
        if call.spec not in specs:
            specs.append(call.spec)
        which.append(specs.index(call.spec))
        after = tuple(
            -(place[keyed[one]] + 1) if one in keyed else _dependency(runtime, one)
            for one in call.after
        )
        new.append(call.new(packed, after))
    seqs = runtime.store.transact(coordinator.submit_all, runtime.universe, specs, which, new)
    found = dict(zip(order, seqs, strict=True))
    return [
        handle_of(runtime, one.call.task, found[index], keyed=bool(one.call.key))
        for index, one in enumerate(given)
    ]


def run_map(runtime: Runtime, wanted: Any, values: Iterable[Any], timeout: float | None) -> Any:
    handles = submit_many(runtime, wanted, ((value,) for value in values))

    def results() -> Iterator[Any]:
        for handle in handles:
            yield handle.result(timeout)

    return results()


def call_of(runtime: Runtime, wanted: Any) -> TaskCall[Any, Any]:
    call = wanted.plain if isinstance(wanted, Task) else wanted
    if not isinstance(call, TaskCall):
        raise Invalid(what="task", found=repr(wanted)[:64], why="not made by @hf.task")
    if runtime.app.tasks.get(call.task.name) is not call.task:
        raise Invalid(
            what="task", name=call.task.name, why="unknown to the app; name it in App(tasks=…)"
        )
    return call


def handle_of(
    runtime: Runtime, task: Task[Any, Any] | None, seq: int, *, keyed: bool = False
) -> TaskHandle[Any]:
    store = runtime.store
    generation = store.read(partial(_generation, runtime, seq)) if keyed else store.generation
    return TaskHandle(runtime, TaskId(generation, seq), task)


def _generation(runtime: Runtime, seq: int, txn: Txn) -> int:
    """Of a task that has a key: it may be older than a restored backup."""
    body = body_of(txn, keys_of(runtime.universe), pack_int(seq))
    return runtime.store.generation if body is None else body.generation


def _dependency(runtime: Runtime, one: Any) -> int:
    [seq] = runtime.store.read(partial(_seqs, runtime, [_task_id(one)]))
    return int(seq)


def _seqs(runtime: Runtime, tasks: Sequence[TaskId], txn: Txn) -> tuple[int, ...]:
    """Of tasks that are there, and of the generation that their names say."""
    return tuple(look.find(txn, runtime.universe, task).seq for task in tasks)


def _task_id(one: Any) -> TaskId:
    if isinstance(one, TaskHandle):
        one = one.id
    if not isinstance(one, str):
        raise Invalid(what="after", found=repr(one)[:64], expected="handles or ids of tasks")
    return parse_task(one)


def _by_key(given: list[Submission]) -> dict[str, int]:
    """Which of them a key names, where only one has it."""
    named = {one for each in given for one in each.call.after if isinstance(one, str)}
    found: dict[str, int] = {}
    for at, one in enumerate(given):
        key = one.call.key
        first = found.setdefault(key, at) if key else at
        if key in named and given[first].call.task is not one.call.task:
            raise Invalid(what="after", key=key, why="two different tasks have this key")
    return found


def _in_order(given: list[Submission], keyed: dict[str, int]) -> list[int]:
    """Each after those it waits for."""
    order: list[int] = []
    state: dict[int, int] = {}
    for start in range(len(given)):
        stack = [start]
        while stack:
            index = stack[-1]
            if state.get(index) == 2:
                stack.pop()
                continue
            state[index] = 1
            waits = [
                keyed[one]
                for one in given[index].call.after
                if isinstance(one, str) and one in keyed
            ]
            todo = [one for one in waits if state.get(one) != 2]
            if any(state.get(one) == 1 for one in todo):
                raise CyclicDependency(
                    task=given[index].call.key, waits_for=given[todo[0]].call.key
                )
            if todo:
                stack += todo
            else:
                state[index] = 2
                order.append(index)
                stack.pop()
    return order


def _arguments(one: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    if not isinstance(one, tuple | list):
        raise Invalid(
            what="task arguments",
            found=repr(one)[:64],
            expected="a tuple of arguments for each task",
        )
    return one, {}


def _batches(packed: list[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for one in packed:
        if batch and (len(batch) >= SUBMIT_BATCH or size + len(one) > SUBMIT_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(one)
        size += len(one)
    if batch:
        yield batch

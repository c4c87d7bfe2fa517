"""Tasks as users write and submit them.

    @hf.task(lease_s=60, attempts=5)
    def resize(path: str, width: int) -> str: ...

    app = hf.App("shop", tasks=[resize])
    with app.open("./data") as rt:
        handle = rt.submit(resize, "a.png", width=80)          # durable when it returns
        handle.result(timeout=30)
        rt.submit(resize.options(key="a-80", delay_s=5), "a.png", 80)

Arguments and results are plain data, converted to what the annotations say. The function itself can
still be called as it is.
"""

from __future__ import annotations

import inspect
import math
import threading
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec, TypeVar

import msgspec

from holdfast import codec
from holdfast.clock import S
from holdfast.config import BATCH_MAX, MESSAGE_BYTES_MAX, TTL_NS_MAX
from holdfast.errors import CommitUnknown, HoldfastError, Invalid, Timeout, ValueTooLarge
from holdfast.roles.task_run import BadTaskResult
from holdfast.store.api import Store, Txn
from holdfast.tasks import coordinator, look
from holdfast.tasks.coordinator import CyclicDependency, New
from holdfast.tasks.ids import TaskId, parse_task
from holdfast.tasks.rows import Limits, Spec, body_of, keys_of, pack_int
from holdfast.tasks.states import State
from holdfast.world.catalog import check_text

if TYPE_CHECKING:
    from holdfast.app.runtime import Runtime

T = TypeVar("T")
P = ParamSpec("P")

ISOLATIONS = ("thread", "process")
OPTIONS = ("key", "queue", "priority", "delay_s", "after", "limit_key")
# Submitted in one commit, at most; `submit_many` takes any number.
SUBMIT_BATCH = 1_000
SUBMIT_BYTES = 4 * 1024 * 1024
TIMEOUT_S_MAX = TTL_NS_MAX / S


class TaskFailedError(HoldfastError):
    """The task has ended, and not well: FAILED, or DEAD. `error` is the text of its last error."""

    code = "task_failed"
    hint = "look at it with `holdfast tasks show`, and try it anew with `holdfast tasks redrive`"


class Queue(NamedTuple):
    """A named queue, with how many of its tasks, and of each `limit_key` in it, run at a time."""

    name: str
    concurrency: int = 0
    per_key: int = 0


class Task(Generic[P, T]):
    """A function that workers run. Made by `@hf.task`."""

    def __init__(self, fn: Callable[P, Any], *, spec: Spec, isolation: str = "thread") -> None:
        self.fn = fn
        self.name = spec.name
        self.spec = spec
        self.isolation = isolation
        self.asynchronous = inspect.iscoroutinefunction(fn)
        if isolation not in ISOLATIONS:
            raise Invalid(what="isolation", found=isolation, expected=list(ISOLATIONS))
        if self.asynchronous and isolation != "thread":
            raise Invalid(what="isolation", task=self.name, why="coroutines run in one event loop")
        if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
            raise Invalid(what="task", name=self.name, why="a generator runs nothing when called")
        check_spec(spec)
        self.__doc__ = fn.__doc__
        self.__name__ = getattr(fn, "__name__", self.name)
        self.__module__ = getattr(fn, "__module__", "")
        self._qualname = getattr(fn, "__qualname__", self.__name__)
        if isolation == "process" and "<" in self._qualname:
            raise Invalid(
                what="isolation",
                task=self.name,
                found=self._qualname,
                why="another process finds only what its module has a name for",
            )
        try:
            self._signature = inspect.signature(fn)
            hints = typing.get_type_hints(fn)
        except (TypeError, ValueError, NameError, AttributeError) as error:
            raise Invalid(
                what="task", name=self.name, why=f"its annotations cannot be read: {error}"
            ) from None
        self._arity = _arity(self._signature)
        self.returns: Any = hints.pop("return", Any)
        self._hints = hints
        self._positional = [
            hints.get(name, Any)
            for name, one in self._signature.parameters.items()
            if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
        ]
        self._typed = any(hint is not Any for hint in hints.values())
        self.parameters = frozenset(self._signature.parameters)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        return typing.cast(T, self.fn(*args, **kwargs))

    def __repr__(self) -> str:
        return f"<task {self.name}>"

    def options(self, **options: Any) -> TaskCall[P, T]:
        """The task with options that could collide with its arguments."""
        unknown = sorted(options.keys() - set(OPTIONS))
        if unknown:
            raise Invalid(what="task option", found=unknown, expected=list(OPTIONS))
        return TaskCall(self, options)

    # -- for whoever submits -----------------------------------------------------------------------

    def pack(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bytes:
        """The arguments as they are stored; what does not fit the function is refused here."""
        try:
            if kwargs or self._arity is None or not self._arity[0] <= len(args) <= self._arity[1]:
                self._signature.bind(*args, **kwargs)
            packed = codec.pack([list(args), kwargs])
            if self._typed:
                self._arguments(packed)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise Invalid(what="task arguments", task=self.name, why=str(error)) from None
        if len(packed) > MESSAGE_BYTES_MAX:
            raise ValueTooLarge(
                what="task arguments",
                task=self.name,
                bytes=len(packed),
                bytes_max=MESSAGE_BYTES_MAX,
            )
        return packed

    def value(self, result: bytes) -> T:
        return typing.cast(T, _as(self.returns, codec.unpack(result)))

    # -- for whoever runs it -------------------------------------------------------------------------

    @property
    def home(self) -> tuple[str, str]:
        return self.__module__, self._qualname

    def invoke(self, args: bytes) -> Any:
        positional, named = self._arguments(args)
        return self.fn(*positional, **named)

    def dump(self, value: Any) -> bytes:
        try:
            packed = codec.pack(value)
            if self.returns is not Any:
                _as(self.returns, codec.unpack(packed))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise BadTaskResult(task=self.name, why=str(error)) from None
        return packed

    def _arguments(self, args: bytes) -> tuple[Any, Any]:
        positional, named = codec.unpack(args)
        if not self._typed:
            return positional, named
        known = [
            _as(hint, value) for hint, value in zip(self._positional, positional, strict=False)
        ]
        named = {name: _as(self._hints.get(name, Any), value) for name, value in named.items()}
        return known + positional[len(known) :], named


class TaskCall(Generic[P, T]):
    """A task with options, as `rt.submit` takes it."""

    def __init__(self, task: Task[P, T], options: dict[str, Any]) -> None:
        self.task = task
        self.given = options
        spec = task.spec
        changes: dict[str, Any] = {}
        if "queue" in options:
            changes["queue"] = options["queue"]
        if "priority" in options:
            changes["priority"] = options["priority"]
        try:
            self.spec = msgspec.convert(
                msgspec.structs.asdict(spec) | changes, type=_SpecForm
            ).spec()
        except msgspec.ValidationError as error:
            raise Invalid(what="task option", task=task.name, why=str(error)) from None
        check_spec(self.spec)
        delay_s = options.get("delay_s", 0)
        if not isinstance(delay_s, int | float) or not 0 <= delay_s <= TTL_NS_MAX / S:
            raise Invalid(what="delay_s", found=repr(delay_s)[:64], min=0, max=TTL_NS_MAX / S)
        self.delay_ns = math.ceil(delay_s * S)
        for what in ("key", "limit_key"):
            if options.get(what) is not None:
                check_text(what, options[what])
        self.key: str = options.get("key") or ""
        self.limit: str = options.get("limit_key") or ""
        after = options.get("after") or ()
        if isinstance(after, str | TaskHandle):
            after = (after,)
        if not isinstance(after, Iterable):
            raise Invalid(what="after", found=repr(after)[:64], expected="handles or ids of tasks")
        self.after: tuple[Any, ...] = tuple(after)

    def call(self, *args: Any, **kwargs: Any) -> Submission:
        """With its arguments, for `rt.submit_all`."""
        return Submission(self, self.task.pack(args, kwargs))

    def new(self, packed: bytes, after: tuple[int, ...]) -> New:
        return New(packed, self.delay_ns, self.key, self.limit, after)


class Submission(NamedTuple):
    call: TaskCall[Any, Any]
    packed: bytes


class _SpecForm(msgspec.Struct):
    """A spec whose fields are checked for their types."""

    name: str
    queue: str
    priority: int
    lease_ns: int
    attempts: int
    expiries_max: int
    window_ns: int
    retain_ns: int
    backoff_ns: int
    backoff_ns_max: int

    def spec(self) -> Spec:
        return Spec(**msgspec.structs.asdict(self))


class Declare(typing.Protocol):
    def __call__(self, fn: Callable[P, T], /) -> Task[P, T]: ...


@typing.overload
def task(fn: Callable[P, T], /) -> Task[P, T]: ...
@typing.overload
def task(
    fn: None = None,
    /,
    *,
    name: str | None = None,
    queue: str = "default",
    priority: int = 0,
    lease_s: float = 60,
    attempts: int = 5,
    expiries_max: int = 3,
    execution_window_s: float = 300,
    retain_s: float = 7 * 24 * 3600,
    backoff_s: float = 0.1,
    backoff_max_s: float = 60,
    isolation: str = "thread",
) -> Declare: ...


def task(
    fn: Any = None,
    /,
    *,
    name: str | None = None,
    queue: str = "default",
    priority: int = 0,
    lease_s: float = 60,
    attempts: int = 5,
    expiries_max: int = 3,
    execution_window_s: float = 300,
    retain_s: float = 7 * 24 * 3600,
    backoff_s: float = 0.1,
    backoff_max_s: float = 60,
    isolation: str = "thread",
) -> Any:
    """Declare a task: any function, `def` or `async def`.

    `attempts` bounds its failures, `expiries_max` the leases it outlives (a task that kills its worker
    is DEAD in the end). A lease is extended while the function runs, for `execution_window_s` after it
    began or last said `hf.current_task().progress()`. What is kept of it goes `retain_s` after its end.
    """

    def declare(fn: Callable[..., Any], /) -> Any:
        if not callable(fn):
            raise Invalid(what="task", found=repr(fn)[:64], why="not a function")
        form = {
            "name": getattr(fn, "__name__", "task") if name is None else name,
            "queue": queue,
            "priority": priority,
            "lease_ns": _ns("lease_s", lease_s),
            "attempts": attempts,
            "expiries_max": expiries_max,
            "window_ns": _ns("execution_window_s", execution_window_s),
            "retain_ns": _ns("retain_s", retain_s),
            "backoff_ns": _ns("backoff_s", backoff_s),
            "backoff_ns_max": _ns("backoff_max_s", backoff_max_s),
        }
        try:
            spec = msgspec.convert(form, type=_SpecForm).spec()
        except msgspec.ValidationError as error:
            raise Invalid(what="task", task=form["name"], why=str(error)) from None
        return Task(fn, spec=spec, isolation=isolation)

    return declare if fn is None else declare(fn)


class TaskStatus(NamedTuple):
    """How far a task is. `where` is its state, or where it waits."""

    id: str
    name: str
    queue: str
    state: str
    where: str
    attempt: int
    failures: int
    expiries: int
    reason: str
    error: str
    progress: Any = None


class TaskHandle(Generic[T]):
    """A submitted task."""

    def __init__(self, runtime: Runtime, id: TaskId, task: Task[Any, T] | None = None) -> None:
        self._runtime = runtime
        self._id = id
        self._task = task

    @property
    def id(self) -> str:
        return str(self._id)

    def __repr__(self) -> str:
        return f"<task {self.id}>"

    def status(self) -> TaskStatus:
        return self._runtime.store.read(self._status)

    def done(self) -> bool:
        return self.status().state not in (State.WAITING.name, State.LEASED.name)

    def result(self, timeout: float | None = None) -> T:
        """What the task returned. Raises TaskFailedError with the task's own error, or Timeout."""
        if timeout is not None and not (
            isinstance(timeout, int | float) and timeout <= TIMEOUT_S_MAX
        ):
            raise Invalid(what="timeout", found=repr(timeout)[:64], max=TIMEOUT_S_MAX)
        runtime = self._runtime
        store, seq = runtime.store, self._id.seq
        found = store.read(self._ended)
        if found is not None:
            return self._value(found)
        topic = keys_of(runtime.universe).task_topic(seq)
        until_ns = None if timeout is None else runtime.clock.mono_ns() + int(timeout * S)
        since = store.wait(topic, 0, 0.0)
        while (found := store.read(self._ended)) is None:
            left_s = 1.0
            if until_ns is not None:
                left_s = min(left_s, (until_ns - runtime.clock.mono_ns()) / S)
                if left_s <= 0:
                    runtime.check()
                    raise Timeout(what="task", task=self.id, waited_s=timeout)
            since = store.wait(topic, since, left_s)
            runtime.check()
        return self._value(found)

    def cancel(self) -> bool:
        """End it, also while it runs; whether it was ended by this."""
        ended = self._runtime.store.transact(
            coordinator.cancel, self._runtime.universe, [self._id.seq]
        )
        return bool(ended[0])

    # -- inside ------------------------------------------------------------------------------------

    def _ended(self, txn: Txn) -> look.Seen | None:
        row = look.find(txn, self._runtime.universe, self._id)
        if row.state in (State.WAITING, State.LEASED):
            return None
        return look.see(txn, self._runtime.universe, self._id)

    def _value(self, found: look.Seen) -> T:
        row = found.row
        if row.state is not State.COMPLETED:
            raise TaskFailedError(
                task=self.id,
                name=row.spec.name,
                state=row.state.name,
                reason=row.status.reason,
                error=row.status.error,
                attempts=row.status.attempt,
            )
        task = self._task or self._runtime.app.tasks.get(row.spec.name)
        return typing.cast(
            T, codec.unpack(found.result) if task is None else task.value(found.result)
        )

    def _status(self, txn: Txn) -> TaskStatus:
        seen = look.see(txn, self._runtime.universe, self._id)
        row = seen.row
        status = row.status
        return TaskStatus(
            self.id,
            row.spec.name,
            row.spec.queue,
            row.state.name,
            row.where,
            status.attempt,
            status.failures,
            status.expiries,
            status.reason,
            status.error,
            codec.unpack(seen.progress) if seen.progress else None,
        )


# -- submitting ------------------------------------------------------------------------------------


def submit(
    runtime: Runtime, wanted: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> TaskHandle[Any]:
    call = call_of(runtime, wanted)
    if "key" in kwargs and "key" not in call.task.parameters:
        options = dict(call.given, key=kwargs["key"])
        kwargs = {name: value for name, value in kwargs.items() if name != "key"}
        call = TaskCall(call.task, options)
    after = tuple(_dependency(runtime, one) for one in call.after)
    new = call.new(call.task.pack(args, kwargs), after)
    if new.key or new.after:
        # It may be refused for what others did: it goes by itself.
        [seq] = runtime.store.transact(coordinator.submit, runtime.universe, call.spec, [new])
    else:
        seq = runtime.submitter.submit(call.spec, new)
    return handle_of(runtime, call.task, seq, keyed=bool(call.key))


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
        single = _Single(spec, new)
        with self._lock:
            self._waiting.append(single)
            lead = not self._led
            self._led = True
        if not lead:
            single.gate.acquire()
        if single.seq is None and single.error is None:
            self._lead()
        if single.error is not None:
            raise single.error
        assert single.seq is not None
        return single.seq

    def _lead(self) -> None:
        with self._lock:
            batch = self._waiting[:SUBMIT_BATCH]
            size = 0
            for count, one in enumerate(batch):
                size += len(one.new.args)
                if size > SUBMIT_BYTES and count:
                    batch = batch[:count]
                    break
            del self._waiting[: len(batch)]
        try:
            self._commit(batch)
        except Exception as error:
            for one in batch:
                one.error = error
        except BaseException:
            # Whoever interrupted this thread did not mean the others.
            for one in batch:
                one.error = CommitUnknown(
                    why="the thread that submitted for several was interrupted"
                )
            raise
        finally:
            with self._lock:
                following = self._waiting[0] if self._waiting else None
                self._led = following is not None
            if following is not None:
                following.gate.release()
            for one in batch:
                one.gate.release()

    def _commit(self, batch: list[_Single]) -> None:
        specs: list[Spec] = []
        which: list[int] = []
        for one in batch:
            # Almost always they are all alike.
            if not specs or one.spec != specs[-1]:
                specs.append(one.spec)
            which.append(len(specs) - 1)
        seqs = self._store.transact(
            coordinator.submit_all, self._universe, specs, which, [one.new for one in batch]
        )
        for one, seq in zip(batch, seqs, strict=True):
            one.seq = seq


class _Single:
    __slots__ = ("error", "gate", "new", "seq", "spec")

    def __init__(self, spec: Spec, new: New) -> None:
        self.spec = spec
        self.new = new
        self.seq: int | None = None
        self.error: BaseException | None = None
        self.gate = threading.Lock()
        self.gate.acquire()


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
    keyed = {one.call.key: index for index, one in enumerate(given) if one.call.key}
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
    call = TaskCall(wanted, {}) if isinstance(wanted, Task) else wanted
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
    generation = runtime.store.generation
    if keyed:
        # The task of a key may be older than a restored backup.
        body = runtime.store.read(
            lambda txn: body_of(txn, keys_of(runtime.universe), pack_int(seq))
        )
        generation = generation if body is None else body.generation
    return TaskHandle(runtime, TaskId(generation, seq), task)


def _dependency(runtime: Runtime, one: Any) -> int:
    if isinstance(one, TaskHandle):
        one = one.id
    if not isinstance(one, str):
        raise Invalid(what="after", found=repr(one)[:64], expected="handles or ids of tasks")
    return runtime.store.read(look.find, runtime.universe, parse_task(one)).seq


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


def check_spec(spec: Spec) -> None:
    check_text("task", spec.name)
    check_text("queue", spec.queue)
    coordinator.check_spec(spec)


def queues_of(given: Iterable[Any]) -> dict[str, Queue]:
    """The queues of an app by name, checked."""
    found: dict[str, Queue] = {}
    for queue in given:
        if not isinstance(queue, Queue):
            raise Invalid(what="queue", found=repr(queue)[:64], expected="hf.Queue")
        check_text("queue", queue.name)
        for what in ("concurrency", "per_key"):
            most = getattr(queue, what)
            if type(most) is not int or most < 0:
                raise Invalid(what=what, queue=queue.name, found=repr(most)[:64], min=0)
        if queue.name in found:
            raise Invalid(what="queue", name=queue.name, why="declared twice")
        found[queue.name] = queue
    return found


def limits_of(queue: Queue) -> Limits:
    return Limits(queue.concurrency, queue.per_key)


def _ns(what: str, seconds: Any) -> int:
    if not isinstance(seconds, int | float) or not 0 < seconds <= TTL_NS_MAX / S:
        raise Invalid(what=what, found=repr(seconds)[:64], min=0, max=TTL_NS_MAX / S)
    return math.ceil(seconds * S)


def _arity(signature: inspect.Signature) -> tuple[int, int] | None:
    """How many positional arguments there may be; None when it takes more to say."""
    taken = list(signature.parameters.values())
    if any(one.kind not in (one.POSITIONAL_OR_KEYWORD, one.POSITIONAL_ONLY) for one in taken):
        return None
    return sum(one.default is one.empty for one in taken), len(taken)


def _as(hint: Any, value: Any) -> Any:
    return value if hint is Any else msgspec.convert(value, hint)

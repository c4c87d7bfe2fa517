"""Task declarations: the decorator, the options of a submission, and queues.

    @hf.task(lease_s=60, attempts=5)
    def resize(path: str, width: int) -> str: ...

    app = hf.App("shop", tasks=[resize])
    with app.open("./data") as rt:
        handle = rt.submit(resize, "a.png", width=80)          # durable when it returns
        handle.result(timeout=30)
        rt.submit(resize.options(key="a-80", delay_s=5), "a.png", 80)

Arguments and results are plain data, converted to the annotated types. The decorated function can still
be called directly.
"""

from __future__ import annotations

import inspect
import math
import types
import typing
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import msgspec

from holdfast import codec, value_versions
from holdfast.app.parameter_types import BadArgument, types_of
from holdfast.app.schedule_options import ScheduleOptions, checked_args
from holdfast.app.storable_types import check_function
from holdfast.clock import S
from holdfast.config import MESSAGE_BYTES_MAX, TTL_NS_MAX
from holdfast.errors import Invalid, ValueTooLarge
from holdfast.tasks import submit
from holdfast.tasks.model import LOOP, PROCESS, THREAD, QueueLimits, TaskSpec
from holdfast.tasks.submit import TaskToSubmit
from holdfast.world.catalog import check_text

T = TypeVar("T")
P = ParamSpec("P")

_NONE = type(None)
_PLAIN_TYPES: frozenset[type] = frozenset({bool, int, float, str, bytes, _NONE})
ISOLATIONS = ("thread", "process")
REPORTS = ("batch", "each")
OPTIONS = ("key", "queue", "priority", "delay_s", "after", "limit_key", "tag")


class Queue(NamedTuple):
    """A named queue with concurrency limits: for the whole queue, and for each `limit_key` (0: no limit)."""

    name: str
    concurrency: int = 0
    per_key: int = 0


class Task(Generic[P, T]):
    """A function that workers run. Created by `@hf.task`."""

    def __init__(
        self,
        fn: Callable[P, Any],
        *,
        spec: TaskSpec,
        isolation: str = "thread",
        report: str = "batch",
    ) -> None:
        self.fn = fn
        self.name = spec.name
        self.spec = spec
        self.isolation = isolation
        self.report = report
        # The schedule of `@hf.task(every=…)`.
        self.schedule: ScheduleOptions | None = None
        if report not in REPORTS:
            raise Invalid(what="report", found=report, expected=list(REPORTS))
        self.asynchronous = inspect.iscoroutinefunction(fn)
        if isolation not in ISOLATIONS:
            raise Invalid(what="isolation", found=isolation, expected=list(ISOLATIONS))
        if self.asynchronous and isolation != "thread":
            raise Invalid(
                what="isolation",
                task=self.name,
                why="a coroutine runs in the event loop of the worker, not in a process",
            )
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
                why="a task process can import only functions at module level",
            )
        try:
            self.signature = inspect.signature(fn)
            hints = typing.get_type_hints(fn)
        except (TypeError, ValueError, NameError, AttributeError) as error:
            raise Invalid(
                what="task", name=self.name, why=f"its annotations cannot be read: {error}"
            ) from None
        self._argument_counts = _argument_counts(self.signature)
        self.returns: Any = hints.pop("return", Any)
        self._hints_by_name = hints
        self.types = types_of(self.signature, hints)
        positional = [hint for _, hint in self.types.positional]
        self._has_hints = any(hint is not Any for hint in hints.values())
        self._exact_types = [_exact_types(hint) for hint in positional]
        # Surplus arguments are those of `*args`.
        self._exact_rest = _exact_types(self.types.rest)
        self._exact_result_types = _exact_types(self.returns)
        # The fast path of `_fits`, for signatures where each parameter has exactly one type.
        kinds = {parameter.kind for parameter in self.signature.parameters.values()}
        all_single = inspect.Parameter.VAR_POSITIONAL not in kinds and all(
            exact and len(exact) == 1 for exact in self._exact_types
        )
        self._fast_types = tuple(positional) if all_single else None
        # The call without options.
        self.plain: TaskCall[P, T] = TaskCall(self, {})

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        return typing.cast(T, self.fn(*args, **kwargs))

    def __repr__(self) -> str:
        return f"<task {self.name}>"

    def options(self, **options: Any) -> TaskCall[P, T]:
        """Return the task with submission options, kept apart from its arguments."""
        unknown = sorted(options.keys() - set(OPTIONS))
        if unknown:
            raise Invalid(what="task option", found=unknown, expected=list(OPTIONS))
        return TaskCall(self, options)

    def check_storable(self) -> None:
        """Raise NotStorable if an argument or the result cannot be stored."""
        check_function("task", self.name, self.signature, self._hints_by_name, self.returns)

    # -- used by submitters ------------------------------------------------------------------------

    def pack(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bytes:
        """Encode the arguments. Raise Invalid if they do not match the function's signature."""
        try:
            if (
                kwargs
                or self._argument_counts is None
                or not self._argument_counts[0] <= len(args) <= self._argument_counts[1]
            ):
                self.signature.bind(*args, **kwargs)
            pack = codec.pack_value if self._fast_types is None or kwargs else codec.pack
            packed = pack([list(args), kwargs])
            if self._has_hints and (kwargs or not self._has_exact_types(args)):
                self._convert_arguments(*codec.unpack(packed))
        except BadArgument as error:
            raise BadArgument(what="task arguments", task=self.name, **error.fields) from None
        except codec.ENCODE_ERRORS as error:
            raise Invalid(what="task arguments", task=self.name, why=str(error)) from None
        if self._fast_types is None or kwargs:
            codec.check_depth("task arguments", packed, task=self.name)
        if len(packed) > MESSAGE_BYTES_MAX:
            raise ValueTooLarge(
                what="task arguments",
                task=self.name,
                bytes=len(packed),
                bytes_max=MESSAGE_BYTES_MAX,
            )
        return packed

    def _has_exact_types(self, args: Sequence[Any]) -> bool:
        """Whether all arguments already have the annotated types, so that no conversion is needed."""
        if tuple(map(type, args)) == self._fast_types:
            return True
        for exact, value in zip(self._exact_types, args, strict=False):
            if exact is not None and type(value) not in exact:
                return False
        exact = self._exact_rest
        return exact is None or all(
            type(value) in exact for value in args[len(self._exact_types) :]
        )

    def value(self, result: bytes, upcast: value_versions.UpcastObjects | None = None) -> T:
        return typing.cast(T, value_versions.decode(result, self.returns, upcast))

    # -- used by workers -------------------------------------------------------------------------------

    @property
    def home(self) -> tuple[str, str]:
        return self.__module__, self._qualname

    def invoke(self, args: bytes) -> Any:
        positional, named = codec.unpack(args)
        if named or not self._has_exact_types(positional):
            positional, named = self._convert_arguments(positional, named)
        return self.fn(*positional, **named)

    def dump(self, value: Any) -> bytes:
        try:
            exact = self._exact_result_types
            is_exact = exact and type(value) in exact
            packed = codec.pack(value) if is_exact else codec.pack_value(value)
            if exact is not None and type(value) not in exact:
                _convert(self.returns, codec.unpack(packed))
            if not exact or type(value) not in exact:
                codec.check_depth("task result", packed)
        except (*codec.ENCODE_ERRORS, Invalid) as error:
            # Imported lazily: a process that only declares or submits tasks does not need the worker code.
            from holdfast.workers.tasks.attempt import BadTaskResult

            raise BadTaskResult(task=self.name, why=str(error)) from None
        return value_versions.encode_versions(self.returns) + packed

    def _convert_arguments(self, positional: Any, named: Any) -> tuple[Any, Any]:
        if not self._has_hints:
            return positional, named
        return self.types.convert(positional, named, codec.convert)


class AsyncTask(Task[P, T]):
    """A task from an `async def` function. `T` is the type of its result; a direct call returns a coroutine."""

    def __call__(  # type: ignore[override]
        self, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, T]:
        return typing.cast("Coroutine[Any, Any, T]", self.fn(*args, **kwargs))


class TaskCall(Generic[P, T]):
    """A task with submission options, as accepted by `rt.submit`."""

    def __init__(self, task: Task[P, T], options: dict[str, Any]) -> None:
        self.task = task
        self.options = options
        spec = task.spec
        changes: dict[str, Any] = {}
        if "queue" in options:
            changes["queue"] = options["queue"]
        if "priority" in options:
            changes["priority"] = options["priority"]
        try:
            self.spec = msgspec.convert(
                msgspec.structs.asdict(spec) | changes, type=_CheckedSpec
            ).to_spec()
        except msgspec.ValidationError as error:
            raise Invalid(what="task option", task=task.name, why=str(error)) from None
        check_spec(self.spec)
        delay_s = options.get("delay_s", 0)
        if not isinstance(delay_s, int | float) or not 0 <= delay_s <= TTL_NS_MAX / S:
            raise Invalid(what="delay_s", found=repr(delay_s)[:64], min=0, max=TTL_NS_MAX / S)
        self.delay_ns = math.ceil(delay_s * S)
        for what in ("key", "limit_key", "tag"):
            if options.get(what) is not None:
                check_text(what, options[what])
        self.key: str = options.get("key") or ""
        self.limit: str = options.get("limit_key") or ""
        self.tag: str = options.get("tag") or ""
        after = options.get("after") or ()
        if isinstance(after, str) or hasattr(after, "id"):
            after = (after,)  # a single id or handle
        if not isinstance(after, Iterable):
            raise Invalid(what="after", found=repr(after)[:64], expected="handles or ids of tasks")
        self.after: tuple[Any, ...] = tuple(after)

    def call(self, *args: P.args, **kwargs: P.kwargs) -> Submission:
        """Bind the arguments, for `rt.submit_all`."""
        return Submission(self, self.task.pack(args, kwargs))

    def new_task(self, packed: bytes, after: tuple[int, ...], trace: bytes) -> TaskToSubmit:
        return TaskToSubmit(packed, self.delay_ns, self.key, self.limit, after, trace, self.tag)


class Submission(NamedTuple):
    call: TaskCall[Any, Any]
    packed: bytes


class _CheckedSpec(msgspec.Struct):
    """A task spec whose field types msgspec validates."""

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
    kind: int = THREAD

    def to_spec(self) -> TaskSpec:
        return TaskSpec(**msgspec.structs.asdict(self))


class TaskDecorator(typing.Protocol):
    @typing.overload
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, T]], /) -> AsyncTask[P, T]: ...
    @typing.overload
    def __call__(self, fn: Callable[P, T], /) -> Task[P, T]: ...


@typing.overload
def task(fn: Callable[P, Coroutine[Any, Any, T]], /) -> AsyncTask[P, T]: ...
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
    report: str = "batch",
    every: str | None = None,
    zone: str = "UTC",
    missed: str = "one",
    overlap: str = "skip",
    args: Sequence[Any] = (),
) -> TaskDecorator: ...


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
    report: str = "batch",
    every: str | None = None,
    zone: str = "UTC",
    missed: str = "one",
    overlap: str = "skip",
    args: Sequence[Any] = (),
) -> Any:
    """Declare a task: any function, `def` or `async def`.

    `attempts` limits failures. `expiries_max` limits expired leases, so that a task that kills its workers
    becomes DEAD. The worker extends the lease while the function runs, for `execution_window_s` after its
    start or its last `hf.current_task().progress()`. The task is deleted `retain_s` after its end. Workers
    commit outcomes in batches; with `report="each"` an outcome is committed before the worker starts the
    next task. With `every`, a cron rule, the task is a schedule: `zone`, `missed`, `overlap` and `args` belong to it.
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
            "kind": LOOP
            if inspect.iscoroutinefunction(fn)
            else (PROCESS if isolation == "process" else THREAD),
        }
        try:
            spec = msgspec.convert(form, type=_CheckedSpec).to_spec()
        except msgspec.ValidationError as error:
            raise Invalid(what="task", task=form["name"], why=str(error)) from None
        kind = AsyncTask if inspect.iscoroutinefunction(fn) else Task
        declared: Task[..., Any] = kind(fn, spec=spec, isolation=isolation, report=report)
        if every is not None:
            declared.schedule = ScheduleOptions(every, zone, missed, overlap, checked_args(args))
            declared.schedule.check(declared.pack)
        return declared

    return declare if fn is None else declare(fn)


def check_spec(spec: TaskSpec) -> None:
    check_text("task", spec.name)
    check_text("queue", spec.queue)
    submit.check_spec(spec)


def queues_of(queues: Iterable[Any]) -> dict[str, Queue]:
    """Validate the queues of an app and return them by name."""
    by_name: dict[str, Queue] = {}
    for queue in queues:
        if not isinstance(queue, Queue):
            raise Invalid(what="queue", found=repr(queue)[:64], expected="hf.Queue")
        check_text("queue", queue.name)
        for what in ("concurrency", "per_key"):
            limit = getattr(queue, what)
            if type(limit) is not int or limit < 0:
                raise Invalid(what=what, queue=queue.name, found=repr(limit)[:64], min=0)
        if queue.name in by_name:
            raise Invalid(what="queue", name=queue.name, why="declared twice")
        by_name[queue.name] = queue
    return by_name


def to_limits(queue: Queue) -> QueueLimits:
    return QueueLimits(queue.concurrency, queue.per_key)


def _ns(what: str, seconds: Any) -> int:
    if not isinstance(seconds, int | float) or not 0 < seconds <= TTL_NS_MAX / S:
        raise Invalid(what=what, found=repr(seconds)[:64], min=0, max=TTL_NS_MAX / S)
    return math.ceil(seconds * S)


def _argument_counts(signature: inspect.Signature) -> tuple[int, int] | None:
    """The least and greatest number of positional arguments; None if the signature needs a full bind."""
    parameters = list(signature.parameters.values())
    if any(
        parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.POSITIONAL_ONLY)
        for parameter in parameters
    ):
        return None
    return sum(parameter.default is parameter.empty for parameter in parameters), len(parameters)


def _convert(hint: Any, value: Any) -> Any:
    return value if hint is Any else codec.convert(value, hint)


def _exact_types(hint: Any) -> frozenset[type] | None:
    """Return the exact types whose values a hint accepts without conversion; None if it accepts all."""
    if hint is Any:
        return None
    parts = typing.get_args(hint) if _is_union(hint) else (hint,)
    # Compare by identity: some annotations are not hashable.
    plain = frozenset(
        plain_type for plain_type in _PLAIN_TYPES if any(plain_type is part for part in parts)
    )
    # A union of two plain types, such as str | bytes, needs the full conversion.
    return plain if len(plain) == len(parts) and len(plain - {_NONE}) < 2 else frozenset()


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)

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
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import msgspec

from holdfast import codec
from holdfast.app.storable import check_function
from holdfast.clock import S
from holdfast.config import MESSAGE_BYTES_MAX, TTL_NS_MAX
from holdfast.errors import Invalid, ValueTooLarge
from holdfast.tasks import submit
from holdfast.tasks.rows import LOOP, PROCESS, THREAD, Limits, Spec
from holdfast.tasks.submit import New
from holdfast.world.catalog import check_text

T = TypeVar("T")
P = ParamSpec("P")

_NONE = type(None)
_PLAIN: frozenset[type] = frozenset({bool, int, float, str, bytes, _NONE})
ISOLATIONS = ("thread", "process")
REPORTS = ("batch", "each")
OPTIONS = ("key", "queue", "priority", "delay_s", "after", "limit_key")


class Queue(NamedTuple):
    """A named queue, with how many of its tasks, and of each `limit_key` in it, run at a time."""

    name: str
    concurrency: int = 0
    per_key: int = 0


class Task(Generic[P, T]):
    """A function that workers run. Made by `@hf.task`."""

    def __init__(
        self,
        fn: Callable[P, Any],
        *,
        spec: Spec,
        isolation: str = "thread",
        report: str = "batch",
    ) -> None:
        self.fn = fn
        self.name = spec.name
        self.spec = spec
        self.isolation = isolation
        self.report = report
        if report not in REPORTS:
            raise Invalid(what="report", found=report, expected=list(REPORTS))
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
        self._settled = [_settled(hint) for hint in self._positional]
        self._settled_result = _settled(self.returns)
        # Looked for first, where each is of one type.
        plain = all(settled and len(settled) == 1 for settled in self._settled)
        self._usual = tuple(self._positional) if plain else None
        self.parameters = frozenset(self._signature.parameters)
        # How it is submitted when nobody says otherwise.
        self.plain: TaskCall[P, T] = TaskCall(self, {})

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

    def check_storable(self) -> None:
        """NotStorable if an argument or the result cannot be stored."""
        check_function("task", self.name, self._signature, self._hints, self.returns)

    # -- for whoever submits -----------------------------------------------------------------------

    def pack(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bytes:
        """The arguments as they are stored; what does not fit the function is refused here."""
        try:
            if kwargs or self._arity is None or not self._arity[0] <= len(args) <= self._arity[1]:
                self._signature.bind(*args, **kwargs)
            pack = codec.pack_value if self._usual is None or kwargs else codec.pack
            packed = pack([list(args), kwargs])
            if self._typed and (kwargs or not self._fits(args)):
                self._converted(*codec.unpack(packed))
        except codec.UNWRITABLE as error:
            raise Invalid(what="task arguments", task=self.name, why=str(error)) from None
        if self._usual is None or kwargs:
            codec.check_depth("task arguments", packed, task=self.name)
        if len(packed) > MESSAGE_BYTES_MAX:
            raise ValueTooLarge(
                what="task arguments",
                task=self.name,
                bytes=len(packed),
                bytes_max=MESSAGE_BYTES_MAX,
            )
        return packed

    def _fits(self, args: Sequence[Any]) -> bool:
        """Whether all are of the very types that the function names: then nothing is to be converted."""
        if tuple(map(type, args)) == self._usual:
            return True
        for settled, value in zip(self._settled, args, strict=False):
            if settled is not None and type(value) not in settled:
                return False
        return True

    def value(self, result: bytes) -> T:
        return typing.cast(T, _as(self.returns, codec.unpack(result)))

    # -- for whoever runs it -------------------------------------------------------------------------

    @property
    def home(self) -> tuple[str, str]:
        return self.__module__, self._qualname

    def invoke(self, args: bytes) -> Any:
        positional, named = codec.unpack(args)
        if named or not self._fits(positional):
            positional, named = self._converted(positional, named)
        return self.fn(*positional, **named)

    def dump(self, value: Any) -> bytes:
        try:
            settled = self._settled_result
            plain = settled and type(value) in settled
            packed = codec.pack(value) if plain else codec.pack_value(value)
            if settled is not None and type(value) not in settled:
                _as(self.returns, codec.unpack(packed))
            if not settled or type(value) not in settled:
                codec.check_depth("task result", packed)
        except (*codec.UNWRITABLE, Invalid) as error:
            # A task is declared before a store's process is started, run long after: what runs it is
            # imported between the two, or not at all where tasks are submitted alone.
            from holdfast.roles.task_run import BadTaskResult

            raise BadTaskResult(task=self.name, why=str(error)) from None
        return packed

    def _converted(self, positional: Any, named: Any) -> tuple[Any, Any]:
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
        if isinstance(after, str) or hasattr(after, "id"):
            after = (after,)  # one id, or one handle
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
    kind: int = THREAD

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
    report: str = "batch",
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
    report: str = "batch",
) -> Any:
    """Declare a task: any function, `def` or `async def`.

    `attempts` bounds its failures, `expiries_max` the leases it outlives (a task that kills its worker
    is DEAD in the end). A lease is extended while the function runs, for `execution_window_s` after it
    began or last said `hf.current_task().progress()`. What is kept of it goes `retain_s` after its end.
    Outcomes go many to a commit; with `report="each"` each is committed before its worker begins another.
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
            spec = msgspec.convert(form, type=_SpecForm).spec()
        except msgspec.ValidationError as error:
            raise Invalid(what="task", task=form["name"], why=str(error)) from None
        return Task(fn, spec=spec, isolation=isolation, report=report)

    return declare if fn is None else declare(fn)


def check_spec(spec: Spec) -> None:
    check_text("task", spec.name)
    check_text("queue", spec.queue)
    submit.check_spec(spec)


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
    return value if hint is Any else codec.convert(value, hint)


def _settled(hint: Any) -> frozenset[type] | None:
    """Types whose values are what a hint says, so that converting them would change nothing; None: all."""
    if hint is Any:
        return None
    parts = typing.get_args(hint) if _is_union(hint) else (hint,)
    # By identity: not every annotation has a hash.
    plain = frozenset(one for one in _PLAIN if any(one is part for part in parts))
    # Of several types some unions are no types at all: text or bytes.
    return plain if len(plain) == len(parts) and len(plain - {_NONE}) < 2 else frozenset()


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)

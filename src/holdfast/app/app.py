"""The application: its worlds, effects and tasks, compiled into definitions that the layers below run."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

import holdfast.app.world_reference  # noqa: F401  (makes `hf.world` callable)
from holdfast import codec, store, value_versions
from holdfast.app.definitions import (
    Effect,
    EffectWithOptions,
    Inbox,
    Mail,
    World,
    handlers_of,
    is_event,
    reply_type,
)
from holdfast.app.history_limit import Keep, bounds_of
from holdfast.app.schedule_options import schedules_of
from holdfast.app.storable_types import check_fields, check_type, model_types
from holdfast.app.tasks import Queue, Task, queues_of
from holdfast.app_hooks import NO_HOOKS, AppHooks
from holdfast.errors import BadUrl, HoldfastError, Invalid
from holdfast.flows.model import TASK_PREFIX
from holdfast.messages import (
    FLOW_START_PREFIX,
    INBOX,
    RESERVED_KINDS,
    FabricSendParams,
    Ingress,
    IngressKind,
    WorldName,
)
from holdfast.messages import IntentReceipt as StoredReceipt
from holdfast.redaction import BadRedaction, Redactor
from holdfast.world.catalog import check_text, check_universe
from holdfast.world.definition import Cause, EventType, Handler, Upcast, WorldDefinition
from holdfast.world.history import HistoryBound
from holdfast.world.step_inputs import StartableFlow, undeclared_error

if TYPE_CHECKING:
    from holdfast.app.flow_definition import Flow
    from holdfast.app.runtime import Runtime
    from holdfast.store.api import Store
    from holdfast.world.context import Context
    from holdfast.world.step_inputs import EffectCall

W = TypeVar("W", bound=World)


class App:
    """An application that runs in one universe. The universe has the app's name unless `universe` is set."""

    def __init__(
        self,
        name: str,
        *,
        worlds: Iterable[type[World]] = (),
        effects: Iterable[Effect[Any, Any]] = (),
        tasks: Iterable[Task[Any, Any]] = (),
        flows: Iterable[Flow[Any, Any]] = (),
        queues: Iterable[Queue] = (),
        events: Iterable[type[Any] | Inbox] = (),
        upcasts: Iterable[tuple[type[Any], int, Upcast]] = (),
        keep: Mapping[type[World], Keep] | None = None,
        hooks: AppHooks = NO_HOOKS,
        universe: str | None = None,
        version: str | None = None,
        redact: Iterable[str] = (),
    ) -> None:
        """Compile and validate the declarations.

        `redact` has paths of fields, such as `Account.iban` or `*.password`, whose values no output for operators shows.

        `hooks` are called by every runner and task worker of the process that runs the app.

        `keep` limits the history of a world type. Without it the whole journal is kept.

        `events` lists events and inboxes that every world type accepts. A world type without a handler
        journals and ignores them. Any other item without a handler is unknown to this version of the
        code: it waits until a worker with a newer version handles it. Receipts of undeclared effects
        wait in the same way.
        """
        check_text("app", name)
        if not isinstance(hooks, AppHooks):
            raise Invalid(
                what="hooks",
                found=repr(hooks)[:64],
                expected="hf.AppHooks(log=…, metrics=…, replay=…)",
            )
        self.name, self.hooks = name, hooks
        self.universe = name if universe is None else universe
        check_universe(self.universe)
        tasks, flows = list(tasks), list(flows)
        # The schedules that tasks and flows declare with `every=`, by name.
        self.schedules = schedules_of([*tasks, *flows])
        self.tasks: dict[str, Task[Any, Any]] = {}
        for task in tasks:
            self._add_task(task)
        self.flows: dict[str, Flow[Any, Any]] = {}
        for flow in flows:
            self._add_flow(flow)
        self.queues: dict[str, Queue] = queues_of(queues)
        self.effects: dict[str, Effect[Any, Any]] = {}
        self.events: dict[str, EventType] = {}
        self.programs: dict[str, WorldDefinition] = {}
        self._world_types: dict[type[World], str] = {}
        self._event_names: dict[type[Any], str] = {}
        self._upcasts = _upcasts_by_event(upcasts)
        # Causes that every world type accepts, in addition to its own handlers.
        self._accepted_causes: set[Cause] = set()
        for effect in effects:
            self._add_effect(effect)
        for kind in events:
            if isinstance(kind, Inbox):
                self._accepted_causes.add(("inbox", kind.name))
            else:
                self._add_event(kind)
                self._accepted_causes.add(("event", self._event_names[kind]))
        kinds = list(worlds)
        for world in kinds:
            if not (isinstance(world, type) and issubclass(world, World)):
                raise Invalid(what="world", found=repr(world)[:64], why="not an hf.World class")
            self._add_causes(world)
        self._declare_upcasts()
        self._accepted_causes |= {("receipt", flow.kind) for flow in self.flows.values()}
        bounds = bounds_of(keep or {}, kinds)
        for world in kinds:
            self._add_world(world, version, bounds.get(world))
        self.redactor = _redactor_of(redact, self.type_names)

    @property
    def type_names(self) -> frozenset[str]:
        """The names of worlds, events, inboxes, effects, tasks and flows."""
        declared = (self.programs, self.events, self.effects, self.tasks, self.flows)
        causes = (cause for program in self.programs.values() for _, cause in program.handlers)
        return frozenset((*(name for names in declared for name in names), *causes))

    @property
    def histories(self) -> dict[str, HistoryBound | None]:
        """The history limit of each world type; None keeps the whole history."""
        return {name: program.history for name, program in self.programs.items()}

    # -- the registry that reducers use --------------------------------------------------------

    def encode_event(self, event: Any) -> tuple[str, bytes]:
        name = self._event_names.get(type(event))
        if name is None:
            raise undeclared_error(
                what="event",
                type=type(event).__name__,
                why="unknown to the app; handle it in a world or name it in events=",
            )
        return name, self.events[name].encode(event)

    def encode_again(self, event: Any) -> tuple[str, bytes]:
        kind = type(event)
        if kind in self._event_names or not is_event(kind):
            return self.encode_event(event)
        return kind.__name__, EventType(kind.__name__, kind).encode(event)

    def check_known(self, type: str, cause: Cause) -> None:
        program = self.programs.get(type)
        if program is None or cause in program.declared_versions:
            return
        what, name = cause
        if what == "receipt":
            flow = name.startswith(FLOW_START_PREFIX)
            what, listed = ("flow", "flows=") if flow else ("effect", "effects=")
            why = f"the app does not declare this {what}; name it in {listed}"
        else:
            why = "this code does not handle it there; handle it or name it in events="
        raise undeclared_error(what=what, type=name, world=type, why=why)

    def check_event(self, type: str, event: Any) -> tuple[str, bytes]:
        """Return an event's name and encoded bytes; raise Invalid if this world type does not accept it."""
        name, value = self.encode_event(event)
        self.check_known(type, ("event", name))
        return name, value

    def world_type(self, kind: Any) -> str:
        name = self._world_types.get(kind)
        if name is None:
            raise undeclared_error(
                what="world", type=getattr(kind, "__name__", str(kind)), why="unknown to the app"
            )
        return name

    def world_class(self, name: str) -> type[World]:
        """Return the class of a world type."""
        for kind, known in self._world_types.items():
            if known == name:
                return kind
        raise Invalid(
            what="world", type=name[:64], why="unknown to the app", known=sorted(self.programs)
        )

    def effect_call(self, effect: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> EffectCall:
        options: dict[str, Any] = {}
        declared = effect
        if isinstance(effect, EffectWithOptions):
            declared, options = effect.effect, effect.options
        if not isinstance(declared, Effect):
            raise Invalid(what="effect", found=repr(effect), why="not made by @hf.effect")
        return declared.call(declared.positional(args, kwargs) if kwargs else args, options)

    def flow_call(self, flow: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> EffectCall:
        from holdfast.app.flow_intent import to_effect_call

        return to_effect_call(flow, args, kwargs)

    def check_mail(self, mail: FabricSendParams) -> None:
        to = mail.dest_world
        if isinstance(to, WorldName) and to.type not in self.programs:
            raise undeclared_error(what="world", type=to.type, why="unknown to the app")
        if mail.schema is not None:
            event = self.events.get(mail.schema)
            if event is None:
                raise undeclared_error(what="event", type=mail.schema, why="unknown to the app")
            event.decode(mail.value_cbor or b"")
        if isinstance(to, WorldName):
            self.check_known(to.type, (("event", "inbox")[mail.mode == INBOX], mail.body()[0]))

    # -- running -------------------------------------------------------------------------------

    def open(
        self,
        url: str | os.PathLike[str] | Store | None = None,
        *,
        roles: Iterable[str] | None = None,
        **options: Any,
    ) -> Runtime:
        """Open a store and run roles of this app in this process; see `Runtime`. Without a URL the store
        is the one that `holdfast.toml` configures for the universe."""
        roles = None if roles is None else tuple(roles)
        if isinstance(url, os.PathLike):
            url = os.fspath(url)
        if url is not None and not isinstance(url, str) and not hasattr(url, "transact"):
            raise BadUrl(url=repr(url)[:64])
        if isinstance(url, str) and not options and not roles:
            # Validation is complete, so the store's writer process can start while the runtime is imported.
            with contextlib.suppress(HoldfastError):
                store.prestart(url)
        from holdfast.app.runtime import Runtime

        return Runtime(self, url, roles=roles, **options)

    # -- inside --------------------------------------------------------------------------------

    def _add_causes(self, world: type[World]) -> None:
        """Add the events, effects and flows that a world type handles."""
        for cause in handlers_of(world):
            if is_event(cause):
                self._add_event(cause)
            elif isinstance(cause, Effect):
                self._add_effect(cause)
            elif isinstance(cause, StartableFlow):
                self._add_flow(cause)
            elif isinstance(cause, Inbox):
                check_type("inbox", cause.name, "payload", cause.kind)
            else:
                raise Invalid(
                    what="handler",
                    world=world.__name__,
                    cause=repr(cause),
                    why="not an event class, an effect, a flow or an inbox",
                )

    def _add_task(self, task: Any) -> None:
        if not isinstance(task, Task):
            raise Invalid(what="task", found=repr(task)[:64], why="not made by @hf.task")
        if self.tasks.setdefault(task.name, task) is not task:
            raise Invalid(
                what="task", name=task.name, why="two tasks have this name; give one another name="
            )
        task.check_storable()

    def _add_flow(self, flow: Any) -> None:
        from holdfast.app.flow_definition import Flow

        if not isinstance(flow, Flow):
            raise Invalid(what="flow", found=repr(flow)[:64], why="not made by @hf.flow")
        if self.flows.setdefault(flow.name, flow) is not flow:
            raise Invalid(
                what="flow", name=flow.name, why="two flows have this name; give one another name="
            )
        if flow.name in self.tasks or TASK_PREFIX + flow.name in self.tasks:
            raise Invalid(what="flow", name=flow.name, why="a task has this name")
        flow.check_storable()

    def _declare_upcasts(self) -> None:
        """Declare the upcasts of this process. The types of steps are not known here, so an app with flows may name
        classes that are no events."""
        names: dict[str, type[Any]] = {}
        for kind, upcasts in self._upcasts.items():
            if kind not in self._event_names and not self.flows:
                raise Invalid(what="upcast", type=kind.__name__, why="no world handles this event")
            if names.setdefault(kind.__name__, kind) is not kind:
                raise Invalid(what="upcast", type=kind.__name__, why="two classes have this name")
            value_versions.declare(kind, upcasts)

    @property
    def event_types(self) -> dict[type, EventType]:
        """The events that the app knows, by class."""
        return {kind: self.events[name] for kind, name in self._event_names.items()}

    def _add_effect(self, effect: Effect[Any, Any]) -> None:
        from holdfast.app.builtin_effects.fabric import Send

        self._accepted_causes.add(("receipt", effect.kind))
        if isinstance(effect, Send):
            return  # no effect worker performs it: the runtime delivers mail itself
        if effect.kind in RESERVED_KINDS or effect.kind.startswith(FLOW_START_PREFIX):
            raise Invalid(what="effect", kind=effect.kind, why="the runtime reserves this name")
        declared = self.effects.setdefault(effect.kind, effect)
        if declared is not effect:
            raise Invalid(what="effect", kind=effect.kind, why="declared twice")
        effect.check_storable()

    def _add_event(self, kind: type[Any]) -> None:
        if kind in self._event_names:
            return
        if not is_event(kind):
            raise Invalid(
                what="event",
                found=repr(kind),
                why="not an hf.Event class, a dataclass or a pydantic model",
            )
        name = kind.__name__
        if name in self.events:
            raise Invalid(what="event", type=name, why="two classes have this name")
        upcasts = self._upcasts.get(kind, {})
        try:
            check_fields("event", kind)
            check_type("event", kind.__name__, "reply", reply_type(kind))
            reject_sets("event", kind)
            event_type = EventType(name, kind, 1 + len(upcasts), upcasts)
        except (TypeError, ValueError) as error:
            raise Invalid(what="event", type=name, why=str(error)) from None
        self.events[name] = event_type
        self._event_names[kind] = name

    def _add_world(
        self, world: type[World], version: str | None, history: HistoryBound | None
    ) -> None:
        name = world.__name__
        if name in self.programs:
            raise Invalid(what="world", type=name, why="two classes have this name")
        for field in msgspec.structs.fields(world):
            if field.required:
                raise Invalid(what="world", type=name, field=field.name, why="needs a default")
        handlers: dict[Cause, Handler] = {}
        for cause, method in handlers_of(world).items():
            if isinstance(cause, Effect | StartableFlow):
                source: Any = cause
                handlers[("receipt", source.kind)] = _receipt_handler(source.receipt, method)
            elif isinstance(cause, Inbox):
                if ("inbox", cause.name) in handlers:
                    raise Invalid(
                        what="inbox",
                        world=name,
                        name=cause.name,
                        why="two methods handle this inbox",
                    )
                handlers[("inbox", cause.name)] = _mail_handler(cause, method)
            else:
                handlers[("event", self._event_names[cause])] = method
        try:
            check_fields("world", world)
            reject_sets("world", world)
            self.programs[name] = WorldDefinition(
                name,
                version or _fingerprint(world),
                world,
                self.events,
                handlers,
                history,
                self._accepted_causes,
            )
        except (TypeError, ValueError) as error:
            raise Invalid(what="world", type=name, why=str(error)) from None
        self._world_types[world] = name


def _redactor_of(paths: Iterable[str], type_names: Iterable[str]) -> Redactor:
    redactor, known = Redactor(paths), sorted(type_names)
    if unknown := redactor.unknown_types(known):
        why = "the app declares no such type"
        raise BadRedaction(what="redact", path=unknown[0], why=why, known=known)
    return redactor


def _receipt_handler(
    decode: Callable[[StoredReceipt], Any], method: Callable[..., None]
) -> Handler:
    def handle(state: Any, ingress: Ingress, cx: Any) -> None:
        assert ingress.kind is IngressKind.RECEIPT
        method(state, decode(codec.unpack_as(StoredReceipt, ingress.value)), cx)

    return handle


def _mail_handler(inbox: Inbox, method: Callable[..., None]) -> Handler:
    def handle(state: Any, ingress: Ingress, cx: Context) -> None:
        assert ingress.kind is IngressKind.INBOX
        try:
            payload = codec.unpack(ingress.value)
            if inbox.kind is not Any:
                payload = codec.convert(payload, inbox.kind)
        except msgspec.MsgspecError as error:
            raise Invalid(what="payload", inbox=inbox.name, why=str(error)) from None
        mail = Mail(
            inbox=inbox.name,
            payload=payload,
            headers=cx.headers,
            from_universe=cx.from_universe or "",
            from_world=cx.from_world or "",
            from_height=cx.from_height or 0,
            message_id=cx.message_id or b"",
            correlation_id=cx.correlation_id,
        )
        method(state, mail, cx)

    return handle


def _upcasts_by_event(
    upcasts: Iterable[tuple[type[Any], int, Upcast]],
) -> dict[type[Any], dict[int, Upcast]]:
    by_event: dict[type[Any], dict[int, Upcast]] = {}
    for kind, version, fn in upcasts:
        if version in by_event.setdefault(kind, {}):
            raise Invalid(
                what="upcasts",
                type=kind.__name__,
                version=version,
                why="two upcasts for this version",
            )
        by_event[kind][version] = fn
    for kind, steps in by_event.items():
        if sorted(steps) != list(range(1, len(steps) + 1)):
            raise Invalid(
                what="upcasts", type=kind.__name__, why="versions must start at 1 and have no gap"
            )
    return by_event


def reject_sets(what: str, kind: type[Any]) -> None:
    """Reject set types: their iteration order differs between processes, so replays would diverge."""
    visited: list[Any] = []
    stack: list[Any] = [msgspec.inspect.type_info(kind)]
    while stack:
        type_info = stack.pop()
        if type_info in visited:
            continue
        visited.append(type_info)
        if isinstance(type_info, msgspec.inspect.SetType | msgspec.inspect.FrozenSetType):
            raise Invalid(
                what=what,
                type=kind.__name__,
                why="the order of a set is not reproducible in a replay; use a dict or a sorted list",
            )
        if isinstance(type_info, msgspec.inspect.CustomType) and codec.is_model(type_info.cls):
            stack += [info for _, info in model_types(type_info.cls)]
        for name in ("fields", "types", "item_types"):
            for item in getattr(type_info, name, ()) or ():
                stack.append(getattr(item, "type", item))
        for name in ("item_type", "key_type", "value_type", "type"):
            inner = getattr(type_info, name, None)
            if isinstance(inner, msgspec.inspect.Type):
                stack.append(inner)


def _fingerprint(world: type[World]) -> str:
    """Hash the source of the class and its bases, or its field names and types if there is no source."""
    user_classes = world.__mro__[: world.__mro__.index(World)]
    try:
        text = "".join(map(inspect.getsource, user_classes))
    except (OSError, TypeError):
        text = repr([(f.name, str(f.type)) for f in msgspec.structs.fields(world)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]

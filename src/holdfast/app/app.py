"""An application: its worlds, effects and tasks, compiled into what the layers below run."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from holdfast import codec, store
from holdfast.app.declare import Effect, Inbox, Mail, Wanted, World, handlers_of, is_event
from holdfast.app.keep import Keep, bounds_of
from holdfast.app.storable import check_fields, check_type
from holdfast.app.tasks import Queue, Task, queues_of
from holdfast.errors import HoldfastError, Invalid
from holdfast.messages import INBOX, RESERVED, FabricSendParams, Ingress, Kind, WorldName
from holdfast.messages import Receipt as StoredReceipt
from holdfast.world.catalog import check_text, check_universe
from holdfast.world.frame import undeclared
from holdfast.world.history import Bound
from holdfast.world.program import Cause, EventType, Handler, Program, Upcast

if TYPE_CHECKING:
    from holdfast.app.runtime import Runtime
    from holdfast.store.api import Store
    from holdfast.world.context import Context
    from holdfast.world.frame import EffectCall

W = TypeVar("W", bound=World)


class App:
    """What runs in a universe. The app's name is the universe's unless `universe` says otherwise."""

    def __init__(
        self,
        name: str,
        *,
        worlds: Iterable[type[World]] = (),
        effects: Iterable[Effect[Any, Any]] = (),
        tasks: Iterable[Task[Any, Any]] = (),
        queues: Iterable[Queue] = (),
        events: Iterable[type[Any] | Inbox] = (),
        upcasts: Iterable[tuple[type[Any], int, Upcast]] = (),
        keep: Mapping[type[World], Keep] | None = None,
        universe: str | None = None,
        version: str | None = None,
    ) -> None:
        """`keep` bounds the history of a world type; without it a journal is kept whole.

        `events` names events, and inboxes, that every world type of this code knows: where one has no
        handler, it is journaled and ignored. Anything else without a handler is unknown to this code:
        it waits for code that knows it. So do the receipts of effects that are not declared.
        """
        check_text("app", name)
        self.name = name
        self.universe = name if universe is None else universe
        check_universe(self.universe)
        self.tasks: dict[str, Task[Any, Any]] = {}
        for task in tasks:
            self._add_task(task)
        self.queues: dict[str, Queue] = queues_of(queues)
        self.effects: dict[str, Effect[Any, Any]] = {}
        self.events: dict[str, EventType] = {}
        self.programs: dict[str, Program] = {}
        self._world_types: dict[type[World], str] = {}
        self._event_names: dict[type[Any], str] = {}
        self._upcasts = _by_event(upcasts)
        # What all world types know, besides what each of them handles.
        self._declared: set[Cause] = set()
        for effect in effects:
            self._add_effect(effect)
        for kind in events:
            if isinstance(kind, Inbox):
                self._declared.add(("inbox", kind.name))
            else:
                self._add_event(kind)
                self._declared.add(("event", self._event_names[kind]))
        kinds = list(worlds)
        for world in kinds:
            if not (isinstance(world, type) and issubclass(world, World)):
                raise Invalid(what="world", found=repr(world)[:64], why="not an hf.World class")
            for cause in handlers_of(world):
                if is_event(cause):
                    self._add_event(cause)
                elif isinstance(cause, Effect):
                    self._add_effect(cause)
                elif isinstance(cause, Inbox):
                    check_type("inbox", cause.name, "payload", cause.kind)
                else:
                    raise Invalid(
                        what="handler", world=world.__name__, cause=repr(cause), why="not an event"
                    )
        for kind in self._upcasts:
            if kind not in self._event_names:
                raise Invalid(what="upcast", type=kind.__name__, why="no world handles this event")
        bounds = bounds_of(keep or {}, kinds)
        for world in kinds:
            self._add_world(world, version, bounds.get(world))

    @property
    def histories(self) -> dict[str, Bound | None]:
        """How much history worlds keep, by type; None for all of it."""
        return {name: program.history for name, program in self.programs.items()}

    # -- the vocabulary of reducers ------------------------------------------------------------

    def encode_event(self, event: Any) -> tuple[str, bytes]:
        name = self._event_names.get(type(event))
        if name is None:
            raise undeclared(
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
        if program is None or cause in program.known:
            return
        side, name = cause
        if side == "receipt":
            why = "the app does not declare this effect; name it in effects="
        else:
            why = "this code does not handle it there; handle it or name it in events="
        what = "effect" if side == "receipt" else side
        raise undeclared(what=what, type=name, world=type, why=why)

    def check_event(self, type: str, event: Any) -> tuple[str, bytes]:
        """An event's name and bytes; Invalid if it is unknown to this world type in this code."""
        name, value = self.encode_event(event)
        self.check_known(type, ("event", name))
        return name, value

    def world_type(self, kind: Any) -> str:
        found = self._world_types.get(kind)
        if found is None:
            raise undeclared(what="world", type=getattr(kind, "__name__", str(kind)), why="unknown")
        return found

    def effect_call(self, effect: Any, args: tuple[Any, ...]) -> EffectCall:
        wanted = effect if isinstance(effect, Wanted) else Wanted(effect, {})
        if not isinstance(wanted.effect, Effect):
            raise Invalid(what="effect", found=repr(effect), why="not made by @hf.effect")
        return wanted.effect.call(args, wanted.options)

    def check_mail(self, mail: FabricSendParams) -> None:
        to = mail.dest_world
        if isinstance(to, WorldName) and to.type not in self.programs:
            raise undeclared(what="world", type=to.type, why="unknown")
        if mail.schema is not None:
            event = self.events.get(mail.schema)
            if event is None:
                raise undeclared(what="event", type=mail.schema, why="unknown to the app")
            event.decode(mail.value_cbor or b"")
        if isinstance(to, WorldName):
            self.check_known(to.type, (("event", "inbox")[mail.mode == INBOX], mail.body()[0]))

    # -- running -------------------------------------------------------------------------------

    def open(
        self, url: str | Store | None = None, *, roles: Iterable[str] | None = None, **options: Any
    ) -> Runtime:
        """Open a store and run roles of this app in this process; see `Runtime`. Without a URL it is the
        store of the universe, as `holdfast.toml` says."""
        roles = None if roles is None else tuple(roles)
        if isinstance(url, str) and not options and not roles:
            # Nothing is left that could be refused: the store's process starts while we import the rest.
            with contextlib.suppress(HoldfastError):
                store.begin(url)
        from holdfast.app.runtime import Runtime

        return Runtime(self, url, roles=roles, **options)

    # -- inside --------------------------------------------------------------------------------

    def _add_task(self, task: Any) -> None:
        if not isinstance(task, Task):
            raise Invalid(what="task", found=repr(task)[:64], why="not made by @hf.task")
        if self.tasks.setdefault(task.name, task) is not task:
            raise Invalid(what="task", name=task.name, why="two tasks have this name")
        task.check_storable()

    def _add_effect(self, effect: Effect[Any, Any]) -> None:
        from holdfast.app.shipped.fabric import Send

        self._declared.add(("receipt", effect.kind))
        if isinstance(effect, Send):
            return  # no adapter does it: the runtime delivers mail itself
        if effect.kind in RESERVED:
            raise Invalid(what="effect", kind=effect.kind, why="this name is the runtime's")
        known = self.effects.setdefault(effect.kind, effect)
        if known is not effect:
            raise Invalid(what="effect", kind=effect.kind, why="declared twice")
        effect.check_storable()

    def _add_event(self, kind: type[Any]) -> None:
        if kind in self._event_names:
            return
        if not is_event(kind):
            raise Invalid(what="event", found=repr(kind), why="an hf.Event class or a dataclass")
        name = kind.__name__
        if name in self.events:
            raise Invalid(what="event", type=name, why="two classes have this name")
        upcasts = self._upcasts.get(kind, {})
        try:
            check_fields("event", kind)
            refuse_sets("event", kind)
            made = EventType(name, kind, 1 + len(upcasts), upcasts)
        except (TypeError, ValueError) as error:
            raise Invalid(what="event", type=name, why=str(error)) from None
        self.events[name] = made
        self._event_names[kind] = name

    def _add_world(self, world: type[World], version: str | None, history: Bound | None) -> None:
        name = world.__name__
        if name in self.programs:
            raise Invalid(what="world", type=name, why="two classes have this name")
        for field in msgspec.structs.fields(world):
            if field.required:
                raise Invalid(what="world", type=name, field=field.name, why="needs a default")
        handlers: dict[Cause, Handler] = {}
        for cause, method in handlers_of(world).items():
            if isinstance(cause, Effect):
                handlers[("receipt", cause.kind)] = _of_receipt(cause, method)
            elif isinstance(cause, Inbox):
                if ("inbox", cause.name) in handlers:
                    raise Invalid(what="inbox", world=name, name=cause.name, why="handled twice")
                handlers[("inbox", cause.name)] = _of_mail(cause, method)
            else:
                handlers[("event", self._event_names[cause])] = method
        try:
            check_fields("world", world)
            refuse_sets("world", world)
            self.programs[name] = Program(
                name,
                version or _fingerprint(world),
                world,
                self.events,
                handlers,
                history,
                self._declared,
            )
        except (TypeError, ValueError) as error:
            raise Invalid(what="world", type=name, why=str(error)) from None
        self._world_types[world] = name


def _of_receipt(effect: Effect[Any, Any], method: Callable[..., None]) -> Handler:
    def handle(state: Any, ingress: Ingress, cx: Any) -> None:
        assert ingress.kind is Kind.RECEIPT
        method(state, effect.receipt(codec.unpack_as(StoredReceipt, ingress.value)), cx)

    return handle


def _of_mail(inbox: Inbox, method: Callable[..., None]) -> Handler:
    def handle(state: Any, ingress: Ingress, cx: Context) -> None:
        assert ingress.kind is Kind.INBOX
        try:
            payload = codec.unpack(ingress.value)
            if inbox.kind is not Any:
                payload = codec.convert(payload, inbox.kind)
        except msgspec.MsgspecError as error:
            raise Invalid(what="payload", inbox=inbox.name, why=str(error)) from None
        mail = Mail(
            inbox.name,
            payload,
            cx.headers,
            cx.from_universe or "",
            cx.from_world or "",
            cx.from_height or 0,
            cx.message_id or b"",
            cx.correlation_id,
        )
        method(state, mail, cx)

    return handle


def _by_event(
    upcasts: Iterable[tuple[type[Any], int, Upcast]],
) -> dict[type[Any], dict[int, Upcast]]:
    found: dict[type[Any], dict[int, Upcast]] = {}
    for kind, version, fn in upcasts:
        if version in found.setdefault(kind, {}):
            raise Invalid(what="upcasts", type=kind.__name__, version=version, why="two of them")
        found[kind][version] = fn
    for kind, steps in found.items():
        if sorted(steps) != list(range(1, len(steps) + 1)):
            raise Invalid(what="upcasts", type=kind.__name__, why="versions count from 1, no gap")
    return found


def refuse_sets(what: str, kind: type[Any]) -> None:
    """A set has no order that two processes agree on, so a reducer must not see one."""
    seen: list[Any] = []
    ahead: list[Any] = [msgspec.inspect.type_info(kind)]
    while ahead:
        here = ahead.pop()
        if here in seen:
            continue
        seen.append(here)
        if isinstance(here, msgspec.inspect.SetType | msgspec.inspect.FrozenSetType):
            raise Invalid(
                what=what,
                type=kind.__name__,
                why="a set has no order that a replay could repeat; use a dict or a sorted list",
            )
        for name in ("fields", "types", "item_types"):
            for one in getattr(here, name, ()) or ():
                ahead.append(getattr(one, "type", one))
        for name in ("item_type", "key_type", "value_type", "type"):
            inner = getattr(here, name, None)
            if isinstance(inner, msgspec.inspect.Type):
                ahead.append(inner)


def _fingerprint(world: type[World]) -> str:
    """A short name of the code: of the source of the class and its bases, or of its shape when there is
    none."""
    own = world.__mro__[: world.__mro__.index(World)]
    try:
        text = "".join(map(inspect.getsource, own))
    except (OSError, TypeError):
        text = repr([(f.name, str(f.type)) for f in msgspec.structs.fields(world)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]

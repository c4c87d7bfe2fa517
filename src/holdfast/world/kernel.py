"""One step of a world: state and ingress in, state and intents out. No IO, no clock.

`advance` makes a new entry; `repeat` makes one again from the journal and compares. Both run the
same reducer in the same way. A reducer that raises has no effect: the caller drops the state it
touched and takes it again from before (`Stepped.spoiled`).
"""

from __future__ import annotations

import inspect
import traceback
from hashlib import sha256
from typing import Any, NamedTuple

from msgspec.structs import replace

from holdfast import codec
from holdfast.config import ERROR_TEXT_CHARS_MAX
from holdfast.errors import HoldfastError, Invalid, ReplayDiverged, UnknownEvent
from holdfast.messages import Ingress, Intent
from holdfast.world.context import Context, Frame, Vocabulary
from holdfast.world.entry import Outcome, Step
from holdfast.world.program import Cause, Program, cause_of, code_name


class World(NamedTuple):
    """What stays the same from step to step."""

    universe: str
    world_id: str
    name: str
    program: Program
    vocabulary: Vocabulary


class Stepped(NamedTuple):
    step: Step
    intents: list[Intent]
    spoiled: bool
    # Mail by world id: to which world, and what.
    addressed: list[tuple[str, Cause]]


def advance(
    world: World,
    state: Any,
    ingress: Ingress,
    *,
    seq: int,
    height: int,
    wall_ns: int,
    entropy: bytes,
    generation: int,
    base: int = 0,
    replay: bool = False,
) -> Stepped:
    """Apply one ingress to the state, in place, and say what happened."""
    frame = Frame(
        world.universe,
        world.world_id,
        world.name,
        height,
        wall_ns,
        entropy,
        generation,
        ingress.correlation_id,
        world.program.mail_answered,
        ingress,
        world.program.type,
        replay,
    )
    cx = Context(frame, world.vocabulary)
    outcome, error = _run(world, state, ingress, cx)
    cx.end()
    failed = outcome is Outcome.FAILED
    intents = [] if failed else cx.intents
    step = Step(
        seq,
        ingress,
        wall_ns,
        entropy,
        world.program.version,
        generation,
        outcome,
        [intent.content() for intent in intents],
        error,
        None if failed else cx.replied,
        base,
        b"",
        world.program.shape,
    )
    return Stepped(step, intents, failed, [] if failed else cx.addressed)


def give_up(
    world: World, ingress: Ingress, *, seq: int, wall_ns: int, generation: int, base: int
) -> Step:
    """The entry of an ingress that no code knew in time. It changes nothing, in any replay."""
    error = f"unknown_event: no worker declared {ingress.type!r} of {world.program.type} in time"
    return Step(
        seq,
        ingress,
        wall_ns,
        b"",
        world.program.version,
        generation,
        Outcome.UNKNOWN,
        [],
        error,
        None,
        base,
        b"",
        world.program.shape,
    )


def spoil(stepped: Stepped, error: Exception) -> Stepped:
    """A step that came out well, made one that failed: what it left cannot be kept."""
    step = replace(stepped.step, outcome=Outcome.FAILED, emitted=[], error=_told(error), reply=None)
    return Stepped(step, [], True, [])


def repeat(
    world: World, state: Any, step: Step, *, height: int, emitted: list[Intent] | None = None
) -> Any:
    """Apply a journaled step again; the state after it. ReplayDiverged names the height if it does
    not come out alike, and `made_by` if other code made the entry; UnknownEvent if this code does not
    know what was handled. `emitted` gets what it wanted.

    A step that was ignored, or failed, changed nothing. But a state that was written and read is
    not always the one that was written: an int in a float's place has become a float. So where
    the host went on from stored bytes (after a snapshot, after a reducer that raised), so do we.
    """
    try:
        state = _repeat(world, state, step, height, emitted)
        if step.state:
            compare_state(world, state, step.state, height=height)
    except ReplayDiverged as error:
        made_by = code_name(step.code, step.shape)
        if made_by not in (world.program.code, world.program.version):
            error.fields["made_by"] = made_by
        raise
    return state


def compare_state(world: World, state: Any, digest: bytes, *, height: int) -> None:
    """ReplayDiverged unless this is the state that the digest was made of, but for fields that the
    class has got since."""
    try:
        canonical = world.program.canonical(state)
        found = sha256(canonical).digest()
        if found == digest or world.program.has_grown(state, canonical, digest):
            return
        why = f"digest {digest.hex()[:16]} became {found.hex()[:16]}"
    except Invalid as error:
        why = f"it cannot be stored: {error.fields.get('why')}"
    raise _diverged(world, height, "state", why)


def _repeat(world: World, state: Any, step: Step, height: int, emitted: list[Intent] | None) -> Any:
    if step.base == height - 1:
        state = world.program.adopted(state, step.shape)
    if step.outcome is Outcome.FAILED:
        return world.program.fresh(state)
    if step.outcome is Outcome.IGNORED or step.outcome is Outcome.UNKNOWN:
        return state
    if step.outcome is Outcome.OK and not world.program.knows(step.ingress):
        # Other code handled it: that this code cannot repeat it is no divergence.
        (side, type), version = cause_of(step.ingress)
        raise UnknownEvent(
            world=world.world_id,
            name=world.name,
            height=height,
            side=side,
            type=type,
            version=version,
        )
    stepped = advance(
        world,
        state,
        step.ingress,
        seq=step.seq,
        height=height,
        wall_ns=step.wall_ns,
        entropy=step.entropy,
        generation=step.generation,
        replay=True,
    )
    again = stepped.step
    if emitted is not None:
        emitted += stepped.intents
    for what, was, now in (
        ("outcome", step.outcome.value, again.outcome.value),
        ("emitted", step.emitted, again.emitted),
        ("reply", step.reply, again.reply),
    ):
        if was != now:
            why = again.error or f"{_shown(was)} became {_shown(now)}"
            raise _diverged(world, height, what, why)
    return state


def _diverged(world: World, height: int, what: str, why: str) -> ReplayDiverged:
    return ReplayDiverged(
        world=world.world_id,
        type=world.program.type,
        name=world.name,
        height=height,
        what=what,
        why=why,
    )


def _run(world: World, state: Any, ingress: Ingress, cx: Context) -> tuple[Outcome, str]:
    handler = world.program.handler(ingress)
    if handler is None:
        return Outcome.IGNORED, ""
    try:
        # The annotation says None; a decorator may have hidden that nothing has run yet.
        left: object = handler(state, world.program.message(ingress), cx)
        if inspect.isawaitable(left) or inspect.isgenerator(left):
            raise Invalid(what="handler", type=ingress.type, why="it is not a plain function")
        if cx.refusal is not None:
            # It fails though the reducer has caught the error: a step that counts has no refusal, so
            # a replay admits whatever its entry holds, by whatever code.
            raise cx.refusal
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Whatever a reducer raises is its event's failure, and never the end of its host.
        return Outcome.FAILED, _told(error)
    return Outcome.OK, ""


def _told(error: BaseException) -> str:
    """An error as text that can be stored, the end of it if it is long."""
    if isinstance(error, HoldfastError):
        text = str(error)[:ERROR_TEXT_CHARS_MAX]
    else:
        # The first frame is ours.
        shown = traceback.TracebackException.from_exception(error)
        shown.stack = traceback.StackSummary.from_list(list(shown.stack)[1:])
        text = "".join(shown.format())[-ERROR_TEXT_CHARS_MAX:]
    return text.encode(errors="backslashreplace").decode()


def _shown(value: object) -> str:
    if isinstance(value, list):
        return f"{len(value)} intents"
    return repr(codec.unpack(value) if isinstance(value, bytes) else value)[:80]

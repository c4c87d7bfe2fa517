"""The reducer step: state and ingress in, state and intents out. No IO, no clock.

`run_step` makes a new journal entry. `replay_step` runs a journaled step again and compares the
result with the entry. Both run the same reducer in the same way. A reducer that raises has no
effect: the caller discards the modified state and restores the state before the step
(`StepResult.state_dirty`).
"""

from __future__ import annotations

import inspect
import traceback
from hashlib import sha256
from typing import Any, NamedTuple

from msgspec.structs import replace

from holdfast import codec, traces
from holdfast.config import ERROR_TEXT_CHARS_MAX
from holdfast.errors import HoldfastError, Invalid, ReplayDiverged, UnknownEvent
from holdfast.messages import Ingress, Intent
from holdfast.world.context import Context, ReducerInputs, TypeRegistry
from holdfast.world.definition import Cause, WorldDefinition, cause_of, code_name
from holdfast.world.journal_entry import JournalStep, StepOutcome


class WorldSpec(NamedTuple):
    """The constants of a world: everything that is the same for all of its steps."""

    universe: str
    world_id: str
    name: str
    definition: WorldDefinition
    registry: TypeRegistry


class StepResult(NamedTuple):
    """The result of one step: its journal entry body, its intents, and whether the state must be
    restored."""

    step: JournalStep
    intents: list[Intent]
    state_dirty: bool
    # Mail that is addressed by world id: (destination world, cause).
    mail_by_id: list[tuple[str, Cause]]


def run_step(
    world: WorldSpec,
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
) -> StepResult:
    """Apply one ingress to the state, in place, and return the journal step and the intents."""
    frame = ReducerInputs(
        universe=world.universe,
        world_id=world.world_id,
        name=world.name,
        height=height,
        wall_ns=wall_ns,
        entropy=entropy,
        generation=generation,
        correlation_id=ingress.correlation_id,
        wants_mail_receipts=world.definition.wants_mail_receipts,
        cause=ingress,
        type=world.definition.type,
        replay=replay,
    )
    cx = Context(frame, world.registry)
    outcome, error = _run_handler(world, state, ingress, cx)
    cx.end()
    failed = outcome is StepOutcome.FAILED
    intents = [] if failed else cx.intents
    step = JournalStep(
        seq=seq,
        ingress=ingress,
        wall_ns=wall_ns,
        entropy=entropy,
        code=world.definition.version,
        generation=generation,
        outcome=outcome,
        emitted=[intent.replay_digest() for intent in intents],
        error=error,
        reply=None if failed else cx.replied,
        base=base,
        state=b"",
        shape=world.definition.shape,
    )
    return StepResult(step, intents, failed, [] if failed else cx.addressed)


def make_unknown_step(
    world: WorldSpec, ingress: Ingress, *, seq: int, wall_ns: int, generation: int, base: int
) -> JournalStep:
    """Make the step of an ingress that no worker declared in time. It changes no state, in any
    replay."""
    error = f"unknown_event: no worker declared {ingress.type!r} of {world.definition.type} in time"
    return JournalStep(
        seq=seq,
        ingress=ingress,
        wall_ns=wall_ns,
        entropy=b"",
        code=world.definition.version,
        generation=generation,
        outcome=StepOutcome.UNKNOWN,
        emitted=[],
        error=error,
        reply=None,
        base=base,
        state=b"",
        shape=world.definition.shape,
    )


def fail_step(result: StepResult, error: Exception) -> StepResult:
    """Turn a successful step into a failed one, because its result cannot be stored or sent."""
    step = replace(
        result.step, outcome=StepOutcome.FAILED, emitted=[], error=_error_text(error), reply=None
    )
    return StepResult(step, [], True, [])


def replay_step(
    world: WorldSpec,
    state: Any,
    step: JournalStep,
    *,
    height: int,
    emitted: list[Intent] | None = None,
) -> Any:
    """Apply a journaled step again and return the state after it. Raise ReplayDiverged with the
    height if the result differs, with `made_by` if other code made the entry. Raise UnknownEvent if
    this code has no declaration of the handled type. Append the emitted intents to `emitted`.

    A step with the outcome IGNORED or FAILED changes no state. But a state that was stored and
    loaded may differ from the state in memory: an int in a float field becomes a float. So the
    replay reloads the state wherever the host did: after a snapshot, and after a reducer that
    raised.
    """
    try:
        state = _replay(world, state, step, height, emitted)
        if step.state:
            compare_state(world, state, step.state, height=height)
    except ReplayDiverged as error:
        made_by = code_name(step.code, step.shape)
        if made_by not in (world.definition.code, world.definition.version):
            error.fields["made_by"] = made_by
        raise
    return state


def compare_state(world: WorldSpec, state: Any, digest: bytes, *, height: int) -> None:
    """Raise ReplayDiverged unless the state matches the digest. Fields that the class has gained
    since the digest was made are left out of the comparison."""
    try:
        canonical = world.definition.canonical_bytes(state)
        computed_digest = sha256(canonical).digest()
        if computed_digest == digest or world.definition.matches_without_new_fields(
            state, canonical, digest
        ):
            return
        why = f"digest {digest.hex()[:16]} became {computed_digest.hex()[:16]}"
    except Invalid as error:
        why = f"it cannot be stored: {error.fields.get('why')}"
    raise _diverged(world, height, "state", why)


def _replay(
    world: WorldSpec, state: Any, step: JournalStep, height: int, emitted: list[Intent] | None
) -> Any:
    if step.base == height - 1:
        state = world.definition.reload_as_shape(state, step.shape)
    if step.outcome is StepOutcome.FAILED:
        return world.definition.reload_state(state)
    if step.outcome is StepOutcome.IGNORED or step.outcome is StepOutcome.UNKNOWN:
        return state
    if step.outcome is StepOutcome.OK and not world.definition.can_consume(step.ingress):
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
    untraced = traces.enter_replay()
    try:
        result = run_step(
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
    finally:
        if untraced is not None:
            untraced.leave()
    replayed = result.step
    if emitted is not None:
        emitted += result.intents
    for what, recorded, computed in (
        ("outcome", step.outcome.value, replayed.outcome.value),
        ("emitted", step.emitted, replayed.emitted),
        ("reply", step.reply, replayed.reply),
    ):
        if recorded != computed:
            why = replayed.error or f"{_format_value(recorded)} became {_format_value(computed)}"
            raise _diverged(world, height, what, why)
    return state


def _diverged(world: WorldSpec, height: int, what: str, why: str) -> ReplayDiverged:
    return ReplayDiverged(
        world=world.world_id,
        type=world.definition.type,
        name=world.name,
        height=height,
        what=what,
        why=why,
    )


def _run_handler(
    world: WorldSpec, state: Any, ingress: Ingress, cx: Context
) -> tuple[StepOutcome, str]:
    handler = world.definition.handler(ingress)
    if handler is None:
        return StepOutcome.IGNORED, ""
    try:
        # The annotation promises None. A decorator may hide a coroutine or generator that has not
        # run.
        returned: object = handler(state, world.definition.handler_argument(ingress), cx)
        if inspect.isawaitable(returned) or inspect.isgenerator(returned):
            raise Invalid(what="handler", type=ingress.type, why="it is not a plain function")
        if cx.refusal is not None:
            # The step fails even if the reducer caught the error. So a successful step contains no
            # refused intent, and a replay by any code may skip these checks.
            raise cx.refusal
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Any exception of a reducer fails its event only. The host keeps running.
        return StepOutcome.FAILED, _error_text(error)
    return StepOutcome.OK, ""


def _error_text(error: BaseException) -> str:
    """Format an error as storable text: the head of a HoldfastError, the tail of a traceback."""
    if isinstance(error, HoldfastError):
        text = str(error)[:ERROR_TEXT_CHARS_MAX]
    else:
        # The first frame is this module.
        formatted = traceback.TracebackException.from_exception(error)
        formatted.stack = traceback.StackSummary.from_list(list(formatted.stack)[1:])
        text = "".join(formatted.format())[-ERROR_TEXT_CHARS_MAX:]
    return text.encode(errors="backslashreplace").decode()


def _format_value(value: object) -> str:
    if isinstance(value, list):
        return f"{len(value)} intents"
    return repr(codec.unpack(value) if isinstance(value, bytes) else value)[:80]

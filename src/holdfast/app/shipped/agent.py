"""`hf.agent.dispatch`: a prompt into the tmux pane of an agent, from inside a world.

    cx.do(hf.agent.dispatch, "work:0.1", "Run the tests and fix what fails.", "claude")

    @hf.on(hf.agent.dispatch)
    def told(self, receipt: hf.Receipt[hf.agent.Dispatched], cx: hf.Context) -> None: ...

The target is a pane (`%3`, `session`, `session:window.pane`) or `leader`: the pane that the leader of
the universe named with `holdfast dispatch leader`. The third argument is what runs there: `claude` is
submitted by one press of Enter, anything else by two. A fourth is `hf.agent.Options`, or a dict.

Every request is a record of the universe's dispatch log: pending, notified, delivered or failed. The
receipt comes once the pane shows that the text was taken; with `acknowledge` the request is delivered
only when the agent says so, by `holdfast dispatch deliver MARK` or `hf.agent.delivered`.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import msgspec

from holdfast.adapters.dispatching import (
    TRIES,
    Dispatched,
    Dispatching,
    Request,
    name_leader,
)
from holdfast.adapters.errors import NotConfigured
from holdfast.app.declare import Call, Effect
from holdfast.authority.dispatch import DispatchRecord, InvalidTransition, request_id_of
from holdfast.authority.dispatch_log import DispatchLog
from holdfast.authority.outcome import DispatchOutcomeReason, QueueTransition, WorkerCli
from holdfast.authority.panes import LEADER, Pane
from holdfast.authority.replay import ReplayState
from holdfast.messages import Intent
from holdfast.roles.doing import Hold
from holdfast.store.api import Store
from holdfast.world.context import EffectCall

__all__ = [
    "LEADER", "Dispatch", "DispatchLog", "DispatchOutcomeReason", "DispatchRecord", "Dispatched",
    "InvalidTransition", "Options", "QueueTransition", "ReplayState", "WorkerCli", "declare",
    "delivered", "dispatch", "failed", "set_leader",
]  # fmt: skip

KIND = "agent.dispatch"
# A text may have to wait for another to be typed, and is then looked for.
TIMEOUT_S = 60.0
# The dispatch log says when it is enough: tries that nobody confirms are counted there, and a leader
# that is away is waited for.
ATTEMPTS = 1_000_000


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a dispatch may have besides its target, text and program."""

    # The tmux server: a name, or a path; else the operator's own.
    socket: str = ""
    # The agent will say that it has it; until then the request is notified, not delivered.
    acknowledge: bool = False
    # How often a text is typed that no pane confirms.
    tries_max: int = TRIES
    # The text may begin with `!`, `/`, `#` or `&`, which an agent takes for a command.
    commands: bool = False
    metadata: dict[str, str] = {}


class Dispatch(Effect[[str, str, str, Any], Dispatched]):
    """The effect. It keeps its books in the store of the pool that performs it."""

    roles = ("dispatch",)

    def __init__(self, kind: str, socket: str, **options: Any) -> None:
        self._socket = socket
        self._store: Store | None = None
        super().__init__(kind, _typed_by_a_pool, **options)

    def call(self, args: tuple[Any, ...], options: dict[str, Any]) -> EffectCall:
        wanted = super().call(args, options)
        # What is wrong with it is said to the reducer, before anything waits for a pane.
        request = self._request(wanted.params, "unborn", {})
        # What the leader has running is known only there.
        leads = request.target == LEADER
        (replace(request, cli=WorkerCli.CLAUDE) if leads else request).check()
        return wanted

    def within(self, store: Store) -> Dispatch:
        if self.fn is not _typed_by_a_pool:
            return self  # a test or a simulation has put something in its place
        bound = copy.copy(self)
        bound._store = store
        return bound

    def perform(self, intent: Intent, attempt: int, deadline_ns: int, hold: Hold) -> Any:
        if self._store is None:
            return super().perform(intent, attempt, deadline_ns, hold)
        metadata = {"world": intent.origin_name}
        if intent.tag:
            metadata["tag"] = intent.tag
        if intent.redrive_of is not None:
            metadata["redrive_of"] = intent.redrive_of.hex()
        request = self._request(intent.params, request_id_of(intent), metadata)
        return Dispatching(self._store, intent.universe_id).run(request, lambda: hold.dropped)

    def _request(self, params: bytes, request_id: str, metadata: dict[str, str]) -> Request:
        target, text, cli, told = _filled(*self._arguments(params))
        options = told or Options()
        return Request(
            request_id=request_id,
            target=target,
            text=text,
            cli=WorkerCli.named(cli),
            socket=options.socket or self._socket,
            acknowledge=options.acknowledge,
            tries_max=options.tries_max,
            commands=options.commands,
            metadata={**options.metadata, **metadata},
        )


def _typed_by_a_pool(
    call: Call, target: str, text: str, cli: str = "other", options: Options | None = None
) -> Dispatched:
    """What `perform` does within a store. Elsewhere (a simulation) nothing may be typed."""
    hint = "an adapter pool does it; in a simulation put a function in its place"
    raise NotConfigured(what=KIND, why="there is no store to write it down in", hint=hint)


def _filled(
    target: str, text: str, cli: str = "other", options: Options | None = None
) -> tuple[str, str, str, Options | None]:
    return target, text, cli, options


def declare(kind: str = KIND, socket: str = "", **options: Any) -> Dispatch:
    """The effect for panes of this tmux server. Options as in `@hf.effect`."""
    return Dispatch(kind, socket, **{"attempts": ATTEMPTS, "timeout_s": TIMEOUT_S, **options})


def set_leader(
    store: Store, *, universe: str, pane: str, cli: str = "claude", socket: str = ""
) -> Pane:
    """Name the pane that `leader` means, and that is told of dispatches that ended."""
    return name_leader(store, universe, pane=pane, cli=cli, socket=socket)


def delivered(store: Store, *, universe: str, request_id: str) -> DispatchRecord:
    """The agent has it."""
    return DispatchLog(store, universe).delivered(request_id)


def failed(store: Store, *, universe: str, request_id: str, reason: str) -> DispatchRecord:
    """The agent does not do it, and says why."""
    return DispatchLog(store, universe).failed(request_id, reason)


dispatch = declare()

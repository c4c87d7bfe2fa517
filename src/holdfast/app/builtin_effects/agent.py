"""`hf.agent.dispatch`: an effect that types a prompt into the tmux pane of an agent.

    cx.do(hf.agent.dispatch, "work:0.1", "Run the tests and fix what fails.", "claude")

    @hf.on(hf.agent.dispatch)
    def dispatched(self, receipt: hf.Receipt[hf.agent.Dispatched], cx: hf.Context) -> None: ...

The target is a pane (`%3`, `session`, `session:window.pane`) or `leader`, the pane that
`holdfast dispatch leader` set for the universe. The third argument is the program in the pane: a prompt
to `claude` is submitted with one Enter, a prompt to any other program with two. The optional fourth
argument is `hf.agent.Options` or a dict.

Every request is a record in the dispatch log of the universe: pending, notified, delivered or failed. The
receipt is sent when the pane shows that it accepted the text. With `acknowledge` the request is delivered
only after the agent confirms it with `holdfast dispatch deliver MARK` or `hf.agent.delivered`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from holdfast.adapters.dispatch_protocol import (
    TRIES_DEFAULT,
    Dispatched,
    DispatchProtocol,
    PromptRequest,
    set_leader_pane,
)
from holdfast.adapters.errors import NotConfigured
from holdfast.app.definitions import Call, Effect, typed_as
from holdfast.dispatch.leader_pane import LEADER, LeaderPane
from holdfast.dispatch.log import DispatchLog
from holdfast.dispatch.notifications import ReplayState
from holdfast.dispatch.outcomes import DispatchOutcomeReason, QueueTransition, WorkerCli
from holdfast.dispatch.request import DispatchRecord, InvalidTransition, request_id_of
from holdfast.messages import Intent
from holdfast.store.api import Store
from holdfast.workers.effects.handler import CallControl
from holdfast.world.context import EffectCall

__all__ = [
    "LEADER", "Dispatch", "DispatchLog", "DispatchOutcomeReason", "DispatchRecord", "Dispatched",
    "InvalidTransition", "Options", "QueueTransition", "ReplayState", "WorkerCli", "declare",
    "delivered", "dispatch", "failed", "set_leader",
]  # fmt: skip

KIND = "agent.dispatch"
# Covers the wait for another prompt to the same pane, and the check that the text has appeared.
TIMEOUT_S = 60.0
# Practically unlimited: the dispatch log counts unconfirmed tries, and waiting for an absent leader must
# not use up attempts.
ATTEMPTS = 1_000_000


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The optional settings of a dispatch."""

    # The tmux server, by name or path; empty for the default server of the user.
    socket: str = ""
    # The agent confirms the prompt. Until then the request is notified, not delivered.
    acknowledge: bool = False
    # The most tries to type a text that the pane does not confirm.
    tries_max: int = TRIES_DEFAULT
    # Allow a text that starts with `!`, `/`, `#` or `&`, which an agent interprets as a command.
    commands: bool = False
    metadata: dict[str, str] = {}


class Dispatch(Effect[..., Dispatched]):
    """The dispatch effect. It writes its records into the store of the effect worker that performs it."""

    roles = ("dispatch",)

    def __init__(self, kind: str, socket: str, **options: Any) -> None:
        self._default_socket = socket
        self._store: Store | None = None
        super().__init__(kind, _perform_without_store, **options)

    def call(self, args: tuple[Any, ...], options: dict[str, Any]) -> EffectCall:
        effect_call = super().call(args, options)
        # Validate here, so that the reducer gets the error before the intent is queued.
        request = self._request(effect_call.params, "unborn", {})
        # The program in the leader's pane is not known here.
        is_leader = request.target == LEADER
        (replace(request, cli=WorkerCli.CLAUDE) if is_leader else request).check()
        return effect_call

    def within(self, store: Store) -> Dispatch:
        if self.fn is not _perform_without_store:
            return self  # a test or a simulation replaced the function
        bound = copy.copy(self)
        bound._store = store
        return bound

    def perform(self, intent: Intent, attempt: int, deadline_ns: int, hold: CallControl) -> Any:
        if self._store is None:
            return super().perform(intent, attempt, deadline_ns, hold)
        metadata = {"world": intent.origin_name}
        if intent.tag:
            metadata["tag"] = intent.tag
        if intent.redrive_of is not None:
            metadata["redrive_of"] = intent.redrive_of.hex()
        request = self._request(intent.params, request_id_of(intent), metadata)
        return DispatchProtocol(self._store, intent.universe_id).run(request, lambda: hold.dropped)

    def _request(self, params: bytes, request_id: str, metadata: dict[str, str]) -> PromptRequest:
        target, text, cli, given_options = _fill_defaults(*self._decode_arguments(params))
        options = given_options or Options()
        return PromptRequest(
            request_id=request_id,
            target=target,
            text=text,
            cli=WorkerCli.named(cli),
            socket=options.socket or self._default_socket,
            acknowledge=options.acknowledge,
            tries_max=options.tries_max,
            commands=options.commands,
            metadata={**options.metadata, **metadata},
        )


def _perform_without_store(
    call: Call, target: str, text: str, cli: str = "other", options: Options | None = None
) -> Dispatched:
    """Raise NotConfigured: `perform` runs dispatches only when bound to a store. A simulation must not type
    into panes."""
    hint = "only an effect worker with a store performs it; in a simulation replace it with a stub"
    raise NotConfigured(what=KIND, why="there is no store for the dispatch log", hint=hint)


def _fill_defaults(
    target: str, text: str, cli: str = "other", options: Options | None = None
) -> tuple[str, str, str, Options | None]:
    return target, text, cli, options


def declare(kind: str = KIND, socket: str = "", **options: Any) -> Dispatch:
    """Create the effect for panes of a tmux server. Options as in `@hf.effect`."""
    return Dispatch(kind, socket, **{"attempts": ATTEMPTS, "timeout_s": TIMEOUT_S, **options})


def set_leader(
    store: Store, *, universe: str, pane: str, cli: str = "claude", socket: str = ""
) -> LeaderPane:
    """Set the pane of the target `leader`, which also receives notifications about ended dispatches."""
    return set_leader_pane(store, universe, pane=pane, cli=cli, socket=socket)


def delivered(store: Store, *, universe: str, request_id: str) -> DispatchRecord:
    """Record that the agent has received the prompt."""
    return DispatchLog(store, universe).delivered(request_id)


def failed(store: Store, *, universe: str, request_id: str, reason: str) -> DispatchRecord:
    """Record that the agent rejected the prompt, with its reason."""
    return DispatchLog(store, universe).failed(request_id, reason)


def _arguments(
    target: str, text: str, cli: str = "other", options: Options | Mapping[str, Any] | None = None
) -> Dispatched:
    raise NotImplementedError("it only declares types")


dispatch = typed_as(_arguments, declare())

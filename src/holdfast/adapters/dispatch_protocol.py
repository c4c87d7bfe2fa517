"""The dispatch protocol: one dispatch from its request to its end, recorded in the dispatch log.

    requested   logged first: the request is pending
    tried       logged before a text is typed, so that the attempt is known after a crash
    concluded   the outcome, by the outcome table: notified, still pending, or failed
    delivered   with `acknowledge` when the agent acknowledges; otherwise at once

After a crash at any point a repeated run continues. A finished request returns its record, and a
typed text is found in the pane by its mark.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

import msgspec

from holdfast import failpoints
from holdfast.adapters.errors import NotInstalled
from holdfast.adapters.pane_prompter import (
    PanePrompter,
    PromptResult,
    check_not_command,
    check_prompt,
)
from holdfast.adapters.tmux import Tmux, parse_target
from holdfast.clock import SYSTEM, Clock
from holdfast.dispatch import leader_pane
from holdfast.dispatch.leader_pane import LeaderPane
from holdfast.dispatch.log import DispatchLog
from holdfast.dispatch.outcomes import DispatchOutcomeReason, WorkerCli
from holdfast.dispatch.request import DispatchRecord, DispatchStatus, InvalidTransition, mark_of
from holdfast.errors import Busy, HoldfastError, Invalid
from holdfast.runner.error_policy import Refused
from holdfast.store.api import Store

# The number of attempts to type a text that the pane does not confirm.
TRIES_DEFAULT = 3
TRIES_MAX = 20
SEEN_IN_PANE = "seen_in_pane"


class Dispatched(msgspec.Struct, frozen=True):
    """The value of a receipt: the request, its status, and the mark at the end of its text."""

    request_id: str
    status: str
    target: str
    mark: str
    tries: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRequest:
    """The parameters of one dispatch."""

    request_id: str
    target: str
    text: str
    cli: WorkerCli
    socket: str = ""
    # The agent acknowledges the prompt (`holdfast dispatch deliver`).
    acknowledge: bool = False
    tries_max: int = TRIES_DEFAULT
    # The text may be a command of the agent.
    commands: bool = False
    metadata: dict[str, str]

    def check(self) -> None:
        if not self.target:
            raise Invalid(what="target", why="empty")
        check_prompt(self.text, self.cli)
        if not 1 <= self.tries_max <= TRIES_MAX:
            raise Invalid(what="tries_max", found=self.tries_max, min=1, max=TRIES_MAX)
        Tmux(self.socket)


# -- errors --------------------------------------------------------------------------------------


class TargetMissing(Refused):
    code = DispatchOutcomeReason.TARGET_MISSING.value


class TargetUnresolved(Refused):
    code = DispatchOutcomeReason.TARGET_UNRESOLVED.value


class PreflightFailed(Refused):
    code = DispatchOutcomeReason.PREFLIGHT_FAILED.value


class SendFailed(Refused):
    code = DispatchOutcomeReason.SEND_FAILED.value


class Unconfirmed(Refused):
    code = DispatchOutcomeReason.UNCONFIRMED.value


class DispatchFailed(Refused):
    """The dispatch failed for another reason: reported by an operator or the agent, or
    abandoned."""

    code = "dispatch_failed"


class NotConfirmedYet(Busy):
    code = "unconfirmed_yet"


class LeaderMissing(Busy):
    code = DispatchOutcomeReason.LEADER_MISSING.value
    hint = "set the leader's pane: holdfast dispatch leader PANE"


_FAILURES: dict[str, type[Refused]] = {
    kind.code: kind
    for kind in (TargetMissing, TargetUnresolved, PreflightFailed, SendFailed, Unconfirmed)
}


# -- protocol ------------------------------------------------------------------------------------


class DispatchProtocol:
    """Runs the dispatches of a universe, with its store and tmux."""

    def __init__(
        self,
        store: Store,
        universe: str,
        clock: Clock = SYSTEM,
        server: Callable[[str], Tmux] = Tmux,
    ) -> None:
        """`server` makes the tmux client of a socket."""
        self._store = store
        self._clock = clock
        self._tmux_of = server
        self.log = DispatchLog(store, universe)

    def run(
        self, request: PromptRequest, is_cancelled: Callable[[], bool] = lambda: False
    ) -> Dispatched:
        """Run a request until it is notified. Raise an error that determines whether to retry."""
        request.check()
        # Not in `check`: a reducer gets it as a receipt, for the text may come from anywhere.
        if not request.commands and request.target != leader_pane.LEADER:
            check_not_command(request.text, request.cli)
        record = self.log.request(
            request.request_id,
            request.target,
            request.metadata,
            digest=sha256(request.text.encode()).hexdigest(),
        )
        detail = ""
        if record.status is DispatchStatus.PENDING:
            record, detail = self._attempt(request, record, is_cancelled)
        if record.status is DispatchStatus.NOTIFIED and not request.acknowledge:
            record = self._apply_transition(
                record, lambda: self.log.delivered(record.request_id, SEEN_IN_PANE)
            )
        if record.status is DispatchStatus.PENDING:
            raise _pending_error(record, detail)
        if record.status is DispatchStatus.FAILED:
            raise _failed_error(record, detail)
        return Dispatched(
            record.request_id,
            record.status.value,
            record.target,
            mark_of(record.request_id),
            record.tries,
        )

    def _attempt(
        self, request: PromptRequest, record: DispatchRecord, is_cancelled: Callable[[], bool]
    ) -> tuple[DispatchRecord, str]:
        tries = record.tries

        def begin() -> None:
            nonlocal tries
            tries = self.log.tried(request.request_id).tries

        try:
            result = self._type_prompt(request, begin, is_cancelled)
        except InvalidTransition:
            # Another worker finished the request while this one was paused. Nothing was typed.
            return self.log.find(record.request_id) or record, ""
        retries_left = max(request.tries_max - tries, 0)
        if (record.reason, record.deferred) == (result.reason.value, True):
            # The request is deferred for the same reason as before, so there is no new event.
            return record, result.detail
        moved = self._apply_transition(
            record,
            lambda: self.log.concluded(record.request_id, result.reason, retries_left=retries_left),
        )
        return moved, result.detail

    def _apply_transition(
        self, record: DispatchRecord, move: Callable[[], DispatchRecord]
    ) -> DispatchRecord:
        """Apply a transition and return the record. If another worker was first, return its
        record."""
        try:
            return move()
        except InvalidTransition:
            return self.log.find(record.request_id) or record

    def _type_prompt(
        self, request: PromptRequest, on_type: Callable[[], None], is_cancelled: Callable[[], bool]
    ) -> PromptResult:
        target, cli, socket = request.target, request.cli, request.socket
        leads = target == leader_pane.LEADER
        if leads:
            pane = self._store.read(leader_pane.find_leader, self.log.universe)
            if pane is None:
                return _leader_missing("no leader pane is set")
            target, cli, socket = pane.target, WorkerCli.named(pane.cli), pane.socket
            check_prompt(request.text, cli)
            if not request.commands:
                check_not_command(request.text, cli)
        try:
            prompter = PanePrompter(self._tmux_of(socket), self._clock)
            result = prompter.send(
                target,
                request.text,
                cli,
                mark_of(request.request_id),
                on_type=on_type,
                is_cancelled=is_cancelled,
            )
        except NotInstalled as error:
            return PromptResult(DispatchOutcomeReason.SEND_FAILED, str(error))
        if failpoints.armed:
            failpoints.hit("dispatch.prompt_typed", request)
        if leads and result.reason is DispatchOutcomeReason.TARGET_MISSING:
            return _leader_missing(result.detail)
        return result


def set_leader_pane(
    store: Store, universe: str, *, pane: str, cli: str = "claude", socket: str = ""
) -> LeaderPane:
    """Check and set the leader's pane. The pane need not exist yet."""
    parse_target(pane)
    Tmux(socket)
    named: LeaderPane = store.transact(
        leader_pane.set_leader, universe, pane, WorkerCli.named(cli).value, socket
    )
    return named


def _leader_missing(detail: str) -> PromptResult:
    return PromptResult(DispatchOutcomeReason.LEADER_MISSING, detail)


def _pending_error(record: DispatchRecord, detail: str) -> HoldfastError:
    kind = LeaderMissing if record.deferred else NotConfirmedYet
    return kind(request_id=record.request_id, tries=record.tries, why=detail)


def _failed_error(record: DispatchRecord, detail: str) -> HoldfastError:
    kind = _FAILURES.get(record.reason, DispatchFailed)
    return kind(
        request_id=record.request_id, target=record.target, reason=record.reason, why=detail
    )

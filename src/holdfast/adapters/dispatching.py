"""One dispatch, from its request to its end: what is typed, and what the dispatch log says of it.

    requested   written before anything else: pending
    tried       written before a text is typed, so that a crash is known of
    concluded   what came of it, by the table of outcomes: notified, still pending, or failed
    delivered   with `acknowledge` when the agent says so; else at once, for nobody will say more

Done again after a crash anywhere, it goes on where it was: what ended is answered by its record, and
what was typed is found in the pane by its mark.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

import msgspec

from holdfast.adapters.agent import Sent, Typist, check_start, check_text
from holdfast.adapters.errors import NotInstalled
from holdfast.adapters.tmux import Tmux, target_of
from holdfast.authority import panes
from holdfast.authority.dispatch import (
    DispatchRecord,
    DispatchStatus,
    InvalidTransition,
    mark_of,
)
from holdfast.authority.dispatch_log import DispatchLog
from holdfast.authority.outcome import DispatchOutcomeReason, WorkerCli
from holdfast.authority.panes import Pane
from holdfast.clock import SYSTEM, Clock
from holdfast.errors import Busy, HoldfastError, Invalid
from holdfast.runner.faults import Refused
from holdfast.store.api import Store

# How often a text is typed that no pane confirms.
TRIES = 3
TRIES_MAX = 20
SEEN_IN_PANE = "seen_in_pane"


class Dispatched(msgspec.Struct, frozen=True):
    """What a receipt tells: the request, how it stands, and the mark that its text ends with."""

    request_id: str
    status: str
    target: str
    mark: str
    tries: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    request_id: str
    target: str
    text: str
    cli: WorkerCli
    socket: str = ""
    # The agent will say that it has it (`holdfast dispatch deliver`).
    acknowledge: bool = False
    tries_max: int = TRIES
    # The text may be a command of the agent.
    commands: bool = False
    metadata: dict[str, str]

    def check(self) -> None:
        if not self.target:
            raise Invalid(what="target", why="empty")
        check_text(self.text, self.cli)
        if not 1 <= self.tries_max <= TRIES_MAX:
            raise Invalid(what="tries_max", found=self.tries_max, min=1, max=TRIES_MAX)
        Tmux(self.socket)


# -- how it fails --------------------------------------------------------------------------------


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


class DispatchEnded(Refused):
    """It failed otherwise: an operator or the agent said so, or it was given up."""

    code = "dispatch_failed"


class UnconfirmedYet(Busy):
    code = "unconfirmed_yet"


class LeaderMissing(Busy):
    code = DispatchOutcomeReason.LEADER_MISSING.value
    hint = "name the leader's pane: holdfast dispatch leader PANE"


_FAILURES: dict[str, type[Refused]] = {
    kind.code: kind
    for kind in (TargetMissing, TargetUnresolved, PreflightFailed, SendFailed, Unconfirmed)
}


# -- doing it ------------------------------------------------------------------------------------


class Dispatching:
    """The dispatches of a universe, by whoever has its store and a tmux."""

    def __init__(
        self,
        store: Store,
        universe: str,
        clock: Clock = SYSTEM,
        server: Callable[[str], Tmux] = Tmux,
    ) -> None:
        """`server` gives the tmux of a socket."""
        self._store = store
        self._clock = clock
        self._server = server
        self.log = DispatchLog(store, universe)

    def run(self, request: Request, dropped: Callable[[], bool] = lambda: False) -> Dispatched:
        """The request has been notified; or an error that says whether to come back."""
        request.check()
        # Not in `check`: a reducer gets it as a receipt, for the text may come from anywhere.
        if not request.commands and request.target != panes.LEADER:
            check_start(request.text, request.cli)
        record = self.log.request(
            request.request_id,
            request.target,
            request.metadata,
            digest=sha256(request.text.encode()).hexdigest(),
        )
        detail = ""
        if record.status is DispatchStatus.PENDING:
            record, detail = self._try(request, record, dropped)
        if record.status is DispatchStatus.NOTIFIED and not request.acknowledge:
            record = self._moved(
                record, lambda: self.log.delivered(record.request_id, SEEN_IN_PANE)
            )
        if record.status is DispatchStatus.PENDING:
            raise _not_yet(record, detail)
        if record.status is DispatchStatus.FAILED:
            raise _failure(record, detail)
        return Dispatched(
            record.request_id,
            record.status.value,
            record.target,
            mark_of(record.request_id),
            record.tries,
        )

    def _try(
        self, request: Request, record: DispatchRecord, dropped: Callable[[], bool]
    ) -> tuple[DispatchRecord, str]:
        tries = record.tries

        def begin() -> None:
            nonlocal tries
            tries = self.log.tried(request.request_id).tries

        try:
            sent = self._send(request, begin, dropped)
        except InvalidTransition:
            # We were paused, and another has done it: nothing was typed.
            return self.log.find(record.request_id) or record, ""
        left = max(request.tries_max - tries, 0)
        if (record.reason, record.deferred) == (sent.reason.value, True):
            # It waits for what it waited for: nothing happened that the log should tell.
            return record, sent.detail
        moved = self._moved(
            record,
            lambda: self.log.concluded(record.request_id, sent.reason, retries_left=left),
        )
        return moved, sent.detail

    def _moved(self, record: DispatchRecord, move: Callable[[], DispatchRecord]) -> DispatchRecord:
        """The record after a move; if somebody else was first, as that left it."""
        try:
            return move()
        except InvalidTransition:
            return self.log.find(record.request_id) or record

    def _send(
        self, request: Request, begin: Callable[[], None], dropped: Callable[[], bool]
    ) -> Sent:
        target, cli, socket = request.target, request.cli, request.socket
        leads = target == panes.LEADER
        if leads:
            pane = self._store.read(panes.leader, self.log.universe)
            if pane is None:
                return _leader_missing("nobody named the leader's pane")
            target, cli, socket = pane.target, WorkerCli.named(pane.cli), pane.socket
            check_text(request.text, cli)
            if not request.commands:
                check_start(request.text, cli)
        try:
            typist = Typist(self._server(socket), self._clock)
            sent = typist.send(
                target,
                request.text,
                cli,
                mark_of(request.request_id),
                begin=begin,
                dropped=dropped,
            )
        except NotInstalled as error:
            return Sent(DispatchOutcomeReason.SEND_FAILED, str(error))
        if leads and sent.reason is DispatchOutcomeReason.TARGET_MISSING:
            return _leader_missing(sent.detail)
        return sent


def name_leader(
    store: Store, universe: str, *, pane: str, cli: str = "claude", socket: str = ""
) -> Pane:
    """Name the leader's pane, checked. It need not be there yet."""
    target_of(pane)
    Tmux(socket)
    named: Pane = store.transact(
        panes.set_leader, universe, pane, WorkerCli.named(cli).value, socket
    )
    return named


def _leader_missing(detail: str) -> Sent:
    return Sent(DispatchOutcomeReason.LEADER_MISSING, detail)


def _not_yet(record: DispatchRecord, detail: str) -> HoldfastError:
    kind = LeaderMissing if record.deferred else UnconfirmedYet
    return kind(request_id=record.request_id, tries=record.tries, why=detail)


def _failure(record: DispatchRecord, detail: str) -> HoldfastError:
    kind = _FAILURES.get(record.reason, DispatchEnded)
    return kind(
        request_id=record.request_id, target=record.target, reason=record.reason, why=detail
    )

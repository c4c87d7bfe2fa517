"""The dispatcher: maintains pending dispatch requests and notifies the leader of finished ones.

An effect worker pool sends the prompts (`adapters.dispatch_protocol`). The dispatcher does one bounded
step of the rest per tick:

- It fails a request whose effect has ended (cancelled, dead-lettered, its world deleted).
- It expedites requests deferred for a missing leader pane as soon as the pane exists.
- It replays the dispatch log to the leader's registered pane: one line per finished request, once.
  Without the pane the replay cursor does not advance, and the reason is stored
  (`dispatch.notifications`).

The holder of the lease on `<universe>/notices` notifies the leader. Other dispatchers are on
standby. Each line ends with a mark, so a line sent before a crash is found in the pane and not sent
again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from holdfast import failpoints
from holdfast.adapters.errors import NotInstalled
from holdfast.adapters.pane_prompter import PanePrompter, PromptResult
from holdfast.adapters.tmux import Tmux, TmuxFailed
from holdfast.clock import SYSTEM, Clock, S
from holdfast.dispatch import leader_pane, log, notifications
from holdfast.dispatch.leader_pane import LEADER, LeaderPane
from holdfast.dispatch.notifications import LoggedEvent
from holdfast.dispatch.outcomes import DispatchOutcomeReason, WorkerCli
from holdfast.dispatch.request import (
    DISPATCH,
    DispatchEvent,
    DispatchRecord,
    DispatchStatus,
    mark_of,
    topic,
)
from holdfast.durable import lease as leases
from holdfast.durable.lease import Lease
from holdfast.errors import Fenced, Held, NotFound, Timeout
from holdfast.store.api import Store, Txn
from holdfast.workers.dispatch.ops import (
    abandon_requests,
    expedite_deferred,
    requests_without_effect,
)
from holdfast.workers.service import TickService

# Requests that one tick checks, and events that it replays.
PAGE = 100
NOTICES_PER_TICK = 10
# The interval between comparisons of requests with their effects.
RECONCILE_S = 5.0
# The backoff after a failed notification. It doubles up to the maximum.
RETRY_S = 1.0
RETRY_S_MAX = 60.0
LEASE_S = 10.0
REASON_CHARS_MAX = 120
ABANDONED = "abandoned"


class Dispatcher(TickService):
    name = "dispatch"

    def __init__(
        self,
        store: Store,
        *,
        universe: str,
        worker: str,
        incarnation: str,
        lease_ttl_s: float = LEASE_S,
        clock: Clock = SYSTEM,
        server: Callable[[str], Tmux] = Tmux,
    ) -> None:
        """`server` returns the tmux server of a socket."""
        super().__init__(store, clock)
        self._server = server
        self.universe = universe
        self.worker = worker
        self.incarnation = incarnation
        self._ttl_ns = int(lease_ttl_s * S)
        self._lease: Lease | None = None
        self._reconcile_at_ns = 0
        self._reconcile_cursor: DispatchRecord | None = None
        self._retry_at_ns = 0
        self._retry_s = RETRY_S

    @property
    def topics(self) -> Sequence[str]:
        return (topic(self.universe),)

    def tick(self) -> bool:
        more = self._fail_orphaned_requests()
        pane = self.store.read(leader_pane.find_leader, self.universe)
        if pane is None:
            return more
        try:
            return self._serve_leader(pane) or more
        except Fenced:
            # This process was suspended past its lease: another dispatcher has taken over.
            self._lease = None
            return more
        except NotFound:
            # The leader has unregistered its pane.
            return more

    def sleep_s(self) -> float:
        waits_ns = self._retry_at_ns - self.store.now_ns()
        return min(max(waits_ns / S, 0.05), self.idle_s) if waits_ns > 0 else self.idle_s

    def shut_down(self) -> None:
        if self._lease is not None:
            with contextlib.suppress(Fenced):
                self.store.transact(leases.release, self._lease)
            self._lease = None

    # -- requests whose effects have ended -----------------------------------------------------

    def _fail_orphaned_requests(self) -> bool:
        """Fail pending requests without an effect, one page per tick, at intervals."""
        now_ns = self.store.now_ns()
        if self._reconcile_cursor is None and now_ns < self._reconcile_at_ns:
            return False
        page = self.store.read(
            log.list_by_status, self.universe, DispatchStatus.PENDING, self._reconcile_cursor, PAGE
        )
        orphaned = self.store.read(requests_without_effect, self.universe, page)
        if orphaned:
            self.store.transact(abandon_requests, self.universe, orphaned, ABANDONED)
        self._reconcile_cursor = page[-1] if len(page) == PAGE else None
        if self._reconcile_cursor is None:
            self._reconcile_at_ns = now_ns + int(RECONCILE_S * S)
        return self._reconcile_cursor is not None

    # -- the leader ----------------------------------------------------------------------------

    def _serve_leader(self, pane: LeaderPane) -> bool:
        deferred = self.store.read(log.backlog, self.universe).deferred
        pending = self.store.read(notifications.count_pending, self.universe)
        if not (deferred or pending) or self.store.now_ns() < self._retry_at_ns:
            return False
        if not self._acquire_lease():
            return False
        try:
            pane_exists = PanePrompter(self._server(pane.socket), self.clock).exists(pane.target)
        except (NotInstalled, TmuxFailed, Timeout) as error:
            return self._defer(error.code, str(error))
        if not pane_exists:
            return self._defer(_LEADER_MISSING.value, f"nothing runs at {pane.target}")
        if deferred:
            self.store.transact(expedite_deferred, self.universe, PAGE)
        return self._notify_leader(pane) if pending else False

    def _notify_leader(self, pane: LeaderPane) -> bool:
        """Send notices for the events after the cursor, in order. Returns whether more remain."""
        page: list[LoggedEvent] = self.store.read(notifications.next_events, self.universe, PAGE)
        if not page:
            return False
        notified = 0
        done: list[LoggedEvent] = []
        for replayed in page:
            if notified == NOTICES_PER_TICK:
                break
            if not replayed.handled and _is_for_leader(replayed.event):
                sent = self._send_notice(pane, replayed.event)
                if sent.reason is not DispatchOutcomeReason.CONFIRMED:
                    self._advance_cursor(done)
                    missing = sent.reason is DispatchOutcomeReason.TARGET_MISSING
                    return self._defer(
                        (_LEADER_MISSING if missing else sent.reason).value, sent.detail
                    )
                notified += 1
            done.append(replayed)
        self._advance_cursor(done)
        self._retry_s, self._retry_at_ns = RETRY_S, 0
        state = self.store.read(notifications.read, self.universe)
        if state is not None and state.deferred is not None:
            self.store.transact(notifications.clear_deferred, self.universe)
        return len(done) < len(page) or len(page) == PAGE

    def _send_notice(self, pane: LeaderPane, event: DispatchEvent) -> PromptResult:
        self._renew_lease()
        cli = WorkerCli.named(pane.cli)
        typist = PanePrompter(self._server(pane.socket), self.clock)
        return typist.send(pane.target, format_notice(event), cli, mark_of(event.event_id))

    def _advance_cursor(self, done: list[LoggedEvent]) -> None:
        if done:
            if failpoints.armed:
                failpoints.hit("dispatcher.advance_cursor", done)
            self.store.transact(self._advance_to, done)

    def _advance_to(self, txn: Txn, done: list[LoggedEvent]) -> None:
        assert self._lease is not None
        txn.require_live(self._lease)
        ids = [one.event.event_id for one in done]
        notifications.advance(txn, self.universe, done[0].height - 1, done[-1].height, ids)

    def _defer(self, code: str, text: str) -> bool:
        """Store why the leader cannot be notified, and retry later."""
        state = self.store.read(notifications.read, self.universe)
        prior = None if state is None else state.deferred
        if prior is None or (prior.code, prior.text) != (code, text):
            self.store.transact(notifications.defer_leader_notification, self.universe, code, text)
        # A check for a missing pane is cheap. Sending to a pane that does not accept input is not.
        if code == _LEADER_MISSING.value:
            self._retry_s = RETRY_S
        self._retry_at_ns = self.store.now_ns() + int(self._retry_s * S)
        self._retry_s = min(self._retry_s * 2, RETRY_S_MAX)
        return False

    def _acquire_lease(self) -> bool:
        if self._lease is not None and self.store.now_ns() < self._lease.expires_ns:
            return True
        try:
            self._lease = self.store.transact(
                leases.acquire,
                f"{self.universe}/notices",
                self.worker,
                self.incarnation,
                self._ttl_ns,
            )
        except Held as error:
            self._lease = None
            self._retry_at_ns = error.fields.get("until_ns", 0)
            return False
        return True

    def _renew_lease(self) -> None:
        assert self._lease is not None
        if self.store.now_ns() < self._lease.expires_ns - self._ttl_ns // 2:
            return
        [renewed] = self.store.transact(leases.renew, [self._lease], self._ttl_ns)
        if renewed is None:
            raise Fenced(resource=self._lease.resource, held=self._lease.lease_id)
        self._lease = renewed


_LEADER_MISSING = DispatchOutcomeReason.LEADER_MISSING


def format_notice(event: DispatchEvent) -> str:
    """Format the notice to the leader about a finished request."""
    reason = " ".join(event.reason.split())[:REASON_CHARS_MAX]
    because = f": {reason}" if reason else ""
    mark = mark_of(event.request_id)
    text = f"[holdfast] dispatch {mark} to {event.target} {event.status.value}{because}"
    # The reason is untrusted text, and a terminal interprets control characters.
    return "".join(char if char.isprintable() else "?" for char in text)


# -- inside --------------------------------------------------------------------------------------


def _is_for_leader(event: DispatchEvent) -> bool:
    """Whether the leader needs a notice: not about requests sent to the leader itself."""
    return event.status in DISPATCH.terminal and event.target != LEADER

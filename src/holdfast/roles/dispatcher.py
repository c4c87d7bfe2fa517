"""The dispatcher: looks after dispatches that wait, and tells the leader of those that ended.

An adapter pool types (`adapters.dispatching`). What is left to do around it, one bounded step a tick:

- A request whose effect has ended without it (cancelled, buried, its world deleted) fails.
- Requests that were deferred for want of the leader's pane are put back at the front as soon as the
  pane is there, instead of waiting for their time.
- The dispatch log is replayed to the leader, if one has named a pane: each request that ended is told
  in a line, once. Without the pane nothing moves, and the reason is written down (`replay`).

Whoever holds the lease on `<universe>/notices` tells the leader; the others stand by. A line ends with
a mark, so one that was typed before a crash is found in the pane and not typed again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from holdfast.adapters.agent import Sent, Typist
from holdfast.adapters.errors import NotInstalled
from holdfast.adapters.tmux import Tmux, TmuxFailed
from holdfast.authority import dispatch_log, panes, replay
from holdfast.authority.dispatch import (
    DISPATCH,
    DispatchEvent,
    DispatchRecord,
    DispatchStatus,
    mark_of,
    topic,
)
from holdfast.authority.outcome import DispatchOutcomeReason, WorkerCli
from holdfast.authority.panes import LEADER, Pane
from holdfast.authority.replay import Replayed
from holdfast.clock import SYSTEM, Clock, S
from holdfast.durable import lease as leases
from holdfast.durable.lease import Lease
from holdfast.errors import Fenced, Held, NotFound, Timeout
from holdfast.roles.dispatches import abandon_all, hasten, without_effect
from holdfast.roles.role import Role
from holdfast.store.api import Store, Txn

# Requests that one tick looks after, and events that it replays.
PAGE = 100
TOLD_PER_TICK = 10
# How often requests are compared with their effects.
RECONCILE_S = 5.0
# How long a leader that could not be told is left alone: twice as long each time, up to a bound.
RETRY_S = 1.0
RETRY_S_MAX = 60.0
LEASE_S = 10.0
REASON_CHARS_MAX = 120
ABANDONED = "abandoned"


class Dispatcher(Role):
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
        """`server` gives the tmux of a socket."""
        super().__init__(store, clock)
        self._server = server
        self.universe = universe
        self.worker = worker
        self.incarnation = incarnation
        self._ttl_ns = int(lease_ttl_s * S)
        self._lease: Lease | None = None
        self._reconcile_at_ns = 0
        self._reconciled: DispatchRecord | None = None
        self._retry_at_ns = 0
        self._retry_s = RETRY_S

    @property
    def topics(self) -> Sequence[str]:
        return (topic(self.universe),)

    def tick(self) -> bool:
        more = self._reconcile()
        pane = self.store.read(panes.leader, self.universe)
        if pane is None:
            return more
        try:
            return self._serve(pane) or more
        except Fenced:
            # We were paused for longer than our lease: another tells the leader.
            self._lease = None
            return more
        except NotFound:
            # The leader took its name back meanwhile: there is nobody to tell.
            return more

    def next_s(self) -> float:
        waits_ns = self._retry_at_ns - self.store.now_ns()
        return min(max(waits_ns / S, 0.05), self.idle_s) if waits_ns > 0 else self.idle_s

    def finish(self) -> None:
        if self._lease is not None:
            with contextlib.suppress(Fenced):
                self.store.transact(leases.release, self._lease)
            self._lease = None

    # -- requests whose effects have ended -----------------------------------------------------

    def _reconcile(self) -> bool:
        """Go over the pending requests, a page at a time, now and then."""
        now_ns = self.store.now_ns()
        if self._reconciled is None and now_ns < self._reconcile_at_ns:
            return False
        page = self.store.read(
            dispatch_log.listed, self.universe, DispatchStatus.PENDING, self._reconciled, PAGE
        )
        gone = self.store.read(without_effect, self.universe, page)
        if gone:
            self.store.transact(abandon_all, self.universe, gone, ABANDONED)
        self._reconciled = page[-1] if len(page) == PAGE else None
        if self._reconciled is None:
            self._reconcile_at_ns = now_ns + int(RECONCILE_S * S)
        return self._reconciled is not None

    # -- the leader ----------------------------------------------------------------------------

    def _serve(self, pane: Pane) -> bool:
        deferred = self.store.read(dispatch_log.backlog, self.universe).deferred
        pending = self.store.read(replay.pending, self.universe)
        if not (deferred or pending) or self.store.now_ns() < self._retry_at_ns:
            return False
        if not self._hold():
            return False
        try:
            there = Typist(self._server(pane.socket), self.clock).there(pane.target)
        except (NotInstalled, TmuxFailed, Timeout) as error:
            return self._put_off(error.code, str(error))
        if not there:
            return self._put_off(_MISSING.value, f"nothing runs at {pane.target}")
        if deferred:
            self.store.transact(hasten, self.universe, PAGE)
        return self._replay(pane) if pending else False

    def _replay(self, pane: Pane) -> bool:
        """Tell what lies ahead, in order; whether there is more."""
        page: list[Replayed] = self.store.read(replay.ahead, self.universe, PAGE)
        if not page:
            return False
        told = 0
        done: list[Replayed] = []
        for one in page:
            if told == TOLD_PER_TICK:
                break
            if not one.seen and _is_news(one.event):
                sent = self._tell(pane, one.event)
                if sent.reason is not DispatchOutcomeReason.CONFIRMED:
                    self._advance(done)
                    missing = sent.reason is DispatchOutcomeReason.TARGET_MISSING
                    return self._put_off((_MISSING if missing else sent.reason).value, sent.detail)
                told += 1
            done.append(one)
        self._advance(done)
        self._retry_s, self._retry_at_ns = RETRY_S, 0
        state = self.store.read(replay.read, self.universe)
        if state is not None and state.deferred is not None:
            self.store.transact(replay.clear_deferred, self.universe)
        return len(done) < len(page) or len(page) == PAGE

    def _tell(self, pane: Pane, event: DispatchEvent) -> Sent:
        self._renew()
        cli = WorkerCli.named(pane.cli)
        typist = Typist(self._server(pane.socket), self.clock)
        return typist.send(pane.target, notice(event), cli, mark_of(event.event_id))

    def _advance(self, done: list[Replayed]) -> None:
        if done:
            self.store.transact(self._advance_to, done)

    def _advance_to(self, txn: Txn, done: list[Replayed]) -> None:
        assert self._lease is not None
        txn.require_live(self._lease)
        ids = [one.event.event_id for one in done]
        replay.advance(txn, self.universe, done[0].height - 1, done[-1].height, ids)

    def _put_off(self, code: str, text: str) -> bool:
        """The leader cannot be told now: say why, and come back later."""
        state = self.store.read(replay.read, self.universe)
        was = None if state is None else state.deferred
        if was is None or (was.code, was.text) != (code, text):
            self.store.transact(replay.defer_leader_notification, self.universe, code, text)
        # A pane that is not there is cheap to look for; a text that nobody takes is not typed often.
        if code == _MISSING.value:
            self._retry_s = RETRY_S
        self._retry_at_ns = self.store.now_ns() + int(self._retry_s * S)
        self._retry_s = min(self._retry_s * 2, RETRY_S_MAX)
        return False

    def _hold(self) -> bool:
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
        except Held as held:
            self._lease = None
            self._retry_at_ns = held.fields.get("until_ns", 0)
            return False
        return True

    def _renew(self) -> None:
        assert self._lease is not None
        if self.store.now_ns() < self._lease.expires_ns - self._ttl_ns // 2:
            return
        [renewed] = self.store.transact(leases.renew, [self._lease], self._ttl_ns)
        if renewed is None:
            raise Fenced(resource=self._lease.resource, held=self._lease.lease_id)
        self._lease = renewed


_MISSING = DispatchOutcomeReason.LEADER_MISSING


def notice(event: DispatchEvent) -> str:
    """What the leader is told of a request that ended."""
    reason = " ".join(event.reason.split())[:REASON_CHARS_MAX]
    because = f": {reason}" if reason else ""
    mark = mark_of(event.request_id)
    told = f"[holdfast] dispatch {mark} to {event.target} {event.status.value}{because}"
    # Whoever failed it may have said anything, and a terminal obeys.
    return "".join(char if char.isprintable() else "?" for char in told)


# -- inside --------------------------------------------------------------------------------------


def _is_news(event: DispatchEvent) -> bool:
    """What was for the leader itself is no news to it."""
    return event.status in DISPATCH.terminal and event.target != LEADER

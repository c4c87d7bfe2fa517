"""Actors of dispatch: clients that request, pools that type, dispatchers, and a leader pane that
opens and closes.

Pools and dispatchers run product code. The panes are simulated (`simulated_panes`). A leader holds
the universe's lease at times, and an observer records readiness for the checkers.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from holdfast import codec
from holdfast.adapters.dispatch_protocol import DispatchProtocol, PromptRequest
from holdfast.clock import MS, S
from holdfast.dispatch import leader_pane, notifications
from holdfast.dispatch.outcomes import WorkerCli
from holdfast.durable import queue
from holdfast.durable.lease import Lease
from holdfast.durable.queue import RetryBudget
from holdfast.errors import (
    Busy,
    ClaimLost,
    CommitUnknown,
    Conflict,
    Fenced,
    Held,
    Invalid,
    NotFound,
    StoreFull,
    StoreReplaced,
)
from holdfast.leadership import leader_lease
from holdfast.runner.error_policy import Refused
from holdfast.sim.actor import Actor, Incarnation
from holdfast.sim.choice_tape import ChoiceTape
from holdfast.sim.settings import (
    CLAIM_NS,
    LEASE_NS,
    EnvironmentFault,
    SimulationSettings,
    Workload,
    draw_settings,
)
from holdfast.workers.dispatch.dispatcher import Dispatcher
from holdfast.workers.readiness import derive_readiness
from holdfast.workers.readiness_facts import gather_facts
from tests.simulation.simulated_panes import SimTmuxClient, SimTmuxServer

UNIVERSE = "u"
REQUEST_QUEUE = "asks"
LEADER_SESSION = "lead"
WORKERS = ("w0", "w1")
TARGETS = (*WORKERS, *WORKERS, leader_pane.LEADER, "nobody")
NEVER_DEAD = {"failures_max": 1 << 31, "expiries_max": 1 << 31}
STORE_ERRORS = (CommitUnknown, StoreFull, Conflict)


class DispatchSettings(SimulationSettings):
    """Settings of a dispatch run. Requests are never dead-lettered."""

    def config_arguments(self) -> dict[str, Any]:
        told = super().config_arguments()
        return {**told, "budgets": {**told["budgets"], REQUEST_QUEUE: NEVER_DEAD}}


def draw_dispatch_settings(tape: ChoiceTape) -> DispatchSettings:
    """Draw the settings of a seed."""
    settings = draw_settings(tape)
    # The panes outlive a restored backup. The meaning of that state is an operator's decision, so
    # it is not checked.
    kept = tuple(name for name in settings.environment_faults if name != EnvironmentFault.RESTORE)
    values = {one.name: getattr(settings, one.name) for one in fields(settings)}
    return DispatchSettings(**{**values, "environment_faults": kept, "workload": Workload.SPINE})


def dispatch_actors(settings: SimulationSettings) -> list[Actor]:
    server = SimTmuxServer()
    for session in WORKERS:
        server.open_pane(session)
    return [
        *(DispatchClient(f"asker{n}") for n in range(settings.senders)),
        *(DispatchPool(f"pool{n}", server) for n in range(1 + settings.workers)),
        *(NotifierActor(f"teller{n}", server) for n in range(settings.operators)),
        LeaderPaneActor("leader", server),
        LeaderActor("chief"),
        ReadinessObserver("observer"),
    ]


class DispatchClient(Actor):
    """Requests dispatches. It does not repeat a request of unknown outcome."""

    requests = 0

    def run_process(self, incarnation: Incarnation) -> None:
        while True:
            try:
                if not incarnation.faults_stopped:
                    self.requests += 1
                    told = [f"{self.name}-{self.requests}", incarnation.tape.pick(TARGETS)]
                    incarnation.store.transact(queue.put, REQUEST_QUEUE, codec.pack(told))
            except STORE_ERRORS:
                incarnation.pause(ms=50)
            except StoreReplaced:
                incarnation.store.reopen()
            incarnation.pause(ms=600)


class DispatchPool(Actor):
    """Processes requests, one at a time, under a claim."""

    def __init__(self, name: str, server: SimTmuxServer) -> None:
        super().__init__(name)
        self._server = server

    def run_process(self, incarnation: Incarnation) -> None:
        owner = f"{self.name}/{incarnation.incarnation_id}"
        budget = RetryBudget(**NEVER_DEAD)
        dispatching = DispatchProtocol(
            incarnation.store,
            UNIVERSE,
            incarnation.clock,
            lambda _: SimTmuxClient(self._server, incarnation),
        )
        while True:
            try:
                claims = incarnation.store.transact(
                    queue.claim, REQUEST_QUEUE, owner, 1, CLAIM_NS, budget
                )
                for claim in claims:
                    self._do(incarnation, dispatching, claim, budget)
            except STORE_ERRORS:
                incarnation.pause(ms=50)
            except ClaimLost:
                incarnation.count_coverage("dispatch: late pool refused")
            except StoreReplaced:
                incarnation.store.reopen()
            incarnation.pause(ms=200)

    def _do(
        self,
        incarnation: Incarnation,
        dispatching: DispatchProtocol,
        claim: Any,
        budget: RetryBudget,
    ) -> None:
        request_id, target = codec.unpack(claim.payload)
        acknowledge = request_id.endswith("7")
        request = PromptRequest(
            request_id=request_id,
            target=target,
            text=f"do {request_id}",
            cli=WorkerCli.CLAUDE,
            socket=self._server.socket,
            acknowledge=acknowledge,
            metadata={},
        )
        try:
            dispatching.run(request)
        except Refused:
            incarnation.count_coverage("dispatch: refused")
        except Busy as error:
            incarnation.count_coverage(f"dispatch: {error.code}")
            incarnation.store.transact(queue.fail, claim, error.code, "", True, 300 * MS, budget)
            return
        incarnation.store.transact(queue.ack, [claim])


class NotifierActor(Actor):
    """A process that ticks the product's Dispatcher."""

    def __init__(self, name: str, server: SimTmuxServer) -> None:
        super().__init__(name)
        self._server = server

    def run_process(self, incarnation: Incarnation) -> None:
        role = Dispatcher(
            incarnation.store,
            universe=UNIVERSE,
            worker=self.name,
            incarnation=incarnation.incarnation_id,
            lease_ttl_s=LEASE_NS / S,
            clock=incarnation.clock,
            server=lambda _: SimTmuxClient(self._server, incarnation),
        )
        while True:
            try:
                role.tick()
                if incarnation.tape.chance(60) and not incarnation.faults_stopped:
                    self._rewind(incarnation)
            except STORE_ERRORS:
                pass
            except StoreReplaced:
                return
            incarnation.pause(ms=300)

    def _rewind(self, incarnation: Incarnation) -> None:
        """Rewind the cursor, as an operator does to replay notifications."""
        state = incarnation.store.read(notifications.read, UNIVERSE)
        try:
            if state is not None and state.cursor:
                incarnation.store.transact(
                    notifications.rewind, UNIVERSE, incarnation.tape.draw(state.cursor)
                )
        except (NotFound, Invalid):
            incarnation.count_coverage("dispatch: rewind refused")


class LeaderPaneActor(Actor):
    """Opens and closes its pane, sets it as leader pane, and clears it at times."""

    def __init__(self, name: str, server: SimTmuxServer) -> None:
        super().__init__(name)
        self._server = server

    def run_process(self, incarnation: Incarnation) -> None:
        while True:
            choice = incarnation.tape.draw(8)
            try:
                if incarnation.faults_stopped:
                    self._ensure_leader_pane(incarnation)
                elif choice < 2:
                    self._set_leader_pane(incarnation)
                elif choice == 2:
                    incarnation.store.transact(leader_pane.clear_leader, UNIVERSE)
                elif choice == 3:
                    self._server.close_pane(LEADER_SESSION)
                elif LEADER_SESSION not in self._server.panes:
                    self._server.open_pane(LEADER_SESSION)
            except STORE_ERRORS:
                pass
            except StoreReplaced:
                incarnation.store.reopen()
            incarnation.pause(ms=900)

    def _set_leader_pane(self, incarnation: Incarnation) -> None:
        incarnation.store.transact(
            leader_pane.set_leader, UNIVERSE, LEADER_SESSION, "claude", self._server.socket
        )

    def _ensure_leader_pane(self, incarnation: Incarnation) -> None:
        if LEADER_SESSION not in self._server.panes:
            self._server.open_pane(LEADER_SESSION)
        if incarnation.store.read(leader_pane.find_leader, UNIVERSE) is None:
            self._set_leader_pane(incarnation)


class LeaderActor(Actor):
    """Acquires, renews and loses the leader lease of the universe."""

    def run_process(self, incarnation: Incarnation) -> None:
        held: Lease | None = None
        while True:
            choice = incarnation.tape.draw(6)
            try:
                if held is None:
                    held = incarnation.store.transact(
                        leader_lease.acquire,
                        UNIVERSE,
                        self.name,
                        incarnation.incarnation_id,
                        LEASE_NS,
                    )
                elif choice < 3:
                    held = incarnation.store.transact(leader_lease.renew, UNIVERSE, held, LEASE_NS)
                elif choice == 3:
                    incarnation.store.transact(leader_lease.release, UNIVERSE, held)
                    held = None
                elif choice == 4:
                    incarnation.store.transact(leader_lease.mark_stale, UNIVERSE)
            except (*STORE_ERRORS, Held):
                pass
            except Fenced:
                held = None
            except StoreReplaced:
                return
            incarnation.pause(ms=700)


class ReadinessObserver(Actor):
    """Reads the readiness of the universe and records it."""

    def run_process(self, incarnation: Incarnation) -> None:
        while True:
            try:
                # No other actor runs between the read and the record.
                facts = incarnation.store.peek(gather_facts, UNIVERSE)
                found = derive_readiness(facts, incarnation.store.now_ns())
                reasons = [[one.reason.value, one.code] for one in found.reasons]
                incarnation.record(
                    "ready", ready=found.ready, reasons=reasons, backlog=found.backlog
                )
            except StoreReplaced:
                incarnation.store.reopen()
            incarnation.pause(ms=400)

"""Actors around dispatches: who asks, pools that type, dispatchers, a leader that comes and goes.

Pools and dispatchers run the product's own code; the panes are simulated (`panes`). Somebody leads the
universe at times, and an observer writes down what readiness says, for the checkers to judge.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from holdfast import codec
from holdfast.adapters.dispatching import Dispatching, Request
from holdfast.authority import authority, panes, replay
from holdfast.authority.outcome import WorkerCli
from holdfast.authority.readiness import derive_readiness
from holdfast.clock import MS, S
from holdfast.durable import queue
from holdfast.durable.lease import Lease
from holdfast.durable.queue import Budget
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
from holdfast.roles.dispatcher import Dispatcher
from holdfast.roles.readiness import gather
from holdfast.runner.faults import Refused
from holdfast.sim.actor import Actor, Life
from holdfast.sim.panes import Room, SimTmux
from holdfast.sim.settings import CLAIM_NS, LEASE_NS, Nemesis, Settings, Workload, swarm
from holdfast.sim.tape import Tape

U = "u"
ASKS = "asks"
LEAD = "lead"
WORKERS = ("w0", "w1")
TARGETS = (*WORKERS, *WORKERS, panes.LEADER, "nobody")
ENDLESS = {"failures_max": 1 << 31, "expiries_max": 1 << 31}
TROUBLE = (CommitUnknown, StoreFull, Conflict)


class DispatchSettings(Settings):
    """A run about dispatches. What was asked for is never given up."""

    def promises(self) -> dict[str, Any]:
        told = super().promises()
        return {**told, "budgets": {**told["budgets"], ASKS: ENDLESS}}


def drawn(tape: Tape) -> DispatchSettings:
    """The settings that a seed draws."""
    settings = swarm(tape)
    # What a restored backup means to panes that went on is for a person to say.
    kept = tuple(name for name in settings.nemesis if name != Nemesis.RESTORE)
    given = {one.name: getattr(settings, one.name) for one in fields(settings)}
    return DispatchSettings(**{**given, "nemesis": kept, "workload": Workload.SPINE})


def actors(settings: Settings) -> list[Actor]:
    room = Room()
    for session in WORKERS:
        room.open(session)
    return [
        *(Asker(f"asker{n}") for n in range(settings.senders)),
        *(Pool(f"pool{n}", room) for n in range(1 + settings.workers)),
        *(Teller(f"teller{n}", room) for n in range(settings.operators)),
        Leader("leader", room),
        Chief("chief"),
        Observer("observer"),
    ]


class Asker(Actor):
    """Asks for dispatches. What is unknown is not asked for again."""

    asked = 0

    def live(self, life: Life) -> None:
        while True:
            try:
                if not life.calm:
                    self.asked += 1
                    told = [f"{self.name}-{self.asked}", life.tape.pick(TARGETS)]
                    life.store.transact(queue.put, ASKS, codec.pack(told))
            except TROUBLE:
                life.rest(ms=50)
            except StoreReplaced:
                life.store.reopen()
            life.rest(ms=600)


class Pool(Actor):
    """Does what was asked for, one at a time, under a claim."""

    def __init__(self, name: str, room: Room) -> None:
        super().__init__(name)
        self._room = room

    def live(self, life: Life) -> None:
        owner = f"{self.name}/{life.incarnation}"
        budget = Budget(**ENDLESS)
        dispatching = Dispatching(life.store, U, life.clock, lambda _: SimTmux(self._room, life))
        while True:
            try:
                claims = life.store.transact(queue.claim, ASKS, owner, 1, CLAIM_NS, budget)
                for claim in claims:
                    self._do(life, dispatching, claim, budget)
            except TROUBLE:
                life.rest(ms=50)
            except ClaimLost:
                life.seen("dispatch: late pool refused")
            except StoreReplaced:
                life.store.reopen()
            life.rest(ms=200)

    def _do(self, life: Life, dispatching: Dispatching, claim: Any, budget: Budget) -> None:
        request_id, target = codec.unpack(claim.payload)
        acknowledge = request_id.endswith("7")
        request = Request(
            request_id=request_id,
            target=target,
            text=f"do {request_id}",
            cli=WorkerCli.CLAUDE,
            socket=self._room.socket,
            acknowledge=acknowledge,
            metadata={},
        )
        try:
            dispatching.run(request)
        except Refused:
            life.seen("dispatch: refused")
        except Busy as error:
            life.seen(f"dispatch: {error.code}")
            life.store.transact(queue.fail, claim, error.code, "", True, 300 * MS, budget)
            return
        life.store.transact(queue.ack, [claim])


class Teller(Actor):
    """A process whose loop is the product's own Dispatcher, ticked by hand."""

    def __init__(self, name: str, room: Room) -> None:
        super().__init__(name)
        self._room = room

    def live(self, life: Life) -> None:
        role = Dispatcher(
            life.store,
            universe=U,
            worker=self.name,
            incarnation=life.incarnation,
            lease_ttl_s=LEASE_NS / S,
            clock=life.clock,
            server=lambda _: SimTmux(self._room, life),
        )
        while True:
            try:
                role.tick()
                if life.tape.chance(60) and not life.calm:
                    self._rewind(life)
            except TROUBLE:
                pass
            except StoreReplaced:
                return
            life.rest(ms=300)

    def _rewind(self, life: Life) -> None:
        """Somebody wants to see it all again."""
        state = life.store.read(replay.read, U)
        try:
            if state is not None and state.cursor:
                life.store.transact(replay.rewind, U, life.tape.draw(state.cursor))
        except (NotFound, Invalid):
            life.seen("dispatch: rewind refused")


class Leader(Actor):
    """Opens and closes its pane, names it, and once takes the name back."""

    def __init__(self, name: str, room: Room) -> None:
        super().__init__(name)
        self._room = room

    def live(self, life: Life) -> None:
        while True:
            choice = life.tape.draw(8)
            try:
                if life.calm:
                    self._settle(life)
                elif choice < 2:
                    self._name(life)
                elif choice == 2:
                    life.store.transact(panes.clear_leader, U)
                elif choice == 3:
                    self._room.close(LEAD)
                elif LEAD not in self._room.panes:
                    self._room.open(LEAD)
            except TROUBLE:
                pass
            except StoreReplaced:
                life.store.reopen()
            life.rest(ms=900)

    def _name(self, life: Life) -> None:
        life.store.transact(panes.set_leader, U, LEAD, "claude", self._room.socket)

    def _settle(self, life: Life) -> None:
        if LEAD not in self._room.panes:
            self._room.open(LEAD)
        if life.store.read(panes.leader, U) is None:
            self._name(life)


class Chief(Actor):
    """Leads the universe, more or less."""

    def live(self, life: Life) -> None:
        held: Lease | None = None
        while True:
            choice = life.tape.draw(6)
            try:
                if held is None:
                    held = life.store.transact(
                        authority.acquire, U, self.name, life.incarnation, LEASE_NS
                    )
                elif choice < 3:
                    held = life.store.transact(authority.renew, U, held, LEASE_NS)
                elif choice == 3:
                    life.store.transact(authority.release, U, held)
                    held = None
                elif choice == 4:
                    life.store.transact(authority.mark_stale, U)
            except (*TROUBLE, Held):
                pass
            except Fenced:
                held = None
            except StoreReplaced:
                return
            life.rest(ms=700)


class Observer(Actor):
    """Asks whether the universe is ready, and writes the answer down."""

    def live(self, life: Life) -> None:
        while True:
            try:
                # Nothing happens between the look and the note.
                facts = life.store.peek(gather, U)
                found = derive_readiness(facts, life.store.now_ns())
                reasons = [[one.reason.value, one.code] for one in found.reasons]
                life.note("ready", ready=found.ready, reasons=reasons, backlog=found.backlog)
            except StoreReplaced:
                life.store.reopen()
            life.rest(ms=400)

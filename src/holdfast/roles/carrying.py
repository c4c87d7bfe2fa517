"""What a world worker carries for the adapter pools of its process.

A receipt is what its world goes on with. Where the world is hosted in the process of the pool, its
next cycle is run before the receipt is delivered, and one transaction settles the effect, journals the
receipt with the next number of the inbox, and claims the next effects for the pool: one commit for a
step of a chain instead of three.

- The cycle names the effects that it settles. If one of them is not the pool's to settle any more (its
  claim was lost, it was cancelled), or somebody sent to the world meanwhile, nothing of the cycle
  counts: its effects are settled and delivered as ever. A world that was mistaken so goes the ordinary
  way for a while.
- Parcels come from the threads of runners and are worked off by the worker's alone. Some are under way
  while the next are made, so that neither the writer nor the worker waits for the other.
- A world whose cycle is under way is nobody else's until that is answered.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from holdfast import codec
from holdfast.clock import S
from holdfast.config import CYCLES_BYTES_MAX
from holdfast.durable.inbox import Ingress
from holdfast.errors import CommitUnknown, Conflict, HoldfastError, from_wire
from holdfast.messages import Intent, TimerSet, receipt_ingress
from holdfast.roles.firing import ingress_of
from holdfast.roles.receipts import receive
from holdfast.runner import claims
from holdfast.runner.parcel import Parcel
from holdfast.runner.work import Outcome
from holdfast.store.api import Future, Pending, Store, Txn
from holdfast.world import publish
from holdfast.world.cycle import Carried, Cycle, commit
from holdfast.world.host import Host
from holdfast.world.timers import Alarm

# Transactions under way, and the outcomes of one.
AHEAD = 3
OUTCOMES_MIN = 16
OUTCOMES_MAX = 64
# How long a world that was mistaken about its inbox is not carried.
MISTAKEN_S = 1.0


class Worker(Protocol):
    """What carrying needs of the worker, in whose thread it happens."""

    store: Store
    universe: str

    def carriable(self, world_id: str) -> bool:
        """Whether a world is hosted here and sound. Others may ask, from their threads."""

    def drain_all(self, world_ids: Sequence[str]) -> dict[str, list[Ingress]]:
        """What waits for those of them whose state is in memory."""

    def host_of(self, world_id: str) -> Host: ...

    def prepared(
        self, world_id: str, waiting: list[Ingress], carried: list[Carried]
    ) -> Cycle | None:
        """Run a world's reducers; None if it had to be parked."""

    def committed(
        self, world_id: str, cycle: Cycle, error: HoldfastError | None, now_ns: int
    ) -> HoldfastError | None: ...


class Ringing(Protocol):
    """What wakes the worker."""

    @property
    def rung(self) -> threading.Event: ...
    def ring(self) -> None: ...


class Ring(NamedTuple):
    """A timer that is due, of a world that is hosted here."""

    intent: Intent
    timer: TimerSet
    alarm: Alarm


class Round:
    """Timers that are due, handed over by the timer worker, who waits until they are answered for.
    What is not done then fires the ordinary way."""

    def __init__(self, rings: list[Ring]) -> None:
        self.rings = rings
        self.answered = threading.Event()
        # How many of them their worlds have heard.
        self.told = 0
        # Whether one of them was not what it seemed to be: others fire timers here, too.
        self.mistaken = False


class Brought(NamedTuple):
    """What was sent: parcels, the cycles that follow, and the answer to all of it."""

    parcels: list[Parcel]
    cycles: list[tuple[str, Cycle]]
    future: Future[Any]
    # Whether it is the commit of what runners have finished, and not of what came by inboxes alone.
    carries: bool
    round: Round | None = None


class Carriage:
    """The carrier of a process. Parcels are taken while it is open."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._parcels: deque[Parcel] = deque()
        self._bell: Ringing | None = None
        self._sent: deque[Brought] = deque()
        self._under_way: set[str] = set()
        self._mistaken: dict[str, int] = {}
        # By queue: runners that have nothing to do.
        self._offers: dict[str, Parcel] = {}
        self._offering = threading.Lock()
        self._rounds: deque[Round] = deque()

    def open(self, bell: Ringing) -> None:
        """From now on parcels are taken; each, and each answer, rings."""
        self._bell = bell

    def close(self) -> None:
        """No more. What was not begun is taken back by whoever sent it."""
        self._bell = None

    # -- for runners ---------------------------------------------------------------------------

    def carries(self, outcome: Outcome) -> bool:
        joined = outcome.work.joined
        # What is billed, too, goes the ordinary way.
        if len(joined) != 1 or joined[0][0] is not receive:
            return False
        intent = received(outcome)
        if intent.universe_id != self._worker.universe or intent.world_id in self._under_way:
            return False
        return intent.world_id not in self._mistaken and self._worker.carriable(intent.world_id)

    def carry(self, parcel: Parcel) -> bool:
        bell = self._bell
        if bell is None:
            return False
        self._parcels.append(parcel)
        bell.ring()
        return True

    def withdraw(self, parcel: Parcel) -> bool:
        try:
            self._parcels.remove(parcel)
        except ValueError:
            return False
        return True

    def offer(self, parcel: Parcel) -> bool:
        assert parcel.taking is not None
        with self._offering:
            if self._bell is None or parcel.taking[0] in self._offers:
                return False
            self._offers[parcel.taking[0]] = parcel
            return True

    def retract(self, parcel: Parcel) -> bool:
        assert parcel.taking is not None
        with self._offering:
            if self._offers.get(parcel.taking[0]) is not parcel:
                return False
            del self._offers[parcel.taking[0]]
            return True

    # -- for the timer worker --------------------------------------------------------------------

    def rings(self, world_id: str) -> bool:
        """Whether a timer of this world may be handed over."""
        return (
            self._bell is not None
            and world_id not in self._under_way
            and world_id not in self._mistaken
            and self._worker.carriable(world_id)
        )

    def go_round(self, round: Round) -> None:
        bell = self._bell
        if bell is None:
            round.answered.set()
            return
        self._rounds.append(round)
        bell.ring()

    def call_off(self, round: Round) -> bool:
        """Take a round back that was not begun."""
        try:
            self._rounds.remove(round)
        except ValueError:
            return False
        return True

    # -- for the worker ------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return bool(self._sent)

    @property
    def waiting(self) -> bool:
        """Whether there is something to make and room for it."""
        if self._rounds:
            return True
        if not self._parcels:
            return False
        return len(self._sent) < AHEAD or sum(one.carries for one in self._sent) < AHEAD

    def has(self, world_id: str) -> bool:
        """Whether a world's cycle is under way here."""
        return world_id in self._under_way

    def offers(self, cycles: Iterable[Cycle]) -> list[Parcel]:
        """Take the offers of runners for whom cycles have something."""
        if not self._offers:
            return []
        wanted = {
            publish.effects(intent.universe_id, intent.effect_kind)
            for cycle in cycles
            for intent in cycle.intents
        }
        with self._offering:
            names = wanted & self._offers.keys()
            return [self._offers.pop(name) for name in names]

    def turn(self, stop_ns: int) -> bool:
        """Take answers that are there, and send what waits; whether anything was done."""
        if self._mistaken:
            now_ns = self._worker.store.now_ns()
            self._mistaken = {w: at_ns for w, at_ns in self._mistaken.items() if at_ns > now_ns}
        done = False
        while True:
            if self._sent and self._sent[0].future.done():
                self._brought(self._sent.popleft())
            elif self._rounds:
                self._go_round(self._rounds.popleft(), stop_ns)
            elif self.waiting:
                self._bring(self._some(), stop_ns)
            else:
                return done
            done = True

    def follow(
        self, cycles: list[tuple[str, Cycle]], offers: list[Parcel], future: Future[Any]
    ) -> None:
        """See to the answer to cycles that were sent with nothing but offers."""
        self._follow(Brought(offers, cycles, future, carries=False))

    def _follow(self, brought: Brought) -> None:
        self._under_way.update(world_id for world_id, _ in brought.cycles)
        self._sent.append(brought)
        if self._bell is not None:
            brought.future.tell(self._bell.rung)

    def finish(self) -> None:
        """Wait for what is under way, and take no more."""
        self.close()
        while self._sent:
            self._brought(self._sent.popleft())
        while self._rounds:
            self._rounds.popleft().answered.set()

    def _go_round(self, round: Round, stop_ns: int) -> None:
        """Run the cycles in which worlds hear their timers, and send them."""
        try:
            cycles = self._ringing(round, stop_ns)
            if not cycles:
                round.answered.set()
                return
            offers = self.offers(cycle for _, cycle in cycles)
            future = self._worker.store.submit(bring, offers, [cycle for _, cycle in cycles])
        except BaseException:
            round.answered.set()
            raise
        self._follow(Brought(offers, cycles, future, carries=False, round=round))

    def _ringing(self, round: Round, stop_ns: int) -> list[tuple[str, Cycle]]:
        due: dict[str, list[Ring]] = {}
        for ring in round.rings:
            due.setdefault(ring.intent.world_id, []).append(ring)
        arriving = {
            world_id: [
                (
                    codec.pack(ingress_of(one.intent, one.timer)),
                    Carried(None, one.intent.intent_hash, one.alarm),
                )
                for one in rings
            ]
            for world_id, rings in due.items()
        }
        return self._cycles(arriving, stop_ns)

    def _some(self) -> list[Parcel]:
        """The next parcels. All that wait would soon be all there are, under way at the same time."""
        waiting = sum(len(parcel.outcomes) for parcel in list(self._parcels))
        most = min(max(waiting // AHEAD, OUTCOMES_MIN), OUTCOMES_MAX)
        some: list[Parcel] = []
        size = 0
        while size < most:
            try:
                parcel = self._parcels.popleft()
            except IndexError:
                break
            some.append(parcel)
            size += len(parcel.outcomes)
        return some

    def _bring(self, parcels: list[Parcel], stop_ns: int) -> None:
        """Run the cycles that follow from parcels, and send all of it."""
        try:
            cycles = self._following(parcels, stop_ns)
            if not cycles:
                for parcel in parcels:
                    parcel.settled(parcel.outcomes, None)
                return
            parcels += self.offers(cycle for _, cycle in cycles)
            future = self._worker.store.submit(bring, parcels, [cycle for _, cycle in cycles])
        except BaseException:
            for parcel in parcels:
                parcel.refused(CommitUnknown(txn_no=0, why="the worker failed"))
            raise
        self._follow(Brought(parcels, cycles, future, carries=True))

    def _following(self, parcels: list[Parcel], stop_ns: int) -> list[tuple[str, Cycle]]:
        ended: dict[str, list[Outcome]] = {}
        for parcel in parcels:
            for outcome in parcel.outcomes:
                ended.setdefault(received(outcome).world_id, []).append(outcome)
        arriving = {
            world_id: [
                (body_of(one), Carried(one.work.claim.token, received(one).intent_hash))
                for one in some
            ]
            for world_id, some in ended.items()
        }
        return self._cycles(arriving, stop_ns)

    def _cycles(
        self, arriving: dict[str, list[tuple[bytes, Carried]]], stop_ns: int
    ) -> list[tuple[str, Cycle]]:
        """Cycles of worlds in which something arrives that is in no inbox yet."""
        worker = self._worker
        ours = [w for w in arriving if w not in self._under_way and worker.carriable(w)]
        cycles: list[tuple[str, Cycle]] = []
        size = 0
        for world_id, waiting in worker.drain_all(ours).items():
            host, some = worker.host_of(world_id), arriving[world_id]
            if len(waiting) + len(some) >= host.limit:
                continue
            if size > CYCLES_BYTES_MAX or host.clock.mono_ns() >= stop_ns:
                break
            last = waiting[-1].seq if waiting else host.cursor
            expected = [Ingress(seq, None, body, 0) for seq, (body, _) in enumerate(some, last + 1)]
            carried = [one for _, one in some]
            cycle = worker.prepared(world_id, waiting + expected, carried)
            if cycle is not None:
                cycles.append((world_id, cycle))
                size += cycle.size
        return cycles

    def _brought(self, brought: Brought) -> None:
        """Take the outcome of parcels and of their cycles."""
        parcels, cycles, future, _, round = brought
        told: list[HoldfastError | None]
        try:
            told = answers(future, parcels, [cycle for _, cycle in cycles])
        except HoldfastError as error:
            told = [error] * len(cycles)
        self._under_way.difference_update(world_id for world_id, _ in cycles)
        trouble: HoldfastError | None = None
        now_ns = self._worker.store.now_ns()
        for (world_id, cycle), answer in zip(cycles, told, strict=True):
            if isinstance(answer, Conflict):
                self._mistaken[world_id] = now_ns + int(MISTAKEN_S * S)
            trouble = self._worker.committed(world_id, cycle, answer, now_ns) or trouble
        if round is not None:
            round.mistaken = any(isinstance(answer, Conflict) for answer in told)
            heard = zip(cycles, told, strict=True)
            round.told = sum(len(cycle.carried) for (_, cycle), error in heard if error is None)
            round.answered.set()
        if trouble is not None:
            raise trouble


def bring(
    txn: Txn, parcels: list[Parcel], cycles: list[Cycle]
) -> tuple[Pending[Any], dict[int, Pending[Any]]]:
    """The transaction of parcels: go on and settle, claim."""
    committed = commit(txn, cycles)
    # What several parcels of one runner ask for is claimed at once; the last one brings it.
    asking: dict[tuple[str, str], tuple[int, tuple[Any, ...]]] = {}
    for index, parcel in enumerate(parcels):
        if parcel.taking is not None:
            name, timers, owner, limit, *rest = parcel.taking
            _, before = asking.get((name, owner), (index, (name, timers, owner, 0)))
            asking[name, owner] = index, (name, timers, owner, before[3] + limit, *rest)
    return committed, {index: claims.take(txn, *taking) for index, taking in asking.values()}


def answers(
    future: Future[Any], parcels: list[Parcel], cycles: Sequence[Cycle]
) -> list[HoldfastError | None]:
    """The answer to each cycle of `bring`, or of `commit`; whoever waits for a parcel has his. `cycles`
    are those that carry something."""
    try:
        result = future.result()
    except HoldfastError as error:
        for parcel in parcels:
            parcel.refused(error)
        if not parcels or error.retryable or isinstance(error, CommitUnknown):
            raise
        # What became of all of it is the fault of no world.
        raise Conflict(why=error.code) from error
    committed, taken = result if isinstance(result, tuple) else (Pending().fill(result), {})
    told = [None if one is None else from_wire(one) for one in committed.value]
    done = {
        one.token
        for cycle, error in zip(cycles, told, strict=False)
        if error is None
        for one in cycle.carried
    }
    for index, parcel in enumerate(parcels):
        left = [one for one in parcel.outcomes if one.work.claim.token not in done]
        claimed = taken.get(index)
        parcel.settled(left, None if claimed is None else claimed.value)
    return told


def body_of(outcome: Outcome) -> bytes:
    """What its receipt is as an ingress: the same bytes as if it came by the inbox."""
    [(_, (intent, receipt))] = outcome.work.joined
    return codec.pack(receipt_ingress(receipt, correlation_id=intent.correlation_id))


def received(outcome: Outcome) -> Intent:
    """The effect that an outcome brings a receipt for."""
    [(_, (intent, _))] = outcome.work.joined
    assert isinstance(intent, Intent)
    return intent

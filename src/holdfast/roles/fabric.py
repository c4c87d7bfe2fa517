"""The mail of a universe that its worlds' commits could not deliver themselves (protocol F).

    Sorting    every such message, once: into the inbox of a world of this store, or on into the lane
               of another store, or back as the error `no_route` (`sorting`)
    Lane       one for each universe in another store: delivers there, a batch to a commit, and then
               ends the batch here with its receipts

A lane's runner announces its route in the store: every pool sorts, and one that was started without
this route puts mail into the lane, too.

A crash between the two commits of a lane repeats the batch, and the destination, which knows each
message by its id, answers `already_enqueued`. So a message is in one inbox once, and its sender is
told once, whatever dies.

A store that cannot be reached loses no mail and delays no other: its lane lets the mail lie, looks
again with backoff by one message at a time, and nothing else waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from holdfast import codec
from holdfast.clock import SYSTEM, Clock
from holdfast.config import ROUTE_ANNOUNCE_EVERY_NS, ROUTE_LOOK_NS_MAX
from holdfast.durable import queue
from holdfast.durable.queue import Claim
from holdfast.errors import CommitUnknown, HoldfastError, Invalid, Overloaded
from holdfast.messages import FABRIC_SEND, Intent
from holdfast.retry import Backoff, spread
from holdfast.roles.crew import certain
from holdfast.roles.peers import Peers, Unreachable, Vouch, open_existing
from holdfast.roles.sorting import Returning, Sorting, goes_by_lane, look_again
from holdfast.runner import Runner, Work
from holdfast.runner.faults import transient
from holdfast.runner.tick import Tick
from holdfast.store.api import Store, Txn
from holdfast.world import fabric, outbox, publish
from holdfast.world.catalog import check_universe
from holdfast.world.fabric import Accepted

# A claim, by its seq and number.
Place = tuple[int, int]

BATCH = 100
# A runner holds no more than it handles and what it has not settled yet.
HELD_MAX = 4 * BATCH
# One commit into another store holds about this much.
BATCH_BYTES_MAX = 8 * 1024 * 1024
# A lane's claim covers a commit in another store.
LANE_LEASE_MS = 5_000
# A pool has hundreds of lanes, mostly idle. Mail rings for who works it off; this is for rings that were lost.
MAIL_IDLE_MS = 5_000
# Lanes of one pool; each has a thread.
LANES_MAX = 256
LANE_BACKOFF = Backoff(max_ns=30_000_000_000)
SORTING_BACKOFF = Backoff(max_ns=ROUTE_LOOK_NS_MAX)


class Fabric:
    """The runners that work off a universe's waiting mail, and the stores they open for it.

    `peers` says where other universes are: by URL, or as stores that are open, and stay so. `routes`
    says it of universes that nobody named, by URL: a lane is made when the first mail for one comes, and
    mail is brought there only once that store knows the universe, for a default takes any name, misspelled
    ones too. `open` opens a URL; it must not make a store where there is none.
    """

    def __init__(
        self,
        store: Store,
        *,
        universe: str,
        worker: str,
        peers: Mapping[str, str | Store] | None = None,
        routes: Callable[[str], str | None] | None = None,
        open: Callable[[str], Store] | None = None,
        vouch: Vouch | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        check_peers(universe, peers or {})
        self._store = store
        self._universe = universe
        self._worker = worker
        self._clock = clock
        self._routes = routes
        self._peers = Peers(peers or {}, open or open_existing, vouch)
        self._lanes: set[str] = set()
        # Starts a runner that is made later; whether it could.
        self.hire: Callable[[Runner], bool] = lambda runner: False
        self.runners: list[Runner] = [
            Runner(
                store,
                publish.effects(universe, FABRIC_SEND),
                Sorting(store, universe, self._leads_to),
                worker=f"{worker}/{FABRIC_SEND}",
                policy=replace(
                    certain(max_batch=BATCH),
                    backoff=SORTING_BACKOFF,
                    idle_sleep_max_ms=MAIL_IDLE_MS,
                ),
                clock=clock,
            ),
            *(self._lane(peer) for peer in peers or ()),
        ]
        if routes is not None:
            # What an earlier pool had a lane for, and may have left mail in.
            for peer in store.read(outbox.routes, universe, LANES_MAX):
                url = routes(peer)
                if peer in self._lanes:
                    continue
                if url is not None:
                    self._peers.add(peer, url)
                    self.runners.append(self._lane(peer, looked_for=True))
                elif store.read(goes_by_lane, universe, peer):
                    self.runners.append(self._returning(peer, len(self.runners)))

    def _leads_to(self, universe: str) -> bool:
        """Whether there is a lane to a universe, perhaps from now on. For the sorter alone."""
        if universe in self._lanes:
            return True
        url = None if self._routes is None else self._routes(universe)
        if url is None or len(self._lanes) >= LANES_MAX:
            return False
        # First of all: whoever starts after this one has died finds the lane by it.
        self._store.transact(outbox.announce, self._universe, universe)
        self._peers.add(universe, url)
        runner = self._lane(universe, looked_for=True)
        if not self.hire(runner):
            self._lanes.discard(universe)
            return False
        return True

    def _lane(self, peer: str, *, looked_for: bool = False) -> Runner:
        self._lanes.add(peer)
        return LaneRunner(
            self._store,
            outbox.lane(self._universe, peer),
            Lane(self._store, self._peers, peer, self._clock, looked_for=looked_for),
            announced=Announced(self._store, self._universe, peer, self._clock),
            worker=f"{self._worker}/{FABRIC_SEND}/{len(self._lanes)}",
            policy=replace(
                certain(max_batch=BATCH),
                lease_ttl_ms=LANE_LEASE_MS,
                idle_sleep_max_ms=MAIL_IDLE_MS,
            ),
            clock=self._clock,
        )

    def _returning(self, peer: str, number: int) -> Runner:
        returning = Returning(self._store, peer, self._clock)
        return Runner(
            self._store,
            outbox.lane(self._universe, peer),
            returning,
            throttle=returning,
            worker=f"{self._worker}/{FABRIC_SEND}<{number}",
            policy=certain(max_batch=BATCH),
            clock=self._clock,
        )

    def close(self) -> None:
        self._peers.close()


def check_peers(universe: str, peers: Mapping[str, str | Store]) -> None:
    for peer in peers:
        check_universe(peer)
        if peer == universe:
            raise Invalid(what="stores", universe=peer, why="it is the one that runs here")


class Announced:
    """The route of a lane, announced now and then for pools that do not have it."""

    def __init__(self, store: Store, universe: str, peer: str, clock: Clock) -> None:
        self._store = store
        self._route = (universe, peer)
        self._clock = clock
        self._next_ns = 0

    def again(self) -> None:
        now_ns = self._clock.mono_ns()
        if now_ns < self._next_ns:
            return
        try:
            self._store.transact(outbox.announce, *self._route)
        except HoldfastError as error:
            if not (transient(error) or isinstance(error, CommitUnknown)):
                raise
            return  # at the next tick, then
        self._next_ns = now_ns + ROUTE_ANNOUNCE_EVERY_NS


class LaneRunner(Runner):
    """The runner of a lane: while it ticks, there is a route."""

    def __init__(
        self, store: Store, queue: str, lane: Lane, *, announced: Announced, **options: Any
    ) -> None:
        super().__init__(store, queue, lane, throttle=lane, **options)
        self._lane = lane
        self._announced = announced

    def request_stop(self) -> None:
        super().request_stop()
        self._lane.hasten(self.policy.stop_grace_ms / 1000)

    def tick(self) -> Tick:
        tick = super().tick()
        self._announced.again()
        return tick


class Lane:
    """The handler of mail to one universe in another store, and the throttle of its runner.

    The first message of a batch takes along what else its runner holds, so that the other store
    commits once for all of them; those find their answers ready.
    """

    def __init__(
        self, store: Store, peers: Peers, universe: str, clock: Clock, *, looked_for: bool = False
    ) -> None:
        """`looked_for`: nobody named this universe, so it must be known where it is said to be."""
        self._store = store
        self._peers = peers
        self._universe = universe
        self._clock = clock
        self._known = not looked_for
        self._answers: dict[Place, Accepted] = {}
        # What was taken along before, and is held until its end is committed here.
        self._told: set[Place] = set()
        # How often in a row the store could not be reached, and when to try again.
        self._failures = 0
        self._again_ns = 0

    def __call__(self, work: Work) -> None:
        place = _place(work.claim)
        if place not in self._answers:
            if not self._is_known(work):
                look_again(self._store, work, codec.unpack_as(Intent, work.payload), self._universe)
                return
            self._answers = self._deliver(work)
            self._told |= self._answers.keys()
        found = self._answers.pop(place, None)
        if found is None:
            return  # nobody wants it any more
        if found.status == fabric.FULL:
            raise Overloaded(universe=self._universe, world_id=found.dest_world, retry_after_s=1.0)
        work.join(outbox.conclude, codec.unpack_as(Intent, work.payload), found)

    def hasten(self, seconds: float) -> None:
        """Wait no longer than this for a store that is away."""
        self._peers.stop_within(seconds)

    # -- the throttle --------------------------------------------------------------------------

    def stock(self, wanted: int) -> int:
        """All there is, one to look whether the store is back, or none until it is time to look."""
        if self._failures == 0:
            return wanted
        return min(wanted, 1) if self.wait_ns() == 0 else 0

    take = stock

    def wait_ns(self) -> int:
        return max(0, self._again_ns - self._clock.mono_ns())

    # -- inside --------------------------------------------------------------------------------

    def _is_known(self, work: Work) -> bool:
        """Whether the universe is where it is said to be, if that is to be asked."""
        if not self._known:
            with self._reaching(work) as there:
                self._known = there.read(fabric.known, self._universe)
        return self._known

    def _deliver(self, work: Work) -> dict[Place, Accepted]:
        batch, held = self._store.read(batch_with, work.claim, self._told)
        self._told &= held
        if not batch:
            return {}
        now_ns = self._store.now_ns()
        with self._reaching(work) as there:
            answers: list[Accepted] = there.transact(
                fabric.accept_many,
                [(intent, now_ns - claim.enqueued_ns) for claim, intent in batch],
            )
        return {_place(claim): answer for (claim, _), answer in zip(batch, answers, strict=True)}

    @contextmanager
    def _reaching(self, work: Work) -> Iterator[Store]:
        """The other store. Whatever goes wrong there is `Unreachable`, and it is left alone for a while."""
        if self.wait_ns():
            raise Unreachable(universe=self._universe, why="it was not reached a moment ago")
        there: Store | None = None
        try:
            there = self._peers.store(self._universe)
            yield there
        except Exception as error:
            self._failures += 1
            delay_ns = LANE_BACKOFF.delay_ns(self._failures, spread(work.seq, self._failures))
            self._again_ns = self._clock.mono_ns() + delay_ns
            if there is not None:
                self._peers.drop(self._universe, there, error)
            raise Unreachable(
                universe=self._universe, why=f"{type(error).__name__}: {error}"
            ) from error
        self._failures = 0
        self._again_ns = 0


def batch_with(
    txn: Txn, first: Claim, told: set[Place]
) -> tuple[list[tuple[Claim, Intent]], set[Place]]:
    """A claim and others of its owner that were not `told`, as one commit takes them, in the order they
    were sent; and all that the owner holds. Mail that was cancelled or answered is left out.
    """
    others = queue.claims_of(txn, first.queue, first.owner, HELD_MAX)
    batch: list[tuple[Claim, Intent]] = []
    size = 0
    for claim in [first, *(one for one in others if one.seq != first.seq)]:
        if _place(claim) in told:
            continue
        payload = queue.payload_of(txn, claim)
        size += len(payload)
        if batch and (size > BATCH_BYTES_MAX or len(batch) == BATCH):
            break
        intent = codec.unpack_as(Intent, payload)
        if outbox.open_mail(txn, intent):
            batch.append((claim, intent))
    return sorted(batch, key=lambda pair: pair[0].seq), {_place(claim) for claim in others}


def _place(claim: Claim) -> Place:
    return claim.seq, claim.number

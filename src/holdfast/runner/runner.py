"""The runner: the one loop that works off a queue, whatever is in it.

    tick    settle what finished → claim from queue and timers → handle → settle
    loop    tick, then sleep until something is put, due, finished or to be stopped

- A handler runs outside any transaction, under a claim. Its item is acknowledged, requeued or buried
  under that claim's token: nothing is settled twice, and nothing after its time.
- A tick settles all in one commit, unless handlers run long: then what is finished goes first, and
  what is not begun is given back while its claim still has time.
- A store that is busy, or says conflict or not found, makes the tick busy; it never ends the loop.
- A crash (a BaseException that is no Exception) goes right through and settles nothing.

`tick` may be driven directly, by the simulator or by a host with a scheduler of its own; without a
crew no thread is started then. With `concurrency` above 1 handlers run in a crew of threads, and a
tick only gives and collects.
"""

from __future__ import annotations

import asyncio
import threading
import typing
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from holdfast.clock import MS, SYSTEM, Clock
from holdfast.durable import queue as queues
from holdfast.durable.queue import Admission, Claim
from holdfast.errors import CommitUnknown, HoldfastError, Invalid, Timeout
from holdfast.runner import boot, claims
from holdfast.runner.alone import SUSPECT, Alone
from holdfast.runner.boot import LIFE, Event, NotRunning, State
from holdfast.runner.claimer import Claimer
from holdfast.runner.counters import Counters
from holdfast.runner.crew import NUDGE_NS, Crew, Tasks, Threads
from holdfast.runner.faults import Fault, transient
from holdfast.runner.gate import Gate
from holdfast.runner.hooks import Hooks, LogSink, ReplayHook
from holdfast.runner.loop import Loop
from holdfast.runner.policy import Policy
from holdfast.runner.settle import Desk
from holdfast.runner.tick import Tick
from holdfast.runner.work import AsyncHandler, Handler, Outcome, Work, attempt, attempt_async
from holdfast.store.api import Store

# Threads of one runner's crew.
CONCURRENCY_MAX = 1_000
# How often a crew whose claims are tended is looked after.
ATTEND_NS = 50 * MS
# What was claimed and has waited so long for a hand is given back.
UNBEGUN_NS = 1_000 * MS
# How long a suspect keeps all others from being begun.
SOLITUDE_NS = 2_000 * MS


class Throttle(Protocol):
    """Something that bounds how many items may be begun now."""

    def stock(self, wanted: int) -> int:
        """How many of those wanted may be begun now or very soon: so many are claimed."""

    def take(self, wanted: int) -> int:
        """How many of those wanted may be begun now. They are begun at once."""

    def wait_ns(self) -> int:
        """How long it allows nothing more."""


class Runner:
    def __init__(
        self,
        store: Store,
        queue: str,
        handler: Handler | AsyncHandler,
        *,
        worker: str,
        timers: str | None = None,
        policy: Policy | None = None,
        clock: Clock = SYSTEM,
        sleep: Callable[[float], object] | None = None,
        gate: Gate | None = None,
        concurrency: int = 1,
        loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
        alone: Alone | None = None,
        throttle: Throttle | None = None,
        admission: Callable[[], Admission | None] | None = None,
        counters: Counters | None = None,
        log: LogSink | None = None,
        replay: ReplayHook | None = None,
        bootstrap: bool = False,
    ) -> None:
        """`timers` names a second queue, of items put with a `not_before_ns`.

        `sleep` is what the loop rests with instead of waiting for the store to call. With a `loop`
        the handler is a coroutine function, and its calls are tasks of that loop. Runners that
        share an `alone` let a suspect run by itself.
        """
        if not 1 <= concurrency <= CONCURRENCY_MAX:
            raise Invalid(what="concurrency", found=concurrency, expected=f"1 to {CONCURRENCY_MAX}")
        if timers == queue:
            raise Invalid(what="timers", found=timers, expected="another name than the queue's")
        self.worker = worker
        self.counters = counters or Counters()
        self.hooks = Hooks(worker, self.counters, log, replay)
        self.last_progress_ns = clock.mono_ns()
        self._store = store
        self._queue, self._timers = queue, timers
        self._handler = handler
        self._policy = policy or Policy.default()
        self._clock = clock
        self._gate = gate or Gate()
        self._concurrency = concurrency
        self._throttle = throttle
        self._bootstrap = bootstrap
        self._state = LIFE.initial
        self._life = threading.Lock()
        self._event_loop = loop
        self._alone = alone
        self._admission = admission
        # Claimed and not with the crew: those that run alone, and those that the throttle holds.
        self._suspects: deque[Work] = deque()
        self._paced: deque[Work] = deque()
        self._alone_since_ns = 0
        self._stop_by_ns = 0
        self._attend_at_ns = 0
        self._extend_at_ns = 0
        self._withdrawn = 0
        self._crew: Crew | None = None
        self._fatal: Exception | None = None
        self._sleep = sleep
        self._begin()
        if alone is not None:
            alone.enter(self)

    # -- life ----------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        return self._state

    @property
    def failure(self) -> BaseException | None:
        """What ended the loop of a started runner, if an error did."""
        return self._loop.failure

    @property
    def policy(self) -> Policy:
        return self._policy

    @property
    def owner(self) -> str:
        """The name in our claims. It is new at each boot, so that we fence our former selves."""
        return self._claimer.owner

    def set_policy(self, policy: Policy) -> None:
        """In force from the next tick on."""
        self._policy = policy

    def boot(self, layout: Mapping[str, int] | None = None) -> None:
        """STOPPED → RUNNING, or an error and still stopped."""
        with self._life:
            booted = LIFE.next(self._state, Event.BOOT, worker=self.worker)
            boot.check_spaces(boot.spaces() if layout is None else layout)
            self._store.transact(boot.ensure_marker, boot.SCHEMA, bootstrap=self._bootstrap)
            self._begin()
            self._state = booted

    def start(self) -> None:
        """Boot if need be, and loop in a thread of its own."""
        if self._state is State.STOPPED:
            self.boot()
        self._loop.start()

    def run(self) -> None:
        """Loop in this thread until a stop is asked for and nothing is in hand any more."""
        self._loop.run()

    def request_stop(self) -> None:
        """No more claims from now on. Any thread may ask, a handler's too."""
        with self._life:
            if LIFE.allows(self._state, Event.STOP):
                self._state = LIFE.next(self._state, Event.STOP)
        self._loop.ring()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the loop to end; False if it has not by then. Raises the error that ended it."""
        return self._loop.join(timeout_s)

    def shutdown(self, timeout_s: float | None = None) -> bool:
        """Stop, settle what is in hand, and wait until it is done, as `join` does."""
        self.request_stop()
        return self._loop.finish(timeout_s)

    def halt(self) -> None:
        """The end of the loop. Whatever is still in hand is left to run out."""
        self.request_stop()
        with self._life:
            if LIFE.allows(self._state, Event.HALT):
                self._state = LIFE.next(self._state, Event.HALT)
                if self._crew is not None:
                    self._crew.close()
                    self._crew = None
                self._suspects.clear()
                self._paced.clear()
        if self._alone is not None:
            self._alone.leave(self)

    def __enter__(self) -> Runner:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def _begin(self) -> None:
        owner = f"{self.worker}/{self._clock.entropy(6).hex()}"
        self._claimer = Claimer(
            self._store,
            self._queue,
            self._timers,
            owner=owner,
            extend=self._extend,
            hooks=self.hooks,
            admission=self._admission,
        )
        self._desk = Desk(self._store, self.hooks)
        self._stop_by_ns = 0
        self._loop = Loop(self, self._store, self._claimer.names, sleep=self._sleep)
        self._fatal = None

    # -- one tick ------------------------------------------------------------------------------

    @property
    def in_hand(self) -> bool:
        """Whether something is handled or finished that the store does not know of yet."""
        return bool(self._desk.outcomes or self._suspects or self._paced or self.under_way)

    @property
    def under_way(self) -> int:
        """How many items are with the crew. Others may ask, from their threads."""
        crew = self._crew
        return 0 if crew is None else crew.count

    @property
    def _free(self) -> int:
        """How many items would be begun at once."""
        return self._concurrency if self._crew is None else self._crew.free

    @property
    def room(self) -> int:
        """How many more items may be handled at once."""
        if self._suspects or (self._alone is not None and self._alone.wanted):
            return 0
        if self._throttle is not None:
            return self._policy.max_batch - len(self._paced)
        if self._crew is not None:
            return self._crew.room
        return self._concurrency if self._has_crew else self._policy.max_batch

    def tick(self) -> Tick:
        """Handle up to a batch. Waits for the store and, without a crew, for its handlers."""
        with self._gate:
            if self._state is State.STOPPED:
                raise NotRunning(worker=self.worker)
            policy, tick = self._policy, Tick()
            self._collect(policy, tick)
            if self._paced and self._crew is not None and self._state is State.RUNNING:
                self._start(self._crew, [], tick)
            self._attend(policy, tick)
            self._desk.settle(policy, tick)
            # While the store does not take what is finished, nothing more is begun.
            if self._state is State.RUNNING and not self._desk.outcomes:
                limit = min(policy.max_batch, self.room)
                if self._throttle is not None and limit > 0:
                    limit = self._allowed(self._throttle, limit, tick)
                free = self._free if policy.tend else None
                works = self._claimer.claim(max(limit, 0), policy, tick, self._has, free)
                self._handle(works, policy, tick)
                self._desk.settle(policy, tick)
            self._progress()
            self._surface(policy)
            return tick

    def attend_s(self) -> float:
        """How long the crew may be left to itself."""
        if not self.in_hand:
            return float("inf")
        if self._crew is not None and self._crew.standing:
            return NUDGE_NS / 1e9
        if self._paced and self._throttle is not None:
            return max(min(self._throttle.wait_ns(), ATTEND_NS), MS) / 1e9
        return ATTEND_NS / 1e9 if self._policy.tend else float("inf")

    def idle_sleep_ns(self) -> int:
        """How long there is nothing to do: until the next item is due, within the policy's bound."""
        with self._gate:
            due_ns = self._claimer.next_due_ns()
        longest_ns = self._policy.idle_sleep_max_ms * MS
        if due_ns is None:
            return longest_ns
        if self._throttle is not None:
            due_ns = max(due_ns, self._store.now_ns() + self._throttle.wait_ns())
        return max(0, min(due_ns - self._store.now_ns(), longest_ns))

    def idle_sleep_ms(self) -> int:
        """The same in whole milliseconds, never less."""
        return -(-self.idle_sleep_ns() // MS)

    @property
    def _has_crew(self) -> bool:
        return self._concurrency > 1 or self._event_loop is not None or self._policy.tend

    def _collect(self, policy: Policy, tick: Tick) -> None:
        for outcome in self._crew.collect() if self._crew is not None else ():
            self._ended(outcome, policy, tick)

    def _allowed(self, throttle: Throttle, limit: int, tick: Tick) -> int:
        """How many of `limit` may be claimed. If nothing is due, no token is spent on it."""
        try:
            if not self._claimer.looks():
                return 0
            held = len(self._paced)
            near = throttle.stock(limit + held) - held
            return near if self._has_crew or near <= 0 else throttle.take(near)
        except HoldfastError as error:
            _check_transient(error)
            tick.busy += 1
            return 0

    def _attend(self, policy: Policy, tick: Tick) -> None:
        """Look after what the crew has: end what is out of time, or not wanted; extend the rest."""
        crew = self._crew
        if crew is None:
            return
        now_ns = self._clock.mono_ns()
        if self._state is not State.RUNNING:
            self._leave(crew, policy, tick, now_ns)
        if policy.tend:
            crew.nudge()
            if crew.busy or self._suspects or self._paced:
                try:
                    self._look_after(crew, policy, tick, now_ns)
                except HoldfastError as error:
                    _check_transient(error)
                    tick.busy += 1
        if self._alone is not None and self._alone.wanted:
            # Whoever has run so long by itself is not what kills at once.
            since_ns = self._alone_since_ns
            survived = since_ns and now_ns - since_ns >= SOLITUDE_NS
            if survived or not (crew.busy or self._suspects):
                self._alone_since_ns = 0
                self._alone.leave(self)

    def _leave(self, crew: Crew, policy: Policy, tick: Tick, now_ns: int) -> None:
        """At the end. What is not begun will not be; what is has a while to finish, and is given
        back unharmed then: it is another's to do again."""
        unbegun = [*(crew.waiting() if policy.tend else ()), *self._suspects, *self._paced]
        self._suspects.clear()
        self._paced.clear()
        self._give_back(unbegun, tick)
        self._stop_by_ns = self._stop_by_ns or now_ns + policy.stop_grace_ms * MS
        if policy.tend and crew.busy and now_ns >= self._stop_by_ns:
            works = crew.held
            for work in works:
                # Its claim is another's from now on: a bill that still comes is booked by itself.
                work.lost = True
                crew.drop(work)
            self._give_back(works, tick)

    def _look_after(self, crew: Crew, policy: Policy, tick: Tick, now_ns: int) -> None:
        if now_ns >= self._attend_at_ns:
            self._attend_at_ns = now_ns + ATTEND_NS
            for work in crew.held:
                if work.began_ns and 0 < work.limit_ns <= now_ns - work.began_ns:
                    crew.drop(work)
                    late = Timeout(what="handler", waited_s=work.limit_ns / 1e9)
                    self._ended(Outcome(work, late, now_ns - work.began_ns), policy, tick)
            # What waited too long for a hand is another's to do.
            self._give_back(crew.overdue(UNBEGUN_NS), tick)
        withdrawn = self._store.read(queues.withdrawn, self._queue)
        if withdrawn != self._withdrawn:
            self._drop_lost(crew, tick)
            self._withdrawn = withdrawn
        if now_ns >= self._extend_at_ns:
            self._tend(crew, policy, tick)
            self._extend_at_ns = now_ns + policy.lease_ttl_ns // 3

    def _tend(self, crew: Crew, policy: Policy, tick: Tick) -> None:
        """Extend claims, all in one commit."""
        works = [work for work in crew.held if work.limit_ns or not work.began_ns]
        works += [*self._suspects, *self._paced]
        if not works:
            return
        answers: list[int | None] = self._store.transact(
            queues.extend, [work.claim.token for work in works], policy.lease_ttl_ns
        )
        for work, deadline_ns in zip(works, answers, strict=True):
            if deadline_ns is not None:
                work.deadline_ns = max(work.deadline_ns, deadline_ns)
            else:
                self._lose(crew, work, tick)

    def _drop_lost(self, crew: Crew, tick: Tick) -> None:
        """Some claim was taken from its holder: if it was ours, nobody waits for the answer."""
        works = [*crew.held, *self._suspects, *self._paced]
        tokens = [work.claim.token for work in works]
        for work, lost in zip(works, self._store.read(claims.lost, tokens), strict=True):
            if lost:
                self._lose(crew, work, tick)

    def _lose(self, crew: Crew, work: Work, tick: Tick) -> None:
        # Before it is dropped: whoever sees that it is knows why.
        work.lost = True
        for waiting in (self._suspects, self._paced):
            if work in waiting:
                waiting.remove(work)
        crew.drop(work)
        tick.lost += 1
        self.hooks.lost(work)

    def _give_back(self, works: Sequence[Work], tick: Tick) -> None:
        if works:
            self._claimer.hand_back(works, tick)

    def _try_suspect(self, crew: Crew) -> None:
        now_ns = self._clock.mono_ns()
        if self._alone is None or not self._alone.ask(self, now_ns):
            return
        if self._throttle is None or self._throttle.take(1):
            self._alone_since_ns = now_ns
            self._give(crew, [self._suspects.popleft()])

    def _give(self, crew: Crew, works: Sequence[Work]) -> None:
        now_ns = self._clock.mono_ns()
        for work in works:
            work.taken_ns = now_ns
        crew.give(works)

    def _handle(self, works: deque[Work], policy: Policy, tick: Tick) -> None:
        if not self._has_crew:
            self._handle_here(works, policy, tick)
            return
        crew = self._crew
        if crew is None:
            if not works:
                return
            crew = self._crew = self._hire(policy)
        if self._alone is None:
            self._start(crew, list(works), tick)
            return
        self._suspects += [work for work in works if work.claim.expiries >= SUSPECT]
        sound = [work for work in works if work.claim.expiries < SUSPECT]
        # What was claimed in vain before is begun first: it is charged if we die.
        sound.sort(key=lambda work: -work.claim.expiries)
        self._start(crew, sound, tick)
        if self._suspects:
            try:
                self._try_suspect(crew)
            except HoldfastError as error:
                _check_transient(error)
                tick.busy += 1

    def _start(self, crew: Crew, works: list[Work], tick: Tick) -> None:
        """Give works to the crew: those that the throttle lets begin now, in the order they came."""
        if self._throttle is not None:
            self._paced += works
            works = []
            wanted = min(len(self._paced), crew.free)
            if wanted:
                try:
                    begun = self._throttle.take(wanted)
                except HoldfastError as error:
                    _check_transient(error)
                    tick.busy += 1
                    return
                works = [self._paced.popleft() for _ in range(begun)]
        if not works:
            return
        if self._alone is None:
            self._give(crew, works)
        elif not self._alone.begin(lambda: self._give(crew, works)):
            self._give_back(works, tick)

    def _hire(self, policy: Policy) -> Crew:
        # A token is used when a call begins: what is throttled is not taken ahead.
        ahead_max = policy.max_batch if policy.tend and self._throttle is None else 0
        if self._event_loop is not None:
            return Tasks(
                self._concurrency,
                self._attempt_async,
                self._event_loop(),
                began=self.hooks.began,
                done=self._loop.ring,
                clock=self._clock,
                ahead_max=ahead_max,
            )
        return Threads(
            self._concurrency,
            self._attempt,
            name=self.worker,
            began=self.hooks.began,
            done=self._loop.ring,
            clock=self._clock,
            ahead_max=ahead_max,
        )

    def _handle_here(self, works: deque[Work], policy: Policy, tick: Tick) -> None:
        settle_at_ns = self._clock.mono_ns() + policy.settle_after_ms * MS
        # The first item is begun if its claim lives at all, so that every batch gets somewhere;
        # the others only with half a lease before them.
        needs_ns = 0
        while works:
            if self._clock.mono_ns() >= settle_at_ns and not tick.busy:
                self._desk.settle(policy, tick)
                settle_at_ns = self._clock.mono_ns() + policy.settle_after_ms * MS
            late = works[0].deadline_ns <= self._store.now_ns() + needs_ns
            if late or self._cut_short(policy):
                self._claimer.hand_back(works, tick)
                return
            work = works.popleft()
            self.hooks.began(work)
            self._ended(self._attempt(work), policy, tick)
            self._progress()
            needs_ns = policy.lease_ttl_ns // 2

    def _attempt(self, work: Work) -> Outcome:
        return attempt(work, self._handler, self._clock)

    async def _attempt_async(self, work: Work) -> Outcome:
        return await attempt_async(work, typing.cast(AsyncHandler, self._handler), self._clock)

    def _ended(self, outcome: Outcome, policy: Policy, tick: Tick) -> None:
        if outcome.work.lost:
            tick.lost += 1
            self.hooks.lost(outcome.work)
            return
        fault = policy.faults.of(outcome.error)
        self.hooks.ended(outcome, fault)
        self._desk.outcomes.append(outcome)
        if fault is Fault.FATAL and self._fatal is None:
            self._fatal = outcome.error

    def _cut_short(self, policy: Policy) -> bool:
        alarmed = self._fatal is not None and policy.on_fatal != "go_on"
        return alarmed or self._state is not State.RUNNING

    def _surface(self, policy: Policy) -> None:
        """A non-retryable error is the policy's to decide on, once its item is kept."""
        if self._fatal is None or self._desk.outcomes:
            return
        fatal, self._fatal = self._fatal, None
        if policy.on_fatal == "stop":
            self.request_stop()
        elif policy.on_fatal == "raise" and self._state is State.RUNNING:
            raise fatal

    def _has(self, claim: Claim) -> bool:
        if self._crew is not None and self._crew.has(claim):
            return True
        kept = (*self._suspects, *self._paced)
        return any(work.claim.token == claim.token for work in kept)

    def _extend(self, claim: Claim, ttl_ms: int | None) -> int | None:
        ttl_ns = self._policy.lease_ttl_ns if ttl_ms is None else ttl_ms * MS
        answers: list[int | None] = self._store.transact(queues.extend, [claim.token], ttl_ns)
        self._progress()
        return answers[0]

    def wake(self) -> None:
        """Look again: something else than the store has changed."""
        self._loop.ring()

    def _progress(self) -> None:
        self.last_progress_ns = self._clock.mono_ns()


def _check_transient(error: HoldfastError) -> None:
    if not (transient(error) or isinstance(error, CommitUnknown)):
        raise error

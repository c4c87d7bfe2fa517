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
from collections.abc import Callable, Mapping

from holdfast.clock import MS, SYSTEM, Clock
from holdfast.config import CONCURRENCY_MAX
from holdfast.durable import queue as queues
from holdfast.durable.queue import Admission, Claim
from holdfast.errors import CommitUnknown, HoldfastError, Invalid
from holdfast.runner import boot
from holdfast.runner.alone import Alone
from holdfast.runner.boot import LIFE, Event, NotRunning, State
from holdfast.runner.claimer import Claimer
from holdfast.runner.counters import Counters
from holdfast.runner.crew import Crew, Tasks, Threads
from holdfast.runner.faults import Fault
from holdfast.runner.gate import Gate
from holdfast.runner.hooks import Hooks, LogSink, ReplayHook
from holdfast.runner.loop import Loop
from holdfast.runner.parcel import Carrier, Post
from holdfast.runner.policy import Policy
from holdfast.runner.settle import Desk
from holdfast.runner.tending import Tending, Throttle
from holdfast.runner.tick import Tick
from holdfast.runner.work import AsyncHandler, Handler, Outcome, Work, attempt, attempt_async
from holdfast.store.api import Store


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
        # What the last tick that failed has raised, and logged.
        self.told: BaseException | None = None
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
        self._fatal: Exception | None = None
        self._sleep = sleep
        self._carrier: Carrier | None = None
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

    def ride(self, carrier: Carrier) -> None:
        """Let somebody in this process settle what it goes on with. Before the start."""
        self._carrier = carrier

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
                self._tending.close()
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
        self._tending = Tending(
            self._store,
            self._queue,
            self._claimer,
            member=self,
            hooks=self.hooks,
            clock=self._clock,
            hire=self._hire,
            ended=self._ended,
            crewed=self._has_crew,
            alone=self._alone,
            throttle=self._throttle,
        )
        self._desk = Desk(self._store, self.hooks)
        self._loop = Loop(self, self._store, self._claimer.names, sleep=self._sleep)
        self._post: Post | None = None
        if self._carrier is not None:
            self._post = Post(
                self._carrier, self._desk, self._claimer, self._clock, self._loop.ring
            )
        self._fatal = None

    # -- one tick ------------------------------------------------------------------------------

    @property
    def in_hand(self) -> bool:
        """Whether something is handled or finished that the store does not know of yet."""
        parcels = self._post is not None and self._post.busy
        return bool(self._desk.outcomes) or parcels or self._tending.busy

    @property
    def under_way(self) -> int:
        """How many items are with the crew. Others may ask, from their threads."""
        return self._tending.under_way

    @property
    def room(self) -> int:
        """How many more items may be handled at once."""
        tending = self._tending
        if tending.barred:
            return 0
        if self._throttle is not None:
            return self._policy.max_batch - len(tending.paced)
        if tending.crew is not None:
            return tending.crew.room
        return self._concurrency if self._has_crew else self._policy.max_batch

    def tick(self) -> Tick:
        """Handle up to a batch. Waits for the store and, without a crew, for its handlers."""
        with self._gate:
            if self._state is State.STOPPED:
                raise NotRunning(worker=self.worker)
            policy, tick = self._policy, Tick()
            try:
                self._step(policy, tick)
            except Exception as error:
                # Here, and not in the loop alone: a host that ticks by itself has the same log.
                self.hooks.loop_error(error)
                self.told = error
                raise
            return tick

    def _step(self, policy: Policy, tick: Tick) -> None:
        try:
            self._advance(policy, tick)
        except HoldfastError as error:
            if not (error.retryable or isinstance(error, CommitUnknown)):
                raise
            # The store may be away at any look. Whatever was asked for by then may be ours.
            tick.busy += 1
            self._claimer.doubt()
        self._progress()
        self._surface(policy)

    def _advance(self, policy: Policy, tick: Tick) -> None:
        tending = self._tending
        running = self._state is State.RUNNING
        tending.collect(policy, tick, running=running)
        tending.attend(policy, tick, running=running)
        if self._post is not None:
            self._exchange(self._post, policy, tick)
        if self._has_crew and self._state is State.RUNNING and self._desk.outcomes:
            self._turn(policy, tick)
        self._desk.settle(policy, tick)
        # While the store does not take what is finished, nothing more is begun.
        if self._state is State.RUNNING and not self._desk.outcomes:
            works = self._claim(policy, tick)
            if self._has_crew:
                tending.take(works, policy, tick)
            else:
                self._handle_here(works, policy, tick)
            self._desk.settle(policy, tick)
        self._leave_offer(policy, tick)

    def _exchange(self, post: Post, policy: Policy, tick: Tick) -> None:
        """Take what the carrier has brought, and hand it what is finished."""
        running = self._state is State.RUNNING
        works = post.collect(policy, tick, running=running)
        if works:
            self._tending.take(works, policy, tick)
        if running and (self._desk.outcomes or post.busy):
            # What is throttled is claimed by whoever counts its tokens.
            room = self.room if self._throttle is None else 0
            post.send(policy, room, self._again_max(policy))

    def _leave_offer(self, policy: Policy, tick: Tick) -> None:
        """Before a rest: whoever puts something into the queue may claim it for us."""
        idle = self._state is State.RUNNING and not tick.moved and not tick.busy
        if self._post is not None and idle and self._throttle is None:
            self._post.offer(policy, self.room, self._again_max(policy))

    def _turn(self, policy: Policy, tick: Tick) -> None:
        """Settle and claim in one commit, if there is something for both and nothing in doubt."""
        if not (self._desk.sure and self._claimer.sure and self._claimer.looks()):
            return
        if self._post is not None and not self._post.retract():
            return
        limit = self._limit(policy, tick)
        if limit <= 0:
            return
        asking = self._claimer.asking(limit, policy, self._again_max(policy))
        taken = self._desk.turn(policy, tick, asking)
        if taken is not None:
            self._tending.take(self._claimer.answered(taken, tick), policy, tick)

    def _claim(self, policy: Policy, tick: Tick) -> deque[Work]:
        limit = max(self._limit(policy, tick), 0)
        again_max = self._again_max(policy)
        if self._post is not None and not self._post.retract():
            return deque()
        if self._post is not None and self._post.busy:
            # What is on its way is held, too: it must not be adopted. And it claims by itself.
            if self._post.asked or not self._claimer.sure:
                return deque()
        return self._claimer.claim(limit, policy, tick, self._tending.has, again_max)

    def _limit(self, policy: Policy, tick: Tick) -> int:
        asked = 0 if self._post is None else self._post.asked
        limit = min(policy.max_batch, self.room - asked)
        if self._throttle is not None and limit > 0:
            return self._tending.allowed(self._throttle, limit, tick)
        return limit

    def _again_max(self, policy: Policy) -> int | None:
        """How many items that were claimed in vain before would be begun at once."""
        if not policy.tend:
            return None
        crew = self._tending.crew
        return self._concurrency if crew is None else crew.free

    @property
    def awaits(self) -> bool:
        """Whether an answer is on its way that will ring."""
        return self._post is not None and self._post.asked > 0

    def attend_s(self) -> float:
        """How long the crew may be left to itself."""
        return self._tending.attend_s(self._policy) if self.in_hand else float("inf")

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

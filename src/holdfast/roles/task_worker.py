"""The task worker: leases tasks, runs them, reports how they ended.

    tick    collect what ended → report it and lease more, in one commit → give it to the hands →
            extend leases → sleep until a task comes, ends, or is due

- Plain functions run in threads, coroutines in one event loop, those with `isolation="process"` each in
  a spawned process. As many are leased as the hands will begin within moments, by their pace; what no
  hand has begun after `HAND_BACK_NS` goes back uncounted.
- A lease is extended while its function runs, within the task's execution window, which starts anew
  with each sign of progress. A lease that is lost (expired, or the task was cancelled) is told to the
  code that runs under it, and its hand is given up.
- Reports go many to a commit. The outcome of a task with `report="each"` is committed by its own hand, and no
  task of this worker begins meanwhile (`report_gate`).
- A task on its last lease is taken when nothing else is in hand, and nothing is taken beside it.
- Stopping gives back what is not begun at once, and what still runs after `STOP_GRACE_S`.

Leases here are the coordinator's, not claims of a queue, and a task may take microseconds: this is a
loop of its own beside the Runner, over the same crews (docs/decisions/0012).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping

from holdfast import garbage
from holdfast.authority import workers
from holdfast.clock import MS, SYSTEM, Clock, S
from holdfast.config import CONCURRENCY_MAX, SETTLED_BYTES_MAX
from holdfast.durable.bounds import check_name
from holdfast.errors import CommitUnknown, HoldfastError, Invalid, StoreClosed
from holdfast.roles.relay import Own, Relay
from holdfast.roles.task_drain import Drain
from holdfast.roles.task_hands import Hands
from holdfast.roles.task_run import Ended, TaskCode, TaskRun
from holdfast.roles.task_upkeep import TaskUpkeep
from holdfast.runner.bell import Bell
from holdfast.runner.tending import HandsLost
from holdfast.store.api import Standing, Store, Txn, glance
from holdfast.tasks import coordinator as tasks
from holdfast.tasks.coordinator import End, Hold, Leased, Report, Turned
from holdfast.tasks.lease import LEASE_BATCH_MAX, held_by, holds, next_due_ns
from holdfast.tasks.look import offering
from holdfast.tasks.rows import keys_of
from holdfast.tasks.standby import SOON_NS

CONCURRENCY = 16
REPORTS_MAX = 2_000
# Queues that one commit looks into.
QUEUES_ASKED = 16
STOP_GRACE_S = 10.0
STOP_GRACE_S_MAX = 3_600.0
IDLE_S = SOON_NS / S
BEAT_NS = 3 * S
PROGRESS_NS = S
PAUSE_S = 0.05
LEAVE_TRIES = 40
LEAVE_NS = 5 * S
# How long reports wait for others while the hands are busy anyway.
LINGER_S = 0.002
# How long the loop keeps out of the way of what it has just given to idle hands.
BREATH_S = 0.001


class TaskWorker:
    name = "task"
    # Its functions are watched by their leases, not by the watchdog of ticks.
    ticking = False

    def __init__(
        self,
        store: Store,
        *,
        universe: str,
        codes: Mapping[str, TaskCode],
        worker: str,
        incarnation: str,
        queues: Iterable[str],
        concurrency: int = CONCURRENCY,
        processes: int | None = None,
        stop_grace_s: float = STOP_GRACE_S,
        clock: Clock = SYSTEM,
    ) -> None:
        self.store = store
        self.universe = universe
        self.worker = f"{worker}:task"
        self.incarnation = incarnation
        # The name in our leases: new at each start, so that we never act for our former selves.
        self.owner = f"{self.worker}/{incarnation[:12]}"
        self.queues = list(queues)
        if not codes:
            raise Invalid(what="tasks", why="a task worker knows one at least; see App(tasks=…)")
        if not self.queues:
            raise Invalid(what="queues", why="a task worker serves one at least")
        for queue in self.queues:
            check_name("queue", queue)
        if not 0 <= stop_grace_s <= STOP_GRACE_S_MAX:
            raise Invalid(what="stop_grace_s", found=stop_grace_s, min=0, max=STOP_GRACE_S_MAX)
        for what, found in (("concurrency", concurrency), ("processes", processes or 1)):
            if type(found) is not int or not 1 <= found <= CONCURRENCY_MAX:
                raise Invalid(what=what, found=repr(found)[:64], min=1, max=CONCURRENCY_MAX)
        self.failure: BaseException | None = None
        self.rounds = 0
        self.counts = dict.fromkeys(tasks.Answer, 0)
        self._counting = threading.Lock()
        keys = keys_of(universe)
        self._queue_topics = [keys.queue_topic(queue) for queue in self.queues]
        self._own_topic = keys.worker_topic(self.owner)
        self._topics = [*self._queue_topics, keys.revoked, self._own_topic]
        # Our request for tasks, while we wait for them, and what it asks for.
        self._standing: Standing | None = None
        self._asked: tuple[int, tuple[int, ...]] = (0, ())
        # The last commit by which we were called ourselves.
        self._called = 0
        self._codes = codes
        self._names = tuple(sorted(codes))
        self._clock = clock
        self._grace_ns = int(stop_grace_s * S)
        self._hands = Hands(
            codes, concurrency, processes or os.cpu_count() or 1, self._ring, clock, self._tell
        )
        self._held: dict[tuple[int, int], TaskRun] = {}
        self._reports: list[Report] = []
        self._looking = True
        # Whether an answer was lost, and nobody has looked yet what it was.
        self._unsure = False
        self._lingered = False
        self._turns = 0
        # Whether the last lease left something behind, and queues that had something when we looked.
        self._more = False
        self._offers: list[str] = []
        self._due_ns: int | None = None
        self._revocations = 0
        self._suspects = False
        self._lone: TaskRun | None = None
        self._drain = Drain()
        self._renew_ns = 0
        self._beat_ns = 0
        self._progress_ns = 0
        self._stopping = threading.Event()
        self._sleeping = False
        self._upkeep_aside = TaskUpkeep(store, universe)
        self._bell: Bell | None = None
        self._relay = Relay(self._lead, "holdfast-task")
        self._since = 0
        # What our thread is to do itself, and the grant it came with.
        self._own: Own | None = None
        self._own_leased: Leased | None = None
        self._thread: threading.Thread | None = None

    # -- life ------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self._thread is not None and not self._relay.over.is_set()

    @property
    def held(self) -> int:
        """How many tasks it has leased."""
        return len(self._held)

    def start(self) -> None:
        self._thread = threading.Thread(target=self.run, name="holdfast-task", daemon=True)
        self._thread.start()

    def request_stop(self) -> None:
        self._stopping.set()
        self._ring()
        # A hint, and nobody waits for it: the store may be away.
        self.store.submit(lambda txn: txn.notify(self._own_topic))

    def hurry(self) -> None:
        """When it stops, give back at once what runs."""
        self._grace_ns = 0

    def join(self, timeout_s: float | None = None) -> None:
        if self._thread is not None:
            self._relay.over.wait(timeout_s)

    def run(self) -> None:
        self._bell = Bell(self.store, self._topics, name=self.worker)
        self._relay.run()

    def _lead(self) -> Own | None:
        """The loop. It may leave its thread with a task that has just come, and go on in another."""
        assert self._bell is not None
        try:
            while not self._stopping.is_set():
                if self._standing is None and self._own_leased is None:
                    self._since = self.store.wait(self._topics, self._since, 0.0)
                more = self.step()
                self.rounds += 1
                if self._own is not None:
                    own, self._own = self._own, None
                    return own
                if not more and not self._stopping.is_set():
                    self._since = self._sleep(self._since)
            self._leave()
        except StoreClosed:
            pass
        except BaseException as error:
            # What could not be given back, because the store is away, runs out by itself.
            if not (self._stopping.is_set() and _passing(error)):
                self.failure = error
            self._withdraw()
        self._upkeep_aside.close()
        self._bell.close()
        self._hands.close()
        return None

    def wake(self) -> None:
        """Look for tasks in the next step: some may have come, or come due."""
        self._looking = True

    def _sleep(self, since: int) -> int:
        rest_s = self._rest_s()
        if rest_s <= 0:
            # What is due is to be looked at, also if it has become so since the last look.
            self.wake()
            return since
        if not self._hands.busy:
            # Nothing can end here: whoever has news has it from the store.
            return self._stand_by(since, rest_s)
        else:
            assert self._bell is not None
            if self._lingered:
                self._stopping.wait(rest_s)
            else:
                self._sleeping = True
                if not self._hands.finished:
                    self._bell.wait(rest_s)
                self._sleeping = False
        self.wake()
        return since

    def _stand_by(self, since: int, rest_s: float) -> int:
        """Wait for tasks at the store: those that come are leased for us in the commit that brings them."""
        self._stand()
        garbage.bring_on()
        if self._standing is None:
            since = self.store.wait(self._topics, since, rest_s)
            self.wake()
        else:
            self._called = self._standing.wait([self._own_topic], self._called, rest_s)
        return since

    def _stand(self) -> None:
        if self._standing is None and len(self.queues) <= QUEUES_ASKED and not self._suspects:
            rooms = self._hands.free
            self._asked = min(sum(rooms), LEASE_BATCH_MAX), rooms
            self._standing = self.store.stand(
                self._queue_topics,
                tasks.lease_when,
                self.universe,
                self.owner,
                self.queues,
                *self._asked,
                self._names,
                self._due_ns or 0,
            )

    def _stand_down(self) -> None:
        """Take what our request has brought, or call it back."""
        standing, self._standing = self._standing, None
        self._looking = True
        if standing is not None and (standing.answered or not standing.withdraw()):
            leased = standing.result()
            runs = self._runs(leased)
            # One that is alone in our hands is run by this very thread.
            if len(runs) == len(self._held) == 1 and self._relay.ready:
                self._own = None if self._stopping.is_set() else self._hands.enlist(runs[0])
                if self._own is not None:
                    self._own_leased = leased
                    return
            if runs:
                self._hands.give(runs)
                self._breathe()
            self._taken(leased, *self._asked)
            # It may have rung for something else meanwhile.
            self.wake()

    def _withdraw(self) -> None:
        """Have nothing granted that we will not run."""
        standing, self._standing = self._standing, None
        with contextlib.suppress(HoldfastError):
            if standing is not None and not standing.withdraw():
                grants = standing.result().grants
                back = [Report(grant.seq, grant.lease, End.RELEASED) for grant in grants]
                self.store.transact(
                    tasks.settle, self.universe, self.owner, self.store.generation, back
                )

    def _go_on(self) -> None:
        """Another thread was the loop until now, and has begun what was granted."""
        leased, self._own_leased = self._own_leased, None
        assert leased is not None
        self._breathe()
        self._taken(leased, *self._asked)
        self.wake()

    def _breathe(self) -> None:
        """Let others begin with the interpreter to themselves: who was idle has nothing better to do."""
        if self._bell is not None:
            self._sleeping = True
            if not self._hands.finished:
                self._bell.rest(BREATH_S)
            self._sleeping = False

    def _ring(self) -> None:
        if self._sleeping and self._bell is not None:
            self._bell.ring()

    def _rest_s(self) -> float:
        """How long there is nothing to do, unless somebody rings."""
        now_ns = self.store.now_ns()
        until_ns = now_ns + int(IDLE_S * S)
        until_ns = min(until_ns, self._beat_ns, self._upkeep_aside.next_ns)
        if self._due_ns is not None:
            until_ns = min(until_ns, self._due_ns)
        if self._held:
            until_ns = min(until_ns, self._renew_ns)
        if self._suspects and self._hands.busy:
            until_ns = min([until_ns, *self._drain.next_ns(now_ns)])
        rest_s = (until_ns - now_ns) / S
        return min(rest_s, self._hands.rest_s, LINGER_S if self._lingered else rest_s)

    # -- one step --------------------------------------------------------------------------------

    def step(self) -> bool:
        """Do what there is to do; whether there may be more at once."""
        try:
            if self._own_leased is not None:
                self._go_on()
            if self._standing is not None and (self._unsure or self._standing.answered):
                # Before we look for what we were granted and do not know: this we will know.
                self._stand_down()
                return True
            if self._unsure:
                self._recover()
            self._collect()
            self._attend()
            self._upkeep()
            # Last, so that the hands have the interpreter to themselves when they begin.
            moved = self._turn()
        except CommitUnknown:
            self._unsure = True
            self._lapse()
            return True
        except HoldfastError as error:
            if not error.retryable:
                raise
            self._lapse()
            self._looking = True
            self._stopping.wait(PAUSE_S)
            return True
        return moved

    def _collect(self) -> None:
        ended = self._hands.collect()
        if ended:
            let_go = self._held.pop
            self._reports += [
                one.report
                for one in ended
                if let_go(one.work.token, None) is not None and not one.told
            ]
        for run in self._hands.overdue():
            self._give_back(run)

    def _tell(self, ended: Ended) -> bool:
        """Commit one report in the thread of its hand, while no task begins; whether it could. Else
        it goes with the others: the same report again gets the first answer."""
        run = ended.work
        while not run.lapsed and not run.dropped:
            try:
                [answer] = self.store.transact(
                    tasks.settle, self.universe, self.owner, self.store.generation, [ended.report]
                )
            except HoldfastError as error:
                if not _passing(error):
                    return False
                # By the clock, because a worker that stops keeps trying until the lease is over.
                self._clock.sleep(PAUSE_S)
                continue
            with self._counting:
                self.counts[tasks.Answer(answer)] += 1
            return True
        return False

    def _give_back(self, run: TaskRun) -> None:
        if self._held.pop(run.token, None) is not None:
            self._reports.append(Report(*run.token, End.RELEASED))

    def _turn(self) -> bool:
        """Report and lease in one commit."""
        if self._standing is not None:
            if not self._standing.answered and not self._reports:
                self._due_ns = glance(self.store, next_due_ns, self.universe)
                if self._due_ns is None or self.store.now_ns() < self._due_ns:
                    return False
            self._stand_down()
            if self._own is not None:
                return True
        limit, alone, rooms = self._wanted()
        queues = self._offering(rooms) if limit and (self._looking or self._reports) else []
        if limit and not queues:
            # Nobody has anything for us: looking costs the writer nothing, asking would.
            self._looking = False
            limit = 0
        due = self._due_ns is not None and self.store.now_ns() >= self._due_ns
        # What is due is swept also by one who has no room: others may be waiting for it.
        if not self._reports and not (self._looking and limit) and not due:
            return False
        full = limit >= LEASE_BATCH_MAX
        if len(self._reports) < self._hands.line and not self._lingered and not full:
            # The hands have enough to do: what they finish meanwhile goes into the same commit.
            self._lingered = True
            return False
        self._lingered = False
        reports = _within(self._reports, SETTLED_BYTES_MAX)
        with self.store.together():
            all_told = len(reports) == len(self._reports) and not limit and not due
            if all_told and not self._hands.busy and not self._stopping.is_set():
                # In the same message: what comes from now on does not wait until we ask.
                self._stand()
            turned: Turned = self.store.transact(
                tasks.turn,
                self.universe,
                self.owner,
                self.store.generation,
                reports,
                queues,
                limit,
                alone,
                rooms,
                self._names,
            )
        del self._reports[: len(reports)]
        with self._counting:
            for answer in tasks.Answer:
                self.counts[answer] += turned.answers.count(int(answer))
        self._take(turned.leased, limit, rooms)
        return bool(self._reports) or (self._looking and self._wanted()[0] > 0)

    def _offering(self, rooms: tuple[int, ...]) -> list[str]:
        """Our queues that have something, each first in its turn: one that is always full starves no
        other."""
        if len(self.queues) <= QUEUES_ASKED and self._more:
            found = self.queues
        elif self._offers:
            # What was found when we last looked, and not asked for yet.
            found, self._offers = self._offers[:QUEUES_ASKED], self._offers[QUEUES_ASKED:]
        else:
            found, self._due_ns = glance(self.store, self._look, self.queues, rooms)
            found, self._offers = found[:QUEUES_ASKED], found[QUEUES_ASKED:]
        if not found:
            return found
        self._turns = (self._turns + 1) % len(found)
        return found[self._turns :] + found[: self._turns]

    def _look(
        self, txn: Txn, queues: list[str], rooms: tuple[int, ...]
    ) -> tuple[list[str], int | None]:
        """What is there for us now, and when there may be more."""
        kinds = [kind for kind, room in enumerate(rooms) if room > 0]
        found = offering(txn, self.universe, queues, self._names, kinds)
        return found, next_due_ns(txn, self.universe)

    def _wanted(self) -> tuple[int, bool, tuple[int, ...]]:
        """How many to lease, whether a suspect may be among them, and how many of each kind."""
        if self._lone is not None and self._held.get(self._lone.token) is self._lone:
            return 0, False, ()  # on its last lease: nothing beside it
        rooms = self._hands.rooms
        usual = min(sum(rooms), LEASE_BATCH_MAX), False, rooms
        if not self._suspects:
            return usual
        if not self._hands.busy:
            return 1, True, rooms
        return (0, False, ()) if self._drain.wanted(self.store.now_ns()) else usual

    def _take(self, leased: Leased, limit: int, rooms: tuple[int, ...]) -> None:
        runs = self._runs(leased)
        if runs:
            self._hands.give(runs)
        self._taken(leased, limit, rooms)

    def _runs(self, leased: Leased) -> list[TaskRun]:
        """What was granted, as hands take it. From now on it is ours to run and to report."""
        taken_ns, now, codes = self._clock.mono_ns(), self.store.now_ns, self._codes
        expires_ns = lease_ns = renew_ns = 0
        held = self._held
        runs = []
        for grant in leased.grants:
            # Most are alike: what was granted together runs out together.
            if grant.expires_ns != expires_ns or grant.lease_ns != lease_ns:
                expires_ns, lease_ns = grant.expires_ns, grant.lease_ns
                renew_ns = expires_ns - lease_ns + lease_ns // 3
                if not held or renew_ns < self._renew_ns:
                    self._renew_ns = renew_ns
            run = TaskRun(grant, codes[grant.name], taken_ns, renew_ns, now)
            held[run.token] = run
            runs.append(run)
        # A suspect comes by itself.
        if runs and runs[0].grant.suspect:
            self._lone = runs[0]
            self._drain.served()
        return runs

    def _taken(self, leased: Leased, limit: int, rooms: tuple[int, ...]) -> None:
        """What the answer says besides."""
        if limit:
            # One who has had his fill of any kind has not seen the end of it.
            full = len(leased.grants) >= min(limit, max(rooms))
            self._more = full or leased.suspects or leased.overdue
            self._looking = self._more or bool(self._offers)
            if not leased.overdue:
                self._suspects = leased.suspects
        if not limit or not self._looking:
            self._due_ns = glance(self.store, next_due_ns, self.universe)
        if leased.revocations != self._revocations:
            self._revocations = leased.revocations
            self._look_for_lost()

    # -- leases ----------------------------------------------------------------------------------

    def _attend(self) -> None:
        now_ns = self.store.now_ns()
        if self._hands.spent:
            # Whatever they wait for does not come: a new process has new hands.
            raise HandsLost(worker=self.worker, queue=",".join(self.queues))
        self._hands.nudge()
        if not self._held:
            self._renew_ns = now_ns + int(IDLE_S * S)
            return
        if now_ns >= self._renew_ns:
            self._extend(now_ns)
        if now_ns - self._progress_ns >= PROGRESS_NS:
            self._progress_ns = now_ns
            self._tell_progress()
        revocations: int = glance(
            self.store, lambda txn: txn.count(keys_of(self.universe).revocations)
        )
        if revocations != self._revocations:
            self._revocations = revocations
            self._look_for_lost()

    def _extend(self, now_ns: int) -> None:
        due = [run for run in self._held.values() if now_ns >= run.renew_ns]
        for start in range(0, len(due), LEASE_BATCH_MAX):
            batch = due[start : start + LEASE_BATCH_MAX]
            progressed = [run.progressed for run in batch]
            wanted = [Hold(*run.token, said) for run, said in zip(batch, progressed, strict=True)]
            answers: list[int] = self.store.transact(
                tasks.extend, self.universe, self.store.generation, wanted
            )
            for run, said, expires_ns in zip(batch, progressed, answers, strict=True):
                if not expires_ns:
                    self._lose(run)
                    continue
                run.progressed = run.progressed and not said
                run.expires_ns = expires_ns
                # Out of its window it is asked for again when it has run out: then it is lost.
                left_ns = expires_ns - now_ns
                run.renew_ns = now_ns + max(left_ns // 3, min(left_ns, 50 * MS))
        self._renew_ns = min(
            (run.renew_ns for run in self._held.values()), default=now_ns + int(IDLE_S * S)
        )

    def _lapse(self) -> None:
        """The store is away. What we hold no more by our own clock is given up without it."""
        for run in [run for run in self._held.values() if run.lapsed]:
            self._lose(run)

    def _look_for_lost(self) -> None:
        def lost(txn: Txn) -> list[TaskRun]:
            return [run for run in self._held.values() if not holds(txn, self.universe, *run.token)]

        for run in self.store.read(lost):
            self._lose(run)

    def _lose(self, run: TaskRun) -> None:
        self._held.pop(run.token, None)
        self._hands.drop(run)

    def _tell_progress(self) -> None:
        said = []
        for run in self._held.values():
            value, run.said = run.said, None
            if value is not None:
                said.append((*run.token, value))
        if said:
            self.store.transact(tasks.report_progress, self.universe, said)

    def _recover(self) -> None:
        """An answer was lost: what was granted by it is ours, and nobody has it. Reports are sent
        again: those that were taken get their first answer."""
        held = self.store.read(held_by, self.universe, self.owner)
        reported = {(one.seq, one.lease) for one in self._reports}
        for token in held:
            if token not in self._held and token not in reported:
                self._reports.append(Report(*token, End.RELEASED))
        self._unsure = False

    # -- upkeep ----------------------------------------------------------------------------------

    def _upkeep(self) -> None:
        now_ns = self.store.now_ns()
        if now_ns >= self._beat_ns:
            self.store.transact(
                workers.heartbeat,
                self.universe,
                self.worker,
                self.incarnation,
                ("task",),
                0,
                len(self._held),
            )
            self._beat_ns = now_ns + BEAT_NS
        self._upkeep_aside.attend(now_ns)

    def _leave(self) -> None:
        """Give back what is not begun, wait for the rest, give back what does not end."""
        self._insist(self._stand_down)
        for run in self._hands.waiting():
            self._give_back(run)
        until_ns = self._clock.mono_ns() + self._grace_ns
        while self._held and self._clock.mono_ns() < until_ns:
            self._collect()
            self._insist(self._report_all)
            self._insist(self._attend)
            self._stopping_rest()
        for run in list(self._held.values()):
            self._give_back(run)
            self._hands.drop(run)
        self._collect()
        self._insist(self._report_all)
        self._insist(self._unregister)

    def _insist(self, do: Callable[[], None]) -> None:
        """Whoever leaves has no next step: a store that is busy now is asked again, a few times."""
        until_ns = self._clock.mono_ns() + LEAVE_NS
        for left in reversed(range(LEAVE_TRIES)):
            try:
                return do()
            except HoldfastError as error:
                late = not left or self._clock.mono_ns() >= until_ns
                if late or not _passing(error):
                    raise
                self._clock.sleep(PAUSE_S)

    def _unregister(self) -> None:
        self.store.transact(workers.forget, self.universe, self.worker, self.incarnation)

    def _stopping_rest(self) -> None:
        assert self._bell is not None
        self._sleeping = True
        if self._held and not self._hands.finished:
            self._bell.wait(PAUSE_S)
        self._sleeping = False

    def _report_all(self) -> None:
        while self._reports:
            reports = _within(self._reports, SETTLED_BYTES_MAX)
            self.store.transact(
                tasks.settle, self.universe, self.owner, self.store.generation, reports
            )
            del self._reports[: len(reports)]


def _passing(error: BaseException) -> bool:
    """Whether the store's refusal passes by itself."""
    return isinstance(error, CommitUnknown) or (
        isinstance(error, HoldfastError) and error.retryable
    )


def _within(reports: list[Report], bytes_max: int) -> list[Report]:
    """The first of them, as many as belong into one commit."""
    size = 0
    for count, one in enumerate(reports[:REPORTS_MAX]):
        size += len(one.result) + len(one.error)
        if size > bytes_max and count:
            return reports[:count]
    return reports[:REPORTS_MAX]

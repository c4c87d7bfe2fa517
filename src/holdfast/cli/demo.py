"""`holdfast demo`: orders, worlds, a Spark job, an agent, tasks, and somebody who kills things.

It runs the real store, queue, lease and runner in real processes, SIGKILLs a worker and then the
store's writer in the middle of it, and checks at the end that what it says is so. It exits with 1 if
one of its claims does not hold. It needs a directory without a store: whoever kills writers must not
meet one that others depend on.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, TextIO

from holdfast.cli import demo_agent, demo_buyer, demo_press, demo_stage, demo_tasks, demo_worlds
from holdfast.cli.demo_bank import app
from holdfast.cli.demo_crew import Crew, Worker
from holdfast.cli.demo_jobs import QUEUE, TIMERS, Order, charges, found_again, reminders
from holdfast.cli.output import emit, table
from holdfast.cli.target import directory_of
from holdfast.clock import MS, SYSTEM, S
from holdfast.durable import lease as leases
from holdfast.durable import queue
from holdfast.durable.lease import Lease
from holdfast.durable.queue import Counts, Dead
from holdfast.errors import Fenced, HoldfastError, Invalid, Timeout
from holdfast.store import open as open_store
from holdfast.store.api import Store, Txn
from holdfast.store.reach import dial, kill_exactly, peer_of
from holdfast.store.schema import Space

ORDERS = 1_000
FLAKY_EVERY = 50
KILL_WORKER_AT = 300
KILL_WRITER_AT = 650
REMIND_AFTER_NS = 1_500 * MS

PHASE_S_MAX = 60.0
LOOK_S = 0.02


class DemoFailed(HoldfastError):
    code = "demo_failed"
    hint = "this is a bug: please report it with the output above"


class NotEmpty(Invalid):
    hint = "the demo kills processes; give it a directory without a store"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store", metavar="DIR", help="a directory without a store; else a temporary one"
    )
    parser.add_argument(
        "--json", action="store_true", help="the outcome as JSON on stdout, the story on stderr"
    )


def run(args: argparse.Namespace) -> int:
    story = Story(sys.stderr if args.json else sys.stdout)
    with _directory(args.store) as path:
        outcome = Demo(path, story).play()
    broken = [claim["claim"] for claim in outcome["claims"] if not claim["holds"]]
    story.end(outcome, "all of it holds" if not broken else f"{len(broken)} of it DO NOT HOLD")
    if args.json:
        emit(args, outcome, "")
    if broken:
        raise DemoFailed(claims=broken)
    return 0


@contextlib.contextmanager
def _directory(given: str | None) -> Iterator[Path]:
    """Where the store goes. A temporary one stays, to be looked at, unless the demo was cut short."""
    if given is not None:
        path = directory_of(given)
        if (path / "data.mdb").exists():
            raise NotEmpty(what="store", path=given, why="there is one already")
        yield path
        return
    path = Path(mkdtemp(prefix="holdfast-demo-"))
    try:
        yield path
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise


class Demo:
    """The acts, in order. `play` returns what was found, claims and all."""

    def __init__(self, path: Path, story: Story) -> None:
        self.path = path
        self.story = story
        self.claims: list[dict[str, Any]] = []

    def play(self) -> dict[str, Any]:
        began_ns = SYSTEM.mono_ns()
        with open_store(self.path) as store, Crew(self.path) as crew:
            poison = self._fill(store)
            alice = crew.start("alice")
            ghost = alice.lease()
            bob = crew.start("bob")
            self._kill_worker(store, alice, ghost)
            self._follow_lease(store, ghost, bob)
            writers = [self._kill_writer(store)]
            self._finish(store)
            due_ns = self._set_timer(store)
            bob.leave()
            writers.append(kill_writer(self.path))
            self.story.tell("bob leaves, and the new writer is killed, too: nothing runs any more.")
        with open_store(self.path) as store, Crew(self.path) as crew:
            self._fire_timer(store, crew.start("carol"), due_ns)
            self._audit(store, poison)
            writers.append(writer_pid(self.path))
            self._claim("writers of the store: two killed, and a third", len(set(writers)), 3)
        demo_worlds.play(self.path, self.story.tell, self._claim, self.story.progress)
        demo_stage.play(self.path, self.story.tell, self._claim, self.story.progress)
        demo_agent.play(self.path, self.story.tell, self._claim)
        demo_tasks.play(self.path, self.story.tell, self._claim)
        return {
            "store": str(self.path),
            "orders": ORDERS,
            "poison_seq": poison,
            "claims": self.claims,
            "seconds": (SYSTEM.mono_ns() - began_ns) / S,
        }

    # -- acts ----------------------------------------------------------------------------------

    def _fill(self, store: Store) -> int:
        orders = [Order(n, 100 + n, flaky=n % FLAKY_EVERY == 0) for n in range(1, ORDERS + 1)]
        store.transact(queue.put_many, QUEUE, [order.payload for order in orders])
        worthless = Order(ORDERS + 1, -1)
        poison: int = store.transact(queue.put, QUEUE, worthless.payload, priority=1)
        self.story.tell(f"A store in {self.path}, generation {store.generation}.")
        self.story.tell(
            f"{ORDERS:,} orders to charge are put into a queue in one commit. The card service is "
            f"down for one in {FLAKY_EVERY} at first. One more order is poison: nobody can charge "
            "minus one cent."
        )
        return poison

    def _kill_worker(self, store: Store, alice: Worker, lease: Lease) -> None:
        self.story.tell("Two workers start: alice, who also gets the lease on the shop, and bob.")
        self._claim("alice held the shop's lease under epoch", lease.epoch, 1)
        self._until(store, "orders charged", lambda counts: counts.done >= KILL_WORKER_AT)
        alice.kill()
        counts = self._counts(store)
        self.story.tell(
            f"SIGKILL alice, with {counts.done:,} orders done and {counts.claimed} in somebody's "
            "hands. What she held goes to bob when her claims expire."
        )
        self._claim("orders not done when the worker was killed", _left(counts), _left(counts) > 0)

    def _follow_lease(self, store: Store, ghost: Lease, bob: Worker) -> None:
        taken = bob.lease()
        self.story.tell(
            f"The shop's lease expired and went to {taken.worker}: epoch {ghost.epoch} → {taken.epoch}."
        )
        self._claim("the lease moved to bob under epoch", taken.epoch, 2)
        try:
            store.transact(_write_as, ghost)
            refused = "it was written"
        except Fenced as error:
            refused = error.code
            self.story.tell(f"alice's ghost tries to write under epoch {ghost.epoch}: {error}")
        self._claim("a write under alice's old lease is refused", refused, "fenced")
        log = [(it.kind, it.worker, it.epoch) for it in store.read(leases.events, 0, 100)]
        moved = [("granted", "alice", 1), ("expired", "alice", 1), ("granted", "bob", 2)]
        self._claim("the lease log", ", ".join(kind for kind, *_ in log), log[:3] == moved)

    def _kill_writer(self, store: Store) -> int:
        self._until(store, "orders charged", lambda counts: counts.done >= KILL_WRITER_AT)
        killed = kill_writer(self.path)
        counts = self._counts(store)
        began_ns = SYSTEM.mono_ns()
        store.transact(_touch)
        took_ms = (SYSTEM.mono_ns() - began_ns) // MS
        self.story.tell(
            f"SIGKILL the store's writer (pid {killed}), with {counts.done:,} done. The next commit "
            f"went through {took_ms} ms later: whoever needs a writer starts one, and asks it what "
            "became of the commits in flight."
        )
        self._claim("orders not done when the writer was killed", _left(counts), _left(counts) > 0)
        return killed

    def _finish(self, store: Store) -> None:
        self._until(store, "orders charged", lambda counts: _left(counts) == 0)
        counts = self._counts(store)
        self.story.tell(f"The queue is empty: {counts.done:,} done, {counts.dead} dead.")

    def _set_timer(self, store: Store) -> int:
        due_ns = store.now_ns() + REMIND_AFTER_NS
        store.transact(queue.put, TIMERS, Order(1, 101).payload, not_before_ns=due_ns)
        self.story.tell(f"A reminder is set, due in {REMIND_AFTER_NS / S} s.")
        return due_ns

    def _fire_timer(self, store: Store, carol: Worker, due_ns: int) -> None:
        self.story.tell("The store is opened again and a new worker starts: carol.")
        self._wait_for("the reminder", lambda: bool(store.read(reminders)))
        [fired] = store.read(reminders)
        late_ms = (fired.at_ns - due_ns) // MS
        self.story.tell(f"The reminder fired at {fired.worker}, {late_ms} ms after it was due.")
        self._claim("the timer fired once, after the restart, at", fired.worker, "carol")
        self._claim("and not before its time: ms late", late_ms, late_ms >= 0)
        carol.leave()

    def _audit(self, store: Store, poison: int) -> None:
        counts, charged = self._counts(store), store.read(charges)
        letters: list[Dead] = store.read(queue.dead, QUEUE)
        once = sorted(it.order for it in charged) == list(range(1, ORDERS + 1))
        flaky = [it for it in charged if it.order % FLAKY_EVERY == 0]
        again = store.read(found_again)
        self._claim("orders done", counts.done, ORDERS)
        self._claim("charges recorded, one for each order", len(charged), once)
        self._claim("cents charged", sum(it.cents for it in charged), _cents())
        self._claim(
            "orders that failed at first and were retried",
            len(flaky),
            len(flaky) == ORDERS // FLAKY_EVERY and all(it.attempt > 1 for it in flaky),
        )
        self._claim("dead letters, the poison among them", len(letters), _only(letters, poison))
        self._claim("orders left in the queue", _left(counts), 0)
        self.story.tell(
            f"The books: {len(charged):,} charges for {ORDERS:,} orders. Second runs after a kill "
            f"that found their charge there, and changed nothing: {again}."
        )
        for letter in letters:
            self.story.tell(f"The dead letter {letter.seq} says: {letter.error.splitlines()[0]}")

    # -- watching ------------------------------------------------------------------------------

    def _claim(self, what: str, found: object, expected: object) -> None:
        """`expected` is the value, or whether it is as it should be."""
        holds = expected if isinstance(expected, bool) else found == expected
        self.claims.append({"claim": what, "found": found, "holds": holds})

    def _counts(self, store: Store) -> Counts:
        return store.read(queue.counts, QUEUE)

    def _until(self, store: Store, what: str, reached: Callable[[Counts], bool]) -> None:
        def look() -> bool:
            counts = self._counts(store)
            self.story.progress(f"{counts.done:5,} of {ORDERS:,} {what}")
            return reached(counts)

        self._wait_for(what, look)
        self.story.progress("")

    def _wait_for(self, what: str, look: Callable[[], bool]) -> None:
        deadline_ns = SYSTEM.mono_ns() + int(PHASE_S_MAX * S)
        while not look():
            if SYSTEM.mono_ns() > deadline_ns:
                raise Timeout(what=what, seconds=PHASE_S_MAX)
            SYSTEM.sleep(LOOK_S)


class Story:
    """Lines for people; on a terminal also one line that changes."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._step = 0
        self._shows = sys.stderr.isatty()

    def tell(self, text: str) -> None:
        self._step += 1
        lead = f"{self._step:2}  "
        print(
            textwrap.fill(text, 88, initial_indent=lead, subsequent_indent="    "), file=self._out
        )
        self._out.flush()

    def end(self, outcome: dict[str, Any], verdict: str) -> None:
        rows = [
            (it["claim"], it["found"], "yes" if it["holds"] else "NO") for it in outcome["claims"]
        ]
        print(f"\n{table(('claim', 'found', 'holds'), rows)}\n", file=self._out)
        print(f"{outcome['seconds']:.1f} s, {verdict}. Look further:", file=self._out)
        for command in _further(outcome):
            print(f"    {command}", file=self._out)
        self._out.flush()

    def progress(self, text: str) -> None:
        if self._shows:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def writer_pid(path: Path) -> int:
    with _writer(path) as (pid, _):
        return pid


def kill_writer(path: Path) -> int:
    with _writer(path) as (pid, born):
        kill_exactly(pid, born)
        return pid


@contextlib.contextmanager
def _writer(path: Path) -> Iterator[tuple[int, str]]:
    with dial(path.absolute()) as sock:
        yield peer_of(sock)


def _write_as(txn: Txn, lease: Lease) -> None:
    txn.require_live(lease)
    _touch(txn)


def _touch(txn: Txn) -> None:
    txn.put((int(Space.APP_STATE), "demo", "touched"), b"")


def _left(counts: Counts) -> int:
    return counts.ready + counts.delayed + counts.claimed


def _cents() -> int:
    return sum(100 + n for n in range(1, ORDERS + 1))


def _only(letters: list[Dead], poison: int) -> bool:
    return [letter.seq for letter in letters] == [poison] and "-1 cents" in letters[0].error


def _further(outcome: dict[str, Any]) -> list[str]:
    path = outcome["store"]
    return [
        f"holdfast store info --store {path}",
        f"holdfast dead list {QUEUE} --store {path}",
        f"holdfast dead show {QUEUE} {outcome['poison_seq']} --store {path}",
        f"holdfast worlds list --universe {app.universe} --store {path}",
        f"holdfast worlds journal Agent/ada --universe {demo_buyer.app.universe} --store {path}",
        f"holdfast tasks list --universe {demo_press.app.universe} --store {path}",
        f"holdfast runs show {demo_stage.NAME} --store {demo_stage.store_in(path)}",
        f"rm -r {path}",
    ]

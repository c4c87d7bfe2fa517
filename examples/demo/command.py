"""The demo: orders, worlds, a Spark job, an agent and tasks, with processes killed in between.

It runs the real store, queue, lease and runner in real processes. It sends SIGKILL to a worker and
to the store's writer while they work, and checks its claims at the end. It exits with 1 if a claim
does not hold. It needs a directory without a store: it kills writers and must not disturb a store
in use.
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

from examples.agent.agent import app as agent_app
from examples.demo import accounts_part, agent_part, bank, print_app, spark_part, tasks_part
from examples.demo.orders import QUEUE, TIMERS, Order, charges, reminders, repeat_count
from examples.demo.worker_processes import WorkerProcess, WorkerProcesses
from holdfast.child_process import kill_verified
from holdfast.cli.output import emit, table
from holdfast.cli.store_option import directory_of
from holdfast.clock import MS, SYSTEM, S
from holdfast.durable import lease as leases
from holdfast.durable import queue
from holdfast.durable.lease import Lease
from holdfast.durable.queue import DeadLetter, QueueCounts
from holdfast.errors import Fenced, HoldfastError, Invalid, Timeout
from holdfast.store import open as open_store
from holdfast.store.api import Store, Txn
from holdfast.store.lmdb.writer_process import connect, peer_of
from holdfast.store.schema import Space

ORDERS = 1_000
FLAKY_EVERY = 50
KILL_WORKER_AT = 300
KILL_WRITER_AT = 650
REMIND_AFTER_NS = 1_500 * MS

PHASE_S_MAX = 60.0
POLL_S = 0.02


class DemoFailed(HoldfastError):
    code = "demo_failed"
    hint = "this is a bug; please report it with the output above"


class NotEmpty(Invalid):
    hint = "the demo kills processes; give it a directory without a store"


def run(args: argparse.Namespace) -> int:
    story = DemoOutput(sys.stderr if args.json else sys.stdout)
    with _directory(args.store) as path:
        outcome = Demo(path, story).run()
    broken = [claim["claim"] for claim in outcome["claims"] if not claim["holds"]]
    story.print_outcome(
        outcome, "all claims hold" if not broken else f"{len(broken)} claims DO NOT HOLD"
    )
    if args.json:
        emit(args, outcome, "")
    if broken:
        raise DemoFailed(claims=broken)
    return 0


@contextlib.contextmanager
def _directory(option: str | None) -> Iterator[Path]:
    """Yield the directory of the store. A temporary one is kept for inspection, unless the demo was
    interrupted."""
    if option is not None:
        path = directory_of(option)
        if (path / "data.mdb").exists():
            raise NotEmpty(what="store", path=option, why="a store exists there")
        yield path
        return
    path = Path(mkdtemp(prefix="holdfast-demo-"))
    try:
        yield path
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise


class Demo:
    """Runs the parts in order. `run` returns the outcome with all claims."""

    def __init__(self, path: Path, story: DemoOutput) -> None:
        self.path = path
        self.story = story
        self.claims: list[dict[str, Any]] = []

    def run(self) -> dict[str, Any]:
        began_ns = SYSTEM.mono_ns()
        with open_store(self.path) as store, WorkerProcesses(self.path) as crew:
            poison = self._create_orders(store)
            alice = crew.start("alice")
            ghost = alice.lease()
            bob = crew.start("bob")
            self._kill_worker(store, alice, ghost)
            self._check_lease_takeover(store, ghost, bob)
            writers = [self._kill_writer(store)]
            self._finish(store)
            due_ns = self._set_timer(store)
            bob.stop()
            writers.append(kill_writer(self.path))
            self.story.print_step(
                "bob shuts down and the new writer is killed as well: no process is left."
            )
        with open_store(self.path) as store, WorkerProcesses(self.path) as crew:
            self._fire_timer(store, crew.start("carol"), due_ns)
            self._check_orders(store, poison)
            writers.append(writer_pid(self.path))
            self._claim("writer processes: two killed, one running", len(set(writers)), 3)
        accounts_part.run_part(self.path, self.story.print_step, self._claim, self.story.progress)
        spark_part.run_part(self.path, self.story.print_step, self._claim, self.story.progress)
        agent_part.run_part(self.path, self.story.print_step, self._claim)
        tasks_part.run_part(self.path, self.story.print_step, self._claim)
        return {
            "store": str(self.path),
            "orders": ORDERS,
            "poison_seq": poison,
            "claims": self.claims,
            "seconds": (SYSTEM.mono_ns() - began_ns) / S,
        }

    # -- parts
    # ---------------------------------------------------------------------------------------

    def _create_orders(self, store: Store) -> int:
        orders = [Order(n, 100 + n, flaky=n % FLAKY_EVERY == 0) for n in range(1, ORDERS + 1)]
        store.transact(queue.put_many, QUEUE, [order.payload for order in orders])
        worthless = Order(ORDERS + 1, -1)
        poison: int = store.transact(queue.put, QUEUE, worthless.payload, priority=1)
        self.story.print_step(f"Created a store in {self.path}, generation {store.generation}.")
        self.story.print_step(
            f"Put {ORDERS:,} orders into a queue in one commit. The first attempt of one order in "
            f"{FLAKY_EVERY} fails because the card service is down. One more order is poison: a "
            "charge of minus one cent always fails."
        )
        return poison

    def _kill_worker(self, store: Store, alice: WorkerProcess, lease: Lease) -> None:
        self.story.print_step(
            "Two workers start: alice, which acquires the lease on the shop, and bob."
        )
        self._claim("epoch of alice's lease on the shop", lease.epoch, 1)
        self._wait_for_counts(store, "orders charged", lambda counts: counts.done >= KILL_WORKER_AT)
        alice.kill()
        counts = self._counts(store)
        self.story.print_step(
            f"SIGKILL alice, with {counts.done:,} orders done and {counts.claimed} claimed. Bob gets "
            "the orders claimed by alice when those claims expire."
        )
        self._claim(
            "orders open when the worker was killed", _open_orders(counts), _open_orders(counts) > 0
        )

    def _check_lease_takeover(self, store: Store, old_lease: Lease, bob: WorkerProcess) -> None:
        new_lease = bob.lease()
        self.story.print_step(
            f"The shop's lease expired and {new_lease.worker} acquired it: epoch {old_lease.epoch} → {new_lease.epoch}."
        )
        self._claim("epoch of the lease after bob acquired it", new_lease.epoch, 2)
        try:
            store.transact(_write_under_lease, old_lease)
            refused = "it was written"
        except Fenced as error:
            refused = error.code
            self.story.print_step(
                f"A write under alice's old lease (epoch {old_lease.epoch}) is refused: {error}"
            )
        self._claim("a write under alice's old lease is refused", refused, "fenced")
        log = [(it.kind, it.worker, it.epoch) for it in store.read(leases.events, 0, 100)]
        moved = [("granted", "alice", 1), ("expired", "alice", 1), ("granted", "bob", 2)]
        self._claim("the lease log", ", ".join(kind for kind, *_ in log), log[:3] == moved)

    def _kill_writer(self, store: Store) -> int:
        self._wait_for_counts(store, "orders charged", lambda counts: counts.done >= KILL_WRITER_AT)
        killed = kill_writer(self.path)
        counts = self._counts(store)
        began_ns = SYSTEM.mono_ns()
        store.transact(_touch)
        took_ms = (SYSTEM.mono_ns() - began_ns) // MS
        self.story.print_step(
            f"SIGKILL the store's writer (pid {killed}), with {counts.done:,} done. The next commit "
            f"succeeded {took_ms} ms later: a client without a writer starts one and resolves its "
            "commits in flight."
        )
        self._claim(
            "orders open when the writer was killed", _open_orders(counts), _open_orders(counts) > 0
        )
        return killed

    def _finish(self, store: Store) -> None:
        self._wait_for_counts(store, "orders charged", lambda counts: _open_orders(counts) == 0)
        counts = self._counts(store)
        self.story.print_step(f"The queue is empty: {counts.done:,} done, {counts.dead} dead.")

    def _set_timer(self, store: Store) -> int:
        due_ns = store.now_ns() + REMIND_AFTER_NS
        store.transact(queue.put, TIMERS, Order(1, 101).payload, not_before_ns=due_ns)
        self.story.print_step(f"Set a reminder, due in {REMIND_AFTER_NS / S} s.")
        return due_ns

    def _fire_timer(self, store: Store, carol: WorkerProcess, due_ns: int) -> None:
        self.story.print_step("Reopened the store. A new worker starts: carol.")
        self._wait_for("the reminder", lambda: bool(store.read(reminders)))
        [fired] = store.read(reminders)
        late_ms = (fired.at_ns - due_ns) // MS
        self.story.print_step(f"{fired.worker} fired the reminder {late_ms} ms after it was due.")
        self._claim("worker that fired the timer, once, after the restart", fired.worker, "carol")
        self._claim("ms between due time and firing", late_ms, late_ms >= 0)
        carol.stop()

    def _check_orders(self, store: Store, poison: int) -> None:
        counts, charged = self._counts(store), store.read(charges)
        letters: list[DeadLetter] = store.read(queue.list_dead, QUEUE)
        once = sorted(it.order for it in charged) == list(range(1, ORDERS + 1))
        flaky = [it for it in charged if it.order % FLAKY_EVERY == 0]
        again = store.read(repeat_count)
        self._claim("orders done", counts.done, ORDERS)
        self._claim("charges recorded, one per order", len(charged), once)
        self._claim("cents charged", sum(it.cents for it in charged), _expected_cents())
        self._claim(
            "orders that failed at first and were retried",
            len(flaky),
            len(flaky) == ORDERS // FLAKY_EVERY and all(it.attempt > 1 for it in flaky),
        )
        self._claim(
            "dead letters: only the poison order", len(letters), _is_only_poison(letters, poison)
        )
        self._claim("orders left in the queue", _open_orders(counts), 0)
        self.story.print_step(
            f"Recorded {len(charged):,} charges for {ORDERS:,} orders. Repeated executions after a kill "
            f"that found an existing charge and changed nothing: {again}."
        )
        for letter in letters:
            self.story.print_step(f"Dead letter {letter.seq}: {letter.error.splitlines()[0]}")

    # -- waiting and checking
    # ------------------------------------------------------------------------

    def _claim(self, what: str, found: object, expected: object) -> None:
        """Record a claim. `expected` is the expected value, or whether `found` is right."""
        holds = expected if isinstance(expected, bool) else found == expected
        self.claims.append({"claim": what, "found": found, "holds": holds})

    def _counts(self, store: Store) -> QueueCounts:
        return store.read(queue.counts, QUEUE)

    def _wait_for_counts(
        self, store: Store, what: str, reached: Callable[[QueueCounts], bool]
    ) -> None:
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
            SYSTEM.sleep(POLL_S)


class DemoOutput:
    """Prints numbered lines, and on a terminal one progress line."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._step = 0
        self._is_terminal = sys.stderr.isatty()

    def print_step(self, text: str) -> None:
        self._step += 1
        lead = f"{self._step:2}  "
        print(
            textwrap.fill(text, 88, initial_indent=lead, subsequent_indent="    "), file=self._out
        )
        self._out.flush()

    def print_outcome(self, outcome: dict[str, Any], verdict: str) -> None:
        rows = [
            (it["claim"], it["found"], "yes" if it["holds"] else "NO") for it in outcome["claims"]
        ]
        print(f"\n{table(('claim', 'found', 'holds'), rows)}\n", file=self._out)
        print(f"{outcome['seconds']:.1f} s, {verdict}. Next commands:", file=self._out)
        for command in _next_commands(outcome):
            print(f"    {command}", file=self._out)
        self._out.flush()

    def progress(self, text: str) -> None:
        if self._is_terminal:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def writer_pid(path: Path) -> int:
    with _writer(path) as (pid, _):
        return pid


def kill_writer(path: Path) -> int:
    with _writer(path) as (pid, born):
        kill_verified(pid, born)
        return pid


@contextlib.contextmanager
def _writer(path: Path) -> Iterator[tuple[int, str]]:
    with connect(path.absolute()) as sock:
        yield peer_of(sock)


def _write_under_lease(txn: Txn, lease: Lease) -> None:
    txn.require_live(lease)
    _touch(txn)


def _touch(txn: Txn) -> None:
    txn.put((int(Space.APP_STATE), "demo", "touched"), b"")


def _open_orders(counts: QueueCounts) -> int:
    return counts.ready + counts.delayed + counts.claimed


def _expected_cents() -> int:
    return sum(100 + n for n in range(1, ORDERS + 1))


def _is_only_poison(letters: list[DeadLetter], poison: int) -> bool:
    return [letter.seq for letter in letters] == [poison] and "-1 cents" in letters[0].error


def _next_commands(outcome: dict[str, Any]) -> list[str]:
    path = outcome["store"]
    return [
        f"holdfast store info --store {path}",
        f"holdfast dead list {QUEUE} --store {path}",
        f"holdfast dead show {QUEUE} {outcome['poison_seq']} --store {path}",
        f"holdfast worlds list --universe {bank.app.universe} --store {path}",
        f"holdfast flows steps buy/ada --universe {agent_app.universe} --store {path}",
        f"holdfast tasks list --universe {print_app.app.universe} --store {path}",
        f"holdfast runs show {spark_part.NAME} --store {spark_part.ledger_path(path)}",
        f"rm -r {path}",
    ]

"""Two machines that share a store, one of which is cut off from it: it stops by itself, the other takes
over within the time to live of a lease and a second, and when the link is back, what the first still has in
hand counts for nothing.

Machines are network namespaces; see `tests.chaos.machines`. Times are those of the store: of the decisions in
its lease log.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.app.runtime import Runtime
from holdfast.authority import authority, workers
from holdfast.clock import S
from holdfast.durable import lease
from holdfast.durable.lease import LeaseEvent
from holdfast.errors import NotFound
from holdfast.store.api import Txn
from holdfast.world import catalog
from holdfast.world.catalog import subject_of
from tests.chaos.app import RECEIVER, WHO
from tests.chaos.isolated import CUT, GATE, TASK_LEASE_S, Desk, Held, Ordered, app, keep, work
from tests.chaos.machines import SERVER_ADDRESS, Machine, Switch
from tests.chaos.receiver import Receiver
from tests.chaos.stalls import Stalls
from tests.chaos.verdict import lease_events
from tests.pgcluster import DATABASE, USER, Cluster
from tests.process.watch import until
from tests.processes import Proc

MODULES = ("holdfast.store.postgres", "holdfast.roles.world_worker", "holdfast.durable.lease")

pytestmark = [pytest.mark.postgresql, pytest.mark.timeout(180)]

LEASE_S = 4.0
# What a takeover may take beyond the lease.
SLACK_S = 1.0
DESKS = 8
PACE_S = 0.02
LONG_S = 60.0
# What the cut-off machine is left alone for after the others have gone on.
BEYOND_S = 1.0


@dataclass
class Cut:
    """What happened to two machines, one of which was cut off and healed."""

    runtime: Runtime
    outside: Receiver
    # By store time, and by the clock of this machine: when the link was cut, and when it came back.
    cut_ns: int
    cut_s: float
    healed_s: float
    healed_ns: int
    # Worlds that the cut-off machine had at the time.
    had: set[str]
    events: dict[str, list[LeaseEvent]]
    stalled_s: float
    slowdown: float
    running: bool
    sent: list[str]
    desks: dict[str, Desk]

    def calls_of_cut(self, *, after_s: float, before_s: float = float("inf")) -> list[str]:
        return [
            f"{call.what} {call.id} {call.at_s - self.cut_s:+.2f} s"
            for call in self.outside.calls
            if call.who == CUT and call.what != "told" and after_s < call.at_s < before_s
        ]


class Load:
    """Orders and tasks, one after another, from a machine that is not cut off."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.orders: list[str] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._send, daemon=True)
        self.failure: BaseException | None = None

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()

    def _send(self) -> None:
        try:
            number = 0
            while not self._ended.wait(PACE_S):
                number += 1
                id = f"o{number}"
                self._runtime.world(Desk, f"desk-{number % DESKS}").send(Ordered(id))
                self.orders.append(id)
                if number % 3 == 0:
                    self._runtime.submit(work, f"t{number}")
        except BaseException as error:
            self.failure = error


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cut]:
    folder = tmp_path_factory.mktemp("machines")
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(Switch())
        machines = [switch.machine(name) for name in (CUT, "b")]
        cluster = stack.enter_context(
            Cluster(standby=False, host=SERVER_ADDRESS, prefix=switch.prefix)
        )
        outside = stack.enter_context(Receiver(folder / "outside"))
        port = cluster.primary.port
        direct = f"postgresql://{USER}@/{DATABASE}?host={cluster.folder}&port={port}"
        runtime: Runtime = stack.enter_context(app.open(direct, roles=()))
        procs = [
            stack.enter_context(_worker(machine, port, outside.path, folder / "gate"))
            for machine in machines
        ]
        for proc in procs:
            proc.expect("ready", LONG_S)
        yield _cut_and_heal(runtime, outside, machines[0], procs, folder / "gate")


def _worker(machine: Machine, port: int, outside: Path, gate: Path) -> Proc:
    url = f"postgresql://{USER}@{SERVER_ADDRESS}:{port}/{DATABASE}"
    up = [
        sys.executable, "-m", "holdfast.cli", "up", "tests.chaos.isolated:app", "--store", url,
        "--worker", machine.name, "--lease-s", f"{LEASE_S:g}",
    ]  # fmt: skip
    env = {RECEIVER: str(outside), WHO: machine.name, GATE: str(gate)}
    return Proc.spawn(machine.command(up), ready=None, env=env)


def _cut_and_heal(
    runtime: Runtime, outside: Receiver, machine: Machine, procs: list[Proc], gate: Path
) -> Cut:
    store = runtime.store
    # Whoever is there when a world comes into being may get it: so both, from the beginning.
    until(lambda: _live(runtime) >= {CUT, "b"}, "both", LONG_S)
    with Load(runtime) as load, Stalls() as stalls:
        until(lambda: _worlds_of(runtime, CUT) and _worlds_of(runtime, "b"), "worlds", LONG_S)
        # An effect and a task that the machine is in the midst of when it is cut off.
        names = iter(range(1000))
        until(lambda: _begin(runtime, outside, "effect", next(names)), "an effect", LONG_S)
        until(lambda: _begin(runtime, outside, "task", next(names)), "a task", LONG_S)
        had = _worlds_of(runtime, CUT)
        machine.cut()
        cut_ns, cut_s = store.now_ns(), time.monotonic()
        until(lambda: not _worlds_of(runtime, CUT), "the takeover", LONG_S)
        until(lambda: time.monotonic() > cut_s + LEASE_S + SLACK_S + BEYOND_S, "a while", LONG_S)
        machine.heal()
        healed_s, healed_ns = time.monotonic(), store.now_ns()
        until(lambda: _spoke(runtime, CUT, healed_ns), f"its return\n{procs[0].errors}", LONG_S)
        gate.touch()
        until(lambda: _calls_since(outside, healed_s), "its work", LONG_S)
    assert load.failure is None, load.failure
    until(lambda: _settled(runtime, load.orders), "the end of all", LONG_S)
    return Cut(
        runtime, outside, cut_ns, cut_s, healed_s, healed_ns, had, lease_events(store),
        stalls.longest_s, stalls.slowdown, all(proc.running for proc in procs), load.orders, _desks(runtime),
    )  # fmt: skip


def _begin(runtime: Runtime, outside: Receiver, what: str, number: int) -> bool:
    """Ask for one that takes long on the machine that is cut off; whether it was that one that began it."""
    id = f"long-{what}-{number}"
    if what == "effect":
        runtime.world(Desk, f"desk-{number % DESKS}").send(Held(id))
    else:
        runtime.submit(keep, id)
    first = until(
        lambda: next((call.who for call in outside.calls if call.id == id), ""), id, LONG_S
    )
    return first == CUT


def _worlds_of(runtime: Runtime, worker: str) -> set[str]:
    """Resources of worlds that this worker has now."""

    def look(txn: Txn) -> set[str]:
        worlds = catalog.worlds(txn, app.universe, "", DESKS)
        resources = [subject_of(app.universe, record.world_id) for record in worlds]
        found = {resource: lease.current(txn, resource) for resource in resources}
        return {
            resource
            for resource, held in found.items()
            if held is not None and held.worker == worker and held.state is lease.State.HELD
        }

    return runtime.store.read(look)


def _live(runtime: Runtime) -> set[str]:
    """Who may be given worlds."""

    def look(txn: Txn) -> set[str]:
        epoch = authority.epoch(txn, app.universe)
        found = workers.live(txn, app.universe, txn.now_ns, int(LEASE_S / 2 * S), epoch)
        return {one.worker for one in found}

    return runtime.store.read(look)


def _spoke(runtime: Runtime, worker: str, since_ns: int) -> bool:
    """Whether a worker was heard of since."""
    known: list[workers.WorkerRecord] = runtime.store.read(workers.known, app.universe)
    return any(one.worker == worker and one.heartbeat_ns > since_ns for one in known)


def _calls_since(outside: Receiver, at_s: float) -> bool:
    calls = [call for call in outside.calls if call.who == CUT and call.what != "told"]
    return any(call.at_s > at_s for call in calls)


def _desks(runtime: Runtime) -> dict[str, Desk]:
    found = {}
    for number in range(DESKS):
        with contextlib.suppress(NotFound):
            found[f"desk-{number}"] = runtime.world(Desk, f"desk-{number}").state()
    return found


def _settled(runtime: Runtime, orders: list[str]) -> bool:
    """Whether all that was sent has come, and is paid."""
    desks = _desks(runtime).values()
    came = {id for desk in desks for id in desk.ordered}
    return came >= set(orders) and all(len(desk.ordered) == len(desk.paid) for desk in desks)


# -- facts -----------------------------------------------------------------------------------------


def test_the_other_machine_takes_over_within_the_lease_and_a_second(cut: Cut) -> None:
    assert cut.had
    # The second is for a machine that has nothing else to do: who decides, decides as late as it computes.
    bound_ns = int((LEASE_S + SLACK_S * cut.slowdown + cut.stalled_s) * S)
    for resource in cut.had:
        taken = [
            event
            for event in cut.events[resource]
            if event.kind == "granted" and event.worker == "b" and event.decided_ns > cut.cut_ns
        ]
        assert taken, resource
        took_s = (taken[0].decided_ns - cut.cut_ns) / S
        print(f"taken over after {took_s:.2f} s, slowdown {cut.slowdown:.1f}")
        assert taken[0].decided_ns - cut.cut_ns <= bound_ns


def test_nobody_takes_over_before_the_lease_has_run_out(cut: Cut) -> None:
    for resource in cut.had:
        before = None
        for event in cut.events[resource]:
            if event.kind == "granted" and before is not None and before.kind == "expired":
                assert event.decided_ns >= before.expires_ns
            before = event


def test_the_machine_that_is_cut_off_begins_nothing_once_its_leases_have_run_out(cut: Cut) -> None:
    """It could: whom it calls is within its reach."""
    over_s = cut.cut_s + LEASE_S + cut.stalled_s
    assert cut.calls_of_cut(after_s=over_s, before_s=cut.healed_s) == []


def test_a_task_is_told_that_its_lease_has_run_out_while_the_store_is_away(cut: Cut) -> None:
    told = [call for call in cut.outside.calls if call.what == "told" and call.who == CUT]
    assert told
    late_s = SLACK_S * cut.slowdown + cut.stalled_s
    assert told[0].at_s <= cut.cut_s + TASK_LEASE_S + late_s


def test_what_the_healed_machine_brings_late_counts_for_nothing(cut: Cut) -> None:
    paid = [value for desk in cut.desks.values() for value in desk.paid]
    late = [value for value in paid if value.endswith(f"by {CUT}")]
    assert late == []


def test_every_order_has_one_receipt(cut: Cut) -> None:
    ordered = [id for desk in cut.desks.values() for id in desk.ordered]
    paid = [value.split()[0] for desk in cut.desks.values() for value in desk.paid]
    assert Counter(ordered) == Counter(paid)
    assert set(cut.sent) <= set(ordered)
    assert max(Counter(ordered).values()) == 1


def test_epochs_only_grow(cut: Cut) -> None:
    for resource, events in cut.events.items():
        epochs = [event.epoch for event in events if event.kind == "granted"]
        assert epochs == list(range(1, len(epochs) + 1)), resource


def test_the_healed_machine_goes_on_without_a_restart(cut: Cut) -> None:
    assert cut.running
    assert cut.calls_of_cut(after_s=cut.healed_s)

"""Part 2 of the demo: twenty accounts and two workers, one of which is killed.

Accounts are worlds. They pay each other by mail, notify the outside of each payment by an effect,
and set a timer. One worker is killed with SIGKILL, and the other takes over its worlds. At the end
no cent is missing, every payment has one receipt, and a replay of every journal produces the same
entries.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from examples.demo.bank import DemoAccount, Deposited, PayOrdered, app
from examples.demo.up_process import UpProcess
from holdfast.app.runtime import Runtime
from holdfast.clock import MS, SYSTEM, S
from holdfast.errors import Timeout
from holdfast.world import restore
from holdfast.world.catalog import list_worlds

APP = "examples.demo.bank:app"
ACCOUNTS = 20
OPENING = 1_000
PAYMENTS = 1_000
KILL_AT = 300
PHASE_S_MAX = 60.0

PrintStep = Callable[[str], None]
CheckClaim = Callable[[str, object, object], None]
ShowProgress = Callable[[str], None]


def run_part(
    path: Path, print_step: PrintStep, check_claim: CheckClaim, progress: ShowProgress
) -> None:
    processes: list[UpProcess] = []
    try:
        with app.open(str(path), roles=()) as rt:
            processes += [UpProcess(path, "dora", APP), UpProcess(path, "emil", APP)]
            _run_part(rt, processes, print_step, check_claim, progress)
    finally:
        for one in processes:
            one.stop()


def _run_part(
    rt: Runtime,
    processes: list[UpProcess],
    print_step: PrintStep,
    check_claim: CheckClaim,
    progress: ShowProgress,
) -> None:
    accounts = [rt.world(DemoAccount, f"account-{n:02}") for n in range(ACCOUNTS)]
    rt.send_many([(account, Deposited(OPENING)) for account in accounts])
    print_step(
        f"Part 2: {ACCOUNTS} accounts, each a world with a balance of {OPENING:,}, and two workers, "
        f"dora and emil. {PAYMENTS:,} payments between accounts are sent. An effect notifies the "
        "outside of each."
    )
    orders = [
        (accounts[n % ACCOUNTS], PayOrdered(f"account-{(n * 7 + 3) % ACCOUNTS:02}", 1 + n % 5))
        for n in range(PAYMENTS)
    ]
    killed_ns = 0
    for at in range(0, PAYMENTS, 50):
        rt.send_many(orders[at : at + 50])
        if at == KILL_AT:
            dora = processes.pop(0)
            dora.kill()
            killed_ns = SYSTEM.mono_ns()
            print_step(f"SIGKILL dora, with {at + 50} payments sent. emil takes over its worlds.")

    def told() -> int:
        return sum(account.state().notified for account in accounts)

    _wait(lambda: told() >= PAYMENTS, "payments told", lambda: progress(f"{told():5,} notified"))
    progress("")
    took_ms = (SYSTEM.mono_ns() - killed_ns) // MS
    print_step(f"All payments are made and notified, {took_ms / 1000:.1f} s after the kill.")
    _wait(lambda: all(a.state().nudged for a in accounts), "timers", lambda: None)
    states = [account.state() for account in accounts]
    check_claim("sum of all balances", sum(s.balance for s in states), ACCOUNTS * OPENING)
    check_claim("payments notified, one receipt each", told(), PAYMENTS)
    check_claim("timers fired, one per account", sum(s.nudged for s in states), ACCOUNTS)
    steps = rt.store.read(_replay_all, rt)
    print_step(f"Every journal is replayed from its start: {steps:,} steps, all equal.")
    # Each payment is three steps: the order, its receipt by the payee, and the effect's receipt.
    check_claim("steps with an equal result in the replay", steps, 3 * PAYMENTS + 2 * ACCOUNTS)
    child = accounts[0].fork("what-if", at=1)
    check_claim(
        "balance of a fork of account-00 after its first event", child.state().balance, OPENING
    )


def _replay_all(txn: object, rt: Runtime) -> int:
    from holdfast.world.reducer import WorldSpec

    total = 0
    for one in list_worlds(txn, rt.universe, "", 1000):  # type: ignore[arg-type]
        world = WorldSpec(rt.universe, one.world_id, one.name, app.programs[one.type], app)
        total += restore.check_snapshots(txn, world)  # type: ignore[arg-type]
    return total


def _wait(reached: Callable[[], bool], what: str, show: Callable[[], None]) -> None:
    deadline_ns = SYSTEM.mono_ns() + int(PHASE_S_MAX * S)
    while not reached():
        show()
        if SYSTEM.mono_ns() > deadline_ns:
            raise Timeout(what=what, seconds=PHASE_S_MAX)
        SYSTEM.sleep(0.05)

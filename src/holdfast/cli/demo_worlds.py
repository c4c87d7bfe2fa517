"""The demo's second act: twenty accounts, two workers, and one of them is killed.

Accounts are worlds. They pay each other by mail, have each payment told to the outside by an effect,
and set a timer. One worker is SIGKILLed in the middle; the other takes its worlds over. At the end
no cent is missing, every payment was told once, and a replay of every journal comes out alike.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from holdfast.app.runtime import Runtime
from holdfast.cli.demo_bank import Account, Deposited, PayOrdered, app
from holdfast.clock import MS, SYSTEM, S
from holdfast.errors import Timeout
from holdfast.world import restore
from holdfast.world.catalog import worlds

BANK = "holdfast.cli.demo_bank:app"
ACCOUNTS = 20
OPENING = 1_000
PAYMENTS = 1_000
KILL_AT = 300
LEASE_S = 1.5
PHASE_S_MAX = 60.0

Tell = Callable[[str], None]
Claim = Callable[[str, object, object], None]
Progress = Callable[[str], None]


class Up:
    """A worker process: `holdfast up`."""

    def __init__(
        self, path: Path, name: str, app: str = BANK, env: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        options = ["--store", str(path), "--worker", name, "--lease-s", str(LEASE_S)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.cli", "up", app, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()

    @property
    def gone(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def leave(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self.kill()


def play(path: Path, tell: Tell, claim: Claim, progress: Progress) -> None:
    up: list[Up] = []
    try:
        with app.open(str(path), roles=()) as rt:
            up += [Up(path, "dora"), Up(path, "emil")]
            _play(rt, up, tell, claim, progress)
    finally:
        for one in up:
            one.leave()


def _play(rt: Runtime, up: list[Up], tell: Tell, claim: Claim, progress: Progress) -> None:
    accounts = [rt.world(Account, f"account-{n:02}") for n in range(ACCOUNTS)]
    rt.send_many([(account, Deposited(OPENING)) for account in accounts])
    tell(
        f"Second act: {ACCOUNTS} accounts, each a world with {OPENING:,} in it, and two workers, "
        f"dora and emil. {PAYMENTS:,} payments from one to another are sent; each is told to the "
        "outside by an effect."
    )
    orders = [
        (accounts[n % ACCOUNTS], PayOrdered(f"account-{(n * 7 + 3) % ACCOUNTS:02}", 1 + n % 5))
        for n in range(PAYMENTS)
    ]
    for at in range(0, PAYMENTS, 50):
        rt.send_many(orders[at : at + 50])
        if at == KILL_AT:
            dora = up.pop(0)
            dora.kill()
            killed_ns = SYSTEM.mono_ns()
            tell(f"SIGKILL dora, with {at + 50} payments sent. Her worlds go to emil.")

    def told() -> int:
        return sum(account.state().notified for account in accounts)

    _wait(lambda: told() >= PAYMENTS, "payments told", lambda: progress(f"{told():5,} told"))
    progress("")
    took_ms = (SYSTEM.mono_ns() - killed_ns) // MS
    tell(f"All payments are made and told, {took_ms / 1000:.1f} s after the kill.")
    _wait(lambda: all(a.state().nudged for a in accounts), "timers", lambda: None)
    states = [account.state() for account in accounts]
    claim("money in all accounts", sum(s.balance for s in states), ACCOUNTS * OPENING)
    claim("payments told to the outside, a receipt each", told(), PAYMENTS)
    claim("timers fired, one an account", sum(s.nudged for s in states), ACCOUNTS)
    steps = rt.store.read(_replay_all, rt)
    tell(f"Every journal is replayed from its start: {steps:,} steps, all come out alike.")
    # Each payment is a step that orders it, one that receives it, and one for the receipt.
    claim("steps that came out alike in the replay", steps, 3 * PAYMENTS + 2 * ACCOUNTS)
    child = accounts[0].fork("what-if", at=1)
    claim("a fork of account-00 after its first event has", child.state().balance, OPENING)


def _replay_all(txn: object, rt: Runtime) -> int:
    from holdfast.world.kernel import World

    total = 0
    for one in worlds(txn, rt.universe, "", 1000):  # type: ignore[arg-type]
        world = World(rt.universe, one.world_id, one.name, app.programs[one.type], app)
        total += restore.check_snapshots(txn, world)  # type: ignore[arg-type]
    return total


def _wait(reached: Callable[[], bool], what: str, show: Callable[[], None]) -> None:
    deadline_ns = SYSTEM.mono_ns() + int(PHASE_S_MAX * S)
    while not reached():
        show()
        if SYSTEM.mono_ns() > deadline_ns:
            raise Timeout(what=what, seconds=PHASE_S_MAX)
        SYSTEM.sleep(0.05)

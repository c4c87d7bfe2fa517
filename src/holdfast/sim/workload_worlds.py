"""Actors around worlds: world workers, orchestrators, pools, timer workers, senders, and a keeper.

The roles are in `processes`, what effects find outside in `outside`, the operator in `workload_keeper`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from holdfast.clock import S
from holdfast.errors import (
    CommitUnknown,
    HoldfastError,
    KeyConflict,
    NotFound,
    StoreReplaced,
)
from holdfast.messages import Ingress, event_ingress
from holdfast.roles.role import Role
from holdfast.roles.world_worker import WorkerPolicy
from holdfast.sim import world_app
from holdfast.sim.actor import Actor, Life
from holdfast.sim.household import Household
from holdfast.sim.outside import Outside
from holdfast.sim.processes import Firing, Hosting, Leading, Performing
from holdfast.sim.settings import (
    HORIZON_NS,
    LEASE_NS,
    STUCK_MAX,
    UNKNOWN_NS,
    Settings,
    Workload,
)
from holdfast.sim.workload_keeper import FORKS, Keeper, worlds_there
from holdfast.sim.world_app import ABROAD, UNIVERSE, app
from holdfast.world.host import Budgets, SnapshotPolicy
from holdfast.world.ingress import Address, deliver, deliver_many

# Everything small, so that each bound is met many times in a run.
POLICY = WorkerPolicy(
    lease_ttl_s=LEASE_NS / S,
    idle_s=0.8,
    worlds_per_tick=3,
    tick_s=0.4,
    stuck_max=STUCK_MAX,
    heartbeat_s=0.5,
    compacted_per_tick=1,
    retry_s=0.2,
    budgets=Budgets(max_inbox_batch=3, max_effects_per_cycle=2, max_cycle_wall_ms=100),
    snapshots=SnapshotPolicy(entries=3, keep=2),
)
# Cycles so long that receipts fit in beside what waits.
HOUSEHOLD_POLICY = replace(
    POLICY,
    idle_s=6.0,
    budgets=Budgets(max_inbox_batch=12, max_effects_per_cycle=6, max_cycle_wall_ms=100),
)
LEADER_TTL_S = 1.5
# How long a sender rests. What is carried counts only if nobody sends meanwhile: there it rests for longer.
SENDS_MS = 150
SPARSE_MS = 900
# Of the events of accounts that a process hosts and fires the timers of, those that are about these.
TIMERS_MILLE = 500
LARGE = "." * 5000
# Of a thousand starts of a worker, those with the earlier version of the code.
EARLIER_MILLE = 800
# Of a thousand events, those that the earlier version does not know.
RENEWED_MILLE = 300
# Keys that a sender may send again later, and how often it does.
PAST_KEPT = 8
LATE_MILLE = 500


class AccountHosting(Hosting):
    """A worker of the simulated accounts, whose reducers may kill it, or look where they must not.

    With two versions about, it may start with the other one each time. The first worker has the later
    one, so that what only that knows, or can repeat, goes on in the end.
    """

    def role(self, life: Life) -> Role:
        if life.settings.versions:
            back = self.name != "world0" and life.tape.chance(EARLIER_MILLE)
            self.app = world_app.version(life.settings.keep, back=back)
            version = world_app.FORMER if back else world_app.LATEST
            life.note("code", unknown=list(world_app.LATER if back else ()), version=version)

        def strike() -> None:
            if not life.calm:
                life.seen("reducer killed its process")
                current = life.scheduler.current
                assert current is not None
                life.scheduler.kill(current)

        world_app.outside(strike=strike, mood=lambda: life.scheduler.steps)
        return super().role(life)


# Claims so short, and budgets so small, that both run out many times in a run.
CLAIM_MS = 2_600
IDLE_MS = 2_000


def worlds(settings: Settings) -> list[Actor]:
    """Everybody that worlds need, and who uses them."""
    outside = Outside()
    abroad = (ABROAD,) if settings.lanes else ()  # of one pool: the others learn of the route
    changes = {
        "lease_ttl_ms": CLAIM_MS,
        "expiries_max": settings.expiries_max,
        "idle_sleep_max_ms": IDLE_MS,
    }
    code = world_app.version(settings.keep)
    hosts: list[Actor] = [
        AccountHosting(f"world{n}", code, POLICY) for n in range(settings.world_workers)
    ]
    if settings.household:
        hosting = AccountHosting("world0", code, HOUSEHOLD_POLICY)
        hosts[0] = Household(hosting, code, outside.adapters, changes)
    return [
        *hosts,
        *(
            Leading(f"leader{n}", code, LEADER_TTL_S, UNKNOWN_NS / S, settings.deleted_ns / S)
            for n in range(settings.orchestrators)
        ),
        *(
            Performing(f"pool{n}", app, outside.adapters, changes, abroad=abroad if n == 0 else ())
            for n in range(settings.pools)
        ),
        *(Firing(f"timer{n}", app) for n in range(settings.timer_workers)),
        *(Sender(f"sender{n}") for n in range(settings.senders)),
        Keeper("keeper"),
    ]


class Sender(Actor):
    """Sends keyed events, again and again until it knows, and remembers that across crashes."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.sent = 0
        self.pending: tuple[str, str, Ingress, int] | None = None
        # The latest that were acknowledged, of those that not every version of the code knows.
        self.past: list[tuple[str, str, Ingress, int]] = []

    def idle(self) -> bool:
        return self.pending is None

    def live(self, life: Life) -> None:
        while True:
            if self.pending is None:
                if life.calm:
                    life.sleep(S)
                    continue
                self.pending = self._new(life)
            to, key, ingress, since_ns = self.pending
            if life.store.now_ns() - since_ns > HORIZON_NS:
                life.seen("sender gave up")
                self.pending = None
                continue
            try:
                self._send(life, to, key, ingress)
            except StoreReplaced:
                life.store.reopen()
                self.pending = None
                continue
            except HoldfastError as error:
                if not error.retryable and not isinstance(error, CommitUnknown):
                    raise
                life.rest(ms=100)
                continue
            self.pending = None
            # Not so late that its key may be forgotten: then it would be new.
            if life.tape.chance(200) and life.store.now_ns() - since_ns <= HORIZON_NS:
                other = event_ingress(*app.encode_event(world_app.Rolled(f"{key}!")))
                self._again(life, to, key, other if life.tape.chance(300) else ingress)
            if ingress.type in world_app.LATER:
                self.past = [*self.past, (to, key, ingress, since_ns)][-PAST_KEPT:]
            if self.past:
                self._ask_again(life)
            life.rest(ms=SPARSE_MS if life.settings.household else SENDS_MS)

    def _send(self, life: Life, to: str, key: str, ingress: Ingress) -> None:
        try:
            if life.tape.chance(150):
                # Twice in one: the second finds the first.
                item = (_address(life, to), key, ingress)
                life.store.transact(deliver_many, [item, item])
            else:
                life.store.transact(deliver, _address(life, to), key, ingress)
        except NotFound:
            life.seen("sent to a fork that is not there")

    def _again(self, life: Life, to: str, key: str, ingress: Ingress) -> None:
        """A doubled message, or the same key by mistake for something else."""
        try:
            life.store.transact(deliver, _address(life, to), key, ingress)
        except KeyConflict:
            life.seen("sender's key refused")
        except StoreReplaced:
            life.store.reopen()
        except HoldfastError as error:
            if not isinstance(error, CommitUnknown | NotFound) and not error.retryable:
                raise

    def _ask_again(self, life: Life) -> None:
        """A late retry: by now the first may be handled, wait for other code, or be dead."""
        to, key, ingress, since_ns = life.tape.pick(self.past)
        if life.tape.chance(LATE_MILLE) and life.store.now_ns() - since_ns <= HORIZON_NS:
            self._again(life, to, key, ingress)

    def _new(self, life: Life) -> tuple[str, str, Ingress, int]:
        self.sent += 1
        id = f"{self.name}-{self.sent}"
        accounts = [f"a{n}" for n in range(life.settings.accounts)]
        to = life.tape.pick(accounts)
        wanting = life.settings.workload == Workload.EFFECTS
        if life.tape.chance(200):
            to = f"{to}.f{life.tape.draw(FORKS)}"
            to = _fork_there(life, to) if wanting else to
        event = _wanting(life, id, accounts) if wanting else _event(life, id, accounts)
        if wanting and "." in to and life.tape.chance(400):
            # A fork knows the purchases of its parent, and must not take them back.
            event = world_app.Regretted(id, life.tape.draw(3))
        name, value = app.encode_event(event)
        return to, id, event_ingress(name, value), life.store.now_ns()


def _fork_there(life: Life, to: str) -> str:
    """A fork that is there, if there is any."""
    try:
        there = [one.name for one in life.store.peek(worlds_there) if "." in one.name]
    except StoreReplaced:
        return to
    return str(life.tape.pick(there)) if there else to


RULES = ("0 */6 * * *", "*/1 * * * *", "*/5 * * * *")


def _event(life: Life, id: str, accounts: list[str]) -> Any:
    tape = life.tape
    if life.settings.versions and tape.chance(RENEWED_MILLE):
        return world_app.Renewed(id, ("", "", "timer", "mail")[tape.draw(4)], tape.pick(accounts))
    choice = tape.draw(40) // 2
    if choice < 5:
        return world_app.Paid(id, 1 + tape.draw(9), LARGE if choice == 1 else "")
    if choice < 9:
        return world_app.Moved(id, 1 + tape.draw(5), tape.pick(accounts))
    if choice < 11:
        return world_app.Rolled(id)
    if choice < 14:
        # Few keys and few wishes: the same again, and the same key for something else.
        return world_app.Ordered(id, "ab"[tape.draw(2)], (None, "k0", "k1")[tape.draw(3)])
    if choice < 16:
        return world_app.Slept(id, tape.draw(30), (None, "t0")[tape.draw(2)])
    if choice == 16:
        return world_app.Woken(id, "t0")
    if choice == 17:
        return world_app.Unheard(id)
    if choice == 18:
        return world_app.Botched(id)
    if tape.chance(500):
        return world_app.Moody(id) if tape.chance(600) else world_app.Fickle(id)
    return world_app.Deadly(id)


def _wanting(life: Life, id: str, accounts: list[str]) -> Any:
    """Events of accounts that want much of others."""
    tape = life.tape
    if life.settings.household and tape.chance(TIMERS_MILLE):
        return _timing(life, id)
    choice = tape.draw(24)
    # Few keys and few wishes: the same again, and the same key for something else.
    key = (None, None, "k0", "k1")[tape.draw(4)]
    if choice < 7:
        return world_app.Bought(id, "ab"[tape.draw(2)], key, tape.draw(3))
    if choice < 10:
        return world_app.Ordered(id, "ab"[tape.draw(2)], key)
    if choice < 12:
        return world_app.Regretted(id, tape.draw(3))
    slot = (None, "t0", "t1")[tape.draw(3)]
    if choice < 15:
        return world_app.Slept(id, tape.draw(6), slot)
    if choice < 17:
        return world_app.Dated(id, tape.draw(8) - 3, slot)
    if choice == 17:
        missed = tape.pick(("one", "skip", "all"))
        # A clock that leaps by a day and a half must not bring two thousand events.
        rule = RULES[0] if missed == "all" else tape.pick(RULES)
        return world_app.Ticked(id, rule, missed, "t0")
    if choice == 18:
        return world_app.Woken(id, tape.pick(("t0", "t1")))
    if choice in (19, 20) and not life.settings.crowded:
        return world_app.Wrote(id, "b0")
    if choice < 22:
        return world_app.Moved(id, 1 + tape.draw(5), tape.pick(accounts))
    return world_app.Paid(id, 1 + tape.draw(9))


def _timing(life: Life, id: str) -> Any:
    """Timers that are soon due, by either clock, some at the same time; some that repeat; the end of some."""
    tape = life.tape
    slot = ("t0", "t0", "t1", None)[tape.draw(4)]
    choice = tape.draw(13)
    if choice < 5:
        return world_app.Slept(id, tape.draw(3), slot)
    if choice < 8:
        return world_app.Dated(id, tape.draw(3) - 1, slot)
    if choice == 8:
        return world_app.Ticked(id, RULES[1], tape.pick(("one", "skip")), "t1")
    return world_app.Woken(id, tape.pick(("t0", "t1")))


def _address(life: Life, to: str) -> Address:
    """Accounts are made by what is sent to them first; a fork must be there."""
    mint = None if "." in to else life.clock.entropy(16).hex()
    return Address(UNIVERSE, "Account", to, mint)

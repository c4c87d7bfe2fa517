"""Actors around worlds: world workers and orchestrators (see `processes`), senders, and a keeper.

The keeper is an operator who does whatever an operator may do to worlds, workers and the authority,
and tidies up once faults have stopped.
"""

from __future__ import annotations

from typing import Any

from holdfast import codec, messages
from holdfast.authority import authority, workers
from holdfast.clock import S
from holdfast.durable import item as items
from holdfast.durable import journal, queue
from holdfast.errors import (
    CommitUnknown,
    HoldfastError,
    IllegalTransition,
    Invalid,
    KeyConflict,
    NotFound,
    ReplayDiverged,
    StoreReplaced,
)
from holdfast.messages import Ingress, Intent, Receipt, event_ingress
from holdfast.ops import service
from holdfast.roles import receipts
from holdfast.roles.role import Role
from holdfast.roles.world_worker import WorkerPolicy
from holdfast.sim import world_app
from holdfast.sim.actor import Actor, Life
from holdfast.sim.outside import Outside
from holdfast.sim.processes import Firing, Hosting, Leading, Performing
from holdfast.sim.settings import ATTEMPTS, HORIZON_NS, LEASE_NS, STUCK_MAX, Settings, Workload
from holdfast.sim.world_app import ABROAD, UNIVERSE, app
from holdfast.store import tuples
from holdfast.store.api import Txn
from holdfast.world import catalog, publish, redrive
from holdfast.world import fork as forks
from holdfast.world.catalog import Event as Change
from holdfast.world.catalog import Status, WorldRecord, subject_of
from holdfast.world.host import Budgets, SnapshotPolicy
from holdfast.world.ingress import Address, deliver, deliver_many
from holdfast.world.kernel import World

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
LEADER_TTL_S = 1.5
LARGE = "." * 5000
# What an operator says of an effect that he took care of himself.
BY_HAND = "by_hand"


class AccountHosting(Hosting):
    """A worker of the simulated accounts, whose reducers may kill it, or look where they must not."""

    def role(self, life: Life) -> Role:
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
    abroad = (ABROAD,) if settings.lanes else ()
    changes = {
        "lease_ttl_ms": CLAIM_MS,
        "expiries_max": settings.expiries_max,
        "idle_sleep_max_ms": IDLE_MS,
    }
    return [
        *(AccountHosting(f"world{n}", app, POLICY) for n in range(settings.world_workers)),
        *(Leading(f"leader{n}", app, LEADER_TTL_S) for n in range(settings.orchestrators)),
        *(
            Performing(f"pool{n}", app, outside.adapters, changes, abroad=abroad)
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
            if life.tape.chance(200):
                other = event_ingress(*app.encode_event(world_app.Rolled(f"{key}!")))
                self._again(life, to, key, other if life.tape.chance(300) else ingress)
            life.rest(ms=150)

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
        there = [one.name for one in life.store.peek(_worlds) if "." in one.name]
    except StoreReplaced:
        return to
    return str(life.tape.pick(there)) if there else to


# Names of forks that an account may have.
FORKS = 2
RULES = ("0 */6 * * *", "*/1 * * * *", "*/5 * * * *")


def _event(life: Life, id: str, accounts: list[str]) -> Any:
    tape = life.tape
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
    return world_app.Fickle(id) if tape.chance(250) else world_app.Deadly(id)


def _wanting(life: Life, id: str, accounts: list[str]) -> Any:
    """Events of accounts that want much of others."""
    tape = life.tape
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
    if choice == 19 and not life.settings.crowded:
        return world_app.Wrote(id, "b0")
    if choice < 22:
        return world_app.Moved(id, 1 + tape.draw(5), tape.pick(accounts))
    return world_app.Paid(id, 1 + tape.draw(9))


def _address(life: Life, to: str) -> Address:
    """Accounts are made by what is sent to them first; a fork must be there."""
    mint = None if "." in to else life.clock.entropy(16).hex()
    return Address(UNIVERSE, "Account", to, mint)


class Keeper(Actor):
    """An operator. Once faults have stopped, it undoes what keeps worlds from going on."""

    def live(self, life: Life) -> None:
        while True:
            life.rest(ms=600)
            try:
                if life.calm:
                    self._tidy(life)
                else:
                    self._meddle(life)
            except ReplayDiverged as error:
                life.note("diverged", universe=UNIVERSE, **error.fields)
            except (CommitUnknown, NotFound, IllegalTransition, Invalid):
                life.seen("keeper refused")
            except StoreReplaced:
                life.store.reopen()
            except HoldfastError as error:
                if not error.retryable:
                    raise

    def _tidy(self, life: Life) -> None:
        for world in life.store.read(_worlds):
            diverged = world.blocker is not None and world.blocker.code == ReplayDiverged.code
            if diverged:
                # Nothing makes a fickle reducer do again what it did.
                life.store.transact(catalog.change, UNIVERSE, world.world_id, Change.DELETE)
            elif world.status in (Status.PAUSED, Status.PARKED):
                life.store.transact(catalog.change, UNIVERSE, world.world_id, Change.RESUME)
        for one in life.store.read(workers.known, UNIVERSE):
            if one.draining:
                life.store.transact(workers.drain, UNIVERSE, one.worker, False)

    def _meddle(self, life: Life) -> None:
        if life.settings.workload == Workload.EFFECTS and life.tape.chance(350):
            if life.tape.chance(300):
                self._answer(life)
            else:
                self._redrive(life)
            return
        choice = life.tape.draw(20)
        if choice < 4:
            self._fork(life)
        elif choice < 8:
            self._change(life, life.tape.pick((Change.PAUSE, Change.RESUME, Change.RESUME)))
        elif choice == 8 and life.tape.chance(400):
            self._change(life, Change.DELETE)
        elif choice < 12:
            worker = f"world{life.tape.draw(life.settings.world_workers)}"
            life.store.transact(workers.drain, UNIVERSE, worker, life.tape.chance(400))
        elif choice < 14:
            self._assign(life)
        elif choice < 16:
            self._redrive(life)
        elif choice == 16:
            life.store.transact(authority.force_release, UNIVERSE, "an operator wants it")
        elif choice > 16:
            life.store.transact(authority.mark_stale, UNIVERSE)

    def _world(self, life: Life) -> WorldRecord:
        there = [one for one in life.store.read(_worlds) if one.status is not Status.DELETED]
        if not there:
            raise NotFound(what="world", universe=UNIVERSE)
        found: WorldRecord = life.tape.pick(there)
        return found

    def _change(self, life: Life, event: Change) -> None:
        world = self._world(life)
        life.store.transact(catalog.change, UNIVERSE, world.world_id, event)

    def _assign(self, life: Life) -> None:
        world_id = self._world(life).world_id
        if life.tape.draw(2):
            life.store.transact(catalog.unassign, UNIVERSE, world_id)
            return
        worker = f"world{life.tape.draw(life.settings.world_workers)}"
        priority, pinned = life.tape.draw(3), life.tape.chance(200)
        life.store.transact(
            catalog.assign, UNIVERSE, world_id, worker, priority, "operator", pinned
        )

    def _fork(self, life: Life) -> None:
        parent = self._world(life)
        code = World(UNIVERSE, parent.world_id, parent.name, app.programs[parent.type], app)
        height = life.store.read(_height, parent.world_id)
        at = life.tape.draw(height + 1)
        name = f"{parent.name.partition('.')[0]}.f{life.tape.draw(FORKS)}"
        child_id = life.clock.entropy(16).hex()
        policies = {
            "effects": life.tape.pick(("drop", "fail", "reissue")),
            "timers": life.tape.pick(("drop", "keep")),
        }
        if life.tape.draw(2):
            life.store.transact(forks.fork, code, name, child_id, at=at, **policies)
        else:
            cutting = life.store.read(forks.cut, code, at, **policies)
            life.store.transact(forks.plant, cutting, name, child_id)

    def _answer(self, life: Life) -> None:
        """Give an effect its receipt by hand, maybe twice, maybe to another world."""
        waiting = life.store.read(_in_hand, life.tape.pick(tuple(ATTEMPTS)))
        if waiting:
            intent: Intent = life.tape.pick(waiting)
            told = Receipt(
                intent.intent_hash,
                intent.effect_kind,
                messages.Status.ERROR,
                code=BY_HAND,
                tag=intent.tag,
            )
            service.receipt_inject(life.store, UNIVERSE, intent.world_id, told)
            if life.tape.chance(300):
                # Once more: for the same world it is the same answer, for another it is refused.
                to = self._world(life).world_id
                service.receipt_inject(life.store, UNIVERSE, to, told)

    def _redrive(self, life: Life) -> None:
        kind = life.tape.pick((None, *ATTEMPTS))
        if kind is not None:
            name = publish.effects(UNIVERSE, kind)
            letters = [one.seq for one in life.store.read(queue.dead, name)]
            if letters:
                life.store.transact(
                    receipts.redrive_effects, UNIVERSE, kind, [life.tape.pick(letters)]
                )
            return
        name = redrive.failures(UNIVERSE)
        letters = [one.seq for one in life.store.read(queue.dead, name)]
        if letters:
            life.store.transact(queue.redrive, name, [life.tape.pick(letters)])


def _in_hand(txn: Txn, kind: str) -> list[Intent]:
    """Some effects of a kind that wait, or that a pool is at."""
    keys = items.keys_of(publish.effects(UNIVERSE, kind))
    rows = txn.scan(keys.items, tuples.after(keys.items), 3)
    return [codec.unpack_as(Intent, queue.payload_of(txn, items.decode(row))) for _, row in rows]


def _worlds(txn: Txn) -> list[WorldRecord]:
    return catalog.worlds(txn, UNIVERSE)


def _height(txn: Txn, world_id: str) -> int:
    return journal.head(txn, subject_of(UNIVERSE, world_id)).height

"""The keeper: an operator who does whatever an operator may do to worlds, workers and the authority.

It forks, pauses, deletes and assigns worlds, answers effects by hand, drives dead ones again; and tidies
up once faults have stopped.
"""

from __future__ import annotations

from holdfast import codec, messages
from holdfast.authority import authority, workers
from holdfast.durable import item as items
from holdfast.durable import journal, queue
from holdfast.errors import (
    CommitUnknown,
    HoldfastError,
    IllegalTransition,
    Invalid,
    NotFound,
    ReplayDiverged,
    StoreReplaced,
)
from holdfast.messages import Intent, Receipt, event_ingress
from holdfast.ops import erasure, service
from holdfast.roles import receipts
from holdfast.sim.actor import Actor, Life
from holdfast.sim.settings import ATTEMPTS, Workload
from holdfast.sim.world_app import ABROAD, LATEST, UNIVERSE, Paid, app
from holdfast.store import tuples
from holdfast.store.api import Txn
from holdfast.world import catalog, publish, redrive
from holdfast.world import fork as forks
from holdfast.world.catalog import Event as Change
from holdfast.world.catalog import Status, WorldRecord, subject_of
from holdfast.world.ingress import Address, deliver
from holdfast.world.kernel import World

# Names of forks that an account may have.
FORKS = 2
# Entries after which a fork may still have most of what it was given.
EARLY = 3
# Of a thousand things done to worlds whose histories are bounded, purges.
PURGED_MILLE = 80
FORCED_MILLE = 700
# What an operator says of an effect that he took care of himself.
BY_HAND = "by_hand"


# In the blocker of a world that is parked at an entry of the later version, by the other.
_LATEST = f"made_by='{LATEST}@"


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
        self._found_abroad(life)
        for world in life.store.read(worlds_there):
            why = world.blocker
            diverged = why is not None and why.code == ReplayDiverged.code
            if diverged and why is not None and _LATEST in why.text:
                # The code that made the entry did not come in time. Now it is there.
                life.store.transact(catalog.change, UNIVERSE, world.world_id, Change.RESUME)
            elif diverged:
                # Nothing makes a fickle reducer do again what it did.
                life.store.transact(catalog.change, UNIVERSE, world.world_id, Change.DELETE)
            elif world.status in (Status.PAUSED, Status.PARKED):
                life.store.transact(catalog.change, UNIVERSE, world.world_id, Change.RESUME)
            if world.stopped and world.status is not Status.DELETED:
                # It may be pinned to a worker whose code does not know its next item.
                life.store.transact(catalog.unassign, UNIVERSE, world.world_id)
        for one in life.store.read(workers.known, UNIVERSE):
            if one.draining:
                life.store.transact(workers.drain, UNIVERSE, one.worker, False)

    def _found_abroad(self, life: Life) -> None:
        """Where there is no lane, mail goes to a universe that is there."""
        if life.settings.workload == Workload.EFFECTS and not life.settings.lanes:
            mint = life.clock.entropy(16).hex()
            ingress = event_ingress(*app.encode_event(Paid("hello", 1)))
            life.store.transact(deliver, Address(ABROAD, "Account", "b0", mint), "hello", ingress)

    def _meddle(self, life: Life) -> None:
        if life.settings.workload == Workload.EFFECTS and life.tape.chance(350):
            choice = life.tape.draw(10)
            if choice == 1:
                self._found_abroad(life)
            elif choice < 4:
                self._answer(life)
            else:
                self._redrive(life)
            return
        if life.settings.keep is not None and life.tape.chance(PURGED_MILLE):
            self._purge(life)
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
        there = [one for one in life.store.read(worlds_there) if one.status is not Status.DELETED]
        if not there:
            raise NotFound(what="world", universe=UNIVERSE)
        found: WorldRecord = life.tape.pick(there)
        return found

    def _change(self, life: Life, event: Change) -> None:
        world = self._world(life)
        life.store.transact(catalog.change, UNIVERSE, world.world_id, event)

    def _purge(self, life: Life) -> None:
        """Erase a world, one that is deleted already, too; a purge that is interrupted is the leader's to end."""
        there: list[WorldRecord] = life.store.read(worlds_there)
        if there:
            world_id = life.tape.pick(there).world_id
            force = life.tape.chance(FORCED_MILLE)
            erasure.world_purge(life.store, UNIVERSE, world_id, force=force, tries=2)

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
        # Forks of forks have names of their own, and are made early, too: of what a fork was given.
        account, _, fork = parent.name.partition(".")
        base = 0 if parent.lineage is None else parent.lineage.forked_at_height
        span = height + 1 - base
        at = base + life.tape.draw(min(span, EARLY) if fork and life.tape.draw(2) else span)
        name = f"{account}.{'g' if fork else 'f'}{life.tape.draw(FORKS)}"
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


def worlds_there(txn: Txn) -> list[WorldRecord]:
    return catalog.worlds(txn, UNIVERSE)


def _height(txn: Txn, world_id: str) -> int:
    return journal.head(txn, subject_of(UNIVERSE, world_id)).height

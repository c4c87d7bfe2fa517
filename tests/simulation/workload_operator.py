"""Operator actor: performs every operator action on worlds, workers and the leader lease.

It forks, pauses, deletes and assigns worlds, injects receipts and redrives dead effects. After
faults have stopped it removes the obstacles that it created.
"""

from __future__ import annotations

from holdfast import codec, messages
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
from holdfast.leadership import leader_lease, worker_registry
from holdfast.messages import Intent, IntentReceipt, event_ingress
from holdfast.ops import erasure, world_operations
from holdfast.sim.actor import Actor, Incarnation
from holdfast.sim.settings import ATTEMPTS, Workload
from holdfast.store import tuples
from holdfast.store.api import Txn
from holdfast.workers.effects import receipts
from holdfast.world import catalog, intents, redrive
from holdfast.world import fork as forks
from holdfast.world.catalog import WorldEvent as Change
from holdfast.world.catalog import WorldRecord, WorldStatus, subject_of
from holdfast.world.ingress import WorldAddress, deliver
from holdfast.world.reducer import WorldSpec
from tests.simulation.sample_app import LATEST, OTHER_UNIVERSE, UNIVERSE, Paid, app

# Number of fork names per account.
FORK_NAMES = 2
# Entries after which a fork may still have most of its inherited intents.
EARLY_ENTRIES = 3
# Per mille of operator actions that purge, in runs with bounded histories.
PURGED_MILLE = 80
FORCED_MILLE = 700
# Code of a receipt that the operator injects.
INJECTED_CODE = "by_hand"


# In the blocker of a world that is parked at an entry of the later code version.
_LATEST = f"made_by='{LATEST}@"


class WorldOperator(Actor):
    """An operator. After faults have stopped, it unblocks worlds."""

    def run_process(self, incarnation: Incarnation) -> None:
        while True:
            incarnation.pause(ms=600)
            try:
                if incarnation.faults_stopped:
                    self._unblock_worlds(incarnation)
                else:
                    self._act(incarnation)
            except ReplayDiverged as error:
                incarnation.record("diverged", universe=UNIVERSE, **error.fields)
            except (CommitUnknown, NotFound, IllegalTransition, Invalid):
                incarnation.count_coverage("keeper refused")
            except StoreReplaced:
                incarnation.store.reopen()
            except HoldfastError as error:
                if not error.retryable:
                    raise

    def _unblock_worlds(self, incarnation: Incarnation) -> None:
        self._create_other_universe(incarnation)
        for world in incarnation.store.read(existing_worlds):
            why = world.blocker
            diverged = why is not None and why.code == ReplayDiverged.code
            if diverged and why is not None and _LATEST in why.text:
                # The code version of the entry did not arrive in time. It is available now.
                incarnation.store.transact(
                    catalog.change_status, UNIVERSE, world.world_id, Change.RESUME
                )
            elif diverged:
                # A non-deterministic reducer never reproduces its entry.
                incarnation.store.transact(
                    catalog.change_status, UNIVERSE, world.world_id, Change.DELETE
                )
            elif world.status in (WorldStatus.PAUSED, WorldStatus.PARKED):
                incarnation.store.transact(
                    catalog.change_status, UNIVERSE, world.world_id, Change.RESUME
                )
            if world.stopped and world.status is not WorldStatus.DELETED:
                # It may be pinned to a worker whose code does not know its next event type.
                incarnation.store.transact(catalog.unassign, UNIVERSE, world.world_id)
        for one in incarnation.store.read(worker_registry.list_registered, UNIVERSE):
            if one.draining:
                incarnation.store.transact(
                    worker_registry.set_draining, UNIVERSE, one.worker, False
                )

    def _create_other_universe(self, incarnation: Incarnation) -> None:
        """Create the other universe, the destination of mail in runs without a peer queue."""
        if (
            incarnation.settings.workload == Workload.EFFECTS
            and not incarnation.settings.peer_queues
        ):
            mint = incarnation.clock.entropy(16).hex()
            ingress = event_ingress(*app.encode_event(Paid("hello", 1)))
            incarnation.store.transact(
                deliver, WorldAddress(OTHER_UNIVERSE, "Account", "b0", mint), "hello", ingress
            )

    def _act(self, incarnation: Incarnation) -> None:
        if incarnation.settings.workload == Workload.EFFECTS and incarnation.tape.chance(350):
            choice = incarnation.tape.draw(10)
            if choice == 1:
                self._create_other_universe(incarnation)
            elif choice < 4:
                self._inject_receipt(incarnation)
            else:
                self._redrive(incarnation)
            return
        if incarnation.settings.history_bound is not None and incarnation.tape.chance(PURGED_MILLE):
            self._purge(incarnation)
            return
        choice = incarnation.tape.draw(20)
        if choice < 4:
            self._fork(incarnation)
        elif choice < 8:
            self._change(
                incarnation, incarnation.tape.pick((Change.PAUSE, Change.RESUME, Change.RESUME))
            )
        elif choice == 8 and incarnation.tape.chance(400):
            self._change(incarnation, Change.DELETE)
        elif choice < 12:
            worker = f"world{incarnation.tape.draw(incarnation.settings.world_workers)}"
            incarnation.store.transact(
                worker_registry.set_draining, UNIVERSE, worker, incarnation.tape.chance(400)
            )
        elif choice < 14:
            self._assign(incarnation)
        elif choice < 16:
            self._redrive(incarnation)
        elif choice == 16:
            incarnation.store.transact(leader_lease.force_release, UNIVERSE, "an operator wants it")
        elif choice > 16:
            incarnation.store.transact(leader_lease.mark_stale, UNIVERSE)

    def _pick_world(self, incarnation: Incarnation) -> WorldRecord:
        there = [
            one
            for one in incarnation.store.read(existing_worlds)
            if one.status is not WorldStatus.DELETED
        ]
        if not there:
            raise NotFound(what="world", universe=UNIVERSE)
        found: WorldRecord = incarnation.tape.pick(there)
        return found

    def _change(self, incarnation: Incarnation, event: Change) -> None:
        world = self._pick_world(incarnation)
        incarnation.store.transact(catalog.change_status, UNIVERSE, world.world_id, event)

    def _purge(self, incarnation: Incarnation) -> None:
        """Erase a world, also a deleted one. The leader finishes an interrupted purge."""
        there: list[WorldRecord] = incarnation.store.read(existing_worlds)
        if there:
            world_id = incarnation.tape.pick(there).world_id
            force = incarnation.tape.chance(FORCED_MILLE)
            erasure.world_purge(incarnation.store, UNIVERSE, world_id, force=force, tries=2)

    def _assign(self, incarnation: Incarnation) -> None:
        world_id = self._pick_world(incarnation).world_id
        if incarnation.tape.draw(2):
            incarnation.store.transact(catalog.unassign, UNIVERSE, world_id)
            return
        worker = f"world{incarnation.tape.draw(incarnation.settings.world_workers)}"
        priority, pinned = incarnation.tape.draw(3), incarnation.tape.chance(200)
        incarnation.store.transact(
            catalog.assign, UNIVERSE, world_id, worker, priority, "operator", pinned
        )

    def _fork(self, incarnation: Incarnation) -> None:
        parent = self._pick_world(incarnation)
        code = WorldSpec(UNIVERSE, parent.world_id, parent.name, app.programs[parent.type], app)
        height = incarnation.store.read(_height, parent.world_id)
        # Forks of forks have their own names. Some fork early, while most inherited intents are
        # pending.
        account, _, fork = parent.name.partition(".")
        base = 0 if parent.lineage is None else parent.lineage.forked_at_height
        span = height + 1 - base
        at = base + incarnation.tape.draw(
            min(span, EARLY_ENTRIES) if fork and incarnation.tape.draw(2) else span
        )
        name = f"{account}.{'g' if fork else 'f'}{incarnation.tape.draw(FORK_NAMES)}"
        child_id = incarnation.clock.entropy(16).hex()
        policies = {
            "effects": incarnation.tape.pick(("drop", "fail", "reissue")),
            "timers": incarnation.tape.pick(("drop", "keep")),
        }
        if incarnation.tape.draw(2):
            incarnation.store.transact(forks.fork, code, name, child_id, at=at, **policies)
        else:
            plan = incarnation.store.read(forks.plan_fork, code, at, **policies)
            incarnation.store.transact(forks.create_fork, plan, name, child_id)

    def _inject_receipt(self, incarnation: Incarnation) -> None:
        """Inject the receipt of an effect, at times twice, at times for another world."""
        waiting = incarnation.store.read(_pending_effects, incarnation.tape.pick(tuple(ATTEMPTS)))
        if waiting:
            intent: Intent = incarnation.tape.pick(waiting)
            receipt = IntentReceipt(
                intent.intent_hash,
                intent.effect_kind,
                messages.ReceiptStatus.ERROR,
                code=INJECTED_CODE,
                tag=intent.tag,
            )
            world_operations.receipt_inject(incarnation.store, UNIVERSE, intent.world_id, receipt)
            if incarnation.tape.chance(300):
                # Repeat: the same world returns the same answer, another world is refused.
                to = self._pick_world(incarnation).world_id
                world_operations.receipt_inject(incarnation.store, UNIVERSE, to, receipt)

    def _redrive(self, incarnation: Incarnation) -> None:
        kind = incarnation.tape.pick((None, *ATTEMPTS))
        if kind is not None:
            name = intents.effect_queue(UNIVERSE, kind)
            letters = [one.seq for one in incarnation.store.read(queue.list_dead, name)]
            if letters:
                incarnation.store.transact(
                    receipts.redrive_effects, UNIVERSE, kind, [incarnation.tape.pick(letters)]
                )
            return
        name = redrive.failed_events_queue(UNIVERSE)
        letters = [one.seq for one in incarnation.store.read(queue.list_dead, name)]
        if letters:
            incarnation.store.transact(queue.redrive, name, [incarnation.tape.pick(letters)])


def _pending_effects(txn: Txn, kind: str) -> list[Intent]:
    """Some effects of a kind that are waiting or claimed."""
    keys = items.keys_of(intents.effect_queue(UNIVERSE, kind))
    rows = txn.scan(keys.items, tuples.prefix_end(keys.items), 3)
    return [
        codec.unpack_as(Intent, queue.payload_of(txn, items.decode_item(row))) for _, row in rows
    ]


def existing_worlds(txn: Txn) -> list[WorldRecord]:
    return catalog.list_worlds(txn, UNIVERSE)


def _height(txn: Txn, world_id: str) -> int:
    return journal.head(txn, subject_of(UNIVERSE, world_id)).height

"""Checkers of worlds, by replaying a model: J1 to J6, I1 to I5, I7, K1, E1, E3, T1, F1, D1, A1, S3,
S4, R3.

Ingress gets a number at delivery. A cycle journals the next items in order. `model_app` computes
the expected entry, emissions and state. Assignments, leases and operator actions determine the
worker that may host a world. At every audit the rows are compared with the model: see
`check_world_rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.sim.history import History, HistoryEvent
from tests.simulation import check_intents, model_app
from tests.simulation.check_world_rows import WorldComparison
from tests.simulation.lease_events import expand, parked_as_stuck
from tests.simulation.model_app import ExpectedIntent
from tests.simulation.model_intents import TimerFiring, build_timer
from tests.simulation.model_worlds import FAILED_EVENTS_QUEUE, UniverseModel, WorldModel, message_id
from tests.simulation.violation import Violation

Plain = dict[str, Any]


class _WorldReplay:
    """Replays the world operations of one life of the store."""

    def __init__(self, config: Plain) -> None:
        self.model = UniverseModel()
        self.found: list[Violation] = []
        self._reducers_ran_ns = 0
        self._stuck_max = config.get("stuck_max", 0)
        self._retention_ns = config.get("retention_ns", 0)
        self.model.small_inboxes = config.get("crowded", False)
        self._unknown_ns = config.get("unknown_ns", 0)
        self.model.history_bound = config.get("keep")
        self._deleted_ns = config.get("deleted_ns", 1 << 62)

    def step(self, event: HistoryEvent) -> None:
        if event.op == "audit":
            comparison = WorldComparison(self.model, event)
            comparison.compare()
            self.found += comparison.found
            self.found += check_intents.IntentComparison(self.model, event).violations()
        elif event.op == "code":
            worker = event.actor, event.incarnation
            self.model.unknown_types[worker] = set(event.args["unknown"])
            self.model.versions[worker] = event.args.get("version", "")
        elif event.op == "diverged":
            self._diverged(event)
        elif event.op == "effect.call":
            # A call begun before a restore, by a worker that has not noticed it, belongs to the
            # former life.
            if not event.args.get("late"):
                self.model.calls[event.args["n"]] = event.args
        elif event.applied and event.op in _STEPS:
            _STEPS[event.op](self, event)

    def _add_violation(self, number: str, what: str, event: HistoryEvent) -> None:
        self.found.append(Violation(number, what, event))

    def _world(self, subject: str) -> WorldModel:
        return self.model.world(subject)

    # -- ingress
    # -------------------------------------------------------------------------------------

    def _deliver(self, event: HistoryEvent) -> None:
        args = event.args
        self._delivered(event, args["to"], args["key"], args["ingress"], event.value)

    def _deliver_many(self, event: HistoryEvent) -> None:
        for (to, key, ingress), value in zip(event.args["items"], event.value, strict=True):
            self._delivered(event, to, key, ingress, value)

    def _delivered(
        self, event: HistoryEvent, to: Plain, key: str | None, ingress: Plain, value: Plain
    ) -> None:
        subject, seq = f"{to['universe']}/{value['world_id']}", value["seq"]
        world, body = self._world(subject), list(ingress.values())
        first = world.keys.get(key) if key is not None else None
        if first is not None and not value["already"]:
            if 0 < self._retention_ns < event.at_ns - first[2]:
                # The key may have been forgotten. The item is then new and delivered again.
                del world.keys[key or ""]
                world.redriven[message_id(ingress)] += 1
                first = None
        if first is not None and first[1] != body:
            self._add_violation("I5", f"{subject}: key {key!r} was taken with another body", event)
        elif first is not None and (first[0] != seq or not value["already"]):
            self._add_violation("I4", f"{subject}: key {key!r} is {seq}, was {first[0]}", event)
        if value["already"]:
            self._check_repeat_answer(event, subject, world, seq, value.get("item"))
        if not value["already"]:
            if seq in world.delivered or seq <= world.cursor:
                self._add_violation(
                    "I1", f"{subject}/{seq}: a sequence number was given twice", event
                )
            world.delivered[seq] = (key, body)
            world.waits.sent_ns[seq] = event.at_ns
        if key is not None:
            world.keys.setdefault(key, (seq, body, event.at_ns))
        if event.result == "ok":
            world.acknowledged.add(seq)

    def _check_repeat_answer(
        self, event: HistoryEvent, subject: str, world: WorldModel, seq: int, item: Plain | None
    ) -> None:
        """Check the answer to a repeated key: the current state of its item. It is never `handled`
        while the item waits or is dead. An item that was given up and redriven has a new number."""
        state, now = ("", seq) if item is None else (item["state"], item["seq"])
        steps = world.steps
        if now > len(steps):
            expected_states = {"waiting"}
        elif steps[now - 1]["outcome"] == "unknown":
            id = message_id(steps[now - 1]["ingress"])
            again = [one for one in steps[now:] if message_id(one["ingress"]) == id]
            expected_states = set() if again else {"dead"}
        else:
            expected_states = {"failed" if steps[now - 1]["outcome"] == "failed" else "handled"}
            if self.model.history_bound and world.last_trim is not None:
                # Its entry may have been trimmed.
                if now + world.base <= world.last_trim[0] - self.model.history_bound["entries"]:
                    expected_states.add("removed")
        if now != seq and (seq > len(steps) or steps[seq - 1]["outcome"] != "unknown"):
            expected_states = set()
        if state not in expected_states:
            text = f"{subject}/{seq}: its key is answered as {state or 'delivered'}, now {now}"
            self._add_violation("I7", text, event)

    # -- the host --------------------------------------------------------------------------------

    def _commit(self, event: HistoryEvent) -> None:
        cycle = event.args["cycle"]
        subject = event.args["lease"]["resource"]
        world = self._world(subject)
        if cycle["expected_head"] != world.height:
            self._add_violation(
                "J2", f"{subject}: appended on {cycle['expected_head']}, at {world.height}", event
            )
        if world.status != "active":
            self._add_violation("A1", f"{subject}: a cycle, but it is {world.status}", event)
        self._reducers_ran_ns = self._check_reducer_time(event, subject, cycle)
        # Timers fire before the cycle's own intents, which may cancel or replace them.
        for one in cycle.get("carried", ()):
            if one.get("alarm") is not None:
                self._on_timer_delivered(event, subject, one["intent_hash"], one["alarm"])
        for body in cycle["bodies"]:
            self._append(event, subject, world, body)
        self._check_digest(event, subject, world, len(cycle["bodies"]))
        for failed in cycle.get("failed", ()):
            # Queue numbers are assigned in commit order.
            self.model.last_failed_event += 1
            id = message_id(model_app.read_record(model_app.INGRESS, failed["body"]))
            self.model.failed_events[self.model.last_failed_event] = (subject, failed["seq"], id)

    def _check_digest(
        self, event: HistoryEvent, subject: str, world: WorldModel, entries: int
    ) -> None:
        """Check that only the last entry of a cycle holds a state digest, and that it is
        correct."""
        if not entries:
            return
        found = [step.get("state") for step in world.steps[-entries:]]
        self._resolve_whim(world, entries, found[-1])
        right = model_app.state_digest(world.states[-1], world.code_at(world.height))
        if found != [b""] * (entries - 1) + [right]:
            self._add_violation(
                "J6", f"{subject}: cycle up to {world.height} has another digest", event
            )

    def _resolve_whim(self, world: WorldModel, entries: int, digest: bytes | None) -> None:
        """Derive the value that a Moody handler of this cycle saw. The value of an earlier Moody
        handler of the same cycle is lost and no longer matters."""
        if world.states[-1]["whim"] is not None:
            return
        whim = model_app.resolve_whim(world.states[-1], digest)
        for at in range(1, entries + 1):
            world.states[-at]["whim"] = whim
            if world.steps[-at]["ingress"]["type"] == model_app.MOODY:
                return

    def _check_reducer_time(self, event: HistoryEvent, subject: str, cycle: Plain) -> int:
        """Check the time at which the host reports to have run the reducers: after it got the lease
        and not after the commit. Timer delays count from then."""
        ran_ns: int = cycle.get("wanted_ns") or event.at_ns
        if ran_ns > event.at_ns or ran_ns < self.model.granted_ns.get(subject, 0):
            self._add_violation(
                "T1", f"{subject}: delays count from {ran_ns - event.at_ns} ns", event
            )
        return min(ran_ns, event.at_ns)

    def _append(self, event: HistoryEvent, subject: str, world: WorldModel, body: bytes) -> None:
        step = model_app.step_of(body)
        height = world.height + 1
        seq, ingress = step["seq"], step["ingress"]
        if seq != world.cursor + 1:
            self._add_violation(
                "I2", f"{subject}: ingress {seq} journaled after {world.cursor}", event
            )
        put = world.delivered.get(seq)
        if put is None and ingress["kind"] == "event" and not world.redriven[message_id(ingress)]:
            self._add_violation("I4", f"{subject}/{seq}: journaled, but never delivered", event)
        elif put is not None and put[1] != list(ingress.values()):
            self._add_violation("I1", f"{subject}/{seq}: journaled with another body", event)
        self._check_known_type(event, subject, world, step)
        self._check_code_version(event, subject, world, step)
        should = model_app.expected_step(world.states[-1], step, world.world_id, world.name, height)
        emitted = [want.replay_digest for want in should.intents]
        for what, was, right in (
            ("outcome", step["outcome"], should.outcome),
            ("reply", step["reply"], should.reply),
            ("emissions", step["emitted"], emitted),
        ):
            if was != right:
                text = f"{subject}: entry {height} has {what} {was!r}, the model {right!r}"
                self._add_violation("J3", text, event)
        world.bodies.append(body)
        world.times.append(event.at_ns)
        world.steps.append(step)
        world.states.append(should.state)
        world.wants.append(should.intents)
        for want in should.intents:
            self._record_intent(event, subject, world, want)

    def _check_code_version(
        self, event: HistoryEvent, subject: str, world: WorldModel, step: Plain
    ) -> None:
        """Check that code whose state lacks a field continues from a snapshot, not from entries of
        newer code."""
        lacking = step["code"] == model_app.FORMER
        made_by = world.code_at(world.height)
        if lacking and made_by not in ("", model_app.FORMER) and step["base"] != world.height:
            text = f"{subject}: entry {world.height + 1} by code that cannot repeat the one before"
            self._add_violation("J6", text, event)
        world.waits.code_ns.clear()

    def _check_known_type(
        self, event: HistoryEvent, subject: str, world: WorldModel, step: Plain
    ) -> None:
        """Check that code consumes no event type it does not know, and gives one up only after its
        waiting time."""
        seq, type = step["seq"], step["ingress"]["type"]
        strange = type in self.model.unknown_types.get((event.actor, event.incarnation), ())
        if step["outcome"] != "unknown":
            if strange:
                self._add_violation(
                    "I7", f"{subject}/{seq}: {type} consumed by code without it", event
                )
            world.waits.missed_ns.pop(type, None)
            return
        since_ns = world.waits.stopped_ns.get(seq)
        if since_ns is not None and type in world.waits.missed_ns:
            # It waited together with an earlier item of its type that was given up.
            earlier_ns = max(world.waits.missed_ns[type], world.waits.sent_ns.get(seq, 0))
            since_ns = min(since_ns, earlier_ns)
        if not strange or since_ns is None or event.at_ns < since_ns + self._unknown_ns:
            self._add_violation(
                "I7", f"{subject}/{seq}: {type} given up, waiting since {since_ns}", event
            )
        elif since_ns is not None:
            world.waits.missed_ns[type] = since_ns

    def _stop(self, event: HistoryEvent) -> None:
        """Record that a world stops before an item and becomes unassigned. The first stop
        counts."""
        world = self._world(_subject(event))
        world.hosting.worker = None
        if event.args["seq"]:
            world.waits.stopped_ns.setdefault(event.args["seq"], event.at_ns)
        height = event.args.get("height", 0)
        if height:
            world.waits.code_ns.setdefault(height, event.at_ns)
            self._check_waiting_for_code(event, world, height)

    def _check_waiting_for_code(self, event: HistoryEvent, world: WorldModel, height: int) -> None:
        """Check a world that waits for the code version of an entry: its host ran another version
        and diverged."""
        version = self.model.versions.get((event.actor, event.incarnation), "")
        subject, made_by = _subject(event), world.code_at(height)
        if made_by == version:
            self._add_violation(
                "J6", f"{subject}: waits at {height} for the code that hosted it", event
            )
        elif version != model_app.FORMER and not self._is_nondeterministic(subject, height):
            self._add_violation(
                "J6", f"{subject}: code {version} cannot repeat {height} of {made_by}", event
            )

    def _record_intent(
        self, event: HistoryEvent, subject: str, world: WorldModel, want: ExpectedIntent
    ) -> None:
        """Record an intent. A key refers to its first use; another use is refused. The key of a
        timer is a slot: setting or cancelling it removes the previous timer."""
        intents = self.model.intents
        if want.kind == "timer.set":
            intents.set_timer(build_timer(subject, want, self._reducers_ran_ns), event.i)
            return
        if want.kind == "timer.cancel":
            intents.clear_slot(subject, model_app.slot_of(want) or "", event.i)
            return
        if want.kind == "effect.cancel":
            intents.cancel(subject, want.params, world.inherited.reissued)
            return
        if want.key is not None:
            known = want.hash in world.used_keys
            if (
                world.used_keys.setdefault(want.hash, want.idempotency_digest())
                != want.idempotency_digest()
            ):
                intents.owed[subject, want.positional_id] = "key_conflict"
            if known:
                return
        intents.add(subject, want)

    def _trimmed(self, event: HistoryEvent) -> None:
        """Record that histories were trimmed. The bound is checked at the next audit."""
        for subject, world in self.model.worlds.items():
            if subject.startswith(f"{event.args['universe']}/"):
                world.last_trim = (world.height, event.at_ns)

    def _redrive(self, event: HistoryEvent) -> None:
        if event.args["queue"].endswith(FAILED_EVENTS_QUEUE):
            for old, new in zip(event.args["seqs"], event.value, strict=True):
                subject, seq, id = self.model.failed_events[old]
                self.model.failed_events[new] = (subject, seq, id)
                self.model.last_failed_event = max(new, self.model.last_failed_event)
                self.model.redriven |= {old, new}
                self._world(subject).redriven[id] += 1

    # -- timers, mail and receipts
    # -------------------------------------------------------------------

    def _fired(self, event: HistoryEvent) -> None:
        fire = TimerFiring(event.i, event.at_ns, event.args["wall_ns"])
        self.model.intents.fire(fire, small_inboxes=self.model.small_inboxes)

    def _on_timer_delivered(
        self, event: HistoryEvent, subject: str, name: bytes, due_timer: Plain
    ) -> None:
        """Check a timer delivered in the commit of its world: it is in its slot and due."""
        intents, fire = self.model.intents, TimerFiring(event.i, event.at_ns, due_timer["wall_ns"])
        timer = intents.slots.get((subject, due_timer["slot"]))
        if timer is None or name not in timer.due_ns:
            self._add_violation(
                "T1", f"{subject}: received a timer that is not in {due_timer['slot']}", event
            )
            return
        for following in timer.apply_firing(fire, small_inboxes=self.model.small_inboxes):
            intents.timers[following] = timer
        if fire not in timer.fires.get(name, ()):
            self._add_violation("T1", f"{subject}: received a timer that is not due", event)

    def _check_claimed_effects(self, event: HistoryEvent) -> None:
        """Check that no effect of a deleted world is started."""
        for claim in event.value["items"]:
            if "/effects/" not in claim["queue"] or claim["blob"]:
                continue
            intent = model_app.read_record(model_app.INTENT, claim["payload"])
            subject = f"{intent['universe_id']}/{intent['world_id']}"
            if self._world(subject).status == "deleted" and intent["effect_kind"] != model_app.MAIL:
                self._add_violation("E1", f"{subject}: its effect is started after deletion", event)

    def _accepted(self, event: HistoryEvent) -> None:
        """Check that a message has one inbox item. A repeat returns the place of the first."""
        for (intent, _), answer in zip(event.args["mails"], event.value, strict=True):
            place = (answer["dest_world"], answer["seq"])
            first = self.model.accepted.get(intent["intent_hash"])
            if answer["status"] == "ok" and first is not None:
                self._add_violation("F1", f"{place}: a message was accepted twice", event)
            elif answer["status"] == "already_enqueued" and first not in (None, place):
                self._add_violation(
                    "F1", f"{place}: a repeat is answered with another place", event
                )
            if answer["status"] == "ok":
                self.model.accepted[intent["intent_hash"]] = place

    def _redrive_effects(self, event: HistoryEvent) -> None:
        """Record redriven effects. Each is a new intent with the world and content of the dead
        one."""
        for seq, name in zip(event.args["seqs"], event.value, strict=True):
            for subject, want in list(self.model.intents.by_hash.values()):
                right = model_app.digest(b"redrive", want.hash, seq.to_bytes(8, "big"))
                if right == name and want.kind == event.args["kind"]:
                    self.model.intents.redrive(subject, want, seq)
                    break
            else:
                self._add_violation(
                    "E1", f"redriven, but {name.hex()[:8]} belongs to no dead effect", event
                )

    # -- hosting
    # -------------------------------------------------------------------------------------

    def _acquire(self, event: HistoryEvent) -> None:
        for answer in event.value:
            subject = f"{event.args['universe']}/{answer['world_id']}"
            world = self._world(subject)
            world.name = (answer["record"] or {}).get("name", world.name)
            lease = answer["lease"]
            stuck = parked_as_stuck(event, answer)
            hosting = world.hosting
            lost = hosting.is_held and (stuck or (lease and lease["epoch"] != hosting.epoch))
            if lost:
                self._count_lost_lease(event, subject, world, stuck)
            if lease is not None:
                self._check_may_host(event, subject, world)
                if lease["epoch"] != hosting.epoch:
                    self.model.granted_ns[subject] = event.at_ns
                hosting.is_held, hosting.epoch, hosting.is_isolated = True, lease["epoch"], False
            if stuck:
                world.status, hosting.is_held = "parked", False
                self._reset_losses(world)

    def _count_lost_lease(
        self, event: HistoryEvent, subject: str, world: WorldModel, stuck: bool
    ) -> None:
        """Count an expired lease against the next message of the world."""
        seq, hosting = world.cursor + 1, world.hosting
        hosting.losses[seq] += 1
        hosting.due_losses[seq] += seq in world.delivered
        if stuck and hosting.losses[seq] < self._stuck_max:
            self._add_violation(
                "S3", f"{subject}: parked after {hosting.losses[seq]} losses at {seq}", event
            )
        if not stuck and hosting.is_isolated and 0 < self._stuck_max <= hosting.due_losses[seq]:
            losses = hosting.due_losses[seq]
            self._add_violation(
                "S3", f"{subject}: not parked after {losses} losses at {seq}", event
            )

    def _reset_losses(self, world: WorldModel) -> None:
        world.hosting.is_isolated = False
        world.hosting.losses.clear()
        world.hosting.due_losses.clear()

    def _mark_isolated(self, event: HistoryEvent) -> None:
        self._world(_subject(event)).hosting.is_isolated = True

    def _check_may_host(self, event: HistoryEvent, subject: str, world: WorldModel) -> None:
        worker = event.args["worker"]
        if world.hosting.worker not in (None, worker):
            self._add_violation(
                "A1", f"{subject}: {worker} got it, {world.hosting.worker} should", event
            )
        if world.status != "active":
            self._add_violation(
                "A1", f"{subject}: {worker} got it, but it is {world.status}", event
            )

    def _on_release(self, event: HistoryEvent) -> None:
        lease = event.args["lease"]
        world = self.model.worlds.get(lease["resource"])
        if world is not None and (
            event.op != "lease.leave" or world.hosting.epoch == lease["epoch"]
        ):
            world.hosting.is_held = False

    def _assign(self, event: HistoryEvent) -> None:
        self._world(_subject(event)).hosting.worker = event.args["worker"]

    def _unassign(self, event: HistoryEvent) -> None:
        self._world(_subject(event)).hosting.worker = None

    def _change(self, event: HistoryEvent) -> None:
        world, change = self._world(_subject(event)), event.args["event"]
        world.status = event.value["status"]
        self._reset_losses(world)
        if change == "park":
            self._check_waiting_time(event, world)
        if change != "resume":
            world.hosting.is_held = False
        if change == "delete":
            world.hosting.worker = None
            world.erased_ns = event.at_ns + self._deleted_ns

    def _check_waiting_time(self, event: HistoryEvent, world: WorldModel) -> None:
        """Check that the leader parks a world that waits for a code version only after its waiting
        time."""
        height = event.args["blocker"]["height"]
        since_ns = world.waits.code_ns.pop(height, None)
        if since_ns is None or event.at_ns < since_ns + self._unknown_ns:
            text = f"{_subject(event)}: parked at {height}, waiting since {since_ns}"
            self._add_violation("J6", text, event)

    def _purge(self, event: HistoryEvent) -> None:
        """Check that a purge deletes and fences a world in one commit. Its rows may be erased from
        then on."""
        world = self._world(_subject(event))
        if event.value["status"] != "deleted":
            self._add_violation(
                "A1", f"{_subject(event)}: purged, and {event.value['status']}", event
            )
        world.status, world.hosting.worker, world.hosting.is_held = "deleted", None, False
        world.erased_ns = event.at_ns
        self._reset_losses(world)

    def _park(self, event: HistoryEvent) -> None:
        """Check that only the non-deterministic reducer parks its world for divergence."""
        subject, blocker = _subject(event), event.args["blocker"]
        if blocker["code"] != "replay_diverged" or not self._is_nondeterministic(
            subject, blocker["height"]
        ):
            self._add_violation(
                "J3", f"{subject}: parked: {blocker['code']} {blocker['text']}", event
            )
        self._world(subject).status = "parked"

    def _diverged(self, event: HistoryEvent) -> None:
        subject = f"{event.args['universe']}/{event.args['world']}"
        if not self._is_nondeterministic(subject, event.args["height"]):
            self._add_violation("J3", f"{subject}: replay diverged: {event.args}", event)

    def _is_nondeterministic(self, subject: str, height: int) -> bool:
        """Whether the entry belongs to a Fickle event: each ingress is one entry. A Moody event
        shows only in the digest at the end of its cycle."""
        world = self._world(subject)
        at = height - world.base
        put = world.delivered.get(at)
        if put is not None and put[1][1] == model_app.FICKLE:
            return True
        ends = at <= len(world.steps) and bool(world.steps[at - 1].get("state"))
        while ends and at > 0:
            if world.steps[at - 1]["ingress"]["type"] == model_app.MOODY:
                return True
            at -= 1
            ends = at > 0 and world.steps[at - 1].get("state") == b""
        return False

    # -- forks -----------------------------------------------------------------------------------

    def _fork(self, event: HistoryEvent) -> None:
        made, lineage = event.value, event.value["lineage"]
        subject = f"{made['universe']}/{made['world_id']}"
        if subject in self.model.worlds and self.model.worlds[subject].forked:
            return  # created before; the operation was repeated
        parent = self._world(f"{made['universe']}/{lineage['parent_world_id']}")
        height = lineage["forked_at_height"]
        state = parent.state_at(height)
        if state is not None and state["whim"] is None:
            whim = model_app.resolve_whim(state, lineage["parent_snapshot_hash"])
            state = {**state, "whim": whim}
        if state is None:
            self._add_violation(
                "K1", f"{subject}: forked at {height}, the parent has no such state", event
            )
            state = model_app.initial_state()
        elif lineage["parent_snapshot_hash"] not in model_app.state_digests(state):
            self._add_violation("K1", f"{subject}: not the parent's state at {height}", event)
        child = WorldModel(made["world_id"], made["name"], height, forked=True)
        child.states = [model_app.reload_state(state)]
        self.model.worlds[subject] = child
        pending = self.model.intents.pending_at(
            parent.inherited, parent.steps, parent.wants, height - parent.base
        )
        policy, keeps = _fork_policies(event)
        if not keeps:
            pending.timers.clear()
        child.inherited = self.model.intents.inherit(
            subject, child.world_id, pending, policy, i=event.i, at_ns=event.at_ns
        )
        child.used_keys = dict(child.inherited.keys)


def _fork_policies(event: HistoryEvent) -> tuple[str, bool]:
    """Return a fork's policy for effects, and whether it keeps timers."""
    plan = event.args.get("plan")
    if plan is None:
        return event.args.get("effects", "drop"), event.args.get("timers") == "keep"
    # The plan holds the inherited timers, so an empty list means that none are kept.
    return plan["policy"], bool(plan["pending"]["timers"])


def findings(history: History) -> list[Violation]:
    found: list[Violation] = []
    for life in history.store_lives():
        replay = _WorldReplay(history.events[0].args if history.events else {})
        for event in expand(life):
            replay.step(event)
        found += replay.found
        found += check_intents.check_calls(replay.model)
    return found


def _subject(event: HistoryEvent) -> str:
    return f"{event.args['universe']}/{event.args['world_id']}"


_STEPS: dict[str, Callable[[_WorldReplay, HistoryEvent], None]] = {
    "ingress.deliver": _WorldReplay._deliver,
    "ingress.deliver_many": _WorldReplay._deliver_many,
    "commit": _WorldReplay._commit,
    "history.trim": _WorldReplay._trimmed,
    "queue.redrive": _WorldReplay._redrive,
    "timers.deliver_due": _WorldReplay._fired,
    "claims.claim_batch": _WorldReplay._check_claimed_effects,
    "messages.accept_many": _WorldReplay._accepted,
    "effects.redrive_effects": _WorldReplay._redrive_effects,
    "hosting_lease.acquire": _WorldReplay._acquire,
    "hosting_lease.park": _WorldReplay._park,
    "hosting_lease.mark_isolated": _WorldReplay._mark_isolated,
    "lease.release": _WorldReplay._on_release,
    "lease.leave": _WorldReplay._on_release,
    "cycle.stop_and_release": _WorldReplay._stop,
    "catalog.assign": _WorldReplay._assign,
    "catalog.unassign": _WorldReplay._unassign,
    "catalog.change_status": _WorldReplay._change,
    "purge.begin_purge": _WorldReplay._purge,
    "fork": _WorldReplay._fork,
    "create_fork": _WorldReplay._fork,
}

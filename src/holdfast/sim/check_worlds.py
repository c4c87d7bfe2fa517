"""Checkers of worlds, by replaying a model: J1 to J6, I1 to I5, I7, K1, E1, E3, T1, F1, D1, A1, S3, S4, R3.

Ingress gets a number when it is delivered; a cycle journals the next of it, in order; `check_app` says
what each entry should hold, what it should have emitted and which state follows. Who may host a world
follows from assignments, leases and what operators did. At every audit the rows are compared with all
of that: see `check_world_rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.sim import check_app, check_intents
from holdfast.sim.check_app import Want
from holdfast.sim.check_world_rows import Comparison
from holdfast.sim.history import Event, History
from holdfast.sim.lease_events import expanded, stuck_now
from holdfast.sim.model_intents import Fire, timer_of
from holdfast.sim.model_worlds import FAILURES, Model, World, id_of
from holdfast.sim.violation import Violation

Plain = dict[str, Any]


class _Replay:
    """One life of the store, seen by its worlds."""

    def __init__(self, config: Plain) -> None:
        self.model = Model()
        self.found: list[Violation] = []
        self._ran_ns = 0
        self._stuck_max = config.get("stuck_max", 0)
        self._retention_ns = config.get("retention_ns", 0)
        self.model.crowded = config.get("crowded", False)
        self._unknown_ns = config.get("unknown_ns", 0)
        self.model.keep = config.get("keep")
        self._deleted_ns = config.get("deleted_ns", 1 << 62)

    def step(self, event: Event) -> None:
        if event.op == "audit":
            comparison = Comparison(self.model, event)
            comparison.compare()
            self.found += comparison.found
            self.found += check_intents.Compared(self.model, event).found()
        elif event.op == "code":
            worker = event.actor, event.incarnation
            self.model.unknown[worker] = set(event.args["unknown"])
            self.model.versions[worker] = event.args.get("version", "")
        elif event.op == "diverged":
            self._diverged(event)
        elif event.op == "effect.call":
            # One that was begun before a restore, by a pool that has not noticed, is not of this life.
            if not event.args.get("late"):
                self.model.calls[event.args["n"]] = event.args
        elif event.applied and event.op in _STEPS:
            _STEPS[event.op](self, event)

    def _bad(self, number: str, what: str, event: Event) -> None:
        self.found.append(Violation(number, what, event))

    def _world(self, subject: str) -> World:
        return self.model.world(subject)

    # -- in --------------------------------------------------------------------------------------

    def _deliver(self, event: Event) -> None:
        args = event.args
        self._delivered(event, args["to"], args["key"], args["ingress"], event.value)

    def _deliver_many(self, event: Event) -> None:
        for (to, key, ingress), value in zip(event.args["items"], event.value, strict=True):
            self._delivered(event, to, key, ingress, value)

    def _delivered(
        self, event: Event, to: Plain, key: str | None, ingress: Plain, value: Plain
    ) -> None:
        subject, seq = f"{to['universe']}/{value['world_id']}", value["seq"]
        world, body = self._world(subject), list(ingress.values())
        first = world.keys.get(key) if key is not None else None
        if first is not None and not value["already"]:
            if 0 < self._retention_ns < event.at_ns - first[2]:
                # It may have been forgotten: then it is new, and comes once more.
                del world.keys[key or ""]
                world.redriven[id_of(ingress)] += 1
                first = None
        if first is not None and first[1] != body:
            self._bad("I5", f"{subject}: key {key!r} was taken with another body", event)
        elif first is not None and (first[0] != seq or not value["already"]):
            self._bad("I4", f"{subject}: key {key!r} is {seq}, was {first[0]}", event)
        if value["already"]:
            self._answered(event, subject, world, seq, value.get("item"))
        if not value["already"]:
            if seq in world.delivered or seq <= world.cursor:
                self._bad("I1", f"{subject}/{seq}: a sequence number was given twice", event)
            world.delivered[seq] = (key, body)
            world.sent_ns[seq] = event.at_ns
        if key is not None:
            world.keys.setdefault(key, (seq, body, event.at_ns))
        if event.result == "ok":
            world.known.add(seq)

    def _answered(
        self, event: Event, subject: str, world: World, seq: int, item: Plain | None
    ) -> None:
        """A key is answered with what became of its item, and never as handled while that waits or is
        dead. What was given up and redriven has another number."""
        state, now = ("", seq) if item is None else (item["state"], item["seq"])
        steps = world.steps
        if now > len(steps):
            right = {"waiting"}
        elif steps[now - 1]["outcome"] == "unknown":
            id = id_of(steps[now - 1]["ingress"])
            again = [one for one in steps[now:] if id_of(one["ingress"]) == id]
            right = set() if again else {"dead"}
        else:
            right = {"failed" if steps[now - 1]["outcome"] == "failed" else "handled"}
            if self.model.keep and world.trimmed is not None:
                # Its entry may have been cut off.
                if now + world.base <= world.trimmed[0] - self.model.keep["entries"]:
                    right.add("removed")
        if now != seq and (seq > len(steps) or steps[seq - 1]["outcome"] != "unknown"):
            right = set()
        if state not in right:
            text = f"{subject}/{seq}: its key is answered as {state or 'delivered'}, now {now}"
            self._bad("I7", text, event)

    # -- the host --------------------------------------------------------------------------------

    def _commit(self, event: Event) -> None:
        cycle = event.args["cycle"]
        subject = event.args["lease"]["resource"]
        world = self._world(subject)
        if cycle["expected_head"] != world.height:
            self._bad(
                "J2", f"{subject}: appended on {cycle['expected_head']}, at {world.height}", event
            )
        if world.status != "active":
            self._bad("A1", f"{subject}: a cycle, but it is {world.status}", event)
        self._ran_ns = self._began(event, subject, cycle)
        # What rings has rung before anything that the cycle wants: it may cancel or replace it.
        for one in cycle.get("carried", ()):
            if one.get("alarm") is not None:
                self._rang(event, subject, one["intent_hash"], one["alarm"])
        for body in cycle["bodies"]:
            self._append(event, subject, world, body)
        self._digested(event, subject, world, len(cycle["bodies"]))
        for failed in cycle.get("failed", ()):
            # Numbers of a queue are given in the order of commits.
            self.model.letters_last += 1
            id = id_of(check_app.read(check_app.INGRESS, failed["body"]))
            self.model.letters[self.model.letters_last] = (subject, failed["seq"], id)

    def _digested(self, event: Event, subject: str, world: World, entries: int) -> None:
        """The last entry of a cycle has the digest of the state that follows, and no other has one."""
        if not entries:
            return
        found = [step.get("state") for step in world.steps[-entries:]]
        self._settle_whim(world, entries, found[-1])
        right = check_app.digest_of(world.states[-1], world.code_at(world.height))
        if found != [b""] * (entries - 1) + [right]:
            self._bad("J6", f"{subject}: cycle up to {world.height} has another digest", event)

    def _settle_whim(self, world: World, entries: int, digest: bytes | None) -> None:
        """What a moody handler of this cycle saw is known from here on. What an earlier one of the same
        cycle saw is gone, and nothing can come back to it."""
        if world.states[-1]["whim"] is not None:
            return
        whim = check_app.resolve(world.states[-1], digest)
        for at in range(1, entries + 1):
            world.states[-at]["whim"] = whim
            if world.steps[-at]["ingress"]["type"] == check_app.MOODY:
                return

    def _began(self, event: Event, subject: str, cycle: Plain) -> int:
        """When the reducers ran, by the word of the host: not after the commit, and not before the
        host was there. Delays count from then."""
        ran_ns: int = cycle.get("wanted_ns") or event.at_ns
        if ran_ns > event.at_ns or ran_ns < self.model.granted_ns.get(subject, 0):
            self._bad("T1", f"{subject}: delays count from {ran_ns - event.at_ns} ns", event)
        return min(ran_ns, event.at_ns)

    def _append(self, event: Event, subject: str, world: World, body: bytes) -> None:
        step = check_app.step_of(body)
        height = world.height + 1
        seq, ingress = step["seq"], step["ingress"]
        if seq != world.cursor + 1:
            self._bad("I2", f"{subject}: ingress {seq} journaled after {world.cursor}", event)
        put = world.delivered.get(seq)
        if put is None and ingress["kind"] == "event" and not world.redriven[id_of(ingress)]:
            self._bad("I4", f"{subject}/{seq}: journaled, but nobody delivered it", event)
        elif put is not None and put[1] != list(ingress.values()):
            self._bad("I1", f"{subject}/{seq}: journaled with another body", event)
        self._consumed(event, subject, world, step)
        self._repeatable(event, subject, world, step)
        should = check_app.react(world.states[-1], step, world.world_id, world.name, height)
        emitted = [want.content for want in should.wants]
        for what, was, right in (
            ("outcome", step["outcome"], should.outcome),
            ("reply", step["reply"], should.reply),
            ("emissions", step["emitted"], emitted),
        ):
            if was != right:
                text = f"{subject}: entry {height} has {what} {was!r}, the model {right!r}"
                self._bad("J3", text, event)
        world.bodies.append(body)
        world.times.append(event.at_ns)
        world.steps.append(step)
        world.states.append(should.state)
        world.wants.append(should.wants)
        for want in should.wants:
            self._wanted(event, subject, world, want)

    def _repeatable(self, event: Event, subject: str, world: World, step: Plain) -> None:
        """Code whose state lacks a field goes on from a snapshot of code that has it, not from entries."""
        lacking = step["code"] == check_app.FORMER
        made_by = world.code_at(world.height)
        if lacking and made_by not in ("", check_app.FORMER) and step["base"] != world.height:
            text = f"{subject}: entry {world.height + 1} by code that cannot repeat the one before"
            self._bad("J6", text, event)
        world.code_ns.clear()

    def _consumed(self, event: Event, subject: str, world: World, step: Plain) -> None:
        """Code consumes nothing that it does not know. What it gives up has waited for its time."""
        seq, type = step["seq"], step["ingress"]["type"]
        strange = type in self.model.unknown.get((event.actor, event.incarnation), ())
        if step["outcome"] != "unknown":
            if strange:
                self._bad("I7", f"{subject}/{seq}: {type} consumed by code without it", event)
            world.missed_ns.pop(type, None)
            return
        since_ns = world.stopped_ns.get(seq)
        if since_ns is not None and type in world.missed_ns:
            # It was there while another of its type ran out of time: it has waited with that.
            earlier_ns = max(world.missed_ns[type], world.sent_ns.get(seq, 0))
            since_ns = min(since_ns, earlier_ns)
        if not strange or since_ns is None or event.at_ns < since_ns + self._unknown_ns:
            self._bad("I7", f"{subject}/{seq}: {type} given up, waiting since {since_ns}", event)
        elif since_ns is not None:
            world.missed_ns[type] = since_ns

    def _stop(self, event: Event) -> None:
        """A world waits before an item: assigned to nobody, from the first time on."""
        world = self._world(_subject(event))
        world.worker = None
        if event.args["seq"]:
            world.stopped_ns.setdefault(event.args["seq"], event.at_ns)
        height = event.args.get("height", 0)
        if height:
            world.code_ns.setdefault(height, event.at_ns)
            self._other_code(event, world, height)

    def _other_code(self, event: Event, world: World, height: int) -> None:
        """A world waits for the code of an entry: of other code, and one that came out otherwise."""
        version = self.model.versions.get((event.actor, event.incarnation), "")
        subject, made_by = _subject(event), world.code_at(height)
        if made_by == version:
            self._bad("J6", f"{subject}: waits at {height} for the code that hosted it", event)
        elif version != check_app.FORMER and not self._fickle(subject, height):
            self._bad("J6", f"{subject}: code {version} cannot repeat {height} of {made_by}", event)

    def _wanted(self, event: Event, subject: str, world: World, want: Want) -> None:
        """A key stands for what it was used for first; something else under it is refused. The key
        of a timer is a slot: what is set there goes when another is set, or when it is emptied."""
        intents = self.model.intents
        if want.kind == "timer.set":
            intents.set_timer(timer_of(subject, want, self._ran_ns), event.i)
            return
        if want.kind == "timer.cancel":
            intents.empty(subject, check_app.slot_of(want) or "", event.i)
            return
        if want.kind == "effect.cancel":
            intents.cancel(subject, want.params, world.given.names)
            return
        if want.key is not None:
            known = want.hash in world.ordered
            if world.ordered.setdefault(want.hash, want.means()) != want.means():
                intents.owed[subject, want.place] = "key_conflict"
            if known:
                return
        intents.want(subject, want)

    def _trimmed(self, event: Event) -> None:
        """Histories were cut: by no more than what was too much and too old by then."""
        for subject, world in self.model.worlds.items():
            if subject.startswith(f"{event.args['universe']}/"):
                world.trimmed = (world.height, event.at_ns)

    def _redrive(self, event: Event) -> None:
        if event.args["queue"].endswith(FAILURES):
            for old, new in zip(event.args["seqs"], event.value, strict=True):
                subject, seq, id = self.model.letters[old]
                self.model.letters[new] = (subject, seq, id)
                self.model.letters_last = max(new, self.model.letters_last)
                self.model.redriven |= {old, new}
                self._world(subject).redriven[id] += 1

    # -- what comes back -------------------------------------------------------------------------

    def _fired(self, event: Event) -> None:
        fire = Fire(event.i, event.at_ns, event.args["wall_ns"])
        self.model.intents.fire(fire, crowded=self.model.crowded)

    def _rang(self, event: Event, subject: str, name: bytes, alarm: Plain) -> None:
        """A timer that its world is told in its own commit: it is in its slot, and due."""
        intents, fire = self.model.intents, Fire(event.i, event.at_ns, alarm["wall_ns"])
        timer = intents.slots.get((subject, alarm["slot"]))
        if timer is None or name not in timer.due_ns:
            self._bad("T1", f"{subject}: told of a timer that is not in {alarm['slot']}", event)
            return
        for following in timer.fired(fire, crowded=self.model.crowded):
            intents.timers[following] = timer
        if fire not in timer.fires.get(name, ()):
            self._bad("T1", f"{subject}: told of a timer that is not due", event)

    def _taken(self, event: Event) -> None:
        """What a deleted world wanted is not begun any more."""
        for claim in event.value["items"]:
            if "/effects/" not in claim["queue"] or claim["blob"]:
                continue
            intent = check_app.read(check_app.INTENT, claim["payload"])
            subject = f"{intent['universe_id']}/{intent['world_id']}"
            if self._world(subject).status == "deleted" and intent["effect_kind"] != check_app.MAIL:
                self._bad("E1", f"{subject}: deleted, and its effect is begun", event)

    def _accepted(self, event: Event) -> None:
        """One inbox item for each message; a repeat is told where the first one went."""
        for (intent, _), answer in zip(event.args["mails"], event.value, strict=True):
            place = (answer["dest_world"], answer["seq"])
            first = self.model.accepted.get(intent["intent_hash"])
            if answer["status"] == "ok" and first is not None:
                self._bad("F1", f"{place}: a message was accepted twice", event)
            elif answer["status"] == "already_enqueued" and first not in (None, place):
                self._bad("F1", f"{place}: a repeat is answered with another place", event)
            if answer["status"] == "ok":
                self.model.accepted[intent["intent_hash"]] = place

    def _redrive_effects(self, event: Event) -> None:
        """Each is another intent; whose, and what it wants, is that of the dead one."""
        for seq, name in zip(event.args["seqs"], event.value, strict=True):
            for subject, want in list(self.model.intents.wants.values()):
                right = check_app.digest(b"redrive", want.hash, seq.to_bytes(8, "big"))
                if right == name and want.kind == event.args["kind"]:
                    self.model.intents.redrive(subject, want, seq)
                    break
            else:
                self._bad("E1", f"redriven, but {name.hex()[:8]} is nobody's", event)

    # -- who hosts it ----------------------------------------------------------------------------

    def _acquire(self, event: Event) -> None:
        for answer in event.value:
            subject = f"{event.args['universe']}/{answer['world_id']}"
            world = self._world(subject)
            world.name = (answer["record"] or {}).get("name", world.name)
            lease = answer["lease"]
            stuck = stuck_now(event, answer)
            lost = world.held and (stuck or (lease and lease["epoch"] != world.epoch))
            if lost:
                self._lost(event, subject, world, stuck)
            if lease is not None:
                self._allowed(event, subject, world)
                if lease["epoch"] != world.epoch:
                    self.model.granted_ns[subject] = event.at_ns
                world.held, world.epoch, world.alone = True, lease["epoch"], False
            if stuck:
                world.status, world.held = "parked", False
                self._forgive(world)

    def _lost(self, event: Event, subject: str, world: World, stuck: bool) -> None:
        """A lease that ran out is held against the message that was next."""
        seq = world.cursor + 1
        world.losses[seq] += 1
        world.due_losses[seq] += seq in world.delivered
        if stuck and world.losses[seq] < self._stuck_max:
            self._bad("S3", f"{subject}: parked after {world.losses[seq]} losses at {seq}", event)
        if not stuck and world.alone and 0 < self._stuck_max <= world.due_losses[seq]:
            losses = world.due_losses[seq]
            self._bad("S3", f"{subject}: not parked after {losses} losses at {seq}", event)

    def _forgive(self, world: World) -> None:
        world.alone = False
        world.losses.clear()
        world.due_losses.clear()

    def _try_alone(self, event: Event) -> None:
        self._world(_subject(event)).alone = True

    def _allowed(self, event: Event, subject: str, world: World) -> None:
        worker = event.args["worker"]
        if world.worker not in (None, worker):
            self._bad("A1", f"{subject}: {worker} got it, {world.worker} should", event)
        if world.status != "active":
            self._bad("A1", f"{subject}: {worker} got it, but it is {world.status}", event)

    def _let_go(self, event: Event) -> None:
        lease = event.args["lease"]
        world = self.model.worlds.get(lease["resource"])
        if world is not None and (event.op != "lease.leave" or world.epoch == lease["epoch"]):
            world.held = False

    def _assign(self, event: Event) -> None:
        self._world(_subject(event)).worker = event.args["worker"]

    def _unassign(self, event: Event) -> None:
        self._world(_subject(event)).worker = None

    def _change(self, event: Event) -> None:
        world, change = self._world(_subject(event)), event.args["event"]
        world.status = event.value["status"]
        self._forgive(world)
        if change == "park":
            self._waited(event, world)
        if change != "resume":
            world.held = False
        if change == "delete":
            world.worker = None
            world.erased_ns = event.at_ns + self._deleted_ns

    def _waited(self, event: Event, world: World) -> None:
        """The leader parks a world that waits for the code of an entry, after its time."""
        height = event.args["blocker"]["height"]
        since_ns = world.code_ns.pop(height, None)
        if since_ns is None or event.at_ns < since_ns + self._unknown_ns:
            text = f"{_subject(event)}: parked at {height}, waiting since {since_ns}"
            self._bad("J6", text, event)

    def _purge(self, event: Event) -> None:
        """A world is deleted and fenced in one commit, and erased from then on."""
        world = self._world(_subject(event))
        if event.value["status"] != "deleted":
            self._bad("A1", f"{_subject(event)}: purged, and {event.value['status']}", event)
        world.status, world.worker, world.held = "deleted", None, False
        world.erased_ns = event.at_ns
        self._forgive(world)

    def _park(self, event: Event) -> None:
        """The store is sound, and all reducers but one do the same again: that one is parked."""
        subject, blocker = _subject(event), event.args["blocker"]
        if blocker["code"] != "replay_diverged" or not self._fickle(subject, blocker["height"]):
            self._bad("J3", f"{subject}: parked: {blocker['code']} {blocker['text']}", event)
        self._world(subject).status = "parked"

    def _diverged(self, event: Event) -> None:
        subject = f"{event.args['universe']}/{event.args['world']}"
        if not self._fickle(subject, event.args["height"]):
            self._bad("J3", f"{subject}: repeated otherwise: {event.args}", event)

    def _fickle(self, subject: str, height: int) -> bool:
        """Whether the entry is, or would be, that of a fickle event: each ingress is one entry. Of a
        moody one nothing but the digest tells, at the end of its cycle."""
        world = self._world(subject)
        at = height - world.base
        put = world.delivered.get(at)
        if put is not None and put[1][1] == check_app.FICKLE:
            return True
        ends = at <= len(world.steps) and bool(world.steps[at - 1].get("state"))
        while ends and at > 0:
            if world.steps[at - 1]["ingress"]["type"] == check_app.MOODY:
                return True
            at -= 1
            ends = at > 0 and world.steps[at - 1].get("state") == b""
        return False

    # -- forks -----------------------------------------------------------------------------------

    def _fork(self, event: Event) -> None:
        made, lineage = event.value, event.value["lineage"]
        subject = f"{made['universe']}/{made['world_id']}"
        if subject in self.model.worlds and self.model.worlds[subject].forked:
            return  # made before, and answered again
        parent = self._world(f"{made['universe']}/{lineage['parent_world_id']}")
        height = lineage["forked_at_height"]
        state = parent.state_at(height)
        if state is not None and state["whim"] is None:
            whim = check_app.resolve(state, lineage["parent_snapshot_hash"])
            state = {**state, "whim": whim}
        if state is None:
            self._bad("K1", f"{subject}: forked at {height}, the parent has no such state", event)
            state = check_app.initial()
        elif lineage["parent_snapshot_hash"] not in check_app.digests(state):
            self._bad("K1", f"{subject}: not the parent's state at {height}", event)
        child = World(made["world_id"], made["name"], height, forked=True)
        child.states = [check_app.fresh(state)]
        self.model.worlds[subject] = child
        wishes = self.model.intents.open_at(
            parent.given, parent.steps, parent.wants, height - parent.base
        )
        policy, keeps = _policies(event)
        if not keeps:
            wishes.timers.clear()
        child.given = self.model.intents.inherit(
            subject, child.world_id, wishes, policy, i=event.i, at_ns=event.at_ns
        )
        child.ordered = dict(child.given.keys)


def _policies(event: Event) -> tuple[str, bool]:
    """What a fork does with effects, and whether it keeps timers."""
    cutting = event.args.get("cutting")
    if cutting is None:
        return event.args.get("effects", "drop"), event.args.get("timers") == "keep"
    # It has what is kept, so nothing of it may be missing.
    return cutting["policy"], bool(cutting["wishes"]["timers"])


def findings(history: History) -> list[Violation]:
    found: list[Violation] = []
    for life in history.lives():
        replay = _Replay(history.events[0].args if history.events else {})
        for event in expanded(life):
            replay.step(event)
        found += replay.found
        found += check_intents.calls(replay.model)
    return found


def _subject(event: Event) -> str:
    return f"{event.args['universe']}/{event.args['world_id']}"


_STEPS: dict[str, Callable[[_Replay, Event], None]] = {
    "ingress.deliver": _Replay._deliver,
    "ingress.deliver_many": _Replay._deliver_many,
    "commit": _Replay._commit,
    "history.trim": _Replay._trimmed,
    "queue.redrive": _Replay._redrive,
    "firing.fire_due": _Replay._fired,
    "claims.take": _Replay._taken,
    "fabric.accept_many": _Replay._accepted,
    "receipts.redrive_effects": _Replay._redrive_effects,
    "tenure.acquire": _Replay._acquire,
    "tenure.park": _Replay._park,
    "tenure.try_alone": _Replay._try_alone,
    "lease.release": _Replay._let_go,
    "lease.leave": _Replay._let_go,
    "cycle.stop": _Replay._stop,
    "catalog.assign": _Replay._assign,
    "catalog.unassign": _Replay._unassign,
    "catalog.change": _Replay._change,
    "purge.begin": _Replay._purge,
    "fork": _Replay._fork,
    "plant": _Replay._fork,
}

"""Checker of intents against the rows of an audit: each is in exactly one place. E1 E3 T1 F1 K1 J1.

    an effect   is in its queue, or its world has exactly one receipt
    mail        is in its queue, or in the destination's inbox; then the sender has a receipt
    a timer     is in the queue of its slot, or its world has its event; a replaced timer is in neither
    a fork      has exactly the pending intents that it inherited from its parent

The only exception are intents of a deleted world: they may end without a receipt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from holdfast.sim.history import HistoryEvent
from tests.simulation import model_app
from tests.simulation.check_world_rows import AuditRows
from tests.simulation.model_app import ExpectedIntent
from tests.simulation.model_intents import TimerModel
from tests.simulation.model_worlds import FAILED_EVENTS_QUEUE, UniverseModel
from tests.simulation.violation import Violation

Plain = dict[str, Any]
SubjectAndHash = tuple[str, bytes]

# Codes of receipts that are delivered only where the model expects them.
SYNTHETIC_CODES = ("key_conflict", "dropped_by_fork")
# Codes of effects with unknown outcome: the call may have happened.
UNKNOWN_OUTCOME_CODES = ("timeout", "expiries_exhausted")


class IntentComparison:
    """Compares one audit with the intents of the model."""

    def __init__(self, model: UniverseModel, event: HistoryEvent) -> None:
        self.model = model
        self.event = event
        self._found: list[Violation] = []
        self._queued: Counter[bytes] = Counter()
        self._mail: Counter[bytes] = Counter()
        self._fired: Counter[SubjectAndHash] = Counter()
        self._receipts: dict[SubjectAndHash, list[Plain]] = {}
        self._deleted: set[str] = set()
        # Worlds whose rows may be erased, by subject and by name.
        self._erased: set[str] = set()
        self._pending: set[bytes] = set()
        self._slots: Counter[bytes] = Counter()

    def violations(self) -> list[Violation]:
        universes = self.event.value.get("worlds", {})
        for subject, world in self.model.worlds.items():
            if world.may_be_erased(self.event.at_ns):
                self._deleted.add(subject)
                self._erased |= {subject, world.name}
        for universe, rows_of_universe in universes.items():
            rows = AuditRows(universe, self.event.value)
            for world_id, record in rows_of_universe["records"].items():
                if record["status"] == "deleted":
                    self._deleted.add(f"{universe}/{world_id}")
                    self._check_closed_inbox(f"{universe}/{world_id}", rows)
            for row in rows_of_universe.get("slots", ()):
                if f"{universe}/{row['world_id']}" not in self._deleted:
                    self._slots[row["intent_hash"]] += 1
            for name, row in rows_of_universe.get("pending", {}).items():
                if not row["dead"] and f"{universe}/{row['world_id']}" not in self._deleted:
                    self._pending.add(bytes.fromhex(name))
            self._collect_queues(universe)
            self._collect_inboxes(universe, rows)
        if universes:
            given_up = []
            for subject, world in self.model.worlds.items():
                for step in world.steps:
                    if step["outcome"] == "unknown":
                        given_up.append((subject, step["ingress"]))
                    else:
                        self._record_arrival(subject, step["ingress"])
            for subject, ingress in given_up:
                # A redriven event is delivered a second time. The second delivery counts.
                if not self._has_arrived(subject, ingress):
                    self._record_arrival(subject, ingress)
            self._check_intents()
            self._check_timers()
            self._check_unknown_hashes()
            self._check_receipts()
        return self._found

    def _add_violation(self, number: str, what: str) -> None:
        self._found.append(Violation(number, what, self.event))

    def _check_closed_inbox(self, subject: str, rows: AuditRows) -> None:
        """Check that a deleted world receives nothing."""
        last = rows.inbox(subject)["last_seq"]
        known = self.model.closed_inboxes.setdefault(subject, last)
        if last > known:
            self._add_violation("E1", f"{subject}: {last - known} items delivered after deletion")

    # -- collecting
    # ----------------------------------------------------------------------------------

    def _collect_queues(self, universe: str) -> None:
        for name, queue in self.event.value["queues"].items():
            if name.startswith(f"{universe}/") and not name.endswith(FAILED_EVENTS_QUEUE):
                rows = AuditRows(universe, self.event.value)
                for seq, row in queue["items"].items():
                    intent = model_app.read_record(model_app.INTENT, rows.body(row, "payload"))
                    self._queued[intent["intent_hash"]] += 1
                    self._check_item(f"{name}/{seq}", name.partition("/")[2], intent)

    def _collect_inboxes(self, universe: str, rows: AuditRows) -> None:
        for subject, inbox in self.event.value["inboxes"].items():
            if subject.startswith(f"{universe}/"):
                for row in inbox["rows"].values():
                    self._record_arrival(
                        subject, dict(zip(model_app.INGRESS, rows.ingress(row), strict=True))
                    )

    def _record_arrival(self, subject: str, ingress: Plain) -> None:
        hash, kind = ingress["intent_hash"], ingress["kind"]
        if kind == "fabric":
            self._mail[hash] += 1
        elif kind == "timer":
            self._fired[subject, hash] += 1
        elif kind == "receipt":
            receipt = model_app.receipt_of(ingress)
            self._receipts.setdefault((subject, hash), []).append(receipt)

    def _has_arrived(self, subject: str, ingress: Plain) -> bool:
        hash, kind = ingress["intent_hash"], ingress["kind"]
        return bool(self._mail[hash] if kind == "fabric" else self._fired[subject, hash])

    def _check_item(self, where: str, queue: str, intent: Plain) -> None:
        """Check that an item has the kind, the parameters and the queue of its intent."""
        kind, hash = intent["effect_kind"], intent["intent_hash"]
        known = self.model.intents.by_hash.get(hash)
        if known is not None:
            want = known[1]
            lane = f"effects/{want.kind}>{model_app.OTHER_UNIVERSE}"
            if (kind, intent["params"]) != (want.kind, want.params) or (
                queue not in (f"effects/{want.kind}", lane)
            ):
                self._add_violation("E1", f"{where}: an intent in the wrong place or shape")
        timer = self.model.intents.timers.get(hash)
        if timer is not None:
            right = "timers/calendar" if timer.is_calendar else "timers"
            if kind != "timer.set" or queue != right:
                self._add_violation("T1", f"{where}: a timer in the wrong place")

    # -- checking
    # ------------------------------------------------------------------------------------

    def _check_intents(self) -> None:
        for hash, (subject, want) in self.model.intents.by_hash.items():
            receipts = len(self._receipts.get((subject, hash), ()))
            if (hash in self._pending) != bool(self._queued[hash]) and subject not in self._deleted:
                self._add_violation(
                    "E1", f"{subject}: the pending row and the queue of a {want.kind} differ"
                )
            if want.kind == model_app.MAIL:
                self._check_mail(subject, want, receipts)
                continue
            places = self._queued[hash] + receipts
            lost = places == 0 and subject not in self._deleted
            if places > 1 or lost:
                self._add_violation("E1", f"{subject}: a {want.kind} is in {places} places")

    def _check_mail(self, subject: str, want: ExpectedIntent, receipts: int) -> None:
        if model_app.is_to_other_universe(want):
            self._check_remote_mail(subject, want, receipts)
            return
        places = self._queued[want.hash] + self._mail[want.hash]
        if not self._mail[want.hash] and {subject, model_app.target_of(want)} & self._erased:
            # The message was erased with its sender, or unread with its destination.
            if places > 1 or receipts > 1:
                self._add_violation(
                    "F1", f"{subject}: mail is in {places} places, receipts {receipts}"
                )
            return
        if places != 1:
            self._add_violation("F1", f"{subject}: mail is in {places} places")
        elif receipts > 1 or (receipts != self._mail[want.hash] and subject not in self._deleted):
            self._add_violation("E1", f"{subject}: mail delivered, {receipts} receipts")

    def _check_remote_mail(self, subject: str, want: ExpectedIntent, receipts: int) -> None:
        """Check mail to another universe. Delivery and receipt are two commits, and both states are
        legal between them."""
        waits, there = self._queued[want.hash], self._mail[want.hash]
        delivered_receipts = self._receipts.get((subject, want.hash), [])
        lost = any(one["status"] == "ok" for one in delivered_receipts) and not there
        if there > 1 or lost:
            self._add_violation(
                "F1", f"{subject}: mail abroad is there {there} times, receipts {receipts}"
            )
        elif waits + receipts != 1 and (waits + receipts or subject not in self._deleted):
            self._add_violation(
                "E1", f"{subject}: mail abroad waits {waits} times, receipts {receipts}"
            )

    def _check_timers(self) -> None:
        timers = {id(timer): timer for timer in self.model.intents.timers.values()}
        for timer in timers.values():
            queued = sum(self._queued[name] for name in timer.due_ns)
            fired = {name: self._fired[timer.subject, name] for name in timer.due_ns}
            for name, times in fired.items():
                if times > 1:
                    self._add_violation("T1", f"{timer.subject}: a timer fired {times} times")
                elif times and not self._was_due(timer, name):
                    self._add_violation(
                        "T1", f"{timer.subject}: a timer fired that was not due or was removed"
                    )
            if timer.subject in self._deleted:
                continue
            for name in timer.must_be_delivered(small_inboxes=self.model.small_inboxes):
                if not fired[name]:
                    self._add_violation(
                        "T1", f"{timer.subject}: a past occurrence was not delivered"
                    )
            if sum(self._slots[name] for name in timer.due_ns) != queued:
                self._add_violation(
                    "T1", f"{timer.subject}: slot {timer.slot} and its queue item differ"
                )
            if timer.is_recurring and not all(
                name in timer.may_be_waiting for name in self._waiting_hashes(timer)
            ):
                self._add_violation("T1", f"{timer.subject}: a past occurrence is still waiting")
            over = timer.removed_by is not None or (not timer.is_recurring and any(fired.values()))
            if queued != (0 if over else 1):
                self._add_violation(
                    "T1", f"{timer.subject}: a timer waits {queued} times, fired {fired}"
                )

    def _waiting_hashes(self, timer: TimerModel) -> list[bytes]:
        return [name for name in timer.due_ns if self._queued[name]]

    def _was_due(self, timer: TimerModel, name: bytes) -> bool:
        """Whether a worker fired the timer while it was in its slot and due by the relevant
        clock."""
        fires = timer.fires.get(name, ())
        # A fused commit fires a timer before it applies its replacement.
        in_time = any(timer.removed_by is None or fire.i <= timer.removed_by for fire in fires)
        return in_time and name not in timer.skipped

    def _check_unknown_hashes(self) -> None:
        """Check that every intent, timer event and receipt belongs to an entry of its world."""
        intents = self.model.intents
        for hash in {*self._queued, *self._mail}:
            if hash not in intents.by_hash and hash not in intents.timers:
                self._add_violation("J1", f"an intent {hash.hex()[:8]} of no entry")
        for subject, hash in self._fired:
            if hash not in intents.timers or intents.timers[hash].subject != subject:
                self._add_violation("J1", f"{subject}: a timer {hash.hex()[:8]} of no entry")
        for subject, hash in self._receipts:
            if (
                intents.by_hash.get(hash, ("",))[0] != subject
                and (subject, hash) not in intents.owed
            ):
                forked = subject in self.model.worlds and self.model.worlds[subject].forked
                text = f"{subject}: a receipt of {hash.hex()[:8]}, which it did not emit"
                self._add_violation("K1" if forked else "J1", text)

    def _check_receipts(self) -> None:
        intents = self.model.intents
        for (subject, hash), receipts in self._receipts.items():
            for receipt in receipts:
                self._check_receipt(subject, hash, receipt)
        for (subject, hash), code in intents.owed.items():
            if subject not in self._erased and len(self._receipts.get((subject, hash), ())) != 1:
                self._add_violation(
                    self._invariant_of(subject), f"{subject}: {code} was not delivered exactly once"
                )
        for hash in intents.cancelled:
            if self._queued[hash] and intents.by_hash[hash][0] not in self._deleted:
                self._add_violation(
                    "E1", f"{intents.by_hash[hash][0]}: cancelled, but still queued"
                )

    def _invariant_of(self, subject: str) -> str:
        """The violated invariant of a wrong receipt. In a fork it may be a receipt of the
        parent."""
        world = self.model.worlds.get(subject)
        return "K1" if world is not None and world.forked else "E1"

    def _check_receipt(self, subject: str, hash: bytes, receipt: Plain) -> None:
        """Check the content of a receipt."""
        intents, code = self.model.intents, receipt["code"]
        owed = intents.owed.get((subject, hash))
        if owed != (code if owed or code in SYNTHETIC_CODES else None):
            self._add_violation(
                self._invariant_of(subject), f"{subject}: receipt code {code}, expected {owed}"
            )
        elif code == "cancelled" and not owed and hash not in intents.cancelled:
            self._add_violation("E1", f"{subject}: cancelled without a request")
        elif (receipt["status"] == "ok") == bool(code):
            self._add_violation(
                "E1", f"{subject}: a receipt {receipt['status']} with the code {code!r}"
            )
        elif (receipt["status"] == "timeout") != (code in UNKNOWN_OUTCOME_CODES):
            self._add_violation("E1", f"{subject}: a receipt {receipt['status']} for {code}")
        elif receipt["status"] == "ok" and receipt["effect_kind"] in model_app.EFFECTS:
            self._check_call_result(subject, hash, receipt)

    def _check_call_result(self, subject: str, hash: bytes, receipt: Plain) -> None:
        """Check the result of an effect. It is the number of the call, which must belong to this
        intent."""
        want = intent_of(self.model, hash)
        if want is None:
            return
        number = int(model_app.unpack(receipt["value"]))
        call = self.model.calls.get(number)
        if call is None:
            self._add_violation("E3", f"{subject}: a receipt of call {number}, which was not made")
        elif (call["kind"], call["args"]) != (want.kind, model_app.unpack(want.params)):
            self._add_violation("E3", f"{subject}: a receipt of another intent's call {number}")


def intent_of(model: UniverseModel, hash: bytes) -> ExpectedIntent | None:
    entry = model.intents.by_hash.get(hash)
    return None if entry is None else entry[1]


def check_calls(model: UniverseModel) -> Iterator[Violation]:
    """E3: all calls of an intent carry one key, and calls of other intents carry other keys."""
    by_key: dict[str, tuple[str, str, list[str]]] = {}
    # An order without a user key is one intent, plus one for each redrive and fork.
    intents: Counter[tuple[str, str]] = Counter()
    for _, want in model.intents.by_hash.values():
        if want.kind in model_app.EFFECTS:
            intents[want.kind, model_app.unpack(want.params)[1]] += 1
    keys: dict[tuple[str, str], set[str]] = {}
    for number, call in sorted(model.calls.items()):
        what = (call["kind"], call["world"], call["args"])
        if not call["key"]:
            yield Violation("E3", f"call {number} has no key")
        elif by_key.setdefault(call["key"], what) != what:
            yield Violation("E3", f"call {number} has the key of another intent")
        order = (call["kind"], call["args"][1])
        seen = keys.setdefault(order, set())
        seen.add(call["key"])
        if order[1] and len(seen) > intents[order]:
            yield Violation("E3", f"call {number}: {len(seen)} keys of {intents[order]} intents")

"""Model of a universe: updated by `check_worlds`, compared by `check_world_rows`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.simulation import model_app
from tests.simulation.model_app import ExpectedIntent
from tests.simulation.model_intents import IntentModel, PendingIntents

Plain = dict[str, Any]

# The queue of failed events, in every universe.
FAILED_EVENTS_QUEUE = "failed-events"


@dataclass(slots=True)
class HostingModel:
    """The assignment, the lease and the lost leases of a world."""

    worker: str | None = None
    is_held: bool = False
    epoch: int = 0
    # Lost leases, by the next message.
    losses: Counter[int] = field(default_factory=Counter)
    # The losses during which that message was certainly delivered.
    due_losses: Counter[int] = field(default_factory=Counter)
    # The world runs in isolation, so the next loss is certainly its own fault.
    is_isolated: bool = False


@dataclass(slots=True)
class CodeWaitModel:
    """Waits of a world for code that knows an item or an entry."""

    # Delivery times by seq. First stop before an item by seq. First stop of given-up items by event
    # type.
    sent_ns: dict[int, int] = field(default_factory=dict)
    stopped_ns: dict[int, int] = field(default_factory=dict)
    missed_ns: dict[str, int] = field(default_factory=dict)
    # Begin of the wait for the code version of an entry, by height.
    code_ns: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class WorldModel:
    world_id: str
    name: str = ""
    # A fork starts above its parent's height, with its state.
    base: int = 0
    forked: bool = False
    bodies: list[bytes] = field(default_factory=list)
    times: list[int] = field(default_factory=list)  # commit time of each entry
    steps: list[Plain] = field(default_factory=list)
    # Intents of each entry.
    wants: list[list[ExpectedIntent]] = field(default_factory=list)
    states: list[Plain] = field(default_factory=lambda: [model_app.initial_state()])
    delivered: dict[int, tuple[str | None, list[Any]]] = field(default_factory=dict)
    acknowledged: set[int] = field(default_factory=set)  # acknowledged to the sender
    # Keys of messages: the number of the first use, its body and its time.
    keys: dict[str, tuple[int, list[Any], int]] = field(default_factory=dict)
    # Pending state that a fork inherited.
    inherited: PendingIntents = field(default_factory=PendingIntents)
    # Idempotency digests of effect keys, by intent hash, over all generations.
    used_keys: dict[bytes, bytes] = field(default_factory=dict)
    status: str = "active"
    hosting: HostingModel = field(default_factory=HostingModel)
    redriven: Counter[str] = field(default_factory=Counter)
    waits: CodeWaitModel = field(default_factory=CodeWaitModel)
    # From when on its rows may be erased: it is deleted or purged.
    erased_ns: int | None = None
    # Height and time of the last history trim.
    last_trim: tuple[int, int] | None = None

    @property
    def height(self) -> int:
        return self.base + len(self.bodies)

    @property
    def cursor(self) -> int:
        return len(self.bodies)

    def may_be_erased(self, now_ns: int) -> bool:
        """Whether all or some of its rows may be erased."""
        return self.erased_ns is not None and now_ns >= self.erased_ns

    def code_at(self, height: int) -> str:
        """The code version of an entry. Empty if there is no such entry."""
        at = height - self.base
        return str(self.steps[at - 1]["code"]) if 0 < at <= len(self.steps) else ""

    def state_at(self, height: int) -> Plain | None:
        at = height - self.base
        return self.states[at] if 0 <= at < len(self.states) else None


@dataclass(slots=True)
class UniverseModel:
    """All worlds of one life of the store, by subject, and their intents."""

    worlds: dict[str, WorldModel] = field(default_factory=dict)
    intents: IntentModel = field(default_factory=IntentModel)
    # Time at which the current host got a world.
    granted_ns: dict[str, int] = field(default_factory=dict)
    # Whether inboxes are small and full at times.
    small_inboxes: bool = False
    # History bound, `entries` and `ns`. Empty: unbounded. None: unknown.
    history_bound: Plain | None = None
    # Deleted worlds: the last number of their inboxes.
    closed_inboxes: dict[str, int] = field(default_factory=dict)
    # Messages to other stores, by intent: where they were accepted.
    accepted: dict[bytes, tuple[str, int]] = field(default_factory=dict)
    # Effect calls, by number.
    calls: dict[int, Plain] = field(default_factory=dict)
    # Failed events by their number in the queue of failures: (subject, seq, id).
    failed_events: dict[int, tuple[str, int, str]] = field(default_factory=dict)
    last_failed_event: int = 0
    redriven: set[int] = field(default_factory=set)
    # Event types unknown to the code of each incarnation.
    unknown_types: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    # Code version of each incarnation.
    versions: dict[tuple[str, str], str] = field(default_factory=dict)

    def world(self, subject: str) -> WorldModel:
        world = self.worlds.get(subject)
        if world is None:
            world = self.worlds[subject] = WorldModel(subject.partition("/")[2])
        return world


def message_id(ingress: Plain) -> str:
    """Return the unique id of a message. For mail it includes the sender: an account that was
    deleted and recreated may send the same message again. For a timer it includes its hash: a
    recurring timer repeats its event."""
    if ingress["kind"] == "receipt":
        return ""
    id = str(model_app.event_of(ingress)["id"])
    if ingress["kind"] == "timer":
        return f"{ingress['intent_hash'].hex()}:{id}"
    return f"{ingress['from_world']}:{id}" if ingress["kind"] == "fabric" else id

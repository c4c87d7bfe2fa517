"""Checkers of worlds accept valid histories and report each violation."""

import hashlib
from collections.abc import Callable

import pytest

from holdfast.clock import S
from tests.sim.universe_history import (
    SUBJECT,
    WORLD_ID,
    UniverseHistory,
    encode_intent,
    event,
    inbox_row,
    lease,
    make_ingress,
    pack,
    paid,
    queue_rows,
    receipt,
    renewed,
    world_record,
)
from tests.simulation import check_worlds, model_app
from tests.simulation.checkers import CHECKERS, check_all

INBOX = ("inboxes", SUBJECT)
JOURNAL = ("journals", SUBJECT)
CATALOG = ("worlds", "u")


def payments_journaled() -> UniverseHistory:
    """Two payments sent and journaled, and a third in the inbox."""
    u = UniverseHistory().granted(1)
    u.sent(2, 1, paid("p1", 5), "k1").sent(3, 2, paid("p2", 7), "k2")
    u.cycle(4, paid("p1", 5), paid("p2", 7))
    return u.sent(5, 3, paid("p3", 1), "k3")


def mail_delivered() -> UniverseHistory:
    """A transfer to another account, with the message in its inbox."""
    u = UniverseHistory().granted(1).sent(2, 1, event("Moved", id="m", amount=2, to="w2"))
    u.cycle(3, event("Moved", id="m", amount=2, to="w2"))
    [intent] = u.intents
    mail = make_ingress(
        "fabric", "Paid", paid("m>", 2)[2], intent.hash, from_world=WORLD_ID, from_height=1
    )
    rows = {1: inbox_row(f"fabric:{intent.hash.hex()}", mail)}
    u.put_in_inbox(receipt(intent))
    u.rows["inboxes"]["u/w2"] = {"rows": rows, "cursor": 0, "last_seq": 1}
    catalog = u.rows["worlds"]["u"]
    catalog["records"]["w2"] = world_record("w2")
    catalog["names"]["Account/w2"] = "w2"
    catalog["counts"]["active"] = 2
    catalog["hints"].append(["", "w2"])
    return u


def ordered() -> UniverseHistory:
    """An effect intent in its queue."""
    u = UniverseHistory().granted(1).sent(2, 1, event("Ordered", id="o", what="a", key=None))
    u.cycle(3, event("Ordered", id="o", what="a", key=None))
    return u.put_in_queue(u.intents[0], "u/effects/fx.quote")


def forked(**lineage: object) -> UniverseHistory:
    """A fork of the account after its first entry."""
    u = payments_journaled()
    state = u.state_bytes(1)
    child_record = world_record(
        "c1",
        lineage={
            "parent_world_id": WORLD_ID,
            "parent_snapshot_hash": hashlib.sha256(state).digest(),
            "forked_at_height": 1,
            **lineage,
        },
    )
    u.committed(6, "create_fork", {"name": "c1", "child_id": "c1"}, child_record)
    catalog = u.rows["worlds"]["u"]
    catalog["records"]["c1"] = child_record
    catalog["names"]["Account/c1"] = "c1"
    catalog["counts"]["active"] = 2
    hash = u.rows["journals"][SUBJECT]["entries"][1]["hash"]
    head = {
        "height": 1,
        "hash": hash,
        "checkpoint": 1,
        "floor": 2,
        "below": hash,
        "packed": 0,
    }
    u.rows["journals"]["u/c1"] = {"head": head, "entries": {}, "doubled": []}
    saved = {"hash": b"", "at_ns": 0, "bytes": 0, "state": state}
    u.rows["snapshots"]["u/c1"] = {"states": {1: saved}, "baseline": {"height": 1, "hash": b""}}
    return u


def reducer_failed() -> UniverseHistory:
    """A failed reducer and its dead letter."""
    botched = event("Botched", id="b")
    u = UniverseHistory().granted(1).sent(2, 1, botched).cycle(3, botched)
    letter = pack([WORLD_ID, 1, pack(botched)])
    rows = queue_rows()
    rows["dead"] = {1: {"payload": letter, "blob": b""}}
    rows["died"] = [[9, 1]]
    u.rows["queues"]["u/failed-events"] = rows
    return u


def unrecorded_input() -> UniverseHistory:
    """A reducer that read an unrecorded value. Only the state digest of its cycle depends on it."""
    u = UniverseHistory().granted(1)
    ingress = [event("Moody", id="m"), paid("p", 5)]
    for seq, item in enumerate(ingress, 1):
        u.sent(2, seq, item)
    return u.cycle(3, *ingress)


def park_world(u: UniverseHistory, height: int) -> UniverseHistory:
    blocker = {"code": "replay_diverged", "text": "", "height": height}
    args = {"universe": "u", "world_id": WORLD_ID, "held": lease("a", 1), "blocker": blocker}
    return u.committed(6, "hosting_lease.park", args)


def authority_log(*decisions: list[object], **row: object) -> UniverseHistory:
    """A leader lease log and the lease row that results from it."""
    u = payments_journaled()
    entries = {
        n: {"hash": b"", "at_ns": 0, "body": pack(decision), "blob": b""}
        for n, decision in enumerate(decisions, 1)
    }
    u.rows["journals"]["u/authority"] = {"head": {}, "entries": entries, "doubled": []}
    base = {"state": "held", "worker": "l", "incarnation": "1", "generation": 1, "epoch": 1}
    u.rows["leases"]["u/authority"] = {**base, "expires_ns": 9, "by": ["l"], **row}
    return u


ACQUIRED = ["acquired", "l", "1", "id", 1, 1, 3, 9, ""]
RELEASED = ["released", "l", "1", "id", 1, 1, 5, 9, ""]

RIGHT: dict[str, Callable[[], UniverseHistory]] = {
    "an account": payments_journaled,
    "a key that may be forgotten by now": lambda: payments_journaled().sent(
        16, 4, paid("p3", 1), "k3"
    ),
    "mail": mail_delivered,
    "an effect": ordered,
    "a fork": forked,
    "a failure": reducer_failed,
    "a leader": lambda: authority_log(ACQUIRED),
    "a moody account": unrecorded_input,
    "a moody account is parked at the end of the cycle": lambda: park_world(unrecorded_input(), 2),
    "a history is cut within its bound": lambda: journal_trimmed(6, 2),
    "a purged account is erased": lambda: world_erased(world_purged()),
    "a deleted account is erased after its time": lambda: world_erased(world_deleted(41)),
}


def snapshot_at_two(state: bytes) -> dict[str, object]:
    saved = {"hash": b"", "at_ns": 0, "bytes": 0, "state": state}
    return {"states": {2: saved}, "baseline": {"height": 2, "hash": b""}}


def journal_trimmed(at_s: float, floor: int, *, with_trim_event: bool = True) -> UniverseHistory:
    """Two entries of second 4, with the journal trimmed at `at_s` to start at `floor`. Retention keeps one
    entry, and every entry for two seconds."""
    u = payments_journaled()
    if with_trim_event:
        u.committed(at_s, "history.trim", {"universe": "u", "limit": 3}, False)
    journal_rows = u.rows["journals"][SUBJECT]
    journal_rows["head"] = {
        **journal_rows["head"],
        "floor": floor,
        "below": journal_rows["entries"][floor - 1]["hash"],
    }
    for height in range(1, floor):
        del journal_rows["entries"][height]
    states = {
        at: {"hash": b"", "at_ns": 0, "bytes": 0, "state": u.state_bytes(at)} for at in (1, 2)
    }
    u.rows["snapshots"][SUBJECT] = {"states": states, "baseline": {"height": 2, "hash": b""}}
    return u


def world_purged(*, force: bool = True) -> UniverseHistory:
    args = {"universe": "u", "world_id": WORLD_ID, "head": 2, "force": force}
    return payments_journaled().committed(
        6, "purge.begin_purge", args, world_record(WORLD_ID, status="deleted"), actor="keeper"
    )


def world_erased(u: UniverseHistory, *kept_spaces: str) -> UniverseHistory:
    """Delete the rows of the world except those of the named spaces."""
    for space in {"journals", "inboxes", "snapshots"} - {*kept_spaces}:
        u.rows[space] = {}
    catalog = u.rows["worlds"]["u"]
    catalog["records"], catalog["names"], catalog["counts"], catalog["hints"] = {}, {}, {}, []
    return u


def world_deleted(at_s: float) -> UniverseHistory:
    """A deleted world. Its host is fenced, its rows are retained for nine seconds."""
    args = {"universe": "u", "world_id": WORLD_ID, "event": "delete"}
    return payments_journaled().committed(
        at_s,
        "catalog.change_status",
        args,
        world_record(WORLD_ID, status="deleted"),
        actor="keeper",
    )


# Equal to unknown_ns in the configuration of these histories.
UNKNOWN_S = 2


def unknown_item_abandoned() -> UniverseHistory:
    """An item of unknown type, abandoned after its timeout."""
    return (
        UniverseHistory()
        .declare_code("a", "Renewed")
        .granted(1)
        .sent(2, 1, renewed("p"), "k")
        .stopped(3, 1)
        .granted(4, epoch=2)
        .cycle(4 + UNKNOWN_S, renewed("p"), epoch=2, outcome="unknown")
    )


def test_world_checkers_accept_an_unknown_item_abandoned_after_its_timeout() -> None:
    valid = unknown_item_abandoned().sent(
        9, 1, renewed("p"), "k", already=True, item={"state": "dead", "seq": 1}
    )
    assert [
        violation for violation in check_worlds.findings(valid.history) if violation.number == "I7"
    ] == []


def second_unknown_item_abandoned(sent_s: float, at_s: float) -> UniverseHistory:
    """A second item of the same unknown type, sent later and abandoned later."""
    return (
        unknown_item_abandoned()
        .sent(sent_s, 2, renewed("q"))
        .stopped(8, 2, epoch=2)
        .granted(8.1, epoch=3)
        .cycle(at_s, renewed("q"), epoch=3, outcome="unknown")
    )


def test_unknown_item_timeout_starts_behind_an_earlier_item_of_its_type() -> None:
    valid = second_unknown_item_abandoned(5, 8.2)
    assert [
        violation for violation in check_worlds.findings(valid.history) if violation.number == "I7"
    ] == []
    early = second_unknown_item_abandoned(7, 8.2)
    assert [violation.number for violation in check_worlds.findings(early.history)] == ["I7"]


def entry_of_other_code() -> UniverseHistory:
    """An entry of newer code, and a lease of a worker with the former code. Its state lacks a field."""
    universe = (
        UniverseHistory().declare_code("a").declare_code("b", version=model_app.FORMER).granted(1)
    )
    return universe.sent(2, 1, paid("p", 1)).cycle(3, paid("p", 1)).granted(4, "b", 2)


def park_at(u: UniverseHistory, at_s: float, height: int) -> UniverseHistory:
    blocker = {"code": "replay_diverged", "text": "", "height": height}
    args = {"universe": "u", "world_id": WORLD_ID, "event": "park", "blocker": blocker}
    return u.committed(at_s, "catalog.change_status", args, {"status": "parked"}, actor="o")


def test_world_checkers_accept_a_park_after_the_wait_for_code() -> None:
    valid = entry_of_other_code().stopped(5, 0, "b", 2, height=1)
    assert check_worlds.findings(valid.history) == []
    assert check_worlds.findings(park_at(valid, 5 + UNKNOWN_S, 1).history) == []


WRONG: list[tuple[str, str, Callable[[], UniverseHistory]]] = [
    (
        "J6",
        "code that lacks a field goes on from entries that have it",
        lambda: (
            entry_of_other_code()
            .sent(5, 2, paid("q", 1))
            .cycle(6, paid("q", 1), worker="b", epoch=2, code=model_app.FORMER)
        ),
    ),
    (
        "J6",
        "a world waits for the code that hosted it",
        lambda: entry_of_other_code().granted(20, "a", 3).stopped(21, 0, "a", 3, height=1),
    ),
    (
        "J6",
        "code that has all fields cannot repeat an entry",
        lambda: (
            UniverseHistory()
            .declare_code("a")
            .granted(1, "b", 1)
            .sent(2, 1, paid("p", 1))
            .cycle(3, paid("p", 1), worker="b", code=model_app.FORMER)
            .granted(20, "a", 2)
            .stopped(21, 0, "a", 2, height=1)
        ),
    ),
    (
        "J6",
        "a world that waits for code is parked before its time",
        lambda: park_at(
            entry_of_other_code().stopped(5, 0, "b", 2, height=1), 5 + UNKNOWN_S - 0.5, 1
        ),
    ),
    (
        "J6",
        "a world is parked for code that it does not wait for",
        lambda: park_at(entry_of_other_code(), 9, 1),
    ),
    (
        "J3",
        "an entry replies what its state is not",
        lambda: (
            UniverseHistory()
            .granted(1)
            .sent(2, 1, paid("p", 5))
            .cycle(3, paid("p", 5), reply=pack([1, 6, "5", []]))
        ),
    ),
    (
        "J3",
        "an entry emitted what its event does not ask for",
        lambda: (
            UniverseHistory()
            .granted(1)
            .sent(2, 1, paid("p", 5))
            .cycle(3, paid("p", 5), emitted=[b"x" * 32])
        ),
    ),
    (
        "J3",
        "a snapshot is not the state at its height",
        lambda: payments_journaled().audit("snapshots", SUBJECT, to=snapshot_at_two(b"\x80")),
    ),
    (
        "J6",
        "the last entry of a cycle has no digest",
        lambda: (
            UniverseHistory().granted(1).sent(2, 1, paid("p", 5)).cycle(3, paid("p", 5), state=b"")
        ),
    ),
    (
        "J6",
        "the digest is that of another state",
        lambda: (
            UniverseHistory()
            .granted(1)
            .sent(2, 1, paid("p", 5))
            .cycle(3, paid("p", 5), state=b"x" * 32)
        ),
    ),
    (
        "J6",
        "a digest is not the last entry's alone",
        lambda: (
            UniverseHistory()
            .granted(1)
            .sent(2, 1, paid("p", 5))
            .sent(2, 2, paid("q", 5))
            .cycle(
                3,
                paid("p", 5),
                paid("q", 5),
                state=model_app.state_digest(
                    {**model_app.initial_state(), "balance": 10, "rate": 5, "seen": 2}
                ),
            )
        ),
    ),
    (
        "J3",
        "a sound world is parked",
        lambda: park_world(payments_journaled(), 2),
    ),
    (
        "J3",
        "a moody account is parked at another height than the end of its cycle",
        lambda: park_world(unrecorded_input(), 1),
    ),
    (
        "J2",
        "a cycle on another head",
        lambda: (
            UniverseHistory()
            .granted(1)
            .sent(2, 1, paid("p", 5))
            .cycle(3, paid("p", 5), expected_head=4)
        ),
    ),
    ("J2", "an entry is missing", lambda: payments_journaled().audit(*JOURNAL, "entries", 1)),
    (
        "J2",
        "an entry was changed",
        lambda: payments_journaled().audit(*JOURNAL, "entries", 1, "body", to=b"other"),
    ),
    (
        "J4",
        "the baseline's snapshot is gone",
        lambda: payments_journaled().audit(
            "snapshots", SUBJECT, to={"states": {}, "baseline": {"height": 2, "hash": b""}}
        ),
    ),
    (
        "J4",
        "a journal begins where there is no state",
        lambda: journal_trimmed(6, 2).audit("snapshots", SUBJECT, "states", 1),
    ),
    ("J4", "a journal was cut above its bound", lambda: journal_trimmed(7, 3).audit()),
    ("J4", "a journal was cut before its time", lambda: journal_trimmed(5.9, 2).audit()),
    (
        "J4",
        "a journal was cut by nothing",
        lambda: journal_trimmed(6, 2, with_trim_event=False).audit(),
    ),
    (
        "J4",
        "a journal was cut above its baseline",
        lambda: journal_trimmed(6, 3).audit("snapshots", SUBJECT, "baseline", "height", to=1),
    ),
    (
        "A1",
        "a purged world goes on",
        lambda: world_purged().cycle(7, paid("p3", 1)),
    ),
    (
        "L3",
        "the host of a purged world is not fenced",
        lambda: world_purged().cycle(7, paid("p3", 1)),
    ),
    (
        "A1",
        "a world was purged, and not deleted",
        lambda: payments_journaled().committed(
            6,
            "purge.begin_purge",
            {"universe": "u", "world_id": WORLD_ID, "force": True},
            world_record(WORLD_ID),
        ),
    ),
    ("L7", "a held world was purged without force", lambda: world_purged(force=False)),
    (
        "S4",
        "a purged world left its journal",
        lambda: world_erased(world_purged(), "journals").audit(),
    ),
    (
        "J2",
        "a world is gone that is not deleted",
        lambda: world_erased(payments_journaled()).audit(),
    ),
    (
        "J2",
        "a deleted world is gone before its time",
        lambda: world_erased(world_deleted(42)).audit(),
    ),
    (
        "I1",
        "the inbox of a deleted world is gone before its time",
        lambda: world_deleted(42).audit(*INBOX, "rows", 3),
    ),
    (
        "J2",
        "a journal was swept above its floor",
        lambda: journal_trimmed(6, 2).audit(*JOURNAL, "entries", 2),
    ),
    (
        "L7",
        "a history was cut by a leader that leads no more",
        lambda: (
            payments_journaled()
            .committed(5, "leader_lease.acquire", authority("l"), leading("l", 1), actor="l")
            .committed(17, "_cut", {"lease": leading("l", 1)}, actor="l")
        ),
    ),
    (
        "J5",
        "the log of authority says another leader",
        lambda: authority_log(ACQUIRED, worker="m", by=["m"]).audit(),
    ),
    (
        "J5",
        "authority was granted over a leader",
        lambda: authority_log(ACQUIRED, ACQUIRED).audit(),
    ),
    (
        "J5",
        "authority was given back, and is held",
        lambda: authority_log(ACQUIRED, RELEASED).audit(),
    ),
    (
        "I1",
        "what was acknowledged is nowhere",
        lambda: payments_journaled().audit(*INBOX, "rows", 3),
    ),
    (
        "I1",
        "a message is there twice under two numbers",
        lambda: payments_journaled().sent(6, 4, paid("p3", 1), "k4").audit(),
    ),
    (
        "I1",
        "a message was journaled with another body",
        lambda: UniverseHistory().granted(1).sent(2, 1, paid("p", 5)).cycle(3, paid("p", 6)),
    ),
    (
        "I2",
        "ingress was passed over",
        lambda: (
            UniverseHistory()
            .granted(1)
            .sent(2, 1, paid("p1", 5))
            .sent(2, 2, paid("p2", 5))
            .cycle(3, paid("p2", 5), seq=2)
        ),
    ),
    (
        "I2",
        "the cursor is behind the journal",
        lambda: payments_journaled().audit(*INBOX, "cursor", to=1),
    ),
    (
        "I3",
        "a row below the cursor was not journaled",
        lambda: payments_journaled().audit(*INBOX, to={"rows": {}, "cursor": 3, "last_seq": 3}),
    ),
    (
        "I4",
        "a message of unknown outcome is lost",
        lambda: (
            payments_journaled()
            .sent(6, 4, paid("p4", 1), "k4", result="unknown")
            .audit(*INBOX, "rows", 4)
        ),
    ),
    (
        "I4",
        "a row that nobody delivered",
        lambda: payments_journaled().audit(*INBOX, "rows", 4, to=inbox_row("k9", paid("p9", 1))),
    ),
    (
        "I4",
        "an entry of what nobody delivered",
        lambda: UniverseHistory().granted(1).cycle(3, paid("p", 5)),
    ),
    (
        "I4",
        "a retry under its key was delivered again",
        lambda: payments_journaled().sent(6, 4, paid("p3", 1), "k3"),
    ),
    (
        "I5",
        "the key of one message was taken for another",
        lambda: payments_journaled().sent(6, 3, paid("other", 1), "k3", already=True),
    ),
    (
        "I7",
        "code consumes an event that it does not know",
        lambda: (
            UniverseHistory()
            .declare_code("a", "Renewed")
            .granted(1)
            .sent(2, 1, renewed("p"))
            .cycle(3, renewed("p"))
        ),
    ),
    (
        "I7",
        "an item is given up before its time",
        lambda: (
            UniverseHistory()
            .declare_code("a", "Renewed")
            .granted(1)
            .sent(2, 1, renewed("p"))
            .stopped(3, 1)
            .granted(4, epoch=2)
            .cycle(3 + UNKNOWN_S - 0.5, renewed("p"), epoch=2, outcome="unknown")
        ),
    ),
    (
        "I7",
        "an item is given up without having waited",
        lambda: (
            UniverseHistory()
            .declare_code("a", "Renewed")
            .granted(1)
            .sent(2, 1, renewed("p"))
            .cycle(9, renewed("p"), outcome="unknown")
        ),
    ),
    (
        "I7",
        "a key is answered as handled while its item waits",
        lambda: (
            UniverseHistory()
            .sent(2, 1, paid("p", 1), "k")
            .sent(3, 1, paid("p", 1), "k", already=True, item={"state": "handled", "seq": 1})
        ),
    ),
    (
        "I7",
        "a key is answered as handled while its item is dead",
        lambda: unknown_item_abandoned().sent(
            9, 1, renewed("p"), "k", already=True, item={"state": "handled", "seq": 1}
        ),
    ),
    (
        "L3",
        "a host commits under a lease that another has",
        lambda: (
            UniverseHistory()
            .granted(1, "a", 1)
            .sent(2, 1, paid("p", 5))
            .granted(20, "b", 2)
            .cycle(21, paid("p", 5), worker="a", epoch=1)
        ),
    ),
    (
        "L3",
        "a host commits after its world was taken from it",
        lambda: (
            UniverseHistory()
            .granted(1)
            .sent(2, 1, paid("p", 5))
            .committed(
                3,
                "catalog.change_status",
                {"universe": "u", "world_id": WORLD_ID, "event": "pause"},
                world_record(WORLD_ID, status="paused"),
            )
            .cycle(4, paid("p", 5))
        ),
    ),
    (
        "L3",
        "a former leader places worlds",
        lambda: (
            payments_journaled()
            .committed(6, "leader_lease.acquire", authority("l"), leading("l", 1))
            .committed(7, "leader_lease.force_release", {"universe": "u", "reason": ""}, 1)
            .committed(8, "place", {"lease": leading("l", 1)})
        ),
    ),
    (
        "L1",
        "two lead at once",
        lambda: (
            payments_journaled()
            .committed(6, "leader_lease.acquire", authority("l"), leading("l", 1))
            .committed(7, "leader_lease.acquire", authority("m"), leading("m", 2))
        ),
    ),
    (
        "L6",
        "a host that was fenced commits after all",
        lambda: (
            payments_journaled()
            .failed(6, "commit", {"lease": lease("a", 1), "cycle": {}}, "fenced")
            .cycle(7, paid("p3", 1))
        ),
    ),
    (
        "A1",
        "a worker gets a world that is another's",
        lambda: (
            UniverseHistory()
            .committed(1, "catalog.assign", {"universe": "u", "world_id": WORLD_ID, "worker": "b"})
            .granted(2, "a")
        ),
    ),
    (
        "A1",
        "a worker gets a world that is paused",
        lambda: (
            UniverseHistory()
            .committed(
                1,
                "catalog.change_status",
                {"universe": "u", "world_id": WORLD_ID, "event": "pause"},
                world_record(WORLD_ID, status="paused"),
            )
            .granted(2, "a")
        ),
    ),
    (
        "S3",
        "a world is parked as stuck after one loss",
        lambda: payments_journaled().granted(
            20,
            "b",
            lease=None,
            refusal="parked",
            record=world_record(
                WORLD_ID,
                status="parked",
                blocker={
                    "code": "reducer_stuck",
                    "text": "",
                    "height": 0,
                    "since_ns": 20 * S,
                },
            ),
        ),
    ),
    (
        "S3",
        "a reducer kills its worker, alone, for the third time, and its world is not parked",
        lambda: (
            payments_journaled()
            .granted(20, "a", 2)
            .granted(40, "a", 3)
            .committed(
                41,
                "hosting_lease.mark_isolated",
                {"universe": "u", "world_id": WORLD_ID, "held": lease("a", 3)},
            )
            .granted(60, "a", 4)
        ),
    ),
    (
        "S4",
        "worlds are counted wrong",
        lambda: payments_journaled().audit(*CATALOG, "counts", to={"active": 2}),
    ),
    (
        "S4",
        "the worlds of a worker are not those assigned to it",
        lambda: payments_journaled().audit(*CATALOG, "by_worker", to=[["b", WORLD_ID]]),
    ),
    (
        "R3",
        "a world has work, and no hint",
        lambda: payments_journaled().audit(*CATALOG, "hints", to=[]),
    ),
    (
        "R3",
        "a world still waits when all should be at rest",
        lambda: payments_journaled().committed(60, "quiet", {"waiting": [f"{SUBJECT}/3"]}, False),
    ),
    ("E1", "an effect is nowhere", lambda: ordered().audit("queues", to={})),
    (
        "E1",
        "an effect is in its queue twice",
        lambda: (u := ordered()).audit(
            "queues",
            "u/effects/fx.quote",
            to=queue_rows((1, encode_intent(u.intents[0])), (2, encode_intent(u.intents[0]))),
        ),
    ),
    (
        "E1",
        "an effect is in the queue of another kind",
        lambda: (u := ordered()).audit(
            "queues", to={"u/timers": queue_rows((1, encode_intent(u.intents[0])))}
        ),
    ),
    ("F1", "mail did not arrive", lambda: mail_delivered().audit("inboxes", "u/w2")),
    (
        "J1",
        "an effect that no entry wants",
        lambda: payments_journaled().audit(
            "queues",
            "u/effects/fx.quote",
            to=queue_rows((1, encode_intent(model_app.ExpectedIntent(b"h" * 32, "fx.quote", b"")))),
        ),
    ),
    (
        "K1",
        "a fork has another state than its parent had",
        lambda: forked(parent_snapshot_hash=b"other"),
    ),
    (
        "K1",
        "a fork at a height that its parent never had",
        lambda: forked(forked_at_height=9),
    ),
    (
        "K1",
        "a fork inherited its parent's inbox",
        lambda: forked().audit(
            "inboxes",
            "u/c1",
            to={"rows": {1: inbox_row("k3", paid("p3", 1))}, "cursor": 0, "last_seq": 1},
        ),
    ),
    (
        "K1",
        "a fork does not know its parent",
        lambda: forked().audit(*CATALOG, "records", "c1", "lineage", to=None),
    ),
    ("D1", "a failed event is no dead letter", lambda: reducer_failed().audit("queues", to={})),
    (
        "D1",
        "a reducer raised, and nothing was kept",
        lambda: (
            UniverseHistory()
            .granted(1)
            .sent(2, 1, event("Botched", id="b"))
            .cycle(3, event("Botched", id="b"))
            .audit()
        ),
    ),
]


def authority(owner: str) -> dict[str, object]:
    return {"universe": "u", "owner": owner, "incarnation": "1", "ttl_ns": 10 * S}


def leading(owner: str, epoch: int) -> dict[str, object]:
    return lease(owner, epoch, until_s=16, resource="u/authority")


@pytest.mark.parametrize("name", RIGHT)
def test_world_checkers_accept_a_valid_history(name: str) -> None:
    assert check_all(RIGHT[name]().audit().history) == []


@pytest.mark.parametrize(("number", "what", "make"), WRONG, ids=[f"{n}: {w}" for n, w, _ in WRONG])
def test_world_checker_reports_a_violating_history(
    number: str, what: str, make: Callable[[], UniverseHistory]
) -> None:
    violations = CHECKERS[number](make().history)
    assert [violation.number for violation in violations][:1] == [number]


def test_journal_checker_accepts_a_parked_nondeterministic_reducer() -> None:
    fickle = event("Fickle", id="f")
    u = UniverseHistory().granted(1).sent(2, 1, fickle)
    park = {"universe": "u", "world_id": WORLD_ID, "held": lease("a", 1)}
    u.committed(
        3,
        "hosting_lease.park",
        {**park, "blocker": {"code": "replay_diverged", "text": "", "height": 1}},
    )
    assert CHECKERS["J3"](u.history) == []


def test_lease_checker_accepts_commits_under_a_regranted_lease() -> None:
    u = payments_journaled().failed(6, "commit", {"lease": lease("a", 1), "cycle": {}}, "fenced")
    u.granted(20, "a", 2).cycle(21, paid("p3", 1), epoch=2)
    assert CHECKERS["L6"](u.history) == []


# -- the model of the account reducers -------------------------------------------------------------


def test_account_model_computes_states_and_snapshots() -> None:
    u = UniverseHistory().cycle(
        1, paid("p1", 5), paid("p2", 7), event("Moved", id="m", amount=2, to="x")
    )
    expected_state = {
        "balance": 10,
        "seen": 3,
        "rate": 7,
        "marks": [],
        "orders": [],
        "whim": 0,
        "news": 0,
    }
    assert u.states[-1] == expected_state
    rest = b"\xa4rate\xcb\x40\x1c\x00\x00\x00\x00\x00\x00\xa4seen\x03\xa4whim\x00"
    assert model_app.snapshot_bytes(u.states[-1]) == (
        b"\x87\xa7balance\x0a\xa5marks\x90\xa4news\x00\xa6orders\x90" + rest
    )
    assert model_app.snapshot_bytes(u.states[-1], model_app.FORMER) == (
        b"\x86\xa7balance\x0a\xa5marks\x90\xa6orders\x90" + rest
    )


def test_account_model_of_the_former_code_drops_the_news_field() -> None:
    u = (
        UniverseHistory()
        .cycle(1, renewed("p"))
        .cycle(2, paid("q", 1), code=model_app.FORMER, base=1)
    )
    assert [state["news"] for state in u.states] == [0, 1, 0]


def test_reloaded_state_of_the_account_model_has_a_float_rate() -> None:
    assert isinstance(
        model_app.reload_state({**model_app.initial_state(), "rate": 7})["rate"], float
    )

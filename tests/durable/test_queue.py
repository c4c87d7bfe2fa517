"""The queue: put, claim, and every way a claim ends."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast import codec
from holdfast.clock import S, SimClock
from holdfast.config import (
    BATCH_MAX,
    BLOB_THRESHOLD_BYTES,
    ERROR_TEXT_CHARS_MAX,
    QUEUE_PRIORITY_MAX,
    TRIED_ERROR_CHARS_MAX,
    TRIED_KEPT,
    TTL_NS_MAX,
)
from holdfast.durable import queue
from holdfast.durable.item import ITEM, Event, State, keys_of
from holdfast.durable.queue import Budget, Claim, Counts, Dead, Failure
from holdfast.errors import ClaimLost, Fenced, IllegalTransition, Invalid, NotFound
from holdfast.store import blobs, schema, tuples
from holdfast.store.api import Store, Txn
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryBackend

MODULES = (
    "holdfast.durable.queue",
    "holdfast.durable.claim",
    "holdfast.durable.dead",
    "holdfast.durable.item",
)
TTL = 10 * S
# Store time runs a little ahead of a clock that stands still: each commit has a time of its own.
LAPSE = TTL + S
LARGE = b"x" * (BLOB_THRESHOLD_BYTES + 1)


def put(store: Store, *payloads: bytes, **options: Any) -> list[int]:
    seqs: list[int] = store.transact(queue.put_many, "q", list(payloads), **options)
    return seqs


def claim(store: Store, limit: int = 10, owner: str = "a", **options: Any) -> list[Claim]:
    claims: list[Claim] = store.transact(queue.claim, "q", owner, limit, TTL, **options)
    return claims


def one(store: Store, **options: Any) -> Claim:
    [only] = claim(store, 1, **options)
    return only


def counts(store: Store) -> Counts:
    return store.read(queue.counts, "q")


def dead(store: Store) -> list[Dead]:
    return store.read(queue.dead, "q")


def rows(store: Store) -> list[bytes]:
    """Every row of the queue but its counters."""
    keys = keys_of("q")
    lo = keys.items[: -len(tuples.pack(("i",)))]
    return [
        key
        for key, _ in store.read(lambda txn: txn.scan(lo, tuples.after(lo)))
        if key != keys.counts
    ]


# -- putting -------------------------------------------------------------------------------------


def test_sequence_numbers_start_at_1(store: Store) -> None:
    assert store.transact(queue.put, "q", b"x") == 1


def test_a_batch_gets_consecutive_numbers(store: Store) -> None:
    assert put(store, b"a", b"b") + put(store, b"c") == [1, 2, 3]


def test_numbers_are_not_reused_after_everything_is_done(store: Store) -> None:
    put(store, b"a", b"b")
    store.transact(queue.ack, claim(store))
    assert put(store, b"c") == [3]


def test_an_empty_batch_changes_nothing(store: Store) -> None:
    assert put(store) == []
    assert rows(store) == []


def test_queues_do_not_disturb_each_other(store: Store) -> None:
    put(store, b"a")
    assert store.transact(queue.put, "other", b"b") == 1
    assert store.transact(queue.claim, "nobody's", "a", 10, TTL) == []


def test_a_put_rings_the_topic(store: Store) -> None:
    since = store.wait(queue.topic("q"), 0, timeout=0)
    put(store, b"a")
    assert store.wait(queue.topic("q"), since, timeout=10) > since


def test_a_put_inside_a_larger_transaction_answers_at_the_commit(store: Store) -> None:
    def both(txn: Txn) -> Any:
        txn.put((0, "sim", "k"), b"v")
        return queue.put(txn, "q", b"x", priority=3)

    assert store.transact(both) == 1
    assert one(store).priority == 3


# -- claiming ------------------------------------------------------------------------------------


def test_items_are_claimed_in_the_order_they_were_put(store: Store) -> None:
    put(store, b"a", b"b", b"c")
    assert [c.payload for c in claim(store, 2) + claim(store, 2)] == [b"a", b"b", b"c"]


def test_larger_priorities_go_first_and_keep_their_order(store: Store) -> None:
    put(store, b"low", priority=-1)
    put(store, b"high 1", b"high 2", priority=5)
    put(store, b"normal")
    assert [c.payload for c in claim(store)] == [b"high 1", b"high 2", b"normal", b"low"]


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "a claimed item is out of reach of the other claimers",
)
def test_what_is_claimed_is_not_claimed_again(store: Store) -> None:
    put(store, b"a")
    one(store)
    assert claim(store, owner="b") == []


def test_a_claim_says_all_about_its_item(store: Store) -> None:
    put(store, b"a", priority=2)
    found = one(store)
    assert (found.queue, found.seq, found.number, found.owner) == ("q", 1, 1, "a")
    assert (found.priority, found.failures, found.expiries) == (2, 0, 0)
    assert found.expires_ns > found.enqueued_ns


def test_a_limit_of_nothing_claims_nothing(store: Store) -> None:
    put(store, b"a")
    assert claim(store, 0) == []


def test_an_item_is_not_claimed_before_its_time(sim_store: Store, clock: SimClock) -> None:
    put(sim_store, b"later", not_before_ns=sim_store.now_ns() + 5 * S)
    assert claim(sim_store) == []
    clock.advance(5 * S)
    assert one(sim_store).payload == b"later"


def test_due_items_go_by_priority_among_the_ready_ones(sim_store: Store, clock: SimClock) -> None:
    put(sim_store, b"urgent", priority=9, not_before_ns=sim_store.now_ns() + S)
    put(sim_store, b"ready")
    clock.advance(2 * S)
    assert [c.payload for c in claim(sim_store)] == [b"urgent", b"ready"]


def test_a_large_payload_is_fetched_by_its_claim(store: Store) -> None:
    put(store, LARGE)
    found = one(store)
    assert found.payload == b""
    assert store.read(queue.payload_of, found) == LARGE


def test_the_blob_of_a_large_payload_goes_with_its_item(sim_store: Store, clock: SimClock) -> None:
    put(sim_store, LARGE)
    found = one(sim_store)
    sim_store.transact(queue.ack, [found])
    clock.advance(2 * S)
    assert sim_store.transact(blobs.collect, 0, 10) == 1


# -- acking --------------------------------------------------------------------------------------


@pytest.mark.spec("001", "Inbox loop scaffold", "an ack removes the message and its lease together")
def test_an_ack_leaves_nothing_but_the_count(store: Store) -> None:
    put(store, b"a", b"b")
    store.transact(queue.ack, claim(store))
    assert rows(store) == []
    assert counts(store) == Counts(done=2)


def test_an_item_is_acked_once(store: Store) -> None:
    put(store, b"a")
    found = one(store)
    store.transact(queue.ack, [found])
    with pytest.raises(ClaimLost) as error:
        store.transact(queue.ack, [found])
    assert error.value.fields == {"queue": "q", "seq": 1, "number": 1}


def test_the_same_claim_twice_in_one_ack_is_lost(store: Store) -> None:
    put(store, b"a")
    found = one(store)
    with pytest.raises(ClaimLost):
        store.transact(queue.ack, [found, found])
    assert counts(store).claimed == 1


def test_an_ack_is_all_or_none(store: Store) -> None:
    put(store, b"a", b"b")
    first, second = claim(store)
    store.transact(queue.ack, [first])
    with pytest.raises(ClaimLost):
        store.transact(queue.ack, [second, first])
    assert counts(store).claimed == 1


def test_acks_of_several_queues_are_one_transaction(store: Store) -> None:
    put(store, b"a")
    store.transact(queue.put, "other", b"b")
    [other] = store.transact(queue.claim, "other", "a", 1, TTL)
    store.transact(queue.ack, [one(store), other])
    assert counts(store).done == store.read(queue.counts, "other").done == 1


def test_a_token_is_enough_to_ack(store: Store) -> None:
    put(store, b"a")
    store.transact(queue.ack, [one(store).token])
    assert counts(store).done == 1


def enders() -> dict[str, Any]:
    return {
        "ack": lambda store, found: store.transact(queue.ack, [found]),
        "fail": lambda store, found: store.transact(queue.fail, found, "code", "text"),
        "bury": lambda store, found: store.transact(queue.bury, found, "code", "text"),
        "release": lambda store, found: store.transact(queue.release, [found]),
    }


@pytest.mark.parametrize("end", enders())
def test_nothing_ends_an_expired_claim(sim_store: Store, clock: SimClock, end: str) -> None:
    put(sim_store, b"a")
    found = one(sim_store)
    clock.advance(LAPSE)
    with pytest.raises(ClaimLost):
        enders()[end](sim_store, found)
    assert counts(sim_store).claimed == 1


@pytest.mark.spec(
    "001", "Inbox loop scaffold", "putting a message back needs the token of its current lease"
)
@pytest.mark.parametrize("end", enders())
def test_nothing_ends_a_claim_that_another_took_over(
    sim_store: Store, clock: SimClock, end: str
) -> None:
    put(sim_store, b"a")
    old = one(sim_store)
    clock.advance(LAPSE)
    new = one(sim_store, owner="a")
    assert new.number == old.number + 1
    with pytest.raises(ClaimLost):
        enders()[end](sim_store, old)
    sim_store.transact(queue.ack, [new])


@pytest.mark.parametrize("end", enders())
def test_a_claim_is_ended_by_its_owner_only(store: Store, end: str) -> None:
    put(store, b"a")
    found = one(store)
    stolen = queue.Token(found.queue, found.seq, found.number, "thief")
    with pytest.raises(ClaimLost):
        enders()[end](store, stolen)


def test_a_lost_claim_is_a_kind_of_fence() -> None:
    assert issubclass(ClaimLost, Fenced)


# -- failing -------------------------------------------------------------------------------------


def test_a_failure_makes_the_item_ready_again_under_its_seq(store: Store) -> None:
    put(store, b"a", b"b")
    first = one(store)
    assert store.transact(queue.fail, first, "busy", "later") == "ready"
    again = one(store)
    assert (again.seq, again.failures, again.number) == (1, 1, 2)


def test_a_failure_with_a_delay_waits_and_keeps_its_place(
    sim_store: Store, clock: SimClock
) -> None:
    put(sim_store, b"a", b"b")
    [first] = claim(sim_store, 1)
    assert sim_store.transact(queue.fail, first, "busy", "", delay_ns=S) == "delayed"
    assert counts(sim_store) == Counts(ready=1, delayed=1)
    clock.advance(2 * S)
    assert [c.seq for c in claim(sim_store)] == [1, 2]


@pytest.mark.spec(
    "001", "Inbox loop scaffold", "with the retry budget used up the message becomes a dead letter"
)
def test_the_last_failure_of_the_budget_kills(store: Store) -> None:
    put(store, b"a")
    budget = Budget(failures_max=3)
    ends = [store.transact(queue.fail, one(store), "c", "e", budget=budget) for _ in range(3)]
    assert ends == ["ready", "ready", "dead"]
    assert counts(store) == Counts(dead=1)


def test_a_failure_that_cannot_be_retried_kills_at_once(store: Store) -> None:
    put(store, b"a")
    assert store.transact(queue.fail, one(store), "c", "e", retryable=False) == "dead"
    assert dead(store)[0].failures == 1


def test_a_burial_counts_no_failure(store: Store) -> None:
    put(store, b"a")
    store.transact(queue.bury, one(store), "undecodable", "not a frame")
    [letter] = dead(store)
    assert (letter.code, letter.error, letter.failures) == ("undecodable", "not a frame", 0)


# -- settling ------------------------------------------------------------------------------------


def test_settling_answers_for_each_claim_alone(sim_store: Store, clock: SimClock) -> None:
    put(sim_store, b"lost")
    lost = one(sim_store)
    clock.advance(LAPSE)
    put(sim_store, b"done", b"ready", b"delayed", b"dead")
    done, ready, delayed, doomed = claim(sim_store)[1:]
    fails = [
        Failure(ready, "c", ""),
        Failure(delayed, "c", "", delay_ns=S),
        Failure(doomed, "c", "", retryable=False),
        Failure(lost, "c", ""),
    ]
    ends = sim_store.transact(queue.settle, [done, lost], fails)
    assert ends == ["done", "lost", "ready", "delayed", "dead", "lost"]
    assert counts(sim_store) == Counts(ready=1, delayed=1, claimed=1, dead=1, done=1)


def test_settling_one_claim_twice_loses_the_second(store: Store) -> None:
    put(store, b"a")
    found = one(store)
    assert store.transact(queue.settle, [found], [Failure(found, "c", "")]) == ["done", "lost"]


def test_settling_keeps_to_the_budget(store: Store) -> None:
    put(store, b"a")
    ends = store.transact(queue.settle, [], [Failure(one(store), "c", "")], Budget(failures_max=1))
    assert ends == ["dead"]


# -- releasing and extending ---------------------------------------------------------------------


def test_a_released_item_is_unharmed(store: Store) -> None:
    put(store, b"a")
    store.transact(queue.release, [one(store)])
    again = one(store)
    assert (again.failures, again.expiries, again.number) == (0, 0, 2)


def test_an_extended_claim_outlives_its_first_time(sim_store: Store, clock: SimClock) -> None:
    put(sim_store, b"a")
    found = one(sim_store)
    clock.advance(TTL - S)
    [until_ns] = sim_store.transact(queue.extend, [found], TTL)
    assert until_ns > found.expires_ns
    clock.advance(TTL - S)
    assert claim(sim_store, owner="b") == []
    sim_store.transact(queue.ack, [found])
    assert rows(sim_store) == []


def test_extending_never_shortens(store: Store) -> None:
    put(store, b"a")
    found = one(store)
    assert store.transact(queue.extend, [found], 1) == [found.expires_ns]
    store.transact(queue.ack, [found])
    assert rows(store) == []


def test_extending_answers_none_for_what_is_lost(sim_store: Store, clock: SimClock) -> None:
    put(sim_store, b"a")
    lost = one(sim_store)
    clock.advance(LAPSE)
    kept = one(sim_store)
    assert sim_store.transact(queue.extend, [lost, kept], TTL)[0] is None
    assert sim_store.transact(queue.extend, [lost, kept], TTL)[1] is not None


# -- expiring ------------------------------------------------------------------------------------


@pytest.mark.spec(
    "004", "4) Global effect dispatch runtime", "a claim that ran out of time is given to the next"
)
def test_an_expired_claim_is_taken_over_by_the_next_claimer(
    sim_store: Store, clock: SimClock
) -> None:
    put(sim_store, b"a")
    one(sim_store)
    clock.advance(LAPSE)
    again = one(sim_store, owner="b")
    assert (again.expiries, again.failures, again.number) == (1, 0, 2)


def test_a_claim_is_over_at_the_very_instant_of_its_expiry(
    sim_store: Store, clock: SimClock
) -> None:
    put(sim_store, b"a")
    found = one(sim_store)
    clock.advance(found.expires_ns - sim_store.now_ns() - 1)
    assert sim_store.transact(queue.extend, [found], 1) == [found.expires_ns]
    clock.advance(found.expires_ns - sim_store.now_ns())
    assert sim_store.transact(queue.extend, [found], 1) == [None]


def test_the_last_expiry_of_the_budget_kills(sim_store: Store, clock: SimClock) -> None:
    put(sim_store, b"a")
    for _ in range(Budget().expiries_max):
        one(sim_store)
        clock.advance(LAPSE)
    assert claim(sim_store) == []
    [letter] = dead(sim_store)
    assert (letter.code, letter.expiries) == ("expiries_exhausted", Budget().expiries_max)


@pytest.mark.spec(
    "004", "4) Global effect dispatch runtime", "a reaper returns what expired to the pending ones"
)
def test_reaping_makes_overdue_items_ready(sim_store: Store, clock: SimClock) -> None:
    put(sim_store, b"a", b"b")
    claim(sim_store)
    clock.advance(LAPSE)
    assert sim_store.transact(queue.reap, "q", 10) == 2
    assert counts(sim_store) == Counts(ready=2)


def test_reaping_is_bounded_and_takes_the_longest_overdue_first(
    sim_store: Store, clock: SimClock
) -> None:
    put(sim_store, b"a", b"b")
    one(sim_store)
    clock.advance(2 * S)
    one(sim_store)
    clock.advance(LAPSE)
    assert sim_store.transact(queue.reap, "q", 1) == 1
    assert [c.seq for c in sim_store.read(queue.claims_of, "q", "a", 10)] == [2]


def test_reaping_leaves_live_claims_alone(store: Store) -> None:
    put(store, b"a")
    one(store)
    assert store.transact(queue.reap, "q", 10) == 0


# -- dead letters --------------------------------------------------------------------------------


@pytest.mark.spec(
    "001",
    "Inbox loop scaffold",
    "a message given up is kept as a dead letter, inbox and lease cleared with it",
)
def test_a_dead_letter_keeps_everything(sim_store: Store, clock: SimClock) -> None:
    put(sim_store, b"poison", priority=4)
    one(sim_store)
    clock.advance(LAPSE)
    sim_store.transact(queue.fail, one(sim_store), "first", "one")
    found = one(sim_store, owner="last")
    sim_store.transact(queue.fail, found, "second", "two", retryable=False)
    [letter] = dead(sim_store)
    assert letter == Dead(
        queue="q",
        seq=1,
        payload=b"poison",
        code="second",
        error="two",
        failures=2,
        expiries=1,
        claims=3,
        priority=4,
        enqueued_ns=found.enqueued_ns,
        not_before_ns=0,
        died_ns=letter.died_ns,
        owner="last",
        redrive_of=None,
        tried=letter.tried,
    )
    assert [(one.number, one.end, one.code) for one in letter.tried] == [
        (1, "expired", "claim_expired"),
        (2, "failed", "first"),
        (3, "failed", "second"),
    ]
    assert letter.died_ns > found.enqueued_ns
    assert len(rows(sim_store)) == 2


def test_an_item_that_died_of_expiry_keeps_the_text_of_its_last_failure(
    sim_store: Store, clock: SimClock
) -> None:
    put(sim_store, b"a")
    sim_store.transact(queue.fail, one(sim_store), "c", "what went wrong")
    one(sim_store)
    clock.advance(LAPSE)
    claim(sim_store, budget=Budget(expiries_max=1))
    assert dead(sim_store)[0].error == "what went wrong"


def test_the_text_of_an_error_is_bounded(store: Store) -> None:
    put(store, b"a")
    store.transact(queue.bury, one(store), "c", "e" * (ERROR_TEXT_CHARS_MAX + 1))
    assert len(dead(store)[0].error) == ERROR_TEXT_CHARS_MAX


def test_a_later_dead_letter_does_not_overwrite_an_earlier_one(store: Store) -> None:
    put(store, b"a", b"b")
    for found in claim(store):
        store.transact(queue.bury, found, "c", "")
    assert [letter.payload for letter in dead(store)] == [b"a", b"b"]


def test_dead_letters_are_read_in_pages(store: Store) -> None:
    put(store, b"a", b"b", b"c")
    for found in claim(store):
        store.transact(queue.bury, found, "c", "")
    assert [letter.seq for letter in store.read(queue.dead, "q", 1, 1)] == [2]


def test_a_dead_letter_keeps_a_large_payload(store: Store) -> None:
    put(store, LARGE)
    store.transact(queue.bury, one(store), "c", "")
    [letter] = dead(store)
    assert store.read(queue.payload_of, letter) == LARGE


def test_a_redriven_letter_is_a_new_item_that_names_the_old(store: Store) -> None:
    put(store, b"a", priority=3)
    store.transact(queue.fail, one(store), "c", "", retryable=False)
    assert store.transact(queue.redrive, "q", [1]) == [2]
    again = one(store)
    assert (again.seq, again.payload, again.priority, again.failures) == (2, b"a", 3, 0)
    store.transact(queue.bury, again, "c", "")
    assert [letter.redrive_of for letter in dead(store)] == [1]


def test_a_redrive_removes_the_letter_in_the_same_step(store: Store) -> None:
    put(store, b"a")
    store.transact(queue.bury, one(store), "c", "")
    store.transact(queue.redrive, "q", [1])
    assert dead(store) == []
    assert counts(store) == Counts(ready=1)


def test_a_redrive_of_a_missing_letter_changes_nothing(store: Store) -> None:
    put(store, b"a")
    store.transact(queue.bury, one(store), "c", "")
    with pytest.raises(NotFound) as error:
        store.transact(queue.redrive, "q", [1, 9])
    assert error.value.seq == 9
    assert counts(store) == Counts(dead=1)


def test_a_letter_is_redriven_once(store: Store) -> None:
    put(store, b"a")
    store.transact(queue.bury, one(store), "c", "")
    with pytest.raises(NotFound):
        store.transact(queue.redrive, "q", [1, 1])
    assert counts(store) == Counts(dead=1)


def test_a_redriven_large_payload_goes_with_its_new_item(sim_store: Store, clock: SimClock) -> None:
    put(sim_store, LARGE)
    sim_store.transact(queue.bury, one(sim_store), "c", "")
    sim_store.transact(queue.redrive, "q", [1])
    clock.advance(2 * S)
    assert sim_store.transact(blobs.collect, 0, 10) == 0
    found = one(sim_store)
    assert sim_store.read(queue.payload_of, found) == LARGE
    sim_store.transact(queue.ack, [found])
    clock.advance(2 * S)
    assert sim_store.transact(blobs.collect, 0, 10) == 1


def test_purging_removes_by_time_of_death_a_bounded_number_a_call(
    sim_store: Store, clock: SimClock
) -> None:
    put(sim_store, b"a", b"b", LARGE, b"d")
    claims = claim(sim_store)
    for found in (claims[2], claims[1], claims[0]):
        sim_store.transact(queue.bury, found, "c", "")
    clock.advance(2 * S)
    cut_ns = sim_store.now_ns()
    clock.advance(2 * S)
    sim_store.transact(queue.bury, claims[3], "c", "")
    assert sim_store.transact(queue.purge_dead, "q", cut_ns, 2) == 2
    assert [letter.seq for letter in dead(sim_store)] == [1, 4]
    assert sim_store.transact(queue.purge_dead, "q", cut_ns, 2) == 1
    assert counts(sim_store) == Counts(dead=1)
    assert sim_store.transact(blobs.collect, 0, 10) == 1


# -- looking -------------------------------------------------------------------------------------


def test_an_unknown_queue_is_empty(store: Store) -> None:
    assert counts(store) == Counts()


def test_peeking_shows_what_is_next_and_claims_nothing(store: Store) -> None:
    put(store, b"a", LARGE, b"c")
    assert store.read(queue.peek, "q", 2) == [(1, b"a"), (2, LARGE)]
    assert counts(store) == Counts(ready=3)


def test_claims_are_listed_by_owner(store: Store) -> None:
    put(store, b"a", b"b", b"c")
    mine = claim(store, 2, owner="a")
    claim(store, 1, owner="b")
    assert store.read(queue.claims_of, "q", "a", 10) == mine


def test_an_owner_is_not_mistaken_for_one_whose_name_it_begins(store: Store) -> None:
    put(store, b"a")
    claim(store, owner="ab")
    assert store.read(queue.claims_of, "q", "a", 10) == []


def test_nothing_is_due_in_an_empty_queue(store: Store) -> None:
    assert store.read(queue.next_due_ns, "q") is None


def test_a_ready_item_is_due_now(store: Store) -> None:
    put(store, b"a")
    assert store.read(queue.next_due_ns, "q") == 0


def test_a_delayed_item_is_due_at_its_time(store: Store) -> None:
    at_ns = store.now_ns() + 60 * S
    put(store, b"a", not_before_ns=at_ns)
    assert store.read(queue.next_due_ns, "q") == at_ns


def test_a_claimed_item_is_due_when_its_claim_expires(store: Store) -> None:
    put(store, b"a")
    found = one(store)
    assert store.read(queue.next_due_ns, "q") == found.expires_ns


def test_a_backlog_does_not_make_a_claim_read_more(store: Store) -> None:
    put(store, *[b"x"] * 1000, not_before_ns=store.now_ns() + 3600 * S)
    put(store, *[b"x"] * 1000)
    read = 0

    def spy(txn: Any) -> Any:
        nonlocal read
        scan = txn.scan

        def counting(*args: Any, **kwargs: Any) -> Any:
            nonlocal read
            found = scan(*args, **kwargs)
            read += len(found)
            return found

        txn.scan = counting
        return queue.claim.fn(txn, "q", "a", 10, TTL)

    assert len(store.transact(spy)) == 10
    assert read == 10


# -- the table -----------------------------------------------------------------------------------


def test_every_item_state_is_reachable_once_something_fails() -> None:
    assert ITEM.unreachable() == frozenset()


def test_done_and_dead_are_final() -> None:
    assert ITEM.terminal == {State.DONE, State.DEAD}


# What an admission may do to an item that nobody has claimed yet.
JUDGED = {(State.READY, Event.DEFER), (State.READY, Event.BURY)}


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (state, event)
        for state in State
        for event in Event
        if state is not State.CLAIMED
        and event not in (Event.CLAIM, Event.DUE, Event.WITHDRAW)
        and (state, event) not in JUDGED
    ],
)
def test_only_a_claimed_item_is_ended_other_than_by_withdrawing_or_judging_it(
    state: State, event: Event
) -> None:
    with pytest.raises(IllegalTransition):
        ITEM.next(state, event)


@pytest.mark.parametrize(("state", "event"), sorted(JUDGED, key=str))
def test_what_is_ready_may_be_put_off_or_refused_before_anybody_has_it(
    state: State, event: Event
) -> None:
    assert ITEM.next(state, event) in (State.DELAYED, State.DEAD)


# -- bad input -----------------------------------------------------------------------------------

BAD = {
    "queue, empty": (lambda s: s.transact(queue.put, "", b"x"), "queue"),
    "queue, too long": (lambda s: s.transact(queue.put, "q" * 999, b"x"), "queue"),
    "priority": (lambda s: put(s, b"x", priority=QUEUE_PRIORITY_MAX + 1), "priority"),
    "not_before_ns, negative": (lambda s: put(s, b"x", not_before_ns=-1), "not_before_ns"),
    "not_before_ns, too late": (lambda s: put(s, b"x", not_before_ns=1 << 63), "not_before_ns"),
    "payloads": (lambda s: put(s, *[b"x"] * (BATCH_MAX + 1)), "payloads"),
    "owner": (lambda s: claim(s, owner=""), "owner"),
    "limit, negative": (lambda s: claim(s, -1), "limit"),
    "limit, too large": (lambda s: claim(s, BATCH_MAX + 1), "limit"),
    "ttl_ns, nothing": (lambda s: s.transact(queue.claim, "q", "a", 1, 0), "ttl_ns"),
    "ttl_ns, for ever": (lambda s: s.transact(queue.claim, "q", "a", 1, TTL_NS_MAX + 1), "ttl_ns"),
    "budget": (lambda s: claim(s, budget=Budget(failures_max=0)), "budget"),
    "reap": (lambda s: s.transact(queue.reap, "q", -1), "limit"),
    "peek": (lambda s: s.read(queue.peek, "q", -1), "limit"),
    "seq": (lambda s: s.transact(queue.redrive, "q", [0]), "seq"),
    "purge": (lambda s: s.transact(queue.purge_dead, "q", -1, 1), "before_ns"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named_and_changes_nothing(store: Store, case: str) -> None:
    put(store, b"a")
    before = rows(store)
    do, what = BAD[case]
    with pytest.raises(Invalid) as error:
        do(store)
    assert error.value.what == what
    assert rows(store) == before


@pytest.mark.parametrize(("code", "delay_ns", "what"), [("", 0, "code"), ("c", -1, "delay_ns")])
def test_a_bad_failure_is_named_and_changes_nothing(
    store: Store, code: str, delay_ns: int, what: str
) -> None:
    put(store, b"a")
    with pytest.raises(Invalid) as error:
        store.transact(queue.fail, one(store), code, "", delay_ns=delay_ns)
    assert error.value.what == what
    assert counts(store).claimed == 1


# -- against a model -----------------------------------------------------------------------------


class QueueMachine(RuleBasedStateMachine):
    """Each item is in one state; the counters are a recount; the rows are those of its state."""

    BUDGET = Budget(failures_max=3, expiries_max=2)

    def __init__(self) -> None:
        super().__init__()
        self.clock = SimClock()
        self.store = LocalStore("memory:", MemoryBackend(), self.clock)
        self.state: dict[int, str] = {}
        self.failures: Counter[int] = Counter()
        self.expiries: Counter[int] = Counter()
        self.held: dict[int, Claim] = {}
        self.old: list[Claim] = []
        self.deaths: Counter[int] = Counter()

    def now_ns(self) -> int:
        engine = self.store.engine
        return max(engine.now_ns(), engine._last_ns + 1)

    def live(self, seq: int) -> bool:
        return self.now_ns() < self.held[seq].expires_ns

    def sweep(self) -> None:
        """What every claim does first."""
        for seq in [seq for seq in self.held if not self.live(seq)]:
            self.old.append(self.held.pop(seq))
            self.expiries[seq] += 1
            exhausted = self.expiries[seq] >= self.BUDGET.expiries_max
            self.state[seq] = "dead" if exhausted else "ready"

    @rule(n=st.integers(1, 4), priority=st.integers(-1, 1), delay=st.integers(0, 3))
    def put(self, n: int, priority: int, delay: int) -> None:
        at_ns = self.store.now_ns() + delay * S if delay else 0
        for seq in put(self.store, *[b"x"] * n, priority=priority, not_before_ns=at_ns):
            assert seq == len(self.state) + 1
            self.state[seq] = "delayed" if delay else "ready"

    @rule(limit=st.integers(0, 5), owner=st.sampled_from("ab"), ttl=st.integers(1, 5))
    def claim(self, limit: int, owner: str, ttl: int) -> None:
        self.sweep()
        due = {
            seq
            for seq, state in self.state.items()
            if state == "delayed" and self.item(seq).not_before_ns <= self.now_ns()
        }
        self.state.update(dict.fromkeys(due, "ready"))
        ready = [seq for seq, state in self.state.items() if state == "ready"]
        ready.sort(key=lambda seq: (-self.item(seq).priority, seq))
        got = self.store.transact(queue.claim, "q", owner, limit, ttl * S, self.BUDGET)
        assert [found.seq for found in got] == ready[:limit]
        for found in got:
            assert found.failures == self.failures[found.seq]
            assert found.expiries == self.expiries[found.seq]
            self.state[found.seq] = "claimed"
            self.held[found.seq] = found

    @rule()
    def reap(self) -> None:
        before = len(self.held)
        self.sweep()
        assert self.store.transact(queue.reap, "q", 100, self.BUDGET) == before - len(self.held)

    @rule(at=st.integers(0, 20))
    def ack(self, at: int) -> None:
        for seq in self.pick(at):
            if self.live(seq):
                self.store.transact(queue.ack, [self.held.pop(seq)])
                self.state[seq] = "done"
            else:
                with pytest.raises(ClaimLost):
                    self.store.transact(queue.ack, [self.held[seq]])

    @rule(at=st.integers(0, 20), retryable=st.booleans(), delay=st.integers(0, 2))
    def fail(self, at: int, retryable: bool, delay: int) -> None:
        for seq in self.pick(at):
            failure = Failure(self.held[seq], "c", "e", retryable, delay * S)
            live = self.live(seq)
            [end] = self.store.transact(queue.settle, [], [failure], self.BUDGET)
            assert (end == "lost") == (not live)
            if live:
                self.old.append(self.held.pop(seq))
                self.failures[seq] += 1
                exhausted = not retryable or self.failures[seq] >= self.BUDGET.failures_max
                assert end == ("dead" if exhausted else "delayed" if delay else "ready")
                self.state[seq] = end

    @rule(at=st.integers(0, 20))
    def release(self, at: int) -> None:
        for seq in self.pick(at):
            if self.live(seq):
                self.store.transact(queue.release, [self.held[seq]])
                self.old.append(self.held.pop(seq))
                self.state[seq] = "ready"

    @rule(at=st.integers(0, 20), ttl=st.integers(1, 5))
    def extend(self, at: int, ttl: int) -> None:
        for seq in self.pick(at):
            live = self.live(seq)
            [until_ns] = self.store.transact(queue.extend, [self.held[seq]], ttl * S)
            assert (until_ns is None) == (not live)
            if until_ns is not None:
                [self.held[seq]] = [
                    c
                    for c in self.store.read(queue.claims_of, "q", self.held[seq].owner, 100)
                    if c.seq == seq
                ]
                assert self.held[seq].expires_ns == until_ns

    @rule(at=st.integers(0, 20))
    def late_answer(self, at: int) -> None:
        if self.old:
            stale = self.old[at % len(self.old)]
            assert self.store.transact(queue.settle, [stale], []) == ["lost"]

    @rule(at=st.integers(0, 20))
    def redrive(self, at: int) -> None:
        gone = [seq for seq, state in self.state.items() if state == "dead"]
        if gone:
            seq = gone[at % len(gone)]
            [new] = self.store.transact(queue.redrive, "q", [seq])
            assert new == len(self.state) + 1
            self.state[seq] = "redriven"
            self.state[new] = "ready"

    @rule(seconds=st.integers(0, 6))
    def wait(self, seconds: int) -> None:
        self.clock.advance(seconds * S)

    @invariant()
    def counters_are_a_recount(self) -> None:
        found = counts(self.store)
        tally = Counter(self.state.values())
        for name in ("ready", "delayed", "claimed", "dead", "done"):
            assert getattr(found, name) == tally[name], name

    @invariant()
    def every_item_has_exactly_the_rows_of_its_state(self) -> None:
        keys = keys_of("q")
        expected = {
            "ready": {keys.items, keys.ready},
            "delayed": {keys.items, keys.delayed},
            "claimed": {keys.items, keys.holds, keys.claims, keys.owners},
            "dead": {keys.dead, keys.died},
        }
        kinds = {kind for of_state in expected.values() for kind in of_state}
        found: dict[int, list[bytes]] = {}
        for key in rows(self.store):
            [kind] = [kind for kind in kinds if key.startswith(kind)]
            seq = tuples.unpack(key)[-1]
            assert isinstance(seq, int)
            found.setdefault(seq, []).append(kind)
        for seq, state in self.state.items():
            assert sorted(found.pop(seq, [])) == sorted(expected.get(state, ())), (seq, state)
        assert found == {}

    def pick(self, at: int) -> list[int]:
        return [list(self.held)[at % len(self.held)]] if self.held else []

    def item(self, seq: int) -> Any:
        return self.store.read(
            lambda txn: queue.items.whole(txn, keys_of("q"), tuples.pack_int(seq))
        )


TestQueueAgainstItsModel = QueueMachine.TestCase
TestQueueAgainstItsModel.settings = settings(max_examples=80, stateful_step_count=50)


def test_a_dead_letter_may_be_posted_for_what_failed_elsewhere(store: Store) -> None:
    first = store.transact(queue.post_dead, "q", b"p", "reducer_failed", "boom", "w1")
    assert store.read(queue.counts, "q") == queue.Counts(dead=1)
    [letter] = store.read(queue.dead, "q")
    assert (letter.seq, letter.payload, letter.code, letter.error) == (
        first,
        b"p",
        "reducer_failed",
        "boom",
    )
    [again] = store.transact(queue.redrive, "q", [first])
    [claimed] = store.transact(queue.claim, "q", "w", 1, 10**9)
    assert (claimed.seq, claimed.payload) == (again, b"p")
    with pytest.raises(Invalid):
        store.transact(queue.post_dead, "q", b"p", "", "boom")


# -- turns, withdrawing, joined operations ---------------------------------------------------------


def test_groups_take_turns_so_that_a_long_backlog_delays_nobody_else(store: Store) -> None:
    store.transact(queue.put_many, "q", [b"busy"] * 500, 0, 0, "busy")
    store.transact(queue.claim, "q", "w", 3, 10**12)
    store.transact(queue.put, "q", b"one", 0, 0, "quiet")
    claimed = store.transact(queue.claim, "q", "w", 2, 10**12)
    assert b"one" in [claim.payload for claim in claimed]


def test_within_a_group_items_keep_their_order_and_priority_goes_first(store: Store) -> None:
    store.transact(queue.put_many, "q", [b"1", b"2", b"3"], 0, 0, "g")
    store.transact(queue.put, "q", b"urgent", 5, 0, "g")
    claimed = store.transact(queue.claim, "q", "w", 10, 10**12)
    assert [claim.payload for claim in claimed] == [b"urgent", b"1", b"2", b"3"]


def test_a_group_that_has_nothing_left_leaves_no_row_behind(store: Store) -> None:
    for group in ("a", "b"):
        store.transact(queue.put_many, "q", [b"x"] * 3, 0, 0, group)
    store.transact(queue.claim, "q", "w", 10, 10**12)
    prefix = schema.prefix(schema.Space.QUEUE, "q", "g")
    assert store.read(lambda txn: txn.scan(prefix, tuples.after(prefix))) == []


@pytest.mark.parametrize("not_before_ns", [0, 1 << 62], ids=["ready", "delayed"])
def test_what_nobody_claimed_can_be_withdrawn_once(store: Store, not_before_ns: int) -> None:
    seq = store.transact(queue.put, "q", b"x" * 5000, 0, not_before_ns)
    assert store.transact(queue.withdraw, "q", seq) is True
    assert store.transact(queue.withdraw, "q", seq) is False
    assert store.read(queue.counts, "q") == queue.Counts(done=1)
    assert store.transact(queue.claim, "q", "w", 1, 10**9) == []


def test_what_is_claimed_cannot_be_withdrawn(store: Store) -> None:
    seq = store.transact(queue.put, "q", b"x")
    [claim] = store.transact(queue.claim, "q", "w", 1, 10**12)
    assert store.transact(queue.withdraw, "q", seq) is False
    store.transact(queue.ack, [claim.token])


def test_what_is_claimed_can_be_withdrawn_from_its_holder_who_then_settles_nothing(
    store: Store,
) -> None:
    seq = store.transact(queue.put, "q", LARGE)
    held = one(store)
    assert store.transact(queue.withdraw, "q", seq, True) is True
    assert store.transact(queue.settle, [held.token], []) == ["lost"]
    assert store.transact(queue.extend, [held.token], TTL) == [None]
    assert not store.read(queue.holds, held.token)
    assert counts(store) == Counts(done=1)
    assert store.read(queue.next_due_ns, "q") is None


def test_only_what_was_taken_from_a_holder_is_counted_as_withdrawn(store: Store) -> None:
    waiting, held = put(store, b"a", b"b", group="g")
    before = store.read(queue.withdrawn, "q")
    store.transact(queue.withdraw, "q", waiting, True)
    assert store.read(queue.withdrawn, "q") == before
    one(store)
    store.transact(queue.withdraw, "q", held, True)
    assert store.read(queue.withdrawn, "q") == before + 1


def test_a_holder_is_called_when_its_claim_is_withdrawn(store: Store) -> None:
    seq = store.transact(queue.put, "q", b"a")
    one(store)
    since = store.wait(queue.topic("q"), 0, timeout=0)
    store.transact(queue.withdraw, "q", seq, True)
    assert store.wait(queue.topic("q"), since, timeout=10) > since


def test_an_operation_joins_a_failure_and_is_dropped_with_a_lost_claim(store: Store) -> None:
    put(store, b"a", b"b")
    good, bad = claim(store)
    lost = queue.Token(bad.queue, bad.seq, bad.number + 1, bad.owner)
    then = [
        queue.Then(index, queue.put.name, codec.pack(queue.put.positional(("after", payload), {})))
        for index, payload in enumerate([b"0", b"1"])
    ]
    fails = [Failure(good.token, "boom", "text"), Failure(lost, "boom", "text")]
    assert store.transact(queue.settle, [], fails, Budget(), then) == ["ready", "lost"]
    assert [payload for _, payload in store.read(queue.peek, "after", 10)] == [b"0"]


def test_what_joins_the_last_failure_is_committed_with_the_dead_letter(store: Store) -> None:
    put(store, b"a", b"b")
    acked, failed = claim(store)
    args = codec.pack(queue.put.positional(("after", b"x"), {}))
    then = [queue.Then(1, queue.put.name, args)]
    fails = [Failure(failed.token, "boom", "text", retryable=False)]
    ends = store.transact(queue.settle, [acked.token], fails, Budget(), then)
    assert ends == ["done", "dead"]
    assert len(store.read(queue.peek, "after", 10)) == 1


# -- attempts that came to nothing -----------------------------------------------------------------


def test_a_failed_attempt_is_recorded_with_whose_it_was_and_how_it_ended(store: Store) -> None:
    put(store, b"a")
    first = one(store, owner="a")
    store.transact(queue.fail, first, "boom", "text")
    [tried] = one(store, owner="b").tried
    assert (tried.number, tried.owner, tried.end, tried.code, tried.error) == (
        1, "a", "failed", "boom", "text",
    )  # fmt: skip
    assert first.enqueued_ns <= tried.began_ns <= tried.ended_ns <= store.now_ns()


def test_an_attempt_that_ran_out_is_recorded_with_the_end_of_its_claim(
    sim_store: Store, clock: SimClock
) -> None:
    put(sim_store, b"a")
    first = one(sim_store)
    clock.advance(LAPSE)
    [tried] = one(sim_store).tried
    assert (tried.end, tried.code, tried.ended_ns) == (
        "expired", "claim_expired", first.expires_ns,
    )  # fmt: skip


def test_what_was_given_back_unharmed_is_no_attempt(store: Store) -> None:
    put(store, b"a")
    store.transact(queue.release, [one(store)])
    assert one(store).tried == ()


def test_an_extended_claim_is_one_attempt_from_its_beginning(
    sim_store: Store, clock: SimClock
) -> None:
    put(sim_store, b"a")
    held = one(sim_store)
    began_ns = sim_store.now_ns()
    clock.advance(S)
    sim_store.transact(queue.extend, [held.token], TTL)
    sim_store.transact(queue.fail, held, "boom", "text")
    [tried] = one(sim_store).tried
    assert tried.began_ns <= began_ns
    assert tried.ended_ns >= began_ns + S


def test_a_dead_letter_has_its_attempts_the_last_one_too(sim_store: Store, clock: SimClock) -> None:
    put(sim_store, b"a")
    one(sim_store)
    clock.advance(LAPSE)
    sim_store.transact(queue.fail, one(sim_store), "boom", "text", False)
    [letter] = dead(sim_store)
    assert [tried.code for tried in letter.tried] == ["claim_expired", "boom"]


def test_only_the_last_attempts_are_kept_and_their_errors_are_short(store: Store) -> None:
    put(store, b"a")
    budget = Budget(failures_max=100)
    for n in range(TRIED_KEPT + 3):
        found = one(store, budget=budget)
        store.transact(queue.fail, found, f"e{n}", "x" * 10_000, True, 0, budget)
    tried = one(store, budget=budget).tried
    assert [one.code for one in tried] == [f"e{n}" for n in range(3, TRIED_KEPT + 3)]
    assert {len(one.error) for one in tried} == {TRIED_ERROR_CHARS_MAX}


def test_an_operation_joins_an_ack_and_is_dropped_with_a_lost_claim(store: Store) -> None:
    store.transact(queue.put_many, "q", [b"a", b"b"])
    good, bad = store.transact(queue.claim, "q", "w", 2, 10**12)
    lost = queue.Token(bad.queue, bad.seq, bad.number + 1, bad.owner)
    then = [
        queue.Then(index, queue.put.name, codec.pack(queue.put.positional(("after", payload), {})))
        for index, payload in enumerate([b"0", b"1"])
    ]
    ends = store.transact(queue.settle, [good.token, lost], [], queue.Budget(), then)
    assert ends == ["done", "lost"]
    assert [payload for _, payload in store.read(queue.peek, "after", 10)] == [b"0"]


def test_the_will_of_an_item_is_read_once_however_it_dies(store: Store) -> None:
    will = "holdfast.durable.dead:post_notice"
    for payload in (b"failed", b"buried"):
        store.transact(queue.put, "q", payload, 0, 0, "", will)
    failed, buried = store.transact(queue.claim, "q", "w", 2, 10**12)
    store.transact(queue.fail, failed.token, "boom", "text", False)
    store.transact(queue.bury, buried.token, "refused", "text")
    notices = [payload for _, payload in store.read(queue.peek, "q/notices", 10)]
    assert sorted(notices) == [b"boom", b"refused"]


def test_a_will_that_nobody_can_execute_is_refused_at_the_door(store: Store) -> None:
    with pytest.raises(Invalid):
        store.transact(queue.put, "q", b"x", 0, 0, "", "os:system")
    assert store.read(queue.counts, "q") == queue.Counts()


# -- what may be what its workers died of ----------------------------------------------------------

ALONE = Budget(expiries_max=10, alone_from=2)


def outlive(store: Store, clock: SimClock, claims: int) -> None:
    """Everything that is there outlives so many claims."""
    for _ in range(claims):
        claim(store, 100, owner="dead", budget=Budget(expiries_max=10))
        clock.advance(LAPSE)
    store.transact(queue.reap, "q", 100, ALONE)


def claimed(store: Store, limit: int = 10, budget: Budget = ALONE, **options: Any) -> list[bytes]:
    return [one.payload for one in claim(store, limit, budget=budget, **options)]


def test_a_suspect_that_is_first_is_claimed_by_itself(sim_store: Store, clock: SimClock) -> None:
    put(sim_store, b"s1", b"s2")
    outlive(sim_store, clock, 2)
    put(sim_store, b"a", b"b")
    assert [claimed(sim_store) for _ in range(3)] == [[b"s1"], [b"s2"], [b"a", b"b"]]


def test_others_pass_by_a_suspect_that_is_not_first(sim_store: Store, clock: SimClock) -> None:
    put(sim_store, b"s")
    outlive(sim_store, clock, 2)
    put(sim_store, b"a", b"b", priority=1)
    put(sim_store, b"c")
    assert [claimed(sim_store) for _ in range(2)] == [[b"a", b"b", b"c"], [b"s"]]


def test_an_item_is_no_suspect_before_its_time_and_never_without_a_bound(
    sim_store: Store, clock: SimClock
) -> None:
    put(sim_store, b"a", b"b")
    outlive(sim_store, clock, 1)
    assert claimed(sim_store) == [b"a", b"b"]
    clock.advance(LAPSE)
    assert claimed(sim_store, budget=Budget(expiries_max=10)) == [b"a", b"b"]

"""The queue: put, claim, and every way to end a claim."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast import codec
from holdfast.clock import S, SimClock
from holdfast.config import (
    ATTEMPT_ERROR_CHARS_MAX,
    ATTEMPTS_KEPT,
    BATCH_MAX,
    BLOB_THRESHOLD_BYTES,
    ERROR_TEXT_CHARS_MAX,
    QUEUE_PRIORITY_MAX,
    TTL_NS_MAX,
)
from holdfast.durable import queue
from holdfast.durable.item import ITEM_TRANSITIONS, ItemEvent, ItemState, keys_of
from holdfast.durable.queue import Claim, DeadLetter, ItemFailure, QueueCounts, RetryBudget
from holdfast.errors import ClaimLost, Fenced, IllegalTransition, Invalid, NotFound
from holdfast.store import blobs, schema, tuples
from holdfast.store.api import Store, Txn
from holdfast.store.in_process import InProcessStore
from holdfast.store.memory_backend import MemoryBackend

MODULES = (
    "holdfast.durable.queue",
    "holdfast.durable.claim",
    "holdfast.durable.dead_letters",
    "holdfast.durable.item",
)
TTL = 10 * S
# Store time runs ahead of a stopped clock: each commit has a distinct time.
PAST_TTL = TTL + S
LARGE = b"x" * (BLOB_THRESHOLD_BYTES + 1)


def put_items(store: Store, *payloads: bytes, **options: Any) -> list[int]:
    seqs: list[int] = store.transact(queue.put_many, "q", list(payloads), **options)
    return seqs


def claim_items(store: Store, limit: int = 10, owner: str = "a", **options: Any) -> list[Claim]:
    claims: list[Claim] = store.transact(queue.claim, "q", owner, limit, TTL, **options)
    return claims


def claim_one(store: Store, **options: Any) -> Claim:
    [held] = claim_items(store, 1, **options)
    return held


def read_counts(store: Store) -> QueueCounts:
    return store.read(queue.counts, "q")


def dead_letters(store: Store) -> list[DeadLetter]:
    return store.read(queue.list_dead, "q")


def queue_keys(store: Store) -> list[bytes]:
    """List the keys of the queue without its counters."""
    keys = keys_of("q")
    lo = keys.items[: -len(tuples.pack(("i",)))]
    return [
        key
        for key, _ in store.read(lambda txn: txn.scan(lo, tuples.prefix_end(lo)))
        if key != keys.counts
    ]


# -- putting -------------------------------------------------------------------------------------


def test_put_seqs_start_at_1(store: Store) -> None:
    assert store.transact(queue.put, "q", b"x") == 1


def test_put_many_assigns_consecutive_seqs(store: Store) -> None:
    assert put_items(store, b"a", b"b") + put_items(store, b"c") == [1, 2, 3]


def test_seqs_are_not_reused_after_all_items_are_done(store: Store) -> None:
    put_items(store, b"a", b"b")
    store.transact(queue.ack, claim_items(store))
    assert put_items(store, b"c") == [3]


def test_put_many_of_no_items_changes_nothing(store: Store) -> None:
    assert put_items(store) == []
    assert queue_keys(store) == []


def test_queues_are_independent(store: Store) -> None:
    put_items(store, b"a")
    assert store.transact(queue.put, "other", b"b") == 1
    assert store.transact(queue.claim, "nobody's", "a", 10, TTL) == []


def test_put_notifies_the_queue_topic(store: Store) -> None:
    since = store.wait(queue.topic("q"), 0, timeout=0)
    put_items(store, b"a")
    assert store.wait(queue.topic("q"), since, timeout=10) > since


def test_put_inside_a_transaction_returns_its_seq_at_commit(store: Store) -> None:
    def both(txn: Txn) -> Any:
        txn.put((0, "sim", "k"), b"v")
        return queue.put(txn, "q", b"x", priority=3)

    assert store.transact(both) == 1
    assert claim_one(store).priority == 3


# -- claiming ------------------------------------------------------------------------------------


def test_claim_returns_items_in_put_order(store: Store) -> None:
    put_items(store, b"a", b"b", b"c")
    assert [c.payload for c in claim_items(store, 2) + claim_items(store, 2)] == [b"a", b"b", b"c"]


def test_claim_returns_higher_priorities_first(store: Store) -> None:
    put_items(store, b"low", priority=-1)
    put_items(store, b"high 1", b"high 2", priority=5)
    put_items(store, b"normal")
    assert [c.payload for c in claim_items(store)] == [b"high 1", b"high 2", b"normal", b"low"]


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "a claimed item is not claimed again",
)
def test_claimed_item_is_not_claimed_again(store: Store) -> None:
    put_items(store, b"a")
    claim_one(store)
    assert claim_items(store, owner="b") == []


def test_claim_has_the_fields_of_its_item(store: Store) -> None:
    put_items(store, b"a", priority=2)
    held = claim_one(store)
    assert (held.queue, held.seq, held.number, held.owner) == ("q", 1, 1, "a")
    assert (held.priority, held.failures, held.expiries) == (2, 0, 0)
    assert held.expires_ns > held.enqueued_ns


def test_claim_with_limit_zero_is_empty(store: Store) -> None:
    put_items(store, b"a")
    assert claim_items(store, 0) == []


def test_delayed_item_is_not_claimed_before_its_time(sim_store: Store, clock: SimClock) -> None:
    put_items(sim_store, b"later", not_before_ns=sim_store.now_ns() + 5 * S)
    assert claim_items(sim_store) == []
    clock.advance(5 * S)
    assert claim_one(sim_store).payload == b"later"


def test_due_delayed_items_are_claimed_by_priority(sim_store: Store, clock: SimClock) -> None:
    put_items(sim_store, b"urgent", priority=9, not_before_ns=sim_store.now_ns() + S)
    put_items(sim_store, b"ready")
    clock.advance(2 * S)
    assert [c.payload for c in claim_items(sim_store)] == [b"urgent", b"ready"]


def test_payload_of_returns_a_large_payload(store: Store) -> None:
    put_items(store, LARGE)
    held = claim_one(store)
    assert held.payload == b""
    assert store.read(queue.payload_of, held) == LARGE


def test_ack_releases_the_blob_of_a_large_payload(sim_store: Store, clock: SimClock) -> None:
    put_items(sim_store, LARGE)
    held = claim_one(sim_store)
    sim_store.transact(queue.ack, [held])
    clock.advance(2 * S)
    assert sim_store.transact(blobs.collect, 0, 10) == 1


# -- acking --------------------------------------------------------------------------------------


@pytest.mark.spec(
    "001", "Inbox loop scaffold", "an ack deletes the item and its lease in one commit"
)
def test_ack_removes_all_rows_except_the_counters(store: Store) -> None:
    put_items(store, b"a", b"b")
    store.transact(queue.ack, claim_items(store))
    assert queue_keys(store) == []
    assert read_counts(store) == QueueCounts(done=2)


def test_second_ack_raises_claim_lost(store: Store) -> None:
    put_items(store, b"a")
    held = claim_one(store)
    store.transact(queue.ack, [held])
    with pytest.raises(ClaimLost) as error:
        store.transact(queue.ack, [held])
    assert error.value.fields == {"queue": "q", "seq": 1, "number": 1}


def test_ack_with_a_duplicate_claim_raises_claim_lost(store: Store) -> None:
    put_items(store, b"a")
    held = claim_one(store)
    with pytest.raises(ClaimLost):
        store.transact(queue.ack, [held, held])
    assert read_counts(store).claimed == 1


def test_ack_of_several_claims_is_atomic(store: Store) -> None:
    put_items(store, b"a", b"b")
    first, second = claim_items(store)
    store.transact(queue.ack, [first])
    with pytest.raises(ClaimLost):
        store.transact(queue.ack, [second, first])
    assert read_counts(store).claimed == 1


def test_ack_accepts_claims_of_several_queues(store: Store) -> None:
    put_items(store, b"a")
    store.transact(queue.put, "other", b"b")
    [other] = store.transact(queue.claim, "other", "a", 1, TTL)
    store.transact(queue.ack, [claim_one(store), other])
    assert read_counts(store).done == store.read(queue.counts, "other").done == 1


def test_ack_accepts_a_claim_token(store: Store) -> None:
    put_items(store, b"a")
    store.transact(queue.ack, [claim_one(store).token])
    assert read_counts(store).done == 1


def claim_endings() -> dict[str, Any]:
    return {
        "ack": lambda store, held: store.transact(queue.ack, [held]),
        "fail": lambda store, held: store.transact(queue.fail, held, "code", "text"),
        "bury": lambda store, held: store.transact(queue.dead_letter, held, "code", "text"),
        "release": lambda store, held: store.transact(queue.release, [held]),
    }


@pytest.mark.parametrize("end", claim_endings())
def test_ending_an_expired_claim_raises_claim_lost(
    sim_store: Store, clock: SimClock, end: str
) -> None:
    put_items(sim_store, b"a")
    held = claim_one(sim_store)
    clock.advance(PAST_TTL)
    with pytest.raises(ClaimLost):
        claim_endings()[end](sim_store, held)
    assert read_counts(sim_store).claimed == 1


@pytest.mark.spec("001", "Inbox loop scaffold", "a requeue needs the token of the current lease")
@pytest.mark.parametrize("end", claim_endings())
def test_ending_a_claim_taken_over_by_another_raises_claim_lost(
    sim_store: Store, clock: SimClock, end: str
) -> None:
    put_items(sim_store, b"a")
    old = claim_one(sim_store)
    clock.advance(PAST_TTL)
    new = claim_one(sim_store, owner="a")
    assert new.number == old.number + 1
    with pytest.raises(ClaimLost):
        claim_endings()[end](sim_store, old)
    sim_store.transact(queue.ack, [new])


@pytest.mark.parametrize("end", claim_endings())
def test_ending_a_claim_of_another_owner_raises_claim_lost(store: Store, end: str) -> None:
    put_items(store, b"a")
    held = claim_one(store)
    stolen = queue.ClaimToken(held.queue, held.seq, held.number, "thief")
    with pytest.raises(ClaimLost):
        claim_endings()[end](store, stolen)


def test_claim_lost_is_a_fenced_error() -> None:
    assert issubclass(ClaimLost, Fenced)


# -- failing -------------------------------------------------------------------------------------


def test_failed_item_is_ready_again_with_its_seq(store: Store) -> None:
    put_items(store, b"a", b"b")
    first = claim_one(store)
    assert store.transact(queue.fail, first, "busy", "later") == "ready"
    second = claim_one(store)
    assert (second.seq, second.failures, second.number) == (1, 1, 2)


def test_failed_item_with_a_delay_keeps_its_order(sim_store: Store, clock: SimClock) -> None:
    put_items(sim_store, b"a", b"b")
    [first] = claim_items(sim_store, 1)
    assert sim_store.transact(queue.fail, first, "busy", "", delay_ns=S) == "delayed"
    assert read_counts(sim_store) == QueueCounts(ready=1, delayed=1)
    clock.advance(2 * S)
    assert [c.seq for c in claim_items(sim_store)] == [1, 2]


@pytest.mark.spec(
    "001", "Inbox loop scaffold", "a failure that exhausts the retry budget writes a dead letter"
)
def test_failure_at_failures_max_writes_a_dead_letter(store: Store) -> None:
    put_items(store, b"a")
    budget = RetryBudget(failures_max=3)
    ends = [store.transact(queue.fail, claim_one(store), "c", "e", budget=budget) for _ in range(3)]
    assert ends == ["ready", "ready", "dead"]
    assert read_counts(store) == QueueCounts(dead=1)


def test_failure_that_is_not_retryable_writes_a_dead_letter(store: Store) -> None:
    put_items(store, b"a")
    assert store.transact(queue.fail, claim_one(store), "c", "e", retryable=False) == "dead"
    assert dead_letters(store)[0].failures == 1


def test_dead_letter_operation_counts_no_failure(store: Store) -> None:
    put_items(store, b"a")
    store.transact(queue.dead_letter, claim_one(store), "undecodable", "not a frame")
    [letter] = dead_letters(store)
    assert (letter.code, letter.error, letter.failures) == ("undecodable", "not a frame", 0)


# -- finish_batch --------------------------------------------------------------------------------


def test_finish_batch_returns_a_result_for_each_claim(sim_store: Store, clock: SimClock) -> None:
    put_items(sim_store, b"lost")
    lost = claim_one(sim_store)
    clock.advance(PAST_TTL)
    put_items(sim_store, b"done", b"ready", b"delayed", b"dead")
    done, ready, delayed, doomed = claim_items(sim_store)[1:]
    fails = [
        ItemFailure(ready, "c", ""),
        ItemFailure(delayed, "c", "", delay_ns=S),
        ItemFailure(doomed, "c", "", retryable=False),
        ItemFailure(lost, "c", ""),
    ]
    ends = sim_store.transact(queue.finish_batch, [done, lost], fails)
    assert ends == ["done", "lost", "ready", "delayed", "dead", "lost"]
    assert read_counts(sim_store) == QueueCounts(ready=1, delayed=1, claimed=1, dead=1, done=1)


def test_finish_batch_with_a_duplicate_claim_loses_the_second(store: Store) -> None:
    put_items(store, b"a")
    held = claim_one(store)
    assert store.transact(queue.finish_batch, [held], [ItemFailure(held, "c", "")]) == [
        "done",
        "lost",
    ]


def test_finish_batch_applies_the_retry_budget(store: Store) -> None:
    put_items(store, b"a")
    ends = store.transact(
        queue.finish_batch,
        [],
        [ItemFailure(claim_one(store), "c", "")],
        RetryBudget(failures_max=1),
    )
    assert ends == ["dead"]


# -- releasing and extending ---------------------------------------------------------------------


def test_release_counts_neither_failure_nor_expiry(store: Store) -> None:
    put_items(store, b"a")
    store.transact(queue.release, [claim_one(store)])
    second = claim_one(store)
    assert (second.failures, second.expiries, second.number) == (0, 0, 2)


def test_extended_claim_lives_beyond_its_first_expiry(sim_store: Store, clock: SimClock) -> None:
    put_items(sim_store, b"a")
    held = claim_one(sim_store)
    clock.advance(TTL - S)
    [until_ns] = sim_store.transact(queue.extend, [held], TTL)
    assert until_ns > held.expires_ns
    clock.advance(TTL - S)
    assert claim_items(sim_store, owner="b") == []
    sim_store.transact(queue.ack, [held])
    assert queue_keys(sim_store) == []


def test_extend_never_shortens_a_claim(store: Store) -> None:
    put_items(store, b"a")
    held = claim_one(store)
    assert store.transact(queue.extend, [held], 1) == [held.expires_ns]
    store.transact(queue.ack, [held])
    assert queue_keys(store) == []


def test_extend_returns_none_for_a_lost_claim(sim_store: Store, clock: SimClock) -> None:
    put_items(sim_store, b"a")
    lost = claim_one(sim_store)
    clock.advance(PAST_TTL)
    kept = claim_one(sim_store)
    assert sim_store.transact(queue.extend, [lost, kept], TTL)[0] is None
    assert sim_store.transact(queue.extend, [lost, kept], TTL)[1] is not None


# -- expiring ------------------------------------------------------------------------------------


@pytest.mark.spec(
    "004", "4) Global effect dispatch runtime", "the next owner claims the item of an expired claim"
)
def test_expired_claim_is_claimed_by_the_next_owner(sim_store: Store, clock: SimClock) -> None:
    put_items(sim_store, b"a")
    claim_one(sim_store)
    clock.advance(PAST_TTL)
    second = claim_one(sim_store, owner="b")
    assert (second.expiries, second.failures, second.number) == (1, 0, 2)


def test_claim_ends_at_the_instant_of_its_expiry(sim_store: Store, clock: SimClock) -> None:
    put_items(sim_store, b"a")
    held = claim_one(sim_store)
    clock.advance(held.expires_ns - sim_store.now_ns() - 1)
    assert sim_store.transact(queue.extend, [held], 1) == [held.expires_ns]
    clock.advance(held.expires_ns - sim_store.now_ns())
    assert sim_store.transact(queue.extend, [held], 1) == [None]


def test_expiry_at_expiries_max_writes_a_dead_letter(sim_store: Store, clock: SimClock) -> None:
    put_items(sim_store, b"a")
    for _ in range(RetryBudget().expiries_max):
        claim_one(sim_store)
        clock.advance(PAST_TTL)
    assert claim_items(sim_store) == []
    [letter] = dead_letters(sim_store)
    assert (letter.code, letter.expiries) == ("expiries_exhausted", RetryBudget().expiries_max)


@pytest.mark.spec(
    "004",
    "4) Global effect dispatch runtime",
    "the reaper makes items of overdue claims ready again",
)
def test_expire_overdue_makes_items_ready(sim_store: Store, clock: SimClock) -> None:
    put_items(sim_store, b"a", b"b")
    claim_items(sim_store)
    clock.advance(PAST_TTL)
    assert sim_store.transact(queue.expire_overdue, "q", 10) == 2
    assert read_counts(sim_store) == QueueCounts(ready=2)


def test_expire_overdue_is_bounded_and_starts_with_the_longest_overdue(
    sim_store: Store, clock: SimClock
) -> None:
    put_items(sim_store, b"a", b"b")
    claim_one(sim_store)
    clock.advance(2 * S)
    claim_one(sim_store)
    clock.advance(PAST_TTL)
    assert sim_store.transact(queue.expire_overdue, "q", 1) == 1
    assert [c.seq for c in sim_store.read(queue.claims_of, "q", "a", 10)] == [2]


def test_expire_overdue_keeps_live_claims(store: Store) -> None:
    put_items(store, b"a")
    claim_one(store)
    assert store.transact(queue.expire_overdue, "q", 10) == 0


# -- dead letters --------------------------------------------------------------------------------


@pytest.mark.spec(
    "001",
    "Inbox loop scaffold",
    "a dead letter keeps all fields of its item, and the same commit deletes item and lease",
)
def test_dead_letter_keeps_all_fields_of_its_item(sim_store: Store, clock: SimClock) -> None:
    put_items(sim_store, b"poison", priority=4)
    claim_one(sim_store)
    clock.advance(PAST_TTL)
    sim_store.transact(queue.fail, claim_one(sim_store), "first", "one")
    held = claim_one(sim_store, owner="last")
    sim_store.transact(queue.fail, held, "second", "two", retryable=False)
    [letter] = dead_letters(sim_store)
    assert letter == DeadLetter(
        queue="q",
        seq=1,
        payload=b"poison",
        code="second",
        error="two",
        failures=2,
        expiries=1,
        claims=3,
        priority=4,
        enqueued_ns=held.enqueued_ns,
        not_before_ns=0,
        died_ns=letter.died_ns,
        owner="last",
        redrive_of=None,
        failed_attempts=letter.failed_attempts,
    )
    assert [(attempt.number, attempt.end, attempt.code) for attempt in letter.failed_attempts] == [
        (1, "expired", "claim_expired"),
        (2, "failed", "first"),
        (3, "failed", "second"),
    ]
    assert letter.died_ns > held.enqueued_ns
    assert len(queue_keys(sim_store)) == 2


def test_dead_letter_of_an_expired_item_keeps_its_last_error_text(
    sim_store: Store, clock: SimClock
) -> None:
    put_items(sim_store, b"a")
    sim_store.transact(queue.fail, claim_one(sim_store), "c", "what went wrong")
    claim_one(sim_store)
    clock.advance(PAST_TTL)
    claim_items(sim_store, budget=RetryBudget(expiries_max=1))
    assert dead_letters(sim_store)[0].error == "what went wrong"


def test_dead_letter_error_text_is_bounded(store: Store) -> None:
    put_items(store, b"a")
    store.transact(queue.dead_letter, claim_one(store), "c", "e" * (ERROR_TEXT_CHARS_MAX + 1))
    assert len(dead_letters(store)[0].error) == ERROR_TEXT_CHARS_MAX


def test_dead_letter_does_not_overwrite_an_earlier_one(store: Store) -> None:
    put_items(store, b"a", b"b")
    for held in claim_items(store):
        store.transact(queue.dead_letter, held, "c", "")
    assert [letter.payload for letter in dead_letters(store)] == [b"a", b"b"]


def test_dead_letters_are_read_in_pages(store: Store) -> None:
    put_items(store, b"a", b"b", b"c")
    for held in claim_items(store):
        store.transact(queue.dead_letter, held, "c", "")
    assert [letter.seq for letter in store.read(queue.list_dead, "q", 1, 1)] == [2]


def test_dead_letter_keeps_a_large_payload(store: Store) -> None:
    put_items(store, LARGE)
    store.transact(queue.dead_letter, claim_one(store), "c", "")
    [letter] = dead_letters(store)
    assert store.read(queue.payload_of, letter) == LARGE


def test_redrive_creates_a_new_item_with_the_old_seq(store: Store) -> None:
    put_items(store, b"a", priority=3)
    store.transact(queue.fail, claim_one(store), "c", "", retryable=False)
    assert store.transact(queue.redrive, "q", [1]) == [2]
    redriven = claim_one(store)
    assert (redriven.seq, redriven.payload, redriven.priority, redriven.failures) == (2, b"a", 3, 0)
    store.transact(queue.dead_letter, redriven, "c", "")
    assert [letter.redrive_of for letter in dead_letters(store)] == [1]


def test_redrive_removes_the_dead_letter(store: Store) -> None:
    put_items(store, b"a")
    store.transact(queue.dead_letter, claim_one(store), "c", "")
    store.transact(queue.redrive, "q", [1])
    assert dead_letters(store) == []
    assert read_counts(store) == QueueCounts(ready=1)


def test_redrive_of_a_missing_letter_raises_not_found(store: Store) -> None:
    put_items(store, b"a")
    store.transact(queue.dead_letter, claim_one(store), "c", "")
    with pytest.raises(NotFound) as error:
        store.transact(queue.redrive, "q", [1, 9])
    assert error.value.seq == 9
    assert read_counts(store) == QueueCounts(dead=1)


def test_redrive_of_a_letter_twice_raises_not_found(store: Store) -> None:
    put_items(store, b"a")
    store.transact(queue.dead_letter, claim_one(store), "c", "")
    with pytest.raises(NotFound):
        store.transact(queue.redrive, "q", [1, 1])
    assert read_counts(store) == QueueCounts(dead=1)


def test_redrive_moves_the_blob_of_a_large_payload(sim_store: Store, clock: SimClock) -> None:
    put_items(sim_store, LARGE)
    sim_store.transact(queue.dead_letter, claim_one(sim_store), "c", "")
    sim_store.transact(queue.redrive, "q", [1])
    clock.advance(2 * S)
    assert sim_store.transact(blobs.collect, 0, 10) == 0
    held = claim_one(sim_store)
    assert sim_store.read(queue.payload_of, held) == LARGE
    sim_store.transact(queue.ack, [held])
    clock.advance(2 * S)
    assert sim_store.transact(blobs.collect, 0, 10) == 1


def test_purge_dead_removes_the_oldest_letters_up_to_its_limit(
    sim_store: Store, clock: SimClock
) -> None:
    put_items(sim_store, b"a", b"b", LARGE, b"d")
    claims = claim_items(sim_store)
    for held in (claims[2], claims[1], claims[0]):
        sim_store.transact(queue.dead_letter, held, "c", "")
    clock.advance(2 * S)
    cut_ns = sim_store.now_ns()
    clock.advance(2 * S)
    sim_store.transact(queue.dead_letter, claims[3], "c", "")
    assert sim_store.transact(queue.purge_dead, "q", cut_ns, 2) == 2
    assert [letter.seq for letter in dead_letters(sim_store)] == [1, 4]
    assert sim_store.transact(queue.purge_dead, "q", cut_ns, 2) == 1
    assert read_counts(sim_store) == QueueCounts(dead=1)
    assert sim_store.transact(blobs.collect, 0, 10) == 1


# -- reads ---------------------------------------------------------------------------------------


def test_counts_of_an_unknown_queue_are_zero(store: Store) -> None:
    assert read_counts(store) == QueueCounts()


def test_peek_returns_the_next_items_without_a_claim(store: Store) -> None:
    put_items(store, b"a", LARGE, b"c")
    assert store.read(queue.peek, "q", 2) == [(1, b"a"), (2, LARGE)]
    assert read_counts(store) == QueueCounts(ready=3)


def test_claims_of_lists_claims_by_owner(store: Store) -> None:
    put_items(store, b"a", b"b", b"c")
    mine = claim_items(store, 2, owner="a")
    claim_items(store, 1, owner="b")
    assert store.read(queue.claims_of, "q", "a", 10) == mine


def test_claims_of_does_not_match_an_owner_prefix(store: Store) -> None:
    put_items(store, b"a")
    claim_items(store, owner="ab")
    assert store.read(queue.claims_of, "q", "a", 10) == []


def test_next_due_ns_of_an_empty_queue_is_none(store: Store) -> None:
    assert store.read(queue.next_due_ns, "q") is None


def test_next_due_ns_of_a_ready_item_is_zero(store: Store) -> None:
    put_items(store, b"a")
    assert store.read(queue.next_due_ns, "q") == 0


def test_next_due_ns_of_a_delayed_item_is_its_time(store: Store) -> None:
    at_ns = store.now_ns() + 60 * S
    put_items(store, b"a", not_before_ns=at_ns)
    assert store.read(queue.next_due_ns, "q") == at_ns


def test_next_due_ns_of_a_claimed_item_is_its_expiry(store: Store) -> None:
    put_items(store, b"a")
    held = claim_one(store)
    assert store.read(queue.next_due_ns, "q") == held.expires_ns


def test_claim_reads_only_its_limit_of_a_backlog(store: Store) -> None:
    put_items(store, *[b"x"] * 1000, not_before_ns=store.now_ns() + 3600 * S)
    put_items(store, *[b"x"] * 1000)
    read = 0

    def spy(txn: Any) -> Any:
        nonlocal read
        scan = txn.scan

        def counting(*args: Any, **kwargs: Any) -> Any:
            nonlocal read
            scanned = scan(*args, **kwargs)
            read += len(scanned)
            return scanned

        txn.scan = counting
        return queue.claim.fn(txn, "q", "a", 10, TTL)

    assert len(store.transact(spy)) == 10
    assert read == 10


# -- the table -----------------------------------------------------------------------------------


def test_every_item_state_is_reachable() -> None:
    assert ITEM_TRANSITIONS.unreachable() == frozenset()


def test_done_and_dead_item_states_are_final() -> None:
    assert ITEM_TRANSITIONS.terminal == {ItemState.DONE, ItemState.DEAD}


# The transitions that an admission may apply to an unclaimed item.
ADMISSION_TRANSITIONS = {(ItemState.READY, ItemEvent.DEFER), (ItemState.READY, ItemEvent.BURY)}


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (state, event)
        for state in ItemState
        for event in ItemEvent
        if state is not ItemState.CLAIMED
        and event not in (ItemEvent.CLAIM, ItemEvent.DUE, ItemEvent.WITHDRAW)
        and (state, event) not in ADMISSION_TRANSITIONS
    ],
)
def test_item_that_is_not_claimed_rejects_claim_endings(state: ItemState, event: ItemEvent) -> None:
    with pytest.raises(IllegalTransition):
        ITEM_TRANSITIONS.next(state, event)


@pytest.mark.parametrize(("state", "event"), sorted(ADMISSION_TRANSITIONS, key=str))
def test_ready_item_may_be_deferred_or_refused_by_admission(
    state: ItemState, event: ItemEvent
) -> None:
    assert ITEM_TRANSITIONS.next(state, event) in (ItemState.DELAYED, ItemState.DEAD)


# -- bad input -----------------------------------------------------------------------------------

BAD_INPUTS = {
    "queue, empty": (lambda s: s.transact(queue.put, "", b"x"), "queue"),
    "queue, too long": (lambda s: s.transact(queue.put, "q" * 999, b"x"), "queue"),
    "priority": (lambda s: put_items(s, b"x", priority=QUEUE_PRIORITY_MAX + 1), "priority"),
    "not_before_ns, negative": (lambda s: put_items(s, b"x", not_before_ns=-1), "not_before_ns"),
    "not_before_ns, too late": (
        lambda s: put_items(s, b"x", not_before_ns=1 << 63),
        "not_before_ns",
    ),
    "payloads": (lambda s: put_items(s, *[b"x"] * (BATCH_MAX + 1)), "payloads"),
    "owner": (lambda s: claim_items(s, owner=""), "owner"),
    "limit, negative": (lambda s: claim_items(s, -1), "limit"),
    "limit, too large": (lambda s: claim_items(s, BATCH_MAX + 1), "limit"),
    "ttl_ns, nothing": (lambda s: s.transact(queue.claim, "q", "a", 1, 0), "ttl_ns"),
    "ttl_ns, for ever": (lambda s: s.transact(queue.claim, "q", "a", 1, TTL_NS_MAX + 1), "ttl_ns"),
    "budget": (lambda s: claim_items(s, budget=RetryBudget(failures_max=0)), "budget"),
    "reap": (lambda s: s.transact(queue.expire_overdue, "q", -1), "limit"),
    "peek": (lambda s: s.read(queue.peek, "q", -1), "limit"),
    "seq": (lambda s: s.transact(queue.redrive, "q", [0]), "seq"),
    "purge": (lambda s: s.transact(queue.purge_dead, "q", -1, 1), "before_ns"),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_queue_with_bad_input_raises_invalid_with_the_field(store: Store, case: str) -> None:
    put_items(store, b"a")
    before = queue_keys(store)
    do, what = BAD_INPUTS[case]
    with pytest.raises(Invalid) as error:
        do(store)
    assert error.value.what == what
    assert queue_keys(store) == before


@pytest.mark.parametrize(("code", "delay_ns", "what"), [("", 0, "code"), ("c", -1, "delay_ns")])
def test_fail_with_bad_input_raises_invalid_with_the_field(
    store: Store, code: str, delay_ns: int, what: str
) -> None:
    put_items(store, b"a")
    with pytest.raises(Invalid) as error:
        store.transact(queue.fail, claim_one(store), code, "", delay_ns=delay_ns)
    assert error.value.what == what
    assert read_counts(store).claimed == 1


# -- against a model -----------------------------------------------------------------------------


class QueueMachine(RuleBasedStateMachine):
    """Each item is in one state, the counters equal a recount, and the rows match the state."""

    BUDGET = RetryBudget(failures_max=3, expiries_max=2)

    def __init__(self) -> None:
        super().__init__()
        self.clock = SimClock()
        self.store = InProcessStore("memory:", MemoryBackend(), self.clock)
        self.state: dict[int, str] = {}
        self.failures: Counter[int] = Counter()
        self.expiries: Counter[int] = Counter()
        self.live_claims: dict[int, Claim] = {}
        self.ended_claims: list[Claim] = []
        self.deaths: Counter[int] = Counter()

    def now_ns(self) -> int:
        engine = self.store.engine
        return max(engine.now_ns(), engine._last_ns + 1)

    def live(self, seq: int) -> bool:
        return self.now_ns() < self.live_claims[seq].expires_ns

    def expire_overdue_in_model(self) -> None:
        """Expire overdue claims in the model, as every claim does first."""
        for seq in [seq for seq in self.live_claims if not self.live(seq)]:
            self.ended_claims.append(self.live_claims.pop(seq))
            self.expiries[seq] += 1
            exhausted = self.expiries[seq] >= self.BUDGET.expiries_max
            self.state[seq] = "dead" if exhausted else "ready"

    @rule(n=st.integers(1, 4), priority=st.integers(-1, 1), delay=st.integers(0, 3))
    def put(self, n: int, priority: int, delay: int) -> None:
        at_ns = self.store.now_ns() + delay * S if delay else 0
        for seq in put_items(self.store, *[b"x"] * n, priority=priority, not_before_ns=at_ns):
            assert seq == len(self.state) + 1
            self.state[seq] = "delayed" if delay else "ready"

    @rule(limit=st.integers(0, 5), owner=st.sampled_from("ab"), ttl=st.integers(1, 5))
    def claim(self, limit: int, owner: str, ttl: int) -> None:
        self.expire_overdue_in_model()
        due = {
            seq
            for seq, state in self.state.items()
            if state == "delayed" and self.item(seq).not_before_ns <= self.now_ns()
        }
        self.state.update(dict.fromkeys(due, "ready"))
        ready = [seq for seq, state in self.state.items() if state == "ready"]
        ready.sort(key=lambda seq: (-self.item(seq).priority, seq))
        claims = self.store.transact(queue.claim, "q", owner, limit, ttl * S, self.BUDGET)
        assert [held.seq for held in claims] == ready[:limit]
        for held in claims:
            assert held.failures == self.failures[held.seq]
            assert held.expiries == self.expiries[held.seq]
            self.state[held.seq] = "claimed"
            self.live_claims[held.seq] = held

    @rule()
    def expire_overdue(self) -> None:
        before = len(self.live_claims)
        self.expire_overdue_in_model()
        assert self.store.transact(queue.expire_overdue, "q", 100, self.BUDGET) == before - len(
            self.live_claims
        )

    @rule(at=st.integers(0, 20))
    def ack(self, at: int) -> None:
        for seq in self.pick(at):
            if self.live(seq):
                self.store.transact(queue.ack, [self.live_claims.pop(seq)])
                self.state[seq] = "done"
            else:
                with pytest.raises(ClaimLost):
                    self.store.transact(queue.ack, [self.live_claims[seq]])

    @rule(at=st.integers(0, 20), retryable=st.booleans(), delay=st.integers(0, 2))
    def fail(self, at: int, retryable: bool, delay: int) -> None:
        for seq in self.pick(at):
            failure = ItemFailure(self.live_claims[seq], "c", "e", retryable, delay * S)
            live = self.live(seq)
            [end] = self.store.transact(queue.finish_batch, [], [failure], self.BUDGET)
            assert (end == "lost") == (not live)
            if live:
                self.ended_claims.append(self.live_claims.pop(seq))
                self.failures[seq] += 1
                exhausted = not retryable or self.failures[seq] >= self.BUDGET.failures_max
                assert end == ("dead" if exhausted else "delayed" if delay else "ready")
                self.state[seq] = end

    @rule(at=st.integers(0, 20))
    def release(self, at: int) -> None:
        for seq in self.pick(at):
            if self.live(seq):
                self.store.transact(queue.release, [self.live_claims[seq]])
                self.ended_claims.append(self.live_claims.pop(seq))
                self.state[seq] = "ready"

    @rule(at=st.integers(0, 20), ttl=st.integers(1, 5))
    def extend(self, at: int, ttl: int) -> None:
        for seq in self.pick(at):
            live = self.live(seq)
            [until_ns] = self.store.transact(queue.extend, [self.live_claims[seq]], ttl * S)
            assert (until_ns is None) == (not live)
            if until_ns is not None:
                [self.live_claims[seq]] = [
                    c
                    for c in self.store.read(queue.claims_of, "q", self.live_claims[seq].owner, 100)
                    if c.seq == seq
                ]
                assert self.live_claims[seq].expires_ns == until_ns

    @rule(at=st.integers(0, 20))
    def late_answer(self, at: int) -> None:
        if self.ended_claims:
            stale = self.ended_claims[at % len(self.ended_claims)]
            assert self.store.transact(queue.finish_batch, [stale], []) == ["lost"]

    @rule(at=st.integers(0, 20))
    def redrive(self, at: int) -> None:
        dead_seqs = [seq for seq, state in self.state.items() if state == "dead"]
        if dead_seqs:
            seq = dead_seqs[at % len(dead_seqs)]
            [new] = self.store.transact(queue.redrive, "q", [seq])
            assert new == len(self.state) + 1
            self.state[seq] = "redriven"
            self.state[new] = "ready"

    @rule(seconds=st.integers(0, 6))
    def wait(self, seconds: int) -> None:
        self.clock.advance(seconds * S)

    @invariant()
    def counters_equal_a_recount(self) -> None:
        counters = read_counts(self.store)
        tally = Counter(self.state.values())
        for name in ("ready", "delayed", "claimed", "dead", "done"):
            assert getattr(counters, name) == tally[name], name

    @invariant()
    def every_item_has_exactly_the_rows_of_its_state(self) -> None:
        keys = keys_of("q")
        expected = {
            "ready": {keys.items, keys.ready},
            "delayed": {keys.items, keys.delayed},
            "claimed": {keys.items, keys.claim_rows, keys.by_expiry, keys.by_owner},
            "dead": {keys.dead, keys.dead_by_time},
        }
        kinds = {kind for of_state in expected.values() for kind in of_state}
        kinds_by_seq: dict[int, list[bytes]] = {}
        for key in queue_keys(self.store):
            [kind] = [kind for kind in kinds if key.startswith(kind)]
            seq = tuples.unpack(key)[-1]
            assert isinstance(seq, int)
            kinds_by_seq.setdefault(seq, []).append(kind)
        for seq, state in self.state.items():
            assert sorted(kinds_by_seq.pop(seq, [])) == sorted(expected.get(state, ())), (
                seq,
                state,
            )
        assert kinds_by_seq == {}

    def pick(self, at: int) -> list[int]:
        return [list(self.live_claims)[at % len(self.live_claims)]] if self.live_claims else []

    def item(self, seq: int) -> Any:
        return self.store.read(
            lambda txn: queue.items.load_with_claim(txn, keys_of("q"), tuples.pack_int(seq))
        )


TestQueueMatchesItsModel = QueueMachine.TestCase
TestQueueMatchesItsModel.settings = settings(max_examples=80, stateful_step_count=50)


def test_add_dead_letter_writes_a_letter_without_an_item(store: Store) -> None:
    first = store.transact(queue.add_dead_letter, "q", b"p", "reducer_failed", "boom", "w1")
    assert store.read(queue.counts, "q") == queue.QueueCounts(dead=1)
    [letter] = store.read(queue.list_dead, "q")
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
        store.transact(queue.add_dead_letter, "q", b"p", "", "boom")


# -- fair ranks, cancellation, joined operations ---------------------------------------------------


def test_backlog_of_a_group_does_not_delay_another_group(store: Store) -> None:
    store.transact(queue.put_many, "q", [b"busy"] * 500, 0, 0, "busy")
    store.transact(queue.claim, "q", "w", 3, 10**12)
    store.transact(queue.put, "q", b"one", 0, 0, "quiet")
    claimed = store.transact(queue.claim, "q", "w", 2, 10**12)
    assert b"one" in [claim.payload for claim in claimed]


def test_items_of_a_group_are_claimed_by_priority_then_order(store: Store) -> None:
    store.transact(queue.put_many, "q", [b"1", b"2", b"3"], 0, 0, "g")
    store.transact(queue.put, "q", b"urgent", 5, 0, "g")
    claimed = store.transact(queue.claim, "q", "w", 10, 10**12)
    assert [claim.payload for claim in claimed] == [b"urgent", b"1", b"2", b"3"]


def test_group_without_items_has_no_row(store: Store) -> None:
    for group in ("a", "b"):
        store.transact(queue.put_many, "q", [b"x"] * 3, 0, 0, group)
    store.transact(queue.claim, "q", "w", 10, 10**12)
    prefix = schema.key_prefix(schema.Space.QUEUE, "q", "g")
    assert store.read(lambda txn: txn.scan(prefix, tuples.prefix_end(prefix))) == []


@pytest.mark.parametrize("not_before_ns", [0, 1 << 62], ids=["ready", "delayed"])
def test_unclaimed_item_can_be_cancelled_once(store: Store, not_before_ns: int) -> None:
    seq = store.transact(queue.put, "q", b"x" * 5000, 0, not_before_ns)
    assert store.transact(queue.cancel, "q", seq) is True
    assert store.transact(queue.cancel, "q", seq) is False
    assert store.read(queue.counts, "q") == queue.QueueCounts(done=1)
    assert store.transact(queue.claim, "q", "w", 1, 10**9) == []


def test_cancel_of_a_claimed_item_returns_false(store: Store) -> None:
    seq = store.transact(queue.put, "q", b"x")
    [claim] = store.transact(queue.claim, "q", "w", 1, 10**12)
    assert store.transact(queue.cancel, "q", seq) is False
    store.transact(queue.ack, [claim.token])


def test_cancel_of_a_claimed_item_by_force_loses_the_claim(
    store: Store,
) -> None:
    seq = store.transact(queue.put, "q", LARGE)
    held = claim_one(store)
    assert store.transact(queue.cancel, "q", seq, True) is True
    assert store.transact(queue.finish_batch, [held.token], []) == ["lost"]
    assert store.transact(queue.extend, [held.token], TTL) == [None]
    assert not store.read(queue.is_held, held.token)
    assert read_counts(store) == QueueCounts(done=1)
    assert store.read(queue.next_due_ns, "q") is None


def test_cancelled_count_includes_only_claimed_items(store: Store) -> None:
    waiting, held = put_items(store, b"a", b"b", group="g")
    before = store.read(queue.cancelled_count, "q")
    store.transact(queue.cancel, "q", waiting, True)
    assert store.read(queue.cancelled_count, "q") == before
    claim_one(store)
    store.transact(queue.cancel, "q", held, True)
    assert store.read(queue.cancelled_count, "q") == before + 1


def test_cancel_of_a_claimed_item_notifies_the_queue_topic(store: Store) -> None:
    seq = store.transact(queue.put, "q", b"a")
    claim_one(store)
    since = store.wait(queue.topic("q"), 0, timeout=0)
    store.transact(queue.cancel, "q", seq, True)
    assert store.wait(queue.topic("q"), since, timeout=10) > since


def test_operation_joined_to_a_failure_is_skipped_for_a_lost_claim(store: Store) -> None:
    put_items(store, b"a", b"b")
    good, bad = claim_items(store)
    lost = queue.ClaimToken(bad.queue, bad.seq, bad.number + 1, bad.owner)
    joined = [
        queue.JoinedOperation(
            index, queue.put.name, codec.pack(queue.put.bind_positional(("after", payload), {}))
        )
        for index, payload in enumerate([b"0", b"1"])
    ]
    fails = [ItemFailure(good.token, "boom", "text"), ItemFailure(lost, "boom", "text")]
    assert store.transact(queue.finish_batch, [], fails, RetryBudget(), joined) == ["ready", "lost"]
    assert [payload for _, payload in store.read(queue.peek, "after", 10)] == [b"0"]


def test_operation_joined_to_the_last_failure_commits_with_the_dead_letter(store: Store) -> None:
    put_items(store, b"a", b"b")
    acked, failed = claim_items(store)
    args = codec.pack(queue.put.bind_positional(("after", b"x"), {}))
    joined = [queue.JoinedOperation(1, queue.put.name, args)]
    fails = [ItemFailure(failed.token, "boom", "text", retryable=False)]
    ends = store.transact(queue.finish_batch, [acked.token], fails, RetryBudget(), joined)
    assert ends == ["done", "dead"]
    assert len(store.read(queue.peek, "after", 10)) == 1


# -- failed attempts -------------------------------------------------------------------------------


def test_failed_attempt_is_recorded_with_owner_and_error(store: Store) -> None:
    put_items(store, b"a")
    first = claim_one(store, owner="a")
    store.transact(queue.fail, first, "boom", "text")
    [attempt] = claim_one(store, owner="b").failed_attempts
    assert (attempt.number, attempt.owner, attempt.end, attempt.code, attempt.error) == (
        1, "a", "failed", "boom", "text",
    )  # fmt: skip
    assert first.enqueued_ns <= attempt.began_ns <= attempt.ended_ns <= store.now_ns()


def test_expired_attempt_is_recorded_with_the_expiry_of_its_claim(
    sim_store: Store, clock: SimClock
) -> None:
    put_items(sim_store, b"a")
    first = claim_one(sim_store)
    clock.advance(PAST_TTL)
    [attempt] = claim_one(sim_store).failed_attempts
    assert (attempt.end, attempt.code, attempt.ended_ns) == (
        "expired", "claim_expired", first.expires_ns,
    )  # fmt: skip


def test_released_claim_is_not_recorded_as_an_attempt(store: Store) -> None:
    put_items(store, b"a")
    store.transact(queue.release, [claim_one(store)])
    assert claim_one(store).failed_attempts == ()


def test_extended_claim_is_recorded_as_one_attempt(sim_store: Store, clock: SimClock) -> None:
    put_items(sim_store, b"a")
    held = claim_one(sim_store)
    began_ns = sim_store.now_ns()
    clock.advance(S)
    sim_store.transact(queue.extend, [held.token], TTL)
    sim_store.transact(queue.fail, held, "boom", "text")
    [attempt] = claim_one(sim_store).failed_attempts
    assert attempt.began_ns <= began_ns
    assert attempt.ended_ns >= began_ns + S


def test_dead_letter_has_all_failed_attempts(sim_store: Store, clock: SimClock) -> None:
    put_items(sim_store, b"a")
    claim_one(sim_store)
    clock.advance(PAST_TTL)
    sim_store.transact(queue.fail, claim_one(sim_store), "boom", "text", False)
    [letter] = dead_letters(sim_store)
    assert [attempt.code for attempt in letter.failed_attempts] == ["claim_expired", "boom"]


def test_failed_attempts_kept_and_their_error_texts_are_bounded(store: Store) -> None:
    put_items(store, b"a")
    budget = RetryBudget(failures_max=100)
    for n in range(ATTEMPTS_KEPT + 3):
        held = claim_one(store, budget=budget)
        store.transact(queue.fail, held, f"e{n}", "x" * 10_000, True, 0, budget)
    attempts = claim_one(store, budget=budget).failed_attempts
    assert [one.code for one in attempts] == [f"e{n}" for n in range(3, ATTEMPTS_KEPT + 3)]
    assert {len(one.error) for one in attempts} == {ATTEMPT_ERROR_CHARS_MAX}


def test_operation_joined_to_an_ack_is_skipped_for_a_lost_claim(store: Store) -> None:
    store.transact(queue.put_many, "q", [b"a", b"b"])
    good, bad = store.transact(queue.claim, "q", "w", 2, 10**12)
    lost = queue.ClaimToken(bad.queue, bad.seq, bad.number + 1, bad.owner)
    joined = [
        queue.JoinedOperation(
            index, queue.put.name, codec.pack(queue.put.bind_positional(("after", payload), {}))
        )
        for index, payload in enumerate([b"0", b"1"])
    ]
    ends = store.transact(queue.finish_batch, [good.token, lost], [], queue.RetryBudget(), joined)
    assert ends == ["done", "lost"]
    assert [payload for _, payload in store.read(queue.peek, "after", 10)] == [b"0"]


def test_on_dead_operation_runs_once_for_each_dead_item(store: Store) -> None:
    on_dead = "queue.add_death_notice"
    for payload in (b"failed", b"buried"):
        store.transact(queue.put, "q", payload, 0, 0, "", on_dead)
    failed, buried = store.transact(queue.claim, "q", "w", 2, 10**12)
    store.transact(queue.fail, failed.token, "boom", "text", False)
    store.transact(queue.dead_letter, buried.token, "refused", "text")
    notices = [payload for _, payload in store.read(queue.peek, "q/notices", 10)]
    assert sorted(notices) == [b"boom", b"refused"]


def test_put_with_an_unknown_on_dead_operation_raises_invalid(store: Store) -> None:
    with pytest.raises(Invalid):
        store.transact(queue.put, "q", b"x", 0, 0, "", "os:system")
    assert store.read(queue.counts, "q") == queue.QueueCounts()


# -- isolation of items with repeated expiries -----------------------------------------------------

ISOLATING_BUDGET = RetryBudget(expiries_max=10, isolate_from_expiries=2)


def expire_all_claims(store: Store, clock: SimClock, claims: int) -> None:
    """Let every item expire `claims` times."""
    for _ in range(claims):
        claim_items(store, 100, owner="dead", budget=RetryBudget(expiries_max=10))
        clock.advance(PAST_TTL)
    store.transact(queue.expire_overdue, "q", 100, ISOLATING_BUDGET)


def claim_payloads(
    store: Store, limit: int = 10, budget: RetryBudget = ISOLATING_BUDGET, **options: Any
) -> list[bytes]:
    return [held.payload for held in claim_items(store, limit, budget=budget, **options)]


def test_isolated_item_at_the_head_is_claimed_alone(sim_store: Store, clock: SimClock) -> None:
    put_items(sim_store, b"s1", b"s2")
    expire_all_claims(sim_store, clock, 2)
    put_items(sim_store, b"a", b"b")
    assert [claim_payloads(sim_store) for _ in range(3)] == [[b"s1"], [b"s2"], [b"a", b"b"]]


def test_claim_skips_an_isolated_item_that_is_not_at_the_head(
    sim_store: Store, clock: SimClock
) -> None:
    put_items(sim_store, b"s")
    expire_all_claims(sim_store, clock, 2)
    put_items(sim_store, b"a", b"b", priority=1)
    put_items(sim_store, b"c")
    assert [claim_payloads(sim_store) for _ in range(2)] == [[b"a", b"b", b"c"], [b"s"]]


def test_item_is_isolated_only_from_the_bound_of_the_budget(
    sim_store: Store, clock: SimClock
) -> None:
    put_items(sim_store, b"a", b"b")
    expire_all_claims(sim_store, clock, 1)
    assert claim_payloads(sim_store) == [b"a", b"b"]
    clock.advance(PAST_TTL)
    assert claim_payloads(sim_store, budget=RetryBudget(expiries_max=10)) == [b"a", b"b"]
